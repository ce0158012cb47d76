"""The moving average of the weights against float64 arithmetic on the weights after each step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from components import training
from components.config.schema import AdamWConfig, TrainingConfig
from components.config.schema.training import EvalWeights
from components.training.prepared import WeightAverage
from tests.unit.test_training_step import batch, tiny_model

DECAY = 0.7


def prepared(model: nn.Module, device: str = "cpu", evaluated: EvalWeights = EvalWeights.average) -> training.Prepared:
    settings = training.StepSettings(device=torch.device(device))
    config = TrainingConfig(ema_decay=DECAY, eval_weights=evaluated)
    return training.Prepared(model, settings).with_average(config)


def normalized(weights: list[torch.Tensor], decay: float = DECAY) -> torch.Tensor:
    """Return the average of the weights after each applied step in float64."""
    factors = [decay ** (len(weights) - number) for number in range(1, len(weights) + 1)]
    return sum(factor * each.double() for factor, each in zip(factors, weights, strict=True)) / sum(factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_average_is_that_of_the_weights_after_applied_steps(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    model.lm_head.weight.requires_grad_(False)
    prepared_model = prepared(model)
    optimizer = training.build_optimizer(model, AdamWConfig(lr=0.05))
    history: list[dict[str, torch.Tensor]] = []
    for step in range(4):
        poison = model.model.norm.weight.register_hook(lambda gradient: gradient * math.nan) if step == 1 else None
        numbers = training.train_step(prepared_model, [batch(2, 12)], optimizer)
        if poison is not None:
            poison.remove()
        assert numbers["skipped"].item() == (step == 1)
        if step != 1:
            history.append({name: each.detach().clone() for name, each in model.named_parameters()})
    found = prepared_model.average.tensors
    assert found.pop("average_updates") == 3
    assert "average/lm_head.weight" not in found  # not trained
    assert len(found) == sum(each.requires_grad for each in model.parameters())
    for name, average in found.items():
        assert average.dtype == torch.float32
        expected = normalized([weights[name.removeprefix("average/")] for weights in history])
        torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-7)


def test_skipped_first_step_is_not_counted() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, DECAY)
    before = model.weight.detach().clone()
    average.update(torch.tensor(1.0))
    assert torch.equal(average.tensors["average/weight"], before)
    with torch.no_grad():
        model.weight.add_(1)
    average.update(torch.tensor(0.0))
    torch.testing.assert_close(average.tensors["average/weight"], before + 1)


def test_update_has_no_host_sync() -> None:
    with torch.device("meta"):
        model = tiny_model()
    prepared_model = prepared(model, "meta")
    training.train_step(prepared_model, [batch(2, 12, "meta")], training.build_optimizer(model, AdamWConfig()))


@pytest.mark.parametrize("evaluated", EvalWeights)
def test_evaluation_uses_the_selected_weights_and_restores_the_trained_ones(evaluated: EvalWeights) -> None:
    model, rows = tiny_model(), batch(3, 12)
    prepared_model = prepared(model, evaluated=evaluated)
    optimizer = training.build_optimizer(model, AdamWConfig(lr=0.05))
    for _ in range(3):
        training.train_step(prepared_model, [rows], optimizer)
    trained = {name: each.detach().clone() for name, each in model.named_parameters()}
    averaged = {name.removeprefix("average/"): each for name, each in prepared_model.average.tensors.items()}
    averaged.pop("average_updates")
    plain = training.Prepared(model, prepared_model.settings)
    loss = {"trained": training.evaluate(plain, [rows]).loss}
    copy = tiny_model()
    copy.load_state_dict(averaged)
    loss["average"] = training.evaluate(training.Prepared(copy, plain.settings), [rows]).loss
    assert abs(loss["trained"] - loss["average"]) > 1e-3

    found = training.evaluate(prepared_model, [rows])
    assert found.loss == loss["trained" if evaluated is EvalWeights.trained else "average"]
    assert dict(found.metrics) == ({"loss_trained": loss["trained"]} if evaluated is EvalWeights.both else {})
    assert all(torch.equal(each, trained[name]) for name, each in model.named_parameters())
