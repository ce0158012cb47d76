"""Tensor parallelism of linear attention and Mamba-2: each rank computes some of the heads.

Heads of values, and the heads of keys (Mamba-2: the groups) that they use, are divided together. A projection for one
kind of heads is sharded column-wise, the out-projection row-wise. A matrix that holds several kinds, such as all
queries, keys and values, stays whole on each rank, which computes with the rows of its heads: their sizes differ, so no
placement of torch describes such a shard. The same holds for the convolution and for parameters per head. transformers'
forward runs unchanged on these rows; numbers of heads are divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from components.distributed.tensor_parallel import ReplicatedParameters, as_replicated, distribute_parameters
from components.models.anatomy import config_of

_DELTA = {"conv1d": "kkv", "A_log": "h", "dt_bias": "h"}
_KIMI = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "forget_gate.dt_bias"), "v"),
    **dict.fromkeys(("b_proj", "forget_gate.A_log"), "h"),
    "conv1d": "vvv",
}
_MAMBA2 = {
    "in_proj": "vvggh",
    "mup_vector": "vvggh",
    "conv1d": "vgg",
    "norm": "v",
    **dict.fromkeys(("A_log", "D", "dt_bias"), "h"),
}
_QWEN = {**_DELTA, "in_proj_qkv": "kkv", "in_proj_z": "v", "in_proj_a": "h", "in_proj_b": "h"}
_ROWS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _QWEN),
    "qwen3_next": {**_DELTA, "in_proj_qkvz": "K", "in_proj_ba": "K"},
    "olmo_hybrid": {
        **_DELTA,
        "q_proj": "k",
        "k_proj": "k",
        "v_proj": "v",
        "g_proj": "v",
        "a_proj": "h",
        "b_proj": "h",
    },
    "kimi_linear": {**_KIMI, "forget_gate.f_b_proj": "v", "g_b_proj": "v"},
    "bailing_hybrid": {**_KIMI, "forget_gate.f_proj": "v", "g_proj": "v"},
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h"), _MAMBA2),
}
"""Model type -> module or parameter of a layer -> what its rows are for, in order: k, the features of key heads; v,
those of value heads; g, those of groups; h, one row per value head; K, all rows, grouped by key head."""
_Ranges = list[tuple[int, int]]
"""First row and number of rows, of each part."""
_Swapped = list[tuple[nn.Module, dict[str, Any]]]
"""Modules, and the rows of their parameters and buffers that a rank computes with, by name."""
_OUT = ("out_proj", "o_proj")
_NORMS = ("norm", "o_norm")


@dataclass(frozen=True, slots=True)
class _Units:
    """Heads or groups of a layer, by the letters of `_ROWS`, and the part of one rank."""

    counts: Mapping[str, int]
    """Letter -> number of heads or groups."""
    widths: Mapping[str, int]
    """Letter -> rows of each."""
    rank: int
    ranks: int

    @classmethod
    def of(cls, mixer: Any, letters: set[str], rank: int, ranks: int) -> _Units:
        """Read the numbers of heads of a layer, of the kinds that its rows are for."""
        if letters & {"k", "K"}:
            counts = {"k": mixer.num_k_heads, "v": mixer.num_v_heads, "h": mixer.num_v_heads}
            return cls(counts, {"k": mixer.head_k_dim, "v": mixer.head_v_dim, "h": 1}, rank, ranks)
        counts, widths = {"v": mixer.num_heads, "h": mixer.num_heads}, {"v": mixer.head_dim, "h": 1}
        if "g" in letters:
            counts["g"], widths["g"] = mixer.n_groups, mixer.ssm_state_size
        return cls(counts, widths, rank, ranks)

    @property
    def divides(self) -> bool:
        """Whether each rank gets the same number of value heads, and whole key heads or groups or a part of one."""
        shared = [count for letter, count in self.counts.items() if letter in "kg"]
        return self.counts["v"] % self.ranks == 0 and all(
            count % self.ranks == 0 or self.ranks % count == 0 for count in shared
        )

    def is_even(self, spans: str) -> bool:
        """Return whether one contiguous, equal part of the rows is the rank's."""
        return len(spans) == 1 and self.counts[spans.lower()] % self.ranks == 0

    def local(self, letter: str) -> int:
        """Return a rank's number of heads or groups; ranks may share one."""
        return max(self.counts[letter] // self.ranks, 1)

    def first(self, letter: str) -> int:
        """Return the first of a rank's heads or groups."""
        return self.rank * self.counts[letter] // self.ranks

    def size(self, spans: str) -> int:
        """Return the number of rows of all ranks."""
        return sum(self.counts[letter] * self.widths[letter] for letter in spans)

    def rows(self, spans: str) -> _Ranges:
        """Return the rank's rows."""
        ranges, start = [], 0
        for letter in spans:
            width = self.widths[letter]
            ranges.append((start + self.first(letter) * width, self.local(letter) * width))
            start += self.counts[letter] * width
        return ranges


def mixers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of linear attention and Mamba-2 that can be divided by heads, by module name."""
    config = config_of(model)
    if config is None or config.get_text_config().model_type not in _ROWS:
        return {}
    return {
        name: module
        for name, module in model.named_modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
    }


def mixer_plan(mixer: nn.Module, family: str, mesh: DeviceMesh) -> dict[str, ParallelStyle]:
    """Return the styles of a layer of linear attention or Mamba-2, by module path within it; "": the layer itself.

    If tp does not divide its heads, each rank computes the whole layer.
    """
    rows = _ROWS[family]
    units = _Units.of(mixer, set("".join(rows.values())), mesh.get_local_rank(), mesh.size())
    if not units.divides or ("K" in rows.values() and not units.is_even("K")):
        return {"": _WholeMixer()}
    plan: dict[str, ParallelStyle] = {"": _MixerHeads(units, family)}
    for name, module in mixer.named_modules():
        if isinstance(module, nn.Linear) and name in rows:
            even = units.is_even(rows[name])
            plan[name] = ColwiseParallel() if even else RowsOfHeads(units.rows(rows[name]))
        elif name in _OUT:
            plan[name] = RowwiseParallel()
        elif name in _NORMS and name not in rows:
            plan[name] = ReplicatedParameters(partial_grad=True)  # one weight for all heads
    return plan


class RowsOfHeads(ParallelStyle):
    """A projection that is whole on each rank, which computes the rows of its heads: (..., in) -> (..., local out).

    The gradients of the rows that other ranks compute are zero, and are summed over tp.
    """

    def __init__(self, rows: _Ranges) -> None:
        super().__init__()
        self.rows = rows
        """This rank's rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh)
        compute = module.forward

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            hidden = as_replicated(hidden, device_mesh).to_local(grad_placements=[Partial()])
            # Not of lora_A, from which all rows are computed.
            names = {name: self.rows for name, _ in module.named_parameters(recurse=False) if name != "lora_A"}
            with _local_tensors(module, names, Partial()):
                return compute(hidden)

        module.forward = forward
        return module


class _MixerHeads(ParallelStyle):
    """A layer that computes some heads: its own parameters, its convolution and its norm over all features."""

    def __init__(self, units: _Units, family: str) -> None:
        super().__init__()
        self.units, self.family, self.rows = units, family, _ROWS[family]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        units, swapped = self.units, []
        for path, child in module.named_modules():
            if isinstance(child, nn.Linear):
                continue
            indices = {}
            for name, _ in (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)):
                spans = self.rows.get(path) or self.rows.get(f"{path}.{name}".lstrip("."))
                if spans is not None:
                    indices[name] = units.rows(spans)
            if indices:
                distribute_parameters(child, device_mesh)
                swapped.append((child, indices))
                if path == "norm":
                    _use_group_norm(child, units, self.family, device_mesh)
        _divide_counts(module, units)
        _compute_locally(module, swapped, Partial())
        return module


class _WholeMixer(ParallelStyle):
    """A layer that each rank computes as a whole, on plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for child in module.modules():
            distribute_parameters(child, device_mesh)
        swapped: _Swapped = [
            (child, {name: None for name, _ in child.named_parameters(recurse=False)}) for child in module.modules()
        ]
        _compute_locally(module, swapped, Replicate())
        return module


def _compute_locally(module: nn.Module, swapped: _Swapped, gradient: Placement) -> None:
    """Let a module's forward run on local tensors, with the rows in `swapped` of its own and its children's."""
    compute = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _all_local(swapped, gradient):
            return compute(*args, **kwargs)

    module.forward = forward


@contextmanager
def _all_local(swapped: _Swapped, gradient: Placement) -> Iterator[None]:
    """Enter `_local_tensors` of several modules."""
    if not swapped:
        yield
        return
    (module, indices), *others = swapped
    with _local_tensors(module, indices, gradient), _all_local(others, gradient):
        yield


@contextmanager
def _local_tensors(module: nn.Module, indices: Mapping[str, Any], gradient: Placement) -> Iterator[None]:
    """Replace a module's direct parameters and buffers by local tensors within the context.

    Args:
        indices: Name -> the rows that this rank computes with; None or no entry: all rows.
        gradient: Placement of the local gradients.
    """
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor):
            local = parameter.to_local(grad_placements=[gradient])
            module._parameters[name] = _select(local, indices.get(name))
    for name, buffer in buffers.items():
        if buffer is not None and name in indices:
            module._buffers[name] = _select(buffer, indices[name])
    try:
        yield
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


def _select(tensor: torch.Tensor, rows: _Ranges | None) -> torch.Tensor:
    """Return some rows of a tensor, along its first dim with more than one: Kimi's A_log is (1, 1, heads, 1)."""
    if rows is None:
        return tensor
    dim = next((dim for dim, size in enumerate(tensor.shape) if size > 1), 0)
    parts = [tensor.narrow(dim, start, length) for start, length in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _divide_counts(mixer: nn.Module, units: _Units) -> None:
    """Set the numbers of heads and features in a layer and its children to those of a rank."""
    heads = {"num_k_heads": "k", "num_v_heads": "v", "num_heads": "v", "n_groups": "g"}
    features = {"key_dim": "k", "value_dim": "v", "qkv_dim": "v", "intermediate_size": "v"}
    whole: dict[str, tuple[int, int]] = {}
    for name, letter in (heads | features).items():
        if letter in units.counts:
            width = 1 if name in heads else units.widths[letter]
            whole[name] = (units.counts[letter] * width, units.local(letter) * width)
    convolved = "vgg" if "g" in units.counts else "kkv" if "k" in units.counts else "vvv"
    whole["conv_dim"] = (units.size(convolved), sum(length for _, length in units.rows(convolved)))
    for attributes in map(vars, mixer.modules()):
        for name, (total, local) in whole.items():
            if attributes.get(name) == total:
                attributes[name] = local


def _use_group_norm(norm: Any, units: _Units, family: str, mesh: DeviceMesh) -> None:
    """Let a gated norm over the features of a group sum its squares over the ranks that divide the group."""
    groups = units.counts["g"]
    if groups % units.ranks == 0:
        return
    features, own = units.size("v") // groups, units.first("g")
    gate_first = not (family == "falcon_h1" and norm.norm_before_gate)
    norm.forward = partial(_group_norm, norm, features, (own, groups), gate_first, mesh)


def _group_norm(
    norm: Any, features: int, group: tuple[int, int], gate_first: bool, mesh: DeviceMesh, hidden: torch.Tensor,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Gated RMS norm of this rank's part of a group: (batch, seq, local features), the same shape.

    Args:
        features: Features of a group on all ranks.
        group: The group that this rank has a part of, and the number of groups.
    """
    dtype, hidden = hidden.dtype, hidden.to(torch.float32)
    factor = 1.0 if gate is None else F.silu(gate.to(torch.float32))
    hidden = hidden * factor if gate_first else hidden
    own, groups = group
    squares = F.pad(hidden.pow(2).sum(-1, keepdim=True), (own, groups - own - 1))  # (batch, seq, groups)
    summed = all_reduce(squares, group=mesh.get_group())[..., own : own + 1]
    hidden = hidden * torch.rsqrt(summed / features + norm.variance_epsilon)
    hidden = norm.weight * hidden.to(dtype)
    return hidden if gate_first else (hidden * factor).to(dtype)
