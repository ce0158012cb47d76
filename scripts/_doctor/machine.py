"""Checks of CPUs, memory, the GPU driver, disks, and the network between nodes."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from components.protocol.processes import usable_memory
from scripts._doctor.check import NOTE, OK, PROBLEM, Check, read_text, run_command, shorten, variable

LITTLE_MEMORY, LITTLE_SHM = 4 * 2**30, 2**30
LITTLE_DISK, NO_DISK = 5 * 2**30, 2**28
NETWORKED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "9p", "wekafs", "pvfs2", "afs",
             "glusterfs", "orangefs", "panfs", "quobyte"}  # fmt: skip


def check_machine() -> list[Check]:
    """Report the CPUs, memory and shared memory available to this process."""
    return [_cpus(), _memory(), _shared_memory()]


def _cpus() -> Check:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    finding = f"{usable} of {total} usable" if usable < total else f"{total}"
    quota = re.match(r"(\d+) (\d+)", read_text(Path("/sys/fs/cgroup/cpu.max")))
    if quota and (cpus := int(quota[1]) / int(quota[2])) < usable:
        finding += f", limited to {cpus:g} CPUs by the cgroup quota"
    return Check("cpus", OK, finding)


def _memory() -> Check:
    available = re.search(r"MemAvailable:\s*(\d+)", read_text(Path("/proc/meminfo")))
    if available is None:
        return Check("memory", NOTE, "unknown: /proc/meminfo cannot be read")
    total, free = usable_memory(), int(available[1]) * 1024
    limit, used = (read_text(Path("/sys/fs/cgroup", name)).strip() for name in ("memory.max", "memory.current"))
    if limit == str(total) and used.isdecimal():  # of a container
        free = min(free, total - int(used))
    finding = f"{gib(min(free, total))} of {gib(total)} free"
    if free < LITTLE_MEMORY:
        return Check("memory", NOTE, f"{finding}: enough for a tiny model only", "set model=tiny, or free memory")
    return Check("memory", OK, finding)


def _shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Check("/dev/shm", NOTE, "does not exist; NCCL needs it within a node")
    if free < LITTLE_SHM:
        fix = "in a container: docker run --ipc=host or --shm-size=8g"
        return Check("/dev/shm", NOTE, f"{gib(free)} free: possibly too little for NCCL with several GPUs", fix)
    return Check("/dev/shm", OK, f"{gib(free)} free")


def gib(size: float) -> str:
    """Format a number of bytes in GiB or TiB."""
    return f"{size / 2**30:.3g} GiB" if size < 2**40 else f"{size / 2**40:.3g} TiB"


def check_driver() -> list[Check]:
    """Report the GPUs that nvidia-smi lists."""
    result = run_command("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    gpus = [line.strip() for line in result.output.splitlines() if line.strip()]
    if result.status != 0 or not gpus:
        return [Check("driver", NOTE, f"no GPU: {shorten(result.error_line, 90)}")]
    return [Check("driver", OK, gpus[0] + (f" and {len(gpus) - 1} more" if len(gpus) > 1 else ""))]


def check_disk() -> list[Check]:
    """Check the folders for runs and for temporary files."""
    outputs = (
        "the current folder does not exist any more",
        "set run.dir=/path/to/folder, or start from another folder",
    )
    tmp = ("no folder for temporary files is writable", "export TMPDIR=/path/to/folder")
    return [
        _check_folder("outputs", lambda: Path.cwd() / "outputs", *outputs),
        _check_folder("tmp", lambda: Path(tempfile.gettempdir()), *tmp),
    ]


def _check_folder(topic: str, find: Callable[[], Path], missing: str, fix: str) -> Check:
    try:
        path = find()
    except OSError:
        return Check(topic, PROBLEM, missing, fix)
    if reason := why_not_writable(path):
        return Check(topic, PROBLEM, f"{path} is not writable: {reason}", fix)
    finding, free = describe_disk(path)
    if free < NO_DISK:
        return Check(topic, PROBLEM, f"{finding}: too little", fix)
    if free < LITTLE_DISK:
        return Check(topic, NOTE, f"{finding}: too little for most checkpoints", fix)
    return Check(topic, OK, finding)


def why_not_writable(folder: Path) -> str:
    """Return why no file can be created in `folder` or its nearest existing parent; '' if one can."""
    parent = _existing(folder)
    try:
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        return f"{parent}: {error.strerror}"
    return ""


def describe_disk(path: Path) -> tuple[str, float]:
    """Return a description of the disk that holds `path`, or would hold it, and its free bytes."""
    try:
        usage = shutil.disk_usage(_existing(path))
    except OSError as error:
        return f"{path}: {error.strerror}", float("inf")
    kind = file_system(path)
    location = ", network" if is_networked(kind) else ", local" if kind else ""
    return f"{path}: {gib(usage.free)} of {gib(usage.total)} free ({kind or 'unknown'}{location})", usage.free


def file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`, or would hold it; '' if unknown."""
    lines = [line.split() for line in read_text(Path("/proc/mounts")).splitlines()]
    mounts = {fields[1].replace("\\040", " "): fields[2] for fields in lines if len(fields) > 2}
    real = Path(os.path.realpath(_existing(path)))
    return next((mounts[str(folder)] for folder in (real, *real.parents) if str(folder) in mounts), "")


def is_networked(kind: str) -> bool:
    """Return whether a file system of this type is usually shared between nodes; most fuse ones on clusters are."""
    return kind in NETWORKED or kind.startswith(("fuse.", "nfs"))


def _existing(path: Path) -> Path:
    """Return `path`, or its nearest existing parent."""
    return next((each for each in (path, *path.parents) if os.path.exists(each)), Path("/"))


def check_network() -> list[Check]:
    """Check the interface that gloo and NCCL use between nodes: environment variables, RDMA devices, the host name."""
    devices = [path.name for path in sorted(Path("/sys/class/infiniband").glob("*"))]
    nccl = f"; RDMA devices: {', '.join(devices[:4])}" if devices else ""
    if configured := variable("NCCL_SOCKET_IFNAME"):
        nccl = f"; NCCL: {configured} (NCCL_SOCKET_IFNAME)"
    if configured := variable("GLOO_SOCKET_IFNAME"):
        names = {name for _, name in socket.if_nameindex()}
        if not names.issuperset(configured.split(",")):
            finding = f"GLOO_SOCKET_IFNAME={configured}: no such interface (existing: {', '.join(sorted(names))})"
            return [Check("network", PROBLEM, finding, "unset GLOO_SOCKET_IFNAME, or set it to an existing interface")]
        return [Check("network", OK, f"gloo: {configured} (GLOO_SOCKET_IFNAME){nccl}")]
    host = socket.gethostname()
    fix = "for several nodes: export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except (OSError, UnicodeError):
        return [Check("network", NOTE, f"the host name {host} does not resolve; gloo uses the loopback{nccl}", fix)]
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        finding = f"{host} resolves to {addresses[0]}, which other nodes cannot reach{nccl}"
        return [Check("network", NOTE, finding, fix)]
    interfaces = run_command("ip", "-o", "addr").output  # a line: 2: eth0 inet 10.0.0.7/24 ...
    names = {
        fields[3].partition("/")[0]: fields[1] for line in interfaces.splitlines() if len(fields := line.split()) > 3
    }
    found = [f"{address} ({names[address]})" if address in names else address for address in addresses[:2]]
    return [Check("network", OK, f"gloo between nodes: {', '.join(found)}, the address of {host}{nccl}")]
