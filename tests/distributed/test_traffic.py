"""Recorded traffic of collectives on gloo ranks against sizes computed by hand, and the groups of a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # functional collectives import it; import it once, before ranks are forked
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from components import distributed, training
from components.config.schema import LoggingConfig, ParallelismConfig
from components.distributed.mesh import Mesh, groups_of_mesh
from components.models import compile_layers, use_causal_sdpa
from components.observability import Reporter
from components.training.step_cost import StepTraffic, Traffic, TrafficRow, record_traffic
from tests.distributed.parity import Case, build, micro_batches
from tests.harness import run_ranks
from tests.suites import in_parity

FSDP2 = {"strategy": "fsdp2", "dp_shard": -1}
HSDP = {"strategy": "fsdp2", "dp_shard": 2, "dp_replicate": -1}
DDP = {"strategy": "ddp", "dp_shard": 1, "dp_replicate": -1}
FSDP2_TP2 = {"strategy": "fsdp2", "dp_shard": -1, "tp": 2}
CP2 = {"strategy": "fsdp2", "dp_shard": -1, "cp": 2}
CP2_GATHERED = {**CP2, "cp_attention": "all_gather"}
PP2 = {"strategy": "fsdp2", "dp_shard": -1, "pp": 2}
PP2_TP2 = {"strategy": "fsdp2", "dp_shard": 1, "pp": 2, "tp": 2}
EP2 = {"strategy": "fsdp2", "dp_shard": -1, "ep": 2}
EP2_TP2 = {"strategy": "fsdp2", "dp_shard": 1, "ep": 2, "tp": 2}
EP2_CP2 = {"strategy": "fsdp2", "dp_shard": 1, "ep": 2, "cp": 2}
SHAPES = [
    *(FSDP2, HSDP, DDP, FSDP2_TP2, {**FSDP2_TP2, "sequence_parallel": True}),
    *(CP2, CP2_GATHERED, PP2, PP2_TP2, EP2, EP2_TP2, EP2_CP2),
]
LISTED = {
    str(FSDP2): ["dp_shard = world"],
    str(HSDP): ["dp_replicate", "dp_shard", "world"],
    str(DDP): ["dp_replicate = world"],
    str(FSDP2_TP2): ["dp_shard", "tp", "world"],
    str(CP2): ["cp", "fsdp = world"],
    str(PP2): ["pp", "dp_shard", "world"],
    str(EP2): ["dp_shard", "ep", "fsdp = world"],
    str(EP2_TP2): ["ep", "tp", "ep_tp = world"],
    str(EP2_CP2): ["ep", "cp", "fsdp = world"],
}
Volumes = dict[tuple[str, str], tuple[int, int]]
"""(axes of the group, operation) -> (calls, bytes)."""


def train(parallelism: dict[str, Any], around: Any, *, accumulation: int = 1, compiled: bool = False) -> Mesh:
    """Run two optimizer steps of a tiny model in float32, each in a context from the factory that `around` returns."""
    if "pp" in parallelism:
        accumulation = 2
    case = Case("mixtral" if "ep" in parallelism else "llama", parallelism, accumulation, 2, torch.float32)
    config = ParallelismConfig(**parallelism)
    mesh = distributed.build_mesh(config, "cpu")
    model = build(case.model, case.dtype).train()
    use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, config, case.dtype)
    if compiled:
        compile_layers(model, backend="eager")
    called = distributed.wrap_replicas(model, mesh, config, layout)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    settings = training.StepSettings(device=torch.device("cpu"), mesh=mesh)
    enter = around(mesh)
    for step in range(case.steps):
        with enter():
            training.train_step(training.Prepared(model, settings, called), micro_batches(case, mesh, step), optimizer)
    return mesh


def recorded(parallelism: dict[str, Any], **kwargs: Any) -> tuple[Traffic, Mesh]:
    """Return the recorded traffic of the second step."""
    traffics: list[Traffic] = []

    @contextmanager
    def enter() -> Iterator[None]:
        with record_traffic() as traffic:
            yield
        traffics.append(traffic)

    mesh = train(parallelism, lambda mesh: enter, **kwargs)
    return traffics[1], mesh


def by_axes(traffic: Traffic, mesh: Mesh) -> Volumes:
    axes = {each.ranks: each.axes for each in groups_of_mesh(mesh)}
    return {(axes[group], op): (volume.calls, volume.bytes) for (group, op), volume in traffic.volumes.items()}


def test_every_operation_is_recorded_with_group_and_bytes() -> None:
    def body(rank: int) -> None:
        first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
        singleton = [dist.new_group([each]) for each in range(4)][rank]
        own_group, peer = (first, 1 - rank) if rank < 2 else (second, 5 - rank)
        eight, four = torch.ones(8), torch.ones(4, dtype=torch.float64)  # 32 bytes each
        dist.all_reduce(eight)
        with record_traffic() as traffic:
            dist.all_reduce(eight)
            dist.all_reduce(four, group=own_group)
            dist.all_reduce(four, group=own_group)
            dist.all_reduce(eight, group=singleton)
            dist.all_gather_into_tensor(torch.empty(32), eight)
            dist.all_gather([torch.empty(8) for _ in range(2)], eight, group=own_group)
            dist.reduce_scatter_tensor(torch.empty(2), eight)
            dist.all_to_all_single(torch.empty(8), eight)
            dist.broadcast(eight, 1)
            dist.barrier(group=own_group)
            exchange = [dist.P2POp(dist.isend, four, peer), dist.P2POp(dist.irecv, torch.empty_like(four), peer)]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            if rank % 2:
                dist.recv(torch.empty(3), peer, group=own_group)
            else:
                dist.send(torch.ones(3), peer, group=own_group)
        dist.all_reduce(eight)
        world, half = (0, 1, 2, 3), (0, 1) if rank < 2 else (2, 3)
        assert {key: (volume.calls, volume.bytes) for key, volume in traffic.volumes.items()} == {
            (world, "all_reduce"): (1, 32),
            (half, "all_reduce"): (2, 64),
            (world, "all_gather"): (1, 32),
            (half, "all_gather"): (1, 32),
            (world, "reduce_scatter"): (1, 32),
            (world, "all_to_all"): (1, 32),
            (world, "broadcast"): (1, 32),
            (half, "barrier"): (1, 0),
            (world, "send"): (1, 32),
            (world, "recv"): (1, 32),
            (half, "recv" if rank % 2 else "send"): (1, 12),
        }
        assert traffic.groups == {world, half}

    run_ranks(4, body)


def test_functional_collectives_and_dtensors_are_recorded() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        group = (0, 1) if rank < 2 else (2, 3)
        x = torch.ones(4, 6, requires_grad=True)
        with record_traffic() as forward:
            gathered = functional.all_gather_tensor_autograd(x, 0, (mesh, 1)) * 2
        with record_traffic() as backward:
            gathered.sum().backward()
        recorded_volumes = [list(each.volumes.items()) for each in (forward, backward)]
        assert [[(key, volume.calls, volume.bytes) for key, volume in each] for each in recorded_volumes] == [
            [((group, "all_gather"), 1, 96)],
            [((group, "reduce_scatter"), 1, 192)],
        ]
        weight = distribute_tensor(torch.ones(8, 6), mesh["tp"], [Shard(1)])
        sharded = DTensor.from_local(torch.ones(4, 3), mesh["tp"], [Shard(1)])
        with record_traffic() as traffic:
            product = sharded @ weight.T  # (4, 8), a partial sum over tp
            assert product.placements == (Partial(),)
            result = product.relu()  # nonlinear, so DTensor all-reduces first
        assert result.placements == (Replicate(),)
        assert result.to_local()[0, 0] == 6
        ((key, volume),) = traffic.volumes.items()
        assert (key, volume.calls, volume.bytes) == ((group, "all_reduce"), 1, 4 * 8 * 4)

    run_ranks(4, body)


def test_listed_groups_are_those_that_a_step_uses() -> None:
    def body(rank: int) -> list[list[str]]:
        listed = []
        for shape in SHAPES:
            traffic, mesh = recorded(shape)
            groups = groups_of_mesh(mesh)
            assert traffic.groups == {each.ranks for each in groups}, shape
            for each in groups:
                assert rank in each.ranks
                assert str(each) == f"{each.axes}: {len(each.ranks)} ranks, {each.purpose}"
            listed.append([each.axes for each in groups])
        return listed

    for listed in run_ranks(4, body, timeout=120):
        expected = [LISTED.get(str(shape), axes) for shape, axes in zip(SHAPES, listed, strict=True)]
        assert listed == expected


def test_recorded_bytes_of_a_step_match_the_parameter_sizes() -> None:
    """Computed by hand: FSDP pads the rows of every parameter to a multiple of the ranks and moves full units.

    The first layer is gathered again in the backward pass; the last layer and the head with the final norm stay
    unsharded, and the embedding's gradient does not need its weight. Further all-reduces: units, targets, tokens and
    the FLOPs; the loss and its tokens; three flags; the gradient norm over the sharded axes.
    """
    sizes: dict[str, dict[int, int]] = {}  # unit -> number of shards -> bytes per shard
    for name, parameter in build("llama", torch.float32).named_parameters():
        unit = name.split(".")[2] if ".layers." in name else "embed" if "embed" in name else "head"
        for ranks in (1, 2, 4):
            rows = math.ceil(parameter.shape[0] / ranks)
            shard = 4 * rows * math.prod(parameter.shape[1:])
            sizes.setdefault(unit, {}).setdefault(ranks, 0)
            sizes[unit][ranks] += shard
    shard = {ranks: sum(unit[ranks] for unit in sizes.values()) for ranks in (1, 2, 4)}
    regathered = sizes["0"]
    assert sizes.keys() == {"embed", "0", "1", "head"}

    def body(rank: int) -> list[Volumes]:
        found = [recorded(FSDP2), recorded(FSDP2, accumulation=2), recorded(HSDP), recorded(DDP)]
        return [by_axes(*each) for each in found]

    for once, twice, hsdp, ddp in run_ranks(4, body, timeout=120):
        assert once == {
            ("dp_shard = world", "all_gather"): (5, shard[4] + regathered[4]),
            ("dp_shard = world", "reduce_scatter"): (4, 4 * shard[4]),
            ("dp_shard = world", "all_reduce"): (4, 32 + 16 + 24 + 8),
        }
        assert twice["dp_shard = world", "all_gather"] == (10, 2 * (shard[4] + regathered[4]))
        assert twice["dp_shard = world", "reduce_scatter"] == (4, 4 * shard[4])  # in the last micro-batch only
        assert hsdp == {
            ("dp_shard", "all_gather"): (5, shard[2] + regathered[2]),
            ("dp_shard", "reduce_scatter"): (4, 2 * shard[2]),
            ("dp_replicate", "all_reduce"): (4, shard[2]),
            ("dp_shard", "all_reduce"): (1, 8),
            ("world", "all_reduce"): (3, 32 + 16 + 24),
        }
        assert ddp.pop(("dp_replicate = world", "broadcast"))[1] < 500  # DDP broadcasts its bucket order once
        calls, moved = ddp.pop(("dp_replicate = world", "all_reduce"))
        assert moved == shard[1] + 32 + 16 + 24
        assert calls >= 3
        assert ddp == {}


@in_parity
def test_compiled_layers_produce_the_same_traffic() -> None:
    def body(rank: int) -> None:
        tp = {"strategy": "fsdp2", "dp_shard": 1, "tp": -1}
        assert by_axes(*recorded(tp, compiled=True)) == by_axes(*recorded(tp)) != {}

    run_ranks(2, body, timeout=120)


def test_mesh_axes_without_collectives_are_not_listed() -> None:
    """With cp, FSDP shards over dp_shard and cp together, so dp_shard alone is unused."""

    def body(rank: int) -> list[tuple[str, int, str]]:
        mesh = distributed.build_mesh(ParallelismConfig(dp_shard=2, cp=2), "cpu")
        assert mesh["fsdp"].size() == 4
        return [(each.axes, len(each.ranks), each.purpose) for each in groups_of_mesh(mesh)]

    for listed in run_ranks(4, body):
        assert listed == [
            ("cp", 2, "keys and values, statistics of routers"),
            (
                "fsdp = world",
                4,
                "dense parameters gathered, gradients reduce-scattered; sums of losses, tokens, stop flags",
            ),
        ]


def test_traffic_of_the_second_step_is_reported() -> None:
    def body(rank: int) -> Any:
        reported: list[list[Any]] = []
        train(HSDP, lambda mesh: StepTraffic(mesh, reported.append, enabled=False).step)
        assert reported == []
        train(HSDP, lambda mesh: StepTraffic(mesh, reported.append, enabled=True).step)
        (rows,) = reported
        return [asdict(row) for row in rows]

    results = run_ranks(4, body)
    assert [rows for rows in results if rows != results[0]] == []
    assert [(row["group"], row["operation"]) for row in results[0]] == [
        ("dp_replicate", "all_reduce"),
        ("dp_shard", "all_gather"),
        ("dp_shard", "reduce_scatter"),
        ("dp_shard", "all_reduce"),
        ("world", "all_reduce"),
    ]


def test_reporter_prints_a_table_of_traffic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [TrafficRow("tp", "activations inside layers", "all_reduce", 1234, 3 * 2**19)]
    Reporter(LoggingConfig(), str(tmp_path), enabled=True).traffic(rows)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "all_reduce" in line]
    assert line.split() == ["tp", "activations", "inside", "layers", "all_reduce", "1,234", "1.500"]
    Reporter(LoggingConfig(), str(tmp_path), enabled=True).traffic([])
    assert "collectives of one optimizer step: none" in capsys.readouterr().out
    Reporter(LoggingConfig(), str(tmp_path), enabled=False).traffic(rows)
    assert capsys.readouterr().out == ""
