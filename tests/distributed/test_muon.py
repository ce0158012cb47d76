"""Muon, NorMuon and Lion have the same parameters on every mesh as their arithmetic in one process."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from components import checkpoint, distributed, models, training
from components.checkpoint.tensors import list_optimizers
from components.config.schema.optimizer import LionConfig, MatrixScale, MuonConfig, NewtonSchulzDtype, NorMuonConfig
from components.config.schema.run import CheckpointConfig
from tests.distributed.parity import (
    CLIP,
    MODELS,
    MOE_MODELS,
    Case,
    build,
    micro_batches,
    recipe_config,
    samples_of_step,
)
from tests.harness import run_ranks
from tests.suites import PARITY

CPU = torch.device("cpu")
STEPS = 4
GROUPS = [{"match": "mlp", "lr": 5e-3, "weight_decay": 0.3}, {"match": "norm|ln_", "lr": 1e-3, "weight_decay": 0.2}]
CONFIG = MuonConfig(
    lr=2e-3, adamw_lr=5e-3, weight_decay=0.1, momentum=0.9, ns_dtype=NewtonSchulzDtype.float64, eps=1e-5, groups=GROUPS
)
"""With a large eps: the gradients of key biases are zero but for rounding, which AdamW would amplify."""
NORMALIZED = NorMuonConfig(
    **{name: getattr(CONFIG, name) for name in MuonConfig.__dataclass_fields__ if name != "kind"}
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**MODELS["llama"], "intermediate_size": 56, "num_hidden_layers": 4},
    "phi3": {**MODELS["phi3"], "intermediate_size": 56},
    "gpt2": MODELS["gpt2"],
    "mixtral": {**MOE_MODELS["mixtral"], "intermediate_size": 56, "num_hidden_layers": 4},
    "gpt_neox": {
        **{key: MODELS["llama"][key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "use_cache")},
        "model_type": "gpt_neox",
        "num_attention_heads": 4,
        "intermediate_size": 56,
        "max_position_embeddings": 64,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
}
HEAD = 12  # width of a head of phi3 and gpt_neox: 48 / 4


def matrices(name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the matrices of a parameter as views of it: written out by hand for each family."""
    if "qkv_proj" in name:  # phi3: 4 query heads, 2 key heads, 2 value heads
        return list(tensor.split([4 * HEAD, 2 * HEAD, 2 * HEAD]))
    if "c_attn" in name:
        return list(tensor.split(32, dim=1))
    if "query_key_value" in name:
        return list(tensor.view(4, 3, HEAD, 48).unbind(1))  # each (heads, width, hidden)
    if tensor.dim() == 3:
        halves = [half for expert in tensor for half in expert.split(56)] if "gate_up" in name else []
        return halves or list(tensor)
    return list(tensor.split(56)) if "gate_up_proj" in name else [tensor]


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    outside = ("embed", "lm_head", "wte", "wpe", "mlp.gate.", "embed_out")
    return parameter.dim() >= 2 and not any(part in name for part in outside)


def zeropower(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The iteration of torch.optim.Muon, which hard-codes bfloat16."""
    x = gradient.to(dtype)
    if gradient.size(0) > gradient.size(1):
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if gradient.size(0) > gradient.size(1) else x


def rates(name: str, lr: float, decay: float) -> tuple[float, float]:
    """Learning rate and weight decay of a parameter under GROUPS."""
    return (5e-3, 0.3) if "mlp" in name else (1e-3, 0.2) if "norm" in name or "ln_" in name else (lr, decay)


def normalized(update: torch.Tensor, mean_square: torch.Tensor, cfg: NorMuonConfig) -> torch.Tensor:
    """Equations of NorMuon's Algorithm 1 for a matrix (out, in), without 0.2 and the learning rate.

    With scale=shape its norm stays, as in the authors' repository. The mean squares (out,) change in place.
    """
    mean_square.mul_(cfg.beta2).add_((1 - cfg.beta2) * update.square().mean(1))
    divided = update / (mean_square.sqrt() + 1e-10)[:, None]
    if cfg.scale is MatrixScale.shape:
        return divided * update.norm() / divided.norm()
    return divided * math.sqrt(divided.numel()) / divided.norm() / math.sqrt(max(divided.shape))


class PlainMuon:
    """Muon or NorMuon on unsharded parameters, one matrix after the other."""

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]], cfg: MuonConfig) -> None:
        self.parameters, self.cfg = list(parameters), cfg
        self.momentum = {name: torch.zeros_like(parameter) for name, parameter in self.parameters}
        self.mean_squares: dict[tuple[str, int], torch.Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        cfg, dtype = self.cfg, getattr(torch, self.cfg.ns_dtype)
        for name, parameter in self.parameters:
            gradient, momentum = parameter.grad, self.momentum[name]
            momentum.lerp_(gradient, 1 - cfg.momentum)
            update = gradient.lerp(momentum, cfg.momentum)
            lr, decay = rates(name, cfg.lr, cfg.weight_decay)
            parameter.mul_(1 - lr * decay)
            pairs = zip(matrices(name, parameter), matrices(name, update), strict=True)
            for index, (target, direction) in enumerate(pairs):
                flat = direction.reshape(-1, direction.shape[-1])
                is_transposed = "c_" in name  # GPT-2's Conv1D
                columns, rows = flat.shape if is_transposed else flat.shape[::-1]
                scale = 0.2 * math.sqrt(max(rows, columns))
                if cfg.scale is MatrixScale.shape:
                    scale = math.sqrt(max(1, rows / columns))
                result = zeropower(flat, dtype)
                if isinstance(cfg, NorMuonConfig):
                    result = result.T if is_transposed else result
                    old = result.new_zeros(len(result), dtype=torch.float64)
                    result = normalized(result.double(), self.mean_squares.setdefault((name, index), old), cfg)
                    result = (result.T if is_transposed else result).to(dtype)
                target.add_(result.reshape(direction.shape), alpha=-lr * scale)


class PlainLion:
    """Algorithm 2 of Chen et al. 2023 on unsharded parameters, with weight decay on matrices only."""

    def __init__(self, parameters: list[torch.nn.Parameter], cfg: LionConfig) -> None:
        self.parameters, self.cfg = parameters, cfg
        self.moments = [torch.zeros_like(each) for each in parameters]

    @torch.no_grad()
    def step(self) -> None:
        (beta1, beta2), lr = self.cfg.betas, self.cfg.lr
        for parameter, moment in zip(self.parameters, self.moments, strict=True):
            direction = (beta1 * moment + (1 - beta1) * parameter.grad).sign()
            parameter -= lr * (direction + self.cfg.weight_decay * (parameter.dim() > 1) * parameter)
            moment.copy_(beta2 * moment + (1 - beta2) * parameter.grad)


def expected(plain: Any, cfg: MuonConfig | LionConfig) -> dict[str, torch.Tensor]:
    """Parameters after STEPS steps in one process."""
    model = copy.deepcopy(plain).train()
    named = list(model.named_parameters())
    lion = PlainLion([p for _, p in named], cfg) if isinstance(cfg, LionConfig) else None
    cfg = CONFIG if isinstance(cfg, LionConfig) else cfg
    muon = PlainMuon([(n, p) for n, p in named if is_matrix(n, p)], cfg)
    others = [(n, p) for n, p in named if not is_matrix(n, p)]
    groups = []
    for name, parameter in others:
        lr, decay = rates(name, cfg.adamw_lr, cfg.weight_decay if parameter.dim() >= 2 else 0.0)
        groups.append({"params": [parameter], "lr": lr, "weight_decay": decay})
    adamw = torch.optim.AdamW(groups, lr=cfg.adamw_lr, betas=(0.9, 0.95), eps=cfg.eps)
    for step in range(STEPS):
        samples = samples_of_step(step)
        count = sum(int((labels[1:] != -100).sum()) for _, labels in samples)
        model.zero_grad()
        for ids, labels in samples:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            (F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum") / count).backward()
        norm = torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        for optimizer in (muon, adamw) if lion is None else (lion,):
            optimizer.step()
    return {name: parameter.detach() for name, parameter in named}


def train(
    rank_model: Any, case: Case, cfg: MuonConfig | LionConfig, steps: range = range(STEPS), folder: Path | None = None
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the full parameters of this rank after some steps, and the parameters that Muon trained.

    With a folder, the state before a step other than 0 is loaded from it, and the state after the steps saved in it.
    """
    recipe = recipe_config(case)
    mesh = distributed.build_mesh(recipe.parallelism, "cpu")
    model = copy.deepcopy(rank_model).train()
    anatomy = models.read_anatomy(model)
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, recipe.parallelism, case.dtype, anatomy)
    head = training.attach_loss_head(model, recipe.model, recipe.training, recipe.parallelism, mesh, layout.stages, CPU)
    called = distributed.wrap_replicas(model, mesh, recipe.parallelism, layout)
    settings = training.StepSettings(device=CPU, max_grad_norm=CLIP, mesh=mesh, loss_head=head)
    prepared = training.Prepared(model, settings, called, anatomy=anatomy)
    optimizer = training.build_optimizer(prepared, cfg)
    if folder is not None and steps.start:
        found = checkpoint.find_checkpoint(folder, "auto")
        assert found is not None
        checkpoint.load_checkpoint(found, model, optimizer)
    for step in steps:
        training.train_step(prepared, micro_batches(case, mesh, step), optimizer)
    if folder is not None:
        checkpoint.save_checkpoint(folder, steps.stop, model, optimizer, {}, CheckpointConfig())
    by_muon = {id(p) for each in list_optimizers(optimizer)[:1] for g in each.param_groups for p in g["params"]}
    full = {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach()
        for name, each in model.named_parameters()
    }
    return full, [name for name, each in model.named_parameters() if id(each) in by_muon]


FSDP2: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": -1}
ONE: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 1}
SINGLE: dict[str, Any] = {"strategy": "single", "dp_shard": 1}
DDP: dict[str, Any] = {"strategy": "ddp", "dp_shard": 1, "dp_replicate": 2}
MESHES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [(name, SINGLE) for name in FAMILIES],
    2: [
        ("llama", FSDP2),
        ("gpt_neox", FSDP2),
        ("llama", {**ONE, "tp": 2, "sequence_parallel": True}),
        ("mixtral", {**ONE, "ep": 2}),
    ],
    4: [
        ("phi3", {**FSDP2, "tp": 2}),
        ("llama", {**FSDP2, "dp_replicate": 2}),
        ("mixtral", {**ONE, "ep": 2, "pp": 2}),
    ],
}
if PARITY:
    MESHES[2] += [
        ("llama", DDP),
        *((name, FSDP2) for name in ("phi3", "gpt2", "mixtral")),
        ("phi3", {**ONE, "tp": 2}),
        ("llama", {**ONE, "cp": 2}),
        ("llama", {**ONE, "pp": 2}),
    ]
    MESHES[4] += [
        ("llama", FSDP2),
        ("llama", {**ONE, "tp": 4}),
        *(("gpt2", FSDP2), ("gpt2", {**FSDP2, "tp": 2})),
        ("gpt_neox", FSDP2),
        ("llama", {**FSDP2, "tp": 2, "sequence_parallel": True}),
        ("llama", {**FSDP2, "cp": 2}),
        ("llama", {**FSDP2, "pp": 2}),
        ("mixtral", {**FSDP2, "ep": 2}),
        ("mixtral", {**ONE, "ep": 2, "tp": 2}),
        ("mixtral", {**ONE, "ep": 4}),
    ]


@pytest.mark.parametrize("world", [1, 2, 4] if PARITY else [4])
def test_parameters_equal_those_of_one_process(world: int) -> None:
    """In float64; and with Newton-Schulz iterations in bfloat16, which every mesh rounds alike."""
    dtypes = [NewtonSchulzDtype.float64, NewtonSchulzDtype.bfloat16]
    plain = {name: build(name, torch.float64, FAMILIES[name]) for name, _ in MESHES[world]}
    configs = {dtype: MuonConfig(**{**fields_of(CONFIG), "ns_dtype": dtype}) for dtype in dtypes}
    curves = {
        (name, dtype): expected(plain[name], configs[dtype])
        for name in plain
        for dtype in (dtypes if name == "llama" or PARITY else dtypes[:1])
    }

    def body(rank: int) -> list[str]:
        problems = []
        for name, axes in MESHES[world]:
            case = Case(name, axes, accumulation=2, steps=STEPS)
            for dtype in dtypes if name == "llama" or PARITY else dtypes[:1]:
                got, by_muon = train(plain[name], case, configs[dtype])
                reference = curves[name, dtype]
                if by_muon != [each for each in got if is_matrix(each, reference[each])]:
                    problems.append(f"{case}: Muon trains {by_muon}")
                for parameter, value in got.items():
                    error = ((value - reference[parameter]).norm() / reference[parameter].norm()).item()
                    if not error < 1e-12:
                        problems.append(f"{case} {dtype}: {parameter} is off by {error:.1e}")
        return problems

    problems = [line for lines in run_ranks(world, body, timeout=400) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))


NORMALIZED_MESHES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    4: [("phi3", {**FSDP2, "tp": 2}), ("gpt2", {**FSDP2, "tp": 2}), ("mixtral", {**ONE, "ep": 2, "tp": 2})],
}
if PARITY:
    NORMALIZED_MESHES = {world: [(name, axes) for name, axes in cases] for world, cases in MESHES.items()}


@pytest.mark.parametrize("world", NORMALIZED_MESHES)
def test_normalized_rows_equal_those_of_one_process(world: int) -> None:
    """NorMuon in float64, with both scales: fused projections, matrices (in, out), experts, and columns over tp."""
    cases = NORMALIZED_MESHES[world]
    plain = {name: build(name, torch.float64, FAMILIES[name]) for name, _ in cases}
    configs = [NORMALIZED, replace(NORMALIZED, scale=MatrixScale.shape, lr=2e-2)]
    names = [{name for name, _ in cases[index::2]} for index in range(2)]
    curves = [{name: expected(plain[name], cfg) for name in names[index]} for index, cfg in enumerate(configs)]
    without = {name: expected(plain[name], CONFIG) for name in plain}

    def body(rank: int) -> list[str]:
        problems = []
        for index, (name, axes) in enumerate(cases):
            cfg, curve = configs[index % 2], curves[index % 2]
            got, by_muon = train(plain[name], Case(name, axes, accumulation=2, steps=STEPS), cfg)
            for parameter, value in got.items():
                error = ((value - curve[name][parameter]).norm() / curve[name][parameter].norm()).item()
                if not error < 1e-12:
                    problems.append(f"{name} {axes} {cfg.scale}: {parameter} is off by {error:.1e}")
            if not all((got[each] - without[name][each]).norm() > 1e-4 for each in by_muon):
                problems.append(f"{name} {axes} {cfg.scale}: the same as Muon")
        return problems

    problems = [line for lines in run_ranks(world, body, timeout=400) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))


@pytest.mark.parametrize("cfg", [CONFIG, NORMALIZED, LionConfig(lr=2e-3, weight_decay=0.5)], ids=lambda cfg: cfg.kind)
def test_momentum_is_loaded_on_any_mesh(cfg: MuonConfig | LionConfig, tmp_path: Path) -> None:
    """Saved on one mesh after every step and loaded on the next: the parameters of an uninterrupted run."""
    plain = build("mixtral", torch.float64, FAMILIES["mixtral"])
    reference = expected(plain, cfg)
    runs = [(2, {**ONE, "ep": 2}), (2, {**ONE, "tp": 2}), (1, SINGLE), (2, {**ONE, "pp": 2})]
    assert len(runs) == STEPS
    for step, (world, axes) in enumerate(runs):
        case = Case("mixtral", axes, accumulation=2, steps=STEPS)

        def body(rank: int, case: Case, step: int) -> dict[str, torch.Tensor]:
            return train(plain, case, cfg, range(step, step + 1), tmp_path)[0]

        results = run_ranks(world, body, case, step)
    found = {name: value for each in results for name, value in each.items()}
    assert found.keys() == reference.keys()
    for name, value in found.items():
        assert (value - reference[name]).norm() < 1e-12 * reference[name].norm(), name


def fields_of(cfg: MuonConfig) -> dict[str, Any]:
    return {name: getattr(cfg, name) for name in MuonConfig.__dataclass_fields__}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_torch_muon_in_one_process(dtype: torch.dtype) -> None:
    """bfloat16 iterations: the same bits as torch.optim.Muon, with both of its scales, as train_step calls it."""
    model = build("llama", torch.float32).to(dtype)
    names = [name for name, each in model.named_parameters() if is_matrix(name, each)]
    for scale, adjust in ((MatrixScale.rms, "match_rms_adamw"), (MatrixScale.shape, "original")):
        ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
        cfg = MuonConfig(lr=0.02, weight_decay=0.1, scale=scale)
        prepared = training.Prepared(ours, training.StepSettings(device=CPU), anatomy=models.read_anatomy(ours))
        (muon, _) = list_optimizers(training.build_optimizer(prepared, cfg))
        muon.found_inf = torch.zeros(())  # set by every training step
        reference = torch.optim.Muon(
            [theirs.get_parameter(name) for name in names], lr=0.02, weight_decay=0.1, adjust_lr_fn=adjust
        )
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for name in names:
                gradient = torch.randn(ours.get_parameter(name).shape, generator=generator).to(dtype)
                ours.get_parameter(name).grad = gradient
                theirs.get_parameter(name).grad = gradient.clone()
            muon.step()
            reference.step()
        for name in names:
            assert torch.equal(ours.get_parameter(name), theirs.get_parameter(name)), name


def test_mean_squares_keep_their_precision_among_bfloat16_directions() -> None:
    """float32 numbers are exchanged as the bits of two bfloat16 ones; those rounded to bfloat16 would be 0.4 % off."""
    model = build("gpt2", torch.float32, FAMILIES["gpt2"])
    cfg = NorMuonConfig(lr=0.02)
    prepared = training.Prepared(model, training.StepSettings(device=CPU), anatomy=models.read_anatomy(model))
    (muon, _) = list_optimizers(training.build_optimizer(prepared, cfg))
    name = "transformer.h.0.attn.c_attn.weight"  # (in, out)
    parameter = model.get_parameter(name)
    before, momentum = parameter.detach().clone(), torch.zeros_like(parameter)
    mean_squares = torch.zeros(3, 32)
    for step in range(3):
        for each in muon.param_groups[0]["params"]:
            each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(step))
        momentum.lerp_(parameter.grad, 1 - cfg.momentum)
        direction, before = parameter.grad.lerp(momentum, cfg.momentum), parameter.detach().clone()
        muon.step()
        for part, rows in zip(direction.T.chunk(3), mean_squares, strict=True):
            update = normalized(zeropower(part, torch.bfloat16).float(), rows, cfg)
        change = ((1 - 0.02 * 0.1) * before - parameter.detach()).T[-32:]
        assert (change - 0.02 * 0.2 * math.sqrt(32) * update).norm() < 0.01 * change.norm()
    stored = muon.state[parameter]["row_mean_square"]
    assert stored.shape == (1, 96)
    assert (stored - mean_squares.view(1, 96)).abs().max() < 1e-5 * stored.max()
    assert (stored - stored.bfloat16()).abs().max() > 1e-3 * stored.max()


TRANSPOSED: dict[str, dict[str, Any]] = {
    "gpt2": MODELS["gpt2"],
    "gpt_oss": {**MODELS["llama"], "model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1,
                "intermediate_size": 24},
    "llama4_text": {**MODELS["llama"], "model_type": "llama4_text", "num_local_experts": 2, "intermediate_size": 40,
                    "intermediate_size_mlp": 40, "head_dim": 12},
}  # fmt: skip
"""Models with matrices (in, out). The gate and up of this GPT-OSS are square when fused: 2 x 24 by 48."""


def out_in(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the matrices of a parameter as (out, in), by hand: GPT-2's Conv1D and fused experts store (in, out)."""
    if tensor.dim() == 3:
        experts = list(tensor.mT)
        if "gate_up_proj" not in name:
            return experts
        if model.config.model_type == "gpt_oss":
            return [half for each in experts for half in (each[::2], each[1::2])]
        return [half for each in experts for half in each.chunk(2)]
    if not isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D):
        return [tensor]
    return list(tensor.T.chunk(3)) if "c_attn" in name else [tensor.T]


@pytest.mark.parametrize("family", TRANSPOSED)
def test_scale_follows_the_inputs_and_outputs_of_transposed_matrices(family: str) -> None:
    """torch.optim.Muon on matrices (out, in), with its scale sqrt(max(1, out / in))."""
    model = build(family, torch.float32, TRANSPOSED[family])
    anatomy = models.read_anatomy(model)
    prepared = training.Prepared(model, training.StepSettings(device=CPU), anatomy=anatomy)
    cfg = MuonConfig(lr=0.02, weight_decay=0.0, scale=MatrixScale.shape)
    (muon, _) = list_optimizers(training.build_optimizer(prepared, cfg))
    names = {id(each): name for name, each in model.named_parameters()}
    targets: dict[str, tuple[list[torch.Tensor], list[torch.nn.Parameter]]] = {}
    for parameter in muon.param_groups[0]["params"]:
        name, parameter.grad = names[id(parameter)], torch.randn_like(parameter)
        ours = out_in(model, name, parameter.detach())
        theirs = [torch.nn.Parameter(each.clone()) for each in ours]
        for each, gradient in zip(theirs, out_in(model, name, parameter.grad), strict=True):
            each.grad = gradient.clone()
        targets[name] = ours, theirs
    before = {name: [each.clone() for each in ours] for name, (ours, _) in targets.items()}
    muon.step()
    reference = [each for _, theirs in targets.values() for each in theirs]
    torch.optim.Muon(reference, lr=0.02, weight_decay=0.0, adjust_lr_fn="original").step()
    assert any(theirs[0].shape != model.get_parameter(name).shape for name, (_, theirs) in targets.items())
    for name, (ours, theirs) in targets.items():
        for start, our, their in zip(before[name], ours, theirs, strict=True):
            assert (our - their).norm() < 0.03 * (their - start).norm(), name


def changed_by_a_non_finite_step(rank: int, cfg: Any, values: dict[str, Any], state: str) -> list[str]:
    """Return what a step with non-finite gradients changes on a rank; the optimizer has a state of this name."""
    case = Case("llama", FSDP2)
    parallelism = recipe_config(case).parallelism
    mesh = distributed.build_mesh(parallelism, "cpu")
    model = build("llama", torch.float32, values)
    anatomy = models.read_anatomy(model)
    distributed.parallelize(model, mesh, parallelism, torch.float32, anatomy)
    prepared = training.Prepared(model, training.StepSettings(device=CPU, mesh=mesh), anatomy=anatomy)
    optimizer = training.build_optimizer(prepared, cfg)
    (batch, *_) = micro_batches(case, mesh, 0)
    training.train_step(prepared, [batch], optimizer)
    before = state_of(model, optimizer)
    assert any(state in key for key in before)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *args: args[2] * torch.inf)
    numbers = training.train_step(prepared, [batch], optimizer)
    assert numbers["skipped"].item() == 1
    return [key for key, value in state_of(model, optimizer).items() if not torch.equal(value, before[key])]


def test_step_with_non_finite_gradients_changes_nothing() -> None:
    arguments = NorMuonConfig(lr=0.02), MODELS["llama"], "row_mean_square"
    assert run_ranks(2, changed_by_a_non_finite_step, *arguments) == [[], []]
    arguments = LionConfig(lr=0.02), MODELS["llama"], "first_moment"
    assert run_ranks(2, changed_by_a_non_finite_step, *arguments) == [[], []]


def state_of(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return copies of this rank's shards of parameters and optimizer state."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter
        for each in list_optimizers(optimizer):
            found |= {f"{name} {key}": value for key, value in each.state.get(parameter, {}).items()}
    return {
        name: (each.to_local() if isinstance(each, DTensor) else each).detach().clone() for name, each in found.items()
    }
