"""Checks of CPUs, memory, GPUs as the driver reports them, disks, and the network between nodes."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

from scripts._doctor.check import (
    NOTE,
    OK,
    PROBLEM,
    Check,
    ask,
    existing,
    gib,
    read_text,
    shorten,
    variable,
    why_not_writable,
)

LITTLE_MEMORY, LITTLE_SHM = 4 * 2**30, 2**30
LITTLE_DISK, NO_DISK = 5 * 2**30, 2**28
NETWORKED = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "9p", "wekafs", "pvfs2", "afs",
             "glusterfs", "orangefs", "panfs", "quobyte"}  # fmt: skip


def check_machine() -> list[Check]:
    """Report CPUs, memory and shared memory as far as this process may use them."""
    return [_cpus(), _memory(), _shared_memory()]


def _cpus() -> Check:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    quota = read_text(Path("/sys/fs/cgroup/cpu.max")).split()
    told = f"{usable} of {total} usable" if usable < total else f"{total}"
    if len(quota) == 2 and quota[0].isdigit() and int(quota[0]) / int(quota[1]) < usable:
        told += f", limited to the time of {int(quota[0]) / int(quota[1]):g} (cgroup)"
    return Check("cpus", OK, told)


def _memory() -> Check:
    lines = dict(line.split(":", 1) for line in read_text(Path("/proc/meminfo")).splitlines() if ":" in line)
    sizes = {name: int(text.split()[0]) * 1024 for name, text in lines.items() if text.split()[0].isdigit()}
    if "MemTotal" not in sizes:
        return Check("memory", NOTE, "unknown: /proc/meminfo cannot be read")
    total, free = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemTotal"])
    limit = read_text(Path("/sys/fs/cgroup/memory.max")).strip()
    if limit.isdigit() and int(limit) < total:
        used = read_text(Path("/sys/fs/cgroup/memory.current")).strip()
        total, free = int(limit), min(free, int(limit) - (int(used) if used.isdigit() else 0))
    told = f"{gib(free)} of {gib(total)} free"
    if free < LITTLE_MEMORY:
        return Check("memory", NOTE, f"{told}: little for more than a tiny model", "model=tiny, or more memory")
    return Check("memory", OK, told)


def _shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Check("/dev/shm", NOTE, "there is none; NCCL needs it within a node")
    if free < LITTLE_SHM:
        mend = "in a container: docker run --ipc=host or --shm-size=8g"
        return Check("/dev/shm", NOTE, f"{gib(free)} free: little for NCCL with several GPUs", mend)
    return Check("/dev/shm", OK, f"{gib(free)} free")


def check_driver() -> list[Check]:
    """Report the GPUs that nvidia-smi lists."""
    answer = ask("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if answer.status == 0 and answer.output.strip():
        cards = [line.strip() for line in answer.output.splitlines() if line.strip()]
        more = f" and {len(cards) - 1} more" if len(cards) > 1 else ""
        return [Check("driver", OK, f"{cards[0]}{more}")]
    return [Check("driver", NOTE, f"no GPU: {shorten(answer.complaint, 90)}")]


def check_disk() -> list[Check]:
    """Check the folders for runs and for temporary files."""
    try:
        outputs = _place(
            "outputs", Path.cwd() / "outputs", "run.dir=/a/folder/of/yours, or another folder to start from"
        )
    except OSError:
        outputs = Check("outputs", PROBLEM, "this folder is gone", "cd to another one")
    mend = "export TMPDIR=/a/folder/of/yours"
    try:
        return [outputs, _place("tmp", Path(tempfile.gettempdir()), mend)]
    except OSError:
        return [outputs, Check("tmp", PROBLEM, "no folder for temporary files can be written", mend)]


def _place(topic: str, path: Path, mend: str) -> Check:
    reason = why_not_writable(path)
    if reason:
        return Check(topic, PROBLEM, f"{path} cannot be written: {reason}", mend)
    told, free = describe_place(path)
    if free < NO_DISK:
        return Check(topic, PROBLEM, f"{told}: too little", mend)
    if free < LITTLE_DISK:
        return Check(topic, NOTE, f"{told}: little for checkpoints", mend)
    return Check(topic, OK, told)


def describe_place(path: Path) -> tuple[str, float]:
    """Return a description of the disk that holds `path` or would hold it, and its free bytes."""
    try:
        usage = shutil.disk_usage(existing(path))
    except OSError as error:
        return f"{path}: {error.strerror}", float("inf")
    kind = file_system(path)
    where = ", network" if is_networked(kind) else ", local" if kind else ""
    return f"{path}: {gib(usage.free)} of {gib(usage.total)} free ({kind or 'unknown'}{where})", usage.free


def file_system(path: Path) -> str:
    """Return the type of the file system that holds `path` or would hold it, '' if unknown."""
    place, best, kind = os.path.realpath(existing(path)), "", ""
    for line in read_text(Path("/proc/mounts")).splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        mount = fields[1].replace("\\040", " ")
        if (place == mount or place.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind


def is_networked(kind: str) -> bool:
    """Return whether other nodes usually mount a file system of this type; most fuse ones are a cluster's."""
    return kind in NETWORKED or kind.startswith(("fuse.", "nfs"))


def check_network() -> list[Check]:
    """Check the interface for gloo and NCCL between nodes: variables, RDMA devices, the host's name."""
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    asked = variable("GLOO_SOCKET_IFNAME")
    if asked:
        unknown = [name for name in asked.split(",") if name not in names]
        if unknown:
            told = f"GLOO_SOCKET_IFNAME={asked}: there is no such interface (there are: {', '.join(sorted(names))})"
            return [Check("network", PROBLEM, told, "unset GLOO_SOCKET_IFNAME, or name one of these")]
        return [Check("network", OK, f"gloo: {asked} (GLOO_SOCKET_IFNAME){_nccl()}")]
    host = socket.gethostname()
    mend = "for several nodes: export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except (OSError, UnicodeError):
        return [
            Check("network", NOTE, f"the name of this host, {host}, does not resolve; loopback is used{_nccl()}", mend)
        ]
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        told = f"{host} resolves to {addresses[0]}, which no other node can reach{_nccl()}"
        return [Check("network", NOTE, told, mend)]
    where = [f"{address}{_interface_of(address)}" for address in addresses[:2]]
    return [Check("network", OK, f"gloo between nodes: {', '.join(where)}, the address of {host}{_nccl()}")]


def _nccl() -> str:
    asked = variable("NCCL_SOCKET_IFNAME")
    if asked:
        return f"; NCCL: {asked} (NCCL_SOCKET_IFNAME)"
    devices = [path.name for path in sorted(Path("/sys/class/infiniband").glob("*"))]
    return f"; RDMA devices: {', '.join(devices[:4])}" if devices else ""


def _interface_of(address: str) -> str:
    for line in ask("ip", "-o", "addr").output.splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[3].split("/")[0] == address:
            return f" ({fields[1]})"
    return ""
