"""A model on its mesh, as training, evaluation and generation take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from components.config.schema.parallelism import ParallelismConfig
from components.distributed.mesh import Mesh
from components.distributed.pipeline.schedule import Pipeline
from components.training.objectives.loss_head import LossHead
from components.training.setup.flops import StepWork
from components.training.setup.router_loss import RouterLoss

if TYPE_CHECKING:
    from components.models.layers import ParameterCounts


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What stays the same over all steps of a run."""

    device: torch.device
    """Where the model computes."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0: no clipping."""
    defer_grad_sync: bool = True
    """Reduce gradients in the last micro-batch only."""
    mesh: Mesh | None = None
    """Which part of each row is this rank's, and whose tokens count in sums over all ranks; None: one process."""
    autocast: torch.dtype | None = None
    """Type of matmuls where the strategy does not set it (single, ddp)."""
    router_loss: RouterLoss | None = None
    """What the routers of a mixture of experts add to the loss of a training step; evaluation is without it."""
    loss_head: LossHead | None = None
    """Whether the model takes targets and returns their losses; None: it returns logits."""
    work: StepWork | None = None
    """FLOPs of a step and the devices' peak; None: MFU is not measured."""

    @property
    def takes_targets(self) -> bool:
        """Whether the model takes targets and returns the sum of their losses; else it returns logits."""
        return self.loss_head is not None and self.loss_head.takes_targets

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank's tokens, which under cp are a part of each row, count in sums over all ranks."""
        return self.mesh is None or self.mesh.counts_tokens

    @property
    def counts_rows(self) -> bool:
        """Whether this rank's rows count in sums over all ranks: cp ranks have the same."""
        return self.mesh is None or (self.mesh.counts_tokens and self.mesh.rank("cp") == 0)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is ready for its first step, from `prepare`; the first two fields do for one's own model."""

    module: Any
    """This rank's part of the transformers model, under the names of the whole one."""
    settings: StepSettings
    """What stays the same over all steps."""
    replica: nn.Module | Pipeline | None = None
    """What a forward calls: DDP around `module`, or the pipeline; None: `module`."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """How it was parallelized."""
    compute_dtype: torch.dtype = torch.float32
    """Type of matmuls."""
    counts: ParameterCounts | None = None
    """Parameters of the whole model, and bytes of this rank's."""
    summary: str = ""
    """Parameters and types, for the banner."""
    notes: list[object] = field(default_factory=list)
    """What was chosen on the way, for the banner."""

    @property
    def called(self) -> Any:
        """What a training forward calls."""
        return self.module if self.replica is None else self.replica

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline; None: there is one stage."""
        return self.replica if isinstance(self.replica, Pipeline) else None
