"""One loss curve on every mesh: each shape against one process in plain PyTorch.

float64: every parameter's gradient of the first step, within 1e-10 relative. float32: loss and gradient norm of ten
steps, within 1e-5 relative. Replicas: bit-equal after the last step.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from tests.distributed.parity import MODELS, Case, Curve, build, reference, relative, run_case
from tests.harness import run_ranks

FSDP2 = {"strategy": "fsdp2", "dp_shard": -1}
DDP = {"strategy": "ddp", "dp_shard": 1, "dp_replicate": -1}
HSDP = {"strategy": "fsdp2", "dp_shard": 2, "dp_replicate": -1}
TP = {"strategy": "fsdp2", "dp_shard": 1, "tp": -1}
FSDP2_TP2 = {"strategy": "fsdp2", "dp_shard": -1, "tp": 2}
SP = {"sequence_parallel": True}
SHAPES = {
    2: [FSDP2, DDP, TP, {**TP, **SP}],
    4: [FSDP2, DDP, HSDP, FSDP2_TP2, {**FSDP2_TP2, **SP}, TP, {**TP, **SP}],
}
GPT2_PLAN = "tests.distributed.test_parity:gpt2_plan"


class _ConvColwise(ParallelStyle):
    """Column-wise for GPT-2's Conv1D, whose weight is (in, out): a plan that a user would write."""

    def _apply(self, module: nn.Module, mesh: torch.distributed.DeviceMesh) -> nn.Module:
        for name, dim in (("weight", 1), ("bias", 0)):
            whole = getattr(module, name).data
            sharded = distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded))
        module.nf //= mesh.size()

        def forward(x: torch.Tensor) -> torch.Tensor:
            x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
            return (x @ module.weight + module.bias).to_local()

        module.forward = forward
        return module


class _ConvRowwise(ParallelStyle):
    def _apply(self, module: nn.Module, mesh: torch.distributed.DeviceMesh) -> nn.Module:
        for name, place in (("weight", Shard(0)), ("bias", Replicate())):
            whole = getattr(module, name).data
            module.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [place], src_data_rank=None)))

        def forward(x: torch.Tensor) -> torch.Tensor:
            x = DTensor.from_local(x, mesh, [Shard(-1)], run_check=False)
            product = (x @ module.weight).redistribute(placements=[Replicate()])
            return (product + module.bias).to_local()

        module.forward = forward
        return module


def gpt2_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    return {"transformer.h.*.mlp.c_fc": _ConvColwise(), "transformer.h.*.mlp.c_proj": _ConvRowwise()}


COVERING = ("llama_tied", "qwen3", "gpt2")
"""Models whose float32 curves are always tested; `make parity` tests all of them (float64 always does)."""


def cases(world_size: int, dtype: torch.dtype) -> list[Case]:
    everything = os.environ.get("MESHBOOK_ALL_PARITY") == "1"
    names = MODELS if everything or dtype == torch.float64 else COVERING
    steps = 1 if dtype == torch.float64 else 10 if everything or world_size == 2 else 4
    found = []
    for name in names:
        for index, shape in enumerate(SHAPES[world_size]):
            plan = {"tp_plan": GPT2_PLAN} if name == "gpt2" and "tp" in shape else {}
            found.append(Case(name, {**shape, **plan}, 1 + index % 2, steps, dtype))
    return found


def check(case: Case, expected: Curve, got: Curve, different: list[str]) -> list[str]:
    """Return what is wrong with a case, one line each."""
    problems = [f"{case}: replicas of {name} differ" for name in different]
    bound = 1e-10 if case.dtype == torch.float64 else 1e-5
    for name, gradient in got.gradients.items():
        error = relative(gradient, expected.gradients[name])
        if not error < bound:
            problems.append(f"{case}: gradient of {name} is off by {error:.1e}")
    for kind, values, wanted in (("loss", got.losses, expected.losses), ("norm", got.norms, expected.norms)):
        for step, (value, want) in enumerate(zip(values, wanted, strict=True)):
            if not abs(value - want) <= bound * abs(want):
                problems.append(f"{case}: {kind} of step {step} is {value!r}, not {want!r}")
    return problems


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_mesh_has_the_curve_of_one_process(world_size: int, dtype: torch.dtype) -> None:
    work = cases(world_size, dtype)
    models = {name: build(name, dtype) for name in MODELS}
    expected = {case.model: reference(case) for case in work}

    def on_rank(rank: int) -> list[str]:
        problems = []
        for case in work:
            curve, different = run_case(case, models[case.model])
            problems += check(case, expected[case.model], curve, different)
        return problems

    problems = [line for lines in run_ranks(world_size, on_rank, timeout=240) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))
