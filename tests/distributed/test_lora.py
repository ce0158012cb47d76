"""Adapters on every mesh: gradients and curves are those of the peft library in one process, in plain PyTorch.

Those of QLoRA are peft's over weights that were rounded to NF4 by a rule written out here.

float64: the first step's gradient of every adapter parameter within 1e-10; float32: loss and norm of five steps within
1e-5. A covering part is always tested; MESHBOOK_ALL_PARITY=1 (`make parity`) tests all of it.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import DTensor

from components import distributed, models
from components.config.errors import ConfigError
from components.config.schema import ActivationCheckpointing, ParallelismConfig
from components.distributed.tensor import adapters
from components.parity.comparison import relative
from components.parity.shapes import layout_of
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

F32 = torch.float32
EVERYTHING = os.environ.get("MESHBOOK_ALL_PARITY") == "1"
BIASES = {"attention_bias": True, "mlp_bias": True}
SOME = {
    1: [
        Adapted("llama", "single"),
        Adapted("gpt2", "single", peft=RSLORA),
        Adapted("qwen3", "single", F32, DORA),
        Adapted("llama", "single", peft=QDORA),
    ],
    2: [
        Adapted("gpt2", "ddp2"),
        Adapted("qwen3", "dp_shard2"),
        Adapted("llama_tied", "tp2", peft=DORA),  # heads that do not divide: attention on every rank
        Adapted("gemma", "tp2_sp", peft=DORA),  # one kv head, shared
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


def everything(world: int) -> list[Adapted]:
    """Models with heads that tp divides, must share, and cannot divide; mixtures of experts; every schedule."""
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
    packed = [
        Adapted(model, mesh, dtype, peft, config=WIDE | ({"head_dim": 16} if model == "qwen3" else {}))
        for model in ("llama", "qwen3")
        for mesh in DENSE[world]
        if "tp4" not in mesh  # 64 columns lie together
        for dtype, peft in ((torch.float64, QLORA), (F32, QDORA))
    ]
    if world == 2:
        packed += [Adapted("llama", "pp2", peft=QLORA, layout={"pp_schedule": name}, layers=5) for name in SCHEDULES]
    mixtures = [Adapted(model, mesh, peft=ATTENTION) for model in ("mixtral", "qwen3_moe") for mesh in moe]
    return [*grid, *packed, *mixtures, *(staged if world == 2 else [])]


@pytest.mark.parametrize("world", SOME)
def test_adapters_train_as_in_the_peft_library(world: int) -> None:
    problems = problems_of(run_adapted(world, SOME[world]))
    assert not problems, problems


@pytest.mark.skipif(not EVERYTHING, reason="make parity")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", DENSE)
def test_the_whole_grid(world: int) -> None:
    cases = everything(world)
    for start in range(0, len(cases), 40):
        problems = problems_of(run_adapted(world, cases[start : start + 40], timeout=1200))
        assert not problems, problems


def whole_factors_are_not_summed() -> None:
    """tp ranks keep their part of the gradient of A column-wise, and of B row-wise."""
    right = adapters._local
    adapters._local = lambda module, partial: right(module, ())


def shared_heads_are_not_summed() -> None:
    """The same, of key and value heads that ranks share."""
    right = adapters._local
    adapters._local = lambda module, partial: right(module, () if partial == adapters.NAMES else partial)


def lengths_are_of_parts() -> None:
    """A row-wise layer takes the length of this rank's part of a row for that of the row."""
    adapters._InputShard.norms = lambda self, norms: norms


BUGS: list[tuple[Callable[[], None], Adapted, str]] = [
    (whole_factors_are_not_summed, Adapted("llama", "tp2", layers=1), r"gradient of .*lora_[AB]"),
    (shared_heads_are_not_summed, Adapted("gemma", "tp2", layers=1), r"gradient of .*[kv]_proj.lora_[AB]"),
    (lengths_are_of_parts, Adapted("llama", "tp2", peft=DORA, layers=1), r"loss is off"),
]


@pytest.mark.parametrize(("plant", "case", "words"), BUGS, ids=lambda value: getattr(value, "__name__", None))
def test_the_check_sees_a_planted_bug(plant: Callable[[], None], case: Adapted, words: str) -> None:
    (finding,) = run_adapted(2, [case], sabotage=plant)
    assert re.search(words, "\n".join(finding.problems)), finding


def lay_out(model: torch.nn.Module, mesh_name: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """A copy of a model on a mesh of all ranks."""
    config = layout_of(mesh_name, ParallelismConfig())
    assert config is not None
    laid_out = copy.deepcopy(model)
    models.use_causal_sdpa(laid_out)
    distributed.parallelize(laid_out, distributed.build_mesh(config, "cpu"), config, dtype)
    return laid_out


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of one forward and backward on fixed rows, in training mode, from a fixed random state."""
    model.train()
    torch.manual_seed(3)
    ids = torch.arange(3, 35).reshape(2, 16)
    model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    trained = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in trained.items()}


def test_tp_ranks_drop_what_one_process_drops() -> None:
    """Whole inputs alike on every rank, parts of inputs as parts of one draw; and as the peft library draws."""
    cases = [
        Adapted("llama", mesh, peft=replace(peft, dropout=0.4)) for mesh, peft in (("tp2", LORA), ("tp2_sp", DORA))
    ]
    built = [(ours(case), gradients(theirs(case)), case.mesh) for case in cases]
    built = [
        (model, {our_name(name): each for name, each in expected.items()}, mesh) for model, expected, mesh in built
    ]
    alone = [gradients(copy.deepcopy(model)) for model, _, _ in built]

    def worst(rank: int) -> float:
        got = [gradients(lay_out(model, mesh)) for model, _, mesh in built]
        return max(
            relative(each[name], expected[name])
            for grads in (alone, got)
            for each, (_, expected, _) in zip(grads, built, strict=True)
            for name in expected
        )

    assert max(run_ranks(2, worst)) < 1e-10
    without = gradients(ours(Adapted("llama", "tp2")))
    assert max(relative(without[name], each) for name, each in built[0][1].items()) > 0.1


def test_recomputed_and_compiled_layers_have_the_same_gradients() -> None:
    """With dropout, which must be drawn again alike."""
    model = ours(Adapted("llama", "tp2_sp", peft=replace(LORA, dropout=0.3), layers=1))

    def worst(rank: int) -> float:
        expected = gradients(lay_out(model, "tp2_sp"))
        changed = lay_out(model, "tp2_sp")
        models.checkpoint_activations(changed, ActivationCheckpointing.full)
        models.compile_layers(changed, backend="eager")
        got = gradients(changed)
        return max(relative(got[name], expected[name]) for name in expected)

    assert max(run_ranks(2, worst, timeout=120)) < 1e-10


def test_adapters_in_float32_beside_weights_in_bfloat16() -> None:
    """One FSDP unit then holds both types: gradients are those of one process, in float32."""
    model = ours(Adapted("llama", "dp_shard2_tp2", F32, DORA))
    for parameter in model.parameters():
        parameter.data = parameter.data if parameter.requires_grad else parameter.data.bfloat16()
    expected = gradients(copy.deepcopy(model))

    def worst(rank: int) -> float:
        got = [gradients(lay_out(model, mesh, torch.bfloat16)) for mesh in ("dp_shard2", "tp2")]
        assert {each[name].dtype for each in got for name in each} == {F32}
        scale = {"dp_shard2": 2.0, "tp2": 1.0}  # both ranks of dp_shard brought the same rows
        return max(
            relative(each[name] / scale[mesh], expected[name])
            for mesh, each in zip(scale, got, strict=True)
            for name in expected
        )

    assert max(run_ranks(2, worst)) < 0.05  # bfloat16 rounds to 3 digits


def test_a_torch_that_shards_no_bytes_is_told() -> None:
    model = ours(Adapted("llama", "dp_shard2", peft=QLORA))

    def refuse(module: torch.nn.Module, **_: object) -> None:
        raise RuntimeError("Only Tensors of floating point and complex dtype can require gradients")

    def told(rank: int) -> list[str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("components.distributed.fsdp.fully_shard", refuse)
            with pytest.raises(ConfigError) as caught:
                lay_out(model, "dp_shard2")
        return caught.value.problems

    assert re.search(
        r"qlora: FSDP2 of torch .* does not shard bytes \(Only Ten.*parallelism=ddp", run_ranks(2, told)[0][0]
    )


def test_what_cannot_have_adapters_on_a_mesh_is_refused() -> None:
    fused = ours(Adapted("phi3", "tp2"))
    sparse = ours(Adapted("llama", "pp2", peft=replace(LORA, targets=["layers.0.self_attn.q_proj"])))
    narrow = ours(Adapted("llama", "tp2", peft=QLORA))

    def told(rank: int) -> list[str]:
        problems = []
        for model, mesh in ((fused, "tp2"), (sparse, "pp2"), (narrow, "tp2")):
            with pytest.raises(ConfigError) as caught:
                lay_out(model, mesh)
            problems += caught.value.problems
        return problems

    of_tp, of_pp, of_packed = run_ranks(2, told)[0]
    assert re.search(
        r"parallelism.tp: model.layers.0.*_proj has an adapter, .*peft.targets, or set parallelism.tp=1", of_tp
    )
    assert re.search(r"parallelism.pp: no layer of pipeline stage 1 has an adapter.*peft.targets=\[all-linear\]", of_pp)
    assert re.search(
        r"parallelism.tp=2: model.layers.0.self_attn.o_proj has 48 inputs, which are quantized 64 at a time.*peft=lora",
        of_packed,
    )
