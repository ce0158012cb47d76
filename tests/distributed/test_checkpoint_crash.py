"""Checkpoints survive kills at every file operation, and are published atomically."""

from __future__ import annotations

import io
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from components.checkpoint import (
    Mark,
    Saver,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
    verify,
)
from components.checkpoint.manifest import FileRecord
from components.checkpoint.save import Snapshot, _publish
from components.config.schema.run import CheckpointConfig
from components.protocol.errors import ConfigError
from tests.harness import run_ranks

Run = tuple[nn.Module, torch.optim.Optimizer]


def start(value: float = 0.0) -> Run:
    """Two linear layers and their AdamW, all filled with `value` (the step); sharded if there is a process group."""
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    if torch.distributed.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    set_all((model, optimizer), value)
    return model, optimizer


def set_all(run: Run, value: float) -> None:
    model, optimizer = run
    with torch.no_grad():
        for parameter in model.parameters():
            for tensor in (parameter, *optimizer.state[parameter].values()):
                tensor.fill_(value)


def save(run_dir: Path, step: int, keep: int = 3) -> Path:
    return save_checkpoint(run_dir, step, *start(float(step)), {"step": step}, CheckpointConfig(keep=keep))


def assert_resumes_from(run_dir: Path, steps: set[int]) -> Path:
    """Assert that resuming finds a checkpoint of one of `steps` and that all of its values belong to that step."""
    found = find_checkpoint(run_dir, "auto")
    assert found is not None
    run = start(-1.0)
    step = load_checkpoint(found, *run)["step"]
    assert step in steps
    for parameter in run[0].parameters():
        for tensor in (parameter, *run[1].state[parameter].values()):
            assert torch.equal(tensor, torch.full_like(tensor, float(step)))
    return found


def is_killed_at(event: int, begin: Callable[[], Callable[[], object]], counts: Callable[[str, Any], bool]) -> bool:
    """Return whether a function, run in a forked process, was killed at its `event`-th operation on files.

    Args:
        begin: Prepares, and returns the function.
        counts: Whether an audit event (open, mkdir, rename, listdir, ...: everything that touches a file) counts.
    """

    def child() -> None:
        torch.set_num_threads(1)
        function, operations = begin(), 0

        def count(name: str, args: tuple[Any, ...]) -> None:
            nonlocal operations
            if counts(name, args):
                operations += 1
                if operations == event + 1:  # not >=: os.kill raises an audit event itself
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        function()
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def below(folder: Path) -> Callable[[str, Any], bool]:
    """Return a function that counts the operations on paths below a folder."""
    return lambda name, args: any(str(arg).startswith(str(folder)) for arg in args)


def is_save_killed_at(event: int, run_dir: Path, step: int) -> bool:
    def begin() -> Callable[[], object]:
        run = start(float(step))
        return lambda: save_checkpoint(run_dir, step, *run, {"step": step}, CheckpointConfig(keep=1))

    return is_killed_at(event, begin, below(run_dir))


def test_save_killed_at_any_operation_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    """A save that also prunes is killed once at each of its file operations; every time the run can be resumed."""
    save(tmp_path / "before", 1)
    event, outcomes = 0, []
    while True:
        run_dir = tmp_path / f"run_{event}"
        shutil.copytree(tmp_path / "before", run_dir)
        killed = is_save_killed_at(event, run_dir, step=2)
        outcomes.append(assert_resumes_from(run_dir, {1, 2}).name)
        for path in (run_dir / "checkpoints").glob("step_?"):
            assert verify(path) == []  # published checkpoints are complete
        if event % 5 == 0:  # the next save removes what the killed one left
            save(run_dir, 3, keep=2)
            assert_resumes_from(run_dir, {3})
            remaining = {path.name for path in (run_dir / "checkpoints").iterdir()}
            assert remaining == {"step_3", outcomes[-1]}
        if not killed:
            break
        event += 1
    assert event > 20  # proves that the audit hook counts the operations of a save
    assert "step_1" in outcomes
    assert "step_2" in outcomes[:-1]  # killed after publishing, while pruning
    assert outcomes == sorted(outcomes)


def test_first_save_killed_at_any_operation_leaves_a_run_that_starts_over(tmp_path: Path) -> None:
    event = 0
    while is_save_killed_at(event, tmp_path / str(event), step=1):
        if find_checkpoint(tmp_path / str(event), "auto") is not None:
            assert_resumes_from(tmp_path / str(event), {1})
        event += 3
    assert event > 9


def test_all_files_are_synced_before_the_checkpoint_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power loss must not lose data: every file and the folder are synced at full size, the manifest last, then rename.

    Includes a file smaller than Python's 8 KiB write buffer, which would be empty if it were synced before the flush.
    """
    sync, rename, events, sizes = os.fsync, os.rename, [], {}

    def synced(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{int(descriptor)}")).name)
        sizes[events[-1]] = os.fstat(descriptor).st_size
        sync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        events.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    model = nn.Linear(4, 4)
    path = save_checkpoint(tmp_path, 1, model, torch.optim.SGD(model.parameters()), {}, CheckpointConfig())
    written = {file.name: file.stat().st_size for file in path.iterdir()}
    assert min(written.values()) < io.DEFAULT_BUFFER_SIZE
    assert {name: sizes[name] for name in written} == written
    published = events.index("rename")
    assert set(events[: published - 1]) == {file.name for file in path.iterdir()}
    assert events[published - 2] == "manifest.json"
    assert events[published - 1].startswith("step_1.tmp-")
    assert events[published + 1 :] == ["checkpoints", tmp_path.name]


def test_folder_that_nodes_do_not_share_is_reported(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_1.tmp-x").mkdir(parents=True)
    records = {"shard-00002-model-00001-of-00001.safetensors": FileRecord(1, [])}
    with pytest.raises(OSError, match=r"rank 0 cannot find shard-00002.*file system that all nodes share"):
        _publish(tmp_path / "checkpoints" / "step_1.tmp-x", Snapshot(1, {}, {}, {}, Mark(), {"world": 2}), records)


def test_old_checkpoints_are_pruned_after_a_newer_one_is_published(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_9.tmp-dead").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_7").mkdir()  # has no manifest, so it must not be removed
    for step in (2, 4, 10, 6):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_6", "step_7"]
    assert_resumes_from(tmp_path, {6})  # saved last, though not the highest step: a run may restart from an older step


def test_published_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in first.iterdir()}
    second = save(tmp_path, 1)
    assert (first.name, second.name) == ("step_1", "step_1.1")
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in first.iterdir()} == before
    assert find_checkpoint(tmp_path, "auto") == second
    assert find_checkpoint(tmp_path, str(first)) == first


def test_symlink_with_the_name_of_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step_1").symlink_to(tmp_path / "nowhere")
    assert save(tmp_path, 1).name == "step_1.1"


def test_missing_checkpoint_is_none_and_rejected_for_a_path(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, "auto") is None
    assert find_checkpoint(tmp_path, "never") is None
    newest = [save(tmp_path, step) for step in (1, 2)][-1]
    assert find_checkpoint(tmp_path, "never") == newest  # of the same start: the launcher rejects others
    with pytest.raises(ConfigError, match=r"run.resume=.*step_5: not a complete checkpoint: there is no such folder"):
        find_checkpoint(tmp_path, str(tmp_path / "checkpoints" / "step_5"))


def test_requeued_run_resumes_from_its_own_newer_checkpoint(tmp_path: Path) -> None:
    """A requeued job has the same config, including run.resume=PATH, which must not restart it from PATH."""
    origin, run_dir = str(save(tmp_path / "other", 5)), tmp_path / "run"
    earlier = save(run_dir, 1)  # before the run was configured to resume from `origin`
    assert find_checkpoint(run_dir, origin) == Path(origin)
    (run_dir / "config.yaml").write_text(f"run:\n  resume: {origin}\n")
    since = save(run_dir, 6)
    assert find_checkpoint(run_dir, origin) == since
    assert find_checkpoint(run_dir, f"{origin}/") == since  # with the slash that shell completion appends
    assert find_checkpoint(run_dir, os.path.relpath(origin)) == since
    assert find_checkpoint(run_dir, str(earlier)) == earlier
    (since / "state.json").write_text("[]")
    assert find_checkpoint(run_dir, origin) == Path(origin)
    assert run_ranks(2, lambda rank: find_checkpoint(run_dir, origin)) == [Path(origin)] * 2


class Counting(torch.optim.SGD):
    """SGD whose state holds other values than tensors."""

    def __init__(self, parameters: Any, values: dict[str, Any]) -> None:
        super().__init__(parameters, lr=0.1)
        self._values = values

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] |= self._values


def test_numbers_in_the_optimizer_state_are_restored_with_their_types(tmp_path: Path) -> None:
    values = {"steps": 3, "scale": 0.1, "warm": True}

    def body(rank: int) -> None:
        model, _ = start(1.0)
        optimizer = Counting(model.parameters(), values)
        optimizer.step()
        path = save_checkpoint(tmp_path, 1, model, optimizer, {}, CheckpointConfig())
        resumed = Counting(model.parameters(), {})
        load_checkpoint(path, model, resumed)
        for parameter in model.parameters():
            assert resumed.state[parameter] == values
            assert [type(each) for each in resumed.state[parameter].values()] == [float, int, bool]

    run_ranks(2, body)


def test_optimizer_state_that_cannot_be_saved_is_rejected_after_the_first_step(tmp_path: Path) -> None:
    for value, message in (
        ("text", "its state odd of 0.weight is a str"),
        (torch.ones(3), "odd of 0.weight has shape"),
    ):
        model, _ = start()
        optimizer = Counting(model.parameters(), {"odd": value})
        saver = Saver(tmp_path, model, optimizer, CheckpointConfig(every=100))
        with saver, pytest.raises(NotImplementedError, match=message):
            optimizer.step()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"a": {"b": (1, 2)}}, r"extra\['a'\]\['b'\] is a tuple"),
        ({"a": [torch.ones(1)]}, r"extra\['a'\]\[0\] is a Tensor"),
        ({"a": {1: 2}}, r"extra\['a'\] has the key 1"),
    ],
)
def test_extra_state_that_json_cannot_round_trip_is_rejected(
    extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=message):
        save_checkpoint(tmp_path, 1, *start(), extra, CheckpointConfig(keep=1))
    assert list(tmp_path.iterdir()) == []
