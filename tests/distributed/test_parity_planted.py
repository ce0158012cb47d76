"""Mutation tests of the parity grid: the check must detect each bug that is planted in the ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from components.batch import Batch
from components.config.mesh_rules import layout_of
from components.config.schema import ParallelismConfig
from components.config.schema.parallelism import AXES
from components.distributed import apply_tp, expert, row_shards
from components.distributed.mesh import Mesh
from components.distributed.pipeline_schedule import Pipeline
from components.distributed.tensor_parallel import ReplicatedParameters
from components.training import step
from components.training.loss import count_targets
from tests.distributed.grid import Cell, cell, run_cells


def cell_of(model: str, mesh: str) -> Cell:
    layout = layout_of(mesh, ParallelismConfig())
    assert layout is not None
    return cell(model, math.prod(layout.degree(axis) for axis in AXES), layout)


def world_of(cell: Cell) -> int:
    return math.prod(cell.parallelism.degree(axis) for axis in AXES)


def norms_are_not_summed() -> None:
    """Norms over local heads, or over a local sequence shard, keep their partial gradients."""
    start = ReplicatedParameters.__init__
    ReplicatedParameters.__init__ = lambda self, *, partial_grad=False: start(self, partial_grad=False)


def tied_gradient_stays() -> None:
    """The gradient of the tied head is dropped instead of sent to the first stage."""

    def forget(self: Any) -> None:
        self._tied_is_fresh = False
        if self._stages.tied_head is not None:
            self._stages.tied_head.weight.grad = None

    Pipeline._move_tied_gradient = forget


def tied_weight_stays() -> None:
    """The tied head keeps the copy of the embedding from before the first step."""
    Pipeline._copy_tied_weight = copy_once(Pipeline._copy_tied_weight)


def copy_once(copy: Callable[[Any], None]) -> Callable[[Any], None]:
    def once(self: Any) -> None:
        if not getattr(self, "was_copied", False):
            copy(self)
        self.was_copied = True

    return once


def embedding_is_untied() -> None:
    """Tensor parallelism unties the embedding and the head."""
    apply_tp._retie = lambda model, ties: None


def means_of_means() -> None:
    """Each rank divides by its local number of targets, and the gradients of the ranks are averaged."""
    original = step._forward_backward

    def wrong(model: Any, batches: list[Any], objective: Any, units: torch.Tensor) -> torch.Tensor:
        local = torch.stack([count_targets(batch.targets) for batch in batches]).sum()
        return original(model, batches, objective, local * model.settings.mesh.size("dp"))

    step._forward_backward = wrong


def local_divisor() -> None:
    """The number of target tokens is not all-reduced."""
    step.sum_over_ranks = lambda vector: vector


def loss_is_not_reduced() -> None:
    """reduce_loss sums over the local rank only, so each rank logs the mean of its own samples."""
    original = step.reduce_loss
    step.reduce_loss = lambda losses, tokens, dp_group, check_finite: original(
        losses, tokens, check_finite=check_finite
    )


def gradients_are_not_synchronized() -> None:
    """get_sync_ctx defers the reduction of gradients in the last micro-batch too."""
    original = step.get_sync_ctx
    step.get_sync_ctx = lambda model, is_optim_step, defer: original(model, False, True)


def data_is_repeated() -> None:
    """Every data-parallel rank reads the first rank's samples."""
    original = Mesh.rank
    Mesh.rank = lambda self, name: 0 if name == "dp" else original(self, name)


def rows_in_wrong_order() -> None:
    """cp ranks receive contiguous shards of the row, but attention assumes zigzag shards."""

    def contiguous_positions(seq: int, mesh: Any, device: torch.device) -> torch.Tensor:
        size = seq // mesh.size()
        return torch.arange(size, device=device) + size * mesh.get_local_rank()

    row_shards.local_positions = contiguous_positions


def positions_of_another_rank() -> None:
    """Position ids start at zero on every cp rank."""
    original = row_shards.shard_rows

    def wrong(batch: Batch, mesh: Mesh) -> Batch:
        local = original(batch, mesh)
        return replace(local, position_ids=torch.arange(local.shape[1]).expand_as(local.input_ids))

    step.shard_rows = wrong


def shared_experts_are_not_summed() -> None:
    """Gradients of experts that are replicated over tp are not all-reduced."""
    expert._gradients = lambda placements: placements


def expert_replicas_are_not_summed() -> None:
    """Expert gradients are not all-reduced over dp_replicate."""
    Mesh.expert_sharding = property(lambda self: self["efsdp"] if "efsdp" in self else self["dp_shard"])


BUGS: list[tuple[Callable[[], None], str, str, str]] = [
    (norms_are_not_summed, "qwen3", "tp2", "gradient of model.layers.*_norm.weight"),
    (norms_are_not_summed, "llama", "tp2_sp", "gradient of model.layers.*norm.weight"),
    (norms_are_not_summed, "gemma3", "dp_shard2_tp2", "gradient of model.layers.*_norm.weight"),
    (tied_gradient_stays, "llama_tied", "pp2", "gradient of model.embed_tokens.weight"),
    (tied_weight_stays, "llama_tied", "pp2", "loss"),
    (embedding_is_untied, "llama_tied", "tp2", "lm_head.weight is no parameter"),
    (means_of_means, "llama", "dp_shard2", "gradient"),
    (local_divisor, "llama", "dp_shard2", "gradient"),
    (loss_is_not_reduced, "llama", "dp_shard2", "loss"),
    (gradients_are_not_synchronized, "llama", "ddp2", "gradient"),
    (data_is_repeated, "llama", "dp_shard2", "loss"),
    (rows_in_wrong_order, "llama", "cp2", "loss"),
    (positions_of_another_rank, "llama", "cp2", "loss"),
    (shared_experts_are_not_summed, "mixtral", "ep2_tp2", "gradient of .*experts"),
    (shared_experts_are_not_summed, "mixtral", "tp4", "gradient of .*experts"),
    (expert_replicas_are_not_summed, "mixtral", "dp_replicate2_ep2", "gradient of .*experts"),
]


OWNERS = (ReplicatedParameters, Pipeline, Mesh, apply_tp, row_shards, expert, step)
"""What the bugs change."""


@pytest.mark.parametrize("world", [2, 4])
def test_parity_check_detects_each_planted_bug_and_passes_without_bugs(world: int) -> None:
    cells = {(model, mesh): cell_of(model, mesh) for _, model, mesh, _ in BUGS}
    cells = {names: cell for names, cell in cells.items() if world_of(cell) == world}
    bugs = [(plant, cells[model, mesh], pattern) for plant, model, mesh, pattern in BUGS if (model, mesh) in cells]
    # float64 runs only the first step, but a stale tied weight shows in later steps.
    late = (tied_weight_stays,)
    work = [(cell, torch.float32 if plant in late else torch.float64) for plant, cell, _ in bugs]
    work += [(cell, torch.float64) for cell in cells.values()]
    plants = [*(plant for plant, _, _ in bugs), *(None for _ in cells)]
    findings = run_cells(world, work, timeout=200, bugs=plants, owners=OWNERS)
    for (plant, _, pattern), finding in zip(bugs, findings, strict=False):
        assert re.search(pattern, "\n".join(finding.problems)), (plant.__name__, finding)
    for finding in findings[len(bugs) :]:
        assert not finding.rejected
        assert not finding.problems
