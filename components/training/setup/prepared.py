"""A parallelized model with its step settings, for training, evaluation and generation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from components.config.schema.parallelism import ParallelismConfig
from components.config.schema.training import EvalWeights, TrainingConfig
from components.distributed.mesh import Mesh
from components.distributed.pipeline.schedule import Pipeline
from components.training.objectives.loss_head import LossHead
from components.training.optimizers.weight_average import WeightAverage
from components.training.setup.flops import StepFlops
from components.training.setup.router_loss import RouterLoss

if TYPE_CHECKING:
    from components.models.anatomy import Anatomy
    from components.models.layers import ParameterCounts


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings that stay the same over all steps of a run."""

    device: torch.device
    """This rank's device."""
    max_grad_norm: float = 1.0
    """Global norm that gradients are clipped to; 0: no clipping."""
    defer_grad_sync: bool = True
    """Whether gradients are reduced in the last micro-batch only."""
    mesh: Mesh | None = None
    """The mesh, for sharding rows over cp and for sums over all ranks; None: one process."""
    autocast: torch.dtype | None = None
    """Autocast dtype, for strategies that do not set the compute dtype themselves (single, ddp); None: no autocast."""
    router_loss: RouterLoss | None = None
    """Auxiliary loss of mixture-of-experts routers in training steps; evaluation leaves it out."""
    loss_head: LossHead | None = None
    """How the loss is computed from hidden states; None: the model returns logits."""
    flops: StepFlops | None = None
    """Model FLOPs and the devices' peak; None: the MFU is not measured."""
    counts_inputs: bool = False
    """Whether the tokens of a step are all that the model reads, since only the last one of a row is a target."""

    @property
    def takes_targets(self) -> bool:
        """Whether the model takes targets and returns the sum of their losses instead of logits."""
        return self.loss_head is not None and self.loss_head.takes_targets

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank's tokens, under cp a shard of each row, count in sums over all ranks."""
        return self.mesh is None or self.mesh.counts_tokens

    @property
    def counts_rows(self) -> bool:
        """Whether this rank's rows count in sums over all ranks: of the cp ranks, which share rows, only the first."""
        return self.mesh is None or (self.mesh.counts_tokens and self.mesh.rank("cp") == 0)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is ready for its first step, from `prepare`. For a custom model the first two fields suffice."""

    module: Any
    """This rank's shards of the model; parameters keep the names of the unsharded model."""
    settings: StepSettings
    """Settings of all steps."""
    replica: nn.Module | Pipeline | None = None
    """The DDP wrapper of `module`, or the pipeline; None: `module` itself is called."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """Parallelism the model was prepared with."""
    compute_dtype: torch.dtype = torch.float32
    """Dtype of matmuls."""
    stored_dtype: str | None = None
    """Dtype of the parameters, for checkpoints; None: not recorded."""
    anatomy: Anatomy | None = None
    """Structure of the model without adapters, which optimizer=muon needs; None for a custom model."""
    counts: ParameterCounts | None = None
    """Parameters of the whole model, and bytes of this rank's shard."""
    summary: str = ""
    """Parameter counts and dtypes, for the banner."""
    notes: list[object] = field(default_factory=list)
    """Automatic choices, for the banner."""
    average: WeightAverage | None = None
    """Moving average of the trained weights, which `train_step` updates; None: there is none."""

    def with_average(self, training: TrainingConfig) -> Prepared:
        """Return this model with a moving average of its weights if `training.ema_decay` is set, else unchanged."""
        if training.ema_decay is None:
            return self
        average = WeightAverage(self.module, training.ema_decay, training.eval_weights)
        note = f"weight average: exponential, decay {training.ema_decay}, {average.local_bytes:,} bytes on this rank"
        return replace(self, average=average, notes=[*self.notes, f"{note}; {training.eval_weights.described}"])

    @contextmanager
    def with_weights(self, averaged: bool) -> Iterator[None]:
        """Context in which the module holds the averaged weights, if `averaged` and there is an average."""
        if not averaged or self.average is None:
            yield
            return
        try:
            with self.average.swapped_in():
                self._weights_changed()
                yield
        finally:
            self._weights_changed()

    def _weights_changed(self) -> None:
        if self.pipeline is not None:  # its copy of a tied embedding is of the other weights
            self.pipeline.weights_changed()

    @property
    def evaluates_average(self) -> bool:
        """Whether held-out losses and generated texts are those of the averaged weights."""
        return self.average is not None and self.average.evaluated is not EvalWeights.trained

    @property
    def called(self) -> Any:
        """The module or pipeline that a training forward calls."""
        return self.module if self.replica is None else self.replica

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline; None without pipeline parallelism."""
        return self.replica if isinstance(self.replica, Pipeline) else None

    @property
    def called_modules(self) -> list[nn.Module]:
        """The modules of this rank whose forwards run: those of its pipeline stages, or `module`."""
        return [self.module] if self.pipeline is None else self.pipeline.stage_modules
