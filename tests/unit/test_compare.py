"""Comparison of runs, and metrics.jsonl: strict JSON whose damage is reported, preserved and skipped."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.config.schema.run import LoggingConfig
from components.config.stored_run import MetricsLog
from components.launch.run_directory_lease import take_lease
from components.observability import Reporter
from components.presentation import PlainConsole
from components.training import StepMetrics
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


def make_rewarded(folder: Path, rewards: tuple[float, ...]) -> Path:
    """Write a run directory with a reward per step, whose loss means nothing, and a held-out reward 0.5 lower."""
    make_run(folder, losses=())
    log = MetricsLog(folder)
    for step, reward in enumerate(rewards, 1):
        log.append({"step": step, "reward": reward, "loss": -0.0, "tokens": 100 * step})
    log.append({"step": len(rewards), "eval_reward": rewards[-1] - 0.5})
    return folder


def test_runs_with_rewards_are_compared_by_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `plot`")
    figures: list[Any] = []
    monkeypatch.setattr(compare, "save_figure", lambda figure, file: figures.append(figure))
    rewarded = [make_rewarded(tmp_path / "a", (0.01, 1.0, 0.75)), make_rewarded(tmp_path / "b", (0.25, 0.5))]
    comparison = read_comparison([*rewarded, make_run(tmp_path / "failed", losses=())], [])
    table = dict(zip(comparison.header(), comparison.cells("a"), strict=True))
    assert {name: text for name, text in table.items() if "loss" in name or "reward" in name} == {
        "last reward": "0.7500", "best reward": "1.0000", "eval reward": "0.2500",
    }  # fmt: skip
    comparison = read_comparison([*rewarded, make_run(tmp_path / "c", losses=(5.0, 3.5))], [])
    cells = {name: dict(zip(comparison.header(), comparison.cells(name), strict=True)) for name in comparison.runs}
    assert (cells["b"]["last loss"], cells["b"]["best reward"]) == ("", "0.5000")
    assert (cells["c"]["last loss"], cells["c"]["best reward"]) == ("3.5000", "")
    assert comparison.plot(tmp_path / "x.png") is None
    drawn = {axes.get_title(): [str(line.get_label()) for line in axes.lines] for axes in figures[0].axes}
    assert drawn == {
        "loss": ["c"], "loss over tokens": ["c"], "held-out loss": ["c"],
        "reward": ["a", "b"], "held-out reward": ["a", "b"],
    }  # fmt: skip
    assert [axes.get_yscale() for axes in figures[0].axes] == ["linear"] * 5  # although the rewards differ by 100


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


STEPS = 8


def step(number: int, loss: float | None = None) -> StepMetrics:
    return StepMetrics(number, number / 10 if loss is None else loss, 1.0, 64, 1.0, False, False, False, False)


def reporter(run: Path) -> Reporter:
    return Reporter(LoggingConfig(plot=False), str(run), enabled=True)


def write(run: Path) -> Path:
    report = reporter(run)
    for number in range(1, STEPS + 1):
        report.step(step(number), lr=1e-3, tokens=64 * number)
    return run / "metrics.jsonl"


def steps(report: Reporter) -> list[int]:
    return [line["step"] for line in report.read()]


def strict(path: Path) -> list[dict[str, object]]:
    def reject(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=reject) for line in path.read_text().splitlines()]


def test_nan_is_written_as_null_and_listed_in_nonfinite(tmp_path: Path) -> None:
    report = reporter(tmp_path)
    report.step(step(1, math.nan), lr=1e-3, tokens=64)
    report.evaluation(step=1, eval_loss=-math.inf, count=3)
    first, second = strict(tmp_path / "metrics.jsonl")
    assert (first["loss"], first["nonfinite"], first["grad_norm"]) == (None, {"loss": "nan"}, 1.0)
    assert (second["eval_loss"], second["nonfinite"]) == (None, {"eval_loss": "-inf"})
    again = report.read()
    assert math.isnan(again[0]["loss"])
    assert again[1]["eval_loss"] == -math.inf


def set_line(number: int, content: bytes) -> Callable[[list[bytes]], list[bytes]]:
    return lambda lines: [*lines[: number - 1], content, *lines[number:]]


DAMAGE: dict[str, tuple[Callable[[list[bytes]], list[bytes]], list[int], str]] = {
    "bad JSON": (set_line(3, b'{"step": 3, "lo'), [3], "holds a damaged line"),
    "missing step": (set_line(3, b'{"loss": 3}'), [3], "holds a damaged line"),
    "not an object": (set_line(3, b"[3]"), [3], "holds a damaged line"),
    "not UTF-8": (set_line(3, b'{"step": 3, "x": "\xff\xfe"}'), [3], "holds a damaged line"),
    "changed value": (lambda lines: [line.replace(b'"loss": 0.3', b'"loss": 0.7') for line in lines], [3], "damaged"),
    "missing newline": (lambda lines: [lines[0], lines[1] + lines[2], *lines[3:]], [], ""),
    "wrong newline": (lambda lines: [lines[0], lines[1] + b"\x0b" + lines[2], *lines[3:]], [], ""),
    "missing lines": (
        lambda lines: [*lines[:2], *lines[4:]],
        [3, 4],
        "2 lines are missing in metrics.jsonl before step 5",
    ),
    "truncated": (lambda lines: lines[:6], [7, 8], "ends with step 6: the history of the steps up to 8 is lost"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_reported_and_preserved_and_the_run_continues(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path)
    damage, lost, message = DAMAGE[kind]
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"".join(line + b"\n" for line in damage(lines)))
    report = reporter(tmp_path)
    capsys.readouterr()
    report.continue_from(STEPS)
    assert message in capsys.readouterr().out
    assert steps(report) == [number for number in range(1, STEPS + 1) if number not in lost]
    report.step(step(STEPS + 1), lr=1e-3, tokens=64)
    assert strict(path)[-1]["step"] == STEPS + 1
    preserved = tmp_path / "metrics.jsonl.damaged"
    assert preserved.exists() == ("damaged" in message)
    if preserved.exists():
        assert preserved.read_bytes() in path.read_bytes() + b"".join(line + b"\n" for line in damage(lines))
    again = reporter(tmp_path)
    again.continue_from(STEPS + 1)
    assert "metrics.jsonl" not in capsys.readouterr().out, "repaired damage must not be reported again"


def test_lines_without_checksums_are_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    report = reporter(tmp_path)
    report.continue_from(2)
    assert "metrics.jsonl holds 2 damaged lines: moved to metrics.jsonl.damaged" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl.damaged").read_text() == lines
    report.step(step(3), lr=1e-3, tokens=64)
    assert steps(report) == [3]
    strict(tmp_path / "metrics.jsonl")


def test_dropped_steps_that_the_run_repeats_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path)
    report = reporter(tmp_path)
    report.continue_from(5)
    assert "steps 6 to 8 in metrics.jsonl are dropped: the run repeats them" in capsys.readouterr().out
    assert steps(report) == [1, 2, 3, 4, 5]


def test_missing_history_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = reporter(tmp_path)
    report.continue_from(5)  # started from another run's checkpoint, so there is no history yet
    assert capsys.readouterr().out == ""
    (tmp_path / "checkpoints" / "step_5").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "nowhere")
    report.continue_from(5)
    assert "metrics.jsonl is missing or empty: the history of steps 1 to 5 is lost" in capsys.readouterr().out


def test_no_bit_flip_changes_the_history_silently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    original, before = path.read_bytes(), reporter(tmp_path).read()
    rng = random.Random(0)
    for _ in range(200):
        data = bytearray(original)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        report = reporter(tmp_path)
        capsys.readouterr()
        report.continue_from(STEPS)
        after = report.read()
        assert all(line in before for line in after)
        assert after == before or "metrics.jsonl" in capsys.readouterr().out
