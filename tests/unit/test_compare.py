"""scripts/compare.py on files of runs that are complete, running, failed or of other recipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.config.stored_run import MetricsLog
from components.launch.run_directory_lease import take_lease
from components.presentation import PlainConsole
from scripts import compare
from scripts.compare import main, read_comparison

ROOT = Path(__file__).resolve().parents[2]
CONFIG: dict[str, Any] = {
    "run": {"dir": "DIR", "seed": 42},
    "model": {"path": "/models/SmolLM2-135M", "config": {}},
    "optimizer": {"lr": 1e-4, "betas": [0.9, 0.95]},
}


def make_run(folder: Path, *, recipe: str = "finetune", losses: tuple[float, ...] = (5.0, 4.0), **config: Any) -> Path:
    """Write a run directory without a result: a loss per step of 100 tokens, at the end a held-out loss 1 higher."""
    folder.mkdir(parents=True)
    sections = {**CONFIG, "run": {"dir": str(folder), "seed": 42}, **config}
    (folder / "config.yaml").write_text(yaml.safe_dump(sections, sort_keys=False))
    (folder / "environment.json").write_text(json.dumps({"recipe": recipe, "started": "2020-01-01T00:00:00+00:00"}))
    log = MetricsLog(folder)
    for step, loss in enumerate(losses, 1):
        log.append(
            {"step": step, "loss": loss, "tokens": 100 * step, "tokens_per_second": 10.0 * step, "extra": step / 8}
        )
    if losses:
        log.append({"step": len(losses), "eval_loss": losses[-1] + 1})
    return folder


def finish(folder: Path, **values: Any) -> Path:
    result = {
        "status": "ok",
        "steps": 2,
        "mesh": "dp_shard=2 x tp=1",
        "tokens_per_second": 1234.0,
        "wall_seconds": 60.0,
    }
    (folder / "result.json").write_text(json.dumps({**result, "peak_memory_bytes": 3 * 2**29, **values}))
    return folder


def rows_of(markdown: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines() if line[:1] == "|"]


def test_table_has_the_numbers_of_complete_running_and_failed_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = finish(make_run(tmp_path / "done", losses=(5.0, 3.5)))
    going = make_run(
        tmp_path / "going", recipe="pretrain", losses=(5.0, 6.0, 5.5), model={"config": {"model_type": "llama"}}
    )
    failed = make_run(tmp_path / "failed", losses=())
    (failed / "result.json").write_text(json.dumps({"status": "oom", "error": "CUDA out of memory\nmore"}))
    lease = take_lease(going)
    try:
        assert main([str(done), str(going), str(failed), "--metric", "extra", "--out", str(tmp_path / "out")]) == 0
    finally:
        lease.release()
    header, _, *rows = rows_of((tmp_path / "out" / "compare.md").read_text().partition("Keys whose")[0])
    table = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert table["done"] == {
        "run": "done", "recipe": "finetune", "model": "SmolLM2-135M", "mesh": "dp_shard=2", "steps": "2",
        "tokens": "200", "last loss": "3.5000", "best loss": "3.5000", "eval loss": "4.5000", "extra": "0.25",
        "tokens/s": "1,234", "peak GiB": "1.50", "wall s": "60.0", "status": "ok",
    }  # fmt: skip
    running = table["going"]
    assert (running["recipe"], running["model"], running["status"]) == ("pretrain", "llama from scratch", "running")
    assert (running["steps"], running["last loss"], running["best loss"]) == ("3", "5.5000", "5.0000")
    assert running["tokens/s"] == "25"  # the median without the first interval
    assert (table["failed"]["status"], table["failed"]["steps"], table["failed"]["last loss"]) == ("oom", "", "")
    output = capsys.readouterr().out
    assert "failed: CUDA out of memory\n" in output
    assert "more" not in output


def test_run_that_was_killed_is_not_reported_as_running(tmp_path: Path) -> None:
    run = make_run(tmp_path / "killed")
    take_lease(run).release()
    (comparison,) = read_comparison([run], []).runs.values()
    assert compare.status_of(comparison) == "no result"


def test_keys_whose_values_differ_are_listed_with_the_values(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", optimizer={"lr": 2e-4, "betas": [0.9, 0.95]}, peft={"rank": 8})
    assert read_comparison([one, two], []).differences() == [
        ["optimizer.lr", "0.0001", "0.0002"],
        ["peft.rank", "-", "8"],
    ]


def test_plot_has_the_losses_over_steps_and_tokens_and_each_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    figures: list[Any] = []
    monkeypatch.setattr(compare, "save_figure", lambda figure, file: figures.append(figure))
    runs = [make_run(tmp_path / "a", losses=(5.0, 4.0)), make_run(tmp_path / "b", losses=(3.0, 2.0, 1.0))]
    assert read_comparison(runs, ["extra"]).plot(tmp_path / "x.png") is None
    drawn = {
        axes.get_title(): {str(line.get_label()): line.get_xydata().tolist() for line in axes.lines}
        for axes in figures[0].axes
    }
    assert drawn == {
        "loss": {"a": [[1, 5], [2, 4]], "b": [[1, 3], [2, 2], [3, 1]]},
        "loss over tokens": {"a": [[100, 5], [200, 4]], "b": [[100, 3], [200, 2], [300, 1]]},
        "held-out loss": {"a": [[2, 5]], "b": [[3, 2]]},
        "extra": {"a": [[1, 0.125], [2, 0.25]], "b": [[1, 0.125], [2, 0.25], [3, 0.375]]},
    }


def test_runs_of_the_same_name_are_distinguished_by_their_folders(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in ("x/run", "y/run", "z")]
    assert list(read_comparison([*runs, runs[0]], []).runs) == ["x/run", "y/run", "z"]


def test_narrow_terminal_gets_a_column_per_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = read_comparison([finish(make_run(tmp_path / "one")), finish(make_run(tmp_path / "two"))], [])
    comparison.print(PlainConsole(width=70))
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0].split(), lines[1].split()] == [["one", "two"], ["recipe", "finetune", "finetune"]]
    assert ["tokens/s", "1,234", "1,234"] in [line.split() for line in lines]
    comparison.print(PlainConsole(width=200))
    assert capsys.readouterr().out.split()[:3] == ["run", "recipe", "model"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["nowhere"], ["nowhere: is not a run directory, it has no config.yaml; give the directories of runs"]),
        (["run", "--metric", "los"], ["--metric los: no run has logged it; choose from: eval_loss, extra, loss"]),
        (["run", "--out", "run/config.yaml"], ["config.yaml: ", "; fix that, or choose another --out"]),
    ],
)
def test_invalid_arguments_are_rejected(
    arguments: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    errors = capsys.readouterr().err
    assert all(part in errors for part in parts), errors
    assert not (tmp_path / "outputs").exists()


def test_comparison_does_not_import_torch_and_writes_only_its_own_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    runs = [str(finish(make_run(tmp_path / name))) for name in ("one", "two")]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    code = f"import sys; from scripts.compare import main; status = main({[*runs, '--out', 'out']}); " + (
        "assert status == 0 and not {'torch', 'transformers', 'wandb'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=tmp_path, env=environment)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.parts[len(tmp_path.parts)] != "out"}
    assert after == before
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["compare.md", "compare.png"]
