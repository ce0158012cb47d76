"""A training step of a model with random weights, built as in a recipe."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from components import data, distributed, training
from components.config.schema import FinetuneConfig, ModelConfig, ParallelismConfig, PeftConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import WeightInit
from components.config.schema.parallelism import Strategy
from components.data.dataset import Facts
from components.distributed.mesh import Mesh

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
LLAMA_1B: dict[str, Any] = {
    **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
"""The shape of Llama 3.2 1B."""
TINY: dict[str, Any] = {
    **_LLAMA, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
GEMMA3: dict[str, Any] = {
    **TINY, "model_type": "gemma3_text", "head_dim": 16, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
QWEN3_MOE: dict[str, Any] = {
    **TINY, "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of a step: `micro_batches` of `rows` rows of `tokens` tokens, each row of `documents` equal documents."""

    tokens: int = 64
    rows: int = 2
    micro_batches: int = 1
    documents: int = 2
    pack: bool = True
    lengths: tuple[int, ...] = ()
    """Lengths of rows that are not packed; empty: all `tokens`."""


class _PadToken:
    """The only attribute of a tokenizer that a dataset reads."""

    pad_token_id = 0


@dataclass(frozen=True, slots=True)
class _Start:
    """Attributes of a run that `training.prepare` requires; without a checkpoint to resume from."""

    mesh: Mesh
    device: torch.device
    resume_from: None = None


@dataclass
class TrainingStep:
    """A prepared model with its optimizer and batches."""

    model: training.Prepared
    optimizer: Any
    batches: data.TrainBatches
    device: torch.device
    tokens: int
    """Tokens of a step."""
    losses: list[float] = field(default_factory=list)
    done: int = 0

    def run(self, steps: int) -> torch.Tensor:
        """Do a number of optimizer steps; return the last loss, on the device."""
        loss = torch.zeros(())
        for _ in range(steps):
            loss = training.train_step(self.model, self.batches.at(self.done), self.optimizer)["loss"]
            self.done += 1
        return loss

    def curve(self, steps: int) -> list[float]:
        """Return the loss of each of a number of steps."""
        return [self.run(1).item() for _ in range(steps)]

    def seconds(self, steps: int, warmup: int) -> float:
        """Return the seconds of a step after a warm-up."""
        self.run(warmup)
        synchronize(self.device)
        began = time.perf_counter()
        self.run(steps)
        synchronize(self.device)
        return (time.perf_counter() - began) / steps


@contextmanager
def training_step(
    config: dict[str, Any],
    shape: Shape,
    device: str,
    strategy: Strategy = Strategy.single,
    peft: str = "none",
    policy: str = "none",
    **model: Any,
) -> Iterator[TrainingStep]:
    """Yield a training step of a model with random weights; its memory is freed afterwards.

    Args:
        config: The model's config.json.
        policy: Activation checkpointing.
        model: Further keys of the model section.
    """
    values = {"compile": "false", **model}
    cfg = FinetuneConfig(
        model=ModelConfig(init=WeightInit.random, tokenizer="bytes", config=dict(config), **values),
        data=DocsDataConfig(pack=shape.pack),
        parallelism=ParallelismConfig(strategy=strategy, dp_shard=1, activation_checkpointing=policy),  # type: ignore[arg-type]
        peft=PeftConfig(method=peft),  # type: ignore[arg-type]
    )
    cfg.training.seq_len, cfg.training.micro_batch_size = shape.tokens, shape.rows
    cfg.training.global_batch_size = shape.rows * shape.micro_batches
    mesh = distributed.build_mesh(cfg.parallelism, device)
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    prepared = training.prepare(cfg, _Start(mesh, place), config["vocab_size"])
    plan = data.BatchPlan(
        global_batch_size=cfg.training.global_batch_size,
        micro_batch_size=shape.rows,
        dp_rank=0,
        dp_size=1,
        padding=data.Padding(multiple=mesh.sequence_multiple),
    )
    batches = data.TrainBatches(rows_of(shape, config["vocab_size"]), plan, seed=3)
    optimizer = training.build_optimizer(prepared, cfg.optimizer)
    step = TrainingStep(prepared, optimizer, batches, place, shape.tokens * cfg.training.global_batch_size)
    try:
        yield step
    finally:
        del prepared, optimizer, step.model, step.optimizer
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def rows_of(shape: Shape, vocabulary: int) -> Any:
    """Return random rows whose tokens are all targets."""
    generator = torch.Generator().manual_seed(1)
    length = shape.tokens // shape.documents if shape.pack else shape.tokens
    lengths = shape.lengths or (length,)
    examples = []
    for index in range(64 * shape.documents):
        tokens = torch.randint(1, vocabulary, (lengths[index % len(lengths)],), generator=generator).tolist()
        examples.append(data.Example(tokens, list(tokens)))
    samples = data.Dataset(examples, _PadToken(), facts=Facts("random"), seq_len=shape.tokens)  # type: ignore[arg-type]
    return data.PackedDataset(samples, shape.tokens) if shape.pack else samples


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
