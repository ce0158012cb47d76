"""Time to create the mesh for 8 to 16,384 processes, compared with the same process groups created by torch alone.

python scripts/benchmark/mesh_creation.py
python scripts/benchmark/mesh_creation.py --worlds 8 1024 --repeats 9

torch's fake backend creates every process group of a real run without communication, so one process can run rank 0 of
any world size. Compares `distributed.build_mesh` with the views that training uses, with torch's `init_device_mesh`,
with the same dims and `_flatten` for the same views. Both run alternately, each time in a new process; the
report has medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

WORLDS = (8, 64, 512, 4096, 16384)
USED = ("fsdp", "dp_cp", "dp")
"""Views that training uses of a mesh with all axes except expert parallelism."""


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", nargs=2, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one[0], int(options.one[1]))))
        return
    print("| processes | mesh | groups | Meshbook ms | torch ms | ratio |\n|---|---|---|---|---|---|")
    for world in options.worlds:
        taken: dict[str, list[float]] = {"meshbook": [], "torch": []}
        for _ in range(options.repeats):
            for method, times in taken.items():
                command = [sys.executable, __file__, "--one", method, str(world)]
                result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                times.append(result["seconds"])
        ours, bare = (1e3 * statistics.median(times) for times in taken.values())
        print(f"| {world:,} | {result['mesh']} | {result['groups']} | {ours:.1f} | {bare:.1f} | {ours / bare:.2f} |")


def degrees_of(world: int) -> dict[str, int]:
    """Return the mesh degrees: pp 2 and tp 2, from 64 processes on also cp 2 and dp_replicate 2, the rest dp_shard."""
    large = world >= 64
    rest = world // (16 if large else 4)
    return {"pp": 2, "dp_replicate": 2 if large else 1, "dp_shard": rest, "cp": 2 if large else 1, "tp": 2}


def measure(method: str, world: int) -> dict[str, object]:
    """Create the mesh of rank 0 once. The first group of a process takes longer, so one is created beforehand."""
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
    seconds = time.perf_counter() - began
    created = len(dist.distributed_c10d._world.pg_map) - before
    shape = " x ".join(f"{name} {degree}" for name, degree in used.items())
    return {"seconds": seconds, "groups": created, "mesh": shape}


if __name__ == "__main__":
    main()
