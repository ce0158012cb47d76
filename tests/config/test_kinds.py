"""Kinds of a config section: registered once, selected by an option, and rejecting keys of other kinds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from components.config.compose.frozen import from_yaml, to_yaml
from components.config.compose.sources import CONF, option_groups
from components.config.compose.typed import free_keys, known_keys
from components.config.kinds import KINDS, WITHOUT_KIND, kinds_of
from components.config.rules import accepted_kinds
from components.config.schema import (
    AdamWConfig,
    CausalLMConfig,
    DpoConfig,
    FinetuneConfig,
    LocalClusterConfig,
    NextTokenConfig,
    OptimizerConfig,
    SlurmClusterConfig,
    TrainConfig,
)
from components.config.schema.data import DataKind
from components.protocol.errors import ConfigError
from tests.config.commands import Commands, placeholder_recipe
from tests.config.composed import config_of, problems_of


def compose(*overrides: str, folders: tuple[Path, ...] = (CONF,)) -> FinetuneConfig:
    return config_of("finetune", *overrides, folders=folders)


def problems(*overrides: str, folders: tuple[Path, ...] = (CONF,)) -> list[str]:
    """Return the problems reported for a command line that cannot be composed."""
    return problems_of("finetune", *overrides, folders=folders)


def test_every_kind_is_registered_under_its_own_name() -> None:
    hints = get_type_hints(FinetuneConfig)
    for section, kinds in KINDS.items():
        base = next(each for each in next(iter(kinds.values())).__mro__ if each.__mro__[1] is object)
        assert issubclass(hints[section], base)
        assert set(kinds) == set(get_type_hints(base)["kind"]), "a kind without a class"
        for kind, schema in kinds.items():
            assert schema is not base
            assert issubclass(schema, base)
            assert next(each.default for each in fields(schema) if each.name == "kind") is kind
    assert set(KINDS) - set(WITHOUT_KIND) == {"data"}
    assert all(kind in KINDS[section] for section, kind in WITHOUT_KIND.items())
    groups = option_groups([CONF])
    assert set(KINDS) <= set(groups)
    assert "next_token" in groups["objective"]


def test_composed_sections_have_the_class_of_their_kind() -> None:
    cfg = compose("model=tiny")
    assert (type(cfg.model), type(cfg.objective), type(cfg.optimizer)) == (CausalLMConfig, NextTokenConfig, AdamWConfig)
    assert type(cfg.cluster) is LocalClusterConfig
    assert type(compose("model=tiny", "cluster=slurm").cluster) is SlurmClusterConfig
    explicit = ("optimizer.kind=adamw", "model.kind=causal_lm", "objective.kind=next_token", "cluster.kind=local")
    assert compose(*explicit) == compose()


def test_frozen_config_without_kinds_is_read() -> None:
    cfg = compose("model=tiny")
    old_config = yaml.safe_load(to_yaml(cfg))
    for section in ("model", "objective", "optimizer", "cluster"):
        del old_config[section]["kind"]
    assert from_yaml(yaml.safe_dump(old_config), FinetuneConfig) == cfg
    del old_config["objective"]
    assert from_yaml(yaml.safe_dump(old_config), FinetuneConfig) == cfg
    del old_config["data"]["kind"]
    with pytest.raises(ConfigError) as caught:
        from_yaml(yaml.safe_dump(old_config), FinetuneConfig)
    assert "data.kind: not set, and it has no default; set data.kind=..." in caught.value.problems


def test_kind_of_a_cluster_may_override_any_option() -> None:
    """Both kinds have the same keys, so that a user's file may set those of Slurm for local runs, too."""
    cfg = compose("cluster.kind=slurm", "cluster.procs_per_node=2", "cluster.partition=gpu")
    assert type(cfg.cluster) is SlurmClusterConfig
    assert compose("cluster.partition=gpu").cluster == LocalClusterConfig(partition="gpu")
    assert compose("cluster=slurm_2node", "cluster.kind=local", "cluster.nodes=1").cluster.time == "24:00:00"
    assert problems("cluster=slurm_2node", "cluster.kind=local")[0].startswith("cluster.nodes=2: a local run has one")


def frozen_config_problems(section: str, **values: object) -> list[str]:
    """Return the problems of a frozen config with these values in a section."""
    container = yaml.safe_load(to_yaml(compose("model=tiny", "data=jsonl", "data.path=x.jsonl")))
    container[section] |= values
    with pytest.raises(ConfigError) as caught:
        from_yaml(yaml.safe_dump(container), FinetuneConfig)
    return caught.value.problems


def test_key_of_another_kind_in_a_frozen_config_is_rejected() -> None:
    (problem,) = frozen_config_problems("data", messages_column="messages")
    assert problem == "data.messages_column=messages: data of kind sft has no such key (kinds with this key: chat)"
    (problem,) = frozen_config_problems("optimizer", beta=1)
    assert problem == "optimizer.beta=1: no such key; did you mean optimizer.betas?"


def test_unknown_kind_is_rejected_without_further_errors() -> None:
    assert frozen_config_problems("optimizer", kind="adamww") == [
        "optimizer.kind=adamww: must be one of adamw, adamw8bit, lion, muon, normuon, sgd, custom; did you mean adamw?"
    ]
    (problem,) = frozen_config_problems("data", kind="sftt")
    assert problem.startswith(
        "data.kind=sftt: must be one of docs, sft, chat, text, custom, mixture, preferences, labels, tokens, prompts; "
        "did you mean sft?"
    )


class SecondKind(StrEnum):
    """An additional kind of optimizer."""

    momentum = "momentum"


@dataclass(kw_only=True, slots=True)
class MomentumConfig(OptimizerConfig):
    """An optimizer config with a new key and without those of AdamW."""

    kind: SecondKind = SecondKind.momentum  # type: ignore[assignment]
    momentum: float = 0.9
    extra: dict[str, int] | None = None


@dataclass(kw_only=True, slots=True)
class FixedConfig(FinetuneConfig):
    """A recipe config that accepts one kind of optimizer."""

    optimizer: AdamWConfig


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, ...]:
    """Register a second kind of optimizer, and return the conf folders with options of it."""
    monkeypatch.setitem(KINDS, "optimizer", {**KINDS["optimizer"], SecondKind.momentum: MomentumConfig})  # type: ignore[arg-type]
    options = tmp_path / "conf" / "optimizer"
    options.mkdir(parents=True)
    header = "defaults: [/schema/optimizer/momentum@_here_, _self_]\n"
    (options / "mine.yaml").write_text(f"{header}lr: 0.5\n")
    (options / "heavy.yaml").write_text("defaults: [mine, _self_]\nmomentum: 0.99\n")
    (options / "adam.yaml").write_text(f"{header}eps: 1.0e-4\n")
    (options / "headless.yaml").write_text("kind: adamw\nmomentum: 0.99\n")
    (options / "nesterov.yaml").write_text("defaults: [/schema/optimizer/nesterov@_here_, _self_]\n")
    return CONF, tmp_path / "conf"


def test_option_replaces_the_default_kind_and_its_keys(folders: tuple[Path, ...]) -> None:
    cfg = compose("model=tiny", "optimizer=heavy", "optimizer.warmup_steps=3", folders=folders)
    assert cfg.optimizer == MomentumConfig(lr=0.5, momentum=0.99, warmup_steps=3)
    assert from_yaml(to_yaml(cfg), FinetuneConfig) == cfg
    assert type(compose("optimizer=adamw_wsd", folders=folders).optimizer) is AdamWConfig


def test_keys_of_another_kind_are_rejected_with_the_option_to_choose(folders: tuple[Path, ...]) -> None:
    keys = known_keys(FinetuneConfig)
    assert {"optimizer.betas", "optimizer.momentum", "optimizer.lr"} <= set(keys)
    assert len(keys) == len(set(keys))
    assert "optimizer.extra" not in free_keys(FinetuneConfig)
    (problem,) = problems("optimizer=mine", "optimizer.eps=1e-5", folders=folders)
    assert problem.startswith(
        "optimizer.eps=1e-5: the chosen option of optimizer has no such key; add optimizer=adamw, or "
    )
    (problem,) = problems("optimizer.momentum=0.5", folders=folders)
    assert problem == (
        "optimizer.momentum=0.5: the chosen option of optimizer has no such key; add optimizer=sgd, or another "
        "optimizer=NAME that has it (muon, adam, mine, heavy, normuon)"
    )
    (problem,) = problems("optimizer=adam", folders=folders)
    assert problem.endswith(
        "optimizer/adam.yaml: optimizer.eps: optimizer of kind momentum has no such key "
        "(kinds with this key: adamw, adamw8bit, muon, normuon)"
    )
    (problem,) = problems("optimizer=headless", folders=folders)
    assert problem.endswith(
        "optimizer of kind adamw has no such key (kinds with this key: muon, normuon, sgd, momentum)"
    )
    (problem,) = problems("optimizer=nesterov", folders=folders)
    assert problem.endswith("(there are: adamw, adamw8bit, lion, muon, normuon, sgd, custom, momentum)")
    (problem,) = problems("optimizer=mine", "optimizer.momentun=1", folders=folders)
    assert problem == "optimizer.momentun=1: no such key; did you mean optimizer.momentum?"


def test_setting_a_kind_without_its_option_is_rejected(folders: tuple[Path, ...]) -> None:
    (problem,) = problems("optimizer=mine", "optimizer.kind=adamw", folders=folders)
    with pytest.raises(ConfigError) as caught:
        MomentumConfig(kind="adamw")  # type: ignore[arg-type]
    assert [problem] == caught.value.problems
    assert problem == (
        "optimizer.kind=adamw: the chosen option has kind momentum; choose another option of conf/optimizer/ "
        "(optimizer=NAME) instead of setting the kind"
    )


def test_section_accepts_the_kinds_of_its_annotation(folders: tuple[Path, ...]) -> None:
    kinds = ["adamw", "adamw8bit", "lion", "muon", "normuon", "sgd", "custom", "momentum"]
    assert list(kinds_of(OptimizerConfig)) == kinds
    assert list(kinds_of(AdamWConfig)) == ["adamw"]
    assert "optimizer.momentum" not in known_keys(FixedConfig)
    container = yaml.safe_load(to_yaml(compose("optimizer=mine", folders=folders)))
    with pytest.raises(ConfigError) as caught:
        from_yaml(yaml.safe_dump(container), FixedConfig)
    assert caught.value.problems == ["optimizer.kind=momentum: must be one of adamw"]


def test_help_and_cfg_print_the_kinds(commands: Commands, tmp_path: Path) -> None:
    recipe = placeholder_recipe(tmp_path, "finetune", "FinetuneConfig")
    shown = commands.run(recipe, ["--help", "all"], tmp_path).output.replace("\n    ", " ")
    assert "\nobjective: next_token\n" in shown
    printed = yaml.safe_load(commands.run(recipe, ["model=tiny", "--cfg", "job"], tmp_path).output)
    kinds = {section: values["kind"] for section, values in printed.items() if "kind" in values}
    assert kinds == {
        "cluster": "local", "data": "docs", "model": "causal_lm", "objective": "next_token", "optimizer": "adamw",
    }  # fmt: skip


@dataclass(kw_only=True, slots=True)
class OptionalObjectiveConfig(TrainConfig):
    """A recipe config whose objective may be null."""

    objective: NextTokenConfig | None = None


def test_recipe_with_an_optional_objective_accepts_no_preference_pairs() -> None:
    assert DataKind.preferences not in accepted_kinds(OptionalObjectiveConfig, "data")
    assert DataKind.preferences in accepted_kinds(DpoConfig, "data")
