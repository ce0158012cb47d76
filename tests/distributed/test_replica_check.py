"""Flipped bits in one rank's weights, reduced gradients or optimizer state are found, and the rank is named.

The reference is SHA-256 of each rank's bytes: the comparison must raise exactly if two ranks hold different bits of
the same data, and which ranks hold the same data is read off the bytes of undisturbed runs.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from components.checkpoint.replica_check import ReplicaCheck
from components.config.schema.parallelism import ParallelismConfig, Strategy
from components.json_collectives import all_gather_json
from components.models.weights.shards import local_part
from components.protocol.failures import CorruptRank
from components.training.prepared import WeightAverage
from components.watch.faults import _STEP_POINTS, _flip_random_bit
from tests.distributed.grid import cell
from tests.distributed.tiny_runs import LAYERS, TinyRun, build, start
from tests.harness import run_ranks
from tests.suites import TORTURE

FLIPS = 100 if TORTURE else 6
"""Flipped bits on each mesh."""
HSDP = {"dp_replicate": 2, "dp_shard": 2}
SHAPES: dict[str, tuple[int, dict[str, int]]] = {
    "ddp": (4, {"dp_replicate": 4}),
    "replicas tp": (4, {"dp_replicate": 2, "dp_shard": 1, "tp": 2}),
    "fsdp2": (4, {"dp_shard": 4}),
    "fsdp2 cp": (4, {"dp_shard": 2, "cp": 2}),
    "fsdp2 ep": (4, {"dp_shard": 2, "ep": 2}),
    "fsdp2 tp": (4, {"dp_shard": 2, "tp": 2}),
    "hsdp": (4, HSDP),
    "pp hsdp": (4, {"pp": 2, "dp_replicate": 2, "dp_shard": 1}),
    "tp": (4, {"dp_shard": 1, "tp": 4}),
    "tp pair": (2, {"dp_shard": 1, "tp": 2}),
    "hsdp tp": (8, {**HSDP, "tp": 2}),
    "hsdp cp": (8, {**HSDP, "cp": 2}),
    "hsdp ep": (8, {**HSDP, "ep": 2}),
    "pp fsdp2 tp": (8, {"pp": 2, "dp_shard": 2, "tp": 2}),
    "wide hsdp": (8, {"dp_replicate": 4, "dp_shard": 2}),
}
"""Number of ranks and degrees of each mesh; without dp_shard the strategy is ddp."""
COMPARED = [*SHAPES] if TORTURE else ["hsdp", "tp pair"]
NAMES_THE_RANK = {"ddp": True, "hsdp": False} | (
    {"tp pair": False, "tp": True, "fsdp2 tp": False, "replicas tp": None, "wide hsdp": True, "hsdp tp": None}
    if TORTURE
    else {}
)
"""Mesh with flipped bits -> whether a majority of the replicas names the rank; None: of some tensors only."""


def state_of(run: TinyRun) -> dict[str, torch.Tensor]:
    """Return this rank's shards of the weights and the optimizer state by name."""
    held = {}
    for name, parameter in run.model.named_parameters():
        held[name] = parameter.detach()
        held |= {f"{name} {quantity}": value for quantity, value in run.optimizer.state[parameter].items()}
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in held.items()}


def hashes_of(run: TinyRun) -> list[dict[str, str]]:
    """Return the SHA-256 of each tensor's bytes on each rank."""
    content = {name: each.contiguous().view(-1).view(torch.uint8) for name, each in state_of(run).items()}
    return all_gather_json({name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in content.items()})


def replicas_of(run: TinyRun) -> dict[str, list[list[int]]]:
    """Return the sets of several ranks that hold the same weights, by name: those with equal bytes."""
    sets: dict[str, dict[str, list[int]]] = {}
    for rank, hashes in enumerate(hashes_of(run)):
        for name, value in hashes.items():
            sets.setdefault(name, {}).setdefault(value, []).append(rank)
    weights = {name: list(by_hash.values()) for name, by_hash in sets.items() if " " not in name}  # no optimizer state
    return {name: [ranks for ranks in found if len(ranks) > 1] for name, found in weights.items()}


def started(name: str) -> tuple[TinyRun, ReplicaCheck]:
    world, degrees = SHAPES[name]
    model = "qwen3_moe" if "ep" in degrees else "llama"
    strategy = Strategy.fsdp2 if "dp_shard" in degrees else Strategy.ddp
    layout = ParallelismConfig(strategy=strategy, **{"dp_replicate": 1, "dp_shard": 1} | degrees)
    run = start(cell(model, world, layout, LAYERS.get(model, 2)), build(model))
    run.train(3)
    return run, ReplicaCheck(run.mesh, run.model, run.optimizer, every=1)


@pytest.mark.parametrize("name", COMPARED)
def test_the_ranks_that_are_compared_are_those_with_equal_bytes(name: str) -> None:
    """Neither a rank with other data nor a missing replica; and an undisturbed run is never accused."""

    def body(rank: int) -> tuple[dict[str, list[list[int]]], dict[str, str], str]:
        run, check = started(name)
        for step in range(4, 8):
            check.compare(step)
            run.train(1)
        prefix = "model/"
        compared = {
            each.removeprefix(prefix): identity
            for identity, tensors in check._replicated().items()
            for each in tensors
            if each.startswith(prefix)
        }
        return replicas_of(run), compared, check.note

    results = run_ranks(SHAPES[name][0], body)
    expected = results[0][0]
    found: dict[str, dict[str, list[int]]] = {each: {} for each in expected}
    for rank, (_, compared, note) in enumerate(results):
        for each, identity in compared.items():
            found[each].setdefault(identity, []).append(rank)
        assert ("no rank holds a replica" in note) == (not compared)
    assert {each: sorted(sets.values()) for each, sets in found.items()} == {
        each: sorted(sets) for each, sets in expected.items()
    }
    assert any(expected.values()) == (name not in ("fsdp2", "fsdp2 cp", "fsdp2 ep"))


def test_a_flipped_bit_of_the_averaged_weights_is_found() -> None:
    def body(rank: int) -> str:
        run, _ = started("tp pair")
        average = WeightAverage(run.model, 0.9)
        check = ReplicaCheck(run.mesh, run.model, run.optimizer, every=1, average=average.tensors)
        check.compare(4)
        norm = next(each for name, each in average.tensors.items() if name.endswith("norm.weight"))
        if rank == 1:
            local_part(norm).view(torch.int32)[0] ^= 1
        with pytest.raises(CorruptRank) as caught:
            check.compare(5)
        return str(caught.value)

    assert all("average/" in message for message in run_ranks(2, body))


def is_replicated(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor) or any(
        each.is_replicate() and size > 1 for each, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    )


def plant(run: TinyRun, point: str, seed: int) -> None:
    """Flip a bit of a replicated tensor in this rank's next optimizer step, once."""
    parameters = [each for group in run.optimizer.param_groups for each in group["params"] if is_replicated(each)]

    def shards() -> list[torch.Tensor]:
        if point == "reduced_gradients":
            tensors = [parameter.grad for parameter in parameters]
        elif point == "weights":
            tensors = [parameter.detach() for parameter in parameters]
        else:
            tensors = [value for parameter in parameters for value in run.optimizer.state[parameter].values()]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
        return [each for each in local if each.numel()]

    def flip(*_: Any) -> None:
        hook.remove()
        _flip_random_bit(shards(), seed)

    before = point == "reduced_gradients"
    register = run.optimizer.register_step_pre_hook if before else run.optimizer.register_step_post_hook
    hook = register(flip)


def different_data(run: TinyRun, replicas: dict[str, list[list[int]]]) -> bool:
    """Return whether two replicas have different bytes, by the sets of `replicas_of` an undisturbed run."""
    hashes = hashes_of(run)
    return any(
        len({hashes[rank][name] for rank in ranks}) > 1
        for parameter, sets in replicas.items()
        for ranks in sets
        for name in hashes[ranks[0]]
        if name.split(" ")[0] == parameter
    )


def message_of(check: ReplicaCheck, step: int) -> str:
    """Return the message of the error that a comparison raises; empty if it raises none."""
    try:
        check.compare(step)
    except CorruptRank as error:
        return str(error)
    return ""


def check_accusation(message: str, victim: int, named: bool | None) -> None:
    """Check that a message names the victim alone, or says that it is one of two ranks."""
    alone = message.startswith(f"rank {victim} on host ") and "a majority of the replicas agrees" in message
    one_of_two = message.startswith("one of 2 ranks computes wrong numbers") and "no majority shows which" in message
    assert alone if named else one_of_two or (alone and named is None), (victim, message)
    assert f"rank {victim} on host " in message


@pytest.mark.parametrize("name", NAMES_THE_RANK)
def test_flipped_bits_are_found_at_the_next_comparison(name: str) -> None:
    """One to three steps after the flip. Rounding may have removed a flipped low bit by then; nothing is found then."""
    ranks = SHAPES[name][0]

    def body(rank: int) -> Counter[str]:
        run, check = started(name)
        replicas = replicas_of(run)
        draw, counts = random.Random(17), Counter[str]()
        for number in range(FLIPS):
            point, victim, steps = _STEP_POINTS[number % 3], draw.randrange(ranks), draw.choice((1, 1, 2, 3))
            saved = {each: tensor.clone() for each, tensor in state_of(run).items()}
            if rank == victim:
                plant(run, point, seed=number)
            run.train(steps)
            differs = different_data(run, replicas)
            message = message_of(check, number)
            assert bool(message) == differs, (number, point, victim, message)
            counts[f"{point} {'found' if differs else 'vanished'}"] += 1
            if message:
                check_accusation(message, victim, NAMES_THE_RANK[name])
            for each, tensor in state_of(run).items():
                tensor.copy_(saved[each])
            assert not message_of(check, number)
        return counts

    results = run_ranks(ranks, body, timeout=1800)
    assert all(counts == results[0] for counts in results)
    print(f"{name}: {dict(sorted(results[0].items()))}")
    assert results[0]["weights found"] >= FLIPS // 3 * 0.8
    assert results[0].total() == FLIPS
