"""A run on four nodes with a random fault every minute ends with the weights of an undisturbed run.

    MESHBOOK_TORTURE=1 MESHBOOK_CHAOS_MINUTES=45 pytest tests/slurm/test_chaos.py -s

The faults: a node crashes and boots later; its cable is cut, for seconds or for good; a rank is killed or hangs; the
job is preempted. All the time every save is slow on one rank, and one request in a hundred to the S3 server with the
copies of the checkpoints fails. The weights are compared bitwise.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, until
from tests.slurm.login import CPU, QUICK, CommandResult, Login, log_of, result_of, steps_of
from tests.storage.conftest import S3, free_port, needs_s3, process_on_port
from tests.suites import TORTURE

MINUTES = float(os.environ.get("MESHBOOK_CHAOS_MINUTES", "45"))
PAUSE = 20.0
"""Most seconds from the progress after a fault to the next one."""
STEPS = round(MINUTES * 40)
UP = {"idle", "alloc", "mix", "comp"}
RUN = (
    *("cluster=slurm_1node", "cluster.nodes=4", "cluster.procs_per_node=1", "parallelism=fsdp2", *CPU, *QUICK),
    *("training.global_batch_size=8", "training.micro_batch_size=2", f"training.max_steps={STEPS}"),
    *("training.log_every=1", "checkpoint.every=10", "checkpoint.keep=3", "checkpoint.export=true"),
    *("training.step_timeout_seconds=20", "cluster.requeue.max=1000", "cluster.requeue.hang=1000"),
    *("cluster.requeue.crash=1000", "cluster.requeue.without_progress=20", "cluster.requeue.before_first_step=20"),
)
SLOW_DISK = "cluster.env.MESHBOOK_FAULT='slow=0.5:after_shards:rank1:*'"


class Chaos:
    """Injects random faults into the job of a run, and repairs the cluster after each."""

    def __init__(self, cluster: Cluster, submission: CommandResult, rng: random.Random) -> None:
        self.cluster, self.submission, self.rng = cluster, submission, rng
        self.faults: list[str] = []

    @property
    def run_dir(self) -> Path:
        return self.submission.run_dir

    def node(self) -> str:
        """Return a random node of the running attempt."""
        newest = max((self.run_dir / "logs").glob("attempt_*/nodes"), key=lambda file: file.stat().st_mtime)
        return self.rng.choice(newest.read_text().split())

    def signal_rank(self, number: int) -> None:
        """Send a signal to the rank of a random node."""
        for process in self.cluster.processes(self.node()):
            file = Path(f"/proc/{process}/cmdline")
            command = file.read_text() if file.exists() else ""
            if command.endswith("finetune.py\0") and "srun" not in command:
                os.kill(process, number)

    def crash_a_node(self) -> None:
        """Power a node off, and on again after Slurm may have noticed."""
        node = self.node()
        self.cluster.crash(node)
        time.sleep(self.rng.uniform(5, 100))
        self.cluster.boot(node)

    def cut_a_cable(self) -> None:
        """Pull a node's cable for up to a minute."""
        node = self.node()
        self.cluster.cut(node)
        time.sleep(self.rng.choice([1, 5, 60]))
        self.cluster.heal(node)

    def kill_a_rank(self) -> None:
        """Kill a rank."""
        self.signal_rank(signal.SIGKILL)

    def stop_a_rank(self) -> None:
        """Stop a rank, so that it hangs."""
        self.signal_rank(signal.SIGSTOP)

    def preempt(self) -> None:
        """Ask the ranks to save and to be requeued."""
        self.cluster.run("scancel", "--signal=USR2", self.submission.job, check=False)

    def fault(self) -> None:
        """Inject a random fault."""
        kinds = (self.crash_a_node, self.cut_a_cable, self.kill_a_rank, self.stop_a_rank, self.preempt)
        kind = self.rng.choice(kinds)
        self.faults.append(kind.__name__)
        kind()

    def repair(self) -> None:
        """Return nodes that Slurm has drained or set down, as an administrator would."""
        for node, state in self.cluster.node_states().items():
            if state.rstrip("*") not in UP:
                self.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)

    def step(self) -> int:
        """Return the last step in metrics.jsonl."""
        return max(steps_of(self.run_dir), default=0) if (self.run_dir / "metrics.jsonl").exists() else 0

    def ended(self) -> bool:
        """Return whether the job has ended for good."""
        return self.cluster.job(self.submission.job)["JobState"] in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"}

    def progressed(self, since: float) -> bool:
        """Return whether an attempt took a step after this time, or the job has ended; repairs the cluster."""
        self.repair()
        file = self.run_dir / "metrics.jsonl"
        return self.ended() or (file.exists() and file.stat().st_mtime > since)

    def run(self, seconds: float) -> None:
        """Inject faults for this long, each after the run has made progress since the one before."""
        began = time.time()
        while time.time() - began < seconds and not self.ended():
            now = time.time()
            until(lambda since=now: self.progressed(since), lambda: log_of(self.run_dir), 900)
            time.sleep(self.rng.uniform(0, PAUSE))
            if not self.ended():
                self.fault()


@pytest.fixture
def remote(fresh_cluster: Cluster) -> Iterator[S3]:
    """An S3 server that the nodes reach through a proxy, which spoils one request in a hundred."""
    needs_s3()
    server, proxy, address = free_port(), free_port(), f"{fresh_cluster.subnet}.253"
    moto = [sys.executable, "-c", f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{server}'])"]
    spoiling = [sys.executable, "-m", "tests.storage.faulty_proxy", str(proxy), str(server), "0.01", "7", address]
    with process_on_port(moto, server), process_on_port(spoiling, proxy, address):
        found = S3(proxy, server, proxied=True, address=address)
        found.create_bucket()
        yield found


@pytest.mark.skipif(not TORTURE, reason="takes an hour: make torture")
@pytest.mark.timeout(0)
def test_job_with_random_faults_ends_with_the_weights_of_an_undisturbed_job(login: Login, remote: S3) -> None:
    undisturbed = login.run(*RUN)
    login.cluster.wait_for(undisturbed.job, "COMPLETED", 3600)
    options = (SLOW_DISK, "checkpoint.remote=s3://bucket/run")
    submission = login.run(*RUN, *options, environment=remote.environment)
    began = time.monotonic()
    chaos = Chaos(login.cluster, submission, random.Random(3))
    chaos.run(60 * MINUTES)
    until(lambda: chaos.progressed(0) and chaos.ended(), lambda: log_of(chaos.run_dir), 3600)
    seconds = time.monotonic() - began
    run, result = submission.run_dir, result_of(submission.run_dir)
    assert (result["status"], result.get("steps")) == ("ok", STEPS), log_of(run)
    kinds = ", ".join(f"{chaos.faults.count(kind)} {kind}" for kind in sorted({*chaos.faults}))
    logged = sum(
        len(re.findall(r"^step +\d+ +loss", log.read_text(errors="replace"), re.MULTILINE))
        for log in (run / "logs").glob("attempt_*/rank_0.log")
    )
    undisturbed_seconds = result_of(undisturbed.run_dir)["wall_seconds"]
    print(f"\n{len(chaos.faults)} faults in {seconds:.0f} s: {kinds}")
    print(f"{sum(remote.faults().values())} spoiled requests: {remote.faults()}")
    print(f"{STEPS} of {logged} steps useful ({STEPS / logged:.1%}); {result['lost_seconds']:.0f} s lost")
    print(f"goodput {1 - result['lost_seconds'] / seconds:.1%}; undisturbed {undisturbed_seconds:.0f} s")
    assert steps_of(run) == steps_of(undisturbed.run_dir)
    weights = [each / "export" / "model.safetensors" for each in (undisturbed.run_dir, run)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert remote.get("run/export/model.safetensors") == weights[0].read_bytes()
