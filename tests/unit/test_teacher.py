"""Stored values follow their target tokens into batches; files are complete or absent, and damage is reported."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from components import data
from components.batch import bits_of
from components.config.schema.objective import DistillationConfig, Divergence
from components.config.teacher_files import (
    LOG_PROBS,
    TARGET_LOG_PROB,
    TOKEN_IDS,
    TeacherHeader,
    check_stored_teacher,
    read_teacher_file,
)
from components.data.dataset import Facts
from components.protocol.errors import ConfigError
from components.storage import tensor_files
from components.storage.tensor_files import BlockHashes
from components.training.objectives.base import Chunk, Vocabulary
from components.training.objectives.distillation import DistillationLoss, TopK, _top_k_divergence, find_top_k
from components.training.objectives.teacher import StoredTeacher
from components.training.objectives.teacher_store import TargetSlots, write_file

K = 3
TOKENS, VOCABULARY = 7, 23


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
    return TeacherHeader(samples="s", tokenizer="t", vocabulary=200, top_k=K, temperature=1.5, teacher="T")


def blocks(total: int, size: int = 5) -> Iterator[dict[str, np.ndarray]]:
    """Values of `total` targets: ids 10 n + 0, 1, 2 of target n, and probabilities of four outcomes."""
    for start in range(0, total, size):
        numbers = np.arange(start, min(start + size, total))
        weights = np.exp(-np.arange(K + 1)[None] * (1 + numbers[:, None] / 7))
        yield {
            TOKEN_IDS: (10 * numbers[:, None] + np.arange(K)).astype(np.int32),
            LOG_PROBS: np.log(weights / weights.sum(-1, keepdims=True)).astype(np.float32),
            TARGET_LOG_PROB: -numbers.astype(np.float32),
        }


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    file, slots = tmp_path / "top_k_train.safetensors", TargetSlots(np.asarray([0, 4, 4, 13], np.int64))
    mass = write_file(file, header(), slots, blocks(13))
    others = np.concatenate([np.exp(block[LOG_PROBS][:, -1]) for block in blocks(13)])
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


def rewrite(file: Path, *, hashed: bool = True, **changed: np.ndarray) -> None:
    """Replace tensors, and write the hashes of the new values or none."""
    with safe_open(file, "np") as opened:
        metadata = {"teacher": opened.metadata()["teacher"]}
    tensors = load_file(file) | changed
    hashes = {name: BlockHashes() for name in tensors}
    for name, each in hashes.items():
        each.update(tensors[name].tobytes())
    if hashed:
        metadata["hashes"] = json.dumps({name: each.hexdigest() for name, each in hashes.items()})
    save_file(tensors, file, metadata)


def test_every_flipped_bit_of_the_values_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "_HASHED_BYTES", 64)
    file, slots = tmp_path / "top_k_train.safetensors", TargetSlots(np.asarray([0, 4, 4, 13], np.int64))
    write_file(file, header(), slots, blocks(13))
    content = file.read_bytes()
    for place in range(8 + int.from_bytes(content[:8], "little"), len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="stored teacher damaged: its bytes .*run scripts/teacher.py again"):
            read_all(file)
    file.write_bytes(content)
    assert [len(row[TARGET_LOG_PROB]) for row in read_all(file)] == [4, 0, 9]


def read_all(file: Path) -> list[Mapping[str, np.ndarray]]:
    stored = StoredTeacher(file)
    return [stored.of_row(row) for row in range(stored.rows)]


VALUES = {
    "ids beyond the vocabulary": (TOKEN_IDS, lambda ids: ids + 190, "token ids from .* in a vocabulary of 200"),
    "negative ids": (TOKEN_IDS, lambda ids: ids - 7, "token ids from -7"),
    "NaN": (LOG_PROBS, lambda values: values * np.float32(np.nan), "no numbers"),
    "infinite": (LOG_PROBS, lambda values: values * 0 + np.float32(np.inf), "probabilities with the sum 1"),
    "doubled": (LOG_PROBS, lambda values: values * 2, "probabilities with the sum 1"),
    "target above 0": (TARGET_LOG_PROB, lambda values: values + 5, "above 0"),
    "target NaN": (TARGET_LOG_PROB, lambda values: values * np.float32(np.nan), "no numbers"),
    "int64 ids": (TOKEN_IDS, lambda ids: ids.astype(np.int64), "its tensors are not those of top_k 3 and 13 targets"),
    "fewer targets": (TOKEN_IDS, lambda ids: ids[:-1], "its tensors are not those"),
    "huge starts": ("starts", lambda starts: starts + 10**12, "not consecutive"),
    "negative starts": ("starts", lambda starts: starts - 10, "not consecutive"),
    "descending starts": ("starts", lambda starts: starts[[0, 2, 1, 3]] + [0, 4, 0, 0], "not consecutive"),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_that_no_teacher_returns_are_refused(case: str, tmp_path: Path) -> None:
    """In a file whose hashes are those of the values."""
    name, change, message = VALUES[case]
    file, slots = tmp_path / "top_k_train.safetensors", TargetSlots(np.asarray([0, 4, 4, 13], np.int64))
    write_file(file, header(), slots, blocks(13))
    rewrite(file)
    assert len(read_all(file)) == 3
    rewrite(file, **{name: change(load_file(file)[name]).copy()})
    with pytest.raises(ValueError, match=message):
        read_all(file)


def test_a_file_without_hashes_is_refused(tmp_path: Path) -> None:
    slots, expected = TargetSlots(np.asarray([0, 13], np.int64)), header()
    for split in ("train", "eval"):
        write_file(tmp_path / f"top_k_{split}.safetensors", expected, slots, blocks(13))
    assert check_stored_teacher(str(tmp_path), expected.temperature, expected.vocabulary) == []
    rewrite(tmp_path / "top_k_train.safetensors", hashed=False)
    assert check_stored_teacher(str(tmp_path), expected.temperature, expected.vocabulary) == [
        f"teacher.stored={tmp_path}: top_k_train.safetensors cannot be read (it was not written by "
        "scripts/teacher.py); remove it, and run scripts/teacher.py again"
    ]


def test_a_teacher_that_returns_no_probabilities_leaves_no_file(tmp_path: Path) -> None:
    slots = TargetSlots(np.asarray([0, 4, 13], np.int64))
    broken = ({**block, LOG_PROBS: block[LOG_PROBS] * np.float32(np.nan)} for block in blocks(13))
    with pytest.raises(ConfigError, match="teacher.path=T: this model returned log-probabilities that are no numbers"):
        write_file(tmp_path / "top_k_train.safetensors", header(), slots, broken)
    assert list(tmp_path.iterdir()) == []


HEADERS: dict[str, dict[str, Any] | str] = {
    "deep": "[" * 100_000,
    "list": "[1]",
    "temperature NaN": {"temperature": float("nan")},
    "temperature text": {"temperature": "x"},
    "vocabulary text": {"vocabulary": "x"},
    "top_k negative": {"top_k": -1},
    "top_k of another file": {"top_k": 2},
    "top_k text": {"top_k": "3"},
    "samples no text": {"samples": [1]},
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_are_checked_before_torch_is_imported(case: str, tmp_path: Path) -> None:
    slots, described = TargetSlots(np.asarray([0, 13], np.int64)), HEADERS[case]
    for file in (tmp_path / f"top_k_{split}.safetensors" for split in ("train", "eval")):
        write_file(file, header(), slots, blocks(13))
    assert check_stored_teacher(str(tmp_path), 1.5, 200) == []
    text = described if isinstance(described, str) else json.dumps({**asdict(header()), **described})
    save_file(load_file(file), file, {"teacher": text})
    (problem,) = check_stored_teacher(str(tmp_path), 1.5, 200)
    assert re.search(r"top_k_eval.safetensors cannot be read .*; remove it, and run scripts/teacher.py again", problem)
    file.unlink()
    os.mkfifo(file)
    assert "Not a regular file" in check_stored_teacher(str(tmp_path), 1.5, 200)[0]


def logits(seed: int, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(TOKENS, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def outcomes(probabilities: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Probabilities of each of the k tokens and of any other token, (tokens, k + 1)."""
    of_k = probabilities.gather(1, ids)
    return torch.cat([of_k, 1 - of_k.sum(-1, keepdim=True)], dim=1)


def formula(kind: Divergence, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if kind == Divergence.forward_kl:
        return (p * (p / q).log()).sum(-1)
    if kind == Divergence.reverse_kl:
        return (q * (q / p).log()).sum(-1)
    middle = (p + q) / 2
    return ((p * (p / middle).log()).sum(-1) + (q * (q / middle).log()).sum(-1)) / 2


@pytest.mark.parametrize(("kind", "k"), itertools.product(Divergence, [1, 5, VOCABULARY - 1, VOCABULARY]))
def test_value_and_gradient_are_those_of_the_formula(kind: Divergence, k: int) -> None:
    teacher, student = logits(0), logits(1).requires_grad_()
    p = teacher.softmax(-1)
    ids = p.topk(k).indices
    if k == VOCABULARY:
        expected = formula(kind, p, student.softmax(-1))
    else:
        expected = formula(kind, outcomes(p, ids), outcomes(student.softmax(-1), ids))
    (gradient,) = torch.autograd.grad(expected.sum(), student)

    stored = find_top_k(teacher.log_softmax(-1), k, Vocabulary())
    assert torch.equal(stored.ids, ids)
    got, got_gradient = _top_k_divergence(kind, stored, student.detach().log_softmax(-1), Vocabulary())
    torch.testing.assert_close(got, expected.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got_gradient, gradient, rtol=1e-10, atol=1e-10)


def test_forward_kl_has_the_published_gradient() -> None:
    teacher, student = logits(2), logits(3)
    p, q = teacher.softmax(-1), student.softmax(-1)
    stored = find_top_k(teacher.log_softmax(-1), 4, Vocabulary())
    _, gradient = _top_k_divergence(Divergence.forward_kl, stored, student.log_softmax(-1), Vocabulary())
    in_k = torch.zeros_like(p, dtype=torch.bool).scatter(1, stored.ids, True)
    p_rest, q_rest = ((each * ~in_k).sum(-1, keepdim=True) for each in (p, q))
    expected = torch.where(in_k, q - p, q - p_rest * q / q_rest)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_a_tiny_remaining_probability_is_exact() -> None:
    """1 - the sum of the k probabilities would be 0 in float32."""
    teacher = torch.zeros(1, VOCABULARY)
    teacher[0, 0] = 40.0
    stored = find_top_k(teacher.log_softmax(-1), 1, Vocabulary())
    expected = teacher.double().log_softmax(-1)[0, 1:].logsumexp(-1)
    assert stored.log_probs[0, 1].item() == pytest.approx(expected.item(), rel=1e-6)
    student = teacher.flip(1)
    value, gradient = _top_k_divergence(Divergence.forward_kl, stored, student.log_softmax(-1), Vocabulary())
    assert value.item() == pytest.approx(40, rel=1e-5)
    assert gradient.isfinite().all()


def test_loss_of_stored_values_mixes_temperature_and_cross_entropy() -> None:
    cfg = DistillationConfig(temperature=2.0, cross_entropy_weight=0.25)
    teacher, student = logits(4), logits(5).requires_grad_()
    targets = torch.tensor([3, -100, 0, 22, 7, -100, 11])
    stored = find_top_k((teacher / 2).log_softmax(-1), 6, Vocabulary())
    log_probs = stored.log_probs.float()
    of_targets = teacher.log_softmax(-1).gather(1, targets.clamp(min=0)[:, None])[:, 0].float() * (targets >= 0)
    values = {LOG_PROBS: log_probs, TOKEN_IDS: stored.ids.int(), TARGET_LOG_PROB: of_targets}

    p = log_probs.double().softmax(-1)  # rounded to float32 as stored
    kept = targets >= 0
    apart = formula(Divergence.forward_kl, p, outcomes((student / 2).softmax(-1), stored.ids))[kept].sum()
    entropy = torch.nn.functional.cross_entropy(student[kept], targets[kept], reduction="sum")
    expected = 0.75 * 4 * apart + 0.25 * entropy
    (gradient,) = torch.autograd.grad(expected, student)

    loss = DistillationLoss(cfg)
    bits = {name: bits_of(value) for name, value in values.items()}
    got, got_gradient = loss.of_chunk(Chunk(student.detach(), targets, values=bits))
    assert got.item() == pytest.approx(expected.item(), rel=1e-10)
    assert got_gradient is not None
    torch.testing.assert_close(got_gradient[kept], gradient[kept], rtol=1e-10, atol=1e-12)
    assert got_gradient.isfinite().all()
    sums = [apart.item(), entropy.item(), -of_targets.double().sum().item()]
    assert loss.sums is not None
    assert loss.sums.tolist() == pytest.approx(sums, rel=1e-10)


def test_positions_without_a_target_have_finite_gradients() -> None:
    """Their stored values are zeros: k times the token 0."""
    empty = {LOG_PROBS: torch.zeros(TOKENS, 4).view(torch.int32), TOKEN_IDS: torch.zeros(TOKENS, 3, dtype=torch.int32)}
    stored = TopK.of_chunk(empty, torch.float64)
    for kind in Divergence:
        value, gradient = _top_k_divergence(kind, stored, logits(6).log_softmax(-1), Vocabulary())
        assert value.isfinite().all()
        assert gradient.isfinite().all()
