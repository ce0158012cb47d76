"""Open a run directory: choose its path, lock it, and validate what an earlier run left in it.

Config changes of a resumed run are reported, or rejected if they would silently change what it computes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml

from components.config.compose.frozen import from_yaml, intact_copy, read_intact, to_yaml
from components.config.kinds import WITHOUT_KIND
from components.config.schema.data import MixtureDataConfig
from components.config.schema.recipes import RecipeConfig, section
from components.config.schema.run import PeftConfig, accepts, is_defining, is_same_checkpoint
from components.config.schema.training import EvaluationConfig
from components.launch.clusters import job_of, jobs_by_id, stop_command
from components.launch.run_directory import RunDirectory, check_writable, make, make_new, reported_by_path
from components.launch.run_directory_lease import take_lease
from components.protocol.errors import ConfigError, field_values, raise_all
from components.protocol.run_files import (
    CHECKPOINT_STATE,
    CHECKPOINTS,
    CONFIG,
    JOB_ID,
    LEASE,
    LOCK,
    LOGS,
    RECORD,
    RESULT,
    atomic_write,
    checkpoint_folders,
    numbers_in,
    read_json,
    set_aside,
    take_lock,
    temporaries,
)
from components.protocol.safe_parsing import load_json, load_yaml
from components.terminal import print_text

_LONGEST = 200
"""Maximum characters quoted of a value, and of a problem of a stored config, whose contents are arbitrary."""
_PER_START = ("run.dir", "run.name", "run.resume", "run.accept_changes")
"""Keys that may differ between starts without a message: they do not change what the run computes."""
_WITHOUT_EFFECT = ("checkpoint.", "cluster.", "logging.", "parallelism.", "training.micro_batch_size")
"""Keys, by their first characters, that do not change the loss curve."""


def open_run_directory(cfg: RecipeConfig, recipe: str) -> RunDirectory:
    """Choose, create, lock and validate the run directory of `cfg`, and set cfg.run.dir to its absolute path.

    Raises ConfigError if it contains another run, is in use, or cannot be written; it then writes no run files.
    """
    _check_source(cfg)
    path = _requested_path(cfg, recipe)
    with reported_by_path(path):
        path, created = (path, make(path)) if cfg.run.dir is not None else make_new(path)
        names = _names(path)
        lock = _lock(path)
    if names:
        try:
            stored = _stored_config(path)
            _validate_resume(path, stored, cfg, recipe)
            with reported_by_path(path):
                take_lease(
                    path
                ).release()  # fails if rank 0 of another run holds it; this run's rank 0 acquires it again
                stored.restore(path)
        except ConfigError:
            _unlock(lock)
            raise
    cfg.run.dir = str(path)
    return RunDirectory(path, fresh=not names, created=created, lock=lock, attempt=_next_attempt(path))


def check_run_directory(cfg: RecipeConfig, recipe: str) -> RunDirectory:
    """Return what `open_run_directory` would, without creating or locking it: TIME-HEX is the name of a new directory.

    Raises ConfigError if it would, as far as can be checked here: not whether a folder of the cluster can be written.
    """
    resume = cfg.run.resume
    if not (cfg.cluster.only_renders and os.path.isabs(resume) and not os.path.exists(resume)):
        _check_source(cfg)
    path = _requested_path(cfg, recipe)
    shown = path if cfg.run.dir is not None else path / "TIME-HEX"
    if cfg.cluster.only_renders and not shown.exists():
        return RunDirectory(shown, fresh=True, created=[], lock=None, attempt=0)
    with reported_by_path(path):
        check_writable(path)
        names = _names(path) if cfg.run.dir is not None and path.is_dir() else set()
        if (path / LOCK).exists():
            _unlock(_lock(path))
    if names:
        _validate_resume(path, _stored_config(path), cfg, recipe)
    return RunDirectory(shown, fresh=not names, created=[], lock=None, attempt=_next_attempt(shown))


def _requested_path(cfg: RecipeConfig, recipe: str) -> Path:
    """Return the path of run.dir, or without it the folder in which to create a run directory."""
    if cfg.run.dir is None:
        return Path.cwd() / "outputs" / recipe
    return Path(os.path.expanduser(cfg.run.dir)).absolute()


def _names(path: Path) -> set[str]:
    """Return the names of entries other than locks and temporaries. Raises ConfigError if they are not of a run."""
    ignored = {LOCK, LEASE, *(left.name for left in temporaries(path))}
    names = {entry.name for entry in path.iterdir()} - ignored
    if names and CONFIG not in names and intact_copy(path) is None:
        lost = f" ({CONFIG} is missing, and no copy of it is intact)" if names & {LOGS, CHECKPOINTS} else ""
        raise ConfigError(f"run.dir={path}: contains files, but no run{lost}; choose another run.dir")
    return names


@dataclass(frozen=True)
class _StoredConfig:
    """The frozen config of a run's previous start."""

    text: str
    copy: Path | None = None
    """Source of the text if config.yaml is missing or damaged."""
    why: str = ""

    def restore(self, path: Path) -> None:
        """Replace config.yaml with the copy, keeping a damaged one under another name."""
        if self.copy is None:
            return
        if os.path.lexists(path / CONFIG):
            set_aside(path / CONFIG, "damaged")
        atomic_write(path / CONFIG, self.text)
        print_text(f"{path / CONFIG}: restored from {self.copy}: {self.why}", file=sys.stderr)


def _stored_config(path: Path) -> _StoredConfig:
    """Return the contents of config.yaml or of its newest intact copy. Raises ConfigError if there is neither."""
    try:
        return _StoredConfig(read_intact(path / CONFIG))
    except ConfigError as error:
        copy = intact_copy(path)
        if copy is None:
            raise ConfigError(f"run.dir={path}: {error}; restore it, or choose another run.dir") from error
        reason = "missing" if not os.path.lexists(path / CONFIG) else "it was damaged or edited by hand"
        return _StoredConfig(copy[1], copy[0], reason)


@contextmanager
def exclude_starts(path: Path) -> Iterator[None]:
    """Exclude every start from a run directory while a tool changes it.

    Raises ConfigError if a run uses it, or if it belongs to a job that has not ended or whose state is unknown.
    """
    advice = "wait for it to finish"
    lock, lease = _lock(path, advice), None
    try:
        if lock is None and not (path / RESULT).exists():
            raise ConfigError(
                f"run.dir={path}: cannot determine whether its run has ended: there are no locks and no {RESULT}"
            )
        if doubt := _reject_live_job(path, advice):
            raise ConfigError(
                f"run.dir={path}: {doubt}; retry on a login node of its cluster, or remove {path / JOB_ID} if the job "
                "has ended"
            )
        lease = take_lease(path)
        yield
    finally:
        if lease is not None:
            lease.release()
        _unlock(lock)


def _next_attempt(path: Path) -> int:
    last = 0 if os.path.lexists(path / RESULT) else -1  # a result.json without logs counts as attempt 0
    return max(numbers_in(path / LOGS, "attempt_"), default=last) + 1


def _lock(path: Path, advice: str = "choose another run.dir") -> int | None:
    """Lock the directory until this process ends and return the descriptor; None if the file system has no locks."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        has_locks = take_lock(descriptor)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"run.dir={path}: is in use by another run; {advice}") from error
    if not has_locks:
        os.close(descriptor)
        print_text(f"{path}: no locks on this file system; do not start this run twice at once", file=sys.stderr)
        return None
    if os.fstat(descriptor).st_nlink == 0:
        os.close(descriptor)
        raise ConfigError(f"run.dir={path}: was just removed by another start; run the command again")
    return descriptor


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _reject_live_job(path: Path, advice: str = "choose another run.dir") -> str | None:
    """Return why the state of the directory's job is unknown; None if the job has ended, or if there is none.

    Raises ConfigError if a job that was submitted for this directory is pending or running.
    """
    try:
        job = job_of(path, search=True)
    except ConfigError as error:
        return f"was submitted, but it is unknown whether the cluster accepted the job ({error})"
    if job is None:
        return None
    state = jobs_by_id([job]).get(job)
    if state is None or state.doubt:
        reason = state.doubt if state else "no cluster.kind uses such ids"
        return f"belongs to job {job}, which may still run: {reason}"
    if not state.over:
        raise ConfigError(
            f"run.dir={path}: belongs to job {job}, which is {state.reported}; {advice}, or end the job with "
            f"{stop_command(job)}"
        )
    return None


def _validate_resume(path: Path, stored: _StoredConfig, cfg: RecipeConfig, recipe: str) -> None:
    """Raise ConfigError unless the run in `path` may continue with `cfg`."""
    if not cfg.cluster.only_renders and (doubt := _reject_live_job(path)):
        print_text(f"{path}: {doubt}; do not start this run twice at once", file=sys.stderr)
    checkpoints = path / CHECKPOINTS
    if checkpoints.is_symlink():
        raise ConfigError(
            f"{checkpoints}: is a link, but what a run writes and removes must be in its own folders; replace the link "
            "by the folder that it points to, or choose another run.dir"
        )
    if os.path.lexists(checkpoints) and not checkpoints.is_dir():
        raise ConfigError(f"{checkpoints}: is not a directory; move it away, or restore the checkpoints")
    owners = _recipes_of(path)
    if owners and recipe not in owners:
        raise ConfigError(
            f"run.dir={path}: contains a run of the recipe {owners[0]}, not {recipe}; choose another run.dir"
        )
    # torchrun restarts its ranks with the same command line: the checkpoints are then those of this start.
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if cfg.run.resume == "never" and not is_restart:
        if checkpoint_folders(checkpoints):
            raise ConfigError(
                f"run.resume=never: run.dir={path} contains checkpoints, which would mix with those of a new run; "
                "choose another run.dir, or remove it"
            )
        return
    try:
        from_yaml(stored.text, type(cfg))
    except ConfigError as error:
        quoted = "; ".join(shorten(problem, _LONGEST, placeholder="...") for problem in error.problems[:2])
        more = f"; and {len(error.problems) - 2} more" if len(error.problems) > 2 else ""
        raise ConfigError(
            f"run.dir={path}: its {CONFIG} does not fit this recipe ({quoted}{more}); choose another run.dir"
        ) from error
    _check_second_start(path, cfg)
    check_changes(stored.text, cfg, f"run.dir={path}")


def _recipes_of(path: Path) -> list[str]:
    """Return the recipes recorded in environment.json and its copies; print a message if it is damaged."""
    files = [path / RECORD, *sorted((path / LOGS).glob(f"attempt_*/{RECORD}"))]
    owners = [read_json(file).get("recipe") for file in files]
    if owners[0] is None and os.path.lexists(path / LOGS):
        print_text(f"{files[0]}: missing or damaged; writing a new one", file=sys.stderr)
    return list(dict.fromkeys(owner for owner in owners if isinstance(owner, str)))


def check_changes(before: str, cfg: RecipeConfig, origin: str) -> None:
    """Compare `cfg` with the config that a run began with, and print the differences.

    Args:
        before: Contents of its config.yaml.
        origin: Location of that config, for messages.

    Raises:
        ConfigError: Names each changed key that affects what the run computes (batches, data, seed, model) and is not
            in run.accept_changes.
    """
    try:
        stored = _flat(load_yaml(before))
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: its config cannot be read: {error}") from error
    then = {**_defaults(cfg), **stored}
    now = _flat(load_yaml(to_yaml(cfg)))
    changed = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key) and key not in _PER_START]
    raise_all(
        [
            f"{key}={_short(now.get(key))}: the run in {origin} began with {_short(then.get(key))}; restore that "
            f"value, choose another run.dir, or accept the change and continue: run.accept_changes=[{key}]"
            for key in changed
            if is_defining(key) and not accepts(cfg.run.accept_changes, key)
        ]
    )
    if changed:
        differences = "; ".join(f"{key}: {_short(then.get(key))} -> {_short(now.get(key))}" for key in changed)
        print_text(f"{origin} resumes with changed values: {differences}", file=sys.stderr)


def _short(value: Any) -> str:
    """Return a value on one line, and only the beginning of a long one, such as a chat template."""
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _defaults(cfg: RecipeConfig) -> dict[str, Any]:
    """Return the defaults of all keys of `cfg`, for stored configs written before a key existed."""
    sections = field_values(cfg)
    sources = cfg.data.sources if isinstance(cfg.data, MixtureDataConfig) else {}
    sections |= {f"data.sources.{name}": source for name, source in sources.items()}
    found: dict[str, Any] = {}
    for name, values in sections.items():
        for field in fields(values):
            if field.default is not MISSING:
                found[f"{name}.{field.name}"] = field.default
            elif field.default_factory is not MISSING:
                found[f"{name}.{field.name}"] = field.default_factory()
    found.pop("data.sources", None)  # compared per source
    found |= {f"{name}.kind": kind for name, kind in WITHOUT_KIND.items() if name in sections}
    return json.loads(json.dumps(found, default=asdict))  # the types that YAML loads, such as lists for tuples


def _check_source(cfg: RecipeConfig) -> None:
    """Compare `cfg` with the config stored in the checkpoint that it names, if any. Raises ConfigError."""
    evaluation, peft = section(cfg, EvaluationConfig), section(cfg, PeftConfig)
    if evaluation is not None and evaluation.checkpoint is not None and peft is not None:
        _check_adapters(peft, evaluation.checkpoint)
    if cfg.run.resume in ("auto", "never"):
        return
    file = Path(cfg.run.resume).expanduser() / CHECKPOINT_STATE
    try:
        before = load_json(file)["config"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"run.resume={cfg.run.resume}: not a complete checkpoint: {file}: {error!r}") from error
    if before is not None:
        check_changes(before, cfg, f"run.resume={cfg.run.resume}")


def _check_second_start(path: Path, cfg: RecipeConfig) -> None:
    """Reject a changed command that would continue an earlier start from the checkpoint in run.resume, and ignore it.

    Checkpoints that this run directory saved since it started from run.resume take precedence over it, for requeues and
    for repeated commands. Raises ConfigError.
    """
    if cfg.run.resume in ("auto", "never"):
        return
    now = _flat(load_yaml(to_yaml(cfg)))
    for file in (folder / CHECKPOINT_STATE for folder in checkpoint_folders(path / CHECKPOINTS)):
        try:
            then = {**_defaults(cfg), **_flat(load_yaml(load_json(file)["config"]))}
        except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
            continue  # the search for checkpoints reports the problem
        if not is_same_checkpoint(then.get("run.resume"), cfg.run.resume):
            continue
        changed = [
            key
            for key in sorted({*then, *now})
            if then.get(key) != now.get(key) and not key.startswith((*_WITHOUT_EFFECT, *_PER_START))
        ]
        if changed:
            differences = "; ".join(f"{key}: {_short(then.get(key))} -> {_short(now.get(key))}" for key in changed)
            raise ConfigError(
                f"run.resume={cfg.run.resume}: run.dir={path} already started from it, with other values "
                f"({differences}), and would continue from {file.parent.name}; choose another run.dir to start from "
                "this checkpoint again, or set run.resume=auto to continue with the new values"
            )


def _check_adapters(peft: PeftConfig, checkpoint: str) -> None:
    """Compare the adapter settings that the stored weights do not determine: scaling and variant."""
    try:
        path = Path(checkpoint).expanduser()
        of_run = path / CONFIG
        stored = of_run.read_text("utf-8") if of_run.is_file() else load_json(path / CHECKPOINT_STATE)["config"]
        then = _flat({"peft": asdict(PeftConfig()), **load_yaml(stored)})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
        return  # loading the checkpoint reports the problem
    now = _flat({"peft": asdict(peft)})
    raise_all(
        [
            f"{key}={now[key]}: evaluation.checkpoint={checkpoint} was trained with {then[key]}; set {key}={then[key]}"
            for key in now
            if is_defining(key) and now[key] != then[key]
        ]
    )


def _flat(sections: dict[str, Any]) -> dict[str, Any]:
    """Return the values by dotted key, without top-level scalars (the schema version)."""
    kept = {name: values for name, values in sections.items() if isinstance(values, dict)}
    flat = {f"{name}.{key}": value for name, values in kept.items() for key, value in values.items()}
    for name, source in flat.pop("data.sources", {}).items():
        flat |= {f"data.sources.{name}.{key}": value for key, value in source.items()}
    return flat
