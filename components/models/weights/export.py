"""Write a model on any mesh as a folder that transformers loads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from components.config.schema.model import ModelConfig
from components.config.schema.peft import PeftConfig, PeftExport
from components.models.meta_copy import meta_twin
from components.models.weights.adapter_files import Merge, export_adapter
from components.models.weights.gather import WRITER, gathered_tensors, told_by_writer, writer_rank
from components.models.weights.names import saved_tensors
from components.models.weights.new_folder import NewFolder
from components.models.weights.shards import Index
from components.models.weights.weight_files import WeightFiles, row_blocks

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def export_run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path | str,
    base: ModelConfig,
    peft: PeftConfig,
    card: str = "",
) -> list[Path]:
    """Write what a run made, and return the folders: RUN/export for transformers, RUN/adapter for PEFT, or both.

    Arguments and errors are those of `export_model` and `export_adapter`; call it on all ranks.
    """
    run_dir, folders = Path(run_dir), []
    if peft.adapts and peft.export != PeftExport.merged:
        folders.append(export_adapter(model, tokenizer, run_dir / "adapter", base, peft, card))
    if not peft.adapts or peft.export != PeftExport.adapter:
        folders.append(export_model(model, tokenizer, run_dir / "export", card=card))
    return folders


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 2 * 1024**3,
    card: str = "",
) -> Path:
    """Write `folder`: weights in safetensors, config, generation config, tokenizer and a model card.

    Call it on all ranks; each may hold other parameters (pipeline stages). Rank 0 gathers and writes one tensor at a
    time. The folder appears under its name once it is complete, replacing an older one. Tensors have the names that
    transformers expects on disk; tied ones are written once. Adapters are merged into the weights of their layers.

    Args:
        dtype: Type to write; None: as stored.
        shard_bytes: Largest weight file; a single larger tensor still makes one file.
        card: Text for the model card, below its title.

    Raises:
        NotImplementedError: On every rank: weights whose form on disk cannot be made one parameter at a time.
        OSError: On every rank, when rank 0 could not write.
    """
    folder = Path(folder)
    export = _Export(model, folder, dtype, shard_bytes)
    try:
        problem = told_by_writer(_write(export, model, tokenizer, card))
    except BaseException:
        export.abandon()  # of the other ranks nothing is there
        raise
    if problem is not None:
        raise OSError(f"{folder}: the export could not be written: {problem}")
    return folder


def _write(export: _Export, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, card: str) -> str | None:
    """Gather and write everything; return the writer's problem. A collective."""
    merge, problem, is_writer = Merge(model), None, writer_rank() == WRITER
    try:
        if is_writer:
            export.begin()
    except OSError as error:
        problem = str(error)
    for name, full in gathered_tensors(model, merge.order(export.tensors)):
        if problem is not None or full is None or merge.take(name, full):
            continue  # after a failure the others still give their parts, so that nobody waits for anybody
        try:
            export.add(name, merge.reader(name, full.__getitem__))
            merge.forget(name)
        except (OSError, ValueError) as error:
            problem = str(error)
    try:
        if is_writer and problem is None:
            export.finish(model, tokenizer, card)
    except (OSError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        export.abandon()
    return problem


def export_stored(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | str,
    read: Callable[[str, Index], torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 2 * 1024**3,
    card: str = "",
) -> Path:
    """Write what `export_model` would, of weights that are stored somewhere, in one process that never holds them.

    Args:
        model: Tells names, shapes and types; its own weights are not looked at, so it may be on the meta device.
        read: Returns a block of the model's tensor of a name.
        dtype, shard_bytes, card: As for `export_model`.

    Raises:
        NotImplementedError: Weights whose form on disk cannot be made one parameter at a time.
        OSError: The folder could not be written.
    """
    export = _Export(model, Path(folder), dtype, shard_bytes)
    try:
        export.begin()
        for name in export.tensors:
            export.add(name, partial(read, name))
        export.finish(model, tokenizer, card)
    except BaseException:
        export.abandon()
        raise
    return Path(folder)


class _Export:
    """A folder in the making, not yet under its name."""

    def __init__(self, model: PreTrainedModel, folder: Path, dtype: torch.dtype | None, shard_bytes: int) -> None:
        """Plan it: which tensors come, and what is written of each. Nothing is written yet."""
        twin = meta_twin(model)
        self.tensors = saved_tensors(twin)
        """What is exported, in the model's order, on the meta device."""
        self._made, self._dtype = NewFolder(folder), dtype
        self._to_disk = _disk_form(twin)
        self._stored: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in self.tensors.items():
            self.tensors[name] = tensor.detach().to(dtype or tensor.dtype)
            self._stored[name] = self._to_disk(name, self.tensors[name])
        planned = {name: tensor for made in self._stored.values() for name, tensor in made.items()}
        self._files = WeightFiles(self._made.path, planned, shard_bytes)

    def begin(self) -> None:
        """Make room, and the folder under another name. Raises OSError."""
        self._made.begin()

    def add(self, name: str, read: Callable[[Index], torch.Tensor]) -> None:
        """Write a tensor of the model, of which `read` returns blocks. Raises OSError, ValueError."""
        if name not in self.tensors:
            raise ValueError(f"{name} is not a tensor of the model as transformers builds it")
        whole, made = self.tensors[name], self._stored[name]
        if list(map(id, made.values())) == [id(whole)]:  # on disk it has at most another name
            blocks = (self._typed(read(index)) for index in row_blocks(whole))
            self._files.write(next(iter(made)), blocks)
            return
        everything = tuple(slice(0, size) for size in whole.shape)
        for stored, value in self._to_disk(name, self._typed(read(everything))).items():
            self._files.write(stored, [value])

    def finish(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, card: str) -> None:
        """Write the rest and put the folder under its name. Raises OSError, ValueError."""
        self._files.finish()
        _write_configs(model, tokenizer, self._made.path, self._dtype, _card(self._made.folder.name, card))
        self._made.publish()

    def abandon(self) -> None:
        """Leave nothing behind."""
        self._files.close()
        self._made.abandon()

    def _typed(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._dtype or value.dtype)


def _disk_form(twin: PreTrainedModel) -> Callable[[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what turns a parameter into the tensors that transformers keeps on disk for it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

    conversions = get_model_conversion_mapping(twin, add_legacy=False)
    for conversion in conversions:
        if isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1:
            raise NotImplementedError(
                f"{type(twin).__name__}: {', '.join(conversion.target_patterns)} are one tensor on disk; exporting "
                "such models is not built yet, use transformers' save_pretrained on one process"
            )
    kept = [each for each in conversions if not isinstance(each, PrefixChange)]
    object.__setattr__(twin, "_weight_conversions", kept)
    return lambda name, value: revert_weight_conversion(twin, {name: value})


def _write_configs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None,
    card: str,
) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(meta_twin(model)).__name__]
    config.dtype = dtype or config.dtype
    config.use_cache = True
    generation = copy.deepcopy(model.generation_config)
    for each in (config, generation):
        _align_special_tokens(each, tokenizer)
    # Not through save_pretrained, which refuses values that models on the hub do have.
    config.to_json_file(folder / "config.json")
    generation.to_json_file(folder / "generation_config.json")
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(card)


def _align_special_tokens(config: PreTrainedConfig | GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """The tokenizer the model was trained with decides; a list that holds its token already stays."""
    tokens = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for key, token in tokens.items():
        current = getattr(config, key, None)
        if token is not None and not (isinstance(current, list) and token in current):
            setattr(config, key, token)


def _card(name: str, text: str) -> str:
    return CARD.format(name=name, text=text.strip())


CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

{text}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
```
"""
