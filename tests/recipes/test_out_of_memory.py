"""Real out-of-memory failures are recorded as status oom in result.json, whatever detects them."""

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


def with_memory_limit(mib: int) -> tuple[str, ...]:
    """Return a command prefix that limits the address space of each process."""
    return ("sh", "-c", f'ulimit -v {mib * 1024} && exec "$@"', "sh", sys.executable)


def test_python_allocation_beyond_the_process_limit_is_oom(bench: Bench) -> None:
    bench.write(f"if RANK == int(os.environ['WORLD_SIZE']) - 1:\n    bytearray({2048 * MIB})\ntime.sleep(600)")
    for processes in ("1", "2"):
        done = bench.start(
            f"cluster.procs_per_node={processes}", f"run.dir={processes}", command=with_memory_limit(1024)
        ).wait()
        assert (done.status, status(bench.folder / processes)) == (1, "oom"), done.errors


def test_torch_allocation_beyond_the_process_limit_is_oom(bench: Bench) -> None:
    bench.write("import torch\ntorch.ones(2**38)")
    done = bench.start("run.dir=mine", command=with_memory_limit(32 * 1024)).wait()
    assert "can't allocate memory" in done.errors
    assert (done.status, status(bench.folder / "mine")) == (1, "oom")


@pytest.fixture
def limited_cgroup() -> Iterator[Path]:
    """A cgroup limited to 128 MiB."""
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
    pytest.skip("no cgroup with a memory limit can be created here")


def test_rank_killed_by_the_kernel_for_memory_is_oom(bench: Bench, limited_cgroup: Path) -> None:
    bench.write(f"""
        if RANK == 1:
            taken = b"x" * {512 * MIB}
        time.sleep(600)
    """)
    command = ("sh", "-c", f'echo $$ > {limited_cgroup}/cgroup.procs && exec "$@"', "sh", sys.executable)
    done = bench.start(TWO, "cluster.oversubscribe=true", "run.dir=mine", command=command).wait()
    assert "rank 1 was ended by SIGKILL" in done.errors
    assert (done.status, status(bench.folder / "mine")) == (1, "oom")
    bench.assert_no_process_left()
