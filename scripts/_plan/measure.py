"""Measurements of this machine's devices: matmuls, attention, copies, collectives and host overhead.

`scripts/plan.py --measure` runs this file in a subprocess, because torch may hang, crash or fail to import. It starts
one process per GPU, or on a CPU as many as share its cores, and prints one JSON object.
"""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from components.launch.machine import usable_cores, visible_gpus
from components.protocol.processes import LocalRank, reserve_loopback_port, without_ranks
from scripts._doctor.check import last_line

LIMIT = 150.0
"""Time limit of all measurements together, in seconds."""
ATTENTION_PASSES = 3.5
"""FLOPs of the forward and backward of attention relative to its forward; see planning's ATTENTION_BACKWARD."""
CHAIN = 32
"""Multiplications and additions of the chain of operators whose host overhead is measured."""


class Sizes(NamedTuple):
    """Sizes of the measured operations."""

    matmul: int
    """Rows and columns of both operands."""
    attention: tuple[int, int, int, int]
    """Batch, heads, sequence length, head dim."""
    copied: int
    """Bytes of the tensor that is copied."""
    sent: int
    """Bytes of the gathered tensor."""
    seconds: float
    """Duration of each measurement on a CPU: all processes measure for the same time, so that they share the cores
    throughout."""


LARGE = Sizes(8192, (2, 16, 4096, 128), 2**30, 2**28, 1.0)
SMALL = Sizes(1024, (1, 4, 512, 64), 2**26, 2**24, 1.0)
TINY = Sizes(128, (1, 2, 128, 32), 2**20, 2**18, 0.05)
"""For GPUs; for CPUs; for tests on CPUs."""


def measure_device(ranks: int, sizes: Sizes | None = None) -> dict[str, Any]:
    """Return the figures of the visible GPUs, or of `ranks` processes that share the CPU.

    Rates are in FLOP/s or bytes/s, times in seconds. Raises RuntimeError if a process fails or the time limit is
    reached.
    """
    gpus = visible_gpus(os.environ)
    ranks, device = (gpus, "cuda") if gpus else (ranks, "cpu")
    warnings.filterwarnings("ignore", category=FutureWarning)  # names of collectives that a later torch replaces
    sizes = sizes or (LARGE if gpus else SMALL)
    os.environ["OMP_NUM_THREADS"] = threads = str(max(usable_cores() // ranks, 1))
    torch.set_num_threads(int(threads))
    reports = _run_ranks(ranks, device, sizes)
    return {"device": device, "ranks": ranks, "threads": int(threads), **_combined(reports)}


def _combined(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of rank 0, and of `_shared` figures the mean over ranks."""
    combined = dict(reports[0])
    for name in combined:
        if name.endswith("_shared"):
            combined[name] = statistics.fmean(report[name] for report in reports)
    return combined


def _run_ranks(ranks: int, device: str, sizes: Sizes) -> list[dict[str, Any]]:
    """Fork the processes, which must precede CUDA initialization, and return their reports."""
    began, context = time.monotonic(), get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    with reserve_loopback_port() as store:
        processes = [
            context.Process(target=_run_rank, args=(rank, ranks, store, device, sizes, pipes[rank][1]))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
    for _, sender in pipes:
        sender.close()  # so that receiving from a process that died raises EOFError
    reports: list[dict[str, Any]] = []
    try:
        for rank, (receiver, _) in enumerate(pipes):
            if not receiver.poll(max(began + LIMIT - time.monotonic(), 0)):
                raise RuntimeError(f"process {rank} did not finish within {LIMIT:g} s")
            report = receiver.recv()
            if "error" in report:
                raise RuntimeError(f"process {rank}: {report['error']}")
            reports.append(report)
    except EOFError:
        raise RuntimeError(f"process {rank} ended without a result") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
    return reports


def _run_rank(rank: int, ranks: int, store: socket.socket, device: str, sizes: Sizes, sender: Connection) -> None:
    """Send the figures of one process, and exit without torch's shutdown, which may wait for other processes."""
    report: dict[str, Any] = {}
    try:
        fd = store.fileno() if rank == 0 else None
        os.environ |= LocalRank(rank, ranks, store.getsockname()[1], fd, Path("."), 0).variables()
        from components.distributed import start_process_group

        limit = timedelta(seconds=LIMIT)
        start_process_group(device, rendezvous_timeout=limit, collective_timeout=limit)
        report = _gpu_figures(sizes) if device == "cuda" else _cpu_figures(sizes)
    except Exception as error:  # any error is reported
        report = {"error": f"{type(error).__name__}: {last_line(str(error))}"}
    finally:
        sender.send(report)
        os._exit(0)


def _cpu_figures(sizes: Sizes) -> dict[str, Any]:
    """Measure on rank 0 while the other processes wait, then on all processes at once, then collectives."""
    operations = {
        "fp32": _matmul(torch.float32, sizes, "cpu"),
        "bf16": _matmul(torch.bfloat16, sizes, "cpu"),
        "attention": _attention(torch.float32, sizes, "cpu"),
        "copy": _copy(sizes, "cpu"),
    }
    figures: dict[str, Any] = {"name": "cpu"}
    for name, (run, amount) in operations.items():
        if dist.get_rank() == 0:
            figures[f"{name}_alone"] = amount / min(_cpu_times(run, sizes.seconds / 2))
        dist.barrier()
    for name, (run, amount) in operations.items():
        dist.barrier()
        figures[f"{name}_shared"] = amount / statistics.median(_cpu_times(run, sizes.seconds))
    dist.barrier()
    run, operators = _operators("cpu")
    figures["operator_shared"] = statistics.median(_cpu_times(run, sizes.seconds)) / operators
    return figures | _collective_figures(sizes, "cpu", lambda run: _counted_times(run, sizes.seconds))


def _gpu_figures(sizes: Sizes) -> dict[str, Any]:
    """Measure on every GPU at once, then collectives, then what the host does."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.backends.cuda.matmul.allow_tf32 = False
    operations = {
        "fp32": _matmul(torch.float32, sizes._replace(matmul=sizes.matmul // 2), device),
        "bf16": _matmul(torch.bfloat16, sizes, device),
        "attention": _attention(torch.bfloat16, sizes, device),
        "copy": _copy(sizes, device),
    }
    if torch.cuda.get_device_capability(device) >= (8, 9):
        operations["fp8"] = _float8_matmul(sizes.matmul, device)
    total = torch.cuda.mem_get_info(device)[1]
    figures: dict[str, Any] = {"name": torch.cuda.get_device_name(device), "memory": total}
    for name, (run, amount) in operations.items():
        figures[f"{name}_shared"] = amount / statistics.median(_gpu_times(run))
    run, operators = _operators(device)
    figures["operator_shared"] = statistics.median(_launch_times(run)) / operators
    pinned = torch.empty(sizes.sent, dtype=torch.uint8, pin_memory=True)
    received = torch.empty(sizes.sent, dtype=torch.uint8, device=device)
    copies = _gpu_times(lambda: received.copy_(pinned, non_blocking=True))
    figures["host_copy_shared"] = sizes.sent / statistics.median(copies)
    return figures | _collective_figures(sizes, device, _gpu_times)


def _matmul(dtype: torch.dtype, sizes: Sizes, device: torch.device | str) -> tuple[Callable[[], object], float]:
    """Return a square matmul and its FLOPs."""
    size = sizes.matmul
    left, right, out = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    return lambda: torch.mm(left, right, out=out), 2.0 * size**3


def _float8_matmul(size: int, device: torch.device) -> tuple[Callable[[], object], float]:
    """Return a square matmul of float8 operands with one scale per tensor, and its FLOPs."""
    left = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()  # the kernel requires column-major
    scale = torch.ones((), device=device)
    return (
        lambda: torch._scaled_mm(left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16),
        2.0 * size**3,
    )


def _attention(dtype: torch.dtype, sizes: Sizes, device: torch.device | str) -> tuple[Callable[[], object], float]:
    """Return the forward and backward of causal attention, and the FLOPs of its unmasked pairs."""
    batch, heads, length, dim = sizes.attention
    query, key, value, gradient = (
        torch.randn(batch, heads, length, dim, device=device).to(dtype).requires_grad_() for _ in range(4)
    )

    def run() -> None:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(output, (query, key, value), gradient.detach())

    return run, ATTENTION_PASSES * 4.0 * batch * heads * dim * length * (length + 1) / 2


def _copy(sizes: Sizes, device: torch.device | str) -> tuple[Callable[[], object], float]:
    """Return a copy between tensors, and the bytes that it reads and writes."""
    source = torch.zeros(sizes.copied, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return lambda: target.copy_(source), 2.0 * sizes.copied


def _operators(device: torch.device | str) -> tuple[Callable[[], object], int]:
    """Return the forward and backward of a chain of operators on tiny tensors, and how many kernels it launches: two
    per link of the chain in the forward, and two in the backward."""
    weight, value = torch.ones(8, device=device, requires_grad=True), torch.ones(8, device=device)

    def run() -> None:
        hidden = value
        for _ in range(CHAIN):
            hidden = hidden * weight + value
        hidden.sum().backward()
        weight.grad = None

    return run, 4 * CHAIN


def _collective_figures(
    sizes: Sizes, device: torch.device | str, timed: Callable[[Callable[[], object]], list[float]]
) -> dict[str, Any]:
    """Return bandwidth and latency over all processes; without them if there is only one.

    Bandwidth is that of a rank in a ring: bytes x (n - 1) / n / seconds for an all-gather, twice that for an
    all-reduce. Latency is that of an all-gather of 64 bytes, per doubling of the ranks. On a CPU it includes the host's
    work for the collective of a DTensor, which no device hides.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return {}
    shard = torch.ones(sizes.sent // 4 // ranks, device=device)
    gathered = torch.empty(shard.numel() * ranks, device=device)
    tiny, gathered_tiny = torch.ones(16, device=device), torch.empty(16 * ranks, device=device)
    ring = gathered.numel() * 4 * (ranks - 1) / ranks
    gathers = timed(lambda: dist.all_gather_into_tensor(gathered, shard))
    reductions = timed(lambda: dist.all_reduce(gathered.zero_()))
    small = timed(lambda: dist.all_gather_into_tensor(gathered_tiny, tiny))
    latency = _usual(small)
    bandwidths = (
        ring / max(_usual(gathers) - latency, 1e-9),
        2 * ring / max(_usual(reductions) - 2 * latency, 1e-9),
    )
    if device == "cpu":
        latency = _usual(timed(_tensor_parallel_pair(ranks))) / 2
    return {
        "gather_bandwidth": bandwidths[0],
        "reduce_bandwidth": bandwidths[1],
        "latency": latency / math.log2(ranks),
    }


def _tensor_parallel_pair(ranks: int) -> Callable[[], object]:
    """Return an all-gather of a tiny DTensor in a forward, and the reduce-scatter of its gradient in the backward."""
    mesh, shard = init_device_mesh("cpu", (ranks,)), torch.ones(16, requires_grad=True)

    def run() -> None:
        gathered = DTensor.from_local(shard, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        gathered.to_local(grad_placements=[Partial()]).sum().backward()

    return run


def _usual(times: list[float]) -> float:
    """Return the lower quartile: other programs on the machine delay some of the calls."""
    return statistics.quantiles(times, n=4)[0]


def _cpu_times(run: Callable[[], object], seconds: float) -> list[float]:
    """Return the seconds of each call, for as many calls as fit into `seconds`, after a warm-up.

    Processor time rather than wall time, so that other programs on the machine do not count.
    """
    run()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while not times or time.perf_counter() < deadline:
        began = time.process_time()
        run()
        times.append((time.process_time() - began) / torch.get_num_threads())
    return times


def _counted_times(run: Callable[[], object], seconds: float) -> list[float]:
    """Return the seconds of each call of a collective: every process makes the same number of calls."""
    for _ in range(2):
        run()
    dist.barrier()
    began = time.perf_counter()
    run()
    number = torch.tensor(seconds / max(time.perf_counter() - began, 1e-6))
    dist.broadcast(number, 0)
    times = []
    for _ in range(min(max(int(number.item()), 3), 200)):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times


def _gpu_times(run: Callable[[], object], repeats: int = 20) -> list[float]:
    """Return the seconds of each call on the device, between two events on its stream, after a warm-up."""
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def _launch_times(run: Callable[[], object], repeats: int = 20) -> list[float]:
    """Return the host's seconds for each call, which it makes while the device still computes or is idle."""
    times = []
    for _ in range(repeats + 5):
        torch.cuda.synchronize()  # the queue of launches is empty, so that no launch waits for the device
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return times[5:]


def main() -> int:
    """Measure with as many processes as argv[1] says, and print the figures, or the error on stderr."""
    environment = without_ranks(os.environ)
    os.environ.clear()
    os.environ |= environment
    try:
        figures = measure_device(int(sys.argv[1]), TINY if "--tiny" in sys.argv else None)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(figures), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
