"""Training runs whose memory and traffic real gloo ranks measure, for comparison with their simulations."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from components import distributed, training
from components.batch import Batch
from components.checkpoint.tensors import list_optimizers
from components.config.mesh_rules import fit_micro_batches
from components.config.schema.cluster import Device, LocalClusterConfig
from components.config.schema.data import DocsDataConfig, LabelsDataConfig, PreferencesDataConfig
from components.config.schema.model import LossMethod, ModelConfig, WeightInit
from components.config.schema.objective import ClassificationConfig, DPOConfig, Reference, RewardConfig, TeacherConfig
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.parallelism import (
    SPLIT_BACKWARD,
    ActivationCheckpointing,
    ContextAttention,
    ParallelismConfig,
    PipelineSchedule,
    Strategy,
)
from components.config.schema.recipes import ClassifyConfig, DistillConfig, DpoConfig, FinetuneConfig, TrainConfig
from components.config.schema.run import PeftConfig
from components.config.schema.training import TrainingConfig
from components.planning.fake_rank import SavedForBackward, local_bytes, parameters_in_use
from components.planning.simulated_step import _simulate_step, _synthetic_batches, build_objective
from components.planning.simulation import SimulatedRank
from components.training.attempt import GarbageCollection
from components.training.step_cost import record_traffic, traffic_table
from scripts._memory.ranks import allocations, highest
from tests.harness import run_ranks

WINDOWS = 4
"""Times that a peak is measured: gloo's threads may still hold buffers of earlier collectives in some of them."""
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True,
}  # fmt: skip
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "vocab_size": 4096, "hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 16,
    "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}  # fmt: skip
_COMMON: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_DELTA = _COMMON | {"head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
                    "linear_value_head_dim": 64}  # fmt: skip
_FEW = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
_LATENT = {**_COMMON, "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16,
           "v_head_dim": 48, "moe_intermediate_size": 192}  # fmt: skip
HYBRID: dict[str, dict[str, Any]] = {
    "Qwen3.5": {**_DELTA, "model_type": "qwen3_5_text"},
    "Qwen3-Next": {**_DELTA, **_FEW, "model_type": "qwen3_next", "shared_expert_intermediate_size": 192},
    "OLMo Hybrid": {**_DELTA, "model_type": "olmo_hybrid", "linear_num_key_heads": 4, "linear_value_head_dim": 128},
    "Kimi Linear": {**_LATENT, "model_type": "kimi_linear", "linear_num_heads": 4, "linear_head_dim": 32,
                    "num_experts": 8, "num_experts_per_token": 2,
                    "layer_types": ["linear_attention", "full_attention"] * 2},
    "Nemotron-H": {**_COMMON, "model_type": "nemotron_h", "head_dim": 64, "ssm_state_size": 64, "mamba_num_heads": 8,
                   "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
                   "mamba_head_dim": 64, "n_groups": 2, "chunk_size": 64, "n_routed_experts": 8,
                   "num_experts_per_tok": 2, "moe_intermediate_size": 192,
                   "moe_shared_expert_intermediate_size": 384},
    "Gemma 4": {**_COMMON, "model_type": "gemma4_text", "head_dim": 64, "global_head_dim": 128,
                "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
                "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "DeepSeek V3": {**_LATENT, "model_type": "deepseek_v3", "q_lora_rank": 96, "n_routed_experts": 8, "n_group": 2,
                    "num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 2},
}  # fmt: skip
"""Models with layers of several kinds."""
del HYBRID["Nemotron-H"]["num_hidden_layers"]  # its list of layers says how many
CPU_RANKS = LocalClusterConfig(device=Device.cpu)
MODELS = {"Llama": LLAMA, "MoE": MOE, **HYBRID}
"""The first two have 100 MB, and are those of scripts/memory.py."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory and traffic of a real rank."""

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    peaks: tuple[int, ...]
    """Peak of each measured step."""
    traffic: dict[tuple[str, str], tuple[int, int]]
    """(group, operation) -> (calls, bytes) of a step."""


def finetune(
    model: str = "Llama", seq_len: int = 128, rows: int = 4, *, world: int, model_values: Any = None,
    peft: str = "none", training: Any = None, optimizer: Any = None, pack: bool = False, **axes: Any,
) -> FinetuneConfig:  # fmt: skip
    """Return the config of a run with `rows` micro-batches of one row on each rank; axes: the `parallelism` section."""
    parallelism = parallelism_of(axes)
    return FinetuneConfig(
        model=model_config(model, **(model_values or {})),
        data=DocsDataConfig(pack=pack),
        cluster=CPU_RANKS,
        parallelism=parallelism,
        peft=PeftConfig(method=peft),
        optimizer=optimizer or AdamWConfig(),
        training=training_config(parallelism, world, seq_len, rows, **(training or {})),
    )


def model_config(model: str, **values: Any) -> ModelConfig:
    """Return the config of one of MODELS, in float32 and with model.loss=logits by default."""
    config = MODELS[model] | values.pop("config", {})
    options = {"dtype": "float32", "compute_dtype": "float32", "loss": LossMethod.logits, **values}
    return ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=config, **options)


def parallelism_of(axes: dict[str, Any]) -> ParallelismConfig:
    """Return the `parallelism` section with names as in a config file."""
    kinds: dict[str, Any] = {
        "strategy": Strategy,
        "pp_schedule": PipelineSchedule,
        "cp_attention": ContextAttention,
        "activation_checkpointing": ActivationCheckpointing,
    }
    values = {name: kinds[name](value) if name in kinds else value for name, value in axes.items()}
    return ParallelismConfig(**{"dp_shard": 1, **values})


def training_config(
    parallelism: ParallelismConfig, world: int, seq_len: int, rows: int, **values: Any
) -> TrainingConfig:
    """Return sizes with `rows` rows a step on each data-parallel rank."""
    size = rows * parallelism.resolve(world).dp
    return TrainingConfig(**{"seq_len": seq_len, "micro_batch_size": 1, "global_batch_size": size, **values})


def dpo(
    *, world: int, reference: str, method: str = "none", pack: bool = False, rows: int = 2, **axes: Any
) -> DpoConfig:
    """Return the config of preference optimization with `rows` pairs on each rank."""
    parallelism = parallelism_of(axes)
    return DpoConfig(
        model=model_config("Llama"),
        data=PreferencesDataConfig(path="pairs.jsonl", pack=pack),
        cluster=CPU_RANKS,
        parallelism=parallelism,
        peft=PeftConfig(method=method),
        objective=DPOConfig(reference=Reference(reference)),
        training=training_config(parallelism, world, 128, rows),
    )


def classify(*, world: int, reward: bool = False, **axes: Any) -> ClassifyConfig:
    """Return the config of a classifier of texts, or of a reward model."""
    parallelism = parallelism_of(axes)
    pairs: Any = PreferencesDataConfig(path="pairs.jsonl")
    texts: Any = LabelsDataConfig(path="texts.jsonl", num_labels=5)
    return ClassifyConfig(
        model=model_config("Llama"),
        data=pairs if reward else texts,
        cluster=CPU_RANKS,
        parallelism=parallelism,
        objective=RewardConfig() if reward else ClassificationConfig(),
        training=training_config(parallelism, world, 128, 4),
    )


def distill(*, world: int, teacher: Path, **axes: Any) -> DistillConfig:
    """Return the config of a distillation from the model in the folder `teacher`, which `save_teacher` writes."""
    parallelism = parallelism_of(axes)
    return DistillConfig(
        model=model_config("Llama", loss=LossMethod.auto),
        data=DocsDataConfig(),
        cluster=CPU_RANKS,
        parallelism=parallelism,
        teacher=TeacherConfig(path=str(teacher), tokenizer="bytes"),
        training=training_config(parallelism, world, 128, 4),
    )


def save_teacher(folder: Path) -> Path:
    """Write a smaller Llama with random weights to a folder, and return the folder."""
    config = AutoConfig.for_model(**{**LLAMA, "hidden_size": 256, "num_hidden_layers": 4})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def measure_ranks(cfg: TrainConfig, world: int) -> list[Measured]:
    """Train on real gloo ranks as a recipe does, on synthetic rows; return the memory and traffic of each rank."""
    return run_ranks(world, lambda rank: _measure(cfg, world, rank), timeout=800)


def simulate_each(cfg: TrainConfig, world: int, ranks: list[int]) -> list[SimulatedRank]:
    """Simulate some of the ranks, each in a process of its own."""
    return run_ranks(len(ranks), lambda index: _simulate_step(cfg, world, ranks[index]), timeout=800, init=False)


def _measure(cfg: TrainConfig, world: int, rank: int) -> Measured:
    cfg = fit_micro_batches(cfg, world)
    mesh = distributed.build_mesh(cfg.parallelism, "cpu")
    run = training.RunContext(mesh, torch.device("cpu"), rank)
    vocabulary = cfg.model.config["vocab_size"]
    model = training.prepare(cfg, run, vocabulary)
    with allocations() as second:
        objective = build_objective(cfg, run, model, vocabulary)
    frozen = sum(second)
    optimizer = training.build_optimizer(model, cfg.optimizer)
    batches = [_random_tokens(batch, vocabulary, mesh.rank("dp")) for batch in _synthetic_batches(cfg, mesh)]
    head = None if model.pipeline is None else model.pipeline.tied_head
    held = [*model.module.parameters(), *(() if head is None else head.parameters())]
    gradients: list[int] = []
    for each in list_optimizers(optimizer):
        each.register_step_pre_hook(
            lambda *_: gradients.append(local_bytes(each.grad for each in held if each.grad is not None))
        )

    def step() -> None:
        training.train_step(model, batches, optimizer, objective)

    step()
    states = [state for each in list_optimizers(optimizer) for state in each.state.values()]
    state_bytes = local_bytes(each for state in states for each in state.values() if isinstance(each, torch.Tensor))
    average = 0 if model.average is None else model.average.local_bytes
    parameters = local_bytes(held)
    with record_traffic() as traffic:
        step()
    rows = {(row.group, row.operation): (row.calls, row.bytes) for row in traffic_table(traffic, mesh)}
    # DDP's buckets hold the gradients, and outlive the step.
    buckets = gradients[0] if isinstance(model.replica, DistributedDataParallel) else 0
    # A split backward leaves gradients allocated until the next step, which are part of its peak. Windows are short
    # otherwise, because the profiler misses some of the frees in gloo's threads.
    steps = 2 if cfg.parallelism.pp_schedule in SPLIT_BACKWARD else 1
    peaks, saved = [], 0
    for _ in range(WINDOWS):
        gradients.clear()
        gc.collect()
        with (
            GarbageCollection(1),
            SavedForBackward(lambda: parameters_in_use(model.module, head)) as kept,
            allocations() as changes,
        ):
            for _ in range(steps):
                step()
        saved = max(saved, kept.peak)
        peaks.append(parameters + state_bytes + average + frozen + buckets + highest(changes))
    return Measured(parameters, gradients[0], state_bytes, saved, tuple(peaks), rows)


def _random_tokens(batch: Batch, vocabulary: int, seed: int) -> Batch:
    """Return a micro-batch with random tokens, which routers spread over the experts."""
    generator = torch.Generator().manual_seed(seed)
    return replace(batch, input_ids=torch.randint(vocabulary, batch.shape, generator=generator))
