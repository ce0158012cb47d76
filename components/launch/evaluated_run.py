"""`run=RUN`: model, data and checkpoint of an evaluation, from the frozen config of a training run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from omegaconf import OmegaConf

from components.config.compose.explain import override_parts
from components.config.compose.frozen import read_optional_section
from components.config.compose.sweep import override_of
from components.config.compose.texts import literal
from components.config.errors import ConfigError
from components.config.schema.data import DataConfig, MixtureDataConfig
from components.config.schema.model import ModelConfig
from components.config.schema.objective import DistillationConfig, ObjectiveConfig, PreferenceConfig, ScoreConfig
from components.config.schema.peft import PeftConfig
from components.config.schema.recipes import EvaluateConfig, RecipeConfig
from components.config.schema.run import RunConfig
from components.config.schema.training import EvalWeights, TrainingConfig
from components.protocol.run_files import CONFIG, RESULT
from components.terminal import print_text

Section = TypeVar("Section")

KEY = "run="
OPTION = "of_run"
"""Name of the config options that hold the sections of the run."""
SECTIONS: Mapping[str, type[Any]] = {"model": ModelConfig, "data": DataConfig, "peft": PeftConfig}
"""Sections that are taken as a whole, unless the command line chooses another option (data=jsonl)."""


@contextmanager
def evaluated_run(schema: type[RecipeConfig]) -> Iterator[tuple[Path, ...]]:
    """Replace `run=RUN` on the command line (`sys.argv`) by the settings of a run; yield the folder of their options.

    A section of the run becomes an option of its config group, so that the keys of the command line, whatever their
    order, override the run's. Other recipes than evaluations are left alone.

    Raises ConfigError if RUN is not the directory of a training run, or one whose held-out loss is not that of tokens.
    """
    given = [each for each in sys.argv[1:] if each.startswith(KEY)] if issubclass(schema, EvaluateConfig) else []
    if not given:
        yield ()
        return
    if len(given) > 1:
        raise ConfigError(f"{' '.join(given)}: one evaluation takes one run; remove all but one")
    others = [each for each in sys.argv[1:] if not each.startswith(KEY)]
    argv = sys.argv
    with TemporaryDirectory(prefix="meshbook-") as folder:
        try:
            sys.argv = [argv[0], *_overrides(given[0], others, Path(folder)), *others]
            yield (Path(folder),)
        finally:
            sys.argv = argv


def reject_swept_run(schema: type[RecipeConfig]) -> None:
    """Reject `run=RUN` in a sweep."""
    given = next((each for each in sys.argv[1:] if each.startswith(KEY)), None)
    if given is not None and issubclass(schema, EvaluateConfig):
        raise ConfigError(f"{given}: -m cannot sweep over the settings of a run; remove -m, and start each evaluation")


def _overrides(given: str, others: list[str], folder: Path) -> list[str]:
    """Write the options of a run to `folder`, and return the overrides that choose them and set its other keys."""
    run_dir = Path(given.removeprefix(KEY).strip("'\"")).expanduser()
    file = run_dir / CONFIG
    if not file.is_file():
        raise ConfigError(f"{given}: not a run directory, it has no {CONFIG}; give the directory of a training run")
    chosen = {override_parts(each)[0]: each for each in others}
    _check_objective(
        _read_optional(given, file, "objective", ObjectiveConfig), given, run_dir, chooses_data="data" in chosen
    )
    overrides = []
    for name, schema in SECTIONS.items():
        lacks_adapters = name == "peft" and _read_optional(given, file, name, schema) is None  # an own recipe
        if name not in chosen and not lacks_adapters:
            _write_option(folder / name / f"{OPTION}.yaml", name, _read(given, file, name, schema))
            overrides.append(f"{name}={OPTION}")
    training, run = _read(given, file, "training", TrainingConfig), _read(given, file, "run", RunConfig)
    overrides += [
        f"run.seed={run.seed}",  # of weights that are drawn, not loaded
        f"run.private={run.private}",
        f"evaluation.seq_len={training.seq_len}",
        f"evaluation.micro_batch_size={training.micro_batch_size}",
    ]
    if "evaluation.checkpoint" not in chosen:
        averaged = training.ema_decay is not None and training.eval_weights is not EvalWeights.trained
        overrides += [override_of("evaluation.checkpoint", str(run_dir)), f"evaluation.average={averaged}"]
    return overrides


def _read(given: str, file: Path, name: str, schema: type[Section]) -> Section:
    section = _read_optional(given, file, name, schema)
    if section is None:
        raise ConfigError(
            f"{given}: {file}: the config of this run has no section {name}; give the directory of a training run"
        )
    return section


def _read_optional(given: str, file: Path, name: str, schema: type[Section]) -> Section | None:
    try:
        return read_optional_section(file, name, schema)
    except ConfigError as error:
        raise ConfigError([f"{given}: {problem}" for problem in error.problems]) from error


def _check_objective(objective: ObjectiveConfig | None, given: str, run_dir: Path, *, chooses_data: bool) -> None:
    """Reject a run whose model or data has no loss per token; report one whose eval_loss is another than that."""
    result = run_dir / RESULT
    if isinstance(objective, ScoreConfig):
        raise ConfigError(
            f"{given}: its model has a score head and no loss per token; its held-out results are in {result}, and "
            "scripts/score.py applies an exported reward model to other data"
        )
    if isinstance(objective, PreferenceConfig) and not chooses_data:
        raise ConfigError(
            f"{given}: its data are preferences, which have no loss per token; its eval_loss is in {result}; add "
            "data=jsonl data.path=... for the loss of its model on texts"
        )
    if isinstance(objective, DistillationConfig | PreferenceConfig):
        print_text(
            f"{given}: trained with objective={objective.kind}; this evaluation reports the next-token loss, not the "
            f"eval_loss of {result}",
            file=sys.stderr,
        )


def _write_option(file: Path, group: str, section: Any) -> None:
    """Write a section as an option of its config group, composed with the classes of its kind and of its sources."""
    defaults = [f"/schema/{group}/{section.kind}@_here_"] if hasattr(section, "kind") else []
    sources = section.sources if isinstance(section, MixtureDataConfig) else {}
    defaults += [f"/schema/{group}/{source.kind}@sources.{name}" for name, source in sources.items()]
    values = {"defaults": [*defaults, "_self_"], **literal(asdict(section))}
    file.parent.mkdir()
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(values)), encoding="utf-8")
