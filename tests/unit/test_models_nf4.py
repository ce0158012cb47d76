"""Weights in 4 bits: their values are those of the published levels, and nothing is ever held whole for long."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from components import distributed, models
from components.config.errors import ConfigError
from components.config.schema import ModelConfig, ParallelismConfig
from components.models.lora import quantized_layers
from components.models.weights.nf4 import (
    BLOCK_BYTES,
    level_pairs,
    nf4_linear,
    pack,
    packed_reader,
    unpack,
    unpacked_reader,
)
from components.parity.shapes import layout_of
from components.training.setup.flops import model_flops
from components.training.setup.recompute_policy import _gathered
from tests.distributed.adapted import NF4, QLORA, rounded_to_nf4
from tests.harness import run_ranks
from tests.tiny_models import SIZES
from tests.unit.test_models_lora import adapted

WIDEST_GAP = float((NF4[1:] - NF4[:-1]).max())


def restored(matrix: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return unpack(pack(matrix), matrix.shape[1], level_pairs(), dtype)


@pytest.mark.parametrize("columns", [64, 200])
def test_values_are_the_nearest_of_the_published_levels(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.models.weights.nf4.PACKED_AT_ONCE", 7 * columns)
    torch.manual_seed(0)
    matrix = torch.randn(50, columns) * torch.logspace(-4, 3, 50)[:, None]
    matrix[5] = 0
    made = restored(matrix)
    torch.testing.assert_close(made, rounded_to_nf4(matrix), rtol=0, atol=0)
    for block, values in zip(made.split(64, dim=1), matrix.split(64, dim=1), strict=True):
        scale = values.abs().amax(1, keepdim=True)
        assert ((block - values).abs() <= (WIDEST_GAP / 2 + 2**-11) * scale).all()
    of_normal = (restored(normal := torch.randn(64, 4096)) - normal).norm() / normal.norm()
    assert 0.08 < of_normal < 0.10  # the paper's point: what 4 bits can do for normal weights in blocks of 64


def test_a_value_takes_four_and_a_quarter_bits() -> None:
    assert pack(torch.randn(8, 640)).nbytes == 8 * 640 * 4.25 / 8
    assert pack(torch.randn(3, 65)).shape == (3, 2 * BLOCK_BYTES)


def test_blocks_of_rows_and_columns_are_packed_as_the_whole() -> None:
    """As ranks of fsdp and tp do it, and the export back again."""
    matrix = torch.randn(6, 300)
    whole = pack(matrix)
    part = (slice(2, 5), slice(BLOCK_BYTES, 5 * BLOCK_BYTES))
    assert torch.equal(packed_reader(matrix.__getitem__, 300)(part), whole[part])
    assert torch.equal(unpacked_reader(whole.__getitem__, 300)((slice(1, 4), slice(0, 300))), restored(matrix)[1:4])


@pytest.mark.parametrize("gathered_in", [torch.uint8, torch.bfloat16, torch.float32])
def test_a_product_keeps_bytes_and_gives_the_gradient_of_the_matrix(gathered_in: torch.dtype) -> None:
    """FSDP2 of torch 2.11 gathers bytes in the type of the products, as if they were weights."""
    matrix, bias = torch.randn(40, 100), torch.randn(40)
    packed = pack(matrix).to(gathered_in)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    for dtype in (torch.float64, torch.bfloat16):
        hidden = torch.randn(2, 5, 100, dtype=dtype, requires_grad=True)
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
            made = nf4_linear(hidden, packed, bias.to(dtype), level_pairs())
        assert {each.dtype for each in kept} <= {gathered_in, torch.float32}
        assert max(each.numel() for each in kept) <= max(packed.numel(), 512)
        (gradient,) = torch.autograd.grad(made.square().sum(), hidden)
        expected = F.linear(hidden, rounded_to_nf4(matrix).to(dtype)) + bias.to(dtype)
        torch.testing.assert_close(made, expected)
        (wanted,) = torch.autograd.grad(expected.square().sum(), hidden)
        torch.testing.assert_close(gradient, wanted)


def test_under_autocast_a_product_is_that_of_a_linear_layer() -> None:
    matrix, bias, hidden = torch.randn(40, 100), torch.randn(40), torch.randn(2, 100, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made = nf4_linear(hidden, pack(matrix), bias, level_pairs())
        expected = F.linear(hidden, rounded_to_nf4(matrix), bias)
    assert made.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(made, expected, rtol=2e-2, atol=2e-2)  # the bias is added before or after rounding
    made.float().square().sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


def test_matrices_that_are_kept_transposed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"peft.method=qlora: GPT2LMHeadModel stores its matrices transp.*peft=lora"):
        adapted("gpt2", QLORA)


def test_what_is_counted_and_told_is_the_model_not_its_bytes() -> None:
    packed, plain = adapted("llama", QLORA), adapted("llama", replace(QLORA, method="lora"))
    counts, others = models.count_parameters(packed), models.count_parameters(plain)
    assert (counts.total, counts.trainable) == (others.total, others.trainable)
    in_bits = sum(each.in_features * each.out_features for each in quantized_layers(packed).values())
    assert str(counts) == f"{others}, {in_bits:,} frozen in NF4"
    assert counts.local_bytes < others.local_bytes
    assert model_flops(packed) == model_flops(plain)
    held, waiting = _gathered(packed, torch.bfloat16, dict.fromkeys(packed.parameters(), 1))
    more, alike = _gathered(plain, torch.bfloat16, dict.fromkeys(plain.parameters(), 1))
    blocks = [layer.weight.numel() for layer in quantized_layers(packed).values()]
    assert (more - held, waiting) == (2 * in_bits - sum(blocks), alike)


class LargestAtOnce(TorchDispatchMode):
    """Bytes of floating-point tensors that were made within it and were there at once, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        storage = made.untyped_storage() if isinstance(made, torch.Tensor) and made.is_floating_point() else None
        if storage is not None and made.device.type == "cpu" and storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.now -= size


def test_weights_are_packed_while_they_are_read(tmp_path: Path) -> None:
    """Of 24 matrices and two ranks no rank ever has more than a few in full; afterwards it has its bytes."""
    values = {**SIZES, "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    AutoModelForCausalLM.from_config(
        AutoConfig.for_model(values.pop("model_type"), **values), dtype=torch.bfloat16
    ).save_pretrained(tmp_path)
    cfg = ModelConfig(path=str(tmp_path), tokenizer="bytes")

    def body(rank: int) -> tuple[int, int, int]:
        model = models.build_on_meta(cfg)
        models.add_adapters(model, QLORA)
        layout = layout_of("dp_shard2", ParallelismConfig())
        assert layout is not None
        distributed.parallelize(model, distributed.build_mesh(layout, "cpu"), layout, torch.float32)
        models.materialize(model, "cpu")
        with LargestAtOnce() as reading:
            models.fill_weights(model, cfg, 0)
        parts = [layer.weight.to_local() for layer in quantized_layers(model).values()]
        whole = sum(layer.in_features * layer.out_features for layer in quantized_layers(model).values())
        return whole, sum(part.nbytes for part in parts), reading.most

    for whole, held, most in run_ranks(2, body):
        assert held == whole * (0.5 + 2 / 64) / 2
        assert most < 0.25 * 4 * whole / 2
