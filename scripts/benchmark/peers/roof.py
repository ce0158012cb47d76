"""Throughput of a large matmul: bfloat16 on CUDA, float32 on a CPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from scripts.benchmark.peers.workload import Workload

SIZE = {"cuda": 8192, "cpu": 1536}
REPEATS = {"cuda": 50, "cpu": 5}


def tflops(device: str) -> float:
    """Return the median TFLOP/s, by wall time on CUDA and by processor time on a CPU, which others may use too."""
    size, dtype = SIZE[device], torch.bfloat16 if device == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(REPEATS[device] + 3):
        began = now(device)
        torch.mm(left, right)
        seconds.append(now(device) - began)
    return 2 * size**3 / sorted(seconds[3:])[REPEATS[device] // 2] / 1e12


def now(device: str) -> float:
    """Return the current time in seconds after synchronizing the device; processor time on a CPU."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    workload = Workload.read(sys.argv[1])
    torch.set_num_threads(workload.threads)
    Path(sys.argv[2]).write_text(json.dumps({"tflops": tflops(workload.device)}))
