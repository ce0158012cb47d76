"""Pipeline parallelism: the stages of a model run by torch's schedules.

The micro-batches of a step are those of gradient accumulation. Losses are sums, divided by the global number of target
tokens before the backward, so gradients need no scaling afterwards; under FSDP they are reduced once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from components.config.schema.model import DOCUMENTS
from components.config.schema.parallelism import SINGLE_STAGE, PipelineSchedule
from components.distributed.stages import Stage, Stages

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

Batch = dict[str, torch.Tensor]
"""input_ids and targets, under cp or in packed rows position_ids, (micro_batch, seq) each; keywords of the layers."""
INPUTS = ("input_ids", "targets", "position_ids")
"""Of a batch, what stages or the loss name themselves; the rest is handed to every stage as it is."""
TokenLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(logits (batch, seq, vocabulary), targets (batch, seq)) -> the sum of the token losses."""
Targets = dict[str, Any]
"""targets (batch, seq) and, in target_count, how many of them the host knows to be at most real."""


class Pipeline:
    """This rank's stages and the schedule over all of them; what the training step calls instead of a model."""

    def __init__(self, module: nn.Module, stages: Stages, mesh: DeviceMesh, schedule: PipelineSchedule) -> None:
        self.module = module
        """What this rank has of the model, under the model's own names."""
        self.group = mesh.get_group()
        self._mesh = mesh
        self._stages = stages
        self._name = str(schedule)
        self._hidden = stages.hidden
        self._device = next(module.parameters()).device
        self._built: tuple[tuple[int, ...], Any] = ((), None)
        self._loss: TokenLoss | None = None
        self._tied_is_fresh = False
        self._apart = False
        if stages.tied_head is not None:
            stages.tied_head.to_empty(device=self._device)

    @property
    def stage_modules(self) -> list[nn.Module]:
        """This rank's stages: what the schedule calls."""
        return [stage.module for stage in self._stages.own]

    def forward_backward(
        self,
        batches: list[Batch],
        token_loss: TokenLoss | None,
        head_keywords: dict[str, Any],
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Add the gradients of a step's micro-batches, all of one shape; return this rank's token losses in float64.

        Args:
            token_loss: The sum of a micro-batch's token losses; None: the last stage takes targets and returns it.
            head_keywords: What such a stage takes besides targets.
            tokens: Units of the whole step (target tokens), over all ranks.
        """
        self._copy_tied_weight()
        self._loss = lambda output, targets: _quotient(token_loss(output, targets) if token_loss else output, tokens)
        whole = {name: _joined([batch[name] for batch in batches]) for name in batches[0]}
        rows, seq = batches[0]["input_ids"].shape
        schedule = self._schedule(len(batches), rows, seq, token_loss is None)
        taken: Targets = {}
        if token_loss is None and self._has_head:
            taken = {"targets": whole["targets"], **head_keywords}
        losses: list[torch.Tensor] = []
        schedule.step(
            *([whole["input_ids"]] if self._stages.own[0].index == 0 else []),
            target=whole["targets"] if self._has_head else None,
            losses=losses if self._has_head else None,
            position_ids=_positions(whole),
            **_keywords(whole),
            **taken,
            return_outputs=False,
        )
        self._move_tied_gradient()
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack([loss.detach().double() for loss in losses]).sum() * tokens

    def loss(self, batch: Batch, token_loss: TokenLoss | None, head_keywords: dict[str, Any]) -> torch.Tensor:
        """Return the sum of a micro-batch's token losses on the ranks of the last stage, zero on the others."""
        self._copy_tied_weight()
        taken = {"targets": batch["targets"], **head_keywords} if token_loss is None else {}
        output = self._forward(batch["input_ids"], _positions(batch), _keywords(batch), **taken)
        if output is None:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return token_loss(output, batch["targets"]) if token_loss else output

    @contextmanager
    def stages_apart(self) -> Iterator[None]:
        """Context in which `loss` does not communicate: each rank runs its stages on random hidden states.

        A stage that raises then does not leave the next one waiting.
        """
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def logits(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor) -> Any:
        """Return an object whose `logits` (batch, positions to keep, vocabulary) every rank has, in float32."""
        self._copy_tied_weight()
        logits = self._forward(input_ids, position_ids, {}, logits_to_keep=logits_to_keep)
        shape = (len(input_ids), len(logits_to_keep), self._hidden.vocabulary)
        logits = torch.empty(shape, device=self._device) if logits is None else logits.float().contiguous()
        dist.broadcast(logits, src=self._rank_of(self._stages.last), group=self.group)
        return SimpleNamespace(logits=logits, past_key_values=None)

    def _forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, keywords: Batch, **head: Any
    ) -> torch.Tensor | None:
        """Pass one micro-batch through all stages; logits where the last one is, which alone gets `head`."""
        passed = input_ids
        for stage in self._stages.own:
            if stage.index > 0 and not self._is_here(stage.index - 1):
                passed = self._hidden.buffer(len(input_ids), input_ids.shape[1], self._device)
                if self._apart:
                    passed.normal_()
                else:
                    dist.recv(passed, src=self._rank_of(stage.index - 1), group=self.group)
            last = stage.index == self._stages.last
            passed = stage.module(passed, position_ids=position_ids, **keywords, **(head if last else {}))
            if last:
                return passed
            if not self._is_here(stage.index + 1) and not self._apart:
                dist.send(passed.contiguous(), dst=self._rank_of(stage.index + 1), group=self.group)
        return None

    def _schedule(self, micro_batches: int, rows: int, seq: int, gives_loss: bool) -> Any:
        """torch's schedule for micro-batches of (rows, seq); a new one when the shape has changed."""
        from torch.distributed.pipelining.schedules import get_schedule_class  # a second that only pipelines pay

        key = (micro_batches, rows, seq, gives_loss)
        if self._built[0] != key:
            built = [self._torch_stage(stage, rows, seq, gives_loss) for stage in self._stages.own]
            schedule = get_schedule_class(self._name)(
                built[0] if self._name in SINGLE_STAGE else built,
                n_microbatches=micro_batches,
                loss_fn=self._token_loss,
                scale_grads=False,
            )
            if self._built[0]:
                _skip_shape_vote(schedule)
            self._built = (key, schedule)
        return self._built[1]

    def _torch_stage(self, stage: Stage, rows: int, seq: int, gives_loss: bool) -> PipelineStage:
        from torch.distributed.pipelining import PipelineStage

        # Shapes are stated, so that torch need not run the stage once to find them.
        hidden = self._hidden.buffer(rows, seq, "meta").requires_grad_()
        tokens = torch.empty((rows, seq), dtype=torch.int64, device="meta")
        last = stage.index == self._stages.last
        output = torch.empty((rows, seq, self._hidden.vocabulary), dtype=self._hidden.dtype, device="meta")
        if gives_loss:
            exact = torch.float64 if self._hidden.dtype == torch.float64 else torch.float32
            output = torch.empty((), dtype=exact, device="meta")
        return PipelineStage(
            stage.module,
            stage.index,
            len(self._stages.places),
            self._device,
            input_args=tokens if stage.index == 0 else hidden,
            output_args=output.requires_grad_() if last else hidden,
            group=self.group,
        )

    def _token_loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self._loss is None:
            raise RuntimeError("the schedule asks for a loss outside of a step")
        return self._loss(output, targets)

    @property
    def _has_head(self) -> bool:
        return self._is_here(self._stages.last)

    def _is_here(self, stage: int) -> bool:
        return self._stages.places[stage] == self._mesh.get_local_rank()

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.group, self._stages.places[stage])

    def _copy_tied_weight(self) -> None:
        """Bring the embedding's weight to the head that is tied to it, unless no step was done since."""
        if self._tied_is_fresh:
            return
        self._tied_is_fresh = True
        embedding, head = self._tied_weights()
        with torch.no_grad():
            self._move(embedding, head)

    def _move_tied_gradient(self) -> None:
        """Add the gradient of the tied head's working copy to the embedding's; after it comes the update."""
        embedding, head = self._tied_weights()
        if not any(weight is not None and weight.requires_grad for weight in (embedding, head)):
            return  # not tied, or frozen: the copy stays true
        self._tied_is_fresh = False
        arrived = None if embedding is None else torch.empty_like(_local(embedding))
        self._move(None if head is None else head.grad, arrived)
        if embedding is not None:
            _local(embedding.grad).add_(arrived)
        if head is not None:
            head.grad = None

    def _move(self, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        """Copy this rank's part of a tensor from one end of the pipeline to the other; None: not this rank's."""
        if source is not None and target is not None:
            _local(target).copy_(_local(source))
            return
        first, last = self._rank_of(0), self._rank_of(self._stages.last)
        other = last if dist.get_rank() == first else first
        if source is not None:
            dist.send(_local(source).contiguous(), dst=other, group=self.group)
        if target is not None:
            arrived = torch.empty_like(_local(target), memory_format=torch.contiguous_format)
            dist.recv(arrived, src=other, group=self.group)
            _local(target).copy_(arrived)

    def _tied_weights(self) -> tuple[Any, Any]:
        """The sharded weights of a tied embedding and head, as far as this rank has them."""
        for stage in self._stages.own:
            if isinstance(stage.module, FSDPModule):
                stage.module.reshard()
        embedding, head = self._stages.embedding, self._stages.tied_head
        return embedding and embedding.weight, head and head.weight


def pad_to_longest(batches: Sequence[Batch]) -> list[Batch]:
    """Pad the micro-batches of a step (micro_batch, seq) on the right to one length: stages want one shape.

    Packed rows have it already.
    """
    if DOCUMENTS in batches[0]:
        return list(batches)
    longest = max(batch["input_ids"].shape[1] for batch in batches)
    fill = {"input_ids": 0, "labels": -100}
    return [
        {name: F.pad(batch[name], (0, longest - batch[name].shape[1]), value=value) for name, value in fill.items()}
        for batch in batches
    ]


def _skip_shape_vote(schedule: Any) -> None:
    """Let a schedule take shapes as stated, without asking the other stages.

    Before its first step a schedule of torch 2.13 lets the stages vote on whether all state their shapes, which also
    connects neighbors, and reads the result: the host waits for the device. The first schedule of a run has done that;
    for those of other shapes the outcome is known. Older versions of torch do not vote.
    """
    if hasattr(schedule, "_warmup_p2p"):
        from torch.distributed.pipelining.stage import InferenceMode

        def take_stated(stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
            for stage in stages:
                stage._inference_mode = InferenceMode.STATIC

        schedule._warmup_p2p = take_stated


def _joined(values: Sequence[Any]) -> Any:
    """Return the rows of all micro-batches, or the largest of their numbers, which bounds them all."""
    return torch.cat(list(values)) if isinstance(values[0], torch.Tensor) else max(values)


def _quotient(loss: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return loss / tokens.to(loss.dtype)


def _keywords(batch: Batch) -> Batch:
    """What stages hand down to their layers as it is."""
    return {name: tensor for name, tensor in batch.items() if name not in INPUTS}


def _positions(batch: Batch) -> torch.Tensor:
    """(batch, seq): those that are given, or the order of the row."""
    if "position_ids" in batch:
        return batch["position_ids"].contiguous()
    rows, seq = batch["input_ids"].shape
    return torch.arange(seq, device=batch["input_ids"].device).repeat(rows, 1)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
