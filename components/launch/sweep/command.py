"""`python recipe.py -m ...`: check all points, create the sweep's folder, run the points."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from components.config.compose.composition import Check, no_check
from components.config.compose.sweep import PointRequest, SweepRequest, compose_point, expand_sweep, override_of
from components.config.compose.sweep_keys import EVAL_LOSS, SweepConfig, is_sweep_key, read_sweep_keys
from components.config.schema.recipes import GrpoConfig, RecipeConfig, section
from components.config.schema.run import CheckpointConfig, trackers_without_group
from components.config.schema.training import TrainingConfig
from components.launch.clusters import backend_of
from components.launch.machine import processes_of, visible_gpus
from components.launch.open_run import directory_problems
from components.launch.overrides import reject_swept_run
from components.launch.recipe import Recipe
from components.launch.run_checks import MESH_KEYS, affects, problems_before_start, simulated_memory, split_absent
from components.launch.run_directory import check_writable, reported_by_path
from components.launch.sweep.plan import (
    PLAN,
    Point,
    StudyPlan,
    Sweep,
    locked,
    new_directory,
    point_name,
    read_points,
    read_sweep,
)
from components.launch.sweep.points import PointLoop, conclude, point_command, run_points, share_problems
from components.launch.sweep.ranking import choose_criterion, missing_metric, read_curve
from components.launch.sweep.study import JOURNAL, MOST_REPEATS, PointStudy, space_of
from components.protocol.errors import ConfigError, raise_all
from components.storage.object_store import join
from components.terminal import print_text

_NOTHING_SWEPT = (
    "-m (--multirun): a sweep needs a key with several values, such as parallelism=ddp,fsdp2; add one, or remove -m"
)


def run_sweep(recipe: Recipe) -> int:
    """Run a command line with -m, and return the exit status.

    0: every point is ok or submitted; 1: one is not, or losses disagree; 130: stopped by Ctrl-C. Raises ConfigError
    for problems shared by all points, before anything is written.
    """
    reject_swept_run(recipe.schema, sys.argv[1:])
    keys = read_sweep_keys(each for each in sys.argv[1:] if is_sweep_key(each))[0]
    parallel = keys.parallel or 1

    def check(cfg: RecipeConfig, rejected: Collection[str]) -> list[str]:
        processes = _processes(cfg, parallel)
        backend = backend_of(cfg.cluster)
        shared = (
            [] if affects(rejected, MESH_KEYS) or not backend.runs_here else share_problems(cfg, processes, parallel)
        )
        # quick: without querying the cluster, which the launcher of each point does
        backend_problems, _ = backend.validate(cfg, processes, rejected, quick=True)
        watched = _metric_problems(cfg, keys)
        problems, _ = split_absent(cfg, problems_before_start(cfg, processes, rejected))
        return shared + watched + backend_problems + problems

    request = _expand(recipe, check)
    if request.shown:
        return _show_configs(recipe, request)
    configs, problems = _compose_all(request, check)
    first = next(cfg for cfg in configs if cfg is not None)
    sweep = _stored_study(recipe, request, first.run.dir) or _new_sweep(recipe, request, first.run.dir)
    points = [
        _point(sweep, number, point, cfg, problems[number])
        for number, (point, cfg) in enumerate(zip(request.points, configs, strict=True))
    ]
    if any(cfg is not None and cfg.cluster.starts_nothing for cfg in configs):
        return _dry_run(replace(sweep, points=points), configs, problems)
    if any(cfg is not None and cfg.run.private for cfg in configs):
        os.umask(0o077)
    if sweep.study is None:
        sweep = replace(sweep, points=points)
    with reported_by_path(sweep.directory):
        sweep.directory.mkdir(parents=True, exist_ok=True)
    with locked(sweep.directory):
        sweep = _sweep_now(sweep, recipe, request)
        with reported_by_path(sweep.directory):
            sweep.write()
        if sweep.study is not None:
            stops = _run_study(sweep, sweep.study, request, check)
        else:
            print_text(f"sweep {sweep.directory}: {len(points)} points", flush=True)
            stops = run_points(sweep, points)
    return conclude(sweep, stops)


def _metric_problems(cfg: RecipeConfig, keys: SweepConfig) -> list[str]:
    """Require a metric that runs with rewards have, and several evaluations during a run if points are stopped early.

    Without a study and an early stop the default metric needs no change: the table then ranks by what there is.
    """
    training, metric, rule = section(cfg, TrainingConfig), keys.metric, keys.early_stop
    problems = []
    if isinstance(cfg, GrpoConfig) and metric == EVAL_LOSS and (keys.trials is not None or rule is not None):
        problems.append(f"sweep.metric={metric}: runs with rewards have no {metric}; set sweep.metric=eval_reward")
    if rule is None or training is None or not metric.startswith("eval"):
        return problems
    every, steps = training.eval_every, training.max_steps
    if every > 0 and (steps is None or every < steps):
        return problems
    last = "" if steps is None else f", less than training.max_steps={steps}"
    return [
        *problems,
        f"training.eval_every={every}: sweep.early_stop={rule} compares {metric} during the runs; set it to a number "
        f"of steps greater than 0{last}, or remove sweep.early_stop",
    ]


def _sweep_now(sweep: Sweep, recipe: Recipe, request: SweepRequest) -> Sweep:
    """Return the sweep with what another process has written to its folder until this one took its lock.

    Raises ConfigError if that is another sweep.
    """
    folder = str(sweep.directory)
    if (stored := _stored_study(recipe, request, folder)) is not None:
        return stored
    new_directory(recipe.name, folder)
    return sweep


def _new_sweep(recipe: Recipe, request: SweepRequest, given: str | None) -> Sweep:
    """Return a sweep in a new folder, without its points. Raises ConfigError if the given folder is not empty."""
    directory, identity = new_directory(recipe.name, given)
    return Sweep(
        directory=directory,
        id=identity,
        recipe=recipe.name,
        file=recipe.file,
        folder=Path.cwd(),
        command=shlex.join([Path(sys.executable).name, *sys.argv]),
        options=list(request.options),
        keys=list(request.points[0].values),
        points=[],
        metric=request.keys.metric,
        goal=request.keys.direction,
        study=_study_plan(request),
        parallel=request.keys.parallel,
        early_stop=request.keys.early_stop,
    )


def _study_plan(request: SweepRequest) -> StudyPlan | None:
    if request.keys.trials is None:
        return None
    free = (*(each.key for each in request.space), "run.dir", "cluster.dry_run")
    fixed = [given for key, given in request.typed if key not in free]
    return StudyPlan(request.keys.trials, request.keys.seed, space_of(request.space), fixed)


def _stored_study(recipe: Recipe, request: SweepRequest, given: str | None) -> Sweep | None:
    """Return the study that a command continues; None if run.dir holds none.

    Raises ConfigError if its points would not be those of this command.
    """
    plan = _study_plan(request)
    if plan is None or given is None or not (Path(given).expanduser() / PLAN).exists():
        return None
    stored = read_sweep(Path(given))
    if stored.study is None:
        return None
    own = {"recipe": recipe.file, "sweep.metric": request.keys.metric, "sweep.goal": request.keys.direction}
    theirs = {"recipe": stored.file, "sweep.metric": stored.metric, "sweep.goal": stored.goal}
    different = stored.study.differences(plan) + [name for name in own if own[name] != theirs[name]]
    if different:
        raise ConfigError(
            f"run.dir={given}: holds a study whose command differs in {', '.join(different)}; give the same "
            f"({stored.command}), or choose another run.dir"
        )
    keys = request.keys
    return replace(stored, study=plan, folder=Path.cwd(), parallel=keys.parallel, early_stop=keys.early_stop)


def _run_study(sweep: Sweep, plan: StudyPlan, request: SweepRequest, check: Check) -> list[int]:
    """Run the unfinished points of a study and choose further ones; return the signals that stopped it."""
    study = PointStudy(sweep.directory, plan, request.space, sweep.goal)
    if len(study.values) < len(sweep.points):
        raise ConfigError(
            f"{sweep.directory / JOURNAL}: lacks points of {PLAN}, so that the study cannot be continued; restore "
            "it, or choose another run.dir"
        )
    for values in study.values[len(sweep.points) :]:  # chosen by a sweep that was killed before it recorded them
        sweep.points.append(_chosen_point(sweep, request, values, check))
    for row in read_points(sweep, [sweep.points[number] for number in study.unfinished()]):
        if row.has_ended:
            study.record(row, sweep.metric, read_curve(sweep, row.point))
    done = len(study.values) - len(study.unfinished())
    text = f", {done} of which have ended" if done else ""
    print_text(f"study {sweep.directory}: {plan.trials} points{text}", flush=True)
    points = _points_of_study(sweep, study, request, check)
    return PointLoop(sweep, points, plan.trials, study).run()


def _points_of_study(sweep: Sweep, study: PointStudy, request: SweepRequest, check: Check) -> Iterator[Point]:
    """Yield the unfinished points, and then new ones, each chosen when it can start.

    Ends early if no ok point has the metric, and if the study has no new proposal.
    """
    yield from [sweep.points[number] for number in study.unfinished()]
    while len(study.values) < study.plan.trials:
        ok = [row for row in read_points(sweep) if row.state == "ok"]
        if missing_metric(sweep, choose_criterion(sweep, ok), ok):
            return
        if (values := study.choose()) is None:
            print_text(f"study ended: {MOST_REPEATS} proposals in a row repeated its {len(study.values)} points")
            return
        sweep.points.append(_chosen_point(sweep, request, values, check))
        sweep.write()
        yield sweep.points[-1]


def _chosen_point(sweep: Sweep, request: SweepRequest, values: dict[str, str], check: Check) -> Point:
    """Return the next point of a study; its launcher will report its problems, if it has any."""
    point = request.study_point(values)
    try:
        cfg, problems = compose_point(request, point, check)
    except ConfigError as error:
        cfg, problems = None, error.problems
    return _point(sweep, len(sweep.points), point, cfg, problems)


def _expand(recipe: Recipe, check: Check) -> SweepRequest:
    """Return the points of the sweep; with `parallelism=plan:K`, each of them on its best K meshes."""
    given = sys.argv[1:]
    if not any(each.startswith("parallelism=plan:") for each in given):
        return expand_sweep(recipe.name, recipe.schema, recipe.file.parent, given, check)
    from components.launch.overrides import BEST, requested_plans, sweep_values  # few commands need the planner

    best = requested_plans(given)
    others = [each for each in given if not (best and BEST.fullmatch(each))]
    request = expand_sweep(recipe.name, recipe.schema, recipe.file.parent, others, check)
    if best is None:
        return request
    if request.space:
        (count,) = [each for each in given if BEST.fullmatch(each)]
        raise ConfigError(
            f"{count}: the planner chooses the meshes, and sweep.trials the points; list the meshes "
            "(parallelism=fsdp2,fsdp2_tp2), or remove sweep.trials"
        )
    points = []
    for point in request.points:
        cfg, problems = compose_point(request, point, no_check)
        if cfg is None:
            raise ConfigError(problems)
        world = _processes(cfg, request.keys.parallel or 1)
        for name, overrides in sweep_values(cfg, point.overrides, world, best):
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
    replaced = request.request.replaced
    print_text(*replaced, sep="\n", end="\n" * bool(replaced), file=sys.stderr)
    if rejections and problems:
        rejections += [problem for problem in problems[0] if all(problem in found for found in problems)]
    if not rejections and all(problems):
        rejections = [problem for found in problems for problem in found]
    if not request.points[0].values:
        rejections.append(_NOTHING_SWEPT)
    raise_all(list(dict.fromkeys(rejections)))
    return configs, problems


def _processes(cfg: RecipeConfig, parallel: int) -> int:
    """Return the number of ranks of a point, which has its share of the GPUs of this machine."""
    return processes_of(cfg, visible_gpus(os.environ) // parallel)


def _point(sweep: Sweep, number: int, point: PointRequest, cfg: RecipeConfig | None, problems: list[str]) -> Point:
    overrides, processes, mesh, runs_here = list(point.overrides), None, None, True
    name = point_name(number, point.values)
    if cfg is not None:
        processes = _processes(cfg, sweep.parallel or 1)
        mesh = None if problems else str(cfg.parallelism.resolve(processes))
        runs_here = backend_of(cfg.cluster).runs_here
        overrides += [override_of(f"{key}.group", sweep.id) for key in trackers_without_group(cfg.logging)]
        checkpoints = section(cfg, CheckpointConfig)
        if checkpoints is not None and checkpoints.remote is not None and "checkpoint.remote" not in point.values:
            overrides.append(override_of("checkpoint.remote", join(checkpoints.remote, name)))  # one URL for each run
        if cfg.run.name is None:
            overrides.append(override_of("run.name", name))  # used as job name
    return Point(number, name, point.values, overrides, mesh, processes, runs_here)


def _dry_run(sweep: Sweep, configs: list[RecipeConfig | None], problems: list[list[str]]) -> int:
    """List the points without starting them; the launcher of a cluster's point prints what it would submit."""
    with reported_by_path(sweep.directory):
        check_writable(sweep.directory)
    what = f"a sweep of {len(sweep.points)} points in {sweep.directory}"
    if sweep.study is not None:
        what = (
            f"a study of {sweep.study.trials} points in {sweep.directory}, whose listed values and ends of ranges are"
        )
    print_text(f"cluster.dry_run: {what}")
    failed = False
    for point, cfg, found in zip(sweep.points, configs, problems, strict=True):
        runs_here = cfg is not None and backend_of(cfg.cluster).runs_here
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
                *simulated_memory(cfg, _processes(cfg, sweep.parallel or 1), sweep.file),
                sep="\n",
                flush=True,
            )
    return int(failed)


def _show_configs(recipe: Recipe, request: SweepRequest) -> int:
    """Print the config of each point as --cfg requests, in a process each."""
    statuses = []
    for number, point in enumerate(request.points):
        print_text(f"# {point_name(number, point.values)}", flush=True)
        common = [request.run_dir] if request.run_dir else []
        command = [sys.executable, str(recipe.file), *request.options, *request.shown, *point.overrides, *common]
        statuses.append(subprocess.run(command, check=False).returncode)
    return max(statuses)
