"""Selective activation checkpointing: what is computed twice; and what `auto` chooses by which estimate."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from components import models
from components.config.schema import FinetuneConfig, ModelConfig, ParallelismConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.parallelism import ActivationCheckpointing, MeshShape
from components.config.schema.training import TrainingConfig
from components.distributed.mesh import Mesh
from components.models.activations import LayerBytes, layer_bytes
from components.training.checkpointing import estimate
from tests.distributed.parity import MODELS, MOE_MODELS

NONE, SELECTIVE, FULL = (ActivationCheckpointing(name) for name in ("none", "selective", "full"))
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"


class _Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func).removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


def build(name: str, **values: Any) -> Any:
    values = {**(MODELS | MOE_MODELS)[name], **values}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    models.use_causal_sdpa(model)
    return model.train()


def test_products_and_attention_are_computed_once_and_the_rest_again() -> None:
    plain, calls, gradients = build("llama"), {}, {}
    tokens = torch.randint(3, 97, (2, 16))
    for policy in (NONE, SELECTIVE, FULL):
        model = copy.deepcopy(plain)
        models.checkpoint_activations(model, policy)
        with _Counts() as counted:
            model(input_ids=tokens, use_cache=False).logits.logsumexp(-1).sum().backward()
        calls[policy] = counted.calls
        gradients[policy] = {name: parameter.grad for name, parameter in model.named_parameters()}
    for kept in ("aten.mm", ATTENTION):
        assert calls[NONE][kept] == calls[SELECTIVE][kept] < calls[FULL][kept]
    for again in ("aten.silu", "aten.rsqrt"):
        assert calls[NONE][again] < calls[SELECTIVE][again] == calls[FULL][again]
    for policy in (SELECTIVE, FULL):
        assert all(torch.equal(gradients[policy][name], value) for name, value in gradients[NONE].items())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_the_estimate_is_what_a_layer_keeps(name: str) -> None:
    """Against the storages that autograd holds of a real layer, beyond the parameters."""
    values = {"n_embd": 128} if name == "gpt2" else {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    kept = []
    for layers in (2, 3):
        model = build(name, **values, **{"n_layer" if name == "gpt2" else "num_hidden_layers": layers}).bfloat16()
        held = {each.untyped_storage()._cdata: each.untyped_storage() for each in model.parameters()}
        own = sum(storage.nbytes() for storage in held.values())

        def pack(tensor: torch.Tensor, held: dict[int, Any] = held) -> torch.Tensor:
            held[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            getattr(model, model.base_model_prefix)(input_ids=torch.zeros(2, 64, dtype=torch.int64), use_cache=False)
        kept.append(sum(storage.nbytes() for storage in held.values()) - own)
    estimated = layer_bytes(model, 2, 64, torch.bfloat16)
    assert estimated.none == pytest.approx(kept[1] - kept[0], rel=0.02)
    assert estimated.full == 2 * 64 * 128 * 2
    assert estimated.full < estimated.selective < estimated.none


def test_experts_are_gathered_over_fewer_ranks_than_the_rest() -> None:
    """The same local parameters on 8 ranks: with ep 4 each rank gathers the experts of 2, and all else of 8."""
    model = build("mixtral")
    experts = sum(each.numel() for name, each in model.named_parameters() if "experts" in name)
    cfg = FinetuneConfig(
        model=ModelConfig(path="made here"),
        data=DocsDataConfig(),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=8, seq_len=64),
        parallelism=ParallelismConfig(reshard_after_forward=False),
    )
    needs = []
    for degrees in ({"dp_shard": 8}, {"dp_shard": 2, "ep": 4}):
        mesh = Mesh(None, MeshShape(**degrees))  # type: ignore[arg-type] # sizes alone count
        needs.append(estimate(model, cfg, mesh, torch.device("cpu"), torch.float32)[FULL])
    gathered, waiting = experts * 4, 2 * experts * 4 // 2  # gradients of two layers, of two
    assert needs[0] - needs[1] == (8 - 2) * (gathered + waiting)


def test_what_tp_and_types_divide_and_multiply() -> None:
    model = build("mixtral")
    one = layer_bytes(model, 1, 32, torch.bfloat16)
    wide = layer_bytes(model, 1, 32, torch.float32)
    tp, sp = (layer_bytes(model, 1, 32, torch.bfloat16, tp=2, sequence_parallel=each) for each in (False, True))
    assert wide == LayerBytes(2 * one.none, 2 * one.selective, 2 * one.full)
    assert sp.none == pytest.approx(one.none / 2, rel=0.01)
    assert sp.none < tp.none < one.none
    assert one.of(FULL, layers=10) == 10 * one.full + one.none  # one layer is being recomputed
    assert one.of(NONE, layers=10, in_flight=3) == 30 * one.none
