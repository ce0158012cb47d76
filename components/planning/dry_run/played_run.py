"""Dry runs of a whole run: its ranks whose memory differs, and a summary in lines of text. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.config.model_files import locate
from components.config.schema.model import ModelConfig, WeightInit
from components.config.schema.recipes import TrainConfig
from components.config.shape import ModelShape
from components.planning.dry_run.dry_run_children import ranks_to_play, start_dry_runs
from components.planning.dry_run.dry_run_result import DryRun
from components.planning.formulas.term import bytes_text
from components.terminal import fit

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
EXPERT_KEYS = {
    "mixtral": "num_local_experts",
    "gpt_oss": "num_local_experts",
    "deepseek_v3": "n_routed_experts",
    "glm4_moe": "n_routed_experts",
}
"""Model type -> its key for the number of experts; num_experts for others."""
SINGLE_MLP_SIZE = ("mixtral", "gpt_oss", "olmoe")
"""Model types without dense MLPs, whose intermediate_size is that of an expert."""


def play_run(cfg: TrainConfig, shape: ModelShape, world: int, recipe: Path | None = None) -> list[DryRun]:
    """Play the first and the last rank of a run, and one of each kind of pipeline stage.

    A model of the hub that is not on this machine is built from its stated sizes.

    Args:
        recipe: File of the recipe whose steps are played; None: Meshbook's recipe for the class of the config.

    Raises ConfigError with all problems of a child process.
    """
    built = replace(cfg, model=buildable(cfg.model, shape))
    return start_dry_runs(built, world, ranks_to_play(built, world), recipe=recipe)


def buildable(model: ModelConfig, shape: ModelShape) -> ModelConfig:
    """Return a model config that can be built here: a hub model by its sizes, any other as it is."""
    if model.path is None or locate(model.path).is_local:
        return model
    values: dict[str, Any] = {"model_type": shape.family}
    values |= {key: getattr(shape, name) for name, key in SIZE_KEYS.items() if getattr(shape, name) is not None}
    if shape.experts:
        values[EXPERT_KEYS.get(shape.family or "", "num_experts")] = shape.experts
    if shape.family in SINGLE_MLP_SIZE and shape.expert_mlp is not None:
        values["intermediate_size"] = values.pop("moe_intermediate_size")
    return replace(
        model, path=None, revision=None, init=WeightInit.random, tokenizer="bytes", config={**values, **model.config}
    )


def dry_run_lines(runs: Sequence[DryRun], estimated: int | None) -> list[str]:
    """Return the memory of a run by its played ranks, and the traffic and notes of the fullest one.

    Args:
        estimated: Peak bytes by the formulas; None: unknown.
    """
    fullest = max(runs, key=lambda each: each.peak)
    formulas = ""
    if estimated is not None:
        formulas = f" (formulas {bytes_text(estimated)}, {estimated / fullest.peak - 1:+.1%})"
    ranks = ", ".join(f"{each.rank}: {bytes_text(each.peak)}" for each in runs)
    lines = [
        f"{bytes_text(fullest.peak)} on rank {fullest.rank}{formulas}",
        f"    peak of each played rank: {ranks}; a rank took {fullest.cpu_seconds:.0f} s of CPU",
        f"    of rank {fullest.rank}: parameters {bytes_text(fullest.parameters)}, gradients "
        f"{bytes_text(fullest.gradients)}, optimizer {bytes_text(fullest.optimizer)}, saved for the backward at most "
        f"{bytes_text(fullest.saved)}; peak at {fullest.peak_operator} in {fullest.peak_phase}",
        *(
            f"    {each.group}: {each.calls} {each.operation}, {bytes_text(each.bytes)} per step"
            for each in fullest.traffic
        ),
        *(f"    note: {note}" for note in fullest.notes),
    ]
    return [part for line in lines for part in fit(line).split("\n")]
