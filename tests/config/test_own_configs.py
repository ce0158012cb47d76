"""Config classes of user recipes: other sections, and sections with additional keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from components.config.compose.frozen import Config, from_yaml, to_yaml
from components.config.compose.typed import free_keys, known_keys
from components.config.mesh_rules import fit_micro_batches
from components.config.rules import validate
from components.config.schema import (
    AdamWConfig,
    Attention,
    CausalLMConfig,
    CheckpointConfig,
    Device,
    EvaluationConfig,
    FinetuneConfig,
    LocalClusterConfig,
    LoggingConfig,
    ModelConfig,
    NextTokenConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelismConfig,
    PeftConfig,
    RecipeConfig,
    TrainingConfig,
    WeightInit,
)
from components.config.schema.data import DocsDataConfig, SftDataConfig
from components.config.schema.recipes import section, with_section
from components.config.schema.run import ProfileConfig
from components.protocol.errors import ConfigError
from tests.config.commands import Commands
from tests.config.composed import config_of, problems_of


@dataclass(kw_only=True, slots=True)
class OwnTraining(TrainingConfig):
    """A built-in section with an additional key."""

    patience: int = 3


@dataclass(kw_only=True, slots=True)
class AlignConfig(RecipeConfig):
    """A config that does not inherit from the config of another recipe."""

    training: OwnTraining = field(default_factory=OwnTraining)
    objective: ObjectiveConfig = field(default_factory=NextTokenConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass(kw_only=True, slots=True)
class ProbeConfig(RecipeConfig):
    """A config for evaluation, without training and PEFT."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


@dataclass(kw_only=True, slots=True)
class OwnAdamW(AdamWConfig):
    """A kind of optimizer with an additional key."""

    amsgrad: bool = False


@dataclass(kw_only=True, slots=True)
class OwnSft(SftDataConfig):
    """A kind of data with an additional key."""

    style: str = "plain"


@dataclass(kw_only=True, slots=True)
class OwnModel(CausalLMConfig):
    """A kind of model with an additional key."""

    probe: int = 0


@dataclass(kw_only=True, slots=True)
class StyledConfig(FinetuneConfig):
    """A config whose sections are built-in kinds with additional keys."""

    model: OwnModel
    data: OwnSft
    optimizer: OwnAdamW = field(default_factory=OwnAdamW)


def model(**values: Any) -> ModelConfig:
    return CausalLMConfig(init=WeightInit.random, tokenizer="bytes", config={"model_type": "llama"}, **values)


@dataclass(kw_only=True, slots=True)
class DistillationConfig(FinetuneConfig):
    """A config with a second section of the same kind."""

    teacher: ModelConfig


INVALID: tuple[tuple[dict[str, Any], int, str], ...] = (
    ({"training": {"global_batch_size": 3}}, 2, "training.global_batch_size=3: must be a multiple of dp=2"),
    ({"training": {"seq_len": 100, "global_batch_size": 8}, "parallelism": {"cp": 8}}, 8, "training.seq_len=100: must"),
    ({"training": {"eval_every": 0}, "checkpoint": {"keep_best": True}}, 1, "checkpoint.keep_best=true: needs"),
    ({"training": {"max_steps": 3}, "logging": {"profile": ProfileConfig(enabled=True)}}, 1,
     "logging.profile.start=10"),
    ({"model": {"attention": Attention.flex_attention}, "cluster": {"device": Device.cpu}}, 1,
     "model.attention=flex_attention: torch has no backward"),
)  # fmt: skip


def build(schema: type[Config], training: type[TrainingConfig], values: dict[str, dict[str, Any]]) -> Config:
    sections: dict[str, Any] = {"model": model(**values.get("model", {})), "data": DocsDataConfig()}
    classes = {
        "training": training,
        "checkpoint": CheckpointConfig,
        "parallelism": ParallelismConfig,
        "logging": LoggingConfig,
        "cluster": LocalClusterConfig,
    }
    sections |= {name: classes[name](**fields) for name, fields in values.items() if name != "model"}
    return schema(**sections)


@pytest.mark.parametrize(("values", "world", "message"), INVALID)
def test_user_config_is_validated_by_the_sections_it_has(values: dict, world: int, message: str) -> None:
    expected = validate(build(FinetuneConfig, TrainingConfig, values), world)
    assert [problem[: len(message)] for problem in expected] == [message]
    assert validate(build(AlignConfig, OwnTraining, values), world) == expected


def test_missing_sections_are_not_validated() -> None:
    cfg = ProbeConfig(
        model=model(attention=Attention.flex_attention),
        data=DocsDataConfig(),
        evaluation=EvaluationConfig(seq_len=99),
        parallelism=ParallelismConfig(cp=2),
        cluster=LocalClusterConfig(device=Device.cpu),
    )
    of_length, of_attention = validate(cfg, 2)
    assert of_length.startswith("evaluation.seq_len=99: must be a multiple of 4")
    assert of_attention.startswith("model.attention=flex_attention: parallelism.cp=2 splits rows")
    assert fit_micro_batches(cfg, 2) is cfg


def test_micro_batch_size_is_fitted_for_any_recipe() -> None:
    cfg = AlignConfig(model=model(), data=DocsDataConfig(), training=OwnTraining(patience=7))
    cfg.training.global_batch_size, cfg.training.micro_batch_size = 6, 4
    assert fit_micro_batches(cfg, 1).training == OwnTraining(patience=7, global_batch_size=6, micro_batch_size=3)
    assert cfg.training.micro_batch_size == 4


def test_section_is_found_by_its_class() -> None:
    cfg = AlignConfig(model=model(), data=DocsDataConfig())
    assert section(cfg, TrainingConfig) is cfg.training
    assert section(cfg, ModelConfig) is cfg.model
    assert section(cfg, PeftConfig) is None
    changed = with_section(cfg, cfg.training, OwnTraining(patience=9))
    assert (changed.training.patience, cfg.training.patience, changed.model) == (9, 3, cfg.model)


def composed(schema: type[Config], *overrides: str) -> Config:
    return config_of("finetune", *overrides, schema=schema)


def test_options_of_a_kind_fill_its_subclass() -> None:
    overrides = ("optimizer.amsgrad=true", "model.probe=3", "data.style=fancy", "data.path=x.jsonl")
    cfg = composed(StyledConfig, "model=tiny", "data=gsm8k", "optimizer=adamw_wsd", *overrides)
    assert cfg.optimizer == OwnAdamW(
        amsgrad=True, lr=3e-4, schedule=cfg.optimizer.schedule, warmup_steps=5, min_lr_ratio=0
    )
    assert (type(cfg.model), cfg.model.probe, cfg.model.hidden) == (OwnModel, 3, 64)
    assert (type(cfg.data), cfg.data.style, cfg.data.prompt_column) == (OwnSft, "fancy", "question")
    assert from_yaml(to_yaml(cfg), StyledConfig) == cfg
    assert type(composed(FinetuneConfig, "data=gsm8k", "model=tiny").data) is SftDataConfig


def test_second_section_of_the_same_kind_has_its_own_keys() -> None:
    cfg = composed(DistillationConfig, "model=tiny", "+model@teacher=llama_2m", "teacher.revision=main")
    assert (cfg.model.hidden, cfg.teacher.hidden, cfg.teacher.revision) == (64, 192, "main")
    assert type(cfg.teacher) is CausalLMConfig
    assert from_yaml(to_yaml(cfg), DistillationConfig) == cfg
    assert {"teacher.path", "teacher.config", "model.path"} <= set(known_keys(DistillationConfig))
    assert "teacher.config" in free_keys(DistillationConfig)
    with pytest.raises(ConfigError) as caught:
        composed(DistillationConfig, "model=tiny", "+model@teacher=llama_2m", "teacher.heads=0", "model.hidden=0")
    assert sorted(problem.partition(":")[0] for problem in caught.value.problems) == [
        "model.hidden=0",
        "teacher.heads=0",
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data=pydocs"],
            "data=pydocs: has kind docs, which this recipe does not train on; use recipes/finetune.py, or choose "
            "another option of data",
        ),
        (["data=jsonl", "data.stile=x"], "data.stile=x: no such key; did you mean data.style?"),
        (["data=jsonl", "optimizer.amsgrad=2"], "optimizer.amsgrad=2: must be true or false"),
    ],
)
def test_errors_in_a_subclass_are_reported(overrides: Sequence[str], message: str) -> None:
    assert problems_of("finetune", "model=tiny", "data.path=x.jsonl", *overrides, schema=StyledConfig) == [message]


OWN_RECIPE = '''"""My recipe."""
from dataclasses import dataclass, field
from pathlib import Path
from components.config.schema import FinetuneConfig
from components.launch import recipe

@dataclass(kw_only=True)
class Extra:
    gamma: float = 2.0
    pair: tuple[int, int] = (1, 2)
    where: Path | None = None

@dataclass(kw_only=True)
class Mine(FinetuneConfig):
    extra: Extra = field(default_factory=Extra)
    other: Extra | None = None
    goal: float = 3.0

@recipe("finetune")
def main(cfg: Mine) -> None: ...
main()
'''


def test_help_shows_own_sections_and_keys_without_docstrings(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN_RECIPE)
    shown = commands.run(tmp_path / "mine.py", ["--help", "all", "extra.gamma=5"], tmp_path)
    assert (shown.status, shown.errors, shown.imported_torch) == (0, "", False)
    assert shown.output.startswith("My recipe.\n")
    own = shown.output[shown.output.index("\nextra:") :]
    assert own == (
        "\nextra:\n  extra.gamma=5\n      Number.\n  extra.pair=[1,2]\n      Tuple.\n  extra.where=null\n"
        "      Path or null.\n\nother=null\n\ngoal=3\n"
    )
