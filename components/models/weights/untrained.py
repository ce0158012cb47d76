"""Parts of a pretrained model that training on text leaves as they are: encoders of images and sound, MTP layers.

transformers builds some models without them, so a model does not hold what its files hold. An export copies them from
the files, block by block, and has the config, the names and the processor files of the pretrained model. Nothing is
copied from a GGUF file.
"""

from __future__ import annotations

import copy
import logging
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from components.config.model_files import locate
from components.config.schema.model import ModelConfig, WeightInit
from components.json_collectives import this_rank
from components.models.anatomy import encoder_parameters, kept_in_float32
from components.models.build import BUILT_FROM, DECODED_FROM, load_config
from components.models.layers import meta_copy
from components.models.weights.loading import LoadPlan, plan_loading
from components.models.weights.quantized_files import open_safetensors
from components.models.weights.shards import local_part
from components.models.weights.weight_sources import SafetensorsTensors, find_file
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "audio_tokenizer_config.json",
    "chat_template.json",
)
"""Files of a processor of images, videos and sound, without those that a tokenizer writes."""
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_MTP_KEYS = re.compile("mtp|nextn")
"""Keys of a config.json that describe layers that predict further tokens."""
_CONTAINERS = ("model", "language_model", "layers")
"""Components of tensor names that say nothing about the part they belong to."""


@dataclass(frozen=True, slots=True)
class Untrained:
    """What an export copies from the files of a pretrained model."""

    base: ModelConfig
    stored: SafetensorsTensors
    plan: LoadPlan
    config: PreTrainedConfig
    """Config of the files; that of the trained model is a part of it if the model is only its decoder."""
    stored_config: dict[str, Any]
    """The same, as it is in config.json."""
    meta_model: PreTrainedModel
    """The trained model, unsharded."""
    held: dict[str, str]
    """Tensors that the model holds, but that text does not use -> stored name."""
    prefixes: dict[tuple[str, str], None]
    """Prefixes of the model's names, and those that the files have in their place."""
    quantized: set[str]
    """Modules whose tensors are not rounded: they hold integers or float8, and scales for them."""

    def __str__(self) -> str:
        counts = Counter(map(_part, self.names))
        return ", ".join(f"{part}.* ({count} tensor{'s' if count > 1 else ''})" for part, count in counts.items())

    @property
    def names(self) -> list[str]:
        """Stored names of the tensors to copy."""
        return [*self.held.values(), *self.plan.rest]

    def tensor(self, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        """Return a stored tensor on the meta device, in the dtype to write it in: rounded to `dtype`, never widened."""
        tensor = self.stored.on_meta(name)
        if dtype is None or name.rpartition(".")[0] in self.quantized:
            return tensor
        if torch.promote_types(tensor.dtype, dtype) == dtype:
            return tensor
        kept = kept_in_float32(self.meta_model, dtype)
        return tensor.to(torch.float32 if kept is not None and kept.search(name) else dtype)

    def name_on_disk(self, name: str) -> str:
        """Return the name in the files of a tensor that has `name` where transformers saves the trained model alone."""
        for ours, theirs in self.prefixes:
            renamed = f"{theirs}{name.removeprefix(ours)}"
            if name.startswith(ours) and renamed in self.stored.shapes():
                return renamed
        return name

    def whole_config(self, trained: PreTrainedConfig) -> PreTrainedConfig:
        """Return the config of the files with `trained` as its part, or `trained` itself if it is the whole.

        Keys of the files that describe MTP layers are in it, even if transformers reads them into others.
        """
        whole = trained
        if type(trained) is not type(self.config):
            whole = copy.deepcopy(self.config)
            trained.architectures = whole.get_text_config().architectures
            whole.update({"text_config": trained, "dtype": trained.dtype})
        text = self.stored_config.get("text_config") or self.stored_config
        for part, values in ((whole, self.stored_config), (whole.get_text_config(), text)):
            lost = {key for key in values if _MTP_KEYS.search(key)} - part.to_dict().keys()
            vars(part).update({key: values[key] for key in lost})  # some are properties without a setter
        return whole

    def copy_processor(self, folder: Path) -> None:
        """Copy the files of the processor of images or sound that `folder` lacks, if there is one. Raises OSError."""
        if not self.held and type(self.config) is type(self.meta_model.config):
            return
        names = {name for name in _PROCESSOR_FILES if not (folder / name).exists()}
        if (folder / "chat_template.jinja").exists():
            names.discard("chat_template.json")  # its older form
        files = locate(str(self.base.path))
        for name in sorted(names):
            try:
                source = find_file(files, name, self.base.revision)
            except ConfigError as error:  # neither in the cache nor known to be missing, and the hub cannot be reached
                logger.warning("%s is not copied to the export: %s", name, error)
                continue
            if source is not None:
                shutil.copyfile(source, folder / name)


def find_untrained(model: PreTrainedModel) -> Untrained | None:
    """Return what an export of a model on any mesh copies from the files it was built from; None if that is nothing.

    Only the headers of the files are read. If neither the class nor the config of the model announces such tensors,
    files of the hub are not downloaded for it, and the result is None without them.

    Raises:
        ConfigError: The files are missing, damaged or unreachable, or hold such a tensor of an unknown dtype.
    """
    from transformers import PreTrainedConfig

    base: ModelConfig | None = vars(model).get(BUILT_FROM)
    if base is None or base.path is None or base.init == WeightInit.random or locate(base.path).gguf_file:
        return None
    meta_model, config = meta_copy(model), load_config(base)
    values, _ = PreTrainedConfig.get_config_dict(locate(base.path).name_or_folder, revision=base.revision)
    encoders = encoder_parameters(meta_model)
    is_part = type(config) is not type(meta_model.config)
    keys = {**values, **(values.get("text_config") or {})}
    is_announced = bool(is_part or encoders or meta_model._keys_to_ignore_on_load_unexpected)
    is_announced |= any(keys[key] for key in keys if _MTP_KEYS.search(key))
    try:
        stored = open_safetensors(locate(base.path), base.revision, download=is_announced)
    except ConfigError:
        if is_announced:
            raise
        return None
    plan = plan_loading(meta_model, list(stored.shapes()), base)
    held = {name: source for name, source in plan.direct.items() if name in encoders}
    if not (is_part or held or plan.rest):
        return None
    prefixes = dict.fromkeys(_prefixes(*pair) for pair in plan.direct.items())
    names = [*held.values(), *plan.rest]
    quantized = {name.rpartition(".")[0] for name in names if stored.on_meta(name).dtype not in _FLOATS}
    return Untrained(base, stored, plan, config, values, meta_model, held, prefixes, quantized)


def file_notes(model: PreTrainedModel) -> list[str]:
    """Return the lines of rank 0's banner about weights that are decoded, and tensors that are not trained.

    Empty if there are none, and in a simulation.
    """
    if this_rank() != 0 or any(isinstance(local_part(parameter), FakeTensor) for parameter in model.parameters()):
        return []
    quantization = _decoded_from(model)
    notes = [f"weights: decoded from {quantization} to bfloat16; exports are not quantized"] if quantization else []
    try:
        untrained = find_untrained(model)
    except ConfigError as error:  # a run that resumes needs no weights of the base model before its export
        return [*notes, f"tensors that are not trained are unknown: {error}"]
    if untrained is not None and untrained.names:
        notes.append(f"not trained, copied to exports from {untrained.base.path}: {untrained}")
    return notes


def with_decoding(card: str, model: PreTrainedModel) -> str:
    """Return the text of a model card, with a sentence about the format of weights that were decoded."""
    method = _decoded_from(model)
    if method is None:
        return card
    return f"{card.strip()}\n\nBefore the training, the weights were decoded from {method} to bfloat16."


def _decoded_from(model: PreTrainedModel) -> str | None:
    method: str | None = vars(model).get(DECODED_FROM)
    return method


def _prefixes(ours: str, theirs: str) -> tuple[str, str]:
    """Return what remains of two names without the components at their ends that are equal."""
    first, second = ours.split("."), theirs.split(".")
    while first and second and first[-1] == second[-1]:
        first.pop()
        second.pop()
    return "".join(f"{each}." for each in first), "".join(f"{each}." for each in second)


def _part(name: str) -> str:
    """Return the part of a model that a tensor belongs to, such as model.visual, mtp or model.layers.61."""
    components = name.split(".")
    last = len(components) - 1
    first = next((index for index, each in enumerate(components[:-1]) if each not in _CONTAINERS), last)
    return ".".join(components[: first + 1])
