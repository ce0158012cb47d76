"""Checks that need torch: devices, and an all-reduce of two gloo processes.

The doctor runs this file in a subprocess, because torch may hang, crash or fail to import. One JSON object is printed
per check as soon as the check is done.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from components.config.schema import ModelConfig
from components.launch.machine import visible_gpus
from components.protocol.processes import LocalRank, reserve_loopback_port, without_ranks
from components.training.prepared import compute_dtype
from scripts._doctor.check import NOTE, OK, PROBLEM, Check, last_line, run_command

SECONDS = 30.0
"""Time limit of the rendezvous and the all-reduce of two processes."""


def main() -> None:
    """Run the checks. gloo comes first, because its ranks are forked, which must precede CUDA initialization."""
    environment = without_ranks(os.environ)
    os.environ.clear()
    os.environ |= environment
    for check in (check_gloo, check_devices):
        print(json.dumps(asdict(check())), flush=True)


def check_devices() -> Check:
    """Report the devices and the compute dtype of a run."""
    present, usable = visible_gpus({}), torch.cuda.device_count() if torch.cuda.is_available() else 0
    dtype = compute_dtype(ModelConfig(path="any"), torch.device("cuda" if usable else "cpu"))[1]
    build = f"torch {torch.__version__}"
    if usable:
        gpus = sorted({torch.cuda.get_device_name(index) for index in range(usable)})
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        return Check("devices", OK, f"{usable} x {', '.join(gpus)}; {dtype}; {build}, NCCL {nccl}")
    if present and "CUDA_VISIBLE_DEVICES" in os.environ:
        hidden = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides {present} GPUs"
        return Check("devices", NOTE, f"{hidden}; CPU, {dtype}; {build}", "unset CUDA_VISIBLE_DEVICES")
    if present and torch.version.cuda:
        finding = f"{present} GPUs, but {build} (CUDA {torch.version.cuda}) cannot use them: driver too old or broken"
        return Check("devices", PROBLEM, finding, "check nvidia-smi, or set cluster.device=cpu")
    gpus = f"{present} GPUs" if present else ""
    if not gpus and "gpu" in run_command("sinfo", "--noheader", "-o", "%G", seconds=10).output:
        gpus = "the cluster's nodes have GPUs"
    if gpus and torch.version.cuda is None:
        fix = "make install TORCH=cuda, or set cluster.device=cpu"
        return Check("devices", PROBLEM, f"{gpus}, but {build} is a CPU build", fix)
    return Check("devices", OK, f"CPU, {dtype}; {build}")


def check_gloo() -> Check:
    """Start two processes as a local run does, and all-reduce a number over them."""
    began, context = time.monotonic(), get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    with reserve_loopback_port() as store:
        ranks = [context.Process(target=_reduce, args=(rank, store, pipes[rank][1])) for rank in range(2)]
        for each in ranks:
            each.start()
    reports = []
    for process, (receiver, _) in zip(ranks, pipes, strict=True):
        process.join(max(began + SECONDS - time.monotonic(), 0))
        ended = f"timed out after {SECONDS:g} s" if process.is_alive() else f"a process ended ({process.exitcode})"
        process.kill()
        reports.append(receiver.recv() if receiver.poll() else ended)
    what, errors = "all-reduce of two processes on this machine", [report for report in reports if report != "ok"]
    if not errors:
        return Check("gloo", OK, f"{what} took {time.monotonic() - began:.1f} s")
    fix = "check GLOO_SOCKET_IFNAME and that no firewall blocks 127.0.0.1; parallelism=single needs no network"
    return Check("gloo", PROBLEM, f"{what} failed: {errors[0]}", fix)


def _reduce(rank: int, store: socket.socket, sender: Connection) -> None:
    """Send `ok` or this rank's error, and exit without torch's shutdown, which may wait for the other rank."""
    report = ""
    try:
        fd = store.fileno() if rank == 0 else None
        os.environ |= LocalRank(rank, 2, store.getsockname()[1], fd, Path("."), 0).variables()
        from components.distributed import start_process_group

        limit = timedelta(seconds=SECONDS)
        start_process_group("cpu", rendezvous_timeout=limit, collective_timeout=limit)
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
        torch.distributed.barrier()
        report = "ok" if value.item() == 2 else f"1 + 1 gave {value.item()}"
    except Exception as error:  # any error is reported
        report = f"{type(error).__name__}: {last_line(str(error))}"
    finally:
        sender.send(report)
        os._exit(0)


if __name__ == "__main__":
    main()
