"""Any file of a run directory is damaged and the same command typed again: a refusal in a sentence, or the same curve.

A run is killed behind its fourth of six steps. In a copy of what it left, one entry (a file, a link or a folder, of
config, environment, metrics, result, logs and checkpoints alike) is cut short, has a bit flipped, is deleted, or is
replaced by a folder or a link. The next start either refuses with a sentence and status 2, or ends with the weights
and the losses that an undisturbed run has. What is lost of the history is reported. 10 cases; MESHBOOK_TORTURE=1: 300.
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

CASES = int(os.environ.get("MESHBOOK_CORRUPTIONS", "300" if os.environ.get("MESHBOOK_TORTURE") else "10"))
SEED = int(os.environ.get("MESHBOOK_SEED", "0"))
STEPS, SAVED = 6, 4
KINDS = ("cut short", "flipped", "deleted", "a folder", "a dangling link", "a link to another file")
PATIENCE = 300.0


def one_process(folder: Path, name: str) -> Command:
    arguments = ("checkpoint.every=1", "checkpoint.keep=3", f"training.max_steps={STEPS}", "parallelism=single")
    command = small_run(folder, name, *arguments, "cluster.procs_per_node=1")
    command.arguments.remove("cluster=local_2proc")
    return command


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def weights(run: Path) -> dict[str, bytes]:
    held = {}
    for file in sorted((run / "checkpoints" / f"step_{STEPS}").glob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            held |= {f"{file.name} {name}": tensors.get_tensor(name).tobytes() for name in tensors.keys()}  # noqa: SIM118
    return held


def damage(run: Path, kind: str, dice: random.Random) -> Path:
    """Damage an entry and return its path."""
    entries = sorted(run.rglob("*"))
    files = [entry for entry in entries if entry.is_file() and not entry.is_symlink() and entry.stat().st_size]
    path = dice.choice(files if kind in ("cut short", "flipped") else entries)
    if kind == "cut short":
        os.truncate(path, dice.randrange(path.stat().st_size))
        return path
    if kind == "flipped":
        data = bytearray(path.read_bytes())
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        return path
    other = dice.choice([each for each in files if each != path and not each.is_relative_to(path)])
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind != "deleted":
        path.symlink_to(run / "nowhere" if kind == "a dangling link" else other)
    return path


def has_to_be_reported(path: Path, run: Path) -> bool:
    """Whether an entry holds what a resume needs, or the history; a run that resumes does not look at the others."""
    name = str(path.relative_to(run))
    return name in ("config.yaml", "metrics.jsonl", "checkpoints") or f"checkpoints/step_{SAVED}" in name


@pytest.mark.timeout(600 + 60 * CASES)
def test_damage_to_any_file_is_refused_in_a_sentence_or_healed(tmp_path: Path) -> None:
    quiet = one_process(tmp_path, "quiet")
    assert (attempt := quiet.start()).wait(PATIENCE) == 0, attempt.said()
    expected, curve = weights(quiet.run_dir), losses(quiet.run_dir)
    assert sorted(curve) == list(range(1, STEPS + 1))
    killed = one_process(tmp_path, "killed")
    attempt = killed.start({"MESHBOOK_FAULT": f"eio:before_manifest:rank0:{SAVED + 1}"})
    assert attempt.wait(PATIENCE) == 1, attempt.said()
    assert sorted(os.listdir(killed.run_dir / "checkpoints"))[-1] == f"step_{SAVED}"
    assert (killed.run_dir / "result.json").exists()

    dice, seen, wrong = random.Random(SEED), Counter[str](), []
    command = one_process(tmp_path, "run")
    for number in range(CASES):
        kind = KINDS[number % len(KINDS)]
        shutil.rmtree(command.run_dir, ignore_errors=True)
        shutil.copytree(killed.run_dir, command.run_dir, symlinks=True)
        path = damage(command.run_dir, kind, dice)
        attempt = command.start()
        status, said = attempt.wait(PATIENCE), attempt.said()
        seen["refused" if status == 2 else "healed"] += 1
        if problem := problem_of(status, said, path, command.run_dir, (expected, curve)):
            wrong.append(f"case {number} of seed {SEED}: {path} {kind}: {problem}\n{said}")
    print(f"{CASES} corruptions of seed {SEED}: {dict(seen)}, {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong)


def problem_of(
    status: int, said: str, path: Path, run: Path, expected: tuple[dict[str, bytes], dict[int, float]]
) -> str:
    """Return what is wrong with how a start on a damaged directory ended; empty if nothing is."""
    if "Traceback" in said or status not in (0, 2):
        return f"ended with status {status}"
    if status == 2:
        return "" if len(said.splitlines()) <= 3 and str(run) in said else "refused without a sentence"
    if weights(run) != expected[0]:
        return "other weights"
    told = losses(run)
    if any(expected[1][step] != loss for step, loss in told.items()):
        return "another curve"
    if told != expected[1] and "metrics.jsonl" not in said:
        return "history lost in silence"
    return "damage not reported" if has_to_be_reported(path, run) and not reported(path, said) else ""


def reported(path: Path, said: str) -> bool:
    """Whether the output names an entry, its folder, or says that its steps are done again."""
    return path.name in said or path.parent.name in said or "the run repeats them" in said
