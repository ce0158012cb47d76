"""Data and the shortest command of each recipe with its own objectives: a tiny model that trains in seconds."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components.models.tokenizer import byte_tokenizer

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
COMMON = (
    *("model=tiny", "training.global_batch_size=4", "training.micro_batch_size=2", "training.seq_len=64"),
    *("checkpoint.export=false", "logging.plot=false", "logging.examples=0", "cluster.device=cpu"),
    "data.eval_fraction=0.25",
)
JOBS = {
    "dpo": ("dpo.py", "data.path=pairs.jsonl", "generation.samples=0"),
    "distill": ("distill.py", "data=text", "data.path=texts.jsonl", "teacher.path=teacher", "generation.samples=0"),
    "classify": ("classify.py", "data.path=texts.jsonl", "data.label_names=[a,b]"),
    "grpo": (
        "grpo.py",
        "data.path=prompts.jsonl",
        "data=prompts",
        "reward.functions=[length]",
        "generation.samples=0",
        "rollouts.group=2",
        "rollouts.max_new_tokens=16",
    ),
    "reward": ("classify.py", "objective=reward", "data=preferences", "data.path=pairs.jsonl"),
}
"""Recipe and arguments by job, for the files of `write_data`."""


def job(name: str) -> tuple[Path, tuple[str, ...]]:
    """Return the recipe file and the arguments of a job."""
    file, *arguments = JOBS[name]
    return RECIPES / file, (*COMMON, *arguments)


def write_data(folder: Path) -> None:
    """Write pairs.jsonl, labeled texts.jsonl and a causal LM with the byte tokenizer, `teacher`, into a folder."""
    rng = random.Random(3)

    def text(most: int) -> str:
        return "".join(rng.choices("abcdefgh ", k=rng.randint(3, most)))

    pairs = [{"prompt": f"question {number}?", "chosen": text(25), "rejected": text(25)} for number in range(40)]
    write_rows(folder / "pairs.jsonl", pairs)
    write_rows(folder / "prompts.jsonl", [{"prompt": pair["prompt"]} for pair in pairs])
    texts = [{"text": f"text {number} {text(40)}", "label": "ab"[number % 2]} for number in range(40)]
    write_rows(folder / "texts.jsonl", texts)
    write_teacher(folder / "teacher")


def write_rows(file: Path, rows: Sequence[dict[str, object]]) -> None:
    """Write one JSON object per line."""
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_teacher(folder: Path) -> None:
    """Write a teacher with confident predictions and another hidden size than the tiny model."""
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=264, tie_word_embeddings=False, **sizes)
    teacher = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(20)
    teacher.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def lines_of(run: Path, key: str = "loss") -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl that have this key, without times and checksums."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    excluded = ("tokens_per_second", "rollout_seconds", "check")
    return [{name: value for name, value in line.items() if name not in excluded} for line in lines if key in line]
