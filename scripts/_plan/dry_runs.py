"""Dry runs of the best rows of a plan: the run's own code on fake tensors, at the real world size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from components.config.model_files import locate
from components.config.schema.model import ModelConfig, WeightInit
from components.config.schema.recipes import TrainConfig
from components.config.shape import ModelShape
from components.planning.dry_run.dry_run_children import ranks_to_play, start_dry_runs
from components.planning.dry_run.dry_run_result import DryRun
from components.planning.formulas.memory_check import GIB
from components.planning.formulas.ranking import Plan

SIZE_KEYS = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "hidden": "hidden_size",
    "vocab": "vocab_size",
    "head_dim": "head_dim",
    "mlp": "intermediate_size",
    "expert_mlp": "moe_intermediate_size",
    "experts_per_token": "num_experts_per_tok",
    "tied": "tie_word_embeddings",
}
"""Size of a model -> its key in the configs of transformers."""
LOCAL_EXPERTS = ("mixtral", "gpt_oss")
"""Model types that call the number of experts num_local_experts; others call it num_experts."""


def play_rows(cfg: TrainConfig, shape: ModelShape, plans: Sequence[Plan], world: int) -> list[list[DryRun]]:
    """Play the first, last and fullest rank of each plan; return their results by plan.

    A model of the hub that is not on this machine is built from its stated sizes.

    Raises ConfigError with all problems of a child process.
    """
    played = []
    for plan in plans:
        training = replace(cfg.training, micro_batch_size=plan.candidate.micro_batch_size)
        chosen = replace(
            cfg, model=buildable(cfg.model, shape), parallelism=plan.candidate.parallelism, training=training
        )
        played.append(start_dry_runs(chosen, world, ranks_to_play(chosen, world)))
    return played


def buildable(model: ModelConfig, shape: ModelShape) -> ModelConfig:
    """Return a model config that can be built here: a hub model by its sizes, any other as it is."""
    if model.path is None or locate(model.path).is_local:
        return model
    values: dict[str, Any] = {"model_type": shape.family}
    values |= {key: getattr(shape, name) for name, key in SIZE_KEYS.items() if getattr(shape, name) is not None}
    if shape.experts:
        values["num_local_experts" if shape.family in LOCAL_EXPERTS else "num_experts"] = shape.experts
    return replace(
        model, path=None, revision=None, init=WeightInit.random, tokenizer="bytes", config={**values, **model.config}
    )


def dry_run_lines(plans: Sequence[Plan], played: Sequence[Sequence[DryRun]]) -> list[str]:
    """Return a table of the estimated and the played memory of each row, with the traffic of the fullest rank."""
    lines = ["", "dry runs: bytes of the run's own code on fake tensors, maximum over the played ranks"]
    for number, (plan, runs) in enumerate(zip(plans, played, strict=True), 1):
        fullest = max(runs, key=lambda each: each.peak)
        ranks = ", ".join(f"{each.rank}: {each.peak / GIB:,.2f}" for each in runs)
        lines.append(
            f"row {number}: {fullest.peak / GIB:,.2f} GiB (formulas {plan.memory.peak / GIB:,.2f}, "
            f"{plan.memory.peak / fullest.peak - 1:+.1%}); GiB by rank: {ranks}; parameters "
            f"{fullest.parameters / GIB:,.2f}, gradients {fullest.gradients / GIB:,.2f}, optimizer "
            f"{fullest.optimizer / GIB:,.2f}, saved for the backward {fullest.saved / GIB:,.2f}; peak at "
            f"{fullest.peak_operator} in {fullest.peak_phase}; {fullest.cpu_seconds:.0f} s of CPU"
        )
        lines += [
            f"    {each.group}: {each.calls} {each.operation}, {each.bytes / 2**20:,.1f} MiB per step"
            for each in fullest.traffic
        ]
        lines += [f"    note: {note}" for note in fullest.notes]
    return lines
