"""Folders of Meshbook, in a checkout or as a wheel installs them."""

from __future__ import annotations

from pathlib import Path

COMPONENTS = Path(__file__).resolve().parent
"""This package."""
INSTALLED = COMPONENTS.parent / "meshbook"
"""The package that a wheel installs next to `components`; in a checkout it has no conf/."""
PROJECT = INSTALLED if (INSTALLED / "conf").is_dir() else COMPONENTS.parent
"""Folder that contains conf/, recipes/, scripts/, slurm/ and k8s/."""
HELP = "__help__"
"""Global variable of a recipe's module that replaces its docstring in --help, if the command meshbook starts it."""
