"""One loss curve on every mesh: every product of the six axes on 2, 4 and 8 processes, each against one process.

float64: every parameter's gradient of the first step, within 1e-10 relative. float32: loss and gradient norm of five
steps, within 1e-5 relative of what one process computes in float64. Replicas: bit-equal after the last step. A part of
the grid that covers every axis, every pair of axes and every model is always tested; `make parity` tests all of it and
writes outputs/parity/grid.md.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from components.config.errors import ConfigError
from components.config.schema import ParallelismConfig
from components.config.schema.parallelism import AXES, ActivationCheckpointing, ContextAttention, PipelineSchedule
from components.parity.shapes import RECOMPUTE, all_layouts, layout_of, mesh_shapes, name_of
from tests.distributed import grid
from tests.distributed.grid import Cell, Finding, cell, cells, run_cells
from tests.distributed.grid_record import record
from tests.distributed.parity import SMALL, Case, Curve, build, reference, relative, run_case
from tests.harness import run_ranks

FSDP2 = {"strategy": "fsdp2", "dp_shard": -1}
DDP = {"strategy": "ddp", "dp_shard": 1, "dp_replicate": -1}
HSDP = {"strategy": "fsdp2", "dp_shard": 2, "dp_replicate": -1}
TP = {"strategy": "fsdp2", "dp_shard": 1, "tp": -1}
FSDP2_TP2 = {"strategy": "fsdp2", "dp_shard": -1, "tp": 2}
SP = {"sequence_parallel": True}
CP = {"strategy": "fsdp2", "dp_shard": 1, "cp": 2}
EVERYTHING = os.environ.get("MESHBOOK_ALL_PARITY") == "1"
MOE = ("mixtral", "qwen3_moe")
AT_ONCE = 40
"""Meshes in one world: each leaves its process groups behind."""


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


def problems_of(findings: list[Finding]) -> str:
    record(findings)
    unexpected = [f"{each.model} on {each.mesh} was refused: {text}" for each in findings for text in each.refused]
    return "\n".join([*unexpected, *(text for each in findings for text in each.problems)])


def covering(world: int) -> list[Cell]:
    """Each mesh of `world` processes once, with the model and the policy of recomputation that had the fewest before.

    A policy is counted by the axes that it was combined with.
    """
    chosen: list[Cell] = []
    for layout in all_layouts(world, ParallelismConfig()):
        names = MOE if layout.ep > 1 else tuple(grid.MODELS)
        names = names if layout.ep < 4 else MOE[1:]
        model = min(names, key=lambda name: sum(each.model == name for each in chosen))
        axes = _axes(layout)
        before = Counter(
            each.parallelism.activation_checkpointing for each in chosen for axis in axes & _axes(each.parallelism)
        )
        of_all = Counter(each.parallelism.activation_checkpointing for each in chosen)
        policy = min(RECOMPUTE, key=lambda each: (before[each], of_all[each]))
        plan = grid.GPT2_PLAN if model == "gpt2" else None
        chosen.append(cell(model, world, replace(layout, tp_plan=plan, activation_checkpointing=policy)))
    return chosen


def _axes(layout: ParallelismConfig) -> set[str]:
    return {axis for axis in AXES if layout.degree(axis) > 1}


@pytest.mark.parametrize("world", [2, 4])
def test_a_covering_part_of_the_grid(world: int) -> None:
    chosen = covering(world)
    work = [(each, torch.float64) for each in chosen] + [(each, torch.float32) for each in chosen[:: 4 * world - 4]]
    problems = problems_of(run_cells(world, work, timeout=240))
    assert not problems, problems


def test_the_part_covers_axes_pairs_and_models() -> None:
    chosen = [*covering(2), *covering(4)]
    for pair in combinations(AXES, 2):
        assert any(all(each.parallelism.degree(axis) > 1 for axis in pair) for each in chosen), pair
    for axis in AXES[:-1]:
        assert any(each.parallelism.degree(axis) > 1 and each.parallelism.sequence_parallel for each in chosen), axis
    for axis, policy in product(AXES, RECOMPUTE):
        found = [each for each in chosen if each.parallelism.activation_checkpointing == policy]
        assert any(axis in _axes(each.parallelism) for each in found), (axis, policy)
    for model in grid.MODELS:
        assert sum(each.model == model for each in chosen) >= 3, model


@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_product_is_there_and_only_the_impossible_is_refused(world: int) -> None:
    products = list(mesh_shapes(world))
    assert len(products) == {2: 6, 4: 21, 8: 56}[world]  # ordered factorizations into six
    for model in grid.MODELS:
        found = cells(world, model)
        assert len(found) == len(products) + sum(shape.tp > 1 for shape in products) + 1  # sp, ddp
        assert len({each.name for each in found}) == len(found)
        experts = {"mixtral": 6, "qwen3_moe": 16}.get(model, 1)
        assert {each.name for each in found if each.refused} == {
            each.name for each in found if experts % each.parallelism.ep
        }


def test_gpt2_has_no_plan_for_tp_and_is_refused_without_one() -> None:
    work = [(cell("gpt2", 2, layout), torch.float64) for layout in all_layouts(2, ParallelismConfig())]
    findings = run_cells(2, work, timeout=60)
    assert {each.mesh for each in findings if each.refused} == {"tp2", "tp2_sp", "ep2"}
    assert all("parallelism.tp_plan" in text for each in findings if "tp" in each.mesh for text in each.refused)


@pytest.mark.parametrize(
    "name",
    [
        *("dp_shard2", "pp2_dp_replicate2_dp_shard2_ep4_cp2_tp2_sp", "ddp4", "dp_shard2_cp2"),
        *("ddp2_full", "tp2_sp_selective"),
    ],
)
def test_names_of_meshes_can_be_read_back(name: str) -> None:
    layout = layout_of(name, ParallelismConfig())
    assert layout is not None
    degrees = [layout.degree(axis) for axis in AXES]
    assert name_of(layout, int(torch.tensor(degrees).prod())) == name


@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_of_the_pipeline(world: int) -> None:
    """A tied model in stages, alone and with fsdp, tp or cp beside it."""
    names = {2: ["pp2"], 4: ["pp4", "pp2_dp_shard2", "pp2_cp2", "pp2_tp2_sp"]}[world]
    work = []
    for index, schedule in enumerate(PipelineSchedule):
        for name in names if EVERYTHING else {names[0], names[index % len(names)]}:
            layout = layout_of(name, ParallelismConfig(pp_schedule=schedule))
            each = cell("llama_tied" if world == 2 else "gemma3", world, layout)
            work.append((replace(each, name=f"{name} {schedule}"), torch.float64))
    problems = problems_of(run_cells(world, work, timeout=240))
    assert not problems, problems


def test_both_ways_to_attend_over_cp() -> None:
    """all_gather where ulysses would be chosen, over full and sliding attention; ulysses with shared kv heads."""
    work = []
    for method in (ContextAttention.all_gather, ContextAttention.ulysses):
        for model, name in (("gemma3", "cp4"), ("gemma3", "cp2_tp2"), ("qwen3", "cp4"), ("gpt2", "dp_shard2_cp2")):
            each = cell(model, 4, layout_of(name, ParallelismConfig(cp_attention=method)))
            work.append((replace(each, name=f"{name} {method}"), torch.float64))
    problems = problems_of(run_cells(4, work, timeout=120))
    assert not problems, problems


def test_compiled_layers_train_over_cp_and_tp() -> None:
    meshes = [
        *({**CP, "cp_attention": method} for method in (ContextAttention.ulysses, ContextAttention.all_gather)),
        *(TP, {**TP, **SP}),
    ]
    cases = [Case("llama", mesh, steps=1, compile="aot_eager") for mesh in meshes]
    expected, model = reference(cases[0]), build("llama", torch.float64)

    def on_rank(rank: int) -> list[str]:
        return [line for case in cases for line in check(case, expected, *run_case(case, model))]

    assert not [line for lines in run_ranks(2, on_rank, timeout=240) for line in lines]


def test_some_experts_get_no_token() -> None:
    gradients = grid.expected_curve("qwen3_moe", 2, torch.float64).gradients
    largest = gradients["model.layers.0.mlp.experts.down_proj"].abs().amax(dim=(1, 2))  # (experts,)
    assert (largest[: grid.IDLE_EXPERTS] == 0).all()
    assert (largest > 0).any()


@pytest.mark.skipif(not EVERYTHING, reason="make parity")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("model", grid.MODELS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_whole_grid(world: int, model: str) -> None:
    found = cells(world, model, RECOMPUTE)
    record([Finding(world, model, each.name, "float64", refused=list(each.refused)) for each in found if each.refused])
    legal = [each for each in found if not each.refused]
    problems = []
    for start in range(0, len(legal), AT_ONCE):
        some = legal[start : start + AT_ONCE]
        plain = [each for each in some if each.parallelism.activation_checkpointing == ActivationCheckpointing.none]
        for dtype, chosen in ((torch.float64, some), (torch.float32, plain)):
            work = [(each, dtype) for each in chosen]
            problems.append(problems_of(run_cells(world, work, timeout=3500)))
    assert not any(problems), "\n".join(problems)


PP = {"strategy": "fsdp2", "dp_shard": 1, "pp": 2}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "olmo": ({}, PP),  # its last norm has no parameters
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.05}, TP),  # clamps its projections in place
    "granite": ({"embedding_multiplier": 2.0}, PP),  # scaled by the forward itself
    "phimoe": ({"sliding_window": 4, "num_local_experts": 2, "router_jitter_noise": 0.0}, FSDP2),  # only in its mask
    "apertus": ({}, TP),  # all features share the numbers of its activation
    "deepseek_v2": ({**LATENT, "num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 2}, TP),
}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "cohere": ({"use_qk_norm": True}, TP, "self_attn.q_norm has a weight for each head, and tp divides heads"),
    "jamba": ({"num_experts": 2, "expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 2,
               "attn_layer_offset": 1, "use_mamba_kernels": False}, TP,
              "model.layers.0.mamba.conv1d is a convolution, which the plan of JambaForCausalLM leaves out"),
    "llama4_text": ({"num_local_experts": 2, "head_dim": 12}, TP, "does not receive the experts chosen for each token"),
    "zamba2": ({"num_hidden_layers": 4, "mamba_d_state": 4, "n_mamba_heads": 8, "hybrid_layer_ids": [1, 3],
                "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid"] * 2}, FSDP2,
               "model.layers.1 and model.layers.3 of Zamba2ForCausalLM share parameters"),
    "falcon": ({}, CP, "FalconForCausalLM computes attention in its own code, outside transformers' attention "
               "interface, so its sequences cannot be sharded; set parallelism.cp=1"),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, CP,
             "Lfm2ForCausalLM has layers of type conv, which are neither"),
    "minimax": ({"num_local_experts": 2}, CP,
                "MiniMaxForCausalLM has layers of type linear_attention, which are neither"),
    "doge": ({"sliding_window": None}, FSDP2, "adds its own mask to transformers' causal mask"),
}  # fmt: skip


def test_families_that_hide_something() -> None:
    """What a forward does beside its modules happens once; what cannot be divided is refused by name."""

    def of(name: str, values: dict[str, Any]) -> nn.Module:
        # DeepSeek turns its queries in complex numbers of float32; the router of PhiMoE is not the one we know.
        dtype = torch.float32 if name in ("deepseek_v2", "phimoe") else torch.float64
        return build(name, dtype, {**SMALL, **values, "model_type": name})

    built = {name: of(name, values) for name, (values, _) in FAMILIES.items()}
    trained = {
        name: Case(name, mesh, 1 + ("pp" in mesh), 1, next(built[name].parameters()).dtype)
        for name, (_, mesh) in FAMILIES.items()
    }
    expected = {name: reference(case, of(name, FAMILIES[name][0])) for name, case in trained.items()}
    refused = {name: of(name, values) for name, (values, _, _) in REFUSED.items()}

    def on_rank(rank: int) -> list[str]:
        found = []
        for name, case in trained.items():
            found += check(case, expected[name], *run_case(case, built[name]))
        for name, (_, mesh, words) in REFUSED.items():
            with pytest.raises(ConfigError, match=re.escape(words)):
                run_case(Case(name, mesh, 1, 1), refused[name])
        return found

    problems = sorted({line for lines in run_ranks(2, on_rank, timeout=240) for line in lines})
    assert not problems, "\n".join(problems)
