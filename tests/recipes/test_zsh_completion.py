"""The completion script in an interactive zsh on a pseudo-terminal: what a person sees after the tab key."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITHIN = 60.0
"""Seconds within which zsh must answer."""
SETUP = (
    "show() { print -r -- \"<$BUFFER>\" }; zle -N show; bindkey '^B' show",  # prints the command line that is edited
    'eval "$(meshbook completion zsh)"',
    "print rea''dy",
)
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")

pytestmark = [
    pytest.mark.new_interpreter,
    pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh on PATH (Debian: zsh)"),
]


class Terminal:
    """A zsh without settings: nothing has called compinit."""

    def __init__(self, folder: Path) -> None:
        command = folder / "bin" / "meshbook"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshbook "$@"\n')
        command.chmod(0o755)
        variables = {
            **os.environ,
            "TERM": "xterm",
            "HOME": str(folder),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{command.parent}:{os.environ['PATH']}",
            "PS1": "> ",
        }
        self.process, self.keyboard = pty.fork()
        if self.process == 0:
            os.chdir(folder)
            os.execvpe("zsh", ["zsh", "-f", "-i"], variables)
        self.type("\n".join([*SETUP, ""]))
        self.started = self.read_until("ready\n")

    def type(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def read_until(self, text: str) -> str:
        """Return what is shown, without control sequences, once it contains `text`."""
        shown, deadline = "", time.monotonic() + WITHIN
        while text not in CONTROL.sub("", shown):
            ready, _, _ = select.select([self.keyboard], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"no {text!r} within {WITHIN:g} s: {shown!r}"
            shown += os.read(self.keyboard, 65536).decode(errors="replace")
        return CONTROL.sub("", shown)

    def after(self, keys: str) -> tuple[str, str]:
        """Type keys into an empty command line; return what is shown, and then the command line."""
        self.type(f"\x15{keys}\x02")
        shown = self.read_until(">\n")
        return shown, re.findall(r"<(.*)>\n", shown)[-1]

    def close(self) -> None:
        os.close(self.keyboard)
        os.waitpid(self.process, 0)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    (tmp_path / "mine.jsonl").touch()
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def test_zsh_completes_commands_keys_options_and_files(terminal: Terminal) -> None:
    """A space follows a command, a value and a file, but not a key or a section."""
    assert "command not found" not in terminal.started
    for typed, line in {
        "meshbook fine": "meshbook finetune ",
        "meshbook finetune optimizer.l": "meshbook finetune optimizer.lr=",
        "meshbook help train": "meshbook help training.",
        "meshbook finetune cluster.device=cp": "meshbook finetune cluster.device=cpu ",
        "meshbook finetune data=jsonl data.path=mi": "meshbook finetune data=jsonl data.path=mine.jsonl ",
    }.items():
        assert terminal.after(f"{typed}\t")[1] == line
    shown, _ = terminal.after("meshbook finetune model=tiny parallelism=fsdp2_tp\t\t")
    assert all(f"parallelism=fsdp2_{each}" in shown for each in ("tp2", "tp2_sp", "tp4"))
