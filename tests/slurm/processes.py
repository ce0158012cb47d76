"""Processes of this machine, read from /proc."""

from __future__ import annotations

from pathlib import Path


def all_commands() -> dict[int, list[str]]:
    """Return the command line of every living process that has one (kernel threads and zombies have none)."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            line = _read(entry / "cmdline")
            if line:
                found[int(entry.name)] = line.rstrip("\0").split("\0")
    return found


def descendants(ancestor: int) -> dict[int, list[str]]:
    """Return the command lines of all living descendants; for an init, everything in its PID namespaces."""
    commands = all_commands()
    parents = {process: _parent(process) for process in commands}

    def descends(process: int) -> bool:
        while process in parents:
            process = parents[process]
            if process == ancestor:
                return True
        return False

    return {process: command for process, command in commands.items() if descends(process)}


def is_init(process: int) -> bool:
    """Whether the process is process 1 of a nested PID namespace."""
    for line in _read(Path(f"/proc/{process}/status")).splitlines():
        if line.startswith("NSpid:"):
            return len(line.split()) > 2 and line.split()[-1] == "1"
    return False


def _parent(process: int) -> int:
    after_name = _read(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return int(after_name[1]) if after_name else 0


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""  # the process has ended meanwhile
