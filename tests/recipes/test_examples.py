"""The folders of examples/: every command of their READMEs runs from another folder and does what the README says."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components import data, models, training
from components.batch import Batch
from components.config.compose.frozen import read_section
from components.config.schema import DataConfig, ModelConfig
from tests.examples import EXAMPLES, OUTDATED, ROOT, blocks, commands, copy_example, require_program, words
from tests.recipes.launching import until
from tests.recipes.test_finetune import curve, result
from tests.suites import TORTURE

PATCHED = ("own_loss", "own_optimizer", "own_model_family")
MADE = ("own_data", *PATCHED)
"""Examples whose train.py is made from recipes/finetune.py."""
TRAINED = (*MADE, "own_recipe")
SBATCH = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/arguments"
echo "sbatch: Job 7 to start at 2030-01-01T12:00:00 using 8 processors on nodes n[1-2]" >&2
"""
"""Script that replaces `sbatch --test-only`, which only login nodes have, and accepts every job."""
LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Ran:
    """A finished command of a README."""

    status: int
    output: str
    run_dir: Path | None


def run(command: str, folder: Path, examples: Path = EXAMPLES, **environment: str) -> Ran:
    """Run a command as written, but in a folder of its own; `examples` replaces the folder examples/."""
    folder.mkdir()
    program, *arguments = words(command, examples)
    assert program == "python"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MESHBOOK_", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**clean, "CUDA_VISIBLE_DEVICES": "", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    runs = list(folder.glob("outputs/*/*"))
    return Ran(done.returncode, done.stdout + done.stderr, runs[0] if runs else None)


@pytest.fixture
def own_modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a module of an example."""

    def load(example: str, module: str) -> Any:
        monkeypatch.syspath_prepend(EXAMPLES / example)
        return importlib.import_module(module)

    return load


def check_own_data(ran: Ran) -> None:
    """Exactly the answers of train.txt are trained on, each with the token that ends it, in each of 5 epochs."""
    answers = re.findall(r"^A: (.*?)(?:\n\n|\n\Z)", (EXAMPLES / "own_data/train.txt").read_text(), re.DOTALL | re.M)
    assert len(answers) == 16
    assert curve(ran.run_dir, "tokens")[-1] == 5 * sum(len(each.encode()) + 1 for each in answers)
    assert blocks("own_data", "text")[0] in ran.output


def check_own_model_family(ran: Ran) -> None:
    """The export has the class's weights: plain transformers computes the run's held-out loss."""
    importlib.import_module("parallel_llama").register()
    model = AutoModelForCausalLM.from_pretrained(ran.run_dir / "export")
    assert type(model).__name__ == "ParallelLlamaForCausalLM"
    config = ran.run_dir / "config.yaml"
    tokenizer = models.load_tokenizer(read_section(config, "model", ModelConfig))
    held_out = data.build_dataset(read_section(config, "data", DataConfig), tokenizer, seq_len=128, split="eval")
    total, count = 0.0, 0
    with torch.no_grad():
        for index in range(len(held_out)):
            ids, labels = (torch.tensor([each]) for each in held_out[index])
            targets = int((labels[:, 1:] != -100).sum())
            total, count = total + model(input_ids=ids, labels=labels).loss.item() * targets, count + targets
    assert result(ran.run_dir)["eval_loss"] == pytest.approx(total / count, rel=1e-5)


def check_own_recipe(ran: Ran) -> None:
    (goal,) = re.findall(r"goal.eval_loss=(\d+)$", commands("own_recipe")[0])
    ended = result(ran.run_dir)
    assert ended["steps"] < 200
    assert ended["eval_loss"] <= int(goal)
    assert blocks("own_recipe", "text")[0].strip() in ran.output


CHECKS = {
    "own_data": check_own_data,
    "own_model_family": check_own_model_family,
    "own_recipe": check_own_recipe,
}


@pytest.mark.parametrize("name", TRAINED)
def test_commands_train_from_another_folder(name: str, tmp_path: Path, own_modules: Any) -> None:
    """The losses fall, and are the same for the command on a mesh of two ranks (in CI that one is only checked)."""
    dry_run = "" if TORTURE else " cluster.dry_run=true"
    examples = copy_example(name, tmp_path).parent
    first, *on_meshes = (command for command in commands(name) if command.startswith("python "))
    ran = run(first, tmp_path / "first", examples)
    assert ran.status == 0, ran.output
    losses = curve(ran.run_dir)
    assert losses[-1] < losses[0] - 0.05
    for command in on_meshes:
        meshed = run(command + dry_run, tmp_path / "meshed", examples)
        assert meshed.status == 0, meshed.output
        assert ("on 2 processes" if TORTURE else "would start 2 x") in meshed.output
        if TORTURE:
            assert curve(meshed.run_dir) == pytest.approx(losses, rel=1e-4 if name == "own_optimizer" else 1e-5)
    if name == "own_model_family":
        own_modules(name, "parallel_llama")
    if name in CHECKS:
        CHECKS[name](ran)


@pytest.mark.parametrize("name", PATCHED)
def test_patch_is_shown_and_small_and_fits_the_recipe(name: str) -> None:
    """`patch` and `git apply` find the lines where the patch says, without fuzz."""
    file = EXAMPLES / name / "train.patch"
    assert blocks(name, "diff") == [file.read_text()]
    changed = re.findall(r"^(?!--- |\+\+\+ )[-+]", file.read_text(), re.MULTILINE)
    assert 1 <= len(changed) <= 12
    require_program("patch")
    for command in ("patch --dry-run --fuzz=0 recipes/finetune.py", "git apply --check --verbose"):
        arguments = [*command.split(), str(file)]
        environment = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output + OUTDATED
        assert "offset" not in output, output + OUTDATED


def test_own_data_needs_no_change_of_the_recipe(tmp_path: Path) -> None:
    assert blocks("own_data", "diff") == []
    made = copy_example("own_data", tmp_path) / "train.py"
    assert made.read_text() == (ROOT / "recipes/finetune.py").read_text()


def test_own_loss_and_its_gradient_equal_plain_pytorch(own_modules: Any) -> None:
    """A step of a model in float64 with all logits, and a chunk of logits with weights."""
    focal, gamma = own_modules("own_loss", "focal"), 2.5
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA)).double()
    ids = torch.randint(64, (3, 10))
    labels = ids.masked_fill(torch.rand(3, 10) < 0.3, -100)

    def plain(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        real = targets != -100
        p = logits.softmax(-1)[real].gather(-1, targets[real][:, None])[:, 0]
        return ((1 - p) ** gamma * -p.log()).sum()

    targets = labels[:, 1:]
    expected = plain(model(input_ids=ids, use_cache=False).logits[:, :-1], targets) / (targets != -100).sum()
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    prepared = training.Prepared(model, training.StepSettings(device=torch.device("cpu"), max_grad_norm=0.0))
    before = [each.detach().clone() for each in model.parameters()]
    objective = focal.Focal(focal.FocalConfig(gamma=gamma))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    numbers = training.train_step(prepared, [Batch.from_labels(ids, labels)], sgd, objective)
    assert numbers["loss"].item() == pytest.approx(expected.item(), rel=1e-12)
    for old, new, gradient in zip(before, model.parameters(), gradients, strict=True):
        torch.testing.assert_close(old - new.detach(), gradient, rtol=1e-9, atol=1e-12)

    scores = torch.randn(7, 64, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([1, 5, -100, 63, 0, -100, 9])
    twice = torch.full((7,), 2.0, dtype=torch.float64)
    loss, gradient = objective.token_loss.of_chunk(training.Chunk(scores.detach().clone(), chosen, weights=twice))
    doubled = 2 * plain(scores, chosen)
    doubled.backward()
    assert loss.item() == pytest.approx(doubled.item(), rel=1e-12)
    torch.testing.assert_close(gradient[chosen != -100], scores.grad[chosen != -100], rtol=1e-9, atol=1e-12)


def test_own_section_is_validated(tmp_path: Path) -> None:
    (wrong,) = re.findall(r"`(python examples/own_loss/\S+ focal\S+)`", (EXAMPLES / "own_loss/README.md").read_text())
    ran = run(wrong, tmp_path / "wrong", copy_example("own_loss", tmp_path).parent)
    assert (ran.status, ran.output, ran.run_dir) == (2, "focal.gamma=0.0: must be at least 1\n", None)


def test_own_optimizer_equals_its_formula(own_modules: Any) -> None:
    value, momentum, lr, decay = 0.5, 0.0, 0.1, 0.2
    parameter = torch.nn.Parameter(torch.tensor([value], dtype=torch.float64))
    optimizer = own_modules("own_optimizer", "lion").Lion([parameter], lr=lr, weight_decay=decay)
    for gradient in (1.0, -0.05, -3.0, 0.0):
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        direction = 0.9 * momentum + 0.1 * gradient
        value = value * (1 - lr * decay) - lr * ((direction > 0) - (direction < 0))
        momentum = 0.99 * momentum + 0.01 * gradient
        assert parameter.item() == pytest.approx(value, rel=1e-12)


def test_own_cluster_is_rendered_by_a_dry_run(tmp_path: Path) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(SBATCH)
    sbatch.chmod(0o755)
    (command,) = commands("own_cluster")
    ran = run(command, tmp_path / "here", PATH=f"{sbatch.parent}:{os.environ['PATH']}")
    assert ran.status == 0, ran.output
    assert "could start at 2030-01-01T12:00:00" in ran.output
    lines = ran.output.splitlines()
    options = ("partition=gpu_a100", "account=my_group", "nodes=2", "gpus-per-node=4", "time=8:00:00", "mail-type=FAIL")
    for option in options:
        assert f"#SBATCH --{option}" in lines, ran.output
    for text in ("ulimit -n 65536", "HF_HOME=/scratch/my_group/huggingface", "--container-image=nvcr.io#nvidia/"):
        assert text in ran.output
    requested = (sbatch.parent / "arguments").read_text()
    assert "--test-only" in requested
    assert "--partition=gpu_a100" in requested
    assert not any((tmp_path / "here").iterdir())


@pytest.fixture
def spooler(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables of a queue of its own, and of the example's class; ends its jobs afterwards."""
    require_program("tsp", "task-spooler")
    variables = {"TS_SOCKET": str(tmp_path / "socket"), "TMPDIR": str(tmp_path)}
    yield {**variables, "PYTHONPATH": str(EXAMPLES / "own_scheduler")}
    environ = {**os.environ, **variables}
    subprocess.run(["tsp", "-k"], env=environ, capture_output=True, check=False)
    subprocess.run(["tsp", "-K"], env=environ, capture_output=True, check=False)


def test_own_scheduler_survives_a_killed_rank_and_a_stop(spooler: dict[str, str], tmp_path: Path) -> None:
    """A rank is killed and the ranks are started again; the job is stopped and requeued; the losses are those of an
    undisturbed local run to the bit."""
    exported, command = commands("own_scheduler")
    assert exported == "export PYTHONPATH=examples/own_scheduler"
    command += " training.max_steps=60 run.deterministic=true checkpoint.export=false generation.samples=0 run.dir=RUN"
    local = run(command.replace("cluster=spooler", "cluster=local_2proc"), tmp_path / "local", **spooler)
    assert local.status == 0, local.output
    submitted = run(command, tmp_path / "here", **spooler)
    folder = tmp_path / "here" / "RUN"
    job = re.search(r"^job +(task_spooler:TaskSpooler/meshbook:\w+)$", submitted.output, re.MULTILINE)
    assert job is not None, submitted.output
    assert (folder / "job_id").read_text() == f"{job[1]}\n"

    def signal_rank(attempt: int, number: int) -> None:
        """Send a signal to a rank of an attempt that has taken a step."""
        progress = folder / "logs" / f"attempt_{attempt}" / "progress.json"
        until(lambda: progress.exists() and "first_step" in progress.read_text())
        ranks = subprocess.run(["pgrep", "-f", f"{folder}/code/recipes/finetune.py$"], capture_output=True, check=True)
        os.kill(int(ranks.stdout.split()[-1]), number)

    signal_rank(0, signal.SIGKILL)
    signal_rank(1, signal.SIGUSR2)
    until(lambda: (folder / "result.json").exists() and result(folder)["status"] not in ("preempted", "failed"))
    ended = result(folder)
    assert (ended["status"], ended["restarts"], ended["processes"]) == ("ok", 2, 2)
    assert curve(folder) == curve(tmp_path / "local" / "RUN")
    assert [(folder / "logs" / f"attempt_{number}" / "job").read_text() for number in range(3)] == [f"{job[1]}\n"] * 3


def test_examples_are_listed() -> None:
    folders = {file.parent.name for file in EXAMPLES.glob("*/README.md")}
    assert folders == {*TRAINED, "own_cluster", "own_scheduler"}
    for name in folders:
        assert f"({name}/README.md)" in (EXAMPLES / "README.md").read_text()
        assert f"`examples/{name}/`" in (ROOT / "docs/recipes.md").read_text()
        assert (f"examples/{name}/train.py" in (ROOT / ".gitignore").read_text().splitlines()) == (name in MADE)
        files = list((EXAMPLES / name).rglob("*.py"))
        assert all(file.read_text().count("\n") <= 120 for file in files)
