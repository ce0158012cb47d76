"""The kinds of a section: registered once, chosen by an option, and strict about each other's keys."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from components.config.compose.diagnose import COMPOSITION_ERRORS, diagnose
from components.config.compose.frozen import from_container, from_yaml, to_yaml
from components.config.compose.sources import CONF, Request, option_groups, register_schemas
from components.config.compose.typed import free_keys, known_keys
from components.config.errors import ConfigError
from components.config.kinds import KINDS, WITHOUT_KIND, kinds_of
from components.config.schema import (
    AdamWConfig,
    CausalLMConfig,
    FinetuneConfig,
    LocalClusterConfig,
    NextTokenConfig,
    OptimizerConfig,
    SlurmClusterConfig,
)
from tests.config.commands import Commands


def request(*overrides: str, folders: tuple[Path, ...] = (CONF,)) -> Request:
    register_schemas("finetune", FinetuneConfig)
    return Request("finetune", FinetuneConfig, folders, overrides)


def compose(*overrides: str, folders: tuple[Path, ...] = (CONF,)) -> FinetuneConfig:
    return from_container(request(*overrides, folders=folders).compose(overrides), FinetuneConfig)


def problems(*overrides: str, folders: tuple[Path, ...] = (CONF,)) -> list[str]:
    """What is reported for a command line that cannot be composed."""
    asked = request(*overrides, folders=folders)
    try:
        from_container(asked.compose(overrides), FinetuneConfig)
    except COMPOSITION_ERRORS as error:
        return diagnose(asked, error, lambda cfg, refused: [])
    return []


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


def test_every_group_with_kinds_has_options() -> None:
    groups = option_groups([CONF])
    assert set(KINDS) <= set(groups)
    assert "next_token" in groups["objective"]


def test_a_config_is_composed_of_kinds() -> None:
    cfg = compose("model=tiny")
    assert (type(cfg.model), type(cfg.objective), type(cfg.optimizer)) == (CausalLMConfig, NextTokenConfig, AdamWConfig)
    assert type(cfg.cluster) is LocalClusterConfig
    assert type(compose("model=tiny", "cluster=slurm").cluster) is SlurmClusterConfig
    stated = compose("optimizer.kind=adamw", "model.kind=causal_lm", "objective.kind=next_token", "cluster.kind=local")
    assert stated == compose()


def test_a_frozen_config_from_before_there_were_kinds_is_read() -> None:
    cfg = compose("model=tiny")
    older = yaml.safe_load(to_yaml(cfg))
    for section in ("model", "objective", "optimizer", "cluster"):
        del older[section]["kind"]
    assert from_yaml(yaml.safe_dump(older), FinetuneConfig) == cfg
    del older["objective"]
    assert from_yaml(yaml.safe_dump(older), FinetuneConfig) == cfg
    del older["data"]["kind"]
    with pytest.raises(ConfigError) as caught:
        from_yaml(yaml.safe_dump(older), FinetuneConfig)
    assert "data.kind: not set, and it has no default; set data.kind=..." in caught.value.problems


def test_the_kind_of_a_cluster_may_be_set_over_any_option() -> None:
    """Both kinds have the same keys, so that a user's file may hold those of Slurm for local runs too."""
    cfg = compose("cluster.kind=slurm", "cluster.procs_per_node=2", "cluster.partition=gpu")
    assert type(cfg.cluster) is SlurmClusterConfig
    assert compose("cluster.partition=gpu").cluster == LocalClusterConfig(partition="gpu")
    assert compose("cluster=slurm_2node", "cluster.kind=local", "cluster.nodes=1").cluster.time == "24:00:00"
    assert problems("cluster=slurm_2node", "cluster.kind=local")[0].startswith("cluster.nodes=2: a local run has one")


def frozen(section: str, **values: object) -> list[str]:
    """The problems of a frozen config with these values in a section."""
    container = yaml.safe_load(to_yaml(compose("model=tiny", "data=jsonl", "data.path=x.jsonl")))
    container[section] |= values
    with pytest.raises(ConfigError) as caught:
        from_yaml(yaml.safe_dump(container), FinetuneConfig)
    return caught.value.problems


def test_a_key_of_another_kind_in_a_frozen_config_is_refused() -> None:
    (problem,) = frozen("data", messages_column="messages")
    assert problem == "data.messages_column=messages: data of kind sft has no such key (kinds with this key: chat)"
    (problem,) = frozen("optimizer", beta=1)
    assert problem == "optimizer.beta=1: no such key; did you mean optimizer.betas?"


def test_a_kind_that_there_is_not_is_refused_alone() -> None:
    assert frozen("optimizer", kind="adamww") == ["optimizer.kind=adamww: must be one of adamw; did you mean adamw?"]
    (problem,) = frozen("data", kind="sftt")
    assert problem.startswith(
        "data.kind=sftt: must be one of docs, sft, chat, text, custom, mixture, preferences; did you mean sft?"
    )


class SecondKind(StrEnum):
    """A kind that a later part may add."""

    momentum = "momentum"


@dataclass(kw_only=True, slots=True)
class MomentumConfig(OptimizerConfig):
    """An optimizer with a key of its own, without those of AdamW."""

    kind: SecondKind = SecondKind.momentum  # type: ignore[assignment]
    momentum: float = 0.9
    extra: dict[str, int] | None = None


@dataclass(kw_only=True, slots=True)
class FixedConfig(FinetuneConfig):
    """A recipe's config that takes one kind of optimizer."""

    optimizer: AdamWConfig


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, ...]:
    """A second kind of optimizer, and options of it."""
    monkeypatch.setitem(KINDS, "optimizer", {**KINDS["optimizer"], SecondKind.momentum: MomentumConfig})  # type: ignore[arg-type]
    options = tmp_path / "conf" / "optimizer"
    options.mkdir(parents=True)
    header = "defaults: [/schema/optimizer/momentum@_here_, _self_]\n"
    (options / "sgd.yaml").write_text(f"{header}lr: 0.5\n")
    (options / "heavy.yaml").write_text("defaults: [sgd, _self_]\nmomentum: 0.99\n")
    (options / "adam.yaml").write_text(f"{header}eps: 1.0e-4\n")
    (options / "headless.yaml").write_text("kind: adamw\nmomentum: 0.99\n")
    (options / "nesterov.yaml").write_text("defaults: [/schema/optimizer/nesterov@_here_, _self_]\n")
    return CONF, tmp_path / "conf"


def test_an_option_replaces_the_default_kind_with_its_keys(folders: tuple[Path, ...]) -> None:
    cfg = compose("model=tiny", "optimizer=heavy", "optimizer.warmup_steps=3", folders=folders)
    assert cfg.optimizer == MomentumConfig(lr=0.5, momentum=0.99, warmup_steps=3)
    assert from_yaml(to_yaml(cfg), FinetuneConfig) == cfg
    assert type(compose("optimizer=adamw_wsd", folders=folders).optimizer) is AdamWConfig


def test_the_keys_of_all_kinds_are_known_and_another_kinds_are_refused(folders: tuple[Path, ...]) -> None:
    keys = known_keys(FinetuneConfig)
    assert {"optimizer.betas", "optimizer.momentum", "optimizer.lr"} <= set(keys)
    assert len(keys) == len(set(keys))
    assert "optimizer.extra" not in free_keys(FinetuneConfig)
    (told,) = problems("optimizer=sgd", "optimizer.eps=1e-5", folders=folders)
    assert told.startswith(
        "optimizer.eps=1e-5: the chosen option of optimizer has no such key; add optimizer=adamw, or "
    )
    (told,) = problems("optimizer.momentum=0.5", folders=folders)
    assert told == "optimizer.momentum=0.5: the chosen option of optimizer has no such key; add optimizer=sgd, or " \
        "another optimizer=NAME that has it (adam)"  # fmt: skip
    (told,) = problems("optimizer=adam", folders=folders)
    assert told.endswith(
        "optimizer/adam.yaml: optimizer.eps: optimizer of kind momentum has no such key (kinds with this key: adamw)"
    )
    (told,) = problems("optimizer=headless", folders=folders)
    assert told.endswith("optimizer of kind adamw has no such key (kinds with this key: momentum)")
    (told,) = problems("optimizer=nesterov", folders=folders)
    assert told.endswith("requests schema/optimizer=nesterov: no such option (there are: adamw, momentum)")
    (told,) = problems("optimizer=sgd", "optimizer.momentun=1", folders=folders)
    assert told == "optimizer.momentun=1: no such key; did you mean optimizer.momentum?"


def test_the_kind_is_chosen_by_an_option_not_by_its_name(folders: tuple[Path, ...]) -> None:
    (told,) = problems("optimizer=sgd", "optimizer.kind=adamw", folders=folders)
    assert told.startswith("optimizer.kind=adamw: must be one of momentum")
    with pytest.raises(ConfigError) as caught:
        MomentumConfig(kind="adamw")  # type: ignore[arg-type]
    assert caught.value.problems == [
        "optimizer.kind=adamw: the chosen option has kind momentum; choose another option of conf/optimizer/ "
        "(optimizer=NAME) instead of setting the kind"
    ]


def test_a_config_takes_the_kinds_of_its_annotation(folders: tuple[Path, ...]) -> None:
    assert list(kinds_of(OptimizerConfig)) == ["adamw", "momentum"]
    assert list(kinds_of(AdamWConfig)) == ["adamw"]
    assert "optimizer.momentum" not in known_keys(FixedConfig)
    container = yaml.safe_load(to_yaml(compose("optimizer=sgd", folders=folders)))
    with pytest.raises(ConfigError) as caught:
        from_yaml(yaml.safe_dump(container), FixedConfig)
    assert caught.value.problems == ["optimizer.kind=momentum: must be one of adamw"]


def test_help_and_cfg_show_the_kinds(commands: Commands, tmp_path: Path) -> None:
    recipe = tmp_path / "shown.py"
    recipe.write_text(
        "from components.config.schema import FinetuneConfig\nfrom components.launch import recipe\n"
        "@recipe('finetune')\ndef main(cfg: FinetuneConfig) -> None: ...\nmain()\n"
    )
    shown = commands.run(recipe, ["--help"], tmp_path).output
    assert "\nobjective: dpo, next_token\n" in shown
    printed = yaml.safe_load(commands.run(recipe, ["model=tiny", "--cfg", "job"], tmp_path).output)
    kinds = {section: values["kind"] for section, values in printed.items() if "kind" in values}
    assert kinds == {
        "cluster": "local", "data": "docs", "model": "causal_lm", "objective": "next_token", "optimizer": "adamw",
    }  # fmt: skip
