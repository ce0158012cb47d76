"""`python recipe.py -m ...`: check all points, create the sweep's folder, run the points."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from components.config.compose.diagnose import Check
from components.config.compose.sweep import PointRequest, SweepRequest, compose_point, expand_sweep, override_of
from components.config.errors import ConfigError
from components.config.schema.checks import raise_all
from components.config.schema.logging import trackers_without_group
from components.config.schema.recipes import RecipeConfig
from components.launch.backend import Recipe
from components.launch.clusters import backend_of
from components.launch.evaluated_run import reject_swept_run
from components.launch.machine import processes_of, visible_gpus
from components.launch.memory_report import played_memory
from components.launch.open_run import directory_problems
from components.launch.run_checks import problems_before_start
from components.launch.run_directory.filesystem import check_writable, reported_by_path
from components.launch.sweep.plan import Point, Sweep, new_directory, point_name
from components.launch.sweep.points import point_command, run_points
from components.terminal import print_text

NOTHING_SWEPT = (
    "-m (--multirun): a sweep needs a key with several values, such as parallelism=ddp,fsdp2; add one, or remove -m"
)


def run_sweep(recipe: Recipe) -> int:
    """Run a command line with -m, and return the exit status.

    0: every point is ok or submitted; 1: one is not, or losses disagree; 130: stopped by Ctrl-C. Raises ConfigError
    for problems shared by all points, before anything is written.
    """
    reject_swept_run(recipe.schema)
    gpus = visible_gpus(os.environ)

    def check(cfg: RecipeConfig, rejected: Collection[str]) -> list[str]:
        processes = processes_of(cfg, gpus)
        # quick: without querying the cluster, which the launcher of each point does
        backend_problems, _ = backend_of(cfg.cluster.kind).validate(cfg, processes, rejected, quick=True)
        return backend_problems + problems_before_start(cfg, processes, rejected)

    request = _expand(recipe, check)
    if request.shown:
        return _show_configs(recipe, request)
    configs, problems = _compose_all(request, check)
    first = next(cfg for cfg in configs if cfg is not None)
    directory, identity = new_directory(recipe.name, first.run.dir)
    points = [
        _point(number, point, cfg, problems[number], identity)
        for number, (point, cfg) in enumerate(zip(request.points, configs, strict=True))
    ]
    sweep = Sweep(
        directory=directory,
        id=identity,
        recipe=recipe.name,
        file=recipe.file,
        folder=Path.cwd(),
        command=shlex.join([Path(sys.executable).name, *sys.argv]),
        options=list(request.options),
        keys=list(request.points[0].values),
        points=points,
        metric=request.keys.metric,
        goal=request.keys.direction,
    )
    if any(cfg is not None and cfg.cluster.starts_nothing for cfg in configs):
        return _dry_run(sweep, configs, problems)
    if any(cfg is not None and cfg.run.private for cfg in configs):
        os.umask(0o077)
    with reported_by_path(directory):
        directory.mkdir(parents=True, exist_ok=True)
        sweep.write()
    print_text(f"sweep {sweep.directory}: {len(points)} points", flush=True)
    return run_points(sweep, points)


def _expand(recipe: Recipe, check: Check) -> SweepRequest:
    """Return the points of the sweep; with `parallelism=plan:K`, each of them on its best K meshes."""
    if not any(each.startswith("parallelism=plan:") for each in sys.argv[1:]):
        return expand_sweep(recipe.name, recipe.schema, recipe.file.parent, check)
    from components.launch.planned_mesh import BEST, requested_plans, sweep_values  # few commands need the planner

    best = requested_plans(sys.argv[1:])
    if best is None:
        return expand_sweep(recipe.name, recipe.schema, recipe.file.parent, check)
    argv, sys.argv = sys.argv, [each for each in sys.argv if not BEST.fullmatch(each)]
    try:
        request = expand_sweep(recipe.name, recipe.schema, recipe.file.parent, check)
    finally:
        sys.argv = argv
    points = []
    for point in request.points:
        cfg, problems = compose_point(request, point, lambda cfg, rejected: [])
        if cfg is None:
            raise ConfigError(problems)
        for name, overrides in sweep_values(cfg, point.overrides, best):
            values = {"parallelism": name, **point.values}
            points.append(PointRequest((*point.overrides, *overrides), values))
    return replace(request, points=points)


def _compose_all(request: SweepRequest, check: Check) -> tuple[list[RecipeConfig | None], list[list[str]]]:
    """Compose and check every point.

    Raises ConfigError if any point does not compose, along with the problems shared by all others; if no point can run;
    and if no key is swept.
    """
    rejections: list[str] = []
    configs: list[RecipeConfig | None] = []
    problems: list[list[str]] = []
    for point in request.points:
        try:
            cfg, found = compose_point(request, point, check)
        except ConfigError as error:
            rejections += error.problems
            continue
        configs.append(cfg)
        problems.append(found)
    if rejections and problems:
        rejections += [problem for problem in problems[0] if all(problem in found for found in problems)]
    if not rejections and all(problems):
        rejections = [problem for found in problems for problem in found]
    if not request.points[0].values:
        rejections.append(NOTHING_SWEPT)
    raise_all(list(dict.fromkeys(rejections)))
    return configs, problems


def _point(number: int, point: PointRequest, cfg: RecipeConfig | None, problems: list[str], sweep_id: str) -> Point:
    overrides, processes, mesh = list(point.overrides), None, None
    name = point_name(number, point.values)
    if cfg is not None:
        processes = processes_of(cfg, visible_gpus(os.environ))
        mesh = None if problems else str(cfg.parallelism.resolve(processes))
        overrides += [override_of(f"{key}.group", sweep_id) for key in trackers_without_group(cfg.logging)]
        if cfg.run.name is None:
            overrides.append(override_of("run.name", name))  # used as job name
    return Point(number, name, point.values, overrides, mesh, processes)


def _dry_run(sweep: Sweep, configs: list[RecipeConfig | None], problems: list[list[str]]) -> int:
    """List the points without starting them; the launcher of a cluster's point prints what it would submit."""
    with reported_by_path(sweep.directory):
        check_writable(sweep.directory)
    print_text(f"cluster.dry_run: a sweep of {len(sweep.points)} points in {sweep.directory}")
    failed = False
    for point, cfg, found in zip(sweep.points, configs, problems, strict=True):
        runs_here = cfg is not None and backend_of(cfg.cluster.kind).runs_here
        if not found and cfg is not None and runs_here:
            cfg.run.dir = str(sweep.run_dir(point))
            found = directory_problems(cfg, sweep.recipe)
        if found or cfg is None:
            failed = True
            print_text(f"{point.name}: invalid: {'; '.join(found)}", flush=True)
        elif not runs_here:
            print_text(f"{point.name}:", flush=True)
            failed |= subprocess.run(point_command(sweep, point), check=False).returncode != 0
        else:
            print_text(
                f"{point.name}: would start {point.processes} x {sweep.file}, mesh {point.mesh}",
                *played_memory(cfg, processes_of(cfg, visible_gpus(os.environ))),
                sep="\n",
                flush=True,
            )
    return int(failed)


def _show_configs(recipe: Recipe, request: SweepRequest) -> int:
    """Print the config of each point as --cfg requests, by running Hydra once per point."""
    statuses = []
    for number, point in enumerate(request.points):
        print_text(f"# {point_name(number, point.values)}", flush=True)
        common = [request.run_dir] if request.run_dir else []
        command = [sys.executable, str(recipe.file), *request.options, *request.shown, *point.overrides, *common]
        statuses.append(subprocess.run(command, check=False).returncode)
    return max(statuses)
