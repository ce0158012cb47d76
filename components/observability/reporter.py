"""Numbers on their way to a person: the terminal, RUN_DIR/metrics.jsonl and wandb. Only rank 0 reports."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from components.config.metrics_log import MetricsLog
from components.config.schema.logging import LoggingConfig
from components.console import PlainConsole
from components.observability.plot import LossPlot
from components.observability.result import Result, summary, write_result
from components.observability.wandb import WandbRun
from components.protocol.run_files import FIRST_STEP, create_marker
from components.terminal import print_text

TRAINING = "training"
"""What the progress bar shows unless the run does something else."""
WIDE = 100
"""Columns of a console from which log lines have room for the tokens since the start; a log file has 120."""


class ReportedStep(Protocol):
    """What is reported of an optimizer step (`components.training.StepMetrics` has it)."""

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
    def seconds_at_peak(self) -> float: ...

    @property
    def others(self) -> Mapping[str, float]: ...


class TrafficNumbers(Protocol):
    """What one kind of operation over one process group moved in a step (`components.distributed.TrafficRow`)."""

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
class Interval:
    """Steps one after the other."""

    tokens: int = 0
    seconds: float = 0.0
    seconds_at_peak: float = 0.0

    def add(self, step: ReportedStep) -> None:
        """Count one more step."""
        self.tokens += step.tokens
        self.seconds += step.seconds
        self.seconds_at_peak += step.seconds_at_peak

    def __add__(self, other: Interval) -> Interval:
        return Interval(
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.seconds_at_peak + other.seconds_at_peak,
        )

    @property
    def speed(self) -> float:
        """Target tokens per second."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def mfu(self) -> float | None:
        """Share of the devices' peak; None: not known."""
        return self.seconds_at_peak / max(self.seconds, 1e-9) or None


class _Output(PlainConsole):
    """The terminal, or whatever reads the output; where that ends (`| head`, `| tee` by Ctrl-C), the run does not."""

    def on_broken_pipe(self) -> None:
        """Go on in silence: rich would leave the program here, with nothing saved and nothing said."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what Python still holds of the output goes there
        try:
            print_text(
                "nobody reads the output any more; the run goes on, and metrics.jsonl tells how", file=sys.stderr
            )
            sys.stderr.flush()
        except BrokenPipeError:  # 2>&1 |
            os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


class Reporter:
    """One line per log step, a progress bar on a terminal, one JSON object per line in metrics.jsonl.

    On a rank that does not report every method does nothing, so that a recipe needs no `if`.
    """

    def __init__(
        self, logging: LoggingConfig, run_dir: str, enabled: bool, total_steps: int = 0, title: str = ""
    ) -> None:
        """`title` stands above loss.png; "": the name of the run directory."""
        self.enabled = enabled
        width = None if sys.stdout.isatty() else 120  # a log file has no width of its own
        self.console = _Output(quiet=not enabled, highlight=False, soft_wrap=True, width=width)
        self._run_dir = Path(run_dir)
        self._metrics = MetricsLog(self._run_dir)
        self._plot = LossPlot(self._run_dir, title, self._metrics.read) if enabled and logging.plot else None
        self._wandb = WandbRun(logging.wandb, run_dir, self.console) if enabled else None
        self._progress: Progress | None = None
        if enabled and logging.progress and total_steps and self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._task = self._progress.add_task(TRAINING, total=total_steps)
        self._since = Interval()  # the last log line
        self._intervals: list[Interval] = []  # between two log lines
        self._waited, self._asked, self._second_batch = 0.0, 0, 0.0  # for batches: seconds, how many, when

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
        if self._wandb is not None:
            self._wandb.finish(failed=error is not None)

    def say(self, text: str) -> None:
        """Print one line for the person."""
        self.console.print(text, markup=False)

    def continue_from(self, step: int) -> None:
        """Drop what metrics.jsonl holds of later steps, which are done again, and report what is damaged in it."""
        if self.enabled:
            for problem in self._metrics.continue_from(step):
                self.say(problem)
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Return what `next(batches)` returns, and count how long it took."""
        began = time.perf_counter()
        self._asked += 1
        if self._asked == 2:
            self._second_batch = began
            self._note_first_step()
        batch = next(batches)
        self._waited += time.perf_counter() - began
        return batch

    def _note_first_step(self) -> None:
        """Leave a file that tells a cluster's requeue policy that this attempt got as far as an optimizer step."""
        logs = self._run_dir / "logs"
        if self.enabled and logs.is_dir():
            create_marker(logs / FIRST_STEP)

    def step(self, metrics: ReportedStep, *, lr: float, tokens: int, every: int = 1) -> None:
        """Take the numbers of an optimizer step, and log them if the step is a multiple of `every`.

        Args:
            tokens: Target tokens since the start of the run, over all ranks.
        """
        self._since.add(metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step)
        if metrics.step % every:
            return
        passed, self._since = self._since, Interval()
        self._intervals.append(passed)
        self._write(
            step=metrics.step,
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            lr=lr,
            tokens=tokens,
            tokens_per_second=round(passed.speed, 1),
            **({} if passed.mfu is None else {"mfu": round(passed.mfu, 4)}),
            **metrics.others,
        )
        values = [
            f"step {metrics.step:>6}",
            f"loss {metrics.loss:.4f}",
            f"grad_norm {metrics.grad_norm:.4g}",
            f"lr {lr:.2g}",
            f"tokens/s {passed.speed:,.0f}",
            *([] if passed.mfu is None else [f"MFU {passed.mfu:.0%}"]),
            *(f"{name} {value:.4g}" for name, value in metrics.others.items()),
            *([f"tokens {tokens:,}"] if self.console.width >= WIDE else []),
        ]
        self.say("  ".join(values))
        if metrics.skipped:
            self.say(f"step {metrics.step:>6}  update skipped: gradients are not finite")
        if self._plot is not None:
            self._plot.update()

    @contextmanager
    def status(self, doing: str) -> Iterator[None]:
        """Show on a terminal what the run does besides training, such as an evaluation, while it does it."""
        if self._progress is None:
            yield
            return
        self._progress.update(self._task, description=doing, refresh=True)
        try:
            yield
        finally:
            self._progress.update(self._task, description=TRAINING)

    def evaluation(
        self,
        *,
        step: int,
        eval_loss: float,
        count: int,
        unit: str = "target token",
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Log a pass over the held-out set.

        Args:
            count: Units (such as target tokens) of the pass; 0: it was stopped.
            metrics: Others than the loss, by name; logged with the prefix `eval_`.
        """
        if not count:
            self.say(f"step {step:>6}  no eval_loss: the evaluation was stopped, or its samples have no {unit}s")
            return
        others = {f"eval_{name}": value for name, value in (metrics or {}).items()}
        self._write(step=step, eval_loss=eval_loss, **others)
        values = [f"eval_loss {eval_loss:.4f}", *(f"{name} {value:.4g}" for name, value in others.items())]
        self.say(f"step {step:>6}  {'  '.join(values)}  over {count:,} held-out {unit}s")
        if self._plot is not None:
            self._plot.update()

    def traffic(self, rows: Sequence[TrafficNumbers]) -> None:
        """Print what the collectives of one optimizer step moved."""
        if not rows:
            self.say("collectives of one optimizer step: no collective moved anything")
            return
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for column in ("group", "purpose", "operation"):
            table.add_column(column, overflow="fold")
        table.add_column("calls", justify="right")
        table.add_column("MiB", justify="right")
        for row in rows:
            table.add_row(row.group, row.purpose, row.operation, f"{row.calls:,}", f"{row.bytes / 2**20:,.3f}")
        self.say("\ncollectives of one optimizer step, as rank 0 put in:")
        self.console.print(table)

    def generations(self, prompts: list[str], answers: list[str], *, when: str) -> None:
        """Show what the model answers; there are no answers if the generation was stopped."""
        if not answers:
            return
        for prompt, answer in zip(prompts, answers, strict=True):
            self.say(f"\nprompt: {prompt}\nanswer {when}: {answer}")

    def finish(self, result: Result) -> None:
        """Write result.json and loss.png, and log how the run ended."""
        if not self.enabled:
            return
        if measured := self._intervals[1:]:  # the first interval pays for warming up
            whole = sum(measured, Interval())
            result.tokens_per_second = round(whole.speed, 1)
            result.mfu = None if whole.mfu is None else round(whole.mfu, 4)
        result.data_wait_seconds = round(self._waited, 3)
        if self._second_batch:
            started = time.perf_counter() - result.wall_seconds
            result.seconds_to_first_step = round(self._second_batch - started, 1)
        write_result(self._run_dir, result)
        if self._plot is not None and (why_not := self._plot.finish()):
            self.say(why_not)
        self.say(summary(result, self._run_dir))

    def read(self) -> list[dict[str, Any]]:
        """Return everything in metrics.jsonl."""
        return self._metrics.read()

    def _write(self, **values: Any) -> None:
        if not self.enabled:
            return
        self._metrics.append(values)
        if self._wandb is not None:
            self._wandb.log(values)
