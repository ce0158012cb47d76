"""The start banner of a run: versions, mesh, batch arithmetic, model, and a table of the ranks."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from components.config.schema.parallelism import MeshShape
from components.exchange import all_gather_json

_LONGEST_SUBJECT = 14
"""Maximum number of characters of a note's subject, which is the name of its row; "note" is that of other notes."""


@dataclass(kw_only=True, slots=True)
class BannerFacts:
    """Contents of the banner; coordinates, device and bytes are those of this rank."""

    mesh: MeshShape
    """Degrees of the axes."""
    coordinates: str
    """Mesh coordinates of this rank."""
    device: torch.device
    """Device of this rank."""
    batch: str
    """Batch arithmetic as a formula."""
    model: str
    """Name, number of parameters, dtypes."""
    local_bytes: int
    """Bytes of this rank's parameter shards."""
    groups: list[str] = field(default_factory=list)
    """One line for each process group of this rank, with its purpose."""
    notes: list[Any] = field(default_factory=list)
    """Hints and warnings about the run: (subject, text), or "subject: text". None and empty ones are left out."""


def print_banner(console: Console, facts: BannerFacts) -> None:
    """Gather the ranks' values and print the banner on `console`; a collective."""
    local_rank = os.environ.get("LOCAL_RANK", "0")
    ranks = all_gather_json([socket.gethostname(), local_rank, str(facts.device), facts.coordinates, facts.local_bytes])
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(facts, len(ranks) == 1):
        table.add_row(name, text)
    console.print(table)
    if len(ranks) == 1:
        return
    rank_table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("rank", "host", "local rank", "device", "mesh coordinates", "parameter bytes"):
        rank_table.add_column(column, no_wrap=True)
    for rank, (host, local_rank, device, coordinates, local_bytes) in enumerate(ranks):
        if rank < 16 or rank == len(ranks) - 1:
            rank_table.add_row(str(rank), host, local_rank, device, coordinates, f"{local_bytes:,}")
        elif rank == 16:
            rank_table.add_row("...", *[""] * 5)
    console.print(rank_table)


def _rows(facts: BannerFacts, is_alone: bool) -> list[tuple[str, str]]:
    packages = ("torch", "transformers", "meshbook")
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    rows = [
        ("versions", f"python {platform.python_version()}, {versions}"),
        ("mesh", facts.mesh.summary),
        *([("device", str(facts.device))] if is_alone else []),
        ("batch", facts.batch),
        ("model", facts.model),
    ]
    rows += [("" if index else "process groups", line) for index, line in enumerate(facts.groups)]
    return rows + [(name, text) for name, text in map(_note, filter(None, facts.notes)) if text]


def _note(note: Any) -> tuple[str, str]:
    """Return the subject of a note and its text."""
    if isinstance(note, tuple):
        return note[0], str(note[1])
    subject, _, text = str(note).partition(": ")
    return (subject, text) if text and len(subject) <= _LONGEST_SUBJECT else ("note", str(note))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return "not installed"
