"""AdamW with 8-bit moments, compiled: the same bits as torchao's optimizer in one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from components import checkpoint, training
from components.checkpoint.tensors import list_optimizers
from components.config.rules import _optimizer_problems
from components.config.schema.model import DType, ModelConfig
from components.config.schema.optimizer import AdamW8bitConfig, AdamWConfig
from components.config.schema.run import CheckpointConfig
from components.protocol.errors import ConfigError
from components.training.optimizers.gradients import step_if_finite
from components.training.optimizers.optim import AdamW8bit
from tests.optional import need_torchao
from tests.suites import PARITY

need_torchao()

STEPS = 4
SHAPES = {"square": (16, 512), "wide": (3, 5, 512), "odd_rows": (33, 256), "norm": (512,), "small": (8, 256)}
CONFIG = AdamW8bitConfig(lr=1e-2, weight_decay=0.1)


@pytest.fixture
def eager() -> Iterator[None]:
    """Run the update without compiling it."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Weights(nn.Module):
    """Parameters of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def fill_gradients(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        magnitudes = 10.0 ** -torch.randint(0, 5, parameter.shape, generator=generator)
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * magnitudes).to(parameter.dtype)


def groups(module: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [each for each in module.parameters() if each.dim() > 1], "weight_decay": CONFIG.weight_decay},
        {"params": [each for each in module.parameters() if each.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.skipif(not PARITY, reason="compiles for a minute and a half: make parity")
@pytest.mark.filterwarnings("ignore:OptimState8bit does not implement")  # torchao's tensor in torch's compile cache
def test_equals_torchao_with_one_graph_for_all_shapes_and_learning_rates() -> None:
    compare_with_torchao(graphs=1)


def test_equals_torchao_without_compilation(eager: None) -> None:
    compare_with_torchao(graphs=0)


@contextmanager
def bounded_torchao() -> Iterator[None]:
    """Within the context torchao's second moments are at least the least that AdamW's can be beside the first."""
    from torchao.optim import adam

    original = adam.single_param_adam

    def bounded(
        parameter: Any, grad: Any, step: Any, first: Any, second: Any, largest: Any, lr: Any, beta1: float,
        beta2: float, *rest: Any,
    ) -> None:  # fmt: skip
        if not hasattr(first, "codes"):
            original(parameter, grad, step, first, second, largest, lr, beta1, beta2, *rest)
            return
        factor, exact_first = beta1**2 / beta2, first.dequantize()
        ratio = (1 - beta1) ** 2 / (1 - beta2) * (factor ** (step - 1) - 1) / (factor - 1)
        exact_second = torch.maximum(second.dequantize(), exact_first.square() / ratio.clamp(min=1e-12))
        original(parameter, grad, step, exact_first, exact_second, largest, lr, beta1, beta2, *rest)
        first.copy_(exact_first)
        second.copy_(exact_second)

    adam.single_param_adam = bounded
    try:
        yield
    finally:
        adam.single_param_adam = original


def compare_with_torchao(graphs: int) -> None:
    from torchao.optim import AdamW8bit as Reference

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours, theirs = Weights(), Weights()
    optimizers = training.build_optimizer(ours, CONFIG)
    assert list(optimizers) == ["adamw8bit", "adamw"]
    for step in range(STEPS):
        fill_gradients(ours, step)
        for optimizer in optimizers.values():
            training.set_learning_rate(optimizer, CONFIG, step, STEPS)
            step_if_finite(optimizer, torch.ones(()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs

    reference = Reference(groups(theirs), lr=CONFIG.lr, betas=tuple(CONFIG.betas), eps=CONFIG.eps)
    with bounded_torchao():
        for step in range(STEPS):
            fill_gradients(theirs, step)
            for group in reference.param_groups:
                group["lr"].fill_(training.learning_rate(CONFIG, step, STEPS))
            reference.step()
    for name, parameter in theirs.named_parameters():
        found = ours.get_parameter(name)
        if name in ("norm", "small"):
            assert torch.allclose(found, parameter, rtol=1e-6, atol=1e-7), name
            continue
        assert torch.equal(found, parameter), name
        state, expected = optimizers["adamw8bit"].state[found], reference.state[parameter]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[f"{moment}_codes"], expected[moment].codes), name
            assert torch.equal(state[f"{moment}_scale"].view(-1), expected[moment].scale), name


def test_state_has_two_bytes_per_value(eager: None) -> None:
    model = nn.Linear(1024, 512, bias=False)
    (optimizer,) = training.build_optimizer(model, CONFIG).values()
    assert isinstance(optimizer, AdamW8bit)
    fill_gradients(model, 0)
    optimizer.step()
    size = sum(each.untyped_storage().nbytes() for each in optimizer.state[model.weight].values())
    assert size == 2 * 1024 * 512 * (1 + 4 / 256) + 4  # codes, scales and the step counter
    assert optimizer.note == "adamw8bit: 1.0 MiB for the moments of 524,288 values per rank, 2.03 bytes each"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_skipped_steps_leave_no_trace(eager: None, dtype: torch.dtype) -> None:
    """Also the first step, which allocates the state."""
    skipping, plain = Weights().to(dtype), Weights().to(dtype)
    optimizers, references = (training.build_optimizer(each, CONFIG) for each in (skipping, plain))
    for step, finite in enumerate([False, True, False, True]):
        fill_gradients(skipping, step)
        fill_gradients(plain, step)
        if not finite:
            skipping.square.grad[0, 0] = math.nan
        norm = training.gradient_norm(skipping.parameters())
        for key, optimizer in optimizers.items():
            assert step_if_finite(optimizer, norm).item() == (not finite)
            if finite:
                references[key].step()
    for name, parameter in plain.named_parameters():
        found = skipping.get_parameter(name)
        assert torch.equal(found, parameter), name
        if name not in ("norm", "small"):
            expected = references["adamw8bit"].state[parameter]
            for key, value in optimizers["adamw8bit"].state[found].items():
                assert torch.equal(value, expected[key]), f"{name} {key}"


def test_loss_curve_is_close_to_that_of_float32_moments(eager: None) -> None:
    def curve(config: AdamWConfig | AdamW8bitConfig) -> list[float]:
        torch.manual_seed(1)
        inputs, target = torch.randn(256, 256), torch.randn(256, 64)
        model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))
        optimizers, losses = list_optimizers(training.build_optimizer(model, config)), []
        for _ in range(10):
            loss = (model(inputs) - target).square().mean()
            losses.append(loss.item())
            model.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
        return losses

    exact, quantized = curve(AdamWConfig(lr=3e-3)), curve(AdamW8bitConfig(lr=3e-3))
    assert exact[-1] < 0.8 * exact[0]
    assert quantized == pytest.approx(exact, rel=0.01)
    assert quantized[2:] != exact[2:]


@pytest.mark.parametrize("betas", [[0.9, 0.95], [0.9, 0.999], [0.9, 0.81], [0.0, 0.9]], ids=str)
def test_no_weight_moves_by_more_than_under_adamw(eager: None, betas: list[float]) -> None:
    """Gradients of very different sizes in a block, most of them only once, as in rows of an embedding."""
    lr, steps = 1e-2, 8
    config = AdamW8bitConfig(lr=lr, weight_decay=0.0, betas=betas)
    model = nn.Embedding(64, 256)
    (optimizer,) = list_optimizers(training.build_optimizer(model, config))
    generator, (beta1, beta2) = torch.Generator().manual_seed(0), betas
    for step in range(1, steps + 1):
        magnitudes = 10.0 ** -(8 * torch.rand(64, 256, generator=generator))
        used = torch.rand(64, 1, generator=generator) < (1 if step == 1 else 0.3)
        model.weight.grad = torch.randn(64, 256, generator=generator) * magnitudes * used
        before = model.weight.detach().clone()
        optimizer.step()
        # By the Cauchy-Schwarz inequality, over all gradients.
        weights = [(1 - beta1) * beta1**k / (1 - beta1**step) for k in range(step)]
        squares = [(1 - beta2) * beta2**k / (1 - beta2**step) for k in range(step)]
        bound = math.sqrt(sum(a * a / b for a, b in zip(weights, squares, strict=True)))
        assert (model.weight - before).abs().max() < 1.001 * bound * lr, step


def test_moments_of_adamw_are_quantized_on_resume(eager: None, tmp_path: Path) -> None:
    model = nn.Linear(256, 64, bias=False)
    optimizer = training.build_optimizer(model, AdamWConfig())
    fill_gradients(model, 0)
    optimizer.step()
    checkpoint.save_checkpoint(tmp_path, 1, model, optimizer, {}, CheckpointConfig())
    resumed = training.build_optimizer(model, CONFIG)
    found = checkpoint.find_checkpoint(tmp_path, "auto")
    checkpoint.load_checkpoint(found, model, resumed)
    moment = optimizer.state[model.weight]["exp_avg"].clone()
    model.weight.grad = torch.zeros_like(model.weight)
    resumed["adamw8bit"].step()
    state = resumed["adamw8bit"].state[model.weight]
    assert sorted(state) == ["exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes", "exp_avg_sq_scale", "step"]
    assert state["step"] == 2
    from torchao.optim.quant_utils import create_dynamic_map, dequant_with_qmap

    values = dequant_with_qmap(
        state["exp_avg_codes"], torch.tensor(create_dynamic_map()), state["exp_avg_scale"].view(-1)
    )
    assert (values - 0.9 * moment).abs().max() < 0.02 * moment.abs().max()


def test_adamw_rejects_a_checkpoint_with_8_bit_moments(eager: None, tmp_path: Path) -> None:
    model = nn.Linear(256, 64, bias=False)
    optimizers = training.build_optimizer(model, CONFIG)
    fill_gradients(model, 0)
    optimizers["adamw8bit"].step()
    checkpoint.save_checkpoint(tmp_path, 1, model, optimizers, {}, CheckpointConfig())
    found = checkpoint.find_checkpoint(tmp_path, "auto")
    with pytest.raises(ConfigError, match="holds exp_avg_codes, .* of weight, but AdamW needs exp_avg"):
        checkpoint.load_checkpoint(found, model, training.build_optimizer(model, AdamWConfig()))


def test_float64_weights_are_rejected() -> None:
    problems = _optimizer_problems(CONFIG, ModelConfig(path="mine", dtype=DType.float64), None)
    assert problems == [
        "optimizer.kind=adamw8bit: computes updates in float32, less exact than model.dtype=float64; set "
        "optimizer=adamw, or model.dtype=float32"
    ]
    assert _optimizer_problems(CONFIG, ModelConfig(path="mine"), None) == []
