"""Digests of bits, the ranks that differing digests accuse, and flipped bits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from components.checkpoint.replica_check import _ROW_WORDS, Suspicion, _digest_each, _find_corrupt
from components.checkpoint.tensors import Tensors
from components.protocol.errors import ConfigError
from components.watch.faults import VARIABLE, arm_bit_flips, fault_point, flip_random_bit

BIG = 8 * _ROW_WORDS


def tensors() -> Tensors:
    """Tensors of all kinds: several rows, a remainder, odd numbers of bytes, a scalar, not contiguous, misaligned."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(3 * _ROW_WORDS, 10, generator=generator)
    return {
        "several rows": numbers,
        "remainder": torch.randn(BIG + 5, generator=generator).bfloat16(),
        "transposed": torch.randn(7, 11, generator=generator).t(),
        "misaligned": torch.randn(BIG + 1, generator=generator)[1:],
        "bytes": torch.randint(0, 255, (13,), generator=generator, dtype=torch.uint8),
        "scalar": torch.tensor(5.0),
        "empty": torch.zeros(0, 4),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def digest(held: Tensors) -> list[int]:
    return _digest_each({"": held})[""]


@contextmanager
def flipped(tensor: torch.Tensor, seed: int) -> Iterator[None]:
    flip_random_bit([tensor], seed)
    yield
    flip_random_bit([tensor], seed)


def test_every_flipped_bit_changes_the_digest() -> None:
    held = tensors()
    expected = digest(held)
    for name, tensor in held.items():
        for seed in range(12 if tensor.numel() else 0):
            with flipped(tensor, seed):
                assert digest(held) != expected, (name, seed)
    assert digest(held) == expected


def test_changes_that_cancel_in_sums_and_swapped_values_change_the_digest() -> None:
    words = torch.arange(4 * _ROW_WORDS)
    expected = digest({"": words})
    for first, second in [(5, 9), (5, 5 + _ROW_WORDS), (5, 9 + _ROW_WORDS)]:
        changed = words.clone()
        changed[first], changed[second] = changed[first] + 8, changed[second] - 8
        assert digest({"": changed}) != expected
        changed = words.clone()
        changed[[first, second]] = changed[[second, first]]
        assert digest({"": changed}) != expected
    assert digest({"a": words[:_ROW_WORDS], "b": words[_ROW_WORDS:]}) != digest({"a": words[_ROW_WORDS:], "b": words})


def test_digest_does_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = digest(tensors())
        torch.set_num_threads(4)
        assert digest(tensors()) == expected
    finally:
        torch.set_num_threads(threads)


def test_a_flip_changes_one_bit() -> None:
    generator = random.Random(1)
    for name, tensor in tensors().items():
        if tensor.numel():
            before = tensor.clone()
            flip_random_bit([tensor], generator.randrange(2**30))
            old, new = (each.contiguous().view(-1).view(torch.uint8) for each in (before, tensor))
            changed = (old ^ new)[old != new].tolist()
            assert [byte.bit_count() for byte in changed] == [1], name


ACCUSED = {
    "equal": ([{"a": [1]}, {"a": [1]}, {"b": [2]}], None),
    "majority": ([{"a": [1]}, {"a": [2]}, {"a": [1]}], Suspicion([1], [])),
    "two replicas": ([{"a": [1]}, {"a": [2]}, {"b": [3]}, {"b": [3]}], Suspicion([], [0, 1])),
    "half": ([{"a": [1]}, {"a": [1]}, {"a": [2]}, {"a": [2]}], Suspicion([], [0, 1, 2, 3])),
    "three of five differ from one another": ([{"a": [each]} for each in (1, 1, 2, 3, 4)], Suspicion([], [*range(5)])),
    "two of five": ([{"a": [each]} for each in (1, 1, 1, 2, 3)], Suspicion([3, 4], [])),
    "a pair that a majority elsewhere explains": (
        [{"a": [1], "b": [1]}, {"a": [2], "b": [2]}, {"c": [9], "b": [1]}, {"c": [9], "b": [1]}],
        Suspicion([1], []),
    ),
}
"""Name -> (digests of each rank, accusation)."""


@pytest.mark.parametrize("name", ACCUSED)
def test_majority_names_the_ranks_that_differ(name: str) -> None:
    by_rank, expected = ACCUSED[name]
    assert _find_corrupt(by_rank) == expected


def test_flips_are_planted_at_the_step_and_rank_that_the_variable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "flip=5:weights:rank0:2,flip=6:reduced_gradients:rank1:1")
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    arm_bit_flips([optimizer])
    different = []
    for _ in range(3):
        weight.grad = torch.ones(8)
        optimizer.step()
        different.append(int((weight != 1).sum()))
    assert different == [0, 1, 1]


@pytest.mark.parametrize("fault", ["flip=5:after_shards", "flip:weights", "flip=x:weights", "kill:weight"])
def test_a_wrong_flip_is_rejected(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv(VARIABLE, fault)
    with pytest.raises(ConfigError, match="flip=SEED"):
        fault_point("weights")
