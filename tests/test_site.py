"""The site that `make docs` has built, as headless Chromium shows it on a phone and on a notebook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.browser import WIDTHS, Page, Word, lay_out

SITE = Path(__file__).resolve().parents[1] / "outputs/docs"
FILES = [file for file in sorted(SITE.rglob("*.html")) if file.name != "404.html"]
SCROLLED = re.compile(r"\bpre > code\b|\btable\b|md-typeset__scrollwrap$")
"""Blocks of code and tables, which scroll by themselves."""


@pytest.fixture(scope="module")
def pages() -> dict[tuple[str, int], Page]:
    """Return each page of the site at each width."""
    names = [str(file.relative_to(SITE)) for file in FILES]
    assert "index.html" in names, "run make docs"
    return dict(zip([(name, width) for name in names for width in WIDTHS], lay_out(FILES), strict=True))


def content(page: Page) -> list[Word]:
    """Return the words of the page itself: not of its header, navigation and footer."""
    return [word for word in page.words if "md-typeset" in word.path]


def test_no_page_scrolls_to_the_side_and_nothing_is_cut(pages: dict[tuple[str, int], Page]) -> None:
    for page, laid in pages.items():
        assert laid.content_width <= laid.width, page
        cut = [path for path in laid.scrolled if "md-content" in path and not SCROLLED.search(path)]
        assert cut == [], page
        for word in content(laid):
            inside = all(left >= 0 and right <= laid.width for left, _, right, _ in word.boxes)
            assert inside or SCROLLED.search(word.path), (page, word)


def test_keys_and_words_are_not_broken(pages: dict[tuple[str, int], Page]) -> None:
    """Except after a hyphen or slash between words of prose."""
    for page, laid in pages.items():
        broken = [word for word in content(laid) if word.is_broken]
        wrong = [
            word for word in broken if "code" in word.path or not re.search(r"[^\W\d]{2}[-/]\]?[^\W\d]", word.text)
        ]
        assert wrong == [], page


def test_words_do_not_overlap(pages: dict[tuple[str, int], Page]) -> None:
    for page, laid in pages.items():
        words = tuple(word for word in content(laid) if not SCROLLED.search(word.path))
        assert Page(laid.width, laid.box, laid.content_width, words, ()).overlaps() == [], page


@pytest.mark.parametrize(("text", "page"), [("data.eval_fraction", "reference/data"), ("QLoRA", "lora")])
def test_search_works_in_a_page_opened_from_a_folder(pages: object, tmp_path: Path, text: str, page: str) -> None:
    """Without a server, and without the permission that lay_out gives to Chromium."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=20000"]
    address = f"{(SITE / 'reference/run.html').as_uri()}?q={text}"
    command = ["chromium", *options, f"--user-data-dir={tmp_path}", address]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    first = re.search(r'href="([^"]*)" class="md-search-result__link"', shown)
    assert first
    assert first[1] == (SITE / f"{page}.html").as_uri()
