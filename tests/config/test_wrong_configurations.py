"""Each config error is reported before the start in one sentence with the value, the rule and the key to change.

Every row is a command line in an empty folder. It must exit with status 2 and one line of output, without a traceback,
a file or an import of torch. The recipes are placeholders with the real configs and an empty main; the last test
uses the real recipes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from components.launch.run_checks import problems_before_start
from scripts._docs.refusals import all_refusals
from tests.config.commands import REPOSITORY, Commands, Ended
from tests.config.test_composition import compose
from tests.config.wrong_lines import TABLE
from tests.optional import runnable

PLACEHOLDER = """
from components.config.schema import {schema}
from components.launch import recipe

@recipe("{name}")
def main(cfg: {schema}) -> None:
    print("started")

main()
"""

ROWS = [
    pytest.param(line, parts, id=f"{category}: {line}")
    for category, rows in TABLE.items()
    for line, *parts in runnable(rows)
]


@pytest.fixture(scope="module")
def finetune(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A placeholder recipe with the config of recipes/finetune.py."""
    return placeholder_recipe(tmp_path_factory.mktemp("recipes"), "finetune", "FinetuneConfig")


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A placeholder recipe with the config of recipes/evaluate.py."""
    return placeholder_recipe(tmp_path_factory.mktemp("recipes"), "evaluate", "EvaluateConfig")


def placeholder_recipe(folder: Path, name: str, schema: str) -> Path:
    file = folder / f"{name}.py"
    file.write_text(PLACEHOLDER.format(name=name, schema=schema))
    return file


def assert_rejected(ended: Ended, parts: list[str], folder: Path, *, torch_allowed: bool = False) -> None:
    """Assert one line of output that contains all `parts`, status 2, no traceback and no run in `folder`."""
    assert ended.status == 2, ended
    assert "Traceback" not in ended.errors + ended.output
    assert ended.output == ""
    assert len(ended.errors.splitlines()) == 1, ended.errors
    for part in parts:
        assert part in ended.errors
    assert not (folder / "outputs").exists()
    if not torch_allowed:
        assert not ended.imported_torch


@pytest.mark.parametrize(("line", "parts"), ROWS)
def test_invalid_command_line_is_rejected_in_one_sentence(
    commands: Commands, finetune: Path, tmp_path: Path, line: str, parts: list[str]
) -> None:
    arguments = line.split(" ")
    if "model=" not in line:
        arguments.append("model=tiny")
    key, _, value = arguments[0].lstrip("+").partition("=")
    ended = commands.run(finetune, arguments, tmp_path)
    assert_rejected(ended, parts, tmp_path)
    assert os.listdir(tmp_path) == []
    message = ended.errors.rstrip("\n")
    of_source = re.sub(r"data\.sources\.\w+\.", "data.", message)  # the page has the keys of every source as data.KEY
    assert any(each.matches(text) for each in all_refusals() for text in (message, of_source)), "not in refusals.md"
    if key.startswith(("training.", "optimizer.", "run.")) and "," not in value and not line.endswith("${nowhere}"):
        assert key in ended.errors


def write_rows(path: Path, *rows: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def data_files(folder: Path) -> None:
    """Write the files used by the rows of DATA."""
    write_rows(folder / "qa.jsonl", {"question": "q", "answer": "a"})
    (folder / "qa.csv").write_text("question,answer\nq,a\n")
    write_rows(folder / "chat.jsonl", {"messages": [{"role": "user", "content": "q"}]})
    (folder / "empty.jsonl").write_text("")
    (folder / "blank.jsonl").write_text("\n\n")
    (folder / "header.csv").write_text("prompt,response\n")
    (folder / "broken.jsonl").write_text('{"prompt": \n')
    (folder / "notes.docx").write_text("x")
    (folder / "bare").mkdir()


DATA = [
    ("data=jsonl data.path=nope.jsonl", "data.path", "nope.jsonl", "no such file"),
    ("data=jsonl data.path=./nope/", "data.path", "nope", "no such"),
    ("data=jsonl data.path=qa.jsonl data.eval_path=nope.csv data.prompt_column=question data.response_column=answer",
     "data.eval_path", "nope.csv"),
    ("data=jsonl data.path=bare", "data.path", "bare"),
    ("data=jsonl data.path=notes.docx", "data.path", "notes.docx"),
    ("data=jsonl data.path=broken.jsonl", "broken.jsonl"),
    ("data=jsonl data.path=qa.jsonl data.prompt_column=question", "data.response_column", "response", "answer"),
    ("data=jsonl data.path=qa.csv data.response_column=answer", "data.prompt_column", "prompt", "question"),
    ("data=chat_jsonl data.path=chat.jsonl data.messages_column=conversations", "data.messages_column", "messages"),
    ("data=jsonl data.path=empty.jsonl", "data.path", "empty.jsonl", "empty"),
    ("data=jsonl data.path=blank.jsonl", "data.path", "blank.jsonl"),
    ("data=jsonl data.path=header.csv", "data.path", "header.csv", "no rows"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "parts"), [pytest.param(line, parts, id=line) for line, *parts in DATA])
def test_invalid_data_file_is_rejected_in_one_sentence(
    commands: Commands, finetune: Path, tmp_path: Path, line: str, parts: list[str]
) -> None:
    data_files(tmp_path)
    assert_rejected(commands.run(finetune, [*line.split(" "), "model=tiny"], tmp_path), parts, tmp_path)


@pytest.mark.parametrize(
    ("rows", "more", "parts"),
    [
        ([{"prompt": "a", "response": "b"}, {"prompt": "a", "response": None}], [], ["rows.jsonl:2", "null"]),
        ([{"prompt": "a", "response": None}], ["data.bad_rows=drop"], ["rows.jsonl", "no rows"]),
        ([{"prompt": "a", "response": "b"}, {"prompt": "a"}], [], ["rows.jsonl:2", "data.response_column=response"]),
    ],
    ids=["a null row", "all rows dropped", "a row without the column"],
)
def test_error_found_while_reading_data_is_rejected_by_the_real_recipe(
    commands: Commands, tmp_path: Path, rows: list[dict[str, object]], more: list[str], parts: list[str]
) -> None:
    """The ranks raise the error: torch is imported by then, but no files are left either."""
    write_rows(tmp_path / "rows.jsonl", *rows)
    arguments = ["model=tiny", "data=jsonl", "data.path=rows.jsonl", *more]
    ended = commands.run(REPOSITORY / "recipes" / "finetune.py", arguments, tmp_path)
    assert ended.status == 2, ended
    assert ended.imported_torch
    assert "Traceback" not in ended.errors
    for part in parts:
        assert part in ended.errors
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def model_folders(folder: Path) -> None:
    """Write the folders used by the rows of MODEL."""
    (folder / "bare").mkdir()
    config = {"model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2}
    for name in ("no_weights", "broken"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "broken" / "config.json").write_text("{")
    (folder / "fake.gguf").write_bytes(b"not a model at all, really not")


PREFERENCES = [
    ("objective=kto data.label_column=null", "objective.kind=kto", "needs answers with a label", "data.label_column"),
    ("objective=kto", "data.label_column=label", "no such column", "it has prompt, chosen, rejected, completion, good"),
    ("data.label_column=good", "data.label_column=good", "objective.kind=dpo compares pairs", "objective=kto"),
    ("data.label_column=nope objective=kto", "data.label_column=nope", "no such column"),
    ("data.rejected_column=worse", "data.rejected_column=worse", "no such column", "rejected"),
    ("objective.loss=ipo objective.label_smoothing=0.1", "objective.label_smoothing=0.1", "objective.loss=sigmoid"),
    ("objective.loss=rank", "objective.loss=rank", "sigmoid, hinge, ipo"),
    ("objective=simpo objective.gamma=-1", "objective.gamma=-1", "at least 0"),
    ("objective=orpo objective.reference=frozen_copy", "objective.reference", "no such key"),
    ("objective.reference=adapters_off", "objective.reference=adapters_off", "no adapters", "peft=lora"),
    ("objective.reference=frozen_copy peft=lora", "objective.reference=frozen_copy", "adapters_off"),
    ("objective=kto data.label_column=good peft=lora peft.dropout=0.1", "peft.dropout=0.1", "objective.kind=kto"),
    ("objective=next_token", "objective", "next_token"),
]


@pytest.mark.parametrize(("line", "parts"), [pytest.param(line, parts, id=line) for line, *parts in PREFERENCES])
def test_invalid_preference_objective_is_rejected_in_one_sentence(
    commands: Commands, tmp_path: Path, line: str, parts: list[str]
) -> None:
    dpo = placeholder_recipe(tmp_path, "dpo", "DpoConfig")
    values = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d", "good": True}
    write_rows(tmp_path / "rows.jsonl", values)
    arguments = ["model=tiny", "data.path=rows.jsonl", *line.split(" ")]
    assert_rejected(commands.run(dpo, arguments, tmp_path), parts, tmp_path)


DISTILLATION = [
    ("", "teacher.path", "not set"),
    ("teacher.path=./nowhere", "teacher.path=./nowhere: no such folder"),
    ("teacher.path=bare", "teacher.path=bare: the folder has no config.json"),
    ("teacher.path=owner/name teacher.dtype=auto", "teacher.dtype=auto", "bfloat16"),
    ("teacher.path=owner/name model.loss=logits", "model.loss=logits", "model.loss=chunked"),
    ("teacher.path=owner/name objective.temperature=0", "objective.temperature=0", "greater than 0"),
    ("teacher.path=owner/name objective.cross_entropy_weight=1", "objective.cross_entropy_weight=1", "finetune.py"),
    ("teacher.path=owner/name objective=dpo", "objective=dpo", "use recipes/dpo.py, or choose another option"),
    ("teacher.path=run", "teacher.path=run: is the directory of a run; give the model that it exported, run/export"),
    ("teacher.path=small", "teacher.path=small", "200 entries, fewer than the student's 264"),
    ("teacher.path=owner/name teacher.stored=kept", "teacher.stored=kept: teacher.path=owner/name is set too"),
    ("teacher.stored=./nowhere", "teacher.stored=./nowhere: no such folder", "scripts/teacher.py"),
    ("teacher.stored=bare", "teacher.stored=bare: has no top_k_train.safetensors and no top_k_eval.safetensors"),
    ("teacher.stored=damaged", "teacher.stored=damaged: top_k_eval.safetensors cannot be read", "remove it"),
    (
        "teacher.stored=kept model.config.vocab_size=272",
        "teacher.stored=kept",
        "264 entries, but the student's has 272",
    ),
    ("teacher.stored=kept objective.temperature=3", "objective.temperature=3", "teacher.stored=kept", "temperature 2"),
    (
        "teacher.stored=kept data=pysource objective.temperature=2 training.seq_len_ramp=[{until_step:2,seq_len:128}]",
        "training.seq_len_ramp",
        "teacher.stored=kept",
        "teacher.path",
    ),
    ("teacher.stored=kept teacher.top_k=8", "teacher.top_k=8: belongs to scripts/teacher.py", "set it there"),
]
STORING = [
    ("", "teacher.path", "not set"),
    ("teacher.stored=kept", "teacher.stored=kept", "set teacher.path"),
    ("teacher.path=owner/name teacher.top_k=0", "teacher.top_k=0", "at least 1"),
    ("teacher.path=owner/name teacher.top_k=300", "teacher.top_k=300", "at most 264"),
    ("teacher.path=small", "teacher.path=small", "200 entries, fewer than the student's 264"),
]


def write_teacher_file(file: Path, lost: int = 0) -> None:
    """Write a file of stored probabilities of two rows with two targets, without its last `lost` bytes."""
    header = {"samples": "a", "tokenizer": "b", "vocabulary": 264, "top_k": 4, "temperature": 2.0, "teacher": "T"}
    tensors = {
        "starts": {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]},
        "teacher_log_probs": {"dtype": "F32", "shape": [2, 5], "data_offsets": [24, 64]},
        "teacher_target_log_prob": {"dtype": "F32", "shape": [2], "data_offsets": [64, 72]},
        "teacher_token_ids": {"dtype": "I32", "shape": [2, 4], "data_offsets": [72, 104]},
    }
    hashes = dict.fromkeys(tensors, "0" * 16)  # one block each, which a check before the start does not read
    metadata = {"teacher": json.dumps(header), "hashes": json.dumps(hashes)}
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(104)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content[: len(content) - lost])


@pytest.mark.parametrize(("line", "parts"), [pytest.param(line, parts, id=line) for line, *parts in DISTILLATION])
def test_invalid_distillation_is_rejected_in_one_sentence(
    commands: Commands, tmp_path: Path, line: str, parts: list[str]
) -> None:
    distill = placeholder_recipe(tmp_path, "distill", "DistillConfig")
    (tmp_path / "bare").mkdir()
    (tmp_path / "run" / "export").mkdir(parents=True)
    (tmp_path / "run" / "export" / "config.json").write_text("{}")
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 200}))
    (tmp_path / "small" / "model.safetensors").write_bytes(b"")
    for split in ("train", "eval"):
        write_teacher_file(tmp_path / "kept" / f"top_k_{split}.safetensors")
        write_teacher_file(tmp_path / "damaged" / f"top_k_{split}.safetensors", 0 if split == "train" else 8)
    temperature = [] if "temperature" in line else ["objective.temperature=2"]
    arguments = ["model=tiny", "model.config.vocab_size=264", *temperature, *filter(None, line.split(" "))]
    assert_rejected(commands.run(distill, arguments, tmp_path), parts, tmp_path)


@pytest.mark.parametrize(("line", "parts"), [pytest.param(line, parts, id=line) for line, *parts in STORING])
def test_invalid_storing_of_a_teacher_is_rejected_in_one_sentence(
    commands: Commands, tmp_path: Path, line: str, parts: list[str]
) -> None:
    script = placeholder_recipe(tmp_path, "teacher", "StoreTeacherConfig")
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 200}))
    (tmp_path / "small" / "model.safetensors").write_bytes(b"")
    arguments = ["model=tiny", "model.config.vocab_size=264", *filter(None, line.split(" "))]
    assert_rejected(commands.run(script, arguments, tmp_path), parts, tmp_path)


LABELS = [
    ("", "data.num_labels=null: the number of labels is required", "data.label_names"),
    ("data.num_labels=1", "data.num_labels=1: classification needs at least 2 labels"),
    ("data.num_labels=3 data.label_names=[a,b]", "data.num_labels=3: data.label_names has 2 names"),
    ("data.label_names=[a,a]", "data.label_names=['a', 'a']: the names must differ"),
    ("data.num_labels=2 data.label_column=text", "data.label_column=text: is also data.text_column"),
    ("data.num_labels=2 data.label_column=kind", "data.label_column=kind", "no such column"),
    ("data.num_labels=2 objective=reward", "objective.kind=reward", "data=preferences"),
    ("data.num_labels=2 objective=dpo", "objective=dpo", "choose another option"),
    ("data=preferences", "data.kind=preferences: objective.kind=classification", "objective=reward"),
    ("data=preferences objective=reward data.label_column=good", "data.label_column=good", "remove it"),
    ("data=preferences objective=reward objective.center_weight=-1", "objective.center_weight=-1", "at least 0"),
    ("data.num_labels=2 model.loss=chunked", "model.loss=chunked: there is no LM head", "model.loss=auto"),
    ("data.num_labels=2 evaluation.tasks=[arc]", "evaluation.tasks=[arc]: this recipe evaluates no benchmark tasks"),
    ("data.num_labels=2 generation.samples=2", "generation: a model with a score head generates no text"),
]


@pytest.mark.parametrize(("line", "parts"), [pytest.param(line, parts, id=line) for line, *parts in LABELS])
def test_invalid_score_model_is_rejected_in_one_sentence(
    commands: Commands, tmp_path: Path, line: str, parts: list[str]
) -> None:
    classify = placeholder_recipe(tmp_path, "classify", "ClassifyConfig")
    row = {"text": "a", "label": 0, "prompt": "a", "chosen": "b", "rejected": "c", "good": True, "completion": "b"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    arguments = ["model=tiny", "data.path=rows.jsonl", *filter(None, line.split(" "))]
    assert_rejected(commands.run(classify, arguments, tmp_path), parts, tmp_path)


MODEL = [
    ("model.path=no_weights", "model.path=no_weights: the folder has no weights", "model.init=random"),
    ("model.path=bare", "model.path=bare: the folder has no config.json"),
    ("model.path=./nowhere", "model.path=./nowhere: no such folder"),
    ("model.path=nowhere.gguf", "model.path=nowhere.gguf: no such file"),
    ("model.path=fake.gguf", "fake.gguf", "not a GGUF file"),
    ("model.path=broken", "broken", "config.json cannot be read"),
    ("model.path=package:no_such_package/x.gguf", "no_such_package", "not installed"),
    ("model=tiny model.tokenizer=./nowhere", "model.tokenizer=./nowhere: no such folder"),
]


@pytest.mark.parametrize(("line", "parts"), [pytest.param(line, parts, id=line) for line, *parts in MODEL])
def test_model_with_missing_files_is_rejected_in_one_sentence(
    commands: Commands, finetune: Path, tmp_path: Path, line: str, parts: list[str]
) -> None:
    model_folders(tmp_path)
    assert_rejected(commands.run(finetune, line.split(" "), tmp_path), parts, tmp_path)


@pytest.mark.parametrize(
    ("file", "text", "argument", "parts"),
    [
        (
            "experiment/mine.yaml",
            "training: {max_steps: 3}",
            "experiment=mine",
            ["conf file experiment/mine.yaml", "read as experiment.KEY", "make `# @package _global_` its first line"],
        ),
        ("local/user.yaml", "cluster: {nodes: 1}", "run.seed=1", ["local/user.yaml", "`# @package _global_`"]),
        ("network/mine.yaml", "network_env: {A: b}", "network=mine", ["network/mine.yaml", "`# @package cluster`"]),
        ("model/mine.yaml", "model: {path: x}", "model=mine", ["model/mine.yaml", "remove the line `model:`"]),
        ("experiment/b.yaml", "# @package _global_\nlogging: {plot: 1}", "experiment=b", ["plot: must be true or"]),
    ],
)
def test_error_in_a_users_conf_file_is_reported_with_its_name(
    commands: Commands, finetune: Path, tmp_path: Path, file: str, text: str, argument: str, parts: list[str]
) -> None:
    (tmp_path / "conf" / file).parent.mkdir(parents=True)
    (tmp_path / "conf" / file).write_text(text)
    ended = commands.run(finetune, ["model=tiny", argument], tmp_path)
    assert_rejected(ended, parts, tmp_path)
    both = commands.run(finetune, ["model=tiny", argument, "xyzzy=3"], tmp_path)
    assert both.errors.splitlines()[0] == "2 problems with this run:"
    assert {ended.errors.strip(), "xyzzy=3: no such key"} == set(both.errors.splitlines()[1:])


def test_evaluate_recipe_rejects_invalid_keys_and_values(commands: Commands, evaluate: Path, tmp_path: Path) -> None:
    ended = commands.run(evaluate, ["model=tiny", "evaluation.micro_batch=3"], tmp_path)
    assert_rejected(ended, ["did you mean evaluation.micro_batch_size?"], tmp_path)
    ended = commands.run(evaluate, ["model=tiny", "peft=lora"], tmp_path)
    assert_rejected(ended, ["peft.method=lora: evaluation.checkpoint=null", "step_N", "peft=none"], tmp_path)
    ended = commands.run(evaluate, ["model=tiny", "evaluation.step_timeout_seconds=0.5"], tmp_path)
    assert_rejected(ended, ["evaluation.step_timeout_seconds=0.5: must be 0 (never time out)"], tmp_path)
    ended = commands.run(evaluate, ["model=tiny", "evaluation.tasks=[a]", "evaluation.task_path=absent"], tmp_path)
    assert_rejected(ended, ["evaluation.task_path=absent: no such folder; set it to the folder of your"], tmp_path)
    ended = commands.run(evaluate, ["model=tiny", "data.eval_split=null", "data.eval_fraction=0"], tmp_path)
    assert_rejected(ended, ["data.eval_fraction=0.0: nothing is held out"], tmp_path)
    ended = commands.run(evaluate, ["model=tiny", "training.max_steps=3"], tmp_path)
    assert_rejected(ended, ["training.max_steps=3: no such key"], tmp_path)
    ended = commands.run(evaluate, ["model=tiny", "optimizer=adamw"], tmp_path)
    assert_rejected(ended, ["optimizer=adamw: this recipe has no options of optimizer; remove it"], tmp_path)
    listed = commands.run(evaluate, ["--help"], tmp_path).output
    assert "\n  model/rope: " in listed
    assert not any(f"\n{group}: " in listed.partition("Keys,")[0] for group in ("gpu", "optimizer", "objective"))


def test_key_of_a_source_that_is_not_in_an_empty_mixture(commands: Commands, finetune: Path, tmp_path: Path) -> None:
    ended = commands.run(finetune, ["data=mixture", "data.sources.a.path=x"], tmp_path)
    hint = "data.sources.a.path=x: the mixture has no source a; add it: +data@data.sources.a=OPTION"
    assert hint in ended.errors.splitlines()


def test_missing_checkpoint_is_rejected_before_the_start(
    commands: Commands, finetune: Path, evaluate: Path, tmp_path: Path
) -> None:
    """Paths are relative to the working directory, ~ is the home folder, and an empty folder is not a checkpoint."""
    (tmp_path / "empty").mkdir()
    for wrong in ("~nobody/nope", "empty"):
        ended = commands.run(evaluate, ["model=tiny", f'evaluation.checkpoint="{wrong}"'], tmp_path)
        message = f"evaluation.checkpoint={wrong}: no such checkpoint; set it to RUN/checkpoints/step_N"
        assert_rejected(ended, [message], tmp_path)
    (tmp_path / "complete").mkdir()
    (tmp_path / "complete" / "manifest.json").write_text("{}")
    (tmp_path / "complete" / "state.json").write_text('{"config": null}')
    for recipe, key, path in (
        (evaluate, "evaluation.checkpoint", "complete"),
        (evaluate, "evaluation.checkpoint", "~/complete"),
        (finetune, "run.resume", "~/complete"),
    ):
        ended = commands.run(recipe, ["model=tiny", f'{key}="{path}"'], tmp_path, HOME=str(tmp_path))
        assert (ended.status, ended.output) == (0, "started\n"), ended


def test_unreachable_hub_is_reported_at_once_and_its_cache_is_used(
    commands: Commands, finetune: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": ""}
    model, rows = ["model.path=owner/name"], ["model=tiny", "data=jsonl", "data.path=owner/rows"]
    ended = commands.run(finetune, model, tmp_path, **environment)
    reason = f"owner/name: is not in the hub's cache {tmp_path}/home, and {endpoint} cannot be reached (Connection"
    assert_rejected(ended, [f"model.path={reason}", "hf download owner/name", "a local folder"], tmp_path)
    ended = commands.run(finetune, rows, tmp_path, **environment)
    assert_rejected(ended, ["data.path=owner/rows: is not in the hub's cache", "--repo-type dataset"], tmp_path)
    ended = commands.run(finetune, model, tmp_path, **{**environment, "HF_HUB_OFFLINE": "1"})
    assert_rejected(ended, ["model.path=owner/name", "cannot be reached (HF_HUB_OFFLINE is set)"], tmp_path)
    for folder, arguments in (("hub/models--owner--name/snapshots/1", model), ("datasets/owner___rows", rows)):
        (tmp_path / "home" / folder).mkdir(parents=True)
        (tmp_path / "home" / folder / "config.json").write_text("{}")
        ended = commands.run(finetune, arguments, tmp_path, **environment)
        assert (ended.status, ended.output) == (0, "started\n"), ended
        assert "the hub cannot be reached (Connection refused): using only its local cache" in ended.errors


@pytest.mark.parametrize("name", ["finetune", "pretrain", "evaluate"])
def test_default_data_needs_no_network(commands: Commands, tmp_path: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": ""}
    arguments = ["model=tiny", "cluster.dry_run=true"]
    ended = commands.run(REPOSITORY / "recipes" / f"{name}.py", arguments, tmp_path, **environment)
    assert (ended.status, ended.errors) == (0, "")


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job"], ["model=tiny", "cluster.dry_run=true"]])
def test_closed_output_pipe_ends_a_command_without_error_message(tmp_path: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(REPOSITORY / "recipes/finetune.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.skipif(
    PathFinder.find_spec("torchao", [sysconfig.get_path("purelib")]) is not None, reason="torchao is in site-packages"
)
def test_missing_torchao_is_reported_with_the_extra_to_install(
    commands: Commands, finetune: Path, tmp_path: Path
) -> None:
    missing = "torchao is not installed; run pip install 'meshbook[quantization]'"
    settings = {
        "optimizer.kind=adamw8bit": ["optimizer=adamw8bit"],
        "model.float8=rowwise": ["model.float8=rowwise", "model.float8_emulate=true"],
    }
    for setting, arguments in settings.items():
        ended = commands.run(finetune, ["model=tiny", *arguments], tmp_path)
        assert_rejected(ended, [f"{setting}: {missing}"], tmp_path)

        submission = ["model=tiny", *arguments, "cluster=slurm_2node", "cluster.dry_run=true"]
        assert missing in commands.run(finetune, submission, tmp_path).errors
        for elsewhere in (["runtime=apptainer", "image=image.sif"], ["runtime=pyxis", "image=image"]):
            container = [f"cluster.container.{each}" for each in elsewhere]
            assert missing not in commands.run(finetune, [*submission, *container], tmp_path).errors


SBATCH_LINE, JOB_LINE = "#SBATCH --job-name=", "kind: Job\n"


@pytest.mark.parametrize(
    ("arguments", "line", "unchecked"),
    [
        ("cluster=slurm_2node cluster.account=lab", SBATCH_LINE, "account=lab"),
        ("-m cluster=slurm_2node run.seed=1,2", SBATCH_LINE, "partition=null"),
        ("cluster=slurm_2node data=jsonl data.path=/scratch/mine.jsonl", SBATCH_LINE, "data.path=/scratch/mine.jsonl"),
        (
            "cluster=slurm_2node cluster.python=/cluster/bin/python",
            "\npython=(/cluster/bin/python)",
            "/cluster/bin/python",
        ),
        ("cluster=slurm_2node run.dir=/cluster/run", "#SBATCH --output=/cluster/run/logs", "/cluster/run"),
        ("cluster=slurm_2node run.resume=/cluster/step_4", SBATCH_LINE, "run.resume=/cluster/step_4"),
        ("cluster=slurm_2node cluster.template=mine.j2", "#SBATCH --requeue\nmine\n", "device=cuda"),
        (
            "cluster=k8s cluster.k8s.image=a cluster.k8s.volumes.runs=/cluster",
            JOB_LINE,
            "whether the nodes can pull it",
        ),
        (
            "cluster=k8s cluster.k8s.image=a cluster.k8s.volumes.runs=/cluster run.dir=/cluster/run",
            JOB_LINE,
            "runs=/cluster",
        ),
    ],
)
def test_render_needs_no_cluster_and_writes_nothing(
    arguments: str, line: str, unchecked: str, commands: Commands, finetune: Path, tmp_path: Path
) -> None:
    (tmp_path / "bash").symlink_to(shutil.which("bash") or "")
    (tmp_path / "mine.j2").write_text("#!/bin/sh\n{% for each in sbatch %}\n#SBATCH {{ each }}\n{% endfor %}\nmine\n")
    settings = ["model=tiny", "cluster.device=cuda", "training.global_batch_size=48", "cluster.dry_run=render"]
    ended = commands.run(finetune, [*arguments.split(), *settings], tmp_path, PATH=str(tmp_path))
    assert (ended.status, ended.imported_torch) == (0, False), ended.errors
    assert line in ended.output
    assert "not checked" not in ended.output
    assert unchecked in " ".join(ended.errors.partition("not checked")[2].split())
    assert {each.name for each in tmp_path.iterdir()} == {"bash", "mine.j2"}


def test_without_a_cluster_the_message_names_the_key_that_renders(
    commands: Commands, finetune: Path, tmp_path: Path
) -> None:
    k8s = ["cluster=k8s", "cluster.k8s.image=a", f"cluster.k8s.volumes.runs={tmp_path}"]
    for cluster in (["cluster=slurm_2node"], k8s):
        ended = commands.run(finetune, ["model=tiny", *cluster], tmp_path, PATH=str(tmp_path))
        assert ended.status == 2
        assert "cluster.dry_run=render" in ended.errors


@pytest.mark.parametrize(
    ("package", "setting"),
    [("tensorboard", "logging.tensorboard=true"), ("mlflow", "logging.mlflow.enabled=true"),
     ("trackio", "logging.trackio.enabled=true")],
)  # fmt: skip
def test_missing_package_of_a_tracker_is_reported_with_the_extra_to_install(
    commands: Commands, finetune: Path, tmp_path: Path, package: str, setting: str
) -> None:
    if PathFinder.find_spec(package, sys.path) is not None:
        pytest.skip(f"{package} is installed")
    ended = commands.run(finetune, ["model=tiny", setting], tmp_path)
    missing = f"{setting}: {package} is not installed; run pip install 'meshbook[{package}]', or set it to false"
    assert_rejected(ended, [missing], tmp_path)


def test_missing_lm_eval_is_reported_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else real(name))
    for name in ("finetune", "pretrain", "evaluate"):
        data = ("data=text", f"data.path={__file__}") if name == "pretrain" else ()
        without = problems_before_start(compose(name, "model=tiny", *data), 1)
        (missing,) = set(problems_before_start(compose(name, "model=tiny", *data, "evaluation.tasks=[a]"), 1)) - set(
            without
        )
        assert missing == (
            "evaluation.tasks=['a']: lm-eval is not installed; run pip install 'meshbook[evaluation]', or set it to []"
        )


@pytest.mark.parametrize(
    ("key", "url", "package", "extra"),
    [("data.path", "gs://bucket/x.jsonl", "gcsfs", "gcs"), ("checkpoint.remote", "az://box/run", "adlfs", "azure")],
)
def test_missing_package_of_an_object_store_is_reported_with_the_extra_to_install(
    commands: Commands, finetune: Path, tmp_path: Path, key: str, url: str, package: str, extra: str
) -> None:
    if PathFinder.find_spec(package, sys.path) is not None:
        pytest.skip(f"{package} is installed")
    ended = commands.run(finetune, ["model=tiny", "data=jsonl", f"data.path={__file__}", f"{key}={url}"], tmp_path)
    assert f"{key}={url}: {package} is not installed; run pip install 'meshbook[{extra}]', or" in ended.errors
    assert ended.status == 2
    assert not ended.imported_torch


def test_gpus_are_counted_without_torch(commands: Commands, finetune: Path, tmp_path: Path) -> None:
    arguments = ["model=tiny", "cluster.procs_per_node=2"]
    ended = commands.run(finetune, arguments, tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert_rejected(ended, ["cluster.procs_per_node=2", "2 processes, but 1 visible GPU"], tmp_path)


ALL_STAGES = {
    "parallelism=tp2": "",
    "cluster.procs_per_node=3": "parallelism: tp 2 = 2 processes, but there are 3",
    "data=jsonl": "",
    "data.path=nope.jsonl": "data.path=nope.jsonl: no such file",
    "model.path=./nowhere": "model.path=./nowhere: no such folder",
    "model.dtype=float16": "model.dtype=float16: must be one of",
    "optimizer.lr=-1": "optimizer.lr=-1.0: must be greater than 0",
    "optimizer.eps=tiny": "optimizer.eps=tiny: must be a number",
    "optimizer.schedule=cosin": "optimizer.schedule=cosin: must be one of",
    "checkpoint.keep=0": "checkpoint.keep=0: must be at least 1",
    "checkpoint.keep_best=true": "checkpoint.keep_best=true: needs checkpoint.every=0 to be a multiple of",
    "training.max_step=3": "training.max_step=3: no such key",
    "+logging.plott=true": "logging.plott=true: no such key",
    "logging.progress=1": "logging.progress=1: must be true or false",
    "logging.profile.start=0": "logging.profile.start=0: must be at least 1",
    "run.seed=x": "run.seed=x: must be a whole number",
    "run.name=a=b": "run.name=a=b: cannot be parsed",
    "run.dir=/dev/null/run": "run.dir=/dev/null/run: cannot be used",
    "generation.samples=${nowhere}": "generation.samples: Interpolation key 'nowhere' not found",
    "hydra.run.dir=x": "hydra.run.dir=x: Hydra is only used for composition",
    "--lr=3": "--lr=3: no such option",
    "--config-dir=nowhere": "--config-dir=nowhere: no such folder",
    "peft.rank=8": "peft.rank=8: peft.method=none trains every parameter",
}
"""Arguments of one command line and the beginnings of their error messages; "" marks a valid one."""


def test_all_config_errors_are_reported_at_once(commands: Commands, finetune: Path, tmp_path: Path) -> None:
    """Errors in options, composition, sections, across sections, in files and in the run directory."""
    ended = commands.run(finetune, list(ALL_STAGES), tmp_path)
    assert ended.status == 2
    heading, *lines = ended.errors.splitlines()
    expected = [sentence for sentence in ALL_STAGES.values() if sentence]
    for sentence in expected:
        assert sum(line.startswith(sentence) for line in lines) == 1, (sentence, ended.errors)
    assert heading == f"{len(expected)} problems with this run:", ended.errors
    assert len(lines) == len(expected)
    assert os.listdir(tmp_path) == []


def test_all_config_errors_of_a_sweep_are_reported_at_once(commands: Commands, finetune: Path, tmp_path: Path) -> None:
    wrong = {
        "run.seed=range(1,9,0)": "run.seed=range(1,9,0): a range with a step of 0",
        "trainig.max_steps=1,2": "trainig.max_steps=1,2: no such key",
        "optimizer.lr=-1,-2": "optimizer.lr=-1.0: must be greater than 0",
        "logging.plott=true": "logging.plott=true: no such key",
        "checkpoint.keep=0": "checkpoint.keep=0: must be at least 1",
        "checkpoint.keep_best=true": "checkpoint.keep_best=true: needs",
    }
    ended = commands.run(finetune, ["-m", "model=tiny", *wrong], tmp_path)
    heading, *lines = ended.errors.splitlines()
    for sentence in wrong.values():
        assert sum(line.startswith(sentence) for line in lines) == 1, (sentence, ended.errors)
    assert (ended.status, heading) == (2, f"{len(wrong)} problems with this run:")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("parallelism=tp44", "parallelism=tp44: no such option"),
        ("parallelism.tp=four", "parallelism.tp=four: must be a whole number"),
        ("parallelism.tp=0", "parallelism.tp=0: must be at least 1, or -1"),
    ],
)
def test_consequences_of_a_config_error_are_not_reported(
    commands: Commands, finetune: Path, tmp_path: Path, wrong: str, message: str
) -> None:
    """The intended mesh has dp=1. That the batch of 2 does not fit dp=4 would only be a consequence of the error."""
    rest = ["model=tiny", "cluster=local_4proc", "training.global_batch_size=2"]
    assert_rejected(commands.run(finetune, [wrong, *rest], tmp_path), [message], tmp_path)
    alone = commands.run(finetune, rest, tmp_path)
    assert_rejected(alone, ["training.global_batch_size=2: must be a multiple of dp=4"], tmp_path)


def test_valid_config_is_accepted(commands: Commands, finetune: Path, tmp_path: Path) -> None:
    """Positive control for the tests above. In a mixture, one source with held-out samples is enough."""
    two = ["data=mixture", *(f"+data@data.sources.{name}=pydocs" for name in "ab")]
    for data in ([], [*two, "data.sources.a.eval_split=null", "data.sources.a.eval_fraction=0"]):
        ended = commands.run(finetune, ["model=tiny", *data], tmp_path)
        assert (ended.status, ended.output) == (0, "started\n")


@pytest.mark.parametrize(
    ("overrides", "size"),
    runnable([
        (["training.global_batch_size=14"], 2),
        (["cluster=local_4proc", "training.global_batch_size=12"], 3),
        (["parallelism=pp2_1f1b", "training.global_batch_size=6"], 3),
        (["parallelism=pp2_1f1b", "parallelism.pp_schedule=ZBVZeroBubble", "model=llama_2m"], 4),
    ]),
)  # fmt: skip
def test_micro_batch_size_is_reduced_to_fit_and_reported(
    commands: Commands, finetune: Path, tmp_path: Path, overrides: list[str], size: int
) -> None:
    message = "training.micro_batch_size=4: does not fit the global batch" if size < 4 else ""
    shown = commands.run(finetune, ["model=tiny", "cluster.dry_run=true", *overrides], tmp_path)
    assert (shown.status, shown.output.count("training.micro_batch_size")) == (0, bool(message)), shown
    assert message in shown.output
    assert not message or f"; using {size}, which does not change results" in shown.output


@pytest.mark.parametrize("name", ["finetune", "evaluate"])
@pytest.mark.parametrize("arguments", [["run.sed=3"], ["data=jsonl", "data.path=nope.jsonl"]])
def test_real_recipes_reject_errors_quickly_without_importing_torch(
    tmp_path: Path, name: str, arguments: list[str]
) -> None:
    """Run as a user would. The limit is CPU time, since the machine may be busy."""
    program = (
        "import runpy, sys\n"
        f"sys.argv = {[str(REPOSITORY / 'recipes' / f'{name}.py'), 'model=tiny', *arguments]}\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n    print(*(name in sys.modules for name in ('torch', 'transformers', 'numpy')))\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "False False False\n"
    assert len(done.stderr.splitlines()) == 1
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
    assert os.listdir(tmp_path) == []
