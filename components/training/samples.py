"""Sample generations during a run, printed for inspection."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from components import data, distributed, models, observability
from components.config.schema.data import DataConfig, MixtureDataConfig
from components.config.schema.training import GenerationConfig
from components.conversation import Prompt
from components.distributed.init import get_local_world_size_preinit
from components.exchange import all_gather_json
from components.kernel_counters import usable_memory
from components.training.evaluation import Interruptible
from components.training.setup.prepared import Prepared

FREE_SHARE = 0.5
"""Maximum fraction of a rank's free memory for unsharded weights, so that generation does not set the run's peak."""
GIB = 2**30


class GenerationRun(Interruptible, Protocol):
    """Attributes of a run that `show_generations` uses."""

    @property
    def cfg(self) -> Any:
        """Config of the recipe, with the section data."""

    def report_generations(self, generations: list[tuple[str, str]]) -> None:
        """Print (prompt, answer) pairs on rank 0."""

    def print(self, *lines: str) -> None:
        """Print lines on rank 0."""


def show_generations(
    model: Prepared, tokenizer: Any, held_out: data.HasPrompts, cfg: GenerationConfig, run: GenerationRun
) -> None:
    """Generate and print answers to held-out prompts and to `generation.prompts`. A collective.

    Held-out prompts have the system message and tools of their sample; the others have `data.system_prompt`.

    FSDP2 gathers the weights once for all tokens if they fit in `FREE_SHARE` of the free memory of every rank, else for
    every token; a line reports which. Under pp they are always gathered for every token. Nothing is printed once a stop
    request arrives.
    """
    prompts = []
    if not run.agreed_to_stop():
        given = [Prompt(text, _encoded(tokenizer, text, run.cfg.data)) for text in cfg.prompts]
        prompts = [*data.sample_prompts(held_out, cfg.samples), *given]
    with (
        run.status("generating", len(prompts) * cfg.max_new_tokens) as advance,
        model.with_weights(model.evaluates_average),
        gathered_weights(model, run) if prompts else nullcontext(),
        distributed.unsharded_rows(model.called, run.mesh, model.parallelism) as forward,
    ):
        sampling = models.Sampling(cfg.temperature, cfg.top_p, cfg.seed)

        def stopped() -> bool:
            advance()  # called before each token
            return run.agreed_to_stop()

        answers = models.generate(model.module, tokenizer, prompts, cfg.max_new_tokens, forward, stopped, sampling)
    texts = [prompt.text for prompt in prompts]
    run.report_generations(list(zip(texts, answers, strict=True)) if answers else [])


def _encoded(tokenizer: Any, prompt: str, cfg: DataConfig) -> list[int]:
    """Return the tokens of a prompt, with the system message that all conversations of the data begin with."""
    sources = cfg.sources.values() if isinstance(cfg, MixtureDataConfig) else [cfg]
    systems = {getattr(source, "system_prompt", None) for source in sources}
    return models.encode_prompt(tokenizer, prompt, systems.pop() if len(systems) == 1 else None)


def free_memory(device: torch.device) -> int:
    """Return the bytes that this rank can still allocate on a device.

    On a CPU: an equal share of the machine's usable memory for each local rank, without what this process has used at
    its peak.
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    share = usable_memory() // max(1, get_local_world_size_preinit())
    return max(0, share - observability.peak_memory_bytes(device))


def gathered_weights(model: Prepared, run: GenerationRun) -> AbstractContextManager[None]:
    """Return a context in which FSDP2's weights are unsharded if they fit, the same on all ranks; report the choice."""
    if model.pipeline is not None:
        return nullcontext()  # copying tied weights between stages needs the shards
    needed = distributed.unsharded_bytes(model.module)
    figures = all_gather_json([needed, free_memory(model.settings.device)])
    if not any(needed for needed, _ in figures):
        return nullcontext()  # not sharded by FSDP2
    needed, free = max(figures, key=lambda each: each[0] / max(each[1], 1))  # of the fullest rank
    fits = needed <= FREE_SHARE * free
    if fits:
        run.print(f"generation: weights gathered once ({needed / GIB:.2f} GiB of {free / GIB:.2f} GiB free)")
    else:
        run.print(f"generation: weights gathered per token (at once {needed / GIB:.2f} GiB; {free / GIB:.2f} GiB free)")
    return distributed.unshard_fsdp2_model(model.module) if fits else nullcontext()
