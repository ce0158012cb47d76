"""Write a model on any mesh as a folder that transformers loads."""

from __future__ import annotations

import copy
import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from components.models.gather import WRITER, gathered_tensors
from components.models.names import saved_tensors
from components.models.safetensors import INDEX_FILE, SINGLE_FILE
from components.models.twin import meta_twin

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


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

    Call it on all ranks; each may hold other parameters (pipeline stages). Rank 0 gathers one tensor at a time and
    writes a file whenever `shard_bytes` are together, so it holds that much at most. The folder appears under its name
    once it is complete, replacing an older one. Tensors have the names that transformers expects on disk; tied ones
    are written once.

    Args:
        dtype: Type to write; None: as stored.
        shard_bytes: Largest weight file; a single larger tensor still makes one file.
        card: Text for the model card, below its title.

    Raises:
        NotImplementedError: On every rank: weights whose form on disk cannot be made one parameter at a time.
        OSError: On every rank, when rank 0 could not write.
    """
    from safetensors import SafetensorError

    folder = Path(folder)
    twin = meta_twin(model)
    to_disk = _disk_form(twin)
    writer = _Writer(folder, shard_bytes) if _rank() == WRITER else None
    problem = None
    for name, full in gathered_tensors(model, list(saved_tensors(twin))):
        if writer is None or problem is not None or full is None:
            continue  # after a failure the others still give their parts, so that nobody waits for anybody
        try:
            for stored, value in to_disk(name, full.to(dtype or full.dtype)).items():
                writer.add(stored, value)
        except (OSError, SafetensorError) as error:
            problem = str(error)
    if writer is not None and problem is None:
        try:
            writer.finish(lambda tmp: _write_configs(model, tokenizer, tmp, dtype, _card(folder.name, card)))
        except (OSError, SafetensorError) as error:
            problem = str(error)
    if writer is not None and problem is not None:
        writer.abandon()
    problem = _told_by_writer(problem)
    if problem is not None:
        raise OSError(f"{folder}: the export could not be written: {problem}")
    return folder


class _Writer:
    """Tensors on their way into files of bounded size, in a folder that is not yet under its name."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._tmp = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
        self._limit = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = 0

    def add(self, name: str, value: torch.Tensor) -> None:
        if self._pending and _size(value) + sum(map(_size, self._pending.values())) > self._limit:
            self._flush()
        self._pending[name] = value.contiguous()
        self._bytes += _size(value)

    def finish(self, write_rest: Callable[[Path], None]) -> None:
        """Write what is left, name the files and put the folder under its name."""
        self._flush()
        count = len(self._files)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._files, start=1):
            final = SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            (self._tmp / f"part-{number}").rename(self._tmp / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
            (self._tmp / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        write_rest(self._tmp)
        old = self._tmp.with_name(f"{self._tmp.name}-old")
        if self._folder.exists():
            self._folder.rename(old)
        self._tmp.rename(self._folder)
        shutil.rmtree(old, ignore_errors=True)

    def abandon(self) -> None:
        shutil.rmtree(self._tmp, ignore_errors=True)

    def _flush(self) -> None:
        from safetensors.torch import save_file

        self._tmp.mkdir(parents=True, exist_ok=True)
        self._files.append(list(self._pending))
        save_file(self._pending, self._tmp / f"part-{len(self._files)}", metadata={"format": "pt"})
        self._pending = {}


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _told_by_writer(problem: str | None) -> str | None:
    if not dist.is_initialized():
        return problem
    told = [problem]
    dist.broadcast_object_list(told, src=WRITER)
    return told[0]


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
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token, current = getattr(tokenizer, key), getattr(config, key, None)
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
