"""Tokenize a corpus into a token store, which data=tokens reads: one shard per input file, resumable.

python scripts/tokenize_corpus.py corpus --tokenizer Qwen/Qwen3-0.6B --out store         # a folder of JSONL files
python scripts/tokenize_corpus.py a.jsonl.gz b.parquet --tokenizer bytes --out store --text-column content --workers 8
python scripts/tokenize_corpus.py corpus --tokenizer bytes --out store --shard 3/16      # third of 16 tasks of an array
python scripts/tokenize_corpus.py --out store --index                                    # then the manifest, once
python recipes/pretrain.py data=tokens data.path=store

Reads what data=text reads, streamed, and ends each document with the end-of-text token as data=text does. Each file is
tokenized by a process of its own. A shard appears under its name once it is complete: repeat an interrupted command,
and finished shards are kept while their file has the same size and hash. Shards of another tokenizer or other settings
are refused. Ids have 2 bytes, or 4 for more than 65,536 tokens. Without --shard, the manifest is written at the end; it
lists all shards of the folder. Exit status 0; 1: a process or the disk failed; 2: an invalid command line or input.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from components.config.schema.model import ModelConfig
from components.config.shape import locate
from components.data.token_store.corpus import (
    Outcome,
    Progress,
    check_shards,
    manifest_of,
    remove_leftovers,
    settings_of,
    tokenize_file,
)
from components.data.token_store.manifest import write_manifest
from components.launch.machine import usable_cores
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.terminal import exit_with, print_text
from scripts._tokenize_corpus.display import Display
from scripts._tokenize_corpus.options import as_options, read_options
from scripts._tokenize_corpus.workers import process_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of model.tokenizer=`name`, without torch unless it is in a GGUF file. Raises ConfigError."""
    needs_torch = name != "bytes" and locate(name, "model.tokenizer").gguf_file is not None
    if not needs_torch and "transformers" not in sys.modules:
        # transformers imports torch wherever it is installed: 2 s and 300 MB for nothing.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns if there is no torch
    from components.models.tokenizer import load_tokenizer

    return load_tokenizer(ModelConfig(path=name, tokenizer=name))


def tokenize(options: Namespace) -> int:
    """Write the shards of the input files; return the exit status. Raises ConfigError before the first one."""
    tokenizer = load(options.tokenizer)
    settings = settings_of(tokenizer, options.tokenizer, text_column=options.text_column, bad_rows=options.bad_rows)
    check_shards(options.files, settings, options.out)
    for note in options.notes:
        print_text(note)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {options.out}: cannot be created: {error.strerror or error}") from error
    remove_leftovers(options.out)
    workers = min(options.workers, max(len(options.files), 1))
    threads = max(usable_cores() // workers, 1)
    display, problems, is_config, bad_rows = Display(options.files), list[str](), True, 0
    with display.shown():
        for event in process_files(
            options.files, workers, threads, lambda file, report: tokenize_file(file, tokenizer, settings, report)
        ):
            if event is None:
                display.refresh()
            elif isinstance(event.message, Progress):
                display.advance(event.file, event.message)
            elif isinstance(event.message, Outcome):
                display.finish(event.file, event.message)
                bad_rows += event.message.bad_rows
            else:
                display.finish(event.file, None)
                problems += event.message.problems
                is_config = is_config and event.message.is_config
    if bad_rows:
        print_text(f"{bad_rows:,} bad rows left out")
    if problems:
        print_problems(as_options(problems))
        return EXIT_INVALID if is_config else 1
    return 0


def index(folder: Path) -> None:
    """Write the manifest of a folder and print its counts. Raises ConfigError."""
    manifest = manifest_of(folder)
    try:
        file = write_manifest(manifest)
    except OSError as error:
        raise ConfigError(f"{folder}: the manifest cannot be written: {error.strerror or error}") from error
    print_text(f"{file}: {len(manifest.shards):,} shards, {manifest.documents:,} documents, {manifest.tokens:,} tokens")


def main(arguments: list[str]) -> int:
    """Tokenize, write the manifest, or both; return the exit status."""
    try:
        options = read_options(arguments, __doc__)
        if options.inputs and (status := tokenize(options)):
            return status
        if options.shard is None:
            index(options.out)
    except ConfigError as error:
        print_problems(as_options(error.problems))
        return EXIT_INVALID
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    exit_with(main)
