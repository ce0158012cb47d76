"""A model on its mesh, with its weights: what is trained, evaluated and generated from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from components import distributed, models
from components.config.schema.recipes import EvaluateConfig, FinetuneConfig
from components.distributed.mesh import Mesh
from components.training.checkpointing import choose_checkpointing
from components.training.loss_head import attach_loss_head
from components.training.precision import autocast_dtype, compute_dtype
from components.training.prepared import Prepared, StepSettings
from components.training.router import attach_router_loss
from components.training.work import step_work

if TYPE_CHECKING:
    from pathlib import Path


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


def prepare(cfg: FinetuneConfig | EvaluateConfig, run: OnMesh, vocabulary: int) -> Prepared:
    """Build a model on meta, parallelize it, and fill this rank's part. A collective: call it on all ranks.

    The order matters. Adapters come before sharding, so that they are sharded like their layers; the head and the
    policy of recomputation are chosen on meta, before memory is allocated; layers are compiled inside FSDP's and
    DDP's wrappers, which are the last. A config without the sections of training gives a model that only evaluates.

    Args:
        vocabulary: Number of tokens of the tokenizer; a model from scratch gets as many embeddings.

    Raises ConfigError for a model or a mesh that cannot be computed.
    """
    mesh, device, trains = run.mesh, run.device, isinstance(cfg, FinetuneConfig)
    dtype, why_dtype = compute_dtype(cfg.model, device)
    model = models.build_on_meta(cfg.model, vocabulary)
    anatomy = models.read_anatomy(model)
    models.add_adapters(model, cfg.peft, exports=trains)
    work = step_work(model, cfg.logging, mesh, device, dtype, anatomy) if trains else None
    layout = distributed.parallelize(model, mesh, cfg.parallelism, dtype, anatomy)
    router_loss = attach_router_loss(model, cfg.model, mesh, anatomy) if trains else None
    loss_head = attach_loss_head(model, cfg, mesh, layout.stages, device)
    recompute = None
    if isinstance(cfg, FinetuneConfig):
        recompute = choose_checkpointing(model, cfg, mesh, device, dtype, anatomy=anatomy)
        models.checkpoint_activations(model, recompute.policy, anatomy)
    if cfg.model.compile:
        models.compile_layers(model, anatomy=anatomy)
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
            loss_head=loss_head,
            work=work,
        ),
        parallelism=cfg.parallelism,
        compute_dtype=dtype,
        counts=counts,
        summary=f"{counts}, {cfg.model.dtype}, {why_dtype}",
        notes=[*layout.notes, router_loss, loss_head, recompute, work],
    )
