"""Steps with the levers of speed and memory together: none of them makes the host wait for the device."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from components import distributed, models, training
from components.config.schema import ActivationCheckpointing, FinetuneConfig, ModelConfig, ParallelismConfig, PeftConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import DType, Float8, LossMethod, WeightInit
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.training import TrainingConfig
from components.models.float8 import float8_layers
from components.parity.shapes import layout_of
from tests.distributed.adapted import DORA, QLORA
from tests.distributed.packed import SEQ_LEN, batches_of, packed
from tests.harness import run_ranks
from tests.optional import need_torchao
from tests.tiny_models import FAMILIES

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "unique2")
"""Operators of aten whose result the host, or the shape of another tensor, has to wait for."""


@dataclass(frozen=True)
class Levers:
    """A step on packed rows, its loss in chunks."""

    peft: PeftConfig
    recompute: ActivationCheckpointing
    compile: bool = False
    float8: Float8 = Float8.none

    def __str__(self) -> str:
        parts = [self.peft.method, self.recompute, "compile" if self.compile else "", self.float8]
        return " ".join(str(part) for part in parts if part not in ("", "none"))


ADAPTED = Levers(changed(DORA, dropout=0.1), ActivationCheckpointing.selective)
PACKED_WEIGHTS = Levers(changed(QLORA, dropout=0.1), ActivationCheckpointing.selective)
COMPILED = Levers(changed(QLORA, dropout=0.1), ActivationCheckpointing.full, compile=True)
EIGHT_BITS = Levers(PeftConfig(), ActivationCheckpointing.selective, float8=Float8.rowwise)


def built(levers: Levers, layout: ParallelismConfig | None = None) -> tuple[Any, training.TokenLoss, ModelConfig]:
    """A model as a recipe makes it, on the meta device."""
    cfg = FinetuneConfig(
        model=ModelConfig(
            init=WeightInit.random, tokenizer="bytes", config={**FAMILIES["qwen3"], "num_hidden_layers": 1},
            dtype=DType.bfloat16, loss=LossMethod.chunked, float8=levers.float8,
            float8_emulate=levers.float8 != Float8.none,
        ),
        data=DocsDataConfig(pack=True), training=TrainingConfig(seq_len=SEQ_LEN, micro_batch_size=2),
    )  # fmt: skip
    model = models.build_on_meta(cfg.model)
    models.add_adapters(model, levers.peft)
    mesh = None
    if layout is not None:
        mesh = distributed.build_mesh(layout, "cpu")
        distributed.parallelize(model, mesh, layout, torch.bfloat16)
    loss = training.attach_loss_head(
        model, cfg.model.loss, cfg.training, cfg.parallelism, mesh, None, torch.device("meta")
    )
    assert loss.takes_targets
    models.checkpoint_activations(model, levers.recompute)
    if levers.compile:
        models.compile_layers(model, backend="eager")
    return model, loss, cfg.model


@pytest.mark.parametrize("levers", [ADAPTED, PACKED_WEIGHTS, COMPILED, EIGHT_BITS], ids=str)
def test_a_step_with_every_lever_never_waits_for_the_device(levers: Levers) -> None:
    """On the meta device whatever would wait raises. Rows come from the host, as in a recipe."""
    if levers.float8 != Float8.none:
        need_torchao()
    model, loss, _ = built(levers)
    assert bool(float8_layers(model)) == (levers.float8 != Float8.none)
    optimizer = training.build_optimizer(model, AdamWConfig())
    settings = training.StepSettings(torch.device("meta"), loss_head=loss)
    vector = training.train_step(training.Prepared(model, settings), batches_of(packed(), micro=2).at(0), optimizer)
    assert vector.vector.is_meta
    assert vector.vector.shape == (len(training.FIELDS),)


class NoWaiting(TorchDispatchMode):
    """Raises where a device would make the host wait, on a CPU, which never does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if func.overloadpacket.__name__ in WAITS:
            raise RuntimeError(f"{func}: the host waits")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("levers", [PACKED_WEIGHTS], ids=str)
def test_ranks_that_prefetch_never_wait_for_the_device(levers: Levers) -> None:
    """FSDP2 does not run on the meta device: two ranks on CPUs, where operators that would wait raise instead."""

    def body(rank: int) -> int:
        layout = layout_of("dp_shard2", ParallelismConfig(prefetch=1))
        model, loss, cfg = built(levers, layout)
        models.materialize(model, "cpu")
        models.fill_weights(model, cfg, 0)
        optimizer = training.build_optimizer(model, AdamWConfig())
        settings = training.StepSettings(torch.device("cpu"), loss_head=loss)
        batches = batches_of(packed(), rank, 2, micro=1)
        training.train_step(training.Prepared(model, settings), batches.at(0), optimizer)  # the first step sets up
        on_host = batches.at(1)
        waiting = NoWaiting()
        with waiting:
            training.train_step(training.Prepared(model, settings), on_host, optimizer)
        return waiting.seen

    assert min(run_ranks(2, body)) > 500


def test_an_operator_that_waits_is_seen() -> None:
    with pytest.raises(RuntimeError, match="the host waits"), NoWaiting():
        torch.ones(3).sum().item()
