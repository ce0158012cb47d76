"""Checks of a run before it starts, which all backends share: files, hub access, and the estimated memory.

Hub access is checked here, because the hub's own client retries for most of a minute, in every process.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from components.config.compose.frozen import read_frozen
from components.config.compute_rules import top_k_problem, torchao_problems, vocabulary_problem
from components.config.mesh_rules import fit_micro_batches
from components.config.model_files import check_adapter, check_settings, check_template, check_weights, locate
from components.config.rules import harness_problems, legal_node_counts, tracker_problems, validate
from components.config.schema.cluster import Device, MemoryPolicy
from components.config.schema.data import MixtureDataConfig, RowsDataConfig, TokensDataConfig
from components.config.schema.model import CausalLMConfig, Float8, Qat, WeightInit
from components.config.schema.objective import DistillationConfig, TeacherConfig, TopKTeacherConfig
from components.config.schema.optimizer import AdamW8bitConfig, CustomOptimizerConfig
from components.config.schema.parallelism import AXES
from components.config.schema.recipes import (
    AnswerPromptsConfig,
    GrpoConfig,
    RecipeConfig,
    TrainConfig,
    named_models,
    section,
)
from components.config.schema.run import CheckpointConfig, PeftConfig
from components.config.schema.training import EvaluationConfig, TasksConfig
from components.config.shape import ModelShape, read_shape
from components.config.teacher_files import check_stored_teacher
from components.conversation import read_prompts
from components.data.preflight import check_files, check_reward_functions, check_token_stores, reward_columns
from components.data.sources.files import is_hub_name
from components.launch.machine import determinism_problems
from components.protocol.errors import ConfigError
from components.protocol.run_files import CHECKPOINT_MANIFEST, CHECKPOINTS, CONFIG, ROLLOUTS, checkpoint_folders
from components.protocol.secrets import secret_problems
from components.storage.object_store import package_problems

MESH_KEYS = frozenset(
    ["cluster.kind", "cluster.nodes", "cluster.procs_per_node", "cluster.device", "cluster.oversubscribe"]
    + [f"parallelism.{name}" for name in (*AXES, "strategy")]
)
"""Keys that determine the number of processes and the mesh degrees."""
_MODEL_KEYS = frozenset(["model.config", *(f"model.{field.name}" for field in fields(ModelShape)), "model.path"])
"""Keys that determine the shape of the model."""
_ABSOLUTE = re.compile(r"[\w.]+=(/.*?): ")
"""Beginning of a problem of a key whose value is an absolute path."""
OFFLINE = "HF_HUB_OFFLINE"
"""Variable that restricts Hugging Face libraries to their local cache."""
_TRUE = ("1", "on", "yes", "true")
_CONNECT_TIMEOUT = 5.0
"""Timeout in seconds for connecting to the hub."""
_PROXIES = ("https_proxy", "http_proxy", "all_proxy")


def problems_before_start(
    cfg: RecipeConfig, world_size: int, rejected: Collection[str] = (), node_counts: list[int] | None = None
) -> list[str]:
    """Return all problems of `cfg` on `world_size` ranks, including those of the files it names, one sentence each.

    If the config contains secrets, only those are reported, since the messages of other problems quote values.

    Args:
        cfg: The config.
        world_size: Number of ranks.
        rejected: Keys and sections already rejected; their values in `cfg` are not the user's.
        node_counts: Receives the numbers of nodes in cluster.nodes on which the run can train, in order.
    """
    if secrets := secret_problems(cfg, sys.argv[1:]):
        return secrets
    shape, problems = ModelShape(), []
    try:
        if not affects(rejected, _MODEL_KEYS):
            shape = read_shape(cfg.model)
        problems = _model_problems(cfg) + _teacher_problems(cfg, shape)
    except ConfigError as error:
        problems = error.problems
    by_rules = validate(cfg, None if affects(rejected, MESH_KEYS) else world_size, shape)
    problems = by_rules + problems
    if not affects(rejected, MESH_KEYS):
        fitted = cfg if by_rules else fit_micro_batches(cfg, world_size)  # the ranks read the config that is fitted
        counts, on_fewest = legal_node_counts(fitted, by_rules, shape)
        problems += on_fewest
        if node_counts is not None:
            node_counts[:] = counts
    problems += determinism_problems(cfg.run, os.environ)
    if isinstance(cfg, AnswerPromptsConfig):  # of the data it uses the system message only
        problems += _problems_of(lambda: _prompt_problems(cfg.answers.prompts))
    else:
        problems += _problems_of(lambda: check_files(cfg.data))
        problems += _problems_of(lambda: _reward_problems(cfg))
    problems += _import_problems(cfg) + _task_problems(cfg)
    if not affects(rejected, _MODEL_KEYS | {"model.tokenizer"}):
        problems += check_token_stores(cfg.data, cfg.model, shape.vocab)
    return list(dict.fromkeys(problems + _checkpoint_problems(cfg)))


def split_absent(cfg: RecipeConfig, problems: list[str]) -> tuple[list[str], list[str]]:
    """Return the problems, and, with cluster.dry_run=render, notes on files that only the cluster may have."""
    match = {problem: _ABSOLUTE.match(problem) for problem in problems if cfg.cluster.only_renders}
    absent = [each for each, path in match.items() if path is not None and not os.path.exists(path[1])]
    return [problem for problem in problems if problem not in absent], [f"not checked: {each}" for each in absent]


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
    peft = section(cfg, PeftConfig)
    problems += package_problems("peft.path", None if peft is None else peft.path)
    return problems + package_problems("checkpoint.remote", remote, "set it to null")


def _task_problems(cfg: RecipeConfig) -> list[str]:
    """Check that the folder of the user's own tasks exists."""
    tasks = section(cfg, TasksConfig)
    if tasks is None or tasks.task_path is None or Path(os.path.expanduser(tasks.task_path)).is_dir():
        return []
    return [f"evaluation.task_path={tasks.task_path}: no such folder; set it to the folder of your task YAML files"]


def _model_problems(cfg: RecipeConfig) -> list[str]:
    paths, peft = named_models(cfg), section(cfg, PeftConfig)
    problems = [problem for key, path in paths.items() for problem in check_settings(path, key)]
    problems += check_template(cfg.model)
    if cfg.model.path is not None and cfg.model.init == WeightInit.pretrained:
        problems += check_weights(cfg.model.path)
    if (teacher := section(cfg, TeacherConfig)) is not None and teacher.path is not None:
        problems += check_weights(teacher.path, "teacher.path")
    return problems + check_adapter(peft) if peft is not None and "peft.path" in paths else problems


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
    if resume not in ("auto", "never") and not Path(os.path.expanduser(resume), CHECKPOINT_MANIFEST).is_file():
        problems.append(f"run.resume={resume}: no such checkpoint; set it to auto, never or RUN/checkpoints/step_N")
    evaluation = section(cfg, EvaluationConfig)
    checkpoint = evaluation.checkpoint if evaluation is not None else None
    if checkpoint is not None:
        path = Path(os.path.expanduser(checkpoint))
        if (path / CONFIG).is_file():
            if not any((folder / CHECKPOINT_MANIFEST).is_file() for folder in checkpoint_folders(path / CHECKPOINTS)):
                problems.append(
                    f"evaluation.checkpoint={checkpoint}: the run has no complete checkpoint; wait for its first save, "
                    "or give another run"
                )
        elif not (path / CHECKPOINT_MANIFEST).is_file():
            problems.append(f"evaluation.checkpoint={checkpoint}: no such checkpoint; set it to RUN/checkpoints/step_N")
    return problems


def _reward_problems(cfg: RecipeConfig) -> list[str]:
    """Check the reward functions against the columns of the data, and the run whose answers are replayed."""
    if not isinstance(cfg, GrpoConfig):
        return []
    problems = check_reward_functions(cfg.reward, reward_columns(cfg.data))
    return problems if cfg.rollouts.replay is None else problems + _replay_problems(cfg, cfg.rollouts.replay)


def _replay_problems(cfg: GrpoConfig, replay: str) -> list[str]:
    """Require a run with answers for every step, sampled as this run uses them."""
    key, run = f"rollouts.replay={replay}", Path(os.path.expanduser(replay))
    numbers = [int(file.stem) for file in (run / ROLLOUTS).glob("*.safetensors") if file.stem.isdecimal()]
    if not numbers:
        return [f"{key}: has no answers in {run / ROLLOUTS}; set it to a run directory of recipes/grpo.py"]
    other, problems = read_frozen(run / CONFIG, GrpoConfig), list[str]()
    used = ("group", "batches", "passes", "max_new_tokens", "temperature", "overlong_margin")
    values = {f"rollouts.{name}": [getattr(each.rollouts, name) for each in (cfg, other)] for name in used}
    values["training.global_batch_size"] = [each.training.global_batch_size for each in (cfg, other)]
    values["reward.functions"] = [each.reward.functions for each in (cfg, other)]
    for name, (own, theirs) in values.items():
        if own != theirs:
            of_answers = "rewarded" if name == "reward.functions" else "sampled"
            problems.append(f"{name}={own}: the answers of {key} were {of_answers} with {theirs}; set it to that")
    last = max(numbers) + other.rollouts.updates - 1
    if cfg.training.max_steps is not None and cfg.training.max_steps > last:
        problems.append(
            f"training.max_steps={cfg.training.max_steps}: {key} has answers for {last} steps; lower it to that"
        )
    return problems


def _prompt_problems(file: str) -> list[str]:
    """Raise ConfigError for a file without prompts, or with lines that are none."""
    read_prompts(file)
    return []


def _problems_of(check: Callable[[], list[str]]) -> list[str]:
    """Return the problems that a check returns or raises as ConfigError."""
    try:
        return check()
    except ConfigError as error:
        return error.problems


@dataclass(frozen=True, slots=True)
class _HubRepo:
    """A model or dataset that a run reads from the hub."""

    key: str
    name: str
    kind: str
    """model or dataset."""


def check_hub(cfg: RecipeConfig, environ: Mapping[str, str]) -> str | None:
    """Return why the hub is unreachable, or None if it is reachable or not needed.

    Raises ConfigError if the hub is unreachable and `cfg` needs models or datasets that are not cached.
    """
    needed = _hub_repos(cfg)
    reason = _unreachable(environ) if needed else None
    if reason is None:
        return None
    missing = [each for each in needed if not _is_cached(each, environ)]
    if missing:
        raise ConfigError([_missing_problem(each, reason, environ) for each in missing])
    return reason


def is_offline(environ: Mapping[str, str]) -> bool:
    """Return whether these environment variables restrict Hugging Face libraries to their local cache."""
    return environ.get(OFFLINE, "").lower() in _TRUE


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the cache folder of huggingface_hub."""
    return Path(environ.get("HF_HUB_CACHE") or _home(environ) / "hub").expanduser()


def _home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser()


def _hub_repos(cfg: RecipeConfig) -> list[_HubRepo]:
    found = []
    for key, path in named_models(cfg).items():
        files = locate(path, key)
        if not files.is_local and not files.gguf_file:
            found.append(_HubRepo(key, files.name_or_folder, "model"))
    sources = {"data": cfg.data}
    if isinstance(cfg.data, MixtureDataConfig):
        sources = {f"data.sources.{name}": source for name, source in cfg.data.sources.items()}
    for key, source in sources.items():
        if isinstance(source, RowsDataConfig):
            paths = {"path": source.path, "eval_path": source.eval_path}
            found += [
                _HubRepo(f"{key}.{name}", path, "dataset")
                for name, path in paths.items()
                if path is not None and is_hub_name(path)
            ]
    return found


def _is_cached(repo: _HubRepo, environ: Mapping[str, str]) -> bool:
    repository = hub_cache(environ) / f"{repo.kind}s--{repo.name.replace('/', '--')}" / "snapshots"
    if any(repository.glob("*/*")):
        return True
    prepared = Path(environ.get("HF_DATASETS_CACHE") or _home(environ) / "datasets").expanduser()
    return repo.kind == "dataset" and (prepared / repo.name.replace("/", "___")).is_dir()


def _unreachable(environ: Mapping[str, str]) -> str | None:
    """Return why the hub is unreachable; None if it accepts a connection, or if a proxy is configured."""
    if is_offline(environ):
        return f"{OFFLINE} is set"
    if any(environ.get(name) or environ.get(name.upper()) for name in _PROXIES):
        return None
    address = urlsplit(_endpoint(environ))
    failed = [f"no connection within {_CONNECT_TIMEOUT:g} s"]

    def connect() -> None:
        port = address.port or (80 if address.scheme == "http" else 443)
        try:
            socket.create_connection((address.hostname or "", port), timeout=_CONNECT_TIMEOUT).close()
            failed.clear()
        except OSError as error:
            failed[:] = [error.strerror or str(error)]

    attempt = Thread(target=connect, daemon=True)  # a thread because DNS resolution has no timeout
    attempt.start()
    attempt.join(_CONNECT_TIMEOUT)
    return failed[0] if failed else None


def _endpoint(environ: Mapping[str, str]) -> str:
    return environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _missing_problem(repo: _HubRepo, why: str, environ: Mapping[str, str]) -> str:
    model = repo.kind == "model"
    option, local = ("", "a local folder") if model else ("--repo-type dataset ", "a local file or folder")
    return (
        f"{repo.key}={repo.name}: is not in the hub's cache {_home(environ)}, and {_endpoint(environ)} cannot be "
        f"reached ({why}); download it on a machine with network access (hf download {option}{repo.name}), or set "
        f"{repo.key} to {local}"
    )


def memory_report(cfg: RecipeConfig, processes: int, *, on_cluster: bool) -> tuple[list[str], list[str]]:
    """Return the problems and the notes about the memory of a run's fullest rank.

    Args:
        cfg: A valid config.
        processes: Number of ranks.
        on_cluster: Whether the run waits in a queue; only then a missing device is noted.
    """
    cluster = cfg.cluster
    if cluster.memory_check is MemoryPolicy.off or not isinstance(cfg, TrainConfig):
        return [], []
    if cluster.gpu is None:
        unknown = "memory: not checked, since cluster.gpu is not set; set it to an option of conf/gpu"
        return [], [unknown] if on_cluster and cluster.device is not Device.cpu else []
    # Imported here, because every launch reaches this function and few have a device.
    from components.planning.formulas.hardware import device_files, find_hardware
    from components.planning.formulas.ranking import Verdict, check_memory

    try:
        hardware = find_hardware(cluster.gpu)
    except ConfigError as error:
        return error.problems, []
    used, *others = device_files(cluster.gpu)
    notes = [f"{used}: used instead of {other}" for other in others]
    try:
        check = check_memory(cfg, cfg.parallelism.resolve(processes), hardware)
    except ConfigError as error:
        return [], notes + [f"memory: not checked: {problem}" for problem in error.problems]
    if check.verdict is Verdict.exceeds and cluster.memory_check is MemoryPolicy.refuse:
        return [f"{check.text}; or set cluster.memory_check=report"], []
    return [], [*notes, check.text if check.verdict is not Verdict.exceeds else f"warning: {check.text}"]


def simulated_memory(cfg: RecipeConfig, processes: int, recipe: Path) -> list[str]:
    """Return the memory and traffic of a recipe's step in lines of text, with cluster.dry_run=plan; otherwise none.

    Raises ConfigError if the recipe does not train or its step cannot be simulated.
    """
    cluster = cfg.cluster
    if cluster.dry_run != "plan":
        return []
    if not isinstance(cfg, TrainConfig):
        raise ConfigError("cluster.dry_run=plan: only training recipes can be simulated; use cluster.dry_run=true")
    from components.planning.formulas.hardware import find_hardware
    from components.planning.formulas.memory import estimate_memory
    from components.planning.formulas.ranking import workload_on
    from components.planning.simulation import simulate_run, simulation_lines

    estimated = None
    if cluster.gpu is not None:
        hardware = find_hardware(cluster.gpu)
        try:
            workload = workload_on(cfg, cfg.parallelism.resolve(processes), hardware)
        except ConfigError:  # the formulas do not cover the model, which a simulation builds
            pass
        else:
            cfg = replace(cfg, parallelism=workload.parallelism)  # with activation_checkpointing=auto resolved
            estimated = estimate_memory(workload, hardware.device_type).peak
    first, *others = simulation_lines(simulate_run(cfg, read_shape(cfg.model), processes, recipe), estimated)
    return [f"step on fake tensors: {first}", *others]
