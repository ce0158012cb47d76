"""What a path given to scripts/chat.py selects: a checkpoint of a run, an export, or an adapter. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.checkpoint.manifest import Manifest, ManifestError, newest_complete
from components.config.compose.frozen import read_optional_section, read_section
from components.config.model_files import GGUF_BASE, check_weights, locate
from components.config.schema import ModelConfig, ObjectiveConfig, PeftConfig, RunConfig, ScoreConfig, WeightInit
from components.config.schema.data import DataConfig
from components.config.schema.parallelism import ParallelismConfig
from components.config.schema.training import EvalWeights, TrainingConfig
from components.protocol.errors import ConfigError, raise_all
from components.protocol.run_files import CHECKPOINT_MANIFEST, CONFIG, checkpoint_step
from components.protocol.safe_parsing import load_json

EXPORT_CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
"""Files that make a folder an export or an adapter."""
EXPORT, ADAPTER = "export", "adapter"
"""Folders of a run directory that hold them."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SCORES = "has a score head, which generates no text; use scripts/score.py for the export of a reward model"


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """A checkpoint, and the sections of its run's config that its model needs."""

    path: Path
    step: int
    seed: int
    model: ModelConfig
    peft: PeftConfig
    parallelism: ParallelismConfig
    averaged: bool
    """Whether the run evaluates and generates with the moving average of the weights."""
    system: str = ""
    """System message of the run's data; empty: none."""
    notes: list[str] = field(default_factory=list)
    """Newer checkpoints that were skipped, and why."""


@dataclass(frozen=True, slots=True)
class ExportSource:
    """A folder in the format of transformers."""

    path: Path
    model: ModelConfig
    system: str = ""
    """System message of the data of the run that wrote it; empty: none."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """A folder in the format of PEFT."""

    path: Path
    model: ModelConfig
    """The base model that the adapter is applied to."""
    system: str = ""
    """System message of the data of the run that wrote it; empty: none."""


ChatSource = CheckpointSource | ExportSource | AdapterSource


def find_source(given: Path, *, trust_remote_code: bool = False) -> ChatSource:
    """Return what a path selects, after checking its files by name, size and content of the configs.

    Of a run directory it is the newest complete checkpoint, or the export if that is not older, or the adapter if there
    is nothing else.

    Args:
        given: Run directory, checkpoint, export or adapter.
        trust_remote_code: Whether Python code from the model's repository may run.

    Raises:
        ConfigError: The path is none of these, the files are incomplete, or the model generates no text.
    """
    path = given.expanduser().resolve()
    if not path.is_dir():
        raise ConfigError(f"{given}: no such folder; give a run directory, a checkpoint, an export or an adapter")
    if (path / ADAPTER_CONFIG).is_file():
        return _adapter(path, trust_remote_code)
    if (path / CHECKPOINT_MANIFEST).is_file() or checkpoint_step(path.name) is not None:
        return _checkpoint(path, trust_remote_code)
    if (path / EXPORT_CONFIG).is_file():
        return _export(path, trust_remote_code)
    if (path / CONFIG).is_file():
        return _of_run(path, trust_remote_code)
    raise ConfigError(
        f"{given}: neither a run directory (no {CONFIG}), a checkpoint (no {CHECKPOINT_MANIFEST}), an export (no "
        f"{EXPORT_CONFIG}) nor an adapter (no {ADAPTER_CONFIG}); give one of them"
    )


def _of_run(run_dir: Path, trusts: bool) -> ChatSource:
    export, adapter = run_dir / EXPORT, run_dir / ADAPTER
    exported = _written(export / EXPORT_CONFIG)
    try:
        checkpoint, notes = newest_complete(run_dir)
    except ConfigError:
        if exported is None and (adapter / ADAPTER_CONFIG).is_file():
            return _adapter(adapter, trusts)
        if exported is None:
            raise
        return _export(export, trusts)
    if exported is not None and exported >= (_written(checkpoint / CHECKPOINT_MANIFEST) or 0):
        return _export(export, trusts)
    return _checkpoint(checkpoint, trusts, notes)


def _written(file: Path) -> int | None:
    """Return when a file was written, in nanoseconds; None if there is none."""
    return file.stat().st_mtime_ns if file.is_file() else None


def _checkpoint(path: Path, trusts: bool, notes: Sequence[str] = ()) -> CheckpointSource:
    try:
        manifest = Manifest.read(path)
        problems = manifest.check_sizes(path)
    except ManifestError as error:
        problems = [str(error)]
    if problems:
        raise ConfigError(f"{path}: not a complete checkpoint: {'; '.join(problems)}; give another one")
    file = path.parent.parent / CONFIG
    if isinstance(read_optional_section(file, "objective", ObjectiveConfig), ScoreConfig):
        raise ConfigError(f"{path}: {SCORES}")
    model, training = read_section(file, "model", ModelConfig), read_section(file, "training", TrainingConfig)
    if model.trust_remote_code and not trusts:
        raise ConfigError(
            f"{path}: the model {model.path} runs Python code from its repository; read that code, then add "
            "--trust-remote-code"
        )
    peft = read_optional_section(file, "peft", PeftConfig) or PeftConfig()
    if model.path is not None:
        locate(model.path)
        raise_all(check_weights(model.path) if peft.adapts and model.init == WeightInit.pretrained else [])
    return CheckpointSource(
        path=path,
        step=manifest.step,
        seed=read_section(file, "run", RunConfig).seed,
        model=model,
        peft=peft,
        parallelism=read_section(file, "parallelism", ParallelismConfig),
        averaged=training.ema_decay is not None and training.eval_weights is not EvalWeights.trained,
        system=_system_message(file),
        notes=list(notes),
    )


def _export(path: Path, trusts: bool) -> ExportSource:
    config = _read_object(path / EXPORT_CONFIG)
    architectures = config.get("architectures") or [""]
    if str(architectures[0]).endswith("ForSequenceClassification"):
        raise ConfigError(f"{path}: {SCORES}")
    raise_all(check_weights(str(path), "RUN"))
    return ExportSource(
        path, ModelConfig(path=str(path), trust_remote_code=trusts), _system_message(path.parent / CONFIG)
    )


def _adapter(path: Path, trusts: bool) -> AdapterSource:
    config = _read_object(path / ADAPTER_CONFIG)
    base, task = config.get("base_model_name_or_path"), config.get("task_type")
    if task == "SEQ_CLS":
        raise ConfigError(f"{path}: {SCORES}")
    if not isinstance(base, str) or not base:
        raise ConfigError(
            f"{path}: base_model_name_or_path in {ADAPTER_CONFIG} is {base!r}, not the model that the adapter was "
            "trained on; give the run directory, a checkpoint or the merged export instead"
        )
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise ConfigError(f"{path}: the adapter has no weights ({ADAPTER_WEIGHTS}); give a complete one")
    base = base.removesuffix(GGUF_BASE)
    named = f"base_model_name_or_path in {path / ADAPTER_CONFIG}"
    locate(base, named)
    raise_all(check_weights(base, named))
    revision = config.get("revision")
    model = ModelConfig(path=base, revision=str(revision) if revision else None, trust_remote_code=trusts)
    return AdapterSource(path, model, _system_message(path.parent / CONFIG))


def _system_message(file: Path) -> str:
    """Return the system message that the data of a run adds to its conversations; empty: none, or not from a run."""
    data = read_optional_section(file, "data", DataConfig) if file.is_file() else None
    return getattr(data, "system_prompt", None) or ""


def _read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError."""
    try:
        values = load_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}; give a complete folder") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: must hold an object of keys; give a complete folder")
    return values
