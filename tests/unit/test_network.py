"""Network variables, seeds and eval shards, compared with NeMo AutoModel's utils and KempnerForge's setup.

Each docstring names the published function and the weakness that the test covers.
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
from components.config.schema.parallelism import ParallelismConfig, Strategy
from components.distributed import init, utils
from components.distributed.process import environment as network
from components.distributed.process.groups import stream
from components.protocol.errors import ConfigError
from tests.distributed import published
from tests.distributed.contrast import alone, both_implementations, contrast
from tests.harness import run_ranks


def single(
    implementation: str, check: Callable[[Any], None], ours: Any, published: Any, symptom: str, **variables: str
) -> None:
    """Run a check in one process whose only launcher variables are these."""
    contrast(
        implementation,
        lambda rank, implementation: check(implementation),
        ours,
        published,
        symptom=symptom,
        world_size=1,
        init=False,
        env=alone(**variables),
    )


def _fake_ip(folder: Path, output: str, status: int = 0) -> str:
    """Create a fake `ip` command that prints `output`; return a PATH that starts with its folder."""
    command = folder / "ip"
    command.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit {status}\n")
    command.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@both_implementations
def test_ib_child_interface_is_returned_without_parent_suffix(implementation: str, tmp_path: Path) -> None:
    """KempnerForge _detect_ib_interface: ib0.8001@ib0 was returned with its suffix."""
    path = _fake_ip(
        tmp_path, "lo UNKNOWN 127.0.0.1/8\nib1 DOWN\nib2 UP\nib0.8001@ib0 UP 10.0.0.1/24\neth0 UP 10.1.0.1/24"
    )

    def check(detect: Callable[[], Any]) -> None:
        assert detect() == "ib0.8001"

    single(implementation, check, init._detect_ib_interface, published._detect_ib_interface, "ib0.8001@ib0", PATH=path)


def test_roce_interface_is_detected() -> None:
    """KempnerForge _detect_ib_interface: RoCE interfaces were missed."""
    output = "lo UNKNOWN 127.0.0.1/8\neth0 UP 10.1.0.1/24\nens9 UP 10.2.0.1/24\n\n"
    assert network.first_rdma_interface(output, {"ens9"}) == "ens9"
    assert network.first_rdma_interface(output + "ibp3 UP 10.3.0.1/24\n", {"ens9"}) == "ibp3"
    assert network.first_rdma_interface(output, set()) is None


def test_failing_ip_command_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KempnerForge _detect_ib_interface: all errors were swallowed."""
    monkeypatch.setenv("PATH", _fake_ip(tmp_path, "ib0 UP 10.0.0.1/24", status=2))
    assert init._detect_ib_interface() is None
    assert "`ip -br addr` failed" in caplog.text


@both_implementations
@pytest.mark.parametrize("interface", ["^lo,docker", "=lo"])
def test_nccl_interface_syntax_is_not_passed_to_gloo(implementation: str, interface: str) -> None:
    """KempnerForge _set_nccl_env: gloo failed with "Unable to find address for: ^lo"."""

    def check(set_nccl_env: Callable[[], None]) -> None:
        set_nccl_env()
        assert os.environ["NCCL_SOCKET_IFNAME"] == interface
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    variables = {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": ""}
    environment = alone(**variables)

    def with_no_gloo_name(rank: int) -> dict[str, str | None]:
        return {**environment(rank), "GLOO_SOCKET_IFNAME": None}

    contrast(
        implementation,
        lambda rank, implementation: check(implementation),
        init._set_nccl_env,
        published._set_nccl_env,
        symptom="(?i)unable to find address|interface",
        world_size=1,
        init=False,
        env=with_no_gloo_name,
    )


@both_implementations
def test_rdma_settings_require_an_rdma_interface(implementation: str, tmp_path: Path) -> None:
    """KempnerForge _set_nccl_env: NCCL_NET_GDR_LEVEL was set even without InfiniBand."""
    without_ib = _fake_ip(tmp_path, "lo UNKNOWN 127.0.0.1/8\neth0 UP 10.0.0.1/24")

    def check(set_nccl_env: Callable[[], None]) -> None:
        set_nccl_env()
        assert not {"NCCL_NET_GDR_LEVEL", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME"} & set(os.environ)
        _fake_ip(tmp_path, "ib0 UP 10.0.0.1/24")
        set_nccl_env()
        names = ("NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_NET_GDR_LEVEL", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
        assert [os.environ[name] for name in names] == ["ib0", "0", "2", "1"]

    single(implementation, check, init._set_nccl_env, published._set_nccl_env, "AssertionError", PATH=without_ib)


def test_plain_interface_name_is_shared_with_gloo_and_set_values_are_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """KempnerForge _set_nccl_env: gloo gets the same interface; disabled NCCL error handling logs a warning."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "x")  # so that monkeypatch restores it
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    init._set_nccl_env()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "a stuck collective hangs" in caplog.text


def _network_address() -> str | None:
    """Return a non-loopback address of this machine. A UDP connect sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]


@pytest.mark.parametrize("over_the_network", [True, False])
def test_recipe_ranks_get_nccl_settings_only_for_network_rendezvous(over_the_network: bool, tmp_path: Path) -> None:
    """The contract of conf/network/auto.yaml. Ranks that rendezvous over loopback need no NCCL settings."""
    address = _network_address() if over_the_network else "127.0.0.1"
    if address is None:
        pytest.skip("this machine has only a loopback address")
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


@both_implementations
@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_invalid_for_numpy_leaves_torch_unseeded(implementation: str, seed: int) -> None:
    """KempnerForge _set_seed: numpy raised ValueError after torch had already been seeded."""

    def check(set_seed: Callable[..., None]) -> None:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        with pytest.raises(ValueError):
            set_seed(seed, rank=0)
        assert torch.equal(torch.get_rng_state(), before), "torch was seeded"
        with pytest.raises(ConfigError, match=f"run.seed={seed}: with pipeline rank 0 it must lie between 0"):
            set_seed(seed, rank=0)

    single(implementation, check, init._set_seed, published._set_seed, "torch was seeded")


def test_generators_agree_within_a_pipeline_stage_and_differ_between_stages() -> None:
    """KempnerForge _set_seed."""

    def draw(**ranks: int) -> tuple[float, float, float]:
        init._set_seed(42, **ranks)
        return torch.rand(()).item(), random.random(), float(np.random.random())

    def check(rank: int) -> bool:
        first = draw(rank=0)
        assert first == draw(rank=5)
        assert not set(first) & set(draw(rank=0, pp_rank=1))
        return first == (torch.rand((), generator=torch.Generator().manual_seed(42)).item(), *first[1:])

    assert run_ranks(1, check, init=False) == [True]


def test_random_streams_differ_per_rank_coordinates() -> None:
    """KempnerForge _set_seed: no distinct stream per rank, e.g. for augmentation over dp, dropout over tp."""

    def draw(*coordinates: int) -> tuple[float, ...]:
        return tuple(torch.rand(4, generator=stream(42, *coordinates)).tolist())

    coordinates = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (12, 3), (1, 23), (2**40,)]
    assert len({draw(*each) for each in coordinates}) == len(coordinates)
    assert draw(1, 0) == draw(1, 0)
    assert draw(1) != tuple(torch.rand(4, generator=stream(43, 1)).tolist())


@both_implementations
def test_eval_shard_depends_on_strategy_not_on_config_class(implementation: str) -> None:
    """NeMo AutoModel dp_eval_sample_shard: the decision was an isinstance check of a config class."""

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

    single(implementation, check, utils.dp_eval_sample_shard, published.dp_eval_sample_shard, r"None == \(3, 4\)")
