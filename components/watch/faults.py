"""Fault injection for tests: a kill, a disk error or a flipped bit at a named point of a run. Imports no torch.

MESHBOOK_FAULT=kill:after_manifest:rank0:2      # rank 0 is killed the second time that it reaches the point
MESHBOOK_FAULT=enospc:after_shards              # every rank, the first time
MESHBOOK_FAULT=slow=5:after_random:rank1:*      # rank 1 sleeps for 5 s every time
MESHBOOK_FAULT=eio:before_manifest,kill:at_load # several
MESHBOOK_FAULT=flip=7:weights:rank1:3           # step 3 of this attempt leaves one wrong bit in rank 1's weights

A fault is KIND:POINT, optionally followed by the rank (rankN or all, the default) and the occurrence (a number counted
from 1, the default, or * for every one). Points are those of POINTS, of which only rank 0 reaches those from
before_manifest to while_pruning, of _REMOTE_POINTS, and of _STEP_POINTS, which are reached once per step. Kinds:
kill (SIGKILL), stop (SIGSTOP), enospc, eio, erofs (the errors of a full, a failing and a read-only disk), slow=SECONDS,
and at the points of _STEP_POINTS flip=SEED, a bit drawn at random, which simulates silent data corruption for tests of
the comparison of replicas.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from components.protocol.errors import ConfigError
from components.protocol.processes import current_rank

if TYPE_CHECKING:
    import torch

VARIABLE = "MESHBOOK_FAULT"
POINTS = (
    "after_folder",
    "after_shards",
    "after_random",
    "before_manifest",
    "after_manifest",
    "before_rename",
    "after_rename",
    "while_pruning",
    "at_load",
)
"""In the order of a save; at_load: before the first file of a checkpoint is read."""
_REMOTE_POINTS = ("while_copying", "before_remote_manifest", "after_remote_manifest")
"""In the order of a copy to checkpoint.remote: before each file, and on rank 0 around the write of the manifest."""
_STEP_POINTS = ("reduced_gradients", "weights", "optimizer_state")
"""In the order of a step, each with the tensors that a bit is flipped in: the first before the update, others after."""
_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO, "erofs": errno.EROFS}
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_NUMBERED = ("slow", "flip")
_ALL, _EVERY = "all", "*"


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: str
    number: float
    """Seconds of slow, seed of flip; 0 for other kinds."""
    point: str
    ranks: str
    occurrence: str
    """Number of the pass through the point, counted from 1, or `*`."""

    def __str__(self) -> str:
        kind = f"{self.kind}={self.number:g}" if self.kind in _NUMBERED else self.kind
        return f"{kind}:{self.point}:{self.ranks}:{self.occurrence}"


def fault_point(name: str, flip: Callable[[int], object] | None = None) -> None:
    """Trigger the faults that MESHBOOK_FAULT sets for this point and this rank, if any.

    The remaining occurrences are counted down in the variable of this process, so there is no other state.

    Args:
        flip: Flips a bit drawn with this seed; required at the points of _STEP_POINTS.

    Raises:
        OSError: The fault is a disk error.
        ConfigError: The variable is malformed.
    """
    armed = os.environ.get(VARIABLE)
    if not armed:
        return
    due = []
    remaining = []
    for fault in map(_parse, armed.split(",")):
        here = fault.point == name and fault.ranks in (_ALL, f"rank{current_rank(os.environ)}")
        if here and fault.occurrence in ("1", _EVERY):
            due.append(fault)
        if here and fault.occurrence != _EVERY:
            fault = replace(fault, occurrence=str(int(fault.occurrence) - 1))
        if fault.occurrence != "0":
            remaining.append(fault)
    os.environ[VARIABLE] = ",".join(map(str, remaining))
    for fault in due:
        if fault.kind == "flip" and flip is not None:
            flip(int(fault.number))
        else:
            _trigger(fault)


def _trigger(fault: _Fault) -> None:
    if fault.kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault.kind])
    elif fault.kind == "slow":
        time.sleep(fault.number)
    else:
        number = _ERRORS[fault.kind]
        raise OSError(number, f"{os.strerror(number)} ({VARIABLE}={fault})")


def _parse(text: str) -> _Fault:
    kind, point, ranks, occurrence = [*text.strip().split(":"), "", "", ""][:4]
    kind, _, number = kind.partition("=")
    fault = _Fault(kind, float(number) if _is_number(number) else 0.0, point, ranks or _ALL, occurrence or "1")
    valid_ranks = fault.ranks == _ALL or (
        fault.ranks.startswith("rank") and fault.ranks.removeprefix("rank").isdecimal()
    )
    valid_occurrence = fault.occurrence == _EVERY or (fault.occurrence.isdecimal() and int(fault.occurrence) > 0)
    valid_kind = _is_number(number) if kind in _NUMBERED else not number and (kind in _SIGNALS or kind in _ERRORS)
    valid_point = point in _STEP_POINTS or (point in (*POINTS, *_REMOTE_POINTS) and kind != "flip")
    if text.count(":") > 3 or not (valid_kind and valid_point and valid_ranks and valid_occurrence):
        raise ConfigError(
            f"{VARIABLE}={text}: must be KIND:POINT[:rankN or all[:number or *]], KIND one of "
            f"{', '.join([*_SIGNALS, *_ERRORS])}, slow=SECONDS or flip=SEED, POINT one of "
            f"{', '.join([*POINTS, *_REMOTE_POINTS])}, or for flip and others {', '.join(_STEP_POINTS)}; unset it"
        )
    return fault


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


def arm_bit_flips(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Register the points of _STEP_POINTS around each step of the optimizers, if MESHBOOK_FAULT names any of them."""
    if not any(f":{point}" in os.environ.get(VARIABLE, "") for point in _STEP_POINTS):
        return
    before, *after = _STEP_POINTS

    def pre_hook(*_: Any) -> None:
        fault_point(before, partial(_flip_random_bit, _tensors_at(before, optimizers)))

    def post_hook(*_: Any) -> None:
        for point in after:
            fault_point(point, partial(_flip_random_bit, _tensors_at(point, optimizers)))

    optimizers[0].register_step_pre_hook(pre_hook)
    optimizers[-1].register_step_post_hook(post_hook)


def _tensors_at(point: str, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return this rank's shards of the tensors of a point: gradients, weights or optimizer state."""
    import torch  # here, as in _flip_random_bit: most users of this file have no tensors
    from torch.distributed.tensor import DTensor

    parameters = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
    if point == "reduced_gradients":
        tensors = [parameter.grad for parameter in parameters if parameter.grad is not None]
    elif point == "weights":
        tensors = [parameter.detach() for parameter in parameters]
    else:
        states = [optimizer.state[each] for optimizer in optimizers for each in optimizer.state]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    shards = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [shard for shard in shards if shard.numel()]


def _flip_random_bit(tensors: Sequence[torch.Tensor], seed: int) -> None:
    """Flip one bit of one of the tensors in place, drawn with `seed`; tensors are drawn in proportion to their size."""
    import torch

    draw = random.Random(seed)
    (tensor,) = draw.choices(tensors, weights=[each.numel() * each.element_size() for each in tensors])
    element, byte, bit = draw.randrange(tensor.numel()), draw.randrange(tensor.element_size()), draw.randrange(8)
    index = []
    for size in reversed(tensor.shape):
        element, position = divmod(element, size)
        index.append(position)
    value = tensor[tuple(reversed(index))].reshape(1).clone()
    value.view(torch.uint8)[byte] ^= 1 << bit
    tensor[tuple(reversed(index))] = value[0]
