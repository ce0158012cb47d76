"""Tokenized samples on disk, under a key of everything that they follow from.

The key is a hash of the source's content, of the config that chooses among it, of the tokenizer with its chat template,
and of this code: whatever changes gives another key. One process makes an entry, aside and renamed; others that start
at once wait for it. All read samples from it as they need them, through the page cache that they share: neither the
source nor its tokens need fit in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from components.config.errors import ConfigError
from components.config.schema.data import DataConfig, TextDataConfig
from components.data import examples
from components.data.chat_template import ChatTemplate, KeyUsage, is_fast
from components.data.examples import Example
from components.data.sources import text
from components.data.sources.rows import Conversation, Document
from components.data.sources.split import Record, SourceSplit, characters_of, first_prompts, held_out_by_hash, sample_limit
from components.data.token_file import read_tokens, remove_expired, write_tokens
from components.data.tokens import Tokens, flattened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

FORMAT = 2
"""Of the entries; raised when their layout changes."""
WORTH_BYTES = 1_000_000
"""A source of less is tokenized again in about a second, and leaves nothing on disk."""
KEPT_SECONDS = 30 * 24 * 3600
"""An entry that was not read for so long goes when another one is made."""
CODE = Path(__file__).parent
"""What makes samples of a source."""
_ENCODED_AT_ONCE = 1000  # conversations or documents: bounds the memory for their text, and occupies all cores
_CHARACTERS_AT_ONCE = 1 << 20  # about: a document may be long
_PROMPTS_KEPT = 100  # to generate samples from
_NOT_IN_KEY = ("pack", "cache", "weight", "overlong", "path", "eval_path", "max_samples", "max_eval_samples",
              "unused_keys")  # fmt: skip
"""Keys of the config that do not choose among a source's content, or are in the key in another way."""


class TokenizedSplit(NamedTuple):
    """What became of one side of a source."""

    tokens: Tokens
    prompts: list[str]
    bad_rows: int
    unused: list[str]
    """Columns and keys of messages that neither the chat template nor Meshbook uses."""


class _Encoder(NamedTuple):
    """What is tokenized, and how."""

    split: SourceSplit
    tokenizer: PreTrainedTokenizerBase
    seq_len: int | None = None
    """Of the samples that documents are cut into."""
    most: int | None = None
    """Of such samples."""
    usage: KeyUsage | None = None
    """Of conversations: which of their keys are used."""

    def samples_of(self, batch: list[Record]) -> Iterable[Example]:
        """Tokenize a part of the side."""
        documents = [record for record in batch if isinstance(record, Document)]
        if self.seq_len is not None:
            return text.encode_documents(self.tokenizer, documents, self.seq_len)
        conversations = [each for each in batch if isinstance(each, Conversation)]
        encoded = examples.encode_conversations(self.tokenizer, conversations)
        if self.usage is not None:
            for conversation in conversations:
                self.usage.observe(conversation)
        return encoded

    @property
    def unused(self) -> list[str]:
        """What was read and left out; known once the whole side was encoded."""
        keys = [] if self.usage is None else self.usage.unused
        return [*(f"column {name}" for name in self.split.unused_columns), *keys]


def tokenize(split: SourceSplit, cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> TokenizedSplit:
    """Return the samples of a side, from `data.cache` where they are known; documents are cut to `seq_len` tokens.

    A fast tokenizer encodes on all cores. A folder that cannot be written costs a warning, and memory for all tokens.

    Raises ConfigError where the source is wrong, or changes while it is read.
    """
    most = sample_limit(cfg, split.is_eval)
    encoder = (
        _Encoder(side, tokenizer, seq_len, most)
        if isinstance(cfg, TextDataConfig)
        else _Encoder(side, tokenizer, usage=KeyUsage(ChatTemplate(tokenizer)))
    )
    tokenizer_hash = None if cfg.cache is None else hash_of_tokenizer(tokenizer)
    if cfg.cache is None or tokenizer_hash is None:
        return _make(encoder)
    content, size = split.identity()
    if size < WORTH_BYTES:
        return _make(encoder)
    key = _key([content, tokenizer_hash, split.is_eval, held_out_by_hash(cfg), most, encoder.seq_len], cfg)
    try:
        entry = Path(cfg.cache).expanduser() / f"{key}.safetensors"
    except RuntimeError as error:  # the user of a container often has no home
        logger.warning("data.cache=%s: %s; the tokenized samples are not kept", cfg.cache, error)
        return _make(encoder)
    if (cached := _read(entry)) is not None:
        return cached
    with _lock(entry.with_suffix(".lock")):
        if (cached := _read(entry)) is not None:
            return cached
        return _make(encoder, entry, content)


def hash_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a hash of all that decides a text's tokens; None for a tokenizer that cannot be written as a whole."""
    if not is_fast(tokenizer):
        return None
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    whole |= {"truncation": None, "padding": None}  # set anew by every call
    record = [type(tokenizer).__name__, tokenizer.chat_template, tokenizer.special_tokens_map]
    return xxhash.xxh3_128(json.dumps([whole, record], default=str).encode()).hexdigest()


def _key(record: list[Any], cfg: DataConfig) -> str:
    chosen = {name: value for name, value in dataclasses.asdict(cfg).items() if name not in _NOT_IN_KEY}
    versions = [version(package) for package in ("transformers", "tokenizers", "jinja2")]
    code = xxhash.xxh3_128(b"".join(file.read_bytes() for file in sorted(CODE.rglob("*.py")))).hexdigest()
    return xxhash.xxh3_128(json.dumps([FORMAT, *record, chosen, versions, code]).encode()).hexdigest()


def _make(encoder: _Encoder, entry: Path | None = None, content: str = "") -> TokenizedSplit:
    """Tokenize a side into a file, or in memory without one or where it cannot be written."""
    prompts = first_prompts(encoder.split, _PROMPTS_KEPT)
    if entry is not None:

        def summary() -> str:
            return json.dumps({"prompts": prompts, "bad_rows": encoder.split.bad_rows, "unused": encoder.unused})

        try:
            write_tokens(entry, _token_chunks(encoder, content), summary)
        except OSError as error:
            logger.warning("data.cache=%s: %s; the tokenized samples are not kept", entry.parent, error)
        else:
            with contextlib.suppress(OSError):
                remove_expired(entry.parent, KEPT_SECONDS)
        if (made := _read(entry)) is not None:
            return made
    tokens = flattened(chain.from_iterable(_encoded(encoder)))
    return TokenizedSplit(tokens, prompts, encoder.split.bad_rows, encoder.unused)


def _token_chunks(encoder: _Encoder, content: str) -> Iterator[Tokens]:
    """Yield a side's tokens; at their end, before they are published, see whether the source is what it was."""
    yield from map(flattened, _encoded(encoder))
    if encoder.split.identity()[0] != content:
        raise ConfigError("data: the source was changed while it was read; start again")


def _encoded(encoder: _Encoder) -> Iterator[Iterable[Example]]:
    """Yield the samples of a side, some at a time: of conversations all, of documents at most as many as asked for."""
    side, left = encoder.split, encoder.most
    is_short = len(side) <= _ENCODED_AT_ONCE and split.characters <= _CHARACTERS_AT_ONCE
    with _progress(len(side), hidden=is_short) as advance:
        for batch in _batches(side):
            samples = encoder.samples_of(batch)
            if left is not None:
                samples = list(islice(samples, left))
                left -= len(samples)
            yield samples
            if left == 0:
                return
            advance(len(batch))


def _batches(split: SourceSplit) -> Iterator[list[Record]]:
    """Yield what is encoded at once, about."""
    batch, size = list[Record](), 0
    for record in side:
        batch.append(record)
        size += characters_of(record)
        if len(batch) == _ENCODED_AT_ONCE or size >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read(entry: Path) -> TokenizedSplit | None:
    found = read_tokens(entry)
    if found is None:
        return None
    with contextlib.suppress(OSError):  # a folder that only can be read
        os.utime(entry)  # so its time of change is that of its last use: file systems seldom record reading
    summary = json.loads(found[1])
    return TokenizedSplit(found[0], summary["prompts"], summary["bad_rows"], summary["unused"])


@contextlib.contextmanager
def _lock(lock: Path) -> Iterator[None]:
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
def _progress(total: int, hidden: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on the first rank's terminal; it goes away when all is done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    hidden = hidden or os.environ.get("RANK", "0") != "0" or not console.is_terminal
    with Progress(console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("tokenizing", total=total)
        yield lambda count: progress.advance(task, count)
