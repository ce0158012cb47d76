"""Texts that YAML 1.1 or Hydra would read as something else, and option files that replace others of their name."""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import pytest

from components.config.compose.composition import compose as compose_request
from components.config.compose.frozen import from_yaml, to_yaml
from components.config.compose.sources import CONF
from components.config.kinds import kinds_of, type_hints
from components.config.schema import FinetuneConfig
from components.launch.run_checks import memory_report
from components.planning.formulas.hardware import find_hardware
from tests.config.commands import Commands
from tests.config.composed import config_of, request
from tests.config.test_composition import RECIPES, compose

TEXTS = ["12:00:00", "16:00", "010", "0x10", "on", "no", "1e3", "1_000", "2026-11-27", ".5", "1.10", "True"]
HYDRA = "{override hydra/hydra_logging: none}, {override hydra/job_logging: none}"


def every_section() -> type:
    """Return a config with a section for each dataclass that any recipe's section may be."""
    classes: dict[str, type] = {}
    for schema in RECIPES.values():
        for name, hint in type_hints(schema).items():
            for kind, each in (kinds_of(hint) or {"": hint}).items():
                classes.setdefault(f"{name}_{kind}_{each.__name__}".lower(), each)
    return make_dataclass("EverySection", list(classes.items()), kw_only=True)


EVERY = every_section()


def text_values(schema: type, text: Any) -> dict[str, Any]:
    """Return a value for each text, list of texts and dict of texts below a dataclass, nested like the dataclass."""
    values: dict[str, Any] = {}
    for name, hint in type_hints(schema).items():
        hints = set(get_args(hint)) - {type(None)} if type(None) in get_args(hint) else {hint}
        if is_dataclass(hint):
            values[name] = text_values(hint, text)
        elif str in hints:
            values[name] = text
        elif list[str] in hints:
            values[name] = [text, text]
        elif dict[str, str] in hints:
            values[name] = {"A": text, "B": text}
    return {name: value for name, value in values.items() if value != {}}


def as_plain_yaml(values: Any) -> str:
    """Return values as YAML in flow style, without quotes."""
    if isinstance(values, dict):
        return "{" + ", ".join(f"{key}: {as_plain_yaml(value)}" for key, value in values.items()) + "}"
    return f"[{', '.join(values)}]" if isinstance(values, list) else values


def as_overrides(values: Any, key: str = "") -> list[str]:
    if not isinstance(values, dict):
        return [f"{key}={as_plain_yaml(values)}"]
    return [each for name, value in values.items() for each in as_overrides(value, f"{key}.{name}".lstrip("."))]


def composed(values: Any, cfg: Any) -> Any:
    """Return the composed values of the keys of `values`."""
    if not isinstance(values, dict):
        return cfg
    return {key: composed(value, cfg[key]) for key, value in values.items()}


@pytest.mark.parametrize("text", TEXTS)
def test_every_text_of_the_schema_is_as_written_in_a_file_and_on_the_command_line(tmp_path: Path, text: str) -> None:
    values = text_values(EVERY, text)
    assert len(as_overrides(values)) > 250
    sections = "".join(f"{name}: {{}}\n" for name in values)
    (tmp_path / "every.yaml").write_text(f"defaults: [schema/every, _self_, {{text: null}}, {HYDRA}]\n{sections}")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "mine.yaml").write_text(f"# @package _global_\n{as_plain_yaml(values)}\n")
    for overrides in (["text=mine"], as_overrides(values)):
        found = compose_request(request("every", *overrides, schema=EVERY, folders=(tmp_path,)))
        assert composed(values, found.values) == values


class Mode(Enum):
    """Choices that YAML 1.1 reads as booleans."""

    on = "on"
    off = "off"


@dataclass(kw_only=True, slots=True)
class OwnSection:
    """Types that the sections of an own recipe may have."""

    mode: Mode = Mode.off
    name: str | None = None
    rounds: int = 1
    rate: float = 1.0
    flag: bool = False
    size: str | int = ""
    share: float | str = ""
    table: dict[str, list[str]] = field(default_factory=dict)
    nested: dict[str, dict[str, str]] = field(default_factory=dict)
    anything: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class OwnConfig(FinetuneConfig):
    """A config with an own section."""

    own: OwnSection = field(default_factory=OwnSection)


OWN_OPTION = """
defaults: [/schema/data/mixture@data, /schema/data/sft@data.sources.mine, _self_]
data: {sources: {mine: {path: 1_000, prompt_column: yes, max_samples: 0x10, weight: 1e-1}}}
cluster:
  {kind: slurm, procs_per_node: 8, sbatch_extra: {begin: 16:00}, time: 12:00:00, numa_binding: off,
   env: {on: 010, yes: no, X: &x 0o7}}
run: {name: *x, seed: 010}
own:
  mode: on
  name: ~
  rounds: 0x10
  rate: 1e-4
  flag: on
  size: 12
  share: 1:30
  table: &t {010: [on, 2026-11-27, 0.10]}
  nested: {a: {<<: {y: 1_0}, b: .5}}
  anything: {x: on, y: 010, 3: 1e3}
"""


def test_an_own_recipes_texts_are_as_written_and_numbers_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_{OWN_OPTION}")
    cfg = config_of("finetune", "experiment=mine", "model=tiny", schema=OwnConfig, folders=(tmp_path, CONF))
    assert (cfg.cluster.time, cfg.cluster.numa_binding.value, cfg.run.name, cfg.run.seed) == (
        "12:00:00",
        "off",
        "0o7",
        8,
    )
    assert cfg.cluster.env == {"on": "010", "yes": "no", "X": "0o7"}
    assert cfg.cluster.sbatch_extra == {"begin": "16:00"}
    source = cfg.data.sources["mine"]
    assert (source.path, source.prompt_column, source.max_samples, source.weight) == ("1_000", "yes", 16, 0.1)
    own = cfg.own
    assert (own.mode, own.name, own.rounds, own.rate, own.flag) == (Mode.on, None, 16, 1e-4, True)
    assert (own.size, own.share, own.table) == (12, "1:30", {"010": ["on", "2026-11-27", "0.10"]})
    assert own.nested == {"a": {"y": "1_0", "b": ".5"}}
    assert own.anything == {"x": True, "y": 8, "3": 1000.0}
    assert from_yaml(to_yaml(cfg), OwnConfig) == cfg


def test_a_frozen_config_edited_by_hand_has_the_texts_as_written() -> None:
    text = (
        to_yaml(compose("finetune"))
        .replace("  time: null\n", "  time: 12:00:00\n")
        .replace("  env: {}\n", "  env: {X: 010}\n")
    )
    edited = from_yaml(text, FinetuneConfig)
    assert (edited.cluster.time, edited.cluster.env) == ("12:00:00", {"X": "010"})


RECIPE = """
from components.config.schema import FinetuneConfig
from components.launch import recipe

@recipe("finetune")
def main(cfg: FinetuneConfig) -> None:
    print(cfg.optimizer.lr, cfg.optimizer.weight_decay, cfg.model.rope.factor, cfg.training.seq_len)

main()
"""
SHADOWING = {
    "optimizer/adamw.yaml": "lr: 0.123\n",
    "model/rope/none.yaml": "type: yarn\nfactor: 5.0\n",
    "cluster/local.yaml": (CONF / "cluster" / "local.yaml").read_text(),
    "finetune.yaml": (CONF / "finetune.yaml").read_text().replace("seq_len: 256", "seq_len: 64"),
}
"""Options of a user, and the main config, with names of built-in ones; one of them is a copy."""


@pytest.mark.parametrize("where", ["current folder", "next to the recipe", "--config-dir"])
def test_a_users_file_replaces_the_built_in_one_of_its_name_and_the_banner_names_both(
    commands: Commands, tmp_path: Path, where: str
) -> None:
    (tmp_path / "cwd").mkdir()
    (tmp_path / "there").mkdir()
    folder = {"current folder": "cwd/conf", "next to the recipe": "there/conf"}.get(where, "mine")
    for name, text in SHADOWING.items():
        (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    (recipe := tmp_path / "there" / "copy.py").write_text(RECIPE)
    option = [f"--config-dir={tmp_path / 'mine'}"] if where == "--config-dir" else []
    ended = commands.run(recipe, ["model=tiny", *option], tmp_path / "cwd")
    assert ended.output == "0.123 0.01 5.0 64\n", ended.errors
    replaced = [line for line in ended.errors.splitlines() if "used instead of" in line]
    changed = [name for name, text in SHADOWING.items() if text != (CONF / name).read_text()]
    expected = [f"{tmp_path / folder / name}: used instead of {CONF / name}" for name in changed]
    assert sorted(replaced) == sorted(expected)
    printed = commands.run(recipe, ["model=tiny", "--cfg", "job", *option], tmp_path / "cwd")
    assert "lr: 0.123" in printed.output
    assert "used instead of" in printed.errors


def test_of_two_folders_of_a_user_the_one_on_the_command_line_is_used(commands: Commands, tmp_path: Path) -> None:
    for folder, lr in (("conf", 0.5), ("given", 0.25)):
        (tmp_path / folder / "optimizer").mkdir(parents=True)
        (tmp_path / folder / "optimizer" / "mine.yaml").write_text(f"lr: {lr}\n")
    (tmp_path / "copy.py").write_text(RECIPE)
    ended = commands.run(tmp_path / "copy.py", ["model=tiny", "optimizer=mine", "--config-dir=given"], tmp_path)
    assert ended.output.startswith("0.25 "), ended.errors
    assert f"{tmp_path}/given/optimizer/mine.yaml: used instead of {tmp_path}/conf/optimizer/mine.yaml" in ended.errors


@pytest.mark.parametrize("folder", ["conf/local/gpu", "conf/gpu"])
def test_a_users_device_replaces_the_built_in_one_of_its_name_and_the_banner_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = compose("finetune", "model=tiny", "cluster.gpu=h100_80")
    assert not any("used instead" in note for note in memory_report(cfg, 1, on_cluster=False)[1])
    (own := tmp_path / folder / "h100_80.yaml").parent.mkdir(parents=True)
    own.write_text((CONF / "gpu" / "h100_80.yaml").read_text().replace("84.9e+9", "1e9"))
    problems, notes = memory_report(cfg, 1, on_cluster=False)
    assert (problems, notes[0]) == ([], f"{own}: used instead of {CONF}/gpu/h100_80.yaml")
    assert find_hardware("h100_80").memory_bytes == 1e9
