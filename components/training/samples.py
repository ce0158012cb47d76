"""Sample texts of a model on its mesh, for people to read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from components import data, distributed, models
from components.config.schema.training import GenerationConfig
from components.distributed.mesh import Mesh

if TYPE_CHECKING:
    from components.training.prepared import Prepared


class Interruptible(Protocol):
    """What a pass over data takes of a run: its mesh, what it shows meanwhile, and whether to stop."""

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""

    @property
    def agreed_to_stop(self) -> Callable[[], bool]:
        """Returns whether any rank was asked to stop. A collective."""

    @property
    def status(self) -> Callable[[str], AbstractContextManager[None]]:
        """Returns a context in which the progress bar shows what the run does."""


def generate_samples(
    model: Prepared, tokenizer: Any, held_out: Any, cfg: GenerationConfig, run: Interruptible
) -> list[tuple[str, str]]:
    """Return prompts, of the held-out set and of `generation.prompts`, with the model's answers. A collective.

    A run that was asked to stop returns none.
    """
    prompts = [*data.sample_prompts(held_out, cfg.samples), *cfg.prompts]
    with run.status("generating"), distributed.whole_rows(model.replica, run.mesh, model.parallelism) as forward:
        answers = models.generate(model.module, tokenizer, prompts, cfg.max_new_tokens, forward, run.agreed_to_stop)
    return list(zip(prompts, answers, strict=True)) if answers else []
