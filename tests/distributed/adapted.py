"""Models with adapters: ours on a mesh and the peft library's in one process, with the same parameter values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import peft
import torch
from transformers.pytorch_utils import Conv1D

from components import models
from components.config.mesh_rules import layout_of
from components.config.schema import ParallelismConfig, PeftConfig
from components.config.schema.parallelism import Strategy
from components.models.lora import adapted_layers
from components.planning.parity_reference import Curve
from tests.distributed import grid
from tests.distributed.parity import build as build_tiny
from tests.distributed.parity import reference
from tests.harness import run_ranks

LORA = PeftConfig(method="lora", rank=6, alpha=9.0)
DORA = replace(LORA, dora=True)
ATTENTION = replace(LORA, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
"""For mixtures of experts: all-linear would include the router, which peft treats as a linear layer."""
RSLORA = replace(LORA, rslora=True, rank=5)
SAVED = replace(LORA, modules_to_save=["embed_tokens", "lm_head", "model.norm"])
"""The embedding, the head and the last norm are trained too."""
QLORA = replace(LORA, method="qlora")
QDORA = replace(DORA, method="qlora")
WIDE = {"hidden_size": 128, "intermediate_size": 256}
"""Model sizes for which two tp ranks can shard the quantized weights."""
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
"""The NF4 levels as published in appendix E of the QLoRA paper and in bitsandbytes."""


@dataclass(frozen=True)
class Adapted:
    """A model with adapters on a mesh."""

    model: str
    mesh: str
    dtype: torch.dtype = torch.float64
    peft: PeftConfig = field(default_factory=lambda: LORA)
    layout: dict[str, Any] = field(default_factory=dict)
    """Further settings of the section parallelism."""
    layers: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    """Further values of the model's config."""

    @property
    def key(self) -> tuple[str, int, torch.dtype, str, str]:
        return self.model, self.layers, self.dtype, str(self.peft), str(self.config)

    def cell(self, world: int) -> grid.Cell:
        single = ParallelismConfig(strategy=Strategy.single, dp_shard=1)
        layout = single if self.mesh == "single" else layout_of(self.mesh, ParallelismConfig(**self.layout))
        assert layout is not None
        created = grid.cell(self.model, world, layout, layers=self.layers)
        if self.mesh == "single":
            created = replace(created, name="single")
        return replace(created, name=f"{created.name} {self.peft}")


def adapter_values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Values for every adapter parameter of our model. B is not zero, since A would have no gradient then."""
    generator = torch.Generator().manual_seed(11)
    created = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            created[name] = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("lora_magnitude_vector"):
                layer: Any = model.get_submodule(name.rpartition(".")[0])
                weight = layer.dequantized(layer.matrix.detach(), layer.lora_A.shape[1], torch.float64)
                created[name] = weight.double().norm(dim=1) * (1 + created[name])
    return created


def build(case: Adapted) -> torch.nn.Module:
    model = build_tiny(case.model, case.dtype, {**grid.values_of(case.model, case.layers), **case.config})
    for module in model.modules():
        if isinstance(module, Conv1D):
            vars(module).pop("forward", None)  # its own forward is exact in float64: it casts nothing
    return model


def ours(case: Adapted) -> torch.nn.Module:
    """Build our model with adapters in one process."""
    return with_adapters(build(case), case.peft)


def with_adapters(model: Any, cfg: PeftConfig) -> torch.nn.Module:
    """Add our adapters to a model, in place, with the values of `adapter_values`."""
    models.add_adapters(model, cfg, exports=False)
    with torch.no_grad():
        for name, value in adapter_values(model).items():
            model.get_parameter(name).copy_(value)
    return model


def rounded_to_nf4(matrix: torch.Tensor) -> torch.Tensor:
    """Quantize (out, in) to NF4 and dequantize: per block, the absolute maximum in float16 times the nearest level."""
    rounded = matrix.detach().float().clone()
    for row in rounded:
        for block in row.split(64):
            scale = block.abs().max().half().float()
            nearest = (block[:, None] / scale - NF4).abs().argmin(dim=1) if scale else torch.full_like(block, 7).int()
            block.copy_(scale * NF4[nearest])
    return rounded.to(matrix.dtype)


def lora_config(cfg: PeftConfig, **extra: Any) -> peft.LoraConfig:
    """The same settings as a config of the peft library."""
    targets = "all-linear" if cfg.targets == ["all-linear"] else cfg.targets
    return peft.LoraConfig(
        r=cfg.rank, lora_alpha=cfg.alpha, lora_dropout=cfg.dropout, target_modules=targets, use_rslora=cfg.rslora,
        use_dora=cfg.dora, modules_to_save=cfg.modules_to_save or None, **extra,
    )  # fmt: skip


def theirs(case: Adapted) -> torch.nn.Module:
    """Build the model with the peft library's adapters and the same parameter values."""
    return with_peft(build(case), case.peft, ours(case))


def with_peft(model: torch.nn.Module, cfg: PeftConfig, adapted: torch.nn.Module) -> torch.nn.Module:
    """Add the peft library's adapters to a model, in place, with the values that ours have in `adapted`."""
    for name in adapted_layers(adapted) if cfg.quantizes else ():
        module: Any = model.get_submodule(name)
        transposed = isinstance(module, Conv1D)
        rounded = rounded_to_nf4(module.weight.T if transposed else module.weight)
        module.weight.data = rounded.T.contiguous() if transposed else rounded
    peft.inject_adapter_in_model(lora_config(cfg), model)
    remaining = adapter_values(adapted)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(remaining.pop(our_name(name)))
    assert not remaining, f"peft has no {remaining.keys()}"
    return model


def our_name(name: str) -> str:
    """model.layers.0.mlp.up_proj.lora_A.default.weight -> model.layers.0.mlp.up_proj.lora_A"""
    return name.replace(".modules_to_save.default", "").removesuffix(".default.weight")


def expected_curve(case: Adapted) -> Curve:
    curve = reference(grid.case_of(case.model, case.dtype), theirs(case))
    curve.gradients = {our_name(name): gradient for name, gradient in curve.gradients.items()}
    return curve


def run_adapted(
    world: int,
    cases: list[Adapted],
    timeout: float = 120,
    bugs: Sequence[Callable[[], Any]] = (),
    owners: Sequence[Any] = (),
) -> list[grid.Finding]:
    """Run the cases one after the other on the same ranks, and compare each with the peft library in one process.

    bugs and owners: as of `grid.run_cells`.
    """
    built = {case.key: (ours(case), expected_curve(case)) for case in cases}

    def on_rank(rank: int) -> list[grid.Finding]:
        findings = []
        for case, plant in zip(cases, bugs or [None] * len(cases), strict=True):
            with grid.planted(plant, owners):
                findings.append(grid.run_cell(world, case.cell(world), case.dtype, *built[case.key]))
        return findings

    return [grid.merge(each) for each in zip(*run_ranks(world, on_rank, timeout=timeout), strict=True)]


def problems_of(findings: list[grid.Finding]) -> str:
    rejected = [f"{each.model} on {each.mesh} was rejected: {text}" for each in findings for text in each.rejected]
    return "\n".join([*rejected, *(text for each in findings for text in each.problems)])
