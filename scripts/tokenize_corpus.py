"""Tokenize a corpus into a token store, which data=tokens reads: one shard per input file, resumable.

python scripts/tokenize_corpus.py corpus --tokenizer Qwen/Qwen3-0.6B --out store         # a folder of JSONL files
python scripts/tokenize_corpus.py a.jsonl.gz b.parquet --tokenizer bytes --out store --text-column content --workers 8
python scripts/tokenize_corpus.py corpus --tokenizer bytes --out store --shard 3/16      # third of 16 tasks of an array
python scripts/tokenize_corpus.py --out store --index                                    # then the manifest, once
python scripts/tokenize_corpus.py --out megatron --index --tokenizer Qwen/Qwen3-0.6B     # of shards of other programs
python scripts/tokenize_corpus.py hf://datasets/owner/name --tokenizer bytes --out store # objects, one after another
python scripts/tokenize_corpus.py s3://bucket/corpus --tokenizer bytes --out s3://bucket/store --scratch /mnt/scratch
python recipes/pretrain.py data=tokens data.path=store

Reads what data=text reads, streamed, and ends each document with the end-of-text token as data=text does. Each file is
tokenized by a process of its own. A shard appears under its name once it is complete: repeat an interrupted command,
and finished shards are kept while their file has the same size and hash, or the object at its URL the same version.
Shards of another tokenizer or other settings are refused. A worker copies an object to --scratch, tokenizes it and
removes the copy; with a URL as --out, it writes the shard there before it uploads it. Ids have 2 bytes, or 4 for more
than 65,536 tokens. Without --shard, the manifest is written at the end; it lists all shards of the folder. Exit status
0; 1: a process, the disk or the object store failed; 2: an invalid command line or input.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.config.model_files import locate
from components.config.schema.model import ModelConfig
from components.data.token_store.corpus import (
    InputFile,
    Outcome,
    Progress,
    StoreFolder,
    check_shards,
    check_space,
    manifest_of,
    remove_leftovers,
    remove_scratch,
    scratch_folder,
    settings_of,
    tokenize_file,
)
from components.data.token_store.manifest import ShardEntry, ShardFormat, read_manifest
from components.data.token_store.writer import has_foreign_shards, index_folder
from components.launch.machine import usable_cores
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.storage.object_store import StorageError, is_url
from components.terminal import exit_with, print_text
from scripts._tokenize_corpus.display import Display
from scripts._tokenize_corpus.options import as_options, read_options
from scripts._tokenize_corpus.workers import Work, process_files

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
    try:
        kept = check_shards(options.files, settings, StoreFolder(options.out, attempts=2))
    except StorageError as error:
        raise ConfigError(f"--out {options.out}: {error}") from error
    for note in options.notes:
        print_text(note)
    files = [file for file in options.files if file not in kept]
    workers = min(options.workers, max(len(files), 1))
    remove_scratch(options.scratch)
    if is_url(options.out) or any(file.version is not None for file in files):
        check_space(files, settings, options.scratch, workers)
    try:
        if not is_url(options.out):
            Path(options.out).mkdir(parents=True, exist_ok=True)
            remove_leftovers(Path(options.out))
    except OSError as error:
        raise ConfigError(f"--out {options.out}: cannot be created: {error.strerror or error}") from error
    with scratch_folder(options.scratch) as scratch:

        def work(file: InputFile, report: Callable[[Progress], object]) -> Outcome:
            return tokenize_file(file, options.out, scratch, tokenizer, settings, report)

        return process(options.files, kept, workers, work)


def process(files: Sequence[InputFile], kept: Mapping[InputFile, Outcome], workers: int, work: Work) -> int:
    """Call `work` for each file that is not kept, and show the progress; return the exit status."""
    threads = max(usable_cores() // workers, 1)
    display, problems, is_config, bad_rows = Display(files), list[str](), True, 0
    with display.shown():
        for file, outcome in kept.items():
            display.finish(file, outcome)
        for event in process_files([file for file in files if file not in kept], workers, threads, work):
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


def index(options: Namespace) -> None:
    """Write the manifest of a folder and print its counts. Raises ConfigError or StorageError."""
    out = options.out
    is_foreign = not options.inputs and not is_url(out) and has_foreign_shards(Path(out))
    if not is_foreign and (options.document_end or options.id_bytes):
        raise ConfigError(
            f"--out {out}: has no shards of other programs (.bin, .npy, .ds); leave out --document-end and --id-bytes"
        )
    try:
        if is_foreign and options.tokenizer is None:
            raise ConfigError(f"--tokenizer: needed, as {out} has shards of other programs; give that of their ids")
        if is_foreign:
            file = str(index_shards(options))
            manifest = read_manifest(out, "--out")
        else:
            folder = StoreFolder(out)
            manifest = manifest_of(folder)
            file = folder.write_manifest(manifest)
    except (ConfigError, StorageError):
        raise
    except OSError as error:
        raise ConfigError(f"{out}: the manifest cannot be written: {error.strerror or error}") from error
    print_text(f"{file}: {len(manifest.shards):,} shards, {manifest.documents:,} documents, {manifest.tokens:,} tokens")


def index_shards(options: Namespace) -> Path:
    """Write the manifest of shards that may be of other programs and return its file. Raises ConfigError or OSError."""
    tokenizer, end = load(options.tokenizer), options.document_end
    if end is not None:
        vocabulary = tokenizer.get_vocab()
        end = int(end) if end.isdecimal() else vocabulary.get(end)
        if end not in vocabulary.values():
            raise ConfigError(
                f"--document-end {options.document_end}: is neither a token of {options.tokenizer} nor an id of one; "
                f"its end-of-text token is {tokenizer.eos_token} ({tokenizer.eos_token_id})"
            )
    without_ends = list[str]()

    def report(entry: ShardEntry) -> None:
        print_text(f"{entry.path}: {entry.documents:,} documents, {entry.tokens:,} tokens", flush=True)
        without_ends.extend([entry.path] if entry.format is ShardFormat.raw else [])

    try:
        file = index_folder(Path(options.out), tokenizer, document_end=end, id_bytes=options.id_bytes, report=report)
    except ValueError as error:
        raise ConfigError(f"--out: {str(error).replace('id_bytes=', '--id-bytes ')}") from error
    if without_ends and end is None:
        print_text(
            f"{len(without_ends):,} shards store no document ends, such as {without_ends[0]}: each is one document; "
            "--document-end TOKEN separates them"
        )
    return file


def main(arguments: list[str]) -> int:
    """Tokenize, write the manifest, or both; return the exit status."""
    try:
        options = read_options(arguments, __doc__)
        if options.inputs and (status := tokenize(options)):
            return status
        if options.shard is None:
            index(options)
    except ConfigError as error:
        print_problems(as_options(error.problems))
        return EXIT_INVALID
    except StorageError as error:
        print_problems([f"--out {options.out}: {error}"])
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    exit_with(main)
