"""Requirements of the test cluster on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged", "ip", "unshare", "nsenter", "setpriv")


def missing_requirement() -> str | None:
    """Return why no cluster can run here, or None."""
    missing = [name for name in PROGRAMS if not shutil.which(name)]
    if missing:
        return f"programs are missing: {', '.join(missing)} (tests/slurm/cluster.py names the packages)"
    if os.geteuid():
        return "a cluster in network namespaces needs root"
    probe = "mount -t tmpfs tmpfs /dev/shm && ip link add switch type bridge && ip link add one type veth peer name two"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "sh", "-c", probe],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return f"namespaces are refused (CAP_SYS_ADMIN and CAP_NET_ADMIN are needed): {done.stderr.strip()}"
    return None
