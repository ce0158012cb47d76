"""Rank and node of this process from environment variables, network interfaces, and the CPUs near its GPU.

A process is a rank if torchrun, or another launcher with the same variables, has set RANK and WORLD_SIZE, or if it is
a task of a Slurm step with several tasks (SLURM_STEP_ID is set, or SLURM_PROCID is above 0). A batch shell and `salloc`
also set SLURM_PROCID=0 and SLURM_NTASKS, but run no ranks. torchrun's and Slurm's variables are never mixed. An empty
variable counts as unset.

Copies between a GPU and host memory of another NUMA node cross the link between the sockets, so a rank's threads are
bound to the CPUs near its GPU. `torchrun --numa-binding` (torch/numa/binding.py) does the same for its own workers, but
needs numactl; here a rank binds itself, whoever started it, within the CPUs that Slurm or the user allowed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Collection, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from components.protocol.errors import ConfigError
from components.protocol.processes import EXPORTED, tasks_variable

logger = logging.getLogger(__name__)
_RDMA_DEVICES = Path("/sys/class/infiniband")


class RankEnvironmentError(ConfigError):
    """Error in the rank variables: one is missing, out of range, or contradicts another."""


class Source(StrEnum):
    """Source of the rank variables; single: there are none, and this is the only process."""

    torchrun = "torchrun"
    srun = "srun"
    single = "single"


@dataclass(frozen=True, slots=True)
class RankVariables:
    """Rank and node of this process. A field that no variable determines is None, never with `world_size` 1."""

    source: Source
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    num_nodes: int | None
    slurm_node: int | None = None

    @property
    def node(self) -> str:
        """Identifier of this node, the same on all its ranks and different on other nodes."""
        if self.slurm_node is not None:
            return f"slurm node {self.slurm_node}"
        if self.local_rank is not None:
            return f"node of rank {self.rank - self.local_rank}"  # torchrun numbers a node's ranks consecutively
        return socket.gethostname()


def read_rank_variables(environ: Mapping[str, str] | None = None) -> RankVariables:
    """Return the rank variables of this process.

    Args:
        environ: Variables to read; by default those of this process.

    Raises:
        RankEnvironmentError: A variable is not an integer, is missing although the others are set, or contradicts them.
    """
    environ = os.environ if environ is None else environ
    if _has_slurm_ranks(environ, "RANK", "WORLD_SIZE"):
        return _validated(_srun_variables(environ))
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return _validated(_torchrun_variables(environ))
    return RankVariables(Source.single, 0, 1, local_rank=0, local_world_size=1, num_nodes=1)


def read_local_variables(environ: Mapping[str, str] | None, rank: int, world_size: int) -> RankVariables:
    """Return the variables of a process whose rank is already known, as after `init_process_group`.

    Its node is determined by LOCAL_RANK, LOCAL_WORLD_SIZE and NUM_NODES, or inside a Slurm step without them by
    Slurm's variables.
    """
    environ = os.environ if environ is None else environ
    if world_size == 1:
        return RankVariables(Source.single, 0, 1, local_rank=0, local_world_size=1, num_nodes=1)
    if _has_slurm_ranks(environ, "RANK", "LOCAL_RANK") and _step_tasks(environ) == world_size:
        return _validated(_srun_variables(environ))
    return _validated(_torchrun_variables({**environ, "RANK": str(rank), "WORLD_SIZE": str(world_size)}))


def read_lone_local_variables(environ: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Return LOCAL_RANK and LOCAL_WORLD_SIZE of a process without RANK and WORLD_SIZE, by default 0 and 1.

    Raises:
        RankEnvironmentError: One is not an integer or is out of range.
    """
    environ = os.environ if environ is None else environ
    rank, size = _parse_integer(environ, "LOCAL_RANK"), _parse_integer(environ, "LOCAL_WORLD_SIZE")
    if size is not None and size < 1:
        raise RankEnvironmentError(f"LOCAL_WORLD_SIZE={size}: must be at least 1")
    if rank is not None and not 0 <= rank < (size or rank + 1):
        raise RankEnvironmentError(f"LOCAL_RANK={rank}: must be 0 or more and below LOCAL_WORLD_SIZE={size}")
    return rank or 0, size or 1


def _has_slurm_ranks(environ: Mapping[str, str], *names: str) -> bool:
    """Return whether Slurm's variables define the rank: a step of several tasks, and no launcher has set `names`.

    Variables that this process exported itself (`export_variables`) do not count as a launcher's.
    """
    exported = _exported_values(environ)
    if any(environ.get(name) and name not in exported for name in names):
        return False
    return _step_tasks(environ) > 1 or (_parse_integer(environ, "SLURM_PROCID") or 0) > 0


def _step_tasks(environ: Mapping[str, str]) -> int:
    """Return the number of tasks in this process's Slurm step, 0 outside a step."""
    stated = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEP_NUM_TASKS")
    in_step = stated or (_parse_integer(environ, "SLURM_PROCID") or 0) > 0
    return (_parse_integer(environ, tasks_variable(environ)) or 0) if in_step else 0


def require_integer(environ: Mapping[str, str], name: str, companion: str) -> int:
    """Return the integer in variable `name`, which must be set because `companion` is."""
    value = _parse_integer(environ, name)
    if value is None:
        raise RankEnvironmentError(
            f"{name} is not set although {companion} is: ranks need both; "
            "start with torchrun or srun, which set them, or unset both to run a single process"
        )
    return value


def _torchrun_variables(environ: Mapping[str, str]) -> RankVariables:
    rank = require_integer(environ, "RANK", f"WORLD_SIZE={environ.get('WORLD_SIZE')}")
    world_size = require_integer(environ, "WORLD_SIZE", f"RANK={rank}")
    local_rank, local_world_size = _parse_integer(environ, "LOCAL_RANK"), _parse_integer(environ, "LOCAL_WORLD_SIZE")
    num_nodes = _parse_integer(environ, "NUM_NODES")
    if num_nodes is None:
        num_nodes = _parse_integer(environ, "GROUP_WORLD_SIZE")  # torchrun's number of agents, one per node
    if num_nodes is None and local_world_size and world_size % local_world_size == 0:
        num_nodes = world_size // local_world_size
    if local_world_size is None and num_nodes and world_size % num_nodes == 0:
        local_world_size = world_size // num_nodes
    if world_size == 1:
        local_rank, local_world_size, num_nodes = local_rank or 0, local_world_size or 1, num_nodes or 1
    return RankVariables(Source.torchrun, rank, world_size, local_rank, local_world_size, num_nodes)


def _srun_variables(environ: Mapping[str, str]) -> RankVariables:
    name = tasks_variable(environ)
    tasks = f"{name}={environ.get(name)}"
    prefix = "SLURM_STEP_" if name == "SLURM_STEP_NUM_TASKS" else "SLURM_"
    node = _parse_integer(environ, "SLURM_NODEID")
    return RankVariables(
        Source.srun,
        rank=require_integer(environ, "SLURM_PROCID", tasks),
        world_size=require_integer(environ, name, f"SLURM_PROCID={environ['SLURM_PROCID']}"),
        local_rank=require_integer(environ, "SLURM_LOCALID", tasks),
        local_world_size=_tasks_on_node(environ.get(f"{prefix}TASKS_PER_NODE", ""), node),
        num_nodes=_parse_integer(environ, "SLURM_STEP_NUM_NODES" if prefix == "SLURM_STEP_" else "SLURM_NNODES"),
        slurm_node=node,
    )


def _tasks_on_node(tasks_per_node: str, node: int | None) -> int | None:
    """Return the number of tasks on a node from Slurm's list, such as 2(x3),1 for four nodes with 2, 2, 2 and 1."""
    counted = 0
    for count, _, repeat in re.findall(r"([0-9]{1,18})(\(x([0-9]{1,18})\))?", tasks_per_node):
        counted += int(repeat or 1)
        if node is not None and node < counted:
            return int(count)
    return None


def _validated(variables: RankVariables) -> RankVariables:
    names = {
        Source.srun: ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "tasks on this node"),
        Source.torchrun: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    }
    rank_name, world_name, local_name, local_world_name = names[variables.source]
    rank, world = variables.rank, variables.world_size
    local, local_world, nodes = variables.local_rank, variables.local_world_size, variables.num_nodes
    problems = []
    if world < 1:
        problems.append(f"{world_name}={world}: must be at least 1")
    if not 0 <= rank < max(world, 1):
        problems.append(f"{rank_name}={rank}: must lie between 0 and {world_name} - 1 = {world - 1}")
    if local_world is not None and not 1 <= local_world <= world:
        problems.append(f"{local_world_name}={local_world}: must lie between 1 and {world_name}={world}")
    elif local is not None and not 0 <= local < (local_world or world):
        bound = f"{local_world_name}={local_world}" if local_world else f"{world_name}={world}"
        problems.append(f"{local_name}={local}: must be 0 or more and below {bound}")
    if nodes is not None and not problems:
        problems += _node_problems(nodes, world, local_world)
    if problems:
        raise RankEnvironmentError(problems)
    return variables


def _node_problems(nodes: int, world: int, local_world: int | None) -> list[str]:
    if not 1 <= nodes <= world:
        return [f"NUM_NODES={nodes}: must lie between 1 and the number of processes, {world}"]
    elsewhere = world - local_world if local_world is not None else None
    if elsewhere is not None and (elsewhere < nodes - 1 or (nodes == 1 and elsewhere)):
        return [
            f"NUM_NODES={nodes}: contradicts LOCAL_WORLD_SIZE={local_world} of WORLD_SIZE={world}, "
            f"which leaves {elsewhere} processes for {nodes - 1} other nodes; unset NUM_NODES or correct it"
        ]
    return []


def _parse_integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise RankEnvironmentError(f"{name}={text!r}: must be a whole number") from None


def read_integer(name: str) -> int | None:
    """Return the integer in variable `name` of this process, None if it is unset or empty."""
    return _parse_integer(os.environ, name)


def export_variables(values: Mapping[str, str], environ: MutableMapping[str, str] | None = None) -> None:
    """Set variables for code called by this process, and record their old values for `restore_variables`."""
    environ = os.environ if environ is None else environ
    previous = _exported_values(environ)
    for name, value in values.items():
        if environ.get(name) != value:
            previous.setdefault(name, environ.get(name))
            environ[name] = value
    if previous:
        environ[EXPORTED] = json.dumps({"pid": os.getpid(), "previous": previous})


def restore_variables(environ: MutableMapping[str, str] | None = None) -> None:
    """Undo every `export_variables` of this process, so that no later code or child reads stale values."""
    environ = os.environ if environ is None else environ
    for name, value in _exported_values(environ).items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    environ.pop(EXPORTED, None)


def _exported_values(environ: Mapping[str, str]) -> dict[str, str | None]:
    record = json.loads(environ.get(EXPORTED) or "{}")
    return record["previous"] if record.get("pid") == os.getpid() else {}  # a child process inherits the record


def bind_to_gpu(device: torch.device, root: Path = Path("/")) -> str:
    """Bind this process to the CPUs of its GPU's NUMA node; return what was bound, empty if nothing had to be.

    Threads started afterwards inherit it. Nothing is bound on a CPU, on a machine with one NUMA node, and if the
    process may use CPUs of that node only. If it may use none of them, a warning is logged.

    Args:
        root: Root of the file system with /sys and /proc.
    """
    if device.type != "cuda" or not hasattr(os, "sched_setaffinity"):
        return ""
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the PCI address
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
        cpus = _read_cpus((root / f"sys/devices/system/node/node{node}/cpulist").read_text())
    except FileNotFoundError:  # a node of -1 too: the machine has one, or a virtual machine hides them
        return ""
    allowed = os.sched_getaffinity(0)
    if allowed <= cpus:
        return ""
    if not allowed & cpus:
        logger.warning(
            "cluster.numa_binding=auto: this process may not use any CPU of NUMA node %d, which GPU %s is attached to; "
            "its copies cross sockets. Allocate whole nodes (cluster.exclusive=true), or set it to off",
            *(node, address),
        )
        return ""
    for thread in (root / "proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended
            if os.sched_getaffinity(int(thread.name)) == allowed:  # others were bound on purpose
                os.sched_setaffinity(int(thread.name), allowed & cpus)
    return f"CPUs: rank 0 is bound to the {len(allowed & cpus)} of NUMA node {node}, where its GPU is"


def _read_cpus(ranges: str) -> set[int]:
    """Return the CPUs of a list such as 0-3,8-11."""
    cpus: set[int] = set()
    for each in filter(None, ranges.strip().split(",")):
        first, _, last = each.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _detect_ib_interface() -> str | None:
    """Detect the first UP InfiniBand interface with an IP address (KempnerForge, distributed/setup.py).

    InfiniBand interfaces come first, then Ethernet interfaces of RDMA devices (RoCE). The result is this node's; other
    nodes may differ, and each sets its own. None, with a log record, if there is none or `ip` fails.
    """
    command = shutil.which("ip")
    if command is None:
        logger.debug("InfiniBand detection skipped: the command `ip` is not on PATH")
        return None
    try:
        output = subprocess.run([command, "-br", "addr"], capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("InfiniBand detection skipped: `ip -br addr` failed: %s", error)
        return None
    return _first_rdma_interface(output, {path.name for path in _RDMA_DEVICES.glob("*/device/net/*")})


def _first_rdma_interface(brief_addresses: str, rdma_names: Collection[str]) -> str | None:
    """Return the first RDMA interface in the output of `ip -br addr` that is up and has an address.

    Args:
        rdma_names: Names of the interfaces of RDMA devices, which need not begin with `ib`.
    """
    up = []
    for line in brief_addresses.splitlines():
        name, state, *addresses = line.split() or ("", "")
        if state == "UP" and addresses:
            up.append(name.split("@")[0])  # a child interface is listed with its parent: ib0.8001@ib0
    infiniband = [name for name in up if name.startswith("ib")]
    return next(iter([*infiniband, *(name for name in up if name in rdma_names)]), None)


def _set_nccl_env() -> None:
    """Set NCCL's and gloo's network variables that are unset (KempnerForge, distributed/setup.py).

    If there is an RDMA interface, both bind to it and NCCL may use RDMA and GPUDirect; otherwise NCCL chooses.
    NCCL_SOCKET_IFNAME allows patterns (^lo, =ib0, eth, a list) that gloo does not support, so gloo gets its value only
    if it is the name of an interface of this node.
    """
    configured = os.environ.get("NCCL_SOCKET_IFNAME")
    detected = _detect_ib_interface()
    interface = configured or detected
    if interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        if interface in {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        elif "GLOO_SOCKET_IFNAME" not in os.environ:
            logger.info("NCCL_SOCKET_IFNAME=%s is not the name of one interface; gloo chooses its interface", interface)
    if detected:
        os.environ.setdefault("NCCL_IB_DISABLE", "0")
        os.environ.setdefault("NCCL_NET_GDR_LEVEL", "2")
    if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "0":
        logger.warning(
            "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 disables NCCL's timeouts: a stuck collective hangs forever; unset it"
        )
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
