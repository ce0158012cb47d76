"""Where headless Chromium puts the words of HTML pages and SVG pictures."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest

WIDTHS = (390, 1280)
"""Width of a phone and of a notebook, in pixels."""
_SCRIPT = """
const jobs = JOBS, pages = [];
function words(page) {
  const found = [], walker = page.createTreeWalker(page.documentElement, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (parent.closest('script, style, noscript, title, option')) continue;
    if (!parent.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue;
    for (const match of node.data.matchAll(/\\S+/gu)) {
      const range = page.createRange();
      range.setStart(node, match.index);
      range.setEnd(node, match.index + match[0].length);
      const boxes = [...range.getClientRects()].filter(box => box.width > 0 && (box.right > 0 || !page.body));
      const sides = boxes.map(box => [box.x, box.y, box.right, box.bottom]);
      if (boxes.length) found.push([match[0], sides, path(parent)]);
    }
  }
  return found;
}
function path(element) {
  const names = [];
  for (; element && element.localName !== 'html' && names.length < 6; element = element.parentElement)
    names.unshift(element.localName + [...element.classList].map(name => '.' + name).join(''));
  return names.join(' > ');
}
function scrolled(page) {
  const wide = [...page.querySelectorAll('body *')].filter(each => each.scrollWidth > each.clientWidth + 1);
  return wide.filter(each => each.clientWidth > 1 && each.getBoundingClientRect().right > 0 && each.checkVisibility()
    && getComputedStyle(each).overflowX !== 'visible').map(path);
}
async function measure([address, width]) {
  const frame = document.createElement('iframe');
  frame.style.cssText = `border: 0; height: 900px; width: ${width}px`;
  frame.src = address;
  await new Promise(done => { frame.onload = done; document.body.replaceChildren(frame); });
  const page = frame.contentDocument;
  await page.fonts.ready;
  await new Promise(done => setTimeout(done, 50));
  const root = page.documentElement;
  const own = root.viewBox?.baseVal ?? {x: 0, y: 0, width: root.clientWidth, height: root.clientHeight};
  const content = Math.max(root.scrollWidth, page.body?.scrollWidth ?? 0);
  const box = [own.x, own.y, own.x + own.width, own.y + own.height];
  pages.push({width, box, content, words: words(page), scrolled: scrolled(page)});
}
(async () => {
  for (const job of jobs) await measure(job);
  document.body.innerHTML = '<pre></pre>';
  document.body.firstChild.textContent = JSON.stringify(pages);
})().catch(error => { document.body.innerText = error.stack; });
"""


@dataclass(frozen=True)
class Word:
    """A word of a page, without spaces: several boxes if it is broken over lines."""

    text: str
    boxes: tuple[tuple[float, float, float, float], ...]
    """Left, top, right and bottom of each part, in pixels of the page."""
    path: str
    """Names and classes of the elements around it, the nearest last."""

    @property
    def is_broken(self) -> bool:
        """Whether it is broken over two or more lines."""
        return len({round(top) for _, top, _, _ in self.boxes}) > 1


@dataclass(frozen=True)
class Page:
    """A page laid out in a window of a width."""

    width: int
    box: tuple[float, float, float, float]
    """Left, top, right and bottom of a picture's viewBox, or of the window."""
    content_width: int
    """Larger than the width: the page scrolls to the side."""
    words: tuple[Word, ...]
    """Visible words, in the order of the document; not those left of the window, where menus are parked."""
    scrolled: tuple[str, ...]
    """Paths of the elements whose content is wider than they are, and is cut or scrolls."""

    def overlaps(self) -> list[tuple[str, str]]:
        """Return pairs of words drawn over each other: by more than two pixels both ways."""
        parts = sorted(((*box, word.text) for word in self.words for box in word.boxes), key=lambda part: part[1])
        found = []
        for index, (left, _, right, bottom, text) in enumerate(parts):
            for other in islice(parts, index + 1, None):
                if bottom - other[1] <= 2:  # as those below it
                    break
                if min(right, other[2]) - max(left, other[0]) > 2 and min(bottom, other[3]) - other[1] > 2:
                    found.append((text, other[4]))
        return found

    def outside(self) -> list[str]:
        """Return the words that are not wholly inside the picture, or the width of the window."""
        left, top, right, bottom = self.box if self.words[0].path.startswith("svg") else (0, -1e9, self.width, 1e9)
        return [
            word.text
            for word in self.words
            if any(box[0] < left or box[1] < top or box[2] > right or box[3] > bottom for box in word.boxes)
        ]


def lay_out(files: Sequence[Path], widths: Sequence[int] = WIDTHS) -> list[Page]:
    """Return the pages of each file at each width: all widths of the first file, then of the next.

    Skip the test where there is no Chromium; under MESHBOOK_REQUIRE_BROWSER=1 fail instead.
    """
    program = shutil.which("chromium")
    if program is None:
        reason = "needs chromium (Debian package chromium)"
        if os.environ.get("MESHBOOK_REQUIRE_BROWSER") == "1":
            pytest.fail(f"MESHBOOK_REQUIRE_BROWSER=1, but {reason}", pytrace=False)
        pytest.skip(reason)
    jobs = json.dumps([(file.resolve(strict=True).as_uri(), width) for file in files for width in widths])
    with tempfile.TemporaryDirectory() as folder:
        frames = Path(folder) / "frames.html"
        frames.write_text(f"<!doctype html><body><script>{_SCRIPT.replace('JOBS', jobs)}</script>", encoding="utf-8")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        options += ["--allow-file-access-from-files", "--virtual-time-budget=600000", "--dump-dom"]
        command = [program, *options, frames.as_uri()]
        run = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, check=False)
    if not (answer := re.search(r"<pre>(.*)</pre>", run.stdout, re.DOTALL)):
        raise RuntimeError(
            f"chromium measured nothing (status {run.returncode}): {run.stdout[-2000:]} {run.stderr[-2000:]}"
        )
    return [
        Page(
            each["width"],
            tuple(each["box"]),
            each["content"],
            tuple(Word(text, tuple(map(tuple, boxes)), path) for text, boxes, path in each["words"]),
            tuple(each["scrolled"]),
        )
        for each in json.loads(html.unescape(answer[1]))
    ]
