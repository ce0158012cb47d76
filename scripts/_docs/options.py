"""Options of the config groups, and the values that the file of each recipe sets, from conf/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from components.config.compose.explain import written
from components.config.compose.help_text import RECIPES, file_of, purpose_of, recipes_with, sections
from scripts._docs.markdown import NOTE, ROOT, cell, code, table

CONF = ROOT / "conf"


def groups() -> dict[str, list[Path]]:
    """Return the config groups by name, with the files of their options; conf/local is the user's own."""
    folders = sorted({file.parent for file in CONF.rglob("*.yaml")} - {CONF})
    names = {str(folder.relative_to(CONF)): folder for folder in folders}
    return {name: sorted(folder.glob("*.yaml")) for name, folder in names.items() if not name.startswith("local")}


def options_page() -> str:
    """Return the page of the options of every group."""
    parts = [
        f"{NOTE}\n# Options\n",
        "A group is set by `GROUP=OPTION`; each option is a file of values, `conf/GROUP/OPTION.yaml`. A file of yours "
        "there, or in a folder `conf/` next to your recipe or in the folder of the command, is an option too.\n",
    ]
    for group, files in groups().items():
        parts += [
            f"## {group}\n",
            table(["option", "purpose"], [[code(f.stem), cell(purpose_of(f.read_text()))] for f in files]),
        ]
    return "\n".join(parts)


def recipes_page() -> str:
    """Return the page that lists the sections, groups and values of each recipe's config."""
    parts = [
        f"{NOTE}\n# Recipes and sections\n",
        "A recipe's config consists of sections. The pages state the value of a key in each recipe, which its file in "
        "`conf/` or an option sets; another option, an experiment or the command line replaces it, in this order.\n",
    ]
    names = list(RECIPES)
    rows = [
        [f"[{section}]({section}.md)", *("x" if name in recipes_with(section) else "" for name in names)]
        for section in sections()
    ]
    parts += [
        table(["section", *map(code, names)], rows),
        "\n`teacher` and `answer` are the configs of `scripts/teacher.py` and `scripts/answer.py`.\n",
    ]
    for name in names:
        values = yaml.safe_load((CONF / f"{name}.yaml").read_text())
        chosen = {
            key: option for entry in values["defaults"] if isinstance(entry, dict) for key, option in entry.items()
        }
        chosen = {key: option for key, option in chosen.items() if "hydra" not in key and key != "optional local"}
        own = {key: value for key, value in values.items() if key not in ("defaults", "hydra")}
        parts.append(f"## {file_of(name)}\n")
        parts.append(
            f"{code(f'conf/{name}.yaml')} selects {', '.join(code(f'{k}={written(v)}') for k, v in chosen.items())}.\n"
        )
        rows = [[code(key), code(written(value))] for key, value in _flat(own).items()]
        if rows:
            parts.append(table(["key", "value"], rows))
    return "\n".join(parts)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found
