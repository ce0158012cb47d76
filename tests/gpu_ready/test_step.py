"""A training step on fake CUDA tensors for every layout: no host sync, no tensor on the wrong device."""

from __future__ import annotations

import pytest

from tests.gpu_ready.conftest import Run
from tests.gpu_ready.matrix import LAYOUTS
from tests.optional import need_torchao
from tests.suites import PARITY, select

EACH_COMMIT_LAYOUTS = [each for each in LAYOUTS if each not in ("dp_shard", "tp", "single")]
"""The others train at each commit in the tests below, with adapters, objectives and other optimizers."""


@pytest.mark.parametrize("layout", select(LAYOUTS, EACH_COMMIT_LAYOUTS, PARITY))
def test_training_step_has_no_host_sync(fake_cuda: Run, layout: str) -> None:
    axes, world = LAYOUTS[layout]
    for rank in {0, world - 1} if "pp" in axes else {0}:
        record = fake_cuda("step", axes=axes, world=world, rank=rank)
        assert record["waits"] == {}
        assert record["devices"] == ["cuda"]
        assert record["evaluation_waits"] == {}
        assert record["evaluation_reads"] == 1  # once, for all batches


@pytest.mark.parametrize("peft", ["none", "lora"])
def test_each_unit_is_gathered_and_reduced_as_planned(fake_cuda: Run, peft: str) -> None:
    """Units: embedding, two layers, norm with head. A backward gathers the first layer only; a step reduces once."""
    record = fake_cuda("step", axes={"dp_shard": 8}, world=8, model={"loss": "chunked"}, peft=peft)
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


TEACHERS = {
    "distillation": ["single", "dp_shard", "tp with sequence parallelism", "cp by ulysses", "pp"],
    "stored_distillation": ["tp with sequence parallelism", "cp by ulysses", "pp"],
}


EVERY_TEACHER = [(name, each) for name in TEACHERS for each in TEACHERS[name]]
EACH_COMMIT_TEACHERS = [
    ("distillation", "dp_shard"), ("distillation", "pp"), ("stored_distillation", "tp with sequence parallelism"),
]  # fmt: skip


@pytest.mark.parametrize(("objective", "layout"), select(EVERY_TEACHER, EACH_COMMIT_TEACHERS, PARITY))
def test_distillation_step_has_no_host_sync(fake_cuda: Run, objective: str, layout: str) -> None:
    axes, world = LAYOUTS[layout]
    record = fake_cuda("step", axes=axes, world=world, rank=world - 1, model={"loss": "chunked"},
                       objective=objective)  # fmt: skip
    assert record["waits"] == {}
    assert record["devices"] == ["cuda"]
    assert record["evaluation_waits"] == {}
    assert record["evaluation_reads"] == 2  # sums, and the means of metrics


@pytest.mark.parametrize("layout", select(["single", "dp_shard", "tp with sequence parallelism"], ["dp_shard"], PARITY))
def test_lora_stores_frozen_weights_in_bfloat16_and_adapters_in_float32(fake_cuda: Run, layout: str) -> None:
    axes, world = LAYOUTS[layout]
    record = fake_cuda("step", axes=axes, world=world, peft="lora")
    assert record["dtypes"] == ["torch.bfloat16 False", "torch.float32 True"]
    assert record["waits"] == {}
    assert fake_cuda("step", axes=axes, world=world)["dtypes"] == ["torch.float32 True"]


OBJECTIVES = {
    "classification": ["single", "dp_shard", "tp with sequence parallelism", "cp by ulysses", "pp"],
    "reward": ["single", "cp by all_gather", "pp"],
    "dpo": ["single", "dp_shard", "tp with sequence parallelism", "cp by ulysses", "pp"],
    "dpo_adapters_off": ["single", "hsdp", "tp", "pp"],
    "kto": ["single", "pp"],
}
EACH_COMMIT = [
    ("classification", "tp with sequence parallelism"), ("reward", "cp by all_gather"), ("dpo", "cp by ulysses"),
    ("dpo_adapters_off", "pp"), ("kto", "single"),
]  # fmt: skip
ALL_OBJECTIVES = [(name, each) for name in OBJECTIVES for each in OBJECTIVES[name]]


@pytest.mark.parametrize(("objective", "layout"), select(ALL_OBJECTIVES, EACH_COMMIT, PARITY))
def test_step_with_objective_has_no_host_sync(fake_cuda: Run, objective: str, layout: str) -> None:
    """On the first and the last stage of a pipeline, of which only the last one scores rows."""
    axes, world = LAYOUTS[layout]
    peft = "lora" if objective == "dpo_adapters_off" else "none"
    for rank in {0, world - 1} if "pp" in axes else {0}:
        record = fake_cuda("step", axes=axes, world=world, rank=rank, objective=objective, peft=peft)
        assert record["waits"] == {}
        assert record["devices"] == ["cuda"]
        assert record["evaluation_waits"] == {}
        assert record["evaluation_reads"] == 2  # sums, and the means of metrics


@pytest.mark.parametrize("layout", select(["single", "cp by ulysses", "pp"], ["cp by ulysses"], PARITY))
def test_step_with_packed_pairs_has_no_host_sync(fake_cuda: Run, layout: str) -> None:
    axes, world = LAYOUTS[layout]
    mixed = {"dtype": "float32", "compute_dtype": "bfloat16"}
    record = fake_cuda("step", axes=axes, world=world, rank=world - 1, model=mixed, objective="dpo", pack=True)
    assert record["waits"] == {}
    assert record["evaluation_waits"] == {}
    assert record["masks"] == {}
    assert "_varlen_attn" in record["operators"]


OPTIMIZER_LAYOUTS = ["single", "hsdp", "tp with sequence parallelism", "pp"]


@pytest.mark.parametrize("layout", select(OPTIMIZER_LAYOUTS, ["single", "pp"], PARITY))
def test_step_with_8_bit_moments_has_no_host_sync(fake_cuda: Run, layout: str) -> None:
    """Moments are on the device, and so is the decision to skip an update."""
    need_torchao()
    axes, world = LAYOUTS[layout]
    record = fake_cuda("step", axes=axes, world=world, optimizer="adamw8bit")
    assert record["waits"] == {}
    assert record["devices"] == ["cuda"]
    assert sum(count for name, count in record["operators"].items() if "amax" in name) >= 10


@pytest.mark.parametrize("layout", select(OPTIMIZER_LAYOUTS, ["hsdp", "tp with sequence parallelism"], PARITY))
def test_step_with_muon_has_no_host_sync(fake_cuda: Run, layout: str) -> None:
    """Newton-Schulz iterations run on the device, and the exchange with owner ranks does not wait."""
    axes, world = LAYOUTS[layout]
    record = fake_cuda("step", axes=axes, world=world, optimizer="muon")
    assert record["waits"] == {}
    assert record["devices"] == ["cuda"]
    assert sum(count for name, count in record["operators"].items() if "addmm" in name) > 10
