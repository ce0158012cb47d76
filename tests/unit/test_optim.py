"""Steps with non-finite gradients leave no trace in any optimizer, compared with a run without these steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from components import training
from components.batch import Batch
from components.config.schema import AdamWConfig
from components.config.schema.optimizer import LionConfig
from components.training.optimizers.gradients import SpikeWindow, local_tensor, step_if_finite
from components.training.optimizers.optim import AdamW, Lion

Parameters = Iterable[torch.Tensor]


class CustomOptimizer(torch.optim.Optimizer):
    """Optimizer with state in all forms that users' optimizers have: numbers, lists, new tensors, group values."""

    def __init__(self, params: Parameters, lr: float) -> None:
        super().__init__(params, {"lr": lr, "calls": 0, "largest": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = 0.9 * state["mean"] + parameter.grad if "mean" in state else parameter.grad.clone()
                state.setdefault("history", []).append(parameter.grad.clone())
                state["history"] = state["history"][-2:]
                group["largest"] = torch.maximum(group["largest"], torch.tensor(float(state["step"])))
                scale = group["lr"] / (state["step"] + group["calls"])
                parameter.sub_(scale * (state["mean"] + sum(state["history"])))


OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw_shards": lambda p: AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "lion": lambda p: Lion([{"params": list(p), "weight_decay": 0.1}], LionConfig(lr=0.1)),
    "muon": lambda p: torch.optim.Muon(p, lr=0.1),
    "homemade": lambda p: CustomOptimizer(p, lr=0.1),
}
FINITE = (False, True, False, False, True, True, False)
"""Which steps have finite gradients."""


def trained(
    name: str,
    build: Callable[[], nn.Module],
    grad: Callable[[nn.Module, int], None],
    masked: bool,
    poisoned: bool = True,
) -> tuple[nn.Module, torch.optim.Optimizer, list[float]]:
    """Train for the steps of FINITE with `step_if_finite`, or for the finite ones alone with plain steps."""
    model = build()
    optimizer, skipped = OPTIMIZERS[name](model.parameters()), []
    for step, finite in enumerate(FINITE):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        grad(model, step)
        if masked:
            if poisoned and not finite:
                first = local_tensor(next(model.parameters()).grad)
                first.view(-1)[:1] = math.nan if step else math.inf
            norm = training.gradient_norm(model.parameters())
            training.clip_gradients(model.parameters(), norm, 1.0)
            skipped.append(step_if_finite(optimizer, norm).item())
        elif finite:
            training.clip_gradients(model.parameters(), training.gradient_norm(model.parameters()), 1.0)
            optimizer.step()
    return model, optimizer, skipped


def flat_state(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the leaves of the optimizer's state dict, with tensors as lists of this rank's values."""
    leaves, _ = tree_flatten(optimizer.state_dict())
    return [local_tensor(leaf).tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def compare(
    name: str, build: Callable[[], nn.Module], grad: Callable[[nn.Module, int], None], poisoned: bool = True
) -> list[str]:
    """Return the differences left by skipped steps; `poisoned`: this rank has the non-finite gradients."""
    expected, reference, _ = trained(name, build, grad, masked=False)
    model, optimizer, skipped = trained(name, build, grad, masked=True, poisoned=poisoned)
    problems = [] if skipped == [not finite for finite in FINITE] else [f"{name}: skipped {skipped}"]
    for (key, got), want in zip(model.named_parameters(), expected.parameters(), strict=True):
        if not torch.equal(local_tensor(got), local_tensor(want)):
            problems.append(f"{name}: {key} differs")
    for group in (*optimizer.param_groups, *reference.param_groups):
        group["lr"] = 0.0
    if flat_state(optimizer) != flat_state(reference):
        problems.append(f"{name}: the state is {flat_state(optimizer)}, not {flat_state(reference)}")
    return problems


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 5, bias=False))


def fill_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_skipped_steps_leave_no_trace(name: str) -> None:
    problems = compare(name, matrices, fill_gradients)
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", ["sgd_fused", "adagrad", "homemade"])
def test_state_after_a_skipped_step_equals_the_state_before(name: str) -> None:
    """A checkpoint may read it there: state created by a skipped first step is removed, and counters are restored."""
    model = matrices()
    optimizer = OPTIMIZERS[name](model.parameters())
    fresh = flat_state(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    step_if_finite(optimizer, training.gradient_norm(model.parameters()))
    assert flat_state(optimizer) == fresh
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_state_loaded_after_a_skipped_step_is_kept() -> None:
    model, other = matrices(), matrices()
    optimizer, source = (OPTIMIZERS["adagrad"](each.parameters()) for each in (model, other))
    fill_gradients(other, 0)
    source.step()
    loaded = source.state_dict()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    step_if_finite(optimizer, training.gradient_norm(model.parameters()))
    optimizer.load_state_dict(loaded)
    assert flat_state(optimizer) == flat_state(source)


@pytest.mark.parametrize("name", ["sgd_momentum", "rmsprop", "muon", "adamw_foreach", "lion"])
def test_skipping_does_not_synchronize_with_the_device(name: str) -> None:
    """The meta device holds no values, so any read of one raises."""
    model = matrices().to("meta")
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        assert step_if_finite(optimizer, training.gradient_norm(model.parameters())).is_meta


@pytest.mark.parametrize("name", ["sgd_momentum", "muon"])
def test_train_step_skips_nonfinite_gradients_without_a_fused_kernel(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = matrices()

        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            hidden = torch.nn.functional.one_hot(input_ids, 4).float() * self.factor
            return type("Output", (), {"logits": self.layers(hidden)})

        factor = 1.0

    model = Model()
    optimizer = OPTIMIZERS[name](model.parameters())
    tokens = torch.tensor([[0, 1, 2, 3]])
    vectors, weights = [], []
    for factor in (1.0, math.nan, 1.0):
        model.factor = factor
        settings = training.StepSettings(torch.device("cpu"))
        vectors.append(
            training.train_step(training.Prepared(model, settings), [Batch.from_labels(tokens, tokens)], optimizer)
        )
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    assert [bool(vector["skipped"]) for vector in vectors] == [False, True, False]
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(weights[1], weights[2], strict=True))


def expected_spikes(values: list[tuple[float, float]], deviations: float, size: int) -> list[bool]:
    """Return which values (loss, norm) lie too far above those before them: the rule of OLMo-core's optimizers."""
    window, decisions = [], []
    for value in values:
        columns = list(zip(*window[-size:], strict=True)) if len(window) >= size // 2 else []
        means, spreads = map(statistics.fmean, columns), map(statistics.stdev, columns)
        limits = [mean + deviations * spread for mean, spread in zip(means, spreads, strict=True)]
        decisions.append(any(x > limit for x, limit in zip(value, limits, strict=False)) and value[1] < math.inf)
        if all(map(math.isfinite, value)):
            window.append(value)
    return decisions


def test_spikes_are_those_of_the_formula_also_after_a_resume() -> None:
    """Spikes of the loss and of the norm; values that are not finite; a level that rises for good."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    values = (torch.tensor([3.0, 1.0]) + 0.1 * noise).tolist()
    values[2][0], values[10][0], values[20][1] = 5.0, 9.0, 9.0
    values[15], values[16], values[17] = [math.nan, math.inf], [math.inf, math.inf], [math.inf, 1.0]
    for value in values[40:]:
        value[0] += 5.0
    decisions = expected_spikes(values, 3.0, 16)
    window, found = SpikeWindow(3.0, 16, torch.device("cpu")), []
    for number, value in enumerate(values):
        if number % 7 == 3:
            saved = window.state()
            window = SpikeWindow(3.0, 16, torch.device("cpu"))
            window.load_state(saved)
        found.append(bool(window.add(torch.tensor(value, dtype=torch.float64))))
    assert found == decisions
    assert [number for number, each in enumerate(found) if each][:3] == [10, 17, 20]
    assert 1 <= sum(found[40:]) <= 1 + 16 / (1 + 3**2)  # as documented, updates resume
    assert not found[2]  # the window was not half full
    assert len(window.state()[0]) == 16


@pytest.mark.parametrize("level", [0.0, 0.6931471805599453, -2.0, 1e9])
def test_rounding_is_no_spike_where_values_are_constant(level: float) -> None:
    """The deviation is 0 there, so that any greater value would lie above every number of deviations."""
    window = SpikeWindow(6.0, 8, torch.device("cpu"))
    for _ in range(8):
        assert not window.add(torch.tensor([level, level], dtype=torch.float64))
    tiny = level + abs(level) * 1e-12
    assert not window.add(torch.tensor([tiny, tiny], dtype=torch.float64))
    assert window.add(torch.tensor([level + 1e-4 * max(abs(level), 1), level], dtype=torch.float64))


def test_banner_states_that_a_short_run_skips_nothing() -> None:
    window = SpikeWindow(6.0, 128, torch.device("cpu"))
    assert window.note(64).endswith(
        "128 steps; no update of this run is skipped, since its 64 steps do not fill half of the window"
    )
    assert window.note(65).endswith("of the last 128 steps")


def test_lion_keeps_its_moment_in_float32_beside_bfloat16_weights() -> None:
    """A hundredth of a gradient vanishes beside a bfloat16 moment, and a decay near 1 would be rounded to 1."""
    weight = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    lion = Lion([{"params": [weight], "weight_decay": 1.0}], LionConfig(lr=2**-8, betas=[0.9, 0.999]))
    for _ in range(10):
        weight.grad = torch.ones_like(weight)
        lion.step()
    moment = lion.state[weight]["first_moment"]
    assert moment.dtype == torch.float32
    assert moment[0, 0].item() == pytest.approx(1 - 0.999**10, rel=1e-5)
    assert weight.grad[0, 0] == 1  # not used as temporary memory
    exact = 1.0
    for _ in range(10):
        exact -= 2**-8 * (1 + exact)
    assert weight[0, 0].item() == pytest.approx(exact, rel=2**-7)


def test_default_optimizer_skips_without_copies_of_its_state() -> None:
    """Its fused kernel skips the update on the device, depending on `found_inf`."""
    model = matrices()
    optimizer = training.build_optimizer(model, AdamWConfig())
    fill_gradients(model, 0)
    step_if_finite(optimizer, training.gradient_norm(model.parameters()))
    assert optimizer.found_inf.item() == 0  # type: ignore[attr-defined]
