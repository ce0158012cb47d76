"""The last collectives of each rank are written next to the stacks when a run hangs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from components.launch.rank import record_collectives
from components.watch.watchdog import write_collectives
from tests.harness import run_ranks

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE")


def test_record_of_the_missing_rank_lacks_the_pending_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def body(rank: int) -> str | None:
        record_collectives(tmp_path)
        group = dist.new_group([0, 1], backend="gloo")
        dist.all_reduce(torch.ones(3), group=group)
        if rank == 1:
            dist.all_gather([torch.ones(5), torch.ones(5)], torch.ones(5), group=group, async_op=True)
        written = write_collectives(5.0)
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
    assert run_ranks(1, lambda rank: write_collectives(5.0)) == [None]
    monkeypatch.setenv(NAMES[0], "7")
    record_collectives(tmp_path)
    assert [os.environ[name] for name in NAMES] == ["7", "1", f"{tmp_path}/flight_recorder_rank_"]
