"""Export of adapters: as a folder in PEFT's format, or merged into the weights of their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from components.config.schema.model import ModelConfig
from components.config.schema.run import PeftConfig
from components.config.shape import GGUF_BASE, locate
from components.exchange import broadcast_json, this_rank
from components.models.anatomy import is_transposed, stores_transposed
from components.models.build import IMAGE_TEXT
from components.models.classifier import SCORE, TokenScores
from components.models.layers import meta_copy
from components.models.lora import FACTORS, expert_factors, quantized_layers, scaling_of
from components.models.lora_linear import ADAPTER_PARAMETERS, row_norms
from components.models.quantization import transposed_reader, unpacked_reader
from components.models.tokenizer import save_tokenizer
from components.models.weights.shards import WRITER, Index, gathered_tensors
from components.models.weights.weight_files import NewFolder, write_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CAUSAL_LM = "AutoModelForCausalLM"
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
            config = adapter_config(model, tensors, base, peft)
            write_adapter(tokenizer, folder, tensors, config, card)
        except (OSError, ValueError) as error:
            failure = str(error)
    failure = broadcast_json(failure, src=WRITER)
    if failure is not None:
        raise OSError(f"{folder}: the adapter could not be written: {failure}")
    return folder


def write_adapter(
    tokenizer: PreTrainedTokenizerBase, folder: Path, tensors: Mapping[str, torch.Tensor], config: object, card: str
) -> None:
    """Write `folder` from full tensors of adapters and the score head under the model's names. Raises OSError."""
    new_folder = NewFolder(folder)
    try:
        new_folder.begin()
        stored = _in_peft_layout(tensors)
        write_file(new_folder.path / "adapter_model.safetensors", stored)
        config.save_pretrained(new_folder.path)  # type: ignore[attr-defined]
        if f"{SCORE}.weight" in tensors:
            tokenizer.save_pretrained(new_folder.path)
        else:
            save_tokenizer(tokenizer, new_folder.path)
        (new_folder.path / "README.md").write_text(_card(folder.name, config, card, tensors), encoding="utf-8")
        new_folder.publish()
    except BaseException:
        new_folder.abandon()
        raise


def _card(name: str, config: Any, text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    base = config.base_model_name_or_path or "a model from scratch"
    auto_class = (config.auto_mapping or {}).get("base_model_class", CAUSAL_LM)
    head = tensors.get(f"{SCORE}.weight")
    return _CARD.format(
        name=name,
        base=base,
        text=text.strip(),
        task="text-generation" if head is None else "text-classification",
        auto_class=auto_class if head is None else "AutoModelForSequenceClassification",
        options="" if head is None else f", num_labels={len(head)}",
    )


def adapter_config(model: PreTrainedModel, names: Iterable[str], base: ModelConfig, peft: PeftConfig) -> object:
    """Return the `peft.LoraConfig` of the adapters whose parameters have these names.

    PEFT stores the weights of a score head in the same file (`modules_to_save`).
    """
    from peft import LoraConfig  # takes two seconds to import

    meta_model, scores, loader = meta_copy(model), isinstance(model, TokenScores), base_class(model)
    layers = {name.rpartition(".")[0] for name in names if not name.endswith(FACTORS) and not _is_head(name)}
    leaves = {name.rpartition(".")[2] for name in layers}
    same_leaf = {name for name, _ in meta_model.named_modules() if name.rpartition(".")[2] in leaves}
    linear = any(isinstance(meta_model.get_submodule(name), nn.Linear) for name in layers)
    return LoraConfig(
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        modules_to_save=[SCORE] if scores else None,
        auto_mapping={"base_model_class": loader, "parent_library": "transformers"} if loader != CAUSAL_LM else None,
        base_model_name_or_path=base_name(base),
        revision=base.revision,
        r=peft.rank,
        lora_alpha=peft.alpha,  # type: ignore[arg-type] # annotated as int by PEFT, but used as a float
        lora_dropout=peft.dropout,
        use_rslora=peft.rslora,
        use_dora=peft.dora,
        target_modules=sorted(leaves if same_leaf == layers else layers),
        target_parameters=list(peft.target_parameters) or None,
        fan_in_fan_out=bool(layers) and not linear,
        inference_mode=True,
    )


def base_class(model: PreTrainedModel) -> str:
    """Return the class of transformers that loads a model with an LM head."""
    return "AutoModelForImageTextToText" if model.config.model_type in IMAGE_TEXT else CAUSAL_LM


def base_name(base: ModelConfig) -> str | None:
    """Return the base model's hub name or absolute folder, or None for a model from scratch.

    For a GGUF file, which PEFT cannot open, return an explanation: PEFT repeats it in its error.
    """
    if base.path is None:
        return None
    files = locate(base.path)
    if files.gguf_file:
        return f"{base.path}{GGUF_BASE}"
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
        is_adapter = name.rpartition(".")[2] in ADAPTER_PARAMETERS or name.endswith(FACTORS)
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
        if lora_A.dim() == 3:
            return self._read_experts(name, read(index).to(lora_A.dtype), lora_A, lora_B, index).to(dtype)
        transposed = is_transposed(self._meta_model.get_submodule(name.rpartition(".")[0]))
        if self._packed:  # as (out, in)
            read = unpacked_reader(read, lora_A.shape[1])
        elif transposed:
            read = transposed_reader(read)
        rows, columns = reversed(index) if transposed else index  # of (out, in)
        # DoRA needs the norms of complete rows, which blocks are unless the matrix is stored transposed.
        width = slice(0, lora_A.shape[1]) if magnitude else columns
        merged = read((rows, width)).to(lora_A.dtype) + self._scaling * (lora_B[rows] @ lora_A[:, width])
        if magnitude:
            merged = (merged * (magnitude[0][rows] / row_norms(merged))[:, None])[:, columns]
        return (merged.T if transposed else merged).to(dtype)

    def _read_experts(
        self, name: str, block: torch.Tensor, lora_A: torch.Tensor, lora_B: torch.Tensor, index: Index
    ) -> torch.Tensor:
        """Return a block of the experts' matrix with the factors (experts, rank, in) and (experts, out, rank) added."""
        experts, *rest = index
        transposed = stores_transposed(self._meta_model.get_submodule(name.rpartition(".")[0]))
        rows, columns = reversed(rest) if transposed else rest  # of (out, in)
        delta = self._scaling * (lora_B[experts, rows] @ lora_A[experts, :, columns])
        return block + (delta.mT if transposed else delta)

    def forget(self, name: str) -> None:
        """Release the adapter of a weight that has been written."""
        for each in _adapter_of(name):
            self._adapters.pop(each, None)


def _adapter_of(name: str) -> list[str]:
    """Return the names that adapter parameters of the weight `name` have; it need not have any."""
    path, _, leaf = name.rpartition(".")
    return [f"{path}.{each}" for each in ADAPTER_PARAMETERS] if leaf == "weight" else expert_factors(name)


def _in_peft_layout(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return adapter tensors as PEFT stores them, by their names in its files.

    PEFT wraps a module of experts once for each adapted matrix, the first one innermost, and flattens the factors of
    all experts: A to (experts * rank, in), with the ranks of an expert together, and B to (out, rank * experts), with
    the experts of a rank together.
    """
    matrices: dict[str, list[str]] = {}
    for name in tensors:
        if name.endswith(FACTORS[0]):
            matrices.setdefault(name.rpartition(".")[0], []).append(name.removesuffix(FACTORS[0]))
    stored = {_name_in_file(name): tensor for name, tensor in tensors.items() if not name.endswith(FACTORS)}
    for path, of_module in matrices.items():
        for index, matrix in enumerate(of_module):
            lora_A, lora_B = (tensors[factor] for factor in expert_factors(matrix))
            wrapper = path + ".base_layer" * (len(of_module) - 1 - index)
            stored[_name_in_file(f"{wrapper}.lora_A")] = lora_A.flatten(0, 1)
            stored[_name_in_file(f"{wrapper}.lora_B")] = lora_B.permute(1, 2, 0).flatten(1).contiguous()
    return stored


def _is_head(name: str) -> bool:
    return name.startswith(f"{SCORE}.")


def _name_in_file(name: str) -> str:
    suffix = "" if name.endswith("lora_magnitude_vector") or _is_head(name) else ".weight"
    return f"base_model.model.{name}{suffix}"


_CARD = """---
library_name: peft
pipeline_tag: {task}
---

# {name}

An adapter for {base}.

{text}

```python
from peft import PeftModel
from transformers import {auto_class}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = PeftModel.from_pretrained({auto_class}.from_pretrained("{base}"{options}), "{name}")
```
"""
