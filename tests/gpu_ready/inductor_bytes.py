"""Bytes that Inductor's fused kernels move per token: `python -m tests.gpu_ready.inductor_bytes NAME PEFT`.

A layer of a model and its chunked loss are compiled on the CPU with two numbers of tokens; the difference is what a
token costs. Matrix products and attention are separate kernels and do not count. Inductor fuses elementwise operators
by the same rules for GPUs, so the bytes are a prediction for them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.scheduler import Scheduler
from torch._inductor.select_algorithm import extern_kernels

from components import models
from components.config.schema import ModelConfig, PeftConfig
from components.config.schema.model import WeightInit
from components.training.objectives import PLAIN
from components.training.objectives.chunked_loss import Head, Targets, linear_token_loss
from tests.gpu_ready.roofline import MODELS

TOKENS = (128, 256)
FUSED = {"SchedulerNode", "FusedSchedulerNode", "OuterLoopFusedSchedulerNode"}
CPU = torch.device("cpu")


@contextmanager
def without_kernels() -> Iterator[None]:
    """Generate kernels, but compile and run neither them nor matmuls, which would take most of the time."""

    def do_nothing(*arguments: Any, **options: Any) -> None:
        pass

    changed = [(AsyncCompile, "cpp_pybinding"), *((extern_kernels, name) for name in ("mm", "addmm", "bmm"))]
    originals = [getattr(each, name) for each, name in changed]
    AsyncCompile.cpp_pybinding = lambda self, argument_types, source: do_nothing  # type: ignore[method-assign]
    for each, name in changed[1:]:
        setattr(each, name, do_nothing)
    yield
    for (each, name), original in zip(changed, originals, strict=True):
        setattr(each, name, original)


class Bytes:
    """Sums the bytes of all fused kernels that are generated within the context."""

    def __enter__(self) -> Bytes:
        torch._dynamo.reset()
        self.moved, self._codegen = 0, Scheduler.codegen
        codegen = self._codegen

        def counting(scheduler: Scheduler) -> Any:
            kernels = [each for each in scheduler.nodes if type(each).__name__ in FUSED]
            self.moved += sum(each.get_read_write_buffers_sizes() for each in kernels)
            return codegen(scheduler)

        Scheduler.codegen = counting  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        Scheduler.codegen = self._codegen  # type: ignore[method-assign]


def layer_bytes(config: dict[str, Any], peft: str) -> float:
    """Return the bytes per token of one layer, forward and backward, whose input needs a gradient."""
    config = {**config, "num_hidden_layers": 1, "vocab_size": 512}
    cfg = ModelConfig(init=WeightInit.random, tokenizer="bytes", config=config, dtype="bfloat16", compile="true")  # type: ignore[arg-type]
    model = models.build_on_meta(cfg, 512)
    models.add_adapters(model, PeftConfig(method=peft))  # type: ignore[arg-type]
    models.compile_layers(model)
    models.materialize(model, CPU)
    models.fill_weights(model, cfg, 0)
    model.enable_input_require_grads()
    model.train()
    moved = []
    for tokens in TOKENS:
        with Bytes() as counted:
            rows = torch.ones(1, tokens, dtype=torch.int64)
            model(input_ids=rows, use_cache=False).logits.float().sum().backward()
        moved.append(counted.moved)
    return (moved[1] - moved[0]) / (TOKENS[1] - TOKENS[0])


def loss_bytes(vocabulary: int) -> float:
    """Return the bytes per token of the compiled loss and its gradient."""
    moved = []
    for tokens in TOKENS:
        hidden = torch.zeros(tokens, 64, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.zeros(vocabulary, 64, dtype=torch.bfloat16)
        with Bytes() as counted:
            targets = Targets(torch.ones(tokens, dtype=torch.int64))
            linear_token_loss(hidden, weight, None, targets, Head(compiled=True), PLAIN.token_loss)
        moved.append(counted.moved)
    return (moved[1] - moved[0]) / (TOKENS[1] - TOKENS[0])


def main(name: str, peft: str) -> None:
    """Print the bytes per token of a layer and of the loss as JSON."""
    config = MODELS[name]
    with torch._inductor.config.patch(force_disable_caches=True), without_kernels():
        print(json.dumps({"layer": layer_bytes(config, peft), "loss": loss_bytes(config["vocab_size"])}))


if __name__ == "__main__":
    main(*sys.argv[1:])
