"""The start banner of a run, and its end: result.json, summary, peak memory, lost work, plots, and model card.

Restarts lose work: steps that are taken again, and the time until training goes on.
"""

from __future__ import annotations

import os
import platform
import resource
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table

from components.config.schema.parallelism import MeshShape, describe_processes
from components.config.stored_run import MetricsLog, has_rewards
from components.json_collectives import all_gather_json
from components.presentation import (
    MISSING,
    TARGET_TOKEN,
    expert_figure,
    has_matplotlib,
    loss_figure,
    reward_figure,
    save_figure,
)
from components.protocol.run_files import (
    LOGS,
    atomic_write_json,
    attempt_logs,
    disk_errors_named,
    numbers_in,
    read_json,
)
from components.protocol.safe_parsing import load_yaml, read_regular
from components.protocol.secrets import secret_problems

_PROGRESS = "progress.json"
"""File in the logs of an attempt: when it began and took its first step, and what it takes again."""
_VERSIONS = ("meshbook", "torch", "transformers", "datasets", "safetensors")
_UPDATE_SECONDS = 60.0
"""Minimum time between two plots during a run."""
_LONGEST_SUBJECT = 14
"""Maximum number of characters of a note's subject, which is the name of its row; "note" is that of other notes."""


@dataclass(kw_only=True, slots=True)
class BannerFacts:
    """Contents of the banner; coordinates, device and bytes are those of this rank."""

    mesh: MeshShape
    """Degrees of the axes."""
    coordinates: str
    """Mesh coordinates of this rank."""
    device: torch.device
    """Device of this rank."""
    batch: str
    """Batch arithmetic as a formula."""
    model: str
    """Name, number of parameters, dtypes."""
    local_bytes: int
    """Bytes of this rank's parameter shards."""
    groups: list[str] = field(default_factory=list)
    """One line for each process group of this rank, with its purpose."""
    notes: list[Any] = field(default_factory=list)
    """Hints and warnings about the run: (subject, text), or "subject: text". None and empty ones are left out."""


def print_banner(console: Console, facts: BannerFacts) -> None:
    """Gather the ranks' values and print the banner on `console`; a collective."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    ranks = all_gather_json([socket.gethostname(), local_rank, str(facts.device), facts.coordinates, facts.local_bytes])
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(facts, len(ranks) == 1):
        table.add_row(name, text)
    console.print(table)
    if len(ranks) == 1:
        return
    rank_table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("rank", "host", "local rank", "device", "mesh coordinates", "parameter bytes"):
        rank_table.add_column(column, no_wrap=True)
    for rank, (host, local_rank, device, coordinates, local_bytes) in enumerate(ranks):
        if rank < 16 or rank == len(ranks) - 1:
            rank_table.add_row(str(rank), host, local_rank, device, coordinates, f"{local_bytes:,}")
        elif rank == 16:
            rank_table.add_row("...", *[""] * 5)
    console.print(rank_table)


def _rows(facts: BannerFacts, is_alone: bool) -> list[tuple[str, str]]:
    packages = ("torch", "transformers", "meshbook")
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    rows = [
        ("versions", f"python {platform.python_version()}, {versions}"),
        ("mesh", facts.mesh.summary),
        *([("device", str(facts.device))] if is_alone else []),
        ("batch", facts.batch),
        ("model", facts.model),
    ]
    rows += [("" if index else "process groups", line) for index, line in enumerate(facts.groups)]
    return rows + [(name, text) for name, text in map(_note, filter(None, facts.notes)) if text]


def _note(note: Any) -> tuple[str, str]:
    """Return the subject of a note and its text."""
    if isinstance(note, tuple):
        return note[0], str(note[1])
    subject, _, text = str(note).partition(": ")
    return (subject, text) if text and len(subject) <= _LONGEST_SUBJECT else ("note", str(note))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return "not installed"


@dataclass(kw_only=True, slots=True)
class Result:
    """Contents of result.json."""

    status: str
    """ok, preempted or interrupted; the launcher writes invalid, failed, hung, corrupted, oom and cancelled."""
    steps: int
    """Completed optimizer steps."""
    mesh: str
    """Axes of the mesh with their degrees."""
    processes: int
    """Number of processes."""
    wall_seconds: float
    """Seconds from the start of the recipe's main to its end."""
    peak_memory_bytes: int
    """Peak memory of rank 0: allocated on a GPU, resident (RSS) on a CPU."""
    peak_reserved_bytes: int | None = None
    """Peak memory reserved by torch's CUDA allocator on rank 0, which is what runs out; None on a CPU."""
    compute_dtype: str | None = None
    """Dtype of matmuls, as chosen for the device; it limits how closely losses can agree between meshes."""
    tokens_per_second: float | None = None
    """Tokens per second over all ranks, without the first log interval."""
    counted_tokens: str = "target"
    """Tokens that are counted: target; input (all that the model reads) if only the last of a row is a target."""
    mfu: float | None = None
    """Model FLOPs utilization, without the first log interval; None if the peak FLOP/s or the FLOPs are unknown."""
    seconds_to_first_step: float | None = None
    """Seconds from the start of the recipe's main until the loop requests the second batch of this attempt, by when the
    first optimizer step has been launched."""
    data_wait_seconds: float = 0.0
    """Seconds that rank 0 waited for batches."""
    first_loss: float | None = None
    """Loss of the first step."""
    last_loss: float | None = None
    """Loss of the last step."""
    eval_loss: float | None = None
    """Held-out loss at the end."""
    eval_accuracy: float | None = None
    """Held-out accuracy at the end, in [0, 1]; None for objectives without accuracy."""
    tasks: dict[str, float] = field(default_factory=dict)
    """Scores of benchmark tasks (evaluation.tasks) at the end, by TASK/METRIC."""
    first_eval_loss: float | None = None
    """Held-out loss before the first step."""
    first_reward: float | None = None
    """Mean reward of the first step; None in a run without rewards, as the other rewards."""
    last_reward: float | None = None
    """Mean reward of the last step."""
    first_eval_reward: float | None = None
    """Held-out reward before the first step."""
    eval_reward: float | None = None
    """Held-out reward at the end."""
    stopped_early: bool = False
    """Evaluations stopped improving (training.early_stop_patience)."""
    skipped_steps: int = 0
    """Steps whose update was skipped because the gradients were not finite, or because of training.skip_spikes."""
    spikes: int = 0
    """Those of them that were spikes (training.skip_spikes)."""
    restarts: int = 0
    """Attempts of the run after the first."""
    lost_steps: int = 0
    """Steps taken again after restarts."""
    lost_seconds: float = 0.0
    """Seconds that the restarts took: from each checkpoint resumed from until a step was taken from there."""
    step_seconds: float | None = None
    """Seconds per optimizer step, without the first log interval."""
    planned: dict[str, Any] | None = None
    """Estimates of scripts/plan.py for this run: gpu, processes, peak_memory_bytes of the fullest rank, step_seconds.
    None if cluster.gpu is not set, or if a requeued run has fewer processes."""


def summary(result: Result, run_dir: Path) -> str:
    """Return the lines printed at the end of a run; each fits into 80 columns, except for long paths."""
    steps = f"{result.steps} step{'' if result.steps == 1 else 's'}"
    doing = f"{steps} on "
    if result.last_loss is None and not result.skipped_steps:  # nothing is trained
        evaluated = result.eval_loss is not None or result.eval_reward is not None or result.tasks
        doing = "evaluated on " if evaluated else ""
        doing = f"evaluated step {result.steps} on " if result.steps else doing
    first = f"{result.status}: {doing}{describe_processes(result.processes)} in {result.wall_seconds:.0f} s"
    parts = []
    if result.first_reward is not None and result.last_reward is not None:  # in place of the loss, which means nothing
        parts.append(f"reward {result.first_reward:.3f} to {result.last_reward:.3f}")
    elif result.first_loss is not None and result.last_loss is not None:
        parts.append(f"loss {_short(result.first_loss)} to {_short(result.last_loss)}")
    if result.eval_reward is not None:
        change = f"{result.first_eval_reward:.3f} to " if result.first_eval_reward is not None else ""
        parts.append(f"held-out reward {change}{result.eval_reward:.3f}")
    elif result.eval_loss is not None:
        before = result.first_eval_loss
        change = f"{_short(before)} to " if before is not None else ""
        share = f" ({(result.eval_loss - before) / before:+.0%})" if before else ""
        parts.append(f"held-out loss {change}{_short(result.eval_loss)}{share}")
    if result.tokens_per_second:  # with rewards, the targets of a step are the answers that it samples and trains on
        counted = f"{result.counted_tokens} tokens/s"
        counted = counted if result.last_reward is None else "answer tokens/s with sampling"
        parts.append(f"{result.tokens_per_second:,.0f} {counted}")
    if result.mfu is not None:
        parts.append(f"MFU {result.mfu:.1%}")
    if result.restarts:
        times = f"{result.restarts} restart{'' if result.restarts == 1 else 's'}"
        again = f"{result.lost_steps} step{'' if result.lost_steps == 1 else 's'} taken again"
        parts.append(f"{times}: {again}, {result.lost_seconds:,.0f} s lost")
    peak = f"peak memory {result.peak_memory_bytes / 2**30:.2f} GiB"
    if result.peak_reserved_bytes is not None:
        peak += f" allocated, {result.peak_reserved_bytes / 2**30:.2f} GiB reserved"
    parts.append(peak)
    return "\n".join([first, *(f"  {part}" for part in parts), f"  {run_dir}"])


def _short(loss: float) -> str:
    return f"{loss:.3f}" if abs(loss) >= 0.1 or loss == 0 else f"{loss:.3g}"


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: allocated on a GPU, resident (RSS) on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_reserved_bytes(device: torch.device) -> int | None:
    """Return the peak memory in bytes reserved by torch's CUDA allocator; None on a CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class LostWork:
    """Work lost over all attempts of a run."""

    restarts: int = 0
    """Number of attempts after the first."""
    steps: int = 0
    """Steps taken again, as far as earlier attempts had logged them."""
    seconds: float = 0.0
    """Seconds from each checkpoint that an attempt resumed from, or from the start of the run, until an attempt had
    taken a step from there: the steps taken again, the end of the earlier attempt, the queue and the start."""


def record_start(run_dir: Path, attempt: int, lost_steps: int, saved: float | None) -> None:
    """Record the start of an attempt in its logs.

    Args:
        run_dir: The run directory.
        attempt: Number of the attempt.
        lost_steps: Steps that the attempt takes again.
        saved: Seconds since the epoch at which its checkpoint was saved; None if it begins with the first step.
    """
    now = time.time()
    since = saved or read_json(attempt_logs(run_dir, 0) / _PROGRESS).get("since", now)
    _write(run_dir, attempt, {"since": since, "lost_steps": lost_steps})


def record_first_step(run_dir: Path, attempt: int) -> None:
    """Record that an attempt has taken its first step."""
    _write(run_dir, attempt, {"first_step": time.time()})


def lost_work(run_dir: Path) -> LostWork:
    """Return the work lost by the restarts of a run so far."""
    attempts = sorted(numbers_in(run_dir / LOGS, "attempt_"))
    files = [attempt_logs(run_dir, number) / _PROGRESS for number in attempts if number]
    restarts = [read_json(file) for file in files if file.is_file()]
    # A later attempt from the same checkpoint includes the time of an earlier one.
    seconds = {
        restart["since"]: restart["first_step"] - restart["since"] for restart in restarts if "first_step" in restart
    }
    steps = sum(restart.get("lost_steps", 0) for restart in restarts)
    return LostWork(len(restarts), steps, round(sum(seconds.values()), 1))


def _write(run_dir: Path, attempt: int, values: dict[str, float]) -> None:
    logs = attempt_logs(run_dir, attempt)
    if logs.is_dir():
        with disk_errors_named(logs / _PROGRESS):
            atomic_write_json(logs / _PROGRESS, {**read_json(logs / _PROGRESS), **values})


def render_model_card(run_dir: Path | str, state: Mapping[str, Any], mesh: str, *, averaged: bool = False) -> str:
    """Return Markdown: a table of the settings and results of the training, and the command line.

    Values that are missing from the files get no row. A value that looks like a secret is replaced by a note.

    Args:
        run_dir: Folder with config.yaml, environment.json and metrics.jsonl, all optional.
        state: Training state when the weights were saved: step, tokens, skipped, the first and last loss and reward,
            optimizer, and the dtype of the parameters. Evaluations after that step are left out.
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
    unit = "packed rows" if data.get("pack") else "answers" if "rollouts" in config else unit
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
    name = "loss" if state.get("last_reward") is None else "reward"
    first, last = state.get(f"first_{name}"), state.get(f"last_{name}")
    planned = f" of {max_steps}" if max_steps is not None else ""
    planned = f" of a run of {epochs} epochs" if epochs is not None else planned
    return {
        "optimizer steps": f"{step}{planned}" if step is not None else None,
        f"{counted} tokens": f"{tokens:,}" if tokens is not None else None,
        name: f"{_loss_text(first)} in the first step, {_loss_text(last)} in the last"
        if first is not None and last is not None
        else None,
        "skipped updates": state.get("skipped") or None,
    }


def _of_evaluations(metrics: Path, step: int | None) -> dict[str, Any]:
    """Return the first and last held-out loss or reward up to the step of the weights: the run may have continued."""
    lines: list[dict[str, Any]] = []
    with suppress(OSError):
        lines = MetricsLog(metrics.parent).read()
    name = "reward" if has_rewards(lines) else "loss"
    held_out = [line for line in lines if f"eval_{name}" in line and (step is None or line["step"] <= step)]
    values = [
        f"{_loss_text(each[f'eval_{name}'])} after {each['step']} steps" for each in held_out[:1] + held_out[1:][-1:]
    ]
    return {f"held-out {name}": ", ".join(values)}


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
        "versions": ", ".join(f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name)),
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


class RunPlot:
    """RUN_DIR/loss.png, or reward.png, and experts.png of a mixture; a thread redraws them during the run."""

    def __init__(self, run_dir: Path, title: str, read: Callable[[], list[dict[str, Any]]]) -> None:
        """Plot what `read` returns, the objects of metrics.jsonl; without a title the name of the run directory."""
        self._folder, self._title, self._read = run_dir, title or run_dir.name, read
        self.unit = TARGET_TOKEN
        """What a loss is a mean over; set by the first evaluation."""
        self._thread: threading.Thread | None = None
        self._next = 0.0  # time.monotonic() from which the next update may start

    def update(self) -> None:
        """Start a redraw in a thread, unless one is running or the last was less than _UPDATE_SECONDS ago."""
        now = time.monotonic()
        if now >= self._next and not (self._thread and self._thread.is_alive()):
            self._next = now + _UPDATE_SECONDS
            self._thread = threading.Thread(target=self._draw, name="plot", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait for a redraw that is running."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> str | None:
        """Draw the final plot; return why nothing was drawn, or None."""
        self.wait()
        return self._draw()

    def _draw(self) -> str | None:
        metrics = self._read()
        if not has_matplotlib():
            return f"no plot: {MISSING}"
        name, figure = "loss", loss_figure(metrics, self._title, self.unit)
        if has_rewards(metrics):
            name, figure = "reward", reward_figure(metrics, self._title)
        if figure is None:
            return f"no plot: no {name} was logged"
        save_figure(figure, self._folder / f"{name}.png")
        if (experts := expert_figure(metrics, self._title)) is not None:
            save_figure(experts, self._folder / "experts.png")
        return None
