"""The training section of a model card, rendered from the files of the run directory; secrets are left out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from components.config.metrics_log import MetricsLog
from components.config.safe_yaml import load_yaml
from components.config.secrets import secret_problems
from components.protocol.safe_json import read_regular

VERSIONS = ("meshbook", "torch", "transformers", "datasets", "safetensors")


def render_model_card(run_dir: Path | str, state: Mapping[str, Any], mesh: str, *, averaged: bool = False) -> str:
    """Return Markdown: a table of the settings and results of the training, and the command line.

    Values that are missing from the files get no row. A value that looks like a secret is replaced by a note.

    Args:
        run_dir: Folder with config.yaml, environment.json and metrics.jsonl, all optional.
        state: Training state when the weights were saved: step, tokens, skipped, first_loss, last_loss, optimizer, and
            the dtype of the parameters. Evaluations after that step are left out.
        mesh: Description of the mesh that the weights were trained on.
        averaged: Whether the weights are the run's moving average.
    """
    run_dir = Path(run_dir)
    config, record = _read(run_dir / "config.yaml"), _read(run_dir / "environment.json")
    rows = {
        **_of_config(config, state.get("optimizer"), state.get("dtype")),
        "weights": f"exponential moving average, decay {_get(config, 'training', 'ema_decay')}" if averaged else None,
        **_of_state(state, config),
        **_of_evaluations(run_dir / "metrics.jsonl", state.get("step")),
        "mesh": mesh,
        **_of_record(record),
    }
    lines = ["## Training", "", "| | |", "|---|---|"]
    lines += [f"| {key} | {_cell(key, value)} |" for key, value in rows.items() if value not in (None, "")]
    command = record.get("command")
    if command:
        lines += ["", "Command:", "", *(f"    {line}" for line in _without_secrets("command", command).splitlines())]
    return "\n".join(lines)


def _of_config(config: dict[str, Any], optimizer_class: str | None, stored_dtype: str | None) -> dict[str, Any]:
    model, data, training, optimizer = (_get(config, name) or {} for name in ("model", "data", "training", "optimizer"))
    base = model.get("path") or f"none: {_get(model, 'config', 'model_type')} from scratch"
    if model.get("path") and model.get("init") == "random":
        base = f"architecture of {base}, weights from scratch"
    source = [data.get("kind"), data.get("path"), data.get("subset"), data.get("split"), data.get("revision")]
    sizes = [training.get("global_batch_size"), training.get("seq_len")]
    objective = _get(config, "objective") or {}
    kind = str(objective.get("kind") or "")
    unit = {"classification": "texts", "kto": "answers"}.get(kind, "pairs" if "chosen_column" in data else "sequences")
    unit = "packed rows" if data.get("pack") else unit
    settings = [f"{key} {value}" for key, value in objective.items() if key != "kind" and value not in (None, 0)]
    teacher = _get(config, "teacher") or {}
    stored = teacher.get("stored") and f"its most likely tokens, stored in {teacher['stored']}"
    optimizer_parts = [optimizer_class] if optimizer_class else []
    optimizer_parts += [
        f"{key} {optimizer[key]}" for key in ("lr", "schedule", "warmup_steps", "weight_decay") if key in optimizer
    ]
    return {
        "base model": " at revision ".join(str(part) for part in (base, model.get("revision")) if part),
        "teacher": " at revision ".join(map(str, filter(None, (teacher.get("path"), teacher.get("revision")))))
        or stored,
        "objective": ", ".join(map(str, filter(None, (kind, *settings)))),
        "data": ", ".join(str(part) for part in source if part),
        "batch": None
        if None in sizes
        else f"{sizes[0]} {unit} per step, up to {sizes[1]} tokens {'per answer' if unit == 'pairs' else 'each'}",
        "optimizer": ", ".join(optimizer_parts),
        "dtypes": f"parameters {stored_dtype or model.get('dtype')}, compute {model.get('compute_dtype')}"
        if model
        else None,
        "quantization-aware training": _quantization(model),
        "seed": _get(config, "run", "seed"),
    }


def _quantization(model: dict[str, Any]) -> str | None:
    """Return torchao's config that the weights were trained for; None without model.qat."""
    groups = model.get("qat_group_size")
    return {
        "int8_int4": "quantize with torchao's Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, "
        f"weight_granularity=PerGroup({groups}))",
        "int4_weight_only": f"quantize with torchao's Int4WeightOnlyConfig(group_size={groups})",
    }.get(str(model.get("qat")))


def _of_state(state: Mapping[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    max_steps, epochs = (_get(config, "training", key) for key in ("max_steps", "epochs"))
    counted = "input" if _get(config, "objective", "kind") in ("classification", "reward") else "target"
    step, tokens = state.get("step"), state.get("tokens")
    first, last = state.get("first_loss"), state.get("last_loss")
    planned = f" of {max_steps}" if max_steps is not None else ""
    planned = f" of a run of {epochs} epochs" if epochs is not None else planned
    return {
        "optimizer steps": f"{step}{planned}" if step is not None else None,
        f"{counted} tokens": f"{tokens:,}" if tokens is not None else None,
        "loss": f"{_loss_text(first)} in the first step, {_loss_text(last)} in the last"
        if first is not None and last is not None
        else None,
        "skipped updates": state.get("skipped") or None,
    }


def _of_evaluations(metrics: Path, step: int | None) -> dict[str, Any]:
    """Return the first and the last held-out loss up to the step of the weights: the run may have continued."""
    lines: list[dict[str, Any]] = []
    with suppress(OSError):
        lines = MetricsLog(metrics.parent).read()
    held_out = [each for each in lines if "eval_loss" in each and (step is None or each["step"] <= step)]
    losses = [
        f"{_loss_text(each['eval_loss'])} after {each['step']} steps" for each in held_out[:1] + held_out[1:][-1:]
    ]
    return {"held-out loss": ", ".join(losses)}


def _loss_text(loss: float) -> str:
    return f"{loss:.4f}" if abs(loss) >= 0.1 or loss == 0 else f"{loss:.4g}"


def _of_record(record: dict[str, Any]) -> dict[str, Any]:
    versions, git = record.get("versions") or {}, record.get("git") or {}
    gpus = record.get("gpus") or []
    changed = " with uncommitted changes" if git.get("dirty") else ""
    return {
        "recipe": record.get("recipe"),
        "started": record.get("started"),
        "devices": ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or None,
        "versions": ", ".join(f"{name} {versions[name]}" for name in VERSIONS if versions.get(name)),
        "git commit": f"{git['commit']}{changed}" if git.get("commit") else None,
    }


def _cell(key: str, value: Any) -> str:
    return " ".join(_without_secrets(key, str(value)).split()).replace("|", "\\|")


def _without_secrets(key: str, text: str) -> str:
    """Return `text`, or a note in its place if it looks like a secret."""
    return "left out: it looks like it contains a secret" if secret_problems({key: text}) else text


def _get(values: Any, *keys: str) -> Any:
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _read(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file; empty if the file is missing or damaged."""
    try:
        values = load_yaml(read_regular(path).decode())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}
