"""Load pretrained weights into a model on any mesh: every rank reads its own parts, one tensor at a time."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from components.config.errors import ConfigError
from components.config.model_files import locate
from components.config.schema.model import ModelConfig, WeightInit
from components.models.lora import initialize_adapters
from components.models.meta_copy import meta_twin
from components.models.weights.gguf import GGUFTensors
from components.models.weights.initialize import drawn_weight, initialize_weights
from components.models.weights.names import saved_tensors, tied_names
from components.models.weights.nf4 import fill_or_pack, is_packed, packing
from components.models.weights.safetensors_files import SafetensorsTensors, find_safetensors
from components.models.weights.shards import Index, local_blocks, local_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

OLD_BUFFERS = r"rotary_emb\.inv_freq$"
"""Written by transformers of old; computed since."""

SHOWN = 8
"""Tensors named in an error; the rest is counted."""


class StoredTensors(Protocol):
    """Tensors on disk, by name."""

    def shapes(self) -> dict[str, tuple[int, ...]]: ...

    def read(self, name: str, index: Index) -> torch.Tensor: ...


@dataclass(slots=True)
class Conversion:
    """Stored tensors that become parameters only together, such as the experts of a layer."""

    converter: WeightConverter
    sources: list[tuple[str, str]] = field(default_factory=list)  # stored name, pattern it matched


@dataclass(slots=True)
class Plan:
    """Where every tensor of the model comes from."""

    direct: dict[str, str] = field(default_factory=dict)  # the model's name -> the stored name
    converted: dict[str, Conversion] = field(default_factory=dict)  # the first of the names it makes ->
    repeated: dict[str, tuple[str, str]] = field(default_factory=dict)  # tied name -> its first name, stored name
    unexpected: list[str] = field(default_factory=list)  # stored names without a place in the model


def fill_weights(model: PreTrainedModel, cfg: ModelConfig, seed: int) -> None:
    """Load the weights of `cfg.path`, or draw them from `seed`, as `cfg.init` says; and draw adapters, if any."""
    if cfg.init == WeightInit.random:
        initialize_weights(model, seed)
    else:
        load_weights(model, cfg)
    initialize_adapters(model, seed)


def load_weights(model: PreTrainedModel, cfg: ModelConfig) -> None:
    """Set parameters and persistent buffers from the files of `cfg.path`, cast to the types they have, or packed.

    For a materialised model whose parameters are plain tensors or DTensors. It may lack those of other pipeline
    stages; the files are compared with the whole model. A rank reads the bytes of its own parts; only GGUF tensors
    and fused experts are made whole first, one parameter at a time.

    Raises:
        ConfigError: Files that are missing or not reachable; any tensor that is missing, not expected, of
            another shape, or stored twice with different values where the model ties it.
    """
    if cfg.path is None:
        raise ConfigError("model.path=null: there are no weights to load; set model.init=random")
    twin = meta_twin(model)
    stored = _open(cfg, twin)
    plan = _plan(twin, list(stored.shapes()))
    given = f"model.path={cfg.path}"
    _check(plan, twin, stored.shapes(), given)
    targets = saved_tensors(model)
    shapes = {name: tensor.shape for name, tensor in saved_tensors(twin).items()}
    for name, source in plan.direct.items():
        if name in targets:
            fill_or_pack(targets[name], name, partial(stored.read, source), shapes[name])
    for first, conversion in plan.converted.items():
        if targets.keys().isdisjoint(_made_from(conversion, first)):
            continue
        try:
            made = _convert(conversion, first, twin, stored)
        except (RuntimeError, ValueError, KeyError) as error:
            stored_names = [source for source, _ in conversion.sources]
            raise ConfigError(
                _listed(f"{given}: {first} cannot be made from its parts ({error})", stored_names)
            ) from error
        for name, values in made.items():
            if values.shape != shapes[name]:
                raise ConfigError(_misshaped(given, name, values.shape, shapes[name]))
            fill_or_pack(targets[name], name, values.__getitem__, shapes[name])
    for alias, (name, source) in plan.repeated.items():
        if name in targets:
            _check_equal(targets[name], name, partial(stored.read, source), f"{given}: {alias}")


def weight_reader(model: PreTrainedModel, cfg: ModelConfig, seed: int) -> Callable[[str, Index], torch.Tensor]:
    """Return what reads a block of a tensor as `fill_weights` would set it, in its type there, without its memory.

    Raises ConfigError as `load_weights` does.
    """
    twin = meta_twin(model)
    whole = saved_tensors(twin)
    packed = {name for name, tensor in saved_tensors(model).items() if is_packed(tensor)}

    def typed(read: Callable[[str, Index], torch.Tensor]) -> Callable[[str, Index], torch.Tensor]:
        return lambda name, index: (
            packing(partial(read, name), whole[name].shape[1])(index)
            if name in packed
            else read(name, index).to(whole[name].dtype)
        )

    if cfg.init == WeightInit.random:
        float32 = meta_twin(model, dtype=torch.float32)
        drawn = lru_cache(maxsize=1)(lambda name: drawn_weight(float32, name, seed))
        return typed(lambda name, index: drawn(name)[index])
    stored = _open(cfg, twin)
    plan = _plan(twin, list(stored.shapes()))
    _check(plan, twin, stored.shapes(), f"model.path={cfg.path}")
    source = {name: first for first, each in plan.converted.items() for name in _made_from(each, first)}
    made = lru_cache(maxsize=1)(lambda first: _convert(plan.converted[first], first, twin, stored))

    def read(name: str, index: Index) -> torch.Tensor:
        if name in plan.direct:
            return stored.read(plan.direct[name], index)
        return made(source[name])[name][index]

    return typed(read)


def _open(cfg: ModelConfig, twin: PreTrainedModel) -> StoredTensors:
    files = locate(str(cfg.path))
    if files.gguf_file:
        return GGUFTensors(Path(files.name_or_folder) / files.gguf_file, twin)
    return SafetensorsTensors(find_safetensors(files, cfg.revision))


def _plan(twin: PreTrainedModel, stored_names: list[str]) -> Plan:
    """Map stored names to the model's as transformers does: its renamings, conversions and base-model prefix."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(twin)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted = twin.state_dict()
    ignored = re.compile("|".join([OLD_BUFFERS, *(twin._keys_to_ignore_on_load_unexpected or [])]))
    plan = Plan()
    for stored in sorted(stored_names, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, twin.base_model_prefix, wanted)
        if name not in wanted and stored in wanted:
            name, pattern = stored, None
        if name not in wanted:
            plan.unexpected += [] if ignored.search(stored) else [stored]
        elif pattern is None:
            plan.direct[name] = stored
        else:
            conversion = plan.converted.setdefault(name, Conversion(copy.deepcopy(by_pattern[pattern])))
            conversion.sources.append((stored, pattern))
    for alias, name in tied_names(twin).items():
        if alias in plan.direct:
            source = plan.direct.pop(alias)
            if plan.direct.setdefault(name, source) != source:
                plan.repeated[alias] = (name, source)
    return plan


def _convert(
    conversion: Conversion, first: str, twin: PreTrainedModel, stored: StoredTensors
) -> dict[str, torch.Tensor]:
    for source, pattern in conversion.sources:
        whole = tuple(slice(0, size) for size in stored.shapes()[source])
        # Annotated for the futures of transformers' own loader; it takes tensors, too.
        value: Any = stored.read(source, whole)
        conversion.converter.add_tensor(first, source, pattern, value)
    made = conversion.converter.convert(first, model=twin, config=twin.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _check(plan: Plan, twin: PreTrainedModel, stored: dict[str, tuple[int, ...]], given: str) -> None:
    wanted = saved_tensors(twin)
    found = {*plan.direct, *(name for first in plan.converted for name in _made_from(plan.converted[first], first))}
    missing = [name for name, _ in twin.named_parameters() if name not in found]
    misshaped = [
        _misshaped(given, name, stored[source], wanted[name].shape)
        for name, source in plan.direct.items()
        if stored[source] != tuple(wanted[name].shape)
    ]
    kind = type(twin).__name__
    problems = [
        *_listed(f"{given}: its files lack what {kind} needs", missing),
        *_listed(f"{given}: its files hold what {kind} does not have", plan.unexpected),
        *misshaped[:SHOWN],
    ]
    if problems:
        raise ConfigError(problems)


def _made_from(conversion: Conversion, first: str) -> list[str]:
    """Names of the parameters that a conversion makes, of which `first` is the first."""
    patterns = conversion.converter.target_patterns
    return [first.replace(patterns[0], pattern) for pattern in patterns]


def _check_equal(tensor: torch.Tensor, name: str, read: Callable[[Index], torch.Tensor], given: str) -> None:
    """A tied parameter that is stored under both of its names must have one value."""
    local = local_part(tensor)
    for block in local_blocks(tensor, name):
        if not torch.equal(local[block.local], read(block.full).to(local)):
            raise ConfigError(
                f"{given} differs from {name}, to which the config ties it; set model.config.tie_word_embeddings=false"
            )


def _misshaped(given: str, name: str, stored: Sequence[int], wanted: Sequence[int]) -> str:
    return f"{given}: {name} is {tuple(stored)} there and {tuple(wanted)} in the model; see model.config"


def _listed(problem: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return [f"{problem}: {', '.join(names[:SHOWN])}{more}"]
