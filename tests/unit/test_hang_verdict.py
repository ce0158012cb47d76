"""Ranks that hang or compute wrong numbers: who is blamed, and digests of their weights."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from components.checkpoint.replica_check import _ROW_WORDS, Suspicion, _digest_each, _find_corrupt
from components.checkpoint.tensors import Tensors
from components.config.schema.training import TrainingConfig
from components.protocol.errors import ConfigError
from components.training import NonFiniteGradients, StepMetrics, TrainState
from components.watch.faults import VARIABLE, _flip_random_bit, arm_bit_flips, fault_point
from components.watch.heartbeat import (
    _FIRST_BEAT_SECONDS,
    _MAX_NAMED_RANKS,
    BeatTracker,
    FlightRecorder,
    Post,
    _late_ranks,
    blame,
)
from components.watch.watchdog import _SuspensionDetector


def post(
    beat: int = 1, phase: str = "in step 4", *, host: str = "n2", finished: bool = False, **collectives: int
) -> Post:
    return Post(beat, phase, "forward (model.py:7)", host, collectives, finished)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that the monotonic clock returns; tests set it."""
    time = [100.0]
    monkeypatch.setattr("components.watch.heartbeat.time.monotonic", lambda: time[0])
    return time


def test_rank_without_a_new_heartbeat_is_silent_after_the_timeout(now: list[float]) -> None:
    tracker = BeatTracker()
    assert tracker.seconds_tracked < 0
    first = {0: post(3), 1: post(3), 2: post(3)}
    tracker.update(first, 3)
    now[0] += 4.0
    second = {0: post(9), 1: post(3), 2: post(3, finished=True)}
    tracker.update(second, 3)
    assert tracker.seconds_tracked == 4.0
    assert tracker.silent(4.0, second) == [1]
    assert tracker.silent(4.5, second) == []
    now[0] += 4.0
    assert tracker.silent(4.0, second) == [0, 1]
    tracker.update({0: post(9), 1: post(4), 2: post(3, finished=True)}, 3)
    assert tracker.silent(4.0, second) == [0]


def test_rank_without_a_first_heartbeat_is_silent_only_after_startup_time(now: list[float]) -> None:
    tracker = BeatTracker()
    tracker.update({0: post(3)}, 2)
    now[0] += _FIRST_BEAT_SECONDS - 1
    tracker.update({0: post(5)}, 2)
    assert tracker.silent(4.0, {0: post(5)}) == []
    now[0] += 1.0
    tracker.update({0: post(6)}, 2)
    assert tracker.silent(4.0, {0: post(6)}) == [1]


def test_rank_that_started_fewer_collectives_of_a_group_is_late() -> None:
    assert _late_ranks({0: post(world=7), 1: post(world=6), 2: post(world=7)}) == [1]
    assert _late_ranks({0: post(world=7), 1: post(world=7)}) == []
    # Collectives of groups that a rank is not a member of do not count against it.
    assert _late_ranks({0: post(world=7, a=9), 1: post(world=7, a=9), 2: post(world=7, b=2)}) == []


def test_rank_that_waits_for_another_rank_is_not_blamed() -> None:
    """Rank 2 waits for rank 3 in group b, so it cannot join the collective of group a in which rank 0 waits."""
    posts = {0: post(a=5, c=1), 1: post(c=1), 2: post(a=4, b=8), 3: post(b=7)}
    assert _late_ranks(posts) == [3]
    # In a cycle every rank waits for another one, so all late ranks are returned.
    assert _late_ranks({0: post(a=5, b=7), 1: post(a=4, b=8)}) == [0, 1]


def test_silent_ranks_are_blamed_first_then_late_ranks_then_all_are_listed() -> None:
    late = {0: post(world=7), 1: post(phase="in step 3", world=6)}
    assert blame([1], late).message == "rank 1 on host n2 is missing (last seen in step 3)"
    assert blame([1], {0: post(world=7)}).message == "rank 1 is missing (never seen)"
    assert blame([], late).message == (
        "rank 1 on host n2 has not joined a collective that others wait in: it is in step 3, at forward (model.py:7)"
    )
    message = blame([], {0: post(world=7), 1: post(world=7)}).message
    common = "every rank posts heartbeats and none is behind the others"
    assert message.startswith(f"{common}: rank 0 on host n2 is in step 4, at forward")
    assert "rank 1 on host n2 is in step 4" in message


def on_device(host_counts: int = 9, **groups: tuple[int, int, int]) -> Post:
    """Return a post with (enqueued, started, completed) of process groups, in which the host has started more."""
    devices = {group: list(counts) for group, counts in groups.items()}
    return replace(post(**dict.fromkeys(groups, host_counts)), devices=devices)


def test_rank_is_blamed_by_its_device_when_all_hosts_have_enqueued_the_same() -> None:
    """Without the recorder, the counts of the hosts are equal: none is behind."""
    posts = {0: on_device(a=(8, -1, 6)), 1: on_device(a=(8, -1, 5)), 2: on_device(a=(8, -1, 6))}
    verdict = blame([], posts)
    assert verdict.message == (
        "rank 1 on host n2 has enqueued collective 6 of process group a on its device, but not completed it as others "
        "have: it is in step 4, at forward (model.py:7)"
    )
    assert verdict.hosts == ("n2",)
    with_start_events = {0: on_device(a=(8, 6, 5)), 1: on_device(a=(8, 5, 5)), 2: on_device(a=(8, 6, 5))}
    assert "rank 1 on host n2 has enqueued collective 6" in blame([], with_start_events).message
    assert "but not started it as others have" in blame([], with_start_events).message
    hosts_only = {rank: replace(each, devices={}) for rank, each in posts.items()}
    assert "none is behind the others" in blame([], hosts_only).message


def test_host_that_has_not_enqueued_the_pending_collective_has_not_joined() -> None:
    posts = {0: on_device(a=(6, -1, 5)), 1: on_device(a=(5, -1, 5), b=(2, -1, 2)), 2: on_device(b=(2, -1, 2))}
    assert blame([], posts).message.startswith("rank 1 on host n2 has not joined a collective that others wait in: ")


def test_host_that_ran_less_far_ahead_is_not_blamed() -> None:
    """The device of no rank completes collective 6, which all have enqueued, whatever has been enqueued after it."""
    posts = {0: on_device(9, a=(9, -1, 5), b=(3, -1, 3)), 1: on_device(7, a=(7, -1, 5)), 2: on_device(b=(3, -1, 3))}
    assert _late_ranks(posts) == []
    verdict = blame([], posts)
    assert verdict.hosts == ()
    assert verdict.message.startswith(
        "no rank is behind the others, but collective 6 of process group a is enqueued on the devices of all its 2 "
        "ranks (0, 1) and completes on none: a device or link of theirs is stuck: rank 0 on host n2 is in step 4, at "
    )
    assert "group b" not in verdict.message


def test_device_that_waits_in_another_group_is_not_blamed() -> None:
    """Rank 1 has not started collective 6 of group a because rank 2 has not started collective 3 of group b."""
    posts = {0: on_device(a=(8, 6, 5)), 1: on_device(a=(8, 5, 5), b=(4, 3, 2)), 2: on_device(b=(4, 2, 2))}
    assert blame([], posts).message.startswith("rank 2 on host n2 has enqueued collective 3 of process group b")


def test_groups_without_the_recorder_are_judged_by_the_hosts() -> None:
    posts = {rank: replace(on_device(a=(5, -1, 5)), collectives={"a": 5, "gloo": 4 - rank}) for rank in (0, 1)}
    assert _late_ranks(posts) == [1]
    assert blame([], posts).message.startswith("rank 1 on host n2 has not joined")


def dumped(counts: dict[str, tuple[int, int, int]], groups: dict[str, str], *, with_entries: bool) -> str:
    """Return a dump as torch 2.13 writes it (c10d/FlightRecorderDetail.hpp), with the keys that are read and others."""
    entry = {"collective_seq_id": 1, "is_p2p": False, "p2p_seq_id": 0, "profiling_name": "nccl:all_reduce"}
    entries = [
        {
            **entry,
            "pg_id": int(number),
            "process_group": [name, f"mesh_{name}"],
            "record_id": index,
            "state": "completed",
        }
        for index, (number, name) in enumerate(groups.items())
    ]
    keys = [f"last_{state}_collective" for state in ("enqueued", "started", "completed")]
    status = {number: dict(zip(keys, map(str, each), strict=True)) for number, each in counts.items()}
    dump: dict[str, Any] = {"version": "2.10", "comm_lib_version": "2.28.9", "nccl_comm_state": {}, "pg_status": status}
    return json.dumps(dump | ({"entries": entries} if with_entries and entries else {}))


def test_recorder_reads_counts_without_the_entries_that_query_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are read once for each new group, to find its name: the recorder's numbers differ between ranks."""
    assert FlightRecorder().progress() == {}  # without NCCL
    counts, groups, queries = {}, {}, []

    def dump(includeCollectives: bool, onlyActive: bool) -> str:
        assert not onlyActive
        queries.append(includeCollectives)
        return dumped(counts, groups, with_entries=includeCollectives)

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    recorder = FlightRecorder()
    assert recorder.progress() == {}
    counts |= {"0": (7, -1, 6), "3": (2, 1, 1)}
    groups |= {"0": "0", "3": "5"}
    assert recorder.progress() == {"0": [7, -1, 6], "5": [2, 1, 1]}
    assert queries == [False, False, True]
    counts |= {"0": (9, -1, 8), "4": (1, -1, 1)}  # the entries of group 4 have been overwritten
    for _ in range(2):
        assert recorder.progress() == {"0": [9, -1, 8], "5": [2, 1, 1]}
    assert queries == [False, False, True, False, True, False]


def test_verdict_has_the_hosts_of_the_blamed_ranks_that_were_seen() -> None:
    """All of them, also beyond the ranks that the message names; none if no rank is to blame."""
    posts = {rank: post(host=f"n{rank}", world=7 - rank % 2) for rank in range(4)}
    assert blame([2], posts).hosts == ("n2",)
    assert blame([2, 9], posts).hosts == ("n2",)
    assert blame([], posts).hosts == ("n1", "n3")
    assert blame([], {rank: posts[rank] for rank in (0, 2)}).hosts == ()
    many = {rank: post(host=f"n{rank:02}") for rank in range(2 * _MAX_NAMED_RANKS)}
    assert len(blame([*many], many).hosts) == 2 * _MAX_NAMED_RANKS


def test_blame_message_names_a_limited_number_of_ranks() -> None:
    message = blame(list(range(3 * _MAX_NAMED_RANKS)), {}).message
    assert message.count("never seen") == _MAX_NAMED_RANKS
    assert message.endswith(f"; and {2 * _MAX_NAMED_RANKS} ranks more")


def test_suspension_of_the_process_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("components.watch.watchdog.time.monotonic", lambda: now[0])
    detector = _SuspensionDetector(threshold=2.0)
    slept = []
    for elapsed in (1.0, 1.5, 60.0, 1.0):
        now[0] += elapsed
        slept.append(detector.slept())
    assert slept == [0.0, 0.0, 60.0, 0.0]


def metrics(step: int, *, skipped: bool) -> StepMetrics:
    return StepMetrics(step, 1.0, 1.0, 10, 0.1, skipped, preempt=False, interrupt=False, must_save=False)


def first_aborted(state: TrainState, policy: TrainingConfig, skips: str) -> int | None:
    """Return the step at which the run is aborted, or None. An `x` in `skips` is a skipped step."""
    for step, letter in enumerate(skips, start=state.step + 1):
        state.step = step
        state.record(metrics(step, skipped=letter == "x"))
        try:
            state.raise_if_diverged(metrics(step, skipped=letter == "x"), policy)
        except NonFiniteGradients:
            return step
    return None


@pytest.mark.parametrize(
    ("stop_after", "skips", "aborted_at"),
    [(3, "xx.xx.xxx.", 9), (3, "xx.xx.xx.", None), (1, "..x", 3), (0, "xxxxxxxxxxxxxxxxxxxx", None)],
)
def test_only_consecutive_skipped_steps_abort_the_run(stop_after: int, skips: str, aborted_at: int | None) -> None:
    assert first_aborted(TrainState(), TrainingConfig(stop_after_skipped=stop_after), skips) == aborted_at


def test_message_names_the_setting_that_skips_spikes() -> None:
    policy, state = TrainingConfig(stop_after_skipped=2, skip_spikes=6.0), TrainState(step=9, skipped_in_a_row=2)
    with pytest.raises(NonFiniteGradients, match=r"not finite or were spikes \(training\.skip_spikes=6\), and their"):
        state.raise_if_diverged(replace(metrics(9, skipped=True), is_spike=True), policy)


@pytest.mark.parametrize(("skips", "trained"), [("xxx", False), ("xx.", True), (".xx", True), ("", True)])
def test_run_without_a_finite_step_has_failed(skips: str, trained: bool) -> None:
    state = TrainState()
    assert first_aborted(state, TrainingConfig(stop_after_skipped=0), skips) is None
    state = TrainState.from_dict(state.to_dict())
    if trained:
        state.raise_if_none_finite()
    else:
        with pytest.raises(NonFiniteGradients, match=r"gradients of all 3 steps were not finite .*model\.path"):
            state.raise_if_none_finite()


def test_skipped_step_count_continues_after_resume() -> None:
    policy, state = TrainingConfig(stop_after_skipped=3), TrainState()
    assert first_aborted(state, policy, ".xx") is None
    assert first_aborted(TrainState.from_dict(state.to_dict()), policy, "xxx") == 4
    # A checkpoint saved before the count was part of the state.
    old = {name: value for name, value in state.to_dict().items() if name != "skipped_in_a_row"}
    assert first_aborted(TrainState.from_dict(old), policy, "xxx") == 6


BIG = 8 * _ROW_WORDS


def tensors() -> Tensors:
    """Tensors of all kinds: several rows, a remainder, odd numbers of bytes, a scalar, not contiguous, misaligned."""
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(3 * _ROW_WORDS, 10, generator=generator)
    return {
        "several rows": numbers,
        "remainder": torch.randn(BIG + 5, generator=generator).bfloat16(),
        "transposed": torch.randn(7, 11, generator=generator).t(),
        "misaligned": torch.randn(BIG + 1, generator=generator)[1:],
        "bytes": torch.randint(0, 255, (13,), generator=generator, dtype=torch.uint8),
        "scalar": torch.tensor(5.0),
        "empty": torch.zeros(0, 4),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def digest(held: Tensors) -> list[int]:
    return _digest_each({"": held})[""]


@contextmanager
def flipped(tensor: torch.Tensor, seed: int) -> Iterator[None]:
    _flip_random_bit([tensor], seed)
    yield
    _flip_random_bit([tensor], seed)


def test_every_flipped_bit_changes_the_digest() -> None:
    held = tensors()
    expected = digest(held)
    for name, tensor in held.items():
        for seed in range(12 if tensor.numel() else 0):
            with flipped(tensor, seed):
                assert digest(held) != expected, (name, seed)
    assert digest(held) == expected


def test_changes_that_cancel_in_sums_and_swapped_values_change_the_digest() -> None:
    words = torch.arange(4 * _ROW_WORDS)
    expected = digest({"": words})
    for first, second in [(5, 9), (5, 5 + _ROW_WORDS), (5, 9 + _ROW_WORDS)]:
        changed = words.clone()
        changed[first], changed[second] = changed[first] + 8, changed[second] - 8
        assert digest({"": changed}) != expected
        changed = words.clone()
        changed[[first, second]] = changed[[second, first]]
        assert digest({"": changed}) != expected
    assert digest({"a": words[:_ROW_WORDS], "b": words[_ROW_WORDS:]}) != digest({"a": words[_ROW_WORDS:], "b": words})


def test_digest_does_not_depend_on_the_number_of_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = digest(tensors())
        torch.set_num_threads(4)
        assert digest(tensors()) == expected
    finally:
        torch.set_num_threads(threads)


def test_a_flip_changes_one_bit() -> None:
    generator = random.Random(1)
    for name, tensor in tensors().items():
        if tensor.numel():
            before = tensor.clone()
            _flip_random_bit([tensor], generator.randrange(2**30))
            old, new = (each.contiguous().view(-1).view(torch.uint8) for each in (before, tensor))
            changed = (old ^ new)[old != new].tolist()
            assert [byte.bit_count() for byte in changed] == [1], name


ACCUSED = {
    "equal": ([{"a": [1]}, {"a": [1]}, {"b": [2]}], None),
    "majority": ([{"a": [1]}, {"a": [2]}, {"a": [1]}], Suspicion([1], [])),
    "two replicas": ([{"a": [1]}, {"a": [2]}, {"b": [3]}, {"b": [3]}], Suspicion([], [0, 1])),
    "half": ([{"a": [1]}, {"a": [1]}, {"a": [2]}, {"a": [2]}], Suspicion([], [0, 1, 2, 3])),
    "three of five differ from one another": ([{"a": [each]} for each in (1, 1, 2, 3, 4)], Suspicion([], [*range(5)])),
    "two of five": ([{"a": [each]} for each in (1, 1, 1, 2, 3)], Suspicion([3, 4], [])),
    "a pair that a majority elsewhere explains": (
        [{"a": [1], "b": [1]}, {"a": [2], "b": [2]}, {"c": [9], "b": [1]}, {"c": [9], "b": [1]}],
        Suspicion([1], []),
    ),
}
"""Name -> (digests of each rank, accusation)."""


@pytest.mark.parametrize("name", ACCUSED)
def test_majority_names_the_ranks_that_differ(name: str) -> None:
    by_rank, expected = ACCUSED[name]
    assert _find_corrupt(by_rank) == expected


def test_flips_are_planted_at_the_step_and_rank_that_the_variable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "flip=5:weights:rank0:2,flip=6:reduced_gradients:rank1:1")
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    arm_bit_flips([optimizer])
    different = []
    for _ in range(3):
        weight.grad = torch.ones(8)
        optimizer.step()
        different.append(int((weight != 1).sum()))
    assert different == [0, 1, 1]


@pytest.mark.parametrize("fault", ["flip=5:after_shards", "flip:weights", "flip=x:weights", "kill:weight"])
def test_a_wrong_flip_is_rejected(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setenv(VARIABLE, fault)
    with pytest.raises(ConfigError, match="flip=SEED"):
        fault_point("weights")
