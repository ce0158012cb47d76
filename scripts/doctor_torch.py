"""Of scripts/doctor.py: what only torch can tell. A process of its own, because torch may hang, crash or be broken.

Prints one JSON object per check, as soon as it is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch

from components.config.schema import ModelConfig
from components.launch.machine import visible_gpus
from components.protocol.role import LocalRank
from components.training.precision import compute_dtype
from scripts.doctor_check import NOTE, OK, PROBLEM, Check, ask, last_line

SECONDS = 30.0
"""Within which two processes must have met and reduced a number."""


def main() -> None:
    """Tell of gloo first: its ranks are forked, which they can be only before CUDA has started."""
    tell(check_gloo())
    tell(check_devices())


def tell(check: Check) -> None:
    """Hand a check to the doctor."""
    print(json.dumps(check.as_dict()), flush=True)


def check_devices() -> Check:
    """Where a run would compute, and in which type."""
    present, seen = visible_gpus({}), torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda" if seen else "cpu")
    kind = compute_dtype(ModelConfig(path="any"), device)[1]
    build = f"torch {torch.__version__}"
    if seen:
        cards = sorted({torch.cuda.get_device_name(index) for index in range(seen)})
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none"
        return Check("devices", OK, f"{seen} x {', '.join(cards)}; {kind}; {build}, NCCL {nccl}")
    if present and "CUDA_VISIBLE_DEVICES" in os.environ:
        hidden = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']!r} hides {present} GPUs"
        return Check("devices", NOTE, f"{hidden}; CPU, {kind}; {build}", "unset CUDA_VISIBLE_DEVICES")
    if present and torch.version.cuda is None:
        mend = "pip install torch from an index with CUDA (pytorch.org), or cluster.device=cpu"
        return Check("devices", PROBLEM, f"{present} GPUs, but {build} was built for CPUs", mend)
    if present:
        told = f"{present} GPUs, but {build} (CUDA {torch.version.cuda}) cannot use them: driver too old or broken"
        return Check("devices", PROBLEM, told, "nvidia-smi, or cluster.device=cpu")
    if torch.version.cuda is None and cluster_has_gpus():
        told = f"the cluster's nodes have GPUs, but {build} was built for CPUs"
        return Check("devices", PROBLEM, told, "make install TORCH=cuda, or cluster.device=cpu")
    return Check("devices", OK, f"CPU, {kind}; {build}")


def cluster_has_gpus() -> bool:
    """Whether Slurm, if there is one, has nodes with GPUs."""
    return "gpu" in ask("sinfo", "--noheader", "-o", "%G", seconds=10).output


def check_gloo() -> Check:
    """Two processes start as those of a local run do, and sum a number."""
    began = time.monotonic()
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("127.0.0.1", 0))
        ranks = [_fork(rank, store) for rank in range(2)]
    reports = _wait(ranks, began + SECONDS)
    if all(report == "ok" for report in reports):
        return Check("gloo", OK, f"two processes on this machine reduced a number in {time.monotonic() - began:.1f} s")
    told = next(report for report in reports if report != "ok")
    mend = "see GLOO_SOCKET_IFNAME, and whether a firewall closes 127.0.0.1; parallelism=single needs no network"
    return Check("gloo", PROBLEM, f"two processes on this machine cannot reduce a number: {told}", mend)


def _fork(rank: int, store: socket.socket) -> tuple[int, int]:
    """Start a rank; return its process id and the descriptor of its report."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        _rank_main(rank, store, writer)
    os.close(writer)
    os.set_blocking(reader, False)
    return process, reader


def _rank_main(rank: int, store: socket.socket, writer: int) -> NoReturn:
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
    except Exception as error:  # whatever it is, it belongs into the report and not on the screen
        report = f"{type(error).__name__}: {last_line(str(error))}"
    finally:
        os.write(writer, report.encode())
        os._exit(0)


def _wait(ranks: list[tuple[int, int]], deadline: float) -> list[str]:
    """Return what the ranks report; those that are not done by the deadline are ended."""
    ended: dict[int, int] = {}
    while len(ended) < len(ranks) and time.monotonic() < deadline:
        for process, _ in ranks:
            if process not in ended:
                done, status = os.waitpid(process, os.WNOHANG)
                ended |= {process: status} if done else {}
        time.sleep(0.02)
    reports = []
    for process, reader in ranks:
        report = b""
        with contextlib.suppress(BlockingIOError):
            report = os.read(reader, 4096)
        if process not in ended:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        late = f"not done after {SECONDS:g} s"
        reports.append(report.decode() or (f"a process ended ({ended[process]})" if process in ended else late))
    return reports


if __name__ == "__main__":
    main()
