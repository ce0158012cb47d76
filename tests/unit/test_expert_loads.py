"""z-loss of routers, loads of experts, and their balance by biases in one process; the picture of the loads."""

from __future__ import annotations

import copy
import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import CONFIG_MAPPING

from components import models, training
from components.batch import Batch
from components.checkpoint.tensors import model_tensors
from components.config.compute_rules import _UNBIASED_ROUTERS
from components.config.schema.model import ModelConfig, RouterAux
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.run import ExpertLoads
from components.models.anatomy import ROUTER_BIASES
from components.models.weights.weight_sources import saved_tensors
from components.presentation import expert_figure, save_figure
from components.protocol.errors import ConfigError
from tests.distributed.parity import MOE_MODELS, SMALL, build
from tests.unit.test_training_router import CPU, batches

MINIMAX: dict[str, Any] = {
    **SMALL, "model_type": "minimax_m2", "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def config(**values: Any) -> ModelConfig:
    return ModelConfig(path="made here", router_aux=RouterAux.none, **values)


def step(
    model: nn.Module, attached: training.Routers | None, rows: list[Batch], lr: float = 0.0
) -> training.StepNumbers:
    settings = training.StepSettings(CPU, max_grad_norm=0.0, routers=attached)
    return training.train_step(training.Prepared(model, settings), rows, torch.optim.SGD(model.parameters(), lr=lr))


def test_z_loss_and_its_gradient_equal_the_formula() -> None:
    model = build("mixtral", torch.float64).train()
    plain, rows = copy.deepcopy(model), batches()
    attached = training.attach_routers(model, config(router_z_coef=0.5))
    loss = step(model, attached, rows)["loss"]
    total = torch.zeros((), dtype=torch.float64)
    for batch in rows:
        output = plain(input_ids=batch.input_ids, output_router_logits=True, use_cache=False)
        total = total + F.cross_entropy(output.logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100)
        squares = [logits.double().logsumexp(-1).square().mean() for logits in output.router_logits]
        total = total + 0.5 * sum(squares) / len(squares)
    expected = total / len(rows)
    assert float(loss) == pytest.approx(float(expected.detach()), rel=1e-6)  # Mixtral's router computes in float32
    expected.backward()
    norm = math.sqrt(sum(float(each.grad.double().square().sum()) for each in plain.parameters()))
    assert float(step(model, attached, rows)["grad_norm"]) == pytest.approx(norm, rel=1e-6)
    assert float(step(build("mixtral", torch.float64), None, rows)["grad_norm"]) != pytest.approx(norm, rel=1e-3)


def test_a_skipped_step_changes_no_bias() -> None:
    model = build("minimax_m2", torch.float32, MINIMAX).train()
    attached = training.attach_routers(model, config(router_bias_rate=0.01), logged=ExpertLoads.layers)
    bias = model.model.layers[0].mlp.e_score_correction_bias
    assert float(step(model, attached, batches())["skipped"]) == 0
    after = bias.clone()
    assert after.abs().max() == pytest.approx(0.01)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("inf")
    numbers = step(model, attached, batches())
    assert float(numbers["skipped"]) == 1
    assert torch.equal(bias, after)
    assert numbers.names[-5:] == ("expert_load", "dead_experts", "expert_entropy", "expert_load_0", "expert_load_1")


def test_biases_are_in_checkpoints_and_exports_and_never_trained() -> None:
    """Their dtype is tested in test_stored_dtype.py."""
    model = build("minimax_m2", torch.float32, MINIMAX)
    name = "model.layers.1.mlp.e_score_correction_bias"
    assert f"model/{name}" in model_tensors(model)
    assert name in saved_tensors(model)
    assert name not in dict(model.named_parameters())
    ernie = build("ernie4_5_moe", torch.float32, {**SMALL, "model_type": "ernie4_5_moe", "moe_num_experts": 4})
    trained = training.build_optimizer(ernie, AdamWConfig()).param_groups
    held = {id(each) for group in trained for each in group["params"]}
    assert not [key for key, each in ernie.named_parameters() if "correction_bias" in key and id(each) in held]


def collapsed(rate: float) -> list[float]:
    """Return the largest load of each step of a model whose routers always choose the first expert of eight."""
    model = build("minimax_m2", torch.float32, MINIMAX).train()
    for layer in model.model.layers:
        layer.mlp.e_score_correction_bias[0] += 0.3
    attached = training.attach_routers(model, config(router_bias_rate=rate), logged=ExpertLoads.summary)
    loads = []
    for number in range(40):
        tokens = torch.randint(3, 97, (16, 32), generator=torch.Generator().manual_seed(number))
        loads.append(float(step(model, attached, [Batch.from_labels(tokens, tokens.clone())], lr=0.01)["expert_load"]))
    return loads


def test_collapsed_router_recovers_with_the_bias_and_not_without() -> None:
    """Two of eight experts are chosen, so one that is always chosen has 4 times the mean."""
    assert min(collapsed(0.0)) > 3.9
    assert max(collapsed(0.02)[-10:]) < 2


def test_models_without_biases_or_experts(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="routers of MixtralForCausalLM add no bias to the scores of experts"):
        training.attach_routers(build("mixtral", torch.float32), config(router_bias_rate=0.001))
    assert training.attach_routers(build("llama", torch.float32), config(), logged=ExpertLoads.layers) is None
    attached = training.attach_routers(build("qwen3_moe", torch.float32), config(), logged=ExpertLoads.summary)
    assert attached is not None
    assert not attached  # nothing for the banner
    assert step(build("llama", torch.float32), attached, batches()).names[-1] != "expert_entropy"
    assert "the loads of experts are unknown" in caplog.text


def test_counting_has_no_host_sync_and_compiles() -> None:
    """On the meta device .item() raises."""
    with torch.device("meta"):
        model = type(build("mixtral", torch.float32))(build("mixtral", torch.float32).config)
    model.set_experts_implementation("batched_mm")
    models.use_causal_sdpa(model)
    attached = training.attach_routers(model, config(), logged=ExpertLoads.layers)
    settings = training.StepSettings(torch.device("meta"), routers=attached)
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    assert training.train_step(training.Prepared(model, settings), batches(), optimizer).vector.is_meta

    plain = build("qwen3_moe", torch.float32, {**MOE_MODELS["qwen3_moe"], "num_hidden_layers": 1}).train()
    models.use_causal_sdpa(plain)
    compiled = copy.deepcopy(plain)
    expected = step(plain, training.attach_routers(plain, config(), logged=ExpertLoads.layers), batches())
    attached = training.attach_routers(compiled, config(), logged=ExpertLoads.layers)
    models.compile_layers(compiled, backend="aot_eager")
    assert step(compiled, attached, batches()).vector[-4:].tolist() == expected.vector[-4:].tolist()


def test_picture_of_the_loads(tmp_path: Path) -> None:
    lines = [
        {
            "step": number,
            "expert_load": 3 - number / 50,
            "expert_entropy": 0.9,
            "expert_load_1": 2.0,
            "expert_load_10": 1.5,
        }
        for number in range(1, 60)
    ]
    assert expert_figure([{"step": 1, "loss": 2.0}], "none") is None
    figure = expert_figure([*lines, {"step": 60, "eval_loss": 2.0}], "a run")
    assert figure is not None
    save_figure(figure, tmp_path / "experts.png")
    assert [label.get_text() for label in figure.axes[2].get_yticklabels()] == ["1", "10"]
    assert (tmp_path / "experts.png").stat().st_size > 10_000
    assert len(expert_figure([lines[0]], "one step").axes) == 4


@pytest.mark.parametrize("family", sorted(_UNBIASED_ROUTERS))
def test_families_that_the_launcher_rejects_have_no_bias(family: str) -> None:
    source = importlib.util.find_spec(CONFIG_MAPPING[family].__module__.replace("configuration_", "modeling_"))
    assert source is not None
    text = Path(str(source.origin)).read_text()
    assert not any(re.search(rf"\b{name}\b", text) for name in ROUTER_BIASES)
