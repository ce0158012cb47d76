"""Documents to continue: where they come from, which part of them is held out, and their samples."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from components.config.errors import ConfigError
from components.config.schema.data import TextDataConfig
from components.data.examples import Example
from components.data.files import Row
from components.data.rows import BadRowsSeen, Document, each_document
from components.data.sides import held_out_by_hash, place_of, rows_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STDLIB = "python:stdlib"
"""The `data.path` that means the source of the interpreter's own library: 12 MB of Python, nothing to fetch."""

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
_ENCODED_AT_ONCE = 100  # documents: bounds the memory for their tokens, and is enough to occupy all cores


def stdlib_rows(column: str) -> Iterator[Row]:
    """Yield one row per file of the interpreter's library, in order of their names, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        name = file.relative_to(library)
        if not _NOT_LIBRARY.intersection(name.parts):
            text = file.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield Row(str(name), {column: text})


def documents_of(cfg: TextDataConfig, is_eval: bool) -> tuple[list[Document], int]:
    """Return the documents of a side, and how many bad rows were left out. They are kept in memory."""
    place, bad = place_of(cfg, is_eval), BadRowsSeen()
    rows = stdlib_rows(cfg.text_column) if place.path == STDLIB else rows_of(cfg, place)
    documents = list(each_document(cfg, rows, bad))
    if held_out_by_hash(cfg):
        documents = side_of(documents, cfg.eval_fraction, is_eval)
    return documents, bad.count


def side_of(documents: list[Document], fraction: float, is_eval: bool) -> list[Document]:
    """Return what is held out of `documents`, or the rest.

    Whole documents, those with the smallest hashes; where they are too few for that, the end of each from a line on.
    """
    if not fraction:
        return [] if is_eval else documents
    held_out = round(len(documents) * fraction)
    if held_out == 0:
        return [_part(document, fraction, is_eval) for document in documents]
    hashes = [blake2b(document.text.encode(), digest_size=8).digest() for document in documents]
    largest = sorted(hashes)[held_out - 1]
    return [each for each, key in zip(documents, hashes, strict=True) if (key <= largest) == is_eval]


def encode_documents(tokenizer: PreTrainedTokenizerBase, documents: list[Document], seq_len: int) -> Iterator[Example]:
    """Yield the samples of each document: at most `seq_len` tokens, each beginning with the last of the one before.

    So every token is predicted once, but a document's first; the end-of-text token, where the tokenizer has one,
    ends every document.
    """
    for start in range(0, len(documents), _ENCODED_AT_ONCE):
        texts = [document.text for document in documents[start : start + _ENCODED_AT_ONCE]]
        for ids in tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]:
            end = tokenizer.eos_token_id
            whole = ids if end is None or ids[-1:] == [end] else [*ids, end]
            for first in range(0, max(len(whole) - 1, 1), max(seq_len - 1, 1)):
                piece = whole[first : first + seq_len]
                yield Example(piece, piece)


def _part(document: Document, fraction: float, is_eval: bool) -> Document:
    cut = document.text.find("\n", round(len(document.text) * (1 - fraction))) + 1
    if cut in (0, len(document.text)):
        raise ConfigError(
            f"{document.where}: data.eval_fraction={fraction} of it cannot be held out: no line begins there; set "
            "data.eval_path, or data.eval_fraction=0 with training.eval_every=0"
        )
    return Document(document.where, document.text[cut:] if is_eval else document.text[:cut])


def beginning(document: Document) -> str:
    """Return its first line that is not empty, for a model to continue; at most 80 characters."""
    return document.text.strip().partition("\n")[0][:80]
