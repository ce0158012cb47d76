"""One loss curve on every mesh: every product of the six axes on 2, 4 and 8 processes is compared with one process.

float64: the gradient of every parameter in the first step, within 1e-10 relative. float32: loss and gradient norm of
five steps, within 1e-5 relative of one process in float64. Replicas: bitwise equal after the last step. A subset of the
grid that covers every axis, every pair of axes and every model always runs; `make parity` runs the full grid and writes
outputs/parity/grid.md.
"""

from __future__ import annotations

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

from components.config.mesh_rules import RECOMPUTE, all_layouts, layout_of, mesh_shapes, name_of
from components.config.schema import ParallelismConfig
from components.config.schema.parallelism import AXES, ActivationCheckpointing, ContextAttention, PipelineSchedule
from components.protocol.errors import ConfigError
from tests.distributed import grid
from tests.distributed.grid import Cell, Finding, cell, cells, run_cells
from tests.distributed.grid_record import record
from tests.distributed.parity import SMALL, Case, Curve, build, reference, relative, run_case
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import PARITY, in_parity

FSDP2 = {"strategy": "fsdp2", "dp_shard": -1}
DDP = {"strategy": "ddp", "dp_shard": 1, "dp_replicate": -1}
HSDP = {"strategy": "fsdp2", "dp_shard": 2, "dp_replicate": -1}
TP = {"strategy": "fsdp2", "dp_shard": 1, "tp": -1}
FSDP2_TP2 = {"strategy": "fsdp2", "dp_shard": -1, "tp": 2}
SP = {"sequence_parallel": True}
CP = {"strategy": "fsdp2", "dp_shard": 1, "cp": 2}
MOE = ("mixtral", "qwen3_moe")
MAX_MESHES = 40
"""Maximum number of meshes per world: each leaves its process groups behind."""


class _ConvColwise(ParallelStyle):
    """Column-wise style for GPT-2's Conv1D, whose weight is (in, out), as in a user-defined plan."""

    def _apply(self, module: nn.Module, mesh: torch.distributed.DeviceMesh) -> nn.Module:
        for name, dim in (("weight", 1), ("bias", 0)):
            full = getattr(module, name).data
            sharded = distribute_tensor(full, mesh, [Shard(dim)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded))
        module.nf //= mesh.size()

        def forward(x: torch.Tensor) -> torch.Tensor:
            x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
            return (x @ module.weight + module.bias).to_local()

        module.forward = forward
        return module


class _ConvRowwise(ParallelStyle):
    def _apply(self, module: nn.Module, mesh: torch.distributed.DeviceMesh) -> nn.Module:
        for name, placement in (("weight", Shard(0)), ("bias", Replicate())):
            full = getattr(module, name).data
            module.register_parameter(
                name, nn.Parameter(distribute_tensor(full, mesh, [placement], src_data_rank=None))
            )

        def forward(x: torch.Tensor) -> torch.Tensor:
            x = DTensor.from_local(x, mesh, [Shard(-1)], run_check=False)
            output = (x @ module.weight).redistribute(placements=[Replicate()])
            return (output + module.bias).to_local()

        module.forward = forward
        return module


def gpt2_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    return {"transformer.h.*.mlp.c_fc": _ConvColwise(), "transformer.h.*.mlp.c_proj": _ConvRowwise()}


def check(case: Case, expected: Curve, got: Curve, different: list[str]) -> list[str]:
    """Return one line for each deviation of a case from the reference."""
    problems = [f"{case}: replicas of {name} differ" for name in different]
    bound = 1e-10 if case.dtype == torch.float64 else 1e-5
    for name, gradient in got.gradients.items():
        error = relative(gradient, expected.gradients[name])
        if not error < bound:
            problems.append(f"{case}: gradient of {name} is off by {error:.1e}")
    for kind, values, reference_values in (("loss", got.losses, expected.losses), ("norm", got.norms, expected.norms)):
        for step, (value, reference_value) in enumerate(zip(values, reference_values, strict=True)):
            if not abs(value - reference_value) <= bound * abs(reference_value):
                problems.append(f"{case}: {kind} of step {step} is {value!r}, not {reference_value!r}")
    return problems


def problems_of(findings: list[Finding]) -> str:
    record(findings)
    unexpected = [f"{each.model} on {each.mesh} was rejected: {text}" for each in findings for text in each.rejected]
    return "\n".join([*unexpected, *(text for each in findings for text in each.problems)])


def covering(world: int) -> list[Cell]:
    """Return each mesh of `world` processes once, with the model and recompute policy that were chosen least often.

    Policies are counted per axis, so that each policy is combined with each axis. With another axis than dp_shard, tp
    is combined with sequence parallelism only.
    """
    chosen: list[Cell] = []
    for layout in all_layouts(world, ParallelismConfig()):
        if layout.tp > 1 and not layout.sequence_parallel and _axes(layout) - {"tp", "dp_shard"}:
            continue
        names = MOE if layout.ep > 1 else tuple(grid.MODELS)
        names = names if layout.ep < 4 else MOE[1:]
        model = min(names, key=lambda name: sum(each.model == name for each in chosen))
        axes = _axes(layout)
        chosen_with_axis = Counter(
            each.parallelism.activation_checkpointing for each in chosen for axis in axes & _axes(each.parallelism)
        )
        chosen_overall = Counter(each.parallelism.activation_checkpointing for each in chosen)
        policy = min(RECOMPUTE, key=lambda each: (chosen_with_axis[each], chosen_overall[each]))
        chosen.append(cell(model, world, replace(layout, activation_checkpointing=policy)))
    return chosen


def _axes(layout: ParallelismConfig) -> set[str]:
    return {axis for axis in AXES if layout.degree(axis) > 1}


@pytest.mark.parametrize("world", [2, 4])
def test_covering_subset_of_the_grid_matches_one_process(world: int) -> None:
    chosen = covering(world)
    work = [(each, torch.float64) for each in chosen] + [(each, torch.float32) for each in chosen[:: 4 * world - 4]]
    problems = problems_of(run_cells(world, work, timeout=240))
    assert not problems, problems


def test_covering_subset_includes_all_axes_pairs_policies_and_models() -> None:
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
def test_grid_contains_every_mesh_and_rejects_only_impossible_ones(world: int) -> None:
    products = list(mesh_shapes(world))
    assert len(products) == {2: 6, 4: 21, 8: 56}[world]  # ordered factorizations into six
    for model in grid.MODELS:
        found = cells(world, model)
        assert len(found) == len(products) + sum(shape.tp > 1 for shape in products) + 1  # sp, ddp
        assert len({each.name for each in found}) == len(found)
        experts = {"mixtral": 6, "qwen3_moe": 16}.get(model, 1)
        assert {each.name for each in found if each.rejected} == {
            each.name for each in found if experts % each.parallelism.ep
        }


def test_gpt2_with_a_plan_of_the_user_matches_one_process() -> None:
    plan = ParallelismConfig(tp_plan="tests.distributed.test_parity:gpt2_plan")
    work = [(cell("gpt2", 2, layout_of(name, plan)), torch.float64) for name in ("tp2", "tp2_sp")]
    problems = problems_of(run_cells(2, work, timeout=60))
    assert not problems, problems


@pytest.mark.parametrize(
    "name",
    [
        *("dp_shard2", "pp2_dp_replicate2_dp_shard2_ep4_cp2_tp2_sp", "ddp4", "dp_shard2_cp2"),
        *("ddp2_full", "tp2_sp_selective"),
    ],
)
def test_mesh_names_round_trip(name: str) -> None:
    layout = layout_of(name, ParallelismConfig())
    assert layout is not None
    degrees = [layout.degree(axis) for axis in AXES]
    assert name_of(layout, int(torch.tensor(degrees).prod())) == name


@pytest.mark.parametrize("world", [2, 4])
def test_every_pipeline_schedule_matches_one_process(world: int) -> None:
    """A model with tied embeddings, with pp alone and combined with fsdp, tp or cp."""
    names = {2: ["pp2"], 4: ["pp4", "pp2_dp_shard2", "pp2_cp2", "pp2_tp2_sp"]}[world]
    work = []
    for index, schedule in enumerate(PipelineSchedule):
        for name in names if PARITY else [names[index % len(names)]]:
            layout = layout_of(name, ParallelismConfig(pp_schedule=schedule))
            each = cell("llama_tied" if world == 2 else "gemma3", world, layout)
            work.append((replace(each, name=f"{name} {schedule}"), torch.float64))
    problems = problems_of(run_cells(world, runnable(work), timeout=240))
    assert not problems, problems


def test_cp_attention_methods_match_one_process() -> None:
    """all_gather where auto selects ulysses, with full and sliding attention; ulysses with grouped kv heads."""
    work = []
    for method in (ContextAttention.all_gather, ContextAttention.ulysses):
        for model, name in (("gemma3", "cp4"), ("gemma3", "cp2_tp2"), ("qwen3", "cp4"), ("gpt2", "dp_shard2_cp2")):
            each = cell(model, 4, layout_of(name, ParallelismConfig(cp_attention=method)))
            work.append((replace(each, name=f"{name} {method}"), torch.float64))
    problems = problems_of(run_cells(4, work, timeout=120))
    assert not problems, problems


@pytest.mark.skipif(not PARITY, reason="compiles for a minute: make parity")
def test_compiled_layers_match_one_process_over_cp_and_tp() -> None:
    meshes = [
        *({**CP, "cp_attention": method} for method in (ContextAttention.ulysses, ContextAttention.all_gather)),
        *(TP, {**TP, **SP}),
    ]
    cases = [Case("llama", mesh, steps=1, compile="aot_eager") for mesh in meshes]
    expected, model = reference(cases[0]), build("llama", torch.float64)

    def on_rank(rank: int) -> list[str]:
        return [line for case in cases for line in check(case, expected, *run_case(case, model))]

    assert not [line for lines in run_ranks(2, on_rank, timeout=240) for line in lines]


def test_parity_samples_leave_some_experts_idle() -> None:
    gradients = grid.expected_curve("qwen3_moe", 2, torch.float64).gradients
    largest = gradients["model.layers.0.mlp.experts.down_proj"].abs().amax(dim=(1, 2))  # (experts,)
    assert (largest[: grid.IDLE_EXPERTS] == 0).all()
    assert (largest > 0).any()


@in_parity
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("model", grid.MODELS)
@pytest.mark.parametrize("world", [2, 4, 8])
def test_full_grid_matches_one_process(world: int, model: str) -> None:
    found = cells(world, model, RECOMPUTE)
    record(
        [Finding(world, model, each.name, "float64", rejected=list(each.rejected)) for each in found if each.rejected]
    )
    legal = [each for each in found if not each.rejected]
    problems = []
    for start in range(0, len(legal), MAX_MESHES):
        batch = legal[start : start + MAX_MESHES]
        plain = [each for each in batch if each.parallelism.activation_checkpointing == ActivationCheckpointing.none]
        for dtype, chosen in ((torch.float64, batch), (torch.float32, plain)):
            work = [(each, dtype) for each in chosen]
            problems.append(problems_of(run_cells(world, work, timeout=3500)))
    assert not any(problems), "\n".join(problems)


PP = {"strategy": "fsdp2", "dp_shard": 1, "pp": 2}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "olmo": ({}, PP),  # the final norm has no parameters
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.05}, TP),  # clamps its projections in place
    "granite": ({"embedding_multiplier": 2.0}, PP),  # the forward scales the embeddings
    "phimoe": ({"sliding_window": 4, "num_local_experts": 2, "router_jitter_noise": 0.0}, FSDP2),  # window in mask only
    "apertus": ({}, TP),  # its activation has parameters that all features share
    "deepseek_v2": ({**LATENT, "num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 2}, TP),
}
REJECTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "jamba": ({"num_experts": 2, "expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 2,
               "attn_layer_offset": 1, "use_mamba_kernels": False}, TP,
              "model.layers.0.mamba.conv1d is a convolution, which the plan of JambaForCausalLM leaves out; set "
              "parallelism.tp=1"),
    "llama4_text": ({"num_local_experts": 2, "head_dim": 12}, TP,
                    "does not receive the experts chosen for each token, so tokens cannot be sent to them; set "
                    "parallelism.ep=1 and parallelism.tp=1"),
    "zamba2": ({"num_hidden_layers": 4, "mamba_d_state": 4, "n_mamba_heads": 8, "hybrid_layer_ids": [1, 3],
                "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid"] * 2}, FSDP2,
               "model.layers.1 and model.layers.3 of Zamba2ForCausalLM share parameters, which cannot be sharded layer "
               "by layer or split into stages; set parallelism=ddp"),
    "falcon": ({}, CP, "FalconForCausalLM computes attention in its own code, outside transformers' attention "
               "interface, so its sequences cannot be sharded; set parallelism.cp=1"),
    "minimax": ({"num_local_experts": 2}, CP,
                "MiniMaxForCausalLM has layers of type linear_attention, which are neither full nor sliding attention"),
    "doge": ({"sliding_window": None}, FSDP2, "adds its own mask to transformers' causal mask, which mask-free "
             "attention does not build; set model.attention=eager"),
}  # fmt: skip


def test_families_with_special_forwards_match_or_are_rejected() -> None:
    """Operations of a forward outside its modules run once; layers that cannot be sharded are rejected by name."""

    def build_family(name: str, values: dict[str, Any]) -> nn.Module:
        # DeepSeek rotates its queries in complex64; the float64 router of parity.py does not cover PhiMoE.
        dtype = torch.float32 if name in ("deepseek_v2", "phimoe") else torch.float64
        return build(name, dtype, {**SMALL, **values, "model_type": name})

    built = {name: build_family(name, values) for name, (values, _) in FAMILIES.items()}
    trained = {
        name: Case(name, mesh, 1 + ("pp" in mesh), 1, next(built[name].parameters()).dtype)
        for name, (_, mesh) in FAMILIES.items()
    }
    expected = {name: reference(case, build_family(name, FAMILIES[name][0])) for name, case in trained.items()}
    rejected = {name: build_family(name, values) for name, (values, _, _) in REJECTED.items()}

    def on_rank(rank: int) -> list[str]:
        found = []
        for name, case in trained.items():
            found += check(case, expected[name], *run_case(case, built[name]))
        for name, (_, mesh, message) in REJECTED.items():
            with pytest.raises(ConfigError, match=re.escape(message)):
                run_case(Case(name, mesh, 1, 1), rejected[name])
        return found

    problems = sorted({line for lines in run_ranks(2, on_rank, timeout=240) for line in lines})
    assert not problems, "\n".join(problems)
