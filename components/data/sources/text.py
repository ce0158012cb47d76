"""Plain text: documents, held-out ends, tokenization, also of scored texts; Python's library as a first data set."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.chat_template import ChatTemplate
from components.conversation import Conversation
from components.data.examples import REJECTED, Example, KeyUsage, record_bad, trimmed
from components.data.sources.files import Row
from components.data.sources.rows import BadRowReport, Document, LabeledText
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODULES = """
    abc argparse array ast asyncio base64 bdb binascii bisect builtins calendar cmath code codecs codeop
    collections collections.abc compileall concurrent.futures configparser contextlib copy copyreg csv
    dataclasses datetime decimal difflib dis doctest email.charset email.generator email.header
    email.headerregistry email.message email.parser email.policy email.utils enum filecmp fileinput
    fnmatch fractions ftplib functools gc getopt glob graphlib heapq hmac html html.parser http.client
    http.cookiejar http.cookies http.server imaplib importlib.abc importlib.metadata importlib.resources
    importlib.util io ipaddress itertools json keyword linecache logging logging.config logging.handlers
    mailbox marshal math mimetypes multiprocessing netrc numbers operator optparse os.path pathlib pickle
    pickletools pkgutil platform plistlib poplib pprint profile pstats py_compile pyclbr queue quopri
    random re reprlib runpy secrets shelve shlex shutil smtplib socketserver statistics string struct
    subprocess symtable sysconfig tabnanny tarfile tempfile textwrap threading timeit tokenize tomllib
    traceback tracemalloc types typing unicodedata unittest unittest.mock urllib.error urllib.parse
    urllib.request urllib.robotparser uuid warnings wave weakref wsgiref.handlers wsgiref.headers
    wsgiref.simple_server wsgiref.util xml.dom.minidom xml.etree.ElementTree xml.sax.saxutils
    xmlrpc.client xmlrpc.server zipapp zipfile zipimport zoneinfo
""".split()  # noqa: SIM905 (as a list of 148 strings it could not be read)
"""Modules that exist in every build of Python 3.11 to 3.13, differ little between platforms and have no noticeable
side effect on import. An explicit list rather than discovery, so that the data is the same on every machine. `inspect`
is excluded because torch replaces one of its functions."""
_HELD_OUT_ONE_IN = 13
_MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}


def pydocs_conversations(split: str) -> list[Conversation]:
    """Return one question and answer per documented public function and class, in a fixed order.

    `split` is `train`, or `eval` for the held-out packages: about one in 13, selected by a hash of the package
    name, so that all modules of a package (urllib.parse, urllib.request) are in the same split. A docstring
    shared by several names is used once, so that it is not in both splits. The text depends only on the
    docstrings of the Python version.

    Raises ConfigError if Python runs without docstrings.
    """
    if sys.flags.optimize >= 2:
        raise ConfigError("data=pydocs: python -OO (PYTHONOPTIMIZE=2) removes the docstrings; run python without it")
    return list(_conversations_by_split()[split])


@functools.cache
def _conversations_by_split() -> dict[str, list[Conversation]]:
    by_split: dict[str, list[Conversation]] = {"train": [], "eval": []}
    seen: set[str] = set()
    for module in MODULES:
        for name, signature, summary in _documented(module):
            if summary not in seen:
                split = "eval" if _is_held_out(module) else "train"
                by_split[split].append(_conversation(f"{module}.{name}", signature, summary))
            seen.add(summary)
    return by_split


def _is_held_out(module: str) -> bool:
    """Return whether the package of `module` belongs to the split `eval`; a fixed function of its name."""
    digest = hashlib.sha256(module.partition(".")[0].encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def _documented(module_name: str) -> Iterator[tuple[str, str | None, str]]:
    """Yield name, signature and first paragraph of every documented public function and class of a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accessing ast.Num and others raises DeprecationWarning
        members = dict(inspect.getmembers(importlib.import_module(module_name)))
        for name in sorted(_public_names(members, module_name)):
            value = members.get(name)
            summary = _summary(value, name) if inspect.isroutine(value) or inspect.isclass(value) else None
            if summary is not None:
                yield name, _signature(value), summary


def _public_names(members: dict[str, Any], module_name: str) -> list[str]:
    """Return `__all__` of a module, or the public names defined in its package if it has none."""
    if members.get("__all__") is not None:
        return list(members["__all__"])
    package = module_name.partition(".")[0]
    return [
        name
        for name, value in members.items()
        if not name.startswith("_") and _home(value).lstrip("_").partition(".")[0] == package
    ]


def _home(value: Any) -> str:
    home = getattr(value, "__module__", None)
    return home if isinstance(home, str) else ""


def _summary(value: Any, name: str) -> str | None:
    """Return the first paragraph of a docstring, or None if it is missing, a signature or under three words."""
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    if not isinstance(doc, str):
        return None
    paragraph = _MEMORY_ADDRESS.sub("", inspect.cleandoc(doc).partition("\n\n")[0]).strip()
    only_a_signature = paragraph.startswith(f"{name}(") and paragraph.endswith(")")
    return None if only_a_signature or len(paragraph.split()) < 3 else paragraph


def _signature(value: Any) -> str | None:
    """Return a signature such as `(text, width=70)`, or None if it is unknown or contains machine-specific values."""
    try:
        signature = str(inspect.signature(value))
    except (ValueError, TypeError):
        return None
    shows_this_machine = "<" in signature or "'/" in signature or "\\" in signature
    return None if shows_this_machine else signature


def _conversation(name: str, signature: str | None, summary: str) -> Conversation:
    question = f"What does `{name}` do?"
    answer = summary
    if signature is not None:
        answer = f"`{name}{signature}`\n\n{summary}"
    return Conversation(name, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


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


def encode_scored(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[LabeledText] | Sequence[Conversation],
    *,
    usage: KeyUsage | None = None,
    bad: BadRowReport | None = None,
) -> list[Example]:
    """Tokenize texts, and conversations as `apply_chat_template` does, each followed by a padding token.

    These are the tokens of which transformers' models for sequence classification score the last. Every token is a
    target, so that a truncated sample keeps its first tokens. Labels are not part of the samples.

    Raises ConfigError if a template rejects a conversation or exceeds its time limit; for `bad` see
    `encode_conversations`.
    """
    template, pad = ChatTemplate(tokenizer), tokenizer.pad_token_id
    rendered: dict[bool, list[str]] = {False: [], True: []}  # keyed by whether the tokenizer adds special tokens
    adds_special: list[bool | None] = []  # None: rejected
    for text in texts:
        conversation = text if isinstance(text, Conversation) else text.conversation
        if conversation is not None:
            template.source(None)  # rejects a tokenizer without a default template, of which no row is bad
        try:
            content = str(text[1]) if conversation is None else template.render(conversation).text
            if conversation is not None and usage is not None:
                usage.observe(conversation)
        except ConfigError as error:
            record_bad(error, text.where, bad)
            adds_special.append(None)
            continue
        adds = conversation is None or not tokenizer.chat_template
        adds_special.append(adds)
        rendered[adds].append(content)
    encoded = {
        adds: iter(tokenizer(found, add_special_tokens=adds, return_attention_mask=False, verbose=False)["input_ids"])
        for adds, found in rendered.items()
        if found
    }
    samples = [None if adds is None else [*next(encoded[adds]), pad] for adds in adds_special]
    return [REJECTED if ids is None else trimmed(Example(ids, ids)) for ids in samples]
