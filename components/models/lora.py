"""Adding adapters to a model, operations on all of its adapters, and LoRA on the fused matrices of experts.

Each expert has its own pair of factors, as PEFT's `target_parameters` define. A module of experts keeps its class's
forward, which reads its matrices as attributes in whichever implementation transformers selected. So the forward runs
with the adapted matrices, W + scaling B A, in place of the parameters. They are computed once per forward, and need as
much memory as the frozen ones while the layer runs. The factors' first dim is that of the experts, so expert and tensor
parallelism and FSDP2 shard them like the experts they belong to.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from components.config.model_files import ADAPTER_FILES, VOCABULARY_MODULES, adapter_folder, adapter_problems, locate
from components.config.schema.run import PeftConfig, PeftExport
from components.json_collectives import all_gather_json
from components.models.anatomy import Adapted, is_experts, stores_transposed
from components.models.classifier import LM_HEAD_TENSORS, SCORE, TokenScores
from components.models.lora_linear import (
    ADAPTER_PARAMETERS,
    LoraLayer,
    QuantizedLoraLinear,
    adapted_linear,
    ends_with,
    set_magnitudes,
    target_layers,
    train_whole,
)
from components.models.tokenizer import TOKENIZER_FILES, load_tokenizer
from components.models.weights.shards import Index, fill, local_blocks, local_part
from components.models.weights.weight_sources import SafetensorsTensors, find_file, require_finite
from components.protocol.errors import ConfigError, raise_all
from components.protocol.safe_parsing import load_json
from components.storage.node_cache import FOLDER, NodeCache
from components.storage.object_store import ObjectStore, describe, is_url, join, package_problems

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SHOWN = 4
"""Maximum number of layers named in an error."""
_COPIES = "~/.cache/meshbook"
"""Folder for copies of an adapter in an object store."""
BASE_WEIGHTS = "base_weights"
"""Key in the header of the weights: dtype and fingerprint of the weights that the adapter was trained over."""
BASE_FORMAT = "base_format"
"""Key in the header of the weights of a QLoRA run: the format of the adapted layers' base weights."""
VOCABULARY = "vocabulary"
"""Key in the header of the weights: hash of the tokens and their ids, if rows of the vocabulary are trained."""
FACTORS = ("_lora_A", "_lora_B")
"""Suffixes that a matrix's name gets for the names of its factors."""


def add_adapters(model: PreTrainedModel, cfg: PeftConfig, *, exports: bool = True) -> None:
    """Freeze a model and add adapters to its target layers and experts in place; do nothing for peft.method=none.

    peft.modules_to_save are trained as a whole, and so is a score head, whose weights no pretrained model has. Call it
    before the model is sharded, usually on the meta device. `fill_weights` initializes the adapters.

    Args:
        exports: Whether the run writes an export; PEFT must then be able to read the adapters, unless peft.export
            merges them.

    Raises ConfigError for a target that matches no layer, a layer that cannot be adapted, or one that PEFT cannot read.
    """
    if not cfg.adapts:
        return
    targets = target_layers(model, cfg, exports and cfg.export != PeftExport.merged)
    experts = _target_experts(model, cfg)
    saved = _modules_to_save(model, cfg, {*targets, *experts})
    model.requires_grad_(False)
    for name in targets:
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        parent.register_module(leaf, adapted_linear(parent.get_submodule(leaf), cfg))
    for path, names in experts.items():
        _adapt_experts(model.get_submodule(path), names, cfg)
    train_whole(model, saved)
    if isinstance(model, TokenScores):
        model.score.to(torch.promote_types(model.score.weight.dtype, torch.float32)).requires_grad_(True)


def _modules_to_save(model: PreTrainedModel, cfg: PeftConfig, adapted: Container[str]) -> list[str]:
    """Return the names of the modules that peft.modules_to_save selects.

    Raises ConfigError for a name that matches no module with weights, or one within or around an adapted layer.
    """
    problems, chosen = [], []
    own = {
        name: module
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    }
    for target in cfg.modules_to_save:
        found = [name for name in own if ends_with(name, target)]
        key = f"peft.modules_to_save=[{target}]"
        if not found:
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in own if name not in adapted))
            problems.append(f"{key}: {type(model).__name__} has no such module with weights; choose some of {ends}")
        if twice := [name for name in found if name in adapted]:
            problems.append(
                f"{key}: {twice[0]} has an adapter; remove it here, or from peft.targets or peft.target_parameters"
            )
        chosen += found
    raise_all(problems)
    return list(dict.fromkeys(chosen))


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer | _LoraExperts]:
    """Return the layers and experts with adapters by name; empty for a model without adapters."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer | _LoraExperts)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context in which adapted layers compute without their adapters."""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_off = False


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLoraLinear]:
    """Return the layers with packed weights by name."""
    return {name: layer for name, layer in adapted_layers(model).items() if isinstance(layer, QuantizedLoraLinear)}


def scaling_of(model: nn.Module) -> float:
    """Return the scaling factor that all adapters of a model share; 0 for a model without adapters."""
    return next((layer.scaling for layer in adapted_layers(model).values()), 0.0)


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Initialize adapters so that they do not change the model: A random as in PEFT, B zero, magnitudes W's row norms.

    A depends only on the seed and its name, not on the mesh. The global random state does not change. Call it on all
    ranks, after the model's own weights were filled.
    """
    for name, layer in adapted_layers(model).items():
        if isinstance(layer, _LoraExperts):
            for matrix in layer.adapted:
                first, second = (layer.get_parameter(factor) for factor in expert_factors(matrix))
                _draw(first, f"{name}.{expert_factors(matrix)[0]}", seed)
                local_part(second).zero_()
            continue
        _draw(layer.lora_A, f"{name}.lora_A", seed)
        local_part(layer.lora_B).zero_()
        if layer.lora_magnitude_vector is not None:
            set_magnitudes(layer)


def _draw(factor: torch.Tensor, name: str, seed: int) -> None:
    """Set A, (..., rank, in), by Kaiming uniform with a = sqrt(5), the initialization of nn.Linear."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    drawn = (2 * torch.rand(*factor.shape, generator=generator) - 1) / math.sqrt(factor.shape[-1])
    fill(factor, name, drawn.__getitem__)


def expert_factors(name: str) -> list[str]:
    """Return the names that the factors of the experts' matrix `name` have."""
    return [f"{name}{suffix}" for suffix in FACTORS]


class _LoraExperts(Adapted, nn.Module):
    """Base class of adapted modules of experts; the module's class becomes a subclass of it and of its own class."""

    scaling: float
    adapted: tuple[str, ...]
    """Names of the adapted matrices, in the module's order. The factors of NAME are the parameters NAME_lora_A
    (experts, rank, in) and NAME_lora_B (experts, out, rank)."""
    is_off: bool = False
    """Whether to skip the adapters; set by `adapters_off`."""

    def adapt(self, names: tuple[str, ...], cfg: PeftConfig) -> None:
        """Add uninitialized factors for the matrices `names`, on their device."""
        self.scaling, self.adapted = cfg.scaling, names
        for name in names:
            weight: Any = self._parameters[name]
            experts, features_out, features_in = weight.shape
            if stores_transposed(self):
                features_in, features_out = features_out, features_in
            # The optimizer updates the factors, so they are at least float32, whatever the dtype of the experts.
            dtype = torch.promote_types(weight.dtype, torch.float32)
            shapes = ((experts, cfg.rank, features_in), (experts, features_out, cfg.rank))
            for factor, shape in zip(expert_factors(name), shapes, strict=True):
                self.register_parameter(factor, nn.Parameter(torch.empty(shape, dtype=dtype, device=weight.device)))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Apply the experts, with the arguments of their own class: hidden states, chosen experts, router weights."""
        if self.is_off:
            return super().forward(*args, **kwargs)
        with self._adapted_matrices():
            return super().forward(*args, **kwargs)

    @contextmanager
    def _adapted_matrices(self) -> Iterator[None]:
        """Replace the adapted parameters by W + scaling B A within the context. They may be shards of the experts."""
        frozen: dict[str, Any] = {name: self._parameters[name] for name in self.adapted}
        merged: dict[str, Any] = {}
        for name, weight in frozen.items():
            lora_A, lora_B = (getattr(self, factor).to(weight.dtype) for factor in expert_factors(name))
            left, right = (lora_A.mT, lora_B.mT) if stores_transposed(self) else (lora_B, lora_A)
            merged[name] = torch.baddbmm(weight, left, right, alpha=self.scaling)
        self._parameters.update(merged)
        try:
            yield
        finally:
            self._parameters.update(frozen)


def _adapt_experts(module: nn.Module, names: tuple[str, ...], cfg: PeftConfig) -> None:
    """Add adapters to the matrices `names` of a module of experts, in place."""
    cls = type(module)
    # A subclass rather than a wrapper, so that parameters keep their names and deep copies keep their forward.
    module.__class__ = type(f"Lora{cls.__name__}", (_LoraExperts, cls), {})
    module.adapt(names, cfg)  # type: ignore[operator]


def _target_experts(model: PreTrainedModel, cfg: PeftConfig) -> dict[str, tuple[str, ...]]:
    """Return the experts' modules that peft.target_parameters selects, by name, with the names of their matrices.

    Raises ConfigError for a target that matches no matrix of fused experts.
    """
    modules = {name: module for name, module in model.named_modules() if is_experts(module)}
    matrices = {
        f"{path}.{name}": (path, name)
        for path, module in modules.items()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }
    problems = [
        _no_such_parameter(model, target, matrices)
        for target in cfg.target_parameters
        if not any(ends_with(full, target) for full in matrices)
    ]
    if problems:
        raise ConfigError(problems)
    chosen: dict[str, tuple[str, ...]] = {}
    for full, (path, name) in matrices.items():
        if any(ends_with(full, target) for target in cfg.target_parameters):
            chosen[path] = (*chosen.get(path, ()), name)
    return chosen


def _no_such_parameter(model: PreTrainedModel, target: str, matrices: dict[str, tuple[str, str]]) -> str:
    given, kind = f"peft.target_parameters=[{target}]", type(model).__name__
    if not matrices:
        return f"{given}: {kind} has no fused experts; remove peft.target_parameters"
    short = sorted({".".join(full.split(".")[-3:]) for full in matrices})
    if any(ends_with(name, target) for name, _ in model.named_parameters()):
        reason = "is not a matrix of fused experts; linear layers belong into peft.targets"
    else:
        leaves = {each.rpartition(".")[2]: each for each in short} | {each: each for each in short}
        nearest = difflib.get_close_matches(target, leaves, n=1, cutoff=0.6)
        reason = f"{kind} has no such parameter{f'; did you mean {leaves[nearest[0]]}?' if nearest else ''}"
    return f"{given}: {reason}; choose some of {', '.join(short)}"


def is_adapter(name: str) -> bool:
    """Return whether a parameter's name is that of an adapter's."""
    return name.rpartition(".")[2] in ADAPTER_PARAMETERS or name.endswith(FACTORS)


def peft_layout(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that were trained as PEFT stores them, by their names in its files.

    PEFT flattens the factors of all experts: A to (experts * rank, in), with the ranks of an expert together, and B to
    (out, rank * experts), with the experts of a rank together.
    """
    stored = {}
    for name, peft_name in _peft_names(tensors).items():
        tensor = tensors[name]
        if name.endswith(FACTORS):
            is_first = name.endswith(FACTORS[0])
            tensor = tensor.flatten(0, 1) if is_first else tensor.permute(1, 2, 0).flatten(1).contiguous()
        stored[peft_name] = tensor
    return stored


def _peft_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names that trained parameters have in PEFT's files, by the model's names.

    PEFT wraps a module of experts once for each adapted matrix, the first one innermost.
    """
    names = list(names)
    matrices: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(FACTORS[0]):
            matrices.setdefault(name.rpartition(".")[0], []).append(name.removesuffix(FACTORS[0]))
    stored = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        if name.endswith(FACTORS):
            matrix, factor = name[: -len(FACTORS[0])], name[1 - len(FACTORS[0]) :]
            wrappers = len(matrices[path]) - 1 - matrices[path].index(matrix)
            stored[name] = f"base_model.model.{path}{'.base_layer' * wrappers}.{factor}.weight"
        else:
            stored[name] = f"base_model.model.{name}{'.weight' * (leaf in ('lora_A', 'lora_B'))}"
    return stored


def read_adapter(model: PreTrainedModel, cfg: PeftConfig) -> str:
    """Set the adapters of a model on any mesh, and the modules trained beside them, from `cfg.path`. A collective.

    A rank reads its own shards, except for experts, whose factors PEFT stores in another layout. The model must be
    filled already.

    Returns dtype and fingerprint of the base weights that the adapter was trained over; empty if its files do not say.

    Raises ConfigError if the files are missing or unreachable, or hold an adapter of other settings, layers or shapes.
    """
    config_file, weights_file = _adapter_files(str(cfg.path))
    raise_all(adapter_problems(cfg, load_json(config_file)))
    stored = SafetensorsTensors([weights_file])
    targets = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sources = _peft_names(targets)
    _check_adapter(cfg, stored, {sources[name]: _peft_shape(name, each) for name, each in targets.items()}, model)
    _check_vocabulary(model, stored, str(cfg.path))
    head = _tied_head(model, stored.shapes())
    embedding = next(model.get_input_embeddings().parameters(recurse=False), None)  # on the first pipeline stage only
    for name, parameter in targets.items():
        source = sources[name]
        if source not in stored.shapes():
            continue  # a new score head
        read = partial(_read_finite, stored, source, str(cfg.path))
        if head and parameter is embedding:
            _check_tied(parameter, read, partial(stored.read, head), str(cfg.path))
        if not name.endswith(FACTORS):
            fill(parameter, name, read)
            continue
        experts, flat, is_first = parameter.shape[0], read(()), name.endswith(FACTORS[0])
        full = flat.unflatten(0, (experts, cfg.rank)) if is_first else flat.unflatten(1, (cfg.rank, experts))
        fill(parameter, name, (full if is_first else full.permute(2, 0, 1)).__getitem__)
    return stored.metadata().get(BASE_WEIGHTS, "")


def _adapter_files(path: str) -> list[Path]:
    """Return local copies of ADAPTER_FILES of a folder, a run, a hub name or a URL. Raises ConfigError."""
    if is_url(path):
        raise_all(package_problems("peft.path", path))
        try:
            store, cache = ObjectStore(path), NodeCache(Path(_COPIES).expanduser() / FOLDER)
            return [cache.object(store, store.stat(join(path, name))) for name in ADAPTER_FILES]
        except OSError as error:
            reason = "there is no such object" if isinstance(error, FileNotFoundError) else describe(error)
            raise ConfigError(f"peft.path={path}: {reason}; give the folder of an adapter") from error
    files = locate(str(adapter_folder(path)), "peft.path")
    found = {name: find_file(files, name, None, key="peft.path") for name in ADAPTER_FILES}
    raise_all(
        [f"peft.path={path}: has no {name}; give the folder of an adapter" for name, file in found.items() if not file]
    )
    return [file for file in found.values() if file is not None]


def _peft_shape(name: str, parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape that a trained parameter has in PEFT's files."""
    shape = tuple(parameter.shape)
    if name.endswith(FACTORS[0]):
        return (shape[0] * shape[1], shape[2])
    return (shape[1], shape[2] * shape[0]) if name.endswith(FACTORS[1]) else shape


def _read_finite(stored: SafetensorsTensors, name: str, path: str, index: Index) -> torch.Tensor:
    return require_finite(stored.read(name, index), f"peft.path={path}: {name}")


def _check_adapter(
    cfg: PeftConfig, stored: SafetensorsTensors, expected: dict[str, tuple[int, ...]], model: PreTrainedModel
) -> None:
    """Raise ConfigError on every rank if the stored tensors are not those that some rank expects, by stored name."""
    key, shapes, head = f"peft.path={cfg.path}", stored.shapes(), _tied_head(model, stored.shapes())
    by_rank = all_gather_json({name: list(shape) for name, shape in expected.items()})
    wanted = {name: tuple(shape) for of_rank in by_rank for name, shape in of_rank.items()}
    is_scored = {name: name.startswith(f"base_model.model.{SCORE}.") for name in wanted.keys() | shapes.keys()}
    missing = sorted(name for name in wanted.keys() - shapes.keys() if not is_scored[name])
    further = sorted(shapes.keys() - wanted.keys() - {head})
    whole = [name for name in further if ".lora_" not in name and not is_scored[name]]
    merge = "merge it by PEFT's merge_and_unload, and set model.path to the result"
    problems = []
    if missing:
        problems.append(
            f"{key}: has no adapter for {_listed(missing)}, which peft.targets or peft.modules_to_save selects; select "
            "the layers that it was trained with"
        )
    if whole:
        problems.append(
            f"{key}: also has weights of {_listed(whole)}, which are not among peft.modules_to_save; {merge}"
        )
    elif any(is_scored[name] for name in further):
        problems.append(f"{key}: is the adapter of a classifier, with a score head; use recipes/classify.py")
    elif further:
        of_ends = any(name.partition(".lora_")[0].rpartition(".")[2] in VOCABULARY_MODULES for name in further)
        problems.append(
            f"{key}: has adapters of {_listed(further)}; {merge if of_ends else 'add these layers to peft.targets'}"
        )
    ends = [name for name in wanted if name.endswith("embed_tokens.weight") or "embed" in name.rpartition(".")[0]]
    if _ties(model) and not head and any(name in shapes for name in ends):
        problems.append(f"{key}: trained the embedding apart from the LM head, but the model ties them; {merge}")
    problems += [
        f"{key}: {name} is {shapes[name]} in the file but {shape} in this run; set peft.rank, model.path and "
        "model.new_tokens as in the run that trained it"
        for name, shape in sorted(wanted.items())
        if name in shapes and shapes[name] != shape
    ][:_SHOWN]
    if integers := sorted(stored.not_floats().keys() & wanted.keys()):
        problems.append(f"{key}: {_listed(integers)} hold no floating-point numbers; give another adapter")
    raise_all(problems)


def trains_vocabulary(model: PreTrainedModel, tensors: Mapping[str, Sequence[int]]) -> bool:
    """Return whether tensors of an adapter, name -> shape, include rows of the embedding or the LM head."""
    rows = model.config.get_text_config().vocab_size
    return any(
        tuple(shape[:1]) == (rows,) and ".lora_" not in name and not is_adapter(name) for name, shape in tensors.items()
    )


def hash_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of a tokenizer's tokens and their ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]


def _check_vocabulary(model: PreTrainedModel, stored: SafetensorsTensors, path: str) -> None:
    """Raise ConfigError if rows of the vocabulary were trained for other tokens than those of the run's tokenizer.

    The header of the weights holds a hash of the tokens. Files without it are compared by the tokenizer beside them.
    """
    if not trains_vocabulary(model, stored.shapes()):
        return
    built_from: Any = model.built_from
    cfg = dataclasses.replace(built_from, chat_template=None)
    own, expected, theirs = hash_vocabulary(load_tokenizer(cfg)), stored.metadata().get(VOCABULARY), None
    if expected == own:
        return
    files = None if is_url(path) else locate(str(adapter_folder(path)), "peft.path")
    if files is not None and any(find_file(files, name, None, key="peft.path") for name in TOKENIZER_FILES):
        theirs = load_tokenizer(dataclasses.replace(cfg, tokenizer=files.name_or_folder, new_tokens=[]))
        expected = expected or hash_vocabulary(theirs)
    if expected in (None, own):
        return
    change = "model.tokenizer and model.new_tokens as in the run that trained it"
    if files is not None and theirs is not None:
        known, vocabulary = load_tokenizer(dataclasses.replace(cfg, new_tokens=[])).get_vocab(), theirs.get_vocab()
        added = json.dumps(sorted(vocabulary.keys() - known.keys(), key=vocabulary.__getitem__), ensure_ascii=False)
        change = f"model.tokenizer={files.name_or_folder} and model.new_tokens=[]"
        if known.items() <= vocabulary.items() and VOCABULARY in stored.metadata():  # of a run that had these
            change = f"'model.new_tokens={added}'"
    raise ConfigError(
        f"peft.path={path}: trained rows of the vocabulary for other tokens than those of this run's tokenizer "
        f"(model.new_tokens={json.dumps(list(cfg.new_tokens), ensure_ascii=False)}); set {change}"
    )


def _ties(model: PreTrainedModel) -> bool:
    return bool(model.config.get_text_config().tie_word_embeddings or model.config.tie_word_embeddings)


def _tied_head(model: PreTrainedModel, stored: Collection[str]) -> str:
    """Return the stored name of an LM head that the model ties to its embedding; empty if there is none."""
    names = [name for name in stored if re.match(LM_HEAD_TENSORS, name.removeprefix("base_model.model."))]
    return names[0] if names and _ties(model) else ""


def _check_tied(
    embedding: torch.Tensor, first: Callable[[Index], torch.Tensor], second: Callable[[Index], torch.Tensor], path: str
) -> None:
    """Raise ConfigError if the stored values of an embedding and its tied head differ in this rank's shard."""
    for block in local_blocks(embedding, "embedding"):
        if not torch.equal(first(block.full), second(block.full)):
            raise ConfigError(
                f"peft.path={path}: its LM head and its embedding differ, but the model ties them; merge it by PEFT's "
                "merge_and_unload, and set model.path to the result"
            )


def _listed(names: Sequence[str]) -> str:
    short = list(dict.fromkeys(name.removeprefix("base_model.model.") for name in names))
    return ", ".join(short[:_SHOWN]) + (f" and {len(short) - _SHOWN} more" if len(short) > _SHOWN else "")
