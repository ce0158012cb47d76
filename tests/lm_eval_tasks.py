"""Tasks of lm-eval with local data, one for each type of request."""

from __future__ import annotations

import json
from pathlib import Path

NAMES = ["pick", "last_word", "texts", "answer"]
"""Tasks that `write_tasks` writes: multiple_choice, loglikelihood, loglikelihood_rolling and generate_until."""
HEAD = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{validation: {file}, train: {file}}}
validation_split: validation
output_type: {kind}
"""
BODIES = {
    "pick": """doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
fewshot_split: train
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "last_word": """doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "texts": """doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
""",
    "answer": """doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["q", "\\n"], do_sample: false, max_gen_toks: 4}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}
KINDS = dict(zip(NAMES, ("multiple_choice", "loglikelihood", "loglikelihood_rolling", "generate_until"), strict=True))


def write_tasks(folder: Path, documents: int = 11) -> Path:
    """Write the tasks and their documents, whose lengths differ, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "question": f"{'why and ' * (index % 7)}what is {index}",
            "choices": [" one", f" {'more ' * (index % 3)}two", " th"],
            "answer": index % 3,
            "text": " ".join(f"{index} word{each}" for each in range(3 * (index % 5) + 1)),
        }
        for index in range(documents)
    ]
    file = folder / "documents.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, body in BODIES.items():
        (folder / f"{name}.yaml").write_text(HEAD.format(name=name, file=file, kind=KINDS[name]) + body)
    return folder


LIBRARY = {
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation_split: validation"),
    "lambada_openai": ("lambada/lambada_openai.yaml", "test_split: validation"),
    "winogrande": ("winogrande/default.yaml", "validation_split: validation"),
    "gsm8k": (
        "gsm8k/gsm8k.yaml",
        "test_split: validation\nnum_fewshot: 1\n"
        'generation_kwargs: {until: ["Question:", "q"], do_sample: false, temperature: 0.0, max_gen_toks: 6}',
    ),
    "wikitext": ("wikitext/wikitext.yaml", "test_split: validation\nvalidation_split: null"),
}
"""Tasks of lm-eval's own library -> their file, and keys for data with the splits train and validation.

Their prompts, functions, filters and metrics are the library's: documents with functions in Python, contexts that
differ between choices, perplexities, answers found by regular expressions, and texts that are cut into windows."""


def write_library_tasks(folder: Path, documents: int = 4) -> Path:
    """Write local data for the tasks of LIBRARY, each as local_NAME, and return the folder."""
    import lm_eval.tasks

    folder.mkdir(parents=True, exist_ok=True)
    for name, (file, keys) in LIBRARY.items():
        rows = [_library_row(name, index) for index in range(documents)]
        data = folder / f"{name}.jsonl"
        data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        original = Path(lm_eval.tasks.__file__).parent / file
        (folder / f"local_{name}.yaml").write_text(
            f"include: {original}\ntask: local_{name}\ntag: local\ndataset_path: json\ndataset_name: null\n"
            f"dataset_kwargs:\n  data_files: {{validation: {data}, train: {data}}}\ntraining_split: train\n{keys}\n"
        )
    return folder


def _library_row(name: str, index: int) -> dict[str, object]:
    """Return a document with the columns of a task's data set."""
    if name == "hellaswag":
        endings = [f"goes {word} [title] {index}" for word in ("on", "away", "up and up", "in")]
        return {"activity_label": "Play", "ctx_a": "A man", "ctx_b": "he", "endings": endings, "label": str(index % 4)}
    if name == "winogrande":
        sentence = f"The cup {index} met the jar because _ was {'so ' * index}round."
        return {"sentence": sentence, "option1": "the cup", "option2": "the jar", "answer": str(index % 2 + 1)}
    if name == "gsm8k":
        return {"question": f"What is {index} + 1?", "answer": f"It is {index + 1}.\n#### {index + 1}"}
    text = " ".join(f"word{index} and {each}" for each in range(4 * index + 2))
    return {"text": text} if name == "lambada_openai" else {"page": text}
