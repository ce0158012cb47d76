"""NF4 weights: values are the published levels, and unpacked matrices are never kept in memory."""

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
from components.config.mesh_rules import layout_of
from components.config.schema import ModelConfig, ParallelismConfig
from components.models.lora import quantized_layers
from components.models.quantization import (
    BLOCK_BYTES,
    fill_or_pack,
    level_pairs,
    nf4_linear,
    pack,
    packed_reader,
    unpack,
    unpacked_reader,
)
from components.training.step_cost import model_flops
from tests.distributed.adapted import NF4, QLORA, rounded_to_nf4
from tests.harness import run_ranks
from tests.optional import SHARDS_BYTES
from tests.tiny_models import SIZES, logits, reference, tiny_folder
from tests.unit.test_models_lora import adapted

WIDEST_GAP = float((NF4[1:] - NF4[:-1]).max())


def unpacked(matrix: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return unpack(pack(matrix), matrix.shape[1], level_pairs(), dtype)


@pytest.mark.parametrize("columns", [64, 200])
def test_nf4_values_are_the_nearest_published_levels(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.models.quantization._PACKED_AT_ONCE", 7 * columns)
    torch.manual_seed(0)
    matrix = torch.randn(50, columns) * torch.logspace(-4, 3, 50)[:, None]
    matrix[5] = 0
    output = unpacked(matrix)
    torch.testing.assert_close(output, rounded_to_nf4(matrix), rtol=0, atol=0)
    for block, values in zip(output.split(64, dim=1), matrix.split(64, dim=1), strict=True):
        scale = values.abs().amax(1, keepdim=True)
        assert ((block - values).abs() <= (WIDEST_GAP / 2 + 2**-11) * scale).all()
    relative_error = (unpacked(normal := torch.randn(64, 4096)) - normal).norm() / normal.norm()
    assert 0.08 < relative_error < 0.10  # what 4 bits achieve for normal weights in blocks of 64, as in the QLoRA paper


def test_nf4_takes_four_and_a_quarter_bits_per_value() -> None:
    assert pack(torch.randn(8, 640)).nbytes == 8 * 640 * 4.25 / 8
    assert pack(torch.randn(3, 65)).shape == (3, 2 * BLOCK_BYTES)


def test_packed_shard_equals_the_shard_of_the_packed_matrix() -> None:
    """FSDP and TP ranks pack only their shards, and the export unpacks them."""
    matrix = torch.randn(6, 300)
    packed = pack(matrix)
    shard = (slice(2, 5), slice(BLOCK_BYTES, 5 * BLOCK_BYTES))
    assert torch.equal(packed_reader(matrix.__getitem__, 300)(shard), packed[shard])
    assert torch.equal(unpacked_reader(packed.__getitem__, 300)((slice(1, 4), slice(0, 300))), unpacked(matrix)[1:4])


@pytest.mark.parametrize("gathered_dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_nf4_linear_saves_only_packed_bytes_and_gives_the_gradient_of_the_matrix(gathered_dtype: torch.dtype) -> None:
    """FSDP2 of torch 2.11 all-gathers the bytes in the compute dtype, as if they were weights."""
    matrix, bias = torch.randn(40, 100), torch.randn(40)
    packed = pack(matrix).to(gathered_dtype)
    saved: list[torch.Tensor] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    for dtype in (torch.float64, torch.bfloat16):
        hidden = torch.randn(2, 5, 100, dtype=dtype, requires_grad=True)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(save, lambda each: each):
            output = nf4_linear(hidden, packed, bias.to(dtype), level_pairs())
        assert {each.dtype for each in saved} <= {gathered_dtype, torch.float32}
        assert max(each.numel() for each in saved) <= max(packed.numel(), 512)
        (gradient,) = torch.autograd.grad(output.square().sum(), hidden)
        expected = F.linear(hidden, rounded_to_nf4(matrix).to(dtype)) + bias.to(dtype)
        torch.testing.assert_close(output, expected)
        (expected_gradient,) = torch.autograd.grad(expected.square().sum(), hidden)
        torch.testing.assert_close(gradient, expected_gradient)


def test_nf4_linear_under_autocast_matches_a_linear_layer() -> None:
    matrix, bias, hidden = torch.randn(40, 100), torch.randn(40), torch.randn(2, 100, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = nf4_linear(hidden, pack(matrix), bias, level_pairs())
        expected = F.linear(hidden, rounded_to_nf4(matrix), bias)
    assert output.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, rtol=2e-2, atol=2e-2)  # the bias is added before or after rounding
    output.float().square().sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


def test_matrices_of_conv1d_are_packed_transposed(tmp_path: Path) -> None:
    """As bitsandbytes does; the same bytes are read without a materialized model, as for an export."""
    cfg = ModelConfig(path=str(tiny_folder(tmp_path, "gpt2")), tokenizer="bytes")
    model = models.build_on_meta(cfg)
    models.add_adapters(model, QLORA)
    read = models.weight_reader(model, cfg, 0)
    models.materialize(model, "cpu")
    models.fill_weights(model, cfg, 0)
    stored, layers = reference(tmp_path), quantized_layers(model)
    assert len(layers) == 2 * 4
    for name, layer in layers.items():
        matrix = stored.get_submodule(name).weight.T
        assert torch.equal(layer.dequantized(layer.weight, len(matrix.T), torch.float32), rounded_to_nf4(matrix))
        assert torch.equal(read(f"{name}.weight", (slice(1, 5), slice(0, layer.weight.shape[1]))), layer.weight[1:5])
    torch.testing.assert_close(logits(model.eval()), logits(with_rounded_matrices(stored, list(layers))))


def with_rounded_matrices(model: Any, layers: list[str]) -> Any:
    for name in layers:
        weight = model.get_submodule(name).weight
        weight.data = rounded_to_nf4(weight.T).T.contiguous()
    return model


def test_parameter_and_flop_counts_are_those_of_the_unpacked_model() -> None:
    packed, plain = adapted("llama", QLORA), adapted("llama", replace(QLORA, method="lora"))
    counts, plain_counts = models.count_parameters(packed), models.count_parameters(plain)
    assert (counts.total, counts.trainable) == (plain_counts.total, plain_counts.trainable)
    packed_values = sum(each.in_features * each.out_features for each in quantized_layers(packed).values())
    assert str(counts) == f"{plain_counts}, {packed_values:,} frozen in NF4"
    assert counts.local_bytes < plain_counts.local_bytes
    assert model_flops(packed) == model_flops(plain)


class PeakMemory(TorchDispatchMode):
    """Peak bytes of live floating-point CPU tensors that were created in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.current = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storage = result.untyped_storage() if isinstance(result, torch.Tensor) and result.is_floating_point() else None
        if storage is not None and result.device.type == "cpu" and storage._cdata not in self.seen:
            self.seen.add(storage._cdata)
            self.current += storage.nbytes()
            self.peak = max(self.peak, self.current)
            weakref.finalize(storage, self._on_free, storage._cdata, storage.nbytes())
        return result

    def _on_free(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.current -= size


@pytest.mark.skipif(not SHARDS_BYTES, reason="needs torch 2.12")
def test_weights_are_packed_while_they_are_read_so_peak_memory_stays_low(tmp_path: Path) -> None:
    """No rank holds more than a few unpacked matrices at once; afterwards it holds only its packed shards."""
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
        with PeakMemory() as memory:
            models.fill_weights(model, cfg, 0)
        shards = [layer.weight.to_local() for layer in quantized_layers(model).values()]
        values_in_model = sum(layer.in_features * layer.out_features for layer in quantized_layers(model).values())
        return values_in_model, sum(shard.nbytes for shard in shards), memory.peak

    for values_in_model, packed_bytes, peak in run_ranks(2, body):
        assert packed_bytes == values_in_model * (0.5 + 2 / 64) / 2
        assert peak < 0.25 * 4 * values_in_model / 2


def test_loaded_weights_are_packed_on_the_device_of_the_parameter() -> None:
    index = (slice(0, 4), slice(0, BLOCK_BYTES))
    assert packed_reader(torch.randn(4, 64).__getitem__, 64, "meta")(index).is_meta
    searched = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.bucketize.Tensor:
                searched.append(args[0].device.type)
            return func(*args, **(kwargs or {}))

    packed = torch.empty(4, BLOCK_BYTES, dtype=torch.uint8, device="meta")
    with Record():
        fill_or_pack(packed, "weight", torch.randn(4, 64).__getitem__, (4, 64))
    assert searched == ["meta"]
