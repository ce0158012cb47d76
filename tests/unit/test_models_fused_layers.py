"""RMSNorms, rotary embeddings and low-rank products with few kernels, against transformers and plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from components.models.fused_layers import FusedNorm, fuse_layers, rms_norm, rotate, swiglu
from components.models.lora_linear import add_low_rank
from tests.distributed.parity import SMALL, build

FUSED = {
    "llama": (5, 2, 2), "qwen3": (9, 2, 2), "phi3": (5, 2, 2), "gemma": (0, 2, 0), "gpt2": (0, 0, 0),
    "nemotron": (0, 2, 0), "gpt_neox": (0, 2, 0), "phi3 in part": (5, 2, 2), "gpt_oss": (5, 0, 0), "bitnet": (9, 2, 0),
}  # fmt: skip
"""Model -> fused norms, rotary embeddings and SwiGLUs. Gemma's norms multiply by 1 + weight and its MLPs have a GELU:
they keep their own forward, as other MLPs and experts do. Nemotron, GPT-NeoX and some Phi-3 models rotate a part of
each head."""
MORE_MODELS = {
    "nemotron": {**SMALL, "model_type": "nemotron"},
    "gpt_neox": {**SMALL, "model_type": "gpt_neox", "rotary_pct": 0.5, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "phi3 in part": {**SMALL, "model_type": "phi3", "partial_rotary_factor": 0.5},
    "gpt_oss": {**SMALL, "model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 8},
    "bitnet": {**SMALL, "model_type": "bitnet"},
}


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_give_the_loss_and_gradients_of_transformers(name: str) -> None:
    own: Any = build(name, torch.float64, MORE_MODELS.get(name))
    fused = copy.deepcopy(own)
    counts = fuse_layers(fused)
    assert (counts.norms, counts.rotary, counts.swiglus) == FUSED[name]
    copied = copy.deepcopy(fused)  # copies keep the fused forwards
    ids = torch.randint(0, 97, (2, 16))
    losses = []
    for model in (own, fused, copied):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == losses[1]
    names = dict(own.named_parameters())
    assert dict(fused.named_parameters()).keys() == names.keys()
    for name, parameter in fused.named_parameters():
        assert torch.allclose(parameter.grad, names[name].grad, rtol=1e-4, atol=1e-7), name


def test_gradients_equal_finite_differences() -> None:
    torch.manual_seed(0)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (drawn(2, 3, 8), drawn(8)))
    cos, sin = drawn(2, 3, 8).detach(), drawn(2, 3, 8).detach()
    assert torch.autograd.gradcheck(lambda q, k: rotate(q, k, cos, sin), (drawn(2, 4, 3, 8), drawn(2, 1, 3, 8)))
    cos, sin = cos[..., :4], sin[..., :4]  # half of each head is rotated
    assert torch.autograd.gradcheck(lambda q, k: rotate(q, k, cos, sin), (drawn(2, 4, 3, 8), drawn(2, 1, 3, 8)))
    assert torch.autograd.gradcheck(swiglu, (drawn(2, 3, 8), drawn(2, 3, 8)))
    factors = (drawn(2, 3, 5), drawn(2, 3, 8), drawn(2, 8), drawn(5, 2))
    assert torch.autograd.gradcheck(lambda *each: add_low_rank(*each, 1.5), factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_swiglu_on_a_cpu_has_the_bits_of_transformers_and_saves_less(dtype: torch.dtype) -> None:
    gate, up, grad = (drawn(4, 32, dtype=dtype) for _ in range(3))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        product = swiglu(gate, up)
    assert len(saved) == 2  # gate and up, but not silu(gate)
    own = F.silu(gate) * up
    assert torch.equal(product, own)
    expected = torch.autograd.grad(own, (gate, up), grad)
    assert all(map(torch.equal, torch.autograd.grad(product, (gate, up), grad), expected))


def test_a_norm_in_bfloat16_is_rounded_once() -> None:
    hidden, weight = drawn(64, 256, dtype=torch.bfloat16), drawn(256, dtype=torch.bfloat16)
    exact = F.rms_norm(hidden.double(), (256,), weight.double(), 1e-6)
    error = (rms_norm(hidden, weight, 1e-6) - exact) / exact
    assert error.abs().max() < 1.001 * 2**-8  # half a unit in the last of 8 bits


def test_a_norm_whose_dtype_differs_from_its_input_computes_as_before() -> None:
    own: Any = build("llama", torch.float32)
    fused = copy.deepcopy(own)
    fuse_layers(fused)
    hidden = torch.randn(2, 3, own.config.hidden_size).bfloat16()
    assert isinstance(fused.model.norm, FusedNorm)
    result = fused.model.norm(hidden)
    assert result.dtype == torch.float32
    assert torch.equal(result, own.model.norm(hidden))


def test_a_low_rank_product_equals_two_linear_layers() -> None:
    torch.manual_seed(0)
    base, hidden, first, second = drawn(2, 3, 5), drawn(2, 3, 8), drawn(2, 8), drawn(5, 2)
    tensors = (base, hidden, first, second)
    expected = base + 0.5 * F.linear(F.linear(hidden, first), second)
    weights = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, tensors, weights)
    result = add_low_rank(*tensors, 0.5)
    assert torch.allclose(result, expected, rtol=1e-12)
    for one, two in zip(torch.autograd.grad(result, tensors, weights), gradients, strict=True):
        assert torch.allclose(one, two, rtol=1e-12)
