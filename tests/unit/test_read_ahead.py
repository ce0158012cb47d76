"""Batches read one step ahead: equal to those read in place; the cursor of a checkpoint, errors, the thread's end."""

from __future__ import annotations

import threading
import time
import traceback
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components import data
from components.batch import Batch
from components.models.tokenizer import byte_tokenizer
from components.training.attempt import ReadAhead

CPU = torch.device("cpu")
WAIT_SECONDS = 30.0


def texts(count: int, first: int = 10) -> data.Dataset:
    examples = [data.Example(ids := [first + i, *range(1, 3 + i % 7)], [data.IGNORED, *ids[1:]]) for i in range(count)]
    return data.Dataset(examples, byte_tokenizer(), facts=data.Facts("texts"), seq_len=16)


def pairs(desirable: bool = False) -> data.PairDataset:
    made = data.PairDataset(texts(13), texts(13, 50), [(i, (i + 3) % 13) for i in range(13)])
    labels = torch.arange(26, dtype=torch.float64).view(13, 2) % 2
    return made.with_values("desirable", labels) if desirable else made


class TargetIds:
    """Values of the target tokens, as a stored teacher has them."""

    def __init__(self, dataset: data.Dataset) -> None:
        self.dataset = dataset

    def of_row(self, index: int) -> dict[str, np.ndarray]:
        labels = self.dataset[index].labels[1:]
        return {"top": np.asarray([[label, 2 * label] for label in labels if label != data.IGNORED], np.float32)}


def train_batches(kind: str, start: int = 0) -> data.TrainBatches:
    """Return batches of one rank of two, with the cursor after `start` steps."""
    rows: Any = {
        "packed": lambda: data.PackedDataset(texts(40), 16),
        "mixture": lambda: data.MixtureDataset({"a": texts(9), "b": texts(5)}, {"a": 1.0, "b": 2.0}),
        "pairs": pairs,
        "KTO": lambda: pairs(desirable=True),
        "packed pairs": lambda: data.pack_pairs(pairs().to_be_packed(16)),
    }.get(kind, lambda: texts(11))()
    ramps: dict[str, Any] = {"ramp": {"ramp": ((2, 4), (3, 8))}, "length ramp": {"length_ramp": ((2, 4), (3, 8))}}
    plan = data.BatchPlan(global_batch_size=12, micro_batch_size=2, dp_rank=1, dp_size=2, **ramps.get(kind, {}))
    values = TargetIds(rows) if kind == "stored teacher" else None
    batches = data.TrainBatches(rows, plan, seed=4, token_values=values)
    for _ in range(start):
        next(batches)
    return batches


def tensors(batches: list[Batch]) -> list[Any]:
    """Return every field of micro-batches, tensors as lists."""
    plain = []
    for batch in batches:
        for each in fields(batch):
            value = getattr(batch, each.name)
            values = value.items() if isinstance(value, dict) else [(each.name, value)]
            plain += [(key, v.tolist() if isinstance(v, torch.Tensor) else v) for key, v in values]
    return plain


@pytest.mark.parametrize("kind", ["rows", "ramp", "length ramp", "packed", "mixture", "pairs", "KTO",
                                  "packed pairs", "stored teacher"])  # fmt: skip
@pytest.mark.parametrize("start", [0, 2])
def test_batches_and_cursor_are_those_of_reading_in_place(kind: str, start: int) -> None:
    """A checkpoint saved during any step continues with the next one, although that has been read already."""
    expected, found = train_batches(kind, start), train_batches(kind, start)
    with ReadAhead(found, 4, CPU) as ahead:
        for batches in ahead:
            assert tensors(batches) == tensors(next(expected))
            found.advance()
            assert found.state_dict() == expected.state_dict()
    assert found.state_dict()["step"] == start + 4


class Slow:
    """Rows that can be counted, delayed and broken. A step reads two of them."""

    def __init__(self) -> None:
        self.read: list[tuple[int, str]] = []
        self.may_read = threading.Event()
        self.may_read.set()
        self.bad_after = 10**9

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> data.Example:
        self.may_read.wait(WAIT_SECONDS)
        self.read.append((index, threading.current_thread().name))
        if len(self.read) > self.bad_after:
            raise OSError(5, "Input/output error", f"row {index}")
        return data.Example([index + 1, 7], [data.IGNORED, 7])


def batches_of(rows: Any) -> data.TrainBatches:
    return data.TrainBatches(rows, data.BatchPlan(global_batch_size=2, micro_batch_size=1), seed=0)


def settled(count: int, rows: Slow) -> int:
    """Return the number of rows that were read, once it is at least `count` and a moment later."""
    until = time.monotonic() + WAIT_SECONDS
    while len(rows.read) < count and time.monotonic() < until:
        time.sleep(0.002)
    time.sleep(0.05)
    return len(rows.read)


def test_thread_reads_one_step_ahead_and_none_after_the_last_step() -> None:
    rows = Slow()
    batches = batches_of(rows)
    with ReadAhead(batches, 3, CPU) as ahead:
        for taken, read in ((0, 2), (1, 4), (2, 6), (3, 6)):
            if taken:
                next(ahead)
            assert settled(read, rows) == read
        with pytest.raises(StopIteration):
            next(ahead)
    assert {thread for _, thread in rows.read} == {"read_ahead"}
    assert [index for index, _ in rows.read] == [index for step in range(3) for index in batches.global_batch(step)]


def test_error_of_the_thread_is_raised_at_its_step_with_the_thread_s_traceback() -> None:
    rows = Slow()
    rows.bad_after = 4  # the third step, which is read during the second
    batches = batches_of(rows)
    with ReadAhead(batches, 9, CPU) as ahead:
        for _ in range(2):
            next(ahead)
            batches.advance()
        assert settled(5, rows) == 5
        for _ in range(2):  # the second call must not wait for a thread that has ended
            with pytest.raises(OSError, match="Input/output error: 'row") as raised:
                next(ahead)
    assert "__getitem__" in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert batches.state_dict()["step"] == 2


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_thread_ends_with_the_context(taken: int) -> None:
    """As after a stop request, a `break` and an exception: with a batch that waits, and after the last one."""
    ahead = ReadAhead(batches_of(Slow()), 3, CPU)

    def body() -> None:
        with ahead:
            for _ in range(taken):
                next(ahead)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert not ahead._thread.is_alive()


def test_blocked_read_does_not_keep_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.training.attempt._CLOSE_SECONDS", 0.2)
    rows = Slow()
    rows.may_read.clear()
    began = time.monotonic()
    with ReadAhead(batches_of(rows), 3, CPU) as ahead:
        pass
    assert time.monotonic() - began < WAIT_SECONDS / 2
    assert ahead._thread.is_alive()
    assert ahead._thread.daemon
    rows.may_read.set()
    ahead._thread.join(WAIT_SECONDS)
    assert len(rows.read) <= 2


def test_batches_for_a_gpu_are_pinned_by_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, devices = [], []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(threading.current_thread().name)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append((device, threading.current_thread())))
    with ReadAhead(train_batches("stored teacher"), 1, torch.device("cuda", 3)) as ahead:
        (first, *_) = next(ahead)
    assert set(pinned) == {"read_ahead"}
    assert len(pinned) == 3 * 3  # ids, targets and the teacher's values of three micro-batches
    assert devices == [(torch.device("cuda", 3), ahead._thread)]
    assert first.input_ids.device == CPU  # the training thread copies it to the device


def test_no_part_of_meshbook_forks_a_process_that_has_threads() -> None:
    """A fork copies locks that other threads hold. Ranks start through exec, and datasets use no worker processes."""
    root = Path(__file__).resolve().parents[2]
    forks = [
        f"{path.relative_to(root)}: {call}"
        for folder in ("components", "recipes")
        for path in sorted((root / folder).rglob("*.py"))
        for call in ("os.fork", 'get_context("fork")', "num_proc=", "DataLoader(")
        if call in path.read_text()
    ]
    assert forks == []
