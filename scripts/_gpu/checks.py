"""The checks of `scripts/gpu.py`: `python -m scripts._gpu.checks NAME DEVICE RANKS SIZE RESULTS` runs one, and appends
its lines to RESULTS. With several ranks, checks start the recipes, whose launcher starts the processes."""

from __future__ import annotations

import faulthandler
import importlib.metadata
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from components.protocol.processes import reserve_loopback_port
from scripts._gpu.verdict import Line, append_line, at_least, failed

Run = Callable[[str, bool], Iterator[Line]]
"""(device, small) -> lines. small: tiny models, which only show that the check itself works."""
RunRanks = Callable[[str, int, bool], Iterator[Line]]
"""(device, ranks, small) -> lines."""
SECONDS = {
    "environment": 25, "kernels": 40, "gradients": 90, "recipe": 60, "full_1b": 70, "lora_8b": 45, "qlora_8b": 45,
    "bare_loop": 45,
}  # fmt: skip
"""Check -> its expected duration on one GPU, in their order; after twice the time it is killed."""
MORE_SECONDS = {
    "steps": 40, "sampling": 60, "grpo": 50, "attention": 25, "loss": 20, "memory": 45, "compiled": 60, "float8": 50,
    "killed": 60,
}  # fmt: skip
"""The same for checks that run if they are named, and in rehearsals (--small)."""
SEVERAL_SECONDS = {"curves": 240, "collectives": 30, "throughput": 120, "stopped_rank": 90, "export": 60}
"""The same for checks of several GPUs."""
NEEDS_GPU = {"attention", "memory", "float8"}
"""Checks that are skipped on a CPU."""
STARTS_PROCESSES = {"environment", "recipe", "grpo", "killed"}
"""Checks that start processes of their own, in which torch starts."""
PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "numpy", "hydra-core", "omegaconf", "peft", "datasets", "gguf",
    "safetensors", "torchao", "liger-kernel", "flash-attn", "flash-attn-3",
)  # fmt: skip


def checks() -> dict[str, Run]:
    """Return the checks by name. Imports torch."""
    from scripts._gpu import gradients, kernels, runs, sampling, speed

    return {
        "environment": environment, "kernels": kernels.kernels, "gradients": gradients.gradients,
        "recipe": runs.recipe, "full_1b": speed.full_1b, "lora_8b": speed.lora_8b, "qlora_8b": speed.qlora_8b,
        "bare_loop": speed.bare_loop, "steps": gradients.steps, "sampling": sampling.sampling, "grpo": runs.grpo,
        "attention": speed.attention, "loss": speed.loss, "memory": speed.memory, "compiled": speed.compiled,
        "float8": speed.float8, "killed": runs.killed,
    }  # fmt: skip


def checks_of_ranks() -> dict[str, RunRanks]:
    """Return the checks of several GPUs by name."""
    from scripts._gpu import several

    return {
        "curves": several.curves, "collectives": several.collectives, "throughput": several.throughput,
        "stopped_rank": several.stopped_rank, "export": several.export,
    }  # fmt: skip


def environment(device: str, small: bool) -> Iterator[Line]:
    """Versions, rates of matrix products and copies, and whether a host sync can be detected."""
    from scripts._plan.measure import TINY, measure_device

    yield Line("python", sys.version.split()[0])
    for package in PACKAGES:
        try:
            yield Line(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Line(package, "not installed")
    for tool in ("gcc", "g++", "ptxas"):
        yield Line(tool, shutil.which(tool) or "not found")
    figures = measure_device(1, TINY if small else None)  # forks, and so precedes CUDA in this process
    name = str(figures["name"])
    yield Line("device", name)
    for what, key, unit, bounds in (
        ("bfloat16 matrix products: TFLOP/s", "bf16", 1e12, {"H100": 600, "H200": 600}),
        ("copies: TB/s", "copy", 1e12, {"H100": 2.5, "H200": 3.4}),
    ):
        value = figures[f"{key}_shared"] / unit
        bound = next((bound for gpu, bound in bounds.items() if gpu in name), None)
        yield Line(what, f"{value:.3g}") if bound is None else at_least(what, value, bound)
    if device == "cuda":
        yield _detects_syncs()


def _detects_syncs() -> Line:
    """Return the line that shows that the checks of host syncs can fail."""
    import torch

    value = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        value.item()
    except RuntimeError:
        return Line("control: a host sync raises", "yes")
    return failed("control: a host sync raises", "no")


def main(name: str, device: str, ranks: str, size: str, results: str) -> None:
    """Run one check and append its lines to a file. SIGUSR1 prints the stacks of all threads."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    small, file = size == "small", Path(results)
    if int(ranks) > 1:
        lines = checks_of_ranks()[name](device, int(ranks), small)
    else:
        if name not in STARTS_PROCESSES:
            reserved = reserve_loopback_port()  # stays bound while this process runs
            os.environ |= {
                "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.getsockname()[1]),
            }  # fmt: skip
            from components import distributed

            distributed.start_process_group(device)
        lines = checks()[name](device, small)
    for line in lines:
        append_line(file, name, line)


if __name__ == "__main__":
    main(*sys.argv[1:])
