"""Building the site with mkdocs, whose hook this module is, and checking every link of the built pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from scripts._docs.markdown import ROOT

LINE = 32
"""Characters in code font that a column of 390 pixels holds."""
PARTS = re.compile(r"(?s)(<pre.*?</pre>|<code>[^<]*</code>|<[^>]*>)")
UNBROKEN = re.compile(r"[^\s<>]*[={][^\s<>]*|(?<![\w&])(?:[\w./]*(?:\w-\d|\d-\w|\b\w-\w)(?:[\w.-]*\w)?|--?[a-z][\w-]*)")
"""Words of prose that a browser would break: KEY={value}, 2e-4, SmolLM2-135M, --top-p."""


def on_page_content(html: str, page: Any, **_: object) -> str:
    """Return a page (for mkdocs) whose keys, paths and numbers stay on one line; long ones break after `.`, `_`, `/`.

    Of the pages that name a key, the search finds the one that explains it first.
    """
    if page.file.src_uri.startswith("reference/"):
        page.meta["search"] = {"boost": 0.2 if page.file.name in ("refusals", "options") else 8}
    parts = PARTS.split(html)
    parts[::2] = [UNBROKEN.sub(_unbroken, text) for text in parts[::2]]
    parts[1::2] = [re.sub(r"(?<=^<code>)[^<]+", _code, tag) for tag in parts[1::2]]
    return "".join(parts)


def _code(match: re.Match[str]) -> str:
    if len(match[0]) <= LINE:
        return _unbroken(match)
    ends = rf"\S{{1,{LINE}}}(?=\s|$)|\S+?(?:(?<=\w)[._/=,]+(?=\w)|(?=\s|$))"
    return re.sub(ends, lambda word: _unbroken(word) + "<wbr>", match[0]).removesuffix("<wbr>")


def _unbroken(match: re.Match[str]) -> str:
    return f'<span class="unbroken">{match[0]}</span>'


def build(folder: Path) -> list[str]:
    """Build the site into `folder` with warnings as errors, and return its broken links.

    Raises subprocess.CalledProcessError if mkdocs fails.
    """
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--clean"]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme's successor
    subprocess.run([*command, "--site-dir", str(folder.resolve())], cwd=ROOT, check=True, env=quiet)
    return broken_links(folder)


class _Page(HTMLParser):
    """The link targets, the loaded files and the ids of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                is_loaded = name == "src" or ("rel", "stylesheet") in attrs
                (self.loaded if is_loaded else self.targets).append(value)


def broken_links(folder: Path) -> list[str]:
    """Return the links of a built site to files or anchors that do not exist, as `PAGE: LINK`.

    Pictures, stylesheets and scripts must be part of the site, since readers may have no network.
    """
    pages = {file: _Page(file.read_text()) for file in sorted(folder.rglob("*.html"))}
    broken = []
    for file, page in pages.items():
        if file.name == "404.html":  # its links begin at the root of the server
            continue
        for target in [*page.loaded, *page.targets]:
            link = urlsplit(target)
            if link.scheme == "data" or (link.scheme and target in page.targets):
                continue
            path = file if not link.path else (file.parent / unquote(link.path)).resolve()
            path = path / "index.html" if path.is_dir() else path
            missing = not path.is_file()
            if missing or (link.fragment and path in pages and unquote(link.fragment) not in pages[path].ids):
                broken.append(f"{file.relative_to(folder)}: {target}")
    return broken
