"""AdamW with 8-bit moments on meshes: the same bits as torchao's optimizer on whole parameters, also after a resume."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from components import checkpoint, distributed, models, training
from components.checkpoint.tensors import list_optimizers
from components.config.schema.optimizer import AdamW8bitConfig
from components.config.schema.run import CheckpointConfig
from components.models.weights.shards import fill, local_blocks, local_part
from components.training.optimizers.gradients import step_if_finite
from tests.distributed.parity import MODELS, MOE_MODELS, Case, build, recipe_config
from tests.distributed.test_muon import changed_by_a_non_finite_step
from tests.harness import run_ranks
from tests.optional import need_torchao
from tests.suites import PARITY, in_parity
from tests.unit.test_adamw8bit import bounded_torchao

need_torchao()

STEPS = 4
CONFIG = AdamW8bitConfig(lr=1e-2, weight_decay=0.1)
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**MODELS["llama"], **WIDE},
    "phi3": {**MODELS["phi3"], **WIDE},
    "gpt2": {**MODELS["gpt2"], "n_embd": 64},
    "mixtral": {**MOE_MODELS["mixtral"], **WIDE},
    "gpt_oss": {**MODELS["llama"], **WIDE, "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4,
                "num_experts_per_tok": 2, "sliding_window": 6},
}  # fmt: skip
FSDP2: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": -1}
ONE: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 1}
SINGLE: dict[str, Any] = {"strategy": "single", "dp_shard": 1}
DDP: dict[str, Any] = {"strategy": "ddp", "dp_shard": 1, "dp_replicate": 2}
SHARDED_COLUMNS = ("o_proj", "down_proj")
"""Parameters whose last dim tensor parallelism shards."""


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """Run both optimizers without compiling them; tests/unit/test_adamw8bit.py compiles."""
    with torch.compiler.set_stance("force_eager"):
        yield


def gradient(name: str, shape: torch.Size, step: int) -> torch.Tensor:
    """Full gradient of a parameter, with magnitudes that differ within a block."""
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    return torch.randn(shape, generator=generator) * 10.0 ** -torch.randint(0, 4, shape, generator=generator)


def blocks_of(name: str, shape: torch.Size, axes: dict[str, Any]) -> int:
    """Size of the blocks of a parameter; 0: it is not quantized. Each expert is whole on a rank of ep or tp."""
    if len(shape) < 2 or shape.numel() < 4096:
        return 0
    is_whole = not any(part in name for part in SHARDED_COLUMNS) or "experts" in name
    parts = 1 if is_whole else axes.get("tp", 1)
    return math.gcd(256, shape[-1] // parts)


@bounded_torchao()
def expected(plain: Any, axes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Parameters and moments after STEPS steps of torchao's optimizer in one process."""
    from torchao.optim import AdamW8bit as Reference

    model = copy.deepcopy(plain)
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        block = blocks_of(name, parameter.shape, axes)
        settings = {"betas": tuple(CONFIG.betas), "weight_decay": CONFIG.weight_decay if parameter.dim() > 1 else 0.0}
        optimizer: Any
        if block:
            optimizer = Reference([parameter], lr=CONFIG.lr, block_size=block, **settings)
        else:
            optimizer = torch.optim.AdamW([parameter], lr=CONFIG.lr, fused=True, **settings)
        for step in range(STEPS):
            parameter.grad = gradient(name, parameter.shape, step)
            lr = training.learning_rate(CONFIG, step, STEPS)
            optimizer.param_groups[0]["lr"] = torch.tensor(lr) if block else lr
            optimizer.step()
        found[name] = parameter.detach()
        if block:
            for moment in ("exp_avg", "exp_avg_sq"):
                found[f"{name} {moment}"] = optimizer.state[parameter][moment].dequantize()
    return found


def train(plain: Any, case: Case, steps: range = range(STEPS), folder: Path | None = None) -> dict[str, torch.Tensor]:
    """Return this rank's parameters and moments after some steps with given gradients, whole.

    With a folder, the state before a step other than 0 is loaded from it, and the state after the steps saved in it.
    """
    recipe = recipe_config(case)
    mesh = distributed.build_mesh(recipe.parallelism, "cpu")
    model = copy.deepcopy(plain)
    anatomy = models.read_anatomy(model)
    if mesh.size("cp") > 1:
        models.use_causal_sdpa(model)
    distributed.parallelize(model, mesh, recipe.parallelism, torch.float32, anatomy)
    optimizers = training.build_optimizer(model, CONFIG)
    if folder is not None and steps.start:
        found = checkpoint.find_checkpoint(folder, "auto")
        assert found is not None
        checkpoint.load_checkpoint(found, model, optimizers)
    for step in steps:
        for name, parameter in model.named_parameters():
            full = gradient(name, parameter.shape, step)
            parameter.grad = torch.zeros_like(parameter)
            fill(parameter.grad, name, lambda index, full=full: full[index])
        for optimizer in list_optimizers(optimizers):
            training.set_learning_rate(optimizer, CONFIG, step, STEPS)
            step_if_finite(optimizer, torch.ones(()))
    if folder is not None:
        checkpoint.save_checkpoint(folder, steps.stop, model, optimizers, {}, CheckpointConfig())
    return {
        key: value for name, each in model.named_parameters() for key, value in whole(name, each, optimizers).items()
    }


def whole(name: str, parameter: torch.Tensor, optimizers: Any) -> dict[str, torch.Tensor]:
    """A parameter and its moments, whole; a collective."""
    from torchao.optim.quant_utils import create_dynamic_map

    found = {name: gathered(parameter, parameter, name)}
    state = optimizers["adamw8bit"].state.get(parameter, {})
    for moment, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        if f"{moment}_codes" in state:
            codes, scale = (local_part(state[f"{moment}_{each}"]) for each in ("codes", "scale"))
            block = codes.shape[-1] // scale.shape[-1]
            numbers = torch.tensor(create_dynamic_map(signed=signed))
            values = numbers[codes.long()] * scale.repeat_interleave(block, -1)
            found[f"{name} {moment}"] = gathered(parameter, values, name)
    return found


def gathered(parameter: torch.Tensor, values: torch.Tensor, name: str) -> torch.Tensor:
    """The whole of a tensor that is sharded like a parameter, by summing disjoint blocks and counting their holders."""
    if not isinstance(parameter, DTensor):
        return values.detach()
    total, holders = torch.zeros(2, *parameter.shape).unbind()
    for block in local_blocks(parameter, name):
        total[block.full] = local_part(values)[block.local]
        holders[block.full] = 1.0
    both = torch.stack([total, holders])
    for axis in range(parameter.device_mesh.ndim):
        torch.distributed.all_reduce(both, group=parameter.device_mesh.get_group(axis))
    return both[0] / both[1]


MESHES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [(name, SINGLE) for name in ("llama", "gpt2")],
    2: [
        ("llama", FSDP2),
        ("llama", {**ONE, "tp": 2, "sequence_parallel": True}),
        ("mixtral", {**ONE, "ep": 2}),
        ("llama", DDP),
        ("llama", {**ONE, "pp": 2}),
        ("llama", {**ONE, "cp": 2}),
    ],
    4: [
        ("phi3", {**FSDP2, "tp": 2}),
        ("llama", {**FSDP2, "dp_replicate": 2}),
        ("mixtral", {**ONE, "ep": 2, "pp": 2}),
        ("mixtral", {**ONE, "ep": 2, "tp": 2}),
    ],
}
if PARITY:
    MESHES[2] += [(name, FSDP2) for name in ("phi3", "gpt2", "mixtral")]
    MESHES[4] += [
        ("llama", FSDP2),
        ("llama", {**ONE, "tp": 4}),
        ("mixtral", {**FSDP2, "ep": 2}),
        ("mixtral", {**FSDP2, "tp": 2}),
    ]


def differences(got: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, value in got.items() if not torch.equal(value, reference[name])]


@pytest.mark.parametrize("world", [1, 2, 4] if PARITY else [4])
def test_same_bits_as_torchao_on_whole_parameters(world: int) -> None:
    plain = {name: build(name, torch.float32, FAMILIES[name]) for name, _ in MESHES[world]}
    references = [expected(plain[name], axes) for name, axes in MESHES[world]]

    def body(rank: int) -> list[str]:
        problems = []
        for (name, axes), reference in zip(MESHES[world], references, strict=True):
            got = train(plain[name], Case(name, axes))
            problems += [f"{name} {axes}: {each}" for each in differences(got, reference)]
            if not any(each.endswith("exp_avg_sq") for each in got):
                problems.append(f"{name} {axes}: nothing is quantized")
        return problems

    problems = [line for lines in run_ranks(world, body, timeout=400) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))


def resumed(plain: Any, family: str, runs: list[tuple[int, dict[str, Any]]], folder: Path) -> dict[str, torch.Tensor]:
    """Parameters and moments of a run that changes its mesh after every step but the last ones."""
    results: list[dict[str, torch.Tensor]] = []
    for number, (world, axes) in enumerate(runs):
        steps = range(number, number + 1 if number + 1 < len(runs) else STEPS)
        results = run_ranks(world, lambda rank, axes=axes, steps=steps: train(plain, Case(family, axes), steps, folder))
    return {name: value for each in results for name, value in each.items()}


@pytest.mark.parametrize("axes", [FSDP2, {**ONE, "tp": 2}] if PARITY else [FSDP2], ids=str)
def test_resume_on_the_same_mesh_continues_with_the_same_bits(axes: dict[str, Any], tmp_path: Path) -> None:
    plain = build("llama", torch.float32, FAMILIES["llama"])
    reference = expected(plain, axes)
    got = resumed(plain, "llama", [(2, axes), (2, axes)], tmp_path)
    assert got.keys() == reference.keys()
    assert not differences(got, reference)


@in_parity
def test_meshes_that_keep_rows_whole_continue_with_the_same_bits(tmp_path: Path) -> None:
    plain = build("mixtral", torch.float32, FAMILIES["mixtral"])
    runs = [(2, {**ONE, "ep": 2}), (2, FSDP2), (1, SINGLE), (2, {**ONE, "pp": 2})]
    got = resumed(plain, "mixtral", runs, tmp_path)
    reference = expected(plain, SINGLE)
    assert got.keys() == reference.keys()
    assert not differences(got, reference)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_moments_stay_the_same_bits_if_shards_split_blocks(family: str, tmp_path: Path) -> None:
    """Loaded and saved on tp2, then in one process, which keeps the parts.

    Rows of 192 columns have three blocks of 64, and a rank of tp2 holds one and a half.
    """
    plain = build(family, torch.float32, {**FAMILIES[family], "intermediate_size": 192})
    start = run_ranks(1, lambda rank: train(plain, Case(family, SINGLE), range(2), tmp_path))[0]

    def zero_step(rank: int, axes: dict[str, Any], step: int) -> dict[str, torch.Tensor]:
        recipe = recipe_config(Case(family, axes))
        mesh = distributed.build_mesh(recipe.parallelism, "cpu")
        model = copy.deepcopy(plain)
        distributed.parallelize(model, mesh, recipe.parallelism, torch.float32, models.read_anatomy(model))
        optimizers = training.build_optimizer(model, CONFIG)
        checkpoint.load_checkpoint(checkpoint.find_checkpoint(tmp_path, "auto"), model, optimizers)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in list_optimizers(optimizers):
            step_if_finite(optimizer, torch.tensor(math.inf))  # changes no value
        checkpoint.save_checkpoint(tmp_path, step, model, optimizers, {}, CheckpointConfig())
        return {k: v for name, each in model.named_parameters() for k, v in whole(name, each, optimizers).items()}

    for step, (world, axes) in enumerate([(2, {**ONE, "tp": 2}), (1, SINGLE)], start=3):
        for got in run_ranks(world, zero_step, axes, step):
            assert got.keys() == start.keys()
            assert not differences(got, start)


def test_step_with_non_finite_gradients_changes_nothing() -> None:
    arguments = CONFIG, FAMILIES["llama"], "exp_avg_sq_codes"
    assert run_ranks(2, changed_by_a_non_finite_step, *arguments) == [[], []]
