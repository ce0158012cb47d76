"""Compiled layers: the number of graphs, and training on rows of many lengths as without compilation."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from components import models, training
from components.batch import Batch
from components.config.schema import ModelConfig, PeftConfig
from components.config.schema.model import WeightInit
from tests.tiny_models import SIZES, VOCAB

TORTURE = os.environ.get("MESHBOOK_TORTURE") == "1"
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "peft", "max_graphs"),
    [(LLAMA, "none", 2), (GEMMA3, "lora", 6), *([(LLAMA, "lora", 3), (GEMMA3, "none", 6)] if TORTURE else [])],
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
