"""Tiny models, generated samples, and one case on a mesh, with the curves and comparisons of planning/parity.py."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM

from components import distributed, models, training
from components.batch import Batch
from components.config.schema import FinetuneConfig, ModelConfig, ParallelismConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import LossMethod, RouterAux
from components.config.schema.optimizer import AdamWConfig, Schedule
from components.config.schema.run import ExpertLoads
from components.distributed.mesh import Mesh
from components.planning import parity as comparison
from components.planning import parity_reference as plain
from components.planning.parity import relative
from components.planning.parity_reference import Curve, Sample

__all__ = ["Curve", "Sample", "relative"]  # re-exported for the tests

CLIP, GLOBAL_BATCH = 1.0, 8
OPTIMIZER = AdamWConfig(lr=1e-3, weight_decay=0.1, schedule=Schedule.constant)
SMALL = {
    "vocab_size": 97,  # a prime, so that every shard is uneven
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "model_type": "llama", "tie_word_embeddings": False},
    "llama_tied": {**SMALL, "model_type": "llama", "tie_word_embeddings": True},
    "llama_one_kv_head": {**SMALL, "model_type": "llama", "num_key_value_heads": 1},
    "llama_uneven_heads": {**SMALL, "model_type": "llama", "num_attention_heads": 3, "num_key_value_heads": 3,
                           "tie_word_embeddings": True},
    "qwen3": {**SMALL, "model_type": "qwen3", "head_dim": 8},
    "mistral": {**SMALL, "model_type": "mistral", "sliding_window": None},
    "gemma": {**SMALL, "model_type": "gemma", "head_dim": 8},
    "gpt2": {"model_type": "gpt2", "vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
             "bos_token_id": 1, "eos_token_id": 2},
    "phi3": {**SMALL, "model_type": "phi3"},
}  # fmt: skip
EXPERTS = {**SMALL, "num_experts_per_tok": 2, "output_router_logits": False}
MOE_MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**EXPERTS, "model_type": "mixtral", "num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": {**EXPERTS, "model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8,
                  "norm_topk_prob": True},
    "olmoe": {**EXPERTS, "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3},
}  # fmt: skip
"""Mixtures of 4, 8 and 6 experts."""
DELTA = {**SMALL, "head_dim": 12, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 8,
         "linear_value_head_dim": 4, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
LATENT = {**SMALL, "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
          "v_head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
          "linear_head_dim": 8, "first_k_dense_replace": 1}  # fmt: skip
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MAMBA = {**SMALL, "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 8,
         "mamba_chunk_size": 16, "attn_layer_indices": [1]}  # fmt: skip
HYBRID_MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**DELTA, "model_type": "qwen3_5_text"},
    "qwen3_5_moe_text": {**DELTA, **FEW, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 16},
    "qwen3_next": {**DELTA, **FEW, "model_type": "qwen3_next", "shared_expert_intermediate_size": 16},
    "olmo_hybrid": {**DELTA, "model_type": "olmo_hybrid", "linear_num_value_heads": 4},
    "kimi_linear": {**LATENT, "model_type": "kimi_linear", "linear_num_heads": 4,
                    "layer_types": ["linear_attention", "full_attention"]},
    "bailing_hybrid": {**LATENT, "model_type": "bailing_hybrid", "layer_group_size": 2, "n_group": 2, "topk_group": 1,
                       "q_lora_rank": None},
    "nemotron_h": {**SMALL, "model_type": "nemotron_h", "head_dim": 12, "ssm_state_size": 8, "mamba_num_heads": 8,
                   "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"], "mamba_head_dim": 12,
                   "n_groups": 2, "chunk_size": 16, "n_routed_experts": 4, "moe_intermediate_size": 16,
                   "moe_shared_expert_intermediate_size": 16},
    "bamba": {**MAMBA, "model_type": "bamba"},
    "granitemoehybrid": {**MAMBA, "model_type": "granitemoehybrid", "shared_intermediate_size": 16,
                         "num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {**MAMBA, "model_type": "falcon_h1", "mamba_d_ssm": 96},
    "zamba2": {**SMALL, "model_type": "zamba2", "layers_block_type": ["linear_attention", "hybrid"],
               "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 8, "mamba_headdim": 12, "chunk_size": 16,
               "num_key_value_heads": 4, "kv_channels": 8},
    "lfm2": {**SMALL, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**SMALL, **FEW, "model_type": "lfm2_moe", "layer_types": ["conv", "full_attention"],
                 "num_dense_layers": 1},
}  # fmt: skip
"""Models whose layers mix tokens by linear attention, Mamba-2 or short convolutions, one layer of each type."""


@dataclass(frozen=True)
class Case:
    """One model on one mesh."""

    model: str
    parallelism: dict[str, Any]
    accumulation: int = 1
    steps: int = 10
    dtype: torch.dtype = torch.float64
    samples: Callable[[int], list[Sample]] | None = None  # samples of a step; None: samples_of_step
    router_aux: float = 0.0  # coefficient of the routers' auxiliary loss
    loss: LossMethod = LossMethod.logits
    compile: str = ""  # backend of torch.compile; empty: eager
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __str__(self) -> str:
        degrees = " ".join(f"{key}={value}" for key, value in self.parallelism.items() if key != "tp_plan")
        terms = f" smoothing={self.label_smoothing} z={self.z_loss}" if self.label_smoothing or self.z_loss else ""
        return (
            f"{self.model} [{degrees}] accumulation={self.accumulation} {str(self.dtype)[6:]} loss={self.loss}{terms}"
        )


def build(name: str, dtype: torch.dtype, values: dict[str, Any] | None = None) -> torch.nn.Module:
    """Build a model from scratch, by name or config values, with norms and biases moved off their trivial values."""
    torch.manual_seed(7)
    values = dict(values or (MODELS | MOE_MODELS | HYBRID_MODELS)[name])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    text_only = Mistral4ForCausalLM if config.model_type == "mistral4" else None  # not among transformers' causal LMs
    model = AutoModelForCausalLM.from_config(config) if text_only is None else text_only(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    if dtype == torch.float64:
        compute_in_float64(model)
    return model.to(dtype)


def exact_loss(name: str) -> LossMethod:
    """Return the loss method that computes in float64: Nemotron-H's own forward casts its logits to float32."""
    return LossMethod.chunked if name == "nemotron_h" else LossMethod.logits


def build_hybrid(name: str) -> torch.nn.Module:
    """Build a model of HYBRID_MODELS in float64, whose states last over a document and change its output."""
    model = build(name, torch.float64)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.sub_(3)
            elif parameter.dim() > 1:
                parameter.mul_(4)
    return model


def compute_in_float64(model: torch.nn.Module) -> None:
    """Replace the parts of a model that compute in float32, whatever the dtype of their input."""
    for module in model.modules():
        if type(module).__name__ in ("MixtralTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter"):
            module.forward = types.MethodType(_float64_router, module)
    plain.compute_in_float64(model)


def _float64_router(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The router of Mixtral, Qwen3-MoE and OLMoE in the dtype of its input: the original casts to float32."""
    logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight) + getattr(self, "favored", 0.0)
    scores, chosen = torch.topk(torch.softmax(logits, dim=-1), self.top_k, dim=-1)
    if getattr(self, "norm_topk_prob", True):
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return logits, scores, chosen


def samples_of_step(step: int) -> list[Sample]:
    """GLOBAL_BATCH samples of different lengths and different numbers of target tokens."""
    generator = torch.Generator().manual_seed(1000 + step)
    samples = []
    for index in range(GLOBAL_BATCH):
        length = int(torch.randint(4, 21, (), generator=generator)) + (9 if index == 0 else 0)
        tokens = torch.randint(3, 97, (length,), generator=generator)
        labels = tokens.clone()
        labels[: int(torch.randint(1, length - 1, (), generator=generator))] = -100
        samples.append((tokens, labels))
    return samples


def hyperparameters(case: Case) -> plain.Hyperparameters:
    terms = {"label_smoothing": case.label_smoothing, "z_loss": case.z_loss}
    return plain.Hyperparameters(OPTIMIZER, case.steps, case.steps, CLIP, router_aux=case.router_aux, **terms)


def router_config(case: Case) -> ModelConfig:
    return recipe_config(case).model


def recipe_config(case: Case) -> FinetuneConfig:
    aux = RouterAux.sequence if case.router_aux else RouterAux.none
    model = ModelConfig(path="made here", router_aux=aux, router_aux_coef=case.router_aux, loss=case.loss)
    return FinetuneConfig(model=model, data=DocsDataConfig(), parallelism=ParallelismConfig(**case.parallelism))


def reference(case: Case, model: torch.nn.Module | None = None) -> Curve:
    """Curve of one process in plain PyTorch; `model` is modified."""
    return plain.reference(
        model or build(case.model, case.dtype), case.samples or samples_of_step, hyperparameters(case)
    )


def run_case(case: Case, rank_model: torch.nn.Module) -> tuple[Curve, list[str]]:
    """Return this rank's curve on the case's mesh, and the names of parameters whose replicas differ afterwards."""
    recipe = recipe_config(case)
    config = recipe.parallelism
    mesh = distributed.build_mesh(config, "cpu")
    model = copy.deepcopy(rank_model).train()
    models.use_causal_sdpa(model)
    anatomy = models.read_anatomy(model)
    layout = distributed.parallelize(model, mesh, config, case.dtype, anatomy)
    router_loss = training.attach_routers(model, recipe.model, mesh, anatomy, ExpertLoads.summary)
    loss_head = training.attach_loss_head(
        model, recipe.model, recipe.training, recipe.parallelism, mesh, layout.stages, torch.device("cpu")
    )
    models.checkpoint_activations(model, config.activation_checkpointing)
    if case.compile:
        models.compile_layers(model, backend=case.compile)
    called = distributed.wrap_replicas(model, mesh, config, layout)
    optimizer = training.build_optimizer(model, OPTIMIZER)
    settings = training.StepSettings(
        device=torch.device("cpu"),
        max_grad_norm=CLIP,
        mesh=mesh,
        defer_grad_sync=config.defers_grad_sync,
        routers=router_loss,
        loss_head=loss_head,
    )  # fmt: skip
    first_gradients: dict[str, torch.Tensor] = {}

    def store_gradients(*_: Any) -> None:
        if case.dtype == torch.float64 and not first_gradients:
            first_gradients.update(full_gradients(model))

    optimizer.register_step_pre_hook(store_gradients)
    prepared = training.Prepared(model, settings, called)
    curve = comparison.train_on_mesh(
        prepared, optimizer, lambda step: micro_batches(case, mesh, step), hyperparameters(case)
    )
    scale = min(1.0, CLIP / (curve.norms[0] + 1e-6))
    curve.gradients = {name: gradient / scale for name, gradient in first_gradients.items()}
    return curve, comparison._differing_replicas(model)


def full_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Full gradient of each parameter of this rank; every rank must call it, because shards are gathered."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in gradients.items()}


def micro_batches(case: Case, mesh: Mesh, step: int) -> list[Batch]:
    """This rank's rows of the global batch, padded on the right to the longest row of each micro-batch."""
    samples = (case.samples or samples_of_step)(step)
    per_rank = len(samples) // mesh.size("dp")
    of_rank = samples[mesh.rank("dp") * per_rank :][:per_rank]
    size = per_rank // case.accumulation
    return [pad(of_rank[start : start + size], mesh.sequence_multiple) for start in range(0, per_rank, size)]


def pad(samples: list[Sample], multiple: int) -> dict[str, torch.Tensor]:
    """(input_ids, labels), each (len(samples), longest rounded up to `multiple`)."""
    longest = max(len(tokens) for tokens, _ in samples)
    longest += -longest % multiple
    rows = [F.pad(tokens, (0, longest - len(tokens)), value=0) for tokens, _ in samples]
    labels = [F.pad(labels, (0, longest - len(labels)), value=-100) for _, labels in samples]
    return Batch.from_labels(torch.stack(rows), torch.stack(labels))
