"""Random invalid command lines with errors from all stages of validation, and the expected message of each error.

Each error reserves config sections, so that no error of a line can be a consequence of another.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from enum import EnumType
from typing import Any, get_type_hints

from components.config.compose.synonyms import synonym_of
from components.config.compose.typed import free_keys, known_keys
from components.config.kinds import WITHOUT_KIND, kinds_of, section_of
from components.config.schema import FinetuneConfig

LETTERS = "abcdefghijklmnopqrstuvwxyz_"
SECRET = "correct-horse-battery"
ENVIRONMENT = {"FUZZ_VALUE": SECRET}
KEYS = known_keys(FinetuneConfig)


@dataclass(frozen=True)
class InvalidArguments:
    """Arguments that together cause one config error, and the beginning of its message."""

    arguments: tuple[str, ...]
    message: str
    sections: frozenset[str]


@dataclass(frozen=True)
class WrongLine:
    """A command line and the beginnings of its expected error messages."""

    arguments: tuple[str, ...]
    messages: tuple[str, ...]


def wrong_line(seed: int) -> WrongLine:
    """Return the command line of a seed: one to eight errors among valid arguments, in random order."""
    rng = random.Random(seed)
    arguments: list[list[str]] = []
    messages: list[str] = []
    reserved: set[str] = set()
    for _ in range(rng.choice((1, 2, 3, 4, 6, 8))):
        error = rng.choice(KINDS)(rng)
        if reserved & error.sections:
            continue
        reserved |= error.sections
        arguments.append(list(error.arguments))
        messages.append(error.message)
    if "model" not in reserved:
        arguments.append(["model=tiny"])
    arguments += [[argument] for section, argument in VALID.items() if section not in reserved and rng.random() < 0.3]
    rng.shuffle(arguments)
    return WrongLine(tuple(each for some in arguments for each in some), tuple(messages))


VALID = {
    "training": "training.log_every=2",
    "optimizer": "optimizer=adamw_wsd",
    "checkpoint": "checkpoint.keep=3",
    "logging": "logging.examples=0",
    "generation": "generation.samples=0",
    "run": "run.seed=7",
    "network": "network=socket",
}


def _misspelled_key(rng: random.Random) -> InvalidArguments:
    """A key with one letter removed, doubled, replaced or inserted."""
    while True:
        key = rng.choice(KEYS)
        section, _, leaf = key.rpartition(".")
        if not section or section == "data" or _is_free(key):
            continue
        at = rng.randrange(len(leaf))
        misspelled = rng.choice(
            (
                leaf[:at] + leaf[at + 1 :],
                leaf[:at] + leaf[at] + leaf[at:],
                leaf[:at] + rng.choice(LETTERS) + leaf[at + 1 :],
                leaf[:at] + rng.choice(LETTERS) + leaf[at:],
            )
        )
        name = f"{section}.{misspelled}"
        if misspelled and misspelled[0].isalpha() and name not in KEYS:
            plus = rng.choice(("", "", "+", "++"))
            return _error([f"{plus}{name}=3"], f"{name}=3: no such key")


def _foreign_key(rng: random.Random) -> InvalidArguments:
    """A key under its name in other tools."""
    name, key = rng.choice(FOREIGN)
    return _error([f"{name}=3"], f"{name}=3: no such key; did you mean {key}", key.partition("=")[0])


def _wrong_type(rng: random.Random) -> InvalidArguments:
    while True:
        key, kind = rng.choice(FIELDS)
        if kind is bool:
            value, rule = rng.choice(("1", "0", "7", "maybe", "2.5")), "must be true or false"
        elif kind is int:
            value, rule = rng.choice(("x", "1.5", "true", "1e3", "[1]")), "must be a whole number"
        elif kind is float:
            value, rule = rng.choice(("fast", "true", "1/2")), "must be a number"
        else:
            value, rule = rng.choice(("zzz", "qqq9", "none_of_these")), "must be one of"
        return _error([f"{key}={value}"], f"{key}={value}: {rule}")


def _of_table(table: tuple[tuple[str, str, str], ...]) -> Callable[[random.Random], InvalidArguments]:
    def choose(rng: random.Random) -> InvalidArguments:
        sections, line, message = rng.choice(table)
        return InvalidArguments(tuple(line.split(" ")), message, frozenset(sections.split()))

    return choose


def _misspelled_option(rng: random.Random) -> InvalidArguments:
    group = rng.choice(("optimizer", "parallelism", "peft", "network", "experiment", "cluster"))
    option = "".join(rng.choice(LETTERS[:-1]) for _ in range(7))
    sections = frozenset({group, *({"parallelism", "cluster", "training", "model"} if group != "network" else ())})
    if group == "experiment":
        sections |= {"optimizer", "peft", "data", "checkpoint", "generation", "logging"}
    return InvalidArguments((f"{group}={option}",), f"{group}={option}: no such option", sections)


def _garbage(rng: random.Random) -> InvalidArguments:
    text = "".join(rng.choice("abcXYZ019_.,;:!?%&(){}[]<>|/\\'\"`^~*#$äß€😀 ") for _ in range(rng.randint(1, 12)))
    text = "§" + text
    return InvalidArguments((text,), text, frozenset({f"garbage {text}"}))


def _misspelled_flag(rng: random.Random) -> InvalidArguments:
    name = "--" + "x".join(rng.choice(LETTERS[:-1]) for _ in range(5))
    argument = rng.choice((name, f"{name}=3"))
    return InvalidArguments((argument,), f"{argument}: no such option", frozenset({f"flag {name}"}))


def _error(arguments: list[str], message: str, *others: str) -> InvalidArguments:
    sections = {text.lstrip("+").partition("=")[0].partition(".")[0] for text in (*arguments, *others)}
    if sections & {"parallelism", "cluster"}:
        sections |= {"parallelism", "cluster"}
    return InvalidArguments(tuple(arguments), message, frozenset(sections))


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in free_keys(FinetuneConfig))


def _fields(schema: type, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the keys of a type that has wrong values; keys of kinds that are not the default have another message."""
    found = []
    kinds = kinds_of(schema)
    for name, kind in get_type_hints(kinds[WITHOUT_KIND[section_of(schema) or ""]] if kinds else schema).items():
        if is_dataclass(kind) and name != "data":
            found += _fields(kind, f"{prefix}{name}.")
        elif kind in (int, float, bool) or isinstance(kind, EnumType):
            found.append((prefix + name, kind))
    return found


FIELDS = _fields(FinetuneConfig)
FOREIGN = tuple(
    (name, meant)
    for name in ("learning_rate", "epochs", "batch_size", "lora_r", "bf16", "max_seq_length", "output_dir", "packing",
                 "num_gpus", "gradient_checkpointing", "save_steps", "wandb_project", "model_name_or_path")
    if (meant := synonym_of(name, KEYS))
)  # fmt: skip
RANGES = (
    ("optimizer", "optimizer.lr=inf", "optimizer.lr=inf: must be greater than 0"),
    ("optimizer", "optimizer.lr=-1e-4", "optimizer.lr=-0.0001: must be greater than 0"),
    ("optimizer", "optimizer.eps=1e400", "optimizer.eps=inf: must be greater than 0"),
    ("optimizer", "optimizer.betas=[0.9,2]", "optimizer.betas=[0.9, 2.0]: must be two numbers"),
    ("training", "training.max_steps=0", "training.max_steps=0: must be at least 1"),
    ("training", "training.max_grad_norm=nan", "training.max_grad_norm=nan: must be at least 0"),
    ("training", "training.seq_len=99999999999999999999", "training.seq_len=99999999999999999999: must fit"),
    ("training", "training.step_timeout_seconds=0.1", "training.step_timeout_seconds=0.1: must be 0"),
    ("generation", "generation.samples=-1", "generation.samples=-1: must be at least 0"),
    ("checkpoint", "checkpoint.keep=0", "checkpoint.keep=0: must be at least 1"),
    ("logging", "logging.peak_tflops=0", "logging.peak_tflops=0.0: must be greater than 0"),
    ("run", "run.seed=-1", "run.seed=-1: must lie between"),
    ("run", "run.resume=''", "run.resume='': must be auto"),
    ("peft", "peft=lora peft.rank=0", "peft.rank=0: must be at least 1"),
    ("peft", "peft.rank=8", "peft.rank=8: peft.method=none"),
    ("data", "data.eval_fraction=1", "data.eval_fraction=1.0: must be at least 0"),
    ("data", "data=jsonl", "data.path: not set"),
    ("data", "data=custom", "data.factory: not set"),
    ("data", "data=custom data.factory=build", "data.factory=build: must be module:function"),
    ("data", "data=custom data.factory=no_such:build", "data.factory=no_such:build: no module"),
)
ACROSS = (
    ("checkpoint training", "checkpoint.keep_best=true", "checkpoint.keep_best=true: needs"),
    (
        "logging training",
        "logging.profile.enabled=true logging.profile.start=99",
        "logging.profile.start=99: the trace",
    ),
    ("model cluster parallelism", "model=tiny model.loss=liger cluster.device=cpu", "model.loss=liger: liger-kernel"),
    ("parallelism cluster", "parallelism=tp2 cluster.procs_per_node=3", "parallelism: tp 2 = 2 processes, but"),
    ("parallelism cluster", "cluster.procs_per_node=4001", "cluster.procs_per_node=4001: 4001 processes on"),
    ("parallelism cluster model", "parallelism.tp=3 model=tiny", "parallelism.tp=3: does not divide the 160 features"),
    ("parallelism cluster model", "parallelism=fsdp2_ep2 model=tiny", "parallelism.ep=2: the model is dense"),
    ("parallelism cluster", "parallelism.tp_plan=a:", "parallelism.tp_plan=a:: is not an import path"),
    ("parallelism cluster", "parallelism.sequence_parallel=true", "parallelism.sequence_parallel=true: needs"),
    ("cluster parallelism", "cluster.nodes=2", "cluster.nodes=2: a local run has one node"),
    ("model", "model.path=./nowhere model.init=pretrained", "model.path=./nowhere: no such folder"),
    ("model", "model=tiny model.tokenizer=./nowhere", "model.tokenizer=./nowhere: no such folder"),
    ("data", "data=jsonl data.path=nope.jsonl", "data.path=nope.jsonl: no such file"),
    ("run", "run.resume=nowhere", "run.resume=nowhere: no such checkpoint"),
    ("run", "run.dir=/dev/null/run", "run.dir=/dev/null/run: cannot be used"),
    ("run", "run.name=${oc.env:FUZZ_VALUE}", "run.name: holds the value of the environment variable FUZZ_VALUE"),
    ("generation", "generation.samples=${nowhere}", "generation.samples: Interpolation key 'nowhere' not found"),
    ("run", "run.name=a=b", "run.name=a=b: cannot be parsed"),
    ("logging", "logging=3", "logging=3: is a section"),
    ("training", "training.max_steps", "training.max_steps: cannot be parsed"),
    ("training", "training.max_steps=1,2", "training.max_steps=1,2: is a sweep over several values"),
    ("hydra", "hydra.run.dir=x", "hydra.run.dir=x: Hydra is only used for composition"),
    ("config-dir", "--config-dir=nowhere", "--config-dir=nowhere: no such folder"),
)
KINDS = (
    *(_misspelled_key, _misspelled_key, _foreign_key, _wrong_type, _wrong_type),
    *(_misspelled_option, _garbage, _misspelled_flag),
    *(_of_table(table) for table in (RANGES, RANGES, ACROSS, ACROSS)),
)
