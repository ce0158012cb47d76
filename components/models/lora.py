"""LoRA: a pair of matrices of low rank beside linear layers, which stay frozen.

The mathematics, the starting values and the files (adapter_files.py) are those of the peft library. Its modules are not
used here, because they do not hold on a mesh: they rename the layer's own weight (base_layer.weight), which loading,
tensor-parallel plans, pipeline stages and export know by transformers' names; on DTensors they mix plain tensors with
distributed ones, and a row-wise layer would reduce over tp twice; and DoRA's lengths are computed when a layer is
wrapped, before it has weights. An adapted layer keeps its name and its weight here, and has the adapter as parameters
of its own, so that FSDP2, checkpoints and resumes see nothing but further parameters. Under QLoRA its weight is packed
(nf4.py): the same parameter in fewer bytes.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from components.config.errors import ConfigError
from components.config.schema.peft import ALL_LINEAR, PeftConfig, PeftExport
from components.models.weights.nf4 import BLOCK, level_pairs, pack, packed_shape, product, unpack
from components.models.weights.shards import fill, local_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_PARAMETERS = ("lora_A", "lora_B", "lora_magnitude_vector")
"""Names of an adapter's parameters, as in PEFT's files."""


class InputsShard(Protocol):
    """How a rank that has some of a layer's inputs, and these columns of W and A, does what needs all of them."""

    def dropout(self, hidden: torch.Tensor, probability: float) -> torch.Tensor:
        """Drop out of (..., inputs of this rank) what one process would drop."""

    def norms(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the norms of whole rows, given those of this rank's part of them, (out,)."""


class LoraLayer(nn.Module):
    """What adapted layers have in common: an adapter as parameters, and the forward that uses it."""

    weight: Any
    bias: Any
    scaling: float
    dropout: float
    lora_A: nn.Parameter
    """(rank, in)"""
    lora_B: nn.Parameter
    """(out, rank)"""
    lora_magnitude_vector: nn.Parameter | None
    """(out,): the lengths of the rows under DoRA, else None."""
    is_off: bool = False
    """Compute as the layer does without its adapter: see `adapters_off`."""
    columns_together: int = 1
    """Inputs whose columns of the weight lie on one rank."""

    def adapt(self, cfg: PeftConfig, features: tuple[int, int]) -> None:
        """Add an adapter, uninitialised, on the device of the weight. features: (in, out)."""
        # The optimizer updates these: never in less than float32, whatever the frozen weights are stored in.
        dtype = torch.promote_types(self.weight.dtype, torch.float32)

        def room(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=self.weight.device))

        self.scaling, self.dropout = cfg.scaling, cfg.dropout
        self.lora_A, self.lora_B = room(cfg.rank, features[0]), room(features[1], cfg.rank)
        self.lora_magnitude_vector = room(features[1]) if cfg.dora else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return self.compute(hidden, self.matrix, self.bias, self.lora_A, self.lora_B, self.lora_magnitude_vector)

    @property
    def matrix(self) -> torch.Tensor:
        """The layer's own weight as (out, in)."""
        return self.weight

    def product(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return what the layer without its adapter gives of (..., in), by this weight."""
        return F.linear(hidden, weight, bias)

    def whole(self, weight: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this weight as a matrix of so many columns to compute with; `dtype` where it has none of its own."""
        return weight

    def compute(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora_A: torch.Tensor,
        lora_B: torch.Tensor,
        magnitude: torch.Tensor | None,
        inputs: InputsShard | None = None,
    ) -> torch.Tensor:
        """Return the layer's output of (..., in), for parameters that may be this tp rank's parts.

        Args:
            inputs: Where `hidden`, `weight` and `lora_A` are this rank's part of the inputs; None: they are whole.
        """
        if self.is_off:
            return self.product(hidden, weight, bias)
        kept = hidden
        if self.training and self.dropout:
            kept = inputs.dropout(hidden, self.dropout) if inputs else F.dropout(hidden, self.dropout)
        lora_A, lora_B = lora_A.to(hidden.dtype), lora_B.to(hidden.dtype)
        added = F.linear(F.linear(kept, lora_A), lora_B) * self.scaling  # (..., out)
        if magnitude is None:
            return self.product(hidden, weight, bias) + added
        with torch.no_grad():  # DoRA takes the norm for a constant (Liu et al. 2024, section 4.3)
            weight_alone = self.whole(weight, lora_A.shape[1], lora_A.dtype)
            norms = row_norms(weight_alone + self.scaling * (lora_B @ lora_A))
            norms = inputs.norms(norms) if inputs else norms
        directed = self.product(kept, weight, None)  # (..., out)
        scale = (magnitude / norms).to(directed.dtype)
        output = scale * (directed + added)
        if kept is not hidden:  # as in peft, dropout spares what the layer itself gives
            output = output + self.product(hidden, weight, None) - directed
        return output if bias is None else output + bias


class LoraLinear(LoraLayer, nn.Linear):
    """nn.Linear with an adapter."""


class QuantizedLoraLinear(LoraLinear):
    """nn.Linear with an adapter and its own weight packed in 4 bits a value (QLoRA)."""

    pairs: torch.Tensor
    """(256, 2): what a byte of the weight stands for; one tensor for all layers of a model."""
    columns_together = BLOCK

    def quantize(self) -> None:
        """Pack the weight; on the meta device there is only its shape to change."""
        weight = self.weight
        packed = torch.empty(packed_shape(*weight.shape), dtype=torch.uint8, device=weight.device)
        self.weight = nn.Parameter(packed if weight.is_meta else pack(weight.detach()), requires_grad=False)
        self.register_buffer("pairs", level_pairs(weight.device), persistent=False)

    def product(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return what the layer without its adapter gives of (..., in), by this packed weight."""
        return product(hidden, weight, bias, self.pairs)

    def whole(self, weight: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this packed weight as a matrix."""
        return unpack(weight, columns, self.pairs, dtype)


class LoraConv1D(LoraLayer):
    """transformers' Conv1D, GPT-2's linear layer, whose weight is (in, out), with an adapter."""

    @property
    def matrix(self) -> torch.Tensor:
        """The layer's own weight as (out, in)."""
        return self.weight.T


def row_norms(matrix: torch.Tensor) -> torch.Tensor:
    """Return the length of each row of (out, in), in float32 or float64: (out,)."""
    return torch.linalg.vector_norm(matrix, dim=1, dtype=torch.promote_types(matrix.dtype, torch.float32))


def add_adapters(model: PreTrainedModel, cfg: PeftConfig, *, exports: bool = True) -> None:
    """Freeze a model and give its targets adapters, in place; nothing happens for peft.method=none.

    Before the model is laid over the mesh, usually on the meta device: `fill_weights` gives them their values.

    Args:
        exports: Whether the adapters will be written for PEFT, if peft.export says so.

    Raises ConfigError for a target that names no layer, or one that cannot have an adapter, or cannot be written.
    """
    if not cfg.adapts:
        return
    chosen = _chosen(model, cfg, exports and cfg.export != PeftExport.merged)
    model.requires_grad_(False)
    for name in chosen:
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        parent.register_module(leaf, _adapted(parent.get_submodule(leaf), cfg))


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the layers with adapters by name; none for a model without."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context in which adapted layers compute as they do without their adapters."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_off = False


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLoraLinear]:
    """Return the layers whose own weight is packed, by name."""
    return {name: layer for name, layer in adapted_layers(model).items() if isinstance(layer, QuantizedLoraLinear)}


def scaling_of(model: nn.Module) -> float:
    """Return by what the adapters of a model are scaled, one number for all of them; 0 where there are none."""
    return next((layer.scaling for layer in adapted_layers(model).values()), 0.0)


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Set every adapter to its start, where it changes nothing: A as peft draws it, B zero, DoRA's lengths W's own.

    A's values depend on the seed and its name alone, whatever the mesh; the global random state stays as it was. Call
    it on all ranks, after the model's own weights were filled.
    """
    for name, layer in adapted_layers(model).items():
        digest = hashlib.sha256(f"{seed}:{name}.lora_A".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        rank, features = layer.lora_A.shape
        # Kaiming's uniform distribution with a = sqrt(5), as nn.Linear has it.
        drawn = (2 * torch.rand(rank, features, generator=generator) - 1) / math.sqrt(features)
        fill(layer.lora_A, f"{name}.lora_A", drawn.__getitem__)
        local_part(layer.lora_B).zero_()
        if layer.lora_magnitude_vector is not None:
            _set_magnitudes(layer)


def _set_magnitudes(layer: LoraLayer) -> None:
    """Row by row of this rank's part; where the weight is cut across its rows, the parts are summed."""
    columns = local_part(layer.lora_A).shape[1]
    norms = row_norms(layer.whole(local_part(layer.weight), columns, torch.float32))
    if isinstance(layer.weight, DTensor):
        mesh = layer.weight.device_mesh
        for axis, placement in enumerate(layer.weight.placements):
            if placement.is_shard(1):
                squares = norms.square()
                dist.all_reduce(squares, group=mesh.get_group(axis))
                norms = squares.sqrt()
    local_part(layer.lora_magnitude_vector).copy_(norms)  # type: ignore[arg-type]


def _adapted(layer: nn.Module, cfg: PeftConfig) -> LoraLayer:
    """A layer of the class with an adapter, which takes over the parameters of `layer`."""
    linear = isinstance(layer, nn.Linear)
    kind: Any = (QuantizedLoraLinear if cfg.quantizes else LoraLinear) if linear else LoraConv1D
    made: Any = copy.copy(layer)
    made.__class__ = kind  # keeps the layer's parameters, hooks and flags
    rows, columns = layer.weight.shape  # type: ignore[misc]
    made.adapt(cfg, (columns, rows) if linear else (rows, columns))
    if cfg.quantizes:
        made.quantize()
    return made


def _chosen(model: PreTrainedModel, cfg: PeftConfig, for_peft: bool) -> list[str]:
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    problems, kind = [], type(model).__name__
    for target in cfg.targets:
        if target != ALL_LINEAR and not any(_ends_with(name, target) for name in linear):
            problems.append(_no_such_target(model, target, sorted({name.rpartition(".")[2] for name in linear})))
    chosen = [name for name in linear if any(t == ALL_LINEAR or _ends_with(name, t) for t in cfg.targets)]
    if not chosen and not problems:
        problems.append(f"peft.targets={cfg.targets}: {kind} has no linear layer to adapt; set peft=none")
    foreign = {type(linear[name]).__name__ for name in chosen if type(linear[name]) not in (nn.Linear, Conv1D)}
    problems += [f"peft.targets={cfg.targets}: {each} of {kind} has a forward of its own" for each in sorted(foreign)]
    if any(isinstance(linear[name], Conv1D) for name in chosen):
        transposed = f"{kind} keeps its matrices transposed (Conv1D)"
        problems += [f"peft.dora=true: {transposed}; set peft.dora=false"] if cfg.dora else []
        problems += [f"peft.method=qlora: {transposed}; set peft=lora"] if cfg.quantizes else []
    if for_peft and (misread := _read_as_experts(model, chosen)):
        problems.append(
            f"peft.targets={cfg.targets}: the PEFT library reads adapters on {', '.join(misread)} of {kind} as those "
            "of its experts, and so cannot open RUN/adapter; set peft.export=merged, or leave them out of peft.targets"
        )
    if problems:
        raise ConfigError(problems)
    return chosen


def _read_as_experts(model: PreTrainedModel, layers: Iterable[str]) -> list[str]:
    """Return the last names of adapted `layers` that PEFT takes for those of experts, which transformers 5 has fused.

    In transformers 4 the matrices of experts were layers with the names of dense ones, and PEFT still converts them.
    """
    if not any(parameter.dim() == 3 for parameter in model.parameters()):  # (experts, out, in)
        return []
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    leaves = {name.rpartition(".")[2] for name in layers}
    converted = LoraConfig(target_modules=sorted(leaves))
    try:
        convert_peft_config_for_transformers(converted, model, None)
    except ValueError:  # it wants all matrices of the experts, or none
        return sorted(leaves & {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
    return sorted(leaves - set(converted.target_modules or ()))


def _no_such_target(model: PreTrainedModel, target: str, leaves: list[str]) -> str:
    named = [module for name, module in model.named_modules() if _ends_with(name, target)]
    if model.get_output_embeddings() in named:
        why = "the output head is never adapted: the loss may be computed from its weight alone"
    elif named:
        why = f"{type(named[0]).__name__} is no linear layer"
    else:
        nearest = difflib.get_close_matches(target, leaves, n=1, cutoff=0.6)
        why = f"no layer of {type(model).__name__} is called so{f'; did you mean {nearest[0]}?' if nearest else ''}"
    return f"peft.targets=[{target}]: {why}; choose {ALL_LINEAR} or some of {', '.join(leaves)}"


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
