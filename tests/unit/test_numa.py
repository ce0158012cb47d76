"""Binding to the NUMA node of a GPU, with a file system of a machine with two sockets."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from components.distributed.process.environment import bind_to_gpu

CUDA = torch.device("cuda", 3)
SOCKETS = {0: "0-3,8-11\n", 1: "4-7,12-15\n"}
ALL = frozenset(range(16))


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """CPUs of the main thread 10, of thread 11 and of thread 12, which is bound to one CPU already."""
    threads: dict[int, set[int]] = {10: set(ALL), 11: set(ALL), 12: {2}}
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: threads[thread or 10])
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: threads.update({thread: set(cpus)}))
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return threads


def machine(root: Path, numa_node: int = 1) -> Path:
    gpu = root / "sys/bus/pci/devices/0000:dc:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(f"{numa_node}\n")
    for node, cpus in SOCKETS.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    for thread in (10, 11, 12):
        (root / f"proc/self/task/{thread}").mkdir(parents=True)
    return root


def test_all_threads_are_bound_to_the_node_of_the_gpu(tmp_path: Path, bound: dict[int, set[int]]) -> None:
    assert "the 8 of NUMA node 1" in bind_to_gpu(CUDA, machine(tmp_path))
    assert bound == {10: {4, 5, 6, 7, 12, 13, 14, 15}, 11: {4, 5, 6, 7, 12, 13, 14, 15}, 12: {2}}
    assert bind_to_gpu(CUDA, tmp_path) == ""  # already within the node


def test_cpus_that_the_job_may_not_use_are_left_out(tmp_path: Path, bound: dict[int, set[int]]) -> None:
    bound[10] = bound[11] = {0, 1, 6, 7}
    assert "the 2 of NUMA node 1" in bind_to_gpu(CUDA, machine(tmp_path))
    assert bound[10] == {6, 7}


def test_nothing_is_bound_without_a_gpu_or_a_node(
    tmp_path: Path, bound: dict[int, set[int]], caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(bound)
    assert bind_to_gpu(torch.device("cpu"), machine(tmp_path / "cpu")) == ""
    assert bind_to_gpu(CUDA, machine(tmp_path / "one", numa_node=-1)) == ""
    assert bind_to_gpu(CUDA, tmp_path / "empty") == ""
    assert bound == before
    bound[10] = bound[11] = {0, 1}
    with caplog.at_level(logging.WARNING):
        assert bind_to_gpu(CUDA, machine(tmp_path / "elsewhere")) == ""
    assert bound[10] == {0, 1}
    assert "may not use any CPU of NUMA node 1, which GPU 0000:dc:00.0" in caplog.text
