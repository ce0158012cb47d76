"""Disk cache of tokenized samples, keyed by a hash of everything that determines them.

The key covers the content of the source, the config keys that select from it, the tokenizer with its chat template,
the versions of the libraries involved, and this package's code. An entry is a shard of a token store whose documents
are the samples. One process writes it; others that start at the same time wait for it. All processes read samples on
demand through the shared page cache, so neither the source nor its tokens have to fit in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from components.chat_template import ChatTemplate, is_fast
from components.config.schema.data import BadRows, DataConfig, Overlong, RowsDataConfig, TextDataConfig
from components.config.schema.training import MOST_TOOL_CALLS
from components.conversation import ASSISTANT, Conversation, Prompt, parse_calls, reads_calls, text_of
from components.data import examples
from components.data.dataset import MaskedLabels, Tokens, flattened
from components.data.examples import Example, KeyUsage
from components.data.sources import text
from components.data.sources.columns import AnswerConfig
from components.data.sources.rows import BadRowReport, Document, LabeledText
from components.data.sources.split import (
    Record,
    SourceSplit,
    characters_of,
    held_out_by_hash,
    sample_limit,
)
from components.data.token_store.shards import IdColumn, StoredColumn, read_shard_header
from components.data.token_store.writer import entry_in, id_bytes_of, read_entry, rescanned, write_shard
from components.protocol.errors import ConfigError
from components.protocol.run_files import PRIVATE
from components.protocol.safe_parsing import parse_json
from components.storage.tensor_files import SUFFIX, KnownNumbers, OpenFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_FORMAT = 5
"""Version of an entry's content; increment it when that changes."""
_ENTRY, _TEMPORARY = (
    re.compile(r"[0-9a-f]{32}\.safetensors"),
    re.compile(r"\.[0-9a-f]{32}\.(tmp|safetensors\.tmp-[0-9a-f]{16})"),
)
_KNOWN = re.compile(r"[0-9a-f]{32}" + re.escape(SUFFIX))
_TEMPORARY_SECONDS = 24 * 3600  # a temporary file this old was left by a process that died
_WORTH_BYTES = 1_000_000
"""Size of the smallest source that is cached; a smaller one is tokenized in about a second at every start."""
_KEPT_SECONDS = 30 * 24 * 3600
"""Age since the last use at which entries are removed, when a new one is written."""
_COMPONENTS = Path(__file__).parents[1]
CODE = ("data", "chat_template.py", "conversation.py")
"""Folder and files of the code that produces samples, which are part of the key."""
_ENCODED_AT_ONCE = 1000  # conversations or documents per batch: bounds memory and keeps all cores busy
_CHARACTERS_AT_ONCE = 1 << 20  # approximate limit per batch, because documents may be long
_PROMPTS_KEPT = 100  # prompts stored to generate sample answers from
_NOT_IN_KEY = ("pack", "cache", "weight", "overlong", "path", "eval_path", "max_samples", "max_eval_samples",
              "unused_keys", "bad_rows")  # fmt: skip
"""Config keys without an effect on the tokens, or with their effect already in the key (a path's content)."""


_SomeRecord = TypeVar("_SomeRecord", Conversation, Document, LabeledText, Record)


class TokenizedSplit(NamedTuple):
    """Tokens and statistics of one split of a source."""

    tokens: Tokens
    prompts: list[Prompt]
    """Prompts of the first samples."""
    bad: BadRowReport
    """Rows of the source that could not become a record, and records of this split that could not be tokenized."""
    unused: list[str]
    """Columns and message keys that neither the chat template nor Meshbook uses."""
    notes: list[str]
    """Notes on the rendered answers."""
    cut_to_turns: int = 0
    """Samples cut to their newest turns."""


@dataclasses.dataclass
class _Encoder:
    """Tokenizer of one split with its settings."""

    split: SourceSplit
    tokenizer: PreTrainedTokenizerBase
    seq_len: int | None = None
    """Length of the samples that documents are cut into; None: conversations."""
    max_samples: int | None = None
    """Limit on the samples cut from documents; None: no limit."""
    usage: KeyUsage | None = None
    """Detector of unused keys of conversations; None: documents."""
    one_sample_each: bool = False
    """Whether each conversation must become one sample, because samples are paired by their position."""
    is_scored: bool = False
    """Whether a score head reads the last token of conversations."""
    refuses: bool = False
    """Whether bad rows end the run (`data.bad_rows=refuse`)."""
    newest: examples.NewestTurns | None = None
    """Limit to which conversations are cut (`data.overlong=keep_last`)."""
    count: int = 0
    """Samples of conversations and labeled texts so far."""
    turns: list[Prompt] = dataclasses.field(default_factory=list)
    """Prompts of the first turns with tool calls so far, of held-out conversations."""
    bad: BadRowReport = dataclasses.field(default_factory=BadRowReport)
    """Records so far that could not be tokenized."""

    def encode(self, batch: list[Record]) -> Iterable[Example]:
        """Tokenize a batch of conversations, documents or labeled texts."""
        if self.seq_len is not None:
            documents = [record for record in batch if isinstance(record, Document)]
            return text.encode_documents(self.tokenizer, documents, self.seq_len)
        conversations = [each for each in batch if isinstance(each, Conversation)]
        if self.split.is_eval and not (self.one_sample_each or self.is_scored):
            template = ChatTemplate(self.tokenizer)
            turns = (turn for each in conversations for turn in _turns_with_calls(template, self.tokenizer, each))
            self.turns += islice(turns, MOST_TOOL_CALLS - len(self.turns))
        labeled = [each for each in batch if isinstance(each, LabeledText)]
        options: dict[str, Any] = {"usage": self.usage, "bad": self.bad}
        if self.is_scored or labeled:
            encoded = text.encode_scored(self.tokenizer, conversations or labeled, **options)
        else:
            encoded = examples.encode_conversations(
                self.tokenizer, conversations, one_sample_each=self.one_sample_each, newest=self.newest, **options
            )
        self.bad.samples += [self.count + index for index, each in enumerate(encoded) if each is examples.REJECTED]
        self.count += len(encoded)
        if self.refuses and self.bad.count == self.count >= _ENCODED_AT_ONCE:  # of millions that take long to count
            raise ConfigError(
                f"data.bad_rows=refuse: none of the first {self.count:,} rows can become a sample; correct these, or "
                f"set model.chat_template to another one:{self.bad}"
            )
        return encoded

    def result(self, prompts: list[Prompt]) -> dict[str, Any]:
        """Return the fields of `TokenizedSplit` except the tokens, as JSON; after the whole split was encoded."""
        unused = [f"column {name}" for name in self.split.unused_columns]
        bad = BadRowReport(self.split.bad.count, self.split.bad.problems, self.bad.samples)
        bad.add(self.bad.problems, self.bad.count)
        unused += [] if self.usage is None else self.usage.unused
        return {
            "prompts": [*prompts, *self.turns],
            "bad": dataclasses.asdict(bad),
            "unused": unused,
            "notes": [] if self.usage is None else self.usage.notes,
            "cut_to_turns": 0 if self.newest is None else self.newest.count,
        }


def tokenize(split: SourceSplit, cfg: DataConfig, tokenizer: PreTrainedTokenizerBase, seq_len: int) -> TokenizedSplit:
    """Return the tokenized samples of a split, cached in `data.cache`; documents are cut into `seq_len` tokens.

    A fast tokenizer uses all cores. If the cache cannot be written, log a warning and keep all tokens in memory.

    Raises ConfigError if the source is invalid or changes while it is read.
    """
    limit = sample_limit(cfg, split.is_eval)
    encoder = (
        _Encoder(split, tokenizer, seq_len, limit)
        if isinstance(cfg, TextDataConfig)
        else _Encoder(
            split,
            tokenizer,
            usage=KeyUsage(ChatTemplate(tokenizer)),
            one_sample_each=isinstance(cfg, AnswerConfig),
            is_scored=isinstance(cfg, AnswerConfig) and cfg.is_scored,
            refuses=isinstance(cfg, RowsDataConfig) and cfg.bad_rows is BadRows.refuse,
            newest=examples.NewestTurns(seq_len) if cfg.overlong is Overlong.keep_last else None,
        )
    )
    tokenizer_hash = None if cfg.cache is None else hash_of_tokenization(tokenizer)
    if cfg.cache is None or tokenizer_hash is None:
        return _tokenize(encoder)
    try:
        folder = Path(cfg.cache).expanduser()
    except RuntimeError as error:  # users of containers often have no home directory
        logger.warning("data.cache=%s: %s; the tokenized samples are not kept", cfg.cache, error)
        return _tokenize(encoder)
    content, size = _identity(split, folder)
    if size < _WORTH_BYTES:
        return _tokenize(encoder)
    lengths = [encoder.seq_len, None if encoder.newest is None else encoder.newest.seq_len]
    key = _key([content, tokenizer_hash, split.is_eval, held_out_by_hash(cfg), limit, lengths], cfg)
    entry = folder / f"{key}.safetensors"
    if (cached := _read_entry(entry)) is not None:
        return cached
    with _lock(entry.with_suffix(".lock")):
        if (cached := _read_entry(entry)) is not None:
            return cached
        if _is_of_earlier_version(folder):
            logger.warning(
                "data.cache=%s: its entries are of an earlier version; the samples are tokenized again, once", folder
            )
        return _tokenize(encoder, entry, content)


def _identity(split: SourceSplit, folder: Path) -> tuple[str, int]:
    """Return `split.identity()`, kept in `folder` as long as the source's files do not change."""
    try:
        if not split.files or sum(file.stat().st_size for file in split.files) < _WORTH_BYTES:
            return split.identity()
        name = xxhash.xxh3_128("\n".join(map(str, split.files)).encode()).hexdigest()
        content, size = KnownNumbers(folder / f"{name}{SUFFIX}", split.files).get("identity", split.identity)
    except OSError:
        return split.identity()  # which names the file
    return content, size


def hash_of_tokenization(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return a hash of everything that determines a tokenizer's output, or None if it cannot be serialized (slow)."""
    if not is_fast(tokenizer):
        return None
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend |= {"truncation": None, "padding": None}  # every call sets these itself
    wrapper = [type(tokenizer).__name__, tokenizer.chat_template, tokenizer.special_tokens_map]
    return xxhash.xxh3_128(json.dumps([backend, wrapper], default=str).encode()).hexdigest()


def _key(inputs: list[Any], cfg: DataConfig) -> str:
    """Return the name of a cache entry: a hash of `inputs`, the config, library versions and this code."""
    selected = {name: value for name, value in dataclasses.asdict(cfg).items() if name not in _NOT_IN_KEY}
    versions = [version(package) for package in ("transformers", "tokenizers", "jinja2")]
    files = [file for name in CODE for file in sorted((_COMPONENTS / name).rglob("*.py")) or [_COMPONENTS / name]]
    code = xxhash.xxh3_128(b"".join(file.read_bytes() for file in files)).hexdigest()
    return xxhash.xxh3_128(json.dumps([_FORMAT, *inputs, selected, versions, code]).encode()).hexdigest()


def _tokenize(encoder: _Encoder, entry: Path | None = None, content: str = "") -> TokenizedSplit:
    """Tokenize a split into the file `entry`, or into memory if there is no entry or it cannot be written."""
    prompts = list(_first_prompts(encoder))
    if entry is not None:
        summary: dict[str, object] = {}
        try:
            write_shard(
                entry, _entry_batches(encoder, content, prompts, summary), id_bytes_of(encoder.tokenizer), summary,
                PRIVATE,  # samples may be confidential
            )  # fmt: skip
        except OSError as error:
            logger.warning("data.cache=%s: %s; the tokenized samples are not kept", entry.parent, error)
        else:
            with contextlib.suppress(OSError):
                _remove_expired(entry.parent)
        if (written := _read_entry(entry)) is not None:
            return written
    tokens = flattened(chain.from_iterable(_encode_batches(encoder)))
    return _split_of(tokens, encoder.result(prompts))


def _first_prompts(encoder: _Encoder) -> Iterator[Prompt]:
    """Yield the prompts of the first records: everything before the first answer, or the first line of a document.

    Labeled texts have no prompts.
    """
    tokenizer, template = encoder.tokenizer, ChatTemplate(encoder.tokenizer)
    for record in islice(encoder.split, _PROMPTS_KEPT):
        if isinstance(record, Document):
            line = text.opening_line(record)
            yield Prompt(line, tokenizer.encode(line))
        elif isinstance(record, Conversation):
            answer = [message["role"] for message in record.messages].index(ASSISTANT)
            try:
                rendered = template.render(record, answer, add_generation_prompt=True).text
            except ConfigError as error:  # a bad row is reported when it is tokenized
                examples.record_bad(error, record.where, BadRowReport())
                continue
            tokens = tokenizer.encode(rendered, add_special_tokens=not tokenizer.chat_template)
            yield Prompt(text_of(record.messages[answer - 1].get("content")), tokens)


def _turns_with_calls(
    template: ChatTemplate, tokenizer: PreTrainedTokenizerBase, conversation: Conversation
) -> Iterator[Prompt]:
    """Yield the prompt of each trained answer with tool calls, and the calls that its rendered text is read as.

    No calls are stored for a text that is not read as the calls of the message.
    """
    for answer in conversation.trained:
        calls = conversation.messages[answer].get("tool_calls")
        if not calls:
            continue
        try:
            prompt = template.render(conversation, answer, add_generation_prompt=True).text
            through = template.render(conversation, answer + 1).text
        except ConfigError:  # a bad row is reported when it is tokenized
            continue
        start = next((i for i, (a, b) in enumerate(zip(prompt, through, strict=False)) if a != b), len(prompt))
        parsed = parse_calls(through[start:])
        tokens = tokenizer.encode(prompt, add_special_tokens=not tokenizer.chat_template)
        question = text_of(conversation.messages[answer - 1].get("content"))
        yield Prompt(question, tokens, parsed if reads_calls(parsed, calls) else [])


def _entry_batches(
    encoder: _Encoder, content: str, prompts: list[Prompt], summary: dict[str, object]
) -> Iterator[list[Example]]:
    """Yield the samples of a split, then check that the source has not changed, and fill the summary of the entry."""
    yield from map(list, _encode_batches(encoder))
    if encoder.split.identity()[0] != content:
        raise ConfigError("data: the source was changed while it was read; start the run again")
    text = json.dumps(encoder.result(prompts))
    summary.update(result=text, hash=xxhash.xxh3_128_hexdigest(text.encode()))


def _encode_batches(encoder: _Encoder) -> Iterator[Iterable[Example]]:
    """Yield the samples of a split in batches, up to `max_samples`; a long split shows a progress bar."""
    split, left = encoder.split, encoder.max_samples
    # After a file that could not be written, the split is encoded again.
    encoder.count, encoder.bad, encoder.turns = 0, BadRowReport(), []
    if encoder.newest is not None:
        encoder.newest.count = 0
    is_short = len(split) <= _ENCODED_AT_ONCE and split.characters <= _CHARACTERS_AT_ONCE
    with _progress(len(split), hidden=is_short) as advance:
        for batch in batches_of(split):
            samples = encoder.encode(batch)
            if left is not None:
                samples = list(islice(samples, left))
                left -= len(samples)
            yield samples
            if left == 0:
                return
            advance(len(batch))


def batches_of(records: Iterable[_SomeRecord]) -> Iterator[list[_SomeRecord]]:
    """Yield conversations or documents in batches of bounded count and size."""
    batch, size = list[_SomeRecord](), 0
    for record in records:
        batch.append(record)
        size += characters_of(record)
        if len(batch) == _ENCODED_AT_ONCE or size >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_entry(entry: Path) -> TokenizedSplit | None:
    """Return the split of an entry, whose ids and labels stay on disk.

    The content is only hashed if the file has changed since it was last read. Returns None if the file does not exist
    or is damaged; damage is logged.
    """
    try:
        known, file = KnownNumbers(entry.with_suffix(SUFFIX), [entry]), OpenFile(entry)
        header = read_shard_header(file, entry)
        stored, summary = entry_in(header, file.size, entry)
        result = str(summary["result"]).encode()
        is_intact = known.get("is intact", lambda: stored == rescanned(entry, stored))
        if (
            not is_intact
            or (header.tokens and header.mask_at is None)
            or summary["hash"] != xxhash.xxh3_128_hexdigest(result)
        ):
            raise ValueError("its content is not that of its header")
        ids = IdColumn(file, header.ids_at, header.id_bytes, header.tokens)
        labels = MaskedLabels(ids, StoredColumn(file, header.mask_at or 0, header.tokens, np.bool_))
        ends = StoredColumn(file, header.ends_at, header.documents, np.int64)[:]
        starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
        return _split_of(Tokens(ids, labels, starts, ends, known), parse_json(result))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("%s is damaged (%r): its samples are tokenized again", entry, error)
        return None


def _is_of_earlier_version(folder: Path) -> bool:
    """Return whether all entries in a folder are of a version that did not write shards of token stores."""
    entries = [file for file in folder.glob("*.safetensors") if _ENTRY.fullmatch(file.name)]
    for entry in entries:
        with contextlib.suppress(OSError, ValueError):
            read_entry(entry)
            return False
    return bool(entries)


def _remove_expired(folder: Path) -> None:
    """Remove entries and known numbers unused for _KEPT_SECONDS, and temporary files of writers that were killed.

    A run that has such a file open continues: on Linux the content exists until the last process of the machine closes
    it. (NFS does not keep it for other machines, so a run there fails if it opened the file longer ago.)

    Raises OSError if the folder cannot be listed.
    """
    now = time.time()
    for file in folder.iterdir():
        is_used = _ENTRY.fullmatch(file.name) or _KNOWN.fullmatch(file.name)
        left = _TEMPORARY_SECONDS if _TEMPORARY.fullmatch(file.name) else math.inf
        limit = _KEPT_SECONDS if is_used else left
        with contextlib.suppress(OSError):  # removed by another process, or owned by another user
            used = file.stat().st_mtime
            if _ENTRY.fullmatch(file.name) and (known := file.with_suffix(SUFFIX)).exists():
                used = max(used, known.stat().st_mtime)
            if now - used > limit:
                file.unlink()


def _split_of(tokens: Tokens, result: dict[str, Any]) -> TokenizedSplit:
    """Return tokens with `_Encoder.result`."""
    prompts = [Prompt(*prompt) for prompt in result["prompts"]]
    return TokenizedSplit(tokens, **result | {"bad": BadRowReport(**result["bad"]), "prompts": prompts})


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes that share the folder; warn and continue if it cannot be locked."""
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # samples may be confidential
            file = stack.enter_context(path.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning("data.cache=%s: %s; every process tokenizes for itself", path.parent, error)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def _progress(total: int, hidden: bool) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on rank 0's terminal and remove it at the end; yields its `advance`."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if hidden or os.environ.get("RANK", "0") != "0" or not console.is_terminal:
        yield lambda count: None  # a disabled bar of rich 13 prints an empty line
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("tokenizing", total=total)
        yield lambda count: progress.advance(task, count)
