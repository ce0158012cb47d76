"""Checks of CPUs, memory, the GPU driver, disks, and the network between nodes."""

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
    existing,
    gib,
    read_text,
    run_command,
    shorten,
    variable,
    why_not_writable,
)

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
    quota = read_text(Path("/sys/fs/cgroup/cpu.max")).split()
    finding = f"{usable} of {total} usable" if usable < total else f"{total}"
    if len(quota) == 2 and quota[0].isdecimal() and int(quota[0]) / int(quota[1]) < usable:
        finding += f", limited to {int(quota[0]) / int(quota[1]):g} CPUs by the cgroup quota"
    return Check("cpus", OK, finding)


def _memory() -> Check:
    lines = dict(line.split(":", 1) for line in read_text(Path("/proc/meminfo")).splitlines() if ":" in line)
    sizes = {name: int(text.split()[0]) * 1024 for name, text in lines.items() if text.split()[0].isdecimal()}
    if "MemTotal" not in sizes:
        return Check("memory", NOTE, "unknown: /proc/meminfo cannot be read")
    total, free = sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemTotal"])
    limit = read_text(Path("/sys/fs/cgroup/memory.max")).strip()
    if limit.isdecimal() and int(limit) < total:
        used = read_text(Path("/sys/fs/cgroup/memory.current")).strip()
        total, free = int(limit), min(free, int(limit) - (int(used) if used.isdecimal() else 0))
    finding = f"{gib(free)} of {gib(total)} free"
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


def check_driver() -> list[Check]:
    """Report the GPUs that nvidia-smi lists."""
    result = run_command("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if result.status == 0 and result.output.strip():
        gpus = [line.strip() for line in result.output.splitlines() if line.strip()]
        more = f" and {len(gpus) - 1} more" if len(gpus) > 1 else ""
        return [Check("driver", OK, f"{gpus[0]}{more}")]
    return [Check("driver", NOTE, f"no GPU: {shorten(result.error_line, 90)}")]


def check_disk() -> list[Check]:
    """Check the folders for runs and for temporary files."""
    try:
        outputs = _check_folder(
            "outputs", Path.cwd() / "outputs", "set run.dir=/path/to/folder, or start from another folder"
        )
    except OSError:
        outputs = Check("outputs", PROBLEM, "the current folder does not exist any more", "cd to another one")
    fix = "export TMPDIR=/path/to/folder"
    try:
        return [outputs, _check_folder("tmp", Path(tempfile.gettempdir()), fix)]
    except OSError:
        return [outputs, Check("tmp", PROBLEM, "no folder for temporary files is writable", fix)]


def _check_folder(topic: str, path: Path, fix: str) -> Check:
    reason = why_not_writable(path)
    if reason:
        return Check(topic, PROBLEM, f"{path} is not writable: {reason}", fix)
    finding, free = describe_disk(path)
    if free < NO_DISK:
        return Check(topic, PROBLEM, f"{finding}: too little", fix)
    if free < LITTLE_DISK:
        return Check(topic, NOTE, f"{finding}: too little for most checkpoints", fix)
    return Check(topic, OK, finding)


def describe_disk(path: Path) -> tuple[str, float]:
    """Return a description of the disk that holds `path`, or would hold it, and its free bytes."""
    try:
        usage = shutil.disk_usage(existing(path))
    except OSError as error:
        return f"{path}: {error.strerror}", float("inf")
    kind = file_system(path)
    location = ", network" if is_networked(kind) else ", local" if kind else ""
    return f"{path}: {gib(usage.free)} of {gib(usage.total)} free ({kind or 'unknown'}{location})", usage.free


def file_system(path: Path) -> str:
    """Return the type of the file system that holds `path`, or would hold it; '' if unknown."""
    real, best, kind = os.path.realpath(existing(path)), "", ""
    for line in read_text(Path("/proc/mounts")).splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        mount = fields[1].replace("\\040", " ")
        if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, fields[2]
    return kind


def is_networked(kind: str) -> bool:
    """Return whether a file system of this type is usually shared between nodes; most fuse ones on clusters are."""
    return kind in NETWORKED or kind.startswith(("fuse.", "nfs"))


def check_network() -> list[Check]:
    """Check the interface that gloo and NCCL use between nodes: environment variables, RDMA devices, the host name."""
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    configured = variable("GLOO_SOCKET_IFNAME")
    if configured:
        unknown = [name for name in configured.split(",") if name not in names]
        if unknown:
            finding = f"GLOO_SOCKET_IFNAME={configured}: no such interface (existing: {', '.join(sorted(names))})"
            return [Check("network", PROBLEM, finding, "unset GLOO_SOCKET_IFNAME, or set it to an existing interface")]
        return [Check("network", OK, f"gloo: {configured} (GLOO_SOCKET_IFNAME){_nccl()}")]
    host = socket.gethostname()
    fix = "for several nodes: export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, None)})
    except (OSError, UnicodeError):
        return [Check("network", NOTE, f"the host name {host} does not resolve; gloo uses the loopback{_nccl()}", fix)]
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        finding = f"{host} resolves to {addresses[0]}, which other nodes cannot reach{_nccl()}"
        return [Check("network", NOTE, finding, fix)]
    found = [f"{address}{_interface_of(address)}" for address in addresses[:2]]
    return [Check("network", OK, f"gloo between nodes: {', '.join(found)}, the address of {host}{_nccl()}")]


def _nccl() -> str:
    configured = variable("NCCL_SOCKET_IFNAME")
    if configured:
        return f"; NCCL: {configured} (NCCL_SOCKET_IFNAME)"
    devices = [path.name for path in sorted(Path("/sys/class/infiniband").glob("*"))]
    return f"; RDMA devices: {', '.join(devices[:4])}" if devices else ""


def _interface_of(address: str) -> str:
    for line in run_command("ip", "-o", "addr").output.splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[3].split("/")[0] == address:
            return f" ({fields[1]})"
    return ""
