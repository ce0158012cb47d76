"""Routers of mixtures of experts in training: auxiliary losses, loads of experts, and their balance by a bias.

The load-balancing loss is that of Switch Transformers (Fedus et al. 2021), for the top k experts as in Hugging Face
transformers, and the z-loss that of ST-MoE (Zoph et al. 2022). They are computed per layer and sequence, so that they
depend neither on micro-batches nor on ranks, and weighted by the sequence's number of target tokens, so that they are
divided by the global number of target tokens like the token losses. In packed rows each document is a sequence, so
packing does not change them either.

The load of an expert is the number of tokens of a step that are sent to it, over all micro-batches and ranks, without
padding. Balance by a bias (Wang et al. 2024, arXiv:2408.15664): after a step, the bias that is added to the scores of
an expert for its choice changes by a constant, up if its load was below the mean of its layer, else down. It receives
no gradient and no weight decay; a skipped step leaves it unchanged.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh

from components.config.compute_rules import no_router_bias
from components.config.schema.data import IGNORED
from components.config.schema.model import DOCUMENTS, ModelConfig, RouterAux
from components.config.schema.run import ExpertLoads
from components.distributed.expert import takes_routing
from components.distributed.mesh import Mesh
from components.models.anatomy import ROUTER_BIASES, Anatomy, read_anatomy
from components.models.weights.shards import local_blocks, local_part
from components.protocol.errors import ConfigError
from components.training.state import StepNumbers

logger = logging.getLogger(__name__)
SEQUENCE_WEIGHTS = "router_sequence_weights"
"""Keyword argument that passes `sequence_weights` through the model's forward to its decoder layers."""
_SWITCH_OFF = "set model.router_aux=none, model.router_z_coef=0 and model.router_bias_rate=0"


def attach_routers(
    model: nn.Module,
    cfg: ModelConfig,
    mesh: Mesh | None = None,
    anatomy: Anatomy | None = None,
    logged: ExpertLoads = ExpertLoads.none,
) -> Routers | None:
    """Attach auxiliary losses to the routers of a transformers model, and counters of tokens to its experts.

    The losses' gradients are added in the backward. Call it on all ranks, after the model is parallelized and before
    activation checkpointing and compilation. Returns None if there is nothing to attach.

    Args:
        anatomy: Anatomy of the whole model; None: read it, which under pp is right for losses only.
        logged: Which loads of experts the metrics of a step hold.

    Raises ConfigError for a coefficient if the model has no router to apply it to, or no bias for
    model.router_bias_rate.
    """
    anatomy = anatomy or read_anatomy(model)
    coefficient = anatomy.router_coefficient if cfg.router_aux_coef is None else cfg.router_aux_coef
    if cfg.router_aux == RouterAux.none:
        coefficient = None
    layers, found = anatomy.decoder_layers(model), anatomy.parts(model, anatomy.routers)
    routers = [[each for router, each in found.items() if router.startswith(f"{name}.")] for name in layers]
    count = _over_stages(sum(map(len, routers)), dist.ReduceOp.SUM, mesh)
    if count == 0 and anatomy.has_router_class and cfg.router_aux_coef is None:
        coefficient = None  # a mixture-of-experts class whose config makes every layer dense
    if count == 0 and (coefficient or cfg.router_z_coef):
        raise ConfigError(
            f"model.router_aux=sequence: the coefficient {coefficient or cfg.router_z_coef} applies to nothing: no "
            f"router was found in the decoder layers of {type(model).__name__}; set model.router_aux=none and "
            "model.router_z_coef=0"
        )
    loads = _find_loads(model, anatomy, cfg, mesh, logged)
    if not coefficient and not cfg.router_z_coef and loads is None:
        return None
    attached = Routers(coefficient or 0.0, cfg.router_z_coef, count, mesh, loads)
    for (name, layer), layer_routers in zip(layers.items(), routers, strict=True):
        of_layer = [] if loads is None else [each for each in loads.experts if each.name.startswith(f"{name}.")]
        _RouterHooks(attached, layer, layer_routers if coefficient or cfg.router_z_coef else [], of_layer)
    return attached


class Routers:
    """Routers and experts of this rank's decoder layers, over the micro-batches of a step.

    Values reach the step's sums in the backward, once per micro-batch however often layers are recomputed.
    """

    def __init__(
        self, coefficient: float, z_coefficient: float, routers: int, mesh: Mesh | None, loads: _Loads | None = None
    ) -> None:
        self.coefficient, self.z_coefficient = coefficient, z_coefficient
        self.routers = routers
        """Number of routers of the whole model."""
        self.loads = loads
        """Loads of the experts; None: they are not counted."""
        self._mesh = mesh
        self._tokens = torch.ones(())
        self._total = torch.zeros(())
        self.expects = False
        """Whether sequence weights must still arrive: this rank has routers or experts, and none was called."""

    def __str__(self) -> str:
        rate, parts = 0.0 if self.loads is None else self.loads.rate, []
        if self.coefficient:
            parts.append(
                f"auxiliary loss, per sequence (in packed rows: per document), coefficient {self.coefficient:g}"
            )
        if self.z_coefficient:
            parts.append(f"z-loss, coefficient {self.z_coefficient:g}")
        if rate:
            parts.append(f"biases of experts change by {rate:g} per step")
        return f"routers: {'; '.join(parts)}" if parts else ""

    def __bool__(self) -> bool:
        return bool(str(self))

    def start_step(self, tokens: torch.Tensor) -> None:
        """Reset the sums. tokens: target tokens of the whole step, over all ranks, a float64 scalar."""
        self._tokens, self._total = tokens, torch.zeros_like(tokens)
        if self.loads is not None:
            self.loads.counts = torch.zeros_like(self.loads.counts, device=tokens.device)

    def step_sum(self) -> torch.Tensor:
        """Return this rank's part of the step's loss times its target tokens, a float64 scalar to sum over all ranks.

        Ranks along tp and cp hold the same value, so only the first of them counts. Raises ConfigError if the sequence
        weights never reached a decoder layer.
        """
        if self.expects and (self.coefficient or self.z_coefficient or (self.loads is not None and self.loads.rate)):
            raise ConfigError(
                "model.router_aux=sequence: this model does not pass keyword arguments down to its decoder layers, so "
                f"its routers do not receive the sequence weights; {_SWITCH_OFF}"
            )
        counts = self._mesh is None or (self._mesh.rank("tp") == 0 and self._mesh.rank("cp") == 0)
        return self._total * self._tokens * counts

    def step_loads(self) -> torch.Tensor:
        """Return this rank's part of the loads of all experts, (layers x experts,) float64, to sum over all ranks.

        Ranks along tp hold the same tokens, so only the first of them counts. Empty if loads are not counted.
        """
        if self.loads is None:
            return self._total.new_zeros(0)
        return self.loads.counts.flatten() * (self._mesh is None or self._mesh.rank("tp") == 0)

    def end_step(self, numbers: StepNumbers, loads: torch.Tensor) -> StepNumbers:
        """Change the biases of experts by their loads, and return a step's metrics with those of the loads.

        Args:
            loads: Sum of `step_loads` over all ranks.
        """
        if self.loads is None:
            return numbers
        if self.expects and self.loads.metrics:  # all ranks still sum the counts: others may have received them
            logger.warning("the loads of experts are unknown: the model passes no keyword arguments to its layers")
            self.loads.metrics = ()
        metrics = self.loads.end_step(loads, numbers["skipped"])
        return StepNumbers(torch.cat([numbers.vector, metrics]), (*numbers.names, *self.loads.metrics))

    def sinks(self, hidden: torch.Tensor, row: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return zeros whose gradients are added to the step's sums. hidden: The layer's input (see `_Sink`).

        Args:
            row: Number of the layer's experts among all; None: their loads are not counted.
        """
        self.expects = False
        total = _Sink.apply(hidden, torch.zeros_like(self._total, requires_grad=True), self._total)
        if row is None or self.loads is None:
            return total, None
        counts = self.loads.counts[row]
        return total, _Sink.apply(hidden, torch.zeros_like(counts, requires_grad=True), counts)

    def add_to_router(self, router: nn.Module, outputs: Any, inputs: _LayerInputs) -> Any:
        """Return a router's outputs with its losses attached: their backward also computes the losses' gradient.

        Args:
            outputs: (logits (batch x seq, experts), scores (batch x seq, top_k), chosen (batch x seq, top_k)).
        """
        targets, sequence_of = inputs.weights.unbind(-1)  # (batch, seq)
        logits, scores, chosen = _check_outputs(outputs, sequence_of, router)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        logits_of = logits.to(dtype).view(*sequence_of.shape, -1)  # (batch, seq, experts)
        indices = torch.arange(inputs.sequences, device=sequence_of.device)[:, None]
        members = (sequence_of[:, None] == indices).to(dtype)  # (batch, sequences, seq)
        experts = chosen.view(*sequence_of.shape, -1)
        squares = logits_of.logsumexp(-1).square() if self.z_coefficient else None  # (batch, seq)
        balance, z = _sequence_losses(logits_of.softmax(-1), experts, members, targets, squares, self._cp_mesh)
        losses = balance.sum() * self.coefficient
        if z is not None:
            losses = losses + z.sum() * self.z_coefficient
        weighted = losses / self.routers
        return logits, _AddLoss.apply(scores, weighted / self._tokens.to(dtype), inputs.total), chosen

    @property
    def _cp_mesh(self) -> DeviceMesh | None:
        return None if self._mesh is None or self._mesh.size("cp") == 1 else self._mesh["cp"]


@dataclass(frozen=True, slots=True)
class _Experts:
    """Experts of a decoder layer on this rank."""

    name: str
    module: nn.Module
    row: int
    """Their number among all of the model, in order."""
    owner: nn.Module | None
    """Module of the bias for their choice; None: they have none."""
    bias: str = ""
    """Its name in the module."""


class _Loads:
    """Loads of all experts in a step, their metrics, and the balance by biases."""

    def __init__(self, experts: list[_Experts], names: tuple[str, ...], size: int, rate: float, logged: ExpertLoads):
        self.experts, self.size, self.rate = experts, size, rate
        self.counts = torch.zeros(len(names), size, dtype=torch.float64)
        """Tokens of this rank that were sent to each expert, (layers, experts)."""
        layers = [number[-1] for name in names if (number := re.findall(r"\.(\d+)\.", name))]
        self.metrics: tuple[str, ...] = ()
        if logged is not ExpertLoads.none:
            self.metrics = ("expert_load", "dead_experts", "expert_entropy")
        if logged is ExpertLoads.layers:
            self.metrics += tuple(f"expert_load_{layer}" for layer in layers)

    def count(self, arguments: tuple[Any, ...], sequence_of: torch.Tensor, sink: torch.Tensor) -> tuple[Any, ...]:
        """Return the arguments of experts, whose backward adds the tokens of each expert to the step's sum.

        Args:
            arguments: Hidden states (batch x seq, hidden), chosen experts and their scores (batch x seq, top_k).
            sequence_of: Sequence of each token, or -1 for those that do not count, (batch, seq).
        """
        hidden, chosen, scores, *others = arguments
        if len(chosen) != sequence_of.numel():
            raise ConfigError(
                f"logging.experts: the experts receive {len(chosen)} of {sequence_of.numel()} tokens, so their loads "
                "cannot be counted; set logging.experts=none and model.router_bias_rate=0"
            )
        counted = (sequence_of.view(-1, 1) >= 0).expand(chosen.shape).to(torch.float64)
        tokens = counted.new_zeros(self.size).scatter_add(0, chosen.flatten(), counted.flatten())
        return hidden, chosen, _AddLoss.apply(scores, tokens, sink), *others

    @torch.no_grad()
    def end_step(self, loads: torch.Tensor, skipped: torch.Tensor) -> torch.Tensor:
        """Change the biases by the loads of a step, and return its metrics, (metrics,) float64, equal on every rank.

        Args:
            loads: Tokens of each expert on all ranks, (layers x experts,).
            skipped: 0 unless the step's update was skipped.
        """
        loads = loads.view(self.counts.shape)
        for each in self.experts:
            if self.rate and each.owner is not None:
                bias, load = each.owner.state_dict(keep_vars=True)[each.bias], loads[each.row]
                change = (self.rate * (load.mean() - load).sign() * (skipped == 0)).view(bias.shape)
                for block in local_blocks(bias, each.bias):
                    local_part(bias)[block.local] += change[block.full].to(bias.dtype)
        if not self.metrics:
            return loads.new_zeros(0)
        shares = loads / loads.sum(1, keepdim=True).clamp(min=1)
        worst = shares.amax(1) * self.size  # (layers,), largest load of an expert over the mean
        entropy = -torch.special.xlogy(shares, shares).sum(1) / math.log(max(2, self.size))
        values = [worst.max(), (loads == 0).sum(), entropy.mean()]
        return torch.stack([each.to(loads.dtype) for each in (*values, *worst)[: len(self.metrics)]])


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


def _sequence_losses(
    probabilities: torch.Tensor,
    chosen: torch.Tensor,
    members: torch.Tensor,
    targets: torch.Tensor,
    squares: torch.Tensor | None = None,
    cp_mesh: DeviceMesh | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return each sequence's load-balancing loss and its z-loss, weighted by its target tokens: (batch, sequences).

    The first is experts x the sum over experts of (share of tokens routed to the expert) x (mean router probability of
    the expert). The shares of a sequence sum to top_k. The second is the mean of `squares`; None without them. A
    sequence without tokens that count has losses of zero.

    Args:
        probabilities: (batch, seq, experts).
        chosen: Experts of each token, (batch, seq, top_k).
        members: 1 if a token belongs to a sequence and counts, else 0; (batch, sequences, seq), in the result's dtype.
        targets: At a sequence's first token its number of target tokens, else 0; (batch, seq).
        squares: Squares of the logarithms of the sums of exponentials of the logits, (batch, seq).
        cp_mesh: Mesh of the ranks that hold the other shards of the rows; each computes the gradient of its own tokens.
    """
    experts = probabilities.shape[2]
    ones = torch.ones_like(chosen, dtype=members.dtype)
    choices = torch.zeros_like(probabilities).scatter_add_(2, chosen, ones)  # (batch, seq, experts)
    ones_and_targets = torch.stack([torch.ones_like(targets), targets], dim=2).to(members.dtype)
    values = probabilities if squares is None else torch.cat([probabilities, squares[..., None]], dim=2)
    summed = members @ values  # (batch, sequences, experts), and one more for squares
    counted = members @ torch.cat([choices, ones_and_targets], dim=2)  # (batch, sequences, experts + 2)
    if cp_mesh is not None:
        width = summed.shape[2]
        sums = all_reduce(torch.cat([summed.detach(), counted], dim=2), "sum", cp_mesh)
        total, counted = sums[..., :width], sums[..., width:]
        summed = summed + (total - summed).detach()  # value: the sum over cp; gradient: that of this rank's shard
    counts, tokens, weight = counted[..., :-2], counted[..., -2:-1].clamp(min=1), counted[..., -1]
    means = summed / tokens
    balance = weight * experts * (counts / tokens * means[..., :experts]).sum(2)
    return balance, None if squares is None else weight * means[..., experts]


@dataclass(frozen=True, slots=True)
class _LayerInputs:
    """What a layer's routers and experts need of a micro-batch."""

    weights: torch.Tensor
    """Result of `sequence_weights`, (batch, seq, 2)."""
    sequences: int
    """Number of sequences per row."""
    total: torch.Tensor
    """Sink of the losses."""
    loads: torch.Tensor | None
    """Sink of the loads, (experts,); None: they are not counted."""


class _RouterHooks:
    """Patched forward and hooks of a decoder layer, which pass the micro-batch's sequence weights to its routers.

    The weights are an input of the layer, so that recomputation passes them again.
    """

    def __init__(self, routers: Routers, layer: nn.Module, modules: list[nn.Module], experts: list[_Experts]) -> None:
        self._routers, self._row = routers, experts[0].row if experts else None
        self._layer_forward = layer.forward
        self._inputs: _LayerInputs | None = None
        layer.forward = self.forward
        if modules or experts:
            routers.expects = True
            layer.register_forward_pre_hook(self.before_layer, with_kwargs=True)
        for module in modules:
            module.register_forward_hook(self.after_router)
        for each in experts:
            each.module.register_forward_pre_hook(self.before_experts)

    def before_layer(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Add the sinks to the weights. A pre-hook is outside of recomputation, so it runs once per micro-batch."""
        if SEQUENCE_WEIGHTS not in kwargs:
            return args, kwargs
        hidden = args[0] if args else kwargs["hidden_states"]
        documents = kwargs.get(DOCUMENTS)
        sequences = 1 if documents is None else documents.bounds.shape[1] - 1
        sinks = self._routers.sinks(hidden, self._row)
        return args, {**kwargs, SEQUENCE_WEIGHTS: (kwargs[SEQUENCE_WEIGHTS], sequences, *sinks)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's original forward without the keyword."""
        passed = kwargs.pop(SEQUENCE_WEIGHTS, None)
        self._inputs = None if passed is None or isinstance(passed, torch.Tensor) else _LayerInputs(*passed)
        try:
            return self._layer_forward(*args, **kwargs)
        finally:
            self._inputs = None

    def after_router(self, router: nn.Module, args: Any, outputs: Any) -> Any:
        """Add the losses to a router's outputs; outside of training steps, return them unchanged."""
        return outputs if self._inputs is None else self._routers.add_to_router(router, outputs, self._inputs)

    def before_experts(self, experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Count the tokens of each expert; outside of training steps, return the arguments unchanged."""
        inputs, loads = self._inputs, self._routers.loads
        if inputs is None or inputs.loads is None or loads is None:
            return args
        return loads.count(args, inputs.weights[..., 1], inputs.loads)


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


def _find_loads(
    model: nn.Module, anatomy: Anatomy, cfg: ModelConfig, mesh: Mesh | None, logged: ExpertLoads
) -> _Loads | None:
    """Return the loads of the model's experts; None if they are neither logged nor balanced, or there are none.

    Raises ConfigError for model.router_bias_rate if no router has a bias.
    """
    if logged is ExpertLoads.none and not cfg.router_bias_rate:
        return None
    names = {name: row for row, name in enumerate(anatomy.experts)}
    experts = [
        _Experts(name, module, names[name], *_bias_of(model.get_submodule(name.rpartition(".")[0])))
        for name, module in anatomy.parts(model, anatomy.experts).items()
        if takes_routing(module)
    ]
    sizes = [next(each.module.parameters(recurse=False)).shape[0] for each in experts]
    size = _over_stages(max(sizes, default=0), dist.ReduceOp.MAX, mesh)
    biases = _over_stages(sum(each.owner is not None for each in experts), dist.ReduceOp.SUM, mesh)
    if cfg.router_bias_rate and not biases:
        raise ConfigError(no_router_bias(cfg.router_bias_rate, type(model).__name__))
    return _Loads(experts, anatomy.experts, size, cfg.router_bias_rate, logged) if size else None


def _bias_of(block: nn.Module) -> tuple[nn.Module | None, str]:
    """Return the module and the name of the bias that a block's router adds to scores; (None, "") without one."""
    for module in block.modules():
        for name in (*module._parameters, *module._buffers):
            if name in ROUTER_BIASES:
                return module, name
    return None, ""


def _over_stages(value: int, operation: dist.ReduceOp.RedOpType, mesh: Mesh | None) -> int:
    """Return the sum or the maximum of a number over the pipeline stages."""
    if mesh is None or mesh.size("pp") == 1:
        return value
    total = torch.tensor(value, device=mesh.device_mesh.device_type)
    dist.all_reduce(total, operation, group=mesh["pp"].get_group())
    return int(total)
