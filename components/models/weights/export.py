"""Export of a model on any mesh, or of a checkpoint, to a folder that transformers loads."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from components.chat_template import ChatTemplate
from components.config.schema.run import PeftConfig, PeftExport
from components.json_collectives import broadcast_json, this_rank
from components.models.anatomy import transformers_class
from components.models.classifier import TokenScores
from components.models.layers import meta_copy
from components.models.tokenizer import save_tokenizer
from components.models.weights.shards import WRITER, Index, gathered_tensors
from components.models.weights.untrained import Untrained, find_untrained, with_decoding
from components.models.weights.weight_files import Merge, NewFolder, WeightFiles, base_class, export_adapter, row_blocks
from components.models.weights.weight_sources import saved_tensors
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def export_run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path | str,
    peft: PeftConfig,
    card: str = "",
    fingerprint: str = "",
) -> list[Path]:
    """Export the model of a run and return the folders: RUN/export for transformers, RUN/adapter for PEFT, or both.

    A collective. Arguments and errors are those of `export_model` and `export_adapter`.
    """
    run_dir, folders = Path(run_dir), []
    if peft.adapts and peft.export != PeftExport.merged:
        described = with_decoding(card, model)
        folders.append(export_adapter(model, tokenizer, run_dir / "adapter", peft, described, fingerprint))
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
    """Write weights in safetensors, config, generation config, tokenizer and a model card to `folder`.

    A collective: call it on all ranks. Ranks may hold different parameters (pipeline stages); rank 0 gathers and writes
    one tensor at a time. The folder is renamed into place once it is complete, and replaces an existing one. Tensors
    have the names that transformers expects on disk; tied ones are written once. Adapters are merged into the weights.
    Parts of the pretrained model that text does not train are copied from its files (untrained.py). Without these files
    the export has the form of the trained model alone, so that no weights are lost; a warning and the card report it.

    Args:
        dtype: Dtype of the written tensors; None: unchanged.
        shard_bytes: Maximum size of a weight file; a single larger tensor gets its own file.
        card: Text of the model card, below its title.

    Raises:
        NotImplementedError: On every rank, if several parameters must be combined into one tensor on disk.
        OSError: On every rank, if rank 0 could not write.
    """
    folder = Path(folder)
    export = _Export(model, folder, dtype, shard_bytes, needs_base=False)
    try:
        failure = broadcast_json(_write(export, model, tokenizer, card), src=WRITER)
    except BaseException:
        export.abandon()  # does nothing on the other ranks, which have written no files
        raise
    if failure is not None:
        raise OSError(f"{folder}: the export could not be written: {failure}")
    return folder


def _write(export: _Export, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, card: str) -> str | None:
    """Gather and write all tensors; return the failure on the writer, if any. A collective."""
    merge, failure, is_writer = Merge(model), None, this_rank() == WRITER
    try:
        if is_writer:
            export.begin()
    except (OSError, ValueError) as error:
        failure = str(error)
    for name, full in gathered_tensors(model, merge.order(export.tensors)):
        if failure is not None or full is None or merge.take(name, full):
            continue  # even after a failure, exhaust the collective, so that no rank hangs
        try:
            export.add(name, merge.reader(name, full.__getitem__))
            merge.forget(name)
        except (OSError, ValueError) as error:
            failure = str(error)
    try:
        if is_writer and failure is None:
            export.finish(tokenizer, card)
    except (OSError, ValueError) as error:
        failure = str(error)
    if failure is not None:
        export.abandon()
    return failure


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
    """Write the same folder as `export_model` from stored weights, in one process, block by block.

    Args:
        model: Provides names, shapes and dtypes; its weights are not read, so it may be on the meta device.
        read: Returns a block of the tensor with a given name.
        dtype, shard_bytes, card: As for `export_model`.

    Raises:
        NotImplementedError: Several parameters must be combined into one tensor on disk.
        ConfigError: The files of the pretrained model, of which parts are copied, cannot be read.
        OSError: The folder could not be written.
    """
    export = _Export(model, Path(folder), dtype, shard_bytes)
    try:
        export.begin()
        for name in export.tensors:
            export.add(name, partial(read, name))
        export.finish(tokenizer, card)
    except BaseException:
        export.abandon()
        raise
    return Path(folder)


class _Export:
    """An exported folder while it is being written, before it is renamed into place."""

    def __init__(
        self,
        model: PreTrainedModel,
        folder: Path,
        dtype: torch.dtype | None,
        shard_bytes: int,
        *,
        needs_base: bool = True,
    ) -> None:
        """List the tensors of the model; nothing is written yet.

        needs_base: Whether to fail if the files of the pretrained model are needed and cannot be read.
        """
        meta_model = meta_copy(model, dtype)
        self.tensors = {name: tensor.detach() for name, tensor in saved_tensors(meta_model).items()}
        """Tensors to export, in the model's order, on the meta device."""
        self._folder, self._dtype, self._shard_bytes = NewFolder(folder), dtype, shard_bytes
        self._model, self._convert = model, _disk_conversion(meta_model)
        self._untrained: Untrained | None = None
        self._needs_base, self._not_copied = needs_base, ""
        self._files = WeightFiles(self._folder.path, {}, shard_bytes)

    def begin(self) -> None:
        """Plan the files, create the folder under a temporary name, and copy what is not trained.

        Raises OSError, ConfigError.
        """
        try:
            self._begin(find_untrained(self._model))
        except ConfigError as error:
            if self._needs_base:
                raise
            self.abandon()
            self._not_copied = (
                "This export has the form of the trained model alone. What else the files of the pretrained model hold "
                f"is not copied: {error}; make them readable, and export a checkpoint of the run with scripts/export.py"
            )
            logger.warning("%s: %s", self._folder.folder, self._not_copied)
            self._begin(None)

    def _begin(self, untrained: Untrained | None) -> None:
        self._untrained = untrained
        copied = {}
        if untrained is not None:
            copied = {name: untrained.tensor(name, self._dtype) for name in untrained.names}
        self._stored = {name: self._to_disk(name, tensor) for name, tensor in self.tensors.items()}
        planned = {name: tensor for stored in self._stored.values() for name, tensor in stored.items()}
        self._files = WeightFiles(self._folder.path, {**copied, **planned}, self._shard_bytes)
        self._folder.begin()
        if untrained is not None:
            for name, tensor in copied.items():
                blocks = (untrained.stored.read(name, index).to(tensor.dtype) for index in row_blocks(tensor))
                self._files.write(name, blocks)

    def add(self, name: str, read: Callable[[Index], torch.Tensor]) -> None:
        """Write a tensor of the model, of which `read` returns blocks. Raises OSError, ValueError."""
        if name not in self.tensors:
            raise ValueError(f"{name} is not a tensor of the model as transformers builds it")
        tensor, stored = self.tensors[name], self._stored[name]
        if list(map(id, stored.values())) == [id(tensor)]:  # unchanged on disk except for its name: write by block
            blocks = (read(index).to(tensor.dtype) for index in row_blocks(tensor))
            self._files.write(next(iter(stored)), blocks)
            return
        if stored:
            value = read(tuple(slice(0, size) for size in tensor.shape)).to(tensor.dtype)
            for stored_name, part in self._to_disk(name, value).items():
                self._files.write(stored_name, [part])

    def finish(self, tokenizer: PreTrainedTokenizerBase, card: str) -> None:
        """Write configs, tokenizer and card, and rename the folder into place. Raises OSError, ValueError."""
        self._files.finish()
        if self._not_copied:
            card = f"{card.strip()}\n\n## Not copied\n\n{self._not_copied}."
        text = _card(self._folder.folder.name, card, self._model, self._untrained)
        _write_configs(self._model, tokenizer, self._folder.path, self._dtype, text, self._untrained)
        self._folder.publish()

    def abandon(self) -> None:
        """Close the files and delete the folder."""
        self._files.close()
        self._folder.abandon()

    def _to_disk(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors on disk of a tensor of the model; none if it is copied from the files of its base."""
        if self._untrained is None:
            return self._convert(name, tensor)
        if name in self._untrained.held:
            return {}
        if name in self._untrained.plan.direct:
            return {self._untrained.plan.direct[name]: tensor}
        return {self._untrained.name_on_disk(each): value for each, value in self._convert(name, tensor).items()}


def _disk_conversion(meta_model: PreTrainedModel) -> Callable[[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a function that converts a parameter to the tensors that transformers stores for it, by name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, revert_weight_conversion

    conversions = get_model_conversion_mapping(meta_model, add_legacy=False)
    for conversion in conversions:
        if isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1:
            raise NotImplementedError(
                f"{type(meta_model).__name__}: {', '.join(conversion.target_patterns)} are one tensor on disk; the "
                "export of such models is not supported yet, use transformers' save_pretrained in one process"
            )
    # revert_weight_conversion would derive the same list again for each tensor; it reads this private attribute first.
    # Prefix changes are dropped as it does: reverted, they would add a prefix that the files need not have had.
    reverted = [each for each in conversions if not isinstance(each, PrefixChange)]
    object.__setattr__(meta_model, "_weight_conversions", reverted)
    return lambda name, value: revert_weight_conversion(meta_model, {name: value})


def _write_configs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype | None,
    card: str,
    untrained: Untrained | None,
) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [transformers_class(model).__name__]
    config.dtype = dtype or config.dtype
    config.use_cache = True
    _align_special_tokens(config, model, tokenizer)
    if isinstance(model, TokenScores):
        config.get_text_config().pad_token_id = config.pad_token_id
    if untrained is not None:
        config = untrained.whole_config(config)
    # Not save_pretrained, which rejects values that some models on the hub have.
    config.to_json_file(folder / "config.json")
    if not isinstance(model, TokenScores):
        generation = copy.deepcopy(model.generation_config)
        declared = generation.eos_token_id
        _align_special_tokens(generation, model, tokenizer)
        if not generation._from_model_config and isinstance(declared, int):  # from a generation_config.json
            generation.eos_token_id = [declared]
        _add_stop_tokens(generation, tokenizer)
        generation.to_json_file(folder / "generation_config.json")
    if isinstance(model, TokenScores):
        tokenizer.save_pretrained(folder)
    else:
        save_tokenizer(tokenizer, folder)
    if untrained is not None:
        untrained.copy_processor(folder)
    (folder / "README.md").write_text(card, encoding="utf-8")


def _align_special_tokens(
    config: PreTrainedConfig | GenerationConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Set special tokens in a config to those of the tokenizer; a list is extended.

    The pad token stays that of the pretrained model, because transformers gives the embedding of a pad token no
    gradient. Only a score model needs one, to find the scored token of each row of a batch.
    """
    tokens = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    if isinstance(model, TokenScores):
        tokens["pad_token_id"] = tokenizer.pad_token_id
    for key, token in tokens.items():
        current = getattr(config, key, None)
        if token is not None and not (isinstance(current, list) and token in current):
            setattr(config, key, [*current, token] if isinstance(current, list) else token)


def _add_stop_tokens(generation: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let generation also stop at the tokens with which the chat template ends answers, as it does in runs."""
    if tokenizer.eos_token_id is None and tokenizer.chat_template is None:
        return
    declared = generation.eos_token_id
    ends = declared if isinstance(declared, list) else [] if declared is None else [declared]
    ends = list(dict.fromkeys([*ends, *ChatTemplate(tokenizer).stop_tokens.values()]))
    generation.eos_token_id = ends if len(ends) > 1 or isinstance(declared, list) else next(iter(ends), None)


def _card(name: str, text: str, model: PreTrainedModel, untrained: Untrained | None) -> str:
    scores = isinstance(model, TokenScores)
    text = with_decoding(text, model)
    if untrained is not None and untrained.names:
        text = f"{text.strip()}\n\n## Not trained\n\nCopied from {untrained.base.path}: {untrained}."
    return _CARD.format(
        name=name,
        text=text.strip(),
        task="text-classification" if scores else "text-generation",
        auto_class="AutoModelForSequenceClassification" if scores else base_class(model),
    )


_CARD = """---
library_name: transformers
pipeline_tag: {task}
---

# {name}

{text}

```python
from transformers import {auto_class}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = {auto_class}.from_pretrained("{name}")
```
"""
