"""A private run of two ranks is accessible to its owner only: no secrets in files, file modes, listening sockets.

The run is started by Meshbook's launcher and by torchrun with umask 000. It uses wandb offline, loses a rank, has one
disk error, resumes, and exports.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import pytest

from tests.distributed.forked_runs import Attempt, descendants, until
from tests.distributed.test_checkpoint_kills import saving_run
from tests.recipes.test_no_secret_is_written import CANARY, SECRETS, files_with
from tests.suites import in_torture

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 in the format of /proc/net/tcp and tcp6."""
STARTS = [
    ("kill:before_rename:rank0:2", 1),
    ("eio:after_shards:rank1:2", 1),
    ("", 0),
]
"""MESHBOOK_FAULT and expected exit status of each start of the same command."""


@in_torture
@pytest.mark.parametrize("elastic", [False, True])
def test_private_run_exposes_nothing_to_other_users(elastic: bool, tmp_path: Path) -> None:
    command = saving_run(tmp_path, "run", elastic)
    replaced = ("checkpoint.export", "logging.wandb.mode")
    command.arguments = [each for each in command.arguments if not each.startswith(replaced)]
    command.arguments += ["logging.wandb.mode=offline", "checkpoint.export=true", "run.private=true"]
    listening: set[str] = set()
    before = os.umask(0)
    try:
        for fault, status in STARTS:
            attempt = command.start(SECRETS | {"MESHBOOK_FAULT": fault})
            listening |= watch_listening_addresses(attempt, elastic)
            assert attempt.status == status, attempt.output()
            assert not any(secret in attempt.output() for secret in (CANARY, *SECRETS.values()))
    finally:
        os.umask(before)

    assert "0100007F" in listening, "no listening socket was found"
    assert listening <= LOOPBACK
    for secret in (CANARY, *SECRETS.values()):
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


def watch_listening_addresses(attempt: Attempt, elastic: bool) -> set[str]:
    """Return the addresses on which the run's processes listen until it ends.

    Sockets of torchrun's agent are excluded, although the ranks, which are forked here, inherit them.
    """
    listening: dict[str, str] = {}
    agent: set[str] = set()

    def ended() -> bool:
        pids = descendants(attempt.pid)
        if elastic:
            agent.update(open_files(attempt.pid))
        else:
            pids.append(attempt.pid)
        addresses = listening_sockets()
        listening.update({each: addresses[each] for pid in pids for each in open_files(pid) & addresses.keys()})
        return attempt.poll() is not None

    until(ended, 120, attempt.output)
    return {address for socket, address in listening.items() if socket not in agent}


def listening_sockets() -> dict[str, str]:
    """Return the address of every listening socket of this machine, by its name in /proc/PID/fd."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]": row[1].split(":")[0] for row in rows if row[3] == "0A"}


def open_files(pid: int) -> set[str]:
    """Return the link targets of a process's open file descriptors."""
    found = set()
    with contextlib.suppress(OSError):  # the process has ended
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(os.readlink(entry.path))
    return found
