"""Terminal output of a run at 80 columns, and its loss.png."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pytest

from components.config.schema.data import SftDataConfig
from components.config.schema.model import ModelConfig
from components.config.schema.parallelism import MeshShape
from components.observability.plot import LossPlot, _figure, run_title

ROOT = Path(__file__).resolve().parents[2]
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


def test_output_fits_a_terminal_of_80_columns(tmp_path: Path) -> None:
    output = on_terminal(
        80, sys.executable, str(ROOT / "recipes" / "finetune.py"), "model=tiny", "parallelism=single",
        "cluster.device=cpu", "training.max_steps=2", "training.global_batch_size=2", "data.max_samples=8",
        "data.max_eval_samples=2", "checkpoint.export=false", "checkpoint.last=false", "generation.max_new_tokens=2",
        f"run.dir={tmp_path}/run",
    )  # fmt: skip
    assert "evaluating" in output
    assert "generating" in output
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", CONTROL.sub("", output))]
    logged = [line for line in lines if line.startswith(("step ", "ok:", "  "))]
    assert sum("grad_norm" in line for line in logged) == 2
    assert [line for line in logged if len(line) > 80 and str(tmp_path) not in line] == []
    assert "note" not in lines  # a note without text
    shown = " ".join(" ".join(lines).split())
    assert "mesh 1 process batch" in shown
    for unwanted in ("1 processes", "dp_shard=1", "MFU"):
        assert unwanted not in shown
    assert (tmp_path / "run" / "loss.png").stat().st_size > 1000


def test_plot_is_updated_during_a_run(tmp_path: Path) -> None:
    plot = LossPlot(tmp_path, "title", lambda: [{"step": 1, "loss": 2.0}])
    plot.update()
    plot.wait()
    picture = tmp_path / "loss.png"
    picture.unlink()
    plot.update()  # too soon
    plot.wait()
    assert not picture.exists()
    assert plot.finish() is None
    assert picture.exists()


@pytest.mark.parametrize("steps", [2, 3, 400])
def test_plot_has_integer_step_ticks(steps: int) -> None:
    figure = _figure([(step, 1.0 / step) for step in range(1, steps + 1)], [], "title")
    assert all(float(tick).is_integer() for tick in figure.axes[0].get_xticks())


def test_plot_title_names_model_data_and_mesh() -> None:
    model, data = ModelConfig(path="owner/Model-0.5B"), SftDataConfig(path="/data/mine.jsonl")
    title = run_title(model, data, MeshShape(dp_shard=2, tp=2))
    assert title == "Model-0.5B on mine.jsonl, dp_shard=2 x tp=2 = 4 processes"
