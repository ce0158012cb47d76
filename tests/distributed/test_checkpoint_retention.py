"""Retention with real saves: which checkpoints remain, kills during pruning, and scripts/checkpoints.py."""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from components import training
from components.batch import Batch
from components.checkpoint import Mark, Saver, find_checkpoint, save_checkpoint, verify
from components.checkpoint.manifest import Manifest, remove
from components.config.schema.run import CheckpointConfig
from scripts import checkpoints
from tests.distributed.test_checkpoint_crash import is_killed_at
from tests.frozen import frozen
from tests.harness import run_ranks
from tests.tiny_models import tiny_config

ROOT = Path(__file__).resolve().parents[2]
POLICY = CheckpointConfig(keep=1, every=2, keep_every=4, keep_best=True)
SAVES = [(2, 1.5, False), (3, None, True), (4, 2.0, False), (5, None, True), (6, 3.0, False), (8, 3.5, False),
         (9, None, True)]  # fmt: skip
"""(step, eval loss, whether the save was triggered by time and is therefore ephemeral)."""


def build_run() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(8, 8)
    if torch.distributed.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters())


def save_all(run_dir: Path, policy: CheckpointConfig) -> list[set[str]]:
    """Make the saves in SAVES; return the checkpoint names after each."""
    listings, run = [], build_run()
    for step, loss, ephemeral in SAVES:
        save_checkpoint(run_dir, step, *run, {}, policy, Mark(loss, ephemeral))
        listings.append(saved_names(run_dir))
    return listings


def saved_names(run_dir: Path) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


def test_two_ranks_apply_the_retention_policy(tmp_path: Path) -> None:
    listings, _ = run_ranks(2, lambda rank: save_all(tmp_path, POLICY))
    assert listings[1] == {"step_2", "step_3"}
    assert listings[-1] == {"step_2", "step_4", "step_8", "step_9"}
    best, by_time = (Manifest.read(tmp_path / "checkpoints" / name) for name in ("step_2", "step_9"))
    assert (best.eval_loss, best.ephemeral) == (1.5, False)
    assert (by_time.eval_loss, by_time.ephemeral) == (None, True)
    assert find_checkpoint(tmp_path, "auto") == tmp_path / "checkpoints" / "step_9"  # ephemeral, but the newest


def test_save_requested_by_one_rank_happens_on_all_ranks_at_the_same_step() -> None:
    def body(rank: int) -> list[bool]:
        model = AutoModelForCausalLM.from_config(tiny_config("llama"))
        optimizer = torch.optim.AdamW(model.parameters())
        settings = training.StepSettings(device=torch.device("cpu"))
        rows = Batch.from_labels(torch.ones(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long))
        reader, must_save = training.StepReader(lag=1), []
        for step in range(4):
            vector = training.train_step(
                training.Prepared(model, settings),
                [rows],
                optimizer,
                requests=torch.tensor([0.0, 0.0, float(rank == 1 == step)], dtype=torch.float64),
            )
            arrived = reader.push(step, vector, began=0.0)
            must_save.append(any(each.must_save for each in arrived))
            assert not any(each.must_stop for each in arrived)
        return must_save

    assert run_ranks(2, body) == [[False, False, True, False]] * 2


def test_truncated_checkpoint_does_not_count_toward_keep(tmp_path: Path) -> None:
    run = build_run()
    for step in (1, 2):
        path = save_checkpoint(tmp_path, step, *run, {}, CheckpointConfig(keep=2))
    os.truncate(next(path.glob("*.safetensors")), 9)
    for step in (3, 4):
        save_checkpoint(tmp_path, step, *run, {}, CheckpointConfig(keep=2))
        assert saved_names(tmp_path) == {"step_2", "step_3", "step_1" if step == 3 else "step_4"}


def test_checkpoint_found_damaged_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    run, policy = build_run(), CheckpointConfig(keep=2, keep_best=True)
    for step, loss in ((1, 2.0), (2, 1.5), (3, 1.0)):
        save_checkpoint(tmp_path, step, *run, {}, policy, Mark(loss))
    flip(next((tmp_path / "checkpoints" / "step_3").glob("*.safetensors")))
    damaged: list[Path] = []
    assert find_checkpoint(tmp_path, "auto", skipped=damaged) == tmp_path / "checkpoints" / "step_2"
    with Saver(tmp_path, *run, policy) as saver:
        saver.damaged += damaged
        for step, loss in ((3, 1.2), (4, 1.3), (5, 1.4)):
            saver.save(step, {}, Mark(loss))
    assert saved_names(tmp_path) == {"step_3", "step_3.1", "step_4", "step_5"}  # step_3.1 is the best intact one


def test_nan_eval_loss_is_stored_as_none(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, *build_run(), {}, CheckpointConfig(), Mark(float("nan")))
    assert Manifest.read(path).eval_loss is None


def is_file_operation(name: str, _: object) -> bool:
    """Inside the top folder rmtree passes bare file names with a dir_fd, so paths cannot be filtered by prefix."""
    return name.split(".")[0] in ("os", "shutil", "open")


def test_pruning_killed_at_any_operation_is_finished_by_the_next_save(tmp_path: Path) -> None:
    save_all(tmp_path / "before", CheckpointConfig(keep=9))
    event = 0
    while True:
        run_dir = tmp_path / str(event)
        shutil.copytree(tmp_path / "before", run_dir)
        folder = run_dir / "checkpoints"
        pruned = [folder / "step_4", folder / "step_6"]
        killed = is_killed_at(event, lambda pruned=pruned: lambda: remove(pruned), is_file_operation)
        assert saved_names(run_dir) >= {"step_2", "step_8", "step_9"}
        for path in folder.glob("step_?"):
            assert verify(path) == []
        if not killed:
            break
        if event % 4 == 0:
            save_checkpoint(run_dir, 10, *build_run(), {}, POLICY)
            assert saved_names(run_dir) == {"step_2", "step_8", "step_10"} | (saved_names(run_dir) & {"step_4"})
        event += 1
    assert event > 8
    assert saved_names(tmp_path / str(event)) == {"step_2", "step_8", "step_9"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory that kept every checkpoint although its config has a stricter retention policy."""
    created = tmp_path / "run"
    save_all(created, CheckpointConfig(keep=9))
    (created / "config.yaml").write_text(
        frozen("checkpoint:\n  keep: 1\n  every: 2\n  keep_every: 4\n  keep_best: true\n")
    )
    return created


@pytest.fixture
def call(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run scripts/checkpoints.py in this process; return its exit status and output."""

    def invoke(action: str, *options: str) -> tuple[int, str]:
        status = checkpoints.main([action, str(run_dir), *options])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return invoke


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_list_reports_every_checkpoint_with_its_state_and_retention_reason(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step_7").mkdir()
    next((run_dir / "checkpoints" / "step_4").glob("*.safetensors")).unlink()
    program = (
        "import sys; from scripts.checkpoints import main; s = main(sys.argv[1:]); print('torch' in sys.modules, s)"
    )
    command = [sys.executable, "-c", program, "list", str(run_dir)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    *table, last = output.splitlines()
    assert last == "False 0"
    rows = {line.split()[0]: line for line in table}
    assert [cell.strip() for cell in rows["checkpoint"].split("  ") if cell] == list(checkpoints.COLUMNS)
    assert list(rows)[1:] == ["step_7", "step_2", "step_4", "step_6", "step_8", "step_9"]
    assert "manifest.json is missing" in rows["step_7"]
    assert rows["step_4"].endswith(".safetensors is missing")
    assert "1.5000" in rows["step_2"]
    assert "best" in rows["step_2"]
    assert "world 1" in rows["step_2"]
    assert "KB" in rows["step_2"]
    assert "not kept" in rows["step_6"]
    assert "last 1, every 4" in rows["step_8"]
    assert "newest" in rows["step_9"]
    assert rows["step_9"].endswith("complete")
    stamp = Manifest.read(run_dir / "checkpoints" / "step_9").saved
    assert stamp.startswith("20")
    assert stamp in rows["step_9"]


def test_list_shows_rewards_of_a_run_with_rewards(run_dir: Path, call: Callable[..., tuple[int, str]]) -> None:
    for step, reward in ((10, 0.25), (11, 0.75), (12, math.nan)):
        save_checkpoint(run_dir, step, *build_run(), {}, CheckpointConfig(keep=9), Mark(eval_reward=reward))
    status, output = call("list")
    rows = {line.split()[0]: line for line in output.splitlines()}
    assert (status, "eval reward" in rows["checkpoint"], "eval loss" in rows["checkpoint"]) == (0, True, False)
    assert "0.7500 best" in " ".join(rows["step_11"].split())
    assert "best" not in rows["step_2"]  # which has the lowest loss
    assert Manifest.read(run_dir / "checkpoints" / "step_12").eval_reward is None


def test_verify_names_damaged_files(run_dir: Path, call: Callable[..., tuple[int, str]]) -> None:
    status, output = call("verify")
    assert status == 0
    assert output.count(": complete") == 5
    victim = next((run_dir / "checkpoints" / "step_6").glob("*.safetensors"))
    flip(victim)
    status, output = call("verify")
    assert status == 1
    assert f"step_6: {victim.name} is damaged" in output
    assert output.count(": complete") == 4


def test_prune_is_a_dry_run_without_yes(run_dir: Path, call: Callable[..., tuple[int, str]]) -> None:
    leftover = run_dir / "checkpoints" / "step_99.tmp-dead"
    leftover.mkdir()
    (run_dir / "checkpoints" / "step_1").mkdir()  # has no manifest, so prune must not remove it
    before = saved_names(run_dir)
    status, output = call("prune")
    assert (status, saved_names(run_dir)) == (0, before)
    doomed = [line.split()[2].rstrip(",") for line in output.splitlines() if line.startswith("would remove")]
    assert doomed == ["step_6", "step_99.tmp-dead"]
    assert output.endswith("add --yes to remove\n")
    assert call("prune", "--yes")[0] == 0
    assert saved_names(run_dir) == before - set(doomed)
    assert call("prune", "--yes")[1] == "nothing to remove\n"
    assert "step_8" not in call("prune", "--keep", "2")[1]
    assert call("prune", "--keep", "0") == (2, call("prune", "--keep", "0")[1])


def test_prune_keeps_the_newest_undamaged_checkpoint(run_dir: Path, call: Callable[..., tuple[int, str]]) -> None:
    (run_dir / "config.yaml").write_text(frozen("checkpoint:\n  keep: 1\n"))
    for name in ("step_8", "step_9"):  # one flipped bit each: file sizes stay right
        flip(next((run_dir / "checkpoints" / name).glob("*.safetensors")))
    assert call("prune", "--yes")[0] == 0
    assert saved_names(run_dir) == {"step_6", "step_8", "step_9"}
    assert find_checkpoint(run_dir, "auto") == run_dir / "checkpoints" / "step_6"


def test_prune_rejects_a_run_directory_in_use(
    run_dir: Path, call: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved_names(run_dir)
    with (run_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        status, output = call("prune", "--yes")
        assert status == 2
        assert "is in use by another run; wait for it to finish" in output
    (run_dir / "job_id").write_text("17\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    status, output = call("prune", "--yes")
    assert status == 2
    assert "no squeue on PATH" in output
    squeue = tmp_path / "squeue"
    squeue.write_text("#!/bin/sh\necho 17 RUNNING\n")
    squeue.chmod(0o700)
    status, output = call("prune", "--yes")
    assert status == 2
    assert "belongs to job 17, which is RUNNING; wait for it to finish, or end the job with scancel 17" in output
    assert saved_names(run_dir) == before
    squeue.write_text("#!/bin/sh\necho 17 COMPLETED\n")
    assert call("prune", "--yes")[0] == 0
    assert saved_names(run_dir) < before


def test_invalid_config_is_reported_without_a_traceback(run_dir: Path, call: Callable[..., tuple[int, str]]) -> None:
    for text, expected in (
        ("checkpoint:\n  keep: many\n", "keep=many: must be a whole number"),
        ("checkpoint: [", "cannot be read as the config of a run"),
        ("model: {}\n", "has no section checkpoint"),
    ):
        (run_dir / "config.yaml").write_text(frozen(text))
        status, output = call("list")
        assert status == 2
        assert expected in output
        assert "Traceback" not in output
    (run_dir / "config.yaml").unlink()
    status, output = call("verify")
    assert status == 2
    assert "not a run directory, it has no config.yaml" in output
