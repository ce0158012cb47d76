"""Comparison of replicas: ranks that hold the same shard of a tensor must hold the same bits.

A processor that computes a wrong number without an error (silent data corruption) changes the weights or the optimizer
state of its rank, and nothing else reports it. Replicas are bit-equal by construction: they start equal, and apply the
same reduced gradients with the same kernels. So each rank digests the bits of its replicated tensors, one small
all-gather exchanges the digests, and a majority of the replicas names the rank that differs.

Which ranks hold the same data follows from the tensors: a DTensor is the same on all ranks with equal coordinates along
the mesh axes that shard it, a plain parameter on all ranks of its pipeline stage, and plain optimizer state wherever
its parameter is. Only the sum over a rank's own samples, before gradients are reduced, has no replica.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from components.checkpoint.tensors import MODEL, OPTIMIZER, Optimizers, Tensors, list_optimizers
from components.distributed.mesh import Mesh
from components.json_collectives import all_gather_json, world_size
from components.protocol.failures import CorruptRank
from components.protocol.processes import node_name

_ROW_WORDS = 4096
"""64-bit words in a row of a digested tensor."""
_ROWS_AT_ONCE = 64
"""Rows that are summed at a time on a CPU, so that the second sum reads them from its cache."""
_SMALL_BYTES = 2**16
"""Smaller tensors are copied into one before they are digested: each would take several kernels."""
_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd 64-bit constants: the golden ratio, and those of the splitmix64 generator (Steele et al. 2014)."""
_NAMED = 3
"""Maximum number of tensors and ranks listed in one message."""

_Digests = dict[str, list[int]]
"""Digest of a rank's tensors, by the identity of the data (`_identity`)."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Ranks whose replicas differ from others."""

    corrupt: list[int] = field(default_factory=list)
    """Ranks that differ from an agreeing majority of the ranks with the same data."""
    undecided: list[int] = field(default_factory=list)
    """Ranks that hold different bits without a majority, such as two replicas: some of these are corrupt."""


class ReplicaCheck:
    """Comparison of the replicas of a run's weights, optimizer state and averaged weights."""

    def __init__(
        self, mesh: Mesh, model: nn.Module, optimizer: Optimizers, every: int, average: Tensors | None = None
    ) -> None:
        """Create the comparison without communication.

        Args:
            every: Optimizer steps between scheduled comparisons (checkpoint.check_replicas); 0: nothing is compared.
            average: `WeightAverage.tensors`; None: there is no average.
        """
        self._mesh, self._model, self._optimizer, self._every = mesh, model, optimizer, every
        self._average = average or {}
        self._ranks_of_stage = world_size() // mesh.size("pp")
        self._equal_after: int | None = None

    def due(self, step: int) -> bool:
        """Return whether a comparison is scheduled after optimizer step `step`."""
        return self._every > 0 and step % self._every == 0

    @property
    def note(self) -> str:
        """Share of this rank's parameters that is compared, for the banner; empty if nothing is to be compared."""
        if self._every == 0 or not dist.is_initialized() or dist.get_world_size() == 1:
            return ""
        sizes: dict[int, int] = {}
        for tensor in self._weights().values():
            copies = self._copies(_sharded_over(tensor))
            sizes[copies] = sizes.get(copies, 0) + _local_bytes(tensor)
        replicated = {copies: size for copies, size in sizes.items() if copies > 1}
        if not replicated:
            return (
                "replicas: no rank holds one of another's parameters on this mesh; a rank that computes wrong numbers "
                f"without an error is not found (checkpoint.check_replicas={self._every})"
            )
        holders = " or ".join(map(str, sorted(replicated)))
        return (
            f"replicas: bits are compared every {self._every} steps and before each checkpoint: "
            f"{_mib(sum(replicated.values()))} of {_mib(sum(sizes.values()))} of parameters, with their optimizer "
            f"state, are replicated on {holders} ranks"
        )

    @torch.no_grad()
    def compare(self, step: int) -> None:
        """Compare all replicas between two optimizer steps, the last of which was `step`. A collective.

        Raises:
            CorruptRank: On every rank with the same message, if two ranks hold different bits of the same data.
        """
        if self._every == 0 or self._ranks_of_stage == 1:
            return
        tensors = self._replicated()
        by_rank: list[_Digests] = all_gather_json(_digest_each(tensors))
        suspicion = _find_corrupt(by_rank)
        if suspicion is None:
            self._equal_after = step
            return
        raise self._error(step, suspicion, by_rank, tensors)

    def _replicated(self) -> dict[str, Tensors]:
        """Return this rank's tensors that other ranks hold too, by the identity of the data."""
        found: dict[str, Tensors] = {}
        weights = self._weights()
        axes = {id(tensor): _sharded_over(tensor) for tensor in weights.values()}
        names = {id(tensor): name for name, tensor in weights.items()}
        entries = [(name, tensor, axes[id(tensor)]) for name, tensor in weights.items()]
        entries += [(name, tensor, _sharded_over(tensor)) for name, tensor in self._average.items()]
        for optimizer in list_optimizers(self._optimizer):
            for parameter, state in optimizer.state.items():
                name = names.get(id(parameter), "").removeprefix(MODEL)
                for quantity, value in state.items() if name else ():
                    if isinstance(value, torch.Tensor):
                        # A plain tensor of a sharded parameter may be computed from the shard.
                        own = _sharded_over(value if isinstance(value, DTensor) else parameter)
                        entries.append((f"{OPTIMIZER}{quantity}/{name}", value, own))
        for name, tensor, sharded in entries:
            if self._copies(sharded) > 1:
                found.setdefault(self._identity(sharded), {})[name] = tensor
        return found

    def _weights(self) -> Tensors:
        """Return parameters, frozen ones too, and persistent buffers as `model/<name>`, tied ones once."""
        seen: set[int] = set()
        tensors: Tensors = {}
        # state_dict() makes FSDP2 reshard, as in `model_tensors`.
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                tensors[MODEL + name] = tensor
        return tensors

    def _copies(self, sharded: dict[str, tuple[int, int]]) -> int:
        """Return the number of ranks that hold the same data as this rank."""
        copies = self._ranks_of_stage
        for _, size in sharded.values():
            copies //= size
        return copies

    def _identity(self, sharded: dict[str, tuple[int, int]]) -> str:
        """Return the text that ranks with the same data have in common: pipeline stage, coordinates of the shard."""
        coordinates = [f"{axis} {coordinate}" for axis, (coordinate, _) in sorted(sharded.items())]
        return ", ".join([f"pp {self._mesh.rank('pp')}", *coordinates])

    def _error(
        self, step: int, suspicion: Suspicion, by_rank: list[_Digests], tensors: dict[str, Tensors]
    ) -> CorruptRank:
        """Return the error of a run with different replicas, with the names of the tensors that differ. A collective.

        Digests of the single tensors are computed only now.
        """
        different = {identity for identity, held in _holders(by_rank).items() if len(held) > 1}
        single = {
            f"{identity}: {name}": _digest_each({"": {name: tensor}})[""]
            for identity in sorted(different & set(tensors))
            for name, tensor in tensors[identity].items()
        }
        gathered: list[dict[str, Any]] = all_gather_json({"node": node_name(os.environ), "digests": single})
        nodes = [each["node"] for each in gathered]
        holders = _holders([each["digests"] for each in gathered])
        names = list(dict.fromkeys(text.partition(": ")[2] for text, held in holders.items() if len(held) > 1))
        total = len({text.partition(": ")[2] for text in holders})
        hosts = sorted({nodes[rank] for rank in suspicion.corrupt or suspicion.undecided})
        message = (
            f"{_describe(suspicion, nodes)}; after step {step} the bits of {len(names)} of {total} replicated tensors "
            f"differ ({_listed(names)}), {self._since}; this state is not saved: test the memory and processors of "
            f"{_listed(hosts)}, and repeat the command on other hosts to resume from the last checkpoint "
            f"(checkpoint.check_replicas={self._every}; 0: never compare)"
        )
        return CorruptRank(message, hosts)

    @property
    def _since(self) -> str:
        if self._equal_after is None:
            return "in the first comparison of this attempt"
        return f"which were equal after step {self._equal_after}"


def _sharded_over(tensor: torch.Tensor) -> dict[str, tuple[int, int]]:
    """Return this rank's coordinate and the size of each mesh axis along which ranks hold different data of a tensor.

    Empty for a plain tensor.
    """
    if not isinstance(tensor, DTensor):
        return {}
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"dim{dim}" for dim in range(mesh.ndim))
    return {
        names[dim]: (mesh.get_local_rank(dim), mesh.size(dim))
        for dim, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and mesh.size(dim) > 1
    }


def _find_corrupt(by_rank: Sequence[_Digests]) -> Suspicion | None:
    """Return the ranks whose digests differ from those of other ranks with the same data; None if all are equal.

    More than half of the ranks with the same data must agree to name the others. Where they do not, the ranks that are
    named elsewhere explain the difference if they are among them; otherwise it is undecided.
    """
    corrupt: set[int] = set()
    ties: list[set[int]] = []
    for held in _holders(by_rank).values():
        if len(held) > 1:
            everyone = {rank for ranks in held.values() for rank in ranks}
            most = max(held.values(), key=len)
            if 2 * len(most) > len(everyone):
                corrupt |= everyone - set(most)
            else:
                ties.append(everyone)
    undecided = {rank for tie in ties if not tie & corrupt for rank in tie}
    return Suspicion(sorted(corrupt), sorted(undecided)) if corrupt or undecided else None


def _digest_each(tensors: dict[str, Tensors]) -> _Digests:
    """Return a digest of the bits of each group of tensors; the host waits for the device once per group.

    Two digests are equal if the bits are equal. If up to three 64-bit words of a tensor differ, or all of them at
    random, the digests differ except for a probability of 2^-64. Sums of integers modulo 2^64 do not depend on their
    order, so kernels and devices do not matter.
    """
    on_devices = {identity: list(_digests_by_device(held.values())) for identity, held in tensors.items()}
    return {
        identity: [number for digest in digests for number in digest.tolist()]
        for identity, digests in on_devices.items()
    }


def _digests_by_device(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the digest (2,) of the tensors of each device, in the order of their first tensors."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        for part in _plain_parts(tensor):
            if part.numel():
                by_device.setdefault(part.device, []).append(part.reshape(-1).view(torch.uint8))
    yield from map(_digest, by_device.values())


def _digest(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the digest (2,) of flat uint8 tensors on one device.

    A tensor is a matrix of 64-bit words. The digest is a hash of the sums of all rows, and one of the sums of columns:
    changes that cancel in a row do not cancel in their columns, unless they form rectangles.
    """
    device = tensors[0].device
    rows: list[torch.Tensor] = []
    columns = torch.zeros(_ROW_WORDS, dtype=torch.int64, device=device)
    small: list[torch.Tensor] = []
    for tensor in tensors:
        end = tensor.numel() - tensor.numel() % (8 * _ROW_WORDS) if tensor.numel() >= _SMALL_BYTES else 0
        if end < tensor.numel():
            small.append(tensor[end:])
        if end:
            columns = _add_sums(tensor[:end], rows, columns)
    if small:
        remainder = -sum(each.numel() for each in small) % (8 * _ROW_WORDS)
        packed = torch.cat([*small, torch.zeros(remainder, dtype=torch.uint8, device=device)])
        columns = _add_sums(packed, rows, columns)
    return torch.stack([_hash(torch.cat(rows)), _hash(columns)])


def _add_sums(tensor: torch.Tensor, rows: list[torch.Tensor], columns: torch.Tensor) -> torch.Tensor:
    """Append the sums of the rows of a flat uint8 tensor to `rows`; return `columns` with its column sums added."""
    aligned = tensor if tensor.storage_offset() % 8 == 0 else tensor.clone()
    words = aligned.view(torch.int64).view(-1, _ROW_WORDS)
    for part in words.split(_ROWS_AT_ONCE) if words.device.type == "cpu" else (words,):
        rows.append(part.sum(1))
        columns = torch.add(part.sum(0), columns, alpha=_MULTIPLIERS[0])  # the factor keeps parts apart
    return columns


def _hash(values: torch.Tensor) -> torch.Tensor:
    """Return a hash of int64 values (n,) as a scalar: the sum of splitmix64 of each value and its index."""
    index = torch.arange(1, len(values) + 1, device=values.device)
    mixed = values + index * _MULTIPLIERS[0]
    for shift, multiplier in ((30, _MULTIPLIERS[1]), (27, _MULTIPLIERS[2]), (31, 1)):
        logical = (mixed >> shift) & (2 ** (64 - shift) - 1)  # torch shifts the sign in
        mixed = (mixed ^ logical) * multiplier
    return mixed.sum()


def _plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that hold this rank's data of a tensor, such as codes and scales of a quantized one."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    if is_traceable_wrapper_subclass(local):
        for name in local.__tensor_flatten__()[0]:
            yield from _plain_parts(getattr(local, name))
    else:
        yield local


def _holders(by_rank: Sequence[_Digests]) -> dict[str, dict[tuple[int, ...], list[int]]]:
    """Return the ranks that hold each digest, by the identity of the data."""
    holders: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for rank, digests in enumerate(by_rank):
        for identity, digest in digests.items():
            holders.setdefault(identity, {}).setdefault(tuple(digest), []).append(rank)
    return holders


def _describe(suspicion: Suspicion, nodes: list[str]) -> str:
    ranks = [f"rank {rank} on host {nodes[rank]}" for rank in suspicion.corrupt or suspicion.undecided]
    if suspicion.corrupt:
        verb = "computes" if len(ranks) == 1 else "compute"
        return f"{_listed(ranks)} {verb} wrong numbers without an error: a majority of the replicas agrees on others"
    return (
        f"one of {len(ranks)} ranks computes wrong numbers without an error, and no majority shows which: "
        f"{_listed(ranks)}"
    )


def _listed(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - _NAMED} more"] if len(texts) > _NAMED else []
    return ", ".join([*texts[:_NAMED], *more])


def _local_bytes(tensor: torch.Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in _plain_parts(tensor))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
