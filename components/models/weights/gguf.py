"""Models in GGUF files: their config, and their tensors one at a time, equal to what transformers makes of them.

`AutoConfig` and `from_pretrained` read such files with the gguf package, which needs 3 s for the 98,000 strings
of a vocabulary, and dequantise the whole model on every rank. Here transformers' own fast reader finds
everything in 20 ms, while names, values and dequantisation still come from transformers' and gguf's tables.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from components.config.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Those whose config is a renaming of the header and whose tensors map one to one."""

ROTARY_FACTORS = "rope_freqs.weight"
"""Scaling of the rotary frequencies, which transformers does not read from GGUF files."""


def read_config(path: Path, key: str = "model.path") -> dict[str, Any]:
    """Return the Hugging Face config that a GGUF file describes, `model_type` included.

    Raises:
        ConfigError: Not a GGUF file, or an architecture outside `ARCHITECTURES`.
    """
    from transformers.integrations import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        metadata, tensors = read_gguf_metadata(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={path}: the GGUF file cannot be read: {error}") from error
    architecture = metadata["general.architecture"]
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{key}={path}: GGUF files of architecture {architecture} cannot be trained from here (only "
            f"{', '.join(ARCHITECTURES)}); set {key} to the model's safetensors folder or hub name"
        )
    if ROTARY_FACTORS in tensors:
        logger.warning(
            "%s scales its rotary frequencies, which transformers does not read from GGUF files; state the scaling "
            "in model.config.rope_parameters, or use the model's safetensors folder",
            path.name,
        )
    mapping: dict[str, Any] = GGUF_CONFIG_MAPPING
    config: dict[str, Any] = {}
    for name, value in metadata.items():
        prefix, _, rest = name.partition(".")
        wanted = mapping.get(prefix, {}).get(rest)
        if wanted and not wanted.startswith("_"):
            config[wanted] = value
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config.setdefault("vocab_size", metadata["tokenizer.ggml.tokens"])  # the reader leaves its length
    return config


class GGUFTensors:
    """The tensors of a GGUF file under the names of a model's parameters."""

    def __init__(self, path: Path, twin: PreTrainedModel) -> None:
        """`twin` is the undivided model on the meta device: its names decide the mapping."""
        from transformers.integrations.gguf import GgufHeader
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self._path = path
        header = GgufHeader.from_file(str(path))
        self._start = header.data_start
        # Undoes what the conversion to GGUF does to values, such as the order of rows in Llama's attention.
        self._processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=twin.config.to_dict())
        names = _model_names(header.architecture, twin)
        self._infos = {names.get(info.name, info.name): info for info in header.tensors if info.name != ROTARY_FACTORS}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes under the model's names; a tensor that the model does not have keeps the file's name."""
        return {name: tuple(info.shape) for name, info in self._infos.items()}

    def read(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """Return a block of a tensor in float32; the whole tensor is dequantised for it."""
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


def _model_names(architecture: str, twin: PreTrainedModel) -> dict[str, str]:
    """Names in a GGUF file -> the model's names, by the gguf package's table."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    table = get_tensor_name_map(kind, twin.config.num_hidden_layers)
    names: dict[str, str] = {}
    for name in twin.state_dict():
        module, _, leaf = name.rpartition(".")
        stored = table.get_name(module)
        if stored is not None:
            names[f"{stored}.{leaf}"] = name
    return names
