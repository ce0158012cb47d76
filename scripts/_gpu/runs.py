"""Checks of whole runs: a run that is killed and resumed, samples and their speed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scripts._gpu.verdict import Line, at_most, failed

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 12
COMMON = [
    "model=llama_2m", f"training.max_steps={STEPS}", "training.micro_batch_size=2", "training.global_batch_size=4",
    "training.seq_len=128", "logging.plot=false", "training.eval_every=0", "generation.samples=0",
    "data.max_samples=200",
]  # fmt: skip


def killed(device: str, small: bool) -> Iterator[Line]:
    """A run that is killed after its first checkpoint and resumed, against an undisturbed one: equal weights."""
    with tempfile.TemporaryDirectory() as folder:
        finals = []
        for name, kill in (("undisturbed", False), ("killed", True)):
            run_dir = Path(folder) / name
            command = [
                sys.executable, str(REPOSITORY / "recipes" / "pretrain.py"), *COMMON, f"run.dir={run_dir}",
                f"cluster.device={device}", "cluster.procs_per_node=1", "checkpoint.every=4",
            ]  # fmt: skip
            if kill:
                _kill_at_checkpoint(command, run_dir / "checkpoints" / "step_4")
            ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
            if ended.returncode:
                yield failed(f"{name} run", (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1])
                return
            finals.append(_weights_digest(run_dir / "checkpoints" / f"step_{STEPS}"))
            seconds = json.loads((run_dir / "result.json").read_text()).get("step_seconds")
            yield Line(f"{name} run: seconds of a step", f"{seconds:.3g}" if seconds else "-")
        yield at_most("weights that differ after kill and resume", float(finals[0] != finals[1]), 0)


def _kill_at_checkpoint(command: list[str], checkpoint: Path) -> None:
    # In the process group of the check, so that a timeout of the check kills the run too.
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        while run.poll() is None and not checkpoint.is_dir():
            time.sleep(0.02)
        if run.poll() is None:
            run.kill()  # its ranks die with it


def _weights_digest(checkpoint: Path) -> str:
    """Return a hash of the tensors of a checkpoint, by name."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    for file in sorted(checkpoint.rglob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                digest.update(name.encode() + tensors.get_tensor(name).contiguous().view(-1).numpy().tobytes())
    return digest.hexdigest()
