"""The pages of docs/: generated ones are current and complete; paths, names, keys and links of all of them exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from components.config.compose.composition import compose
from components.config.compose.explain import written
from components.config.compose.help_text import RECIPES, _field_docs, keys_of, recipe_defaults, sections, variants_of
from components.config.compose.typed import free_keys, known_keys, section_class
from components.config.kinds import type_hints
from scripts._docs import __main__ as docs
from scripts._docs import site
from scripts._docs.options import groups
from scripts._docs.refusals import all_refusals
from scripts._docs.walks import WALKS, Stop
from tests.browser import WIDTHS, Word, lay_out
from tests.config.commands import REPOSITORY
from tests.config.composed import request

DOCS = REPOSITORY / "docs"
PAGES = sorted(str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md"))
AGENTS = "../AGENTS.md"
WRITTEN = [*(page for page in PAGES if not page.startswith("reference/")), AGENTS]
CODE = re.compile(r"(`+)(.+?)\1")
TOP_FOLDERS = "recipes|conf|components|meshbook|scripts|tests|slurm|k8s|docs|examples"
SECTIONS = "|".join(sections())
TEXTS = ("*.md", "docs/*.md", "docs/coming_from/*.md", "examples/*/*.md", "slurm/*.md", "k8s/*.md", "tests/*/*.md")
SOURCES = ("components/**/*.py", "meshbook/*.py", "recipes/*.py", "scripts/**/*.py", "examples/*/*.py")
OTHER_FILES = {
    *(f"nemo_automodel/components/distributed/{name}.py" for name in ("init_utils", "utils")),
    *(f"examples/own_{name}/train.py" for name in ("data", "loss", "optimizer", "model_family")),
    *("distributed/setup.py", "torch/numa/binding.py", "torch/version.py", "litgpt/pretrain.py", "train_ft.py"),
    *("lora_finetune_single_device.py", "version.py", "tokenize.py", "mine.py", "my_data.py"),
    *("/my_project/mine.py", "a/recipes/finetune.py", "b/recipes/finetune.py"),
}
"""Files of other projects, of Python, of a reader and in the headers of patches that texts and sources name."""
COMING_FROM = sorted(str(file.relative_to(DOCS)) for file in DOCS.glob("coming_from/*.md"))


@cache
def text_of(page: str) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def own_words(page: str) -> list[str]:
    """Return the texts in code font of a page, without the first column of a table of another project's keys."""
    text = text_of(page)
    if page in COMING_FROM:
        text = re.sub(r"^\| `.*?` \| ", "", text, flags=re.MULTILINE)
    return [found for _, found in CODE.findall(text)]


@cache
def all_keys() -> set[str]:
    return {key for schema in RECIPES.values() for key in known_keys(schema)}


@cache
def free_sections() -> tuple[str, ...]:
    found = {key for schema in RECIPES.values() for key in free_keys(schema)}
    return tuple(f"{key}." for key in found)


def test_generated_pages_are_current() -> None:
    assert docs.outdated() == [], "run python -m scripts._docs"


def test_reference_lists_every_key_and_no_other() -> None:
    listed = {
        key
        for section in sections()
        for key in re.findall(r"^\| `(\w+\.[\w.]+)` \|", (DOCS / f"reference/{section}.md").read_text(), re.MULTILINE)
    }
    assert listed == all_keys() - set(sections())


@pytest.mark.parametrize("recipe", RECIPES)
def test_documented_defaults_are_those_of_a_composed_config(recipe: str) -> None:
    values: Any = compose(request(recipe)).resolved
    for section, hint in type_hints(RECIPES[recipe]).items():
        kinds = variants_of([section_class(hint)])
        for key in keys_of(kinds.get(str(values[section].get("kind")), next(iter(kinds.values()))), section):
            value = values
            for name in key.split("."):
                value = value[name]
            documented = [each.value for each in recipe_defaults(key) if recipe in each.recipes]
            if not isinstance(value, dict) or not value:
                assert documented == ["required" if value == "???" else written(value)], key


def test_every_key_has_a_docstring() -> None:
    for schema in (each for classes in sections().values() for each in variants_of(classes).values()):
        assert all(_field_docs(schema).values()), schema


def test_navigation_lists_every_page() -> None:
    listed: list[str] = []

    def collect(entries: list[object]) -> None:
        for entry in entries:
            target = next(iter(entry.values())) if isinstance(entry, dict) else entry
            collect(target) if isinstance(target, list) else listed.append(target)

    collect(yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text())["nav"])
    assert len(listed) == len(set(listed))
    assert set(listed) == set(PAGES)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs names them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", [*PAGES, AGENTS])
def test_links_lead_to_pages_pictures_and_headings(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        path, _, anchor = target.partition("#")
        if path.startswith("https://"):
            continue
        file = (DOCS / page).parent / path if path else DOCS / page
        assert file.is_file(), target
        assert not anchor or anchor in anchors_of(file), target


@pytest.mark.parametrize("page", WRITTEN)
def test_paths_modules_and_keys_in_code_font_exist(page: str) -> None:
    for text in own_words(page):
        for path in re.findall(rf"(?<![\w/.-])(?:{TOP_FOLDERS})/[\w./-]*", text):
            if not {"GROUP", "mine", "local"} & set(re.split(r"[/.]", path)):
                assert (REPOSITORY / path.rstrip(".")).exists(), (page, path)
        for name in re.findall(r"\b(?:components|scripts)(?:\.\w+)+", text):
            assert is_importable(name), (page, name)
        for key in re.findall(rf"(?<![\w./$])(?:{SECTIONS})(?:\.[a-z]\w*)+(?![\w(])", text):
            known = key in all_keys() or key.startswith(free_sections())
            assert known or is_member(key) or key.endswith((".yaml", ".jsonl", ".steps", ".py")), (page, key)


def test_python_files_and_modules_that_texts_and_sources_name_exist() -> None:
    """A file may be named by the end of its path; the changelog also names files of earlier versions."""
    files = [
        file.relative_to(REPOSITORY)
        for folder in TOP_FOLDERS.split("|")
        for file in REPOSITORY.glob(f"{folder}/**/*.py")
    ]
    existing = {"/".join(file.parts[start:]) for file in files for start in range(len(file.parts))}
    modules = set[str]()
    for file in (file for pattern in (*TEXTS, *SOURCES) for file in REPOSITORY.glob(pattern)):
        if file.name == "CHANGELOG.md":
            continue
        text = file.read_text()
        named = {name for name in re.findall(r"[\w./-]*\w\.py\b", text) if "NAME" not in name and "FOLDER" not in name}
        assert named - existing - OTHER_FILES == set(), file
        folders = re.findall(r"(?<![\w/.-])components(?:/[a-z]\w*)+(?![\w.])", text)
        assert [name for name in folders if not (REPOSITORY / name).is_dir()] == [], file
        modules.update(re.findall(r"(?<![\w/.])components(?:\.[a-z_]\w*)+(?![\w(])", text))
    assert [name for name in sorted(modules) if not is_importable(name)] == []


def is_importable(name: str) -> bool:
    """Return whether a dotted name is a module of the repository, or a name in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = REPOSITORY.joinpath(*parts[:length])
        file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        if file.is_file():
            return length == len(parts) or re.search(rf"\b{parts[length]}\b", file.read_text()) is not None
    return False


def is_member(name: str) -> bool:
    """Return whether a name such as run.finish or training.prepare is public in the part that recipes use."""
    owner, _, member = name.partition(".")
    packages = {name: f"components/{name}/__init__.py" for name in ("data", "models", "training")}
    file = {"run": "components/training/run.py", **packages}.get(owner)
    return file is not None and re.search(rf"\b{member}\b", (REPOSITORY / file).read_text()) is not None


@pytest.mark.parametrize("page", WRITTEN)
def test_options_in_code_font_exist(page: str) -> None:
    options = {group: {file.stem for file in files} for group, files in groups().items()}
    for text in own_words(page):
        for group, option in re.findall(r"(?<![\w./])([a-z/]+)=([a-z]\w*)\b", text):
            if group in options and option not in ("auto", "plan", "module", "mine"):
                assert option in options[group], (page, f"{group}={option}")


@pytest.mark.parametrize("page", WRITTEN)
def test_commands_of_scripts_have_options_and_keys_that_exist(page: str) -> None:
    """Those of recipes compose in test_documented_commands.py."""
    for script, arguments in re.findall(r"python (scripts/[\w/]+\.py)([^`\n#]*)", (DOCS / page).read_text()):
        file = REPOSITORY / script
        sources = [file, *(file.parent / f"_{file.stem}").glob("*.py")]
        text = "".join(source.read_text() for source in sources)
        for option in re.findall(r"(?<=\s)--[a-z-]+", arguments):
            assert f'"{option}"' in text, (script, option)
        for key, value in re.findall(r"([a-z][\w./]*)=(\S*)", arguments):
            options = [each.stem for each in groups().get(key, [])]
            assert value in options if options else key in all_keys(), (script, key, value)


@pytest.mark.parametrize("page", WRITTEN)
def test_targets_of_make_exist(page: str) -> None:
    targets = re.findall(r"^([\w -]+):(?!=)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    known = {name for line in targets for name in line.split()}
    for text in re.findall(r"(?:^|`)make ((?:\w+=\S+ )?[\w-]+)", (DOCS / page).read_text(), re.MULTILINE):
        assert text.split()[-1] in known, (page, text)


@pytest.mark.parametrize("stop", sorted({stop for walk in WALKS for stop in walk.stops}, key=str), ids=str)
def test_stops_of_the_walks_exist(stop: Stop) -> None:
    file = REPOSITORY / stop.file
    assert file.is_file()
    if not stop.name:
        return
    body: list[ast.stmt] = ast.parse(file.read_text()).body
    for name in stop.name.split("."):
        found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name]
        assert found, f"{stop.file} defines no {stop.name}"
        body = found[0].body


def test_architecture_shows_every_walk() -> None:
    text = (DOCS / "architecture.md").read_text()
    assert all(f"(images/{walk.file}.svg)" in text for walk in WALKS)


@pytest.mark.parametrize("page", COMING_FROM)
def test_tables_of_other_projects_name_keys_of_meshbook(page: str) -> None:
    """The second column names a key, an option or a file, or says that there is none."""
    rows = [line.split(" | ") for line in text_of(page).splitlines() if line.startswith("| `")]
    assert len(rows) >= 10
    for _, cell, *_ in rows:
        if cell != "none":
            (text,) = [text for _, text in CODE.findall(cell)]
            key = text.partition("=")[0]
            assert key in all_keys() | set(groups()) or (REPOSITORY / text).is_file(), (page, cell)


def test_links_of_a_built_site_are_checked(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="folder/page.html#one"></a><a href="#two"></a><img src="no.svg"><script src="https://x.y/z.js">'
    )
    (tmp_path / "folder/page.html").write_text('<h1 id="one"></h1><a href="../index.html"></a><a href="https://x.y/z">')
    assert site.broken_links(tmp_path) == ["index.html: no.svg", "index.html: https://x.y/z.js", "index.html: #two"]


@pytest.mark.parametrize(
    ("html", "parts"),
    [
        ("<code>data.max_eval_samples</code>", ["data.max_eval_samples"]),
        ("<code>meshbook plan --left-out --max-mem 0.9</code>", ["meshbook", "plan", "--left-out", "--max-mem", "0.9"]),
        ("<code>model.rope.original_max_position_embeddings=null</code>",
         ["model.", "rope.", "original_", "max_position_embeddings=null"]),
        ("of SmolLM2-135M at 2e-4 in <pre><code>a-1 b.c</code></pre>", ["SmolLM2-135M", "2e-4"]),
    ],
)  # fmt: skip
def test_keys_of_the_site_are_broken_at_dots_and_underscores_only(html: str, parts: list[str]) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="start.md"))
    shown = site.on_page_content(html, page=page)
    assert re.findall('<span class="unbroken">(.*?)</span>', shown) == parts
    assert re.sub("<span.*?>|</span>|<wbr>", "", shown) == html


def test_refusals_are_read_from_strings_and_range_checks() -> None:
    templates = {each.template for each in all_refusals()}
    assert "training.max_steps={value}: must be at least 1" in templates
    assert any(each.startswith("parallelism.sequence_parallel=true: needs parallelism.tp > 1") for each in templates)


def test_class_variables_are_no_keys() -> None:
    """An objective names its recipe in a ClassVar, which the command line cannot set."""
    assert "objective.recipe" not in all_keys()


def test_pictures_show_every_word_in_a_browser() -> None:
    files = sorted((DOCS / "images").glob("*.svg"))
    for number, page in enumerate(lay_out(files)):
        file = files[number // len(WIDTHS)]
        assert page.overlaps() == [], file
        assert page.outside() == [], file
        assert not re.search(r"/tmp/|/root/|/home/|\u2026", file.read_text()), file
        lines = ["".join(line.itertext()) for line in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
        if (
            "monospace" in file.read_text()
        ):  # a console: its words are in their columns, and none is cut at the last one
            columns = [match.start() for line in lines for match in re.finditer(r"\S+", line)]
            shown = [round((word.boxes[0][0] - 14) * len(word.text) / width(word)) for word in page.words]
            assert shown == columns, file
            assert all(len(line) < round(page.box[2] / 7.8) - 4 for line in lines), file


def width(word: Word) -> float:
    """Return the width of an unbroken word in pixels."""
    ((left, _, right, _),) = word.boxes
    return right - left
