"""A real Slurm cluster of eight nodes on this machine, for tests and for manual experiments.

    eval "$(python -m tests.slurm.cluster up)"    # eight idle nodes within seconds; sets SLURM_CONF
    sinfo; srun -N8 hostname; sbatch ...
    python -m tests.slurm.cluster crash 3         # power off; the cable first, so that peers get no reset
    python -m tests.slurm.cluster boot 3          # power on
    python -m tests.slurm.cluster cut 4           # pull the network cable, and `heal 4` plugs it in again
    python -m tests.slurm.cluster down

Needs root and Debian's packages; without them the tests of this folder are skipped:

    apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2

One munged, one slurmctld and eight slurmd run in namespaces, without systemd; nothing is written outside
/tmp/meshbook-slurm-N, where the logs stay when the cluster stops. Each node n1 to n8 has its own network, host name,
/dev/shm and processes, 64 declared CPUs and 8 fake GPUs, and a cable to one switch; files are shared. The partition
`main` is the default, and its jobs are requeued when `high` needs the nodes.

`--id N` (or MESHBOOK_SLURM_ID) selects a cluster; several can be up, and tests never use id 0, the default. Each is a
tree of PID namespaces:

    namespaces.sh cluster       # its end kills everything
      munged, slurmctld
      namespaces.sh node        # its end kills the node
        slurmd, jobs
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Self

from tests.slurm import configuration, processes
from tests.slurm.configuration import NODES

SCRIPT = Path(__file__).with_name("namespaces.sh")
IDENTITIES = range(1, 10)  # of clusters started by tests; 0 is reserved for manual use
ENDED = {"COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE"}
WAIT_TIMEOUT = 240.0
"""Timeout of every wait, in seconds; many times what a busy machine needs."""

Job = dict[str, str]


class ClusterError(AssertionError):
    """A command or an action on the cluster failed; the message has its output."""


class ClusterInUse(ClusterError):
    """A cluster with this id is up already."""


class Cluster:
    """One cluster, identified by its id. Stateless: any process can control a cluster that is up."""

    def __init__(self, identity: int) -> None:
        self.identity = identity
        self.base = Path(f"/tmp/meshbook-slurm-{identity}")  # short: a socket path has at most 108 characters
        self.subnet = f"10.209.{identity}"
        self.link = f"mbslurm{identity}"  # this machine's cable to the cluster's switch
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment for commands on this cluster: SLURM_CONF, without the variables of an enclosing job."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return inherited | {"SLURM_CONF": str(self.base / "etc" / "slurm.conf")}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @classmethod
    def started(cls, identities: Iterable[int] = IDENTITIES) -> Self:
        """Start a cluster with the first free id of these. It ends with this process."""
        for identity in identities:
            with contextlib.suppress(ClusterInUse):
                cluster = cls(identity)
                cluster.start()
                return cluster
        raise ClusterInUse(f"clusters {list(identities)} are all up")

    def start(self, lasting: bool = False) -> None:
        """Start the cluster and wait until every node is idle. Unless `lasting`, it ends with this process.

        Raises `ClusterInUse` if it is up already, and `ClusterError` with the errors in its logs if it does not start.
        """
        self.base.mkdir(mode=0o755, exist_ok=True)
        lock = os.open(self.base / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(
                lock, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # inherited by the cluster's processes until the last one ends
            self._delete_link()
            configuration.write(self.base, self.identity, self.subnet)
            self._process = self._spawn(lock, lasting)
        except BlockingIOError:
            raise ClusterInUse(f"cluster {self.identity} is up already or starting: {self.base}") from None
        finally:
            os.close(lock)
        try:
            for node in NODES:
                self.boot(node)
            self.wait_for_nodes("idle")
        except BaseException:
            self.stop()
            raise

    def _spawn(self, lock: int, lasting: bool) -> subprocess.Popen[bytes]:
        command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", str(SCRIPT)]
        command += ["cluster", str(self.base), self.subnet, self.link, str(os.getpid())]
        if not lasting:
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        with (self.base / "log" / "daemons.log").open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],
                cwd="/",
                env={name: self.environment[name] for name in ("PATH", "SLURM_CONF")},
            )

    def stop(self) -> None:
        """Kill every process of the cluster, jobs included, and remove its cable. Does nothing if it is not up."""
        init = self._init("cluster")
        if init:
            os.kill(init, signal.SIGKILL)
        until(lambda: not self._init("cluster"), lambda: "the cluster's processes do not end")
        if self._process:
            self._process.wait()
            self._process = None
        self._delete_link()
        if (self.base / "cgroup").exists():
            first, last = configuration.job_ids(self.identity)
            sweep = ["unshare", "--mount", str(SCRIPT), "sweep", str(self.base), str(first), str(last)]
            subprocess.run(sweep, capture_output=True, check=False)

    def crash(self, node: str) -> None:
        """Power a node off. Its cable is removed first, so that peers get no packets rather than closed connections."""
        self._switch("link", "delete", node)
        init = self._init("node", node)
        if init:
            os.kill(init, signal.SIGKILL)
        until(lambda: not self._init("node", node), lambda: f"{node} does not end")

    def boot(self, node: str) -> None:
        """Power a node on. Returns at once; use `wait_for_nodes` to wait for it."""
        if self._init("node", node):
            raise ClusterError(f"{node} is up already")

        def open_request() -> bool:
            try:
                request = os.open(self.base / "run" / "boot", os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                return False  # ENXIO: nobody reads it yet
            os.write(request, f"{node.removeprefix('n')}\n".encode())
            os.close(request)
            return True

        until(open_request, lambda: f"cluster {self.identity} does not come up\n{self._logged_errors()}")

    def cut(self, node: str) -> None:
        """Pull a node's network cable. Its processes continue."""
        self._switch("link", "set", node, "down")

    def heal(self, node: str) -> None:
        """Plug a node's network cable in again."""
        self._switch("link", "set", node, "up")

    def processes(self, node: str) -> list[int]:
        """Return the ids of the job processes on a node, without its init and slurmd, in the outer PID namespace."""
        init = self._init("node", node)
        found = processes.descendants(init) if init else {}
        return [process for process, command in found.items() if command[0] != "slurmd"]

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command on this cluster. Raises `ClusterError` with its output if it fails."""
        done = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=WAIT_TIMEOUT,
            check=False,
            restore_signals=False,  # SIGPIPE stays ignored: a busy controller may close the connection
        )
        if check and done.returncode:
            raise ClusterError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def node_states(self) -> dict[str, str]:
        """Return the state of every node from sinfo, such as "idle"; a * marks nodes that do not respond."""
        listed = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t", check=False).stdout
        return dict(line.split() for line in listed.splitlines())

    def wait_for_nodes(self, states: str | Collection[str], nodes: Iterable[str] = NODES) -> None:
        """Wait until each of these nodes is in one of these states of `node_states`."""
        wanted, awaited = _as_set(states), set(nodes)

        def reached() -> bool:
            if not self._init("cluster"):
                raise ClusterError(f"cluster {self.identity} ended\n{self._logged_errors()}")
            return {name for name, now in self.node_states().items() if now in wanted} >= awaited

        until(reached, lambda: f"nodes are {self.node_states()}, not {sorted(wanted)}\n{self._logged_errors()}")

    def jobs(self, job_id: str | int = "") -> list[Job]:
        """Return every job, or those of one array, as scontrol shows them: {"JobId": "1", "JobState": "RUNNING"}."""
        shown = self.run("scontrol", "--oneliner", "show", "job", *([str(job_id)] if job_id else [])).stdout
        fields = re.compile(r"(?:^| )([A-Z][A-Za-z/:]*)=")
        parts = [fields.split(line)[1:] for line in shown.splitlines() if line.startswith("JobId=")]
        return [dict(zip(each[::2], each[1::2], strict=True)) for each in parts]

    def job(self, job_id: str | int) -> Job:
        """Return the job with this id; for one task of an array, such as "7_2"."""
        (only,) = self.jobs(job_id)
        return only

    def wait_for(self, job_id: str | int, states: str | Collection[str], seconds: float = WAIT_TIMEOUT) -> Job:
        """Wait until a job is in one of these states. Raises `ClusterError` if it ends in another or time runs out."""
        wanted = _as_set(states)

        def reached() -> bool:
            now = self.job(job_id)["JobState"]
            if now in ENDED - wanted:
                raise ClusterError(f"job {job_id} did not get {sorted(wanted)}: {self.job(job_id)}")
            return now in wanted

        until(reached, lambda: f"job {job_id} is not {sorted(wanted)} after {seconds} s: {self.job(job_id)}", seconds)
        return self.job(job_id)

    def cancel(self, *job_ids: str | int) -> None:
        """Cancel jobs. Slurm kills processes that have not ended after KillWait (20 s)."""
        self.run("scancel", *map(str, job_ids))

    def reset(self) -> None:
        """Cancel every job, restore every node and wait until all are idle."""
        self.run("scancel", "--user=root")
        for node in NODES:
            if self._init("node", node):
                self.heal(node)
            else:
                self.boot(node)
        self.wait_for_nodes("idle")

    def _init(self, verb: str, node: str = "") -> int | None:
        """Return the process id of the init of the cluster or of a node, None if it is down."""
        wanted = [SCRIPT.name, verb, str(self.base)]
        for process, command in processes.all_commands().items():
            verb_and_arguments = [Path(command[1]).name, *command[2:4]] if len(command) > 4 else []
            matches = verb_and_arguments == wanted and command[0] == "bash" and node in ("", f"n{command[-1]}")
            if matches and processes.is_init(process):
                return process
        return None

    def _switch(self, *arguments: str) -> None:
        init = self._init("cluster")
        if not init:
            raise ClusterError(f"cluster {self.identity} is not up")
        self.run("nsenter", f"--net=/proc/{init}/ns/net", "ip", *arguments)

    def _delete_link(self) -> None:
        """Delete the cable now: the kernel removes those of a dead namespace too late for the next one of this name."""
        subprocess.run(["ip", "link", "delete", self.link], capture_output=True, check=False)

    def _logged_errors(self) -> str:
        """Return the last errors in the logs of the daemons."""
        log = self.base / "log"
        lines = [line for file in sorted(log.glob("*.log")) for line in file.read_text(errors="replace").splitlines()]
        errors = [line for line in lines if re.search("fatal|error|: line |Cannot", line)]
        return "\n".join([*dict.fromkeys(errors)][-15:] or [f"(no errors in {log})"])


def _as_set(states: str | Collection[str]) -> set[str]:
    return {states} if isinstance(states, str) else set(states)


def until(condition: Callable[[], bool], message: Callable[[], str], seconds: float = WAIT_TIMEOUT) -> None:
    """Poll until a condition holds. Raises `ClusterError` with this message if it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(message())
        time.sleep(0.05)


if __name__ == "__main__":
    from tests.slurm.by_hand import main

    main()
