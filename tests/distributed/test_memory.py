"""What each axis does to a rank's memory, in measured bytes: on gloo processes, with the tools of scripts/memory.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from components import distributed
from components.config.errors import ConfigError
from components.config.schema.model import CAUSAL_SDPA, ModelConfig, WeightInit
from components.config.schema.parallelism import ParallelismConfig
from components.distributed.context_parallel import GatheredAttention
from components.models.attention import causal_sdpa
from scripts._memory.options import models_to_measure, read_options
from scripts._memory.ranks import (
    Load,
    SavedForBackward,
    Usage,
    allocations,
    highest,
    local_bytes,
    measure,
    measure_all,
)
from scripts.memory import shapes_of, table
from tests.harness import run_ranks

HIDDEN, VOCAB, LAYERS, EXPERTS, EXPERT_SIZE = 128, 512, 4, 8, 96
BOTH: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
LLAMA = {**BOTH, "model_type": "llama", "intermediate_size": 384, "tie_word_embeddings": True}
MOE = {
    **BOTH,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": EXPERT_SIZE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
}
SHORT, LONG = Load(seq=64, micro_batches=4), Load(seq=512)
EMBEDDING = 4 * VOCAB * HIDDEN
NORMS = 4 * HIDDEN * (2 * LAYERS + 1)
FEW = 4096
"""Bytes of step counters, and of rows that pad a shard."""
Work = dict[str, tuple[dict[str, Any], dict[str, Any], Load]]


def on(world: int, work: Work) -> dict[str, list[Usage]]:
    """What every rank held, by name of the case: (values of a model's config, parallelism, load)."""

    def body(rank: int) -> list[Usage]:
        return [
            measure(
                ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=config),
                ParallelismConfig(**{"dp_shard": 1, **parallelism}),
                load,
            )
            for config, parallelism, load in work.values()
        ]

    told = run_ranks(world, body, timeout=240)
    return {name: [each[index] for each in told] for index, name in enumerate(work)}


@pytest.fixture(scope="module")
def alone() -> dict[str, Usage]:
    """One process."""
    single = {"strategy": "single"}
    work = {"llama": (LLAMA, single, SHORT), "moe": (MOE, single, SHORT), "long": (LLAMA, single, LONG)}
    return {name: usage for name, (usage,) in on(1, work).items()}


@pytest.fixture(scope="module")
def two() -> dict[str, list[Usage]]:
    """Two ranks of each axis."""
    work = {
        "dp_shard": (LLAMA, {"dp_shard": 2}, SHORT),
        "tp": (LLAMA, {"tp": 2}, SHORT),
        "tp sp": (LLAMA, {"tp": 2, "sequence_parallel": True}, SHORT),
        "pp": (LLAMA, {"pp": 2}, SHORT),
        "moe dp_shard": (MOE, {"dp_shard": 2}, SHORT),
        "moe ep": (MOE, {"ep": 2}, SHORT),
        "ulysses": (LLAMA, {"cp": 2, "cp_attention": "ulysses"}, LONG),
        "all_gather": (LLAMA, {"cp": 2, "cp_attention": "all_gather"}, LONG),
    }
    return on(2, work)


def test_the_figures_are_what_a_small_network_must_have() -> None:
    """Against numbers that can be counted by hand."""
    net = nn.Sequential(nn.Linear(256, 512, bias=False), nn.ReLU(), nn.Linear(512, 256, bias=False))
    rows = torch.randn(1024, 256)
    assert local_bytes([*net.parameters(), net[0].weight[:3]]) == 2 * 4 * 256 * 512  # a view is no memory of its own

    def body(rank: int) -> tuple[int, int]:
        with SavedForBackward(lambda: list(net.parameters())) as saved, allocations() as changes:
            net(rows).sum().backward()
        return saved.peak, highest(changes)

    ((saved, peak),) = run_ranks(1, body)
    assert saved == 4 * 1024 * (256 + 512)  # the rows, and the ReLU's output for both the ReLU and the second layer
    outputs = 4 * 1024 * (512 + 512 + 256)
    gradients = 2 * 4 * 256 * 512
    assert outputs + 4 < peak <= outputs + gradients + 4 * 1024 * 512 + 4 * 1024 * 256 + 8


def test_the_script_tells_what_a_mesh_refuses() -> None:
    cfg = ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config={**LLAMA, "num_hidden_layers": 2})
    shapes = [each for each in shapes_of([2], 64, experts=True) if each.name in ("single", "dp_shard 2", "ep 2")]
    loads = {each.name: (each.parallelism, Load(64), each.world) for each in shapes}
    ratios = r" \| [0-9.]+ \(0.50\)" * 3 + r" \| [0-9.]+ \(1.00\) \| [0-9.]+ \(0.[0-9]+\)"
    for _ in range(5):  # gloo may still hold a piece at the peak: one of five must be below that of one process
        single, sharded, refused = table(shapes, measure_all(cfg, loads))[2:]
        assert re.fullmatch(r"\| single( \| [0-9.]+){5} \|", single)
        assert refused.startswith("| ep 2 | refused: parallelism.ep=2: ")
        if re.fullmatch(rf"\| dp_shard 2{ratios} \|", sharded):
            return
    pytest.fail(sharded)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("--degrees 2,x", "--degrees 2,x: must be integers of 2 or more"),
        ("--seq 100 --degrees 2,4", "give a multiple of 8"),
        ("parallelism=tp2", "this script sets the meshes by --degrees"),
        ("model=tiny model.config=3", "model.config"),
    ],
)
def test_a_wrong_option_is_told(typed: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        models_to_measure(read_options(typed.split())[1])


def test_one_process_holds_four_times_its_parameters(alone: dict[str, Usage]) -> None:
    for usage in alone.values():
        assert usage.gradients == usage.parameters
        assert 2 * usage.parameters <= usage.optimizer <= 2 * usage.parameters + FEW
        assert usage.peak > usage.state + usage.saved / 2


@pytest.mark.parametrize("name", ["dp_shard", "moe dp_shard"])
def test_dp_shard_halves_all_state(name: str, alone: dict[str, Usage], two: dict[str, list[Usage]]) -> None:
    whole = alone["moe" if "moe" in name else "llama"]
    for usage in two[name]:
        for part in ("parameters", "gradients", "optimizer"):
            assert getattr(usage, part) == pytest.approx(getattr(whole, part) / 2, abs=FEW)
        assert usage.peak < whole.peak


@pytest.mark.parametrize("name", ["tp", "tp sp"])
def test_tp_halves_all_but_the_norms(name: str, alone: dict[str, Usage], two: dict[str, list[Usage]]) -> None:
    whole = alone["llama"]
    for usage in two[name]:
        assert usage.parameters == pytest.approx((whole.parameters + NORMS) / 2, abs=FEW)
        assert usage.gradients == pytest.approx((whole.gradients + NORMS) / 2, abs=FEW)
        assert usage.optimizer == pytest.approx((whole.optimizer + 2 * NORMS) / 2, abs=FEW)
        # Without sequence parallel, what lies between the regions is on both ranks; with it, the gathered inputs of
        # the projections are.
        assert usage.saved < (0.6 if name == "tp sp" else 0.7) * whole.saved


def test_pp_halves_the_layers_and_keeps_the_embedding_first(
    alone: dict[str, Usage], two: dict[str, list[Usage]]
) -> None:
    """The last stage has a working copy of the tied embedding for its head: a parameter, and a gradient on its way to
    the first stage, but no optimizer state."""
    whole, (first, last) = alone["llama"], two["pp"]
    layers = whole.parameters - EMBEDDING
    assert first.parameters == pytest.approx(layers / 2 + EMBEDDING, abs=FEW)
    assert last.parameters == pytest.approx(layers / 2 + EMBEDDING, abs=FEW)
    assert first.optimizer == pytest.approx(2 * (layers / 2 + EMBEDDING), abs=FEW)
    assert last.optimizer == pytest.approx(2 * (layers / 2), abs=FEW)
    for usage in (first, last):
        assert usage.gradients <= usage.parameters + FEW
        assert usage.state < 0.56 * whole.state


def test_ep_halves_the_experts_and_gathers_none(alone: dict[str, Usage], two: dict[str, list[Usage]]) -> None:
    """Dense parameters are sharded over ep by FSDP, so all of the state is halved; what FSDP would gather of the
    experts for a layer never is."""
    whole = alone["moe"]
    one_layer = 4 * EXPERTS * 3 * HIDDEN * EXPERT_SIZE
    for usage, gathering in zip(two["moe ep"], two["moe dp_shard"], strict=True):
        assert usage.state == pytest.approx(whole.state / 2, abs=FEW)
        assert usage.peak < gathering.peak - one_layer


@pytest.mark.parametrize("attention", ["ulysses", "all_gather"])
def test_cp_halves_the_activations(attention: str, alone: dict[str, Usage], two: dict[str, list[Usage]]) -> None:
    whole = alone["long"]
    for usage in two[attention]:
        assert usage.saved < 0.55 * whole.saved
        assert usage.peak - usage.state < 0.65 * (whole.peak - whole.state)
        assert usage.state == pytest.approx(whole.state / 2, abs=FEW)  # over cp, FSDP shards parameters too


class AtOnce(GatheredAttention):
    """What is not done: keys and values of all heads gathered together, and kept for the backward."""

    def __call__(self, module, query, key, value, attention_mask, sliding_window=None, **options):  # type: ignore[no-untyped-def]
        return self._attend(module, (sliding_window, None), options, query, key, value), None


def test_gathered_keys_and_values_are_never_held_for_all_heads() -> None:
    heads, seq, width, cp = 8, 1024, 64, 4
    whole = 2 * 4 * heads * seq * width  # keys and values of one row, gathered
    AttentionInterface.register(CAUSAL_SDPA, causal_sdpa)

    def body(rank: int) -> dict[str, tuple[int, int]]:
        mesh = distributed.build_mesh(ParallelismConfig(dp_shard=1, cp=cp), "cpu")
        module = nn.Module()
        found = {}
        for attention in (GatheredAttention, AtOnce):
            # (batch, heads, seq / cp, head_dim)
            query, key, value = (torch.randn(1, heads, seq // cp, width, requires_grad=True) for _ in "qkv")
            module.num_key_value_groups = 1
            peaks = []
            for _ in range(5):  # gloo may still hold the piece before: the least of five is what we ask for
                with torch.no_grad(), allocations() as forward:
                    attention(mesh["cp"])(module, query, key, value, None)
                with allocations() as both:
                    attention(mesh["cp"])(module, query, key, value, None)[0].sum().backward()
                peaks.append((highest(forward), highest(both)))
            found[attention.__name__] = tuple(map(min, zip(*peaks, strict=True)))
        return found

    for told in run_ranks(cp, body, timeout=120):
        chunked, at_once = told["GatheredAttention"], told["AtOnce"]
        assert at_once[0] > 2 * whole  # as they arrive, and in the order of the row
        for pieces, together in zip(chunked, at_once, strict=True):  # forward, and with the backward
            assert pieces < 0.6 * together
