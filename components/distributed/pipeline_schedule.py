"""Pipeline parallelism: runs the stages of a model under torch's schedules.

A schedule runs over the micro-batches of gradient accumulation. Loss sums are divided by the global number of units
before the backward, so gradients need no scaling afterwards. FSDP reduces gradients once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from components.batch import Batch
from components.config.compute_rules import split_backward_problems
from components.config.schema.parallelism import SINGLE_STAGE, PipelineSchedule
from components.distributed.fsdp import reshard
from components.distributed.pipeline_stages import Stage, Stages
from components.protocol.errors import raise_all

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

_LossOfLogits = Callable[[torch.Tensor, Batch], torch.Tensor]
"""(logits (batch, seq, vocabulary), micro-batch) -> loss sum of the micro-batch."""


class Pipeline:
    """This rank's stages and their schedule; the training step calls it instead of a model."""

    def __init__(self, module: nn.Module, stages: Stages, mesh: DeviceMesh, schedule: PipelineSchedule) -> None:
        if Version(torch.__version__).release < (2, 13):
            raise_all(split_backward_problems(schedule, torch.__version__))
        self.module = module
        """The model with this rank's layers only, under their original names."""
        self.group = mesh.get_group()
        self._mesh = mesh
        self._stages = stages
        self._name = str(schedule)
        self._hidden = stages.hidden
        self._device = next(module.parameters()).device
        self._cached: tuple[tuple[int, ...], Any] = ((), None)
        self._loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self._tied_is_fresh = False
        self._tied_is_trained: bool | None = None
        """Whether the tied weight requires gradients, on both of its stages; None before the first forward."""
        self._isolated = False
        if stages.tied_head is not None:
            stages.tied_head.to_empty(device=self._device)

    @property
    def stage_modules(self) -> list[nn.Module]:
        """Modules of this rank's stages, which the schedule calls."""
        return [stage.module for stage in self._stages.own]

    def forward_backward(
        self,
        batches: list[Batch],
        loss_of_logits: _LossOfLogits | None,
        head_keywords: dict[str, Any],
        units: torch.Tensor,
    ) -> torch.Tensor:
        """Run forward and backward of a step's micro-batches; return this rank's loss sum, a float64 scalar.

        Args:
            batches: Micro-batches of one shape (rows, seq).
            loss_of_logits: Maps logits and a micro-batch to its loss sum; None: the last stage takes targets and
                returns the loss sum itself.
            head_keywords: Arguments of such a last stage besides targets and token weights.
            units: Global number of units of the step (targets, pairs), which losses are divided by.
        """
        self._copy_tied_weight()
        # An earlier forward may have left stages unsharded. torch reshards the stages of a new schedule, but dp ranks
        # build new schedules at different steps. Reshard here, so that all ranks run the same all-gathers.
        self._reshard()

        def loss_of_output(output: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            loss = output if loss_of_logits is None else loss_of_logits(output, batches[int(index)])
            return loss / units.to(loss.dtype)

        self._loss = loss_of_output
        joined = Batch.joined(batches)
        rows, seq = batches[0].shape
        schedule = self._schedule(len(batches), rows, seq, loss_of_logits is None)
        head_inputs = joined.head_inputs() | head_keywords if loss_of_logits is None and self._has_head else {}
        losses: list[torch.Tensor] = []
        schedule.step(
            *([joined.input_ids] if self._stages.own[0].index == 0 else []),
            # Schedules pass only a chunk of this tensor to the loss. It is the index of the micro-batch, on the CPU, so
            # that reading it does not wait for the device; from `torch.tensor`, which has values in a simulation too.
            target=torch.tensor(range(len(batches))) if self._has_head else None,
            losses=losses if self._has_head else None,
            position_ids=_positions(joined),
            **joined.layer_keywords(),
            **head_inputs,
            return_outputs=False,
        )
        self._move_tied_gradient()
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack([loss.detach().double() for loss in losses]).sum() * units

    def forward(self, batch: Batch, head_keywords: dict[str, Any] | None = None) -> torch.Tensor | None:
        """Forward a micro-batch; return the output of the last stage on its ranks, None on the others.

        Args:
            head_keywords: Arguments of a last stage that takes targets, besides the targets; None: it returns logits.
        """
        self._copy_tied_weight()
        head_inputs = {} if head_keywords is None else batch.head_inputs() | head_keywords
        return self._forward(batch.input_ids, _positions(batch), batch.layer_keywords(), **head_inputs)

    @property
    def tied_head(self) -> nn.Module | None:
        """This rank's copy of a head that is tied to the embedding; None on ranks without one."""
        return self._stages.tied_head

    def weights_changed(self) -> None:
        """Copy the embedding to the tied head again before the next forward. For changes outside a training step."""
        self._tied_is_fresh = False

    @contextmanager
    def stages_apart(self) -> Iterator[None]:
        """Disable communication in `forward` within the context: each rank runs its stages on random hidden states.

        If one stage raises, the next one does not hang waiting for it.
        """
        self._isolated = True
        try:
            yield
        finally:
            self._isolated = False

    def logits(self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor) -> Any:
        """Return an object with `logits` (batch, positions to keep, vocabulary) in float32, on every rank.

        Called like a Hugging Face model, for generation.
        """
        self._copy_tied_weight()
        logits = self._forward(input_ids, position_ids, {}, logits_to_keep=logits_to_keep)
        shape = (len(input_ids), len(logits_to_keep), self._hidden.vocabulary)
        logits = torch.empty(shape, device=self._device) if logits is None else logits.float().contiguous()
        dist.broadcast(logits, src=self._rank_of(self._stages.last), group=self.group)
        return SimpleNamespace(logits=logits, past_key_values=None)

    def _forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, keywords: dict[str, Any], **head: Any
    ) -> torch.Tensor | None:
        """Pass a micro-batch through all stages; return the last stage's output on its rank, None on the others.

        Only the last stage gets the keyword arguments `head`.
        """
        activation = input_ids
        for stage in self._stages.own:
            if stage.index > 0 and not self._is_here(stage.index - 1):
                activation = self._hidden.buffer(len(input_ids), input_ids.shape[1], self._device)
                if self._isolated:
                    activation.normal_()
                else:
                    dist.recv(activation, src=self._rank_of(stage.index - 1), group=self.group)
            last = stage.index == self._stages.last
            activation = stage.module(activation, position_ids=position_ids, **keywords, **(head if last else {}))
            if last:
                return activation
            if not self._is_here(stage.index + 1) and not self._isolated:
                dist.send(activation.contiguous(), dst=self._rank_of(stage.index + 1), group=self.group)
        return None

    def _schedule(self, micro_batches: int, rows: int, seq: int, returns_loss: bool) -> Any:
        """Return torch's schedule for micro-batches of (rows, seq); build a new one if the shape has changed."""
        from torch.distributed.pipelining.schedules import get_schedule_class  # takes a second to import

        key = (micro_batches, rows, seq, returns_loss)
        if self._cached[0] != key:
            torch_stages = [self._torch_stage(stage, rows, seq, returns_loss) for stage in self._stages.own]
            schedule = get_schedule_class(self._name)(
                torch_stages[0] if self._name in SINGLE_STAGE else torch_stages,
                n_microbatches=micro_batches,
                loss_fn=self._loss_of_output,
                scale_grads=False,
            )
            if self._cached[0] or dist.get_backend(self.group) == dist.Backend.FAKE:  # a simulation has no other stages
                _skip_first_exchange(schedule, torch_stages)
            self._cached = (key, schedule)
        return self._cached[1]

    def _torch_stage(self, stage: Stage, rows: int, seq: int, returns_loss: bool) -> PipelineStage:
        from torch.distributed.pipelining import PipelineStage

        # Input and output shapes are given, so that torch does not run the stage once to infer them.
        hidden = self._hidden.buffer(rows, seq, "meta").requires_grad_()
        tokens = torch.empty((rows, seq), dtype=torch.int64, device="meta")
        last = stage.index == self._stages.last
        output = torch.empty((rows, seq, self._hidden.vocabulary), dtype=self._hidden.dtype, device="meta")
        if returns_loss:
            loss_dtype = torch.float64 if self._hidden.dtype == torch.float64 else torch.float32
            output = torch.empty((), dtype=loss_dtype, device="meta")
        torch_stage: Any = PipelineStage(
            stage.module,
            stage.index,
            len(self._stages.pp_ranks),
            self._device,
            input_args=tokens if stage.index == 0 else hidden,
            output_args=output.requires_grad_() if last else hidden,
            group=self.group,
        )
        if hasattr(torch_stage, "_validate_fwd_outputs"):
            # That of torch 2.11 compares strides too, which differ for a slice of a vocabulary that tp pads.
            torch_stage._validate_fwd_outputs = partial(_check_outputs, torch_stage, last)
        return torch_stage

    def _loss_of_output(self, output: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        if self._loss is None:
            raise RuntimeError("the schedule computed a loss before forward_backward was called")
        return self._loss(output, index)

    @property
    def _has_head(self) -> bool:
        return self._is_here(self._stages.last)

    def _is_here(self, stage: int) -> bool:
        return self._stages.pp_ranks[stage] == self._mesh.get_local_rank()

    def _rank_of(self, stage: int) -> int:
        return dist.get_global_rank(self.group, self._stages.pp_ranks[stage])

    def _copy_tied_weight(self) -> None:
        """Copy the embedding's weight to the tied head, if it was updated since the last copy."""
        if self._tied_is_fresh:
            return
        self._tied_is_fresh = True
        embedding, head = self._tied_weights()
        if self._tied_is_trained is None:
            self._tied_is_trained = self._share_requires_grad(embedding, head)
        with torch.no_grad():
            self._move(embedding, head)

    def _share_requires_grad(self, embedding: Any, head: Any) -> bool:
        """Set `requires_grad` of the tied head to that of the embedding, which may have been frozen; return it.

        The host of the last stage waits for it once, before the first forward, because FSDP reads it there.
        """
        if embedding is None and head is None:
            return False
        own: bool = (head if embedding is None else embedding).requires_grad
        if dist.get_backend(self.group) == dist.Backend.FAKE:  # a simulation has no other stages
            return own
        shared = torch.tensor(float(own), device=self._device)
        self._move(None if embedding is None else shared, None if head is None else shared)
        if head is not None:
            head.requires_grad_(bool(shared))
        return bool(shared)

    def _move_tied_gradient(self) -> None:
        """Add the gradient of the tied head's copy to the embedding's, before the optimizer step."""
        embedding, head = self._tied_weights()
        if embedding is not None and embedding.requires_grad != self._tied_is_trained:
            raise RuntimeError(
                f"the tied embedding was {'unfrozen' if embedding.requires_grad else 'frozen'} after the first forward "
                "of a pipeline, whose last stage holds a copy: set its requires_grad right after training.prepare"
            )
        if not self._tied_is_trained:
            return  # not tied, or frozen: the copy stays valid
        self._tied_is_fresh = False
        head_grad = None if embedding is None else torch.empty_like(_local(embedding))
        self._move(None if head is None else head.grad, head_grad)
        if embedding is not None:
            _local(embedding.grad).add_(head_grad)
        if head is not None:
            head.grad = None

    def _move(self, source: torch.Tensor | None, target: torch.Tensor | None) -> None:
        """Copy the local shard of a tensor between the first and last stage; None on a rank without that stage."""
        if source is not None and target is not None:
            _local(target).copy_(_local(source))
            return
        first, last = self._rank_of(0), self._rank_of(self._stages.last)
        other = last if dist.get_rank() == first else first
        if source is not None:
            dist.send(_local(source).contiguous(), dst=other, group=self.group)
        if target is not None:
            received = torch.empty_like(_local(target), memory_format=torch.contiguous_format)
            dist.recv(received, src=other, group=self.group)
            _local(target).copy_(received)

    def _reshard(self) -> None:
        for stage in self._stages.own:
            reshard(stage.module)

    def _tied_weights(self) -> tuple[Any, Any]:
        """Return the sharded weights of the tied embedding and head; None for one that this rank does not hold."""
        self._reshard()
        embedding, head = self._stages.embedding, self._stages.tied_head
        return embedding and embedding.weight, head and head.weight


def pad_to_longest(batches: Sequence[Batch]) -> list[Batch]:
    """Pad the micro-batches of a step (micro_batch, seq) on the right to the longest: schedules require one shape."""
    longest = max(batch.shape[1] for batch in batches)
    return [batch.pad_to(longest) for batch in batches]


def _skip_first_exchange(schedule: Any, stages: Sequence[Any]) -> None:
    """Patch a schedule to begin its first step without communication between the stages.

    torch connects neighboring ranks there, with a copy to the device that blocks the host. torch 2.13 also exchanges
    whether all shapes are given, and reads the result from the device. The first schedule of a run has done so, and
    later ones have the same result.
    """
    if hasattr(schedule, "_warmup_p2p"):
        from torch.distributed.pipelining.stage import InferenceMode

        def use_given_shapes(stages: Sequence[Any], has_backward: bool, p2p_done: bool) -> None:
            for stage in stages:
                stage._inference_mode = InferenceMode.STATIC

        schedule._warmup_p2p = use_given_shapes
    else:  # torch 2.11
        for stage in stages:
            stage._get_init_p2p_neighbors_ops = list


def _check_outputs(stage: Any, last: bool, outputs: tuple[torch.Tensor, ...]) -> None:
    """Raise RuntimeError if the outputs of a stage differ in shape or dtype from those that it was built with.

    The last stage sends its outputs to no other, and a model may return logits in float32.
    """
    expected, found = (
        [(*each.shape, *([] if last else [each.dtype])) for each in part]
        for part in (stage.get_outputs_meta(), outputs)
    )
    if found != expected:
        raise RuntimeError(f"stage {stage.stage_index} of the pipeline returned {found} instead of {expected}")


def _positions(batch: Batch) -> torch.Tensor:
    """Return the position ids (batch, seq) of a batch; 0 ... seq - 1 if it has none."""
    if batch.position_ids is not None:
        return batch.position_ids.contiguous()
    rows, seq = batch.shape
    return torch.arange(seq, device=batch.input_ids.device).repeat(rows, 1)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
