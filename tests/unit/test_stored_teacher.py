"""Stored values follow their target tokens into batches; files are complete or absent, and damage is reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from components import data
from components.config.teacher_files import TeacherHeader, read_teacher_file
from components.data.dataset import Facts
from components.training.objectives.stored_teacher import StoredTeacher
from components.training.objectives.teacher_store import TargetSlots, write_file
from components.training.objectives.top_k import LOG_PROBS, TARGET_LOG_PROB, TOKEN_IDS

K = 3


class PadOnlyTokenizer:
    pad_token_id = 0


def texts(count: int = 11) -> data.Dataset:
    examples = []
    for index in range(count):
        tokens = [100 * (index + 1) + i for i in range(4 + 3 * index % 7)]
        examples.append(data.Example(tokens, [-100] * (1 + index % 3) + tokens[1 + index % 3 :]))
    return data.Dataset(examples, PadOnlyTokenizer(), facts=Facts("here"), seq_len=16)  # type: ignore[arg-type]


class TargetIds:
    """The values of a target are its id, and a vector of two numbers derived from it."""

    def __init__(self, dataset: data.Dataset | data.PackedDataset | data.MixtureDataset) -> None:
        self.dataset = dataset

    def of_row(self, index: int) -> Mapping[str, np.ndarray]:
        ids = np.asarray([label for label in self.dataset[index].labels[1:] if label != -100], np.int32)
        return {"id": ids, "pair": np.stack([ids * 2, ids * 3], axis=1).astype(np.float32)}


DATASETS = {
    "rows": texts,
    "packed": lambda: data.PackedDataset(texts(), 16),
    "mixture": lambda: data.MixtureDataset({"a": texts(4), "b": texts(9)}, {"a": 1.0, "b": 2.0}),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_values_follow_their_tokens_into_shuffled_and_held_out_batches(kind: str) -> None:
    dataset = DATASETS[kind]()
    held_out = 0
    for rank in range(2):
        plan = data.BatchPlan(
            global_batch_size=4, micro_batch_size=2, dp_rank=rank, dp_size=2, padding=data.Padding(multiple=4)
        )
        train = data.TrainBatches(dataset, plan, seed=7, token_values=TargetIds(dataset))
        evaluated = list(data.EvalBatches(dataset, plan, TargetIds(dataset)))
        for batch in [*(each for _ in range(6) for each in next(train)), *evaluated]:
            targets = batch.targets.where(batch.targets != -100, 0)
            assert torch.equal(batch.token_values["id"].long(), targets)
            pairs = torch.stack([targets * 2, targets * 3], dim=-1)
            assert torch.equal(batch.token_values["pair"], pairs.float())
            half = batch.at_positions(torch.arange(1, batch.shape[1], 2))  # as under cp
            assert torch.equal(half.token_values["id"], batch.token_values["id"][:, 1::2])
        held_out += sum(int((batch.targets != -100).sum()) for batch in evaluated)
    assert held_out == TargetSlots.of(dataset).total


def header() -> TeacherHeader:
    return TeacherHeader(samples="s", tokenizer="t", vocabulary=20, top_k=K, temperature=1.5, teacher="T")


def blocks(total: int, size: int = 5) -> Iterator[dict[str, np.ndarray]]:
    """Values of `total` targets: ids 10 n + 0, 1, 2 and log-probabilities -n - 0, 1, 2, 3 of target n."""
    for start in range(0, total, size):
        numbers = np.arange(start, min(start + size, total))
        yield {
            TOKEN_IDS: (10 * numbers[:, None] + np.arange(K)).astype(np.int32),
            LOG_PROBS: (-numbers[:, None] - np.arange(K + 1)).astype(np.float32),
            TARGET_LOG_PROB: -numbers.astype(np.float32),
        }


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    file, slots = tmp_path / "top_k_train.safetensors", TargetSlots(np.asarray([0, 4, 4, 13], np.int64))
    mass = write_file(file, header(), slots, blocks(13))
    others = np.exp(-np.arange(13.0) - K)
    assert mass == pytest.approx(1 - others.mean())
    stored = StoredTeacher(file)
    assert stored.header == header()
    everything = {name: np.concatenate([each[name] for each in blocks(13)]) for name in next(blocks(13))}
    for row, part in enumerate((slice(0, 4), slice(4, 4), slice(4, 13))):
        for name, values in stored.of_row(row).items():
            assert np.array_equal(values, everything[name][part])
            assert values.dtype == everything[name].dtype
    assert file.stat().st_mode & 0o077 == 0
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_an_interrupted_writer_leaves_no_file(tmp_path: Path) -> None:
    file, slots = tmp_path / "top_k_train.safetensors", TargetSlots(np.asarray([0, 4, 13], np.int64))
    assert write_file(file, header(), slots, blocks(10)) is None  # a stop request

    def failing() -> Iterator[dict[str, np.ndarray]]:
        yield from blocks(10)
        raise OSError("lost")

    with pytest.raises(OSError, match="lost"):
        write_file(file, header(), slots, failing())
    assert list(tmp_path.iterdir()) == []


def test_damage_is_reported(tmp_path: Path) -> None:
    file, slots = tmp_path / "top_k_train.safetensors", TargetSlots(np.asarray([0, 4, 13], np.int64))
    write_file(file, header(), slots, blocks(13))
    content = file.read_bytes()
    open_before = StoredTeacher(file)
    for damaged in (content[:-4], content + b"0000", b"", content[:50], bytes(8) + content[8:], b"\xff" * 40):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"."):
            read_teacher_file(file)
    file.write_bytes(content[:200])
    with pytest.raises(OSError, match=r"stored teacher truncated.*run scripts/teacher.py again"):
        open_before.of_row(1)
