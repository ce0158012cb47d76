"""Minimal re-creations of published systems (NeMo AutoModel, OLMo-core, KempnerForge) from descriptions, not copied.

Each function has the name of the original and reproduces only its weakness.
"""

from __future__ import annotations

import atexit
import math
import os
import random
import signal
import subprocess
from contextlib import ContextDecorator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

GLOO_DEFAULT = timedelta(minutes=30)  # timeout of a new group unless one is passed; tests reduce it


# NeMo AutoModel, init_utils


def get_rank_safe() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def get_world_size_safe() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def get_local_rank_preinit() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def initialize_distributed(backend: str, timeout_minutes: float = 1) -> Any:
    world, rank = get_world_size_safe(), get_rank_safe()
    if not dist.is_initialized():
        timeout = timedelta(minutes=timeout_minutes)
        if world == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            dist.init_process_group(backend, rank=rank, world_size=world, timeout=timeout)
        atexit.register(destroy_global_state)
    return SimpleNamespace(backend=backend, rank=rank, world_size=world, device=None, is_main=rank == 0)


def destroy_global_state() -> None:
    if dist.is_initialized():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        dist.destroy_process_group()
        signal.signal(signal.SIGINT, signal.SIG_DFL)


# NeMo AutoModel, utils


def _create_gloo_group() -> Any:
    return dist.new_group(backend="gloo", timeout=GLOO_DEFAULT) if dist.is_initialized() else None


def _barrier_with_timeout(timeout: timedelta, group: Any = None) -> bool:
    if not dist.is_initialized():
        return True
    if group is not None:
        dist.barrier(group)
        return True
    try:
        group = _create_gloo_group()
    except RuntimeError:
        group = None
    if group is None:
        dist.barrier()
        return True
    try:
        dist.monitored_barrier(group, timeout=timeout)
    except RuntimeError:
        return False
    dist.destroy_process_group(group)
    return True


class FirstRankPerNode(ContextDecorator):
    def __init__(self, group: Any = None, timeout: timedelta | None = None) -> None:
        self.timeout = timeout  # replaces the argument of __enter__, which a `with` statement cannot pass

    def __enter__(self, timeout: timedelta = timedelta(hours=10)) -> bool:
        self._first = not dist.is_initialized() or dist.get_rank() == 0
        if not self._first:
            _barrier_with_timeout(self.timeout or timeout)  # False: "continuing anyway"
        return self._first

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> bool:
        if self._first and dist.is_initialized():
            _barrier_with_timeout(timedelta(hours=10))
        if exc_type is not None and dist.is_initialized():
            raise SystemExit(1)
        return False


def barrier_and_log(string: str, logger: Any) -> None:
    dist.barrier()
    logger.info("[%s] datetime: now", string)


class DDPConfig:
    pass


def dp_eval_sample_shard(distributed_config: Any, dp_rank: int, dp_size: int) -> Any:
    return (dp_rank, dp_size) if isinstance(distributed_config, DDPConfig) and dp_size > 1 else None


# OLMo-core, distributed.utils


def init_distributed(backend: str = "nccl", shared_filesytem: bool = True, **kwargs: Any) -> None:
    if os.environ.get("RANK") is None and os.environ.get("WORLD_SIZE") is None:
        defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NUM_NODES": 1}
        defaults |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": random.randint(20000, 30000)}
        for name, value in defaults.items():
            os.environ.setdefault(name, str(value))
    if shared_filesytem:
        os.environ.setdefault("OLMO_SHARED_FS", "1")
    if dist.is_initialized():
        if dist.get_backend() != backend:
            raise OSError(f"initialised with {dist.get_backend()}, not {backend}")
    else:
        dist.init_process_group(backend, **kwargs)
    validate_env_vars()


def validate_env_vars() -> None:
    if "LOCAL_RANK" not in os.environ:
        raise OSError("Missing env var LOCAL_RANK")
    if "NUM_NODES" not in os.environ and "LOCAL_WORLD_SIZE" not in os.environ:
        raise OSError("Missing either NUM_NODES or LOCAL_WORLD_SIZE")


def get_rank(group: Any = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: Any = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK") or 0)


def get_fs_local_rank(group: Any = None) -> int:
    if os.environ.get("OLMO_SHARED_FS") == "1":
        return int(os.environ.get("FS_LOCAL_RANK") or dist.get_rank(group))
    return int(os.environ.get("FS_LOCAL_RANK") or get_local_rank())


def get_local_world_size() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def get_num_nodes() -> int:
    if "NUM_NODES" in os.environ:
        return int(os.environ["NUM_NODES"])
    return dist.get_world_size() // get_local_world_size()


def _as_tensor(value: Any, device: torch.device) -> torch.Tensor:
    return value.to(device) if isinstance(value, torch.Tensor) else torch.tensor(value, device=device)


def synchronize_value(value: Any, device: torch.device, src: int = 0, group: Any = None) -> Any:
    carrier = _as_tensor(value, device)
    dist.broadcast(carrier, src, group=group)
    return carrier if isinstance(value, torch.Tensor) else carrier.item()


def synchronize_flag(flag: bool, device: torch.device, group: Any = None) -> bool:
    return synchronize_value(flag, device, group=group)


def all_reduce_value(value: Any, device: torch.device, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    carrier = _as_tensor(value, device)
    dist.all_reduce(carrier, op=op, group=group)
    return carrier if isinstance(value, torch.Tensor) else carrier.item()


def broadcast_object(obj: Any, src: int = 0, group: Any = None) -> Any:
    carrier = [obj]
    dist.broadcast_object_list(carrier, src, group=group)
    return carrier[0]


def all_gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    shapes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(shapes, tensor.shape, group=group)
    gathered = [torch.zeros(shape, dtype=tensor.dtype) for shape in shapes]
    dist.all_gather(gathered, tensor.detach(), group=group)
    return gathered


def get_mesh_coordinates(mesh: Any, rank: int | None = None) -> Any:
    found = (mesh.mesh == rank).nonzero()
    assert found.size(0) in (0, 1)
    return found[0].tolist() if len(found) else None


def backend_supports_cpu(backend: str) -> bool:
    return "gloo" in backend or "mpi" in backend


def do_n_at_a_time(
    f: Any, *, n: int | None = None, process_group: Any = None, world_size: Any = None, local_rank: Any = None
) -> Any:
    size = get_world_size(process_group) if world_size is None else world_size
    position = get_rank(process_group) if local_rank is None else local_rank
    turns = math.ceil(size / (get_num_nodes() if n is None else n))
    result = None
    for turn in range(turns):
        if turn == position % turns:
            result = f()
        dist.barrier(process_group)
    return result


# KempnerForge, distributed.setup


def get_world_info() -> tuple[int, int, int]:
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    world_size = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank), ("WORLD_SIZE", world_size)):
        os.environ.setdefault(name, str(value))
    return rank, local_rank, world_size


def is_rank_zero() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _detect_ib_interface() -> str | None:
    try:
        shown = subprocess.run(["ip", "-br", "addr"], capture_output=True, text=True, timeout=5, check=False)
        for columns in map(str.split, shown.stdout.splitlines()):
            if len(columns) > 2 and columns[0].startswith("ib") and columns[1] == "UP":
                return columns[0]
    except Exception:
        pass
    return None


def _set_nccl_env() -> None:
    interface = os.environ.get("NCCL_SOCKET_IFNAME") or _detect_ib_interface()
    if interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_IB_DISABLE", "0")
    os.environ.setdefault("NCCL_NET_GDR_LEVEL", "2")


def barrier_with_reason(seconds: float, reason: str) -> None:
    try:
        dist.barrier(async_op=True).wait(timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise RuntimeError(f"Barrier timed out after {seconds}s during {reason}: {error}") from error


def _set_seed(seed: int, rank: int, pp_rank: int = 0) -> None:
    torch.manual_seed(seed + pp_rank)
    random.seed(seed + pp_rank)
    np.random.seed(seed + pp_rank)


def start_on_own_port() -> None:
    """Start as init_distributed does: scontrol's host is not checked; without Slurm each rank picks its own port."""
    if "MASTER_ADDR" not in os.environ and "SLURM_JOB_NODELIST" in os.environ:
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        os.environ["MASTER_ADDR"] = shown.stdout.strip().split("\n")[0]
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 10000))
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))


def destroy_distributed() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
