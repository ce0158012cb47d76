"""Config and tensors of models in GGUF files, read one tensor at a time, equal to what transformers loads.

`AutoConfig` and `from_pretrained` use the gguf package, which takes 3 s to parse a vocabulary of 98,000 strings, and
dequantize the complete model on every rank. This module uses transformers' own header reader (20 ms). Names, config
values and dequantization still come from the tables of transformers and gguf.
"""

from __future__ import annotations

import logging
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from components.config.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Supported architectures: their config is a renaming of the header, and their tensors map one to one."""

ROTARY_FACTORS = "rope_freqs.weight"
"""Tensor with the scaling of rotary frequencies, which transformers does not read from GGUF files."""


def read_config(path: Path, key: str = "model.path") -> dict[str, Any]:
    """Return the values of the Hugging Face config that a GGUF file describes, including `model_type`.

    Raises:
        ConfigError: The file is not GGUF, or its architecture is not in `ARCHITECTURES`.
    """
    from transformers.integrations import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        metadata, tensors = read_gguf_metadata(str(path))
    except (OSError, ValueError, LookupError, ArithmeticError, MemoryError, RecursionError, struct.error) as error:
        raise ConfigError(f"{key}={path}: the GGUF file cannot be read: {error}") from error
    architecture = metadata["general.architecture"]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{key}={path}: GGUF files of architecture {architecture} are not supported (only "
            f"{', '.join(ARCHITECTURES)}); set {key} to the model's safetensors folder or hub name"
        )
    if ROTARY_FACTORS in tensors:
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
        self._infos = {names.get(info.name, info.name): info for info in header.tensors if info.name != ROTARY_FACTORS}

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
