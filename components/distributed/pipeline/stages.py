"""Cutting a Hugging Face causal LM into pipeline stages without rewriting it.

A stage runs the model's own forward; where another stage's modules would be stand parameterless stand-ins that hand
hidden states on. The embeddings belong to the first stage, what follows the decoder layers to the last. What the
forward itself does before and after the layers (scale embeddings, a norm without parameters) must happen once: what a
stage is given goes straight into its first layer, and what it gives straight out of its last. What is left of the
model itself keeps the names it always had, so loading, optimizer, checkpoints and export need not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from components.batch import HEAD_KEYWORDS
from components.config.errors import ConfigError
from components.config.layouts import stage_layers
from components.distributed.pipeline.placeholders import Absent, Entrance, Exit, NothingAdded
from components.models.anatomy import Anatomy


@dataclass(frozen=True, slots=True)
class Hidden:
    """What travels from one stage to the next."""

    size: int
    vocabulary: int
    dtype: torch.dtype

    def buffer(self, rows: int, seq: int, device: torch.device | str) -> torch.Tensor:
        """Return room for hidden states: (batch, seq, hidden)."""
        return torch.empty((rows, seq, self.size), dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of this rank."""

    index: int
    """Its number, 0 for the first of the whole pipeline."""
    module: nn.Module
    """Tokens (first stage) or hidden states in, hidden states or logits (last stage) out."""


@dataclass(frozen=True, slots=True)
class Stages:
    """What a rank has of a pipeline."""

    own: tuple[Stage, ...]
    """This rank's stages, in order."""
    places: tuple[int, ...]
    """Place on the pp axis of every stage of the pipeline."""
    hidden: Hidden
    """What travels between them."""
    embedding: nn.Module | None = None
    """The input embedding of a tied model, where this rank has the first stage."""
    tied_head: nn.Module | None = None
    """The head of a tied model, where this rank has the last stage: its weight is a working copy of the embedding's,
    and no parameter of the model."""

    @property
    def last(self) -> int:
        """Number of the last stage of the pipeline."""
        return len(self.places) - 1


def cut_into_stages(model: nn.Module, places: list[int], place: int, dtype: torch.dtype, anatomy: Anatomy) -> Stages:
    """Leave in `model` what the stages at `place` of the pp axis have, and return these stages, sharing its modules.

    Call it on the meta device, after tensor and expert parallelism and before FSDP, which shards each stage.

    Args:
        places: Place on the pp axis of every stage.
        place: This rank's.
        dtype: Of the hidden states.

    Raises ConfigError for a model whose parts cannot be told apart.
    """
    parts = _Parts.of(model, anatomy)
    ranges = stage_layers(len(parts.layers), len(places))
    own = [index for index, holder in enumerate(places) if holder == place]
    _refuse_idle_stages(parts.layers, ranges)
    vocabulary, size = parts.embedding.weight.shape
    hidden = Hidden(size, vocabulary, dtype)
    tied = parts.untie()
    stages = tuple(Stage(index, _stage(parts, index, ranges)) for index in own)
    first, last = 0 in own, len(places) - 1 in own
    kept = {layer for index in own for layer in ranges[index]}
    _leave(parts.inner, parts.layers_name, parts.layers, kept, {})
    for name in [] if first else parts.before:
        parts.inner._modules[name] = _stand_in(parts, name)
    for name in [] if last else parts.after:
        parts.inner._modules[name] = Absent()
    for name in parts.heads:
        if not last or (tied and parts.root._modules[name] is parts.head):
            parts.root._modules[name] = Absent()
    return Stages(
        own=stages,
        places=tuple(places),
        hidden=hidden,
        embedding=parts.embedding if tied and first else None,
        tied_head=parts.head if tied and last else None,
    )


@dataclass(slots=True)
class _Parts:
    """The modules of a causal LM: embeddings, decoder layers, what follows them."""

    root: nn.Module
    inner: nn.Module
    """The module that runs the layers."""
    inner_name: str
    layers_name: str
    layers: list[nn.Module]
    before: list[str]
    """Children of the inner model with parameters, before the layers."""
    after: list[str]
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
                f"parallelism.pp: {type(model).__name__} is not embeddings, one list of decoder layers and a head; it "
                "cannot be cut into stages; set parallelism.pp=1"
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
            before=[name for name in names[:position] if _matters(inner._modules[name])],
            after=[name for name in names[position + 1 :] if _has_parameters(inner._modules[name])],
            heads=[name for name, child in model._modules.items() if name != inner_name and _has_parameters(child)],
            embedding=embedding,
            head=head,
        )
        for name in parts.before:
            _stand_in(parts, name)
        return parts

    def untie(self) -> bool:
        """Give a tied head a weight of its own; return whether it was tied."""
        if self.head is None or self.head.weight is not self.embedding.weight:
            return False
        tied = self.embedding.weight
        self.head.weight = nn.Parameter(torch.empty_like(tied), requires_grad=tied.requires_grad)
        return True


def _stage(parts: _Parts, index: int, ranges: list[range]) -> nn.Module:
    """The model with nothing of other stages in it; before the last stage, the inner model is all of it."""
    first, last = index == 0, index == len(ranges) - 1
    inner, own = shallow_copy(parts.inner), ranges[index]
    entrance = None if first else Entrance()
    leaving = None if last else Exit()
    borders = {own[0] - 1: entrance, own[-1] + 1: leaving}
    _leave(inner, parts.layers_name, parts.layers, set(own), borders)
    if entrance is not None:
        check = partial(_check_arrival, type(parts.root).__name__, entrance)
        parts.layers[own[0]].register_forward_pre_hook(check, with_kwargs=True, prepend=True)
    for name in [] if first else parts.before:
        inner._modules[name] = _stand_in(parts, name)
    for name in [] if last else parts.after:
        inner._modules[name] = Absent()
    stage = inner
    if last:
        stage = shallow_copy(parts.root)
        stage._modules[parts.inner_name] = inner
    stage.forward = partial(_forward, stage.forward, entrance, leaving)
    return stage


def _check_arrival(kind: str, entrance: Entrance, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Hook of a stage's first layer: what the entrance gave must have arrived."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    if entrance.given is not None and (hidden is None or hidden.shape != entrance.given.shape):
        raise ConfigError(
            f"parallelism.pp: the layers of {kind} return more than hidden states, so that no stand-in can take the "
            "place of those of other stages; set parallelism.pp=1"
        )


def _forward(
    compute: Any,
    entrance: Entrance | None,
    leaving: Exit | None,
    inputs: torch.Tensor,
    position_ids: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Run a stage; what the loss needs goes to every stage of a rank, and only the last one's own forward takes it."""
    given = {"input_ids": inputs} if entrance is None else {"inputs_embeds": inputs}
    if entrance is not None:
        entrance.given = inputs
    of_layers = {name: value for name, value in options.items() if name not in HEAD_KEYWORDS}
    output = compute(**given, position_ids=position_ids, use_cache=False, **of_layers)[0]
    if entrance is not None:
        entrance.given = None
    if leaving is not None:
        output, leaving.taken = leaving.taken, None
    # Schedules that split the backward detach what a stage returns, in place; a view cannot be.
    return output.clone() if output._is_view() else output


def _refuse_idle_stages(layers: list[nn.Module], ranges: list[range]) -> None:
    """A stage without gradients would break the chain of backwards; adapters may be that sparse."""
    trained = [any(parameter.requires_grad for parameter in layer.parameters()) for layer in layers]
    idle = [stage for stage, its in enumerate(ranges) if not any(trained[layer] for layer in its)]
    if idle:
        raise ConfigError(
            f"parallelism.pp: no layer of pipeline stage {idle[0]} has an adapter, so that it has nothing to train; "
            "set peft.targets=[all-linear], or a smaller parallelism.pp"
        )


def _leave(
    inner: nn.Module, name: str, layers: list[nn.Module], kept: set[int], borders: Mapping[int, nn.Module | None]
) -> None:
    """Layers keep their numbers: models look up what kind of layer each is by them."""
    left = [layer if i in kept else borders.get(i) or Absent() for i, layer in enumerate(layers)]
    inner._modules[name] = nn.ModuleList(left)


def _stand_in(parts: _Parts, name: str) -> nn.Module:
    module = parts.inner._modules[name]
    if module is parts.embedding or isinstance(module, nn.Dropout):
        return Absent()
    if isinstance(module, nn.Embedding):
        return NothingAdded()
    raise ConfigError(
        f"parallelism.pp: {type(parts.root).__name__} has {name} between its embedding and its layers, which only "
        "the first stage may apply; set parallelism.pp=1"
    )


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module of the same class and with the same tensors, whose hooks and children can be changed by themselves."""
    shared = ("_parameters", "_buffers")
    clone = object.__new__(type(module))  # an FSDP module has a __new__ of its own, which calls the constructor
    clone.__dict__ = {
        key: value.copy() if isinstance(value, dict) and key not in shared else value
        for key, value in vars(module).items()
    }
    return clone


def _has_parameters(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.parameters())


def _matters(module: nn.Module | None) -> bool:
    """Whether a child before the layers must not be applied twice."""
    return _has_parameters(module) or isinstance(module, nn.Dropout)
