"""Splitting a Hugging Face causal LM into pipeline stages without rewriting it.

A stage runs the model's original forward, in which parameterless placeholders replace the modules of other stages. The
first stage holds the embeddings, the last one everything after the decoder layers. Operations of the forward itself
before and after the layers (scaling embeddings, a norm without parameters) must be applied once, so a stage's input is
fed directly into its first layer, and its output is captured directly after its last. The model keeps the original
names of its remaining parameters, so loading, optimizer, checkpoints and export work unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from components.batch import HEAD_KEYWORDS
from components.config.shape import stage_layers
from components.models.anatomy import Anatomy, config_of
from components.protocol.errors import ConfigError

_RETURN_PAIRS = frozenset({"bamba", "falcon_h1"})
"""Model types whose decoder layers return pairs of which the first is the hidden states."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Hidden states passed between stages, and the shape of the logits."""

    size: int
    vocabulary: int
    dtype: torch.dtype

    def buffer(self, rows: int, seq: int, device: torch.device | str) -> torch.Tensor:
        """Return an uninitialized buffer for hidden states: (rows, seq, hidden)."""
        return torch.empty((rows, seq, self.size), dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of this rank."""

    index: int
    """Index in the pipeline, from 0."""
    module: nn.Module
    """Maps tokens (first stage) or hidden states to hidden states or logits (last stage)."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of one rank."""

    own: tuple[Stage, ...]
    """This rank's stages, in pipeline order."""
    pp_ranks: tuple[int, ...]
    """Rank on the pp axis of every stage of the pipeline."""
    hidden: Hidden
    embedding: nn.Module | None = None
    """The input embedding of a tied model; None on ranks without the first stage."""
    tied_head: nn.Module | None = None
    """The head of a tied model; None on ranks without the last stage. Its weight is a copy of the embedding's and not a
    parameter of the model."""

    @property
    def last(self) -> int:
        """Index of the last stage of the pipeline."""
        return len(self.pp_ranks) - 1


def cut_into_stages(
    model: nn.Module, pp_ranks: list[int], pp_rank: int, dtype: torch.dtype, anatomy: Anatomy
) -> Stages:
    """Remove the modules of other pp ranks from `model` in place, and return this rank's stages, which share the rest.

    Call it on the meta device, after tensor and expert parallelism and before FSDP, which shards each stage.

    Args:
        pp_ranks: Rank on the pp axis of every stage.
        pp_rank: This rank on the pp axis.
        dtype: Dtype of the hidden states.

    Raises ConfigError for a model that is not embeddings, one list of decoder layers and a head.
    """
    parts = _Parts.of(model, anatomy)
    ranges = stage_layers(len(parts.layers), len(pp_ranks))
    own = [index for index, rank in enumerate(pp_ranks) if rank == pp_rank]
    _reject_idle_stages(parts.layers, ranges)
    vocabulary, size = parts.embedding.weight.shape
    if parts.head is not None:  # the number of labels for a score head
        vocabulary = parts.head.weight.shape[0]
    hidden = Hidden(size, vocabulary, dtype)
    tied = parts.untie()
    stages = tuple(Stage(index, _stage(parts, index, ranges)) for index in own)
    first, last = 0 in own, len(pp_ranks) - 1 in own
    kept = {layer for index in own for layer in ranges[index]}
    _use_placeholders(parts, parts.inner, kept, {})
    for name in parts.heads:
        if not last or (tied and parts.root._modules[name] is parts.head):
            parts.root._modules[name] = _Passthrough()
    return Stages(
        own=stages,
        pp_ranks=tuple(pp_ranks),
        hidden=hidden,
        embedding=parts.embedding if tied and first else None,
        tied_head=parts.head if tied and last else None,
    )


class _Passthrough(nn.Module):
    """Placeholder for a module of another stage; returns its first argument."""

    block_type: Any = None
    pairs = False
    """Whether the model's layers return pairs of which the first is the hidden states (Bamba, Falcon-H1)."""

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states unchanged: (batch, seq, hidden)."""
        return (hidden, None) if self.pairs else hidden


class _StageInput(_Passthrough):
    """Placeholder for the layer before a stage's first one; returns the stage's input.

    The model's forward may transform hidden states before its layers (e.g. scale embeddings). The first stage has done
    so already, and ignoring the argument undoes the repetition on later stages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states received from the previous stage: (batch, seq, hidden)."""
        return (self.received, None) if self.pairs else self.received


class _StageOutput(_Passthrough):
    """Placeholder for the layer after a stage's last one; captures the stage's output.

    The model's forward may transform hidden states after its layers (e.g. a norm without parameters), which only the
    last stage may apply.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captured: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Capture the hidden states for the next stage and return them: (batch, seq, hidden)."""
        self.captured = hidden
        return super().forward(hidden)


class _ZeroPositions(nn.Module):
    """Placeholder for learned position embeddings, which the first stage has added already."""

    def forward(self, positions: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a scalar zero, which broadcasts to any shape."""
        return torch.zeros((), device=positions.device)


@dataclass(slots=True)
class _Parts:
    """Modules of a causal LM by their position in the forward."""

    root: nn.Module
    inner: nn.Module
    """The module that runs the layers."""
    inner_name: str
    layers_name: str
    layers: list[nn.Module]
    model_type: str
    """transformers' model type; empty for a model that is not from Hugging Face."""
    before: list[str]
    """Children of the inner model before the layers, with parameters or dropout."""
    after: list[str]
    """Children of the inner model after the layers, with parameters."""
    heads: list[str]
    """Children of the root with parameters, besides the inner model."""
    embedding: Any
    head: Any

    @classmethod
    def of(cls, model: nn.Module, anatomy: Anatomy) -> _Parts:
        inner_name = anatomy.inner
        inner = model._modules.get(inner_name)
        lists = [name for name, child in (inner or model).named_children() if isinstance(child, nn.ModuleList)]
        layers_path = next(iter(anatomy.layers), "").rpartition(".")[0]
        if inner is None or [f"{inner_name}.{name}" for name in lists] != [layers_path]:
            raise ConfigError(
                f"parallelism.pp: {type(model).__name__} is not embeddings, one list of decoder layers and a head, so "
                "it cannot be split into stages; set parallelism.pp=1"
            )
        names = list(inner._modules)
        position = names.index(lists[0])
        embedding = None if anatomy.embedding is None else model.get_submodule(anatomy.embedding)
        head = None if anatomy.head is None else model.get_submodule(anatomy.head)
        parts = cls(
            root=model,
            inner=inner,
            inner_name=inner_name,
            layers_name=lists[0],
            layers=list(inner._modules[lists[0]]),  # type: ignore[call-overload]
            model_type="" if (config := config_of(model)) is None else config.model_type,
            before=[name for name in names[:position] if _applies_once(inner._modules[name])],
            after=[name for name in names[position + 1 :] if _has_parameters(inner._modules[name])],
            heads=[name for name, child in model._modules.items() if name != inner_name and _has_parameters(child)],
            embedding=embedding,
            head=head,
        )
        for name in parts.before:
            _placeholder(parts, name)  # raises ConfigError for an unsupported module
        return parts

    def untie(self) -> bool:
        """Give a tied head a separate weight; return whether it was tied."""
        if self.head is None or self.head.weight is not self.embedding.weight:
            return False
        tied = self.embedding.weight
        self.head.weight = nn.Parameter(torch.empty_like(tied), requires_grad=tied.requires_grad)
        return True


def _stage(parts: _Parts, index: int, ranges: list[range]) -> nn.Module:
    """Return the module of one stage: a copy of the model (inner model before the last stage) with placeholders."""
    first, last = index == 0, index == len(ranges) - 1
    inner, own = shallow_copy(parts.inner), ranges[index]
    stage_input = None if first else _StageInput()
    stage_output = None if last else _StageOutput()
    borders = {own[0] - 1: stage_input, own[-1] + 1: stage_output}
    _use_placeholders(parts, inner, set(own), borders)
    if stage_input is not None:
        check = partial(_check_layer_input, type(parts.root).__name__, stage_input)
        parts.layers[own[0]].register_forward_pre_hook(check, with_kwargs=True, prepend=True)
    stage = inner
    if last:
        stage = shallow_copy(parts.root)
        stage._modules[parts.inner_name] = inner
    stage.forward = partial(_forward, stage.forward, stage_input, stage_output)
    return stage


def _check_layer_input(
    kind: str, stage_input: _StageInput, layer: nn.Module, args: Any, kwargs: dict[str, Any]
) -> None:
    """Pre-hook of a stage's first layer: raise ConfigError if it does not receive the stage's input, and only that."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    received = stage_input.received
    if received is None:
        return
    others = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.Tensor) and each is not hidden]
    if any(each.shape == received.shape and each.is_floating_point() for each in others):
        raise ConfigError(
            f"parallelism.pp: the layers of {kind} also receive the output of the embedding, which only the first "
            "stage has; set parallelism.pp=1"
        )
    if hidden is None or hidden.shape != received.shape:
        raise ConfigError(
            f"parallelism.pp: the layers of {kind} return more than hidden states, so layers of other stages cannot be "
            "replaced by placeholders; set parallelism.pp=1"
        )


def _forward(
    compute: Any,
    stage_input: _StageInput | None,
    stage_output: _StageOutput | None,
    inputs: torch.Tensor,
    position_ids: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Run a stage: (batch, seq) tokens or (batch, seq, hidden) -> hidden states, logits or the loss sum.

    torch's schedules pass the same keyword arguments to all stages of a rank. Those of the head (HEAD_KEYWORDS) are
    taken by the loss head's forward around this one, so they are dropped here.
    """
    model_input = {"input_ids": inputs} if stage_input is None else {"inputs_embeds": inputs}
    if stage_input is not None:
        stage_input.received = inputs
    of_layers = {name: value for name, value in options.items() if name not in HEAD_KEYWORDS}
    output = compute(**model_input, position_ids=position_ids, use_cache=False, **of_layers)[0]
    if stage_input is not None:
        stage_input.received = None
    if stage_output is not None:
        output, stage_output.captured = stage_output.captured, None
    # Schedules with a split backward call detach_() on a stage's output, which fails for a view.
    return output.clone() if output._is_view() else output


def _reject_idle_stages(layers: list[nn.Module], ranges: list[range]) -> None:
    """Raise ConfigError for a stage without trainable parameters, whose backward would fail.

    Happens with adapters on few layers, or with training.freeze.
    """
    trained = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in layers]
    idle = [stage for stage, indices in enumerate(ranges) if not any(trained[index] for index in indices)]
    if idle:
        raise ConfigError(
            f"parallelism.pp: no layer of pipeline stage {idle[0]} is trained or has an adapter, so that its backward "
            "computes nothing; set a smaller parallelism.pp, or train more, by training.freeze and training.trainable, "
            "or by peft.targets=[all-linear]"
        )


def _use_placeholders(parts: _Parts, inner: nn.Module, kept: set[int], borders: Mapping[int, nn.Module | None]) -> None:
    """Replace all layers of `inner` but `kept`, and modules before and after them that belong to other stages.

    Layer indices do not change: models look up a layer's type by index.

    Args:
        inner: The inner model or a copy of it.
        borders: Layer index -> placeholder to use there; other layers become a `_Passthrough`.
    """
    layers = [layer if i in kept else borders.get(i) or _Passthrough() for i, layer in enumerate(parts.layers)]
    for layer, replaced in zip(layers, parts.layers, strict=True):
        if isinstance(layer, _Passthrough):
            layer.pairs = parts.model_type in _RETURN_PAIRS
            if parts.model_type == "nemotron_h":  # its forward reads the type of every layer
                layer.block_type = replaced.block_type
    inner._modules[parts.layers_name] = nn.ModuleList(layers)
    for name in [] if 0 in kept else parts.before:
        inner._modules[name] = _placeholder(parts, name)
    for name in [] if len(layers) - 1 in kept else parts.after:
        inner._modules[name] = _Passthrough()


def _placeholder(parts: _Parts, name: str) -> nn.Module:
    """Return the placeholder for a child before the layers. Raises ConfigError for an unsupported kind."""
    module = parts.inner._modules[name]
    if module is parts.embedding or isinstance(module, nn.Dropout):
        return _Passthrough()
    if isinstance(module, nn.Embedding):
        return _ZeroPositions()
    raise ConfigError(
        f"parallelism.pp: {type(parts.root).__name__} has {name} between its embedding and its layers, which only "
        "the first stage may apply; set parallelism.pp=1"
    )


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares its tensors, but has its own dicts of hooks and children."""
    shared = ("_parameters", "_buffers")
    clone = object.__new__(type(module))  # an FSDP module has a __new__ of its own, which calls the constructor
    clone.__dict__ = {
        key: value.copy() if isinstance(value, dict) and key not in shared else value
        for key, value in vars(module).items()
    }
    return clone


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


def _applies_once(module: nn.Module | None) -> bool:
    """Return whether a child before the layers must not be applied again on later stages."""
    return _has_parameters(module) or isinstance(module, nn.Dropout)
