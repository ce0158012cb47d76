"""The checks of `scripts/gpu.py`: `python -m scripts._gpu.checks NAME DEVICE RANKS SMALL` runs one, and prints its
lines. With several ranks, checks start the recipes, whose launcher starts the processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict

from components.protocol.loopback import reserve_loopback_port
from scripts._gpu.verdict import Line, at_least

Run = Callable[[str, bool], Iterator[Line]]
"""(device, small) -> lines. small: tiny models, which only show that the check itself works."""
RunRanks = Callable[[str, int, bool], Iterator[Line]]
"""(device, ranks, small) -> lines."""
SECONDS = {
    "machine": 40, "parity": 60, "packed": 30, "syncs": 40, "busy": 30, "memory": 60, "compiled": 90,
    "throughput": 90, "loss": 30, "attention": 20, "float8": 50, "nf4": 45, "killed": 60,
}  # fmt: skip
"""Check -> its expected duration on one GPU; after twice the time it is killed."""
SEVERAL_SECONDS = {"curves": 240, "collectives": 30, "throughput": 120, "stopped_rank": 90, "export": 60}
"""The same for checks of several GPUs."""


def checks() -> dict[str, Run]:
    """Return the checks by name. Imports torch."""
    from scripts._gpu import correct, runs, speed

    return {
        "machine": machine, "parity": correct.parity, "packed": correct.packed, "syncs": correct.syncs,
        "busy": speed.busy, "memory": correct.memory, "compiled": speed.compiled, "throughput": speed.throughput,
        "loss": speed.loss, "attention": speed.attention, "float8": speed.float8, "nf4": speed.nf4,
        "killed": runs.killed,
    }  # fmt: skip


def checks_of_ranks() -> dict[str, RunRanks]:
    """Return the checks of several GPUs by name."""
    from scripts._gpu import several

    return {
        "curves": several.curves, "collectives": several.collectives, "throughput": several.throughput,
        "stopped_rank": several.stopped_rank, "export": several.export,
    }  # fmt: skip


def machine(device: str, small: bool) -> Iterator[Line]:
    """Rates of matrix products and copies, as `scripts/doctor.py --measure` takes them."""
    from scripts._doctor.measure import TINY, measure_device

    figures = measure_device(1, TINY if small else None)
    name = str(figures["name"])
    yield Line("device", name)
    for what, key, unit, bounds in (
        ("bfloat16 matrix products: TFLOP/s", "bf16", 1e12, {"H100": 600, "H200": 600}),
        ("copies: TB/s", "copy", 1e12, {"H100": 2.5, "H200": 3.4}),
    ):
        value = figures[f"{key}_shared"] / unit
        bound = next((bound for gpu, bound in bounds.items() if gpu in name), None)
        yield Line(what, f"{value:.3g}") if bound is None else at_least(what, value, bound)


def main(name: str, device: str, ranks: str, small: str) -> None:
    """Run one check and print a JSON object for each of its lines."""
    if int(ranks) > 1:
        for line in checks_of_ranks()[name](device, int(ranks), small == "small"):
            print(json.dumps(asdict(line)), flush=True)
        return
    if name != "machine" and name != "killed":  # these start processes of their own
        reserved = reserve_loopback_port()  # stays bound while this process runs
        port = reserved.getsockname()[1]
        os.environ |= {
            "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        from components import distributed

        distributed.start_process_group(device)
    for line in checks()[name](device, small == "small"):
        print(json.dumps(asdict(line)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
