"""The parity grid: tiny models on every mesh, each compared with one process. Defines the cells and how to run them.

Models have an uneven number of layers per pipeline stage where possible, and two layers without a pipeline. Head
counts are chosen so that over all models tp and cp divide the heads, share them, or cannot divide them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from components.config.mesh_rules import all_layouts, name_of
from components.config.schema import FinetuneConfig, ModelConfig, ParallelismConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import WeightInit
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.training import TrainingConfig
from components.config.shape import ModelShape, shape_of_config
from components.planning import parity as comparison
from components.planning.formulas.ranking import MeshPlan, plan_mesh
from components.planning.parity_reference import Curve, Sample
from components.protocol.errors import ConfigError
from tests.distributed.parity import EXPERTS, HYBRID_MODELS, SMALL, Case, build, reference, run_case
from tests.harness import run_ranks

GLOBAL_BATCH, MAX_LENGTH = 16, 24
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 4,
              "tie_word_embeddings": False},
    "llama_tied": {**SMALL, "model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 3,
                   "tie_word_embeddings": True},
    "qwen3": {**SMALL, "model_type": "qwen3", "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8},
    "gemma": {**SMALL, "model_type": "gemma", "num_key_value_heads": 1, "head_dim": 8},
    "gemma3": {**SMALL, "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8,
               "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, "bos_token_id": 1,
             "eos_token_id": 2},
    "phi3": {**SMALL, "model_type": "phi3"},
    "mixtral": {**EXPERTS, "model_type": "mixtral", "num_local_experts": 6, "sliding_window": None},
    "qwen3_moe": {**EXPERTS, "model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 24, "head_dim": 8,
                  "num_attention_heads": 8, "norm_topk_prob": True},
}  # fmt: skip
IDLE_EXPERTS = 2
"""Number of experts in the first layer of qwen3_moe that no token is routed to; with ep=8, all experts of one rank."""
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
ROUTER_AUX = 0.1  # large, so that errors in it are visible next to the token loss
STEPS = {torch.float64: 1, torch.float32: 5}


@dataclass(frozen=True)
class Cell:
    """One model on one mesh of the grid."""

    model: str
    name: str
    parallelism: ParallelismConfig
    accumulation: int
    layers: int
    rejected: tuple[str, ...] = ()

    def case(self, dtype: torch.dtype) -> Case:
        return replace(case_of(self.model, dtype), parallelism=asdict(self.parallelism), accumulation=self.accumulation)


@dataclass
class Finding:
    """Result of a cell: the worst relative differences over all ranks, and other problems."""

    world: int
    model: str
    mesh: str
    dtype: str
    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    worst_gradient: str = ""
    wrong: list[str] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        location = f"{self.model} on {self.mesh} of {self.world} in {self.dtype}"
        bound = BOUNDS[getattr(torch, self.dtype)]
        measured = {"loss": self.loss, "norm": self.norm, f"gradient of {self.worst_gradient}": self.gradient}
        exceeded = [f"{figure} is off by {value:.1e}" for figure, value in measured.items() if not value <= bound]
        return [f"{location}: {text}" for text in [*exceeded, *self.wrong]]


def samples_of_step(step: int) -> list[Sample]:
    """GLOBAL_BATCH samples of different lengths and different numbers of target tokens."""
    generator = torch.Generator().manual_seed(2000 + step)
    samples = []
    for _ in range(GLOBAL_BATCH):
        length = int(torch.randint(4, MAX_LENGTH + 1, (), generator=generator))
        tokens = torch.randint(3, 97, (length,), generator=generator)
        labels = tokens.clone()
        labels[: int(torch.randint(1, length - 1, (), generator=generator))] = -100
        samples.append((tokens, labels))
    return samples


def values_of(model: str, layers: int) -> dict[str, Any]:
    """Config values of a model with this many layers, or of a hybrid model."""
    if model in HYBRID_MODELS:  # one layer of each kind
        return dict(HYBRID_MODELS[model])
    values = {**MODELS[model], "n_layer" if model == "gpt2" else "num_hidden_layers": layers}
    if model == "gemma3":
        values["layer_types"] = [("sliding_attention", "full_attention")[index % 2] for index in range(layers)]
    return values


def build_model(model: str, layers: int, dtype: torch.dtype) -> torch.nn.Module:
    built = build(model, dtype, values_of(model, layers))
    if model == "qwen3_moe":
        router = built.model.layers[0].mlp.gate.weight.data  # (experts, hidden)
        router.mul_(20)
        router[:IDLE_EXPERTS] = 0  # their logits are never among the largest
    return built


def cells(world: int, model: str, recompute: Sequence[ActivationCheckpointing] | None = None) -> list[Cell]:
    """All meshes of `world` ranks for a model, valid or rejected, with each of the recompute policies."""
    return [cell(model, world, layout) for layout in all_layouts(world, ParallelismConfig(), recompute)]


def cell(model: str, world: int, layout: ParallelismConfig, layers: int | None = None) -> Cell:
    """One model on one mesh; by default an uneven number of layers per stage where possible."""
    mesh = layout.resolve(world)
    stages = len(layout.stage_ranks(mesh.pp))
    layers = layers or (stages + 1 if 1 < stages < 8 else max(2, stages))
    shape = ModelShape(**{"experts": 0, **shape_of_config(values_of(model, layers))})
    accumulation = max(2, mesh.pp * (2 if str(layout.pp_schedule) == "DualPipeV" else 1))
    cfg = FinetuneConfig(
        model=ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=values_of(model, layers)),
        data=DocsDataConfig(),
        training=TrainingConfig(
            global_batch_size=GLOBAL_BATCH, micro_batch_size=GLOBAL_BATCH // (mesh.dp * accumulation), seq_len=48
        ),
    )
    plan: MeshPlan = plan_mesh(name_of(layout, world), layout, cfg, world, shape)
    used = GLOBAL_BATCH // (plan.cfg.training.micro_batch_size * mesh.dp)
    return Cell(model, plan.name, layout, used, layers, plan.problems)


@contextmanager
def planted(plant: Callable[[], Any] | None, owners: Sequence[Any]) -> Iterator[None]:
    """Plant a bug, if any, by a function that replaces attributes of `owners`; restore them afterwards."""
    before = [dict(vars(owner)) for owner in owners]
    if plant is not None:
        plant()
    yield
    for owner, attributes in zip(owners, before, strict=True):
        for name, value in attributes.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)


def run_cells(
    world: int,
    chosen: list[tuple[Cell, torch.dtype]],
    timeout: float,
    bugs: Sequence[Callable[[], Any] | None] = (),
    owners: Sequence[Any] = (),
) -> list[Finding]:
    """Run cells one after the other on the same ranks, and return one finding for each.

    Args:
        bugs: The bug that is planted on every rank for each cell; empty: none.
        owners: Modules and classes that the bugs change.
    """
    needed = {(cell.model, cell.layers, dtype) for cell, dtype in chosen if not cell.rejected}
    models = {key: build_model(*key) for key in needed}
    expected = {key: expected_curve(*key) for key in needed}

    def on_rank(rank: int) -> list[Finding]:
        warnings.filterwarnings("error", message=r"FSDP2-wrapped module \(FSDP.* returned a view")
        findings = []
        for (cell, dtype), plant in zip(chosen, bugs or [None] * len(chosen), strict=True):
            key = (cell.model, cell.layers, dtype)
            with planted(plant, owners):
                findings.append(run_cell(world, cell, dtype, models.get(key), expected.get(key)))
        return findings

    return [merge(each) for each in zip(*run_ranks(world, on_rank, timeout=timeout), strict=True)]


def expected_curve(model: str, layers: int, dtype: torch.dtype) -> Curve:
    """Curve of one process in float64, also for float32 meshes: a float32 reference would add its own rounding error.

    An 8-layer qwen3_moe in float32 is off by 1e-5 after four steps, and by as much with another number of threads.
    """
    case = replace(case_of(model, torch.float64), steps=STEPS[dtype])
    return reference(case, build_model(model, layers, torch.float64))


def case_of(model: str, dtype: torch.dtype) -> Case:
    """The part of a case that does not depend on the mesh."""
    router_aux = ROUTER_AUX if "num_experts_per_tok" in MODELS[model] else 0.0
    return Case(model, {}, steps=STEPS[dtype], dtype=dtype, samples=samples_of_step, router_aux=router_aux)


def run_cell(world: int, cell: Cell, dtype: torch.dtype, model: Any, expected: Curve | None) -> Finding:
    """Run a cell on this rank and compare it with the expected curve."""
    finding = Finding(world, cell.model, cell.name, str(dtype)[6:], rejected=list(cell.rejected))
    if finding.rejected or expected is None:
        return finding
    try:
        curve, different = run_case(cell.case(dtype), model)
    except ConfigError as error:
        finding.rejected = error.problems
        return finding
    except Exception as error:
        raise RuntimeError(f"{cell.model} on {cell.name} in {dtype}: {error}") from error
    finding.loss = comparison.worst_difference(curve.losses, expected.losses)
    finding.norm = comparison.worst_difference(curve.norms, expected.norms)
    finding.wrong = [f"replicas of {name} differ" for name in different]
    finding.wrong += [f"{name} is no parameter of the model" for name in set(curve.gradients) - set(expected.gradients)]
    for name in set(curve.gradients) & set(expected.gradients):
        error = comparison.relative(curve.gradients[name], expected.gradients[name])
        if not error <= finding.gradient:
            finding.gradient, finding.worst_gradient = error, name
    if dtype == torch.float64:
        of_ranks: list[Any] = [None] * world
        dist.all_gather_object(of_ranks, set(curve.gradients))
        if missing := set(expected.gradients) - set().union(*of_ranks):
            finding.wrong.append(f"no rank has {sorted(missing)}")
    return finding


def merge(of_ranks: Iterable[Finding]) -> Finding:
    """Merge the findings of all ranks: the worst differences and all problems."""
    ranks = list(of_ranks)
    worst = max(ranks, key=lambda finding: finding.gradient)
    return replace(
        worst,
        loss=max(finding.loss for finding in ranks),
        norm=max(finding.norm for finding in ranks),
        wrong=sorted({text for finding in ranks for text in finding.wrong}),
        rejected=sorted({text for finding in ranks for text in finding.rejected}),
    )
