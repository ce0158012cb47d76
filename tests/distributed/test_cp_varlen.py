"""Context parallelism over gathered keys by the variable-length kernel, emulated on a CPU, matches one process.

The emulation follows the documented semantics of FlashAttention's varlen interface: sequences are given by cumulative
lengths, and the causal mask and windows are aligned to the last query and the last key of each. As in the kernel, the
backward uses the output and the log-sum-exp of the forward, and gradients of keys outside all sequences are undefined.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from components import distributed
from components.config.schema import ParallelismConfig
from components.config.schema.model import CAUSAL_SDPA
from components.distributed import context_parallel
from components.distributed.context_parallel import GatheredAttention
from components.distributed.row_shards import local_positions
from components.models.attention import causal_sdpa
from components.models.documents import Documents
from scripts._gpu.kernels import gathered_keys_error
from tests.distributed.packed import MODELS, documents, packed, reference
from tests.distributed.packed import differences as step_differences
from tests.distributed.parity import build, relative
from tests.distributed.test_packing import GATHER, on_mesh
from tests.harness import run_ranks

BATCH, HEADS, KV_HEADS, WIDTH, SEQ = 2, 8, 4, 8, 32
LAST = [[0, 5, 6, 19, 32], [0, 32, 32, 32, 32]]
"""Documents that cross chunks, start and end within one, hold one token; and one document, padded with empty ones."""


def sequences(
    query: torch.Tensor, key: torch.Tensor, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Iterator[tuple[slice, slice, torch.Tensor, float]]:
    """Yield the queries and the keys of each sequence, the mask (queries, keys) and the scale of a kernel call."""
    query_ends, key_ends, longest_query, longest_key = arguments
    assert query_ends.dtype == key_ends.dtype == torch.int32
    assert (query_ends[-1], key_ends[-1]) == (len(query), len(key)), "gradients outside of sequences are undefined"
    left, right = options["window_size"]
    assert right == 0
    assert options["is_causal"] == (left == -1)
    scale = options["scale"] or query.shape[-1] ** -0.5
    queries, keys = query_ends.tolist(), key_ends.tolist()
    assert queries[0] == keys[0] == 0
    for rows, columns in zip(zip(queries, queries[1:], strict=False), zip(keys, keys[1:], strict=False), strict=True):
        length, width = rows[1] - rows[0], columns[1] - columns[0]
        assert 0 <= length <= longest_query
        assert 0 <= width <= longest_key
        position = torch.arange(length)[:, None] + width - length  # aligned to the last query and the last key
        distance = position - torch.arange(width)
        yield slice(*rows), slice(*columns), (distance >= 0) & ((distance <= left) | (left < 0)), scale


def scores(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """(queries, heads, head_dim) and (keys, kv_heads, head_dim) -> (heads, queries, keys)."""
    found = torch.einsum("qhd,khd->hqk", query, repeat(key, query)) * scale
    return found.masked_fill(~mask, -torch.inf)


def repeat(key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def emulated_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_ends: torch.Tensor, key_ends: torch.Tensor,
    longest_query: int, longest_key: int, is_causal: bool = False, scale: float | None = None,
    window_size: list[int] | None = None, enable_gqa: bool = False, *unused: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[1])
    arguments = query_ends, key_ends, longest_query, longest_key
    options = {"is_causal": is_causal, "scale": scale, "window_size": window_size}
    output = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
    logsumexp = query.new_full((query.shape[1], len(query)), torch.nan)
    for rows, columns, mask, scale in sequences(query, key, arguments, options):
        found = scores(query[rows], key[columns], mask, scale)
        logsumexp[:, rows] = found.logsumexp(dim=-1)
        output[rows] = torch.einsum("hqk,khd->qhd", found.softmax(dim=-1), repeat(value[columns], query))
    return output, logsumexp, torch.zeros(2, dtype=torch.uint64)


def emulated_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
    logsumexp: torch.Tensor, query_ends: torch.Tensor, key_ends: torch.Tensor, longest_query: int, longest_key: int,
    is_causal: bool, random_state: torch.Tensor, scale: float | None = None, window_size: list[int] | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    arguments = query_ends, key_ends, longest_query, longest_key
    options = {"is_causal": is_causal, "scale": scale, "window_size": window_size}
    grads = [torch.full_like(each, torch.nan, memory_format=torch.contiguous_format) for each in (query, key, value)]
    delta = (grad * output).sum(-1).t()  # (heads, queries)
    for rows, columns, mask, scale in sequences(query, key, arguments, options):
        found = scores(query[rows], key[columns], mask, scale)
        weights = (found - logsumexp[:, rows, None]).exp()
        slopes = torch.einsum("qhd,khd->hqk", grad[rows], repeat(value[columns], query)) - delta[:, rows, None]
        slopes = slopes * weights * scale
        grads[0][rows] = torch.einsum("hqk,khd->qhd", slopes, repeat(key[columns], query))
        heads = torch.einsum("hqk,qhd->khd", slopes, query[rows]), torch.einsum("hqk,qhd->khd", weights, grad[rows])
        for target, of_heads in zip(grads[1:], heads, strict=True):
            target[columns] = of_heads.unflatten(1, (key.shape[1], -1)).sum(2)
    return tuple(grads)


def install_emulation() -> None:
    """Register the emulation for this process, which must be a forked rank."""
    importlib.import_module("torch.nn.attention.varlen")  # defines the operators
    torch.library.register_kernel("torch_attn::_varlen_attn", "cpu", emulated_forward)
    torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", emulated_backward)
    context_parallel.supports_varlen = lambda query, value, dropout: query.shape[-1] == value.shape[-1]


def expected(tensors: list[torch.Tensor], window: int | None, bounds: torch.Tensor | None) -> list[torch.Tensor]:
    """Return (batch, seq, heads, head_dim) and the gradients of its product with a fixed tensor, in one process."""
    query, key, value = (each.clone().requires_grad_() for each in tensors[:3])
    position = torch.arange(SEQ)
    mask = position <= position[:, None]
    if window is not None:
        mask = mask & (position > position[:, None] - window)
    if bounds is not None:
        document = (position[:, None] >= bounds[:, None, 1:]).sum(-1)  # (batch, seq)
        mask = mask & (document[:, :, None] == document[:, None, :])
    found = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(HEADS // KV_HEADS, 1)) * 0.3
    weights = found.masked_fill(~mask.expand(BATCH, SEQ, SEQ)[:, None], -torch.inf).softmax(-1)
    output = torch.einsum("bhqk,bhkd->bqhd", weights, value.repeat_interleave(HEADS // KV_HEADS, 1))
    (output * tensors[3]).sum().backward()
    return [output.detach(), query.grad, key.grad, value.grad]  # type: ignore[list-item]


CASES = [(window, packs) for window in (None, 3, 13) for packs in (False, True)]


@pytest.mark.parametrize("cp", [2, 4])
def test_varlen_calls_over_gathered_keys_match_one_process(cp: int) -> None:
    """So do explicit masks, the reference where the kernel is missing, and keys repeated for torch 2.11."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, HEADS, SEQ, WIDTH), *[(BATCH, KV_HEADS, SEQ, WIDTH)] * 2, (BATCH, SEQ, HEADS, WIDTH)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    bounds = torch.tensor(LAST, dtype=torch.int32)
    wanted = [expected(tensors, window, bounds if packs else None) for window, packs in CASES]
    AttentionInterface.register(CAUSAL_SDPA, causal_sdpa)

    def on_rank(rank: int) -> list[str]:
        mesh = distributed.build_mesh(ParallelismConfig(dp_shard=1, cp=cp), "cpu")["cp"]
        local = local_positions(SEQ, mesh, torch.device("cpu"))
        problems = []
        for kernel in ("masks", "varlen", "varlen with repeated keys"):
            if kernel == "varlen":
                install_emulation()
            elif kernel != "masks":
                context_parallel.has_grouped_queries = lambda: False
            for (window, packs), results in zip(CASES, wanted, strict=True):
                leaves = [each[:, :, local].clone().requires_grad_() for each in tensors[:3]]
                module = nn.Module()
                module.num_key_value_groups = HEADS // KV_HEADS  # type: ignore[assignment]
                options = {"documents": Documents(bounds, longest=32)} if packs else {}
                output, _ = GatheredAttention(mesh, CAUSAL_SDPA)(
                    module, *leaves, None, sliding_window=window, scaling=0.3, **options
                )
                (output * tensors[3][:, local]).sum().backward()
                found = [output.detach(), *(each.grad for each in leaves)]
                exact = [results[0][:, local], *(each[:, :, local] for each in results[1:])]
                for name, got, want in zip("oqkv", found, exact, strict=True):
                    if not relative(got, want) < 1e-12:
                        problems.append(f"{kernel} window={window} packed={packs}: {name} {relative(got, want)}")
        return problems

    assert not [line for lines in run_ranks(cp, on_rank, timeout=120) for line in lines]


def test_packed_model_over_gathered_keys_by_varlen_matches_separate_documents() -> None:
    """Sliding windows, grouped keys and recomputed layers; documents cross the borders of ranks."""
    rows, name = packed(), "mistral"
    model = build(name, torch.float64, MODELS[name])
    wanted = reference(model, documents(rows))

    def on_rank(rank: int) -> list[str]:
        install_emulation()
        return [
            line
            for policy in ("full", "selective")
            for line in step_differences(wanted, on_mesh(model, GATHER, policy)[0])
        ]

    assert not [line for lines in run_ranks(2, on_rank, timeout=120) for line in lines]


def test_gpu_check_of_gathered_keys_accepts_the_documented_kernel() -> None:
    def on_rank(rank: int) -> float:
        install_emulation()
        return gathered_keys_error("cpu", torch.float64)

    assert run_ranks(1, on_rank)[0] < 1e-12
