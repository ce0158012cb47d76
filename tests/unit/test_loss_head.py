"""The loss without logits in one process: what it holds, what it costs nothing for, and where it steps back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from components import models, training
from components.batch import Batch
from components.config.errors import ConfigError
from components.config.schema import AdamWConfig, FinetuneConfig, ModelConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import LossMethod
from components.config.schema.objective import NextTokenConfig
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.training import TrainingConfig
from components.training.objectives import chunked_loss
from components.training.objectives.chunked_loss import Head, Targets, linear_token_loss
from tests.unit.test_training_step import LLAMA

VOCABULARY, HIDDEN = 6000, 32
PLAIN = training.CrossEntropy()
CPU = torch.device("cpu")


class _Sizes(TorchDispatchMode):
    """Remembers the shape of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.shapes += [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result

    @property
    def most_tokens(self) -> int:
        """Rows of the largest tensor of logits."""
        return max((shape[0] for shape in self.shapes if len(shape) == 2 and shape[1] == VOCABULARY), default=0)


@contextmanager
def chunks_of(tokens: int) -> Iterator[None]:
    before = dict(chunked_loss.CHUNK_LOGITS)
    chunked_loss.CHUNK_LOGITS.update(dict.fromkeys(before, tokens * VOCABULARY))
    try:
        yield
    finally:
        chunked_loss.CHUNK_LOGITS.update(before)


def build(device: str = "cpu", **values: Any) -> Any:
    torch.manual_seed(0)
    values = {**LLAMA, "vocab_size": VOCABULARY, "model_type": "llama", **values}
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    models.use_causal_sdpa(model)
    return model


def config(loss: LossMethod = LossMethod.chunked) -> FinetuneConfig:
    return FinetuneConfig(
        model=ModelConfig(path="made here", loss=loss),
        data=DocsDataConfig(),
        training=TrainingConfig(micro_batch_size=8, seq_len=64),
    )


def attach(model: nn.Module, loss: LossMethod = LossMethod.chunked) -> training.LossHead:
    cfg = config(loss)
    return training.attach_loss_head(model, cfg.model.loss, cfg.training, cfg.parallelism, None, None, CPU)


def rows(targets: int = 500) -> Batch:
    """Eight rows of 64 tokens, `targets` of which carry loss."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (8, 64), generator=generator)
    labels = torch.full((8, 64), -100)
    places = torch.randperm(8 * 63, generator=generator)[:targets]
    labels[:, 1:].reshape(-1)[places] = 1  # a copy: only the places count
    real = torch.zeros(8 * 63, dtype=torch.bool).index_fill(0, places, True).view(8, 63)
    labels[:, 1:] = torch.where(real, tokens[:, 1:], -100)
    return Batch.from_labels(tokens, labels)


def step(model: nn.Module, loss: training.LossHead | None, batch: Batch, **values: Any) -> training.StepNumbers:
    optimizer = training.build_optimizer(model, AdamWConfig())
    device = next(model.parameters()).device
    settings = training.StepSettings(device=device, loss_head=loss, **values)
    return training.train_step(training.Prepared(model, settings), [batch], optimizer)


def gradients(model: Any, loss: training.LossHead | None, batch: Batch, **values: Any) -> dict[str, Any]:
    """Gradients before the update, and the step's vector."""
    found: dict[str, Any] = {}

    class Keep(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            found.update({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})

    optimizer = Keep(model.parameters(), lr=0.0)
    optimizer.param_groups[0]["fused"] = False
    settings = training.StepSettings(device=CPU, loss_head=loss, max_grad_norm=0.0, **values)
    found["loss"] = training.train_step(training.Prepared(model, settings), [batch], optimizer)["loss"]
    return found


def test_no_tensor_of_tokens_x_vocabulary_is_made_and_ignored_targets_cost_nothing() -> None:
    shapes = {}
    for name, method, targets in (("logits", None, 500), ("all", 1, 500), ("few", 1, 20)):
        model = build()
        loss = attach(model) if method else None
        with chunks_of(100), _Sizes() as sizes:
            step(model, loss, rows(targets))
        shapes[name] = sizes
    assert any(shape in ((8, 64, VOCABULARY), (512, VOCABULARY)) for shape in shapes["logits"].shapes)
    assert 86 <= shapes["all"].most_tokens <= 100
    products = [shape for shape in shapes["few"].shapes if shape[-1:] == (VOCABULARY,) and len(shape) == 2]
    assert sum(shape[0] for shape in dict.fromkeys(products)) <= 128  # of 512 tokens


def test_a_step_on_the_meta_device_with_batches_of_the_host() -> None:
    """Targets are counted on the host and nothing is asked of the device."""
    model = build("meta")
    batch = rows(20)
    with chunks_of(50), _Sizes() as sizes:
        vector = step(model, attach(model), batch)
    assert vector.vector.shape == (len(training.FIELDS),)
    assert 0 < sizes.most_tokens <= 50


@pytest.mark.parametrize("values", [{}, {"model_type": "cohere", "logit_scale": 0.25}, {"tie_word_embeddings": True}])
def test_gradients_are_those_of_logits(values: dict[str, Any]) -> None:
    batch = rows(300)
    expected = gradients(build(**values).double(), None, batch)
    model = build(**values).double()
    with chunks_of(40):
        got = gradients(model, attach(model), batch)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).norm() <= 1e-6 * value.norm(), name  # transformers' norms are in float32


def test_a_frozen_head_costs_no_gradient() -> None:
    batch, shapes = rows(500), {}
    for frozen in (False, True):
        model = build(tie_word_embeddings=False)
        model.lm_head.weight.requires_grad_(not frozen)
        model.model.embed_tokens.weight.requires_grad_(False)
        loss = attach(model)
        with chunks_of(100), _Sizes() as sizes:
            step(model, loss, batch)
        assert model.lm_head.weight.grad is None
        shapes[frozen] = sizes.shapes
    assert (VOCABULARY, HIDDEN) in shapes[False]
    assert (VOCABULARY, HIDDEN) not in shapes[True]


def test_autocast_computes_as_logits_do_and_the_loss_is_float32() -> None:
    batch = rows(300)
    expected = gradients(build(), None, batch, autocast=torch.bfloat16)
    model = build()
    with chunks_of(40):
        got = gradients(model, attach(model), batch, autocast=torch.bfloat16)
    assert abs(got["loss"] - expected["loss"]) <= 1e-6 * expected["loss"]
    for name, value in expected.items():
        assert (got[name] - value).norm() <= 2e-2 * value.norm(), name
    # What chunks add to the head's gradient is not rounded after each of them.
    exact = gradients(build(), None, batch)["lm_head.weight"]
    error = (got["lm_head.weight"] - exact).norm() / (expected["lm_head.weight"] - exact).norm()
    assert error <= 1.05


def test_layers_recomputed_and_compiled() -> None:
    batch = rows(300)
    expected = gradients(build(), None, batch)
    model = build()
    models.checkpoint_activations(model, ActivationCheckpointing.full)
    models.compile_layers(model, backend="eager")
    with chunks_of(40):
        got = gradients(model, attach(model), batch)
    for name, value in expected.items():
        assert (got[name] - value).norm() <= 1e-5 * value.norm(), name


def test_logits_and_evaluation_are_what_they_were() -> None:
    model = build().eval()
    batch = rows(300)
    expected = model(input_ids=batch.input_ids, use_cache=False).logits
    held_out = training.evaluate(training.Prepared(model, training.StepSettings(device=CPU)), [batch])
    loss = attach(model)
    assert torch.equal(model(input_ids=batch.input_ids, use_cache=False).logits, expected)
    settings = training.StepSettings(device=CPU, loss_head=loss)
    with chunks_of(40):
        found = training.evaluate(training.Prepared(model, settings), [batch])
    assert found.loss == pytest.approx(held_out.loss, rel=1e-6)
    assert found.count == held_out.count


def test_a_count_that_is_too_small_is_never_a_wrong_loss() -> None:
    hidden, weight = torch.randn(600, 8), torch.randn(50, 8)
    targets = torch.randint(0, 50, (600,))
    assert linear_token_loss(hidden, weight, None, Targets(targets, 600), Head(), PLAIN).isfinite()
    assert linear_token_loss(hidden, weight, None, Targets(targets, 200), Head(), PLAIN).isnan()


def test_gradients_are_given_once_and_no_targets_give_zero() -> None:
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    nothing = linear_token_loss(hidden, weight, None, Targets(torch.full((9,), -100), 0), Head(), PLAIN)
    nothing.backward()
    assert nothing == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert weight.grad is not None
    assert not weight.grad.any()
    loss = linear_token_loss(hidden, weight, None, Targets(torch.arange(9)), Head(), PLAIN)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        loss.backward()


class _Scaled(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


def test_a_head_of_another_kind_keeps_its_logits_and_says_so() -> None:
    model = build()
    model.lm_head.__class__ = _Scaled
    told = attach(copy.deepcopy(model), LossMethod.auto)
    assert (told.method, told.takes_targets) == (LossMethod.logits, False)
    assert "its LM head is a _Scaled" in str(told)
    with pytest.raises(ConfigError, match="model.loss=chunked: .*_Scaled.* set model.loss=logits"):
        attach(model)


def test_code_after_the_head_that_needs_all_logits_is_left_to_logits() -> None:
    class Centred(type(build())):  # type: ignore[misc]
        def forward(self, **kwargs: Any) -> Any:
            output = super().forward(**kwargs)
            return replace(output, logits=output.logits - output.logits.mean(-1, keepdim=True))

    model = build()
    model.__class__ = Centred
    assert "needs all of them at once" in str(attach(model, LossMethod.auto))


def test_auto_makes_small_logits() -> None:
    assert not attach(build(), LossMethod.auto).takes_targets  # 512 tokens x 6,000 words
    with chunks_of(100):
        assert attach(build(), LossMethod.auto).method == LossMethod.chunked


def test_liger_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="model.loss=liger: .*GPUs only"):
        attach(build(), LossMethod.liger)


@pytest.mark.parametrize("change", [None, lambda logits: 30 * torch.tanh(logits / 30)], ids=["plain", "softcapped"])
def test_smoothing_and_z_loss_of_chunks_are_those_of_logits(change: Any) -> None:
    """Values and gradients in float64; ignored targets add neither."""
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((50, 8), (31, 8)))
    targets = torch.randint(0, 31, (50,), generator=generator)
    targets[::7] = -100
    token_loss = training.CrossEntropy(label_smoothing=0.2, z_loss=0.05)
    found = []
    for chunked in (False, True):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        if chunked:
            with chunks_of(11):
                loss = linear_token_loss(*leaves, None, Targets(targets), Head(logits_transform=change), token_loss)
        else:
            logits = torch.nn.functional.linear(*leaves)
            loss = token_loss.of_logits((logits if change is None else change(logits))[None], targets[None])
        loss.backward()
        found.append([loss.detach(), *(each.grad for each in leaves)])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    plain = PLAIN.of_logits(torch.nn.functional.linear(hidden, weight)[None], targets[None])
    assert abs(plain - found[0][0]) > 1


def test_a_held_out_loss_has_neither_smoothing_nor_z_loss() -> None:
    model, batch = build(), rows(300)
    prepared = training.Prepared(model, training.StepSettings(device=CPU))
    plain = training.evaluate(prepared, [batch]).loss
    objective = training.NextToken(NextTokenConfig(label_smoothing=0.2, z_loss=0.1))
    numbers = training.train_step(prepared, [batch], torch.optim.SGD(model.parameters(), lr=0.0), objective)
    assert numbers["loss"] > plain + 1
    assert training.evaluate(prepared, [batch]).loss == pytest.approx(plain, rel=1e-12)
