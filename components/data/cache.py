"""Tokenized samples on disk, under a key of everything that they follow from.

The key is a hash of the conversations themselves, of the tokenizer with its chat template, and of the code: whatever
changes (a file, a column, a revision of the hub, a version) gives another key, and nothing else does. One process makes
an entry, aside and renamed; others that start at once wait for it and read it, as memory that they share.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash
from safetensors import SafetensorError

from components.data import examples
from components.data.rows import Conversation
from components.data.tokens import Tokens, flattened, hash_of_arrays, joined

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FORMAT = 1
"""Of the entries; raised when their layout changes."""
WORTH_BYTES = 1_000_000
"""Less text than this is tokenized again in about a second, and leaves nothing on disk."""
_ENCODED_AT_ONCE = 1000  # conversations: bounds the memory for their text, and is enough to occupy all cores


def tokenize(
    conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase, folder: str | None = None
) -> Tokens:
    """Return the samples of conversations, from `folder` where they are known; None: they are made each time.

    A fast tokenizer encodes on all cores. A folder that cannot be written costs a warning, not the run.
    """
    tokenizer_hash = None if folder is None else hash_of_tokenizer(tokenizer)
    if folder is None or tokenizer_hash is None:
        return _encoded(conversations, tokenizer)
    digest = xxhash.xxh3_128(f"{FORMAT} {tokenizer_hash} {_hash_of_code()}".encode())
    size = 0
    for chunk in _chunks(conversations):
        text = json.dumps([conversation.messages for conversation in chunk]).encode()
        digest.update(text)
        size += len(text)
    if size < WORTH_BYTES:
        return _encoded(conversations, tokenizer)
    entry = Path(folder).expanduser() / f"{digest.hexdigest()}.safetensors"
    if (known := _read(entry)) is not None:
        return known
    with _alone(entry.with_suffix(".lock")):
        if (known := _read(entry)) is not None:
            return known
        tokens = _encoded(conversations, tokenizer)
        _write(entry, tokens)
        return tokens


def hash_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a hash of all that decides a text's tokens; None for a tokenizer that cannot be written as a whole."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    whole = json.loads(backend.to_str())
    whole |= {"truncation": None, "padding": None}  # set anew by every call
    said = [type(tokenizer).__name__, tokenizer.chat_template, tokenizer.special_tokens_map]
    return xxhash.xxh3_128(json.dumps([whole, said], default=str).encode()).hexdigest()


def _hash_of_code() -> str:
    """Of what makes samples of conversations: this project's part, and the packages that it calls."""
    versions = [version(package) for package in ("transformers", "tokenizers", "jinja2")]
    return xxhash.xxh3_128(Path(examples.__file__).read_bytes() + json.dumps(versions).encode()).hexdigest()


def _encoded(conversations: Sequence[Conversation], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    parts = []
    with _progress(len(conversations)) as advance:
        for chunk in _chunks(conversations):
            parts.append(flattened(examples.encode_conversations(tokenizer, chunk)))
            advance(len(chunk))
    return joined(parts)


def _chunks(conversations: Sequence[Conversation]) -> Iterator[Sequence[Conversation]]:
    for start in range(0, len(conversations), _ENCODED_AT_ONCE):
        yield conversations[start : start + _ENCODED_AT_ONCE]


def _read(entry: Path) -> Tokens | None:
    """Return an entry, mapped into memory that all processes of a machine share; None: not there or damaged."""
    import numpy as np

    try:
        with entry.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        arrays = []
        for name, dtype in zip(Tokens._fields, (np.int32, np.int32, np.int64), strict=True):
            begin, end = header[name]["data_offsets"]
            shape = ((end - begin) // np.dtype(dtype).itemsize,)
            arrays.append(np.memmap(entry, dtype, "r", 8 + size + begin, shape) if shape[0] else np.zeros(0, dtype))
        tokens = Tokens(*arrays)
        if header["__metadata__"]["hash"] == hash_of_arrays(tokens):
            return tokens
        logger.warning("%s is damaged: it is made again", entry)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError, LookupError, TypeError) as error:
        logger.warning("%s is damaged (%s): it is made again", entry, error)
    return None


def _write(entry: Path, tokens: Tokens) -> None:
    from safetensors.numpy import save_file

    aside = entry.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        save_file(tokens._asdict(), aside, metadata={"hash": hash_of_arrays(tokens)})
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, entry)
    except (OSError, SafetensorError) as error:
        logger.warning("data.cache=%s: %s; the tokenized samples are not kept", entry.parent, error)
        with contextlib.suppress(OSError):
            aside.unlink()


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until no other process that shares the folder is within; a folder without locks is no reason to stop."""
    with contextlib.ExitStack() as stack:
        try:
            lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds what the data say
            file = stack.enter_context(lock.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("data.cache=%s: %s; every process tokenizes for itself", lock.parent, error)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on the first rank's terminal; it goes away when all is done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    hidden = os.environ.get("RANK", "0") != "0" or not console.is_terminal or total <= _ENCODED_AT_ONCE
    with Progress(console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("tokenizing", total=total)
        yield lambda count: progress.advance(task, count)
