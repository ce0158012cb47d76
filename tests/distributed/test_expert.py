"""Expert parallelism has the curve of one process, for every routing of tokens and every number of experts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

from components import checkpoint, distributed, models, training
from components.config.schema import ModelConfig, ParallelismConfig
from components.config.schema.model import WeightInit
from components.config.schema.run import CheckpointConfig
from components.distributed.expert import ExpertParallel
from components.protocol.errors import ConfigError
from tests.distributed.parity import MOE_MODELS, Case, build, micro_batches, reference, run_case
from tests.distributed.test_parity import FSDP2, HSDP, SP, TP, check
from tests.harness import run_ranks
from tests.suites import PARITY, in_parity

EP = {"strategy": "fsdp2", "dp_shard": 1, "ep": -1}
FSDP2_EP2 = {"strategy": "fsdp2", "dp_shard": -1, "ep": 2}
HSDP_EP2 = {"strategy": "fsdp2", "dp_shard": 1, "dp_replicate": -1, "ep": 2}
EP2_TP2 = {"strategy": "fsdp2", "dp_shard": 1, "ep": 2, "tp": 2}
FSDP2_TP2 = {"strategy": "fsdp2", "dp_shard": -1, "tp": 2}
SHAPES = {
    2: [FSDP2, EP, TP, {**TP, **SP}],
    4: [FSDP2, HSDP, EP, FSDP2_EP2, HSDP_EP2, FSDP2_TP2, EP2_TP2, {**EP2_TP2, **SP}, {**TP, **SP}],
}


def cases(world_size: int, dtype: torch.dtype) -> list[Case]:
    """In float64 all models on all meshes; by default OLMoE, since the grid has the others, on those with tp or ep.

    In float32, in which the experts are computed by grouped matmuls, Mixtral on some.
    """
    exact = dtype == torch.float64
    exact_shapes = SHAPES[world_size] if PARITY else SHAPES[world_size][3:]
    return [
        Case(name, shape, 1 + index % 2, 1 if exact else 4, dtype)
        for name in ((MOE_MODELS if PARITY else ["olmoe"]) if exact else ["mixtral"])
        for index, shape in enumerate(exact_shapes if exact else SHAPES[world_size][-2 :: -4 if PARITY else -8])
        if (name, shape, world_size) != ("olmoe", EP, 4)  # 6 experts cannot be sharded over 4
    ]


def run_cases(world_size: int, selected: list[Case], favored: tuple[int, ...] = ()) -> list[str]:
    """Return the problems of the cases, one line each; the router sends every token to the favored experts, if any."""
    built = {case.model: build(case.model, case.dtype) for case in selected}
    for model in built.values():
        favor_experts(model, favored)
    expected = {case.model: reference(case, copy.deepcopy(built[case.model])) for case in selected}

    def on_rank(rank: int) -> list[str]:
        found = []
        for case in selected:
            curve, different = run_case(case, built[case.model])
            found += check(case, expected[case.model], curve, different)
        return found

    return sorted({line for lines in run_ranks(world_size, on_rank, timeout=240) for line in lines})


def favor_experts(model: torch.nn.Module, experts: tuple[int, ...]) -> None:
    """Add a constant to the logits of `experts`; the probabilities still depend on the token."""
    for module in model.modules():
        if experts and type(module).__name__.endswith("TopKRouter"):
            module.favored = torch.zeros(module.num_experts, dtype=torch.float64)
            module.favored[list(experts)] = 50.0


@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(4, torch.float64), (4, torch.float32), *([(2, torch.float64), (2, torch.float32)] if PARITY else [])],
    ids=str,
)
def test_every_mesh_has_the_curve_of_one_process(world_size: int, dtype: torch.dtype) -> None:
    problems = run_cases(world_size, cases(world_size, dtype))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("favored", [(0, 1), *([(0, 2)] if PARITY else [])], ids=str)
def test_experts_without_tokens_have_the_curve_of_one_process(favored: tuple[int, ...]) -> None:
    shapes = [EP, FSDP2_EP2, EP2_TP2, {**TP, **SP}]
    problems = run_cases(4, [Case("mixtral", shape, 2, 1) for shape in shapes], favored)
    assert not problems, "\n".join(problems)


BOUNDS = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}
TOKENS = {2: [13, 0], 3: [0, 40, 7]}
"""World size -> number of tokens of each rank."""


DTYPE_CASES = [(dtype, implementation) for dtype in BOUNDS for implementation in ("eager", "batched_mm", "grouped_mm")]
DTYPE_CASES.remove((torch.float64, "grouped_mm"))  # not implemented by torch


@pytest.mark.parametrize("world_size", TOKENS)
def test_experts_module_matches_one_process_for_any_token_counts(world_size: int) -> None:
    torch.manual_seed(3)
    cases = []
    for dtype, implementation in DTYPE_CASES:
        inputs = [
            (torch.randn(count, 16, dtype=dtype), torch.rand(count, 6).topk(2).indices,
             torch.rand(count, 2, dtype=dtype))
            for count in TOKENS[world_size]
        ]  # fmt: skip
        plain = build_experts(6, dtype, implementation)
        combined = [torch.cat(tensors) for tensors in zip(*inputs, strict=True)]
        cases.append((plain, inputs, outputs_and_gradients(plain, *combined)))

    def on_rank(rank: int) -> list[float]:
        errors = []
        for plain, inputs, expected in cases:
            module = copy.deepcopy(plain)
            ExpertParallel()._apply(module, init_device_mesh("cpu", (world_size,), mesh_dim_names=("ep",)))
            assert module.gate_up_proj.to_local().shape == (6 // world_size, 48, 16)
            start = sum(TOKENS[world_size][:rank])
            here = [each[start : start + TOKENS[world_size][rank]] for each in expected[:3]] + expected[3:]
            errors.append(worst_error(outputs_and_gradients(module, *inputs[rank]), here))
        return errors

    for errors in run_ranks(world_size, on_rank):
        for (dtype, implementation), error in zip(DTYPE_CASES, errors, strict=True):
            assert error < BOUNDS[dtype], implementation


@pytest.mark.parametrize("world_size", [2, 3], ids=["divided", "not divided"])
def test_experts_module_matches_one_process_when_ranks_share_the_tokens(world_size: int) -> None:
    torch.manual_seed(4)
    plain, cases = build_experts(4, torch.float64, "eager"), []
    for tokens in (1, 13):
        inputs = torch.randn(tokens, 16).double(), torch.rand(tokens, 4).topk(2).indices, torch.rand(tokens, 2).double()
        cases.append((inputs, outputs_and_gradients(plain, *inputs)))

    def on_rank(rank: int) -> float:
        module = copy.deepcopy(plain)
        ExpertParallel()._apply(module, init_device_mesh("cpu", (world_size,), mesh_dim_names=("any_name",)))
        assert len(module.down_proj.to_local()) == (2 if world_size == 2 else 4)
        return max(worst_error(outputs_and_gradients(module, *inputs), expected) for inputs, expected in cases)

    assert max(run_ranks(world_size, on_rank)) < BOUNDS[torch.float64]


def build_experts(count: int, dtype: torch.dtype, implementation: str) -> MixtralExperts:
    config = MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=count)
    config._experts_implementation = implementation
    module = MixtralExperts(config).to(dtype)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def outputs_and_gradients(
    module: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> list[Any]:
    """Return the output and the gradients of hidden states, router weights and parameters."""
    hidden, weights = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    for parameter in module.parameters():
        parameter.grad = None
    output = module(hidden, chosen, weights)
    (output * torch.linspace(-1, 1, 16, dtype=output.dtype)).sum().backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    full_tensors = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
    return [each.detach().clone() for each in (output, hidden.grad, weights.grad, *full_tensors)]


def worst_error(values: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative error of tensors, which have the expected shapes and dtypes."""
    pairs = list(zip(values, expected, strict=True))
    assert all((value.shape, value.dtype) == (other.shape, other.dtype) for value, other in pairs)
    norms = [((value - other).double().norm(), other.double().norm()) for value, other in pairs]
    return max((difference / max(norm.item(), 1e-30)).item() for difference, norm in norms)


def test_model_whose_experts_cannot_be_sharded_is_rejected() -> None:
    def rejection(name: str) -> str:
        config = ParallelismConfig(**EP)
        with pytest.raises(ConfigError) as caught:
            distributed.parallelize(
                build(name, torch.float32), distributed.build_mesh(config, "cpu"), config, torch.float32
            )
        return str(caught.value)

    def on_rank(rank: int) -> list[str]:
        return [rejection("llama"), rejection("olmoe")]

    dense, indivisible = run_ranks(4, on_rank)[0]
    assert dense.startswith("parallelism.ep=4: LlamaForCausalLM is dense")
    assert dense.endswith("set parallelism.ep=1")
    assert "parallelism.ep=4: does not divide the model's 6 experts" in indivisible


@in_parity
def test_compiled_layers_match_eager_layers() -> None:
    def on_rank(rank: int) -> list[float]:
        return [loss_and_norm(compiled) for compiled in (False, True)]

    def loss_and_norm(compiled: bool) -> tuple[float, float]:
        config, case = ParallelismConfig(**EP), Case("mixtral", EP, dtype=torch.float32)
        mesh, model = distributed.build_mesh(config, "cpu"), build(case.model, case.dtype)
        distributed.parallelize(model, mesh, config, case.dtype)
        if compiled:
            models.compile_layers(model, backend="eager")
        loss = model(input_ids=micro_batches(case, mesh, 0)[0].input_ids).logits.square().sum()
        loss.backward()
        return loss.item(), training.gradient_norm(model.parameters()).item()

    for plain, compiled in run_ranks(2, on_rank, timeout=240):
        assert compiled == pytest.approx(plain, rel=1e-6)


def test_float64_computes_experts_without_grouped_matmuls() -> None:
    model = models.build_on_meta(ModelConfig(config=SIZES, init=WeightInit.random, tokenizer="bytes", dtype="float64"))
    models.materialize(model, "cpu")
    assert model(input_ids=torch.arange(4)[None]).logits.dtype == torch.float64


SIZES = {"model_type": "mixtral", "hidden_size": 33, "head_dim": 8, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 272}  # fmt: skip
LAYOUTS = {
    4: [(4, EP2_TP2), (4, FSDP2_EP2), (2, TP)],
    6: [(4, FSDP2_EP2), (4, HSDP_EP2), (4, EP2_TP2), (2, FSDP2)],
}
"""Number of experts -> (world size, shape). With 6 experts fsdp2_ep2 has 3 per ep rank, which FSDP shards over two
ranks: the first matrix along dim 1, the second, of odd size, unevenly along dim 0; with ep2_tp2 the tp ranks hold the
same experts."""


def build_on_mesh(model_config: ModelConfig, shape: dict[str, Any], seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Build a model as the recipes do, and its optimizer."""
    config = ParallelismConfig(**shape)
    model = models.build_on_meta(model_config)
    distributed.parallelize(model, distributed.build_mesh(config, "cpu"), config, torch.float32)
    models.materialize(model, "cpu")
    models.fill_weights(model, model_config, seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def full_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Parameters, and optimizer state if given, with their global shapes."""
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in [("value", parameter), *(optimizer.state[parameter].items() if optimizer else ())]:
            full = value.full_tensor() if isinstance(value, DTensor) else value
            tensors[f"{name} {key}"] = full.detach().clone()
    return tensors


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("experts", LAYOUTS if PARITY else [6])
def test_weights_are_initialized_loaded_saved_resumed_and_exported_on_every_mesh(experts: int, tmp_path: Path) -> None:
    scratch = ModelConfig(config={**SIZES, "num_local_experts": experts}, init=WeightInit.random, tokenizer="bytes")
    torch.manual_seed(0)
    config = models.build_on_meta(scratch).config
    plain = transformers.AutoModelForCausalLM.from_config(config)
    plain.save_pretrained(tmp_path / "plain")
    pretrained = ModelConfig(path=str(tmp_path / "plain"), tokenizer="bytes")
    drawn = models.build_on_meta(scratch)
    models.materialize(drawn, "cpu")
    models.fill_weights(drawn, scratch, 5)

    def write(rank: int, shape: dict[str, Any], folder: Path) -> None:
        assert_equal(full_tensors(build_on_mesh(scratch, shape, 5)[0]), full_tensors(drawn))
        model, optimizer = build_on_mesh(pretrained, shape, 0)
        assert_equal(full_tensors(model), full_tensors(plain))
        models.export_model(model, models.load_tokenizer(scratch), folder / "export")
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1) * parameter.detach()
        optimizer.step()
        checkpoint.save_checkpoint(folder, 1, model, optimizer, {}, CheckpointConfig(keep=1))
        tensors = full_tensors(model, optimizer)
        if rank == 0:
            torch.save(tensors, folder / "expected.pt")

    def read(rank: int, shape: dict[str, Any], folder: Path) -> None:
        run = build_on_mesh(scratch, shape, 6)
        checkpoint.load_checkpoint(checkpoint.find_checkpoint(folder, "auto"), *run)
        assert_equal(full_tensors(*run), torch.load(folder / "expected.pt"))

    folders = [tmp_path / str(index) for index in range(len(LAYOUTS[experts]))]
    for act, shift in ((write, 0), (read, 1)):  # each layout reads what the one before it has written
        for world in {world for world, _ in LAYOUTS[experts]}:
            work = [(s, folders[n - shift]) for n, (size, s) in enumerate(LAYOUTS[experts]) if size == world]
            run_ranks(world, lambda rank, act=act, work=work: [act(rank, *each) for each in work])
    for folder in folders:
        exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "export")
        assert_equal(full_tensors(exported), full_tensors(plain))
