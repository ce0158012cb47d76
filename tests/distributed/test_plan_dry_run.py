"""Steps simulated at their world size by `scripts/plan.py --dry-run` and `cluster.dry_run=plan`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from components.config.schema.model import CausalLMConfig
from components.config.shape import read_shape
from components.models.build import load_config
from components.planning.formulas.workload import architecture_of
from components.planning.simulation import buildable
from tests.config.commands import REPOSITORY
from tests.preloaded import run_preloaded
from tests.suites import PARITY

HUB = {"path": "someone/not-on-this-machine", "family": "qwen3", "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64,
       "vocab": 512, "mlp": 128, "head_dim": 16, "tied": True}  # fmt: skip


@pytest.mark.skipif(not PARITY, reason="starts a child for each simulated rank: make parity")
def test_the_best_rows_are_played_at_their_world_size() -> None:
    """A hub model that is not on this machine is built from its stated sizes."""
    sizes = [f"model.{name}={str(value).lower()}" for name, value in HUB.items()]
    command = ["--dry-run", "2", "--json", "cluster=slurm_2node", "cluster.gpu=h100_80", "model=qwen3_0_6b", *sizes,
               "training.global_batch_size=32", "training.seq_len=64"]  # fmt: skip
    planned = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts" / "plan.py"), *command], capture_output=True, text=True, check=False
    )
    assert planned.returncode == 0, planned.stderr
    first, second, *others = json.loads(planned.stdout)["rows"]
    assert not any("dry_run" in row for row in others)
    for row in (first, second):
        runs = row["dry_run"]
        assert {run["world"] for run in runs} == {16}
        assert {run["rank"] for run in runs} >= {0, 15}
        parameters = next(term["value"] for term in row["memory"] if term["name"] == "parameters")
        assert max(run["parameters"] for run in runs) == pytest.approx(parameters, rel=0.01)
        assert any(traffic["operation"] == "all_reduce" for run in runs for traffic in run["traffic"])


def test_a_model_built_from_its_sizes_has_the_sizes_of_the_option() -> None:
    model = CausalLMConfig(**HUB)
    built = load_config(buildable(model, read_shape(model)))
    assert (built.model_type, built.num_hidden_layers, built.head_dim, built.tie_word_embeddings) == (
        "qwen3",
        2,
        16,
        True,
    )
    assert asdict(architecture_of(buildable(model, read_shape(model)))) == asdict(architecture_of(model))


def test_step_of_a_recipe_is_simulated(tmp_path: Path) -> None:
    """activation_checkpointing=auto is resolved for the device; nothing is written or started."""
    overrides = ["model=tiny", "cluster=local_4proc", "cluster.device=cpu", "cluster.gpu=cpu", "parallelism=fsdp2_tp2",
                 "parallelism.activation_checkpointing=auto", "cluster.dry_run=plan"]  # fmt: skip
    shown = run("finetune", overrides, tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "cluster.dry_run=plan: would start 4 x " in shown.stdout
    lines = r"step on fake tensors: [\d.]+ MiB on rank \d \(formulas [\d.]+ MiB, .*%\)\n +peak of each .*: 0: .*, 3: "
    assert re.search(lines, shown.stdout), shown.stdout
    assert re.search(r"tp: \d+ all_reduce, [\d.]+ [KM]iB per step", shown.stdout), shown.stdout
    assert max(map(len, shown.stdout.partition("step on fake")[2].splitlines())) <= 80
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_that_does_not_train_has_no_step_to_play(tmp_path: Path) -> None:
    shown = run("evaluate", ["model=tiny", "cluster.device=cpu", "cluster.dry_run=plan"], tmp_path)
    assert shown.returncode == 2
    assert "cluster.dry_run=plan: only training recipes can be simulated" in shown.stderr


def run(recipe: str, overrides: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "recipes" / f"{recipe}.py"), *overrides]
    if not PARITY:
        return run_preloaded(command, folder)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
