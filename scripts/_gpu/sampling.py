"""Sampling on the device: the tokens of many padded rows with a cache, against whole rows on a CPU, and its speed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from components import models, training
from components.conversation import Prompt
from components.training.evaluation import generation_forward
from scripts._gpu import gradients
from scripts._gpu.gradients import FLOAT64, Case
from scripts._gpu.kernels import error
from scripts._gpu.speed import DEFAULT, SMALL_ROWS, rate
from scripts._gpu.step import LLAMA_1B, TINY, TrainingStep, synchronize, training_step
from scripts._gpu.verdict import Line, at_most, attempt, control

_CASES = tuple(
    Case(name, config, FLOAT64, 1e-4, options=options)
    for name, config, options in (
        ("Llama", gradients.LLAMA, {}),
        ("Llama, fsdp2", gradients.LLAMA, gradients.mesh(strategy="fsdp2")),
        ("Gemma 3", gradients.GEMMA3, {}),
        ("Qwen3.5", gradients.QWEN3_5, {}),
        ("Nemotron-H", gradients.NEMOTRON_H, {}),
        ("DeepSeek V3", gradients.DEEPSEEK_V3, {}),
    )
)
"""The bound is the share of different tokens: float64 leaves none."""
_LENGTHS, _TOKENS = (70, 41, 41, 5, 1), 24
"""Tokens of each prompt, two of which are equal, and of each answer."""
_ROWS, _PROMPT_TOKENS, _ANSWER_TOKENS = 64, 128, 128
_PREDICTED = {"H200": 19_835, "H100": 19_835}
"""Sampled tokens/s of LLAMA_1B with _ROWS rows: the term "sampling of answers" of `scripts/plan.py --recipe grpo
model=llama3_2_1b cluster.gpu=h200 training.global_batch_size=64 rollouts.rows=64 rollouts.max_new_tokens=128 --why 1`
on one GPU, which the launches of kernels bound."""


def sampling(device: str, small: bool) -> Iterator[Line]:
    """Tokens and logits against those of a CPU for each type of cache, and tokens/s of 1B."""
    for case in _CASES:
        yield from attempt(case.label, _same_tokens(case, device))
    for name, config in (("Llama", gradients.LLAMA), ("Gemma 3", gradients.GEMMA3), ("Qwen3.5", gradients.QWEN3_5)):
        for dtypes, bound in ((gradients.FLOAT32, 1e-4), (gradients.MIXED, 5e-2), (gradients.BF16, 5e-2)):
            case = Case(f"{name}, {dtypes['dtype']} {dtypes['compute_dtype']}", config, dtypes, bound)
            yield from attempt(case.label, _same_logits(case, device))
    yield from attempt("tokens/s", _tokens_per_second(device, small))


def _same_tokens(case: Case, device: str) -> Iterator[Line]:
    """Yield the share of tokens that are not those of whole rows on a CPU, one row after another and uncached."""
    prompts = _prompts()
    chosen = models.Sampling(temperature=1.0, seed=3, keeps_stop=True)
    with gradients.step_of(case, device, lr=0.0) as step:
        reference = gradients.reference_model(case).eval()
        gradients.copy_weights(reference, step)
        found = _sampled(step, prompts, _TOKENS, chosen, rows=4)
        padded = _sampled(step, prompts, _TOKENS, chosen, rows=4, sees_padding=True)
    expected = _of_whole_rows(reference, prompts, chosen)
    what = f"{case.label}: share of tokens that differ from a CPU's"
    yield at_most(what, _differing(found, expected), case.bound)
    yield control(f"{what}, padding visible", _differing(padded, expected), case.bound)


def _same_logits(case: Case, device: str) -> Iterator[Line]:
    """Yield the error of the logits after padded prompts, whose padding attends to nothing."""
    prompts, logits = _prompts(), list[torch.Tensor]()

    class Recorded(models.Sampling):
        def choose(self, rows: torch.Tensor, indices: torch.Tensor, position: int) -> torch.Tensor:
            logits.append(rows[indices.argsort()])
            return rows.argmax(-1)

    with gradients.step_of(case, device, lr=0.0) as step:
        reference = gradients.reference_model(case).eval()
        gradients.copy_weights(reference, step)
        for sees_padding in (False, True):
            _sampled(step, prompts, 1, Recorded(keeps_stop=True), len(prompts), sees_padding)
    with torch.no_grad():
        expected: Any = [reference(input_ids=torch.tensor([each])).logits[0, -1] for each in prompts]
    what = f"{case.label}: error of the logits after padded prompts"
    yield at_most(what, error(logits[0], torch.stack(expected)), case.bound)
    if case.dtypes is gradients.FLOAT32:
        yield control(f"{what}, padding visible", error(logits[1], torch.stack(expected)), case.bound)


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 256, (length,), generator=generator).tolist() for length in _LENGTHS]
    prompts[2] = prompts[1]
    return prompts


def _differing(found: list[list[int]], expected: list[list[int]]) -> float:
    pairs = [pair for each in zip(found, expected, strict=True) for pair in zip(*each, strict=True)]
    return sum(one != other for one, other in pairs) / len(pairs)


def _sampled(
    step: TrainingStep, prompts: list[list[int]], tokens: int, chosen: models.Sampling, rows: int,
    sees_padding: bool = False,
) -> list[list[int]]:  # fmt: skip
    """Return the answers of a prepared model, as in a run of recipes/grpo.py. sees_padding: Plant that fault."""
    run = training.RunContext(step.model.settings.mesh, step.device)
    module = step.model.module
    module.generation_config.eos_token_id = None
    tokenizer = models.load_tokenizer(step.cfg.model)
    tokenizer.eos_token = tokenizer.chat_template = None
    longest = max(map(len, prompts)) + tokens
    with generation_forward(step.model, run, rows, longest) as forward:
        if sees_padding:
            forward = replace(forward, call=lambda attention_mask, **options: module(**options))
        return models.generate_tokens(
            module, tokenizer, [Prompt("", each) for each in prompts], tokens, forward, chosen
        )


@torch.no_grad()
def _of_whole_rows(model: nn.Module, prompts: list[list[int]], chosen: models.Sampling) -> list[list[int]]:
    answers = []
    for index, prompt in enumerate(prompts):
        row, choose = list(prompt), chosen.of_prompt(index)
        for position in range(_TOKENS):
            logits: Any = model(input_ids=torch.tensor([row]), use_cache=False).logits[:, -1]  # (1, vocabulary)
            row.append(int(choose(logits, position)))
        answers.append(row[len(prompt) :])
    return answers


def _tokens_per_second(device: str, small: bool) -> Iterator[Line]:
    """Yield tokens/s and the peak memory of a model as `auto` configures it, with rows of one length."""
    config, rows, tokens = (TINY, 4, 8) if small else (LLAMA_1B, _ROWS, _ANSWER_TOKENS)
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(1, config["vocab_size"], (rows, _PROMPT_TOKENS), generator=generator).tolist()
    chosen = models.Sampling(temperature=1.0, keeps_stop=True)
    with training_step(config, SMALL_ROWS, device, parallelism=DEFAULT, compile="auto") as step:
        _sampled(step, prompts, 4, chosen, rows)
        seconds = []
        for _ in range(2):
            synchronize(step.device)
            began = time.perf_counter()
            answers = _sampled(step, prompts, tokens, chosen, rows)
            synchronize(step.device)
            seconds.append(time.perf_counter() - began)
    what = f"{rows} answers of {tokens} tokens"
    yield rate(f"{what}: tokens/s", sum(map(len, answers)) / seconds[0], _PREDICTED)
    yield Line(f"{what}: milliseconds per token of all rows", f"{1000 * seconds[0] / tokens:.1f}")
    # A kernel that is built for each length of the cache takes its time the first time only.
    yield at_most(f"{what}: time of the first / of the second time", seconds[0] / seconds[1], 1.5, speed=True)
