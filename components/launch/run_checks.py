"""The fast, read-only checks of a run that all backends share."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path

from components.config.errors import ConfigError
from components.config.model_files import check_settings, check_weights
from components.config.rules.compute_rules import top_k_problem, torchao_problems, vocabulary_problem
from components.config.rules.run_rules import harness_problems, tracker_problems
from components.config.schema.checkpoint import CheckpointConfig
from components.config.schema.data import MixtureDataConfig, RowsDataConfig, TokensDataConfig
from components.config.schema.model import CausalLMConfig, Float8, Qat, TeacherConfig, TopKTeacherConfig, WeightInit
from components.config.schema.objective import DistillationConfig
from components.config.schema.optimizer import AdamW8bitConfig, CustomOptimizerConfig
from components.config.schema.parallelism import AXES
from components.config.schema.recipes import RecipeConfig, named_models, section
from components.config.schema.training import EvaluationConfig, TasksConfig
from components.config.secrets import secret_problems
from components.config.shape import ModelShape, read_shape
from components.config.teacher_files import check_stored_teacher
from components.config.validate import node_count_problems, validate
from components.data.preflight import check_files, check_token_stores
from components.launch.deterministic_kernels import determinism_problems
from components.protocol.run_files import CHECKPOINTS, CONFIG
from components.storage.urls import package_problems

MESH_KEYS = frozenset(
    ["cluster.kind", "cluster.nodes", "cluster.procs_per_node", "cluster.device", "cluster.oversubscribe"]
    + [f"parallelism.{name}" for name in (*AXES, "strategy")]
)
"""Keys that determine the number of processes and the mesh degrees."""
MODEL_KEYS = frozenset(["model.config", *(f"model.{each.name}" for each in fields(ModelShape)), "model.path"])
"""Keys that determine the shape of the model."""
_ABSOLUTE = re.compile(r"[\w.]+=(/.*?): ")
"""Beginning of a problem of a key whose value is an absolute path."""
_MANIFEST = "manifest.json"
"""File that every published checkpoint contains."""


def problems_before_start(cfg: RecipeConfig, world_size: int, rejected: Collection[str] = ()) -> list[str]:
    """Return all problems of `cfg` on `world_size` ranks, including those of the files it names, one sentence each.

    If the config contains secrets, only those are reported, since the messages of other problems quote values.

    Args:
        cfg: The config.
        world_size: Number of ranks.
        rejected: Keys and sections already rejected; their values in `cfg` are not the user's.
    """
    if secrets := secret_problems(cfg, sys.argv[1:]):
        return secrets
    shape, problems = ModelShape(), []
    try:
        if not affects(rejected, MODEL_KEYS):
            shape = read_shape(cfg.model)
        problems = _model_problems(cfg) + _teacher_problems(cfg, shape)
    except ConfigError as error:
        problems = error.problems
    problems = validate(cfg, None if affects(rejected, MESH_KEYS) else world_size, shape) + problems
    if not affects(rejected, MESH_KEYS):
        problems += node_count_problems(cfg, shape)
    problems += determinism_problems(cfg.run, os.environ)
    problems += _problems_of(lambda: check_files(cfg.data)) + _import_problems(cfg) + _task_problems(cfg)
    if not affects(rejected, MODEL_KEYS | {"model.tokenizer"}):
        problems += check_token_stores(cfg.data, cfg.model, shape.vocab)
    return list(dict.fromkeys(problems + _checkpoint_problems(cfg)))


def split_absent(cfg: RecipeConfig, problems: list[str]) -> tuple[list[str], list[str]]:
    """Return the problems, and, with cluster.dry_run=render, notes on files that only the cluster may have."""
    found = {each: _ABSOLUTE.match(each) for each in problems if cfg.cluster.only_renders}
    absent = [each for each, path in found.items() if path is not None and not os.path.exists(path[1])]
    return [each for each in problems if each not in absent], [f"not checked: {each}" for each in absent]


def affects(rejected: Collection[str], keys: Collection[str]) -> bool:
    """Return whether any rejected key or section is among `keys`, contains one of them, or lies inside one."""
    return any(
        key == each or each.startswith(f"{key}.") or key.startswith(f"{each}.") for key in rejected for each in keys
    )


def _import_problems(cfg: RecipeConfig) -> list[str]:
    """Check that the packages a config needs are installed, before a sweep starts or a job is queued."""
    optimizer = section(cfg, CustomOptimizerConfig)
    paths = {
        "parallelism.tp_plan": cfg.parallelism.tp_plan,
        "optimizer.factory": None if optimizer is None else optimizer.factory,
    }
    problems = []
    for key, path in paths.items():
        package = (path or "").partition(":")[0].partition(".")[0]
        if path is not None and importlib.util.find_spec(package) is None:
            problems.append(f"{key}={path}: no module named {package!r}; install it, or put it next to the recipe")
    if cfg.cluster.has_same_packages:  # otherwise each rank checks its own
        problems += _storage_problems(cfg)
        problems += tracker_problems(cfg.logging)
        if (tasks := section(cfg, TasksConfig)) is not None:
            problems += harness_problems(tasks)
        if (eight_bit := section(cfg, AdamW8bitConfig)) is not None:
            problems += torchao_problems(f"optimizer.kind={eight_bit.kind}")
        if cfg.model.qat != Qat.none:
            problems += torchao_problems(f"model.qat={cfg.model.qat}")
        if cfg.model.float8 != Float8.none:
            problems += torchao_problems(f"model.float8={cfg.model.float8}")
    return problems


def _storage_problems(cfg: RecipeConfig) -> list[str]:
    """Require the packages of the object stores that a config names, which are optional, to be installed."""
    sources = {"data": cfg.data}
    if isinstance(cfg.data, MixtureDataConfig):
        sources = {f"data.sources.{name}": source for name, source in cfg.data.sources.items()}
    checkpoint = section(cfg, CheckpointConfig)
    remote = None if checkpoint is None else checkpoint.remote
    urls: dict[str, str | None] = {}
    for key, source in sources.items():
        if isinstance(source, RowsDataConfig | TokensDataConfig):
            urls |= {f"{key}.path": source.path, f"{key}.eval_path": source.eval_path}
    problems = [problem for key, url in urls.items() for problem in package_problems(key, url)]
    return problems + package_problems("checkpoint.remote", remote, "set it to null")


def _task_problems(cfg: RecipeConfig) -> list[str]:
    """Check that the folder of the user's own tasks exists."""
    tasks = section(cfg, TasksConfig)
    if tasks is None or tasks.task_path is None or Path(os.path.expanduser(tasks.task_path)).is_dir():
        return []
    return [f"evaluation.task_path={tasks.task_path}: no such folder; set it to the folder of your task YAML files"]


def _model_problems(cfg: RecipeConfig) -> list[str]:
    problems = [problem for key, path in named_models(cfg).items() for problem in check_settings(path, key)]
    if cfg.model.path is not None and cfg.model.init == WeightInit.pretrained:
        problems += check_weights(cfg.model.path)
    if (teacher := section(cfg, TeacherConfig)) is not None and teacher.path is not None:
        problems += check_weights(teacher.path, "teacher.path")
    return problems


def _teacher_problems(cfg: RecipeConfig, student: ModelShape) -> list[str]:
    """Check the teacher's vocabulary against the student's where both can be read, and the files of a stored one."""
    teacher, objective = section(cfg, TeacherConfig), section(cfg, DistillationConfig)
    if teacher is None:
        return []
    if teacher.stored is not None and objective is not None:
        return check_stored_teacher(teacher.stored, objective.temperature, student.vocab)
    problems = []
    if isinstance(teacher, TopKTeacherConfig) and student.vocab is not None and teacher.top_k > student.vocab:
        problems.append(top_k_problem(teacher.top_k, student.vocab))
    size = read_shape(CausalLMConfig(path=teacher.path)).vocab
    if teacher.path is not None and size is not None and student.vocab is not None and size < student.vocab:
        problems.append(vocabulary_problem(teacher.path, size, student.vocab))
    return problems


def _checkpoint_problems(cfg: RecipeConfig) -> list[str]:
    """Check that the named checkpoints exist, before a job is queued. Their contents are checked by the ranks."""
    problems = []
    resume = cfg.run.resume
    if resume not in ("auto", "never") and not Path(os.path.expanduser(resume), _MANIFEST).is_file():
        problems.append(f"run.resume={resume}: no such checkpoint; set it to auto, never or RUN/checkpoints/step_N")
    evaluation = section(cfg, EvaluationConfig)
    checkpoint = evaluation.checkpoint if evaluation is not None else None
    if checkpoint is not None:
        path = Path(os.path.expanduser(checkpoint))
        if (path / CONFIG).is_file():
            if not any(path.glob(f"{CHECKPOINTS}/step_*/{_MANIFEST}")):
                problems.append(
                    f"evaluation.checkpoint={checkpoint}: the run has no complete checkpoint; wait for its first save, "
                    "or give another run"
                )
        elif not (path / _MANIFEST).is_file():
            problems.append(f"evaluation.checkpoint={checkpoint}: no such checkpoint; set it to RUN/checkpoints/step_N")
    return problems


def _problems_of(check: Callable[[], list[str]]) -> list[str]:
    """Return the problems that a check returns or raises as ConfigError."""
    try:
        return check()
    except ConfigError as error:
        return error.problems
