"""Adapters on their way out: as a folder in PEFT's own format, or merged into the weights of their layers."""

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
from components.models.lora import ADAPTER_PARAMETERS, quantized_layers, row_norms, scaling_of
from components.models.meta_copy import meta_twin
from components.models.weights.gather import WRITER, gathered_tensors, told_by_writer, writer_rank
from components.models.weights.new_folder import NewFolder
from components.models.weights.nf4 import unpacking
from components.models.weights.shards import Index
from components.models.weights.weight_files import write_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Read = Callable[[Index], torch.Tensor]
"""Returns a block of a tensor."""


def export_adapter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    base: ModelConfig,
    peft: PeftConfig,
    card: str = "",
) -> Path:
    """Write the adapters of a model on any mesh as `folder`, which `peft.PeftModel.from_pretrained` opens.

    Call it on all ranks; each may hold other parameters (pipeline stages). The folder appears once it is complete,
    replacing an older one.

    Args:
        base: Names the model that the adapters belong to.
        card: Text for the model card, below its title.

    Raises OSError on every rank, when rank 0 could not write.
    """
    folder, problem = Path(folder), None
    tensors = {name: full for name, full in gathered_tensors(model, [], trained=True) if full is not None}
    if writer_rank() == WRITER:
        try:
            write_adapter(tokenizer, folder, tensors, adapter_config(model, tensors, base, peft), card)
        except (OSError, ValueError) as error:
            problem = str(error)
    problem = told_by_writer(problem)
    if problem is not None:
        raise OSError(f"{folder}: the adapter could not be written: {problem}")
    return folder


def write_adapter(
    tokenizer: PreTrainedTokenizerBase, folder: Path, tensors: Mapping[str, torch.Tensor], config: object, card: str
) -> None:
    """Write `folder` from whole adapters under the model's names. Raises OSError."""
    made = NewFolder(folder)
    try:
        made.begin()
        stored = {_name_in_file(name): tensor for name, tensor in tensors.items()}
        write_file(made.path / "adapter_model.safetensors", stored)
        config.save_pretrained(made.path)  # type: ignore[attr-defined]
        tokenizer.save_pretrained(made.path)
        base = config.base_model_name_or_path or "a model from scratch"  # type: ignore[attr-defined]
        (made.path / "README.md").write_text(CARD.format(name=folder.name, base=base, text=card.strip()))
        made.publish()
    except BaseException:
        made.abandon()
        raise


def adapter_config(model: PreTrainedModel, names: Iterable[str], base: ModelConfig, peft: PeftConfig) -> object:
    """Return the `peft.LoraConfig` of the adapters whose parameters have these names."""
    from peft import LoraConfig  # two seconds that only an export pays

    twin = meta_twin(model)
    layers = {name.rpartition(".")[0] for name in names}
    leaves = {name.rpartition(".")[2] for name in layers}
    so_called = {name for name, _ in twin.named_modules() if name.rpartition(".")[2] in leaves}
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name(base),
        revision=base.revision,
        r=peft.rank,
        lora_alpha=peft.alpha,  # type: ignore[arg-type] # whole in peft's annotation, any number in its formula
        lora_dropout=peft.dropout,
        use_rslora=peft.rslora,
        use_dora=peft.dora,
        target_modules=sorted(leaves if so_called == layers else layers),
        fan_in_fan_out=not any(isinstance(twin.get_submodule(name), nn.Linear) for name in layers),
        inference_mode=True,
    )


def base_name(base: ModelConfig) -> str | None:
    """Return what PEFT can open as the base model: a hub name or an absolute folder; else a sentence that says why not.

    PEFT repeats it where it fails to open the base model. None: the model was made from scratch.
    """
    if base.path is None:
        return None
    files = locate(base.path)
    if files.gguf_file:
        return f"{base.path} (a GGUF file, which PEFT cannot open by itself: load the base model first)"
    return files.name_or_folder


class Merge:
    """Adds adapters to the weights of their layers, block by block; to packed ones as they are unpacked."""

    def __init__(self, model: PreTrainedModel) -> None:
        """model: Tells what kinds of layers there are, and by what adapters are scaled; its values do not count."""
        self._twin, self._scaling = meta_twin(model), scaling_of(model)
        self._packed = bool(quantized_layers(model))
        self._adapters: dict[str, torch.Tensor] = {}

    def order(self, names: Iterable[str]) -> list[str]:
        """Return the names of weights in their order, each behind the names of its adapter's parameters."""
        return [each for name in names for each in (*_adapter_of(name), name)]

    def take(self, name: str, whole: torch.Tensor) -> bool:
        """Keep a tensor until its layer's weight comes, if it is an adapter's; return whether it is."""
        mine = name.rpartition(".")[2] in ADAPTER_PARAMETERS
        if mine:
            self._adapters[name] = whole
        return mine

    def reader(self, name: str, read: Read) -> Read:
        """Return what reads blocks of a tensor with the adapter of its layer, if it has one, added."""
        return partial(self._read, name, read)

    def _read(self, name: str, read: Read, index: Index) -> torch.Tensor:
        adapter = [self._adapters[each] for each in _adapter_of(name) if each in self._adapters]
        if not adapter:
            return read(index)
        first, second, *magnitude = adapter
        dtype = self._twin.get_parameter(name).dtype
        block = (unpacking(read, first.shape[1]) if self._packed else read)(index)
        linear = isinstance(self._twin.get_submodule(name.rpartition(".")[0]), nn.Linear)
        rows, columns = index if linear else reversed(index)  # of (out, in)
        added = self._scaling * (second[rows] @ first[:, columns])
        merged = block.to(first.dtype) + (added if linear else added.T)
        if magnitude:  # of whole rows: so blocks of a matrix are cut
            merged *= (magnitude[0][rows] / row_norms(merged))[:, None]
        return merged.to(dtype)

    def forget(self, name: str) -> None:
        """Let go of the adapter of a weight that is done."""
        for each in _adapter_of(name):
            self._adapters.pop(each, None)


def _adapter_of(name: str) -> list[str]:
    """Names of the parameters that an adapter beside the weight `name` would have; none for what is no weight."""
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

An adapter of {base}.

{text}

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{name}")
```
"""
