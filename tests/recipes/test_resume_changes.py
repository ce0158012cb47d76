"""Changes since a run began are logged on resume, and rejected if they affect its results unless accepted by key."""

from __future__ import annotations

import json
from pathlib import Path

from tests.recipes.test_finetune import ROOT, result, start

TINY = ("experiment=smoke", "data=jsonl", "data.eval_fraction=0.5", "generation.samples=0", "cluster.device=cpu",
        "checkpoint.export=false", "logging.plot=false", "training.seq_len=64", "parallelism=single")  # fmt: skip


def write(file: Path, answer: str) -> None:
    rows = [{"prompt": f"question {i}", "response": f"{answer} {i}"} for i in range(40)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, *overrides: str) -> tuple[int, str]:
    command = (*TINY, f"data.path={folder}/mine.jsonl", f"run.dir={folder}/run", *overrides)
    process = start(ROOT / "recipes" / "finetune.py", *command, cwd=folder)
    output = process.communicate(timeout=240)[0]
    return process.returncode, output


def test_resume_with_changed_data_is_rejected_unless_accepted(tmp_path: Path) -> None:
    write(tmp_path / "mine.jsonl", "answer")
    status, output = run(tmp_path, "training.max_steps=2")
    assert status == 0, output
    stored = json.loads((tmp_path / "run" / "checkpoints" / "step_2" / "state.json").read_text())
    assert stored["config"] == (tmp_path / "run" / "config.yaml").read_text()

    status, output = run(tmp_path, "training.max_steps=3", "training.global_batch_size=4", "run.seed=1")
    assert status == 2
    assert "run.accept_changes=[run.seed]" in output
    assert "run.accept_changes=[training.global_batch_size]" in output

    write(tmp_path / "mine.jsonl", "another")  # the config is unchanged
    status, output = run(tmp_path, "training.max_steps=3")
    assert status == 2, output
    assert "samples differ from the" in output
    assert "run.accept_changes=[data]" in output
    assert "training.max_steps: 2 -> 3" in output
    status, output = run(tmp_path, "training.max_steps=3", "run.accept_changes=[data]")
    assert status == 0, output
    assert result(tmp_path / "run")["steps"] == 3
