"""The start of an attempt in a batch script: the nodes that it uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.launch.slurm.attempt_start import record_failed_nodes, start_attempt

NODES = [f"n{number}" for number in range(1, 9)]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


def begin(run_dir: Path, attempt: int, nodes: list[str], *, failed: list[str], job: str = "7") -> None:
    """Write the files of an attempt on `nodes`, of which some failed."""
    logs = run_dir / "logs" / f"attempt_{attempt}"
    logs.mkdir(parents=True)
    (logs / "job").write_text(f"{job}\n")
    (logs / "checkpoints").write_text("")
    (logs / "nodes").write_text("".join(f"{node}\n" for node in nodes))
    record_failed_nodes(run_dir, attempt, failed)


def chosen(run_dir: Path, attempt: int) -> list[str]:
    return (run_dir / "logs" / f"attempt_{attempt}" / "nodes").read_text().split()


@pytest.mark.parametrize(("counts", "used"), [([8], 7), ([4, 8], 4), ([4, 6, 8], 6), ([4, 5, 6, 7, 8], 7), ([1, 2], 2)])
def test_attempt_uses_as_many_nodes_as_the_run_can(run_dir: Path, counts: list[int], used: int) -> None:
    begin(run_dir, 0, NODES[:7], failed=[])
    assert start_attempt(run_dir, 0, counts if used < 7 else [*counts, 7]) == 0
    assert chosen(run_dir, 0) == NODES[:used]
    assert not (run_dir / "requeue").exists()


def test_template_that_lists_no_nodes_ends_the_job(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(run_dir, 0, [], failed=[])
    assert start_attempt(run_dir, 0, [4]) == 1
    assert "compare cluster.template with slurm/train.sbatch.j2" in capsys.readouterr().out


def test_node_that_failed_twice_is_left_out(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Failures in attempts of another job do not count."""
    begin(run_dir, 0, NODES, failed=["n1"], job="6")
    begin(run_dir, 1, NODES, failed=["n1", "n3"])
    begin(run_dir, 2, NODES, failed=["n3"])
    begin(run_dir, 3, NODES, failed=[])
    assert start_attempt(run_dir, 3, [4, 5, 6, 7, 8]) == 0
    assert chosen(run_dir, 3) == ["n1", "n2", *NODES[3:]]
    assert "without n3, which failed in 2 attempts" in capsys.readouterr().out


def test_job_is_requeued_once_for_other_nodes(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If it gets the same nodes again, it uses them: no others are up."""
    begin(run_dir, 0, NODES[:4], failed=["n2"])
    begin(run_dir, 1, NODES[:4], failed=["n2"])
    begin(run_dir, 2, NODES[:4], failed=[])
    assert start_attempt(run_dir, 2, [4]) == 0
    assert (run_dir / "requeue").read_text() == "n2\n"
    assert "n2 failed in 2 attempts: requeuing the job for other nodes" in capsys.readouterr().out
    (run_dir / "requeue").unlink()
    begin(run_dir, 3, NODES[:4], failed=[])
    assert start_attempt(run_dir, 3, [4]) == 0
    assert not (run_dir / "requeue").exists()
    assert chosen(run_dir, 3) == NODES[:4]


def test_nodes_that_are_down_count_as_failed(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(run_dir, 0, NODES[:4], failed=[])
    (run_dir / "logs" / "attempt_0" / "down_nodes").write_text("n2|down*|Not responding\n")
    begin(run_dir, 1, NODES[:4], failed=[])
    assert start_attempt(run_dir, 1, [4]) == 0
    assert capsys.readouterr().out == "node n2 of the previous attempt is down*: Not responding\n"
    assert (run_dir / "logs" / "attempt_0" / "failed_nodes").read_text() == "n2\n"
