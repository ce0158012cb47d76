"""Predicted tokens per second of whole models, without a GPU: see roofline.py."""

from __future__ import annotations

import pytest

from components import models
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.shape import shape_of_built
from components.planning.formulas.architecture import read_architecture
from components.planning.formulas.policies import RESERVED_BYTES, fitting_policy, policy_peaks
from components.planning.formulas.workload import build_workload
from tests.gpu_ready.cases import config_of
from tests.gpu_ready.conftest import Run
from tests.gpu_ready.roofline import DEVICES, MODELS, WORK, costs, step_seconds
from tests.suites import PARITY

GIB_80 = 80 * 2**30
needs_all = pytest.mark.skipif(not PARITY, reason="make parity: simulates steps of 8B models")


def predicted(run: Run, name: str, device: str) -> float:
    """Return the tokens per second without compiled layers."""
    work = WORK[name]
    return work.tokens / sum(step_seconds(work, costs(run, work, "all"), DEVICES[device]).values())


@needs_all
def test_fused_layers_are_predicted_to_reach_a_rate(fake_cuda: Run) -> None:
    """47,600 was predicted before the layers were fused and the loss added its chunks in one kernel."""
    assert predicted(fake_cuda, "1B full", "H200") >= 58_000


@needs_all
def test_adapters_of_8b_are_predicted_to_reach_a_rate(fake_cuda: Run) -> None:
    lora, qlora = (predicted(fake_cuda, name, "H200") for name in ("8B LoRA", "8B QLoRA"))
    assert lora >= 14_300  # 11,400 before
    assert lora / qlora <= 1.1


@pytest.mark.parametrize("name", WORK)
def test_auto_is_configured_as_it_is_predicted(name: str) -> None:
    """On 80 GB: compiled layers, nothing recomputed, matmuls in bfloat16, trained weights in float32."""
    work = WORK[name]
    cfg = config_of({"config": MODELS[work.model], "compile": "auto"}, {"dp_shard": -1}, work.peft, pack=True)
    cfg.parallelism.activation_checkpointing = ActivationCheckpointing.auto
    cfg.training.seq_len, cfg.training.micro_batch_size = 4096, work.micro_batch
    cfg.training.global_batch_size = work.rows
    built = models.build_on_meta(cfg.model, cfg.model.config["vocab_size"]).config.to_dict()
    architecture = read_architecture(shape_of_built(built), "llama")
    workload = build_workload(
        cfg, cfg.parallelism.resolve(1), on_gpu=True, architecture=architecture, device_memory=GIB_80
    )  # fmt: skip
    peaks = policy_peaks(cfg, workload, "cuda")
    assert fitting_policy(peaks, GIB_80 - RESERVED_BYTES) is ActivationCheckpointing.none
    assert cfg.model.compiles(cfg.parallelism, packs=True, on_gpu=True)
    assert not cfg.model.fuses(cfg.parallelism, packs=True, on_gpu=True)
    assert (workload.compute_bytes, workload.trained_bytes) == (2, 4)
    assert workload.stored_bytes == (4 if work.peft == "none" else 2)
