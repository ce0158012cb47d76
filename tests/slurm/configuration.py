"""Configuration files of one cluster: slurm.conf, gres.conf, cgroup.conf, hosts, a munge key and the fake GPUs."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import subprocess
from pathlib import Path

NODES = [f"n{number}" for number in range(1, 9)]
CPUS, GPUS = 64, 8  # per node, declared only: all nodes share the hardware of this machine
JOBS_PER_CLUSTER = 100_000

# Timeouts are short, so that tests of failures are quick. A requeued job starts cred_expire + 1 s later.
# All nodes share a few real cores: no affinity, no limits, and slurmd does not check the declared size.
_SLURM_CONF = """\
ClusterName=meshbook{identity}
SlurmctldHost=controller({subnet}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={base}/run/munge.sock,cred_expire=5
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/run/slurmctld.pid
SlurmdPidFile={base}/run/slurmd-%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd-%n.log
MailProg=/bin/true
MpiDefault=none
FirstJobId={first_job}
MaxJobId={last_job}

ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
EnforcePartLimits=ALL

KillWait=20
SlurmdTimeout=10
MessageTimeout=10
ReturnToService=2
MinJobAge=3600
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={base}/log/jobcomp.txt

{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=30 PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=30 PriorityTier=10 PreemptMode=OFF
"""
_NODE = "NodeName={name} NodeAddr={address} CPUs={cpus} Boards=1 SocketsPerBoard=2 CoresPerSocket={cores} \
ThreadsPerCore=1 RealMemory=1000000 Gres=gpu:{gpus} State=UNKNOWN"


def write(base: Path, identity: int, subnet: str) -> None:
    """Write all files that a cluster reads under `base`, and clear those of an earlier cluster."""
    for folder in ("etc", "run", "log", "state", "spool", "dev", "cgroup"):
        shutil.rmtree(base / folder, ignore_errors=True)
    for folder in ("etc", "run", "log", "state", "dev", *(f"spool/{name}" for name in NODES)):
        (base / folder).mkdir(parents=True)
    os.mkfifo(base / "run" / "boot")
    _write_munge_key(base / "etc" / "munge.key")
    _write_gpus(base)
    addresses = {name: f"{subnet}.{number}" for number, name in enumerate(NODES, start=1)}
    names = {"localhost": "127.0.0.1", "controller": f"{subnet}.254", os.uname().nodename: f"{subnet}.253"}
    # torch's TCPStore does reverse lookups of IPv4-mapped IPv6 addresses, and warns if one fails.
    mapped = [f"::ffff:{address} {name}" for name, address in addresses.items()]
    hosts = [f"{address} {name}" for name, address in (names | addresses).items()]
    (base / "etc" / "hosts").write_text("\n".join(hosts + mapped) + "\n")
    first_job, last_job = job_ids(identity)
    (base / "etc" / "slurm.conf").write_text(
        _SLURM_CONF.format(
            identity=identity,
            subnet=subnet,
            base=base,
            first_job=first_job,
            last_job=last_job,
            tracking="cgroup" if _use_freezer(base) else "linuxproc",
            nodes="\n".join(
                _NODE.format(name=name, address=address, cpus=CPUS, cores=CPUS // 2, gpus=GPUS)
                for name, address in addresses.items()
            ),
        )
    )


def job_ids(identity: int) -> tuple[int, int]:
    """Return the first and last job id of a cluster. Clusters share the freezer, so ids must differ."""
    return identity * JOBS_PER_CLUSTER + 1, (identity + 1) * JOBS_PER_CLUSTER - 1


def _write_munge_key(file: Path) -> None:
    file.touch(mode=0o600)
    file.write_bytes(secrets.token_bytes(128))


def _write_gpus(base: Path) -> None:
    """Create copies of /dev/null as GPU device files, which Slurm counts."""
    for number in range(GPUS):
        device = base / "dev" / f"nvidia{number}"
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (base / "etc" / "gres.conf").write_text(f"Name=gpu File={base}/dev/nvidia[0-{GPUS - 1}]\n")


def _use_freezer(base: Path) -> bool:
    """Whether jobs can be tracked by cgroup, as on most clusters: then a signal reaches a task, but not its children.

    The cgroup v1 freezer is mounted for this cluster only. Where the mount fails, linuxproc tracks jobs by process
    ancestry and also signals the children.
    """
    root = base / "cgroup" / "freezer"
    root.mkdir(parents=True)
    mount = ["unshare", "--mount", "mount", "-t", "cgroup", "-o", "freezer", "cgroup", str(root)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        shutil.rmtree(base / "cgroup")
        return False
    settings = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={base}/cgroup\nConstrainCores=no\n"
    (base / "etc" / "cgroup.conf").write_text(settings)
    return True
