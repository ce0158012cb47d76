"""Noise of embeddings (NEFTune): that of a formula in one process, on every mesh, also packed and recomputed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.integrations.neftune import neftune_post_forward_hook

from components import distributed, models, training
from components.batch import Batch
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.training import TrainingConfig
from components.training.objectives import PLAIN
from components.training.prepared import EmbeddingNoise
from components.training.step import forward_loss, local_batch, score_rows, training_loss
from tests.distributed import packed
from tests.distributed.parity import CLIP, MODELS, Case, build, micro_batches, recipe_config, samples_of_step
from tests.harness import run_ranks
from tests.suites import PARITY

CPU = torch.device("cpu")
STEPS, ALPHA, SEED = 3, 5.0, 11
WITH_NOISE = TrainingConfig(neftune_alpha=ALPHA)
Samples = list[tuple[list[int], list[int]]]
"""Tokens and labels."""


def splitmix(values: Any) -> Any:
    """The finalizer of SplitMix64 on uint64, whose products numpy wraps around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def expected_noise(tokens: list[int], step: int, hidden: int) -> torch.Tensor:
    """Return the noise (tokens, hidden) of a document."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        positions = np.arange(len(tokens), dtype=np.uint64)
        text = splitmix(np.array(tokens, dtype=np.uint64) * golden + splitmix(positions)).sum()
        start = np.uint64(SEED) * golden + np.uint64(step) * np.uint64(0xBF58476D1CE4E5B9)
        keys = splitmix(splitmix(np.array([text + start])) + splitmix(positions + np.uint64(1)))
        numbers = splitmix(keys[:, None] + (np.arange(hidden, dtype=np.uint64) + np.uint64(1)) * golden)
    uniform = torch.from_numpy((numbers.astype(np.int64) >> 40).astype(np.float64)) / 2**23
    return uniform * ALPHA / math.sqrt(len(tokens) * hidden)


def reference(plain: Any, samples: Callable[[int], Samples]) -> list[float]:
    """Return the losses of AdamW's steps in one process, with each sample forwarded separately."""
    model = copy.deepcopy(plain).train()
    noise: list[torch.Tensor] = []
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: output + noise[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for tokens, labels in samples(step):
            noise[:] = [expected_noise(tokens, step, plain.get_input_embeddings().weight.shape[1])]
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
            targets = torch.tensor(labels[1:])
            total = total + F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
            count += int((targets != -100).sum())
        model.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append((total / count).item())
    return losses


def noisy(plain: Any, case: Case, values: TrainingConfig = WITH_NOISE) -> tuple[training.Prepared, Any]:
    """Return the model on a mesh with noise, and the mesh."""
    cfg, model = recipe_config(case), copy.deepcopy(plain).train()
    mesh = distributed.build_mesh(cfg.parallelism, "cpu")
    anatomy = models.read_anatomy(model)
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, cfg.parallelism, case.dtype, anatomy)
    models.checkpoint_activations(model, cfg.parallelism.activation_checkpointing)
    noise = EmbeddingNoise.attached(model, anatomy, layout.stages, values, SEED)
    replica = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout)
    settings = training.StepSettings(CPU, max_grad_norm=CLIP, mesh=mesh, noise=noise)
    return training.Prepared(model, settings, replica), mesh


def losses_of(prepared: training.Prepared, batches: Callable[[int], list[Batch]]) -> list[float]:
    optimizer = training.build_optimizer(prepared.module, AdamWConfig(lr=1e-3, weight_decay=0.0))
    losses = []
    for step in range(STEPS):
        if prepared.settings.noise is not None:
            prepared.settings.noise.step = step
        losses.append(float(training.train_step(prepared, batches(step), optimizer)["loss"]))
    return losses


ONE: dict[str, Any] = {"strategy": "fsdp2", "dp_shard": 1}
SINGLE: dict[str, Any] = {"strategy": "single", "dp_shard": 1}
DEEP = {"gemma": {**MODELS["gemma"], "num_hidden_layers": 4}}
"""Models with two pipeline stages on each of two ranks; Gemma scales its embeddings."""
FULL = {"activation_checkpointing": "full"}
CASES = {
    1: [Case("llama", {**SINGLE, **FULL}, accumulation=4), Case("gpt2", SINGLE), Case("gemma", SINGLE)],
    2: [
        Case("llama", {"strategy": "fsdp2", "dp_shard": -1, **FULL}, accumulation=2),
        Case("llama", {"strategy": "ddp", "dp_shard": 1, "dp_replicate": 2}),
        Case("gemma", {**ONE, "tp": 2, "sequence_parallel": True}),
        Case("llama_tied", {**ONE, "cp": 2}, accumulation=2),
        Case("gpt2", {**ONE, "pp": 2}, accumulation=2),
        Case("gemma", {**ONE, "pp": 2, "pp_schedule": "ZBVZeroBubble"}, accumulation=4),
    ],
}
if PARITY:
    CASES[4] = [
        Case(name, {"strategy": "fsdp2", "dp_shard": -1, axis: 2}, accumulation=2)
        for name in ("llama", "gpt2", "gemma")
        for axis in ("tp", "cp", "pp")
    ]


@pytest.mark.parametrize("world", CASES)
def test_losses_equal_those_of_the_formula_on_every_mesh(world: int) -> None:
    """Also with several micro-batches and recomputation. Without noise, and with that of another step, they differ."""
    plain = {case.model: build(case.model, torch.float64, DEEP.get(case.model)) for case in CASES[world]}

    def samples(step: int) -> Samples:
        return [(tokens.tolist(), labels.tolist()) for tokens, labels in samples_of_step(step)]

    expected = {name: reference(model, samples) for name, model in plain.items()}

    def body(rank: int) -> list[list[float]]:
        found = []
        for case in CASES[world]:
            prepared, mesh = noisy(plain[case.model], case)
            found.append(losses_of(prepared, lambda step, case=case, mesh=mesh: micro_batches(case, mesh, step)))
        return found

    for found in run_ranks(world, body, timeout=300):
        for case, losses in zip(CASES[world], found, strict=True):
            assert losses == pytest.approx(expected[case.model], rel=1e-10), case

    def control(rank: int) -> list[float]:
        prepared, mesh = noisy(plain["llama"], CASES[1][0], TrainingConfig())
        return losses_of(prepared, lambda step: micro_batches(CASES[1][0], mesh, step))

    for without, noise in zip(run_ranks(1, control)[0], expected["llama"], strict=True):
        assert abs(without / noise - 1) > 1e-4


def test_packed_documents_have_the_noise_of_separate_ones() -> None:
    """On one process and with the rows sharded over cp. Rows also hold padding."""
    rows, plain = packed.packed(), build("gpt2", torch.float64)
    expected = reference(plain, lambda step: [(tokens, labels) for tokens, labels in packed.documents(rows, step)])

    def body(rank: int, axes: dict[str, Any]) -> list[float]:
        prepared, _ = noisy(plain, Case("gpt2", axes))
        return losses_of(prepared, lambda step: packed.batches_of(rows, micro=2).at(step))

    for world, axes in ((1, SINGLE), (2, {**ONE, "cp": 2})):
        for losses in run_ranks(world, body, axes):
            assert losses == pytest.approx(expected, rel=1e-10), axes


def test_scale_and_distribution_are_those_of_transformers() -> None:
    """Of an unpadded row: uniform, independent between channels, tokens, steps and documents."""
    model = build("llama", torch.float32)
    embedding = model.get_input_embeddings()
    tokens = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    clean = embedding(tokens)
    embedding.neftune_noise_alpha = ALPHA
    handle = embedding.register_forward_hook(neftune_post_forward_hook)
    theirs = (embedding(tokens) - clean).detach()
    handle.remove()
    noise = EmbeddingNoise.attached(model, models.read_anatomy(model), None, WITH_NOISE, SEED)
    assert noise is not None
    settings = training.StepSettings(CPU, noise=noise)
    seen: list[torch.Tensor] = []
    embedding.register_forward_hook(lambda module, args, output: seen.append((output - clean).detach()))
    batch = Batch.from_labels(tokens, tokens)
    for step in range(2):
        noise.step = step
        model(**local_batch(batch, settings, training=True).model_inputs(), use_cache=False)
    ours = seen[0]
    bound = ALPHA / math.sqrt(tokens.shape[1] * ours.shape[-1])
    for values in (ours, theirs):
        assert 0.999 * bound < values.abs().max() <= 1.001 * bound
        assert values.mean().abs() < 0.03 * bound
        assert values.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    counts = torch.histc(ours, bins=16, min=-bound, max=bound) / ours.numel()
    assert (counts - 1 / 16).abs().max() < 0.01
    pairs = [(ours, seen[1]), (ours[0], ours[1]), (ours[:, 1:], ours[:, :-1]), (ours[..., 1:], ours[..., :-1])]
    for first, second in pairs:
        assert torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1].abs() < 0.06


def test_only_training_forwards_have_noise() -> None:
    """Neither evaluation, nor the scoring pass of a row objective, nor a forward for generation."""
    model, plain = (build("llama", torch.float64).train() for _ in range(2))
    noise = EmbeddingNoise.attached(model, models.read_anatomy(model), None, WITH_NOISE, SEED)
    clean = training.Prepared(plain, training.StepSettings(CPU))
    prepared = training.Prepared(model, training.StepSettings(CPU, noise=noise))
    tokens = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = Batch.from_labels(tokens, tokens)
    keyed = local_batch(batch, prepared.settings, training=True)
    noised = training_loss(prepared, keyed, PLAIN.token_loss)
    assert not torch.isclose(noised, training_loss(clean, batch, PLAIN.token_loss), rtol=1e-6)
    assert torch.equal(forward_loss(prepared, local_batch(batch, prepared.settings)), forward_loss(clean, batch))
    assert torch.equal(score_rows(prepared, [keyed]).log_probs, score_rows(clean, [batch]).log_probs)
    assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)


def test_documents_end_with_their_last_target_or_the_row() -> None:
    """Targets of a score head are within the document, and rows of token stores predict a token beyond them."""
    noise = EmbeddingNoise(ALPHA, SEED)
    batch = Batch.from_labels(torch.arange(12).view(2, 6), torch.tensor([[-100, 1, 2, -100, -100, -100], [-100] * 6]))
    lengths = noise.with_keys(batch, predicts_next=True).layer_inputs[noise.KEYWORD][..., 1]
    assert lengths.tolist() == [[3, 3, 3, 0, 0, 0], [0] * 6]
    lengths = noise.with_keys(batch, predicts_next=False).layer_inputs[noise.KEYWORD][..., 1]
    assert lengths.tolist() == [[2, 2, 0, 0, 0, 0], [0] * 6]
    full = replace(batch, targets=torch.arange(12).view(2, 6))
    assert noise.with_keys(full, predicts_next=True).layer_inputs[noise.KEYWORD][..., 1].unique().tolist() == [6]
    bounds = torch.tensor([[0, 2, 4, 6], [0, 3, 6, 6]], dtype=torch.int32)
    several = noise.with_keys(replace(full, document_bounds=bounds), predicts_next=True)
    assert several.layer_inputs[noise.KEYWORD][..., 1].tolist() == [[2] * 6, [3] * 6]
