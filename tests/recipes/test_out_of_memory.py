"""Memory that really runs out: status oom in result.json, whoever noticed it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.recipes.launching import TWO, Bench

MIB = 2**20


def status(run_dir: Path) -> str:
    return json.loads((run_dir / "result.json").read_text())["status"]


def under_limit(mib: int) -> tuple[str, ...]:
    """A command whose processes may map this much memory each."""
    return ("sh", "-c", f'ulimit -v {mib * 1024} && exec "$@"', "sh", sys.executable)


def test_an_allocation_beyond_the_limit_of_a_process(bench: Bench) -> None:
    bench.write(f"if RANK == int(os.environ['WORLD_SIZE']) - 1:\n    bytearray({2048 * MIB})\ntime.sleep(600)")
    for processes in ("1", "2"):
        done = bench.start(
            f"cluster.procs_per_node={processes}", f"run.dir={processes}", command=under_limit(1024)
        ).wait()
        assert (done.status, status(bench.folder / processes)) == (1, "oom"), done.errors


def test_torch_beyond_the_limit_of_a_process(bench: Bench) -> None:
    bench.write("import torch\ntorch.ones(2**38)")
    done = bench.start("run.dir=mine", command=under_limit(32 * 1024)).wait()
    assert "can't allocate memory" in done.errors
    assert (done.status, status(bench.folder / "mine")) == (1, "oom")


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group of at most 128 MiB."""
    parents = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
    for parent, limits in zip(parents, (("memory.limit_in_bytes",), ("memory.max", "memory.swap.max")), strict=True):
        group = parent / f"meshbook_test_{os.getpid()}"
        try:
            group.mkdir()
            for limit in limits:
                (group / limit).write_text("0" if "swap" in limit else str(128 * MIB))
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("control groups with a limit of memory cannot be made here")


def test_a_rank_that_the_kernel_kills_for_memory(bench: Bench, memory_group: Path) -> None:
    bench.write(f"""
        if RANK == 1:
            taken = b"x" * {512 * MIB}
        time.sleep(600)
    """)
    command = ("sh", "-c", f'echo $$ > {memory_group}/cgroup.procs && exec "$@"', "sh", sys.executable)
    done = bench.start(TWO, "cluster.oversubscribe=true", "run.dir=mine", command=command).wait()
    assert "rank 1 was ended by SIGKILL" in done.errors
    assert (done.status, status(bench.folder / "mine")) == (1, "oom")
    bench.assert_nobody_left()
