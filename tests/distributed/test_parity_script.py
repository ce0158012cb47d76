"""scripts/parity.py from the command line: its table and files, failing meshes and invalid options."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.config.schema.data import DocsDataConfig
from components.config.schema.model import ModelConfig
from components.config.schema.objective import NextTokenConfig
from components.config.schema.recipes import FinetuneConfig
from components.config.schema.training import TrainingConfig
from components.planning.parity import Comparison, _hyperparameters
from tests.config.commands import Commands, served
from tests.preloaded import run_preloaded
from tests.suites import PARITY, in_parity

ROOT = Path(__file__).resolve().parents[2]
CHOSEN = (
    r"training.freeze=[embed_tokens,layers\.1\.mlp]",
    "optimizer.groups=[{match: norm, lr: 1e-3, weight_decay: 0.1}, {match: mlp, lr: 5e-3}]",
)
"""Weights that stay as they are, and others with rates of their own; the tied head is a copy under pp."""
JOB = ["model=tiny", "data.max_samples=64", "training.seq_len=64", "training.global_batch_size=6", "cluster.device=cpu"]


def run(*arguments: str, cwd: Path, preloaded: bool = False) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{cwd}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "parity.py"), *arguments]
    if preloaded:
        return run_preloaded(command, cwd, environ)
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with served() as server:
        yield server


def test_tiny_model_passes_and_writes_table_files(tmp_path: Path) -> None:
    meshes = "tp2_sp,cp2,dp_shard2,ddp2,pp2" if PARITY else "dp_shard2,pp2"
    options = ("--processes", "2", "--steps", "3", "--meshes", meshes, "--out", "table", "--dtype", "float64")
    completed = run(*JOB, *CHOSEN, *options, cwd=tmp_path, preloaded=not PARITY)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    rows = list(csv.DictReader((tmp_path / "table" / "parity.csv").open()))
    assert [(row["mesh"], row["verdict"]) for row in rows] == [(name, "ok") for name in meshes.split(",")]
    assert all(0 < float(row["gradient"]) < 1e-12 and row["worst_gradient"] for row in rows)
    assert (tmp_path / "table" / "parity.md").read_text().count("| ok |") == len(rows)
    assert (tmp_path / "table" / "parity.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


@in_parity
def test_named_mesh_that_the_model_does_not_support_is_rejected(tmp_path: Path) -> None:
    """Detected from the config of a dense model, before any model is built."""
    completed = run(*JOB, "--processes", "2", "--steps", "1", "--meshes", "ep2", "--no-gradients", cwd=tmp_path)
    assert completed.returncode == 2, completed.stdout + completed.stderr
    assert completed.stderr.startswith("--meshes ep2: parallelism.ep=2: the model is dense (no experts); set")


@in_parity
def test_deviating_and_crashing_meshes_fail(tmp_path: Path) -> None:
    """Uses a custom dataset that differs between ranks, and one that kills a rank."""
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "from components.data import Example\n"
        "def build(tokenizer, seq_len, split):\n"
        "    shift = int(os.environ['RANK']) if os.environ['WORLD_SIZE'] == '2' else 0\n"
        "    return [Example([5 + i + shift, 6, 7, 8 + i], [-100, 6, 7, 8 + i]) for i in range(32)]\n"
        "def bad(tokenizer, seq_len, split):\n"
        "    if os.environ['RANK'] == '1': os._exit(3)\n"
        "    return build(tokenizer, seq_len, split)\n"
    )
    job = [*JOB, "--processes", "2", "--steps", "1", "--meshes", "dp_shard2"]
    (tmp_path / "conf" / "data").mkdir(parents=True)
    for name in ("build", "bad"):
        text = f"defaults:\n  - /schema/data/custom@_here_\n  - _self_\nfactory: mine:{name}\neval_split: held\n"
        (tmp_path / "conf" / "data" / f"custom_{name}.yaml").write_text(text)
    for name, message in (("build", "loss off by"), ("bad", "failed: a process died")):
        completed = run(*job, f"data=custom_{name}", "--out", name, cwd=tmp_path)
        assert completed.returncode == 1, completed.stdout + completed.stderr
        assert message in completed.stdout
        assert [row["verdict"] for row in csv.DictReader((tmp_path / name / "parity.csv").open())] == ["wrong"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0"], "--processes 0: must be 1 or more"),
        (["--meshes", "fsdp9"], "--meshes fsdp9: no such mesh"),
        (["--processes", "2", "--meshes", "pp4"], "--meshes pp4: parallelism: pp 4 = 4 processes, but there are 2"),
        (["--processes", "4", "--meshes", "pp4"], "--meshes pp4: parallelism.pp=4"),  # the model has two layers
        (["model=tiny_moe", "--processes", "3", "--meshes", "ep3"], "--meshes ep3: parallelism.ep=3"),
        (["parallelism=ddp"], "parallelism=ddp: this script sets the meshes by --meshes"),
        (["model.dtype=float64"], "this script sets the dtype by --dtype"),
        (["--dtype", "float16"], "--dtype: invalid choice"),
        (["training.seq_len=1"], "training.seq_len=1"),
        (["model.nope=1"], "model.nope"),
        (["optimizer=lion"], "optimizer=lion: the reference supports AdamW only; set optimizer=adamw"),
        (["training.neftune_alpha=5"], "training.neftune_alpha=5: the reference trains without this noise"),
        (["training.skip_spikes=6"], "training.skip_spikes=6: the reference skips no update; set it to null"),
        (["training.max_steps=null", "training.epochs=2"], "training.epochs=2: the comparison needs the length"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_options_are_rejected_before_torch_is_imported(
    arguments: list[str], message: str, tmp_path: Path, commands: Commands
) -> None:
    ended = commands.run(ROOT / "scripts" / "parity.py", [*JOB, *arguments], tmp_path)
    assert ended.status == 2, ended.output + ended.errors
    assert message in ended.errors
    assert "Traceback" not in ended.errors
    assert not ended.imported_torch
    assert not (tmp_path / "outputs").exists()


def test_comparison_trains_the_terms_of_the_configured_objective(tmp_path: Path) -> None:
    cfg = FinetuneConfig(
        model=ModelConfig(path="made here"),
        data=DocsDataConfig(),
        objective=NextTokenConfig(label_smoothing=0.1, z_loss=0.02),
        training=TrainingConfig(max_steps=3),
    )
    found = _hyperparameters(Comparison(cfg, 2, steps=3, dtype="float64", gradients=True, out=tmp_path))
    assert (found.label_smoothing, found.z_loss, found.max_steps) == (0.1, 0.02, 3)
