"""Weights as they are stored: safetensors and GGUF files, read block by block, and the names of a model's tensors.

GGUF: `AutoConfig` and `from_pretrained` use the gguf package, which takes 3 s to parse a vocabulary of 98,000 strings,
and dequantize the complete model on every rank. This module uses transformers' own header reader (20 ms) and reads one
tensor at a time. Names, config values and dequantization still come from the tables of transformers and gguf, so the
weights equal those that transformers loads.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from components.config.model_files import ModelFiles
from components.models.tokenizer import explain_loading_error
from components.protocol.errors import ConfigError
from components.protocol.safe_parsing import load_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
STORED_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Dtypes by their names in safetensors headers."""
_FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
_MEAN_ROWS = 4096
"""Rows of an embedding that are read at a time for their mean."""
logger = logging.getLogger(__name__)
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Supported architectures: their config is a renaming of the header, and their tensors map one to one."""
_ROTARY_FACTORS = "rope_freqs.weight"
"""Tensor with the scaling of rotary frequencies, which transformers does not read from GGUF files."""


class StoredTensors(Protocol):
    """Reader of the tensors in a model's files."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by stored name."""

    def not_floats(self) -> dict[str, str]:
        """Return the dtypes of the tensors that hold no floating-point numbers, as the files call them."""

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a block of a stored tensor."""


class SafetensorsTensors:
    """Tensors of safetensors files under their stored names."""

    def __init__(self, paths: list[Path]) -> None:
        """Read the headers.

        Raises ConfigError with the path of a file that is missing or damaged, or holds a tensor of another file.
        """
        self._path_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        for path in paths:
            header = _read_header(path)
            if repeated := sorted(header.keys() & self._path_of.keys()):
                raise ConfigError(
                    f"{path}: holds {repeated[0]}, which {self._path_of[repeated[0]].name} holds too; remove the file "
                    "that is not the model's"
                )
            self._path_of |= dict.fromkeys(header, path)
            self._shapes |= {name: shape for name, (shape, _) in header.items()}
            self._dtypes |= {name: dtype for name, (_, dtype) in header.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by stored name."""
        return self._shapes

    def dtypes(self) -> dict[str, str]:
        """Return dtypes by stored name, as the files call them."""
        return self._dtypes

    def not_floats(self) -> dict[str, str]:
        """Return the dtypes of the tensors that hold no floating-point numbers, as the files call them."""
        return {name: dtype for name, dtype in self._dtypes.items() if dtype not in _FLOATS}

    def on_meta(self, name: str) -> torch.Tensor:
        """Return a tensor with the shape and the dtype of a stored one, without memory. Raises ConfigError."""
        if self._dtypes[name] not in STORED_DTYPES:
            raise ConfigError(
                f"{self._path_of[name]}: {name} is of dtype {self._dtypes[name]}, which cannot be copied; use a model "
                f"with dtypes of {', '.join(STORED_DTYPES)}"
            )
        return torch.empty(self._shapes[name], dtype=STORED_DTYPES[self._dtypes[name]], device="meta")

    def metadata(self) -> dict[str, str]:
        """Return the texts in the headers of the files. Raises ConfigError."""
        texts: dict[str, str] = {}
        for path in dict.fromkeys(self._path_of.values()):
            with _opened(path) as file:
                texts |= file.metadata() or {}
        return texts

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a block of a tensor in its stored dtype; only the block's bytes are read. Raises ConfigError."""
        # Reopened for each block: while a file stays mapped, every page read counts towards this rank's memory.
        with _opened(self._path_of[name]) as file:
            return file.get_slice(name)[index].clone() if index else file.get_tensor(name).clone()


def find_safetensors(files: ModelFiles, revision: str | None, *, download: bool = True) -> list[Path]:
    """Return the model's weight files from its folder, or from the hub after downloading them.

    Args:
        download: Whether to download files of the hub that are not in the cache.

    Raises:
        ConfigError: There are no safetensors files, the index is invalid or names missing files, or the hub cannot be
            reached.
    """
    single = find_file(files, SINGLE_FILE, revision, download=download)
    if single is not None:
        return [single]
    index = find_file(files, INDEX_FILE, revision, download=download)
    if index is None:
        raise ConfigError(
            f"model.path={files.name_or_folder}: has no {SINGLE_FILE} or {INDEX_FILE}; convert its weights to "
            "safetensors, or set model.init=random to start from scratch"
        )
    try:
        named = list(dict(load_json(index)["weight_map"]).values())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index}: not a valid index of safetensors files: {error!r}") from error
    if outside := [name for name in named if not _is_inside(name)]:
        raise ConfigError(
            f"{index}: lists {outside[0]!r}, but weight files must be inside the folder; correct the index, or do not "
            "use a model from this source"
        )
    names = sorted(set(named))
    paths = [find_file(files, name, revision, download=download) for name in names]
    missing = [name for name, path in zip(names, paths, strict=True) if path is None]
    if missing:
        raise ConfigError(
            f"model.path={files.name_or_folder}: {INDEX_FILE} lists files that do not exist: {', '.join(missing)}"
        )
    return [path for path in paths if path is not None]


def _is_inside(name: object) -> bool:
    """Return whether a name is a path inside the folder; links are allowed, as files in the hub's cache are links."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    is_short = all(len(part.encode()) <= 255 for part in path.parts)  # the limit of file systems
    return is_short and not path.is_absolute() and ".." not in path.parts


def find_file(
    files: ModelFiles, name: str, revision: str | None, *, download: bool = True, key: str = "model.path"
) -> Path | None:
    """Return a file of the model's folder, or of the hub after downloading it; None if there is none.

    Errors name `key`. Without `download`, it is None if the cache of the hub does not hold it.
    """
    if files.is_local:
        path = Path(files.name_or_folder) / name
        return path if path.is_file() else None
    from transformers.utils import cached_file

    try:
        cached = cached_file(
            files.name_or_folder,
            name,
            revision=revision,
            local_files_only=not download,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=download,
        )
    except (OSError, ValueError) as error:
        raise explain_loading_error(error, files, key, "weights") from error
    return Path(cached) if cached else None


def require_finite(values: torch.Tensor, where: str) -> torch.Tensor:
    """Return `values`. Raises ConfigError if one is NaN or infinite; the sum takes 0.1 s per GiB."""
    if values.is_floating_point():
        summed = values if values.element_size() > 1 else values.float()  # no sum of float8
        # A sum of finite values may overflow.
        if not summed.sum(dtype=torch.float32).isfinite() and not summed.isfinite().all():
            raise ConfigError(f"{where} holds NaN or infinite values; use weights from before they diverged")
    return values


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shapes and dtypes, as safetensors calls them, by name."""
    with _opened(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (tuple(each.get_shape()), each.get_dtype()) for name, each in slices.items()}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises ConfigError if it cannot be read, in the body too."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file: {error}") from error


def read_config(path: Path, key: str = "model.path") -> dict[str, Any]:
    """Return the values of the Hugging Face config that a GGUF file describes, including `model_type`.

    Raises:
        ConfigError: The file is not GGUF, or its architecture is not in `_ARCHITECTURES`.
    """
    from transformers.integrations import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        metadata, tensors = read_gguf_metadata(str(path))
    except (OSError, ValueError, LookupError, ArithmeticError, MemoryError, RecursionError, struct.error) as error:
        raise ConfigError(f"{key}={path}: the GGUF file cannot be read: {error}") from error
    architecture = metadata["general.architecture"]
    if architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{key}={path}: GGUF files of architecture {architecture} are not supported (only "
            f"{', '.join(_ARCHITECTURES)}); set {key} to the model's safetensors folder or hub name"
        )
    if _ROTARY_FACTORS in tensors:
        logger.warning(
            "%s scales its rotary frequencies, which transformers does not read from GGUF files; set the scaling "
            "in model.config.rope_parameters, or use the model's safetensors folder",
            path.name,
        )
    mapping: dict[str, Any] = GGUF_CONFIG_MAPPING
    config: dict[str, Any] = {}
    for name, value in metadata.items():
        prefix, _, rest = name.partition(".")
        config_key = mapping.get(prefix, {}).get(rest)
        if config_key and not config_key.startswith("_"):
            config[config_key] = value
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config.setdefault("vocab_size", metadata["tokenizer.ggml.tokens"])  # the reader replaces arrays by their length
    return config


class GGUFTensors:
    """Tensors of a GGUF file under the names of a model's parameters."""

    def __init__(self, path: Path, meta_model: PreTrainedModel) -> None:
        """`meta_model`: the unsharded model on the meta device, which provides the parameter names."""
        from transformers.integrations.gguf import GgufHeader
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self._path = path
        header = GgufHeader.from_file(str(path))
        self._start = header.data_start
        # Reverts changes that the conversion to GGUF makes to values, such as the row order of Llama's attention.
        self._processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(
            config=meta_model.config.to_dict()
        )
        names = _model_names(header.architecture, meta_model)
        self._infos = {names.get(info.name, info.name): info for info in header.tensors if info.name != _ROTARY_FACTORS}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by the model's names, or by the file's name for a tensor that the model lacks."""
        return {name: tuple(info.shape) for name, info in self._infos.items()}

    def not_floats(self) -> dict[str, str]:
        """Return the types of the tensors of integers, by name."""
        from gguf import GGMLQuantizationType

        kinds = {name: GGMLQuantizationType(info.ggml_type).name for name, info in self._infos.items()}
        return {name: kind for name, kind in kinds.items() if kind in ("I8", "I16", "I32", "I64")}

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a block of a tensor in float32; this dequantizes the complete tensor."""
        import numpy as np
        from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

        info = self._infos[name]
        kind = GGMLQuantizationType(info.ggml_type)
        data: np.ndarray = np.fromfile(self._path, dtype=np.uint8, count=info.nbytes, offset=self._start + info.offset)
        if kind == GGMLQuantizationType.F32:
            data = data.view(np.float32).reshape(info.shape)
        elif kind == GGMLQuantizationType.F16:
            data = data.view(np.float16).reshape(info.shape)
        else:
            data = data.reshape(quant_shape_to_byte_shape(info.shape, kind))
        values = self._processor.process(dequantize(data, kind), info.name).weights
        return torch.from_numpy(np.ascontiguousarray(values))[index]


class GrownTensors:
    """Stored tensors, of which those of the vocabulary have rows for new tokens: the mean of the other tokens' rows."""

    def __init__(self, stored: StoredTensors, names: Collection[str], rows: range) -> None:
        """`names`: stored names of the embedding and the head. `rows`: ids of the new tokens, after all others."""
        self._stored, self._names, self._rows = stored, names, rows
        self._means: dict[str, torch.Tensor] = {}
        self.not_floats = stored.not_floats

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by stored name."""
        shapes = self._stored.shapes()
        return shapes | {name: (max(shapes[name][0], self._rows.stop), *shapes[name][1:]) for name in self._names}

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a block of a stored tensor."""
        if name not in self._names or index[0].stop <= self._rows.start or index[0].start >= self._rows.stop:
            return self._stored.read(name, index)
        wanted, rest = index[0], index[1:]
        before, after = slice(wanted.start, self._rows.start), slice(self._rows.stop, wanted.stop)
        new = min(wanted.stop, self._rows.stop) - max(wanted.start, self._rows.start)
        mean = self._mean(name)[rest]
        parts = [self._stored.read(name, (part, *rest)).to(mean) for part in (before, after) if part.start < part.stop]
        parts.insert(before.start < before.stop, mean.expand(new, *mean.shape))
        return torch.cat(parts)

    def _mean(self, name: str) -> torch.Tensor:
        """Return the mean of the other tokens' rows in float64; computed once, in blocks of rows."""
        if name not in self._means:
            rows, *rest = self._stored.shapes()[name]
            rows, columns = min(rows, self._rows.start), tuple(slice(0, size) for size in rest)
            blocks = [slice(start, min(start + _MEAN_ROWS, rows)) for start in range(0, rows, _MEAN_ROWS)]
            sums = [self._stored.read(name, (block, *columns)).double().sum(0) for block in blocks]
            self._means[name] = torch.stack(sums).sum(0) / rows
        return self._means[name]


def _model_names(architecture: str, meta_model: PreTrainedModel) -> dict[str, str]:
    """Return GGUF names -> the model's names, by the gguf package's table."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(kind, meta_model.config.num_hidden_layers)
    names: dict[str, str] = {}
    for name in meta_model.state_dict():
        module, _, leaf = name.rpartition(".")
        stored = table.get_name(module)
        if stored is not None:
            names[f"{stored}.{leaf}"] = name
    return names


def saved_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers in the model's order, each once, under its first name.

    `state_dict` also makes FSDP reshard parameters that a forward left unsharded.
    """
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return the additional names of shared parameters -> the first name of each."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original != name:
            tied[name] = original
    return tied
