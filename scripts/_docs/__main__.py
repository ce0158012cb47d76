"""Write the generated pages of docs/, or build the documentation site.

python -m scripts._docs                        # write docs/reference and docs/images
python -m scripts._docs --check                # exit with status 1 if one of them is not current
python -m scripts._docs --build outputs/docs   # build the site and check its links; see make docs
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

from components.config.compose.help_text import sections
from components.terminal import HelpText
from scripts._docs import keys, options, refusals, site, walks
from scripts._docs.markdown import ROOT

DOCS = ROOT / "docs"


def generated() -> dict[str, Callable[[], str]]:
    """Return the generated files by path below docs/, with the functions that write them."""
    pages: dict[str, Callable[[], str]] = {
        "reference/index.md": options.recipes_page,
        "reference/options.md": options.options_page,
        "reference/refusals.md": refusals.page,
    }
    pages |= {f"reference/{name}.md": lambda name=name: keys.section_page(name) for name in sections()}
    return pages | {f"images/{walk.file}.svg": lambda walk=walk: walks.draw(walk) for walk in walks.WALKS}


def outdated() -> list[str]:
    """Return the generated files that are missing or whose content differs, and files that nothing generates."""
    pages = {name: write() for name, write in generated().items()}
    found = [name for name, text in pages.items() if not _holds(DOCS / name, text)]
    present = [str(file.relative_to(DOCS)) for file in DOCS.glob("reference/*")]
    return found + [name for name in present if name not in pages]


def write_all() -> None:
    """Write every generated file."""
    for name, text in generated().items():
        file = DOCS / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text())


def _holds(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text() == text


def main() -> int:
    """Parse the command line; return the exit status."""
    parser = ArgumentParser("scripts._docs", description=__doc__, formatter_class=HelpText)
    parser.add_argument("--check", action="store_true", help="report files that are not current, and write nothing")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="build the site into this folder")
    asked = parser.parse_args()
    if not asked.check and not asked.build:
        write_all()
        return 0
    problems = [f"docs/{name}: not current; run python -m scripts._docs" for name in outdated()]
    if asked.build and not problems:
        problems = [f"broken link: {link}" for link in site.build(asked.build)]
    print("\n".join(problems) or ("docs/ is current" if asked.check else f"built {asked.build}"))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
