"""The router auxiliary loss in one process: equal to Hugging Face's, for which models, and without host syncs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from components import models, training
from components.batch import Batch
from components.config.schema import ModelConfig
from components.config.schema.model import RouterAux
from components.protocol.errors import ConfigError
from components.training.routers import _sequence_losses, sequence_weights
from tests.distributed.parity import MOE_MODELS, build

CPU = torch.device("cpu")


def cfg(coefficient: float | None = 0.5, aux: RouterAux = RouterAux.sequence) -> ModelConfig:
    return ModelConfig(path="made here", router_aux=aux, router_aux_coef=coefficient)


def batches(seed: int = 0) -> list[Batch]:
    tokens = torch.randint(3, 97, (2, 2, 12), generator=torch.Generator().manual_seed(seed))
    return [Batch.from_labels(each, each.clone()) for each in tokens]


def step(model: torch.nn.Module, loss: training.Routers | None) -> list[float]:
    """Return loss and gradient norm of a step with learning rate 0."""
    settings = training.StepSettings(CPU, max_grad_norm=0.0, routers=loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return training.train_step(training.Prepared(model, settings), batches(), optimizer).vector[:2].tolist()


def test_loss_of_single_sequences_equals_hugging_face() -> None:
    logits = torch.randn(3, 7, 5)
    attended = torch.arange(7) < torch.tensor([[7], [4], [1]])
    chosen = logits.topk(2).indices
    weights = F.pad(torch.ones(3, 1, dtype=torch.int64), (0, 6))  # one target per sequence, stored at its first token
    ours = _sequence_losses(logits.softmax(-1), chosen, attended[:, None].float(), weights)[0][:, 0]
    theirs = [load_balancing_loss_func((row[:n],), 5, 2) for row, n in zip(logits, (7, 4, 1), strict=True)]
    torch.testing.assert_close(ours, torch.stack(theirs))


def test_sequence_without_targets_has_zero_loss() -> None:
    logits = torch.randn(1, 7, 5)
    no_targets = torch.zeros(1, 7, dtype=torch.int64)
    counted = no_targets[:, None].float()
    losses = _sequence_losses(logits.softmax(-1), logits.topk(2).indices, counted, no_targets, logits[..., 0])
    assert losses[0] == losses[1] == 0


def test_tokens_after_the_last_target_are_padding() -> None:
    labels = torch.tensor([[-100, 5, -100, 6, -100, -100], [-100] * 6, [5, -100, -100, -100, -100, -100], [4] * 6])
    targets, number = sequence_weights(Batch.from_labels(labels, labels).targets).unbind(-1)
    assert targets[:, 0].tolist() == [2, 0, 0, 5]  # no position predicts the first token
    assert not targets[:, 1:].any()
    assert number.tolist() == [[0, 0, 0, 0, -1, -1], [-1] * 6, [-1] * 6, [0] * 6]


def test_each_document_of_a_packed_row_is_a_separate_sequence() -> None:
    labels = torch.tensor([[7, 5, -100, -100, 6, -100, 9, -100], [-100, 1, 1, 1, 1, 1, 1, 1]])
    bounds = torch.tensor([[0, 2, 6, 8, 8], [0, 8, 8, 8, 8]], dtype=torch.int32)
    targets, number = sequence_weights(Batch.from_labels(labels, labels).targets, bounds).unbind(-1)
    assert targets.tolist() == [[1, 0, 1, 0, 0, 0, 0, 0], [7] + [0] * 7]
    assert number.tolist() == [[0, 0, 1, 1, 1, -1, -1, -1], [0] * 8]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "olmoe"])
def test_coefficient_defaults_to_that_of_the_model_config(name: str) -> None:
    model = build(name, torch.float32)
    default = training.attach_routers(model, cfg(None))
    assert default is not None
    assert default.coefficient == model.config.router_aux_loss_coef
    assert str(default).startswith("routers: auxiliary loss, per sequence")
    assert str(default).endswith(f"coefficient {default.coefficient:g}")
    assert training.attach_routers(build(name, torch.float32), cfg(0.25)).coefficient == 0.25
    assert training.attach_routers(model, cfg(0.0)) is None
    assert training.attach_routers(model, cfg(aux=RouterAux.none)) is None


def test_dense_model_has_no_router_loss_and_rejects_a_coefficient() -> None:
    assert training.attach_routers(build("llama", torch.float32), cfg(None)) is None
    with pytest.raises(ConfigError, match=r"0\.5 applies to nothing.*LlamaForCausalLM; set model\.router_aux=none"):
        training.attach_routers(build("llama", torch.float32), cfg())


def test_router_without_logits_is_rejected() -> None:
    model = build("mixtral", torch.float32)
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(
            lambda module, args, outputs: (outputs[0].unflatten(0, (2, -1)), *outputs[1:])
        )
    with pytest.raises(ConfigError, match=r"MixtralTopKRouter does not return logits, .*; set model\.router_aux=none"):
        step(model, training.attach_routers(model, cfg()))


class DropsKeywords(MixtralForCausalLM):
    """A model that drops the keyword arguments it does not use."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool, router_sequence_weights: Any = None) -> Any:
        return super().forward(input_ids, use_cache=use_cache)


def test_model_that_drops_keyword_arguments_is_rejected() -> None:
    model = DropsKeywords(build("mixtral", torch.float32).config)
    with pytest.raises(ConfigError, match="does not pass keyword arguments down"):
        step(model, training.attach_routers(model, cfg()))


@pytest.mark.slow
def test_compiled_layers_have_the_same_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MOE_MODELS, "qwen3_moe", {**MOE_MODELS["qwen3_moe"], "num_hidden_layers": 1})
    plain = build("qwen3_moe", torch.float32).train()
    models.use_causal_sdpa(plain)
    compiled = copy.deepcopy(plain)
    expected = step(plain, training.attach_routers(plain, cfg()))
    loss = training.attach_routers(compiled, cfg())
    models.compile_layers(compiled, backend="aot_eager")
    assert step(compiled, loss) == pytest.approx(expected, rel=1e-6)


def test_sums_of_a_step_begin_at_zero() -> None:
    model = build("mixtral", torch.float32).train()
    attached = training.attach_routers(model, cfg())
    assert step(model, attached) == step(model, attached)


def test_router_loss_has_no_host_sync() -> None:
    """On the meta device .item() raises."""
    with torch.device("meta"):
        model = MixtralForCausalLM(build("mixtral", torch.float32).config)
    model.set_experts_implementation("batched_mm")
    models.use_causal_sdpa(model)
    loss = training.attach_routers(model, cfg())
    settings = training.StepSettings(torch.device("meta"), routers=loss)
    vector = training.train_step(
        training.Prepared(model, settings), batches(), torch.optim.AdamW(model.parameters(), fused=False)
    )
    assert vector.vector.is_meta
