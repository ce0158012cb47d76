"""Exact exchange of values between ranks, compared with the published behavior of OLMo-core.

Each docstring names the published function and the weakness that the test covers. Tests under `against_published`
also run their check against a re-creation of the published behavior, which must fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from components.distributed import utils
from components.distributed.collectives import MismatchError
from components.distributed.process.groups import NotInGroupError
from tests.distributed import published
from tests.distributed.contrast import against_published
from tests.harness import run_ranks

CPU = torch.device("cpu")


@against_published(utils.synchronize_value, published.synchronize_value, symptom="assert 0.1000000014")
def test_synchronized_numbers_keep_value_and_type(rank: int, synchronize: Callable[..., Any]) -> None:
    """OLMo-core synchronize_value: turns 0.1 into 0.10000000149 on every rank, the source included."""
    for value in (0.1, -(2**53) - 1, 2**63 - 1, True, math.inf, 1e-320):
        received = synchronize(value if rank == 0 else type(value)(0), CPU)
        assert received == value
        assert type(received) is type(value)


@against_published(
    (utils.synchronize_value, utils.all_reduce_value),
    (published.synchronize_value, published.all_reduce_value),
    symptom="the argument changed",
)
def test_tensor_arguments_are_not_modified(rank: int, functions: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    """OLMo-core synchronize_value, all_reduce_value: overwrite a tensor that is already on the device."""
    local = torch.full((2, 3), float(rank + 1), dtype=torch.bfloat16)
    before = local.clone()
    synchronized, reduced = functions[0](local, CPU), functions[1](local, CPU)
    assert torch.equal(local, before), "the argument changed"
    assert torch.equal(synchronized, torch.ones_like(local))
    assert torch.equal(reduced, torch.full_like(local, 3.0))


@pytest.mark.parametrize("name", ["synchronize_value", "synchronize_flag", "broadcast_object"])
@against_published(utils, published, symptom="ValueError.*(?i:group|rank)", world_size=3, published_timeout=4)
def test_default_source_is_the_first_rank_of_the_group(rank: int, module: Any, name: str) -> None:
    """OLMo-core synchronize_value, synchronize_flag, broadcast_object: src=0 fails in groups without rank 0."""
    group = dist.new_group([1, 2])
    function = getattr(module, name)
    arguments = () if name == "broadcast_object" else (CPU,)
    value = True if name == "synchronize_flag" else rank * 10
    if rank:
        expected = True if name == "synchronize_flag" else 10
        assert function(value, *arguments, group=group) == expected
    elif module is utils:
        with pytest.raises(NotInGroupError):
            function(value, *arguments, group=group)


@against_published(
    utils.synchronize_value,
    published.synchronize_value,
    symptom="AssertionError|SIGABRT|still running|RuntimeError",
    published_timeout=4,
)
def test_source_rank_determines_type_shape_and_dtype(rank: int, synchronize: Callable[..., Any]) -> None:
    """OLMo-core synchronize_value: a type mismatch across ranks hangs, or reinterprets the bits."""
    assert synchronize(7 if rank == 0 else 7.5, CPU) == 7
    received = synchronize(torch.arange(3) if rank == 0 else 0.5, CPU)
    assert received.tolist() == [0, 1, 2]
    received = synchronize(torch.ones(2, 2, dtype=torch.float64) if rank == 0 else torch.zeros(5), CPU)
    assert received.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert received.dtype is torch.float64
    assert synchronize(torch.tensor(rank == 0), CPU).item() is True
    assert synchronize(torch.tensor([5 - rank], dtype=torch.int16), CPU).tolist() == [5]
    assert synchronize(torch.zeros(0, 3), CPU).shape == (0, 3)


def test_unsupported_values_are_rejected() -> None:
    """Only a bool, int, float or tensor is accepted; other values raise before any communication."""

    def check(rank: int) -> tuple[float, str]:
        with pytest.raises(OverflowError, match="64 bits"):
            utils.all_reduce_value(2**63, CPU)
        with pytest.raises(TypeError, match="str: expected a bool"):
            utils.all_reduce_value("text", CPU)  # type: ignore[type-var]
        return utils.synchronize_value(rank + 0.5, CPU, src=2), utils.broadcast_object(f"from {rank}", src=1)

    assert run_ranks(3, check) == [(2.5, "from 1")] * 3


@against_published(utils.all_reduce_value, published.all_reduce_value, symptom="assert 33554432.0 == 33554434.0")
def test_all_reduced_sums_are_exact(rank: int, reduce: Callable[..., Any]) -> None:
    """OLMo-core all_reduce_value: returns 33554432.0 for 16777217.0 on two ranks."""
    assert reduce(16777217.0, CPU) == 33554434.0
    assert reduce(2**53 + 1, CPU) == 2**54 + 2
    assert reduce(0.1 * (rank + 1), CPU) == 0.1 + 0.2


@against_published(utils.all_reduce_value, published.all_reduce_value, symptom="AssertionError: (True|1)", world_size=3)
def test_sum_of_bools_is_a_count(rank: int, reduce: Callable[..., Any]) -> None:
    """OLMo-core all_reduce_value: the sum of bools is True."""
    count = reduce(True, CPU)
    assert count == 3, count
    assert reduce(torch.tensor([True, rank == 0]), CPU).tolist() == [3, 1]
    assert reduce(rank == 1, CPU, op=dist.ReduceOp.MAX) is True


@against_published(
    utils, published, symptom="SIGABRT|invalid|still running|Connection|DID NOT RAISE", published_timeout=4
)
def test_mismatched_values_raise_on_every_rank(rank: int, module: Any) -> None:
    """OLMo-core all_reduce_value, all_gather: a dtype mismatch aborts the process."""
    double = torch.ones(2, dtype=torch.float64 if rank else torch.float32)
    with pytest.raises(MismatchError, match=r"rank 0: a float32 .* rank 1: a float64 tensor of shape \[2\]"):
        module.all_gather(double)
    with pytest.raises(MismatchError, match=r"rank 0: a float32 .* rank 1: a float64"):
        module.all_reduce_value(double, CPU)
    with pytest.raises(MismatchError, match=r"shape \[1\]; rank 1: a float32 tensor of shape \[2\]"):
        module.all_reduce_value(torch.ones(rank + 1), CPU)
    with pytest.raises(MismatchError, match=r"rank 0: the int 1; rank 1: a float32 tensor"):
        module.all_reduce_value(torch.ones(1) if rank else 1, CPU)
    assert module.all_reduce_value(1.5 if rank else 1, CPU) == 2.5  # ints and floats can be added


def test_numbers_support_every_reduction() -> None:
    """A NaN on any rank propagates, also through MIN."""
    ops = dist.ReduceOp

    def check(rank: int) -> list[Any]:
        value = rank + 2  # 2, 3, 4
        results: list[Any] = [utils.all_reduce_value(value, CPU, op) for op in (ops.PRODUCT, ops.MIN, ops.MAX, ops.AVG)]
        results += [utils.all_reduce_value(value, CPU, op) for op in (ops.BAND, ops.BOR, ops.BXOR)]
        results.append(math.isnan(utils.all_reduce_value(math.nan if rank == 1 else 1.0, CPU, ops.MIN)))
        with pytest.raises(ValueError, match="numbers can be reduced by"):
            utils.all_reduce_value(value, CPU, "mean")
        return results

    assert run_ranks(3, check) == [[24, 2, 4, 3.0, 0, 7, 5, True]] * 3


@against_published(
    utils.all_gather,
    published.all_gather,
    symptom="RuntimeError|invalid tensor size|SIGABRT|still running",
    world_size=3,
    published_timeout=4,
)
def test_all_gather_supports_ragged_tensors(rank: int, gather: Callable[..., Any]) -> None:
    """OLMo-core all_gather: raises for ragged shapes, although it is meant to support them."""
    gathered = gather(torch.full((rank, 2), rank, dtype=torch.int16))
    assert [item.tolist() for item in gathered] == [[], [[1, 1]], [[2, 2], [2, 2]]]
    assert [tuple(item.shape) for item in gathered] == [(0, 2), (1, 2), (2, 2)]
    assert [item.tolist() for item in gather(torch.tensor(rank == 1))] == [False, True, False]
    for dtype in (torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.uint64):
        gathered = gather(torch.full((rank + 1,), rank).to(dtype))
        assert [item.to(torch.complex64).real.tolist() for item in gathered] == [[0], [1, 1], [2, 2, 2]]
        assert {item.dtype for item in gathered} == {dtype}
    assert [item.tolist() for item in gather(torch.zeros(0))] == [[], [], []]


@against_published(utils.all_gather, published.all_gather, symptom="no gradient|RuntimeError")
def test_all_gather_is_differentiable(rank: int, gather: Callable[..., Any]) -> None:
    """OLMo-core all_gather: no autograd. The expected gradient is computed by hand from the weights of each term."""
    local = torch.full((rank + 1,), 2.0, dtype=torch.float64, requires_grad=True)
    gathered = gather(local)
    assert gathered[0].requires_grad, "no gradient"
    sum((rank + 1) * (source + 1) * item.pow(2).sum() for source, item in enumerate(gathered)).backward()
    # d/dx of sum over ranks r of (r + 1) (source + 1) x^2 at x = 2
    assert local.grad is not None
    assert local.grad.tolist() == [(1 + 2) * (rank + 1) * 4.0] * (rank + 1)
    with torch.no_grad():
        assert not gather(local)[0].requires_grad
    if gather is utils.all_gather:
        with pytest.raises(MismatchError, match="with gradient"):
            gather(local if rank else local.detach())


@against_published(utils.all_gather, published.all_gather, symptom="a pickled collective")
def test_all_gather_does_not_pickle(rank: int, gather: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """OLMo-core all_gather: one pickled collective per call."""

    def forbidden(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a pickled collective")

    monkeypatch.setattr(dist, "all_gather_object", forbidden)
    assert [item.item() for item in gather(torch.tensor([rank]))] == [0, 1]


def test_helpers_work_in_a_single_process() -> None:
    """OLMo-core documents that most helpers work in a non-distributed context as well."""
    tensor = torch.ones(2)
    assert utils.synchronize_value(0.1, CPU) == 0.1
    assert utils.synchronize_flag(True, CPU) is True
    assert utils.all_reduce_value(3, CPU) == 3
    assert utils.broadcast_object("x") == "x"
    assert utils.all_gather(tensor) == [tensor]
    assert utils.all_gather_object("x") == ["x"]
    assert (utils.get_world_size(), utils.get_local_rank(), utils.get_fs_local_rank()) == (1, 0, 0)
    assert (utils.get_local_world_size(), utils.get_num_nodes(), utils.get_global_rank(3)) == (1, 1, 3)
    utils.validate_env_vars()
    assert run_ranks(2, lambda rank: utils.all_gather_object({"rank": rank})) == [[{"rank": 0}, {"rank": 1}]] * 2
