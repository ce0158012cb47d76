"""The sample order: a well-shuffled permutation for every size, and a pure function of (seed, position)."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter

import pytest

from components.data.packing import BlockOrder, SampleOrder
from components.protocol.errors import ConfigError


def epoch(size: int, seed: int, number: int = 0) -> list[int]:
    return SampleOrder(size, seed).indices(number * size, size)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**70])
def test_every_epoch_is_a_permutation_for_every_small_size_and_around_the_powers_of_two(seed):
    for size in [*range(1, 300), 4**6, 4**6 - 1, 4**6 + 1, 7473, 2**15, 2**15 + 1]:
        for number in range(3 if size < 300 else 1):
            assert sorted(epoch(size, seed, number)) == list(range(size))


def test_order_is_pinned():
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
