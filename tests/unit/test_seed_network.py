"""Network variables, seeds and evaluation shards (seed pages 001 and 003): ours against the published behaviour.

Each docstring names the line of SEED_NOTES that it answers, as section.item or section (function).
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from components import distributed
from components.config.errors import ConfigError
from components.config.schema.parallelism import ParallelismConfig, Strategy
from components.distributed import init, utils
from components.distributed.process import network
from components.distributed.process.seeding import stream
from tests.distributed import published
from tests.distributed.contrast import alone, both_sides, contrast
from tests.harness import run_ranks


def single(side: str, check: Callable[[Any], None], ours: Any, published: Any, symptom: str, **variables: str) -> None:
    """Run a check in one process that has these variables and no other of a launcher."""
    contrast(
        side,
        lambda rank, implementation: check(implementation),
        ours,
        published,
        symptom=symptom,
        world_size=1,
        init=False,
        env=alone(**variables),
    )


def _fake_ip(folder: Path, output: str, status: int = 0) -> str:
    """Put an `ip` on the PATH that prints this; returns the PATH."""
    command = folder / "ip"
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {status}\n")
    command.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@both_sides
def test_a_child_interface_is_named_without_its_parent(side: str, tmp_path: Path) -> None:
    """SEED_NOTES 4 (_detect_ib_interface): ib0.8001@ib0 was returned with its suffix."""
    path = _fake_ip(
        tmp_path, "lo UNKNOWN 127.0.0.1/8\nib1 DOWN\nib2 UP\nib0.8001@ib0 UP 10.0.0.1/24\neth0 UP 10.1.0.1/24"
    )

    def check(detect: Callable[[], Any]) -> None:
        assert detect() == "ib0.8001"

    single(side, check, init._detect_ib_interface, published._detect_ib_interface, "ib0.8001@ib0", PATH=path)


def test_rdma_over_ethernet_is_seen() -> None:
    """SEED_NOTES 4 (_detect_ib_interface): RoCE interfaces were not."""
    shown = "lo UNKNOWN 127.0.0.1/8\neth0 UP 10.1.0.1/24\nens9 UP 10.2.0.1/24\n\n"
    assert network.first_rdma_interface(shown, {"ens9"}) == "ens9"
    assert network.first_rdma_interface(shown + "ibp3 UP 10.3.0.1/24\n", {"ens9"}) == "ibp3"
    assert network.first_rdma_interface(shown, set()) is None


def test_a_failing_ip_command_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SEED_NOTES 4 (_detect_ib_interface): everything was swallowed."""
    monkeypatch.setenv("PATH", _fake_ip(tmp_path, "ib0 UP 10.0.0.1/24", status=2))
    assert init._detect_ib_interface() is None
    assert "`ip -br addr` failed" in caplog.text


@both_sides
@pytest.mark.parametrize("stated", ["^lo,docker", "=lo"])
def test_the_interface_syntax_of_nccl_does_not_reach_gloo(side: str, stated: str) -> None:
    """SEED_NOTES 4 (_set_nccl_env), 7 (15), 8.9: gloo died with "Unable to find address for: ^lo"."""

    def check(set_nccl_env: Callable[[], None]) -> None:
        set_nccl_env()
        assert os.environ["NCCL_SOCKET_IFNAME"] == stated
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    variables = {"NCCL_SOCKET_IFNAME": stated, "GLOO_SOCKET_IFNAME": ""}
    environment = alone(**variables)

    def with_no_gloo_name(rank: int) -> dict[str, str | None]:
        return {**environment(rank), "GLOO_SOCKET_IFNAME": None}

    contrast(
        side,
        lambda rank, implementation: check(implementation),
        init._set_nccl_env,
        published._set_nccl_env,
        symptom="(?i)unable to find address|interface",
        world_size=1,
        init=False,
        env=with_no_gloo_name,
    )


@both_sides
def test_no_rdma_no_rdma_settings(side: str, tmp_path: Path) -> None:
    """SEED_NOTES 4 (_set_nccl_env): NCCL_NET_GDR_LEVEL was pinned without InfiniBand. With it, page 003 holds."""
    without_ib = _fake_ip(tmp_path, "lo UNKNOWN 127.0.0.1/8\neth0 UP 10.0.0.1/24")

    def check(set_nccl_env: Callable[[], None]) -> None:
        set_nccl_env()
        assert not {"NCCL_NET_GDR_LEVEL", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME"} & set(os.environ)
        _fake_ip(tmp_path, "ib0 UP 10.0.0.1/24")
        set_nccl_env()
        names = ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
        assert [os.environ[name] for name in names] == ["ib0", "0", "2", "1"]

    single(side, check, init._set_nccl_env, published._set_nccl_env, "AssertionError", PATH=without_ib)


def test_one_plain_interface_name_is_shared_and_stated_values_stay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Seed page 003 (_set_nccl_env): gloo gets the name of a real interface; a disabled error handling is warned of."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x")  # so that monkeypatch puts it back
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    init._set_nccl_env()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "a stuck collective hangs" in caplog.text


def _own_address() -> str | None:
    """An address of this machine that is not its loopback's; the socket connects nowhere."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]


@pytest.mark.parametrize("over_the_network", [True, False])
def test_ranks_of_recipes_get_the_settings_where_they_meet_over_the_network(
    over_the_network: bool, tmp_path: Path
) -> None:
    """What conf/network/auto.yaml promises. Ranks of one machine, which meet on its loopback interface, need none."""
    address = _own_address() if over_the_network else "127.0.0.1"
    if address is None:
        pytest.skip("this machine has no address but its loopback's")
    path = _fake_ip(tmp_path, "ib0 UP 10.0.0.1/24")
    names = ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL", "TORCH_NCCL_ASYNC_ERROR_HANDLING")

    def check(rank: int) -> list[str | None]:
        distributed.start_process_group("cpu")
        dist.barrier()
        return [os.environ.get(name) for name in names]

    def environment(rank: int) -> dict[str, str | None]:
        return {"MASTER_ADDR": address, "PATH": path, "NCCL_NET_GDR_LEVEL": "5", **dict.fromkeys(names[:2])}

    expected = ["ib0", "0", "5", "3"] if over_the_network else [None, None, "5", None]
    assert run_ranks(2, check, init=False, env=environment) == [expected] * 2


@both_sides
@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_refuses_touches_nothing(side: str, seed: int) -> None:
    """SEED_NOTES 4 (_set_seed): numpy's ValueError came after torch was seeded already."""

    def check(set_seed: Callable[..., None]) -> None:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        with pytest.raises(ValueError):
            set_seed(seed, rank=0)
        assert torch.equal(torch.get_rng_state(), before), "torch was seeded"
        with pytest.raises(ConfigError, match=f"run.seed={seed}: with pipeline rank 0 it must lie between 0"):
            set_seed(seed, rank=0)

    single(side, check, init._set_seed, published._set_seed, "torch was seeded")


def test_all_generators_are_seeded_alike_on_a_stage_and_unlike_between_stages() -> None:
    """Seed page 003 (_set_seed)."""

    def drawn(**ranks: int) -> tuple[float, float, float]:
        init._set_seed(42, **ranks)
        return torch.rand(()).item(), random.random(), float(np.random.random())

    def check(rank: int) -> bool:
        first = drawn(rank=0)
        assert first == drawn(rank=5)
        assert not set(first) & set(drawn(rank=0, pp_rank=1))
        return first == (torch.rand((), generator=torch.Generator().manual_seed(42)).item(), *first[1:])

    assert run_ranks(1, check, init=False) == [True]


def test_streams_of_a_ranks_own() -> None:
    """SEED_NOTES 4 (_set_seed): no distinct stream was offered, for augmentation by dp or dropout over tp."""

    def drawn(*coordinates: int) -> tuple[float, ...]:
        return tuple(torch.rand(4, generator=stream(42, *coordinates)).tolist())

    coordinates = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (12, 3), (1, 23), (2**40,)]
    assert len({drawn(*place) for place in coordinates}) == len(coordinates)
    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1) != tuple(torch.rand(4, generator=stream(43, 1)).tolist())


@both_sides
def test_what_decides_is_the_strategy_not_a_class(side: str) -> None:
    """SEED_NOTES 2 (dp_eval_sample_shard): decided by isinstance of a config class."""

    @dataclass
    class Foreign:
        strategy: str = "ddp"

    def check(shard: Callable[..., Any]) -> None:
        ddp = ParallelismConfig(strategy=Strategy.ddp, dp_replicate=4, dp_shard=1)
        assert shard(ddp, 3, 4) == (3, 4)
        assert shard(Foreign(), 1, 2) == (1, 2)
        assert shard(ddp, 0, 1) is None
        assert shard(ParallelismConfig(strategy=Strategy.fsdp2), 3, 4) is None
        for wrong in ((ddp, 4, 4), (object(), 0, 2)):
            with pytest.raises(ConfigError):
                shard(*wrong)

    single(side, check, utils.dp_eval_sample_shard, published.dp_eval_sample_shard, r"None == \(3, 4\)")
