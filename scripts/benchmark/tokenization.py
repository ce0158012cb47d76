"""How fast conversations become tokens and labels; TRL, torchtune and `datasets.map` beside it where installed.

python scripts/benchmark/tokenization.py                          # Python's documentation, the default model
python scripts/benchmark/tokenization.py --path gsm8k/train.jsonl --prompt question --response answer
pip install --no-deps --target /tmp/peers trl torchtune torchao tiktoken sentencepiece
python scripts/benchmark/tokenization.py --peers /tmp/peers

Every arm renders the chat template and finds which tokens carry the loss. (Not called tokenize.py: that is a module of
Python's own.)
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib.metadata
import io
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from transformers.convert_slow_tokenizer import bytes_to_unicode

from components import models
from components.config.compose.sources import CONF
from components.config.schema import ModelConfig
from components.config.schema.data import DataConfig, DocsDataConfig, SftDataConfig
from components.data.cache import tokenize
from components.data.examples import encode_conversations
from components.data.sources.rows import Conversation
from components.data.sources.split import SourceSplit

Arm = Callable[[], int]
"""Tokenizes everything and returns the number of tokens."""
SEQ_LEN = 2048  # cuts documents, not conversations


def main() -> None:
    """Print tokens per second of each arm, the median of some runs, interleaved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="rows with a prompt and a response; default: the documentation")
    parser.add_argument("--prompt", default="prompt", help="column")
    parser.add_argument("--response", default="response", help="column")
    parser.add_argument("--model", default="smollm2_135m", help="option of conf/model")
    parser.add_argument("--peers", type=Path, help="folder with trl and torchtune, where they are not installed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    if given.peers:
        sys.path.append(str(given.peers))
    cfg = source(given.path, given.prompt, given.response)
    conversations = list(SourceSplit(cfg, False))
    values = yaml.safe_load((CONF / "model" / f"{given.model}.yaml").read_text())
    tokenizer = models.load_tokenizer(ModelConfig(path=values["path"], tokenizer=values.get("tokenizer")))
    with tempfile.TemporaryDirectory() as folder:
        cfg, uncached = replace(cfg, cache=folder), replace(cfg, cache=None)
        arms = {
            "ours": lambda: len(tokenize(SourceSplit(uncached, False), uncached, tokenizer, SEQ_LEN).tokens.ids),
            "ours, the next time": lambda: len(tokenize(SourceSplit(cfg, False), cfg, tokenizer, SEQ_LEN).tokens.ids),
            f"ours on {given.processes} processes": partial(on_processes, conversations, tokenizer, given.processes),
            **peers(conversations, tokenizer, given.processes),
            **torchtune(conversations, tokenizer, Path(folder)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        tokens = {}
        for run in range(given.repeat + 1):
            for name, arm in arms.items():
                began = time.perf_counter()
                tokens[name] = arm()
                seconds[name] += [time.perf_counter() - began] if run else []
    print(f"{len(conversations):,} conversations, {given.model}, {os.cpu_count()} cores")
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        print(f"{name:36} {tokens[name]:12,} tokens {middle:8.2f} s {tokens[name] / middle:14,.0f} tokens/s")


def source(path: Path | None, prompt: str, response: str) -> DataConfig:
    """Return the config of a file, all of which is trained on, or of the default data set."""
    if path is None:
        return DocsDataConfig()
    return SftDataConfig(path=str(path), prompt_column=prompt, response_column=response, eval_fraction=0.0)


def on_processes(conversations: list[Conversation], tokenizer: Any, processes: int) -> int:
    """Tokenize parts in processes of their own, with one thread each."""
    size = -(-len(conversations) // (4 * processes))
    parts = [conversations[start : start + size] for start in range(0, len(conversations), size)]
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            found = pool.map(partial(encode_conversations, tokenizer), parts, chunksize=1)
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before
    return sum(len(example.input_ids) for part in found for example in part)


def peers(conversations: list[Conversation], tokenizer: Any, processes: int) -> dict[str, Arm]:
    """Return what other packages do with the same conversations; say of those that cannot be imported why not."""
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()
    table = datasets.Dataset.from_list(
        [{"prompt": each.messages[:-1], "completion": each.messages[-1:]} for each in conversations]
    )
    arms: dict[str, Arm] = {}
    for count in sorted({1, processes}):
        arms[f"datasets.map, num_proc={count}"] = partial(mapped, table, tokenizer, count)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            from trl.trainer.sft_trainer import SFTTrainer
    except ImportError as error:
        print(f"trl: not measured, it cannot be imported: {str(error).strip().splitlines()[0]}")
        return arms
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)
    name = f"trl {importlib.metadata.version('trl')}"
    for count in sorted({1, processes}):
        asked = SimpleNamespace(
            dataset_num_proc=count,
            assistant_only_loss=False,
            max_length=None,
            dataset_text_field="text",
            shuffle_dataset=False,
        )
        prepare = partial(SFTTrainer._prepare_dataset, trainer, table, tokenizer, asked, False, None, "benchmark")
        arms[f"{name}, dataset_num_proc={count}"] = lambda prepare=prepare: counted(prepare())
    return arms


def torchtune(conversations: list[Conversation], tokenizer: Any, folder: Path) -> dict[str, Arm]:
    """Return torchtune's own way, sample by sample: it knows no Hugging Face templates, so its template is Llama 3's.

    Its tokenizer is its fastest, tiktoken, over the same words: the ids differ, their number hardly does.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            from torchtune.data import InputOutputToMessages
            from torchtune.datasets import SFTDataset
            from torchtune.models.llama3 import Llama3Tokenizer
    except ImportError as error:
        print(f"torchtune: not measured, it cannot be imported: {str(error).strip().splitlines()[0]}")
        return {}
    words, rows = folder / "words.tiktoken", folder / "rows.json"
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    ranks = {word: rank for word, rank in tokenizer.get_vocab().items() if all(letter in byte_of for letter in word)}
    ordered = sorted(ranks, key=ranks.__getitem__)
    coded = (base64.b64encode(bytes(byte_of[letter] for letter in word)).decode() for word in ordered)
    words.write_text("".join(f"{word} {rank}\n" for rank, word in enumerate(coded)))
    rows.write_text(json.dumps([{"input": each.messages[-2]["content"], "output": each.messages[-1]["content"]}
                                for each in conversations]))  # fmt: skip
    samples = SFTDataset(
        source="json",
        data_files=str(rows),
        split="train",
        message_transform=InputOutputToMessages(),
        model_transform=Llama3Tokenizer(str(words)),
    )
    name = f"torchtune {importlib.metadata.version('torchtune')}"
    return {name: lambda: sum(len(sample["tokens"]) for sample in samples)}


def mapped(table: Any, tokenizer: Any, processes: int) -> int:
    """Tokenize in batches, as the documentation of `datasets` recommends for fast tokenizers."""

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        both = [prompt + completion for prompt, completion in zip(rows["prompt"], rows["completion"], strict=True)]
        prompts = tokenizer.apply_chat_template(rows["prompt"], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(tokenizer.apply_chat_template(both, tokenize=False), add_special_tokens=False)["input_ids"]
        starts = [len(each) for each in tokenizer(prompts, add_special_tokens=False)["input_ids"]]
        labels = [[-100] * start + each[start:] for start, each in zip(starts, ids, strict=True)]
        return {"input_ids": ids, "labels": labels}

    num_proc = processes if processes > 1 else None
    return counted(table.map(encode, batched=True, num_proc=num_proc, remove_columns=table.column_names))


def counted(table: Any) -> int:
    """Return the number of tokens in a table."""
    return len(table.data.column("input_ids").combine_chunks().flatten())


if __name__ == "__main__":
    main()
