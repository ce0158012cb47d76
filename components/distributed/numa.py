"""Binding of a rank's threads to the CPUs near its GPU.

Copies between a GPU and host memory of another NUMA node cross the link between the sockets. `torchrun --numa-binding`
(torch/numa/binding.py) does the same for its own workers, but needs numactl; here a rank binds itself, whoever started
it, within the CPUs that Slurm or the user allowed.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)


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
