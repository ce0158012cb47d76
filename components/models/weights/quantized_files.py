"""Weights of quantized safetensors files, decoded to bfloat16 slice by slice under the names of plain weights.

Every value is its code times the scale of its block, computed in float32 and rounded once. The layouts:

- MXFP4 of gpt-oss: `X_blocks` (experts, out, in / 32, 16), two E2M1 codes per byte, low bits first, and `X_scales`, the
  exponents of powers of two. X itself is (experts, in, out). Format: OCP Microscaling 1.0.
- FP8: `X` in float8 and `X_scale_inv`, `X_scale` or, of a weight, `scale` or `qscale_weight` beside it: one per matrix,
  per row or per block of the size in config.json. Blocks at the edges may be smaller. Scales may be exponents too
  (MXFP8; DeepSeek V4, whose experts are E2M1 codes, two per int8).
- NVFP4 of ModelOpt: `X`, two codes per byte, `X_scale` per 16 values and `X_scale_2`, by which scales are multiplied.
- compressed-tensors: float8 and int8 as above; `X_packed` with E2M1 codes, two per byte, and `X_scale` divided by
  `X_global_scale` (NVFP4) or exponents (MXFP4); or integers of 4 or 8 bits in int32, and `X_shape`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from components.config.model_files import ModelFiles, Quantization, read_quantization
from components.models.weights.shards import Index
from components.models.weights.weight_sources import SafetensorsTensors, find_file, find_safetensors
from components.protocol.errors import ConfigError
from components.protocol.safe_parsing import load_json

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the codes of four bits."""
_ACTIVATIONS = re.compile(
    r"(\.|_)(activation_scale|input_scale|input_global_scale|input_zero_point|output_scale|[kqv]_scale|prob_output_scale"
    r"|[kqv]_zero_point)$"
)
"""Scales of activations and of key-value caches, which training does not use."""
_SCALES = re.compile(r"(_scale_inv|_scale|_scale_2|_global_scale|_scales|\.scale|\.qscale_weight)$")
_CODES = ("U8", "F8_E4M3")
"""Dtypes of ModelOpt's codes, as safetensors calls them."""
_EXPONENTS = ("U8", "F8_E8M0")
"""Dtypes of scales that are exponents of two."""
_DECODED_AT_ONCE = 2**24
"""Approximate number of values that are decoded at a time: a matrix of 18,432 x 7,168 would take 0.5 GB in float32."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A weight as it is stored."""

    codes: str
    """Stored name of the codes."""
    scale: str
    shape: tuple[int, ...]
    """Shape of the decoded values, in the order of the files."""
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    per_element: int = 1
    """Codes in a stored element."""
    e2m1: bool = False
    """Whether codes are indices of `_E2M1`; otherwise numbers."""
    second: str | None = None
    """Scale of all scales."""
    divides: bool = False
    """Whether scales are divided by it."""
    in_groups: bool = False
    """Whether the last dim is stored as two, groups and the bytes of a group."""
    transposed: bool = False
    """Whether the model has the transpose."""


def open_safetensors(files: ModelFiles, revision: str | None, *, download: bool = True) -> SafetensorsTensors:
    """Return the tensors of a model's safetensors files, decoded if they are quantized.

    Args:
        download: Whether to download files of the hub that are not in the cache.

    Raises ConfigError as `find_safetensors` does, for damaged files, and for formats that are not read.
    """
    paths = find_safetensors(files, revision, download=download)
    quantization = quantization_of(files, revision)
    if quantization is None:
        stored = SafetensorsTensors(paths)
        has_codes = any(dtype in _CODES for dtype in stored.dtypes().values())
        # Earlier versions of ModelOpt described weights in a file of their own only.
        described = find_file(files, "hf_quant_config.json", revision, download=download) if has_codes else None
        if described is None:
            return stored
        quantization = _read_description(described)
    return _DecodedTensors(paths, quantization)


def _read_description(file: Path) -> Quantization:
    """Return the format in a file of ModelOpt. Raises ConfigError if it is damaged or the format is not read."""
    try:
        stated = load_json(file)["quantization"]
        values = {"quant_method": "modelopt", "quant_algo": stated["quant_algo"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{file}: does not describe quantized weights: {error!r}; download it again") from error
    quantization = read_quantization({"quantization_config": values}, str(file))
    return quantization or Quantization("modelopt")


def quantization_of(files: ModelFiles, revision: str | None) -> Quantization | None:
    """Return the format of a model's quantized weights; None if they are plain. Raises ConfigError."""
    from transformers import PreTrainedConfig

    if files.gguf_file:
        return None
    config, _ = PreTrainedConfig.get_config_dict(files.name_or_folder, revision=revision)
    return read_quantization(config, f"model.path={files.name_or_folder}")


class _DecodedTensors(SafetensorsTensors):
    """Tensors of quantized files, decoded, and under their stored names those that are not quantized."""

    def __init__(self, paths: list[Path], quantization: Quantization) -> None:
        """Read the headers. Raises ConfigError for damaged files, and if the scales of a weight are missing."""
        super().__init__(paths)
        self._quantization = quantization
        self._stored = self._shapes
        self._encoded: dict[str, _Encoded] = {}
        used: set[str] = {name for name in self._stored if _ACTIVATIONS.search(name)}
        for name in sorted(self._stored.keys() - used):
            if (match := self._find(name)) is not None:
                plain, encoded = match
                self._encoded[plain] = encoded
                used |= {encoded.codes, encoded.scale, *([encoded.second] if encoded.second else [])}
                used.add(f"{plain}_shape")
        self._shapes = {name: shape for name, shape in self._stored.items() if name not in used}
        for plain, encoded in self._encoded.items():
            *lead, rows, columns = encoded.shape
            self._shapes[plain] = (*lead, columns, rows) if encoded.transposed else encoded.shape

    def not_floats(self) -> dict[str, str]:
        """Return the dtypes of the tensors that hold no floating-point numbers, as the files call them."""
        return {
            name: kind for name, kind in super().not_floats().items() if name in self._shapes.keys() - self._encoded
        }

    def on_meta(self, name: str) -> torch.Tensor:
        """Return a tensor with the shape and the dtype of a stored or decoded one, without memory."""
        if name in self._encoded:
            return torch.empty(self._shapes[name], dtype=torch.bfloat16, device="meta")
        return super().on_meta(name)

    def read(self, name: str, index: Index) -> torch.Tensor:
        """Return a block of a tensor, in bfloat16 if it is quantized. Raises ConfigError."""
        if name not in self._encoded:
            return super().read(name, index)
        encoded = self._encoded[name]
        index = tuple(index) or tuple(slice(0, size) for size in self._shapes[name])
        if encoded.transposed:
            index = (*index[:-2], index[-1], index[-2])
        *lead, rows, columns = (slice(*each.indices(size)) for each, size in zip(index, encoded.shape, strict=True))
        unit = math.lcm(encoded.block[1] if encoded.block[1] < encoded.shape[-1] else 1, self._width(encoded))
        whole = slice(columns.start // unit * unit, min(-(-columns.stop // unit) * unit, encoded.shape[-1]))
        wanted = slice(columns.start - whole.start, columns.stop - whole.start)
        sizes = [each.stop - each.start for each in (*lead, rows, columns)]
        decoded = torch.empty(sizes, dtype=torch.bfloat16)
        step = max(1, _DECODED_AT_ONCE * sizes[-2] // max(1, decoded.numel()))
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            values = self._decode(encoded, lead, part, whole)
            decoded[..., part.start - rows.start : part.stop - rows.start, :] = values[..., wanted]
        return decoded.mT.contiguous() if encoded.transposed else decoded

    def _decode(self, encoded: _Encoded, lead: list[slice], rows: slice, columns: slice) -> torch.Tensor:
        """Return a block of the values of a weight in float32; `columns` are those of whole elements and blocks."""
        count, width = columns.stop - columns.start, encoded.block[1]
        values = self._codes(encoded, lead, rows, columns)[..., :count]  # (..., rows, columns)
        scales = self._scales(encoded, lead, rows, columns)  # (..., rows, blocks)
        if scales.shape[-1] == 1:
            return values.mul_(scales)
        if count % width == 0:
            return values.unflatten(-1, (-1, width)).mul_(scales[..., None]).flatten(-2)
        return values.mul_(scales.repeat_interleave(width, -1)[..., :count])

    def _codes(self, encoded: _Encoded, lead: list[slice], rows: slice, columns: slice) -> torch.Tensor:
        """Return what the codes of a block stand for without their scales, in float32."""
        elements = slice(columns.start // self._width(encoded), -(-columns.stop // self._width(encoded)))
        index: Index = (*lead, rows, elements)
        if encoded.in_groups:
            codes = super().read(encoded.codes, (*index, slice(0, self._stored[encoded.codes][-1]))).flatten(-2)
        else:
            codes = super().read(encoded.codes, index)
        if encoded.e2m1:
            levels = torch.tensor(_E2M1)
            pairs = torch.cartesian_prod(levels, levels).flip(1)  # (256, 2), the low bits first
            return F.embedding(codes.view(torch.uint8).int(), pairs).flatten(-2)
        if encoded.per_element > 1:
            bits = 32 // encoded.per_element
            shifts = torch.arange(0, 32, bits, dtype=torch.int32)
            return ((codes[..., None] >> shifts) & (2**bits - 1)).flatten(-2).float() - 2 ** (bits - 1)
        return codes.float()

    def _width(self, encoded: _Encoded) -> int:
        """Return the number of codes in a stored element, or in a group of bytes."""
        return encoded.per_element * (self._stored[encoded.codes][-1] if encoded.in_groups else 1)

    def _scales(self, encoded: _Encoded, lead: list[slice], rows: slice, columns: slice) -> torch.Tensor:
        """Return the scales of a block's values in float32, (..., rows, blocks)."""
        height, width = encoded.block
        stored = self._stored[encoded.scale]
        *_, all_rows, all_columns = encoded.shape
        grid = (-(-all_rows // height), -(-all_columns // width))
        of_rows, of_columns = (
            slice(each.start // size, -(-each.stop // size)) for each, size in ((rows, height), (columns, width))
        )
        if stored[-2:] == grid and len(stored) == len(encoded.shape):
            scales = super().read(encoded.scale, (*lead, of_rows, of_columns))
        else:  # one per matrix or row, without the dims that have a single value
            shape = (*encoded.shape[:-2], *grid)
            scales = super().read(encoded.scale, ()).view(shape)[(*lead, of_rows, of_columns)]
        scales = _as_float32(scales, self._dtypes[encoded.scale])
        if encoded.second is not None:
            second = super().read(encoded.second, ()).float()
            if second.numel() > 1:
                second = second.view(*second.shape, *[1] * (scales.dim() - second.dim()))[tuple(lead)]
            scales = scales / second if encoded.divides else scales * second
        return scales[..., torch.arange(rows.start, rows.stop) // height - of_rows.start, :]

    def _find(self, name: str) -> tuple[str, _Encoded] | None:
        """Return the plain name of a stored tensor that holds codes, and its layout; None for other tensors.

        Raises ConfigError if its scales are missing or do not belong to it.
        """
        dtype, shape = self._dtypes[name], self._stored[name]
        if _SCALES.search(name) or len(shape) < 2:
            return None
        if name.endswith("_blocks") and dtype == "U8" and len(shape) == 4:
            plain = name.removesuffix("_blocks")
            scale, groups = self._required(name, f"{plain}_scales"), shape[2]
            size = 2 * shape[3]
            encoded = _Encoded(
                name, scale, (*shape[:2], groups * size), (1, size), 2, True, in_groups=True, transposed=True
            )
            return plain, self._checked(encoded)
        if name.endswith("_packed") and dtype in ("U8", "I32"):
            return name.removesuffix("_packed"), self._packed(name, name.removesuffix("_packed"))
        if dtype in ("F8_E4M3", "F8_E5M2", "I8") or (dtype == "U8" and f"{name}_scale" in self._stored):
            return name, self._scaled(name)
        return None

    def _scaled(self, name: str) -> _Encoded:
        """Return the layout of a tensor of codes that has the name of the weight."""
        module, _, leaf = name.rpartition(".")
        names = [f"{name}_scale_inv", f"{name}_scale"]
        names += [f"{module}.scale", f"{module}.qscale_weight"] if leaf == "weight" else []
        scale = next((each for each in names if each in self._stored), names[0])
        self._required(name, scale)
        *lead, rows, columns = self._stored[name]
        dtype = self._dtypes[name]
        if dtype == "U8" or (dtype == "I8" and self._quantization.method == "fp8"):
            second = self._second(name, scale, f"{name}_scale_2")
            shape = (*lead, rows, 2 * columns)
            return self._checked(_Encoded(name, scale, shape, self._group(scale, shape[-1]), 2, True, second))
        return self._checked(_Encoded(name, scale, self._stored[name], self._block(name, scale)))

    def _packed(self, name: str, plain: str) -> _Encoded:
        """Return the layout of a tensor of compressed-tensors that holds several codes per element."""
        scale = self._required(name, f"{plain}_scale")
        *lead, rows, columns = self._stored[name]
        for suffix in ("_zero_point", "_g_idx"):
            if f"{plain}{suffix}" in self._stored:
                raise ConfigError(
                    f"{self._path_of[name]}: {plain} has {plain}{suffix}, a format that is not read; give the model in "
                    "bfloat16"
                )
        if self._dtypes[name] == "U8":
            second = self._second(name, scale, f"{plain}_global_scale")
            shape = (*lead, rows, 2 * columns)
            group = self._group(scale, shape[-1])
            return self._checked(_Encoded(name, scale, shape, group, 2, True, second, divides=True))
        shape = tuple(int(size) for size in super().read(self._required(name, f"{plain}_shape"), ()))
        bits = next((bits for bits in (4, 8) if shape and -(-shape[-1] * bits // 32) == columns), None)
        if bits is None or shape[:-1] != (*lead, rows):
            raise ConfigError(
                f"{self._path_of[name]}: {name} is {self._stored[name]}, which does not hold {shape} integers of 4 or "
                f"8 bits, as {plain}_shape says; download the file again"
            )
        return self._checked(_Encoded(name, scale, shape, self._block(name, scale, shape), 32 // bits))

    def _required(self, name: str, other: str) -> str:
        """Return the name of a tensor that belongs to `name`. Raises ConfigError if the files do not have it."""
        if other not in self._stored:
            raise ConfigError(
                f"{self._path_of[name]}: {name} is quantized ({self._dtypes[name]}), but the files lack its scales, "
                f"{other}; download the model again"
            )
        return other

    def _second(self, name: str, scale: str, other: str) -> str | None:
        """Return the name of the scale of E2M1 codes' scales, which float8 scales have and exponents have not."""
        dtype = self._dtypes[scale]
        if dtype in _EXPONENTS:
            return None
        if dtype != "F8_E4M3":
            raise ConfigError(
                f"{self._path_of[name]}: {name} has scales of dtype {dtype}, a format that is not read; give the model "
                "in bfloat16"
            )
        return self._required(name, other)

    def _group(self, scale: str, columns: int) -> tuple[int, int]:
        """Return the block of E2M1 codes: a part of a row, of the size of the format or of one in config.json."""
        size = 32 if self._dtypes[scale] in _EXPONENTS else 16
        sizes = [size, *(width for height, width in self._quantization.blocks if height == 1)]
        return 1, next((each for each in sizes if -(-columns // each) == self._stored[scale][-1]), size)

    def _block(self, name: str, scale: str, shape: tuple[int, ...] | None = None) -> tuple[int, int]:
        """Return the rows and columns that share a scale: all, a row, or a block of a size in config.json.

        Sizes are not derived from the number of scales, since blocks at the edges may be smaller.
        """
        *lead, rows, columns = shape or self._stored[name]
        stored, matrices = self._stored[scale], int(torch.Size(lead).numel())
        count = int(torch.Size(stored).numel())
        candidates = [*self._quantization.blocks, *([(1, 32)] if self._dtypes[scale] in _EXPONENTS else [])]
        for height, width in candidates:
            if tuple(stored[-2:]) == (-(-rows // height), -(-columns // width)):
                return height, width
        if count == matrices:
            return rows, columns
        if count == matrices * rows and stored[-1] in (1, rows):
            return 1, columns
        stated = ", ".join(f"{height} x {width}" for height, width in candidates) or "no blocks"
        raise ConfigError(
            f"{self._path_of[scale]}: {scale} is {tuple(stored)}, which does not fit {name}, ({rows}, {columns}), in "
            f"blocks of {stated}; correct weight_block_size in config.json, or download the model again"
        )

    def _checked(self, encoded: _Encoded) -> _Encoded:
        """Return a layout. Raises ConfigError if the shape of its scales is not that of its blocks."""
        *lead, rows, columns = encoded.shape
        (height, width), stored = encoded.block, self._stored[encoded.scale]
        expected = (*lead, -(-rows // height), -(-columns // width))
        if [size for size in stored if size != 1] != [size for size in expected if size != 1]:
            raise ConfigError(
                f"{self._path_of[encoded.scale]}: {encoded.scale} is {tuple(stored)}, which does not fit "
                f"{encoded.codes}, {encoded.shape}, in blocks of {height} x {width}; download the model again"
            )
        return encoded


def _as_float32(scales: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return scales, of which exponents stand for powers of two; 255 is NaN, as in the standard."""
    if dtype not in _EXPONENTS:
        return scales.float()
    return scales.view(torch.uint8).view(torch.float8_e8m0fnu).float()
