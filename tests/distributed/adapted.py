"""Models with adapters: ours on a mesh, and the peft library's in one process, with the same values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import peft
import torch
from transformers.pytorch_utils import Conv1D

from components import models
from components.config.schema import ParallelismConfig, PeftConfig
from components.config.schema.parallelism import Strategy
from components.parity.reference import Curve
from components.parity.shapes import layout_of
from tests.distributed import grid
from tests.distributed.parity import build as build_tiny
from tests.distributed.parity import reference
from tests.harness import run_ranks

LORA = PeftConfig(method="lora", rank=6, alpha=9.0)
DORA = replace(LORA, dora=True)
ATTENTION = replace(LORA, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
"""For mixtures of experts, where peft takes the router for a linear layer."""
RSLORA = replace(LORA, rslora=True, rank=5)
QLORA = replace(LORA, method="qlora")
QDORA = replace(DORA, method="qlora")
WIDE = {"hidden_size": 128, "intermediate_size": 256}
"""Of a model whose packed weights two tp ranks can share."""
NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
"""As published: the paper's appendix E, and bitsandbytes."""


@dataclass(frozen=True)
class Adapted:
    """A model with adapters on a mesh."""

    model: str
    mesh: str
    dtype: torch.dtype = torch.float64
    peft: PeftConfig = field(default_factory=lambda: LORA)
    layout: dict[str, Any] = field(default_factory=dict)
    """Further keys of the section parallelism."""
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
        made = grid.cell(self.model, world, layout, layers=self.layers)
        if self.mesh == "single":
            made = replace(made, name="single")
        return replace(made, name=f"{made.name} {self.peft}")


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Values for every adapter of our model: B is not zero, for A would have no gradient."""
    generator = torch.Generator().manual_seed(11)
    made = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            made[name] = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.endswith("lora_magnitude_vector"):
                layer: Any = model.get_submodule(name.rpartition(".")[0])
                weight = layer.dequantized(layer.weight.detach(), layer.lora_A.shape[1], torch.float64)
                made[name] = weight.double().norm(dim=1) * (1 + made[name])
    return made


def build(case: Adapted) -> torch.nn.Module:
    model = build_tiny(case.model, case.dtype, {**grid.values_of(case.model, case.layers), **case.config})
    for module in model.modules():
        if isinstance(module, Conv1D):
            vars(module).pop("forward", None)  # float64 as it is: nothing in it casts
    return model


def ours(case: Adapted) -> torch.nn.Module:
    """Our adapted model on the CPU, whole."""
    model = build(case)
    models.add_adapters(model, case.peft)
    with torch.no_grad():
        for name, value in values(model).items():
            model.get_parameter(name).copy_(value)
    return model


def rounded_to_nf4(matrix: torch.Tensor) -> torch.Tensor:
    """What remains of (out, in) in NF4, block by block: its largest magnitude in float16 x the nearest level."""
    kept = matrix.detach().float().clone()
    for row in kept:
        for block in row.split(64):  # of a row
            scale = block.abs().max().half().float()
            nearest = (block[:, None] / scale - NF4).abs().argmin(dim=1) if scale else torch.full_like(block, 7).int()
            block.copy_(scale * NF4[nearest])
    return kept.to(matrix.dtype)


def lora_config(cfg: PeftConfig, **more: Any) -> peft.LoraConfig:
    """The same settings in the peft library's own words."""
    targets = "all-linear" if cfg.targets == ["all-linear"] else cfg.targets
    return peft.LoraConfig(
        r=cfg.rank, lora_alpha=cfg.alpha, lora_dropout=cfg.dropout, target_modules=targets, use_rslora=cfg.rslora,
        use_dora=cfg.dora, **more,
    )  # fmt: skip


def theirs(case: Adapted) -> torch.nn.Module:
    """The model with the peft library's modules, and the same values."""
    model = build(case)
    if case.peft.quantizes:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.data = rounded_to_nf4(module.weight)
    peft.inject_adapter_in_model(lora_config(case.peft), model)
    given = values(ours(case))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(given.pop(our_name(name)))
    assert not given, f"peft has no {given.keys()}"
    return model


def our_name(name: str) -> str:
    """model.layers.0.mlp.up_proj.lora_A.default.weight -> model.layers.0.mlp.up_proj.lora_A"""
    return name.removesuffix(".default.weight")


def expected_curve(case: Adapted) -> Curve:
    curve = reference(grid.case_of(case.model, case.dtype), theirs(case))
    curve.gradients = {our_name(name): gradient for name, gradient in curve.gradients.items()}
    return curve


def run_adapted(
    world: int, cases: list[Adapted], timeout: float = 120, sabotage: Callable[[], Any] | None = None
) -> list[grid.Finding]:
    """Run cases in one world, one after the other, each against the peft library in one process."""
    built = {case.key: (ours(case), expected_curve(case)) for case in cases}

    def on_rank(rank: int) -> list[grid.Finding]:
        if sabotage is not None:
            sabotage()
        return [grid.run_cell(world, case.cell(world), case.dtype, *built[case.key]) for case in cases]

    return [grid.merge(each) for each in zip(*run_ranks(world, on_rank, timeout=timeout), strict=True)]


def problems_of(findings: list[grid.Finding]) -> str:
    refused = [f"{each.model} on {each.mesh} was refused: {text}" for each in findings for text in each.refused]
    return "\n".join([*refused, *(text for each in findings for text in each.problems)])
