"""The reference that every mesh is compared with, and one case on a mesh. Shared by the parity tests.

The reference is plain PyTorch in one process: each sample forwarded alone and without padding, one division by the
number of target tokens, torch's own clipping and AdamW.
"""

from __future__ import annotations

import copy
import hashlib
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from components import distributed, models, training
from components.config.schema import ParallelismConfig
from components.distributed.mesh import Mesh

LR, CLIP, GLOBAL_BATCH = 1e-3, 1.0, 8
SMALL = {
    "vocab_size": 97,  # divides by nothing
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
"""Mixtures of experts: 4, 8 and 6 of them."""

Sample = tuple[torch.Tensor, torch.Tensor]  # tokens and labels, (seq,) each


@dataclass(frozen=True)
class Case:
    """One model on one mesh."""

    model: str
    parallelism: dict[str, Any]
    accumulation: int = 1
    steps: int = 10
    dtype: torch.dtype = torch.float64
    samples: Callable[[int], list[Sample]] | None = None  # of a step; None: made up

    def __str__(self) -> str:
        degrees = " ".join(f"{key}={value}" for key, value in self.parallelism.items() if key != "tp_plan")
        return f"{self.model} [{degrees}] accumulation={self.accumulation} {str(self.dtype)[6:]}"


@dataclass
class Curve:
    """What a run showed: a loss and a gradient norm per step, and the first step's gradients by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def build(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """A model from scratch, its norms and biases moved off their trivial initial values."""
    torch.manual_seed(7)
    values = dict((MODELS | MOE_MODELS)[name])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    if dtype == torch.float64 and name in MOE_MODELS:
        model.set_experts_implementation("eager")  # torch's grouped products have no float64
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    for module in model.modules():
        if dtype == torch.float64 and type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_float64_norm, module)
        if dtype == torch.float64 and type(module).__name__.endswith("TopKRouter"):
            module.forward = types.MethodType(_float64_router, module)
    return model.to(dtype)


def _float64_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    """RMSNorm in the type of its input: transformers casts to float32, whose rounding would drown a float64 test."""
    gemma = type(self).__name__.startswith("Gemma")
    eps = self.eps if gemma else self.variance_epsilon
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (self.weight + (1 if gemma else 0))


def _float64_router(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The router of Mixtral, Qwen3-MoE and OLMoE in the type of its input, for the same reason."""
    logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight) + getattr(self, "favoured", 0.0)
    scores, chosen = torch.topk(torch.softmax(logits, dim=-1), self.top_k, dim=-1)
    if getattr(self, "norm_topk_prob", True):
        scores = scores / scores.sum(dim=-1, keepdim=True)
    return logits, scores, chosen


def samples_of_step(step: int) -> list[Sample]:
    """GLOBAL_BATCH samples of unequal lengths and unequal numbers of target tokens."""
    generator = torch.Generator().manual_seed(1000 + step)
    samples = []
    for index in range(GLOBAL_BATCH):
        length = int(torch.randint(4, 21, (), generator=generator)) + (9 if index == 0 else 0)
        tokens = torch.randint(3, 97, (length,), generator=generator)
        labels = tokens.clone()
        labels[: int(torch.randint(1, length - 1, (), generator=generator))] = -100
        samples.append((tokens, labels))
    return samples


def reference(case: Case, model: torch.nn.Module | None = None) -> Curve:
    """The curve of one process in plain PyTorch; `model` is used up."""
    model, curve = model or build(case.model, case.dtype), Curve()
    samples_of = case.samples or samples_of_step
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
    for step in range(case.steps):
        optimizer.zero_grad()
        total, count = torch.zeros((), dtype=case.dtype), 0
        for tokens, labels in samples_of(step):
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
            count += int((labels[1:] != -100).sum())
        (total / count).backward()
        if step == 0:
            curve.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        curve.losses.append(float(total.detach() / count))
        norm = torch.stack(
            [p.grad.double().norm() for p in model.parameters()]
        ).norm()  # torch's float32 one is not exact
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm.to(case.dtype))
        curve.norms.append(float(norm))
        optimizer.step()
    return curve


def run_case(case: Case, rank_model: torch.nn.Module) -> tuple[Curve, list[str]]:
    """The curve of this rank on the case's mesh, and the names of parameters whose replicas differ afterwards."""
    config = ParallelismConfig(**case.parallelism)
    mesh = distributed.build_mesh(config, "cpu")
    model = copy.deepcopy(rank_model).train()
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, config, case.dtype)
    called = distributed.wrap_replicas(model, mesh, config, layout)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=LR, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    settings = training.StepSettings(
        device=torch.device("cpu"), max_grad_norm=CLIP, mesh=mesh, defer_grad_sync=config.defer_grad_sync
    )  # fmt: skip
    curve = Curve()
    if case.dtype == torch.float64:
        curve.gradients = first_gradients(model, called, micro_batches(case, mesh, 0), settings)
    for step in range(case.steps):
        vector = training.train_step(called, micro_batches(case, mesh, step), optimizer, settings)
        curve.losses.append(vector[0].item())
        curve.norms.append(vector[1].item())
    return curve, differing_replicas(model)


def micro_batches(case: Case, mesh: Mesh, step: int) -> list[dict[str, torch.Tensor]]:
    """This rank's part of the global batch, padded on the right to the longest row of each micro-batch."""
    samples = (case.samples or samples_of_step)(step)
    per_rank = len(samples) // mesh.size("dp")
    mine = samples[mesh.rank("dp") * per_rank :][:per_rank]
    size = per_rank // case.accumulation
    return [pad(mine[start : start + size], mesh.sequence_multiple) for start in range(0, per_rank, size)]


def pad(samples: list[Sample], multiple: int) -> dict[str, torch.Tensor]:
    """(input_ids, labels), each (len(samples), longest rounded up to `multiple`)."""
    longest = max(len(tokens) for tokens, _ in samples)
    longest += -longest % multiple
    rows = [F.pad(tokens, (0, longest - len(tokens)), value=0) for tokens, _ in samples]
    labels = [F.pad(labels, (0, longest - len(labels)), value=-100) for _, labels in samples]
    return {"input_ids": torch.stack(rows), "labels": torch.stack(labels)}


def first_gradients(
    model: torch.nn.Module, called: Any, batches: list[dict[str, torch.Tensor]], settings: Any
) -> dict[str, torch.Tensor]:
    """The whole gradients of a step, caught where the optimizer would use them; the weights stay as they are."""
    caught: dict[str, torch.Tensor] = {}

    class Catcher(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for name, parameter in model.named_parameters():
                grad = parameter.grad
                caught[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()

    catcher = Catcher(model.parameters(), lr=0.0)
    catcher.param_groups[0]["fused"] = False
    unclipped = type(settings)(
        device=settings.device, max_grad_norm=0.0, mesh=settings.mesh, defer_grad_sync=settings.defer_grad_sync
    )  # fmt: skip
    training.train_step(called, batches, catcher, unclipped)
    return caught


def differing_replicas(model: torch.nn.Module) -> list[str]:
    """Names of parameters of which two ranks hold the same part with different bits."""
    mine = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            mesh, local = parameter.device_mesh, parameter.to_local()
            where = tuple(
                mesh.get_local_rank(dim) for dim, place in enumerate(parameter.placements) if not place.is_replicate()
            )
        else:
            where, local = (), parameter
        mine[name, where] = hashlib.sha256(local.detach().numpy().tobytes()).hexdigest()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    different = set()
    for (name, where), digest in mine.items():
        if any(other.get((name, where), digest) != digest for other in everyone):
            different.add(name)
    return sorted(different)


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    """||value - expected|| / ||expected||, and the absolute error where nothing is expected."""
    scale = expected.norm().item()
    return (value - expected).norm().item() / (scale if scale > 0 else 1.0)
