"""A player of rendered manifests: runs each pod as processes of this machine, as the Job controller and kubelet would.

    with Player(submission.objects, folder) as player:
        player.play(until=lambda: ...)            # or until the job ends
        player.evict(1)                           # SIGTERM, and SIGKILL after the pod's grace period
        assert player.play() == "Complete"

Each pod has its own network with an address, a host name, /etc/hosts with the names that the headless Service would
give, /dev/shm of the manifest's size, process ids, and exactly the manifest's environment; its command is process 1.
All pods share the files of this machine, which stand for both the image and the volume. A pod that ends is replaced,
fails the job or completes its index by the manifest's podFailurePolicy. Nothing is scheduled, pulled or admitted.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.kubernetes.desk import PROJECT
from tests.kubernetes.test_manifest import expand, pod_of
from tests.preloaded import PreloadedPopen

SUBNET = "10.213.0"
TIMEOUT = 120.0
"""Timeout of every wait, in seconds; many times what a busy machine needs."""
_NEWNS, _NEWPID = 0x00020000, 0x20000000
_NAMESPACES = ("net", "uts", "mnt")


def missing_requirement() -> str | None:
    """Return why no pods can be played here, or None."""
    if os.geteuid():
        return "pods in namespaces need root"
    probe = "mount -t tmpfs tmpfs /dev/shm && ip link add switch type bridge && ip link add one type veth peer name two"
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "sh", "-c", probe]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no unshare (Debian: util-linux)"
    if done.returncode:
        return f"namespaces are refused, or there is no ip (Debian: iproute2): {done.stderr.strip()}"
    return None


@dataclass
class PlayedPod:
    """One pod: its sandbox, which holds the namespaces, and its container's process 1."""

    index: int
    uid: str
    sandbox: subprocess.Popen[bytes]
    container: PreloadedPopen
    log: Path
    disrupted: bool = False
    """Whether the cluster evicted it (condition DisruptionTarget)."""
    kill_at: float | None = None
    """Time of SIGKILL, after SIGTERM."""

    def terminate(self, grace: float) -> None:
        """Send SIGTERM to process 1, and SIGKILL after the grace period."""
        if self.container.poll() is None and self.kill_at is None:
            self.container.send_signal(signal.SIGTERM)
            self.kill_at = time.monotonic() + grace


@dataclass
class Player:
    """The pods of one Indexed Job, and its state."""

    objects: list[dict[str, Any]]
    folder: Path
    """Folder for the logs of the pods."""
    state: str = ""
    """Complete, Failed or Deleted; empty while the job runs."""
    pods: dict[int, PlayedPod] = field(default_factory=dict)
    ended: list[tuple[int, int]] = field(default_factory=list)
    """Index and exit status of each pod that ended, in order."""
    complete: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.job = next(each for each in self.objects if each["kind"] == "Job")
        self.name, self.spec = self.job["metadata"]["name"], pod_of(self.job)
        self.grace = self.spec["terminationGracePeriodSeconds"]
        self.started = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self.hosts = self.folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")

    def __enter__(self) -> Self:
        self.switch = _sandbox("--net")
        _inside(self.switch, "ip link add switch type bridge && ip link set switch up", "net")
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods.values():
            pod.container.kill()
            self._remove(pod)
        self.switch.kill()
        self.switch.wait()

    def play(self, until: Callable[[], object] = lambda: False) -> str:
        """Start, replace and end pods until the job has ended or `until` returns true; return the job's state."""
        deadline = time.monotonic() + TIMEOUT
        while not (self.state and not self.pods) and not until():
            self._reconcile()
            assert time.monotonic() < deadline, f"nothing happened within {TIMEOUT:g} s\n{self.logs()}"
            time.sleep(0.05)
        return self.state

    def evict(self, index: int) -> None:
        """Evict a pod, as for one of a higher priority or a drained node: it has its grace period to end."""
        self.pods[index].disrupted = True
        self.pods[index].terminate(self.grace)

    def lose_node(self, index: int) -> None:
        """Kill all processes of a pod at once, as if its node had lost power."""
        self.pods[index].disrupted = True
        self.pods[index].container.kill()

    def delete(self) -> None:
        """Delete the job: its pods have their grace period to end, and are not replaced."""
        self.state = "Deleted"
        for pod in self.pods.values():
            pod.terminate(self.grace)

    def logs(self) -> str:
        """Return the output of all pods."""
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in sorted(self.folder.glob("pod_*.log")))

    def _reconcile(self) -> None:
        """Take one step of the controller and the kubelet."""
        for index in range(self.job["spec"]["completions"]):
            if not self.state and index not in self.pods and index not in self.complete:
                self.pods[index] = self._start(index)
        for index, pod in list(self.pods.items()):
            status = pod.container.poll()
            if status is None and pod.kill_at is not None and time.monotonic() > pod.kill_at:
                pod.container.kill()
            if status is None:
                continue
            self._remove(pod)
            del self.pods[index]
            self.ended.append((index, status))
            self._conclude(pod, status)

    def _conclude(self, pod: PlayedPod, status: int) -> None:
        """Decide what the end of a pod means, by the manifest's podFailurePolicy."""
        if self.state:
            return
        if status == 0:
            self.complete.add(pod.index)
            self.state = "Complete" if len(self.complete) == self.job["spec"]["completions"] else ""
        elif self._action(pod, status) != "Ignore":
            self.state = "Failed"
            for other in self.pods.values():
                other.terminate(self.grace)

    def _action(self, pod: PlayedPod, status: int) -> str:
        for rule in self.job["spec"]["podFailurePolicy"]["rules"]:
            if "onPodConditions" in rule:
                matches = pod.disrupted and rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
            else:
                codes = rule["onExitCodes"]
                matches = (status % 256 in codes["values"]) == (codes["operator"] == "In")
            if matches:
                return rule["action"]
        return "Count"  # fails the job, since its backoffLimit is 0

    def _start(self, index: int) -> PlayedPod:
        """Start a pod with a new address and uid."""
        self.started += 1
        address, uid, name = f"{SUBNET}.{self.started}", str(uuid.uuid4()), f"{self.name}-{index}"
        host = f"{name}.{self.spec['subdomain']}"
        others = [line for line in self.hosts.read_text().splitlines() if f" {host} " not in f"{line} "]
        self.hosts.write_text("\n".join([*others, f"{address} {host} {name}"]) + "\n")
        sandbox = _sandbox("--net", "--uts", "--mount")
        cable = f"pod{self.started}"
        _inside(self.switch, f"ip link add {cable} type veth peer name eth0 netns {sandbox.pid}", "net")
        _inside(self.switch, f"ip link set {cable} master switch up", "net")
        shm = self.spec["volumes"][0]["emptyDir"]["sizeLimit"].removesuffix("i")
        setup = (
            f"ip link set lo up && ip address add {address}/24 dev eth0 && ip link set eth0 up && hostname {name} && "
            f"mount --bind {self.hosts} /etc/hosts && mount -t tmpfs -o size={shm} tmpfs /dev/shm"
        )
        _inside(sandbox, setup, *_NAMESPACES)
        container, log = self.spec["containers"][0], self.folder / f"pod_{self.started}_index_{index}.log"
        with log.open("wb") as output:
            process = PreloadedPopen(
                [sys.executable, *container["command"][1:]],
                cwd=container["workingDir"],
                env=_image_environment() | self._environment(index, uid),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=lambda: _enter(sandbox.pid),
            )
        return PlayedPod(index, uid, sandbox, process, log)

    def _environment(self, index: int, uid: str) -> dict[str, str]:
        """Return the variables of the manifest, and those that Kubernetes adds."""
        fields = {"metadata.uid": uid, "spec.nodeName": f"node-{index}"}
        variables: dict[str, str] = {}
        for each in self.spec["containers"][0]["env"]:
            value = each.get("value")
            field_path = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            variables[each["name"]] = expand(value, variables) if value is not None else fields[field_path]
        return variables | {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}

    def _remove(self, pod: PlayedPod) -> None:
        pod.container.wait()
        pod.sandbox.kill()
        pod.sandbox.wait()


def _image_environment() -> dict[str, str]:
    """Return the variables that the image sets: the interpreter and Meshbook's code, and nothing of this process."""
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(PROJECT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def _sandbox(*namespaces: str) -> subprocess.Popen[bytes]:
    """Start a process that only holds new namespaces, and wait until it has them."""
    holder = subprocess.Popen(["unshare", *namespaces, "sleep", "infinity"])
    while Path(f"/proc/{holder.pid}/comm").read_text() != "sleep\n":
        time.sleep(0.005)
    return holder


def _inside(sandbox: subprocess.Popen[bytes], script: str, *namespaces: str) -> None:
    """Run a shell script in namespaces of a sandbox."""
    entered = [f"--{'mount' if name == 'mnt' else name}=/proc/{sandbox.pid}/ns/{name}" for name in namespaces]
    subprocess.run(["nsenter", *entered, "sh", "-c", script], check=True)


def _enter(sandbox: int) -> None:
    """Enter a sandbox and continue as process 1 of a container; the calling process waits for it and forwards SIGTERM.

    SIGKILL of the calling process ends the container, as PR_SET_PDEATHSIG.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    folder = os.getcwd()
    handles = [os.open(f"/proc/{sandbox}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    for handle in handles:
        check(libc.setns(handle, 0))
        os.close(handle)
    check(libc.unshare(_NEWNS | _NEWPID))
    child = os.fork()
    if child:
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(status if status >= 0 else 128 - status)
    check(libc.prctl(1, signal.SIGKILL, 0, 0, 0))
    check(libc.mount(b"proc", b"/proc", b"proc", 0, None))
    os.chdir(folder)


def rank_logs(run_dir: Path) -> str:
    """Return the logs of all ranks."""
    files = sorted(run_dir.glob("logs/attempt_*/rank_*.log"))
    return "\n".join(f"--- {file.relative_to(run_dir)}\n{file.read_text()[-2000:]}" for file in files)
