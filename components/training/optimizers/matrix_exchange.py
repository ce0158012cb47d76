"""Exchange of sharded matrices with owner ranks, each of which holds some of them completely.

An optimizer such as Muon computes a function of whole matrices. If every rank gathered each matrix and computed all of
them, n ranks would do n times the arithmetic. Here each matrix has one owner among the ranks that shard it: an
all-to-all sends it the other ranks' shards, and a second one returns the results. Replicas (dp_replicate) form groups
of their own, each of which computes everything. A fused projection consists of several matrices: queries, keys and
values, or gate and up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from components.distributed.mesh import share_timeout
from components.models.anatomy import Anatomy
from components.models.weights.shards import Block, blocks_at

Index = tuple[slice, ...]
_BUCKET_ELEMENTS = 2**27
"""Approximate number of elements of the parameters in one exchange: bounds the memory of its buffers."""
Runs = tuple[range, ...]
"""Indices along one dim, as ascending ranges."""
_HALVES = {"gate_up_proj"}
"""Projections with gate and up one after the other."""
_QUERIES_KEYS_VALUES = {"qkv_proj", "c_attn", "Wqkv", "W_pack"}
"""Projections with all queries, then all keys, then all values."""
_BY_HEAD = {"query_key_value"}
"""Projections with the queries, key and value of one key-value head after the other (GPT-NeoX, BLOOM, Falcon)."""
_ALTERNATING = {"gpt_oss"}
"""Model types whose experts alternate between a column of gate and one of up."""


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A matrix within a parameter: all of it, one expert, or one matrix of a fused projection."""

    parameter: nn.Parameter
    runs: tuple[Runs, ...]
    """Indices within the full parameter along each dim."""
    is_transposed: bool = False
    """Whether it is stored as (in, out)."""
    attached: int = 0
    """Numbers that are exchanged with each row of (out, in), after its values. Ranks that share a row hold the same."""

    @property
    def input_dim(self) -> int:
        """Dim of the inputs, along which the exchanged values are longer by `attached`."""
        return len(self.runs) - (2 if self.is_transposed else 1)

    @property
    def exchanged_shape(self) -> tuple[int, ...]:
        """Shape with the attached numbers."""
        dim = self.input_dim
        return tuple(size + self.attached * (each == dim) for each, size in enumerate(self.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape with as many dims as the parameter; all but the last two are 1."""
        return tuple(sum(map(len, runs)) for runs in self.runs)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a matrix that a rank holds."""

    local: Index
    """Indices in the rank's local tensor."""
    matrix: Index
    """Indices in the matrix."""
    shape: tuple[int, ...]
    is_attached: bool = False
    """Whether it holds the numbers attached to rows."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(slots=True)
class Bucket:
    """Matrices that are exchanged together."""

    parameters: list[nn.Parameter] = field(default_factory=list)
    """Parameters with these matrices."""
    group: dist.ProcessGroup | None = None
    """Ranks that exchange them; None: this rank holds each of them completely."""
    owned: list[tuple[Matrix, list[list[Piece]]]] = field(default_factory=list)
    """Matrices that this rank owns, with the pieces of each rank of the group."""
    sent: list[list[tuple[Matrix, Piece]]] = field(default_factory=list)
    """This rank's pieces, by the owner's rank in the group."""


class MatrixExchange:
    """Plan of the exchanges for a list of matrices. Creating it is a collective of the ranks that shard a parameter."""

    def __init__(self, matrices: Sequence[Matrix], cost: Callable[[Matrix], float]) -> None:
        """Assign owners such that the ranks of a group have about the same `cost`."""
        self.buckets: list[Bucket] = []
        by_ranks: dict[tuple[int, ...], list[Matrix]] = {}
        for matrix in matrices:
            by_ranks.setdefault(_ranks_of(matrix.parameter), []).append(matrix)
        for ranks, members in sorted(by_ranks.items()):
            if len(ranks) == 1:
                self.buckets += [_local_bucket(part) for part in _in_buckets(members)]
            else:
                self.buckets += _exchanged(members, ranks, cost)

    @property
    def sent_elements(self) -> int:
        """Elements that this rank sends to other ranks in one pass, there and back."""
        total = 0
        for bucket in self.buckets:
            if bucket.group is not None:
                rank = dist.get_rank(bucket.group)
                total += sum(
                    piece.numel for owner, sent in enumerate(bucket.sent) if owner != rank for _, piece in sent
                )
                total += sum(
                    piece.numel
                    for _, pieces in bucket.owned
                    for source, each in enumerate(pieces)
                    if source != rank
                    for piece in each
                )
        return total


class Transfer:
    """One pass of a bucket: shards to owners, and results back."""

    def __init__(self, bucket: Bucket, values: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Start sending this rank's pieces of `values`, local tensors by parameter, with the attached numbers."""
        self.bucket = bucket
        self._values = values
        self._work: dist.Work | None = None
        if bucket.group is not None:
            pieces = [values[matrix.parameter][piece.local].reshape(-1) for matrix, piece in self._sent]
            self._sizes = [sum(piece.numel for _, piece in sent) for sent in bucket.sent]
            self._owned_sizes = [
                sum(piece.numel for _, pieces in bucket.owned for piece in pieces[source])
                for source in range(len(bucket.sent))
            ]
            first = next(iter(values.values()))
            self._send = torch.cat(pieces) if pieces else first.new_empty(0)
            self._received = first.new_empty(sum(self._owned_sizes))
            self._work = dist.all_to_all_single(
                self._received, self._send, self._owned_sizes, self._sizes, group=bucket.group, async_op=True
            )

    @property
    def _sent(self) -> Iterator[tuple[Matrix, Piece]]:
        return itertools.chain.from_iterable(self.bucket.sent)

    def apply(
        self, function: Callable[[Matrix, torch.Tensor], torch.Tensor]
    ) -> Iterator[tuple[Matrix, Piece, torch.Tensor]]:
        """Apply `function` to each matrix (rows, columns) on its owner; yield this rank's pieces of the results."""
        if self._work is None:
            for matrix, (pieces,) in self.bucket.owned:
                values = self._values[matrix.parameter]
                whole = values.new_empty(matrix.exchanged_shape)
                for piece in pieces:
                    whole[piece.matrix] = values[piece.local]
                result = function(matrix, whole.view(whole.shape[-2:])).reshape(whole.shape)
                for piece in pieces:
                    yield matrix, piece, result[piece.matrix]
            return
        self._work.wait()
        # Pieces arrive by source rank, and are sent back in the same order: no header says which piece is which.
        received = iter(self._received.split([piece.numel for _, piece in self._pieces_by_source()]))
        wholes = {matrix: self._received.new_empty(matrix.exchanged_shape) for matrix, _ in self.bucket.owned}
        for matrix, piece in self._pieces_by_source():
            wholes[matrix][piece.matrix] = next(received).view(piece.shape)
        for matrix, whole in wholes.items():
            wholes[matrix] = function(matrix, whole.view(whole.shape[-2:])).reshape(whole.shape)
        results = [wholes[matrix][piece.matrix].reshape(-1) for matrix, piece in self._pieces_by_source()]
        back = torch.cat(results) if results else self._received
        dist.all_to_all_single(self._send, back, self._sizes, self._owned_sizes, group=self.bucket.group)
        parts = self._send.split([piece.numel for _, piece in self._sent])
        for (matrix, piece), part in zip(self._sent, parts, strict=True):
            yield matrix, piece, part.view(piece.shape)

    def _pieces_by_source(self) -> Iterator[tuple[Matrix, Piece]]:
        """Yield the pieces of the owned matrices in the order in which they are received."""
        for source in range(len(self.bucket.sent)):
            for matrix, pieces in self.bucket.owned:
                for piece in pieces[source]:
                    yield matrix, piece


def _ranks_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the global ranks that together hold a parameter, with this rank's replica coordinates."""
    if not isinstance(parameter, DTensor):
        return (0,)
    return tuple(rank for rank, _ in _holders(parameter))


def _holders(parameter: DTensor) -> list[tuple[int, list[int]]]:
    """Return (global rank, mesh coordinate) of the ranks that differ from this one along sharding axes only."""
    mesh, own = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    if own is None:
        raise ValueError(f"this rank is not in the mesh {mesh} of a parameter that it holds")
    axes = [
        range(size) if not placement.is_replicate() else range(coordinate, coordinate + 1)
        for placement, size, coordinate in zip(parameter.placements, mesh.shape, own, strict=True)
    ]
    ranks = mesh.mesh.flatten().tolist()
    holders = []
    for coordinate in itertools.product(*axes):
        position = 0
        for index, size in zip(coordinate, mesh.shape, strict=True):
            position = position * size + index
        holders.append((ranks[position], list(coordinate)))
    return holders


def _exchanged(matrices: list[Matrix], ranks: tuple[int, ...], cost: Callable[[Matrix], float]) -> list[Bucket]:
    """Return the buckets of matrices that the same ranks shard."""
    order = sorted(ranks)
    rank = order.index(dist.get_rank())
    pieces = _PieceTable(order)
    load = [0.0] * len(order)
    owners: dict[Matrix, int] = {}
    held_by: dict[Matrix, list[int]] = {
        matrix: [i for i in range(len(order)) if pieces.of(matrix, i)] for matrix in matrices
    }
    # A matrix that one rank holds completely stays there; the others go to the least loaded rank, largest first.
    for matrix in sorted(matrices, key=lambda each: (len(held_by[each]) > 1, -cost(each))):
        holders = held_by[matrix]
        owners[matrix] = holders[0] if len(holders) == 1 else min(range(len(order)), key=lambda i: load[i])
        load[owners[matrix]] += cost(matrix)
    buckets = []
    group = _process_group(matrices[0].parameter, order)
    for part in _in_buckets(matrices):
        if all(len(held_by[each]) == 1 for each in part):  # nothing to exchange, so no collective either
            own = [(each, [pieces.of(each, rank)]) for each in part if owners[each] == rank]
            buckets.append(Bucket(_parameters_of([each for each, _ in own]), None, own))
            continue
        sent: list[list[tuple[Matrix, Piece]]] = [[] for _ in order]
        for matrix in part:
            sent[owners[matrix]] += [(matrix, piece) for piece in pieces.of(matrix, rank)]
        owned = [
            (matrix, [pieces.of(matrix, source) for source in range(len(order))])
            for matrix in part
            if owners[matrix] == rank
        ]
        buckets.append(Bucket(_parameters_of(part), group, owned, sent))
    return buckets


def _local_bucket(matrices: list[Matrix]) -> Bucket:
    """Return the bucket of matrices of parameters that are not sharded."""
    owned = [(matrix, [_pieces(matrix, [_full_block(matrix.parameter)])]) for matrix in matrices]
    return Bucket(_parameters_of(matrices), None, owned)


class _PieceTable:
    """Pieces of each matrix on each rank; layers with equal shapes and placements share them."""

    def __init__(self, order: list[int]) -> None:
        self._order = order
        self._cache: dict[tuple[object, ...], list[Piece]] = {}

    def of(self, matrix: Matrix, index: int) -> list[Piece]:
        """Return the pieces of `matrix` that rank number `index` holds."""
        parameter = matrix.parameter
        if not isinstance(parameter, DTensor):
            raise TypeError("only DTensors are sharded")
        kind = (matrix.runs, matrix.is_transposed, matrix.attached)
        key = (tuple(parameter.shape), parameter.placements, parameter.device_mesh, kind, index)
        if key not in self._cache:
            coordinate = dict(_holders(parameter))[self._order[index]]
            self._cache[key] = _pieces(matrix, blocks_at(parameter, coordinate, "parameter"))
        return self._cache[key]


def _pieces(matrix: Matrix, blocks: list[Block]) -> list[Piece]:
    """Return the intersections of a matrix with a rank's blocks of its parameter, and its numbers attached to rows."""
    pieces: list[Piece] = []
    inputs = matrix.input_dim
    width, length = max((block.local[inputs].stop for block in blocks), default=0), matrix.shape[inputs]
    attached = slice(width, width + matrix.attached), slice(length, length + matrix.attached)
    for block in blocks:
        dims = [
            _intersections(runs, local, full)
            for runs, local, full in zip(matrix.runs, block.local, block.full, strict=True)
        ]
        pieces += _products(dims, is_attached=False)
        if matrix.attached and block.local[inputs].start == 0:  # once for each row
            pieces += _products([*dims[:inputs], [attached], *dims[inputs + 1 :]], is_attached=True)
    return pieces


def _products(dims: Sequence[list[tuple[slice, slice]]], *, is_attached: bool) -> Iterator[Piece]:
    """Yield the pieces of all combinations of (local indices, indices in the matrix) of each dim."""
    for each in itertools.product(*dims):
        shape = tuple(local.stop - local.start for local, _ in each)
        yield Piece(tuple(local for local, _ in each), tuple(inner for _, inner in each), shape, is_attached)


def _intersections(runs: Runs, local: slice, full: slice) -> list[tuple[slice, slice]]:
    """Return (local indices, indices in the matrix) of the overlaps of `runs` with the indices `full` of a dim."""
    found, start = [], 0
    for run in runs:
        low, high = max(run.start, full.start), min(run.stop, full.stop)
        if low < high:
            offset, inner = local.start - full.start, start - run.start
            found.append((slice(low + offset, high + offset), slice(low + inner, high + inner)))
        start += len(run)
    return found


def _full_block(parameter: nn.Parameter) -> Block:
    full = tuple(slice(0, size) for size in parameter.shape)
    return Block(full, full)


def _process_group(parameter: nn.Parameter, order: list[int]) -> dist.ProcessGroup:
    """Return a process group of the ranks: that of a mesh axis if there is one, else a new one. A collective."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis in range(mesh.ndim):
            group = mesh.get_group(axis)
            if dist.get_process_group_ranks(group) == order:
                return group
    group = dist.new_group(order, use_local_synchronization=True)
    if group is None:
        raise ValueError(f"this rank is not in the group {order}")
    share_timeout(group)
    return group


def _in_buckets(matrices: list[Matrix]) -> Iterator[list[Matrix]]:
    """Split matrices into lists of about _BUCKET_ELEMENTS; all matrices of a parameter are in the same list."""
    bucket: list[Matrix] = []
    size = 0
    for _, group in itertools.groupby(matrices, key=lambda matrix: id(matrix.parameter)):
        members = list(group)
        size_of_parameter = members[0].parameter.numel()
        if bucket and size + size_of_parameter > _BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket += members
        size += size_of_parameter
    if bucket:
        yield bucket


def _parameters_of(matrices: Sequence[Matrix]) -> list[nn.Parameter]:
    return list({id(matrix.parameter): matrix.parameter for matrix in matrices}.values())


def fused_matrices(name: str, shape: Sequence[int], anatomy: Anatomy, model_type: str) -> tuple[int, list[Runs]] | None:
    """Return the fused dim of a weight, and the indices of each of its matrices along it; None if it is one matrix.

    Args:
        name: Name of the parameter.
        shape: Shape of the full weight: (out, in), (in, out), or either after a dim of experts.
        model_type: Model type of the config.
    """
    components = name.split(".")
    projection = components[-2] if components[-1] == "weight" else components[-1]
    dim = len(shape) - (1 if name in anatomy.transposed else 2)  # of the outputs
    size = shape[dim]
    if projection in _HALVES and size % 2 == 0:
        if model_type in _ALTERNATING and len(shape) == 3:
            # gate and up alternate, row by row
            return dim, [tuple(range(i, i + 1) for i in range(first, size, 2)) for first in (0, 1)]
        return dim, [(range(size // 2),), (range(size // 2, size),)]
    heads = set(anatomy.layer_heads)
    if len(heads) != 1:
        return None
    (own,) = heads
    sizes = (own.heads * own.keys, own.kv_heads * own.keys, own.kv_heads * own.values)
    if sum(sizes) != size:  # such as a gate beside the queries: splitting by these sizes would mix matrices
        return None
    if projection in _QUERIES_KEYS_VALUES:
        starts = (0, sizes[0], sizes[0] + sizes[1])
        return dim, [(range(start, start + width),) for start, width in zip(starts, sizes, strict=True)]
    if projection in _BY_HEAD:
        return dim, _by_head(sizes, own.kv_heads)
    return None


def _by_head(sizes: tuple[int, int, int], kv_heads: int) -> list[Runs]:
    """Return the indices of queries, keys and values that alternate between key-value heads."""
    queries, keys, values = (width // kv_heads for width in sizes)
    group = queries + keys + values
    offsets = ((0, queries), (queries, keys), (queries + keys, values))
    return [tuple(range(head * group + o, head * group + o + n) for head in range(kv_heads)) for o, n in offsets]
