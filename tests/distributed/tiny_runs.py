"""Small training runs on any mesh, set up and fed as in a recipe, but without files and reports."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from components import distributed, models, training
from components.config.mesh_rules import layout_of
from components.config.schema import ParallelismConfig
from components.config.schema.parallelism import PipelineSchedule
from components.data.batches import BatchPlan, Padding, TrainBatches
from components.data.examples import IGNORED, Example
from components.distributed.mesh import Mesh
from components.training import TrainState
from tests.distributed.grid import ROUTER_AUX, Cell, build_model, cell
from tests.distributed.parity import CLIP, OPTIMIZER, Case, router_config

GLOBAL_BATCH = 8
LAYERS = {"llama": 4, "llama_tied": 4}
"""Number of layers of models that are also split into four stages; other models have two."""
MAX_STEPS = 100
SAMPLES = 89


class Samples(Sequence[Example]):
    """Random samples of unequal lengths; records which samples were read."""

    def __init__(self, size: int = SAMPLES) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        generator = torch.Generator().manual_seed(5000 + index)
        length = int(torch.randint(4, 21, (), generator=generator))
        ids = torch.randint(3, 97, (length,), generator=generator).tolist()
        prompt = 1 + index % (length - 2)
        return Example(ids, [IGNORED] * prompt + ids[prompt:])


@dataclass
class TinyRun:
    """The state of one rank of a run."""

    mesh: Mesh
    model: torch.nn.Module
    called: Any
    optimizer: torch.optim.Optimizer
    settings: training.StepSettings
    samples: Samples
    batches: TrainBatches
    state: TrainState = field(default_factory=TrainState)

    def extra(self) -> dict[str, Any]:
        return {"state": self.state.to_dict(), "data": self.batches.state_dict()}

    def take(self, extra: dict[str, Any]) -> None:
        """Resume from a return value of `extra`."""
        self.state = TrainState.from_dict(extra["state"])
        self.batches.load_state_dict(extra["data"])

    def train(self, steps: int) -> tuple[list[float], list[list[int]]]:
        """Train, and return the loss of each step and the samples that this rank read for it."""
        losses, read = [], []
        for _ in range(steps):
            training.set_learning_rate(self.optimizer, OPTIMIZER, self.state.step, MAX_STEPS)
            self.samples.read.clear()
            vector = training.train_step(
                training.Prepared(self.model, self.settings, self.called), next(self.batches), self.optimizer
            )
            self.state.step += 1
            losses.append(vector["loss"].item())
            read.append(list(self.samples.read))
        return losses, read


def cell_named(model: str, name: str, world: int) -> Cell:
    """Return a model on a named mesh; "pp2 ZBVZeroBubble" also names a pipeline schedule."""
    name, _, schedule = name.partition(" ")
    base = ParallelismConfig()
    layout = base if name == "fsdp2" else layout_of(name, base)
    assert layout is not None, name
    if schedule:
        layout = replace(layout, pp_schedule=PipelineSchedule(schedule))
    result = cell(model, world, layout, LAYERS.get(model, 2))
    assert not result.rejected, (model, name, result.rejected)
    return result


def build(model: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return build_model(model, LAYERS.get(model, 2), dtype)


def start(cell: Cell, built: torch.nn.Module, seed: int = 0, dtype: torch.dtype = torch.float32) -> TinyRun:
    """Start a run on this rank with a copy of `built`, set up like parity.run_case."""
    config = cell.parallelism
    mesh = distributed.build_mesh(config, "cpu")
    distributed.seed_ranks(seed, mesh)
    model = copy.deepcopy(built).train()
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, config, dtype)
    is_moe = hasattr(built.config, "num_experts_per_tok")
    case = Case(cell.model, {}, router_aux=ROUTER_AUX if is_moe else 0.0)
    router_loss = training.attach_routers(model, router_config(case), mesh)
    called = distributed.wrap_replicas(model, mesh, config, layout)
    settings = training.StepSettings(
        device=torch.device("cpu"),
        max_grad_norm=CLIP,
        mesh=mesh,
        defer_grad_sync=config.defers_grad_sync,
        routers=router_loss,
    )
    plan = BatchPlan(
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=GLOBAL_BATCH // (mesh.size("dp") * mesh.size("pp")),
        dp_rank=mesh.rank("dp"),
        dp_size=mesh.size("dp"),
        padding=Padding(multiple=mesh.sequence_multiple),
    )
    samples = Samples()
    batches = TrainBatches(samples, plan, seed=seed)
    return TinyRun(mesh, model, called, training.build_optimizer(model, OPTIMIZER), settings, samples, batches)


def whole(run: TinyRun) -> dict[str, torch.Tensor]:
    """Return the full parameters and optimizer state of all ranks, gathered by torch."""
    local = {}
    for name, parameter in run.model.named_parameters():
        for key, value in [("value", parameter), *run.optimizer.state[parameter].items()]:
            value = value.detach()
            local[f"{name} {key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    if not dist.is_initialized():
        return local
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    return {name: value for held in gathered for name, value in held.items()}


def global_order(run: TinyRun, read: list[list[int]]) -> list[list[int]]:
    """Return the samples of each step in global batch order, gathered from the samples that the ranks read."""
    gathered: list[Any] = [(run.mesh.rank("dp"), read)]
    if dist.is_initialized():
        gathered *= dist.get_world_size()
        dist.all_gather_object(gathered, (run.mesh.rank("dp"), read))
    by_rank: dict[int, list[list[int]]] = {}
    for rank, steps in gathered:
        assert by_rank.setdefault(rank, steps) == steps, "ranks with the same dp rank read different samples"
    return [[index for rank in sorted(by_rank) for index in by_rank[rank][step]] for step in range(len(read))]
