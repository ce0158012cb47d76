"""Quantization-aware training: equal to torchao's own prepared model, on one process and under FSDP2, and exported."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from components import distributed, models, training
from components.batch import Batch
from components.config.schema import ModelConfig, ParallelismConfig, PeftConfig
from components.config.schema.model import Qat, WeightInit
from components.config.schema.optimizer import AdamWConfig
from components.models.quantization.float8 import quantized_config
from components.observability.result import render_model_card
from components.parity.comparison import relative
from components.planning.formulas.step_time import estimate_time
from components.planning.formulas.workload import layer_activations
from components.protocol.errors import ConfigError
from tests.harness import run_ranks
from tests.optional import need_torchao
from tests.tiny_models import FAMILIES
from tests.unit.test_planning_time import H100, term, workload

need_torchao()
LLAMA = {**FAMILIES["llama"], "hidden_size": 64, "intermediate_size": 96}
KINDS = [Qat.int8_int4, Qat.int4_weight_only]


def config(qat: Qat = Qat.none, **more: Any) -> ModelConfig:
    return ModelConfig(
        init=WeightInit.random, tokenizer="bytes", config=LLAMA, qat=qat, compute_dtype="float32", **more
    )


def initialized(cfg: ModelConfig) -> PreTrainedModel:
    model = models.build_on_meta(cfg)
    models.materialize(model, "cpu")
    models.fill_weights(model, cfg, 0)
    return model


def by_torchao(qat: Qat) -> PreTrainedModel:
    """Prepare a model with torchao alone, from the same weights."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    model = initialized(config())
    quantize_(model, QATConfig(quantized_config(config(qat)), step="prepare"), filter_fn=in_decoder)
    return model


def in_decoder(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "layers." in name


def batches() -> list[Batch]:
    rows = torch.randint(3, 200, (2, 2, 16), generator=torch.Generator().manual_seed(0))
    return [Batch.from_labels(each, each) for each in rows]


def trained(model: Any, settings: training.StepSettings, mine: slice = slice(None)) -> list[float]:
    optimizer = training.build_optimizer(model, AdamWConfig(lr=1e-3))
    prepared = training.Prepared(model, settings)
    return [training.train_step(prepared, batches()[mine], optimizer)["loss"].item() for _ in range(2)]


@pytest.mark.parametrize("qat", KINDS)
def test_training_equals_that_of_torchaos_prepared_model(qat: Qat) -> None:
    expected, found, plain = by_torchao(qat), initialized(config(qat)), initialized(config())
    assert type(found.lm_head) is nn.Linear
    settings = training.StepSettings(device=torch.device("cpu"))
    losses = [trained(each, settings) for each in (expected, found, plain)]
    assert losses[0] == losses[1] != losses[2]
    for (name, own), (other, theirs) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(own, theirs)


def test_training_under_fsdp2_equals_one_process() -> None:
    cfg = config(Qat.int8_int4)
    reference = initialized(cfg)
    expected = trained(reference, training.StepSettings(device=torch.device("cpu")))

    def on_rank(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        parallelism = ParallelismConfig(dp_shard=2)
        mesh = distributed.build_mesh(parallelism, "cpu")
        model = models.build_on_meta(cfg)
        distributed.parallelize(model, mesh, parallelism, torch.float32)
        models.materialize(model, "cpu")
        models.fill_weights(model, cfg, 0)
        losses = trained(model, training.StepSettings(device=torch.device("cpu"), mesh=mesh), slice(rank, rank + 1))
        return losses, {name: each.full_tensor() for name, each in model.named_parameters()}  # type: ignore[attr-defined]

    for losses, parameters in run_ranks(2, on_rank):
        assert losses == pytest.approx(expected, rel=1e-6)
        for name, own in reference.named_parameters():
            assert relative(parameters[name], own) < 1e-4, name  # the rounding of equal sums in another order


def test_export_is_quantized_to_the_model_that_was_trained(tmp_path: Path) -> None:
    """torchao's convert of the trained model, and its quantization of the exported weights, compute the same."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    cfg = config(Qat.int8_int4)
    model = initialized(cfg)
    trained(model, training.StepSettings(device=torch.device("cpu")))
    models.export_run(model, models.load_tokenizer(cfg), tmp_path, cfg, PeftConfig())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    quantize_(loaded, quantized_config(cfg), filter_fn=in_decoder)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        emulated = model.eval()(input_ids=ids).logits
        converted = copy.deepcopy(model)
        quantize_(converted, QATConfig(quantized_config(cfg), step="convert"))
        expected, found = converted(input_ids=ids).logits, loaded(input_ids=ids).logits
        rounded = initialized(config())(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(found, emulated, rtol=1e-4, atol=1e-5)
    assert (found - rounded).abs().max() > 1e-3


def test_model_card_names_the_config_that_quantizes(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model:\n  qat: int4_weight_only\n  qat_group_size: 64\n")
    assert "torchao's Int4WeightOnlyConfig(group_size=64)" in render_model_card(tmp_path, {}, "single")


def test_planned_memory_and_time_count_the_rounded_weights() -> None:
    plain, weights, both = (workload(qat=qat) for qat in (Qat.none, Qat.int4_weight_only, Qat.int8_int4))
    layer = plain.architecture.layer_matmul_weights
    assert layer_activations(weights).none - layer_activations(plain).none == 18 * layer
    assert layer_activations(both).full == layer_activations(plain).full
    assert layer_activations(both).none - layer_activations(plain).none > 4 * layer
    assert term(estimate_time(plain, H100), "fake quantization") == 0
    assert term(estimate_time(replace(weights, compiled=False), H100), "fake quantization") > 0


def test_group_size_must_divide_the_inputs() -> None:
    with pytest.raises(
        ConfigError, match="qat_group_size=64: does not divide the 96 inputs of model.layers.0.mlp.down"
    ):
        models.build_on_meta(config(Qat.int8_int4, qat_group_size=64))
