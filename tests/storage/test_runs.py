"""Complete runs over a real S3 server that fails: killed in a copy, directory lost, resumed, exported, same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.distributed.forked_runs import Attempt, Command
from tests.distributed.test_checkpoint_kills import final_state
from tests.storage.conftest import S3, SECRET

STEPS = 8
WAIT = 300.0  # seconds
SMALL = (
    *("model=tiny", "data=jsonl", "cluster=local_2proc", "cluster.device=cpu", "training.global_batch_size=4"),
    *("training.micro_batch_size=2", "training.seq_len=32", "training.eval_every=0", "generation.samples=0"),
    *("logging.wandb.mode=disabled", "logging.plot=false", "logging.examples=0", f"training.max_steps={STEPS}"),
    *("checkpoint.every=2", "checkpoint.keep=2"),
)
ROWS = "".join(json.dumps({"prompt": f"{n} + 1", "response": str(n + 1)}) + "\n" for n in range(64)).encode()


def ended(attempt: Attempt, status: int | None = 0) -> str:
    """Wait for a run and return its output; None: any status but 0."""
    found = attempt.wait(WAIT)
    assert found == status if status is not None else found != 0, attempt.output()
    return attempt.output()


def test_run_killed_in_a_copy_goes_on_from_the_store(faulty_s3: S3, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    local = Command(tmp_path, tmp_path / "local", [*SMALL, f"data.path={tmp_path}/rows.jsonl"])
    ended(local.start())

    faulty_s3.put("rows.jsonl", ROWS)
    stored = ["data.path=s3://bucket/rows.jsonl", f"data.cache={tmp_path}/cache", "checkpoint.remote=s3://bucket/run"]
    remote = Command(tmp_path, tmp_path / "remote", [*SMALL, *stored, "checkpoint.async_save=true"])
    # The third save: rank 1 dies before its first file, rank 0 before the manifest of the copy.
    ended(remote.start({"MESHBOOK_FAULT": "kill:before_remote_manifest:rank0:3"}), None)
    assert any(name.startswith("run/step_6/") for name in faulty_s3.names())
    assert "run/step_6/manifest.json" not in faulty_s3.names()
    shutil.rmtree(remote.run_dir)  # the node and its disk are gone

    newest = next(name for name in faulty_s3.names("run/step_4/") if name.endswith(".safetensors"))
    content = faulty_s3.get(newest)
    faulty_s3.put(newest, content[:-1] + bytes([content[-1] ^ 1]))
    output = ended(remote.start())
    assert f"checkpoint s3://bucket/run/step_4 is skipped: {Path(newest).name} is damaged" in output
    assert f"resumed from {remote.run_dir}/checkpoints/step_2" in output

    assert final_state(remote.run_dir) == final_state(local.run_dir)
    for name in ("model.safetensors", "config.json"):
        assert faulty_s3.get(f"run/export/{name}") == (local.run_dir / "export" / name).read_bytes()
    faulty_s3.delete("run/step_8/manifest.json")  # as if the last copy had failed
    ended(remote.start())
    assert "run/step_8/manifest.json" in faulty_s3.names()
    assert sum(faulty_s3.faults().values()) > 0
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), f"{file} contains a credential"


def test_run_starts_from_an_adapter_in_the_store(faulty_s3: S3, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(ROWS)
    small = [*SMALL, f"data.path={tmp_path}/rows.jsonl", "peft=lora", "peft.rank=4", "optimizer.lr=1e-2"]
    first = Command(tmp_path, tmp_path / "first", [*small, "checkpoint.remote=s3://bucket/run"])
    ended(first.start())
    second = Command(tmp_path, tmp_path / "second", [*small, "peft.path=s3://bucket/run/adapter"])
    output = " ".join(ended(second.start()).split())
    assert "adapter from s3://bucket/run/adapter, trained over these base weights" in output
    losses = [
        [
            json.loads(line)["eval_loss"]
            for line in (run / "metrics.jsonl").read_text().splitlines()
            if "eval_loss" in line
        ]
        for run in (first.run_dir, second.run_dir)
    ]
    assert losses[1][0] == losses[0][-1] < losses[0][0]
    missing = Command(tmp_path, tmp_path / "third", [*small, "peft.path=s3://bucket/none"])
    assert "peft.path=s3://bucket/none: there is no such object; give the folder of an adapter" in ended(
        missing.start(), 2
    )
    unknown = Command(tmp_path, tmp_path / "fourth", [*small, "peft.path=ftp://bucket/run/adapter"])
    assert "peft.path=ftp://bucket/run/adapter: URLs with ftp:// are not supported; use s3://" in ended(
        unknown.start(), 2
    )
