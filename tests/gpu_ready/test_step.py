"""A training step on fake CUDA tensors for every layout: no host sync, no tensor on the wrong device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.gpu_ready.conftest import Run
from tests.gpu_ready.matrix import LAYOUTS, MIXED, ranks
from tests.optional import need_torchao
from tests.suites import PARITY, select

CHUNKED = {"model": {"loss": "chunked"}}
TEACHERS = ["single", "dp_shard", "tp with sequence parallelism", "cp by ulysses", "pp"]
OPTIMIZERS = ["single", "hsdp", "tp with sequence parallelism", "pp"]


def operators_with(name: str) -> Callable[[dict[str, Any]], int]:
    """Return a function that counts the operators of a record whose name has a part."""
    return lambda record: sum(count for operator, count in record["operators"].items() if name in operator)


@dataclass(frozen=True)
class Trained:
    """What a step trains, and on which layouts."""

    layouts: list[str]
    each_commit: list[str]
    """The layouts of each commit."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Those of `cases.step`."""
    reads: int | None = 2
    """Values that an evaluation reads: sums, and the means of metrics; None: not checked."""
    least: tuple[Callable[[dict[str, Any]], int], int] = (lambda record: 0, 0)
    """A count of operators, and how many there are at least."""


TRAINED = {
    # The other layouts train at each commit below and in test_matrix.py.
    "next_token": Trained([*LAYOUTS], ["cp by ulysses"], reads=1),
    "distillation": Trained(TEACHERS, ["dp_shard", "pp"], {**CHUNKED, "objective": "distillation"}),
    "stored_distillation": Trained(
        TEACHERS[2:], ["tp with sequence parallelism"], {**CHUNKED, "objective": "stored_distillation"}
    ),
    "dapo": Trained(TEACHERS, ["single", "tp with sequence parallelism"], {**CHUNKED, "objective": "dapo"}),
    "classification": Trained(TEACHERS, ["tp with sequence parallelism"], {"objective": "classification"}),
    "reward": Trained(["single", "cp by all_gather", "pp"], ["cp by all_gather"], {"objective": "reward"}),
    "dpo": Trained(TEACHERS, ["cp by ulysses"], {"objective": "dpo"}),
    "dpo_adapters_off": Trained(
        ["single", "hsdp", "tp", "pp"], ["pp"], {"objective": "dpo_adapters_off", "peft": "lora"}
    ),
    "kto": Trained(["single", "pp"], ["single"], {"objective": "kto"}),
    "packed pairs": Trained(
        ["single", "cp by ulysses", "pp"],
        ["cp by ulysses"],
        {"objective": "dpo", "pack": True, "model": MIXED},
        least=(operators_with("_varlen_attn"), 1),
    ),
    # Moments are on the device, and so is the decision to skip an update.
    "adamw8bit": Trained(OPTIMIZERS, ["pp"], {"optimizer": "adamw8bit"}, None, (operators_with("amax"), 10)),
    "lion": Trained(
        OPTIMIZERS, ["tp with sequence parallelism"], {"optimizer": "lion"}, None, (operators_with("_foreach_sign"), 1)
    ),
    "noise and spikes": Trained(
        [*OPTIMIZERS, "cp by ulysses"],
        ["pp", "cp by ulysses"],
        {"sizes": {"neftune_alpha": 5.0, "skip_spikes": 6.0}, "pack": True, "model": MIXED},
        None,
        (operators_with("bitwise_xor"), 7),
    ),
    # Newton-Schulz iterations run on the device, and the exchange with owner ranks does not wait.
    "muon": Trained(OPTIMIZERS, ["hsdp", OPTIMIZERS[2]], {"optimizer": "muon"}, None, (operators_with("addmm"), 11)),
    "normuon": Trained(OPTIMIZERS, ["pp"], {"optimizer": "normuon"}, None, (operators_with("addmm"), 11)),
}
ALL = [(name, each) for name, trained in TRAINED.items() for each in trained.layouts]
EACH_COMMIT = [(name, each) for name, trained in TRAINED.items() for each in trained.each_commit]


@pytest.mark.parametrize(("name", "layout"), select(ALL, EACH_COMMIT, PARITY))
def test_step_has_no_host_sync(fake_cuda: Run, name: str, layout: str) -> None:
    """On the first and the last stage of a pipeline, of which only the last one scores rows."""
    if name == "adamw8bit":
        need_torchao()
    (axes, world), trained = LAYOUTS[layout], TRAINED[name]
    for rank in ranks(layout):
        record = fake_cuda("step", axes=axes, world=world, rank=rank, **trained.arguments)
        assert record["waits"] == {}
        assert record["evaluation_waits"] == {}
        assert record["devices"] == ["cuda"]
        assert record["masks"] == {} or not trained.arguments.get("pack")
        assert trained.reads in (None, record["evaluation_reads"])
        count, least = trained.least
        assert count(record) >= least


@pytest.mark.parametrize("peft", ["none", "lora"])
def test_each_unit_is_gathered_and_reduced_as_planned(fake_cuda: Run, peft: str) -> None:
    """Units: embedding, two layers, norm with head. A backward gathers the first layer only; a step reduces once."""
    record = fake_cuda("step", axes={"dp_shard": 8}, world=8, peft=peft, **CHUNKED)
    assert record["micro_batches"] == 2
    assert record["operators"]["_allgather_base_"] == record["micro_batches"] * (4 + 1)
    assert record["operators"]["_reduce_scatter_base_"] == (4 if peft == "none" else 2)


@pytest.mark.parametrize("layout", ["dp_shard", "pp"])
def test_offloaded_activations_are_copied_without_host_sync(fake_cuda: Run, layout: str) -> None:
    axes, world = LAYOUTS[layout]
    policy = "full" if layout == "pp" else "none"
    axes = {**axes, "activation_offload": True, "activation_checkpointing": policy}
    model = {"config": {"num_hidden_layers": 4}}
    record = fake_cuda("step", axes=axes, world=world, pack=True, model=model)
    assert record["waits"] == {}
    assert record["evaluation_waits"] == {}
    assert record["devices"] == ["cuda"]
    assert record["to_host"] >= record["micro_batches"]


@pytest.mark.parametrize("layout", select(["single", "dp_shard", "tp with sequence parallelism"], ["dp_shard"], PARITY))
def test_lora_stores_frozen_weights_in_bfloat16_and_adapters_in_float32(fake_cuda: Run, layout: str) -> None:
    axes, world = LAYOUTS[layout]
    record = fake_cuda("step", axes=axes, world=world, peft="lora")
    assert record["dtypes"] == ["torch.bfloat16 False", "torch.float32 True"]
    assert record["waits"] == {}
    assert fake_cuda("step", axes=axes, world=world)["dtypes"] == ["torch.float32 True"]
