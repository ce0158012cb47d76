"""Numbers on their way to a person: the terminal, RUN_DIR/metrics.jsonl and wandb. Only rank 0 reports."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from components.config.schema.logging import LoggingConfig
from components.observability.wandb import WandbRun


class Reporter:
    """One line per log step, a progress bar on a terminal, one JSON object per line in metrics.jsonl.

    On a rank that does not report every method does nothing, so that a recipe needs no `if`.
    """

    def __init__(self, logging: LoggingConfig, run_dir: str, *, enabled: bool, total_steps: int = 0) -> None:
        self.enabled = enabled
        self.console = Console(quiet=not enabled, highlight=False, soft_wrap=True)
        self._metrics = Path(run_dir) / "metrics.jsonl"
        self._wandb = WandbRun(logging.wandb, run_dir, self.console) if enabled else None
        self._progress: Progress | None = None
        if enabled and logging.progress and total_steps and self.console.is_terminal:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._task = self._progress.add_task("training", total=total_steps)
        self._since, self._tokens = time.perf_counter(), 0

    def __enter__(self) -> Reporter:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._wandb is not None:
            self._wandb.finish(failed=error is not None)

    def say(self, text: str) -> None:
        """Print one line for the person."""
        self.console.print(text, markup=False)

    def continue_from(self, step: int) -> None:
        """Drop what metrics.jsonl says of later steps: they are done again, and the file stays one curve."""
        if self.enabled and self._metrics.exists():
            kept = [line for line in self._metrics.read_text().splitlines() if json.loads(line)["step"] <= step]
            replacement = self._metrics.with_suffix(".tmp")
            replacement.write_text("".join(f"{line}\n" for line in kept))
            replacement.replace(self._metrics)
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        self._since, self._tokens = time.perf_counter(), 0

    def advance(self, step: int, tokens: int) -> None:
        """Move the bar to `step` and count its target tokens for the next log line."""
        self._tokens += tokens
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def step(self, *, step: int, loss: float, grad_norm: float, lr: float, tokens: int) -> float:
        """Log an optimizer step; return the target tokens per second since the log line before.

        Args:
            loss: Mean per target token of this step.
            tokens: Target tokens since the start of the run, over all ranks.
        """
        now = time.perf_counter()
        speed = self._tokens / max(now - self._since, 1e-9)
        self._since, self._tokens = now, 0
        self._write(
            step=step, loss=loss, grad_norm=grad_norm, lr=lr, tokens=tokens, tokens_per_second=round(speed, 1)
        )
        self.say(
            f"step {step:>6}  loss {loss:.4f}  grad_norm {grad_norm:.3f}  lr {lr:.2e}  "
            f"tokens {tokens:,}  tokens/s {speed:,.0f}"
        )
        return speed

    def evaluation(self, *, step: int, eval_loss: float, tokens: int) -> None:
        """Log a pass over the held-out set."""
        self._write(step=step, eval_loss=eval_loss)
        self.say(f"step {step:>6}  eval_loss {eval_loss:.4f}  over {tokens:,} held-out target tokens")
        self._since = time.perf_counter()

    def read(self) -> list[dict[str, Any]]:
        """Return everything in metrics.jsonl."""
        if not self._metrics.exists():
            return []
        return [json.loads(line) for line in self._metrics.read_text().splitlines()]

    def _write(self, **values: Any) -> None:
        if not self.enabled:
            return
        with self._metrics.open("a") as file:
            file.write(json.dumps(values) + os.linesep)
        if self._wandb is not None:
            self._wandb.log(values)
