"""Measurement of an arm's time, memory and losses. The device is synchronized only at start and end."""

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
    """Recorder of an arm's optimizer steps. The timer starts after the warm-up and stops after the last step."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._losses: list[torch.Tensor | float] = []
        self._measured: dict[str, Any] = {}

    def step(self, loss: torch.Tensor | float, optimizer: Any) -> None:
        """Record a step that `optimizer` has just done. loss: Its mean over the target tokens."""
        self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        done = len(self._losses)
        if done == self._workload.warmup:
            self._reset_peaks()
            self._began = self._now()
        if done == self._workload.total_steps:
            wall, processor = self._now()
            self._measured = {
                "seconds": wall - self._began[0],
                "processor_seconds": processor - self._began[1],
                "memory": self._peaks(),
                "settings": settings_of(optimizer),
            }

    def write(self, file: str, packages: Iterable[str]) -> None:
        """Write the measurements as JSON. Raises RuntimeError if the arm did not do all steps."""
        if len(self._losses) != self._workload.total_steps:
            raise RuntimeError(f"the arm did {len(self._losses)} of {self._workload.total_steps} steps")
        versions = {}
        for package in ("torch", *packages):
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        losses = [float(loss) for loss in self._losses]
        Path(file).write_text(json.dumps({**self._measured, "losses": losses, "versions": versions}))

    def _now(self) -> tuple[float, float]:
        if self._workload.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def _reset_peaks(self) -> None:
        if self._workload.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            with suppress(OSError):  # if it fails, the peak includes loading of the model
                reset_peak()

    def _peaks(self) -> dict[str, float]:
        """Return peak memory in GiB during the measured steps, by kind."""
        if self._workload.device == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated() / GIB,
                "reserved": torch.cuda.max_memory_reserved() / GIB,
            }
        return {"resident": peak() / GIB}


def reset_peak() -> int:
    """Reset this process's peak of resident memory, and return its current resident memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return this process's peak of resident memory in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def settings_of(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's effective settings, which must be equal in all arms."""
    groups = optimizer.param_groups
    parameters = {id(each): each for group in groups for each in group["params"]}
    decayed = {group["weight_decay"] for group in groups}
    return {
        "parameters": sum(parameter.numel() for parameter in parameters.values()),
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters.values()}),
        "lr": sorted({float(group["lr"]) for group in groups}),
        "betas": sorted({tuple(map(float, group["betas"])) for group in groups}),
        "eps": sorted({group["eps"] for group in groups}),
        "weight_decay": sorted(decayed),
    }


def run(train: Callable[[Workload, Meter], None], *packages: str) -> None:
    """Run an arm as a program with the arguments WORKLOAD.json RESULT.json. packages: To report versions of."""
    workload = Workload.read(sys.argv[1])
    result, meter = sys.argv[2], Meter(workload)
    torch.set_num_threads(workload.threads)
    torch.manual_seed(workload.seed)
    train(workload, meter)
    meter.write(result, packages)
