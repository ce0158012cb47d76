"""Rows of a token store: `seq_len` consecutive tokens of a shard and the token after them, by shard and offset.

Shards are on disk or in an object store. Parts of those in an object store are kept on the node, and fetched before
they are needed.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import ceil, floor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from components.config.schema.data import TokensDataConfig
from components.conversation import Prompt
from components.data.dataset import Facts, ItemSequence
from components.data.examples import IGNORED, Example, PackedRow, render_example
from components.data.packing import BlockOrder, documents_size
from components.data.token_store.manifest import Manifest, hash_of_tokenizer, read_manifest, vocabulary_problems
from components.data.token_store.shards import ShardFiles
from components.protocol.errors import ConfigError
from components.storage.node_cache import FOLDER, NodeCache
from components.storage.object_store import ObjectStore, StoredObject, join
from components.storage.tensor_files import OpenFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HELD_OUT_TOGETHER = 16  # rows: consecutive ones share documents with the train split only at both ends
_PROMPTS = 8
_PROMPT_CHARACTERS = 80
logger = logging.getLogger(__name__)
_PART_BYTES = 4 * 1024**2
"""Bytes that are read at once: about two blocks of 256 rows of 4,096 ids of 2 bytes."""
_ATTEMPTS = 12  # about two minutes without the store
_THREADS = 4
_REPORT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class RowSelection:
    """The rows of one split, ascending: chunks at equal distances are held out, all others are trained on.

    A pure function of these values, without a table: held-out chunk j is the first chunk c with
    floor((c + 1) x fraction) = j + 1, and train chunk j is floor(j / (1 - fraction)) (complementary Beatty sequences).
    """

    rows: int
    """Rows of the whole store."""
    fraction: Fraction
    """Share of the rows to hold out, in [0, 1)."""
    is_eval: bool
    """Whether to select the held-out rows."""
    limit: int | None = None
    """Use only the first this many rows; None: all."""

    @property
    def chunk(self) -> int:
        """Consecutive rows that are held out together: 1 if a short last chunk would be most of the held-out rows."""
        chunk = max(1, min(_HELD_OUT_TOGETHER, int(self.rows * self.fraction)))
        return 1 if 2 * self._held_out(chunk) < int(self.rows * self.fraction) else chunk

    def __len__(self) -> int:
        held_out = self._held_out(self.chunk)
        count = held_out if self.is_eval else self.rows - held_out
        return count if self.limit is None else min(count, self.limit)

    def at(self, index: int) -> int:
        """Return the row of the store at `index` of the split."""
        if not self.fraction:
            return index
        chunk = self.chunk
        number, within = divmod(index, chunk)
        share = self._share(chunk)
        return (ceil((number + 1) / share) - 1 if self.is_eval else floor(number / (1 - share))) * chunk + within

    def _share(self, chunk: int) -> Fraction:
        """Share of the chunks to hold out: at least one of them."""
        return max(self.fraction, Fraction(1, -(-self.rows // chunk)))

    def _held_out(self, chunk: int) -> int:
        """Return the number of held-out rows with chunks of a size, of which the last may be shorter."""
        if not self.fraction or not self.rows:
            return 0
        chunks, share = -(-self.rows // chunk), self._share(chunk)
        held_out = int(chunks * share)
        has_last = ceil(held_out / share) == chunks
        return held_out * chunk - (chunks * chunk - self.rows if has_last else 0)


class StoreSplit(NamedTuple):
    """Which rows of a store to use; see `RowSelection`."""

    fraction: float = 0.0
    is_eval: bool = False
    limit: int | None = None


@dataclass(slots=True)
class _StoreFacts(Facts):
    """Statistics of the rows of a split. Those of the whole store are from its manifest."""

    shards: int = 0
    """Shards of the store."""
    store_tokens: int = 0
    """Tokens of the store."""
    store_documents: int = 0
    """Documents of the store."""
    shuffle: str = ""
    """Description of the order of the rows."""

    def __str__(self) -> str:
        shards = f"{self.shards:,} shard{'' if self.shards == 1 else 's'}"
        parts = [
            f"{self.source}: {shards}, {self.store_tokens:,} tokens, {self.store_documents:,} documents",
            f"{self.rows:,} rows of {self.row_tokens:,} tokens",
        ]
        if self.max_documents:
            parts.append(f"documents do not attend to each other (at most {self.max_documents:,} in a row)")
        parts += [*self.notes, *([self.shuffle] if self.shuffle else [])]
        parts += [f"{self.passes:.2f} passes in the whole run"] if self.passes else []
        return "; ".join(parts)


class TokenRows(ItemSequence[PackedRow]):
    """Rows of a token store. Only the manifest is read at the start; a row is read from its shard when it is used.

    Row r of a shard has the tokens from r x seq_len on, and its last target is the first token of row r + 1. So each
    token of a shard except the first is a target once per epoch. The last row of a shard may be shorter. If `pack` is
    set, the documents of a row are those of packed samples: no token attends to another document or predicts its first
    token. A document that continues in the next row starts anew there. Otherwise a row is one document. If the store
    has a loss mask, only the tokens that it marks are targets.
    """

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: PreTrainedTokenizerBase,
        *,
        seq_len: int,
        source: str,
        pack: bool = True,
        split: StoreSplit | None = None,
        blocks: tuple[int, int] = (1, 1),
    ) -> None:
        """Build the rows of a split.

        Args:
            source: Description of the store, for logs.
            split: The split; None: all rows, to train on.
            blocks: Rows of a block and blocks of a window (`BlockOrder`).
        """
        self.pad_token_id: int | None = tokenizer.pad_token_id
        self.seq_len = seq_len
        self._manifest, self._tokenizer, self._pack = manifest, tokenizer, pack
        self._files = ShardFiles(manifest)
        self._remote: _RemoteShards | None = None
        self._prefetch = _Prefetch(self.item)
        tokens = np.asarray([shard.tokens for shard in manifest.shards], np.int64)
        self._ends = np.cumsum(-(-np.maximum(tokens - 1, 0) // seq_len))  # rows up to the end of each shard
        split = split or StoreSplit()
        exact = Fraction(str(split.fraction))  # 0.1 is 1/10
        self._selection = RowSelection(int(self._ends[-1]), exact, split.is_eval, split.limit)
        self.blocks = blocks
        """Rows of a block and blocks of a window (`BlockOrder`)."""
        max_documents = manifest.max_documents(seq_len) if pack else 0
        self.documents = documents_size(max_documents) if pack else 0
        """Size of per-document tensors; 0: documents are not separated."""
        self.facts = _StoreFacts(
            source=source,
            rows=len(self),
            row_tokens=seq_len,
            max_documents=max_documents,
            samples=len(self),
            tokens=len(self) * seq_len,
            target_tokens=len(self) * seq_len,
            shards=len(manifest.shards),
            store_tokens=manifest.tokens,
            store_documents=manifest.documents,
            shuffle="" if split.is_eval else self._describe_order(),
            notes=["a loss mask selects the targets"] if any(shard.mask_hashes for shard in manifest.shards) else [],
        )

    def __len__(self) -> int:
        return len(self._selection)

    def item(self, index: int) -> PackedRow:
        """Return the row at `index` of the split. Raises ConfigError if its shard is damaged, or OSError."""
        row = self._selection.at(index)
        number = int(np.searchsorted(self._ends, row, side="right"))
        start = (row - int(self._ends[number - 1]) if number else row) * self.seq_len
        stop = min(start + self.seq_len, self._manifest.shards[number].tokens)
        shard = self._files.open(number)
        # One token more than the row, if the shard has it: the target of the row's last token.
        ids = shard.ids(start, min(stop + 1, self._manifest.shards[number].tokens))
        inputs, has_next = ids[: stop - start].tolist(), len(ids) > stop - start
        ends = [end - start for end in shard.ends(start, ids[: stop - start])] if self._pack else []
        is_target = shard.is_target(start, start + len(ids))
        targets = ids.tolist() if is_target is None else np.where(is_target, ids, IGNORED).tolist()
        next_label = targets[-1] if has_next and len(inputs) not in ends else IGNORED
        ends = ends if ends and ends[-1] == len(inputs) else [*ends, len(inputs)]
        if self._pack and len(ends) > self.facts.max_documents:  # the sizes of batches depend on it
            raise ConfigError(
                f"{self._manifest.file_of(self._manifest.shards[number])}: a row of {self.seq_len:,} tokens has more "
                f"documents than the manifest's {self.facts.max_documents:,}; write the manifest again"
            )
        labels = targets[: stop - start]
        for first in (0, *ends[:-1]):  # labels are shifted later: a first token would be the target of another document
            labels[first] = IGNORED
        return PackedRow(inputs, labels, ends, next_label)

    def read_from(self, remote: _RemoteShards) -> None:
        """Read the shards from the object store of the manifest's URL."""
        self._remote, self._files = remote, ShardFiles(self._manifest, remote.open)

    @property
    def is_remote(self) -> bool:
        """Whether rows are read from an object store, so that `prefetch` is useful."""
        return self._remote is not None

    def prefetch(self, indices: Iterable[int]) -> None:
        """Begin to fetch rows of an object store that are used soon, in this order."""
        if self._remote is not None:
            self._prefetch.add(indices)
            self._remote.report()

    def order(self, seed: int) -> BlockOrder:
        """Return the training order of the rows."""
        return BlockOrder(len(self), seed, *self.blocks)

    @property
    def fingerprint(self) -> str:
        """Hash of the content of the store, from its manifest, of the selection of rows, and of their order."""
        selection = self._selection
        parts = [self._manifest.hash, self.seq_len, self._pack, *self.blocks]
        parts += [str(selection.fraction), selection.is_eval, selection.limit]
        return xxhash.xxh3_128(json.dumps(parts).encode()).hexdigest()

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Openings of a few rows, to generate from; read on first use."""
        numbers = range(0, len(self), max(1, len(self) // _PROMPTS))
        texts = [self._text(self[number].input_ids[:_PROMPT_CHARACTERS]) for number in numbers[:_PROMPTS]]
        lines = [text.strip().partition("\n")[0][:_PROMPT_CHARACTERS] for text in texts]
        return [Prompt(line, self._tokenizer.encode(line)) for line in lines if line]

    def show(self, index: int) -> str:
        """Return the texts of a row's documents, separated by a line, with the targets in [[ ]]."""
        return "\n--- next document ---\n".join(
            render_example(self._tokenizer, Example(example.input_ids, example.labels))
            for example in self[index].examples
        )

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _describe_order(self) -> str:
        block, window = self.blocks
        if block == 1 or block * window >= len(self):
            return "shuffled"
        return f"blocks of {block:,} rows shuffled, then rows within {window:,} blocks"


def build_rows(cfg: TokensDataConfig, tokenizer: PreTrainedTokenizerBase, *, seq_len: int, is_eval: bool) -> TokenRows:
    """Return the rows of the train or the held-out split of a store.

    Raises ConfigError if the manifest cannot be read, was written with another tokenizer, holds ids beyond the
    tokenizer's vocabulary, or leaves no row.
    """
    is_separate = is_eval and cfg.eval_path is not None
    key, path = ("data.eval_path", str(cfg.eval_path)) if is_separate else ("data.path", cfg.path)
    manifest = read_manifest(path, key)
    problems = vocabulary_problems(
        manifest, f"{key}={path}", size=len(tokenizer), tokenizer_hash=hash_of_tokenizer(tokenizer)
    )
    if problems:
        raise ConfigError(problems)
    rows = TokenRows(
        manifest,
        tokenizer,
        seq_len=seq_len,
        source=f"held out of {path}" if is_eval and not is_separate else path,
        pack=cfg.pack,
        split=StoreSplit(
            fraction=0.0 if cfg.eval_path is not None else cfg.eval_fraction,
            is_eval=is_eval and not is_separate,
            limit=cfg.max_eval_samples if is_eval else cfg.max_samples,
        ),
        blocks=(cfg.block_rows, cfg.window_blocks),
    )
    if (remote := _remote_shards(manifest, cfg)) is not None:
        rows.read_from(remote)
    if len(rows) == 0:
        needs = "a train and a held-out row" if cfg.eval_path is None and cfg.eval_fraction else "a row"
        raise ConfigError(
            f"{key}={path}: its {manifest.tokens:,} tokens are too few for {needs} of training.seq_len={seq_len} "
            "tokens; shorten the rows, add shards, or set data.eval_path"
        )
    return rows


class _RemoteShards:
    """The files of a token store behind a URL."""

    def __init__(self, manifest: Manifest, cache: NodeCache) -> None:
        if manifest.url is None:
            raise ValueError("the manifest has no URL: its shards are files")
        self._url, self._cache = manifest.url, cache
        self._store = ObjectStore(manifest.url, _ATTEMPTS)
        self._entries = {entry.path: entry for entry in manifest.shards}
        self._reported = time.monotonic()

    def open(self, path: Path) -> _RemoteFile:
        """Open a file by its path below the manifest's URL. Raises OSError.

        The size of a shard and a hash of its ids are in the manifest; those of other files are looked up.
        """
        url = join(self._url, path.as_posix())
        entry = self._entries.get(path.as_posix())
        source = self._store.stat(url) if entry is None else StoredObject(url, entry.bytes, entry.hash)
        return _RemoteFile(self._store, self._cache, source)

    def report(self) -> None:
        """Log the requests that were repeated, at most once a minute."""
        if time.monotonic() - self._reported >= _REPORT_SECONDS:
            self._reported = time.monotonic()
            if (repeats := self._store.repeats()) is not None:
                logger.warning(repeats)


class _RemoteFile(OpenFile):
    """An object that is read through the cache of the node."""

    def __init__(self, store: ObjectStore, cache: NodeCache, source: StoredObject) -> None:
        self._store, self._cache, self._source = store, cache, source
        self._name, self._kind = source.url, "token shard"
        self._remedy = "restore the object, remove data.cache if the object is intact, or write the manifest again"
        self.size = source.bytes

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`. Raises OSError if the object is shorter or cannot be read."""
        source, filled = self._source, 0
        while filled < len(buffer):
            start = (offset + filled) // _PART_BYTES * _PART_BYTES
            stop = min(start + _PART_BYTES, source.bytes)
            first = offset + filled - start
            last = min(stop - start, first + len(buffer) - filled)
            if last <= first:
                raise OSError(f"{source.url} ends at byte {source.bytes:,}; {offset + len(buffer):,} were expected")
            data = self._cache.part(source, start, self._reader(start, stop), first, last)
            buffer[filled : filled + len(data)] = data
            filled += len(data)

    def _reader(self, start: int, stop: int) -> Callable[[], bytes]:
        return lambda: self._store.read_range(self._source.url, start, stop)


class _Prefetch:
    """Threads that read rows in the given order and discard them, so that their parts are in the cache."""

    def __init__(self, read: Callable[[int], object]) -> None:
        self._read = read
        self._wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def add(self, rows: Iterable[int]) -> None:
        """Begin to read rows, after those that were added before."""
        for row in rows:
            self._wanted.put(row)
        while len(self._threads) < _THREADS:
            self._threads.append(threading.Thread(target=self._run, name="prefetch", daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        while True:
            row = self._wanted.get()
            try:
                self._read(row)
            except (OSError, ConfigError) as error:  # raised again where the row is used
                logger.debug("row %d was not fetched: %s", row, error)


def _remote_shards(manifest: Manifest, cfg: TokensDataConfig) -> _RemoteShards | None:
    """Return the shards of a store behind a URL, with the cache of a config; None for a store on disk."""
    if manifest.url is None or cfg.cache is None:
        return None
    folder = Path(cfg.cache).expanduser() / FOLDER / "shards"
    return _RemoteShards(manifest, NodeCache(folder, int(cfg.cache_gib * 1024**3)))
