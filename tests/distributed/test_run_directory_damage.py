"""Resuming from a damaged run directory is rejected with a short message or reproduces the undisturbed loss curve.

A run is killed after its fourth of six steps. In a copy of its run directory, one entry is truncated, has a bit
flipped, is deleted, or is replaced by a folder or a link. The entry can be any file, link or folder: config,
environment, metrics, result, logs or checkpoints. The next start either fails with a short message and exit status 2,
or ends with the weights and losses of an undisturbed run. Lost metrics history is reported. 6 cases; 300 with
MESHBOOK_TORTURE=1.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.distributed.forked_runs import Command
from tests.distributed.test_checkpoint_kills import small_run

CASES = int(os.environ.get("MESHBOOK_CORRUPTIONS", "300" if os.environ.get("MESHBOOK_TORTURE") else "6"))
SEED = int(os.environ.get("MESHBOOK_SEED", "0"))
STEPS, SAVED = 6, 4
DAMAGES = ("cut short", "flipped", "deleted", "a folder", "a dangling link", "a link to another file")
TIMEOUT = 300.0


def one_process(folder: Path, name: str) -> Command:
    arguments = ("checkpoint.every=1", "checkpoint.keep=3", f"training.max_steps={STEPS}", "parallelism=single")
    command = small_run(folder, name, *arguments, "cluster.procs_per_node=1")
    command.arguments.remove("cluster=local_2proc")
    return command


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def weights(run: Path) -> dict[str, bytes]:
    values = {}
    for file in sorted((run / "checkpoints" / f"step_{STEPS}").glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            values |= {f"{file.name} {name}": tensors.get_tensor(name).tobytes() for name in tensors.keys()}  # noqa: SIM118
    return values


def damage(run: Path, kind: str, rng: random.Random) -> Path:
    """Damage a random entry of the run directory and return its path."""
    entries = sorted(run.rglob("*"))
    files = [entry for entry in entries if entry.is_file() and not entry.is_symlink() and entry.stat().st_size]
    path = rng.choice(files if kind in ("cut short", "flipped") else entries)
    if kind == "cut short":
        os.truncate(path, rng.randrange(path.stat().st_size))
        return path
    if kind == "flipped":
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        return path
    other = rng.choice([each for each in files if each != path and not each.is_relative_to(path)])
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind != "deleted":
        path.symlink_to(run / "nowhere" if kind == "a dangling link" else other)
    return path


def must_be_reported(path: Path, run: Path) -> bool:
    """Whether an entry is needed to resume or holds the metrics history; a resumed run does not read other entries."""
    name = str(path.relative_to(run))
    return name in ("config.yaml", "metrics.jsonl", "checkpoints") or f"checkpoints/step_{SAVED}" in name


@pytest.mark.timeout(600 + 60 * CASES)
def test_damaged_run_directory_is_rejected_with_a_message_or_repaired(tmp_path: Path) -> None:
    undisturbed = one_process(tmp_path, "undisturbed")
    assert (attempt := undisturbed.start()).wait(TIMEOUT) == 0, attempt.output()
    expected_weights, expected_losses = weights(undisturbed.run_dir), losses(undisturbed.run_dir)
    assert sorted(expected_losses) == list(range(1, STEPS + 1))
    killed = one_process(tmp_path, "killed")
    attempt = killed.start({"MESHBOOK_FAULT": f"eio:before_manifest:rank0:{SAVED + 1}"})
    assert attempt.wait(TIMEOUT) == 1, attempt.output()
    assert sorted(os.listdir(killed.run_dir / "checkpoints"))[-1] == f"step_{SAVED}"
    assert (killed.run_dir / "result.json").exists()

    rng, outcomes, failures = random.Random(SEED), Counter[str](), []
    command = one_process(tmp_path, "run")
    for number in range(CASES):
        kind = DAMAGES[number % len(DAMAGES)]
        shutil.rmtree(command.run_dir, ignore_errors=True)
        shutil.copytree(killed.run_dir, command.run_dir, symlinks=True)
        path = damage(command.run_dir, kind, rng)
        attempt = command.start()
        status, output = attempt.wait(TIMEOUT), attempt.output()
        outcomes["rejected" if status == 2 else "repaired"] += 1
        if problem := problem_of(status, output, path, command.run_dir, (expected_weights, expected_losses)):
            failures.append(f"case {number} of seed {SEED}: {path} {kind}: {problem}\n{output}")
    print(f"{CASES} corruptions of seed {SEED}: {dict(outcomes)}, {len(failures)} wrong")
    assert not failures, "\n".join(failures)


def problem_of(
    status: int, output: str, path: Path, run: Path, expected: tuple[dict[str, bytes], dict[int, float]]
) -> str:
    """Return why the outcome of a start on a damaged directory is wrong, or an empty string."""
    if "Traceback" in output or status not in (0, 2):
        return f"exited with status {status}"
    if status == 2:
        return "" if len(output.splitlines()) <= 3 and str(run) in output else "rejected without a short message"
    if weights(run) != expected[0]:
        return "weights differ"
    resumed_losses = losses(run)
    if any(expected[1][step] != loss for step, loss in resumed_losses.items()):
        return "losses differ"
    if resumed_losses != expected[1] and "metrics.jsonl" not in output:
        return "lost history not reported"
    return "damage not reported" if must_be_reported(path, run) and not reported(path, output) else ""


def reported(path: Path, output: str) -> bool:
    """Whether the output names an entry or its folder, or reports that its steps are repeated."""
    return path.name in output or path.parent.name in output or "the run repeats them" in output
