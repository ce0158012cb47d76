"""`parallelism=auto` and `-m parallelism=plan:K`: meshes chosen by the planner, before the config is composed."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from components.config.compose.command_line import compose_from_command_line
from components.config.compose.explain import override_parts
from components.config.compose.frozen import read_frozen
from components.config.errors import ConfigError
from components.config.meshes import name_of
from components.config.schema.cluster import Device
from components.config.schema.parallelism import AXES
from components.config.schema.recipes import RecipeConfig, TrainConfig
from components.config.shape import read_shape
from components.launch.backend import Recipe
from components.launch.clusters import backend_of
from components.launch.machine import processes_of, visible_gpus
from components.planning.formulas.candidates import Candidate, Choice, LeftOut
from components.planning.formulas.hardware import CPU_NAME, Hardware, find_hardware
from components.planning.formulas.ranking import Plan, legal_plans
from components.planning.formulas.term import bytes_text, seconds_text
from components.protocol.run_files import CONFIG
from components.terminal import fit, print_text

AUTO = "parallelism=auto"
BEST = re.compile(r"parallelism=plan:(\d+)")
ANSWERED_WITHOUT_CONFIG = ("--help", "-h", "--hydra-help", "--info", "-i", "--version", "--shell-completion", "-sc")
TAKE_A_VALUE = ("--cfg", "-c", "--package", "-p")
MESH_KEYS = tuple(f"parallelism.{name}" for name in (*AXES, "strategy", "sequence_parallel", "pp_schedule"))


@contextmanager
def planned_command_line(recipe: Recipe, world_size: int | None) -> Iterator[None]:
    """Replace `parallelism=auto` on the command line by the fastest mesh that fits, within the block.

    A run that resumes on as many ranks keeps its mesh.

    Args:
        world_size: Number of ranks if they are already running; None if they are to be started.

    Raises ConfigError if the device or the model's sizes are unknown, or if no mesh fits.
    """
    _reject_plan(sys.argv)
    overrides = [each for each in sys.argv[1:] if each != AUTO]
    argv, sys.argv = sys.argv, [sys.argv[0], *_without_print_options(overrides)]
    try:
        chosen: list[str] = []
        if not any(each.partition("=")[0] in ANSWERED_WITHOUT_CONFIG for each in overrides):
            cfg = compose_from_command_line(recipe.name, recipe.schema, recipe.file.parent, lambda cfg, rejected: [])
            chosen = [] if cfg is None else _auto_overrides(cfg, overrides, world_size)
        sys.argv = [argv[0], *overrides, *chosen]
        yield
    finally:
        sys.argv = argv


def plan_run(cfg: TrainConfig, overrides: Sequence[str], world: int, count: int) -> list[Plan]:
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
        backend_of(cluster.kind).runs_here and cluster.device is Device.auto and not visible_gpus(os.environ)
    )
    if cluster.gpu is not None or on_cpu:
        return find_hardware(cluster.gpu or CPU_NAME)
    raise ConfigError(
        "cluster.gpu=null: the device is unknown; set it to an option of conf/gpu, such as cluster.gpu=h100_80"
    )


def fixed_keys(overrides: Sequence[str]) -> frozenset[str]:
    """Return the keys that a command line sets; an option of conf/parallelism sets the whole mesh."""
    keys = {override_parts(each)[0] for each in overrides}
    if "parallelism" in keys:
        keys |= set(MESH_KEYS)
    return frozenset(keys)


def requested_plans(arguments: Sequence[str]) -> int | None:
    """Return K of `parallelism=plan:K` on a command line, or None. Raises ConfigError if K is 0."""
    for each in arguments:
        if (match := BEST.fullmatch(each)) is not None:
            if not int(match[1]):
                raise ConfigError(f"{each}: must be plan:1 or more")
            return int(match[1])
    return None


def sweep_values(cfg: RecipeConfig, overrides: Sequence[str], world: int, best: int) -> list[tuple[str, list[str]]]:
    """Return the names and the overrides of the best meshes on `world` ranks for one point of a sweep."""
    plans = plan_run(_trains(cfg), overrides, world, best)
    return [(_name(plan.candidate, world), plan.candidate.overrides(cfg.parallelism)) for plan in plans]


def _without_print_options(arguments: Sequence[str]) -> list[str]:
    """Return arguments without --cfg, --package and --resolve, with which Hydra prints a config and composes none."""
    kept, skips = [], False
    for each in arguments:
        if not skips and each not in ("--resolve", *TAKE_A_VALUE) and not each.startswith(("--cfg=", "--package=")):
            kept.append(each)
        skips = each in TAKE_A_VALUE and not skips
    return kept


def _auto_overrides(cfg: RecipeConfig, overrides: Sequence[str], world_size: int | None) -> list[str]:
    train = _trains(cfg)
    world = world_size or processes_of(cfg, visible_gpus(os.environ))
    if (stored := _stored_candidate(cfg, world)) is not None:
        print_text(f"{AUTO}: keeps {_name(stored, world)}, as {cfg.run.dir} began with", file=sys.stderr)
        return stored.overrides(cfg.parallelism)
    best = plan_run(train, overrides, world, 1)[0]
    text = (
        f"{AUTO}: {_name(best.candidate, world)}, micro-batches {best.workload.micro_batches_text}, for "
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
        raise ConfigError(f"{AUTO}: only training recipes can be planned; set parallelism to an option")
    return cfg


def _reject_plan(arguments: Sequence[str]) -> None:
    """Reject `parallelism=plan:K` outside of a sweep, and misspelled forms of both."""
    for each in arguments[1:]:
        if each.startswith(("parallelism=auto", "parallelism=plan:")) and each != AUTO:
            hint = "needs -m" if BEST.fullmatch(each) else f"write {AUTO}, or parallelism=plan:K with -m"
            raise ConfigError(f"{each}: {hint}; plan:K runs the best K meshes as a sweep")
