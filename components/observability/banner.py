"""The first screen of a run: where users look when something is not as they thought."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from components.config.schema.parallelism import MeshShape
from components.exchange import all_gather_json


@dataclass(kw_only=True, slots=True)
class Facts:
    """What the recipe knows and the banner shows."""

    run_dir: str
    """The run directory."""
    mesh: MeshShape
    """Degrees of the axes."""
    coordinates: str
    """This rank's place on the mesh."""
    device: torch.device
    """Where this rank computes."""
    batch: str
    """Batch arithmetic as a formula."""
    model: str
    """Name, parameters, types."""
    local_bytes: int
    """Bytes of this rank's parameters."""
    groups: list[str] = field(default_factory=list)
    """The process groups of this rank and what each is for, a line each."""
    notes: list[Any] = field(default_factory=list)
    """What a person should know before it costs them something; None: nothing to say."""


def print_banner(console: Console, facts: Facts) -> None:
    """Print the start banner on rank 0. A collective: every rank must call it."""
    ranks = _gather(
        (
            socket.gethostname(),
            os.environ.get("LOCAL_RANK", "0"),
            str(facts.device),
            facts.coordinates,
            facts.local_bytes,
        )
    )
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(facts):
        table.add_row(name, text)
    console.print(table)
    places = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("rank", "host", "local rank", "device", "place on the mesh", "parameter bytes"):
        places.add_column(column, no_wrap=True)
    for rank, (host, local_rank, device, coordinates, local_bytes) in enumerate(ranks):
        if rank < 16 or rank == len(ranks) - 1:
            places.add_row(str(rank), host, local_rank, device, coordinates, f"{local_bytes:,}")
        elif rank == 16:
            places.add_row("...", *[""] * 5)
    console.print(places)


def _rows(facts: Facts) -> list[tuple[str, str]]:
    packages = ("torch", "transformers", "meshbook")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    rows = [
        ("versions", f"python {platform.python_version()}, {versions}"),
        ("run directory", facts.run_dir),
        ("mesh", facts.mesh.summary),
        ("batch", facts.batch),
        ("model", facts.model),
    ]
    rows += [("" if index else "process groups", line) for index, line in enumerate(facts.groups)]
    return rows + [("note", str(note)) for note in facts.notes if note]


def _gather(mine: tuple[str, str, str, str, int]) -> list[tuple[str, str, str, str, int]]:
    return [tuple(each) for each in all_gather_json(mine)]
