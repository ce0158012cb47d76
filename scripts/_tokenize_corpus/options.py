"""The command line of scripts/tokenize_corpus.py."""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from components.config.schema.data import BadRows
from components.data.sources.files import Location
from components.data.sources.split_files import files_of_split, folder_notes, objects_of_split
from components.data.token_store.corpus import SHARD, InputFile
from components.data.token_store.manifest import MANIFEST
from components.launch.machine import usable_cores
from components.protocol.errors import ConfigError
from components.storage.object_store import is_url, join, package_problems, url_problems
from components.terminal import HelpText

_KEYS = {
    "data.text_column=": "--text-column ",
    "data.bad_rows=": "--bad-rows ",
    "model.tokenizer=": "--tokenizer ",
    "model.tokenizer": "--tokenizer",
}
"""Options that replace the keys of a recipe in messages."""


def read_options(arguments: list[str], documentation: str | None) -> Namespace:
    """Parse the options and find the input files, as `files`, with `notes` on their folders.

    Raises ConfigError with all problems.
    """
    parser = ArgumentParser(description=documentation, allow_abbrev=False, formatter_class=HelpText)
    parser.add_argument(
        "inputs", nargs="*", metavar="INPUT", help="file, or folder with a file per split, or their URL"
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="folder or URL of the token store")
    parser.add_argument("--tokenizer", help="as model.tokenizer: a hub name, a folder, a .gguf file, or bytes")
    parser.add_argument("--text-column", default="text", help="as data.text_column (default: text)")
    parser.add_argument("--bad-rows", choices=list(BadRows), default=BadRows.refuse, help="as data.bad_rows")
    parser.add_argument("--split", default="train", help="split of folders, as data.split (default: train)")
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="FOLDER",
        help="folder for copies of objects and unfinished shards (default: "
        "--out, or the system's folder for temporary files if --out is a URL)",
    )
    parser.add_argument("--workers", type=int, help="files tokenized at the same time (default: the usable cores)")
    parser.add_argument("--shard", metavar="I/N", help="only every N-th file, from the I-th on: a task of an array")
    parser.add_argument("--index", action="store_true", help="without INPUT: only write the manifest of FOLDER")
    parser.add_argument(
        "--document-end",
        metavar="TOKEN",
        help="with --index and --tokenizer: token, or id, that ends documents in shards that store no ends",
    )
    parser.add_argument(
        "--id-bytes", type=int, choices=(2, 4), help="with --index and --tokenizer: bytes of an id in bare .npy files"
    )
    options = parser.parse_args(arguments)
    options.bad_rows = BadRows(options.bad_rows)
    options.workers = usable_cores() if options.workers is None else options.workers
    options.scratch = options.scratch or Path(tempfile.gettempdir() if is_url(options.out) else options.out)
    problems = _problems_of(options)
    options.files, options.notes = [], []
    try:
        found = find_files(options.inputs, options.split, options.out)
        folders = [Location("INPUT", each, options.split) for each in options.inputs]
        options.notes = [f"{folder.path}: {note}" for folder in folders for note in folder_notes(folder.path, [folder])]
        options.files = found if options.shard is None else select_files(found, options.shard)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return options


def _problems_of(options: Namespace) -> list[str]:
    """Return what is wrong with the options, except the input files."""
    problems = [] if options.workers >= 1 else [f"--workers {options.workers}: must be at least 1"]
    if is_url(options.out):
        problems += url_problems("--out", options.out) or package_problems("--out", options.out)
    for name, path in (("--out", options.out), ("--scratch", options.scratch)):
        if not is_url(str(path)) and os.path.lexists(path) and not os.path.isdir(path):
            problems.append(f"{name} {path}: is not a folder; choose another one")
            break
    if options.inputs and options.tokenizer is None:
        problems.append("--tokenizer: needed; give the model.tokenizer of the runs that will use the store")
    if not options.inputs and not options.index:
        problems.append("INPUT: needed; give the files of the corpus, or --index for the manifest of existing shards")
    for name, value in (("--document-end", options.document_end), ("--id-bytes", options.id_bytes)):
        if value is not None and (options.inputs or not options.index):
            problems.append(f"{name} {value}: is for shards of other programs; give --index and --tokenizer, no INPUT")
    if not options.inputs and options.shard is not None:
        problems.append(f"--shard {options.shard}: selects input files; give them too")
    if options.index and options.shard is not None:
        problems.append(
            f"--shard {options.shard}: other tasks may still write shards; give --index in a command of its own, once "
            "all tasks have ended"
        )
    return problems


def find_files(inputs: Sequence[str], split: str, out: str) -> list[InputFile]:
    """Return the input files with the names of their shards, sorted by shard. Raises ConfigError.

    A shard is named after its file, with the folders below the given one.
    """
    found: dict[str, InputFile] = {}
    problems = list[str]()
    for given in inputs:
        try:
            files = _objects_in(given, split, out) if is_url(given) else _files_in(given, split, out)
        except ConfigError as error:
            problems += error.problems
            continue
        if not files:
            problems.append(f"{given}: holds only the token store itself; give the files of the corpus")
        for file in files:
            other = found.setdefault(file.shard, file)
            if other.path != file.path:
                problems.append(
                    f"{file.path}: its shard would have the name of that of {other.path}; rename one, or give the "
                    "folder that holds both"
                )
    if problems:
        raise ConfigError(problems)
    return [found[name] for name in sorted(found)]


def _files_in(given: str, split: str, out: str) -> list[InputFile]:
    path = Path(given).expanduser()
    if not path.exists():
        raise ConfigError(f"{given}: no such file or folder")
    files, manifest = files_of_split(Location("INPUT", str(path), split)), Path(out, MANIFEST).resolve()
    if path.is_dir():  # --out may be a folder of the corpus
        files = [file for file in files if file.resolve() != manifest]
    return [
        InputFile(
            str(file), _shard_of(file.relative_to(path) if path.is_dir() else Path(file.name)), os.stat(file).st_size
        )
        for file in files
    ]


def _objects_in(given: str, split: str, out: str) -> list[InputFile]:
    if problems := url_problems("INPUT", given):
        raise ConfigError(problems)
    objects = objects_of_split(Location("INPUT", given, split))
    return [
        InputFile(each.url, _shard_of(name), each.bytes, each.version)
        for name, each in objects.items()
        if each.url != join(out, MANIFEST)
    ]


def _shard_of(name: Path) -> str:
    return f"{'__'.join(name.parts)}{SHARD}"


def select_files(files: list[InputFile], shard: str) -> list[InputFile]:
    """Return every N-th file from the I-th on, for I/N; I counts from 1. Raises ConfigError."""
    index, slash, count = shard.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ConfigError(f"--shard {shard}: must be I/N with I from 1 to N, such as 3/16 for the third of 16 tasks")
    return files[int(index) - 1 :: int(count)]


def as_options(problems: Sequence[str]) -> list[str]:
    """Return messages about keys of a recipe with the options of this command in their place."""
    found = list(problems)
    for key, option in _KEYS.items():
        found = [problem.replace(key, option) for problem in found]
    return found
