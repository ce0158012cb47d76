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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from components.batch import Batch
from components.config.schema.parallelism import SINGLE_STAGE, PipelineSchedule
from components.distributed.fsdp import fsdp_units
from components.distributed.pipeline.stages import Stage, Stages

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

LossOfLogits = Callable[[torch.Tensor, Batch], torch.Tensor]
"""(logits (batch, seq, vocabulary), micro-batch) -> the sum of its losses."""


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
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
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
        loss_of_logits: LossOfLogits | None,
        head_keywords: dict[str, Any],
        units: torch.Tensor,
    ) -> torch.Tensor:
        """Add the gradients of a step's micro-batches, all of one shape; return this rank's sum of losses in float64.

        Args:
            loss_of_logits: The sum of a micro-batch's losses; None: the last stage takes targets and returns it.
            head_keywords: What such a stage takes besides targets and token weights.
            units: Units of the whole step (target tokens, pairs), over all ranks.
        """
        self._copy_tied_weight()
        # A forward before this one may have left the stages gathered. torch reshards those of a schedule that it builds
        # anew, which dp ranks do at different steps: all must start alike, or their all-gathers do not match.
        for stage in self._stages.own:
            for unit in fsdp_units(stage.module):
                unit.reshard()

        def loss_of_output(output: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            loss = output if loss_of_logits is None else loss_of_logits(output, batches[int(index)])
            return loss / units.to(loss.dtype)

        self._loss = loss_of_output
        whole = Batch.joined(batches)
        rows, seq = batches[0].shape
        schedule = self._schedule(len(batches), rows, seq, loss_of_logits is None)
        taken = whole.head_inputs() | head_keywords if loss_of_logits is None and self._has_head else {}
        losses: list[torch.Tensor] = []
        schedule.step(
            *([whole.input_ids] if self._stages.own[0].index == 0 else []),
            # Schedules hand the loss its part of this tensor and nothing else: the number of the micro-batch, on the
            # host, which so need not wait to read it.
            target=torch.arange(len(batches)) if self._has_head else None,
            losses=losses if self._has_head else None,
            position_ids=_positions(whole),
            **whole.layer_keywords(),
            **taken,
            return_outputs=False,
        )
        self._move_tied_gradient()
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack([loss.detach().double() for loss in losses]).sum() * units

    def forward(self, batch: Batch, head_keywords: dict[str, Any] | None = None) -> torch.Tensor | None:
        """Forward a micro-batch; return what the last stage returns on its ranks, None on the others.

        Args:
            head_keywords: What a last stage that takes targets needs besides them; None: it returns logits.
        """
        self._copy_tied_weight()
        taken = {} if head_keywords is None else batch.head_inputs() | head_keywords
        return self._forward(batch.input_ids, _positions(batch), batch.layer_keywords(), **taken)

    @contextmanager
    def stages_apart(self) -> Iterator[None]:
        """Context in which `forward` does not communicate: each rank runs its stages on random hidden states.

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
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, keywords: dict[str, Any], **head: Any
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
                loss_fn=self._loss_of_output,
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

    def _loss_of_output(self, output: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if self._loss is None:
            raise RuntimeError("the schedule asks for a loss outside of a step")
        return self._loss(output, index)

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
    """Pad the micro-batches of a step (micro_batch, seq) on the right to one length: stages need one shape."""
    longest = max(batch.shape[1] for batch in batches)
    return [batch.pad_to(longest) for batch in batches]


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


def _positions(batch: Batch) -> torch.Tensor:
    """Return the position ids (batch, seq) of a batch, or the order of the row."""
    if batch.position_ids is not None:
        return batch.position_ids.contiguous()
    rows, seq = batch.shape
    return torch.arange(seq, device=batch.input_ids.device).repeat(rows, 1)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
