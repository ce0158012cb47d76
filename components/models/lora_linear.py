"""LoRA, DoRA and QLoRA on linear layers, whose own weights are frozen, and modules trained whole beside them.

The formulas, the initialization and the files (weight_files.py) match the PEFT library, but its modules do not work on
a mesh. They rename a layer's weight to base_layer.weight, while loading, tensor-parallel plans, pipeline stages and
export use transformers' names. They mix plain tensors with DTensors, and a row-wise layer would reduce over tp twice.
And they compute DoRA's magnitudes when a layer is wrapped, before it has weights. Here, an adapted layer keeps its name
and its weight, and the adapter is registered as additional parameters of the layer, so that FSDP2 and checkpoints need
no special case. Under QLoRA the weight is packed in NF4 (quantization.py) under the same parameter name.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from components.config.schema.run import ALL_LINEAR, PeftConfig
from components.models.anatomy import Adapted, encoder_parameters
from components.models.quantization import BLOCK, level_pairs, nf4_linear, pack, packed_shape, unpack
from components.models.weights.shards import fill, local_part
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_PARAMETERS = ("lora_A", "lora_B", "lora_magnitude_vector")
"""Names of an adapter's parameters, as in PEFT's files."""


class _InputsShard(Protocol):
    """Operations over all inputs of a row-wise tensor-parallel layer, of which each rank holds a shard."""

    def dropout(self, hidden: torch.Tensor, probability: float) -> torch.Tensor:
        """Apply dropout to (..., in / tp), with this rank's shard of the mask that one process would draw."""

    def norms(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the norms of complete weight rows, (out,), from the norms of this rank's columns of them."""


class LoraLayer(Adapted, nn.Module):
    """Base class of adapted layers: the adapter's parameters and the forward that applies them."""

    weight: Any
    bias: Any
    scaling: float
    dropout: float
    lora_A: nn.Parameter
    """(rank, in)"""
    lora_B: nn.Parameter
    """(out, rank)"""
    lora_magnitude_vector: nn.Parameter | None
    """(out,): DoRA's magnitudes; None without DoRA."""
    is_off: bool = False
    """Whether to skip the adapter; set by `adapters_off`."""
    columns_together: int = 1
    """Tensor parallelism may split the weight's columns only at multiples of this."""
    is_conv1d: bool = False
    """Whether the weight is (in, out)."""

    def adapt(self, cfg: PeftConfig, features: tuple[int, int]) -> None:
        """Add an uninitialized adapter on the device of the weight. features: (in, out)."""
        # The optimizer updates the adapter, so it is at least float32, whatever the dtype of the frozen weights.
        dtype = torch.promote_types(self.weight.dtype, torch.float32)

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=self.weight.device))

        self.scaling, self.dropout = cfg.scaling, cfg.dropout
        self.lora_A, self.lora_B = empty(cfg.rank, features[0]), empty(features[1], cfg.rank)
        self.lora_magnitude_vector = empty(features[1]) if cfg.dora else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return self.compute(hidden, self.matrix, self.bias, self.lora_A, self.lora_B, self.lora_magnitude_vector)

    @property
    def matrix(self) -> torch.Tensor:
        """The layer's weight as (out, in)."""
        return self.weight

    def base_linear(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Apply the layer without its adapter, (..., in) -> (..., out)."""
        return F.linear(hidden, weight, bias)

    def dequantized(self, weight: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a weight as a dense matrix of `columns` columns, in `dtype` if it was packed."""
        return weight

    def compute(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora_A: torch.Tensor,
        lora_B: torch.Tensor,
        magnitude: torch.Tensor | None,
        inputs: _InputsShard | None = None,
    ) -> torch.Tensor:
        """Apply the layer with its adapter, (..., in) -> (..., out), to parameters that may be tp shards.

        Args:
            inputs: Set if `hidden`, `weight` and `lora_A` are this rank's shards of the inputs; None: not sharded.
        """
        if self.is_off:
            return self.base_linear(hidden, weight, bias)
        dropped = hidden
        if self.training and self.dropout:
            dropped = inputs.dropout(hidden, self.dropout) if inputs else F.dropout(hidden, self.dropout)
        if magnitude is None:
            return add_low_rank(self.base_linear(hidden, weight, bias), dropped, lora_A, lora_B, self.scaling)
        lora_A, lora_B = lora_A.to(hidden.dtype), lora_B.to(hidden.dtype)
        with torch.no_grad():  # DoRA treats the norm as a constant (Liu et al. 2024, section 4.3)
            base = self.dequantized(weight, lora_A.shape[1], lora_A.dtype)
            norms = row_norms(base + self.scaling * (lora_B @ lora_A))
            norms = inputs.norms(norms) if inputs else norms
        base_output = self.base_linear(dropped, weight, None)  # (..., out)
        scale = (magnitude / norms).to(base_output.dtype)
        output = scale * add_low_rank(base_output, dropped, lora_A, lora_B, self.scaling)
        if dropped is not hidden:  # as in PEFT, dropout does not apply to the output of the base layer
            output = output + self.base_linear(hidden, weight, None) - base_output
        return output if bias is None else output + bias


class _LoraLinear(LoraLayer, nn.Linear):
    """nn.Linear with an adapter."""


class QuantizedLoraLinear(_LoraLinear):
    """nn.Linear with an adapter, and with its weight packed in 4 bits (QLoRA)."""

    pairs: torch.Tensor
    """(256, 2): the two values of each byte of the weight; one tensor shared by all layers of a model."""
    columns_together = BLOCK

    def quantize(self) -> None:
        """Pack the weight; on the meta device only its shape and dtype change."""
        weight = self.weight
        packed = torch.empty(packed_shape(*weight.shape), dtype=torch.uint8, device=weight.device)
        self.weight = nn.Parameter(packed if weight.is_meta else pack(weight.detach()), requires_grad=False)
        self.register_buffer("pairs", level_pairs(weight.device), persistent=False)

    def base_linear(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Apply the layer without its adapter, (..., in) -> (..., out), with a packed weight."""
        return nf4_linear(hidden, weight, bias, self.pairs)

    def dequantized(self, weight: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a packed weight as a dense matrix of `columns` columns in `dtype`."""
        return unpack(weight, columns, self.pairs, dtype)


class _LoraConv1D(LoraLayer):
    """transformers' Conv1D (GPT-2's linear layer, whose weight is (in, out)) with an adapter."""

    is_conv1d = True

    @property
    def matrix(self) -> torch.Tensor:
        """The layer's weight as (out, in)."""
        return self.weight.T


def row_norms(matrix: torch.Tensor) -> torch.Tensor:
    """Return the L2 norm of each row of (out, in), in float32 or float64: (out,)."""
    return torch.linalg.vector_norm(matrix, dim=1, dtype=torch.promote_types(matrix.dtype, torch.float32))


def set_magnitudes(layer: LoraLayer) -> None:
    """Set DoRA's magnitudes to the weight's row norms, all-reduced over mesh axes that shard the columns."""
    magnitude: Any = layer.lora_magnitude_vector
    if layer.is_conv1d:  # FSDP2 shards its columns, and the magnitudes
        weight = layer.weight.detach()
        whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
        fill(magnitude, "lora_magnitude_vector", row_norms(whole.T).__getitem__)
        return
    columns = local_part(layer.lora_A).shape[1]
    norms = row_norms(layer.dequantized(local_part(layer.weight), columns, torch.float32))
    if isinstance(layer.weight, DTensor):
        mesh = layer.weight.device_mesh
        for axis, placement in enumerate(layer.weight.placements):
            if placement.is_shard(1):
                squares = norms.square()
                dist.all_reduce(squares, group=mesh.get_group(axis))
                norms = squares.sqrt()
    local_part(magnitude).copy_(norms)


def adapted_linear(layer: nn.Module, cfg: PeftConfig) -> LoraLayer:
    """Return a copy of `layer` with an adapter, which shares the layer's parameters.

    A quantized Conv1D becomes a linear layer, as in bitsandbytes: its weight is packed as (out, in).
    """
    linear = isinstance(layer, nn.Linear)
    adapted: Any = copy.copy(layer)
    # Rather than calling a constructor: keeps parameters, hooks and flags.
    adapted.__class__ = QuantizedLoraLinear if cfg.quantizes else _LoraLinear if linear else _LoraConv1D
    if cfg.quantizes and not linear:
        adapted.in_features, adapted.out_features = adapted.weight.shape
        adapted.weight = nn.Parameter(adapted.weight.T.contiguous(), requires_grad=False)
    outputs, inputs = adapted.matrix.shape
    adapted.adapt(cfg, (inputs, outputs))
    if cfg.quantizes:
        adapted.quantize()
    return adapted


def target_layers(model: PreTrainedModel, cfg: PeftConfig, for_peft: bool) -> list[str]:
    """Return the names of the layers that peft.targets selects; `for_peft`: PEFT must be able to read the adapters."""
    from transformers.pytorch_utils import Conv1D

    head, unused = model.get_output_embeddings(), encoder_parameters(model)
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and f"{name}.weight" not in unused
    }
    problems, kind = [], type(model).__name__
    # Each target by itself: a misspelled one would otherwise pass unnoticed beside others that match.
    for target in cfg.targets:
        if target != ALL_LINEAR and not any(ends_with(name, target) for name in linear):
            problems.append(_no_such_target(model, target, sorted({name.rpartition(".")[2] for name in linear})))
    chosen = [name for name in linear if any(t == ALL_LINEAR or ends_with(name, t) for t in cfg.targets)]
    if not chosen and not problems and not cfg.target_parameters:
        problems.append(f"peft.targets={cfg.targets}: {kind} has no linear layer to adapt; set peft=none")
    subclasses = {type(linear[name]).__name__ for name in chosen if type(linear[name]) not in (nn.Linear, Conv1D)}
    problems += [
        f"peft.targets={cfg.targets}: {subclass} of {kind} is a linear layer with its own forward, which cannot be "
        "adapted; choose other peft.targets"
        for subclass in sorted(subclasses)
    ]
    if for_peft and (misread := _read_as_experts(model, chosen)):
        problems.append(
            f"peft.targets={cfg.targets}: the PEFT library mistakes adapters on {', '.join(misread)} of {kind} for "
            "adapters of its experts and cannot open RUN/adapter; set peft.export=merged, or remove these layers from "
            "peft.targets"
        )
    if for_peft and (refused := _refused_by_peft(model, chosen)):
        problems.append(
            f"peft.targets={cfg.targets}: the PEFT library rejects adapters on {', '.join(refused)} of {kind}, whose "
            "kernels would skip them, and cannot open RUN/adapter; set peft.export=merged, or name other layers in "
            "peft.targets"
        )
    if problems:
        raise ConfigError(problems)
    return chosen


def _refused_by_peft(model: PreTrainedModel, layers: Iterable[str]) -> list[str]:
    """Return the last name components of `layers` that PEFT rejects in Mamba models."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    refused = []
    for leaf in sorted({name.rpartition(".")[2] for name in layers}):
        try:
            _check_lora_target_modules_mamba(LoraConfig(), model, leaf)
        except ValueError:
            refused.append(leaf)
    return refused


def _read_as_experts(model: PreTrainedModel, layers: Iterable[str]) -> list[str]:
    """Return the last name components of adapted `layers` that PEFT mistakes for layers of experts.

    In transformers 4, experts were linear layers with the same names as dense ones. transformers 5 fuses them, and PEFT
    converts adapters by these names.
    """
    if not any(parameter.dim() == 3 for parameter in model.parameters()):  # (experts, out, in)
        return []
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    leaves = {name.rpartition(".")[2] for name in layers}
    converted = LoraConfig(target_modules=sorted(leaves))
    try:
        convert_peft_config_for_transformers(converted, model, None)
    except ValueError:  # PEFT requires all matrices of the experts, or none
        return sorted(leaves & {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
    return sorted(leaves - set(converted.target_modules or ()))


def _no_such_target(model: PreTrainedModel, target: str, leaves: list[str]) -> str:
    matches = [module for name, module in model.named_modules() if ends_with(name, target)]
    if model.get_output_embeddings() in matches:
        reason = "the LM head cannot be adapted, because the loss may be computed from its weight without its forward"
    elif matches:
        reason = f"{type(matches[0]).__name__} is not a linear layer"
    else:
        nearest = difflib.get_close_matches(target, leaves, n=1, cutoff=0.6)
        reason = f"{type(model).__name__} has no such layer{f'; did you mean {nearest[0]}?' if nearest else ''}"
    return f"peft.targets=[{target}]: {reason}; choose {ALL_LINEAR} or some of {', '.join(leaves)}"


def ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def train_whole(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Let modules of a frozen model be trained, with weights of at least float32, and compute in the dtype they had.

    A module that shares a weight with one of them, as a tied head does, computes in that dtype, too.

    Raises ConfigError for a module over 16 bits that is neither a linear layer, nor an embedding, nor a norm.
    """
    trained = {id(each) for name in names for each in model.get_submodule(name).parameters()}
    owners = {
        name: (module, parameter.dtype)
        for name, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
        if id(parameter) in trained
    }
    for name, (module, stored) in owners.items():
        module.to(torch.promote_types(stored, torch.float32)).requires_grad_(True)
        if stored.itemsize >= torch.float32.itemsize:
            continue
        if isinstance(module, nn.Linear):
            module.forward = partial(_linear_in_dtype, module)  # type: ignore[method-assign]
        elif isinstance(module, nn.Embedding) or "Norm" in type(module).__name__:
            module.register_forward_hook(partial(_output_in_dtype, stored))
        else:
            raise ConfigError(
                f"peft.modules_to_save: {name} is a {type(module).__name__}, which cannot be trained in float32 over "
                "weights in 16 bits, as linear layers, embeddings and norms can; remove it, or set model.dtype=float32"
            )


def _linear_in_dtype(layer: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Apply a linear layer in the dtype of its input (..., in)."""
    bias = None if layer.bias is None else layer.bias.to(hidden.dtype)
    return F.linear(hidden, layer.weight.to(hidden.dtype), bias)


def _output_in_dtype(dtype: torch.dtype, module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output.to(dtype)


def add_low_rank(
    base: torch.Tensor, hidden: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return base + scaling * hidden @ A.T @ B.T, in the dtype of `base`.

    The scaling multiplies the product with A, whose width is the rank, and the matmul with B adds to the base. A
    backward for the inputs alone, as in pipeline schedules that split it, also computes the gradients of A and B.

    Args:
        base: Output of the frozen layer, (..., out).
        hidden: Input of the adapter, (..., in).
        lora_A: (rank, in); lora_B: (out, rank). On CUDA their gradients are rounded once, from float32.
    """
    output: Any = _AddLowRank.apply(base, hidden.to(base.dtype), lora_A, lora_B, scaling)
    return output


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, base: torch.Tensor, hidden: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        first, second = lora_A.to(base.dtype), lora_B.to(base.dtype)
        rows = hidden.flatten(0, -2)  # (tokens, in)
        low = _scaled_matmul(rows, first.t(), scaling)  # (tokens, rank)
        ctx.save_for_backward(hidden, low, first, second)
        ctx.scaling, ctx.dtype = scaling, lora_A.dtype
        return torch.addmm(base.flatten(0, -2), low, second.t()).view_as(base)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, low, first, second = ctx.saved_tensors
        needs_base, needs_hidden, *_ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)  # (tokens, out)
        grad_low = _scaled_matmul(rows, second, ctx.scaling)  # (tokens, rank)
        grad_hidden = (grad_low @ first).view_as(hidden) if needs_hidden else None
        grad_first = _matmul_in(ctx.dtype, grad_low.t(), hidden.flatten(0, -2))
        grad_second = _matmul_in(ctx.dtype, rows.t(), low)
        return grad if needs_base else None, grad_hidden, grad_first, grad_second, None


def _scaled_matmul(left: torch.Tensor, right: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return scaling * left @ right by one kernel, which does not read the empty summand."""
    return torch.addmm(left.new_empty(()), left, right, beta=0, alpha=scaling)


def _matmul_in(dtype: torch.dtype, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left @ right in `dtype`; on CUDA float32 results of 16-bit operands are not rounded in between."""
    if left.is_cuda and dtype is torch.float32 and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)
