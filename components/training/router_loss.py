"""Auxiliary load-balancing loss of mixture-of-experts routers, independent of the mesh.

The loss is that of Switch Transformers (Fedus et al. 2021), for the top k experts as in Hugging Face transformers. It
is computed per layer and sequence, so that it depends neither on micro-batches nor on ranks, and weighted by the
sequence's number of target tokens, so that it is divided by the global number of target tokens like the token losses.
In packed rows each document is a sequence, so packing does not change the loss either.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh

from components.config.schema.data import IGNORED
from components.config.schema.model import DOCUMENTS, ModelConfig, RouterAux
from components.distributed.mesh import Mesh
from components.models.anatomy import Anatomy, read_anatomy
from components.protocol.errors import ConfigError

SEQUENCE_WEIGHTS = "router_sequence_weights"
"""Keyword argument that passes `sequence_weights` through the model's forward to its decoder layers."""
_SWITCH_OFF = "set model.router_aux=none"


def attach_router_loss(
    model: nn.Module, cfg: ModelConfig, mesh: Mesh | None = None, anatomy: Anatomy | None = None
) -> RouterLoss | None:
    """Attach the auxiliary loss to the routers of a transformers model; its gradient is added in the backward.

    Call it on all ranks, after the model is parallelized and before activation checkpointing and compilation. Returns
    None if `cfg` turns the loss off, or if neither `cfg` nor the model's config sets a coefficient.

    Args:
        anatomy: Anatomy of the whole model; None: read it.

    Raises ConfigError for a coefficient if the model has no router to apply it to.
    """
    anatomy = anatomy or read_anatomy(model)
    coefficient = anatomy.router_coefficient if cfg.router_aux_coef is None else cfg.router_aux_coef
    if cfg.router_aux == RouterAux.none or not coefficient:
        return None
    layers, found = anatomy.decoder_layers(model), anatomy.parts(model, anatomy.routers)
    routers = [[each for router, each in found.items() if router.startswith(f"{name}.")] for name in layers]
    count = _sum_over_stages(sum(map(len, routers)), mesh)
    if count == 0 and anatomy.has_router_class and cfg.router_aux_coef is None:
        return None  # a mixture-of-experts class whose config makes every layer dense
    if count == 0:
        raise ConfigError(
            f"model.router_aux=sequence: the coefficient {coefficient} applies to nothing: no router was found "
            f"in the decoder layers of {type(model).__name__}; {_SWITCH_OFF}"
        )
    loss = RouterLoss(coefficient, count, mesh, expects=any(routers))
    for layer, layer_routers in zip(layers.values(), routers, strict=True):
        _RouterHooks(loss, layer, layer_routers)
    return loss


class RouterLoss:
    """Auxiliary loss of this rank's routers: adds its gradient, and accumulates its value for logging."""

    def __init__(self, coefficient: float, routers: int, mesh: Mesh | None, expects: bool = True) -> None:
        self.coefficient = coefficient
        self.routers = routers
        """Number of routers of the whole model."""
        self._mesh = mesh
        self._tokens = torch.ones(())
        self._total = torch.zeros(())
        self._expects = expects  # whether sequence weights must still arrive: this rank has routers, none was called

    def __str__(self) -> str:
        return f"router loss: auxiliary, per sequence (in packed rows: per document), coefficient {self.coefficient:g}"

    def start_step(self, tokens: torch.Tensor) -> None:
        """Reset the sum. tokens: target tokens of the whole step, over all ranks, a float64 scalar."""
        self._tokens, self._total = tokens, torch.zeros_like(tokens)

    def step_sum(self) -> torch.Tensor:
        """Return this rank's part of the step's loss times its target tokens, a float64 scalar to sum over all ranks.

        Ranks along tp and cp hold the same value, so only the first of them counts. Raises ConfigError if the sequence
        weights never reached a decoder layer.
        """
        if self._expects:
            raise ConfigError(
                "model.router_aux=sequence: this model does not pass keyword arguments down to its decoder layers, so "
                f"its routers do not receive the sequence weights; {_SWITCH_OFF}"
            )
        counts = self._mesh is None or (self._mesh.rank("tp") == 0 and self._mesh.rank("cp") == 0)
        return self._total * self._tokens * counts

    def sink(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a zero scalar whose gradient is added to the step's sum. hidden: The layer's input (see `_Sink`)."""
        self._expects = False
        return _Sink.apply(hidden, torch.zeros_like(self._total, requires_grad=True), self._total)

    def add_to_router(self, router: nn.Module, outputs: Any, inputs: tuple[torch.Tensor, int, torch.Tensor]) -> Any:
        """Return a router's outputs with its auxiliary loss attached: their backward also computes the loss's gradient.

        Args:
            outputs: (logits (batch x seq, experts), scores (batch x seq, top_k), chosen (batch x seq, top_k)).
            inputs: Result of `sequence_weights` (batch, seq, 2), number of sequences per row, result of `sink`.
        """
        weights, sequences, sink = inputs
        targets, sequence_of = weights.unbind(-1)  # (batch, seq)
        logits, scores, chosen = _check_outputs(outputs, sequence_of, router)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        probabilities = F.softmax(logits, dim=-1, dtype=dtype).view(*sequence_of.shape, -1)  # (batch, seq, experts)
        indices = torch.arange(sequences, device=sequence_of.device)[:, None]
        members = (sequence_of[:, None] == indices).to(dtype)  # (batch, sequences, seq)
        experts = chosen.view(*sequence_of.shape, -1)
        losses = _balance_losses(probabilities, experts, members, targets, self._cp_mesh)  # (batch, sequences)
        weighted = losses.sum() * (self.coefficient / self.routers)
        return logits, _AddLoss.apply(scores, weighted / self._tokens.to(dtype), sink), chosen

    @property
    def _cp_mesh(self) -> DeviceMesh | None:
        return None if self._mesh is None or self._mesh.size("cp") == 1 else self._mesh["cp"]


def sequence_weights(targets: torch.Tensor, bounds: torch.Tensor | None = None) -> torch.Tensor:
    """Return two values per token for the routers, (batch, seq, 2) int64, to be sharded over cp like the tokens.

    [..., 0]: at a sequence's first token its number of target tokens, else 0, so that the sum over a sequence's tokens
    is that number on whichever ranks they are. [..., 1]: index of the token's sequence within the row, or -1 after the
    sequence's last target, where tokens are padding or cannot affect a target. Integers, because FSDP2 casts
    floating-point inputs.

    Args:
        targets: (batch, seq), whole rows; IGNORED where there is no target.
        bounds: Boundaries of the documents of packed rows, (batch, documents + 1); None: a row is one sequence.
    """
    rows, seq = targets.shape
    if bounds is None:
        bounds = (torch.arange(2, device=targets.device) * seq).expand(rows, 2)
    bounds = bounds.long()
    starts, ends = bounds[:, :-1], bounds[:, 1:]  # (batch, sequences); empty sequences begin and end at `seq`
    is_target = F.pad((targets != IGNORED).long(), (1, 0))  # (batch, seq + 1): whether each token is a target itself
    is_target.scatter_(1, starts, 0)  # a sequence's first token is predicted from nothing
    before = F.pad(is_target.cumsum(1), (1, 0))  # targets before each position, (batch, seq + 2)
    counts = before.gather(1, ends) - before.gather(1, starts)  # (batch, sequences)
    position = torch.arange(seq, device=targets.device).repeat(rows, 1)
    sequence_of = torch.searchsorted(ends.contiguous(), position, right=True)  # (batch, seq)
    matters = before.gather(1, ends).gather(1, sequence_of) > before[:, :seq]  # this token or a later one is a target
    # The last token may predict the one after the row, as in rows of token stores: one more target of its sequence.
    last, predicts = sequence_of[:, -1:], targets[:, -1:] != IGNORED  # (batch, 1)
    counts = counts.scatter_add(1, last, predicts.long())
    matters |= predicts & (sequence_of == last)
    at_first = torch.zeros_like(is_target).scatter_add_(1, starts, counts)[:, :seq]
    return torch.stack([at_first, torch.where(matters, sequence_of, -1)], dim=-1)


def _balance_losses(
    probabilities: torch.Tensor,
    chosen: torch.Tensor,
    members: torch.Tensor,
    targets: torch.Tensor,
    cp_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Return each sequence's load-balancing loss, weighted by its number of target tokens: (batch, sequences).

    The loss is experts x the sum over experts of (share of tokens routed to the expert) x (mean router probability of
    the expert). The shares of a sequence sum to top_k. A sequence without tokens that count has loss zero.

    Args:
        probabilities: (batch, seq, experts).
        chosen: Experts of each token, (batch, seq, top_k).
        members: 1 if a token belongs to a sequence and counts, else 0; (batch, sequences, seq), in the result's dtype.
        targets: At a sequence's first token its number of target tokens, else 0; (batch, seq).
        cp_mesh: Mesh of the ranks that hold the other shards of the rows; each computes the gradient of its own tokens.
    """
    ones = torch.ones_like(chosen, dtype=members.dtype)
    choices = torch.zeros_like(probabilities).scatter_add_(2, chosen, ones)  # (batch, seq, experts)
    ones_and_targets = torch.stack([torch.ones_like(targets), targets], dim=2).to(members.dtype)
    summed = members @ probabilities  # (batch, sequences, experts)
    counted = members @ torch.cat([choices, ones_and_targets], dim=2)  # (batch, sequences, experts + 2)
    if cp_mesh is not None:
        experts = summed.shape[2]
        sums = all_reduce(torch.cat([summed.detach(), counted], dim=2), "sum", cp_mesh)
        total, counted = sums[..., :experts], sums[..., experts:]
        summed = summed + (total - summed).detach()  # value: the sum over cp; gradient: that of this rank's shard
    counts, tokens, weight = counted[..., :-2], counted[..., -2:-1].clamp(min=1), counted[..., -1]
    return weight * summed.shape[2] * (counts / tokens * (summed / tokens)).sum(2)


class _RouterHooks:
    """Patched forward and hooks of a decoder layer, which pass the micro-batch's sequence weights to its routers.

    The weights are an input of the layer, so that recomputation passes them again.
    """

    def __init__(self, loss: RouterLoss, layer: nn.Module, routers: list[nn.Module]) -> None:
        self._loss = loss
        self._layer_forward = layer.forward
        self._inputs: tuple[torch.Tensor, int, torch.Tensor] | None = None
        layer.forward = self.forward
        if routers:
            layer.register_forward_pre_hook(self.before_layer, with_kwargs=True)
        for router in routers:
            router.register_forward_hook(self.after_router)

    def before_layer(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Add `sink` to the weights. A pre-hook is outside of recomputation, so it runs once per micro-batch."""
        if SEQUENCE_WEIGHTS not in kwargs:
            return args, kwargs
        hidden = args[0] if args else kwargs["hidden_states"]
        documents = kwargs.get(DOCUMENTS)
        sequences = 1 if documents is None else documents.bounds.shape[1] - 1
        return args, {**kwargs, SEQUENCE_WEIGHTS: (kwargs[SEQUENCE_WEIGHTS], sequences, self._loss.sink(hidden))}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's original forward without the keyword."""
        self._inputs = kwargs.pop(SEQUENCE_WEIGHTS, None)
        try:
            return self._layer_forward(*args, **kwargs)
        finally:
            self._inputs = None

    def after_router(self, router: nn.Module, args: Any, outputs: Any) -> Any:
        """Add the loss to a router's outputs; outside of training steps, return them unchanged."""
        return outputs if self._inputs is None else self._loss.add_to_router(router, outputs, self._inputs)


class _AddLoss(torch.autograd.Function):
    """Identity of the scores; in the backward the loss receives the gradient 1, and the sink the loss's value."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, loss: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss), loss.double()


class _Sink(torch.autograd.Function):
    """Zero scalar whose gradient is added to a total.

    Takes the hidden states as input, without a gradient for them, so that its backward lies between a stage's outputs
    and inputs. A split-backward schedule runs that part exactly once, and other parts later or never.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.total = total
        return torch.zeros_like(anchor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        ctx.total.add_(grad)
        return None, None, None


def _check_outputs(outputs: Any, tokens: torch.Tensor, router: nn.Module) -> Any:
    """Return a router's outputs. Raises ConfigError unless they are (logits, scores, chosen), one row per token."""
    is_triple = isinstance(outputs, tuple) and len(outputs) == 3 and all(output.dim() == 2 for output in outputs)
    if is_triple and all(len(output) == tokens.numel() for output in outputs) and not outputs[2].is_floating_point():
        return outputs
    raise ConfigError(
        f"model.router_aux=sequence: {type(router).__name__} does not return logits, scores and chosen experts of "
        f"every token; {_SWITCH_OFF}"
    )


def _sum_over_stages(count: int, mesh: Mesh | None) -> int:
    if mesh is None or mesh.size("pp") == 1:
        return count
    total = torch.tensor(count, device=mesh.device_mesh.device_type)
    dist.all_reduce(total, group=mesh["pp"].get_group())
    return int(total)
