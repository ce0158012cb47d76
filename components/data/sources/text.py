"""Documents to continue: the interpreter's own, the end of one that is held out, and their samples."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.config.errors import ConfigError
from components.data.examples import Example, trimmed
from components.data.sources.files import Row
from components.data.sources.rows import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STDLIB = "python:stdlib"
"""The `data.path` that means the source of the interpreter's own library: 12 MB of Python, nothing to fetch."""

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


def stdlib_rows(column: str) -> Iterator[Row]:
    """Yield one row per file of the interpreter's library, in order of their names, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        name = file.relative_to(library)
        if not _NOT_LIBRARY.intersection(name.parts):
            text = file.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield Row(str(name), {column: text})


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], seq_len: int
) -> Iterator[Example]:
    """Yield the samples of each document: at most `seq_len` tokens, each first_line with the last of the one before.

    So every token is predicted once, but a document's first; the end-of-text token, where the tokenizer has one,
    ends every document.
    """
    texts = [document.text for document in documents]
    for ids in tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]:
        end = tokenizer.eos_token_id
        whole = ids if end is None or ids[-1:] == [end] else [*ids, end]
        for first in range(0, max(len(whole) - 1, 1), max(seq_len - 1, 1)):
            piece = whole[first : first + seq_len]
            yield trimmed(Example(piece, piece))


def split_document(document: Document, fraction: float, is_eval: bool) -> Document:
    """Return the end of a document, from a line on, that is held out of it, or the rest."""
    cut = document.text.find("\n", round(len(document.text) * (1 - fraction))) + 1
    if cut in (0, len(document.text)):
        raise ConfigError(
            f"{document.where}: data.eval_fraction={fraction} of it cannot be held out: no line begins there; "
            "set data.eval_path"
        )
    return Document(document.where, document.text[cut:] if is_eval else document.text[:cut])


def first_line(document: Document) -> str:
    """Return its first line that is not empty, for a model to continue; at most 80 characters."""
    return document.text.strip().partition("\n")[0][:80]
