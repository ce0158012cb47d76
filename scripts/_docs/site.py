"""Building the site with mkdocs, and checking every link of the built pages."""

from __future__ import annotations

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from scripts._docs.markdown import ROOT


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
