"""Emulated float8 linear layers: matmuls equal those of rounded operands, in one process and under FSDP2."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from components import distributed, models, training
from components.batch import Batch
from components.config.mesh_rules import layout_of
from components.config.schema import ActivationCheckpointing, FinetuneConfig, ModelConfig, ParallelismConfig, PeftConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import DType, Float8, Qat, WeightInit
from components.config.schema.optimizer import AdamWConfig
from components.models.quantization import _quantized_config, float8_layers, without_float8
from components.observability.result import render_model_card
from components.planning.formulas.layer_memory import layer_activations
from components.planning.formulas.step_time import estimate_time
from components.planning.parity import relative
from components.protocol.errors import ConfigError
from tests.harness import run_ranks
from tests.optional import need_torchao
from tests.tiny_models import FAMILIES, filled, logits
from tests.unit.test_planning_time import H100, term, workload

need_torchao()
RECIPES = [Float8.tensorwise, Float8.rowwise]
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
need_torchao()
LLAMA = {**FAMILIES["llama"], "hidden_size": 64, "intermediate_size": 96}
KINDS = [Qat.int8_int4, Qat.int4_weight_only]


def config(recipe: Float8 = Float8.tensorwise, **more: Any) -> ModelConfig:
    return ModelConfig(
        init=WeightInit.random, tokenizer="bytes", config=FAMILIES["llama"], float8=recipe, float8_emulate=True,
        compute_dtype=DType.float32, **more,
    )  # fmt: skip


def initialized_model(cfg: ModelConfig) -> PreTrainedModel:
    return filled(cfg)


def rounded(matrix: torch.Tensor, recipe: Float8, dim: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Round a matrix to float8 and back, with one scale per tensor or per row along `dim`, the reduced dim."""
    largest = matrix.abs().amax() if recipe == Float8.tensorwise else matrix.abs().amax(dim, keepdim=True)
    scale = LARGEST[dtype] / largest.double()
    if recipe == Float8.rowwise:
        scale = scale.log2().floor().exp2()
    return (matrix.double() * scale).to(dtype).double() / scale


@pytest.mark.parametrize("recipe", RECIPES)
def test_float8_matmuls_equal_those_of_rounded_operands(recipe: Float8) -> None:
    layer: Any = models.build_on_meta(config(recipe)).model.layers[0].mlp.up_proj.to_empty(device="cpu")
    torch.manual_seed(0)
    weight, hidden, grad = torch.randn(48, 32), torch.randn(7, 32, requires_grad=True), torch.randn(7, 48)
    layer.weight.data.copy_(weight)
    output = layer(hidden)
    output.backward(grad)
    grad_dtype = torch.float8_e5m2 if recipe == Float8.tensorwise else torch.float8_e4m3fn
    x = hidden.detach()
    torch.testing.assert_close(
        output.double(), rounded(x, recipe, 1) @ rounded(weight, recipe, 1).T, rtol=1e-4, atol=1e-4
    )
    input_grad = rounded(grad, recipe, 1, grad_dtype) @ rounded(weight, recipe, 0)
    torch.testing.assert_close(hidden.grad.double(), input_grad, rtol=1e-4, atol=1e-4)
    weight_grad = rounded(grad, recipe, 0, grad_dtype).T @ rounded(x, recipe, 0)
    torch.testing.assert_close(layer.weight.grad.double(), weight_grad, rtol=1e-4, atol=1e-4)
    assert relative(output, x @ weight.T) > 0.005  # the rounding has an effect


def test_lm_head_and_layers_of_unsupported_sizes_are_not_converted() -> None:
    cfg = replace(config(), config={**FAMILIES["llama"], "intermediate_size": 40})
    model, plain = models.build_on_meta(cfg), models.build_on_meta(replace(cfg, float8="none", float8_emulate=False))
    layers = {id(each) for each in float8_layers(model)}
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if id(module) in layers}
    assert names == {"q_proj", "o_proj", "k_proj", "v_proj"}
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    with pytest.raises(ConfigError, match=r"model.float8=tensorwise: no linear layer of LlamaForCausalLM has inputs"):
        models.build_on_meta(replace(cfg, config={**FAMILIES["llama"], "hidden_size": 24, "head_dim": 6}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU may support float8 matmuls")
def test_device_without_float8_matmuls_is_rejected() -> None:
    message = r"model.float8=tensorwise: needs a CUDA device of .*8.9 or higher, but this is"
    with pytest.raises(ConfigError, match=message):
        models.build_on_meta(replace(config(), float8_emulate=False, compute_dtype=DType.auto))


def check_loss(model: Any, bound: float = 0.01, recipe: Float8 = Float8.tensorwise) -> list[str]:
    cfg = FinetuneConfig(model=config(recipe, float8_bound=bound), data=DocsDataConfig())
    rows = torch.arange(3, 35).reshape(2, 16)
    settings = training.StepSettings(device=torch.device("cpu"))
    return training.check_kernels(
        training.Prepared(model, settings), cfg.model, lambda step: [Batch.from_labels(rows, rows)]
    )


def test_float8_that_changes_the_loss_is_rejected_at_startup(monkeypatch: pytest.MonkeyPatch) -> None:
    model = initialized_model(config())
    attention, report = check_loss(model)
    assert attention.startswith("attention: sdpa, observed as torch's ")
    assert report.startswith("float8: tensorwise, emulated, 14 linear layers; the loss is 5.")
    assert report.endswith("% apart")
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)  # tied to the LM head: makes predictions confident
    kind: Any = type(float8_layers(model)[0])
    monkeypatch.setattr(kind, "forward", lambda self, hidden: 3 * hidden @ self.weight.T)  # a wrong scale
    with pytest.raises(ConfigError, match=r"float8=tensorwise: the loss is .* more than model.float8_bound=0.01; set "):
        check_loss(model)
    assert check_loss(model, bound=10.0)


def test_without_float8_runs_plain_linear_layers() -> None:
    one_layer = replace(config(), config={**FAMILIES["llama"], "num_hidden_layers": 1})
    model, plain = (
        initialized_model(one_layer),
        initialized_model(replace(one_layer, float8="none", float8_emulate=False)),
    )
    models.compile_layers(model, backend="eager")
    before = logits(model)
    with without_float8(model):
        torch.testing.assert_close(logits(model), logits(plain))
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    assert relative(before, logits(plain)) > 1e-4


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    ids = torch.arange(3, 35).reshape(2, 16)
    model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    found = {name: each.grad for name, each in model.named_parameters()}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def test_fsdp_gradients_match_those_of_one_process() -> None:
    """Both ranks read the same rows: activations are scaled per micro-batch, so other rows would round differently."""
    policies = {Float8.tensorwise: ActivationCheckpointing.selective, Float8.rowwise: ActivationCheckpointing.none}
    expected = {recipe: gradients(initialized_model(config(recipe))) for recipe in RECIPES}

    def max_error(rank: int) -> float:
        errors = []
        for recipe, policy in policies.items():
            model = models.build_on_meta(config(recipe))
            layout = layout_of("dp_shard2", ParallelismConfig())
            assert layout is not None
            distributed.parallelize(model, distributed.build_mesh(layout, "cpu"), layout, torch.float32)
            models.checkpoint_activations(model, policy)
            models.materialize(model, "cpu")
            models.fill_weights(model, config(recipe), 0)
            errors += [relative(each / 2, expected[recipe][name]) for name, each in gradients(model).items()]
        return max(errors)

    assert max(run_ranks(2, max_error)) < 1e-5


def qat_config(qat: Qat = Qat.none, **more: Any) -> ModelConfig:
    return ModelConfig(
        init=WeightInit.random, tokenizer="bytes", config=LLAMA, qat=qat, compute_dtype="float32", **more
    )


def by_torchao(qat: Qat) -> PreTrainedModel:
    """Prepare a model with torchao alone, from the same weights."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    model = initialized_model(qat_config())
    quantize_(model, QATConfig(_quantized_config(qat_config(qat)), step="prepare"), filter_fn=in_decoder)
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
    expected, found, plain = by_torchao(qat), initialized_model(qat_config(qat)), initialized_model(qat_config())
    assert type(found.lm_head) is nn.Linear
    settings = training.StepSettings(device=torch.device("cpu"))
    losses = [trained(each, settings) for each in (expected, found, plain)]
    assert losses[0] == losses[1] != losses[2]
    for (name, own), (other, theirs) in zip(found.named_parameters(), expected.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(own, theirs)


def test_training_under_fsdp2_equals_one_process() -> None:
    cfg = qat_config(Qat.int8_int4)
    reference = initialized_model(cfg)
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

    cfg = qat_config(Qat.int8_int4)
    model = initialized_model(cfg)
    trained(model, training.StepSettings(device=torch.device("cpu")))
    models.export_run(model, models.load_tokenizer(cfg), tmp_path, PeftConfig())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).eval()
    quantize_(loaded, _quantized_config(cfg), filter_fn=in_decoder)
    ids = torch.arange(3, 19)[None]
    with torch.no_grad():
        emulated = model.eval()(input_ids=ids).logits
        converted = copy.deepcopy(model)
        quantize_(converted, QATConfig(_quantized_config(cfg), step="convert"))
        expected, found = converted(input_ids=ids).logits, loaded(input_ids=ids).logits
        rounded = initialized_model(qat_config())(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(found, emulated, rtol=1e-4, atol=1e-5)
    assert (found - rounded).abs().max() > 1e-3


def test_model_card_names_the_config_that_quantizes(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model:\n  qat: int4_weight_only\n  qat_group_size: 64\n")
    assert "torchao's Int4WeightOnlyConfig(group_size=64)" in render_model_card(tmp_path, {}, "single")


def test_planned_memory_and_time_count_the_rounded_weights() -> None:
    plain, weights, both = (workload(qat=qat) for qat in (Qat.none, Qat.int4_weight_only, Qat.int8_int4))
    kind = plain.architecture.kinds[0]
    layer = plain.architecture.layer_matmul_weights(kind)
    assert layer_activations(weights, kind).none - layer_activations(plain, kind).none == 18 * layer
    assert layer_activations(both, kind).full == layer_activations(plain, kind).full
    assert layer_activations(both, kind).none - layer_activations(plain, kind).none > 4 * layer
    assert term(estimate_time(plain, H100), "fake quantization") == 0
    assert term(estimate_time(replace(weights, compiled=False), H100), "fake quantization") > 0


def test_group_size_must_divide_the_inputs() -> None:
    message = "qat_group_size=64: does not divide the 96 inputs of model.layers.0.mlp.down"
    with pytest.raises(ConfigError, match=message):
        models.build_on_meta(qat_config(Qat.int8_int4, qat_group_size=64))
