"""Cost of a Muon step: matrices orthogonalized by owner ranks, against every rank orthogonalizing all of them.

python scripts/benchmark/muon_step.py                              # the matrices of SmolLM2-135M on fsdp2 and hsdp
python scripts/benchmark/muon_step.py --layers 6 --repeats 9       # fewer matrices, more pairs of steps
torchrun --nproc-per-node 4 scripts/benchmark/muon_step.py --replicas 2     # one mesh, such as your own GPUs

Both methods keep momentum, decay and update on the shards. Owners (optimizers/matrix_exchange.py): an
all-to-all brings each matrix to one rank, a second one returns the results. All: one all-gather of the shards, then
each rank orthogonalizes every matrix. The weights after a step must be equal.

FLOPs are those of the matmuls (torch's FlopCounterMode) on the busiest rank. Bytes are those that a rank sends to
others, at most over the ranks: in an all-gather of n ranks, its shard n - 1 times. Times are those of the slowest rank
in steps that alternate, and their ratio is the median over the pairs. Processor time is the sum over the ranks. On a
machine with fewer cores than ranks, the wall time shows the arithmetic of all ranks together.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.flop_counter import FlopCounterMode

from components import distributed
from components.config.schema.optimizer import MuonConfig, NewtonSchulzDtype
from components.json_collectives import all_gather_json
from components.terminal import HelpText
from components.training.optimizers.gradients import local_tensor
from components.training.optimizers.matrix_exchange import Matrix, Piece
from components.training.optimizers.muon import Muon, orthogonalize
from components.training.step_cost import record_traffic

HIDDEN, INTERMEDIATE, KEYS = 576, 1536, 192
SHAPES = [
    *((HIDDEN, HIDDEN), (KEYS, HIDDEN), (KEYS, HIDDEN), (HIDDEN, HIDDEN)),
    *((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)),
]
"""Matrices of a decoder layer of SmolLM2-135M: q, k, v, o, gate, up, down."""
MESHES = [(2, 1), (4, 1), (4, 2)]
"""Processes and replicas of each mesh in the table."""
COLUMNS = [
    *("mesh", "FLOPs: owners", "all", "sent: owners", "all"),
    *("s: owners", "all", "ratio", "CPU ratio"),
]


class RedundantMuon(Muon):
    """Muon in which every rank gathers all matrices and orthogonalizes each of them. Shards are equal rows."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all matrices. A collective of the ranks that shard them."""
        group = self.param_groups[0]
        for bucket in self._exchange.buckets:
            directions = [self._direction(each, None) for each in bucket.parameters]
            rank, ranks = dist.get_rank(bucket.group), dist.get_world_size(bucket.group)
            shards = torch.cat([each.reshape(-1) for each in directions])
            gathered = shards.new_empty(ranks * len(shards))
            dist.all_gather_into_tensor(gathered, shards, group=bucket.group)
            parts = gathered.view(ranks, -1).split([each.numel() for each in directions], dim=1)
            for parameter, direction, part in zip(bucket.parameters, directions, parts, strict=True):
                whole = part.reshape(ranks * len(direction), -1)  # (rows, columns)
                result = orthogonalize(whole, self._steps).view(ranks, *direction.shape)[rank]
                local_tensor(parameter.detach()).mul_(1 - group["lr"] * group["weight_decay"])
                full = tuple(slice(0, size) for size in direction.shape)
                matrix = Matrix(parameter, tuple((range(size),) for size in parameter.shape))
                self._add(matrix, Piece(full, full, tuple(direction.shape)), result, None)


class Cost(NamedTuple):
    """Time of one step in seconds."""

    wall: float
    """Of the slowest rank."""
    processor: float
    """Summed over the ranks."""


def sharded_matrices(layers: int, mesh: Any) -> list[Matrix]:
    """Return random matrices with random gradients, sharded by FSDP2."""
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Linear(columns, rows, bias=False) for _ in range(layers) for rows, columns in SHAPES)
        )
    fully_shard(model, mesh=mesh)
    model.to_empty(device=mesh.device_type)
    generator = torch.Generator(mesh.device_type).manual_seed(mesh.get_local_rank(mesh.ndim - 1))
    for parameter in model.parameters():
        local_tensor(parameter.detach()).normal_(generator=generator)
        parameter.grad = torch.empty_like(parameter)
        local_tensor(parameter.grad).normal_(generator=generator)
    return [Matrix(each, tuple((range(size),) for size in each.shape)) for each in model.parameters()]


def measured(optimizer: Muon) -> Cost:
    """Return the time of one step. A collective."""
    distributed.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    optimizer.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    walls, processors = zip(
        *all_gather_json((time.perf_counter() - wall, time.process_time() - processor)), strict=True
    )
    return Cost(max(walls), sum(processors))


def work_of(optimizer: Muon, ranks: int) -> tuple[float, float]:
    """Return the FLOPs of a step and the bytes sent, each of the rank with the most. A collective."""
    with FlopCounterMode(display=False) as counter, record_traffic() as traffic:
        optimizer.step()
    inputs = sum(volume.bytes for volume in traffic.volumes.values())
    sent = inputs * (ranks - 1)  # all-gather
    if type(optimizer) is Muon:
        sent = optimizer._exchange.sent_elements * optimizer._dtype.itemsize
        kept = inputs - sent  # the input of an all-to-all contains what stays on the rank
        if not 0 <= kept < inputs:
            raise ValueError(f"{sent} bytes are planned to be sent, but the all-to-alls had {inputs} bytes")
    flops, bytes_sent = zip(*all_gather_json((counter.get_total_flops(), sent)), strict=True)
    return max(flops), max(bytes_sent)


def measure(options: argparse.Namespace) -> None:
    """Print the row of one mesh, on rank 0. Raises ValueError if the two methods disagree."""
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    info = distributed.start_process_group(device)
    ranks = info.world_size // options.replicas
    shape, names = ((ranks,), ("shard",)) if options.replicas == 1 else ((options.replicas, ranks), ("copy", "shard"))
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    cfg = MuonConfig(ns_dtype=NewtonSchulzDtype(options.dtype), weight_decay=0.1)
    optimizers = [kind(sharded_matrices(options.layers, mesh), cfg) for kind in (Muon, RedundantMuon)]
    work = [work_of(optimizer, ranks) for optimizer in optimizers]
    for ours, theirs in zip(*(optimizer.param_groups[0]["params"] for optimizer in optimizers), strict=True):
        if not torch.equal(local_tensor(ours.detach()), local_tensor(theirs.detach())):
            raise ValueError("the two methods computed different weights")
    costs = [[measured(optimizer) for optimizer in optimizers] for _ in range(options.repeats)]
    owners, every = ([pair[index].wall for pair in costs] for index in (0, 1))
    wall = statistics.median(theirs.wall / ours.wall for ours, theirs in costs)
    processor = statistics.median(theirs.processor / ours.processor for ours, theirs in costs)
    name = f"fsdp2 {ranks}" if options.replicas == 1 else f"hsdp {options.replicas} x {ranks}"
    cells = [
        name,
        *(f"{flops / 1e9:,.0f} G" for flops, _ in work),
        *(f"{sent / 2**20:,.1f} MiB" for _, sent in work),
        *(f"{statistics.median(each):.2f}" for each in (owners, every)),
        f"{wall:.2f}",
        f"{processor:.2f}",
    ]
    if info.is_main:
        print(_line(cells), flush=True)


def main() -> None:
    """Measure this mesh under torchrun, else start the processes of each mesh and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=5, help="pairs of steps")
    parser.add_argument("--replicas", type=int, default=1, help="replicas of the sharded matrices (hsdp)")
    parser.add_argument("--dtype", default="bfloat16", help="of the orthogonalization: bfloat16 or float32")
    options = parser.parse_args()
    if "RANK" in os.environ:
        measure(options)
        return
    print(_line(COLUMNS) + "\n" + _line(["---"] * len(COLUMNS)), flush=True)
    for processes, replicas in MESHES:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command = [*launcher, __file__, *sys.argv[1:], "--replicas", str(replicas)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment)


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
