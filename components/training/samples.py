"""Sample texts of a model on its mesh, for people to read."""

from __future__ import annotations

from typing import Any, Protocol

from components import data, distributed, models
from components.config.schema.training import GenerationConfig
from components.training.evaluation import Interruptible
from components.training.setup.prepared import Prepared


class ShowsGenerations(Interruptible, Protocol):
    """What `show_generations` takes of a run."""

    def report_generations(self, answered: list[tuple[str, str]]) -> None:
        """Print prompts with the model's answers."""


def show_generations(
    model: Prepared, tokenizer: Any, held_out: data.HasPrompts, cfg: GenerationConfig, run: ShowsGenerations
) -> None:
    """Print prompts, of the held-out set and of `generation.prompts`, with the model's answers. A collective.

    A run that was asked to stop shows none.
    """
    prompts = [*data.sample_prompts(held_out, cfg.samples), *cfg.prompts]
    with run.status("generating"), distributed.whole_rows(model.called, run.mesh, model.parallelism) as forward:
        answers = models.generate(model.module, tokenizer, prompts, cfg.max_new_tokens, forward, run.agreed_to_stop)
    run.report_generations(list(zip(prompts, answers, strict=True)) if answers else [])
