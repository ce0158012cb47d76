"""Weights of a model on any mesh: loaded from files, each rank its own shards, or drawn from a seed.

Files are read one tensor at a time. Drawn weights are identical on every mesh. A model is built on the meta device;
`materialize` allocates its parameters and computes its buffers.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from components.config.model_files import locate
from components.config.schema.model import ModelConfig, RopeConfig, WeightInit
from components.models.anatomy import is_transposed, plain_tensors, read_anatomy
from components.models.classifier import LM_HEAD_TENSORS, SCORE, TokenScores
from components.models.layers import copy_with_buffers, meta_copy
from components.models.lora import initialize_adapters, quantized_layers
from components.models.quantization import fill_or_pack, is_packed, level_pairs, packed_reader, transposed_reader
from components.models.weights.quantized_files import open_safetensors
from components.models.weights.shards import Index, local_blocks, local_part
from components.models.weights.weight_sources import (
    GGUFTensors,
    GrownTensors,
    StoredTensors,
    require_finite,
    saved_tensors,
    tied_names,
)
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter

_OLD_BUFFERS = re.compile(r"rotary_emb\.inv_freq$")
"""Buffers that old versions of transformers stored, and that models compute today."""
_OLD_CONSTANTS = re.compile(r"(\b\w*inv_freq|(?<=\battn\.)(masked_)?bias|(?<=\battention\.)(masked_)?bias|\bversion)$")
"""The same of modules of the model among what its class ignores: those of GPT-2, GPT-NeoX and BART too."""
_MTP = re.compile(r"(^|\.)(mtp[._]|(eh_proj|enorm|hnorm|shared_head)\.)")
"""Names of layers that predict further tokens, and of what DeepSeek's and GLM's, which are numbered, hold beside a
decoder layer."""
_SHOWN = 8
"""Maximum number of tensors named in an error."""


@dataclass(slots=True)
class Conversion:
    """Stored tensors that are combined into parameters, such as the experts of a layer."""

    converter: WeightConverter
    sources: list[tuple[str, str]] = field(default_factory=list)  # stored name, pattern that it matched


@dataclass(slots=True)
class LoadPlan:
    """Source of each tensor of the model."""

    direct: dict[str, str] = field(default_factory=dict)  # the model's name -> the stored name
    converted: dict[str, Conversion] = field(default_factory=dict)  # the first of the parameters it makes -> conversion
    repeated: dict[str, tuple[str, str]] = field(default_factory=dict)  # tied name -> its first name, stored name
    rest: list[str] = field(default_factory=list)  # stored names of what transformers builds the model without
    unexpected: list[str] = field(default_factory=list)  # other stored names that the model lacks


def fill_weights(model: PreTrainedModel, cfg: ModelConfig, seed: int) -> None:
    """Load the weights of `cfg.path` or draw them from `seed`, depending on `cfg.init`; then initialize adapters."""
    if any(isinstance(local_part(parameter), FakeTensor) for parameter in model.parameters()):
        return  # a simulation: there is no memory to fill
    if cfg.init == WeightInit.random:
        initialize_weights(model, seed)
    elif missing := load_weights(model, cfg):
        initialize_weights(model, seed, missing)
    initialize_adapters(model, seed)


def load_weights(model: PreTrainedModel, cfg: ModelConfig) -> list[str]:
    """Set parameters and persistent buffers from the files of `cfg.path`, cast to their current dtypes or packed.

    The model must be materialized, with plain tensors or DTensors as parameters. It may lack those of other pipeline
    stages; the files are checked against the complete model. A rank reads only the bytes of its shards, except for GGUF
    tensors and fused experts, which are read completely, one parameter at a time.

    Returns the names of a score head's parameters that the files, those of a causal LM, do not have; they are not set.

    Raises:
        ConfigError: Files are missing or unreachable; or a tensor is missing, unexpected, of another shape, or tied in
            the model but stored twice with different values.
    """
    if cfg.path is None:
        raise ConfigError("model.path=null: there are no weights to load; set model.init=random")
    meta_model = meta_copy(model)
    stored, plan = _open_with_plan(cfg, meta_model, model)
    given = f"model.path={cfg.path}"
    new = _use_new_head(plan, meta_model, model)
    _check(plan, meta_model, stored, given, new)
    targets = saved_tensors(model)
    shapes = {name: tensor.shape for name, tensor in saved_tensors(meta_model).items()}
    for name, source in plan.direct.items():
        if name in targets:
            transposed = _is_transposed(meta_model, name)
            fill_or_pack(targets[name], name, partial(_read, stored, source), shapes[name], transposed=transposed)
    for first, conversion in plan.converted.items():
        if targets.keys().isdisjoint(_converted_names(conversion, first)):
            continue
        try:
            converted = _convert(conversion, first, meta_model, stored)
        except ConfigError:
            raise
        except (RuntimeError, ValueError, KeyError) as error:
            stored_names = [source for source, _ in conversion.sources]
            raise ConfigError(
                _listed(f"{given}: {first} cannot be combined from stored tensors ({error})", stored_names)
            ) from error
        for name, values in converted.items():
            if values.shape != shapes[name]:
                raise ConfigError(_misshaped(given, name, values.shape, shapes[name]))
            fill_or_pack(targets[name], name, values.__getitem__, shapes[name])
    for alias, (name, source) in plan.repeated.items():
        if name in targets:
            _check_equal(targets[name], name, partial(stored.read, source), f"{given}: {alias}")
    return new


def weight_reader(model: PreTrainedModel, cfg: ModelConfig, seed: int) -> Callable[[str, Index], torch.Tensor]:
    """Return a function that reads blocks of tensors as `fill_weights` would set them, without a materialized model.

    Blocks have the dtype of the model's tensor, or are packed. Raises ConfigError as `load_weights` does.
    """
    meta_model = meta_copy(model)
    full = saved_tensors(meta_model)
    packed = {name for name, tensor in saved_tensors(model).items() if is_packed(tensor)}

    def cast(read: Callable[[str, Index], torch.Tensor]) -> Callable[[str, Index], torch.Tensor]:
        def read_as_filled(name: str, index: Index) -> torch.Tensor:
            if name not in packed:
                return read(name, index).to(full[name].dtype)
            shape, read_one = full[name].shape, partial(read, name)
            if _is_transposed(meta_model, name):
                return packed_reader(transposed_reader(read_one), shape[0])(index)
            return packed_reader(read_one, shape[1])(index)

        return read_as_filled

    # Drawn in float32, since the random numbers of other dtypes differ; kept while the blocks of a tensor are read.
    float32 = meta_copy(model, dtype=torch.float32)
    drawn = lru_cache(maxsize=1)(lambda name: _drawn_weight(float32, name, seed))
    if cfg.init == WeightInit.random:
        return cast(lambda name, index: drawn(name)[index])
    stored, plan = _open_with_plan(cfg, meta_model, model)
    new = _use_new_head(plan, meta_model, model)
    _check(plan, meta_model, stored, f"model.path={cfg.path}", new)
    source = {name: first for first, each in plan.converted.items() for name in _converted_names(each, first)}
    converted = lru_cache(maxsize=1)(lambda first: _convert(plan.converted[first], first, meta_model, stored))

    def read(name: str, index: Index) -> torch.Tensor:
        if name in plan.direct:
            return _read(stored, plan.direct[name], index)
        if name in new:
            return drawn(name)[index]
        return converted(source[name])[name][index]

    return cast(read)


def _is_transposed(meta_model: PreTrainedModel, name: str) -> bool:
    return is_transposed(meta_model.get_submodule(name.rpartition(".")[0]))


def _open_with_plan(
    cfg: ModelConfig, meta_model: PreTrainedModel, model: PreTrainedModel
) -> tuple[StoredTensors, LoadPlan]:
    """Open the files of `cfg.path`, with rows for the model's new tokens, and plan how they are loaded."""
    files = locate(str(cfg.path))
    stored: StoredTensors
    if files.gguf_file:
        stored = GGUFTensors(Path(files.name_or_folder) / files.gguf_file, meta_model)
    else:
        stored = open_safetensors(files, cfg.revision)
    plan = plan_loading(meta_model, list(stored.shapes()), cfg)
    if not cfg.new_tokens:
        return stored, plan
    rows: Any = model.new_rows
    ends = [
        each for each in (meta_model.get_input_embeddings(), meta_model.get_output_embeddings()) if each is not None
    ]
    of_ends = {id(parameter) for module in ends for parameter in module.parameters()}
    named = meta_model.named_parameters(remove_duplicate=False)
    names = {name for name, parameter in named if id(parameter) in of_ends}
    sources = {plan.direct[name] for name in names & plan.direct.keys()}
    sources |= {source for alias, (_, source) in plan.repeated.items() if alias in names}
    return GrownTensors(stored, sources, rows), plan


def plan_loading(meta_model: PreTrainedModel, stored_names: list[str], cfg: ModelConfig) -> LoadPlan:
    """Map stored names to the model's with transformers' renamings, conversions and base-model prefix.

    Of the names that the model lacks, `rest` has those of other parts: what its class ignores, what is outside the
    decoder of a composite model, and layers that predict further tokens. If these are numbered, they follow the layers
    that the config in `cfg.path` counts, and are never loaded as decoder layers, whatever `cfg.config` sets.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(meta_model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state_dict = meta_model.state_dict()
    plan, others, modules = LoadPlan(), list[str](), {""}  # modules: stored names of those that the model has
    layers = _StoredLayers(meta_model, cfg)
    for stored in sorted(stored_names, key=dot_natural_key):
        name, pattern = rename_source_key(stored, renamings, converters, meta_model.base_model_prefix, state_dict)
        if name not in state_dict and stored in state_dict:
            name, pattern = stored, None
        if name not in state_dict or name in plan.direct or not layers.add(stored, name):
            others.append(stored)
            continue
        modules.update(stored[: dot.start()] for dot in re.finditer(r"\.", stored))
        if pattern is None:
            plan.direct[name] = stored
        else:
            conversion = plan.converted.setdefault(name, Conversion(copy.deepcopy(by_pattern[pattern])))
            conversion.sources.append((stored, pattern))
    ignored = re.compile("|".join(meta_model._keys_to_ignore_on_load_unexpected or ["(?!)"]))
    _sort_others(plan, others, layers, ignored, modules)
    for alias, name in tied_names(meta_model).items():
        if alias in plan.direct:
            source = plan.direct.pop(alias)
            if plan.direct.setdefault(name, source) != source:
                plan.repeated[alias] = (name, source)
    return plan


class _StoredLayers:
    """Decoder layers as files number them: `stored` of them, of which `built` are in the model."""

    def __init__(self, meta_model: PreTrainedModel, cfg: ModelConfig) -> None:
        names = read_anatomy(meta_model).layers
        self.built = self.stored = len(names)
        self._list, self._stored_lists = names[0].rpartition(".")[0] if names else "", set[str]()
        if cfg.config:
            from components.models.build import load_config  # imports transformers

            published = load_config(replace(cfg, config={}, rope=RopeConfig())).get_text_config()
            # Of LongCat, which counts two per layer, and has no numbered MTP layers, `stored` may be too large.
            self.stored += published.num_hidden_layers - meta_model.config.get_text_config().num_hidden_layers

    def add(self, stored: str, name: str) -> bool:
        """Record a stored name and the model's; return False if it is of a layer after those of the files."""
        if not self._list or not name.startswith(f"{self._list}."):
            return True
        number = name.removeprefix(f"{self._list}.").partition(".")[0]
        before, separator, _ = stored.partition(f".{number}.")
        if separator:
            self._stored_lists.add(before)
        return not number.isdecimal() or int(number) < self.stored

    def number(self, stored: str) -> int | None:
        """Return the number of the layer that a stored name belongs to; None if it is in no list of layers."""
        for path in self._stored_lists:
            number = stored.removeprefix(f"{path}.").partition(".")[0]
            if stored.startswith(f"{path}.") and number.isdecimal():
                return int(number)
        return None


def _sort_others(
    plan: LoadPlan, others: list[str], layers: _StoredLayers, ignored: re.Pattern[str], modules: set[str]
) -> None:
    """Add the stored names that the model lacks to `rest` or `unexpected`; old constants of its modules to neither.

    Args:
        ignored: Matches what the class of the model ignores.
        modules: Stored names of the modules that the model has.
    """
    decoder = _decoder_prefix(plan)
    mtp_layers = {layers.number(stored) for stored in others if _MTP.search(stored)}
    for stored in others:
        layer = layers.number(stored)
        is_rest = bool(ignored.search(stored))
        constant = _OLD_CONSTANTS.search(stored)
        owner = stored[: constant.start()].removesuffix(".").removesuffix(".rotary_emb") if constant else None
        if layer is None:
            is_rest = is_rest or bool(_MTP.search(stored)) or not stored.startswith(decoder)
        elif layer >= min(layers.stored, layers.built):
            is_rest = layer >= layers.stored and (is_rest or layer in mtp_layers)
        if is_rest and owner not in modules:
            plan.rest.append(stored)
        elif not is_rest and not _OLD_BUFFERS.search(stored):
            plan.unexpected.append(stored)


def _decoder_prefix(plan: LoadPlan) -> str:
    """Return the prefix that all stored names have before the model's, if the files hold more than this decoder."""
    prefixes = {
        stored.removesuffix(name) if stored.endswith(f".{name}") else "" for name, stored in plan.direct.items()
    }
    return prefixes.pop() if len(prefixes) == 1 else ""


def _convert(
    conversion: Conversion, first: str, meta_model: PreTrainedModel, stored: StoredTensors
) -> dict[str, torch.Tensor]:
    """Return the parameters that a conversion makes from its stored tensors, by name."""
    for source, pattern in conversion.sources:
        full = tuple(slice(0, size) for size in stored.shapes()[source])
        # add_tensor is annotated for the futures of transformers' own loader, but accepts tensors too.
        value: Any = _read(stored, source, full)
        conversion.converter.add_tensor(first, source, pattern, value)
    converted = conversion.converter.convert(first, model=meta_model, config=meta_model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def _use_new_head(plan: LoadPlan, meta_model: PreTrainedModel, model: PreTrainedModel) -> list[str]:
    """Let a score head replace the LM head of the files; return the names of its parameters that the files lack."""
    if not isinstance(model, TokenScores):
        return []
    plan.unexpected = [name for name in plan.unexpected if not re.match(LM_HEAD_TENSORS, name)]
    head = meta_model.get_submodule(SCORE).named_parameters(SCORE)
    return [name for name, _ in head if name not in plan.direct]


def _read(stored: StoredTensors, name: str, index: Index) -> torch.Tensor:
    return require_finite(stored.read(name, index), f"model.path: the stored tensor {name}")


def _check(
    plan: LoadPlan, meta_model: PreTrainedModel, stored: StoredTensors, given: str, new: Sequence[str] = ()
) -> None:
    """Raise ConfigError with all missing, unexpected and misshaped tensors, and parameters stored as integers.

    Args:
        new: Names of parameters that may be missing.
    """
    expected, shapes, not_floats = saved_tensors(meta_model), stored.shapes(), stored.not_floats()
    sources = {source for name, source in plan.direct.items() if expected[name].is_floating_point()}
    sources |= {source for each in plan.converted.values() for source, _ in each.sources}
    integers = [f"{source} ({not_floats[source]})" for source in sorted(sources & not_floats.keys())]
    loaded = {*plan.direct, *(name for first, each in plan.converted.items() for name in _converted_names(each, first))}
    missing = [name for name, _ in meta_model.named_parameters() if name not in loaded and name not in new]
    misshaped = [
        _misshaped(given, name, shapes[source], expected[name].shape)
        for name, source in plan.direct.items()
        if shapes[source] != tuple(expected[name].shape)
    ]
    kind = type(meta_model).__name__
    problems = [
        *_listed(f"{given}: its files lack tensors of {kind}", missing),
        *_listed(f"{given}: its files contain tensors that {kind} does not have", plan.unexpected),
        *misshaped[:_SHOWN],
        *_listed(f"{given}: its files hold {len(integers)} parameters that are not floating-point numbers", integers),
    ]
    if problems:
        raise ConfigError(problems)


def _converted_names(conversion: Conversion, first: str) -> list[str]:
    """Return the names of the parameters that a conversion makes; `first` is the first of them."""
    patterns = conversion.converter.target_patterns
    return [first.replace(patterns[0], pattern) for pattern in patterns]


def _check_equal(tensor: torch.Tensor, name: str, read: Callable[[Index], torch.Tensor], given: str) -> None:
    """Raise ConfigError if a tied parameter that is stored under two names has different values."""
    local = local_part(tensor)
    for block in local_blocks(tensor, name):
        if not torch.equal(local[block.local], read(block.full).to(local)):
            raise ConfigError(
                f"{given} differs from {name}, but the config ties them; set model.config.tie_word_embeddings=false"
            )


def _misshaped(given: str, name: str, stored: Sequence[int], expected: Sequence[int]) -> str:
    return f"{given}: {name} is {tuple(stored)} in the files but {tuple(expected)} in the model; correct model.config"


def _listed(problem: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{problem}: {', '.join(names[:_SHOWN])}{more}"]


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, seed: int, names: Collection[str] | None = None) -> None:
    """Initialize every parameter by its transformers class, from a random state that depends on (`seed`, its name).

    Each full parameter is drawn on the CPU in float32, one at a time, so values depend only on the seed, the name and
    the global shape, not on the mesh or the dtype. Adapters are skipped. The global random state does not change.

    Args:
        names: Parameters to initialize; None: all.

    Raises:
        ConfigError: The class does not initialize one of its parameters.
    """
    meta_model = meta_copy(model, dtype=torch.float32)
    initialized = dict(meta_model.named_parameters(remove_duplicate=False))
    with torch.random.fork_rng(devices=[]):
        for name, parameter in model.named_parameters():
            if name in initialized and (names is None or name in names):
                drawn = _drawn_weight(meta_model, name, seed)
                transposed = is_transposed(meta_model.get_submodule(name.rpartition(".")[0]))
                fill_or_pack(parameter, name, drawn.__getitem__, drawn.shape, transposed=transposed)


def _drawn_weight(meta_model: PreTrainedModel, name: str, seed: int) -> torch.Tensor:
    """Return the full float32 value that `initialize_weights` gives a parameter; reseeds the global generator.

    meta_model: From `meta_copy`, in float32. Raises ConfigError like `initialize_weights`.
    """
    values = _draw(meta_model, name, seed)
    if values.isnan().any():
        raise ConfigError(
            f"model.init=random: {type(meta_model).__name__} has no initialization for {name}; set "
            "model.init=pretrained"
        )
    return values


def _draw(meta_model: PreTrainedModel, name: str, seed: int) -> torch.Tensor:
    """Materialize one parameter of the meta model, and run `_init_weights` of the modules that contain it."""
    path, _, attribute = name.rpartition(".")
    owner = meta_model.get_submodule(path)
    placeholder = owner.get_parameter(attribute)
    real = nn.Parameter(torch.full(placeholder.shape, float("nan"), dtype=torch.float32, device="cpu"))
    owner.register_parameter(attribute, real)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    for model, module in _enclosing(meta_model, path):
        # All other parameters are on the meta device, where initialization draws no random numbers.
        model._init_weights(module)
    owner.register_parameter(attribute, placeholder)
    return real.detach()


def _enclosing(meta_model: PreTrainedModel, path: str) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Yield the module at `path` and its parents, innermost first, with the PreTrainedModel that owns each."""
    from transformers import PreTrainedModel as Base

    chain: list[tuple[PreTrainedModel, nn.Module]] = [(meta_model, meta_model)]
    for name in path.split(".") if path else []:
        module = chain[-1][1].get_submodule(name)
        chain.append((module if isinstance(module, Base) else chain[-1][0], module))
    yield from reversed(chain)


@torch.no_grad()
def materialize(model: PreTrainedModel, device: torch.device | str, *, offload: bool = False) -> None:
    """Allocate every parameter on `device`, uninitialized, and set every buffer.

    The model comes from `build_on_meta`, with or without tensor parallelism and `fully_shard`. Only this rank's shards
    are allocated; modules of other pipeline stages may be missing. Buffers such as rotary frequencies are not in weight
    files: they are computed by the model's constructor on the CPU, so that they are equal on every device. Tied
    parameters stay tied.

    Args:
        offload: Allocate parameters in host memory, as FSDP2's CPU offloading requires; buffers still go to `device`.

    Raises RuntimeError for a buffer that the constructor does not compute.
    """
    tied = tied_names(model)
    model.to_empty(device="cpu" if offload else device)
    for name, original in tied.items():
        _set(model, name, model.get_parameter(original))
    pairs = level_pairs(device)
    for layer in quantized_layers(model).values():
        layer.pairs = pairs
    computed_model = copy_with_buffers(model)
    computed = dict(computed_model.named_buffers(remove_duplicate=False))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        value = pairs if buffer is pairs else computed.get(name)
        if value is None or value.is_meta:
            raise RuntimeError(f"buffer {name} of {type(model).__name__} is not computed by its constructor")
        path, _, attribute = name.rpartition(".")
        model.get_submodule(path)._buffers[attribute] = buffer.to(device).copy_(value)
    # Some models store computed tensors as plain attributes, which `to_empty` does not move.
    computed_modules = dict(computed_model.named_modules())
    for name, module in model.named_modules():
        attributes = plain_tensors(computed_modules[name]) if name in computed_modules else {}
        for attribute in attributes.keys() & plain_tensors(module):
            setattr(module, attribute, attributes[attribute].to(device))


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    model.get_submodule(path).register_parameter(attribute, parameter)
