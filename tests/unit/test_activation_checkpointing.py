"""Activation checkpointing: which operators each policy recomputes, and the memory estimate that `auto` relies on."""

from __future__ import annotations

import copy
import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen  # defines torch_attn::_varlen_attn
import torch.nn.functional as F
from torch._higher_order_ops import wrap
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from components import models
from components.config.schema.parallelism import ActivationCheckpointing
from components.models.activations import _SAVED_OPERATORS
from tests.distributed import parity
from tests.distributed.parity import MODELS, MOE_MODELS

NONE, SELECTIVE, FULL, ALTERNATE = (
    ActivationCheckpointing(name) for name in ("none", "selective", "full", "alternate")
)
OLMO = {**parity.SMALL, "model_type": "olmo"}
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


class _OperatorCounts(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func).removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def build(name: str, **values: Any) -> Any:
    values = {**(MODELS | MOE_MODELS)[name], **values}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    models.use_causal_sdpa(model)
    return model.train()


def test_selective_keeps_matmuls_and_attention_and_recomputes_the_rest() -> None:
    plain, calls, gradients = build("llama"), {}, {}
    tokens = torch.randint(3, 97, (2, 16))
    for policy in (NONE, SELECTIVE, FULL):
        model = copy.deepcopy(plain)
        models.checkpoint_activations(model, policy)
        with _OperatorCounts() as counted:
            model(input_ids=tokens, use_cache=False).logits.logsumexp(-1).sum().backward()
        calls[policy] = counted.calls
        gradients[policy] = {name: parameter.grad for name, parameter in model.named_parameters()}
    for kept in ("aten.mm", ATTENTION):
        assert calls[NONE][kept] == calls[SELECTIVE][kept] < calls[FULL][kept]
    for recomputed in ("aten.silu", "aten.rsqrt"):
        assert calls[NONE][recomputed] < calls[SELECTIVE][recomputed] == calls[FULL][recomputed]
    for policy in (SELECTIVE, FULL):
        assert all(torch.equal(gradients[policy][name], value) for name, value in gradients[NONE].items())


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (query @ key.mT).softmax(-1) @ value


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    mask = flex_attention.create_block_mask(lambda b, h, q, k: q >= 0, 1, 1, 8, 8, device="cpu").as_tuple()
    scores = (query, key, value, lambda score, *_: score, mask, 1.0, {})
    output = torch.ops.higher_order.flex_attention(*scores)[0]
    # In torch 2.11 it is a view, which a custom Function may not return to code that modifies it.
    return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output


def _compiled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return wrap.inductor_compiled_code(_REGION, [query, key, value])[0]


_WRAPPER = getattr(wrap, "InductorCompiledCallable", lambda function: function)  # torch 2.11 passes the function itself
_REGION = _WRAPPER(lambda inputs: [_attend(*inputs)])
_HIGHER_ORDER = {"flex_attention": _flex, "inductor_compiled_code": _compiled}


@contextmanager
def kept_operator(name: str) -> Iterator[tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]]:
    """Yield a function that calls an operator of `SAVED_OPERATORS`, and a composite that computes the same value.

    Within the context, an operator without a CPU kernel has one, which returns the composite as its first output.
    """
    namespace, _, short = name.partition("::")
    if namespace == "higher_order":
        yield _HIGHER_ORDER[short], _attend
        return
    operator = getattr(getattr(torch.ops, namespace), short).default
    if short == "addmm":
        yield operator, lambda one, two, three: one + two @ three
        return
    matmul = short.endswith("mm")
    composite = (lambda one, two, *_: one @ two) if matmul else _attend

    def kernel(*args: Any, **kwargs: Any) -> Any:
        first = composite(*args[:3])
        others = [torch.zeros(()) if str(each.type) == "Tensor" else 0 for each in operator._schema.returns[1:]]
        return (first, *others) if others else first

    def call(one: torch.Tensor, two: torch.Tensor, three: torch.Tensor) -> torch.Tensor:
        inputs: list[Any] = [one, two] if matmul else [one, two, three]
        required = [each for each in operator._schema.arguments if not each.has_default_value()][len(inputs) :]
        fill = {"Tensor": torch.zeros(1, dtype=torch.int32), "Optional[Tensor]": None, "bool": False, "int": 8}
        output = operator(*inputs, *(fill[str(each.type)] for each in required))
        return output[0] if isinstance(output, tuple) else output

    if short in ("mm", "_scaled_dot_product_flash_attention_for_cpu"):
        yield call, composite
        return
    library = torch.library.Library(namespace, "IMPL")
    library.impl(short, kernel, "CPU", allow_override=True)
    try:
        yield call, composite
    finally:
        library._destroy()


class _WithGradient(torch.autograd.Function):
    """A call whose backward is that of its composite, because the GPU operators have no backward on CPU."""

    @staticmethod
    def forward(ctx: Any, call: Any, composite: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.composite = composite
        ctx.save_for_backward(*tensors)
        return call(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            tensors = [each.detach().requires_grad_() for each in ctx.saved_tensors]
            gradients = torch.autograd.grad(ctx.composite(*tensors), tensors, grad, allow_unused=True)
        return None, None, *gradients


class _ChangesInPlace(torch.nn.Module):
    """A decoder layer that modifies the output of `compute` in place, through the kind of alias that `how` names."""

    def __init__(self, compute: Callable[..., torch.Tensor], how: str, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.compute, self.how = compute, how
        self.tensors = torch.nn.ParameterList(tensors)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.compute(*(each * hidden for each in self.tensors))
        if self.how == "itself":
            output.clamp_(-0.2, 0.2).mul_(hidden)
        elif self.how == "a view":
            output.transpose(-1, -2)[..., :3].tanh_()
        elif self.how == "an alias with its own version counter":
            torch.ops.aten._unsafe_view(output, [-1]).tanh_()
        elif self.how == "outside":
            return torch.ops.aten._unsafe_view(output, [-1])
        return output.exp()


IN_PLACE = ("itself", "a view", "an alias with its own version counter", "outside")


@pytest.mark.parametrize("name", _SAVED_OPERATORS)
def test_gradients_are_correct_if_a_kept_output_is_modified_in_place(name: str) -> None:
    torch.manual_seed(0)
    shape = (8, 8) if name.endswith("mm") else (1, 2, 8, 8)
    tensors, hidden = [torch.randn(shape) for _ in range(3)], torch.randn(shape)
    with kept_operator(name) as (call, composite):
        compute = partial(_WithGradient.apply, call, composite)
        for how in IN_PLACE:
            gradients, calls = [], []
            for policy in (NONE, FULL, SELECTIVE):
                model = _Layers(_ChangesInPlace(compute, how, [each.clone() for each in tensors]))
                models.checkpoint_activations(model, policy)  # type: ignore[arg-type]
                layer_input = hidden.clone().requires_grad_()
                with _OperatorCounts() as counted:
                    output = model.layers[0](layer_input * 1)
                    if how == "outside":
                        output.tanh_()
                    output.sum().backward()
                gradients.append([layer_input.grad, *(each.grad for each in model.parameters())])
                calls.append(counted.calls[name.removeprefix("higher_order::").replace("::", ".")])
            for other in gradients[1:]:
                assert all(map(_equal, gradients[0], other)), how
            none, full, selective = calls
            assert none == selective < full  # includes the calls in the composite's backward


@pytest.mark.parametrize("family", ["olmo", "olmoe"])
def test_clipped_qkv_projections_have_the_gradients_of_plain_transformers(family: str) -> None:
    """OLMo clamps q, k and v in place; they share memory with the kept matmul output but not its version counter."""
    values = (OLMO if family == "olmo" else MOE_MODELS["olmoe"]) | {"clip_qkv": 0.05}
    tokens, gradients = torch.randint(3, 97, (2, 16)), []
    for policy in (None, NONE, SELECTIVE, FULL, ALTERNATE):
        model = parity.build(family, torch.float64, values).train()
        if policy is not None:
            models.use_causal_sdpa(model)
            models.checkpoint_activations(model, policy)
        model(input_ids=tokens, use_cache=False).logits.logsumexp(-1).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for other in gradients[1:]:
        for name, expected in gradients[0].items():
            assert parity.relative(other[name], expected) < 1e-12, name


@pytest.mark.slow
def test_selective_keeps_the_outputs_of_regions_that_the_model_compiles() -> None:
    """As transformers compiles flex attention, which has no backward on CPUs."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.attend = torch.nn.Parameter(torch.eye(8)), torch.compile(_attend)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            query = (hidden * self.weight).sin()
            return self.attend(query, self.attend(query, hidden, hidden), hidden).cos()

    gradients = []
    for policy in (NONE, SELECTIVE):
        torch._dynamo.reset()
        model = _Layers(Layer())
        model.config._attn_implementation = "flex_attention"
        hidden = torch.linspace(-1, 1, 128).view(2, 8, 8).requires_grad_()
        with torch._inductor.config.patch({}), _OperatorCounts() as counted:  # restores what the policy sets
            models.checkpoint_activations(model, policy)  # type: ignore[arg-type]
            model.layers[0](hidden).sum().backward()
        gradients.append([hidden.grad, model.layers[0].weight.grad])
    assert all(map(_equal, *gradients))
    assert counted.calls["inductor_compiled_code"] == 2 + 2  # forward and backward of both, none of them recomputed


def test_in_place_change_hidden_from_the_dispatcher_is_an_error() -> None:
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
            ctx.mark_dirty(tensor)
            return tensor

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(grad)

    model = _Layers(_ChangesInPlace(lambda one, two: Kernel.apply(one @ two), "", [torch.eye(3), torch.eye(3)]))
    models.checkpoint_activations(model, SELECTIVE)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"in place.*set it to full or none"):
        model.layers[0](torch.ones(3, 3)).sum().backward()


def test_attention_with_dropout_is_recomputed_to_preserve_the_rng_state() -> None:
    name = "aten::_scaled_dot_product_flash_attention"
    operator = torch.ops.aten._scaled_dot_product_flash_attention.default

    def kernel(query: Any, key: Any, value: Any, dropout_p: float = 0.0, *_: Any, **__: Any) -> Any:
        zero = torch.zeros(())
        return F.dropout(_attend(query, key, value), dropout_p), zero, zero, zero, 0, 0, zero, zero, zero

    class Attention(torch.nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                attended = operator(hidden, hidden, hidden, self.dropout)[0]
            return F.dropout(self.weight * attended * hidden, 0.5)

        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.dropout, self.weight = dropout, torch.nn.Parameter(torch.ones(()))

    library = torch.library.Library("aten", "IMPL")
    library.impl(name.partition("::")[2], kernel, "CPU", allow_override=True)
    hidden, calls = torch.randn(1, 2, 8, 8), []
    try:
        for dropout in (0.0, 0.5):
            gradients = []
            for policy in (NONE, SELECTIVE):
                model = _Layers(Attention(dropout))
                models.checkpoint_activations(model, policy)  # type: ignore[arg-type]
                torch.manual_seed(0)
                with _OperatorCounts() as counted:
                    model.layers[0](hidden).sum().backward()
                gradients.append(next(model.parameters()).grad)
                calls.append(counted.calls[name.replace("::", ".")])
            assert _equal(*gradients)
    finally:
        library._destroy()
    assert calls == [1, 1, 1, 2]


class _Layers(torch.nn.Module):
    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([layer])
        self.config = LlamaConfig(num_hidden_layers=1)


def _equal(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    return one is two if one is None or two is None else torch.equal(one, two)
