"""Rewriting of command lines before composition: `parallelism=auto`, `-m parallelism=plan:K` and `run=RUN`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import yaml

from components.config.compose.command_line import Rewrite, Rewritten, compose_from_command_line
from components.config.compose.explain import override_parts
from components.config.compose.frozen import read_frozen, read_optional_section
from components.config.compose.sweep import override_of
from components.config.compose.typed import literal
from components.config.mesh_rules import name_of
from components.config.schema.cluster import Device
from components.config.schema.data import DataConfig
from components.config.schema.model import ModelConfig
from components.config.schema.objective import DistillationConfig, ObjectiveConfig, PreferenceConfig, ScoreConfig
from components.config.schema.parallelism import AXES
from components.config.schema.recipes import EvaluateConfig, RecipeConfig, TrainConfig
from components.config.schema.run import PeftConfig, RunConfig
from components.config.schema.training import EvalWeights, TrainingConfig
from components.config.shape import read_shape
from components.launch.clusters import backend_of
from components.launch.machine import processes_of, visible_gpus
from components.launch.recipe import Recipe
from components.planning.formulas.hardware import CPU_NAME, Hardware, find_hardware
from components.planning.formulas.ranking import Candidate, Choice, LeftOut, Plan, legal_plans
from components.planning.formulas.workload import bytes_text, seconds_text
from components.protocol.errors import ConfigError
from components.protocol.run_files import CONFIG, RESULT
from components.terminal import fit, print_text

_AUTO = "parallelism=auto"
BEST = re.compile(r"parallelism=plan:(\d+)")
_LAYOUT_KEYS = tuple(f"parallelism.{name}" for name in (*AXES, "strategy", "sequence_parallel", "pp_schedule"))
"""Keys that an option of conf/parallelism sets."""
Section = TypeVar("Section")
KEY = "run="
_SECTIONS: Mapping[str, type[Any]] = {"model": ModelConfig, "data": DataConfig, "peft": PeftConfig}
"""Sections that are taken as a whole, unless the command line chooses another option (data=jsonl)."""


def rewriting(recipe: Recipe, world_size: int | None) -> Rewrite:
    """Return what replaces `parallelism=auto` and `run=RUN` on a command line, before it is composed.

    Args:
        recipe: The recipe; only an evaluation takes run=RUN.
        world_size: Number of ranks if they are already running; None if they are to be started.
    """

    def rewrite(overrides: list[str]) -> Rewritten:
        _reject_plan(overrides)
        runs = (
            [override for override in overrides if override.startswith(KEY)]
            if issubclass(recipe.schema, EvaluateConfig)
            else []
        )
        rewritten = (
            _of_run(runs, [override for override in overrides if override not in runs])
            if runs
            else Rewritten(overrides)
        )
        return _with_best_mesh(recipe, rewritten, world_size) if _AUTO in overrides else rewritten

    return rewrite


def _with_best_mesh(recipe: Recipe, rewritten: Rewritten, world_size: int | None) -> Rewritten:
    """Replace `parallelism=auto` by the fastest mesh that fits; a run that resumes on as many ranks keeps its mesh.

    Raises ConfigError if the device or the model's sizes are unknown, or if no mesh fits.
    """
    overrides = [override for override in rewritten.overrides if override != _AUTO]
    plain = Rewritten(overrides, rewritten.sections)
    cfg = compose_from_command_line(
        recipe.name, recipe.schema, recipe.file.parent, arguments=overrides, rewrite=lambda _: plain
    )
    chosen = [] if cfg is None else _auto_overrides(cfg, overrides, world_size)
    return Rewritten([*overrides, *chosen], rewritten.sections)


def _plan_run(cfg: TrainConfig, overrides: Sequence[str], world: int, count: int) -> list[Plan]:
    """Return the fastest plans for a run that fit its device and pass all checks.

    Args:
        cfg: The run.
        overrides: Its command line, whose mesh keys are kept.
        world: Number of ranks.
        count: Most plans to return.
    """
    choice = Choice(world, max(1, world // cfg.cluster.most_nodes), fixed_keys(overrides))
    return legal_plans(cfg, read_shape(cfg.model), choice, device_of(cfg), LeftOut(), count)


def device_of(cfg: RecipeConfig) -> Hardware:
    """Return the device of a run: cluster.gpu, or the CPU for a local run without GPUs.

    Raises ConfigError if the device is unknown.
    """
    cluster = cfg.cluster
    on_cpu = cluster.device is Device.cpu or (
        backend_of(cluster).runs_here and cluster.device is Device.auto and not visible_gpus(os.environ)
    )
    if cluster.gpu is not None or on_cpu:
        return find_hardware(cluster.gpu or CPU_NAME)
    raise ConfigError(
        "cluster.gpu=null: the device is unknown; set it to an option of conf/gpu, such as cluster.gpu=h100_80"
    )


def fixed_keys(overrides: Sequence[str]) -> frozenset[str]:
    """Return the keys that a command line sets; an option of conf/parallelism sets the whole mesh."""
    keys = {override_parts(override)[0] for override in overrides}
    if "parallelism" in keys:
        keys |= set(_LAYOUT_KEYS)
    return frozenset(keys)


def requested_plans(arguments: Sequence[str]) -> int | None:
    """Return K of `parallelism=plan:K` on a command line, or None. Raises ConfigError if K is 0."""
    for argument in arguments:
        if (match := BEST.fullmatch(argument)) is not None:
            if not int(match[1]):
                raise ConfigError(f"{argument}: must be plan:1 or more")
            return int(match[1])
    return None


def sweep_values(cfg: RecipeConfig, overrides: Sequence[str], world: int, best: int) -> list[tuple[str, list[str]]]:
    """Return the names and the overrides of the best meshes on `world` ranks for one point of a sweep."""
    plans = _plan_run(_trains(cfg), overrides, world, best)
    return [(_name(plan.candidate, world), plan.candidate.overrides(cfg.parallelism)) for plan in plans]


def _auto_overrides(cfg: RecipeConfig, overrides: Sequence[str], world_size: int | None) -> list[str]:
    train = _trains(cfg)
    world = world_size or processes_of(cfg, visible_gpus(os.environ))
    if (stored := _stored_candidate(cfg, world)) is not None:
        print_text(f"{_AUTO}: keeps {_name(stored, world)}, as {cfg.run.dir} began with", file=sys.stderr)
        return stored.overrides(cfg.parallelism)
    best = _plan_run(train, overrides, world, 1)[0]
    text = (
        f"{_AUTO}: {_name(best.candidate, world)}, micro-batches {best.workload.micro_batches_text}, for "
        f"{best.workload.tokens_text} on {world:,} x {device_of(train).name}; estimated {bytes_text(best.memory.peak)} "
        f"and {seconds_text(best.time.seconds)} per step (scripts/plan.py shows others)"
    )
    print_text(fit(text), file=sys.stderr)
    return best.candidate.overrides(cfg.parallelism)


def _stored_candidate(cfg: RecipeConfig, world: int) -> Candidate | None:
    """Return the mesh of the run that `cfg` resumes, if it has as many ranks."""
    if cfg.run.dir is None:
        return None
    with suppress(OSError, ConfigError, yaml.YAMLError):  # an unreadable config is reported when the run is opened
        stored = read_frozen(Path(os.path.expanduser(cfg.run.dir)) / CONFIG, type(cfg))
        mesh = stored.parallelism.resolve(world)
        if isinstance(stored, TrainConfig):
            return Candidate(stored.parallelism, mesh, stored.training.micro_batch_size)
    return None


def _name(candidate: Candidate, world: int) -> str:
    schedule = f"_{candidate.parallelism.pp_schedule}" if candidate.mesh.pp > 1 else ""
    return f"{name_of(candidate.parallelism, world)}{schedule}"


def _trains(cfg: RecipeConfig) -> TrainConfig:
    if not isinstance(cfg, TrainConfig):
        raise ConfigError(f"{_AUTO}: only training recipes can be planned; set parallelism to an option")
    return cfg


def _reject_plan(arguments: Sequence[str]) -> None:
    """Reject `parallelism=plan:K` outside of a sweep, and misspelled forms of both."""
    for argument in arguments:
        if argument.startswith(("parallelism=auto", "parallelism=plan:")) and argument != _AUTO:
            hint = "needs -m" if BEST.fullmatch(argument) else f"write {_AUTO}, or parallelism=plan:K with -m"
            raise ConfigError(f"{argument}: {hint}; plan:K runs the best K meshes as a sweep")


def reject_swept_run(schema: type[RecipeConfig], arguments: Sequence[str]) -> None:
    """Reject `run=RUN` in a sweep."""
    given = next((argument for argument in arguments if argument.startswith(KEY)), None)
    if given is not None and issubclass(schema, EvaluateConfig):
        raise ConfigError(f"{given}: -m cannot sweep over the settings of a run; remove -m, and start each evaluation")


def _of_run(runs: list[str], others: list[str]) -> Rewritten:
    """Return the settings of a run in place of `run=RUN`; those of the command line, whatever their order, override
    them.

    A section of the run replaces that of the config files, unless the command line chooses another option.

    Raises ConfigError if RUN is not the directory of a training run, or one whose held-out loss is not that of tokens.
    """
    if len(runs) > 1:
        raise ConfigError(f"{' '.join(runs)}: one evaluation takes one run; remove all but one")
    (given,) = runs
    run_dir = Path(given.removeprefix(KEY).strip("'\"")).expanduser()
    file = run_dir / CONFIG
    if not file.is_file():
        raise ConfigError(f"{given}: not a run directory, it has no {CONFIG}; give the directory of a training run")
    chosen = {override_parts(other)[0]: other for other in others}
    _check_objective(
        _read_optional(given, file, "objective", ObjectiveConfig), given, run_dir, chooses_data="data" in chosen
    )
    sections = {}
    for name, schema in _SECTIONS.items():
        lacks_adapters = name == "peft" and _read_optional(given, file, name, schema) is None  # an own recipe
        if name not in chosen and not lacks_adapters:
            sections[name] = literal(asdict(_read(given, file, name, schema)))
    training, run = _read(given, file, "training", TrainingConfig), _read(given, file, "run", RunConfig)
    overrides = [
        f"run.seed={run.seed}",  # of weights that are drawn, not loaded
        f"run.private={run.private}",
        f"evaluation.seq_len={training.seq_len}",
        f"evaluation.micro_batch_size={training.micro_batch_size}",
    ]
    if "evaluation.checkpoint" not in chosen:
        averaged = training.ema_decay is not None and training.eval_weights is not EvalWeights.trained
        overrides += [override_of("evaluation.checkpoint", str(run_dir)), f"evaluation.average={averaged}"]
    return Rewritten([*overrides, *others], sections)


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
