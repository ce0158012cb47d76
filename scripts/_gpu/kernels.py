"""Output and gradients of each kernel that a run on a GPU uses, against the same formula in float64 on the CPU.

A control beside each bound plants a fault, such as a mask without a document border, and shows how far it would be from
the bound. An error is relative to the smaller norm of both results, so that a result of zeros is infinitely wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from components.models import quantization
from components.models.attention import AttentionProbe, causal_sdpa
from components.models.documents import Documents
from components.models.fused_layers import rms_norm, rotate, swiglu
from components.models.lora_linear import add_low_rank
from components.torch_kernels import has_grouped_queries
from components.training.objectives import PLAIN
from components.training.objectives.chunked_loss import Head, Targets, linear_token_loss
from components.training.optimizers.gradients import masked_step, step_if_finite
from components.training.optimizers.optim import AdamW
from scripts._gpu.verdict import Line, at_most, attempt, control, failed

Formula = Callable[..., Any]
"""Tensors -> a tensor or several."""
Tensors = Sequence[torch.Tensor]
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-3}
"""Largest relative error of a kernel, by dtype; bfloat16 rounds by up to 2^-9 = 2e-3."""
ATTENTION_BOUND = 1.5e-2
"""The same for attention in bfloat16, which also rounds the probabilities, or their gradients."""
LEAK_BOUND = 1e-6
"""Largest share of a gradient that must be zero."""


def kernels(device: str, small: bool) -> Iterator[Line]:
    """Norms, rotary embeddings, SwiGLU, the loss, adapters, 4-bit weights, optimizers, experts and attention."""
    parts: dict[str, Callable[[torch.device, bool], Iterator[Line]]] = {
        "fused layers": _fused_layers, "chunked loss": _chunked_loss, "LoRA product": _lora_product, "NF4": _four_bits,
        "AdamW": adamw, "SGD": _masked_sgd, "experts": _experts, "attention": attention,
        "attention of cp": _gathered_keys,
    }  # fmt: skip
    for what, part in parts.items():
        yield from attempt(what, part(torch.device(device), small))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference relative to the smaller norm; infinity for NaN, or if only one is zero."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    difference, smaller = (found - expected).norm().item(), min(found.norm().item(), expected.norm().item())
    if difference == 0:
        return 0.0
    return difference / smaller if smaller > 0 and math.isfinite(difference) else math.inf


def worst(found: Tensors, expected: Tensors) -> float:
    """Return the largest error of several tensors."""
    return max(error(one, other) for one, other in zip(found, expected, strict=True))


def _with_gradients(run: Formula, inputs: Tensors, *constants: torch.Tensor) -> list[torch.Tensor]:
    """Return the outputs of a function and the gradients of its inputs, given random gradients of the outputs."""
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    outputs = run(*leaves, *constants)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(5)
    grads = [torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]


def compare(
    what: str,
    device: torch.device,
    run: Formula,
    exact: Formula,
    fault: tuple[str, Formula],
    tensors: tuple[Tensors, Tensors],
    bounds: dict[torch.dtype, float] = BOUNDS,
) -> Iterator[Line]:
    """Yield the largest error of outputs and gradients in each dtype, and the error of a fault.

    Args:
        run: Computes on the device; `exact` and the named fault in float64 on the CPU.
        tensors: Inputs, and constants without gradients, in float64 on the CPU; rounded to each dtype for all of them.
    """
    for dtype, bound in bounds.items():
        rounded, fixed = ([each.to(dtype) for each in kind] for kind in tensors)
        wide = [each.double() for each in rounded], *(each.double() for each in fixed)
        expected = _with_gradients(exact, *wide)
        found = _with_gradients(run, [each.to(device) for each in rounded], *(each.to(device) for each in fixed))
        yield at_most(f"{what}, {_name(dtype)}", worst(found, expected), bound)
    yield control(f"{what}, {fault[0]}", worst(_with_gradients(fault[1], *wide), expected), bound)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _fused_layers(device: torch.device, small: bool) -> Iterator[Line]:
    """RMSNorm, SwiGLU and rotary embeddings."""
    rows, width, generator = 32 if small else 1024, 256 if small else 2048, torch.Generator().manual_seed(0)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight

    def product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up

    def turned(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        halves = (torch.cat((-x[..., 32:], x[..., :32]), -1) for x in (q, k))
        return tuple(x * cos[:, None] + half * sin[:, None] for x, half in zip((q, k), halves, strict=True))

    yield from compare(
        "RMSNorm", device, lambda x, weight: rms_norm(x, weight, 1e-5), norm,
        ("mean subtracted", lambda x, weight: norm(x - x.mean(-1, keepdim=True), weight)),
        ([1 + _draw(generator, 2, rows, width), 1 + _draw(generator, width)], []),
    )  # fmt: skip
    wide = 1000 if small else 8200  # not a multiple of the kernel's 1,024 columns
    gate, up = (_draw(generator, 2, rows, wide) for _ in range(2))
    fault = ("gate and up swapped", lambda gate, up: product(up, gate))
    yield from compare("SwiGLU", device, swiglu, product, fault, ([gate, up], []))
    fault = ("gate and up swapped", lambda both: product(*both.chunk(2, -1)[::-1]))
    yield from compare(
        "SwiGLU of halves of one projection", device, lambda both: swiglu(*both.chunk(2, -1)),
        lambda both: product(*both.chunk(2, -1)), fault, ([torch.cat([gate, up], -1)], []),
    )  # fmt: skip
    extreme = torch.tensor([[-1e4, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 1e4]], device=device)
    difference = (swiglu(extreme, torch.ones_like(extreme)) - F.silu(extreme)).abs().max().item()
    yield at_most("SwiGLU of gates from -1e4 to 1e4: absolute error", difference, 1e-3)
    seq = 64 if small else 512
    angle = _draw(generator, 2, seq, 64)
    yield from compare(
        "rotary embeddings", device, rotate, turned,
        ("turned backwards", lambda q, k, cos, sin: turned(q, k, cos, -sin)),
        ([_draw(generator, 2, 8, seq, 64), _draw(generator, 2, 2, seq, 64)], [angle.cos(), angle.sin()]),
    )  # fmt: skip


def _chunked_loss(device: torch.device, small: bool) -> Iterator[Line]:
    """The loss by chunks of logits, whose weight gradient is added up in float32, with ignored targets."""
    tokens, width, vocabulary = (96, 64, 512) if small else (3000, 512, 16000)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator)
    ids[::3] = -100
    targets = Targets(ids.to(device), int((ids != -100).sum()))
    inputs = [_draw(generator, tokens, width), _draw(generator, vocabulary, width) * width**-0.5]

    def exact(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor = ids) -> torch.Tensor:
        return F.cross_entropy(hidden @ weight.t(), targets, ignore_index=-100, reduction="sum")

    fault = ("targets of the next token", lambda hidden, weight: exact(hidden, weight, ids.roll(1)))
    for compiled in (False, True):
        head = Head(chunk_logits=vocabulary * (tokens // 5), compiled=compiled)

        def run(hidden: torch.Tensor, weight: torch.Tensor, head: Head = head) -> torch.Tensor:
            return linear_token_loss(hidden, weight, None, targets, head, PLAIN.token_loss)

        what = f"chunked loss{', compiled' if compiled else ''}"
        bounds = {dtype: bound for dtype, bound in BOUNDS.items() if not compiled or dtype != torch.float64}
        yield from compare(what, device, run, exact, fault, (inputs, []), bounds)


def _lora_product(device: torch.device, small: bool) -> Iterator[Line]:
    """The product of adapters, which are float32 beside inputs in bfloat16."""
    generator = torch.Generator().manual_seed(0)

    def exact(
        base: torch.Tensor, hidden: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scaling: float = 2.0
    ) -> torch.Tensor:
        return base + scaling * hidden @ down.t() @ up.t()

    def run(base: torch.Tensor, hidden: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(base.dtype, torch.float32)
        return add_low_rank(base, hidden, down.to(wide), up.to(wide), 2.0)

    fault = ("scaled twice", lambda *tensors: exact(*tensors, scaling=4.0))
    inputs = [_draw(generator, 2, 96, 512), _draw(generator, 2, 96, 256), _draw(generator, 16, 256)]
    yield from compare("LoRA product", device, run, exact, fault, ([*inputs, _draw(generator, 512, 16)], []))


def _four_bits(device: torch.device, small: bool) -> Iterator[Line]:
    """Packed NF4 bytes and unpacked values, equal to those of the CPU; blocks that are zero or incomplete."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((64, 64), (128, 1000), (96, 4096)):
        matrix = _draw(generator, *shape).float()
        matrix[3] = 0
        packed, pairs = quantization.pack(matrix), quantization.level_pairs()
        differences = (quantization.pack(matrix.to(device)).cpu() != packed).sum().item()
        yield at_most(f"NF4 of {shape}: packed bytes that differ from the CPU's", differences, 0)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = quantization.unpack(packed.to(device), shape[1], pairs.to(device), dtype).cpu()
            differences = (found != quantization.unpack(packed, shape[1], pairs, dtype)).sum().item()
            yield at_most(f"NF4 of {shape}, {_name(dtype)}: values that differ from the CPU's", differences, 0)


def adamw(device: torch.device, small: bool) -> Iterator[Line]:
    """Fused AdamW against torch's plain one in float64; a step with a norm of NaN changes nothing."""
    generator = torch.Generator().manual_seed(0)
    start, grads = _draw(generator, 33, 17), [_draw(generator, 33, 17) for _ in range(4)]
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    weight = nn.Parameter(start.float().to(device))
    optimizer = AdamW([weight], fused=True, **options)
    exact, repeated = (nn.Parameter(start.float().double()) for _ in range(2))
    plain = [torch.optim.AdamW([each], foreach=False, **options) for each in (exact, repeated)]
    for step, grad in enumerate(grads):
        weight.grad, exact.grad, repeated.grad = grad.float().to(device), grad.float().double(), grad.float().double()
        norm = torch.tensor(math.nan if step == 2 else 1.0, dtype=torch.float64, device=device)
        before = weight.detach().clone()
        step_if_finite(optimizer, norm)
        plain[1].step()
        if step == 2:
            yield at_most("AdamW: weights that a norm of NaN changes", (weight != before).sum().item(), 0)
        else:
            plain[0].step()
    yield at_most("AdamW: weights after 3 steps", error(weight - start.to(weight), exact - start), 1e-5)
    yield control("AdamW, the skipped step is taken", error(repeated - start, exact - start), 1e-5)


def _masked_sgd(device: torch.device, small: bool) -> Iterator[Line]:
    """A step of an optimizer without a switch of its own, masked on the device."""
    weight = nn.Parameter(torch.ones(8, 8, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    values = []
    for skipped in (0.0, 1.0, 0.0):
        weight.grad = torch.ones_like(weight)
        masked_step(optimizer, torch.tensor(skipped, device=device))
        values.append(weight[0, 0].item())
    # 1 - 0.1, the same, then with a momentum of 1.9
    difference = max(abs(found - exact) for found, exact in zip(values, (0.9, 0.9, 0.71), strict=True))
    yield at_most("masked SGD: error of three steps, the second skipped", difference, 1e-6)


def _experts(device: torch.device, small: bool) -> Iterator[Line]:
    """The grouped product of experts, two of which have no tokens: their gradients must be zeros.

    Memory that was freed holds NaN, which a kernel that leaves them unwritten would show.
    """
    from transformers.integrations.moe import _grouped_mm

    counts, rows, columns = (96, 0, 31, 0, 129), 64, 96
    generator, ends = torch.Generator().manual_seed(0), torch.tensor(counts).cumsum(0).int()

    def exact(tokens: torch.Tensor, weights: torch.Tensor, shift: int = 0) -> torch.Tensor:
        parts = [part @ weights[index - shift] for index, part in enumerate(tokens.split(counts))]
        return torch.cat(parts)

    def run(tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        for shape in (tokens.shape, weights.shape, (len(tokens), columns)):
            torch.full(shape, math.nan, dtype=tokens.dtype, device=device)
        return _grouped_mm(tokens, weights, offs=ends.to(device))

    fault = ("the expert before", lambda tokens, weights: exact(tokens, weights, 1))
    inputs = [_draw(generator, sum(counts), rows), _draw(generator, len(counts), rows, columns)]
    bounds = {dtype: bound for dtype, bound in BOUNDS.items() if dtype != torch.float64}
    yield from compare("grouped product of experts", device, run, exact, fault, (inputs, []), bounds)


class Case(NamedTuple):
    """Shape of an attention call."""

    width: int
    """head_dim."""
    heads: int
    kv_heads: int
    window: int | None
    dtype: torch.dtype = torch.bfloat16


CASES = (
    Case(64, 8, 2, None), Case(64, 8, 8, 100), Case(128, 4, 1, None), Case(128, 4, 1, 64), Case(256, 2, 1, None),
    Case(16, 4, 2, 16), Case(64, 4, 2, 100, torch.float32),
)  # fmt: skip
SEQ, LOUD, SILENT = 512, 60, slice(131, 400)
"""Tokens of a row; a position whose value is large; positions whose outputs have no gradient."""
BORDERS = ((0, 1, 130, 131, 400, SEQ), (0, SEQ))
"""Borders of the documents in each row; two documents have one token."""


def attention(device: torch.device, small: bool) -> Iterator[Line]:
    """Attention within documents and over whole rows, with shared key heads, windows and heads of 16 to 256."""
    for case in CASES:
        what = f"attention, heads of {case.width}, {case.heads}/{case.kv_heads}, window {case.window}"
        yield from attempt(what, _attention_case(f"{what}, {_name(case.dtype)}", case, device))
    for width in (64, 128):
        generator, shapes = torch.Generator().manual_seed(0), ((2, 8, SEQ, width), (2, 2, SEQ, width))
        inputs = [_draw(generator, *shapes[index]) for index in (0, 1, 1)]
        rows = ((0, SEQ),) * 2
        fault = ("future visible", lambda q, k, v, rows=rows: _exact(q, k, v, rows, None, causal=False))
        yield from compare(
            f"attention over whole rows, heads of {width}", device,
            lambda q, k, v: causal_sdpa(_Heads(4), q, k, v, None)[0],
            lambda q, k, v, rows=rows: _exact(q, k, v, rows, None), fault, (inputs, []),
            {torch.float32: 1e-5, torch.bfloat16: ATTENTION_BOUND},
        )  # fmt: skip


class _Heads(nn.Module):
    """Attributes of an attention module that transformers' sdpa reads."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def _exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: Sequence[Sequence[int]], window: int | None,
    causal: bool = True,
) -> torch.Tensor:  # fmt: skip
    """Return attention (batch, seq, heads, head_dim), by a softmax for each row and document."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    rows = []
    for row, ends in enumerate(borders):
        parts = []
        for start, end in zip(ends, ends[1:], strict=False):
            q, k, v = (each[row, :, start:end] for each in (query, key, value))
            position = torch.arange(end - start)
            distance = position[:, None] - position
            visible = (distance >= 0) | (not causal)
            if window is not None:
                visible &= distance < window
            scores = (q @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
            parts.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ v)
        rows.append(torch.cat(parts, 1).transpose(0, 1))
    return torch.stack(rows)


def _attention_case(what: str, case: Case, device: torch.device) -> Iterator[Line]:
    """Yield errors of the output at its worst position, of the gradients, and the gradient where it must be zero."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((case.heads, case.width), (case.kv_heads, case.width), (case.kv_heads, case.width))
    inputs = [_draw(generator, 2, heads, SEQ, width).to(case.dtype) for heads, width in sizes]
    grad = _draw(generator, 2, SEQ, case.heads, case.width).to(case.dtype)
    grad[0, SILENT] = 0
    loud = [*inputs[:2], inputs[2].clone()]
    loud[2][0, :, LOUD] *= 1000
    bound = ATTENTION_BOUND if case.dtype == torch.bfloat16 else 1e-5

    def run(tensors: Tensors, borders: Sequence[Sequence[int]] = BORDERS, window: int | None = case.window) -> Any:
        size = max(map(len, borders)) + 1  # rows with fewer documents end with empty ones
        bounds = torch.tensor([[*ends, *[SEQ] * (size - len(ends))] for ends in borders], dtype=torch.int32)
        documents = Documents(bounds.to(device), SEQ)
        return causal_sdpa(
            _Heads(case.heads // case.kv_heads), *tensors, None, sliding_window=window, documents=documents
        )[0]  # fmt: skip

    def at_worst_position(found: torch.Tensor, expected: torch.Tensor) -> float:
        found, expected = found.detach().double().cpu(), expected.detach()
        errors = (found - expected).norm(dim=-1).amax(-1) / expected.norm(dim=-1).amax(-1)  # (batch, seq)
        return errors.max().item()

    def gradients(attend: Formula, tensors: Tensors) -> list[torch.Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        output = attend(leaves)
        return [each.double().cpu() for each in torch.autograd.grad(output, leaves, grad.to(output))]

    def leak(found: Tensors) -> float:
        return max((each[0, :, SILENT].norm() / each.norm()).item() for each in found)

    def exact(tensors: Tensors, causal: bool = True) -> torch.Tensor:
        return _exact(*tensors, BORDERS, case.window, causal)  # type: ignore[misc]

    on_device, wide = ([each.to(device) for each in inputs], [each.double() for each in inputs])
    loud_here, loud_wide = ([each.to(device) for each in loud], [each.double() for each in loud])
    with AttentionProbe() as probe:
        output = run(loud_here)
    kernel = ", ".join(each.kernel for each in probe.observed)
    if device.type == "cuda" and case.dtype == torch.bfloat16 and "varlen" not in kernel:
        yield failed(f"{what}: kernel", f"not the kernel for documents: {kernel}")
    else:
        yield Line(f"{what}: kernel", kernel)
    expected = exact(loud_wide)
    yield at_most(f"{what}: output", at_worst_position(output, expected), bound)
    found, right = gradients(run, on_device), gradients(exact, wide)
    yield at_most(f"{what}: gradients", worst(found, right), bound)
    yield at_most(f"{what}: gradient in a document that must have none", leak(found), LEAK_BOUND)
    whole = BORDERS[0][:1] + BORDERS[0][-1:], BORDERS[1]
    merged = (0, 1, 131, 400, SEQ), BORDERS[1]
    faults = {"documents ignored": whole, "a border dropped": merged}
    for name, borders in faults.items():
        if case.window is None or case.window > 131 - LOUD:
            yield control(f"{what}, {name}: output", at_worst_position(run(loud_here, borders), expected), bound)
    if case.window is not None:
        longer = run(loud_here, window=case.window + 1)
        if LOUD + case.window < 130:
            yield control(f"{what}, window longer by one: output", at_worst_position(longer, expected), bound)
    seen = gradients(lambda tensors: run(tensors, whole), on_device)
    yield control(f"{what}, documents ignored: gradient in a document that must have none", leak(seen), LEAK_BOUND)
    future = at_worst_position(exact(loud_wide, causal=False), expected)
    yield control(f"{what}, future visible: output", future, bound)


def _gathered_keys(device: torch.device, small: bool) -> Iterator[Line]:
    """The variable-length kernel on a chunk of queries, as under cp."""
    if device.type == "cuda":
        yield at_most("queries of a chunk (cp): error", gathered_keys_error("cuda", torch.bfloat16), ATTENTION_BOUND)


def gathered_keys_error(device: str, dtype: torch.dtype) -> float:
    """Return the largest error of the variable-length kernel where queries are a part of a packed row.

    Compares the output and the gradients with attention under a mask in float32 or wider. Of keys in documents without
    queries, the gradients must be zeros.
    """
    from torch.nn.attention.varlen import varlen_attn

    start, end, first, width = 64, 128, 16, 64
    documents = Documents(torch.tensor([[0, 40, 100, 101, 160]], dtype=torch.int32, device=device))
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(tokens, heads, width, generator=generator).to(device, dtype).requires_grad_()
        for tokens, heads in ((end - start, 4), (end - first, 2), (end - first, 2), (end - start, 4))
    )
    query_ends, key_ends = documents.chunk_ends(start, end, first)
    lengths, grouped = (end - start, end - first), has_grouped_queries()
    keys = (key, value) if grouped else [each.repeat_interleave(2, dim=1) for each in (key, value)]
    options: dict[str, Any] = {"window_size": (-1, 0), **({"enable_gqa": True} if grouped else {})}
    output: Any = varlen_attn(query, *keys, query_ends, key_ends, *lengths, **options)
    leaves = query, key, value
    found = [output, *torch.autograd.grad(output, leaves, grad)]
    wide = [leaf.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_() for leaf in leaves]
    heads_first = [wide[0].transpose(0, 1), *(each.repeat_interleave(2, dim=1).transpose(0, 1) for each in wide[1:])]
    mask = documents.mask(160, None)[0, 0, start:end, first:end]
    exact = F.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(0, 1)
    return worst(found, [exact, *torch.autograd.grad(exact, wide, grad.to(exact.dtype))])
