"""scripts/parity.py as a person starts it: the table and its files, a mesh that is wrong, options that are wrong."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EVERYTHING = os.environ.get("MESHBOOK_ALL_PARITY") == "1"
JOB = ["model=tiny", "data.max_samples=64", "training.seq_len=64", "training.global_batch_size=6", "cluster.device=cpu"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{cwd}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "parity.py"), *arguments]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=240, check=False)


def test_the_table_of_a_tiny_model(tmp_path: Path) -> None:
    meshes = "dp_shard2,pp2"
    ended = run(*JOB, "--processes", "2", "--steps", "2", "--meshes", meshes, "--out", "table", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = list(csv.DictReader((tmp_path / "table" / "parity.csv").open()))
    assert [(row["mesh"], row["verdict"]) for row in rows] == [(name, "ok") for name in meshes.split(",")]
    assert all(0 < float(row["gradient"]) < 1e-4 and row["worst_gradient"] for row in rows)
    assert (tmp_path / "table" / "parity.md").read_text().count("| ok |") == 2
    assert (tmp_path / "table" / "parity.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


@pytest.mark.skipif(not EVERYTHING, reason="make parity")
def test_a_named_mesh_that_the_model_rejects(tmp_path: Path) -> None:
    """The model's config, which has no experts, suffices: nothing is built."""
    ended = run(*JOB, "--processes", "2", "--steps", "1", "--meshes", "ep2", "--no-gradients", cwd=tmp_path)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stderr.startswith("--meshes ep2: parallelism.ep=2: the model is dense, it has no experts; set")


def test_a_mesh_that_disagrees_and_one_that_dies(tmp_path: Path) -> None:
    """A data set of the user's that is another one on another rank, and one that kills a rank."""
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
    for name, words in (("build", "loss off by"), ("bad", "failed: a process died")):
        ended = run(*job, f"data=custom_{name}", "--out", name, cwd=tmp_path)
        assert ended.returncode == 1, ended.stdout + ended.stderr
        assert words in ended.stdout
        assert [row["verdict"] for row in csv.DictReader((tmp_path / name / "parity.csv").open())] == ["wrong"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--processes", "0"], "--processes 0: must be 1 or more"),
        (["--meshes", "fsdp9"], "--meshes fsdp9: no such mesh"),
        (["--processes", "2", "--meshes", "pp4"], "--meshes pp4: parallelism: pp 4 = 4 processes, but there are 2"),
        (["--processes", "4", "--meshes", "pp4"], "--meshes pp4: parallelism.pp=4"),  # of two layers
        (["model=tiny_moe", "--processes", "3", "--meshes", "ep3"], "--meshes ep3: parallelism.ep=3"),
        (["parallelism=ddp"], "parallelism=ddp: this script sets the meshes by --meshes"),
        (["model.dtype=float64"], "this script sets the dtype by --dtype"),
        (["--dtype", "float16"], "--dtype: invalid choice"),
        (["training.seq_len=1"], "training.seq_len=1"),
        (["model.nope=1"], "model.nope"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_options_end_before_torch(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")  # the first on the path
    ended = run(*JOB, *arguments, cwd=tmp_path)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "outputs").exists()
