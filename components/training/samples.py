"""Sample generations during a run, printed for inspection."""

from __future__ import annotations

from typing import Any, Protocol

from components import data, distributed, models
from components.config.schema.training import GenerationConfig
from components.training.evaluation import Interruptible
from components.training.setup.prepared import Prepared


class GenerationRun(Interruptible, Protocol):
    """Attributes of a run that `show_generations` uses."""

    def report_generations(self, generations: list[tuple[str, str]]) -> None:
        """Print (prompt, answer) pairs on rank 0."""


def show_generations(
    model: Prepared, tokenizer: Any, held_out: data.HasPrompts, cfg: GenerationConfig, run: GenerationRun
) -> None:
    """Generate and print answers to held-out prompts and to `generation.prompts`. A collective.

    Nothing is printed once a stop request arrives.
    """
    prompts = [*data.sample_prompts(held_out, cfg.samples), *cfg.prompts]
    with (
        run.status("generating"),
        model.with_weights(model.evaluates_average),
        distributed.unsharded_rows(model.called, run.mesh, model.parallelism) as forward,
    ):
        sampling = models.Sampling(cfg.temperature, cfg.top_p, cfg.seed)
        answers = models.generate(
            model.module, tokenizer, prompts, cfg.max_new_tokens, forward, run.agreed_to_stop, sampling
        )
    run.report_generations(list(zip(prompts, answers, strict=True)) if answers else [])
