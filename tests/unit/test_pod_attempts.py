"""A Kubernetes job whose attempts make no progress: the next attempt is refused, with keys that exist there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.launch.k8s.pod import run_pod
from tests.frozen import frozen

JOB = "train/job/mine-1"
POD = {"JOB_COMPLETION_INDEX": "0", "MESHBOOK_POD_UID": "new", "MESHBOOK_JOB": JOB}


@pytest.mark.parametrize(
    ("attempts", "stepped", "message"),
    [
        (
            3,
            True,
            "not restarted: 3 attempts in a row took steps and published no newer checkpoint "
            "(cluster.requeue.without_progress=3): save more often (checkpoint.every, checkpoint.every_minutes), give "
            "a save more time (cluster.signal_lead_seconds, the grace period of the pods), or raise the limit",
        ),
        (
            10,
            False,
            "not restarted: 10 attempts in a row were stopped before their first step "
            "(cluster.requeue.before_first_step=10): set cluster.k8s.priority_class to a class that is preempted less, "
            "or raise the limit",
        ),
    ],
)
def test_pod_refuses_another_attempt_without_progress(
    tmp_path: Path, attempts: int, stepped: bool, message: str
) -> None:
    (tmp_path / "config.yaml").write_text(frozen("cluster: {kind: k8s, procs_per_node: '1', device: cpu}"))
    for number in range(attempts):
        logs = tmp_path / "logs" / f"attempt_{number}"
        logs.mkdir(parents=True)
        (logs / "job").write_text(f"{JOB}\n")
        (logs / "checkpoints").write_text("")
        (logs / "pods.json").write_text(json.dumps({"0": f"uid {number}"}))
        if stepped:
            (logs / "first_step").touch()
    assert run_pod(tmp_path, "recipes/finetune.py", POD) == 1
    assert json.loads((tmp_path / "result.json").read_text())["error"] == message
