"""What a private run of two ranks leaves and opens is its owner's alone: no secret in a file, modes, sockets.

Started by our launcher and by torchrun, with umask 000, a wandb that keeps its files here, a rank that is killed, a
disk that fails once, a resume, and an export.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import pytest

from tests.distributed.forked_runs import Attempt, descendants, until
from tests.distributed.test_checkpoint_kills import saving_run
from tests.recipes.test_no_secret_is_written import CANARY, HELD, files_with

TORTURE = os.environ.get("MESHBOOK_TORTURE") == "1"

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as /proc/net/tcp and tcp6 have them."""
STARTS = [
    ("kill:before_rename:rank0:2", 1),
    ("eio:after_shards:rank1:2", 1),
    ("", 0),
]
"""MESHBOOK_FAULT of each start of the same command, and how it ends."""


@pytest.mark.parametrize("elastic", [False, *([True] if TORTURE else [])])
def test_nobody_else_learns_anything(elastic: bool, tmp_path: Path) -> None:
    command = saving_run(tmp_path, "run", elastic)
    replaced = ("checkpoint.export", "logging.wandb.mode")
    command.arguments = [each for each in command.arguments if not each.startswith(replaced)]
    command.arguments += ["logging.wandb.mode=offline", "checkpoint.export=true", "run.private=true"]
    listening: set[str] = set()
    before = os.umask(0)
    try:
        for fault, status in STARTS:
            attempt = command.start(HELD | {"MESHBOOK_FAULT": fault})
            listening |= watched(attempt, elastic)
            assert attempt.status == status, attempt.said()
            assert not any(secret in attempt.said() for secret in (CANARY, *HELD.values()))
    finally:
        os.umask(before)

    assert "0100007F" in listening, "nothing was seen to listen at all"
    assert listening <= LOOPBACK
    for secret in (CANARY, *HELD.values()):
        assert files_with(command.run_dir, secret) == set()
    assert files_with(command.run_dir, "model_type") >= {"config.yaml", "export"}, "the search finds nothing"
    entries = [command.run_dir, *command.run_dir.rglob("*")]
    kinds = {entry.relative_to(command.run_dir).parts[0] for entry in entries[1:]}
    assert kinds >= {"checkpoints", "export", "wandb", "logs", "config.yaml", "metrics.jsonl", "result.json", ".lock"}
    open_to_others = {
        str(entry): oct(entry.stat().st_mode)
        for entry in entries
        if not entry.is_symlink() and stat.S_IMODE(entry.stat().st_mode) != (0o700 if entry.is_dir() else 0o600)
    }
    assert open_to_others == {}


def watched(attempt: Attempt, elastic: bool) -> set[str]:
    """Addresses on which the run's processes listen, from now to its end.

    Under torchrun not what its agent listens on, which is the person's own: the ranks, forked here, have that open too.
    """
    listening: dict[str, str] = {}
    agent: set[str] = set()

    def ended() -> bool:
        pids = descendants(attempt.pid)
        if elastic:
            agent.update(opened(attempt.pid))
        else:
            pids.append(attempt.pid)
        addresses = listening_sockets()
        listening.update({each: addresses[each] for pid in pids for each in opened(pid) & addresses.keys()})
        return attempt.poll() is not None

    until(ended, 120, attempt.said)
    return {address for socket, address in listening.items() if socket not in agent}


def listening_sockets() -> dict[str, str]:
    """Every socket of this machine that listens now, by its name in /proc/PID/fd, with its address."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]": row[1].split(":")[0] for row in rows if row[3] == "0A"}


def opened(pid: int) -> set[str]:
    """What a process has open."""
    found = set()
    with contextlib.suppress(OSError):  # it has ended
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(os.readlink(entry.path))
    return found
