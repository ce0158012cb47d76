"""Writing of weights: safetensors files of bounded size, folders that get their name only once they are complete, and
adapters in PEFT's format or merged into the weights of their layers.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import nn

from components.config.model_files import ADAPTER_FILES, GGUF_BASE, locate
from components.config.schema.model import ModelConfig
from components.config.schema.run import PeftConfig
from components.json_collectives import broadcast_json, this_rank
from components.models.anatomy import is_transposed, stores_transposed
from components.models.build import IMAGE_TEXT
from components.models.classifier import SCORE, TokenScores
from components.models.layers import meta_copy
from components.models.lora import (
    BASE_FORMAT,
    BASE_WEIGHTS,
    VOCABULARY,
    expert_factors,
    hash_vocabulary,
    is_adapter,
    peft_layout,
    quantized_layers,
    scaling_of,
    trains_vocabulary,
)
from components.models.lora_linear import ADAPTER_PARAMETERS, row_norms
from components.models.quantization import transposed_reader, unpacked_reader
from components.models.tokenizer import save_tokenizer
from components.models.weights.shards import WRITER, Index, gathered_tensors
from components.models.weights.weight_sources import INDEX_FILE, SINGLE_FILE, STORED_DTYPES, tied_names
from components.storage.tensor_files import SafetensorsWriter, TensorEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BLOCK_BYTES = 4 * 1024**2
"""Approximate size of a block that is read, converted and written at a time."""
_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
_METADATA = {"format": "pt"}
"""Metadata that transformers requires in files of PyTorch weights."""
_OLD = "-old"
_OF_AN_EXPORT = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|(adapter_|generation_|tokenizer_)?config\.json"
    r"|tokenizer\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|(additional_)?chat_templates?(\.jinja|\.json)?|README\.md"
)
"""Names of files of an earlier export, which the new one replaces even if it has no such file."""
CAUSAL_LM = "AutoModelForCausalLM"
Read = Callable[[Index], torch.Tensor]
"""Function that returns a block of a full tensor."""


@dataclass(slots=True)
class _File:
    """A planned file: its tensors in the order in which they will be written."""

    tensors: dict[str, torch.Tensor]
    bytes: int = 0


class WeightFiles:
    """Writer of model.safetensors, or of model-N-of-M.safetensors with an index, byte-identical to save_file.

    Names, shapes and the order of the tensors must be given at the start, because the header precedes the values.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> None:
        """Plan the files; nothing is written yet.

        Args:
            tensors: All tensors by name, in the order in which they will be written. Only shapes and dtypes are used,
                so they may be on the meta device.
            shard_bytes: Maximum size of a file without its header; a single larger tensor gets its own file.
        """
        self._folder = folder
        self._files = _split(tensors, shard_bytes)
        self._file_of = {name: index for index, file in enumerate(self._files) for name in file.tensors}
        self._open: tuple[int, BinaryIO, SafetensorsWriter] | None = None
        self._written = 0

    def write(self, name: str, blocks: Iterable[torch.Tensor]) -> None:
        """Write the next tensor, given as blocks along its first dim.

        Raises:
            OSError: The file could not be written.
            ValueError: The blocks do not match the planned shape or dtype.
        """
        planned = self._files[self._file_of[name]].tensors[name]

        def checked() -> Iterator[memoryview]:
            for block in blocks:
                if block.dtype != planned.dtype or block.shape[1:] != planned.shape[1:]:
                    raise ValueError(
                        f"{name}: got a block of shape {tuple(block.shape)}, {block.dtype}; expected blocks of a "
                        f"tensor of shape {tuple(planned.shape)}, {planned.dtype}"
                    )
                yield _bytes_of(block)

        self._writer_of(name).write(name, checked())
        self._written += 1

    def finish(self) -> None:
        """Close the last file and write the index if there are several files. Raises OSError, ValueError."""
        self.close()
        if self._written != len(self._file_of):
            raise ValueError(f"{self._written} tensors were written, but {len(self._file_of)} were planned")
        if len(self._files) > 1:
            weight_map = {name: self._name(index) for name, index in self._file_of.items()}
            body = {"metadata": {"total_size": sum(file.bytes for file in self._files)}, "weight_map": weight_map}
            (self._folder / INDEX_FILE).write_text(json.dumps(body, indent=2) + "\n")

    def close(self) -> None:
        """Close the current file, if any."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _name(self, index: int) -> str:
        count = len(self._files)
        return SINGLE_FILE if count == 1 else f"model-{index + 1:05}-of-{count:05}.safetensors"

    def _writer_of(self, name: str) -> SafetensorsWriter:
        """Return the writer of a tensor's file; open the file first if it is not the current one."""
        index = self._file_of[name]
        if self._open is None or self._open[0] != index:
            self.close()
            tensors = self._files[index].tensors
            # Mode x: returning to an earlier file fails, because tensors must be written in the planned order.
            file = (self._folder / self._name(index)).open("xb")
            try:
                writer = SafetensorsWriter(file, {tensor: _entry(tensors[tensor]) for tensor in tensors}, _METADATA)
            except BaseException:
                file.close()
                raise
            self._open = (index, file, writer)
        return self._open[2]


def write_file(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write tensors in memory, and texts about them, to one file. Raises OSError."""
    with path.open("xb") as file:
        entries = {name: _entry(each) for name, each in tensors.items()}
        writer = SafetensorsWriter(file, entries, {**_METADATA, **metadata})
        for name, each in tensors.items():
            writer.write(name, [_bytes_of(each)])


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's values as bytes; copied only if they are not contiguous in host memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def row_blocks(tensor: torch.Tensor) -> Iterator[Index]:
    """Yield the indices of blocks of rows, about _BLOCK_BYTES each, in which a tensor is read and written."""
    if tensor.ndim == 0:
        yield ()
        return
    rows = max(1, _BLOCK_BYTES // max(1, _size(tensor[:1])))
    rest = tuple(slice(0, size) for size in tensor.shape[1:])
    for start in range(0, tensor.shape[0], rows):
        yield (slice(start, min(start + rows, tensor.shape[0])), *rest)


def _split(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> list[_File]:
    files: list[_File] = []
    for name, tensor in tensors.items():
        if not files or (files[-1].tensors and files[-1].bytes + _size(tensor) > shard_bytes):
            files.append(_File({}))
        files[-1].tensors[name] = tensor
        files[-1].bytes += _size(tensor)
    return files


def _entry(tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(_NAMES[tensor.dtype], tuple(tensor.shape))


def _size(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()


class NewFolder:
    """A folder that is written under a temporary name next to its final one, and then renamed.

    Each attempt first deletes the temporary folders of killed attempts. If two processes write the same folder at once,
    the one that began first is treated as killed: it fails with OSError at the next file that it opens or in `publish`,
    and the other one succeeds. Attempts with different final names are independent.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: the final path; nothing is written yet."""
        self.folder = folder
        self.path = self._temporary_name()
        """Temporary path to write to until `publish`."""

    def begin(self) -> None:
        """Delete leftovers of killed attempts, restore a folder that they moved away, and create `path`.

        Raises OSError.
        """
        pattern = re.compile(rf"{re.escape(self.folder.name)}\.tmp-[0-9a-f]{{8}}({_OLD})?")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in sorted(each for each in self.path.parent.iterdir() if pattern.fullmatch(each.name)):
            with contextlib.suppress(OSError):  # of another user, or deleted meanwhile: it does not disturb
                if leftover.name.endswith(_OLD) and not os.path.lexists(self.folder):
                    leftover.rename(self.folder)  # `publish` was killed between its two renames
                    continue
                # Rename before deleting: a process that still writes there can then not publish a partial folder.
                renamed = leftover.rename(self._temporary_name())
                shutil.rmtree(renamed, ignore_errors=True)
        self.path.mkdir()

    def publish(self) -> None:
        """Rename the folder to its final path, replacing what exists there but for the files of others.

        Raises OSError; the existing folder is then restored.
        """
        old = self.path.with_name(f"{self.path.name}{_OLD}")
        if os.path.lexists(self.folder):  # true for files and dangling links too, which must also be moved away
            self.folder.rename(old)
        try:
            self.path.rename(self.folder)
        except BaseException:
            if os.path.lexists(old) and not os.path.lexists(self.folder):
                old.rename(self.folder)
            raise
        if old.is_symlink() or not old.is_dir():
            old.unlink(missing_ok=True)
            return
        for each in old.iterdir():
            if not (_OF_AN_EXPORT.fullmatch(each.name) or os.path.lexists(self.folder / each.name)):
                each.rename(self.folder / each.name)
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        """Delete the temporary folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def _temporary_name(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.tmp-{secrets.token_hex(4)}")


def export_adapter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    peft: PeftConfig,
    card: str = "",
    fingerprint: str = "",
) -> Path:
    """Write the adapters of a model on any mesh to `folder`, for `peft.PeftModel.from_pretrained`.

    A collective: call it on all ranks. Ranks may hold different parameters (pipeline stages). The folder is renamed
    into place once it is complete, and replaces an existing one.

    Args:
        card: Text of the model card, below its title.
        fingerprint: Dtype and fingerprint of the base weights, as `read_adapter` returns them.

    Raises OSError on every rank if rank 0 could not write.
    """
    folder, failure = Path(folder), None
    tensors = {name: full for name, full in gathered_tensors(model, [], trained=True) if full is not None}
    if this_rank() == WRITER:
        try:
            write_adapter(model, tokenizer, folder, tensors, peft, card, fingerprint)
        except (OSError, ValueError) as error:
            failure = str(error)
    failure = broadcast_json(failure, src=WRITER)
    if failure is not None:
        raise OSError(f"{folder}: the adapter could not be written: {failure}")
    return folder


def write_adapter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    peft: PeftConfig,
    card: str = "",
    fingerprint: str = "",
) -> None:
    """Write `folder` from the full tensors that were trained, by the model's names; see `export_adapter`.

    Raises OSError.
    """
    new_folder = NewFolder(folder)
    # PEFT has its own copy of each module that it saves, so that both ends of a tied model are stored.
    tied = {alias: tensors[name] for alias, name in tied_names(meta_copy(model)).items() if name in tensors}
    tensors, config = {**tensors, **tied}, _adapter_config(model, [*tensors, *tied], peft)
    header = {BASE_WEIGHTS: fingerprint} if fingerprint else {}
    if peft.quantizes:
        header[BASE_FORMAT] = "nf4"
    if trains_vocabulary(model, {name: each.shape for name, each in tensors.items()}):
        header[VOCABULARY] = hash_vocabulary(tokenizer)
    try:
        new_folder.begin()
        write_file(new_folder.path / ADAPTER_FILES[1], peft_layout(tensors), header)
        config.save_pretrained(new_folder.path)
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
    auto_class, head = (config.auto_mapping or {}).get("base_model_class", CAUSAL_LM), tensors.get(f"{SCORE}.weight")
    # Classes of PEFT, which make room for new tokens; it has none for models of images and text.
    peft_class, classes, arguments = "AutoPeftModelForCausalLM", "AutoTokenizer", f'"{name}"'
    if head is not None:
        peft_class, arguments = "AutoPeftModelForSequenceClassification", f'"{name}", num_labels={len(head)}'
    elif auto_class != CAUSAL_LM:
        peft_class, classes = "PeftModel", f"{auto_class}, AutoTokenizer"
        arguments = f'{auto_class}.from_pretrained("{base}"), "{name}"'
    task = "text-generation" if head is None else "text-classification"
    return _CARD.format(
        name=name, base=base, text=text.strip(), task=task, peft_class=peft_class, classes=classes, arguments=arguments
    )


def _adapter_config(model: PreTrainedModel, names: Sequence[str], peft: PeftConfig) -> Any:
    """Return the `peft.LoraConfig` of the trained parameters with these names.

    PEFT stores the weights of other modules that are trained, such as a score head, in the same file.
    """
    from peft import LoraConfig  # takes two seconds to import

    base: Any = model.built_from
    meta_model, scores, loader = meta_copy(model), isinstance(model, TokenScores), base_class(model)
    layers = {name.rpartition(".")[0] for name in names if name.rpartition(".")[2] in ADAPTER_PARAMETERS}
    saved = {name.rpartition(".")[0] for name in names if not is_adapter(name)}
    leaves = {name.rpartition(".")[2] for name in layers}
    same_leaf = {name for name, _ in meta_model.named_modules() if name.rpartition(".")[2] in leaves}
    linear = any(isinstance(meta_model.get_submodule(name), nn.Linear) for name in layers)
    return LoraConfig(
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
        modules_to_save=_short_names(meta_model, saved) or None,
        auto_mapping={"base_model_class": loader, "parent_library": "transformers"} if loader != CAUSAL_LM else None,
        base_model_name_or_path=_base_name(base),
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


def _short_names(meta_model: nn.Module, modules: set[str]) -> list[str]:
    """Return the last components of the names of modules, or the names where PEFT would match others too."""
    names = [name for name, _ in meta_model.named_modules(remove_duplicate=False)]
    short = []
    for module in sorted(modules):
        leaf = module.rpartition(".")[2]
        others = {name for name in names if name.endswith(leaf)} - modules
        short.append(module if others else leaf)
    return list(dict.fromkeys(short))


def base_class(model: PreTrainedModel) -> str:
    """Return the class of transformers that loads a model with an LM head."""
    return "AutoModelForImageTextToText" if model.config.model_type in IMAGE_TEXT else CAUSAL_LM


def _base_name(base: ModelConfig) -> str | None:
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

    def __init__(self, model: PreTrainedModel, *, rounds: bool = True) -> None:
        """Prepare a merge; parameter values of the model are not read.

        Args:
            model: Provides layer types, dtypes and the adapters' scaling.
            rounds: Whether adapted weights are rounded to the dtype of the weight; otherwise they are returned in that
                of the adapter, so that a small change of a weight in 16 bits is kept.
        """
        self._meta_model, self._scaling, self._rounds = meta_copy(model), scaling_of(model), rounds
        self._packed = bool(quantized_layers(model))
        self._adapters: dict[str, torch.Tensor] = {}

    def order(self, names: Iterable[str]) -> list[str]:
        """Return the names of weights in their order, each preceded by the names of its adapter's parameters."""
        return [each for name in names for each in (*_adapter_of(name), name)]

    def take(self, name: str, whole: torch.Tensor) -> bool:
        """Store a full tensor if it belongs to an adapter, until `forget`; return whether it does."""
        if is_adapter(name):
            self._adapters[name] = whole
        return is_adapter(name)

    def reader(self, name: str, read: Read) -> Read:
        """Return a function that reads blocks of a weight with its layer's adapter, if any, merged into them."""
        return partial(self._read, name, read)

    def _read(self, name: str, read: Read, index: Index) -> torch.Tensor:
        adapter = [self._adapters[each] for each in _adapter_of(name) if each in self._adapters]
        if not adapter:
            return read(index)
        lora_A, lora_B, *magnitude = adapter
        dtype = self._meta_model.get_parameter(name).dtype if self._rounds else lora_A.dtype
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
    return [f"{path}.{parameter}" for parameter in ADAPTER_PARAMETERS] if leaf == "weight" else expert_factors(name)


_CARD = """---
library_name: peft
pipeline_tag: {task}
---

# {name}

An adapter for {base}.

{text}

```python
from peft import {peft_class}
from transformers import {classes}

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {peft_class}.from_pretrained({arguments})
```
"""
