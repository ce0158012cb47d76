"""Activation offload with ordinary copies in place of transfers, and the buffers that copies are written to."""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components import models
from components.checkpoint.saver import _ALIGNMENT, _PINNED_BYTES, _buffers_in_few_allocations, _pinned_allocations
from components.config.schema.model import DOCUMENTS
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.run import PeftConfig
from components.models import activations
from components.planning.formulas.layer_memory import layer_activations
from components.planning.formulas.memory import rank_memory
from components.planning.formulas.step_time import estimate_time
from tests.distributed.parity import MODELS
from tests.unit.test_planning_time import H100, term, workload

LAYERS = 4
CPU = torch.device("cpu")
IDS = torch.arange(3, 35).view(2, 16)


def build(**values: Any) -> Any:
    """Build a float64 model whose activations have other shapes than its weights."""
    torch.manual_seed(0)
    config = {**MODELS["llama"], "num_hidden_layers": LAYERS, "hidden_size": 40, "intermediate_size": 56, **values}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    models.use_causal_sdpa(model)
    return model.double().train()


def loss_of(model: Any, **inputs: Any) -> torch.Tensor:
    logits = model(input_ids=IDS, use_cache=False, **inputs).logits
    return logits.square().mean()


def gradients(model: Any, **inputs: Any) -> dict[str, torch.Tensor]:
    loss_of(model, **inputs).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.requires_grad}


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[Any], list[Any]]]:
    """Record the saved tensors as (weak reference to the source, host's copy, layer), and the layers in fetch order."""
    packed, fetched = [], []
    pack, fetch = activations._SavedLayer.pack, activations._SavedLayer.fetch

    def pack_and_record(layer: Any, tensor: torch.Tensor) -> Any:
        saved = pack(layer, tensor)
        if saved is not tensor:
            packed.append((weakref.ref(tensor), saved.host, id(layer)))
        return saved

    def fetch_and_record(layer: Any) -> None:
        fetched.append(id(layer))
        fetch(layer)

    with monkeypatch.context() as patches:
        patches.setattr(activations._SavedLayer, "pack", pack_and_record)
        patches.setattr(activations._SavedLayer, "fetch", fetch_and_record)
        yield packed, fetched


@pytest.mark.parametrize(
    ("policy", "compiled", "lora"),
    [("none", False, False), ("none", False, True), ("full", False, False), ("alternate", False, False),
     ("none", True, False)],
)  # fmt: skip
def test_gradients_are_those_without_offload(
    policy: str, compiled: bool, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = build()
    if lora:
        models.add_adapters(plain, PeftConfig(method="lora", rank=4))
        for name, parameter in plain.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    packed_rows = {DOCUMENTS: torch.tensor([[0, 9, 16], [0, 16, 16]], dtype=torch.int32)} if lora else {}
    model = copy.deepcopy(plain)
    expected = gradients(plain, **packed_rows)
    models.checkpoint_activations(model, ActivationCheckpointing(policy))
    if compiled:
        models.compile_layers(model, backend="aot_eager")
    assert models.offload_activations(model, CPU, smallest=1) == LAYERS - 1
    with recorded(monkeypatch) as (packed, _):
        found = gradients(model, **packed_rows)
    assert len({layer for *_, layer in packed}) == LAYERS - 1
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)


def test_sources_are_released_and_each_layer_is_fetched_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    models.offload_activations(model, CPU, smallest=1)
    with recorded(monkeypatch) as (packed, fetched):
        loss = loss_of(model)
        assert packed
        assert not [shape for source, shape, _ in packed if source() is not None]
        hosts = {host.data_ptr(): host for _, host, _ in packed}
        assert len(hosts) < len(packed)  # queries, keys and values have one input
        layers = list(dict.fromkeys(layer for *_, layer in packed))
        weights = {tuple(each.shape) for each in model.parameters()} | {(40, 56), (20, 40)}
        assert not weights & {tuple(each.shape) for each in hosts.values()}
        alive = [weakref.ref(each) for each in hosts.values()]
        del hosts
        packed.clear()
        loss.backward()
    assert list(dict.fromkeys(fetched)) == layers[::-1]
    first_use = fetched.index(layers[2])
    assert fetched[first_use + 1] == layers[1]  # with the first use of the layer after it
    del loss
    assert not [each for each in alive if each() is not None]


def test_an_evaluation_and_small_tensors_are_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    models.offload_activations(model, CPU, smallest=2 * 16 * 56 * 8)
    with recorded(monkeypatch) as (packed, _):
        with torch.no_grad():
            loss_of(model)
        assert not packed
        loss_of(model)
    assert packed
    assert all(host.nbytes >= 2 * 16 * 56 * 8 for _, host, _ in packed)


def test_planned_memory_holds_about_two_layers_and_time_what_is_not_hidden() -> None:
    peft = PeftConfig(method="lora")
    plain, offloaded = workload(peft=peft), workload(peft=peft, parallelism={"activation_offload": True})
    saved = layer_activations(plain, plain.architecture.kinds[0]).none
    peaks = [
        next(each.value for each in rank_memory(each, 0, "cuda").terms if each.name == "activations")
        for each in (plain, offloaded)
    ]
    layers = plain.architecture.layers
    assert peaks[0] - peaks[1] == pytest.approx((layers - 2) * saved)
    slow = replace(H100, host_bandwidth=1e9)
    copies = 2 * saved * (layers - 1) * plain.micro_batches / 1e9
    exposed = term(estimate_time(offloaded, slow), "activation offload (exposed)")
    assert 0.5 * copies < exposed < copies


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
