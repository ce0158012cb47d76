"""Collectives on values and objects that also work in a single process (as in OLMo-core's distributed.utils).

Numbers are exact (float64, int64), arguments are never modified, and `src` is a rank *within the group*. Before
`init_process_group` each function returns the single-process result.

gloo aborts the process if ranks pass tensors of different dtypes, and reads garbage if one rank sends an int and
another a float of the same width. Ranks therefore exchange headers first: int64 vectors of the same size on all ranks,
with kind, dtype and shape of the value. A number is contained in its header, as 64 bits. Mismatched types or shapes
raise MismatchError on every rank instead of hanging or aborting.
"""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from components.distributed.process.groups import is_distributed, require_member
from components.torch_kernels import torch_dtypes

_Scalar = bool | int | float
_WIDTH = 16
_DIMS_AT = 4
_SCALARS: tuple[type, ...] = (bool, int, float)
_TENSOR = len(_SCALARS)
_T = TypeVar("_T")
Value = TypeVar("Value", bound=_Scalar | torch.Tensor)


def synchronize_value(
    value: Value, device: torch.device, src: int = 0, group: dist.ProcessGroup | None = None
) -> Value:
    """Broadcast a bool, int, float or tensor from rank `src` to every rank of `group`.

    The result has the type, dtype and shape of the value on `src`; the values on the other ranks are ignored. A tensor
    is returned as a new tensor on `device`.

    Args:
        src: Source rank within `group`.

    Raises:
        NotInGroupError: This process is not a member of `group`.
    """
    if not is_distributed():
        return value
    require_member(group)
    message = torch.zeros(_WIDTH, dtype=torch.int64, device=device)
    root = dist.get_rank(group) == src
    if root:
        message = _encode(value, device)
    dist.broadcast(message, group=group, group_src=src)
    header = decode(message.tolist())
    if header.scalar is not None:
        return cast(Value, header.scalar)
    received = _contiguous_copy(value, device) if root else torch.empty(header.shape, dtype=header.dtype, device=device)
    dist.broadcast(_bytes(received), group=group, group_src=src)
    return cast(Value, received)


def synchronize_flag(flag: bool, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Broadcast a flag from the first rank of `group`."""
    return bool(synchronize_value(bool(flag), device, src=0, group=group))


def all_reduce_value(
    value: Value,
    device: torch.device,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
) -> Value:
    """All-reduce a bool, int, float or tensor.

    Numbers are reduced in float64 or as exact integers, in rank order, so that every rank gets the same bits. The SUM
    of bools is the number of True values. A tensor is returned as a new tensor on `device`.

    Raises:
        MismatchError: Ranks mix tensors and numbers, or pass tensors of different dtype or shape. Raised on every rank.
        NotInGroupError: This process is not a member of `group`.
    """
    if not is_distributed():
        return value
    headers = _exchange_headers(value, device, group)
    numbers = [header.scalar for header in headers if header.scalar is not None]
    if len(numbers) == len(headers):
        return cast(Value, _reduce_scalars(numbers, op))
    if len({(header.dtype, header.shape) for header in headers}) > 1:
        raise _mismatch("all_reduce_value", "all ranks must pass numbers, or tensors of one dtype and shape", headers)
    reduced = _contiguous_copy(value, device)
    if reduced.dtype is torch.bool and op == dist.ReduceOp.SUM:
        reduced = reduced.to(torch.int64)
    dist.all_reduce(reduced, op=op, group=group)
    return cast(Value, reduced)


def reduce_loss(
    loss_store: list[torch.Tensor],
    total_num_tokens: torch.Tensor,
    per_token_loss: bool = True,
    dp_group: dist.ProcessGroup | None = None,
    *,
    check_finite: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum losses and their denominator over micro-batches and ranks in one all-reduce.

    Same signature as NeMo AutoModel's distributed.utils.reduce_loss.

    Args:
        loss_store: Sums of token losses, one scalar per micro-batch; may be empty (a rank without data).
        total_num_tokens: Number of targets in this rank's micro-batches, not yet reduced over ranks.
        per_token_loss: True: the denominator is the number of tokens; False: the number of micro-batches.
        dp_group: Process group to sum over (dp x cp); None: no reduction over ranks.
        check_finite: Raise for a non-finite loss, which synchronizes the host with the device. False: return the sum
            unchecked, without synchronizing.

    Returns:
        (loss, denominator), each of shape (1,) and detached: the loss sum in float64, the denominator in int64. The
        mean loss is loss / denominator.

    Raises:
        FloatingPointError: The loss of some ranks is not finite; the message lists these ranks.
    """
    device = total_num_tokens.device
    losses = [loss.detach().to(device=device, dtype=torch.float64).reshape(()) for loss in loss_store]
    total = torch.stack(losses).sum() if losses else torch.zeros((), dtype=torch.float64, device=device)
    count = total_num_tokens.detach().sum().double() if per_token_loss else torch.full_like(total, len(losses))
    size, rank = (dist.get_world_size(dp_group), dist.get_rank(dp_group)) if dp_group is not None else (1, 0)
    packed = torch.stack([total, count])  # (2,)
    if check_finite:
        nonfinite = torch.zeros(size, dtype=torch.float64, device=device)
        nonfinite[rank] = (~torch.isfinite(total)).double()
        packed = torch.cat([packed.nan_to_num(0, 0, 0), nonfinite])  # (2 + ranks,)
    if size > 1:
        dist.all_reduce(packed, group=dp_group)
    nonfinite_ranks = packed[2:].nonzero().flatten().tolist() if check_finite else []
    if nonfinite_ranks:
        raise FloatingPointError(f"the loss of rank {', '.join(map(str, nonfinite_ranks))} of {size} is not finite")
    return packed[:1], packed[1:2].to(torch.int64)


def broadcast_object(obj: _T, src: int = 0, group: dist.ProcessGroup | None = None) -> _T:
    """Broadcast a pickled object to all ranks of the process group. `src` is a rank within `group`.

    Unpickling executes code sent by a peer: use `json_collectives.broadcast_json` for JSON-serializable values.
    """
    if not is_distributed():
        return obj
    require_member(group)
    carrier = [obj]
    dist.broadcast_object_list(carrier, group=group, group_src=src)
    return carrier[0]


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[torch.Tensor]:
    """All-gather tensors into a list in rank order. Shapes may differ between ranks, the dtype may not.

    Differentiable if the tensor requires grad on every rank: its gradient is then summed over all ranks, so all of
    them must run the backward.

    Raises:
        MismatchError: Tensors differ in dtype, or only some require grad. Raised on every rank.
        NotInGroupError: This process is not a member of `group`.
    """
    if not is_distributed():
        return [tensor]
    if not torch.is_grad_enabled():
        tensor = tensor.detach()
    headers = _exchange_headers(tensor, tensor.device, group)
    if len({(header.dtype, header.requires_grad) for header in headers}) > 1:
        raise _mismatch("all_gather", "all ranks must pass the same dtype, and all or none must require grad", headers)
    sizes = [math.prod(header.shape) for header in headers]
    longest = max(sizes)
    if longest == 0:
        return [tensor.new_empty(header.shape) for header in headers]
    flat = torch.cat([tensor.reshape(-1), tensor.new_zeros(longest - tensor.numel())])  # (longest,)
    rows = _AllGatherRows.apply(flat, group)  # (ranks, longest)
    return [row[:size].view(header.shape) for row, size, header in zip(rows, sizes, headers, strict=True)]


def all_gather_object(obj: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """All-gather pickled objects from all ranks of a process group into a list, in rank order.

    Unpickling executes code sent by a peer: use `json_collectives.all_gather_json` for JSON-serializable values.
    """
    if not is_distributed():
        return [obj]
    require_member(group)
    objects = [obj] * dist.get_world_size(group)
    dist.all_gather_object(objects, obj, group=group)
    return objects


class _AllGatherRows(torch.autograd.Function):
    """All-gather of a row: (n,) on each rank -> (ranks, n) on every rank. The backward sums gradients over ranks."""

    @staticmethod
    def forward(ctx: Any, row: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        rows = row.new_empty(dist.get_world_size(group), row.numel())
        dist.all_gather([_bytes(other) for other in rows], _bytes(row.contiguous()), group=group)
        return rows

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad_outputs[0].contiguous().clone()  # (ranks, n), reduced in place below
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8.

    Data that is only copied may have dtypes that a backend does not support.
    """
    return tensor.view(-1).view(torch.uint8)


def _contiguous_copy(value: Any, device: torch.device) -> torch.Tensor:
    return value.detach().to(device, copy=True).contiguous()


def _exchange_headers(
    value: _Scalar | torch.Tensor, device: torch.device, group: dist.ProcessGroup | None
) -> list[Header]:
    require_member(group)
    mine = _encode(value, device)
    messages = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(messages, mine, group=group)
    return [decode(message) for message in torch.stack(messages).tolist()]


def _reduce_scalars(values: list[_Scalar], op: Any) -> _Scalar:
    if op == dist.ReduceOp.SUM:
        return functools.reduce(operator.add, values, 0)
    if op == dist.ReduceOp.AVG:
        return functools.reduce(operator.add, values, 0) / len(values)
    if op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX) and any(math.isnan(value) for value in values):
        return math.nan  # Python's min and max would depend on the order of the ranks
    reducers: list[tuple[Any, Callable[[Any, Any], Any]]] = [
        (dist.ReduceOp.PRODUCT, operator.mul),
        (dist.ReduceOp.MIN, min),
        (dist.ReduceOp.MAX, max),
        (dist.ReduceOp.BAND, operator.and_),
        (dist.ReduceOp.BOR, operator.or_),
        (dist.ReduceOp.BXOR, operator.xor),
    ]
    for supported_op, reducer in reducers:
        if op == supported_op:
            return functools.reduce(reducer, values)
    raise ValueError(f"op={op}: numbers can be reduced by SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR")


class MismatchError(ValueError):
    """Mismatch of the values that ranks passed to a collective; raised on all ranks, with the value of each."""


@dataclass(frozen=True, slots=True)
class Header:
    """Dtype and shape of a tensor, or a number with its type."""

    scalar: _Scalar | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    requires_grad: bool = False

    def __str__(self) -> str:
        if self.scalar is not None:
            return f"the {type(self.scalar).__name__} {self.scalar}"
        name = str(self.dtype).removeprefix("torch.")
        return f"a {name} tensor of shape {list(self.shape)}" + (" with gradient" if self.requires_grad else "")


def _encode(value: _Scalar | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the header of `value` as an int64 vector on `device`.

    Raises:
        TypeError: `value` is not a bool, int, float or tensor.
        OverflowError: `value` is an int of more than 64 bits.
        ValueError: `value` is a tensor with more dims than the header has room for.
    """
    fields = [0] * _WIDTH
    if isinstance(value, torch.Tensor):
        if value.dim() > _WIDTH - _DIMS_AT:
            raise ValueError(f"a tensor of {value.dim()} dims: at most {_WIDTH - _DIMS_AT} are supported")
        fields[:_DIMS_AT] = [_TENSOR, _dtypes().index(value.dtype), value.dim(), int(value.requires_grad)]
        fields[_DIMS_AT : _DIMS_AT + value.dim()] = value.shape
    elif type(value) in _SCALARS:
        fields[0] = _SCALARS.index(type(value))
        fields[1] = struct.unpack("q", struct.pack("d", value))[0] if isinstance(value, float) else int(value)
        if not -(2**63) <= fields[1] < 2**63:
            raise OverflowError(f"{value} does not fit into 64 bits")
    else:
        raise TypeError(f"{type(value).__name__}: expected a bool, int, float or tensor")
    return torch.tensor(fields, dtype=torch.int64, device=device)


def decode(fields: list[int]) -> Header:
    """Return the header from the elements of a vector of `_encode`."""
    if fields[0] == _TENSOR:
        shape = tuple(fields[_DIMS_AT : _DIMS_AT + fields[2]])
        return Header(dtype=_dtypes()[fields[1]], shape=shape, requires_grad=bool(fields[3]))
    kind = _SCALARS[fields[0]]
    bits = struct.unpack("d", struct.pack("q", fields[1]))[0] if kind is float else fields[1]
    return Header(scalar=kind(bits))


def _mismatch(call: str, rule: str, headers: list[Header]) -> MismatchError:
    """Return the error for a call whose headers, in rank order, break `rule`."""
    passed = "; ".join(f"rank {rank}: {header}" for rank, header in enumerate(headers))
    return MismatchError(f"{call}: {rule}, but {passed} (ranks of the group)")


def _dtypes() -> list[torch.dtype]:
    """Return all dtypes in an order that is the same on all ranks."""
    return sorted(set(torch_dtypes().values()), key=str)
