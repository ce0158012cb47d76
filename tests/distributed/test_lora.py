"""Adapters on every mesh: gradients and curves match the peft library in one process, in plain PyTorch.

For QLoRA peft runs on weights that were rounded to NF4 independently, by tests/distributed/adapted.py.

float64: the first step's gradient of every adapter parameter within 1e-10; float32: loss and norm of five steps within
1e-5. A representative subset by default; everything with MESHBOOK_ALL_PARITY=1 (`make parity`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from components import distributed, models
from components.config.errors import ConfigError
from components.config.meshes import layout_of
from components.config.schema import ActivationCheckpointing, ParallelismConfig
from components.distributed.tensor import adapters
from components.parity.comparison import relative
from tests.distributed.adapted import (
    ATTENTION,
    DORA,
    LORA,
    QDORA,
    QLORA,
    RSLORA,
    WIDE,
    Adapted,
    our_name,
    ours,
    problems_of,
    run_adapted,
    theirs,
)
from tests.harness import run_ranks
from tests.optional import SHARDS_BYTES, runnable
from tests.suites import PARITY, in_parity

F32 = torch.float32
BIASES = {"attention_bias": True, "mlp_bias": True}
DEFAULT_CASES = {
    1: [
        Adapted("llama", "single"),
        Adapted("gpt2", "single", peft=RSLORA),
        Adapted("qwen3", "single", F32, DORA),
        Adapted("llama", "single", peft=QDORA),
    ],
    2: [
        Adapted("gpt2", "ddp2"),
        Adapted("qwen3", "dp_shard2"),
        Adapted("llama_tied", "tp2", peft=DORA),  # tp does not divide the heads: attention is replicated
        Adapted("gemma", "tp2_sp", peft=DORA),  # one kv head, which the tp ranks share
        Adapted("llama", "tp2_sp", F32, config=BIASES),
        Adapted("qwen3", "cp2", peft=RSLORA),
        Adapted("llama_tied", "pp2", layout={"defer_grad_sync": False}),
        Adapted("mixtral", "ep2", peft=ATTENTION),
        Adapted("llama", "ddp2", peft=QLORA),
        Adapted("llama", "dp_shard2", F32, QLORA),
        Adapted("llama", "tp2_sp", peft=QDORA, config=WIDE),
    ],
    4: [
        Adapted("llama", "dp_replicate2_dp_shard2", layout={"defer_grad_sync": False}),
        Adapted("qwen3", "dp_shard2_tp2", peft=DORA),
        Adapted("llama", "dp_shard2_tp2_sp"),
        Adapted("llama", "dp_replicate2_dp_shard2", peft=QLORA),
    ],
}
SCHEDULES = ("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
DENSE = {
    1: ("single",),
    2: ("ddp2", "dp_shard2", "tp2", "tp2_sp", "cp2", "pp2"),
    4: (
        *("dp_replicate2_dp_shard2", "dp_shard2_tp2", "dp_shard2_tp2_sp", "dp_replicate2_tp2", "tp4", "tp4_sp"),
        *("dp_shard2_cp2", "cp2_tp2_sp", "pp2_tp2", "pp2_dp_shard2"),
    ),
}


def all_cases(world: int) -> list[Adapted]:
    """Models whose heads tp divides, shares or cannot divide; mixtures of experts; every pipeline schedule."""
    grid = [
        Adapted(model, mesh, dtype, peft)
        for model in ("llama", "llama_tied", "qwen3", "gemma")
        for mesh in DENSE[world]
        for dtype, peft in ((torch.float64, LORA), (torch.float64, DORA), (F32, DORA))
    ]
    grid += [Adapted("llama", mesh, peft=RSLORA) for mesh in DENSE[world]]
    grid += [Adapted("llama", mesh, peft=DORA, config=BIASES) for mesh in DENSE[world]]
    staged = [Adapted("llama", "pp2", layout={"pp_schedule": name}, layers=5) for name in SCHEDULES]
    moe = {2: ["ep2", "tp2"], 4: ["ep2_tp2", "dp_shard2_ep2", "pp2_ep2"]}.get(world, [])
    quantized = [
        Adapted(model, mesh, dtype, peft, config=WIDE | ({"head_dim": 16} if model == "qwen3" else {}))
        for model in ("llama", "qwen3")
        for mesh in DENSE[world]
        if "tp4" not in mesh  # quantization blocks of 64 columns cannot be split
        for dtype, peft in ((torch.float64, QLORA), (F32, QDORA))
    ]
    if world == 2:
        quantized += [Adapted("llama", "pp2", peft=QLORA, layout={"pp_schedule": name}, layers=5) for name in SCHEDULES]
    mixtures = [Adapted(model, mesh, peft=ATTENTION) for model in ("mixtral", "qwen3_moe") for mesh in moe]
    return [*grid, *quantized, *mixtures, *(staged if world == 2 else [])]


def supported(cases: list[Adapted]) -> list[Adapted]:
    """Return the cases that the installed torch can run."""
    packs = ("single", "ddp2")
    return [case for case in runnable(cases) if SHARDS_BYTES or not case.peft.quantizes or case.mesh in packs]


@pytest.mark.parametrize("world", DEFAULT_CASES if PARITY else [1, 2])
def test_adapter_training_matches_the_peft_library(world: int) -> None:
    problems = problems_of(run_adapted(world, supported(DEFAULT_CASES[world])))
    assert not problems, problems


@in_parity
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", DENSE)
def test_adapter_training_matches_the_peft_library_on_the_full_grid(world: int) -> None:
    cases = supported(all_cases(world))
    for start in range(0, len(cases), 40):
        problems = problems_of(run_adapted(world, cases[start : start + 40], timeout=1200))
        assert not problems, problems


def skip_reduction_of_replicated_factors() -> None:
    """Bug: the partial gradients of A (column-wise layers) and B (row-wise layers) are not all-reduced over tp."""
    original = adapters._local
    adapters._local = lambda module, partial: original(module, ())


def skip_reduction_of_shared_heads() -> None:
    """Bug: the same, only for key and value heads that tp ranks share."""
    original = adapters._local
    adapters._local = lambda module, partial: original(module, () if partial == adapters.NAMES else partial)


def norm_local_shards_only() -> None:
    """Bug: a row-wise layer uses the norm of this rank's shard of a row instead of the norm of the full row."""
    adapters._InputShard.norms = lambda self, norms: norms


BUGS: list[tuple[Callable[[], None], Adapted, str]] = [
    (skip_reduction_of_replicated_factors, Adapted("llama", "tp2", layers=1), r"gradient of .*lora_[AB]"),
    (skip_reduction_of_shared_heads, Adapted("gemma", "tp2", layers=1), r"gradient of .*[kv]_proj.lora_[AB]"),
    (norm_local_shards_only, Adapted("llama", "tp2", peft=DORA, layers=1), r"loss is off"),
]


@pytest.mark.parametrize(("sabotage", "case", "pattern"), BUGS, ids=lambda value: getattr(value, "__name__", None))
def test_planted_bug_is_detected(sabotage: Callable[[], None], case: Adapted, pattern: str) -> None:
    (finding,) = run_adapted(2, [case], sabotage=sabotage)
    assert re.search(pattern, "\n".join(finding.problems)), finding


def place_on_mesh(model: torch.nn.Module, mesh_name: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """Return a copy of a model, parallelized over a mesh of all ranks."""
    config = layout_of(mesh_name, ParallelismConfig())
    assert config is not None
    placed = copy.deepcopy(model)
    models.use_causal_sdpa(placed)
    distributed.parallelize(placed, distributed.build_mesh(config, "cpu"), config, dtype)
    return placed


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients of one forward and backward on fixed rows, in training mode, from a fixed RNG state."""
    model.train()
    torch.manual_seed(3)
    ids = torch.arange(3, 35).reshape(2, 16)
    model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    trained = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in trained.items()}


def test_dropout_under_tp_matches_one_process() -> None:
    """Replicated inputs get the same mask on every rank, sharded inputs get shards of it; peft draws the same mask."""
    cases = [
        Adapted("llama", mesh, peft=replace(peft, dropout=0.4)) for mesh, peft in (("tp2", LORA), ("tp2_sp", DORA))
    ]
    built = [(ours(case), gradients(theirs(case)), case.mesh) for case in cases]
    built = [
        (model, {our_name(name): each for name, each in expected.items()}, mesh) for model, expected, mesh in built
    ]
    single = [gradients(copy.deepcopy(model)) for model, _, _ in built]

    def worst(rank: int) -> float:
        got = [gradients(place_on_mesh(model, mesh)) for model, _, mesh in built]
        return max(
            relative(each[name], expected[name])
            for grads in (single, got)
            for each, (_, expected, _) in zip(grads, built, strict=True)
            for name in expected
        )

    assert max(run_ranks(2, worst)) < 1e-10
    no_dropout = gradients(ours(Adapted("llama", "tp2")))
    assert max(relative(no_dropout[name], each) for name, each in built[0][1].items()) > 0.1


def test_recompute_and_compile_do_not_change_adapter_gradients() -> None:
    """Uses dropout, whose mask must be the same in the recomputed forward."""
    model = ours(Adapted("llama", "tp2_sp", peft=replace(LORA, dropout=0.3), layers=1))

    def worst(rank: int) -> float:
        expected = gradients(place_on_mesh(model, "tp2_sp"))
        modified = place_on_mesh(model, "tp2_sp")
        models.checkpoint_activations(modified, ActivationCheckpointing.full)
        models.compile_layers(modified, backend="eager")
        got = gradients(modified)
        return max(relative(got[name], expected[name]) for name in expected)

    assert max(run_ranks(2, worst, timeout=120)) < 1e-10


def test_float32_adapters_on_bfloat16_weights_match_one_process() -> None:
    """An FSDP unit then holds both dtypes; gradients are those of one process, in float32."""
    model = ours(Adapted("llama", "dp_shard2_tp2", F32, DORA))
    for parameter in model.parameters():
        parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
    expected = gradients(copy.deepcopy(model))

    def worst(rank: int) -> float:
        got = [gradients(place_on_mesh(model, mesh, torch.bfloat16)) for mesh in ("dp_shard2", "tp2")]
        assert {each[name].dtype for each in got for name in each} == {F32}
        scale = {"dp_shard2": 2.0, "tp2": 1.0}  # both dp_shard ranks have the same rows
        return max(
            relative(each[name] / scale[mesh], expected[name])
            for mesh, each in zip(scale, got, strict=True)
            for name in expected
        )

    assert max(run_ranks(2, worst)) < 0.05  # bfloat16 has about 3 significant digits


def test_torch_that_cannot_shard_bytes_is_rejected() -> None:
    model = ours(Adapted("llama", "dp_shard2", peft=QLORA))

    def reject_bytes(module: torch.nn.Module, **_: object) -> None:
        raise RuntimeError("Only Tensors of floating point and complex dtype can require gradients")

    def problems_of_rank(rank: int) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("components.distributed.fsdp.fully_shard", reject_bytes)
            with pytest.raises(ConfigError) as caught:
                place_on_mesh(model, "dp_shard2")
        return caught.value.problems

    assert re.search(
        r"qlora: parallelism.strategy=fsdp2 of torch .* shards weights of floating-point.* set parallelism=ddp",
        run_ranks(2, problems_of_rank)[0][0],
    )


def test_unsupported_adapters_on_a_mesh_are_rejected() -> None:
    fused = ours(Adapted("phi3", "tp2"))
    sparse = ours(Adapted("llama", "pp2", peft=replace(LORA, targets=["layers.0.self_attn.q_proj"])))
    narrow = ours(Adapted("llama", "tp2", peft=QLORA))

    def problems_of_rank(rank: int) -> list[str]:
        problems = []
        for model, mesh in ((fused, "tp2"), (sparse, "pp2"), (narrow, "tp2")):
            with pytest.raises(ConfigError) as caught:
                place_on_mesh(model, mesh)
            problems += caught.value.problems
        return problems

    of_tp, of_pp, of_quantized = run_ranks(2, problems_of_rank)[0]
    assert re.search(
        r"parallelism.tp: model.layers.0.*_proj has an adapter, .*peft.targets, or set parallelism.tp=1", of_tp
    )
    assert re.search(r"parallelism.pp: no layer of pipeline stage 1 has an adapter.*peft.targets=\[all-linear\]", of_pp)
    assert re.search(
        r"parallelism.tp=2: model.layers.0.self_attn.o_proj has 48 inputs, which are quantized 64 at a time.*peft=lora",
        of_quantized,
    )
