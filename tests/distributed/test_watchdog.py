"""Heartbeats of real ranks through a store while one rank does not join a collective of its group."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from components.launch.rank import _record_collectives
from components.watch.heartbeat import BeatTracker, HangVerdict, Heartbeat, _late_ranks, blame
from components.watch.watchdog import _write_collectives
from tests.harness import run_ranks

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")


def _wait_for_all(name: str) -> None:
    """Wait for all three ranks without a collective."""
    store = _get_default_store()
    store.add(name, 1)
    while store.add(name, 0) < 3:
        time.sleep(0.01)


def _wait_on_rank_2(rank: int) -> tuple[list[int], list[int], str, int, HangVerdict | None]:
    """Rank 2 blocks rank 1 in a collective of their group, so that rank 1 does not join that of all ranks."""
    heartbeat = Heartbeat.join()
    pair = dist.new_group([1, 2])
    if rank == 1:
        waiting = dist.all_reduce(torch.ones(1), group=pair, async_op=True)
    if rank == 0:
        waiting = dist.all_reduce(torch.ones(1), async_op=True)
    heartbeat.beat("in step 3", f"line of rank {rank}", progressed=rank > 0)  # beat 1; join made beat 0
    while len(heartbeat.posts()) < 3 or any(post.beat < 1 for post in heartbeat.posts().values()):
        time.sleep(0.01)
    before, tracker = heartbeat.posts(), BeatTracker()
    tracker.update(before, 3)
    _wait_for_all("first")
    time.sleep(0.3)
    if rank != 2:
        heartbeat.beat("in step 3", f"line of rank {rank}", progressed=False)
    while any(heartbeat.posts()[other].beat < 2 for other in (0, 1)):
        time.sleep(0.01)
    now = heartbeat.posts()
    tracker.update(now, 3)
    silent = tracker.silent(0.2, now)
    _wait_for_all("second")
    heartbeat.excluded_group = pair.group_name if rank else ""
    progress = heartbeat.beat("in step 3", "", progressed=False)
    assert len(heartbeat.posts()[rank].collectives) == len(now[rank].collectives) - (rank != 0)
    verdict = heartbeat.publish_verdict(HangVerdict(f"reported by rank {rank}", (f"n{rank}", "n7")))
    late, reason = _late_ranks(before), blame([], before).message
    agreed = heartbeat.verdict()
    # Complete the collectives so that the ranks can exit.
    if rank != 0:
        if rank == 2:
            dist.all_reduce(torch.ones(1), group=pair)
        dist.all_reduce(torch.ones(1))
    if rank != 2:
        waiting.wait()
    dist.barrier()
    return silent, late, reason, progress, verdict if verdict == agreed else None


def _outstanding(dumped: dict[str, Any]) -> int:
    """Return how many collectives of the default group are enqueued and not completed."""
    status = dumped["pg_status"]["0"]
    return int(status["last_enqueued_collective"]) - int(status["last_completed_collective"])


def _with_recorder(rank: int, logs: Path) -> tuple[str, str, list[list[int]]]:
    """Rank 2 joins a broadcast of rank 0 late; return the verdicts before and after it is enqueued, and the counts.

    Rank 1 completes it, and rank 0 does not before rank 2 receives. gloo's recorder replaces NCCL's here: torch writes
    both from one template. gloo's host cannot run ahead of a device, so the dump of rank 2 counts the broadcast as
    enqueued for the second verdict.
    """
    _record_collectives(logs)
    library: Any = torch._C._distributed_c10d
    ahead = 0

    def dump(includeCollectives: bool, onlyActive: bool) -> str:
        dumped = json.loads(library._dump_fr_trace_json(includeCollectives=includeCollectives, onlyActive=onlyActive))
        for status in dumped["pg_status"].values():
            status["last_enqueued_collective"] = str(int(status["last_enqueued_collective"]) + ahead)
        return json.dumps(dumped)

    library._dump_nccl_trace_json = dump
    heartbeat, verdicts = Heartbeat.join(), []
    dist.barrier()
    broadcast = dist.broadcast(torch.ones(1), src=0, async_op=True) if rank != 2 else None
    if rank == 1:
        broadcast.wait()
    while _outstanding(json.loads(dump(True, True))) != (rank == 0):  # the recorder learns of an end after the caller
        time.sleep(0.01)
    for name, enqueued in (("host", 0), ("device", 1)):
        ahead = enqueued if rank == 2 else 0
        heartbeat.beat("in step 3", f"line of rank {rank}", progressed=False)
        _wait_for_all(name)
        posts = heartbeat.posts()
        verdicts.append(blame([], posts).message)
        _wait_for_all(f"{name} judged")
    if rank == 2:
        dist.broadcast(torch.ones(1), src=0)
    if rank == 0:
        broadcast.wait()
    (counts,) = zip(*(post.devices.values() for _, post in sorted(posts.items())), strict=True)
    return verdicts[0], verdicts[1], [each[::2] for each in counts]


def test_recorder_of_the_devices_names_a_rank_that_the_hosts_do_not(tmp_path: Path) -> None:
    for before, after, counts in run_ranks(3, _with_recorder, tmp_path):
        joined = counts[0][0]
        assert counts == [[joined, joined - 1], [joined, joined], [joined, joined - 1]]  # enqueued, completed
        assert before.startswith("rank 2 on host ")
        assert before.endswith(" has not joined a collective that others wait in: it is in step 3, at line of rank 2")
        behind = (
            f"has enqueued collective {joined} of process group 0 on its device, but not completed it as others have"
        )
        assert [behind in each for each in after.split("; ")] == [True, True]
        assert "line of rank 0; rank 2 on host " in after


def test_three_ranks_agree_on_the_late_rank() -> None:
    results = run_ranks(3, _wait_on_rank_2)
    for silent, late, reason, progress, verdict in results:
        assert silent == [2]
        assert late == [2]
        assert reason.startswith("rank 2 on host ")
        assert reason.endswith(" has not joined a collective that others wait in: it is in step 3, at line of rank 2")
        assert progress == 3 + 2
        assert verdict == results[0][4]
        reporter = verdict.message.removeprefix("reported by rank ")
        assert verdict == HangVerdict(f"reported by rank {reporter}", (f"n{reporter}", "n7"))


def test_record_of_the_missing_rank_lacks_the_pending_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def body(rank: int) -> str | None:
        _record_collectives(tmp_path)
        group = dist.new_group([0, 1], backend="gloo")
        dist.all_reduce(torch.ones(3), group=group)
        if rank == 1:
            dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5), group=group, async_op=True)
        written = _write_collectives(5.0)
        if rank == 0:
            dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5), group=group)
        dist.barrier()
        return written and written.name

    assert run_ranks(2, body) == ["flight_recorder_rank_0.json", "flight_recorder_rank_1.json"]
    records = [json.loads((tmp_path / f"flight_recorder_rank_{rank}.json").read_text()) for rank in (0, 1)]
    operations = [[each["profiling_name"] for each in record["gloo"]["entries"]] for record in records]
    assert operations[0][-1] == "gloo:all_reduce"
    assert operations[1] == [*operations[0], "gloo:all_gather"]


def test_environment_settings_are_kept_and_nothing_is_written_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert run_ranks(1, lambda rank: _write_collectives(5.0)) == [None]
    monkeypatch.setenv(NAMES[0], "7")
    _record_collectives(tmp_path)
    assert [os.environ[name] for name in NAMES] == ["7", "1", f"{tmp_path}/flight_recorder_rank_"]
