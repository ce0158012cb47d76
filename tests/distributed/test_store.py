"""The store of a batch job: ranks find it through a file of the user, and port scanners get no response."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from components.distributed.process import rendezvous
from components.distributed.process.process_group import start_process_group
from components.json_collectives import all_gather_json, broadcast_json
from components.protocol.processes import reserve_loopback_port
from components.watch.heartbeat import Heartbeat
from tests.harness import run_ranks, start_ranks

NODE_ADDRESS = "127.0.0.2"
"""Address at which other nodes reach this one; they cannot reach 127.0.0.1."""


def batch_job(file: Path) -> dict[str, str | None]:
    """Return the environment variables of a rank of a two-node job."""
    return {"MESHBOOK_STORE_FILE": str(file), "SLURM_NNODES": "2", "MASTER_PORT": None, "MASTER_ADDR": "n1"}


def listening() -> list[tuple[str, int]]:
    """Return the addresses and ports on which this process listens."""
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    inodes = {os.readlink(link) for link in links if os.path.islink(link)}
    fields = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    mine = [each[1].split(":") for each in fields if each[3] == "0A" and f"socket:[{each[9]}]" in inodes]
    return [(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in mine]


def responds(address: str, port: int) -> bool:
    """Whether a port responds to a plain TCPStore client without the secret."""
    try:
        soon = timedelta(seconds=1)
        client = dist.TCPStore(address, port, is_master=False, timeout=soon, wait_for_workers=False)
        return client.num_keys() > 0
    except (dist.DistError, RuntimeError):
        return False


def test_ranks_of_a_batch_job_connect_through_the_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_node_addresses", lambda: [NODE_ADDRESS])
    file, opened = tmp_path / "store.json", list[tuple[str, int]]()

    def recorded(opens: Callable[..., int], address: str | None) -> Callable[..., int]:
        def record(at: str, *arguments: Any) -> int:
            opened.append((address or at, opens(at, *arguments)))
            return opened[-1][1]

        return record

    monkeypatch.setattr(rendezvous, "open_gateway", recorded(rendezvous.open_gateway, None))
    monkeypatch.setattr(rendezvous, "_open_local_proxy", recorded(rendezvous._open_local_proxy, "127.0.0.1"))

    def check(rank: int) -> None:
        info = start_process_group("cpu", rendezvous_timeout=timedelta(seconds=60))
        value = torch.ones(1)
        dist.all_reduce(value)
        assert (info.world_size, value.item()) == (2, 2.0)
        assert rank in Heartbeat.join("here").posts()  # uses a separate connection
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert set(opened) <= set(listening())
        assert not [address for address, _ in listening() if address == "0.0.0.0"]
        gates, doors = all_gather_json(opened)
        assert [address for address, _ in (*gates, *doors)] == [NODE_ADDRESS, "127.0.0.1"]
        assert not any(responds(address, port) for address, port in (doors if rank == 0 else gates))
        idle = [socket.create_connection(tuple(gate)) for gate in gates]  # idle connections do not block others
        again = dist.distributed_c10d._get_default_store().clone()
        again.set(f"after/{rank}", "x")
        assert all_gather_json(len(idle)) == [1, 1]

    run_ranks(2, check, env=lambda rank: batch_job(file), init=False)


def test_missing_rank_zero_is_reported(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        if rank == 1:
            start_process_group("cpu", rendezvous_timeout=timedelta(seconds=1))

    outcomes = start_ranks(2, check, env=lambda rank: batch_job(tmp_path / "store.json"), init=False)
    assert outcomes[0].ok
    assert outcomes[1].exception
    assert f"rank 0 did not write its store's address to {tmp_path / 'store.json'}" in outcomes[1].exception


VALUES = [None, "Grüße\0", ["é" * 70_000, 1.5], {"": [True, float("inf")], "b": {}}]


def test_values_are_exchanged_as_json_without_pickle() -> None:
    def check(rank: int) -> None:
        def refuse(*_: object) -> None:
            raise AssertionError("an object was pickled")

        for name in ("_object_to_tensor", "_tensor_to_object"):
            setattr(dist.distributed_c10d, name, refuse)
        for group in (None, dist.new_group([0, 1], backend="gloo")):
            assert all_gather_json(VALUES[rank], group) == VALUES[:2]
            assert all_gather_json(VALUES[2 + rank], group) == VALUES[2:]
            assert broadcast_json(VALUES[2 * rank], src=1, group=group) == VALUES[2]
        with pytest.raises(TypeError):
            all_gather_json(object())

    run_ranks(2, check)


def test_package_does_not_exchange_pickled_objects() -> None:
    """Except for the public object collectives of OLMo-core `utils`, which nothing calls."""
    components = Path(rendezvous.__file__).parents[2]
    facade = {components / "distributed" / name for name in ("collectives.py", "utils.py", "__init__.py")}
    calls = ("all_gather_object", "broadcast_object", "gather_object", "scatter_object", "send_object", "recv_object")
    found = [
        file
        for folder in (components, components.parent / "recipes", components.parent / "scripts")
        for file in folder.rglob("*.py")
        if file not in facade and any(call in file.read_text() for call in calls)
    ]
    assert found == []


def test_no_other_process_takes_a_reserved_port_before_rank_zero_serves_the_store() -> None:
    """A port that was only looked up is free again, and another process may take it while the ranks start."""
    with reserve_loopback_port() as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        store = rendezvous._connect("127.0.0.1", port, 0, 1, timedelta(seconds=10))
        store.set("served", "yes")
        client = rendezvous._connect("127.0.0.1", port, 1, 1, timedelta(seconds=10))
        assert client.get("served") == b"yes"
