"""Terminal output of a run at 80 columns, and its loss.png."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from components.config.schema.data import SftDataConfig
from components.config.schema.model import ModelConfig, WeightInit
from components.config.schema.parallelism import MeshShape
from components.config.schema.run import LoggingConfig
from components.config.stored_run import run_title
from components.observability import Reporter
from components.observability.result import RunPlot
from components.presentation import TARGET_TOKEN, loss_figure
from tests.suites import in_torture

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("training", "evaluating", "generating", "saving")
"""What the progress bars show."""
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(columns: int, *command: str) -> str:
    """Run a command in a terminal with this number of columns; return its output."""
    process, terminal = pty.fork()
    if process == 0:
        os.execve(command[0], command, {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    output = b""
    try:
        while chunk := os.read(terminal, 1 << 16):
            output += chunk
    except OSError:  # Linux raises EIO once the other end is closed
        pass
    assert os.waitpid(process, 0)[1] == 0, output.decode()
    return output.decode()


FINETUNE = (sys.executable, str(ROOT / "recipes" / "finetune.py"))
SHORT = (
    "model=tiny", "parallelism=single", "cluster.device=cpu", "training.max_steps=2", "training.global_batch_size=2",
    "training.micro_batch_size=2",
    "data.max_samples=8", "data.max_eval_samples=4", "checkpoint.export=false", "generation.max_new_tokens=2",
)  # fmt: skip


def test_output_fits_a_terminal_of_80_columns(tmp_path: Path) -> None:
    output = on_terminal(80, *FINETUNE, *SHORT, "training.micro_batch_size=1", f"run.dir={tmp_path}/run")
    bars = {part: set(re.findall(rf"{part} +━+ +(\d+/\d+)?", CONTROL.sub("", output))) for part in PARTS}
    assert "2/2" in bars["training"]
    assert {"0/4"} <= bars["evaluating"] <= {f"{done}/4" for done in range(5)}
    assert {"0/2"} <= bars["generating"] <= {f"{done}/2" for done in range(3)}
    assert bars["saving"] == {""}
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", CONTROL.sub("", output))]
    logged = [line for line in lines if line.startswith(("step ", "ok:", "  "))]
    assert sum("grad_norm" in line for line in logged) == 2
    assert [line for line in logged if len(line) > 80 and str(tmp_path) not in line] == []
    assert "note" not in lines  # a note without text
    assert lines[1] == "starting: loading PyTorch, the data and the model"
    shown = " ".join(" ".join(lines).split())
    assert "mesh 1 process device cpu batch" in shown
    for unwanted in ("1 processes", "dp_shard=1", "MFU"):
        assert unwanted not in shown
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000
    log = (tmp_path / "run" / "logs" / "latest" / "rank_0.log").read_text()
    assert [line.rstrip() for line in log.splitlines() if line.startswith(("step ", "ok:", "  "))] == logged
    assert "\x1b" not in log
    assert not any(f"{part} " in log for part in PARTS)


def test_log_has_neither_bars_nor_padding_nor_wrapped_lines(tmp_path: Path) -> None:
    run_dir = tmp_path / ("long " * 30 + "name")
    arguments = [*SHORT, "logging.comm=true", "checkpoint.last=false", f"run.dir={run_dir}"]
    done = subprocess.run([*FINETUNE, *arguments], check=True, capture_output=True, text=True, timeout=120)
    output, errors = done.stdout, done.stderr
    lines = output.splitlines()
    assert [line for line in (*errors.splitlines(), *lines) if str(run_dir) in line] == [
        f"run {run_dir}: 1 process",
        f"  {run_dir}",
    ]
    assert "rank  host" not in output  # the table of the ranks of several processes
    assert not (run_dir / "mesh.svg").exists()
    assert [line for line in lines if line != line.rstrip() and not line.startswith("answer ")] == []
    assert not [part for part in PARTS if f"{part} " in output]
    log = (run_dir / "logs" / "latest" / "rank_0.log").read_text()
    assert sorted(log.splitlines()) == sorted(lines + errors.splitlines())


@in_torture
def test_quiet_run_prints_only_its_summary(tmp_path: Path) -> None:
    output = on_terminal(80, *FINETUNE, *SHORT, "--quiet", "checkpoint.last=false", f"run.dir={tmp_path}/run")
    lines = output.replace("\r", "").splitlines()
    assert lines[0] == f"run {tmp_path}/run: 1 process"
    assert lines[1].startswith("ok: 2 steps on 1 process in ")
    assert [line[:2] for line in lines[2:]] == ["  "] * (len(lines) - 2)
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in logged if "loss" in line] == [1, 2]


def test_plot_is_updated_during_a_run(tmp_path: Path) -> None:
    plot = RunPlot(tmp_path, "title", lambda: [{"step": 1, "loss": 2.0}])
    plot.update()
    plot.wait()
    picture = tmp_path / "loss.png"
    picture.unlink()
    plot.update()  # too soon
    plot.wait()
    assert not picture.exists()
    assert plot.finish() is None
    assert picture.exists()


def test_plot_names_the_unit_of_the_evaluated_loss(tmp_path: Path) -> None:
    report = Reporter(LoggingConfig(), str(tmp_path), enabled=True)
    labels = []
    for unit in ("target token", "pair"):
        report.evaluation(step=0, eval_loss=0.7, count=3, unit=unit)
        figure = loss_figure([{"step": 1, "loss": 0.7}], "title", report._plot.unit)
        labels.append(figure.axes[0].get_ylabel())
    report._plot.wait()
    assert labels == ["loss per target token (nats)", "loss per pair"]


@pytest.mark.parametrize("steps", [2, 3, 400])
def test_plot_has_integer_step_ticks(steps: int) -> None:
    figure = loss_figure([{"step": step, "loss": 1.0 / step} for step in range(1, steps + 1)], "title", TARGET_TOKEN)
    assert all(float(tick).is_integer() for tick in figure.axes[0].get_xticks())


def test_plot_title_names_model_data_and_mesh() -> None:
    model, data = ModelConfig(path="owner/Model-0.5B"), SftDataConfig(path="/data/mine.jsonl")
    title = run_title(model, data, MeshShape(dp_shard=2, tp=2))
    assert title == "Model-0.5B on mine.jsonl, dp_shard=2 x tp=2 = 4 processes"
    model.init = WeightInit.random
    assert run_title(model, data, MeshShape()).startswith("Model-0.5B from scratch on mine.jsonl")
    assert model.origin == "architecture of owner/Model-0.5B, random weights"
