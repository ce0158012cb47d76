"""Detection of out-of-memory failures, and the usable memory of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from components.protocol.failures import Kind, failure_status, is_out_of_memory
from components.protocol.processes import killed_for_memory, usable_memory

ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:129] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4398046511104 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error_type", "message"),
    [
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("MemoryError", ""),
        ("_ArrayMemoryError", "Unable to allocate 8.00 TiB"),
        ("RuntimeError", ALLOCATOR),
        ("RuntimeError", "CUDA error: out of memory"),
        ("OSError", "[Errno 12] Cannot allocate memory"),
        ("RuntimeError", "std::bad_alloc"),
    ],
)
def test_out_of_memory_errors_are_recognized(error_type: str, message: str) -> None:
    assert is_out_of_memory(error_type, message)
    assert failure_status(Kind.exception, error_type, message) == "oom"


@pytest.mark.parametrize(
    ("error_type", "message"),
    [
        ("RuntimeError", "shape '[2, 3]' is invalid for input of size 5"),
        ("ValueError", "this text is about programs that ran out of memory"),
        ("PeerFailure", "rank 1 was ended by SIGKILL (out of memory, or killed by a person)"),
        ("OSError", "[Errno 2] No such file or directory"),
    ],
)
def test_other_errors_are_not_out_of_memory(error_type: str, message: str) -> None:
    assert failure_status(Kind.exception, error_type, message) == "failed"


def write_files(root: Path, **files: str) -> Path:
    for name, text in files.items():
        file = root / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("lines", "counter"),
    [
        ("0::/user/job_7\n", "sys/fs/cgroup/user/job_7/memory.events"),
        ("0::/hidden/by/the/container\n", "sys/fs/cgroup/memory.events"),
        ("5:cpu:/\n4:hugetlb,memory:/slurm/job_7\n0::/\n", "sys/fs/cgroup/memory/slurm/job_7/memory.oom_control"),
        ("4:memory:/hidden\n", "sys/fs/cgroup/memory/memory.oom_control"),
    ],
)
def test_out_of_memory_kills_are_read_from_the_cgroup_of_the_process(tmp_path: Path, lines: str, counter: str) -> None:
    write_files(tmp_path, proc__self__cgroup=lines, proc__vmstat="oom_kill 99\n")
    assert killed_for_memory(tmp_path) == 99  # the cgroup has no counter yet
    (tmp_path / counter).parent.mkdir(parents=True)
    (tmp_path / counter).write_text("max 12\noom 4\noom_kill 3\n")
    assert killed_for_memory(tmp_path) == 3


def test_out_of_memory_kills_are_zero_without_any_counter(tmp_path: Path) -> None:
    assert killed_for_memory(tmp_path) == 0


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc__self__cgroup": "0::/job\n", "sys__fs__cgroup__job__memory.max": "1073741824\n"}, 2**30),
        ({"proc__self__cgroup": "0::/job\n", "sys__fs__cgroup__job__memory.max": "max\n"}, None),
        ({"proc__self__cgroup": "4:memory:/j\n", "sys__fs__cgroup__memory__j__memory.limit_in_bytes": "4096"}, 4096),
        ({"proc__self__cgroup": "4:memory:/j\n", "sys__fs__cgroup__memory__memory.limit_in_bytes": str(2**63)}, None),
        (  # Slurm limits the job and the step, which are parents of the task
            {
                "proc__self__cgroup": "0::/job_7/step_0/user/task_0\n",
                "sys__fs__cgroup__job_7__memory.max": "4096\n",
                "sys__fs__cgroup__job_7__step_0__memory.max": "8192\n",
                "sys__fs__cgroup__job_7__step_0__user__task_0__memory.max": "max\n",
            },
            4096,
        ),
        ({"proc__self__cgroup": "4:memory:/j/s\n", "sys__fs__cgroup__memory__j__memory.limit_in_bytes": "4096"}, 4096),
    ],
)
def test_usable_memory_is_limited_by_the_cgroup(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert usable_memory(write_files(tmp_path, **files)) == (expected or total)
