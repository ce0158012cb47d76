"""A model on its mesh, with its weights: what is trained, evaluated and generated from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from components import distributed, models
from components.config.schema.recipes import EvaluateConfig, FinetuneConfig
from components.distributed.mesh import Mesh
from components.distributed.pipeline import Pipeline
from components.training.checkpointing import choose_checkpointing
from components.training.loop import StepSettings
from components.training.precision import autocast_dtype, compute_dtype
from components.training.router import attach_router_loss
from components.training.token_loss import attach_token_loss
from components.training.work import step_work

if TYPE_CHECKING:
    from pathlib import Path

    from components.config.schema import ParallelismConfig
    from components.models.layers import ParameterCounts


class OnMesh(Protocol):
    """What `prepare` takes of a run."""

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""

    @property
    def resume_from(self) -> Path | None:
        """The checkpoint whose weights are loaded afterwards; None: the run begins here."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is ready for its first step."""

    module: Any
    """This rank's part of the transformers model, under the names of the whole one."""
    replica: nn.Module | Pipeline
    """What training, evaluation and generation call: `module`, DDP around it, or the pipeline."""
    settings: StepSettings
    """What stays the same over all steps."""
    parallelism: ParallelismConfig
    """How it was parallelized."""
    compute_dtype: torch.dtype
    """Type of matrix products."""
    counts: ParameterCounts
    """Parameters of the whole model, and bytes of this rank's."""
    summary: str
    """Parameters and types, for the banner."""
    notes: list[object]
    """What was chosen on the way, for the banner."""


def prepare(cfg: FinetuneConfig | EvaluateConfig, run: OnMesh, vocabulary: int) -> Prepared:
    """Build a model on meta, parallelize it, and fill this rank's part. A collective: call it on all ranks.

    Adapters come before sharding, so that they are sharded like their layers; `prepare_built` does the rest.

    Args:
        vocabulary: Number of tokens of the tokenizer; a model from scratch gets as many embeddings.

    Raises ConfigError for a model or a mesh that cannot be computed.
    """
    model = models.build_on_meta(cfg.model, vocabulary)
    models.add_adapters(model, cfg.peft, exports=isinstance(cfg, FinetuneConfig))
    return prepare_built(model, cfg, run)


def prepare_built(model: Any, cfg: FinetuneConfig | EvaluateConfig, run: OnMesh) -> Prepared:
    """Parallelize a model that is on meta, with its adapters, and fill this rank's part. A collective.

    The order matters. The head and the policy of activation checkpointing are chosen on meta, before memory is
    allocated; layers are compiled inside FSDP's and DDP's wrappers, which come last. A config without the training
    sections gives a model that can only be evaluated.

    Raises ConfigError for a mesh that cannot be computed.
    """
    mesh, device, trains = run.mesh, run.device, isinstance(cfg, FinetuneConfig)
    dtype, why_dtype = compute_dtype(cfg.model, device)
    work = step_work(model, cfg.logging, mesh, device, dtype) if trains else None
    layout = distributed.parallelize(model, mesh, cfg.parallelism, dtype)
    router_loss = attach_router_loss(model, cfg.model, mesh) if trains else None
    token_loss = attach_token_loss(model, cfg, mesh, layout.stages, device)
    recompute = choose_checkpointing(model, cfg, mesh, device, dtype) if isinstance(cfg, FinetuneConfig) else None
    if recompute is not None:
        models.checkpoint_activations(model, recompute.policy)
    if cfg.model.compile:
        models.compile_layers(model)
    models.materialize(model, device, offload=cfg.parallelism.cpu_offload)
    if run.resume_from is None or cfg.peft.adapts:  # a checkpoint holds what is trained, not the base of adapters
        models.fill_weights(model, cfg.model, cfg.run.seed)
    replica = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout)
    counts = models.count_parameters(model)
    return Prepared(
        module=model,
        replica=replica,
        settings=StepSettings(
            device=device,
            max_grad_norm=cfg.training.max_grad_norm if isinstance(cfg, FinetuneConfig) else 0.0,
            defer_grad_sync=cfg.parallelism.defer_grad_sync,
            mesh=mesh,
            autocast=autocast_dtype(cfg.parallelism, cfg.model, dtype),
            router_loss=router_loss,
            token_loss=token_loss,
            work=work,
        ),
        parallelism=cfg.parallelism,
        compute_dtype=dtype,
        counts=counts,
        summary=f"{counts}, {cfg.model.dtype}, {why_dtype}",
        notes=[*layout.notes, router_loss, token_loss, recompute, work],
    )
