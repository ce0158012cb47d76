"""Throughput of tokenizing conversations with labels, compared with TRL, torchtune and `datasets.map` if installed.

python scripts/benchmark/tokenization.py                          # Python's documentation, the default model
python scripts/benchmark/tokenization.py --path gsm8k/train.jsonl --prompt question --response answer
pip install --no-deps --target /tmp/peers trl torchtune torchao tiktoken sentencepiece
python scripts/benchmark/tokenization.py --peers /tmp/peers

Every arm renders the chat template and determines which tokens are targets. (The name tokenize.py would shadow a module
of the standard library.)
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
from components.conversation import Conversation
from components.data.cache import tokenize
from components.data.examples import encode_conversations
from components.data.sources.split import SourceSplit
from components.terminal import HelpText

Arm = Callable[[], int]
"""Function that tokenizes everything and returns the number of tokens."""
SEQ_LEN = 2048  # required by `tokenize`; it splits documents, not conversations


def main() -> None:
    """Print tokens per second of each arm, the median of interleaved runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("--path", type=Path, help="file of prompts and responses; default: Python's documentation")
    parser.add_argument("--prompt", default="prompt", help="column of prompts")
    parser.add_argument("--response", default="response", help="column of responses")
    parser.add_argument("--model", default="smollm2_135m", help="option of conf/model")
    parser.add_argument("--peers", type=Path, help="folder with trl and torchtune, if they are not installed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    if options.peers:
        sys.path.append(str(options.peers))
    cfg = source(options.path, options.prompt, options.response)
    conversations = list(SourceSplit(cfg, False))
    values = yaml.safe_load((CONF / "model" / f"{options.model}.yaml").read_text())
    tokenizer = models.load_tokenizer(ModelConfig(path=values["path"], tokenizer=values.get("tokenizer")))
    with tempfile.TemporaryDirectory() as folder:
        cfg, uncached = replace(cfg, cache=folder), replace(cfg, cache=None)
        arms = {
            "ours": lambda: len(tokenize(SourceSplit(uncached, False), uncached, tokenizer, SEQ_LEN).tokens.ids),
            "ours, the next time": lambda: len(tokenize(SourceSplit(cfg, False), cfg, tokenizer, SEQ_LEN).tokens.ids),
            f"ours on {options.processes} processes": partial(
                on_processes, conversations, tokenizer, options.processes
            ),
            **peers(conversations, tokenizer, options.processes),
            **torchtune(conversations, tokenizer, Path(folder)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        tokens = {}
        for run in range(options.repeat + 1):
            for name, arm in arms.items():
                began = time.perf_counter()
                tokens[name] = arm()
                seconds[name] += [time.perf_counter() - began] if run else []
    print(f"{len(conversations):,} conversations, {options.model}, {os.cpu_count()} cores")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:32} {tokens[name]:11,} tokens {median:6.2f} s {tokens[name] / median:10,.0f} tokens/s")


def source(path: Path | None, prompt: str, response: str) -> DataConfig:
    """Return the data config of a file without a held-out split, or that of the default data set."""
    if path is None:
        return DocsDataConfig()
    return SftDataConfig(path=str(path), prompt_column=prompt, response_column=response, eval_fraction=0.0)


def on_processes(conversations: list[Conversation], tokenizer: Any, processes: int) -> int:
    """Tokenize parts of the conversations in several processes, with one thread each."""
    size = -(-len(conversations) // (4 * processes))
    parts = [conversations[start : start + size] for start in range(0, len(conversations), size)]
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            encoded = pool.map(partial(encode_conversations, tokenizer), parts, chunksize=1)
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before
    return sum(len(example.input_ids) for part in encoded for example in part)


def peers(conversations: list[Conversation], tokenizer: Any, processes: int) -> dict[str, Arm]:
    """Return the arms of `datasets` and TRL; print why TRL is not measured if it cannot be imported."""
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()
    table = datasets.Dataset.from_list(
        [
            {"prompt": conversation.messages[:-1], "completion": conversation.messages[-1:]}
            for conversation in conversations
        ]
    )
    arms: dict[str, Arm] = {}
    for count in sorted({1, processes}):
        arms[f"datasets.map, num_proc={count}"] = partial(datasets_map, table, tokenizer, count)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            from trl.trainer.sft_trainer import SFTTrainer
    except ImportError as error:
        print(f"trl: not measured, import failed: {str(error).strip().splitlines()[0]}")
        return arms
    trainer = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)
    name = f"trl {importlib.metadata.version('trl')}"
    for count in sorted({1, processes}):
        arguments = SimpleNamespace(
            dataset_num_proc=count,
            assistant_only_loss=False,
            max_length=None,
            dataset_text_field="text",
            shuffle_dataset=False,
        )
        prepare = partial(SFTTrainer._prepare_dataset, trainer, table, tokenizer, arguments, False, None, "benchmark")
        arms[f"{name}, dataset_num_proc={count}"] = lambda prepare=prepare: count_tokens(prepare())
    return arms


def torchtune(conversations: list[Conversation], tokenizer: Any, folder: Path) -> dict[str, Arm]:
    """Return the arm of torchtune, or {} if it cannot be imported.

    It tokenizes sample by sample. As it does not support Hugging Face's chat templates, the template is Llama 3's. The
    tokenizer is its fastest, tiktoken, with the same vocabulary: ids differ, but the number of tokens hardly does.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            from torchtune.data import InputOutputToMessages
            from torchtune.datasets import SFTDataset
            from torchtune.models.llama3 import Llama3Tokenizer
    except ImportError as error:
        print(f"torchtune: not measured, import failed: {str(error).strip().splitlines()[0]}")
        return {}
    vocabulary, rows = folder / "vocabulary.tiktoken", folder / "rows.json"
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    ranks = {token: rank for token, rank in tokenizer.get_vocab().items() if all(char in byte_of for char in token)}
    ordered = sorted(ranks, key=ranks.__getitem__)
    encoded = (base64.b64encode(bytes(byte_of[char] for char in token)).decode() for token in ordered)
    vocabulary.write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(encoded)))
    answered = [(conversation.messages[-2], conversation.messages[-1]) for conversation in conversations]
    rows.write_text(
        json.dumps([{"input": asked["content"], "output": answer["content"]} for asked, answer in answered])
    )
    samples = SFTDataset(
        source="json",
        data_files=str(rows),
        split="train",
        message_transform=InputOutputToMessages(),
        model_transform=Llama3Tokenizer(str(vocabulary)),
    )
    name = f"torchtune {importlib.metadata.version('torchtune')}"
    return {name: lambda: sum(len(sample["tokens"]) for sample in samples)}


def datasets_map(table: Any, tokenizer: Any, processes: int) -> int:
    """Tokenize in batches, as the documentation of `datasets` recommends for fast tokenizers."""

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        both = [prompt + completion for prompt, completion in zip(rows["prompt"], rows["completion"], strict=True)]
        prompts = tokenizer.apply_chat_template(rows["prompt"], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(tokenizer.apply_chat_template(both, tokenize=False), add_special_tokens=False)["input_ids"]
        starts = [len(each) for each in tokenizer(prompts, add_special_tokens=False)["input_ids"]]
        labels = [[-100] * start + each[start:] for start, each in zip(starts, ids, strict=True)]
        return {"input_ids": ids, "labels": labels}

    num_proc = processes if processes > 1 else None
    return count_tokens(table.map(encode, batched=True, num_proc=num_proc, remove_columns=table.column_names))


def count_tokens(table: Any) -> int:
    """Return the number of tokens in a table."""
    return len(table.data.column("input_ids").combine_chunks().flatten())


if __name__ == "__main__":
    main()
