"""Buffers for copies of a rank's tensors: cut from few allocations of pinned memory, without overlap and waste."""

from __future__ import annotations

import random

import pytest
import torch

from components.checkpoint.saver import _ALIGNMENT, _PINNED_BYTES, _buffers_in_few_allocations, _pinned_allocations


def llama_8b(ranks: int) -> dict[str, int]:
    """Return the bytes of a rank's shards of parameters and AdamW's state in float32."""
    hidden, vocabulary, mlp, kv = 4096, 128_256, 14_336, 1024
    matrices = {"q": hidden, "k": kv, "v": kv, "o": hidden, "gate": mlp, "up": mlp, "down": mlp, "norm": 1}
    sizes = {f"{layer}.{name}": hidden * rows for layer in range(32) for name, rows in matrices.items()}
    sizes |= {"embedding": vocabulary * hidden, "head": vocabulary * hidden}
    return {f"{state}.{name}": 4 * size // ranks for state in ("p", "m", "v") for name, size in sizes.items()}


@pytest.mark.parametrize("ranks", [1, 8, 64])
def test_allocations_of_an_8b_model_take_at_most_one_percent_more_than_its_tensors(ranks: int) -> None:
    sizes = llama_8b(ranks)
    one_each = sum(1 << (size - 1).bit_length() for size in sizes.values())
    allocated = sum(allocation for allocation, _ in _pinned_allocations(sizes))
    assert sum(sizes.values()) <= allocated < 1.01 * sum(sizes.values()) < one_each


@pytest.mark.parametrize("seed", range(20))
def test_buffers_do_not_overlap_and_every_one_fits(seed: int) -> None:
    draw = random.Random(seed)
    sizes = {str(index): draw.choice([0, 1, 4, 2 ** draw.randrange(33), draw.randrange(2**34)]) for index in range(40)}
    found = _pinned_allocations(sizes)
    assert sorted(name for _, offsets in found for name in offsets) == sorted(sizes)
    for allocation, offsets in found:
        assert allocation & (allocation - 1) == 0
        assert allocation <= max(_PINNED_BYTES, *(2 * sizes[name] for name in offsets))
        end = 0
        for name, offset in sorted(offsets.items(), key=lambda item: (item[1], sizes[item[0]])):
            assert offset % _ALIGNMENT == 0
            assert offset >= end
            end = offset + sizes[name]
        assert end <= allocation


def test_buffers_have_the_shapes_and_dtypes_of_the_tensors_and_keep_their_values() -> None:
    tensors = {
        "matrix": torch.arange(12.0).view(3, 4).t(),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "step": torch.tensor(7, dtype=torch.int64),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
    }
    buffers = _buffers_in_few_allocations(tensors, pin_memory=False)
    for name, tensor in tensors.items():
        assert buffers[name].shape == tensor.shape
        buffers[name].copy_(tensor)
    for name, tensor in tensors.items():
        torch.testing.assert_close(buffers[name], tensor, rtol=0, atol=0)
        assert buffers[name].is_contiguous()
    assert len({buffer.untyped_storage().data_ptr() for buffer in buffers.values() if buffer.numel()}) == 1
