"""The auxiliary loss of a mixture of experts' routers, one number whatever the mesh.

It balances the load of the experts (Fedus et al. 2021, Switch Transformers; counted for the top k experts as Hugging
Face does). It is taken per layer and sequence, so that it depends neither on micro-batches nor on ranks, and weighted
by the sequence's target tokens, so that the global number of target tokens divides it like the token losses. In packed
rows each document is a sequence: packing changes the loss no more than a mesh does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh

from components.config.errors import ConfigError
from components.config.schema.data import IGNORED
from components.config.schema.model import DOCUMENTS, ModelConfig, RouterAux
from components.distributed.mesh import Mesh
from components.models.anatomy import Anatomy, read_anatomy

SEQUENCE_WEIGHTS = "router_sequence_weights"
"""Keyword by which `sequence_weights` travel through the model's forward to its decoder layers."""
SWITCH_OFF = "set model.router_aux=none"


def attach_router_loss(
    model: nn.Module, cfg: ModelConfig, mesh: Mesh | None = None, anatomy: Anatomy | None = None
) -> RouterLoss | None:
    """Let the routers of a transformers model add their auxiliary loss to the gradients; call it on all ranks.

    After the model was laid over the mesh, and before activations are checkpointed or layers compiled. Returns None
    where `cfg` asks for none, or neither it nor the model's config gives a coefficient.

    Args:
        anatomy: The whole model's; None: read it.

    Raises ConfigError for a coefficient without a router that it could apply to.
    """
    anatomy = anatomy or read_anatomy(model)
    coefficient = anatomy.router_coefficient if cfg.router_aux_coef is None else cfg.router_aux_coef
    if cfg.router_aux == RouterAux.none or not coefficient:
        return None
    layers, held = anatomy.decoder_layers(model), anatomy.parts(model, anatomy.routers)
    routers = [[each for router, each in held.items() if router.startswith(f"{name}.")] for name in layers]
    count = _sum_over_stages(sum(map(len, routers)), mesh)
    if count == 0 and anatomy.has_router_class and cfg.router_aux_coef is None:
        return None  # its config leaves every layer dense
    if count == 0:
        raise ConfigError(
            f"model.router_aux=sequence: the coefficient {coefficient} applies to nothing: transformers names no "
            f"router in the decoder layers of {type(model).__name__}; {SWITCH_OFF}"
        )
    loss = RouterLoss(coefficient, count, mesh, expects=any(routers))
    for layer, its_routers in zip(layers.values(), routers, strict=True):
        _Layer(loss, layer, its_routers)
    return loss


class RouterLoss:
    """The auxiliary loss of all routers of this rank: its gradient, and its part of the loss that is logged."""

    def __init__(self, coefficient: float, routers: int, mesh: Mesh | None, expects: bool = True) -> None:
        self.coefficient = coefficient
        self.routers = routers
        """Routers of the whole model."""
        self._mesh = mesh
        self._tokens = torch.ones(())
        self._total = torch.zeros(())
        self._expects = expects  # some layers of this rank have routers

    def __str__(self) -> str:
        return f"router auxiliary loss per sequence (of packed rows: per document), coefficient {self.coefficient:g}"

    def start_step(self, tokens: torch.Tensor) -> None:
        """Begin at zero. tokens: target tokens of the whole step, over all ranks, a float64 scalar."""
        self._tokens, self._total = tokens, torch.zeros_like(tokens)

    def step_sum(self) -> torch.Tensor:
        """Return this rank's part of the step's loss times its target tokens, a float64 scalar, to sum over all ranks.

        tp ranks compute the same numbers, cp ranks share theirs: the first of them counts. Raises ConfigError where
        the weights of the sequences never arrived.
        """
        if self._expects:
            raise ConfigError(
                "model.router_aux=sequence: this model does not hand keywords down to its decoder layers, so the "
                f"router cannot know its sequences; {SWITCH_OFF}"
            )
        counts = self._mesh is None or (self._mesh.rank("tp") == 0 and self._mesh.rank("cp") == 0)
        return self._total * self._tokens * counts

    def sink(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return a scalar whose gradient will be added to the step's sum; `hidden` enters the layer that takes it."""
        self._expects = False
        return _Sink.apply(hidden, torch.zeros_like(self._total, requires_grad=True), self._total)

    def of_router(self, router: nn.Module, outputs: Any, given: tuple[torch.Tensor, int, torch.Tensor]) -> Any:
        """Return what a router returned, through which the gradient of its loss will come.

        Args:
            outputs: (logits (batch x seq, experts), scores (batch x seq, top_k), chosen (batch x seq, top_k)).
            given: From `sequence_weights`, (batch, seq, 2); the number of sequences of a row; from `sink`.
        """
        weights, sequences, sink = given
        targets, number = weights.unbind(-1)  # (batch, seq)
        logits, scores, chosen = _checked(outputs, number, router)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        probabilities = F.softmax(logits, dim=-1, dtype=dtype).view(*number.shape, -1)  # (batch, seq, experts)
        numbers = torch.arange(sequences, device=number.device)[:, None]
        members = (number[:, None] == numbers).to(dtype)  # (batch, sequences, seq)
        chosen_of = chosen.view(*number.shape, -1)
        losses = balance_losses(probabilities, chosen_of, members, targets, self._context)  # (batch, sequences)
        weighted = losses.sum() * (self.coefficient / self.routers)
        return logits, _AddLoss.apply(scores, weighted / self._tokens.to(dtype), sink), chosen

    @property
    def _context(self) -> DeviceMesh | None:
        return None if self._mesh is None or self._mesh.size("cp") == 1 else self._mesh["cp"]


def sequence_weights(targets: torch.Tensor, bounds: torch.Tensor | None = None) -> torch.Tensor:
    """Return what each router must know of its tokens: (batch, seq, 2) int64, to be cut like them.

    First, the number of target tokens of a sequence at its first token, 0 elsewhere: their sum is the number wherever
    the tokens are. Then the number of the token's sequence within the row, or -1 after the sequence's last target: such
    tokens are padding or of no consequence. (Integers, because FSDP2 casts floats.)

    Args:
        targets: (batch, seq) of whole rows; IGNORED where there is none.
        bounds: Of the documents of packed rows, (batch, documents + 1); None: a row is one sequence.
    """
    rows, seq = targets.shape
    if bounds is None:
        bounds = (torch.arange(2, device=targets.device) * seq).expand(rows, 2)
    bounds = bounds.long()
    starts, ends = bounds[:, :-1], bounds[:, 1:]  # (batch, sequences); empty ones are at `seq`
    is_target = F.pad((targets != IGNORED).long(), (1, 0))  # (batch, seq + 1): whether each token is predicted
    is_target.scatter_(1, starts, 0)  # predicted from nothing
    before = F.pad(is_target.cumsum(1), (1, 0))  # targets before each place, (batch, seq + 2)
    counts = before.gather(1, ends) - before.gather(1, starts)  # (batch, sequences)
    place = torch.arange(seq, device=targets.device).repeat(rows, 1)
    number = torch.searchsorted(ends.contiguous(), place, right=True)  # (batch, seq)
    matters = before.gather(1, ends).gather(1, number) > before[:, :seq]  # a target is here or further on
    at_first = torch.zeros_like(is_target).scatter_add_(1, starts, counts)[:, :seq]
    return torch.stack([at_first, torch.where(matters, number, -1)], dim=-1)


def balance_losses(
    probabilities: torch.Tensor,
    chosen: torch.Tensor,
    members: torch.Tensor,
    targets: torch.Tensor,
    context: DeviceMesh | None = None,
) -> torch.Tensor:
    """Return experts x sum over experts of (share of tokens that chose it) x (its mean probability), of each sequence.

    Each is weighted by its target tokens: (batch, sequences). The shares of a sequence sum to top_k. A sequence without
    real tokens has zero.

    Args:
        probabilities: (batch, seq, experts).
        chosen: Experts of each token, (batch, seq, top_k).
        members: 1 where a token is of a sequence and counts, else 0; (batch, sequences, seq) in the type of the result.
        targets: Target tokens of a sequence at its first token, (batch, seq).
        context: Ranks that have other parts of the same rows; each gets the gradient of its own tokens.
    """
    ones = torch.ones_like(chosen, dtype=members.dtype)
    choices = torch.zeros_like(probabilities).scatter_add_(2, chosen, ones)  # (batch, seq, experts)
    others = torch.stack([torch.ones_like(targets), targets], dim=2).to(members.dtype)
    summed = members @ probabilities  # (batch, sequences, experts)
    counted = members @ torch.cat([choices, others], dim=2)  # (batch, sequences, experts + 2)
    if context is not None:
        experts = summed.shape[2]
        sums = all_reduce(torch.cat([summed.detach(), counted], dim=2), "sum", context)
        everywhere, counted = sums[..., :experts], sums[..., experts:]
        summed = summed + (everywhere - summed).detach()
    counts, tokens, weight = counted[..., :-2], counted[..., -2:-1].clamp(min=1), counted[..., -1]
    return weight * summed.shape[2] * (counts / tokens * (summed / tokens)).sum(2)


class _Layer:
    """One decoder layer with routers: they see the weights of the micro-batch at hand, also when recomputed."""

    def __init__(self, loss: RouterLoss, layer: nn.Module, routers: list[nn.Module]) -> None:
        self._loss = loss
        self._compute = layer.forward
        self._given: tuple[torch.Tensor, int, torch.Tensor] | None = None
        layer.forward = self.forward
        if routers:
            layer.register_forward_pre_hook(self.before, with_kwargs=True)
        for router in routers:
            router.register_forward_hook(self.after_router)

    def before(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Hook outside of recomputation and compilation: what runs here runs once for each micro-batch."""
        if SEQUENCE_WEIGHTS not in kwargs:
            return args, kwargs
        hidden = args[0] if args else kwargs["hidden_states"]
        documents = kwargs.get(DOCUMENTS)
        sequences = 1 if documents is None else documents.bounds.shape[1] - 1
        return args, {**kwargs, SEQUENCE_WEIGHTS: (kwargs[SEQUENCE_WEIGHTS], sequences, self._loss.sink(hidden))}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, without the keyword."""
        self._given = kwargs.pop(SEQUENCE_WEIGHTS, None)
        try:
            return self._compute(*args, **kwargs)
        finally:
            self._given = None

    def after_router(self, router: nn.Module, args: Any, outputs: Any) -> Any:
        """Hook of the layer's routers; outside of training steps nothing happens."""
        return outputs if self._given is None else self._loss.of_router(router, outputs, self._given)


class _AddLoss(torch.autograd.Function):
    """Scores as they are; in the backward the loss gets the gradient 1, and the sink the loss."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, loss: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss), loss.double()


class _Sink(torch.autograd.Function):
    """A zero whose gradient is added to a total.

    It hangs on a layer's hidden states, without a gradient for them, because a schedule that splits the backward runs
    what lies between a stage's outputs and inputs once, and the rest not at all or later.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, anchor: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        ctx.total = total
        return torch.zeros_like(anchor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        ctx.total.add_(grad)
        return None, None, None


def _checked(outputs: Any, tokens: torch.Tensor, router: nn.Module) -> Any:
    known = isinstance(outputs, tuple) and len(outputs) == 3 and all(each.dim() == 2 for each in outputs)
    if known and all(len(each) == tokens.numel() for each in outputs) and not outputs[2].is_floating_point():
        return outputs
    raise ConfigError(
        f"model.router_aux=sequence: {type(router).__name__} does not return logits, scores and chosen experts of "
        f"every token; {SWITCH_OFF}"
    )


def _sum_over_stages(count: int, mesh: Mesh | None) -> int:
    if mesh is None or mesh.size("pp") == 1:
        return count
    total = torch.tensor(count, device=mesh.device_mesh.device_type)
    dist.all_reduce(total, group=mesh["pp"].get_group())
    return int(total)
