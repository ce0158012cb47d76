"""Traces of some optimizer steps by torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from components.config.schema.logging import ProfileConfig
from components.protocol.run_files import atomic_path, atomic_write


class StepProfile:
    """Records the steps that the config names, counted from the start of this attempt; else it costs nothing.

    RUN_DIR/profile/rank_N.json is a Chrome trace (chrome://tracing, perfetto.dev), rank_N.txt a table of operations.
    """

    def __init__(self, cfg: ProfileConfig, run_dir: str, say: Callable[[str], None]) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._cfg, self._say = cfg, say
        self._files = Path(run_dir) / "profile" / f"rank_{rank}"
        self._on = cfg.enabled and rank in cfg.ranks
        self._steps = 0
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step belongs into this context."""
        self._steps += 1
        if self._on and self._steps == self._cfg.start:
            self._profiler = torch.profiler.profile(profile_memory=self._cfg.memory, with_stack=self._cfg.stacks)
            self._profiler.start()
        yield
        if self._profiler is not None and self._steps == self._cfg.start + self._cfg.steps - 1:
            self._finish(self._profiler)
            self._profiler = None

    def _finish(self, profiler: torch.profiler.profile) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what these steps have started on the device belongs to the trace
        profiler.stop()
        self._files.parent.mkdir(parents=True, exist_ok=True)
        trace, table = self._files.with_suffix(".json"), self._files.with_suffix(".txt")
        with atomic_path(trace) as unpublished:
            profiler.export_chrome_trace(str(unpublished))
        by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        atomic_write(table, profiler.key_averages().table(sort_by=by, row_limit=60) + "\n")
        self._say(f"profile of {self._cfg.steps} steps from the {self._cfg.start}th on: {trace}, {table}")
