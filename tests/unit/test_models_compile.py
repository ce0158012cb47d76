"""Compiled layers: the number of graphs, and training on rows of many lengths as without compilation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components import models, training
from components.batch import Batch
from components.config.schema import ModelConfig, ParallelismConfig, PeftConfig
from components.config.schema.model import DType, WeightInit
from components.config.schema.parallelism import ActivationCheckpointing, PipelineSchedule
from tests.distributed.parity import HYBRID_MODELS
from tests.suites import TORTURE
from tests.tiny_models import SIZES, VOCAB

WINDOW = 16
GEMMA3: dict[str, Any] = {
    **SIZES, "model_type": "gemma3_text", "head_dim": 8, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
LLAMA: dict[str, Any] = {**SIZES, "model_type": "llama"}
LENGTHS = [12, 24, 10, 32, 14, 20, 40, 15, 17, 9, 48, 36]
"""Row lengths, some shorter and some longer than the window."""


@pytest.fixture(autouse=True)
def _reset_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def initialized_model(config: dict[str, Any], peft: str) -> Any:
    cfg = ModelConfig(init=WeightInit.random, tokenizer="bytes", config=dict(config))
    model = models.build_on_meta(cfg, VOCAB)
    models.add_adapters(model, PeftConfig(method=peft))
    models.materialize(model, "cpu")
    models.fill_weights(model, cfg, 0)
    return model


def losses(model: Any) -> list[float]:
    """Train one step per row length, and evaluate before every fourth step."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
    found, prepared = [], training.Prepared(model, training.StepSettings(torch.device("cpu")))
    for number, length in enumerate(LENGTHS):
        rows = torch.randint(3, VOCAB, (2, length), generator=generator)
        batch = Batch.from_labels(rows, rows)
        if number % 4 == 0:
            found.append(training.evaluate(prepared, [batch]).loss)
        found.append(training.train_step(prepared, [batch], optimizer)["loss"].item())
    return found


COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "by default": ({}, {}, True),
    "recomputed as a whole": ({}, {"activation_checkpointing": ActivationCheckpointing.full}, True),
    "recomputed by operator": ({}, {"activation_checkpointing": ActivationCheckpointing.selective}, False),
    "split backward": ({}, {"pp": 2, "dp_shard": 1, "pp_schedule": PipelineSchedule.ZBVZeroBubble}, False),
    "its schedule without pp": ({}, {"pp_schedule": PipelineSchedule.ZBVZeroBubble}, True),
    "tp with packed rows": ({}, {"tp": 2, "dp_shard": 1}, True),
    "tp with rows of many lengths": ({}, {"tp": 2, "dp_shard": 1, "packs": False}, False),
    "rows of many lengths": ({}, {"packs": False}, True),
    "float64": ({"dtype": DType.float64}, {}, False),
    "turned off": ({"compile": "False"}, {}, False),  # false of a YAML file
}


@pytest.mark.parametrize("case", COMPILED)
def test_layers_are_compiled_on_gpus_unless_a_setting_excludes_it(case: str) -> None:
    model, axes, compiled = copy.deepcopy(COMPILED[case])
    cfg = ModelConfig(init=WeightInit.random, tokenizer="bytes", config=dict(LLAMA), **model)
    packs = axes.pop("packs", True)
    parallelism = ParallelismConfig(**axes)
    assert cfg.compiles(parallelism, packs=packs, on_gpu=True) is compiled
    assert cfg.fuses(parallelism, packs=packs, on_gpu=True) is not compiled
    assert bool(cfg.uncompiled_because(parallelism, packs=packs)) is (not compiled and "compile" not in model)
    assert not cfg.compiles(parallelism, packs=packs, on_gpu=False)
    assert not cfg.fuses(parallelism, packs=packs, on_gpu=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "peft", "max_graphs"),
    [(LLAMA, "none", 2), *([(GEMMA3, "lora", 6), (LLAMA, "lora", 3), (GEMMA3, "none", 6)] if TORTURE else [])],
)
def test_rows_of_many_lengths_train_with_few_compiled_graphs(
    config: dict[str, Any], peft: str, max_graphs: int
) -> None:
    """All layers share one code object and its recompile limit, which is 8 by default in torch.

    Separate graphs exist for evaluation and training, for layers whose input needs no gradient (under adapters), and
    for rows shorter or longer than the window. Row lengths as such must not add graphs.
    """
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain = initialized_model(config, peft)
    compiled = copy.deepcopy(plain)
    models.compile_layers(compiled, backend=backend)
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-5)
    assert len(graphs) <= max_graphs


@pytest.mark.slow
def test_linear_attention_is_not_compiled_for_each_number_of_chunks() -> None:
    """transformers' function loops over chunks of 64 tokens, which the compiler would unroll."""
    values = {key: value for key, value in HYBRID_MODELS["qwen3_5_text"].items() if key != "max_position_embeddings"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values, max_position_embeddings=512))
    models.use_causal_sdpa(model)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    models.compile_layers(model, backend=backend)
    counts = []
    for length in (70, 130, 200, 260, 330):
        model(input_ids=torch.ones(1, length, dtype=torch.int64), use_cache=False).logits.sum().backward()
        counts.append(len(graphs))
    assert counts[1:] == [counts[1]] * 4, counts
