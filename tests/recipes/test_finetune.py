"""The recipes end to end, as a user starts them: real processes, a tiny model, real text."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from tests.optional import TORCH
from tests.suites import TORTURE

ROOT = Path(__file__).resolve().parents[2]
TINY = ("experiment=smoke", "training.max_steps=6", "data.max_samples=64", "data.max_eval_samples=8",
        "generation.max_new_tokens=4", "cluster.device=cpu")  # fmt: skip


def start(recipe: Path, *overrides: str, cwd: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MESHBOOK_", "RANK"))}
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen(
        [sys.executable, str(recipe), *overrides],
        cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run(recipe: str, *overrides: str, cwd: Path) -> str:
    process = start(ROOT / "recipes" / recipe, *overrides, cwd=cwd)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    return output


def curve(run_dir: Path, key: str = "loss") -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line[key] for line in lines if key in line]


def result(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())


@pytest.fixture(scope="module")
def single_process(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Run directory and output of an uninterrupted run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    measured = ("logging.peak_tflops=0.01", "logging.profile={enabled: true, start: 2, steps: 1}")
    overrides = (*TINY, *measured, "parallelism=single", f"run.dir={folder}/run", "checkpoint.every=3")
    output = run("finetune.py", *overrides, cwd=folder)
    return folder / "run", output


def test_run_directory_has_the_documented_files(single_process: tuple[Path, str]) -> None:
    run_dir, output = single_process
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "loss.png", "result.json",
                 "export/config.json", "checkpoints/step_3", "checkpoints/step_6",
                 "logs/latest/rank_0.log", "profile/rank_0.json", "profile/rank_0.txt"):  # fmt: skip
        assert (run_dir / name).exists(), f"{name} is missing:\n{output}"
    last = result(run_dir)
    assert last["status"] == "ok"
    assert last["steps"] == 6
    assert last["last_loss"] < last["first_loss"]
    assert last["last_loss"] == curve(run_dir)[-1]
    assert last["eval_loss"] == curve(run_dir, "eval_loss")[-1]
    assert last["peak_memory_bytes"] > 0
    assert 0 < last["mfu"] < 10
    assert min(curve(run_dir, "mfu")) > 0
    assert 0 < last["seconds_to_first_step"] < last["wall_seconds"]
    assert 0 < last["data_wait_seconds"] < last["wall_seconds"]
    assert "\nok: 6 steps on 1 process in " in output
    assert "[[" in output  # the example with its loss mask


@pytest.mark.parametrize(
    "overrides",
    [
        *([("parallelism=fsdp2", "cluster=local_2proc")] if TORTURE else []),
        ("parallelism=fsdp2_tp2_sp", "cluster=local_4proc", "model.loss=chunked"),
        *([("parallelism=ddp", "cluster=local_2proc", "training.micro_batch_size=2")] if TORTURE else []),
    ],
    ids=lambda overrides: overrides[0].removeprefix("parallelism="),
)
def test_every_mesh_logs_the_same_curve(
    overrides: tuple[str, ...], single_process: tuple[Path, str], tmp_path: Path
) -> None:
    extra = ("logging.comm=true", "checkpoint.export=false", "cluster.gpu=cpu")
    output = run("finetune.py", *TINY, *overrides, *extra, f"run.dir={tmp_path}/run", cwd=tmp_path)
    assert "process groups" in output
    assert output.count("collectives of one optimizer step") == 1
    for key in ("loss", "grad_norm", "eval_loss"):
        assert curve(tmp_path / "run", key) == pytest.approx(curve(single_process[0], key), rel=1e-5)
    assert curve(tmp_path / "run", "tokens") == curve(single_process[0], "tokens")
    planned = result(tmp_path / "run")["planned"]
    assert (planned["gpu"], planned["processes"]) == ("cpu", result(tmp_path / "run")["processes"])
    assert planned["peak_memory_bytes"] > 0
    assert planned["step_seconds"] > 0
    picture = (tmp_path / "run" / "mesh.svg").read_text()
    assert picture.count('data-rank="') == planned["processes"]
    assert "Memory of the fullest rank" in picture


def test_export_loads_in_plain_transformers(single_process: tuple[Path, str]) -> None:
    """It loads and generates in a process that does not import this project; its loss is compared below."""
    script = (
        "import sys, json, torch; from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "ids = tokenizer('What does it do?', return_tensors='pt').input_ids\n"
        "longer = model.generate(ids, max_new_tokens=4)\n"
        "print(json.dumps([longer.shape[1] - ids.shape[1], 'components' in sys.modules]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(single_process[0] / "export")],
        capture_output=True, text=True, timeout=120, cwd="/", check=True,
    )  # fmt: skip
    assert "| optimizer | AdamW, lr " in (single_process[0] / "export" / "README.md").read_text()
    generated, imported_components = json.loads(ran.stdout.strip().splitlines()[-1])
    assert 1 <= generated <= 4
    assert not imported_components


@pytest.mark.parametrize("weights", ["checkpoint", "export"])
def test_evaluate_repeats_the_held_out_loss(weights: str, single_process: tuple[Path, str], tmp_path: Path) -> None:
    run_dir = single_process[0]
    source = (
        f"evaluation.checkpoint={run_dir}/checkpoints/step_6"
        if weights == "checkpoint"
        else f"model.path={run_dir}/export"
    )
    overrides = ["model=tiny", source, "data.max_eval_samples=8", "evaluation.seq_len=512", "cluster.device=cpu",
                 f"run.dir={tmp_path}/run", "parallelism=fsdp2", "cluster=local_2proc",
                 "generation.max_new_tokens=4"]  # fmt: skip
    if weights == "export":
        overrides += ["model.init=pretrained", "model.tokenizer=null", "model.config={}", "generation.temperature=0.5"]
    output = run("evaluate.py", *overrides, cwd=tmp_path)
    assert f"answer ({'greedy' if weights == 'checkpoint' else 'temperature 0.5, top_p 1'}): " in output
    evaluated = result(tmp_path / "run")
    assert evaluated["eval_loss"] == pytest.approx(result(run_dir)["eval_loss"], rel=1e-5)
    assert evaluated["steps"] == (6 if weights == "checkpoint" else 0)
    assert ("step      6  eval_loss " in output, "step      0" in output) == (weights == "checkpoint", False)
    assert f"perplexity {math.exp(result(run_dir)['eval_loss']):.3f}"[:14] in output


@pytest.mark.parametrize(("number", "every"), [(signal.SIGUSR2, 1), *([(signal.SIGINT, 3)] if TORTURE else [])])
def test_stopped_run_resumes_with_the_same_curve(
    number: signal.Signals, every: int, single_process: tuple[Path, str], tmp_path: Path
) -> None:
    """After the signal it saves and exits 0; run again, it ends with the bitwise curve of an uninterrupted run."""
    fewer_saves = (
        f"checkpoint.every={every}",
        "checkpoint.last=false",
        "checkpoint.export=false",
    )  # a stopped run saves nevertheless
    command = (*TINY, "parallelism=single", f"run.dir={tmp_path}/run", *fewer_saves)
    process = start(ROOT / "recipes" / "finetune.py", *command, cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"loss"' in metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(number)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    stopped = result(tmp_path / "run")
    assert stopped["status"] == ("preempted" if number == signal.SIGUSR2 else "interrupted")
    assert 1 <= stopped["steps"] < 6
    output = run("finetune.py", *command, cwd=tmp_path)
    assert f"resumed from {tmp_path}/run/checkpoints/step_{stopped['steps']}" in output
    assert curve(tmp_path / "run") == curve(single_process[0])
    assert result(tmp_path / "run")["eval_loss"] == result(single_process[0])["eval_loss"]


def test_wandb_runs_offline_and_its_failure_does_not_stop_a_run(tmp_path: Path) -> None:
    short = (*TINY, "training.max_steps=2", "checkpoint.export=false", "generation.samples=0", "parallelism=single")
    run("finetune.py", *short, f"run.dir={tmp_path}/offline", "logging.wandb.mode=offline", cwd=tmp_path)
    (stored,) = (tmp_path / "offline" / "wandb").glob("offline-run-*-offline-*/*.wandb")
    names = "training optimizer parallelism model data cluster run global_batch_size weight_decay sequence_parallel"
    names += " attention eval_fraction collective_timeout"
    # The records are framed in blocks of 32 KiB, which may cut one name in two.
    assert sum(name.encode() in stored.read_bytes() for name in names.split()) >= len(names.split()) - 1
    output = run("finetune.py", *short, f"run.dir={tmp_path}/online", "logging.wandb.mode=online", cwd=tmp_path)
    assert "wandb failed and is off for the rest of the run" in output  # no account, no network
    assert result(tmp_path / "online")["status"] == "ok"


@pytest.mark.skipif(TORCH >= (2, 12) and not TORTURE, reason="make oldest, make torture: compiles kernels of a CPU")
def test_compiled_layers_give_the_same_losses(tmp_path: Path) -> None:
    """Packed rows, by Inductor, as on a GPU by default."""
    for compiled in ("false", "true"):
        overrides = ("data.pack=true", f"model.compile={compiled}", "parallelism=single")
        run("finetune.py", *TINY, *overrides, f"run.dir={tmp_path / compiled}", cwd=tmp_path)
    assert curve(tmp_path / "true") == pytest.approx(curve(tmp_path / "false"), rel=1e-5)


@pytest.mark.new_interpreter
def test_a_checkout_on_pythonpath_runs_without_being_installed(tmp_path: Path) -> None:
    """As on a machine with the packages but without a package index, from another folder."""
    packages = Path(sysconfig.get_path("purelib"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    for package in packages.iterdir():
        if "meshbook" not in package.name:
            (site / package.name).symlink_to(package)
    checkout = tmp_path / "checkout"
    for folder in ("components", "conf", "recipes"):
        shutil.copytree(ROOT / folder, checkout / folder, ignore=shutil.ignore_patterns("__pycache__", "local"))
    command = [tmp_path / "venv" / "bin" / "python", checkout / "recipes" / "finetune.py", *TINY, "run.dir=mine"]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "meshbook not installed" in done.stdout
    assert json.loads((tmp_path / "mine" / "result.json").read_text())["status"] == "ok"
