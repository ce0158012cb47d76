"""Config changes of a resumed run: reported, or rejected if they would silently change what it computes."""

from __future__ import annotations

import json
import sys
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import yaml

from components.config.compose.frozen import to_yaml
from components.config.errors import ConfigError
from components.config.kinds import WITHOUT_KIND
from components.config.safe_yaml import load_yaml
from components.config.schema.checks import field_values, raise_all
from components.config.schema.data import MixtureDataConfig
from components.config.schema.peft import PeftConfig
from components.config.schema.recipes import RecipeConfig, section
from components.config.schema.run import accepts, is_defining, is_same_checkpoint
from components.config.schema.training import EvaluationConfig
from components.protocol.run_files import CHECKPOINTS, CONFIG
from components.protocol.safe_json import load_json
from components.terminal import print_text

_STATE = "state.json"
"""File of a checkpoint that contains the config it was saved with."""
_PER_START = ("run.dir", "run.name", "run.resume", "run.accept_changes")
"""Keys that may differ between starts without a message: they do not change what the run computes."""
_WITHOUT_EFFECT = ("checkpoint.", "cluster.", "logging.", "parallelism.", "training.micro_batch_size")
"""Keys, by their first characters, that do not change the loss curve."""


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
            f"{key}={now.get(key)}: the run in {origin} began with {then.get(key)}; restore that value, choose "
            f"another run.dir, or accept the change and continue: run.accept_changes=[{key}]"
            for key in changed
            if is_defining(key) and not accepts(cfg.run.accept_changes, key)
        ]
    )
    if changed:
        differences = "; ".join(f"{key}: {then.get(key)} -> {now.get(key)}" for key in changed)
        print_text(f"{origin} resumes with changed values: {differences}", file=sys.stderr)


def _defaults(cfg: RecipeConfig) -> dict[str, Any]:
    """Return the defaults of all keys of `cfg`, for stored configs written before a key existed."""
    sections = field_values(cfg)
    sources = cfg.data.sources if isinstance(cfg.data, MixtureDataConfig) else {}
    sections |= {f"data.sources.{name}": source for name, source in sources.items()}
    found: dict[str, Any] = {}
    for name, values in sections.items():
        for each in fields(values):
            if each.default is not MISSING:
                found[f"{name}.{each.name}"] = each.default
            elif each.default_factory is not MISSING:
                found[f"{name}.{each.name}"] = each.default_factory()
    found.pop("data.sources", None)  # compared per source
    found |= {f"{name}.kind": kind for name, kind in WITHOUT_KIND.items() if name in sections}
    return json.loads(json.dumps(found, default=asdict))  # the types that YAML loads, such as lists for tuples


def check_source(cfg: RecipeConfig) -> None:
    """Compare `cfg` with the config stored in the checkpoint that it names, if any. Raises ConfigError."""
    evaluation, peft = section(cfg, EvaluationConfig), section(cfg, PeftConfig)
    if evaluation is not None and evaluation.checkpoint is not None and peft is not None:
        _check_adapters(peft, evaluation.checkpoint)
    if cfg.run.resume in ("auto", "never"):
        return
    file = Path(cfg.run.resume).expanduser() / _STATE
    try:
        before = load_json(file)["config"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"run.resume={cfg.run.resume}: not a complete checkpoint: {file}: {error!r}") from error
    if before is not None:
        check_changes(before, cfg, f"run.resume={cfg.run.resume}")


def check_second_start(path: Path, cfg: RecipeConfig) -> None:
    """Reject a changed command that would continue an earlier start from the checkpoint in run.resume, and ignore it.

    Checkpoints that this run directory saved since it started from run.resume take precedence over it, for requeues and
    for repeated commands. Raises ConfigError.
    """
    if cfg.run.resume in ("auto", "never"):
        return
    now = _flat(load_yaml(to_yaml(cfg)))
    for file in sorted((path / CHECKPOINTS).glob(f"step_*/{_STATE}")):
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
            differences = "; ".join(f"{key}: {then.get(key)} -> {now.get(key)}" for key in changed)
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
        stored = of_run.read_text("utf-8") if of_run.is_file() else load_json(path / _STATE)["config"]
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
