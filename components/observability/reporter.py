"""Reporting of a run's numbers on rank 0: the console, RUN_DIR/metrics.jsonl, its plots and trackers."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from components.config.schema.run import LoggingConfig
from components.config.stored_run import MetricsLog
from components.observability.result import (
    Result,
    RunPlot,
    lost_work,
    record_first_step,
    record_start,
    summary,
)
from components.observability.trackers import Trackers, enabled_trackers
from components.presentation import TARGET_TOKEN, PlainConsole
from components.protocol.processes import ATTEMPT
from components.protocol.run_files import (
    FIRST_STEP,
    RECORD,
    RESULT,
    accept_start,
    atomic_write_json,
    create_marker,
    disk_errors_named,
    read_json,
)
from components.terminal import printable

_LOG_WIDTH = 10_000
"""Width of output that is not a terminal, where lines are not wrapped."""
_WIDEST_LINE = 120
"""Maximum length of a line of metrics; those that do not fit are in metrics.jsonl only."""


class _ReportedStep(Protocol):
    """Metrics of an optimizer step, implemented by `components.training.StepMetrics`."""

    @property
    def step(self) -> int: ...

    @property
    def loss(self) -> float: ...

    @property
    def grad_norm(self) -> float: ...

    @property
    def tokens(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def skipped(self) -> bool: ...
    @property
    def is_spike(self) -> bool: ...

    @property
    def seconds_at_peak(self) -> float: ...

    @property
    def others(self) -> Mapping[str, float]: ...

    @property
    def reward(self) -> float | None: ...


class _TrafficNumbers(Protocol):
    """Bytes and calls of one collective over a group in a step, as `components.training.step_cost.TrafficRow`."""

    @property
    def group(self) -> str: ...

    @property
    def purpose(self) -> str: ...

    @property
    def operation(self) -> str: ...

    @property
    def calls(self) -> int: ...

    @property
    def bytes(self) -> int: ...


@dataclass(slots=True)
class _Interval:
    """Totals over consecutive steps."""

    tokens: int = 0
    seconds: float = 0.0
    seconds_at_peak: float = 0.0
    steps: int = 0

    def add(self, step: _ReportedStep) -> None:
        """Add a step to the totals."""
        self.steps += 1
        self.tokens += step.tokens
        self.seconds += step.seconds
        self.seconds_at_peak += step.seconds_at_peak

    def __add__(self, other: _Interval) -> _Interval:
        return _Interval(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.seconds_at_peak + other.seconds_at_peak,
            self.steps + other.steps,
        )

    @property
    def speed(self) -> float:
        """Target tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization; None if it is unknown."""
        return self.seconds_at_peak / max(self.seconds, 1e-9) or None


class _Output(PlainConsole):
    """Console of the run's output."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """Print like rich; in a file or a pipe without the spaces that fill the last column of a table."""
        if self.is_terminal or not any(isinstance(each, Table) for each in objects):
            super().print(*objects, **settings)
            return
        with self.capture() as captured:
            super().print(*objects, **settings)
        lines = [line.rstrip() for line in captured.get().split("\n")]
        self.out("\n".join(lines), end="", highlight=False)


class _Count(MofNCompleteColumn):
    """Completed parts of an activity, "3/10"; empty if their number is unknown."""

    def render(self, task: Task) -> Text:
        """Return the text of the column."""
        return Text() if task.total is None else super().render(task)


def _loss_text(loss: float) -> str:
    """Return a loss with four decimals, or four digits if it is small, as a divergence may be."""
    return f"{loss:.4f}" if abs(loss) >= 0.1 or loss == 0 else f"{loss:.4g}"


class Reporter:
    """Log line per log step, progress bar on a terminal, JSON line per log step in metrics.jsonl.

    With `enabled=False` (all ranks but 0) every method does nothing, so that recipes need no `if`.
    """

    def __init__(
        self, logging: LoggingConfig, run_dir: str, enabled: bool, total_steps: int = 0, title: str = ""
    ) -> None:
        """Set up the console and, if enabled, the metrics file, the plot, the trackers and the progress bar.

        Args:
            total_steps: Length of the progress bar; 0: no progress bar, and nothing is trained.
            title: Title of the plots; empty: the name of the run directory.
        """
        self.enabled = enabled
        width = None if sys.stdout.isatty() else _LOG_WIDTH
        self.console = _Output(quiet=not enabled or logging.quiet, highlight=False, soft_wrap=True, width=width)
        self._run_dir = Path(run_dir)
        attempt = os.environ.get(ATTEMPT)
        self._attempt = None if attempt is None else int(attempt)
        self._metrics = MetricsLog(self._run_dir)
        self._plot = RunPlot(self._run_dir, title, self._metrics.read) if enabled and logging.plot else None
        self._trackers = Trackers(enabled_trackers(logging) if enabled else {}, run_dir, self.console)
        self._progress: Progress | None = None
        self._training: TaskID | None = None
        if enabled and logging.progress and not logging.quiet and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), _Count(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self.console, transient=True)
            if total_steps:
                self._training = self._progress.add_task("training", total=total_steps)
        self._trains = total_steps > 0
        self._since_log = _Interval()  # steps since the last log line
        self._intervals: list[_Interval] = []  # one per log line
        self._data_wait = 0.0  # seconds
        self._batches_requested = 0
        self._second_batch_at = 0.0  # time.perf_counter() at which the second batch was requested
        self._held: list[dict[str, Any]] | None = None  # lines before the first step; None: nothing is held back
        self._resumed_at = 0
        self._saved: float | None = None
        self._is_accepted = False

    def __enter__(self) -> Reporter:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._plot is not None:
            self._plot.wait()
        self._trackers.finish(failed=error is not None)

    def print(self, text: str) -> None:
        """Print text, with its lines broken between words if the terminal is narrower."""
        lines = printable(text).split("\n")  # before a secret is broken
        self.console.print("\n".join(part for line in lines for part in self._wrap(line)), markup=False)

    def _wrap(self, line: str) -> list[str]:
        if len(line) <= self.console.width:
            return [line]
        indent = " " * min(len(line) - len(line.lstrip()), self.console.width // 2)
        wrapper = textwrap.TextWrapper(self.console.width, "", indent, break_long_words=False, break_on_hyphens=False)
        return wrapper.wrap(line)

    def _print_metrics(self, *parts: tuple[int, str]) -> None:
        """Print the parts of a line that fit, in order; each has its priority, and those of priority 0 always fit.

        Numbers count as at least six characters, so that all lines of a run have the same parts.
        """
        chosen, room = set(), min(self.console.width, _WIDEST_LINE) + 2
        for index, (priority, text) in sorted(enumerate(parts), key=lambda each: each[1][0]):
            name, _, value = text.partition(" ")
            length = max(len(text) + 2, len(name) + 9 if value[-1:].isdigit() else 0)
            if priority == 0 or length <= room:
                chosen.add(index)
                room -= length
        self.print("  ".join(text for index, (_, text) in enumerate(parts) if index in chosen and text))

    def begin(self, step: int, total_steps: int | None = None, saved: float | None = None) -> None:
        """Record the start of this attempt in its logs. The record of the run stays as it is until `accept_start`.

        Args:
            step: Step that this attempt resumes from.
            total_steps: Length of the progress bar, if the checkpoint changed it; None: as before.
            saved: Seconds since the epoch at which this run saved the checkpoint that it resumes from; None: it does
                not resume from one.
        """
        if self.enabled:
            self._held, self._resumed_at, self._saved = [], step, saved
            if self._attempt is not None:
                record_start(self._run_dir, self._attempt, 0, saved)
        self._show_steps(completed=step, total=total_steps)

    def accept_start(self) -> None:
        """Replace the record of the run by that of this start, at its first step: it will not be refused any more."""
        if not self.enabled or self._is_accepted:
            return
        self._is_accepted = True
        held, self._held = self._held, None
        if self._attempt is not None:
            accept_start(self._run_dir, self._attempt)
        if held is None:
            return
        self.continue_from(self._resumed_at)
        for values in held:
            self._metrics.append(values)

    def continue_from(self, step: int) -> None:
        """Remove lines of later steps, which will run again, from metrics.jsonl, and report damaged lines."""
        if not self.enabled:
            return
        for problem in self._metrics.continue_from(step):
            self.print(problem)
        if self._attempt is not None:
            record_start(self._run_dir, self._attempt, self._metrics.dropped_steps, self._saved)

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Return `next(batches)`, and measure the time spent waiting for it."""
        began = time.perf_counter()
        self._batches_requested += 1
        if self._batches_requested == 2:
            self._second_batch_at = began
            self._mark_first_step()
        batch = next(batches)
        self._data_wait += time.perf_counter() - began
        return batch

    def _mark_first_step(self) -> None:
        """Create the marker file by which the requeue policy detects that this attempt completed a step."""
        logs = self._run_dir / "logs"
        if self.enabled and logs.is_dir():
            with disk_errors_named(logs / FIRST_STEP):
                create_marker(logs / FIRST_STEP)
            if self._attempt is not None:
                record_first_step(self._run_dir, self._attempt)

    def step(self, metrics: _ReportedStep, *, lr: float, tokens: int, every: int = 1) -> None:
        """Record the metrics of an optimizer step, and log them if the step is a multiple of `every`.

        Args:
            tokens: Target tokens since the start of the run, over all ranks.
        """
        self._since_log.add(metrics)
        self._show_steps(completed=metrics.step)
        if metrics.skipped:
            reason = "its loss or gradient norm is a spike" if metrics.is_spike else "gradients are not finite"
            self.print(f"step {metrics.step:>6}  update skipped: {reason}")
        if metrics.step % every:
            return
        interval, self._since_log = self._since_log, _Interval()
        self._intervals.append(interval)
        self._write(
            step=metrics.step,
            **({} if metrics.reward is None else {"reward": metrics.reward}),
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            lr=lr,
            tokens=tokens,
            tokens_per_second=round(interval.speed, 1),
            **({} if interval.mfu is None else {"mfu": round(interval.mfu, 4)}),
            **metrics.others,
        )
        # The divergence of a distillation without cross-entropy is its loss; a loss of 0 equals many metrics.
        left_out = metrics.loss if metrics.reward is None else None
        others = [f"{name} {value:.4g}" for name, value in metrics.others.items() if value != left_out]
        self._print_metrics(
            (0, f"step {metrics.step:>6}"),
            (0, f"loss {_loss_text(metrics.loss)}" if metrics.reward is None else f"reward {metrics.reward:.4f}"),
            (4, f"grad_norm {metrics.grad_norm:.4g}"),
            (6, f"lr {lr:.2g}"),
            (2, f"tokens/s {interval.speed:,.0f}"),
            *([] if interval.mfu is None else [(5, f"MFU {interval.mfu:.0%}")]),
            *(((1, 3)[number] if number < 2 else 7, text) for number, text in enumerate(others)),
            (8, f"tokens {tokens:,}"),
        )
        if self._plot is not None and self._held is None:
            self._plot.update()

    @contextmanager
    def status(self, activity: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """Show a progress bar of an activity other than training, such as an evaluation, during the context.

        Args:
            total: Number of parts of the activity; None: unknown.

        Yields a function that advances the bar by one part.
        """
        progress = self._progress
        if progress is None:
            yield lambda: None
            return
        task = progress.add_task(activity, total=total)
        progress.refresh()
        try:
            yield lambda: progress.advance(task)
        finally:
            progress.remove_task(task)

    def _show_steps(self, completed: int, total: int | None = None) -> None:
        """Update the bar of the optimizer steps; `total` None: as before."""
        if self._progress is not None and self._training is not None:
            self._progress.update(self._training, completed=completed, total=total)

    def evaluation(
        self,
        *,
        step: int,
        eval_loss: float,
        count: int,
        unit: str = TARGET_TOKEN,
        metrics: Mapping[str, float] | None = None,
        eval_reward: float | None = None,
    ) -> None:
        """Log the result of an evaluation on the held-out split.

        Args:
            count: Number of units (such as target tokens) evaluated; 0: nothing is logged.
            metrics: Metrics besides the loss or reward, by name; logged with the prefix `eval_`.
            eval_reward: Mean reward, which is logged in place of the loss; None: an evaluation of the loss.
        """
        if self._plot is not None:
            self._plot.unit = unit
        when = f"step {step:>6}" if step or self._trains else ""
        if not count:
            self.print(f"{when}  no evaluation: it was stopped, or the samples have no {unit}s")
            return
        name, value, text = "eval_loss", eval_loss, _loss_text(eval_loss)
        if eval_reward is not None:
            name, value, text = "eval_reward", eval_reward, f"{eval_reward:.4f}"
        others = {f"eval_{other}": mean for other, mean in (metrics or {}).items()}
        first = "eval_accuracy" if "eval_accuracy" in others else next(iter(others), "")
        self._write(step=step, **{name: value}, **others)
        self._print_metrics(
            (0, when),
            (0, f"{name} {text}"),
            *((1 if other == first else 3, f"{other} {mean:.4g}") for other, mean in others.items()),
            (2, f"over {count:,} held-out {unit}s"),
        )
        if self._plot is not None and self._held is None:
            self._plot.update()

    def tasks(self, *, step: int, metrics: Mapping[str, float], documents: Mapping[str, int | None]) -> None:
        """Log the scores of benchmark tasks, if there are any.

        Args:
            metrics: Values by TASK/METRIC.
            documents: Number of documents of each task to print, in order; None: not counted.
        """
        if not metrics:
            return
        self._write(step=step, **metrics)
        for task, count in documents.items():
            own = {name: value for name, value in metrics.items() if name.startswith(f"{task}/")}
            shown = "  ".join(f"{name.removeprefix(f'{task}/')} {value:.4f}" for name, value in own.items())
            over = "" if count is None else f"  over {count:,} documents"
            self.print(f"step {step:>6}  {task}  {shown}{over}")

    def traffic(self, rows: Sequence[_TrafficNumbers]) -> None:
        """Print a table of the collectives of one optimizer step."""
        if not rows:
            self.print("collectives of one optimizer step: none")
            return
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for column in ("group", "purpose", "operation"):
            table.add_column(column, overflow="fold")
        table.add_column("calls", justify="right")
        table.add_column("MiB", justify="right")
        for row in rows:
            table.add_row(row.group, row.purpose, row.operation, f"{row.calls:,}", f"{row.bytes / 2**20:,.3f}")
        self.print("\ncollectives of one optimizer step, input bytes of rank 0:")
        self.console.print(table)

    def generations(self, prompts: list[str], answers: list[str], *, when: str) -> None:
        """Print generated answers with their prompts; nothing if the generation was stopped (no answers)."""
        if not answers:
            return
        for prompt, answer in zip(prompts, answers, strict=True):
            self.print(f"\nprompt: {prompt}\nanswer {when}: {answer}")

    def finish(self, result: Result) -> None:
        """Add the throughput to `result`, write result.json and the plots, and print the summary."""
        if not self.enabled:
            return
        self.accept_start()
        if measured := self._intervals[1:]:  # the first interval includes compilation and warm-up
            total = sum(measured, _Interval())
            result.tokens_per_second = round(total.speed, 1)
            result.step_seconds = round(total.seconds / max(total.steps, 1), 6)
            result.mfu = None if total.mfu is None else round(total.mfu, 4)
        result.data_wait_seconds = round(self._data_wait, 6)
        if self._second_batch_at:
            started = time.perf_counter() - result.wall_seconds
            result.seconds_to_first_step = round(self._second_batch_at - started, 1)
        planned = read_json(self._run_dir / RECORD).get("planned")
        if (
            isinstance(planned, dict) and planned.get("processes") == result.processes
        ):  # not those of a requeued run that lost nodes
            result.planned = planned
        lost = lost_work(self._run_dir)
        result.restarts, result.lost_steps, result.lost_seconds = lost.restarts, lost.steps, lost.seconds
        atomic_write_json(self._run_dir / RESULT, asdict(result))
        if self._plot is not None and (why_not := self._plot.finish()):
            self.print(why_not)
        self.console.quiet = False  # the summary is all that logging.quiet prints
        self.print(summary(result, self._run_dir))

    def read(self) -> list[dict[str, Any]]:
        """Return the objects in metrics.jsonl."""
        return self._metrics.read()

    def _write(self, **values: Any) -> None:
        if not self.enabled:
            return
        if self._held is None:
            self._metrics.append(values)
        else:
            self._held.append(values)
        self._trackers.log(values)
