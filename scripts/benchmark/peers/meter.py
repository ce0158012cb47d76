"""The clock, memory and losses of an arm, the same for all: nothing waits for the device between two readings."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from scripts.benchmark.peers.workload import Workload

GIB = 2**30


class Meter:
    """Told of every optimizer step by the arm; it starts the clock after the warm-up and stops it after the last."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._losses: list[torch.Tensor | float] = []
        self._told: dict[str, Any] = {}

    def step(self, loss: torch.Tensor | float, optimizer: Any) -> None:
        """Take the mean loss over the target tokens of a step that `optimizer` has just done."""
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        done = len(self._losses)
        if done == self._workload.warmup:
            self._reset_peaks()
            self._began = self._now()
        if done == self._workload.total_steps:
            wall, processor = self._now()
            self._told = {
                "seconds": wall - self._began[0],
                "processor_seconds": processor - self._began[1],
                "memory": self._peaks(),
                "settings": settings_of(optimizer),
            }

    def write(self, file: str, packages: Iterable[str]) -> None:
        """Write what was measured. Raises RuntimeError where the arm did not do all steps."""
        if len(self._losses) != self._workload.total_steps:
            raise RuntimeError(f"did {len(self._losses)} of {self._workload.total_steps} steps")
        versions = {}
        for package in ("torch", *packages):
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        losses = [float(loss) for loss in self._losses]
        Path(file).write_text(json.dumps({**self._told, "losses": losses, "versions": versions}))

    def _now(self) -> tuple[float, float]:
        if self._workload.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def _reset_peaks(self) -> None:
        if self._workload.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):  # without it the peak is that since the start, loading included
                Path("/proc/self/clear_refs").write_text("5")

    def _peaks(self) -> dict[str, float]:
        """Peak memory in GiB during the counted steps."""
        if self._workload.device == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated() / GIB,
                "reserved": torch.cuda.max_memory_reserved() / GIB,
            }
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM"))
        return {"resident": int(peak.split()[1]) / 2**20}


def settings_of(optimizer: Any) -> dict[str, Any]:
    """Return what an optimizer really did: equal in every arm, or they do not train the same."""
    groups = optimizer.param_groups
    parameters = {id(each): each for group in groups for each in group["params"]}
    decayed = {group["weight_decay"] for group in groups}
    return {
        "parameters": sum(each.numel() for each in parameters.values()),
        "dtypes": sorted({str(each.dtype).removeprefix("torch.") for each in parameters.values()}),
        "lr": sorted({float(group["lr"]) for group in groups}),
        "betas": sorted({tuple(map(float, group["betas"])) for group in groups}),
        "eps": sorted({group["eps"] for group in groups}),
        "weight_decay": sorted(decayed),
    }


def run(train: Callable[[Workload, Meter], None], *packages: str) -> None:
    """Be an arm's process: ARM WORKLOAD.json RESULT.json."""
    workload = Workload.read(sys.argv[1])
    result, meter = sys.argv[2], Meter(workload)
    torch.set_num_threads(workload.threads)
    torch.manual_seed(workload.seed)
    train(workload, meter)
    meter.write(result, packages)
