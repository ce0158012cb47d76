"""Each config error is reported before the start in one sentence with the value, the rule and the key to change.

Every row of wrong_lines.txt must exit with status 2 and one line of output, without a traceback, a new file or an
import of torch. The recipes are placeholders with the real configs and an empty main; the last test uses the real ones.
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
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

import pytest

from components.launch.run_checks import problems_before_start
from scripts._docs.refusals import all_refusals
from tests.config.commands import REPOSITORY, Commands, Ended, placeholder_recipe
from tests.config.test_composition import RECIPES, compose
from tests.config.wrong_lines import WrongLine, wrong_lines
from tests.optional import runnable


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of placeholder recipes with the real configs."""
    folder = tmp_path_factory.mktemp("recipes")
    for name, schema in RECIPES.items():
        placeholder_recipe(folder, name, schema.__name__)
    return folder


@pytest.fixture
def finetune(recipes: Path) -> Path:
    return recipes / "finetune.py"


@pytest.fixture
def evaluate(recipes: Path) -> Path:
    return recipes / "evaluate.py"


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


def write_rows(path: Path, *rows: dict[str, object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def data_files(folder: Path) -> None:
    write_rows(folder / "qa.jsonl", {"question": "q", "answer": "a"})
    (folder / "qa.csv").write_text("question,answer\nq,a\n")
    write_rows(folder / "chat.jsonl", {"messages": [{"role": "user", "content": "q"}]})
    (folder / "empty.jsonl").write_text("")
    (folder / "blank.jsonl").write_text("\n\n")
    (folder / "header.csv").write_text("prompt,response\n")
    (folder / "broken.jsonl").write_text('{"prompt": \n')
    (folder / "notes.docx").write_text("x")
    (folder / "bare").mkdir()


def model_files(folder: Path) -> None:
    (folder / "bare").mkdir()
    config = {"model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2}
    for name in ("no_weights", "broken"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "broken" / "config.json").write_text("{")
    (folder / "fake.gguf").write_bytes(b"not a model at all, really not")


def rows_of_answers(folder: Path, **more: object) -> None:
    row = {**more, "prompt": "a", "chosen": "b", "rejected": "c", "completion": "d", "good": True}
    write_rows(folder / "rows.jsonl", row)


def labeled_rows(folder: Path) -> None:
    rows_of_answers(folder, text="a", label=0)


def problems_to_solve(folder: Path) -> None:
    write_rows(folder / "rows.jsonl", {"prompt": "1 + 1", "answer": "2"}, {"prompt": "2 + 2", "answer": "4"})
    write_rows(folder / "unanswered.jsonl", {"prompt": "1 + 1", "solution": "2"})
    (folder / "mine.py").write_text("def score(answers):\n    return [0.0] * len(answers)\n")


def teacher_files(folder: Path) -> None:
    for name in ("bare", "run/export", "small"):
        (folder / name).mkdir(parents=True)
    (folder / "run" / "export" / "config.json").write_text("{}")
    (folder / "small" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 200}))
    (folder / "small" / "model.safetensors").write_bytes(b"")
    for split in ("train", "eval"):
        write_teacher_file(folder / "kept" / f"top_k_{split}.safetensors")
        write_teacher_file(folder / "damaged" / f"top_k_{split}.safetensors", 0 if split == "train" else 8)


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


class Setup(NamedTuple):
    """Recipe of a group of wrong lines, its files, and arguments that a line need not have."""

    recipe: str = "finetune"
    write: Callable[[Path], None] = lambda folder: None
    arguments: tuple[str, ...] = ("model=tiny",)


STUDENT = ("model=tiny", "model.config.vocab_size=264")
SETUPS = {
    "data_files": Setup(write=data_files),
    "model_files": Setup(write=model_files, arguments=()),
    "preferences": Setup("dpo", rows_of_answers, ("model=tiny", "data.path=rows.jsonl")),
    "rewards": Setup("grpo", problems_to_solve, ("model=tiny", "data.path=rows.jsonl")),
    "distillation": Setup("distill", teacher_files, (*STUDENT, "objective.temperature=2")),
    "stored_teacher": Setup("teacher", teacher_files, STUDENT),
    "labels": Setup("classify", labeled_rows, ("model=tiny", "data.path=rows.jsonl")),
    "evaluation": Setup("evaluate"),
}
"""Groups of wrong lines that need another recipe or files than the rest."""


@pytest.mark.parametrize("wrong", [pytest.param(row, id=f"{row.group}: {row.line}") for row in runnable(wrong_lines())])
def test_invalid_command_line_is_rejected_in_one_sentence(
    commands: Commands, recipes: Path, tmp_path: Path, wrong: WrongLine
) -> None:
    setup = SETUPS.get(wrong.group, Setup())
    setup.write(tmp_path)
    written = sorted(os.listdir(tmp_path))
    arguments = wrong.line.split(" ")
    keys = {each.partition("=")[0] for each in arguments}
    arguments += [each for each in setup.arguments if each.partition("=")[0] not in keys]
    ended = commands.run(recipes / f"{setup.recipe}.py", arguments, tmp_path)
    assert_rejected(ended, wrong.parts, tmp_path)
    message = ended.errors.rstrip("\n")
    assert message.startswith(wrong.parts[0])
    assert sorted(os.listdir(tmp_path)) == written
    if wrong.group not in SETUPS:
        of_source = re.sub(
            r"data\.sources\.\w+\.", "data.", message
        )  # the page has the keys of every source as data.KEY
        assert any(each.matches(text) for each in all_refusals() for text in (message, of_source)), "not in refusals.md"


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


@pytest.mark.parametrize(
    ("file", "text", "argument", "parts"),
    [
        ("experiment/mine.yaml", "training: {max_steps: 3}", "experiment=mine",
         ["conf file experiment/mine.yaml", "read as experiment.KEY", "make `# @package _global_` its first line"]),
        ("local/user.yaml", "cluster: {nodes: 1}", "run.seed=1", ["local/user.yaml", "`# @package _global_`"]),
        ("network/mine.yaml", "network_env: {A: b}", "network=mine", ["network/mine.yaml", "`# @package cluster`"]),
        ("model/mine.yaml", "model: {path: x}", "model=mine", ["model/mine.yaml", "remove the line `model:`"]),
        ("experiment/b.yaml", "# @package _global_\nlogging: {plot: 1}", "experiment=b", ["plot: must be true or"]),
    ],
)  # fmt: skip
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


def test_help_of_evaluate_lists_its_groups_only(commands: Commands, evaluate: Path, tmp_path: Path) -> None:
    listed = commands.run(evaluate, ["--help"], tmp_path).output
    assert "\n  model/rope: " in listed
    assert not any(f"\n{group}: " in listed.partition("Keys,")[0] for group in ("gpu", "optimizer", "objective"))


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


def unreachable_hub(folder: Path) -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    return {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": ""}


def test_unreachable_hub_is_reported_at_once_and_its_cache_is_used(
    commands: Commands, finetune: Path, tmp_path: Path
) -> None:
    environment = unreachable_hub(tmp_path)
    endpoint = environment["HF_ENDPOINT"]
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
    arguments = ["model=tiny", "cluster.dry_run=true"]
    ended = commands.run(REPOSITORY / "recipes" / f"{name}.py", arguments, tmp_path, **unreachable_hub(tmp_path))
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
PODS = "cluster=k8s cluster.k8s.image=a cluster.k8s.volumes.runs=/cluster"


@pytest.mark.parametrize(
    ("arguments", "line", "unchecked"),
    [
        ("cluster=slurm_2node cluster.account=lab", SBATCH_LINE, "account=lab"),
        ("-m cluster=slurm_2node run.seed=1,2", SBATCH_LINE, "partition=null"),
        ("cluster=slurm_2node data=jsonl data.path=/scratch/mine.jsonl", SBATCH_LINE, "data.path=/scratch/mine.jsonl"),
        ("cluster=slurm_2node cluster.python=/bin/mine", "\npython=(/bin/mine)", "/bin/mine"),
        ("cluster=slurm_2node run.dir=/cluster/run", "#SBATCH --output=/cluster/run/logs", "/cluster/run"),
        ("cluster=slurm_2node run.resume=/cluster/step_4", SBATCH_LINE, "run.resume=/cluster/step_4"),
        ("cluster=slurm_2node cluster.template=mine.j2", "#SBATCH --requeue\nmine\n", "device=cuda"),
        (PODS, JOB_LINE, "whether the nodes can pull it"),
        (f"{PODS} run.dir=/cluster/run", JOB_LINE, "runs=/cluster"),
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
    ("package", "extra", "setting"),
    [
        *((name, name, f"logging.{name}.enabled=true") for name in ("mlflow", "trackio")),
        ("tensorboard", "tensorboard", "logging.tensorboard=true"),
        ("gcsfs", "gcs", "data=jsonl data.path=gs://bucket/x.jsonl"),
        ("adlfs", "azure", "checkpoint.remote=az://box/run"),
    ],
)
def test_missing_package_is_reported_with_the_extra_to_install(
    commands: Commands, finetune: Path, tmp_path: Path, package: str, extra: str, setting: str
) -> None:
    """Of trackers and of object stores."""
    if PathFinder.find_spec(package, sys.path) is not None:
        pytest.skip(f"{package} is installed")
    ended = commands.run(finetune, ["model=tiny", *setting.split()], tmp_path)
    message = f"{setting.split()[-1]}: {package} is not installed; run pip install 'meshbook[{extra}]', or"
    assert_rejected(ended, [message], tmp_path)


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


def test_gpus_are_counted_without_torch(commands: Commands, finetune: Path, tmp_path: Path) -> None:
    ended = commands.run(finetune, ["model=tiny", "cluster.procs_per_node=2"], tmp_path, CUDA_VISIBLE_DEVICES="0")
    assert_rejected(ended, ["cluster.procs_per_node=2", "2 processes, but 1 visible GPU"], tmp_path)


ALL_STAGES = (
    *("parallelism=tp2 cluster.procs_per_node=3", "data=jsonl data.path=nope.jsonl", "model.path=./nowhere"),
    *("model.dtype=float16", "optimizer.lr=-1", "optimizer.eps=tiny", "optimizer.schedule=cosin", "checkpoint.keep=0"),
    *("checkpoint.keep_best=true", "training.max_step=3", "+logging.plott=true", "logging.progress=1", "run.seed=x"),
    *("logging.profile.start=0", "run.name=a=b", "run.dir=/dev/null/run", "generation.samples=${nowhere}", "--lr=3"),
    *("hydra.run.dir=x", "--config-dir nowhere", "peft.rank=8"),
)
"""Wrong lines that are errors of one command line."""


def test_all_config_errors_are_reported_at_once(commands: Commands, finetune: Path, tmp_path: Path) -> None:
    """Errors in options, composition, sections, across sections, in files and in the run directory."""
    rows = [row for row in wrong_lines() if row.line in ALL_STAGES]
    ended = commands.run(finetune, " ".join(row.line for row in rows).split(" "), tmp_path)
    assert ended.status == 2
    heading, *lines = ended.errors.splitlines()
    for row in rows:
        found = [line for line in lines if line.startswith(row.parts[0]) and all(part in line for part in row.parts)]
        assert len(found) == 1, (row, ended.errors)
    assert heading == f"{len(ALL_STAGES)} problems with this run:", ended.errors
    assert len(lines) == len(rows) == len(ALL_STAGES)
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
