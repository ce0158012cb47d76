"""Folders of models quantized in the layouts of their publishers, each beside one with the decoded weights.

The decoded weights are computed here in float64 from codes and scales drawn at random, over whole matrices.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import tiny_folder

LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
BLOCK = (16, 24)
"""Rows and columns that share an FP8 scale; it divides few of the matrices."""


class Made(NamedTuple):
    """A quantized matrix."""

    stored: dict[str, torch.Tensor]
    """Tensors by what follows the name of the weight, or its module if it begins with a dot."""
    exact: torch.Tensor
    """Decoded values in float64, as the files order them."""


def exponents(*shape: int) -> torch.Tensor:
    """Return uint8 exponents of scales around 2 ** -4."""
    return torch.randint(120, 127, shape, dtype=torch.uint8)


def powers(codes: torch.Tensor) -> torch.Tensor:
    """Return what exponents stand for, in float64."""
    return 2.0 ** (codes.view(torch.uint8).double() - 127)


def spread(scales: torch.Tensor, block: tuple[int, int], rows: int, columns: int) -> torch.Tensor:
    """Return scales of blocks as one per value, (..., rows, columns)."""
    return scales.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of bytes with two codes each, the low bits first, in float64: (..., n) -> (..., 2 n)."""
    low, high = codes.view(torch.uint8) % 16, codes.view(torch.uint8) // 16
    pairs = torch.stack([low, high], -1).flatten(-2).long()
    return torch.where(pairs >= 8, -1.0, 1.0) * LEVELS[pairs % 8]


def float8(*shape: int) -> torch.Tensor:
    """Return random values in float8."""
    return torch.randn(shape).to(torch.float8_e4m3fn)


def grid(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Return the number of blocks in each direction."""
    return -(-rows // block[0]), -(-columns // block[1])


def fp8_blocks(rows: int, columns: int, block: tuple[int, int] = BLOCK, suffix: str = "_scale_inv") -> Made:
    codes, scales = float8(rows, columns), torch.rand(grid(rows, columns, block)) + 0.01
    return Made({"": codes, suffix: scales}, codes.double() * spread(scales.double(), block, rows, columns))


def fp8_tensor(rows: int, columns: int) -> Made:
    codes, scale = float8(rows, columns), torch.rand(()) + 0.01
    stored = {"": codes, "_scale_inv": scale.bfloat16(), ".activation_scale": torch.rand(())}
    return Made(stored, codes.double() * scale.bfloat16().double())


def fp8_channel(rows: int, columns: int) -> Made:
    codes, scales = float8(rows, columns), (torch.rand(rows, 1) + 0.01).bfloat16()
    return Made({"": codes, "_scale": scales}, codes.double() * scales.double())


def exponent_blocks(rows: int, columns: int) -> Made:
    codes, scales = float8(rows, columns), exponents(*grid(rows, columns, BLOCK))
    stored = {"": codes, ".scale": scales.view(torch.float8_e8m0fnu)}
    return Made(stored, codes.double() * spread(powers(scales), BLOCK, rows, columns))


def fp4_in_int8(rows: int, columns: int) -> Made:
    codes = torch.randint(-128, 128, (rows, columns // 2), dtype=torch.int8)
    scales = exponents(*grid(rows, columns, (1, 32)))
    stored = {"": codes, ".scale": scales.view(torch.float8_e8m0fnu)}
    return Made(stored, e2m1(codes) * spread(powers(scales), (1, 32), rows, columns))


def mxfp8(rows: int, columns: int, suffix: str = "_scale") -> Made:
    codes, scales = float8(rows, columns), exponents(*grid(rows, columns, (1, 32)))
    return Made({"": codes, suffix: scales}, codes.double() * spread(powers(scales), (1, 32), rows, columns))


def fp4_codes(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)


def nvfp4_modelopt(rows: int, columns: int) -> Made:
    codes, second = fp4_codes(rows, columns), torch.rand(()) * 0.01
    scales = (torch.rand(grid(rows, columns, (1, 16))) * 200).to(torch.float8_e4m3fn)
    stored = {"": codes, "_scale": scales, "_scale_2": second, ".input_scale": torch.rand(())}
    return Made(stored, e2m1(codes) * spread(scales.double() * second.double(), (1, 16), rows, columns))


def nvfp4_packed(rows: int, columns: int) -> Made:
    codes, second = fp4_codes(rows, columns), torch.rand(1) * 1000
    scales = (torch.rand(grid(rows, columns, (1, 16))) * 200).to(torch.float8_e4m3fn)
    stored = {"_packed": codes, "_scale": scales, "_global_scale": second, ".input_global_scale": torch.rand(1)}
    return Made(stored, e2m1(codes) * spread(scales.double() / second.double(), (1, 16), rows, columns))


def mxfp4_packed(rows: int, columns: int) -> Made:
    codes, scales = fp4_codes(rows, columns), exponents(*grid(rows, columns, (1, 32)))
    stored = {"_packed": codes, "_scale": scales}
    return Made(stored, e2m1(codes) * spread(powers(scales), (1, 32), rows, columns))


def integers(bits: int, group: int | None) -> Callable[[int, int], Made]:
    """Return a function that draws integers packed in int32, the first in the lowest bits."""

    def draw(rows: int, columns: int) -> Made:
        values = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns))
        per_word = 32 // bits
        words = torch.zeros(rows, -(-columns // per_word), dtype=torch.int64)
        for column in range(columns):
            words[:, column // per_word] += (values[:, column] + 2 ** (bits - 1)) << (column % per_word * bits)
        packed = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        block = (1, group or columns)
        scales = (torch.rand(grid(rows, columns, block)) * 0.1 + 0.01).bfloat16()
        stored = {"_packed": packed, "_scale": scales, "_shape": torch.tensor([rows, columns])}
        return Made(stored, values.double() * spread(scales.double(), block, rows, columns))

    return draw


def int8_channel(rows: int, columns: int) -> Made:
    codes = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    scales = torch.rand(rows, 1) * 0.01
    return Made({"": codes, "_scale": scales}, codes.double() * scales.double())


def mxfp4_experts(experts: int, inputs: int, outputs: int) -> Made:
    """gpt-oss stores (experts, out, in / 32, 16) of what the model holds as (experts, in, out)."""
    codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
    scales = exponents(experts, outputs, inputs // 32)
    exact = (e2m1(codes) * powers(scales)[..., None]).flatten(-2).mT
    return Made({"_blocks": codes, "_scales": scales}, exact)


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """Return the description that compressed-tensors writes of layers quantized alike."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


FORMATS: dict[str, tuple[str, dict[str, Any], Callable[[int, int], Made]]] = {
    "fp8 blocks": ("qwen3_moe", {"quant_method": "fp8", "weight_block_size": list(BLOCK)}, fp8_blocks),
    "fp8 tensor": ("mistral", {"quant_method": "fp8", "weight_block_size": None}, fp8_tensor),
    "fp8 and fp4": ("qwen3_moe", {"quant_method": "fp8", "weight_block_size": list(BLOCK)}, exponent_blocks),
    "mxfp8": ("qwen3", compressed("mxfp8-quantized", num_bits=8, type="float", group_size=32), mxfp8),
    "mxfp8 alone": ("qwen3_moe", {"quant_method": "mxfp8", "ignored_layers": []}, partial(mxfp8, suffix="_scale_inv")),
    "nvfp4 modelopt": ("llama", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_modelopt),
    "nvfp4": ("qwen3_moe", compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), nvfp4_packed),
    "mxfp4 packed": (
        "qwen3",
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        mxfp4_packed,
    ),
    "fp8 channel": ("qwen3", compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_channel),
    "int4": ("qwen3", compressed("pack-quantized", num_bits=4, type="int", group_size=32), integers(4, 32)),
    "int8 packed": ("qwen3", compressed("pack-quantized", num_bits=8, type="int"), integers(8, None)),
    "int8": ("qwen3", compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8_channel),
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, fp8_blocks),
}
"""Name -> family of the model, description in config.json, and how matrices are drawn."""


def quantized_folders(parent: Path, name: str) -> tuple[Path, Path]:
    """Save a tiny model in a format of FORMATS, and another with its decoded weights in bfloat16; return both."""
    family, description, draw = FORMATS[name]
    plain, folder = tiny_folder(parent / "plain", family, dtype="bfloat16"), parent / "quantized"
    torch.manual_seed(1)
    stored, decoded = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for key, tensor in load_file(plain / "model.safetensors").items():
        made = None
        if name == "mxfp4":
            made = mxfp4_experts(*tensor.shape) if tensor.ndim == 3 else None
        elif key.endswith("proj.weight"):
            chosen = fp4_in_int8 if name == "fp8 and fp4" and ".experts." in key else draw
            made = chosen(*tensor.shape)
        module = key.rpartition(".")[0]
        parts = {"": tensor} if made is None else made.stored
        stored |= {(module if each.startswith(".") else key) + each: part for each, part in parts.items()}
        decoded[key] = tensor.bfloat16() if made is None else made.exact.float().bfloat16()
    config = json.loads((plain / "config.json").read_text())
    folder.mkdir()
    save_file({key: each.contiguous() for key, each in stored.items()}, folder / "model.safetensors")
    save_file({key: each.contiguous() for key, each in decoded.items()}, plain / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": description}))
    return folder, plain
