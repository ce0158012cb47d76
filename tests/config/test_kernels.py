"""Kernels that do not fit a config are rejected with the value, the rule and the key to change."""

from __future__ import annotations

from typing import Any

import pytest

from components.config import compute_rules
from components.config.rules import validate
from components.config.schema import FinetuneConfig, ModelConfig, ParallelismConfig, PeftConfig
from components.config.schema.cluster import Device, LocalClusterConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import WeightInit
from components.protocol.errors import ConfigError

SINGLE = ParallelismConfig(strategy="single", dp_shard=1)
DDP = ParallelismConfig(strategy="ddp", dp_replicate=-1, dp_shard=1)
EIGHT = {"float8": "rowwise", "float8_emulate": True}


def model(**values: Any) -> ModelConfig:
    return ModelConfig(init=WeightInit.random, tokenizer="bytes", config={"model_type": "llama"}, **values)


@pytest.fixture(autouse=True)
def any_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply no rules about the installed torch, which may be an old one."""
    monkeypatch.setattr(compute_rules, "_installed_torch", lambda: "")


MESH = [
    (model(attention="sdpa_flash"), {"parallelism": ParallelismConfig(cp=2)}, 2,
     "model.attention=sdpa_flash: parallelism.cp=2 uses attention masks", "set model.attention=sdpa"),
    (model(attention="flex_attention"), {"cluster": LocalClusterConfig(device=Device.cpu)}, 1,
     "model.attention=flex_attention: torch has no backward for it on CPUs", "set model.attention=sdpa, or cl"),
    (model(float8="tensorwise"), {"cluster": LocalClusterConfig(device=Device.cpu)}, 1,
     "model.float8=tensorwise: CPUs have no float8 matmuls, but cluster.device=cpu", "model.float8_emulate=true"),
    (model(float8="tensorwise", compile="false"), {}, 1,
     "model.float8=tensorwise: scaling and casting make it slower", "because of model.compile=false; set model.fl"),
    (model(float8="rowwise"), {"parallelism": ParallelismConfig(activation_checkpointing="selective")}, 1,
     "model.float8=rowwise: scaling and casting make it slower", "because of parallelism.activation_check"),
    (model(**EIGHT), {"parallelism": ParallelismConfig(tp=2)}, 2,
     "model.float8=rowwise: linear layers sharded by parallelism.tp=2", "set model.float8=none, or parallelism.tp=1"),
    (model(**EIGHT), {"peft": PeftConfig(method="lora")}, 1,
     "model.float8=rowwise: linear layers with adapters do not run in float8", "set model.float8=none, or peft=none"),
    (model(**EIGHT), {"parallelism": ParallelismConfig(pp=2, pp_schedule="ZBVZeroBubble")}, 2,
     "model.float8=rowwise: parallelism.pp_schedule=ZBVZeroBubble splits the backward", "schedule=Interleaved1F1B"),
    (model(qat="int8_int4"), {"parallelism": ParallelismConfig(tp=2)}, 2,
     "model.qat=int8_int4: torchao does not quantize weights sharded by parallelism.tp=2", "set parallelism.tp=1"),
    (model(qat="int8_int4"), {"peft": PeftConfig(method="qlora")}, 1,
     "model.qat=int8_int4: the weights under adapters are frozen", "set peft=none"),
    (model(qat="int4_weight_only", **EIGHT), {}, 1,
     "model.qat=int4_weight_only: model.float8=rowwise replaces the same layers", "set model.float8=none"),
    (model(qat="int8_int4"), {"parallelism": ParallelismConfig(pp=2, pp_schedule="ZBVZeroBubble")}, 2,
     "model.qat=int8_int4: parallelism.pp_schedule=ZBVZeroBubble splits the backward", "schedule=Interleaved1F1B"),
    (model(dtype="bfloat16", compute_dtype="float32"), {"parallelism": SINGLE}, 1,
     "model.compute_dtype=float32: parallelism.strategy=single computes with the stored weights, which are in bfl",
     "set model.dtype=float32, or parallelism=fsdp2"),
    (model(compute_dtype="float64"), {"parallelism": DDP}, 2,
     "model.compute_dtype=float64: parallelism.strategy=ddp computes with the stored weights, which are in float32",
     "set model.dtype=float64, or parallelism=fsdp2"),
]  # fmt: skip


QLORA, ZBV = PeftConfig(method="qlora"), "ZBVZeroBubble"
REPLICAS = {"dp_shard": 1, "dp_replicate": -1}


@pytest.mark.parametrize(
    ("installed", "layout", "peft", "accepted"),
    [
        ("2.11.0+cu130", {"strategy": "fsdp2", **REPLICAS}, QLORA, False),
        ("2.11.0", {"strategy": "ddp", **REPLICAS}, QLORA, True),
        ("2.12.0", {"strategy": "fsdp2", **REPLICAS}, QLORA, True),
        ("2.100.0a0", {"strategy": "fsdp2", **REPLICAS}, QLORA, True),
        ("2.12.1+cu130", {"pp": 2, "pp_schedule": ZBV}, PeftConfig(), False),
        ("2.12.1", {"pp": 1, "pp_schedule": ZBV}, PeftConfig(), True),
        ("2.11.0", {"pp": 2, "pp_schedule": "1F1B"}, PeftConfig(), True),
        ("2.13.0+cpu", {"pp": 2, "pp_schedule": ZBV}, PeftConfig(), True),
        ("", {"pp": 2, "pp_schedule": ZBV}, PeftConfig(), True),
    ],
)
def test_what_an_old_torch_computes_wrongly_is_rejected(
    installed: str, layout: dict[str, Any], peft: PeftConfig, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 on 4-bit weights, and the gradients of a split backward."""
    monkeypatch.setattr(compute_rules, "_installed_torch", lambda: installed)
    rejected = (
        f"parallelism.pp_schedule=ZBVZeroBubble: splits the backward, in which torch {installed} computes wrong "
        "gradients of weights that a stage uses twice; install torch 2.13 or later, or set "
        "parallelism.pp_schedule=Interleaved1F1B"
    )
    if peft is QLORA:
        rejected = (
            f"peft.method=qlora: parallelism.strategy=fsdp2 of torch {installed} shards weights of floating-point "
            "numbers only, not of packed 4-bit codes; install torch 2.12 or later, or set parallelism=ddp or peft=lora"
        )
    parallelism = ParallelismConfig(**layout)
    config = FinetuneConfig(model=model(), data=DocsDataConfig(), parallelism=parallelism, peft=peft)
    assert validate(config, 2) == ([] if accepted else [rejected])


ALONE = [
    ({"qat_group_size": 64}, "model.qat_group_size=64: needs model.qat; set model.qat=int8_int4"),
    ({"qat": "int4_weight_only", "qat_group_size": 16}, "model.qat=int4_weight_only it must be one of 32, 64, 128"),
    ({"float8_emulate": True}, "model.float8_emulate=true: needs float8; set model.float8=tensorwise"),
    ({"float8": "tensorwise", "compute_dtype": "float32"},
     "model.dtype=float32 with model.compute_dtype=float32 has none; set model.compute_dtype=bfloat16 or model.floa"),
    ({"float8": "rowwise", "dtype": "float64"}, "but model.dtype=float64 with model.compute_dtype=auto has none; set"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("stored", "compute", "strategy"),
    [
        ("bfloat16", "float32", "fsdp2"),
        ("float32", "float32", "single"),
        ("auto", "float32", "ddp"),
        ("float32", "bfloat16", "single"),
        ("bfloat16", "auto", "single"),
        ("float64", "float64", "single"),
    ],
)
def test_dtypes_that_a_strategy_computes_in_are_accepted(stored: str, compute: str, strategy: str) -> None:
    chosen = model(dtype=stored, compute_dtype=compute)
    parallelism = ParallelismConfig(strategy=strategy, dp_shard=1)
    assert validate(FinetuneConfig(model=chosen, data=DocsDataConfig(), parallelism=parallelism), 1) == []


@pytest.mark.parametrize(("chosen", "sections", "world", "rule", "key"), MESH)
def test_kernel_that_other_sections_rule_out_is_rejected(
    chosen: ModelConfig, sections: dict[str, Any], world: int, rule: str, key: str
) -> None:
    (problem,) = validate(FinetuneConfig(model=chosen, data=DocsDataConfig(), **sections), world)
    assert rule in problem
    assert key in problem
    allowed = FinetuneConfig(model=model(), data=DocsDataConfig(), **sections)
    assert validate(allowed, world) == []


OFFLOAD = [
    ({}, 1, "there is no device memory to save on a cpu; set it to false"),
    ({"activation_checkpointing": "selective"}, 1, "activation_checkpointing=selective: holds its tensors outside of"),
    ({"pp": 2, "pp_schedule": "ZBVZeroBubble"}, 2, "parallelism.pp_schedule=ZBVZeroBubble splits the backward, which"),
]


@pytest.mark.parametrize(("values", "world", "rule"), OFFLOAD)
def test_activation_offload_is_rejected_where_it_cannot_work(values: dict[str, Any], world: int, rule: str) -> None:
    device = Device.auto if values else Device.cpu
    sections: dict[str, Any] = {"cluster": LocalClusterConfig(device=device), "data": DocsDataConfig()}
    parallelism = ParallelismConfig(activation_offload=True, **values)
    (problem,) = validate(FinetuneConfig(model=model(), parallelism=parallelism, **sections), world)
    assert rule in problem
    assert "parallelism.activation_offload" in problem
    assert not validate(FinetuneConfig(model=model(), parallelism=ParallelismConfig(**values), **sections), world)


@pytest.mark.parametrize(("values", "problem"), ALONE)
def test_kernel_settings_that_contradict_each_other_are_rejected(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model(**values)
    assert problem in caught.value.problems[0]
