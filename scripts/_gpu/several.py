"""Checks of several GPUs, by whole runs of the recipes: curves of meshes, collectives, a stopped rank, an export."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.protocol.errors import EXIT_HUNG
from scripts._gpu.step import LLAMA_8B
from scripts._gpu.verdict import Line, at_least, at_most, failed

REPOSITORY = Path(__file__).resolve().parents[2]
MESHES = (
    "ddp", "fsdp2", "hsdp", "fsdp2_tp2", "fsdp2_tp2_sp", "hsdp_tp2", "fsdp2_cp2", "fsdp2_cp2_tp2", "pp2_1f1b",
    "pp2_interleaved", "pp4_1f1b", "pp2_fsdp2_tp2",
)  # fmt: skip
"""Options of conf/parallelism, compared with one process."""
SMALL_MESHES = ("fsdp2", "pp2_1f1b")
STEPS = 10
COMMON = [
    "experiment=bench_mesh", "model=llama_2m", f"training.max_steps={STEPS}", "training.seq_len=128",
    "training.global_batch_size=16", "training.micro_batch_size=2", "data.max_samples=400",
]  # fmt: skip
LARGE_SEQ_LEN, LARGE_MICRO_BATCH = 4096, 2
STEP_TIMEOUT = 20.0
"""Seconds without progress after which a run ends as hung."""


def curves(device: str, ranks: int, small: bool) -> Iterator[Line]:
    """Losses of each mesh in float32 against those of one process."""
    with tempfile.TemporaryDirectory() as folder:
        reference: list[float] = []
        for mesh in ("single", *(SMALL_MESHES if small else MESHES)):
            run_dir = Path(folder) / mesh
            processes = 1 if mesh == "single" else ranks
            ended = run_recipe("pretrain", run_dir, device, processes, [*COMMON, f"parallelism={mesh}"])
            if ended.returncode:
                yield failed(mesh, last_line(ended))
                continue
            losses = [metric["loss"] for metric in metrics(run_dir) if "loss" in metric]
            if mesh == "single":
                reference = losses
            elif len(losses) != len(reference):
                yield failed(mesh, f"{len(losses)} losses, not the {len(reference)} of one process")
            else:
                worst = max(abs(one / other - 1) for one, other in zip(losses, reference, strict=True))
                yield at_most(f"{mesh}: relative difference of {STEPS} losses", worst, 1e-5)


def collectives(device: str, ranks: int, small: bool) -> Iterator[Line]:
    """Bandwidth and latency of collectives over all GPUs, as `scripts/plan.py --measure` takes them."""
    from scripts._plan.measure import TINY, measure_device

    figures = measure_device(ranks, TINY if small else None)
    name = str(figures["name"])
    for what, key, bound in (("all-gather", "gather_bandwidth", 300.0), ("all-reduce", "reduce_bandwidth", 300.0)):
        what, value = f"{what}: GB/s of a rank in a ring", figures[key] / 1e9
        nvlink = "H100" in name or "H200" in name
        yield at_least(what, value, bound) if nvlink else Line(what, f"{value:.3g}")
    yield Line("latency per doubling of the ranks: microseconds", f"{figures['latency'] * 1e6:.3g}")


def throughput(device: str, ranks: int, small: bool) -> Iterator[Line]:
    """Tokens/s of a large model with FSDP2, and the share of a step in which communication is not hidden."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = COMMON if small else _large(ranks)
        run_dir = Path(folder) / "run"
        ended = run_recipe("pretrain", run_dir, device, ranks, [*sizes, "parallelism=fsdp2", "training.log_every=1"])
        if ended.returncode:
            yield failed("FSDP2", last_line(ended))
            return
        result = json.loads((run_dir / "result.json").read_text())
        planned = (result.get("planned") or {}).get("step_seconds")
        measured = result["step_seconds"]
        predicted = f"{planned:.3g}" if planned else "-"
        yield Line("FSDP2: seconds of a step", f"{measured:.3g}", predicted=predicted)
        yield Line("FSDP2: tokens/s of a rank", f"{result['tokens_per_second'] / ranks:,.0f}")
        if result.get("mfu"):
            yield at_least("FSDP2: MFU", result["mfu"], 0.4)
        if planned:
            yield at_most("FSDP2: measured / predicted seconds", measured / planned, 1.15, speed=True)


def stopped_rank(device: str, ranks: int, small: bool) -> Iterator[Line]:
    """A rank that is stopped within a step: the run ends as hung, and names it."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        limits = [f"training.step_timeout_seconds={STEP_TIMEOUT:g}", "training.max_steps=1000000"]
        with start_recipe(
            "pretrain", run_dir, device, ranks, [*COMMON, *limits, "parallelism=fsdp2", "training.log_every=1"]
        ) as run:
            while run.poll() is None and not (metrics(run_dir) and _rank_process(run.pid, ranks - 1)):
                time.sleep(0.2)
            began = time.monotonic()
            if (process := _rank_process(run.pid, ranks - 1)) is not None:
                os.kill(process, signal.SIGSTOP)
            output, _ = run.communicate()
        seconds = time.monotonic() - began
        if run.returncode != EXIT_HUNG:
            yield failed("exit status of a run with a stopped rank", f"{run.returncode}, not {EXIT_HUNG}")
            return
        yield at_most("seconds until the run ends", seconds, 3 * STEP_TIMEOUT)
        named = f"rank {ranks - 1}" in output
        yield at_most("messages that do not name the rank", float(not named), 0)
        if device == "cuda":
            dumps = [*(run_dir / "logs").rglob("*flight*")]
            yield at_least("flight recorder dumps", len(dumps), 1, speed=False)


def export(device: str, ranks: int, small: bool) -> Iterator[Line]:
    """The export of all ranks against the one that a single process makes of the checkpoint: equal bytes."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir, again = Path(folder) / "run", Path(folder) / "again"
        saves = ["checkpoint.last=true", "checkpoint.export=true"]
        ended = run_recipe("pretrain", run_dir, device, ranks, [*COMMON, *saves, "parallelism=fsdp2"])
        if not ended.returncode:
            command = [sys.executable, str(REPOSITORY / "scripts" / "export.py"), str(run_dir), "--out", str(again)]
            ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
        if ended.returncode:
            yield failed("export", last_line(ended))
            return
        found = [_digest(each) for each in (run_dir / "export", again)]
        yield at_most("files that differ", float(found[0] != found[1]), 0)


def start_recipe(name: str, run_dir: Path, device: str, ranks: int, overrides: list[str]) -> subprocess.Popen[str]:
    """Start a recipe on a number of processes, with stdout and stderr in one pipe.

    It stays in the process group of the check, so that a timeout of the check kills it too; its ranks die with it.
    """
    command = [
        sys.executable, str(REPOSITORY / "recipes" / f"{name}.py"), *overrides, f"run.dir={run_dir}",
        f"cluster.device={device}", f"cluster.procs_per_node={ranks}",
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=run_dir.parent)


def run_recipe(
    name: str, run_dir: Path, device: str, ranks: int, overrides: list[str]
) -> subprocess.CompletedProcess[str]:
    """Run a recipe to its end."""
    with start_recipe(name, run_dir, device, ranks, overrides) as run:
        output, _ = run.communicate()
    return subprocess.CompletedProcess(run.args, run.returncode, output, "")


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a run's metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a process printed."""
    return ([line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()] or ["no message"])[-1]


def _large(ranks: int) -> list[str]:
    """Return the overrides of LLAMA_8B with random weights, bfloat16 matmuls and data of full rows. Needs no hub."""
    return [
        "experiment=bench_mesh", "model=llama3_1_8b", "model.path=null", "model.init=random", "model.tokenizer=bytes",
        *(f"model.config.{name}={str(value).lower()}" for name, value in LLAMA_8B.items()),
        "training.max_steps=10", f"training.seq_len={LARGE_SEQ_LEN}", f"training.micro_batch_size={LARGE_MICRO_BATCH}",
        f"training.global_batch_size={LARGE_MICRO_BATCH * ranks}", *_device_option(),
    ]  # fmt: skip


def _device_option() -> list[str]:
    """Return the override that names the first visible GPU in conf/gpu; empty for others, which have no prediction."""
    import torch

    name = torch.cuda.get_device_name()
    known = {"H200": "h200", "H100": "h100_80", "A100-SXM4-80GB": "a100_80", "A100-SXM4-40GB": "a100_40"}
    return [f"cluster.gpu={option}" for part, option in known.items() if part in name]


def _rank_process(launcher: int, rank: int) -> int | None:
    """Return the process id of a rank that a launcher started, found by its environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"MESHBOOK_LAUNCHER_PID={launcher}".encode() in variables and f"RANK={rank}".encode() in variables:
            return int(folder.name)
    return None


def _digest(export: Path) -> dict[str, str]:
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in sorted(export.glob("*.safetensors"))}
