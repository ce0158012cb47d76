"""Linear layers and weights with few bits: float8 GEMMs, quantization-aware training, and 4-bit weights (NF4).

float8, by torchao: GEMMs have float8 operands, gradients and all other operations keep their dtype. tensorwise: one
scale per operand, the fastest. rowwise: one scale per row and column, numerically closer to bfloat16. Scaling is
dynamic: scales are computed from the operands of each GEMM. Parameters keep their dtype.

Quantization-aware training (QAT), by torchao: the forward rounds weights, and under int8_int4 activations, to the
values that they have after quantization; the backward passes gradients through the rounding. Parameters keep their
names too, so checkpoints and exports hold ordinary weights, which torchao quantizes with the same config
(`_quantized_config`).

NF4 (QLoRA: Dettmers et al. 2023, arXiv:2305.14314): frozen matrices in 4-bit NormalFloat, and matmuls with them. Each
row is divided into blocks of 64 values. A block is 34 bytes: the scale (its largest magnitude, float16), then 64 4-bit
codes, each the index of the level nearest to value / scale. So a matrix is one uint8 tensor with 4.25 bits per value,
which can be sharded by rows or by blocks of columns like any other matrix. FSDP2 and tensor parallelism shard the
bytes, and a scale is always on the same rank as its codes. The paper's double quantization of scales is not
implemented: its groups span rows, which would constrain sharding, and it would save only 0.1 bits per value. torchao's
NF4Tensor (0.18) is not used: it requires multiples of 16,384 values and cannot be sharded by columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from components.config.compute_rules import torchao_problems
from components.config.schema.model import Float8, ModelConfig, Qat
from components.models.anatomy import encoder_parameters, read_anatomy
from components.models.weights.shards import Index, fill, local_part
from components.protocol.errors import ConfigError, raise_all
from components.torch_kernels import cast_by_autocast, torch_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MULTIPLE = 16
"""Inputs and outputs of a layer must be multiples of this, as torch's float8 GEMM requires."""
_CAPABILITY = (8, 9)
"""Minimum CUDA compute capability for float8 GEMMs: Ada, Hopper and later."""
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""From appendix E of the paper: quantiles of the normal distribution, scaled to [-1, 1], including zero."""
BLOCK = 64
"""Consecutive values of a row that share a scale."""
_SCALE_BYTES = 2
BLOCK_BYTES = _SCALE_BYTES + BLOCK // 2
_PACKED_AT_ONCE = 2**20
"""Approximate number of values that are packed at a time, because temporaries are many times larger than the result."""


def use_float8(model: PreTrainedModel, cfg: ModelConfig) -> None:
    """Convert a model's linear layers to float8 GEMMs in place, with the recipe `cfg.float8`; never the LM head.

    Call it before the model is sharded, usually on the meta device. Names and parameters do not change.

    Raises ConfigError if torchao is missing, this machine has no float8 GEMM, or no layer has suitable sizes.
    """
    if cfg.float8 == Float8.none:
        return
    key = f"model.float8={cfg.float8}"
    raise_all(torchao_problems(key))
    if not cfg.float8_emulate and not _has_float8_gemm():
        raise ConfigError(
            f"{key}: needs a CUDA device of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or higher, but this "
            f"is {_device()}; set model.float8=none (model.float8_emulate=true emulates the rounding anywhere, slowly)"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # The GEMM of a weight's gradient sums over tokens, whose number need not be a multiple of 16: pad that dim.
    settings = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(str(cfg.float8)), emulate=cfg.float8_emulate, pad_inner_dim=True
    )
    head, unused = model.get_output_embeddings(), encoder_parameters(model)
    convert_to_float8_training(
        model,
        config=settings,
        module_filter_fn=lambda module, name: f"{name}.weight" not in unused and _is_convertible(module, head),
    )
    if not float8_layers(model):
        raise ConfigError(
            f"{key}: no linear layer of {type(model).__name__} has inputs and outputs that are multiples of "
            f"{_MULTIPLE}; set model.float8=none"
        )


def float8_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the layers converted by `use_float8`."""
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    return [module for module in linear if type(module).__name__ == "Float8Linear"]


@contextmanager
def without_float8(model: nn.Module) -> Iterator[None]:
    """Context in which float8 layers compute like ordinary linear layers."""
    layers = float8_layers(model)
    for layer in layers:
        layer.forward = partial(nn.Linear.forward, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _is_convertible(module: nn.Module, head: nn.Module | None) -> bool:
    return (
        type(module) is nn.Linear
        and module is not head
        and module.in_features % _MULTIPLE == module.out_features % _MULTIPLE == 0
    )


def _has_float8_gemm() -> bool:
    return torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() >= _CAPABILITY


def _device() -> str:
    if not torch.cuda.is_available():
        return "a machine without CUDA"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} of compute capability {major}.{minor}"


def use_qat(model: PreTrainedModel, cfg: ModelConfig) -> None:
    """Replace the linear layers of a model's decoder by fake-quantized ones in place; never the LM head.

    Call it before the model is sharded, usually on the meta device. Fused experts are not linear layers and stay.

    Raises ConfigError if torchao is missing, or the inputs of a layer are no multiple of the group size.
    """
    if cfg.qat == Qat.none:
        return
    raise_all(torchao_problems(f"model.qat={cfg.qat}"))
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    layers = read_anatomy(model).decoder_layers(model)
    linear = {
        f"{path}.{name}": module
        for path, layer in layers.items()
        for name, module in layer.named_modules()
        if type(module) is nn.Linear
    }
    if not linear:
        raise ConfigError(f"model.qat={cfg.qat}: {type(model).__name__} has no linear layers; set model.qat=none")
    for name, module in linear.items():
        if module.in_features % cfg.qat_group_size:
            raise ConfigError(
                f"model.qat_group_size={cfg.qat_group_size}: does not divide the {module.in_features} inputs of "
                f"{name}; set it to a divisor, such as 32"
            )
    prepare = QATConfig(_quantized_config(cfg), step="prepare")
    chosen = set(linear.values())
    quantize_(model, prepare, filter_fn=lambda module, _: module in chosen)


def _quantized_config(cfg: ModelConfig) -> Any:
    """Return torchao's config that quantizes the weights trained with `cfg`."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8DynamicActivationIntxWeightConfig, PerGroup

    if cfg.qat == Qat.int8_int4:
        groups = PerGroup(cfg.qat_group_size)
        return Int8DynamicActivationIntxWeightConfig(weight_dtype=torch_dtype("int4"), weight_granularity=groups)
    return Int4WeightOnlyConfig(group_size=cfg.qat_group_size)


def packed_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape in bytes of a packed matrix; the last block of each row is padded with zeros."""
    return rows, -(-columns // BLOCK) * BLOCK_BYTES


def is_packed(tensor: torch.Tensor) -> bool:
    """Return whether a parameter is a packed matrix; no other parameters are uint8."""
    return tensor.dtype == torch.uint8


def pack(matrix: torch.Tensor) -> torch.Tensor:
    """Quantize (rows, columns) to the nearest levels; return uint8 of `packed_shape` on the same device."""
    rows, columns = matrix.shape
    packed = torch.empty(packed_shape(rows, columns), dtype=torch.uint8, device=matrix.device)
    chunk = max(1, _PACKED_AT_ONCE // max(1, columns))
    for start in range(0, rows, chunk):
        packed[start : start + chunk] = _pack(matrix[start : start + chunk].float())
    return packed


def unpack(packed: torch.Tensor, columns: int, pairs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize a packed matrix to (rows, columns) of `dtype`: computed in float32, then rounded once.

    pairs: From `level_pairs`, on the device of `packed`.
    """
    packed = packed.to(torch.uint8)  # FSDP2 of torch 2.11 all-gathers in the mixed-precision dtype, exact up to 255
    if packed.is_cuda:
        return _unpack_on_gpu(packed, columns, pairs, dtype)
    blocks = packed.view(len(packed), -1, BLOCK_BYTES)
    scales = blocks[..., :_SCALE_BYTES].contiguous().view(torch.float16)  # (rows, blocks, 1)
    values = F.embedding(blocks[..., _SCALE_BYTES:].int(), pairs)  # (rows, blocks, 32, 2)
    return values.flatten(2).mul_(scales.float()).flatten(1)[:, :columns].to(dtype)


@torch.library.custom_op("meshbook::unpack_nf4", mutates_args=(), device_types="cuda")
def _unpack_on_gpu(packed: torch.Tensor, columns: int, pairs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize like `unpack`, in one kernel. An operator, so that torch.compile and fake tensors need no Triton."""
    from components.models.triton_kernels import launch_unpack

    return launch_unpack(packed, columns, pairs, dtype, BLOCK, BLOCK_BYTES)


@_unpack_on_gpu.register_fake
def _(packed: torch.Tensor, columns: int, pairs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return packed.new_empty(len(packed), columns, dtype=dtype)


def level_pairs(device: torch.device | str | None = None) -> torch.Tensor:
    """Return the two values of each code byte, high bits first: (256, 2) float32."""
    levels = torch.tensor(_LEVELS, device=device)
    return torch.cartesian_prod(levels, levels)


def nf4_linear(
    hidden: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, pairs: torch.Tensor
) -> torch.Tensor:
    """Return hidden @ W.T + bias for a packed W; autograd saves the packed bytes, and the backward unpacks W again.

    Args:
        hidden: (..., columns).
        bias: (rows,) or None. Neither W nor the bias receives a gradient.
    """
    (hidden,) = cast_by_autocast(hidden)
    output: Any = _NF4Linear.apply(hidden, packed, pairs)
    return output if bias is None else output + bias.to(output.dtype)


def fill_or_pack(
    tensor: torch.Tensor,
    name: str,
    read: Callable[[Index], torch.Tensor],
    shape: Sequence[int],
    *,
    transposed: bool = False,
) -> None:
    """Set this rank's shard of `tensor` from blocks of the full tensor, packing them if `tensor` is packed.

    A block is packed on the device of `tensor`, with the same codes on each: on a CPU the search for the nearest levels
    takes minutes for a model of 8B parameters. At most this rank's shard of one matrix is held unpacked.

    Args:
        read: Returns a block of the full, unpacked tensor.
        shape: Shape of the full, unpacked tensor, as `read` returns it.
        transposed: Pack the transpose (of a Conv1D).
    """
    if is_packed(tensor):
        columns, read = (shape[0], transposed_reader(read)) if transposed else (shape[1], read)
        read = packed_reader(read, columns, local_part(tensor).device)
    fill(tensor, name, read)


def transposed_reader(read: Callable[[Index], torch.Tensor]) -> Callable[[Index], torch.Tensor]:
    """Return a function that reads blocks of the transpose of the matrix that `read` reads."""
    return lambda index: read(index[::-1]).T.contiguous()


def packed_reader(
    read: Callable[[Index], torch.Tensor], columns: int, device: torch.device | str | None = None
) -> Callable[[Index], torch.Tensor]:
    """Return a function that reads and packs blocks, indexed in packed bytes, given one that reads a dense matrix.

    Args:
        device: Where to pack; None: on the device of what `read` returns.
    """

    def read_and_pack(index: Index) -> torch.Tensor:
        block = read((index[0], _columns(index[1], columns)))
        return pack(block if device is None else block.to(device))

    return read_and_pack


def unpacked_reader(read: Callable[[Index], torch.Tensor], columns: int) -> Callable[[Index], torch.Tensor]:
    """Return a function that reads dense blocks, given one that reads packed bytes: the inverse of `packed_reader`."""
    bytes_of_row = slice(0, packed_shape(1, columns)[1])
    return lambda index: unpack(read((index[0], bytes_of_row)), columns, level_pairs(), torch.float32)[:, index[1]]


def _columns(packed_bytes: slice, columns: int) -> slice:
    """Return the columns stored in a slice of a row's bytes, which begins and ends at block boundaries."""
    return slice(packed_bytes.start // BLOCK_BYTES * BLOCK, min(packed_bytes.stop // BLOCK_BYTES * BLOCK, columns))


def _pack(matrix: torch.Tensor) -> torch.Tensor:
    rows, columns = matrix.shape
    blocks = F.pad(matrix, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    scales = blocks.abs().amax(2, keepdim=True).half()  # (rows, blocks, 1)
    levels = torch.tensor(_LEVELS, device=matrix.device)
    # The scale of a block of zeros is 0; dividing by 1 instead still gives level 0.
    codes = torch.bucketize(blocks / torch.where(scales > 0, scales, 1).float(), (levels[1:] + levels[:-1]) / 2)
    codes = codes.to(torch.uint8)
    return torch.cat([scales.view(torch.uint8), codes[..., 0::2] << 4 | codes[..., 1::2]], dim=2).flatten(1)


class _NF4Linear(torch.autograd.Function):
    """hidden @ W.T for a packed, frozen W."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, packed: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(packed, pairs)
        ctx.columns = hidden.shape[-1]
        return F.linear(hidden, unpack(packed, ctx.columns, pairs, hidden.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        packed, pairs = ctx.saved_tensors
        return grad @ unpack(packed, ctx.columns, pairs, grad.dtype), None, None
