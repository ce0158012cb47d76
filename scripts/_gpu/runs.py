"""Checks of whole runs: the recipe against a CPU, and a run that is killed and resumed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from components.launch.machine import usable_cores
from components.protocol.run_files import CHECKPOINTS, ROLLOUTS, checkpoint_name
from components.training.answers import Answers
from scripts._gpu.several import last_line, metrics, run_recipe
from scripts._gpu.verdict import Line, at_most, control, failed

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 12
COMMON = [
    "model=llama_2m", f"training.max_steps={STEPS}", "training.micro_batch_size=2", "training.global_batch_size=4",
    "training.seq_len=128", "logging.plot=false", "training.eval_every=0", "generation.samples=0",
    "data.max_samples=200",
]  # fmt: skip
RATE = 2e-3
"""Learning rate of the runs whose losses are compared."""
LOSS_BOUND = 1e-4
"""Largest relative difference of a loss in float32 from that of a CPU."""


_GRPO = [
    "model=llama_2m", f"training.max_steps={STEPS}", "training.micro_batch_size=16", "training.global_batch_size=32",
    "training.seq_len=32", "training.eval_every=0", "data.eval_fraction=0.1", "rollouts.group=8",
    f"optimizer.lr={RATE}", "rollouts.max_new_tokens=8", "checkpoint.export=false", "logging.plot=false",
    "generation.samples=0",
]  # fmt: skip
_DIGITS = """
def digits(answers):
    return [sum(each.isdigit() for each in text) / 8 for text in answers]
"""


def recipe(device: str, small: bool) -> Iterator[Line]:
    """recipes/finetune.py, packed and not, in float32 against the same run on a CPU, and as `auto` configures it."""
    float32, packed = ["model.compute_dtype=float32", f"optimizer.lr={RATE}"], ["data.pack=true"]
    runs = {
        "packed": (device, float32 + packed),
        "not packed": (device, float32),
        "as configured by auto": (device, [f"optimizer.lr={RATE}", *packed]),
        "packed, on a CPU": ("cpu", float32 + packed),
        "not packed, on a CPU": ("cpu", float32),
        "1.5 times the learning rate, on a CPU": ("cpu", [*float32[:1], f"optimizer.lr={1.5 * RATE}", *packed]),
    }
    with tempfile.TemporaryDirectory() as folder:
        run_dirs = {name: Path(folder) / str(index) for index, name in enumerate(runs)}

        def run(name: str) -> subprocess.CompletedProcess[str]:
            place, overrides = runs[name]
            return run_recipe("finetune", run_dirs[name], place, 1, [*COMMON, *overrides])

        with ThreadPoolExecutor(max(2, usable_cores() // 2)) as pool:
            ended = dict(zip(runs, pool.map(run, runs), strict=True))
        losses = {}
        for name, result in ended.items():
            print(f"--- {name}\n{result.stdout}", flush=True)
            if result.returncode:
                yield failed(name, last_line(result))
                continue
            losses[name] = [metric["loss"] for metric in metrics(run_dirs[name]) if "loss" in metric]
            yield Line(f"{name}: first and last loss", f"{losses[name][0]:.4f}, {losses[name][-1]:.4f}")
    if len(losses) < len(runs):
        return
    on_cpu = losses["packed, on a CPU"]
    yield at_most("packed: losses against a CPU's", _difference(losses["packed"], on_cpu), LOSS_BOUND)
    unpacked = _difference(losses["not packed"], losses["not packed, on a CPU"])
    yield at_most("not packed: losses against a CPU's", unpacked, LOSS_BOUND)
    faster = _difference(losses["1.5 times the learning rate, on a CPU"], on_cpu)
    yield control("1.5 times the learning rate: losses", faster, LOSS_BOUND)
    rounded = _difference(losses["as configured by auto"], on_cpu)
    yield Line("as configured by auto: losses against a CPU's in float32", f"{rounded:.3g}")


def grpo(device: str, small: bool) -> Iterator[Line]:
    """recipes/grpo.py in float64 against the same run on a CPU: equal answers; and as `auto` configures it."""
    float64 = ["model.dtype=float64", "model.compute_dtype=float64"]
    runs = {
        "float64": (device, float64),
        "as configured by auto": (device, []),
        "float64, on a CPU": ("cpu", float64),
        "another seed, on a CPU": ("cpu", [*float64, "run.seed=1"]),
    }
    with tempfile.TemporaryDirectory() as folder:
        prompts, reward = Path(folder) / "prompts.jsonl", Path(folder) / "mine.py"
        prompts.write_text("".join(json.dumps({"prompt": f"{number}:"}) + "\n" for number in range(24)))
        reward.write_text(_DIGITS)
        settings = [*_GRPO, f"data.path={prompts}", f"reward.functions=[{reward}:digits]"]
        run_dirs = {name: Path(folder) / str(index) for index, name in enumerate(runs)}
        answers = {}
        for name, (place, overrides) in runs.items():
            ended = run_recipe("grpo", run_dirs[name], place, 1, [*settings, *overrides])
            print(f"--- {name}\n{ended.stdout}", flush=True)
            if ended.returncode:
                yield failed(name, last_line(ended))
                return
            rewards = [metric["reward"] for metric in metrics(run_dirs[name]) if "reward" in metric]
            yield Line(f"{name}: first and last mean reward", f"{rewards[0]:.3f}, {rewards[-1]:.3f}")
            files = sorted((run_dirs[name] / ROLLOUTS).glob("*.safetensors"))
            answers[name] = [tokens for file in files for tokens in Answers.read(file)[0].tokens]
    bound = 1e-3
    differ = {name: _share_of_different(answers[name], answers["float64, on a CPU"]) for name in runs}
    yield at_most("share of answers that differ from a CPU's", differ["float64"], bound)
    yield control("another seed: share of answers that differ", differ["another seed, on a CPU"], bound)


def _share_of_different(found: list[list[int]], expected: list[list[int]]) -> float:
    return sum(one != other for one, other in zip(found, expected, strict=True)) / len(expected)


def _difference(found: list[float], expected: list[float]) -> float:
    """Return the largest relative difference of two curves of the same length."""
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def killed(device: str, small: bool) -> Iterator[Line]:
    """A run that is killed after its first checkpoint and resumed, against an undisturbed one: equal weights."""
    with tempfile.TemporaryDirectory() as folder:
        finals = []
        for name, kill in (("undisturbed", False), ("killed", True)):
            run_dir = Path(folder) / name
            command = [
                sys.executable, str(REPOSITORY / "recipes" / "pretrain.py"), *COMMON, f"run.dir={run_dir}",
                f"cluster.device={device}", "cluster.procs_per_node=1", "checkpoint.every=4", "run.deterministic=true",
            ]  # fmt: skip
            if kill:
                _kill_at_checkpoint(command, run_dir / CHECKPOINTS / checkpoint_name(4))
            ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
            if ended.returncode:
                yield failed(f"{name} run", (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1])
                return
            finals.append(_weights_digest(run_dir / CHECKPOINTS / checkpoint_name(STEPS)))
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
