"""The order of samples, of blocks and of mixtures: permutations, shares, seeds, and resumed positions."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from components.batch import Batch
from components.config.schema.data import ChatDataConfig, DataConfig, MixtureDataConfig, SftDataConfig, TextDataConfig
from components.config.schema.training import StageConfig, TrainingConfig
from components.data import cache
from components.data.batches import BatchPlan, EvalBatches, Padding, TrainBatches
from components.data.dataset import Dataset, Facts
from components.data.examples import IGNORED, Example, PackedRow
from components.data.loading import MixtureDataset, MixtureOrder, Shares, _integer_weights, build_dataset, sources_of
from components.data.packing import BlockOrder, SampleOrder
from components.data.preflight import check_files
from components.models.tokenizer import byte_tokenizer
from components.protocol.errors import ConfigError

TOKENIZER = byte_tokenizer()
MIXTURES = [
    {"a": 1.0},
    {"a": 0.3, "b": 0.7},
    {"a": 1.0, "b": 1.0, "c": 1.0},
    {"a": 0.001, "b": 5.0, "c": 0.6, "d": 2.0},
    {"a": 0.1, "b": 0.05, "c": 0.25, "d": 0.15, "e": 0.123, "f": 0.077, "g": 0.2},
]
SIZES = {"a": 5, "b": 17, "c": 3, "d": 40, "e": 1, "f": 9, "g": 12}


def rows_of(name: str, count: int) -> Dataset:
    """Return samples that identify their source: its letter, then the number of the sample."""
    examples = [Example([ord(name), i + 1, 7], [IGNORED, i + 1, 7]) for i in range(count)]
    return Dataset(examples, TOKENIZER, facts=Facts(f"{name}.jsonl"), seq_len=8)


def mixture_of(weights: dict[str, float], **sizes: int) -> MixtureDataset:
    return MixtureDataset({name: rows_of(name, (SIZES | sizes)[name]) for name in weights}, weights)


def stream(dataset: MixtureDataset, start: int, count: int, seed: int = 3) -> list[tuple[str, int]]:
    """Return the source and number of `count` rows, from position `start` of the order."""
    rows = [dataset[index] for index in dataset.order(seed).indices(start, count)]
    return [(chr(row.input_ids[0]), row.input_ids[1] - 1) for row in rows]


def key(seed: int, label: str) -> int:
    return int.from_bytes(blake2b(f"{seed}:{label}".encode(), digest_size=8).digest(), "big")


def reference_order(
    weights: dict[str, float], seed: int, count: int, sizes: Mapping[str, int] = SIZES
) -> list[tuple[str, int]]:
    """Compute the order position by position: split positions between two halves of the sources by a running credit."""
    names = sorted(weights)
    integer_weight = [round(weights[name] * 1000) for name in names]
    names_by_position: list[str] = [""] * count

    def split_positions(first: int, last: int, positions: Sequence[int]) -> None:
        if last - first == 1:
            for position in positions:
                names_by_position[position] = names[first]
            return
        middle = (first + last) // 2
        common = math.gcd(*integer_weight)
        left_weight, total = sum(integer_weight[first:middle]) // common, sum(integer_weight[first:last]) // common
        credit, halves = key(seed, f"{first}:{last}") % total, ([], [])
        for position in positions:
            credit += left_weight
            halves[credit < total].append(position)
            credit -= total if credit >= total else 0
        split_positions(first, middle, halves[0])
        split_positions(middle, last, halves[1])

    split_positions(0, len(names), range(count))
    orders = {name: itertools.count() for name in names}
    return [(name, SampleOrder(sizes[name], key(seed, name)).at(next(orders[name]))) for name in names_by_position]


@pytest.mark.parametrize("weights", MIXTURES, ids=str)
@pytest.mark.parametrize("seed", [0, 3])
def test_order_equals_the_position_by_position_reference(weights: dict[str, float], seed: int) -> None:
    dataset = mixture_of(weights)
    expected = reference_order(weights, seed, 600)
    assert stream(dataset, 0, 600, seed) == expected
    assert stream(dataset, 543, 21, seed) == expected[543:564]
    assert [stream(dataset, position, 1, seed)[0] for position in (599, 1, 300)] == [expected[i] for i in (599, 1, 300)]


def test_order_is_pinned() -> None:
    """Pinned on purpose: a cursor must mean the same rows in every version and on every machine."""
    order = MixtureOrder((10, 100), ("maths", "web"), Shares(_integer_weights([0.3, 0.7]), 1234), 1234)
    assert order.indices(0, 10) == [42, 54, 58, 9, 11, 26, 2, 59, 89, 3]
    assert order.indices(10**9, 3) == [44, 32, 81]


@pytest.mark.parametrize("weights", MIXTURES, ids=str)
def test_shares_hold_in_every_prefix(weights: dict[str, float]) -> None:
    """The error is less than one row per level of the binary tree over the sources."""
    total = sum(weights.values())
    bound = max(1, math.ceil(math.log2(len(weights))))
    for seed in range(2):
        shares = Shares(_integer_weights([weights[name] for name in sorted(weights)]), seed)
        seen = Counter[int]()
        for position in range(1500):
            source, before = shares.at(position)
            assert before == seen[source]
            seen[source] += 1
            for number, name in enumerate(sorted(weights)):
                assert abs(seen[number] - (position + 1) * weights[name] / total) < bound
        for position in range(10**12, 10**12 + 50):  # the error does not accumulate
            source, before = shares.at(position)
            assert abs(before - position * weights[sorted(weights)[source]] / total) < bound


@pytest.mark.parametrize("weights", MIXTURES, ids=str)
def test_no_row_repeats_before_its_source_is_exhausted(weights: dict[str, float]) -> None:
    found: dict[str, list[int]] = {name: [] for name in weights}
    for name, number in stream(mixture_of(weights), 0, 900):
        found[name].append(number)
    for name, numbers in found.items():
        size = SIZES[name]
        passes = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        assert all(sorted(each) == list(range(size)) for each in passes[:-1])
        assert all(len(set(each)) == len(each) for each in passes[-1:])
    assert len(found["a"]) > 5 or weights["a"] < 0.01


def test_order_of_a_source_does_not_depend_on_the_other_sources() -> None:
    def of_b(weights: dict[str, float]) -> list[int]:
        return [number for name, number in stream(mixture_of(weights), 0, 400) if name == "b"][:40]

    assert of_b({"a": 0.3, "b": 0.7}) == of_b({"b": 1.0, "c": 1.0, "d": 1.0}) == of_b({"b": 1.0})
    assert of_b({"b": 1.0}) != [number for _, number in stream(mixture_of({"b": 1.0}), 0, 40, seed=4)]


def test_weights_are_converted_to_integers_as_exact_decimals() -> None:
    assert _integer_weights([0.1, 0.2]) == (1, 2)
    assert _integer_weights([0.3, 0.7]) == _integer_weights([30.0, 70.0]) == (3, 7)
    assert _integer_weights([1e-05, 2.0]) == (1, 200_000)
    assert _integer_weights([5.0]) == (1,)


# Batches and the cursor


def batches(dataset: MixtureDataset, rank: int = 0, dp: int = 1, size: int = 12, micro: int = 3) -> TrainBatches:
    plan = BatchPlan(global_batch_size=size, micro_batch_size=micro, dp_rank=rank, dp_size=dp)
    return TrainBatches(dataset, plan, seed=3, fingerprint=dataset.fingerprint)


def input_ids_of(steps: Sequence[list[Batch]]) -> list[list[int]]:
    return [row for step in steps for batch in step for row in batch.input_ids.tolist()]


@pytest.mark.parametrize(("dp", "size", "micro"), [(1, 12, 3), (2, 12, 3), (4, 12, 1), (2, 4, 2)])
@pytest.mark.parametrize("stop", [0, 7])
def test_resume_with_another_dp_size_or_batch_size_continues_the_same_order(
    stop: int, dp: int, size: int, micro: int
) -> None:
    dataset = mixture_of({"a": 0.3, "b": 0.5, "d": 0.2})
    uninterrupted = [dataset[index].input_ids for index in dataset.order(3).indices(0, 240)]
    before = batches(dataset)
    used = input_ids_of([next(before) for _ in range(stop)])
    ranks = [batches(dataset, rank, dp, size, micro) for rank in range(dp)]
    for rank in ranks:
        rank.load_state_dict(json.loads(json.dumps(before.state_dict())))
    for _ in range((240 - len(used)) // size):
        used += input_ids_of([next(rank) for rank in ranks])
    assert used == uninterrupted


def test_rows_at_position_one_billion_are_found_in_constant_time() -> None:
    order = MixtureOrder((10**9 + 7, 10**6), ("a", "b"), Shares((3, 7), 1), 1)
    began = time.process_time()
    found = order.indices(10**9, 4)
    assert time.process_time() - began < 0.05
    assert sorted({index < 10**9 + 7 for index in found}) == [False, True]


def test_cursor_of_other_weights_sizes_or_names_is_rejected() -> None:
    before = batches(mixture_of({"a": 0.3, "b": 0.7}))
    next(before)
    state = before.state_dict()
    batches(mixture_of({"b": 7.0, "a": 3.0})).load_state_dict(state)  # the same shares in another order
    renamed = MixtureDataset({"z": rows_of("a", SIZES["a"]), "b": rows_of("b", SIZES["b"])}, {"z": 0.3, "b": 0.7})
    for other in (mixture_of({"a": 0.4, "b": 0.6}), mixture_of({"a": 0.3, "b": 0.7}, a=6), renamed):
        with pytest.raises(ConfigError, match="data: .* samples differ from"):
            batches(other).load_state_dict(state)
        batches(other).load_state_dict(state, ["data.sources"])


# Stages

STAGES = [
    StageConfig(until_step=4, weights={"b": 0.7, "d": 0.3}),
    StageConfig(until_step=9, weights={"a": 0.25, "b": 0.75, "d": 0.0}),
    StageConfig(weights={"a": 1.0, "c": 1.0, "d": 3.0}),
]
STEPS, SIZE = 20, 12
DRAWN = {"a": 0.3, "b": 0.4, "c": 0.1, "d": 0.2}


def staged_reference(lengths: Sequence[int]) -> list[tuple[str, int]]:
    """Return the source and number of each row of `STAGES` of `lengths` rows: the order of each stage alone names the
    source, and each source hands out its rows one after another over the whole run."""
    orders = {name: itertools.count() for name in DRAWN}
    rows = []
    for stage, length in zip(STAGES, lengths, strict=True):
        weights = {name: weight for name, weight in stage.weights.items() if weight}
        for name, _ in reference_order(weights, 3, length):
            rows.append((name, SampleOrder(SIZES[name], key(3, name)).at(next(orders[name]))))
    return rows


def staged(dp: int = 1, size: int = SIZE, stages: Sequence[StageConfig] = tuple(STAGES)) -> list[TrainBatches]:
    """Return the batches of each dp rank of a run with stages."""
    dataset = mixture_of(DRAWN)
    plan = BatchPlan(global_batch_size=size, micro_batch_size=1, dp_size=dp, stages=tuple(stages))
    return [TrainBatches(dataset, replace(plan, dp_rank=rank), seed=3) for rank in range(dp)]


def rows_of_steps(ranks: Sequence[TrainBatches], steps: int) -> list[list[tuple[str, int]]]:
    """Return the source and number of the rows of the next steps."""
    found = [input_ids_of([next(rank) for rank in ranks]) for _ in range(steps)]
    return [[(chr(row[0]), row[1] - 1) for row in rows] for rows in found]


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_stages_draw_the_rows_of_a_reference_and_continue_each_source(dp: int) -> None:
    expected = staged_reference([4 * SIZE, 5 * SIZE, (STEPS - 9) * SIZE])
    found = rows_of_steps(staged(dp), STEPS)
    assert [row for step in found for row in step] == expected
    for name, size in SIZES.items():
        numbers = [number for source, number in expected if source == name]
        passes = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        assert all(len(set(each)) == len(each) for each in passes)  # no row repeats within a pass, across stages too
    for first, stage, steps in ((0, STAGES[0], 4), (4, STAGES[1], 5), (9, STAGES[2], STEPS - 9)):
        rows = [name for step in found[first : first + steps] for name, _ in step]
        for count in range(len(rows) + 1):
            for name in DRAWN:
                share = stage.weights.get(name, 0.0) / sum(stage.weights.values())
                assert abs(rows[:count].count(name) - count * share) < (2 if share else 1e-9)


def test_batches_of_a_run_with_stages_do_not_depend_on_what_follows_or_where_it_resumes() -> None:
    found = rows_of_steps(staged(), STEPS)
    last_first, last_second = (replace(stage, until_step=None) for stage in STAGES[:2])
    assert rows_of_steps(staged(stages=[last_first]), 4) == found[:4]
    assert rows_of_steps(staged(stages=[STAGES[0], last_second]), 9) == found[:9]
    before = staged()[0]
    for step in (17, 3, 4, 9):
        rows = input_ids_of([before.at(step)])
        assert [(chr(row[0]), row[1] - 1) for row in rows] == found[step]
    for step in range(STEPS):
        ranks = staged(dp=2 if step % 2 else 4)
        for rank in ranks:
            rank.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert rows_of_steps(ranks, 1) == found[step : step + 1], step
        before.advance()


@pytest.mark.parametrize("stop", [2, 4, 6, 9, 12])
def test_resume_with_another_batch_size_changes_stages_at_the_same_steps(stop: int) -> None:
    """Also after a second resume; without the stored starts, past stages would be those of the new size."""
    sizes = [SIZE] * stop + [8] * (15 - stop) + [4] * 5
    expected = staged_reference([sum(sizes[:4]), sum(sizes[4:9]), sum(sizes[9:])])
    first, second, third = staged()[0], staged(size=8)[0], staged(size=4)[0]
    found = rows_of_steps([first], stop)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += rows_of_steps([second], 15 - stop)
    third.load_state_dict(json.loads(json.dumps(second.state_dict())))
    counts = [sum(rows) for *_, rows in third.stages(STEPS)]
    assert counts == [sum(sizes[:4]), sum(sizes[4:9]), sum(sizes[9:])]
    found += rows_of_steps([third], 5)
    assert [row for step in found for row in step] == expected


def test_stages_with_equal_weights_continue_each_other_and_a_plain_run_can_get_stages() -> None:
    weights, dataset = {"a": 0.3, "b": 0.7}, mixture_of({"a": 0.3, "b": 0.7})
    plan = BatchPlan(global_batch_size=12, micro_batch_size=1)
    plain = [TrainBatches(dataset, plan, seed=3).global_batch(step) for step in range(9)]
    for stages in (
        [StageConfig(until_step=4), StageConfig(weights=weights)],
        [StageConfig(until_step=4, weights={"a": 3.0, "b": 7.0}), StageConfig()],
    ):
        batches = TrainBatches(dataset, replace(plan, stages=tuple(stages)), seed=3)
        assert [batches.global_batch(step) for step in range(9)] == plain
    before = TrainBatches(dataset, plan, seed=3)
    for _ in range(5):
        before.advance()
    stages = (StageConfig(until_step=5, weights=weights), StageConfig(weights={"b": 1.0}))
    after = TrainBatches(dataset, replace(plan, stages=stages), seed=3)
    uninterrupted = [after.global_batch(step) for step in range(8)]
    after.load_state_dict(before.state_dict())
    assert [uninterrupted[5:8], plain[:5]] == [[after.global_batch(step) for step in range(5, 8)], uninterrupted[:5]]


def test_stages_that_have_begun_cannot_be_changed_by_a_resume() -> None:
    """The order would be rebuilt as if the run had followed the new ones: rows would repeat, and others be skipped."""
    before = staged()[0]
    for _ in range(6):  # within the second stage
        before.advance()
    saved = json.loads(json.dumps(before.state_dict()))
    other = replace(STAGES[0], weights={"b": 1.0, "c": 1.0})
    for stages in ([other, *STAGES[1:]], STAGES[1:], [], [STAGES[0], replace(STAGES[1], until_step=5), *STAGES[2:]]):
        with pytest.raises(ConfigError, match="data.stages: in the 6 steps that are done the run drew .* of a, "):
            staged(stages=stages)[0].load_state_dict(saved)
    later = [*STAGES[:1], replace(STAGES[1], until_step=7), replace(STAGES[2], weights={"a": 1.0})]
    (changed,) = staged(stages=later)
    changed.load_state_dict(saved)
    assert rows_of_steps([changed], 1) == rows_of_steps(staged(), STEPS)[6:7]


def test_rows_are_cut_to_the_length_of_their_stage() -> None:
    examples = [Example(ids := list(range(1, 13)), ids) for _ in range(8)]
    dataset = MixtureDataset({"a": Dataset(examples, TOKENIZER, facts=Facts("a"), seq_len=16)}, {"a": 1.0})
    lengths = [StageConfig(until_step=1, seq_len=16), StageConfig(until_step=2, seq_len=4), StageConfig(seq_len=8)]
    training = TrainingConfig(global_batch_size=2, micro_batch_size=2, seq_len=16, max_steps=4)
    cfg = MixtureDataConfig(sources={"a": TextDataConfig(path="a")}, stages=lengths)
    batches = TrainBatches(dataset, BatchPlan.of(training, cfg, 0, 1), seed=0)
    found = [next(batches)[0] for _ in range(4)]
    assert [batch.shape for batch in found] == [(2, 12), (6, 4), (4, 8), (4, 8)]  # padded to a multiple of 8
    assert [batch.target_count for batch in found] == [22, 22, 22, 22]


# From the config


def source(folder: Path, name: str, count: int, length: int = 4) -> str:
    file = folder / f"{name}.jsonl"
    messages = [{"role": "user", "content": "hm"}, {"role": "assistant", "content": name}]
    texts = ({"prompt": f"{name}{i}", "response": f"{name} {i} " * length, "text": f"{name} {i}\n" * length,
              "messages": [{**messages[0], "content": f"{i}?"}, messages[1]]} for i in range(count))  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return str(file)


def build(cfg: MixtureDataConfig, split: str = "train", seq_len: int = 64) -> MixtureDataset:
    return build_dataset(cfg, TOKENIZER, seq_len=seq_len, split=split)


def three_sources(folder: Path, **values: Any) -> MixtureDataConfig:
    sources: dict[str, DataConfig] = {
        "web": TextDataConfig(path=source(folder, "web", 40, 1), weight=0.5, pack=values.get("pack", False)),
        "maths": SftDataConfig(path=source(folder, "maths", 30), weight=0.3, eval_fraction=0.2),
        "chats": ChatDataConfig(path=source(folder, "chats", 40), weight=0.2, max_samples=25, max_eval_samples=1),
    }
    return MixtureDataConfig(sources=sources, **{"cache": None, **values})


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_samples_of_each_source_equal_those_of_the_source_alone(tmp_path: Path, split: str, pack: bool) -> None:
    cfg = three_sources(tmp_path, pack=pack)
    dataset = build(cfg, split)
    assert list(sources_of(dataset)) == ["chats", "maths", "web"]
    alone = [
        build_dataset(replace(cfg.sources[name], pack=pack, weight=None), TOKENIZER, seq_len=64, split=split)
        for name in sorted(cfg.sources)
    ]
    assert list(dataset) == [row for part in alone for row in part]
    assert all(isinstance(row, PackedRow) == pack for row in dataset)
    assert dataset.prompts == [prompt for part in alone for prompt in part.prompts]
    assert sources_of(alone[0]) == {}
    padded = Padding(token_id=7).of(dataset)
    plan = BatchPlan(global_batch_size=4, micro_batch_size=4)
    (micro, *_) = EvalBatches(dataset, plan)
    if pack:
        assert padded.documents == max(Padding().of(part).documents for part in alone)
        assert micro.document_bounds.shape == (4, padded.documents + 1)
        assert micro.input_ids.shape == (4, 64)
    else:
        assert padded == Padding(token_id=TOKENIZER.pad_token_id)  # the pad token of the dataset has precedence
    expected = [f"{name}: {part.show(i % len(part))}" for i in (0, 1) for name, part in dataset.parts.items()]
    assert [dataset.show(index) for index in range(6)] == expected
    assert dataset[-1] == alone[2][-1]


def test_shares_and_passes_are_reported(tmp_path: Path) -> None:
    cfg = three_sources(tmp_path)
    dataset, plan = build(cfg), BatchPlan(global_batch_size=10, micro_batch_size=1, steps=24)
    used = Counter(index for index in dataset.order(5).indices(0, 240))
    lines = str(plan.facts(dataset)).splitlines()
    begin = 0
    targets = [[sum(label != IGNORED for label in row.labels) for row in part] for part in dataset.parts.values()]
    means = [share * sum(each) / len(each) for share, each in zip((0.2, 0.3, 0.5), targets, strict=True)]
    for line, (name, part), share, mean in zip(lines, dataset.parts.items(), (20, 30, 50), means, strict=True):
        rows = sum(used[index] for index in range(begin, begin + len(part)))
        assert rows == pytest.approx(2.4 * share, abs=2)
        begin += len(part)
        assert line.startswith(f"{name}, {share}.00 % of rows, {100 * mean / sum(means):.2f} % of tokens with loss: ")
        assert f" {len(part):,} samples, " in line
        assert line.endswith(f"{2.4 * share / len(part):.2f} passes in the whole run")
    assert str(build(cfg, "eval").facts).startswith(f"chats: held out of {tmp_path}/chats.jsonl (train): 1 sample, ")
    alone = build_dataset(cfg.sources["maths"], TOKENIZER, seq_len=64, split="train")
    assert str(plan.facts(alone)).endswith("; 10.00 passes in the whole run")


def test_changed_weight_reuses_the_tokenized_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_WORTH_BYTES", 0)
    cfg = three_sources(tmp_path, cache=str(tmp_path / "cache"))
    first = build(cfg)
    entries = sorted((tmp_path / "cache").iterdir())
    assert len(entries) == 3
    cfg.sources["web"].weight = 0.9
    assert build(cfg).fingerprint != first.fingerprint
    assert sorted((tmp_path / "cache").iterdir()) == entries


def test_source_errors_are_reported_with_their_config_keys(tmp_path: Path) -> None:
    empty, chats = tmp_path / "empty.jsonl", tmp_path / "chats.jsonl"
    empty.write_text("\n")
    chats.write_text(json.dumps({"messages": []}) + "\n")
    cfg = MixtureDataConfig(
        sources={
            "one": SftDataConfig(path=source(tmp_path, "one", 3), prompt_column="promt"),
            "two": TextDataConfig(path=str(empty)),
            "three": ChatDataConfig(path=str(chats)),
            "four": SftDataConfig(path=str(tmp_path / "nowhere.jsonl")),
        }
    )
    one, two, four = check_files(cfg)
    assert one.startswith("data.sources.one.prompt_column=promt: ")
    assert two == f"data.sources.two.path={empty}: empty.jsonl has no rows"
    assert four.startswith(f"data.sources.four.path={tmp_path}/nowhere.jsonl: no such file or folder")
    with pytest.raises(ConfigError) as caught:
        build(cfg)
    messages = caught.value.problems
    assert messages[0] == one
    assert "set data.sources.two.path or data.sources.two.split to one with rows" in messages[1]
    assert messages[2].startswith("data.sources.three.bad_rows=refuse: 1 row cannot become a sample; correct these")
    assert "there are no other rows" in messages[2]
    assert messages[3] == four


def test_mixture_without_any_held_out_samples_is_rejected(tmp_path: Path) -> None:
    cfg = three_sources(tmp_path)
    cfg.sources["web"].eval_fraction = 0.0
    assert list(build(cfg, "eval").parts) == ["chats", "maths"]
    assert len(build(cfg).parts["web"].prompts) == 40
    cfg = MixtureDataConfig(sources={"web": cfg.sources["web"]})
    message = r"data.sources: no source has held-out samples; .* set data.sources.NAME.eval"
    with pytest.raises(ConfigError, match=message):
        build(cfg, "eval")


def epoch(size: int, seed: int, number: int = 0) -> list[int]:
    return SampleOrder(size, seed).indices(number * size, size)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**70])
def test_every_epoch_is_a_permutation_for_every_small_size_and_around_the_powers_of_two(seed):
    for size in [*range(1, 300), 4**6, 4**6 - 1, 4**6 + 1, 7473, 2**15, 2**15 + 1]:
        for number in range(3 if size < 300 else 1):
            assert sorted(epoch(size, seed, number)) == list(range(size))


def test_order_of_samples_is_pinned():
    """Pinned on purpose: a cursor must mean the same samples in every version and on every machine."""
    assert epoch(10, 1234) == [6, 4, 5, 0, 1, 3, 2, 8, 9, 7]
    assert SampleOrder(1_000_003, 7).indices(10**12, 3) == [737638, 978200, 905898]


def test_any_position_can_be_computed_alone_and_slices_equal_the_stream():
    order = SampleOrder(97, 5)
    stream = [order.at(position) for position in range(400)]
    assert order.indices(0, 400) == stream
    assert order.indices(90, 14) == stream[90:104]  # across the boundary of epochs 0 and 1
    for number in range(4):
        assert sorted(stream[number * 97 : (number + 1) * 97]) == list(range(97))


def test_orders_of_different_seeds_and_epochs_differ():
    size = 1000
    orders = [epoch(size, seed, number) for seed in range(5) for number in range(4)]
    for a, b in itertools.combinations(orders, 2):
        # The number of positions at which two random permutations agree is Poisson(1)-distributed.
        assert sum(x == y for x, y in zip(a, b, strict=True)) < 10


def test_all_orders_of_four_samples_are_equally_likely():
    seeds = 6_000
    counts = Counter(tuple(epoch(4, seed)) for seed in range(seeds))
    expected = seeds / math.factorial(4)
    chi_square = sum((counts[order] - expected) ** 2 / expected for order in itertools.permutations(range(4)))
    assert chi_square < 52.6  # 23 degrees of freedom: exceeded by chance once in 2,500


@pytest.mark.parametrize("size", [10, 64, 100])
def test_every_sample_is_equally_likely_at_every_position(size):
    seeds = 2000
    counts = Counter(itertools.chain.from_iterable(enumerate(epoch(size, seed)) for seed in range(seeds)))
    expected = seeds / size
    chi_square = sum(
        (counts[position, sample] - expected) ** 2 / expected for position in range(size) for sample in range(size)
    )
    degrees_of_freedom = (size - 1) ** 2
    assert abs(chi_square - degrees_of_freedom) < 5 * math.sqrt(2 * degrees_of_freedom)


@pytest.mark.parametrize("size", [1000, 7473, 2**16])
def test_order_has_no_serial_correlation_or_trend(size):
    order = epoch(size, 11)
    mean = (size - 1) / 2
    variance = (size * size - 1) / 12
    lagged = sum((a - mean) * (b - mean) for a, b in itertools.pairwise(order)) / (size - 1) / variance
    with_position = sum((position - mean) * (sample - mean) for position, sample in enumerate(order)) / size / variance
    ascents = sum(a < b for a, b in itertools.pairwise(order))
    assert abs(lagged) < 5 / math.sqrt(size)
    assert abs(with_position) < 5 / math.sqrt(size)
    assert abs(ascents - (size - 1) / 2) < 5 * math.sqrt((size + 1) / 12)


@pytest.mark.parametrize("block", [1, 2, 7, 64])
@pytest.mark.parametrize("window", [1, 3, 50])
def test_every_epoch_of_a_block_order_is_a_permutation(block, window):
    for size in [*range(1, 20), 63, 64, 65, 127, 500]:
        order = BlockOrder(size, 3, block, window)
        for number in range(2):
            assert sorted(order.indices(number * size, size)) == list(range(size))


def test_positions_of_a_window_are_those_of_its_blocks():
    """With 1,000 samples in blocks of 8: any 5 x 8 positions of a window are 5 whole blocks, in mixed order."""
    order = BlockOrder(1000, 7, 8, 5)
    epochs = [order.indices(number * 1000, 1000) for number in range(2)]
    for positions in epochs:
        windows = [positions[start : start + 40] for start in range(0, 1000, 40)]
        blocks = [Counter(index // 8 for index in window) for window in windows]
        assert all(set(counts.values()) == {8} for counts in blocks)
        assert sorted(number for counts in blocks for number in counts) == list(range(125))
        assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(positions)) < 100  # 40 x 25 neighbors, mostly mixed
        assert [number for counts in blocks for number in sorted(counts)] != list(range(125))
    assert sum(a == b for a, b in zip(*epochs, strict=True)) < 10


def test_the_shorter_last_block_is_anywhere():
    places = {BlockOrder(65, seed, 8, 1).indices(0, 65).index(64) // 8 for seed in range(100)}
    assert places == set(range(9))


def test_blocks_of_one_sample_are_the_sample_order_and_block_orders_are_pinned():
    """Pinned on purpose: a cursor must mean the same samples in every version and on every machine."""
    assert BlockOrder(97, 5, 1, 9).indices(50, 97) == SampleOrder(97, 5).indices(50, 97)
    assert BlockOrder(10, 1234, 2, 2).indices(0, 10) == [7, 6, 9, 8, 0, 5, 4, 1, 3, 2]
    assert BlockOrder(10**12 + 7, 7, 256, 256).indices(10**12, 3) == [854653503634, 854653503558, 69204978134]


def test_block_order_of_a_trillion_samples_takes_microseconds_per_position():
    order = BlockOrder(10**12 + 7, 1, 256, 256)
    began = time.process_time()
    order.indices(10**12, 100)
    assert time.process_time() - began < 0.1  # 1 ms each; measured: 0.05 ms


def test_an_empty_dataset_has_no_order():
    for order in (lambda: SampleOrder(0, 1), lambda: BlockOrder(0, 1, 8, 8)):
        with pytest.raises(ConfigError, match="a dataset of 0 samples cannot be shuffled"):
            order()


def test_objects_of_a_source_need_a_cache_folder() -> None:
    message = "data.cache=null: objects of s3://b/x.jsonl, which data.sources.a reads, are copied to it; set"
    with pytest.raises(ConfigError, match=message):
        MixtureDataConfig(sources={"a": TextDataConfig(path="s3://b/x.jsonl")}, cache=None)
