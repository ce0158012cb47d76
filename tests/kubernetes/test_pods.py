"""The pods of submitted jobs, played as processes: rendezvous, eviction, lost nodes, failures, and the final bits."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.launch.k8s.pod import run_pod
from tests.kubernetes.conftest import skip_or_fail
from tests.kubernetes.desk import Desk
from tests.suites import TORTURE

STEPS = 40
LONG = (f"training.max_steps={STEPS}", "parallelism=fsdp2", "checkpoint.every=5", "cluster.signal_lead_seconds=60")


only_long = pytest.mark.skipif(not TORTURE, reason="more pods: MESHBOOK_TORTURE=1")


@pytest.fixture(scope="session")
def pods() -> Any:
    """The module of the player; skips tests, with the reason, where no pods can be played."""
    from tests.kubernetes import player  # imports torch

    skip_or_fail(player.missing_requirement())
    return player


def steps_of(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm of every step in metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}


def last_checkpoint(run_dir: Path) -> dict[str, bytes]:
    """Return the bits of all tensors of the last checkpoint, weights and optimizer state, by file and name."""
    from safetensors.numpy import load_file

    files = sorted((run_dir / "checkpoints" / f"step_{STEPS}").glob("*.safetensors"))
    bits = {f"{file.name} {name}": value.tobytes() for file in files for name, value in load_file(file).items()}
    assert len(bits) > 100
    return bits


def result_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


def reached(run_dir: Path, step: int) -> Callable[[], bool]:
    return lambda: max(steps_of(run_dir), default=0) >= step


def test_evicted_and_deleted_jobs_resume_to_the_bits_of_an_undisturbed_one(pods: Any, desk: Desk) -> None:
    """One pod is evicted and all restart in their job; then the job is deleted and the command repeated."""
    undisturbed = desk.run(*LONG, "run.dir=undisturbed")
    with pods.Player(undisturbed.objects, desk.folder / "pods_a") as player:
        assert player.play() == "Complete", player.logs() + pods.rank_logs(undisturbed.run_dir)
        assert sorted(player.ended) == [(0, 0), (1, 0)]
    run = undisturbed.run_dir
    result = result_of(run)
    assert (result["status"], result["processes"], result["steps"]) == ("ok", 2, STEPS)
    assert sorted(steps_of(run)) == list(range(1, STEPS + 1))
    assert "peak memory" in (desk.folder / "pods_a" / "pod_1_index_0.log").read_text()  # what kubectl logs shows

    first = desk.run(*LONG, "run.dir=disturbed")
    run = first.run_dir
    frozen = (run / "config.yaml").read_text()
    with pods.Player(first.objects, desk.folder / "pods_b") as player:
        player.play(until=reached(run, 3))
        player.evict(1)
        player.play(until=lambda: len(player.ended) == 2)
        stopped = max(steps_of(run))
        assert stopped < STEPS
        assert [status for _, status in player.ended] == [86, 86], player.logs() + pods.rank_logs(run)
        player.play(until=reached(run, stopped + 3))
        player.delete()
        player.play()
        assert player.state == "Deleted"
    assert result_of(run)["status"] == "preempted"
    assert max(steps_of(run)) < STEPS
    stored = desk.api.objects[f"/apis/batch/v1/namespaces/train/jobs/{first.field('job').rpartition('/')[2]}"]
    stored["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    second = desk.run(*LONG, "run.dir=disturbed")
    with pods.Player(second.objects, desk.folder / "pods_c") as player:
        assert player.play() == "Complete", player.logs() + pods.rank_logs(run)
    assert second.run_dir == run
    assert (run / "config.yaml").read_text() == frozen
    assert [(run / "logs" / f"attempt_{number}" / "pods.json").exists() for number in range(4)] == [True] * 3 + [False]
    assert (run / "logs" / "latest").readlink() == Path("attempt_2")
    assert steps_of(run) == steps_of(undisturbed.run_dir)
    assert last_checkpoint(run) == last_checkpoint(undisturbed.run_dir)


@only_long
def test_all_pods_restart_from_the_last_checkpoint_after_a_node_is_lost(pods: Any, desk: Desk) -> None:
    submission = desk.run(*LONG, "run.dir=lost")
    run = submission.run_dir
    with pods.Player(submission.objects, desk.folder / "pods") as player:
        player.play(until=(run / "checkpoints" / "step_5" / "manifest.json").exists)
        player.lose_node(1)
        assert player.play() == "Complete", player.logs() + pods.rank_logs(run)
        assert player.ended[0] == (1, 137) or player.ended[0] == (1, -9)
        assert (0, 86) in player.ended
    assert sorted(steps_of(run)) == list(range(1, STEPS + 1))
    assert result_of(run)["status"] == "ok"


def test_failed_rank_ends_all_pods_and_the_job(pods: Any, desk: Desk) -> None:
    submission = desk.run(
        recipe=own_recipe(desk, "if RANK == 1: raise ValueError('planted')\nimport time; time.sleep(600)")
    )
    with pods.Player(submission.objects, desk.folder / "pods") as player:
        assert player.play() == "Failed"
        assert (1, 1) in player.ended
        log = (desk.folder / "pods" / "pod_2_index_1.log").read_text()
        assert log.splitlines()[-2:][0].endswith("rank 1 exited with status 1: ValueError: planted"), log
    result = result_of(submission.run_dir)
    assert (result["status"], result["error"]) == ("failed", "rank 1: ValueError: planted")


def test_killed_rank_restarts_the_pods_up_to_the_limit(pods: Any, desk: Desk) -> None:
    """Rank 1 is killed in the second save of each attempt: twice, and the third attempt would end the run."""
    fault = "cluster.env.MESHBOOK_FAULT='kill:after_shards:rank1:2'"
    submission = desk.run(*LONG, "training.max_steps=15", fault, "cluster.requeue.crash=1", "run.dir=killed")
    with pods.Player(submission.objects, desk.folder / "pods") as player:
        assert player.play() == "Failed", player.logs()
        assert sorted(player.ended[:2]) == [(0, 86), (1, 86)], player.logs()
        assert (1, 1) in player.ended[2:]
        log = (desk.folder / "pods" / "pod_2_index_1.log").read_text()
        assert "rank 1 was ended by SIGKILL (out of memory, or killed by a person)" in log
        assert log.splitlines()[-1] == "to be restarted from the last checkpoint"
        limit = "not restarted: the limit of 1 new starts after a crash is reached (cluster.requeue.crash)"
        assert limit in player.logs()
    assert list((submission.run_dir / "checkpoints").glob("step_10")), pods.rank_logs(submission.run_dir)


@only_long
def test_pod_without_the_others_gives_its_node_back(pods: Any, desk: Desk) -> None:
    submission = desk.run("cluster.startup_timeout_minutes=0.01")
    with pods.Player(submission.objects, desk.folder / "pods") as player:
        player.complete.add(1)  # never started
        assert player.play() == "Failed"
        assert "pods 1 did not start within cluster.startup_timeout_minutes=0.01" in player.logs()
    assert result_of(submission.run_dir)["status"] == "failed"


@only_long
def test_limit_of_restarts_ends_the_job(pods: Any, desk: Desk) -> None:
    """Pods that are stopped before their first step count, too."""
    stop = "import signal, time\nif RANK == 0: os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(1)"
    submission = desk.run("cluster.requeue.max=1", recipe=own_recipe(desk, stop))
    with pods.Player(submission.objects, desk.folder / "pods") as player:
        assert player.play() == "Failed"
        assert "not restarted: the limit of 1 requeues is reached (cluster.requeue.max)" in player.logs()
        assert [status for index, status in player.ended if index == 0] == [86, 1]


def test_pod_that_is_replaced_after_the_end_of_the_run_finishes(desk: Desk) -> None:
    submission = desk.run()
    logs = submission.run_dir / "logs" / "attempt_0"
    (logs / "job").write_text(f"{submission.field('job')}\n")
    (logs / "outcome").write_text("done")
    variables = {"JOB_COMPLETION_INDEX": "1", "MESHBOOK_POD_UID": "new", "MESHBOOK_JOB": submission.field("job")}
    assert run_pod(submission.run_dir, "recipes/finetune.py", variables) == 0


def own_recipe(desk: Desk, body: str) -> Path:
    """Write a recipe of the user's own to the volume."""
    header = textwrap.dedent("""
        import os
        from components.config.schema import FinetuneConfig
        from components.launch import recipe

        RANK = int(os.environ.get("RANK", 0))

        @recipe("finetune")
        def main(cfg: FinetuneConfig) -> None:
        """)
    file = desk.folder / "mine.py"
    file.write_text(header + textwrap.indent(body, "    ") + '\n\nif __name__ == "__main__":\n    main()\n')
    return file
