"""A training step of a model with random weights, built as in a recipe."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from components import data, distributed, models, training
from components.config.schema import FinetuneConfig, ModelConfig, ParallelismConfig, PeftConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import DType, WeightInit
from components.config.schema.parallelism import Strategy
from components.data.dataset import Facts
from components.models.lora import initialize_adapters
from components.models.quantization import BLOCK, BLOCK_BYTES, is_packed, pack
from components.models.weights.shards import local_part
from components.planning.parity_reference import compute_in_float64

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
LLAMA_1B: dict[str, Any] = {
    **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
"""The shape of Llama 3.2 1B."""
LLAMA_8B: dict[str, Any] = {
    **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
"""The shape of Llama 3.1 8B."""
TINY: dict[str, Any] = {
    **_LLAMA, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
SINGLE: dict[str, Any] = {"strategy": Strategy.single, "dp_shard": 1, "activation_checkpointing": "none"}
"""The `parallelism` section of one device without sharding and recompute."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Rows of a step: `micro_batches` of `rows` rows of `tokens` tokens, each row of `documents` equal documents."""

    tokens: int = 64
    rows: int = 2
    micro_batches: int = 1
    documents: int = 2
    pack: bool = True
    lengths: tuple[int, ...] = ()
    """Lengths of the documents, or of rows that are not packed; empty: equal ones."""


class _PadToken:
    """The only attribute of a tokenizer that a dataset reads."""

    pad_token_id = 0


@dataclass
class TrainingStep:
    """A prepared model with its optimizer and batches."""

    cfg: FinetuneConfig
    model: training.Prepared
    optimizer: Any
    batches: data.TrainBatches
    plan: data.BatchPlan
    done: int = 0
    """Steps so far."""

    def use_rows(self, shape: Shape) -> None:
        """Continue on other random rows of the same size."""
        rows = random_rows(shape, self.model.module.config.vocab_size)
        self.batches = data.TrainBatches(rows, self.plan, seed=3)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.settings.device

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.cfg.training.seq_len * self.cfg.training.global_batch_size

    def run(self, steps: int) -> training.StepNumbers:
        """Do a number of optimizer steps, at least one; return the numbers of the last, on the device."""
        for _ in range(steps):
            numbers = training.train_step(self.model, self.batches.at(self.done), self.optimizer)
            self.done += 1
        return numbers

    def curve(self, steps: int) -> list[float]:
        """Return the loss of each of a number of steps."""
        return [self.run(1)["loss"].item() for _ in range(steps)]

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
    *,
    parallelism: dict[str, Any] | None = None,
    peft: str = "none",
    lr: float | None = None,
    rows: Any = None,
    **model: Any,
) -> Iterator[TrainingStep]:
    """Yield a training step of a model with random weights; its memory is freed afterwards.

    Args:
        config: The model's config.json.
        parallelism: Keys of the `parallelism` section; None: SINGLE.
        lr: Learning rate; None: the default.
        rows: Dataset of the rows; None: random tokens in rows of `shape`.
        model: Further keys of the `model` section; the layers are not compiled by default.
    """
    values = {"compile": "false", **model}
    cfg = FinetuneConfig(
        model=ModelConfig(init=WeightInit.random, tokenizer="bytes", config=dict(config), **values),
        data=DocsDataConfig(pack=shape.pack),
        parallelism=ParallelismConfig(**(SINGLE if parallelism is None else parallelism)),
        peft=PeftConfig(method=peft),  # type: ignore[arg-type]
    )
    cfg.training.seq_len, cfg.training.micro_batch_size = shape.tokens, shape.rows
    cfg.training.global_batch_size = shape.rows * shape.micro_batches
    cfg.optimizer.lr = cfg.optimizer.lr if lr is None else lr
    mesh = distributed.build_mesh(cfg.parallelism, device)
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    cfg = replace(cfg, model=replace(cfg.model, dtype=training.stored_dtype(cfg.model, place, adapts=cfg.peft.adapts)))
    built = models.build_on_meta(cfg.model, config["vocab_size"])
    anatomy = models.read_anatomy(built)
    models.add_adapters(built, cfg.peft)
    if cfg.model.dtype is DType.float64:
        compute_in_float64(built)
    prepared = training.prepare_built(built, anatomy, cfg, training.RunContext(mesh, place), fill=draw_weights)
    plan = data.BatchPlan(
        global_batch_size=cfg.training.global_batch_size,
        micro_batch_size=shape.rows,
        padding=data.Padding(multiple=mesh.sequence_multiple),
    )
    batches = data.TrainBatches(rows or random_rows(shape, config["vocab_size"]), plan, seed=3)
    step = TrainingStep(cfg, prepared, training.build_optimizer(prepared, cfg.optimizer), batches, plan)
    try:
        yield step
    finally:
        del prepared, step.model, step.optimizer
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def draw_weights(model: Any, cfg: ModelConfig, seed: int) -> None:
    """Draw weights of standard deviation 0.02 on the device: of 8B, `models.fill_weights` takes a CPU over a minute."""
    initialize_adapters(model, seed)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        local = local_part(parameter)
        generator = torch.Generator(local.device).manual_seed(seed * 1_000_003 + index)
        if "lora_" in name:
            continue
        if is_packed(parameter):
            shape = local.shape[0], local.shape[1] // BLOCK_BYTES * BLOCK
            local.copy_(pack(0.02 * torch.randn(shape, device=local.device, generator=generator)))
        elif local.dim() == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            local.normal_(0.0, 0.02, generator=generator)


def random_rows(shape: Shape, vocabulary: int) -> Any:
    """Return random rows whose tokens are all targets."""
    generator = torch.Generator().manual_seed(1)
    lengths = shape.lengths or (shape.tokens // shape.documents if shape.pack else shape.tokens,)
    examples = []
    for index in range(64 * shape.documents):
        tokens = torch.randint(1, vocabulary, (lengths[index % len(lengths)],), generator=generator).tolist()
        examples.append(data.Example(tokens, list(tokens)))
    return dataset(examples, shape)


def dataset(examples: Sequence[data.Example], shape: Shape) -> Any:
    """Return samples, packed into rows or not."""
    samples = data.Dataset(list(examples), _PadToken(), facts=Facts("random"), seq_len=shape.tokens)  # type: ignore[arg-type]
    return data.PackedDataset(samples, shape.tokens) if shape.pack else samples


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
