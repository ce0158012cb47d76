"""The chunked loss: its memory, chunks on GPUs, ignored targets, gradients, and fallbacks to logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from components import distributed, models, training
from components.batch import Batch
from components.config.compute_rules import chunk_logits
from components.config.schema import AdamWConfig, FinetuneConfig, ModelConfig, ParallelismConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import LossMethod
from components.config.schema.objective import NextTokenConfig
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.training import TrainingConfig
from components.planning.formulas.memory import rank_memory
from components.protocol.errors import ConfigError
from components.training import CrossEntropy
from components.training.objectives import chunked_loss
from components.training.objectives.chunked_loss import Head, Targets, linear_token_loss
from components.training.objectives.loss_head import _chunk_logits
from tests.harness import run_ranks
from tests.unit.test_planning_time import workload
from tests.unit.test_training_step import LLAMA

VOCABULARY, HIDDEN = 6000, 32
PLAIN = training.CrossEntropy()
CPU = torch.device("cpu")


class _ShapeRecorder(TorchDispatchMode):
    """Record the shape of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.shapes += [tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result

    @property
    def max_logits_rows(self) -> int:
        """Rows of the largest logits tensor."""
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
    return training.attach_loss_head(model, cfg.model, cfg.training, cfg.parallelism, None, None, CPU)


def rows(targets: int = 500) -> Batch:
    """Eight rows of 64 tokens, with `targets` non-ignored targets."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (8, 64), generator=generator)
    labels = torch.full((8, 64), -100)
    positions = torch.randperm(8 * 63, generator=generator)[:targets]
    is_target = torch.zeros(8 * 63, dtype=torch.bool).index_fill(0, positions, True).view(8, 63)
    labels[:, 1:] = torch.where(is_target, tokens[:, 1:], -100)
    return Batch.from_labels(tokens, labels)


def step(model: nn.Module, loss: training.LossHead | None, batch: Batch, **values: Any) -> training.StepNumbers:
    optimizer = training.build_optimizer(model, AdamWConfig())
    device = next(model.parameters()).device
    settings = training.StepSettings(device=device, loss_head=loss, **values)
    return training.train_step(training.Prepared(model, settings), [batch], optimizer)


def gradients(model: Any, loss: training.LossHead | None, batch: Batch, **values: Any) -> dict[str, Any]:
    """Return the gradients before the update, and the loss of the step."""
    result: dict[str, Any] = {}

    class CaptureGradients(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            result.update({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})

    optimizer = CaptureGradients(model.parameters(), lr=0.0)
    optimizer.param_groups[0]["fused"] = False
    settings = training.StepSettings(device=CPU, loss_head=loss, max_grad_norm=0.0, **values)
    result["loss"] = training.train_step(training.Prepared(model, settings), [batch], optimizer)["loss"]
    return result


def test_chunked_loss_never_materializes_all_logits_and_skips_ignored_targets() -> None:
    shapes = {}
    for name, chunked, targets in (("logits", None, 500), ("all", 1, 500), ("few", 1, 20)):
        model = build()
        loss = attach(model) if chunked else None
        with chunks_of(100), _ShapeRecorder() as recorder:
            step(model, loss, rows(targets))
        shapes[name] = recorder
    assert any(shape in ((8, 64, VOCABULARY), (512, VOCABULARY)) for shape in shapes["logits"].shapes)
    assert 86 <= shapes["all"].max_logits_rows <= 100
    chunks = [shape for shape in shapes["few"].shapes if shape[-1:] == (VOCABULARY,) and len(shape) == 2]
    assert sum(shape[0] for shape in dict.fromkeys(chunks)) <= 128  # of 512 tokens


def test_chunked_loss_step_on_the_meta_device_with_host_batches() -> None:
    """Targets are counted on the host, so that the step never synchronizes with the device."""
    model = build("meta")
    batch = rows(20)
    with chunks_of(50), _ShapeRecorder() as recorder:
        numbers = step(model, attach(model), batch)
    assert numbers.vector.shape == (len(training.FIELDS),)
    assert 0 < recorder.max_logits_rows <= 50


@pytest.mark.parametrize("values", [{}, {"model_type": "cohere", "logit_scale": 0.25}, {"tie_word_embeddings": True}])
def test_chunked_gradients_match_those_of_logits(values: dict[str, Any]) -> None:
    batch = rows(300)
    expected = gradients(build(**values).double(), None, batch)
    model = build(**values).double()
    with chunks_of(40):
        got = gradients(model, attach(model), batch)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).norm() <= 1e-6 * value.norm(), name  # transformers computes norms in float32


def test_gradient_of_a_frozen_head_is_not_computed() -> None:
    batch, shapes = rows(500), {}
    for frozen in (False, True):
        model = build(tie_word_embeddings=False)
        model.lm_head.weight.requires_grad_(not frozen)
        model.model.embed_tokens.weight.requires_grad_(False)
        loss = attach(model)
        with chunks_of(100), _ShapeRecorder() as recorder:
            step(model, loss, batch)
        assert model.lm_head.weight.grad is None
        shapes[frozen] = recorder.shapes
    assert (VOCABULARY, HIDDEN) in shapes[False]
    assert (VOCABULARY, HIDDEN) not in shapes[True]


def test_chunked_loss_under_autocast_matches_logits_and_is_float32() -> None:
    batch = rows(300)
    expected = gradients(build(), None, batch, autocast=torch.bfloat16)
    model = build()
    with chunks_of(40):
        got = gradients(model, attach(model), batch, autocast=torch.bfloat16)
    assert abs(got["loss"] - expected["loss"]) <= 1e-6 * expected["loss"]
    for name, value in expected.items():
        assert (got[name] - value).norm() <= 2e-2 * value.norm(), name
    # The head's gradient is accumulated over chunks in float32, so it is not rounded after each chunk.
    exact = gradients(build(), None, batch)["lm_head.weight"]
    error = (got["lm_head.weight"] - exact).norm() / (expected["lm_head.weight"] - exact).norm()
    assert error <= 1.05


def test_chunked_loss_with_recomputed_and_compiled_layers_matches_logits() -> None:
    batch = rows(300)
    expected = gradients(build(), None, batch)
    model = build()
    models.checkpoint_activations(model, ActivationCheckpointing.full)
    models.compile_layers(model, backend="eager")
    with chunks_of(40):
        got = gradients(model, attach(model), batch)
    for name, value in expected.items():
        assert (got[name] - value).norm() <= 1e-5 * value.norm(), name


def test_attaching_the_loss_head_changes_neither_logits_nor_evaluation() -> None:
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


def test_too_small_bound_on_targets_gives_nan_not_a_wrong_loss() -> None:
    hidden, weight = torch.randn(600, 8), torch.randn(50, 8)
    targets = torch.randint(0, 50, (600,))
    assert linear_token_loss(hidden, weight, None, Targets(targets, 600), Head(), PLAIN).isfinite()
    assert linear_token_loss(hidden, weight, None, Targets(targets, 200), Head(), PLAIN).isnan()


def test_second_backward_raises_and_zero_targets_give_zero_gradients() -> None:
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    empty = linear_token_loss(hidden, weight, None, Targets(torch.full((9,), -100), 0), Head(), PLAIN)
    empty.backward()
    assert empty == 0
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


def test_unsupported_head_falls_back_to_logits_and_reports_it() -> None:
    model = build()
    model.lm_head.__class__ = _Scaled
    loss_head = attach(copy.deepcopy(model), LossMethod.auto)
    assert (loss_head.method, loss_head.takes_targets) == (LossMethod.logits, False)
    assert "its LM head is a _Scaled" in str(loss_head)
    with pytest.raises(ConfigError, match="model.loss=chunked: .*_Scaled.* set model.loss=logits"):
        attach(model)


def test_model_code_that_needs_all_logits_falls_back_to_logits() -> None:
    class Centered(type(build())):  # type: ignore[misc]
        def forward(self, **kwargs: Any) -> Any:
            output = super().forward(**kwargs)
            return replace(output, logits=output.logits - output.logits.mean(-1, keepdim=True))

    model = build()
    model.__class__ = Centered
    assert "needs all of them at once" in str(attach(model, LossMethod.auto))


def test_auto_keeps_logits_if_they_are_small() -> None:
    assert not attach(build(), LossMethod.auto).takes_targets  # 512 tokens x vocabulary of 6,000
    with chunks_of(100):
        assert attach(build(), LossMethod.auto).method == LossMethod.chunked


def test_liger_is_rejected_on_cpu() -> None:
    with pytest.raises(ConfigError, match="model.loss=liger: .*GPUs only"):
        attach(build(), LossMethod.liger)


@pytest.mark.parametrize("transform", [None, lambda logits: 30 * torch.tanh(logits / 30)], ids=["plain", "softcapped"])
def test_chunked_label_smoothing_and_z_loss_match_those_of_logits(transform: Any) -> None:
    """Compare values and gradients in float64; ignored targets contribute to neither term."""
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
                loss = linear_token_loss(*leaves, None, Targets(targets), Head(logits_transform=transform), token_loss)
        else:
            logits = torch.nn.functional.linear(*leaves)
            loss = token_loss.of_logits((logits if transform is None else transform(logits))[None], targets[None])
        loss.backward()
        found.append([loss.detach(), *(each.grad for each in leaves)])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    plain = PLAIN.of_logits(torch.nn.functional.linear(hidden, weight)[None], targets[None])
    assert abs(plain - found[0][0]) > 1


@pytest.mark.parametrize("transform", [None, lambda logits: 30 * torch.tanh(logits / 30)], ids=["plain", "softcapped"])
@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_compiled_chunks_match_float64_and_share_their_graphs(transform: Any, weighted: bool) -> None:
    """The compiler fuses the passes over the logits of a chunk; chunks and batches may have any number of tokens."""
    torch._dynamo.reset()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    generator = torch.Generator().manual_seed(3)
    token_loss = training.CrossEntropy(label_smoothing=0.2, z_loss=0.05)
    for tokens in (50, 33, 47):
        weight, hidden = (torch.randn(size, 8, generator=generator) for size in (31, tokens))
        targets = torch.randint(0, 31, (tokens,), generator=generator)
        targets[::7] = -100
        weights = torch.rand(tokens, generator=generator, dtype=torch.float64) if weighted else None
        exact = [each.double().requires_grad_() for each in (hidden, weight)]
        logits = torch.nn.functional.linear(*exact)
        logits = (logits if transform is None else transform(logits))[None]
        loss = token_loss.of_logits(logits, targets[None], None if weights is None else weights[None])
        loss.backward()
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        head = Head(logits_transform=transform, compiled=True)
        with chunks_of(11):
            compiled = linear_token_loss(*leaves, None, Targets(targets, weights=weights), head, token_loss)
        compiled.backward()
        torch.testing.assert_close(compiled.double(), loss, rtol=1e-5, atol=0)
        for got, expected in zip(leaves, exact, strict=True):
            torch.testing.assert_close(got.grad.double(), expected.grad, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == 1
    torch._dynamo.reset()


def test_held_out_loss_excludes_label_smoothing_and_z_loss() -> None:
    model, batch = build(), rows(300)
    prepared = training.Prepared(model, training.StepSettings(device=CPU))
    plain = training.evaluate(prepared, [batch]).loss
    objective = training.NextToken(NextTokenConfig(label_smoothing=0.2, z_loss=0.1))
    numbers = training.train_step(prepared, [batch], torch.optim.SGD(model.parameters(), lr=0.0), objective)
    assert numbers["loss"] > plain + 1
    assert training.evaluate(prepared, [batch]).loss == pytest.approx(plain, rel=1e-12)


GB = 1_000_000_000


@pytest.mark.parametrize(("memory", "power"), [(16, 24), (25.2, 25), (42.3, 26), (84.9, 27), (149.9, 28), (206, 28)])
def test_a_chunk_takes_a_share_of_the_memory(memory: float, power: int) -> None:
    assert chunk_logits(memory * GB) == 2**power


def test_the_loss_computes_at_most_a_chunk_of_logits_at_a_time() -> None:
    hidden, weight = torch.randn(40, 8), torch.randn(100, 8)
    largest = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.shape[1:] == (100,):
                largest.append(len(found))
            return found

    losses = []
    for head in (Head(), Head(chunk_logits=1000)):
        largest.clear()
        with Record():
            losses.append(linear_token_loss(hidden, weight, None, Targets(torch.arange(40)), head, CrossEntropy()))
        assert max(largest) == (40 if head.chunk_logits is None else 10)
    torch.testing.assert_close(*losses)


def test_tensor_parallel_ranks_use_the_least_chunk() -> None:
    def on_rank(rank: int) -> list[int | None]:
        memory = (84.9 if rank == 0 else 42.3) * GB
        torch.cuda.get_device_properties = lambda _: SimpleNamespace(total_memory=int(memory))
        mesh = distributed.build_mesh(ParallelismConfig(dp_shard=1, tp=2), "cpu")
        return [_chunk_logits(torch.device("cuda"), mesh), _chunk_logits(torch.device("cpu"), mesh)]

    assert run_ranks(2, on_rank) == [[2**26, None]] * 2


def test_planned_memory_follows_the_chunk() -> None:
    load = workload("8b", parallelism={"activation_checkpointing": "full"})
    found = []
    for memory in (None, 25.2 * GB, 84.9 * GB):
        terms = rank_memory(replace(load, loss="chunked", device_memory=memory), 0, "cuda").terms
        found.append(sum(each.value for each in terms if each.name == "loss"))
    assert found[0] == found[2] > found[1]
