"""Adapters on every mesh: gradients and curves match the peft library in one process, in plain PyTorch.

For QLoRA peft runs on weights that were rounded to NF4 independently, by tests/distributed/adapted.py.

float64: the first step's gradient of every adapter parameter within 1e-10; float32: loss and norm of five steps within
1e-5. A representative subset by default; everything with MESHBOOK_ALL_PARITY=1 (`make parity`).
"""

from __future__ import annotations

import copy
import random
import re
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from components import distributed, models
from components.checkpoint.stored_tensors import base_fingerprint
from components.config.mesh_rules import _SPLIT_INPUTS, layout_of, quantized_problems
from components.config.schema import ActivationCheckpointing, ParallelismConfig, PeftConfig
from components.config.schema.parallelism import MeshShape
from components.config.shape import shape_of_built
from components.distributed import apply_tp, tp_plan
from components.models.anatomy import read_anatomy
from components.models.lora import adapted_layers
from components.planning.parity import relative
from components.planning.parity_reference import _forward_in_float64
from components.protocol.errors import ConfigError
from tests.distributed import test_parity, test_tp_plan
from tests.distributed.adapted import (
    ATTENTION,
    DORA,
    LORA,
    QDORA,
    QLORA,
    RSLORA,
    SAVED,
    WIDE,
    Adapted,
    our_name,
    ours,
    problems_of,
    run_adapted,
    theirs,
    with_adapters,
    with_peft,
)
from tests.distributed.parity import SMALL, Case, exact_loss, reference, run_case
from tests.distributed.parity import build as build_tiny
from tests.fuzz import families as fuzz
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
        Adapted("qwen3", "single", peft=SAVED),
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
        *(Adapted("llama", mesh, peft=SAVED) for mesh in ("dp_shard2", "tp2_sp", "pp2")),
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
    grid += [Adapted("llama", mesh, peft=SAVED) for mesh in DENSE[world]]
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
    original = apply_tp._local
    apply_tp._local = lambda module, partial: original(module, ())


def skip_reduction_of_shared_heads() -> None:
    """Bug: the same, only for key and value heads that tp ranks share."""
    original = apply_tp._local
    apply_tp._local = lambda module, partial: original(module, () if partial == apply_tp._NAMES else partial)


def norm_local_shards_only() -> None:
    """Bug: a row-wise layer uses the norm of this rank's shard of a row instead of the norm of the full row."""
    apply_tp._InputShard.norms = lambda self, norms: norms


BUGS: list[tuple[Callable[[], None], Adapted, str]] = [
    (skip_reduction_of_replicated_factors, Adapted("llama", "tp2", layers=1), r"gradient of .*lora_[AB]"),
    (skip_reduction_of_shared_heads, Adapted("gemma", "tp2", layers=1), r"gradient of .*[kv]_proj.lora_[AB]"),
    (norm_local_shards_only, Adapted("llama", "tp2", peft=DORA, layers=1), r"loss is off"),
]


def test_planted_bugs_are_detected() -> None:
    bugs, cases, patterns = zip(*BUGS, strict=True)
    findings = run_adapted(2, [*cases], bugs=bugs, owners=(apply_tp, apply_tp._InputShard))
    for finding, pattern in zip(findings, patterns, strict=True):
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


FAMILY_VALUES: dict[str, dict[str, Any]] = {
    **{name: {**SMALL, **values, "model_type": name} for name, (values, _) in test_parity.FAMILIES.items()},
    **{name: fuzz.draw_config(random.Random(0), name, 97, 2, 64) for name in fuzz.DENSE | fuzz.SPARSE},
    **{
        name: {**SMALL, **values}
        for table in (test_tp_plan.FAMILIES, test_tp_plan.VARIANTS, test_tp_plan.TRANSFORMERS_PLANS)
        for name, values in table.items()
    },
}
"""Config values of every family that tp shards; several names may be variants of one family."""
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
CHOSEN_TARGETS = {
    "phimoe": QKVO,  # its router is a linear layer with its own forward
    # peft mistakes adapters of dense MLPs for those of experts
    "glm4_moe": QKVO,
    "deepseek_v3": LATENT,
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", *QKVO],
    # PEFT rejects Mamba's out_proj
    **{name: ["in_proj", *QKVO] for name in ("nemotron_h", "falcon_h1", "falcon_h1_norm")},
    "deepseek_v2": LATENT,
}
WIDE_HEADS = {
    "global_head_dim": 32,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 32),
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "mamba_d_ssm": 256,
    "shared_intermediate_size": 128,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
}
"""Sizes of linear attention, Mamba-2 and shared experts for which two tp ranks can shard the quantized weights."""
IN_FLOAT32 = ("deepseek_v2", "deepseek_v3", "granitemoe", "phimoe")
"""Families with parts that compute in float32 or complex64 whatever the dtype of their input."""
TP2, TP2_SP, FSDP2_TP2 = test_parity.TP, {**test_parity.TP, **test_parity.SP}, test_parity.FSDP2_TP2
OF_FAMILIES: list[tuple[str, dict[str, Any], PeftConfig]] = [
    # Outputs of column-wise layers are gathered, inputs of row-wise layers are split.
    *((name, TP2, LORA) for name in ("glm4", "deepseek_v2")),
    *((name, TP2_SP, DORA) for name in ("olmo2", "gpt2", "qwen3_5_text")),
    ("nemotron_h", TP2, LORA),
    *((name, TP2, QDORA) for name in ("phi3", "gpt2")),
]
ALL_OF_FAMILIES = [
    (name, mesh, peft)
    for name in FAMILY_VALUES
    for mesh in (TP2, TP2_SP)
    for peft in (LORA, DORA, QLORA, QDORA)
    if mesh is TP2 or name not in test_tp_plan.UNSHARDED_SEQUENCES
]


def build_family(name: str, peft: PeftConfig) -> torch.nn.Module:
    """Build a model of a family in one process; QLoRA needs 64 inputs on each of two ranks."""
    values = FAMILY_VALUES[name]
    if peft.quantizes:
        wide = {**WIDE, "v_head_dim" if "v_head_dim" in values else "head_dim": 32}
        if values["model_type"] == "lfm2":
            wide["conv_bias"] = False  # draws other weights: one of the others lies between two levels
        wide |= {key: size for key, size in WIDE_HEADS.items() if key in values}
        values = {**values, **wide}
    model = build_tiny(name, F32 if name in IN_FLOAT32 else torch.float64, values)
    for module in model.modules():
        kind = type(module).__name__
        if kind in ("CohereAttention", "Ernie4_5Attention", "Gemma2Attention") and name not in IN_FLOAT32:
            module.forward = types.MethodType(_forward_in_float64, module)
        elif isinstance(module, Conv1D):
            vars(module).pop("forward", None)
    return model


def family_problems(world: int, chosen: list[tuple[str, dict[str, Any], PeftConfig]]) -> list[str]:
    """Return one line for each deviation from peft in one process: gradients of the first step, losses of two steps."""
    built: dict[tuple[str, str], Any] = {}
    for name, _, cfg in chosen:
        if (key := (name, str(cfg))) not in built:
            cfg = replace(cfg, targets=CHOSEN_TARGETS.get(name, cfg.targets))
            model = with_adapters(build_family(name, cfg), cfg)
            named = replace(cfg, targets=sorted(adapted_layers(model)))  # peft's own choice may include routers
            case = Case(name, {}, 1, 2, next(model.parameters()).dtype, loss=exact_loss(name))
            expected = reference(case, with_peft(build_family(name, cfg), named, model))
            expected.gradients = {our_name(each): gradient for each, gradient in expected.gradients.items()}
            built[key] = case, model, expected

    def on_rank(rank: int) -> list[str]:
        lines = []
        for name, mesh, cfg in chosen:
            case, model, expected = built[name, str(cfg)]
            on_mesh = replace(case, parallelism=mesh)
            found = test_parity.check(on_mesh, expected, *run_case(on_mesh, model))
            lines += [f"{cfg.method}, dora={cfg.dora}: {line}" for line in found]
        return lines

    return sorted({line for lines in run_ranks(world, on_rank, timeout=1800) for line in lines})


def test_adapters_of_families_with_gathered_and_split_layers_match_the_peft_library_on_tp() -> None:
    problems = family_problems(2, OF_FAMILIES)
    assert not problems, "\n".join(problems)


def test_base_fingerprint_does_not_depend_on_tp() -> None:
    """MLA's style shards nothing; Conv1D's weights are transposed."""
    built = []
    for name in ("deepseek_v2", "gpt2"):
        cfg = replace(QLORA, targets=CHOSEN_TARGETS.get(name, QLORA.targets))
        built.append(with_adapters(build_family(name, cfg), cfg))
    fingerprints = [base_fingerprint(model) for model in built]
    assert (
        run_ranks(2, lambda _: [base_fingerprint(place_on_mesh(each, "tp2")) for each in built]) == [fingerprints] * 2
    )


@in_parity
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cfg", [LORA, DORA, QLORA, QDORA], ids=["lora", "dora", "qlora", "qdora"])
def test_adapters_of_every_family_match_the_peft_library_on_tp(cfg: PeftConfig) -> None:
    three_heads = [name for name in FAMILY_VALUES if name.endswith("3_heads")]  # do not divide QLoRA's width
    chosen = [each for each in ALL_OF_FAMILIES if each[2] == cfg and not (cfg.quantizes and each[0] in three_heads)]
    problems = family_problems(2, chosen) + family_problems(4, [(each[0], FSDP2_TP2, cfg) for each in chosen[::4]])
    assert not problems, "\n".join(problems)


class _UserStyle(ColwiseParallel):
    """A style of the user, which may compute something else."""


def test_all_layers_that_tp_cannot_shard_are_listed_in_one_message_per_reason() -> None:
    model = ours(Adapted("llama", "tp2", peft=QLORA))
    layers = {name: RowwiseParallel() for name in adapted_layers(model) if name.endswith(("o_proj", "down_proj"))}
    styles = layers | {
        "model.layers.1.self_attn.q_proj": SequenceParallel(),
        "model.layers.0.mlp.up_proj": _UserStyle(),
    }
    with pytest.raises(ConfigError) as caught:
        apply_tp._check_adapters(model, styles, 2)
    assert caught.value.problems == [
        "parallelism.tp=2: splits the inputs of layers that are quantized 64 inputs at a time, and must leave each "
        "rank a multiple of 64: model.layers.*.self_attn.o_proj (48), model.layers.*.mlp.down_proj (48); change "
        "parallelism.tp, set peft=lora, or name other layers in peft.targets",
        "parallelism.tp=2: layers with adapters cannot have the style of model.layers.*.self_attn.q_proj "
        "(SequenceParallel), model.layers.*.mlp.up_proj (_UserStyle); use colwise, rowwise, colwise_gather_output, "
        "rowwise_split_input or replicate in parallelism.tp_plan, or name other layers in peft.targets",
    ]


def test_rule_before_the_launch_lists_the_layers_that_the_ranks_would_list() -> None:
    """Of every family that it covers, for QLoRA layers that tp=4 cannot split."""
    mesh, compared = MeshShape(tp=4), set()
    for index, values in enumerate(FAMILY_VALUES.values()):
        if values["model_type"] not in _SPLIT_INPUTS or values["model_type"] in compared:
            continue
        attention, _ = _SPLIT_INPUTS[values["model_type"]]
        cfg = replace(QLORA, targets=[("all-linear", attention, attention.rpartition(".")[2])[index % 3]])
        config = AutoConfig.for_model(**values)
        shape = shape_of_built(config.to_dict())
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        models.add_adapters(model, cfg, exports=False)
        anatomy = read_anatomy(model)
        plan = tp_plan.fit_attention(model, tp_plan.shard_plan(model, anatomy), 4, anatomy)
        styles = {name: style for path, style in plan.items() for name, _ in tp_plan.matching(model, path)}
        with pytest.raises(ConfigError) as caught:
            apply_tp._check_adapters(model, styles, 4)
        (problem,) = quantized_problems(cfg, ParallelismConfig(tp=4), mesh, shape)
        listed = [sorted(re.findall(r"(\w+ \(\d+\))", text)) for text in (problem, *caught.value.problems)]
        assert listed[0] == listed[1], values["model_type"]
        compared.add(values["model_type"])
    assert compared == set(_SPLIT_INPUTS) - {"cohere2"}  # its sizes are Cohere's


def test_unsupported_adapters_on_a_mesh_are_rejected() -> None:
    sparse = ours(Adapted("llama", "pp2", peft=replace(LORA, targets=["layers.0.self_attn.q_proj"])))
    narrow = ours(Adapted("llama", "tp2", peft=QLORA))

    def problems_of_rank(rank: int) -> list[str]:
        problems = []
        for model, mesh in ((sparse, "pp2"), (narrow, "tp2")):
            with pytest.raises(ConfigError) as caught:
                place_on_mesh(model, mesh)
            problems += caught.value.problems
        return problems

    of_pp, of_quantized = run_ranks(2, problems_of_rank)[0]
    assert re.search(
        r"parallelism.pp: no layer of pipeline stage 1 is trained or has an adapter.*peft.targets=\[all-linear\]", of_pp
    )
    assert re.search(
        r"parallelism.tp=2: .* quantized 64 inputs .*\.o_proj \(48\), .*\.down_proj \(48\); ", of_quantized
    )
