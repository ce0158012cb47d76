"""Plain-text documents: Python's standard library as a source, held-out ends of documents, and tokenization."""

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

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


def stdlib_rows(column: str) -> Iterator[Row]:
    """Yield one row per source file of the standard library, sorted by name, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        name = file.relative_to(library)
        if not _NOT_LIBRARY.intersection(name.parts):
            text = file.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield Row(str(name), {column: text})


def document_tokens(tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document]) -> Iterator[list[int]]:
    """Tokenize documents. The end-of-text token, if the tokenizer has one, ends every document."""
    end = tokenizer.eos_token_id
    texts = [document.text for document in documents]
    for ids in tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]:
        yield ids if end is None or ids[-1:] == [end] else [*ids, end]


def encode_documents(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[Document], seq_len: int
) -> Iterator[Example]:
    """Cut each document into samples of at most `seq_len` tokens that overlap by one token.

    Every token except the first of a document is therefore a target exactly once.
    """
    for tokens in document_tokens(tokenizer, documents):
        for first in range(0, max(len(tokens) - 1, 1), max(seq_len - 1, 1)):
            piece = tokens[first : first + seq_len]
            yield trimmed(Example(piece, piece))


def split_document(document: Document, fraction: float, is_eval: bool) -> Document:
    """Split a document at a line break; return its held-out end (`fraction` of it) or the part before.

    Raises ConfigError if no line starts where half to twice of that fraction is held out.
    """
    length, wanted = len(document.text), len(document.text) * fraction
    first = round(length * (1 - fraction))
    starts = (document.text.find("\n", first) + 1, document.text.rfind("\n", 0, first) + 1)
    ends = {cut: length - cut for cut in starts if 0 < cut < length}  # characters that are held out
    cut = next((cut for cut, end in ends.items() if wanted <= 2 * end and end <= 2 * wanted), None)
    if cut is None:
        shares = " or ".join(f"{end / length:.4g}" for end in ends.values())
        remedy = f"set data.eval_fraction={shares}, or" if shares else "it has one line;"
        raise ConfigError(
            f"{document.where}: data.eval_fraction={fraction} of it cannot be held out, because no line starts near "
            f"that place; {remedy} set data.eval_path"
        )
    return Document(document.where, document.text[cut:] if is_eval else document.text[:cut])


def opening_line(document: Document) -> str:
    """Return the first non-empty line of a document, at most 80 characters, as a prompt for generation."""
    return document.text.strip().partition("\n")[0][:80]
