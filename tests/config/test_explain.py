"""Explanations of config errors: patterns of Hydra's messages match, and what a message proposes is accepted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.errors import HydraException

from components.config.compose import explain
from components.config.compose.composition import compose
from components.config.compose.sources import CONF, parsed, read_files
from components.config.rules import validate
from components.config.schema import RecipeConfig
from components.launch.machine import processes_of
from tests.config.composed import request

OURS = ("HOME", "SWEEP_FUNCTION")
"""Patterns of the user's command line, not of a library's message."""
PATTERNS = {name: each for name, each in vars(explain).items() if isinstance(each, re.Pattern) and name not in OURS}


def composed(*options: str, folders: tuple[Path, ...] = (CONF,)) -> str:
    """Return Hydra's message for options of the real conf/."""
    with pytest.raises(HydraException) as caught:
        read_files(request("finetune", folders=folders), map(parsed, options))
    return str(caught.value)


def composed_with(folder: Path, text: str) -> str:
    """Return Hydra's message for an experiment file with this text."""
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "mine.yaml").write_text(text)
    return composed("experiment=mine", folders=(CONF, folder))


CASES: list[tuple[str, Callable[[Path], str], dict[str, str]]] = [
    ("_IN_FILE", lambda folder: composed_with(folder, "defaults: [/model/nope]\n"), {"file": "experiment/mine"}),
    (
        "_IN_FILE",
        lambda folder: composed_with(folder, "defaults: [{override /nope: a}]\n"),
        {"file": "experiment/mine"},
    ),
    ("_NO_GROUP", lambda folder: composed_with(folder, "defaults: [{override /nope: a}]\n"), {"group": "nope"}),
    ("_NO_GROUP", lambda _: composed("data@data.sources.x=gsm8k"), {"group": "data"}),
    ("_SECOND_OPTION", lambda _: composed("+model=tiny"), {"group": "model", "option": "tiny"}),
    (
        "_SECOND_OPTION",
        lambda tmp: composed_with(tmp, "# @package _global_\ndefaults:\n  - /peft: lora\n"),
        {"group": "peft", "option": "lora"},
    ),
]


@pytest.mark.parametrize(("name", "provoke", "groups"), CASES, ids=[name for name, _, _ in CASES])
def test_pattern_matches_the_message_of_the_installed_version(
    name: str, provoke: Callable[[Path], str], groups: dict[str, str], tmp_path: Path
) -> None:
    text = provoke(tmp_path)
    found = PATTERNS[name].search(text)
    assert found is not None, text
    assert {key: found[key] for key in groups} == groups


def test_every_pattern_has_a_case_and_there_are_few() -> None:
    assert {name for name, _, _ in CASES} == PATTERNS.keys()
    assert len(PATTERNS) <= 4


def result(recipe: str, overrides: str) -> RecipeConfig | list[str]:
    """Return the config of a command line on a machine without GPUs, or its problems."""
    composed = compose(request(recipe, *overrides.split()), lambda cfg, _: validate(cfg, processes_of(cfg, 0)))
    return composed.problems or composed.cfg  # type: ignore[return-value]


OTHER_TOOLS = [
    # recipe, key of another tool, what the message names, the command line that follows from it, value that it sets
    ("warmup_ratio=0.1", "optimizer.warmup_steps? It counts optimizer steps: 0.1 * training.max_steps", "{key}=4"),
    ("num_warmup_steps=7", "optimizer.warmup_steps? It counts optimizer steps", "{key}=7"),
    ("min_lr=2e-5", "optimizer.min_lr_ratio? It is a share of optimizer.lr: 2e-5 / optimizer.lr", "{key}=0.1"),
    ("adam_beta2=0.99", "optimizer.betas? It is a list of both, [BETA1,BETA2]", "{key}=[0.9,0.99]"),
    (
        "gradient_accumulation_steps=4",
        "training.global_batch_size? It counts the sequences of an optimizer step over all ranks: "
        "4 * training.micro_batch_size * data-parallel ranks",
        "{key}=16",
    ),
    (
        "per_device_train_batch_size=2",
        "training.micro_batch_size? It counts the sequences of a forward pass",
        "{key}=2",
    ),
    ("per_device_eval_batch_size=2", "training.micro_batch_size? It counts the sequences of a forward pass", "{key}=2"),
    ("batch_size=8", "training.global_batch_size? It counts the sequences of an optimizer step over all", "{key}=8"),
    ("max_seq_length=64", "training.seq_len? It counts tokens", "{key}=64"),
    ("num_train_epochs=3", "training.epochs?", "{key}=3"),
    ("max_steps=9", "training.max_steps?", "{key}=9"),
    ("learning_rate=2e-5", "optimizer.lr?", "{key}=2e-5"),
    ("lr_scheduler_type=linear", "optimizer.schedule?", "{key}=linear"),
    ("save_steps=10", "checkpoint.every? It counts optimizer steps", "{key}=10"),
    ("eval_strategy=steps", "training.eval_every? It counts optimizer steps", "{key}=10"),
    ("gradient_checkpointing=true", "parallelism.activation_checkpointing=full?", "{key}"),
    ("fp16=true", "model.compute_dtype=bfloat16? float16 is not supported", "{key}"),
    ("use_flash_attention=true", "model.attention=sdpa? It uses flash kernels on GPUs", "{key}"),
    ("deepspeed=zero3.json", "parallelism=fsdp2?", "{key}"),
    ("report_to=wandb", "logging.wandb.mode=online? Others are logging.tensorboard=true, ", "{key}"),
    ("lora_r=8", "peft.rank? It needs peft=lora", "peft=lora {key}=8"),
    ("target_modules=q_proj", "peft.targets? It needs peft=lora, and is a list, ", "peft=lora {key}=[q_proj]"),
    ("dataset=x.jsonl", "data.path? For a file, or the name of a hub dataset, write data=x.jsonl", "data=x.jsonl"),
    ("val_set_size=0.1", "data.eval_fraction? It is a share in [0, 1)", "{key}=0.1"),
    ("walltime=12:00:00", "cluster.time? It is for cluster=slurm, and a time", "cluster=slurm {key}=12:00:00"),
    ("world_size=8", "cluster.procs_per_node? It counts the processes of one node", "{key}=8"),
]

ONE_OF = ("training.epochs=", "training.max_steps=")
"""A run has one of these."""


def test_keys_of_other_tools_are_answered_with_keys_and_units_that_work() -> None:
    """All keys are on one command line, and those that follow from the messages on few."""
    problems = result("finetune", " ".join(given for given, _, _ in OTHER_TOOLS))
    assert isinstance(problems, list)
    lines: list[dict[str, str]] = []
    for given, message, followed in OTHER_TOOLS:
        (problem,) = [each for each in problems if each.startswith(f"{given}: ")]
        assert problem.startswith(f"{given}: no such key; did you mean {message}")
        settings = followed.format(key=re.search(r"did you mean ([^?]+)\?", problem)[1]).split()
        names = {"steps" if each.startswith(ONE_OF) else each.partition("=")[0]: each for each in settings}
        line = next((line for line in lines if not names.keys() & line.keys()), None)
        if line is None:
            lines.append(line := {})
        line |= names
    for line in lines:
        accepted = result("finetune", " ".join(line.values()))
        assert isinstance(accepted, RecipeConfig), (line, accepted)


REFUSED = [
    "parallelism=ddp cluster=local_2proc parallelism.tp=2",
    "cluster=local_2proc parallelism.strategy=ddp",
    "parallelism=ddp parallelism.cpu_offload=true",
    "parallelism.stages_per_rank=1",
    "parallelism=pp2_1f1b cluster=local_2proc parallelism.cpu_offload=true",
    "parallelism=fsdp2_tp2 cluster=local_2proc parallelism.async_tp=true",
    "cluster.nodes=2",
    "cluster=slurm cluster.time=24:00",
    "peft.rank=8",
    "optimizer.momentum=0.9",
    "data.prompt_column=q",
    "model.rope.factor=2.0",
]
SETTING = re.compile(r"\+?[a-z_][\w./@-]*=(?!NAME|OPTION)[^\s;,)]+")


def remedies(message: str) -> list[list[str]]:
    """Return the settings that a message proposes after its first semicolon: alternatives, each of one or more."""
    alternatives = re.split(r",? or |, ", message.partition("; ")[2])
    return [found for each in alternatives if (found := SETTING.findall(each))]


@pytest.mark.parametrize("line", REFUSED)
def test_each_setting_that_a_message_proposes_is_accepted(line: str) -> None:
    problems = result("finetune", line)
    assert isinstance(problems, list)
    proposed = remedies(problems[0])
    assert proposed, problems
    for settings in proposed:
        accepted = result("finetune", f"{line} {' '.join(settings)}")
        assert isinstance(accepted, RecipeConfig), (problems, settings, accepted)
