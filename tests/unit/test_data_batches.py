"""Micro-batches: the same global order for every number of ranks, the cursor, padding, evaluation, and epochs."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import time
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from components.batch import Batch
from components.config.schema import TrainingConfig
from components.config.schema.optimizer import AdamWConfig, Schedule
from components.config.schema.run import ProfileConfig
from components.data.batches import BatchPlan, EvalBatches, Padding, TrainBatches, collate
from components.data.dataset import LINEAR_TOKENS, Dataset, Facts
from components.data.examples import IGNORED, Example, PackedRow
from components.data.loading import MixtureDataset
from components.data.packing import PackedDataset, SampleOrder
from components.models.tokenizer import byte_tokenizer
from components.protocol.errors import ConfigError
from tests.tiny_models import SIZES


def numbered_samples(count: int) -> list[Example]:
    """Return samples of different lengths; the first token is the index + 1, because 0 is padding."""
    return [Example([i + 1] + [7] * (1 + i % 5), [IGNORED] + [7] * (1 + i % 5)) for i in range(count)]


def sample_numbers(micro_batches: list[Batch]) -> list[int]:
    """Return the sample index of each row of micro-batches; -1 is a row of padding only."""
    return [row[0] - 1 for batch in micro_batches for row in batch.input_ids.tolist()]


def plan_of(total: int, micro: int, rank: int = 0, dp_size: int = 1) -> BatchPlan:
    return BatchPlan(global_batch_size=total, micro_batch_size=micro, dp_rank=rank, dp_size=dp_size)


def samples_of_all_ranks(dataset, step: int, micro: int, dp_size: int, seed: int = 3) -> list[int]:
    found = []
    for rank in range(dp_size):
        plan = BatchPlan(global_batch_size=24, micro_batch_size=micro, dp_rank=rank, dp_size=dp_size)
        micro_batches = TrainBatches(dataset, plan, seed=seed).at(step)
        assert len(micro_batches) == plan.accumulation
        assert all(len(batch.input_ids) == micro for batch in micro_batches)
        found += sample_numbers(micro_batches)
    return found


def test_global_batch_is_independent_of_dp_size_and_accumulation():
    dataset = numbered_samples(50)
    shapes = [(m, d) for d in (1, 2, 3, 4, 6, 8, 12, 24) for m in (1, 2, 3, 4, 6, 8, 12, 24) if 24 % (m * d) == 0]
    assert len(shapes) == 30
    for step in (0, 1, 2, 5, 1000):
        expected = SampleOrder(50, 3).indices(step * 24, 24)
        for micro, dp_size in shapes:
            assert samples_of_all_ranks(dataset, step, micro, dp_size) == expected


def test_batches_cross_epochs_and_each_epoch_uses_every_sample_once():
    dataset = numbered_samples(50)
    stream = list(itertools.chain.from_iterable(samples_of_all_ranks(dataset, step, 4, 2) for step in range(25)))
    for epoch in range(12):
        assert sorted(stream[epoch * 50 : (epoch + 1) * 50]) == list(range(50))


def test_dataset_smaller_than_the_global_batch_is_repeated_evenly():
    used = samples_of_all_ranks(numbered_samples(5), 0, 2, 3)
    assert sorted(used[:5]) == sorted(used[5:10]) == [0, 1, 2, 3, 4]


def test_iteration_yields_steps_in_order_and_global_batch_returns_their_indices():
    dataset = numbered_samples(31)
    plan = BatchPlan(global_batch_size=8, micro_batch_size=2)
    batches = TrainBatches(dataset, plan, seed=1)
    iterated = [sample_numbers(micro_batches) for micro_batches in itertools.islice(batches, 10)]
    assert iterated == [sample_numbers(TrainBatches(dataset, plan, seed=1).at(step)) for step in range(10)]
    assert iterated == [batches.global_batch(step) for step in range(10)]
    assert batches.epoch == pytest.approx(80 / 31)


@pytest.mark.parametrize("stop", [0, 1, 5, 13])
@pytest.mark.parametrize("shape_after", [(24, 4, 1), (24, 2, 3), (12, 3, 4), (6, 1, 6)])
def test_resume_with_another_dp_size_or_batch_size_continues_the_same_order(stop, shape_after):
    dataset = numbered_samples(50)
    uninterrupted = SampleOrder(50, 9).indices(0, 24 * 40)
    before = TrainBatches(dataset, BatchPlan(global_batch_size=24, micro_batch_size=6), seed=9)
    used = [number for _ in range(stop) for number in sample_numbers(next(before))]
    state = before.state_dict()
    assert state == {
        "seed": 9,
        "epoch": stop * 24 // 50,
        "sample": stop * 24,
        "size": 50,
        "fingerprint": "",
        "step": stop,
    }

    size, micro, dp_size = shape_after
    ranks = []
    for rank in range(dp_size):
        plan = BatchPlan(global_batch_size=size, micro_batch_size=micro, dp_rank=rank, dp_size=dp_size)
        ranks.append(TrainBatches(dataset, plan, seed=9))
        ranks[-1].load_state_dict(state)
    for _ in range(8):
        used += [number for rank in ranks for number in sample_numbers(next(rank))]
    assert used == uninterrupted[: len(used)]


def test_cursor_of_other_samples_or_seed_is_rejected_unless_the_change_is_accepted():
    plan = BatchPlan(global_batch_size=8, micro_batch_size=8)

    def batches(size: int = 20, fingerprint: str = "a", seed: int = 1) -> TrainBatches:
        return TrainBatches(numbered_samples(size), plan, seed=seed, fingerprint=fingerprint)

    before = batches()
    next(before)  # still in the first epoch, where the number of epochs does not reveal another dataset size
    state = before.state_dict()
    batches().load_state_dict(state)
    for other in (batches(size=21), batches(fingerprint="b")):
        with pytest.raises(ConfigError, match=r"data: the 2\d samples differ from the 20 of .*accept_changes=\[data\]"):
            other.load_state_dict(state, ["run.seed"])
        other.load_state_dict(state, ["data.path"])
        assert other.state_dict()["sample"] == 8
    other = batches(seed=2)
    with pytest.raises(ConfigError, match=r"run.seed=2: .* order of seed 1.*run.accept_changes=\[run.seed\]"):
        other.load_state_dict(state, ["data"])
    other.load_state_dict(state, ["run.seed"])
    assert sample_numbers(next(other)) == SampleOrder(20, 2).indices(8, 8)  # the order of the new seed


def test_resume_at_the_billionth_sample_takes_constant_time():
    class Huge(list):
        def __len__(self) -> int:
            return 10**9 + 7

        def __getitem__(self, index):
            return Example([1, index], [IGNORED, index])

    plan = BatchPlan(global_batch_size=4, micro_batch_size=4)
    began = time.perf_counter()
    batches = TrainBatches(Huge(), plan, seed=1)
    position = 2 * (10**9 + 7) + 10**9
    state = {"seed": 1, "epoch": 2, "sample": position, "step": position // 4, "size": 10**9 + 7, "fingerprint": ""}
    batches.load_state_dict(state)
    (batch,) = next(batches)
    assert time.perf_counter() - began < 5  # iterating there would take minutes
    assert batch.input_ids[:, 1].tolist() == SampleOrder(10**9 + 7, 1).indices(position, 4)


@pytest.mark.parametrize(("size", "micro", "dp_size"), [(10, 4, 1), (8, 3, 2), (0, 1, 1), (4, 4, 2)])
def test_indivisible_global_batch_size_and_invalid_dp_rank_are_rejected(size, micro, dp_size):
    with pytest.raises(ConfigError, match=rf"training.global_batch_size={size}: must be a multiple of"):
        BatchPlan(global_batch_size=size, micro_batch_size=micro, dp_size=dp_size)
    with pytest.raises(ValueError, match="dp_rank=2 must be at least 0 and below dp_size=2"):
        BatchPlan(global_batch_size=4, micro_batch_size=1, dp_rank=2, dp_size=2)


# Padding


def test_rows_are_right_padded_to_the_longest_row_rounded_up():
    rows = [Example([5, 6, 7], [IGNORED, 6, 7]), Example([8, 9], [IGNORED, 9])]
    batch = collate(rows, Padding(multiple=4, token_id=1))
    assert batch.input_ids.tolist() == [[5, 6, 7, 1], [8, 9, 1, 1]]
    assert batch.targets.tolist() == [[6, 7, IGNORED, IGNORED], [9, IGNORED, IGNORED, IGNORED]]
    assert (batch.target_count, batch.position_ids, batch.document_bounds) == (3, None, None)
    assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
    assert collate(rows, Padding(multiple=3)).targets.shape == (2, 3)
    assert collate(rows, Padding(length=6)).targets.shape == (2, 6)
    with pytest.raises(ConfigError, match="a sample of 3 tokens is longer than the packed rows of 2 tokens"):
        collate(rows, Padding(length=2))


def test_rows_are_padded_to_multiples_of_128_on_cuda_up_to_the_length_limit():
    rows = [Example([5] * 130, [6] * 130), Example([8, 9], [IGNORED, 9])]
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    widths = {
        (device.type, limit): Padding.on(device, 3, limit).length_of(130)
        for device in (cuda, cpu)
        for limit in (512, 200)
    }
    assert widths == {("cuda", 512): 258, ("cuda", 200): 201, ("cpu", 512): 132, ("cpu", 200): 132}
    assert {Padding.on(cuda, 4, 2048).length_of(length) for length in range(1, 1025)} == set(range(128, 1025, 128))
    on_cuda, on_cpu = (collate(rows, replace(Padding.on(device, 1, 512), token_id=7)) for device in (cuda, cpu))
    assert torch.equal(on_cuda.input_ids[:, :130], on_cpu.input_ids)
    assert torch.equal(on_cuda.targets[:, :130], on_cpu.targets)
    assert set(on_cuda.input_ids[:, 130:].flatten().tolist()) == {7}
    assert set(on_cuda.targets[:, 130:].flatten().tolist()) == {IGNORED}


def _models():
    sizes = {**SIZES, "vocab_size": 64, "max_position_embeddings": 64}
    yield "llama", LlamaForCausalLM, LlamaConfig(**sizes)
    yield "sliding window", MistralForCausalLM, MistralConfig(**sizes, sliding_window=4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("model_class", "config"), [pytest.param(*m[1:], id=m[0]) for m in _models()])
def test_padding_without_a_mask_changes_neither_loss_nor_gradient(model_class, config, attention):
    """Compare rows forwarded one by one without padding with one padded batch, in float64."""
    torch.manual_seed(0)
    config._attn_implementation = attention
    model = model_class(config).double()
    rows = [
        Example(ids, [IGNORED, *ids[1:]])
        for ids in (torch.randint(1, 64, (length,)).tolist() for length in (3, 17, 9, 30))
    ]

    def loss_and_gradients(batches: list[Batch]) -> tuple[float, list[torch.Tensor]]:
        model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            logits = model(input_ids=batch.input_ids, use_cache=False).logits
            total = total + torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"
            )
        total.backward()
        return total.item(), [parameter.grad.clone() for parameter in model.parameters()]

    alone, alone_gradients = loss_and_gradients([collate([row], Padding()) for row in rows])
    empty = Example([], [])
    padding = Padding(multiple=16, rounding=24, limit=64, token_id=9)
    padded, padded_gradients = loss_and_gradients([collate([*rows, empty], padding)])
    # Eager attention of transformers computes its softmax in float32; the rounding depends on the row length.
    loss, relative, absolute = (1e-13, 1e-11, 1e-13) if attention == "sdpa" else (1e-9, 1e-5, 1e-7)
    assert padded == pytest.approx(alone, rel=loss)
    for a, b in zip(alone_gradients, padded_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=relative, atol=absolute)


# Evaluation


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 24, 25])
@pytest.mark.parametrize(("micro", "dp_size"), [(1, 1), (2, 3), (4, 2), (3, 1), (2, 2)])
def test_evaluation_covers_every_sample_once_with_equal_forwards_per_rank(count, micro, dp_size):
    dataset = numbered_samples(count)
    per_rank = [list(EvalBatches(dataset, plan_of(micro * dp_size, micro, rank, dp_size))) for rank in range(dp_size)]
    (forwards,) = {len(batches) for batches in per_rank}
    assert (forwards - 1) * micro * dp_size < count <= forwards * micro * dp_size
    rows = [number for batches in per_rank for number in sample_numbers(batches)]
    assert sorted(number for number in rows if number >= 0) == list(range(count))
    assert rows.count(-1) == forwards * micro * dp_size - count
    for batch in itertools.chain.from_iterable(per_rank):
        padding_rows = batch.input_ids[:, 0] == 0
        assert (batch.targets[padding_rows] == IGNORED).all()
    targets = sum(int((batch.targets != IGNORED).sum()) for batches in per_rank for batch in batches)
    assert targets == sum(len(example.labels) - 1 for example in dataset)


def ramped(micro: int, rank: int, dp_size: int) -> BatchPlan:
    ramp = ((2, 4), (5, 8))
    return BatchPlan(global_batch_size=12, micro_batch_size=micro, dp_rank=rank, dp_size=dp_size, ramp=ramp, steps=9)


@pytest.mark.parametrize(("micro", "dp_size"), [(4, 1), (1, 4), (2, 2)])
def test_ramped_batches_consume_every_sample_once_in_the_same_order(micro: int, dp_size: int) -> None:
    """Nine steps of 4, 4, 8, 8, 8, 12, 12, 12 and 12 rows; a resume at any step continues with the same rows."""
    dataset, sizes = numbered_samples(50), [4, 4, 8, 8, 8, 12, 12, 12, 12]
    order = SampleOrder(50, 3).indices(0, sum(sizes))
    ranks = [TrainBatches(dataset, ramped(micro, rank, dp_size), seed=3) for rank in range(dp_size)]
    states, found = [], []
    for size in sizes:
        states.append(ranks[0].state_dict())
        batches = [next(each) for each in ranks]
        assert all(len(each) == size // (micro * dp_size) for each in batches)
        found.append([number for each in batches for number in sample_numbers(each)])
    used = list(itertools.chain.from_iterable(found))
    assert used == order
    assert sorted(used[:50]) == list(range(50))
    for step, state in enumerate(states):
        again = TrainBatches(dataset, ramped(4, 0, 1), seed=3)
        again.load_state_dict(state)
        assert sample_numbers(next(again)) == found[step] == sample_numbers(again.at(step)) == again.global_batch(step)
    assert ramped(micro, 0, dp_size).samples_before(9) == sum(sizes)
    assert "12 sequences a step" in ranks[0]._plan.describe("sequences")
    assert "4 up to step 2, 8 up to step 5" in ranks[0]._plan.describe("sequences")


def test_cut_rows_keep_every_target_and_cut_attention() -> None:
    """Rows of 6, 11 and 16 tokens in parts of 4, unpacked and packed, against a model that gets each part alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50, num_key_value_heads=1)).double()
    samples = [Example(ids := torch.randint(1, 50, (n,)).tolist(), ids) for n in (6, 11, 16)]
    expected = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        for start in range(0, len(sample.input_ids), 4):
            logits = model(torch.tensor([sample.input_ids[start : start + 4]])).logits[0]  # (4, vocabulary)
            targets = torch.tensor(sample.input_ids[start + 1 : start + 5])
            expected = expected + torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="sum")

    plan = BatchPlan(global_batch_size=3, micro_batch_size=3, length_ramp=((2, 4), (4, 8)))
    batches = TrainBatches(samples, plan, seed=0)
    assert [next(batches)[0].shape for _ in range(5)] == [(12, 4), (12, 4), (6, 8), (6, 8), (3, 16)]
    single = TrainBatches(samples, replace(plan, micro_batch_size=1), seed=0)
    assert [batch.shape for batch in single.at(0)] == [(4, 4)] * 3  # one shape per step, as pipelines require
    cut = batches.at(1)[0]
    logits = model(**cut.model_inputs()).logits
    found = torch.nn.functional.cross_entropy(logits.flatten(0, 1), cut.targets.flatten(), reduction="sum")
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    assert cut.target_count == 6 + 11 + 16 - 3

    labels = [label for each in samples for label in (IGNORED, *each.labels[1:])]
    ids = [token for each in samples for token in each.input_ids]
    packed = collate([PackedRow(ids, labels, [6, 17, 33])], Padding(length=36, documents=5))
    cut = packed.cut_rows(4)
    assert cut.document_bounds.tolist() == [[0, 4, 6, 8, 12, 16, 17, 20, 24, 28, 32, 33, 36, 36]]
    assert cut.position_ids[0, :9].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 0]
    assert cut.longest_document == 4
    assert torch.equal(cut.targets, packed.targets)


RAMP = ((2, 1), (5, 3))
PLANS = [BatchPlan(global_batch_size=size, micro_batch_size=1, ramp=ramp) for size in (4, 7) for ramp in ((), RAMP)]


def batches(plan: BatchPlan, rows: int = 30) -> TrainBatches:
    return TrainBatches(list(range(rows)), plan, seed=3)  # type: ignore[arg-type]


def counted(plan: BatchPlan, rows: int, step: int = 0) -> int:
    """Return the step after which `rows` more rows than before `step` were used."""
    while rows > 0:
        rows -= plan.size_of(step)
        step += 1
    return step


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("epochs", ["0.01", "0.1", "0.5", "1", "1.7", "3"])
def test_steps_use_every_row_as_often_as_asked(plan: BatchPlan, epochs: str) -> None:
    wanted = math.ceil(Fraction(epochs) * 30)
    assert batches(plan).steps_for(float(epochs)) == counted(plan, wanted)
    for size in range(1, 80):
        assert plan.steps_for(size) == counted(plan, size)


def test_fractions_are_exact() -> None:
    assert math.ceil(1.1 * 50) == 56
    assert batches(BatchPlan(global_batch_size=1, micro_batch_size=1), 50).steps_for(1.1) == 55


@pytest.mark.parametrize("before", PLANS)
@pytest.mark.parametrize("after", PLANS)
@pytest.mark.parametrize("step", [0, 1, 4, 9])
def test_resumed_run_uses_the_remaining_rows_with_another_batch_size(
    before: BatchPlan, after: BatchPlan, step: int
) -> None:
    state: dict[str, Any] = {**batches(before).state_dict(), "sample": before.samples_before(step), "step": step}
    resumed = batches(after)
    resumed.load_state_dict(state)
    steps = resumed.steps_for(3)
    assert steps == counted(after, 90 - state["sample"], step)
    if before == after:
        assert steps == batches(before).steps_for(3)


def test_run_that_has_used_its_rows_has_no_more_steps() -> None:
    resumed = batches(PLANS[1])
    resumed.load_state_dict({**resumed.state_dict(), "sample": 200, "step": 50})
    assert resumed.steps_for(3) == 50


def test_ramp_and_profile_must_fit_into_the_steps() -> None:
    training = TrainingConfig(epochs=1.5, batch_size_ramp=[{"until_step": 9, "global_batch_size": 4}])
    assert training.max_steps is None
    assert training.ramp_end_problems(10) == []
    (problem,) = training.ramp_end_problems(9)
    assert "the last until_step must be less than the 9 steps of training.epochs=1.5; change either" in problem
    profile = ProfileConfig(enabled=True, start=8, steps=3)
    assert profile.end_problems(training, 10) == []
    (problem,) = profile.end_problems(training, 9)
    assert "ends with step 10, after the 9 steps of training.epochs=1.5; change" in problem
    assert dataclasses.replace(profile, enabled=False).end_problems(training, 9) == []


def test_final_decay_must_begin_after_the_warmup() -> None:
    training = TrainingConfig(epochs=1.5, max_steps=None)
    wsd = AdamWConfig(schedule=Schedule.wsd, warmup_steps=5, decay_steps=10)
    assert wsd.decay_problems(training, 15) == wsd.decay_problems(training) == []
    (problem,) = wsd.decay_problems(training, 14)
    assert "after optimizer.warmup_steps=5, into the 14 steps of training.epochs=1.5; set it to at most 9" in problem
    assert dataclasses.replace(wsd, schedule=Schedule.cosine).decay_problems(training, 14) == []


def dealt(dataset: Any, micro: int, dp_size: int, step: int = 0, **values: Any) -> list[list[list[int]]]:
    """Return the lengths of the rows of each micro-batch of each rank."""
    found = []
    for rank in range(dp_size):
        plan = BatchPlan(
            global_batch_size=48, micro_batch_size=micro, dp_rank=rank, dp_size=dp_size, deals=True, **values
        )
        batches = TrainBatches(dataset, plan, seed=3).at(step)
        found.append([((batch.targets != IGNORED).sum(1) + 1).tolist() for batch in batches])
    return found


def of_lengths(lengths: Any) -> Dataset:
    """Return samples of the given lengths, at most 100 tokens."""
    samples = [Example([1] * length, [1] * length) for length in lengths]
    return Dataset(samples, byte_tokenizer(), facts=Facts("made here"), seq_len=100)


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(("micro", "dp_size"), [(1, 1), (1, 4), (3, 4), (4, 2), (6, 8), (48, 1)])
def test_dealing_keeps_the_rows_of_a_step(micro: int, dp_size: int, pp: int) -> None:
    lengths = np.random.default_rng(0).integers(2, 100, 150)
    dataset = of_lengths(lengths)
    for step in (0, 2, 5):  # the last crosses an epoch
        drawn = TrainBatches(dataset, plan_of(48, 1), seed=3).global_batch(step)
        found = dealt(dataset, micro, dp_size, step, pp=pp)
        assert {len(batches) for batches in found} == {48 // micro // dp_size}
        rows = [length for batches in found for batch in batches for length in batch]
        assert sorted(rows) == sorted(dataset.lengths[drawn].tolist())


def test_ranks_of_a_micro_batch_have_rows_of_similar_cost() -> None:
    """By hand: of 2, 3, ..., 49 tokens, 4 ranks and micro-batches of 2, the first micro-batch has the longest 8."""
    found = dealt(of_lengths(range(2, 50)), 2, 4)
    assert [batches[0] for batches in found] == [[49, 42], [48, 43], [47, 44], [46, 45]]
    assert [batches[-1] for batches in found] == [[9, 2], [8, 3], [7, 4], [6, 5]]
    alike = dealt(of_lengths(range(2, 50)), 2, 4, pp=2)
    assert {sum(batch) for batches in alike for batch in batches} == {51}


def test_packed_rows_and_mixtures_are_dealt_by_the_squares_of_their_documents() -> None:
    generator = np.random.default_rng(1)
    samples = of_lengths(np.minimum(np.exp(generator.normal(2.5, 1, 4000)).astype(int) + 1, 100))
    packed = PackedDataset(samples, 100)
    squares = np.array([sum(np.diff([0, *row.ends]) ** 2) for row in packed])
    tokens = np.array([len(row.input_ids) for row in packed])
    costs = packed.costs(range(len(packed)))
    assert costs == pytest.approx(squares + LINEAR_TOKENS * tokens)
    mixed = MixtureDataset({"a": packed, "b": packed}, {"a": 1, "b": 1})
    assert mixed.costs([3, len(packed) + 5]) == pytest.approx([costs[3], costs[5]])
    plan = replace(plan_of(64, 4, 0, 4), deals=True)
    line = TrainBatches(samples, plan, seed=0).balance
    drawn, after = (float(re.search(rf"([\d.]+) x {text}", line)[1]) for text in ("as drawn", "the mean"))
    assert 1 <= after < 1.1 < 1.3 < drawn
    assert TrainBatches(samples, replace(plan, deals=False), seed=0).balance == ""
    assert TrainBatches(numbered_samples(80), plan, seed=0).balance == ""  # lengths are unknown


def test_rows_that_a_ramp_cuts_keep_their_order() -> None:
    plan = BatchPlan(global_batch_size=48, micro_batch_size=1, dp_size=4, deals=True, length_ramp=((2, 8),))
    dataset = of_lengths(range(1, 101))
    for step, same in ((0, True), (3, False)):
        rows = [len(batch.input_ids[0]) for batch in TrainBatches(dataset, plan, seed=3).at(step)]
        drawn = TrainBatches(dataset, plan_of(48, 1, 0, 4), seed=3).at(step)
        assert (rows == [min(8, len(batch.input_ids[0])) for batch in drawn]) == same
