"""torch.profiler traces of a few optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from components.config.schema.run import ProfileConfig
from components.protocol.run_files import atomic_path, atomic_write, own_folder


class StepProfile:
    """Profiler of the steps in logging.profile, counted from the start of this attempt; no overhead in other steps.

    It writes RUN_DIR/profile/rank_N.json, a Chrome trace (chrome://tracing, perfetto.dev), and rank_N.txt, a table of
    operators.
    """

    def __init__(self, cfg: ProfileConfig, run_dir: str, report: Callable[[str], None]) -> None:
        """Set up the profiler of this rank; `report` prints the line about the written files."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._cfg, self._report = cfg, report
        self._files = Path(run_dir) / "profile" / f"rank_{rank}"
        self._enabled = cfg.enabled and rank in cfg.ranks
        self._steps = 0
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose one optimizer step; start and stop the profiler at the configured steps."""
        self._steps += 1
        if self._enabled and self._steps == self._cfg.start:
            self._profiler = torch.profiler.profile(profile_memory=self._cfg.memory, with_stack=self._cfg.stacks)
            self._profiler.start()
        yield
        if self._profiler is not None and self._steps == self._cfg.start + self._cfg.steps - 1:
            self._finish(self._profiler)
            self._profiler = None

    def finish(self) -> None:
        """Report that an attempt, which may have resumed, ended before the configured steps."""
        first, last = self._cfg.start, self._cfg.start + self._cfg.steps - 1
        if self._cfg.enabled and self._steps < last:
            self._report(
                f"no profile of steps {first} to {last} of this attempt, which had {self._steps}: logging.profile "
                "counts from the start of an attempt; set logging.profile.start and logging.profile.steps lower"
            )

    def _finish(self, profiler: torch.profiler.profile) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the kernels that these steps have launched belong to the trace
        profiler.stop()
        own_folder(self._files.parent)
        trace, table = self._files.with_suffix(".json"), self._files.with_suffix(".txt")
        with atomic_path(trace) as unpublished:
            profiler.export_chrome_trace(str(unpublished))
        by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        atomic_write(table, profiler.key_averages().table(sort_by=by, row_limit=60) + "\n")
        last = self._cfg.start + self._cfg.steps - 1
        self._report(f"profile of steps {self._cfg.start} to {last} of this attempt: {trace}, {table}")
