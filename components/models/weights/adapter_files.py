"""Export of adapters: as a folder in PEFT's format, or merged into the weights of their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from components.config.model_files import locate
from components.config.schema.model import ModelConfig
from components.config.schema.peft import PeftConfig
from components.exchange import broadcast_json, this_rank
from components.models.lora import ADAPTER_PARAMETERS, quantized_layers, row_norms, scaling_of
from components.models.meta_copy import meta_copy
from components.models.weights.gather import WRITER, gathered_tensors
from components.models.weights.new_folder import NewFolder
from components.models.weights.nf4 import unpacked_reader
from components.models.weights.shards import Index
from components.models.weights.weight_files import write_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Read = Callable[[Index], torch.Tensor]
"""Function that returns a block of a full tensor."""


def export_adapter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    base: ModelConfig,
    peft: PeftConfig,
    card: str = "",
) -> Path:
    """Write the adapters of a model on any mesh to `folder`, for `peft.PeftModel.from_pretrained`.

    A collective: call it on all ranks. Ranks may hold different parameters (pipeline stages). The folder is renamed
    into place once it is complete, and replaces an existing one.

    Args:
        base: Config of the base model; its path is written to the adapter's config.
        card: Text of the model card, below its title.

    Raises OSError on every rank if rank 0 could not write.
    """
    folder, failure = Path(folder), None
    tensors = {name: full for name, full in gathered_tensors(model, [], trained=True) if full is not None}
    if this_rank() == WRITER:
        try:
            write_adapter(tokenizer, folder, tensors, adapter_config(model, tensors, base, peft), card)
        except (OSError, ValueError) as error:
            failure = str(error)
    failure = broadcast_json(failure, src=WRITER)
    if failure is not None:
        raise OSError(f"{folder}: the adapter could not be written: {failure}")
    return folder


def write_adapter(
    tokenizer: PreTrainedTokenizerBase, folder: Path, tensors: Mapping[str, torch.Tensor], config: object, card: str
) -> None:
    """Write `folder` from full adapter tensors under the model's names. Raises OSError."""
    new_folder = NewFolder(folder)
    try:
        new_folder.begin()
        stored = {_name_in_file(name): tensor for name, tensor in tensors.items()}
        write_file(new_folder.path / "adapter_model.safetensors", stored)
        config.save_pretrained(new_folder.path)  # type: ignore[attr-defined]
        tokenizer.save_pretrained(new_folder.path)
        base = config.base_model_name_or_path or "a model from scratch"  # type: ignore[attr-defined]
        (new_folder.path / "README.md").write_text(CARD.format(name=folder.name, base=base, text=card.strip()))
        new_folder.publish()
    except BaseException:
        new_folder.abandon()
        raise


def adapter_config(model: PreTrainedModel, names: Iterable[str], base: ModelConfig, peft: PeftConfig) -> object:
    """Return the `peft.LoraConfig` of the adapters whose parameters have these names."""
    from peft import LoraConfig  # takes two seconds to import

    meta_model = meta_copy(model)
    layers = {name.rpartition(".")[0] for name in names}
    leaves = {name.rpartition(".")[2] for name in layers}
    same_leaf = {name for name, _ in meta_model.named_modules() if name.rpartition(".")[2] in leaves}
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name(base),
        revision=base.revision,
        r=peft.rank,
        lora_alpha=peft.alpha,  # type: ignore[arg-type] # annotated as int by PEFT, but used as a float
        lora_dropout=peft.dropout,
        use_rslora=peft.rslora,
        use_dora=peft.dora,
        target_modules=sorted(leaves if same_leaf == layers else layers),
        fan_in_fan_out=not any(isinstance(meta_model.get_submodule(name), nn.Linear) for name in layers),
        inference_mode=True,
    )


def base_name(base: ModelConfig) -> str | None:
    """Return the base model's hub name or absolute folder, or None for a model from scratch.

    For a GGUF file, which PEFT cannot open, return an explanation: PEFT repeats it in its error.
    """
    if base.path is None:
        return None
    files = locate(base.path)
    if files.gguf_file:
        return f"{base.path} (a GGUF file, which PEFT cannot open by itself: load the base model first)"
    return files.name_or_folder


class Merge:
    """Merges adapters into the weights of their layers, block by block, unpacking packed weights."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model`: provides layer types, dtypes and the adapters' scaling; its parameter values are not read."""
        self._meta_model, self._scaling = meta_copy(model), scaling_of(model)
        self._packed = bool(quantized_layers(model))
        self._adapters: dict[str, torch.Tensor] = {}

    def order(self, names: Iterable[str]) -> list[str]:
        """Return the names of weights in their order, each preceded by the names of its adapter's parameters."""
        return [each for name in names for each in (*_adapter_of(name), name)]

    def take(self, name: str, whole: torch.Tensor) -> bool:
        """Store a full tensor if it belongs to an adapter, until `forget`; return whether it does."""
        is_adapter = name.rpartition(".")[2] in ADAPTER_PARAMETERS
        if is_adapter:
            self._adapters[name] = whole
        return is_adapter

    def reader(self, name: str, read: Read) -> Read:
        """Return a function that reads blocks of a weight with its layer's adapter, if any, merged into them."""
        return partial(self._read, name, read)

    def _read(self, name: str, read: Read, index: Index) -> torch.Tensor:
        adapter = [self._adapters[each] for each in _adapter_of(name) if each in self._adapters]
        if not adapter:
            return read(index)
        lora_A, lora_B, *magnitude = adapter
        dtype = self._meta_model.get_parameter(name).dtype
        block = (unpacked_reader(read, lora_A.shape[1]) if self._packed else read)(index)
        linear = isinstance(self._meta_model.get_submodule(name.rpartition(".")[0]), nn.Linear)
        rows, columns = index if linear else reversed(index)  # of (out, in)
        delta = self._scaling * (lora_B[rows] @ lora_A[:, columns])
        merged = block.to(lora_A.dtype) + (delta if linear else delta.T)
        if magnitude:  # needs norms of complete rows, which blocks of matrices are
            merged *= (magnitude[0][rows] / row_norms(merged))[:, None]
        return merged.to(dtype)

    def forget(self, name: str) -> None:
        """Release the adapter of a weight that has been written."""
        for each in _adapter_of(name):
            self._adapters.pop(each, None)


def _adapter_of(name: str) -> list[str]:
    """Return the names of the adapter parameters that belong to the weight `name`; empty for other parameters."""
    path, _, leaf = name.rpartition(".")
    return [f"{path}.{each}" for each in ADAPTER_PARAMETERS] if leaf == "weight" else []


def _name_in_file(name: str) -> str:
    suffix = "" if name.endswith("lora_magnitude_vector") else ".weight"
    return f"base_model.model.{name}{suffix}"


CARD = """---
library_name: peft
pipeline_tag: text-generation
---

# {name}

An adapter for {base}.

{text}

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{name}")
```
"""
