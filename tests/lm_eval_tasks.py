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
