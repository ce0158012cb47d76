"""Worlds that do not fit on this machine: host cost of a start, and the share of the time that training keeps.

python scripts/benchmark/fleet.py costs      # mesh, manifest, headers and data order, up to 65,536 processes
python scripts/benchmark/fleet.py goodput    # goodput by save interval, and the best interval
python scripts/benchmark/fleet.py goodput --worlds 256 --mtbf-hours 20000 --blocked-seconds 4 --restart-seconds 240

costs: torch's fake backend creates every process group of a real run without communication, so one process can run
rank 0 of any world size. The mesh, with the views that training uses, is compared with torch's `init_device_mesh` and
`_flatten` for the same groups; both run alternately, each time in a new process, and the table has medians. A resume
reads headers, which the ranks share: one rank's part, and then all parts, with the blocks of an 8B model and AdamW (873
tensors per file). The host cost of a step does not depend on the world: scripts/benchmark/host_ops.py.

goodput: the share of the time in steps whose result is kept. Failures are independent, one per --mtbf-hours of a GPU on
average, and each ends the whole run. Measure the seconds of a save and of a restart on your own cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from components.terminal import HelpText, fit

Number = TypeVar("Number", int, float)

WORLDS = (1024, 8192, 16384, 65536)
USED = ("fsdp", "dp_cp", "dp")
"""Views that training uses of a mesh with all axes except expert parallelism."""
INTERVALS = (1, 2, 5, 10, 20, 30, 60)
"""Minutes between saves."""
TENSORS = 873
"""Of a rank's file: 291 parameters of an 8B Llama and two moments of each."""
MTBF_HOURS = 50_677.0
"""Hours of one GPU between failures: 419 unexpected interruptions of 16,384 GPUs in 54 days (The Llama 3 Herd of
Models, 2024, section 3.3.4)."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a run's events."""

    failures: float
    """Between two failures of the whole run, on average."""
    blocked: float
    """For which a save blocks training."""
    background: float
    """From the end of `blocked` until the checkpoint is complete; training goes on."""
    restart: float
    """From a failure to the first step after it: detection, queue, start, loading."""


def goodput(interval: float, times: Times) -> float:
    """Return the expected goodput for saves after every `interval` seconds of training.

    The time from one failure to the next is exponentially distributed and begins with the restart; only whole intervals
    whose checkpoint is complete are kept. As Daly, A higher order estimate of the optimum checkpoint interval (2006),
    with a save that is partly in the background.
    """
    rate, period = 1 / times.failures, interval + times.blocked
    # exp(-a) / (exp(b) - 1), written so that it cannot overflow
    kept = math.exp(-rate * (times.restart + times.background + period)) / -math.expm1(-rate * period)
    return rate * interval * kept


def simulated_goodput(interval: float, times: Times, failures: int, seed: int) -> float:
    """Return the goodput of a run with this many failures, drawn at random."""
    import numpy as np

    until_failure = np.random.default_rng(seed).exponential(times.failures, failures)
    in_intervals = until_failure - times.restart - times.background
    kept = np.maximum(np.floor(in_intervals / (interval + times.blocked)), 0).sum()
    return float(kept * interval / until_failure.sum())


def best_interval(times: Times) -> float:
    """Return the interval with the highest expected goodput, in seconds.

    Where the derivative is zero, x = interval / failures solves 1 - exp(-(x + blocked / failures)) = x. That has one
    solution, below 1, which bisection finds.
    """
    low, high, blocked = 0.0, 1.0, times.blocked / times.failures
    for _ in range(60):
        middle = (low + high) / 2
        if -math.expm1(-(middle + blocked)) > middle:
            low = middle
        else:
            high = middle
    return low * times.failures


def print_goodput(options: argparse.Namespace) -> None:
    """Print a row per world: simulated goodput of each interval, and the best interval with its expected goodput."""
    minutes = " | ".join(f"{minutes} min" for minutes in options.intervals)
    lines = [
        f"| GPUs | failure every | {minutes} | best interval | at best |",
        f"|{'---|' * (len(options.intervals) + 4)}",
    ]
    for world in options.worlds:
        failures = options.mtbf_hours * 3600 / world
        times = Times(failures, options.blocked_seconds, options.background_seconds, options.restart_seconds)
        shares = [
            simulated_goodput(60 * interval, times, options.failures, options.seed) for interval in options.intervals
        ]
        best = best_interval(times)
        lines.append(
            f"| {world:,} | {failures / 3600:,.0f} h | {' | '.join(f'{share:.1%}' for share in shares)} "
            f"| {best / 60:.0f} min | {goodput(best, times):.1%} |"
        )
    print(fit("\n".join(lines)))


def print_costs(options: argparse.Namespace) -> None:
    """Print a row per world with medians over the repeats."""
    first_lines = [
        "| processes | mesh | groups | mesh ms | torch ms | manifest MB | write ms | read ms |",
        f"|{'---|' * 8}",
    ]
    second_lines = [
        "| processes | headers of a rank CPU ms | of all CPU ms | overlaps CPU ms | 1,000 rows of 1e12 ms |",
        f"|{'---|' * 5}",
    ]
    for world in options.worlds:
        taken: dict[str, list[dict[str, float]]] = {"meshbook": [], "torch": []}
        for _ in range(options.repeats):
            for method, results in taken.items():
                command = [sys.executable, __file__, "one", method, str(world)]
                results.append(json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        ours = {key: statistics.median(each[key] for each in taken["meshbook"]) for key in COSTS}
        bare = statistics.median(each["mesh"] for each in taken["torch"])
        first = taken["meshbook"][0]
        first_lines.append(
            f"| {world:,} | {first['shape']} | {first['groups']} | {ours['mesh']:.1f} | {bare:.1f} "
            f"| {ours['bytes'] / 1e6:.1f} | {ours['write']:.0f} | {ours['read']:.0f} |"
        )
        second_lines.append(
            f"| {world:,} | {ours['header']:.0f} | {ours['merge']:.0f} | {ours['overlaps']:.0f} | {ours['order']:.1f} |"
        )
    print(fit("\n".join([*first_lines, "", *second_lines])))


COSTS = ("mesh", "bytes", "write", "read", "header", "merge", "overlaps", "order")
"""Numbers of one measurement: milliseconds, and bytes of a manifest."""


def degrees_of(world: int) -> dict[str, int]:
    """Return the mesh degrees: pp 2 and tp 2, from 64 processes on also cp 2 and dp_replicate 2, the rest dp_shard."""
    large = world >= 64
    rest = world // (16 if large else 4)
    return {"pp": 2, "dp_replicate": 2 if large else 1, "dp_shard": rest, "cp": 2 if large else 1, "tp": 2}


def measure(method: str, world: int) -> dict[str, object]:
    """Return the costs of one start. The first group of a process takes longer, so one is created beforehand."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from components import distributed
    from components.config.schema import ParallelismConfig
    from components.distributed.mesh import VIEWS

    degrees = degrees_of(world)
    used = {name: degree for name, degree in degrees.items() if degree > 1}
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    init_device_mesh("cpu", (world,))
    before = len(dist.distributed_c10d._world.pg_map)
    config = ParallelismConfig(**degrees)
    views = [name for name in USED if sum(axis in used for axis in VIEWS[name]) > 1]
    distributed.build_mesh  # noqa: B018  (the lazy import must not be timed)
    began = time.perf_counter()
    if method == "meshbook":
        mesh = distributed.build_mesh(config, "cpu")
        for view in views:
            mesh[view]
    else:
        plain = init_device_mesh("cpu", tuple(used.values()), mesh_dim_names=tuple(used))
        for view in views:
            plain[tuple(axis for axis in VIEWS[view] if axis in used)]._flatten(view)
    milliseconds = 1e3 * (time.perf_counter() - began)
    created = len(dist.distributed_c10d._world.pg_map) - before
    shape = " x ".join(f"{name} {degree}" for name, degree in used.items())
    others = {**manifest_costs(world), **header_costs(world), **order_costs()} if method == "meshbook" else {}
    return {"mesh": milliseconds, "groups": created, "shape": shape, **others}


def manifest_costs(files: int) -> dict[str, float]:
    """Return bytes and milliseconds of a manifest with this many files of 512 MiB: one file per process."""
    from components.checkpoint.manifest import BLOCK_BYTES, FileRecord, Manifest
    from components.protocol.run_files import CHECKPOINT_MANIFEST

    blocks = 8
    records = {
        f"rank_{number}.safetensors": FileRecord(
            blocks * BLOCK_BYTES, [f"{number * blocks + block:032x}" for block in range(blocks)]
        )
        for number in range(files)
    }
    manifest = Manifest(step=1, serial=1, mesh={"world": files}, versions={}, files=records)
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.perf_counter()
        manifest.write(folder)
        written = time.perf_counter()
        Manifest.read(folder)
        read = time.perf_counter()
        size = (folder / CHECKPOINT_MANIFEST).stat().st_size
    return {"bytes": size, "write": 1e3 * (written - began), "read": 1e3 * (read - written)}


def header_costs(files: int) -> dict[str, float]:
    """Return processor time in milliseconds: to read one of this many files' headers, to merge all of them from JSON,
    as ranks receive them, and to find the blocks of one rank's shards.
    """
    import torch
    from safetensors.torch import save_file

    from components.checkpoint.stored_tensors import merge_headers, read_headers

    shapes = {f"model/layers.{number}.weight": (1, 1) for number in range(TENSORS)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        offsets = {tensor: {"saved_offsets": [0, 0]} for tensor in shapes}
        save_file(
            {tensor: torch.zeros(shape) for tensor, shape in shapes.items()},
            folder / "0.safetensors",
            {"DCP_SHARDING_INFO": json.dumps(offsets)},
        )
        began = time.process_time()
        kinds, rows = read_headers(folder, ["0.safetensors"], [0])
        read = time.process_time()
    part = len(rows) // TENSORS
    texts = [json.dumps((kinds, [number, number, *rows[2:part]] * TENSORS)) for number in range(files)]
    received = time.process_time()
    tensors = merge_headers(json.loads(text) for text in texts)
    merged = time.process_time()
    own = (slice(files // 2, files // 2 + 1), slice(0, 1))
    found = sum(len(list(tensor.overlaps(own))) for tensor in tensors.values())
    searched = time.process_time()
    if found != TENSORS:
        raise RuntimeError(f"{found} blocks found instead of {TENSORS}")
    return {
        "header": 1e3 * (read - began),
        "merge": 1e3 * (merged - received),
        "overlaps": 1e3 * (searched - merged),
    }


def order_costs() -> dict[str, float]:
    """Return the milliseconds to find 1,000 rows at the middle of an epoch of 1e12 rows, from a new order."""
    from components.data.packing import BlockOrder

    began = time.perf_counter()
    BlockOrder(10**12, 7, 256, 256).indices(10**12 // 2, 1000)
    return {"order": 1e3 * (time.perf_counter() - began)}


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpText)
    commands = parser.add_subparsers(dest="command", required=True)
    costs = commands.add_parser("costs")
    costs.add_argument("--worlds", type=_power_of_two, nargs="+", default=WORLDS, help="processes")
    costs.add_argument("--repeats", type=_positive_int, default=5, help="processes per number (%(default)s)")
    shares = commands.add_parser("goodput")
    shares.add_argument("--worlds", type=_positive_int, nargs="+", default=(8, 64, 512, 4096, 16384), help="GPUs")
    shares.add_argument("--mtbf-hours", type=_positive, default=MTBF_HOURS, help="of one GPU (default: %(default)s)")
    shares.add_argument(
        "--blocked-seconds", type=_not_negative, default=5.0, help="of training by a save (%(default)s)"
    )
    shares.add_argument(
        "--background-seconds", type=_not_negative, default=60.0, help="until it is complete (%(default)s)"
    )
    shares.add_argument(
        "--restart-seconds", type=_not_negative, default=300.0, help="from a failure to a step (%(default)s)"
    )
    shares.add_argument("--intervals", type=_positive, nargs="+", default=INTERVALS, help="minutes between saves")
    shares.add_argument("--failures", type=_positive_int, default=100_000, help="drawn per cell (%(default)s)")
    shares.add_argument("--seed", type=int, default=0)
    one = commands.add_parser("one", help=argparse.SUPPRESS)
    one.add_argument("method")
    one.add_argument("world", type=int)
    options = parser.parse_args()
    if options.command == "one":
        print(json.dumps(measure(options.method, options.world)))
    elif options.command == "costs":
        print_costs(options)
    else:
        print_goodput(options)


def _not_negative(text: str) -> float:
    return _number(text, float, lambda value: 0 <= value < math.inf, "must be a number of at least 0")


def _positive(text: str) -> float:
    return _number(text, float, lambda value: 0 < value < math.inf, "must be a number above 0")


def _positive_int(text: str) -> int:
    return _number(text, int, lambda value: value >= 1, "must be an integer of at least 1")


def _power_of_two(text: str) -> int:
    rule = "must be a power of two of at least 4, so that the mesh has a pp and a tp axis"
    return _number(text, int, lambda value: value >= 4 and value & (value - 1) == 0, rule)


def _number(text: str, kind: type[Number], accepts: Callable[[Number], bool], rule: str) -> Number:
    """Return the number; argparse reports the rule if it is not one that the option accepts."""
    with contextlib.suppress(ValueError):
        if accepts(value := kind(text)):
            return value
    raise argparse.ArgumentTypeError(f"{text}: {rule}")


if __name__ == "__main__":
    main()
