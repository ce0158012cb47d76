"""`scripts/plan.py --dry-run`: rows played through the code of a run, and the formulas against them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from components.config.schema.model import CausalLMConfig
from components.config.shape import read_shape
from components.models.build import load_config
from components.planning.formulas.workload import architecture_of
from scripts._plan.dry_runs import buildable
from tests.config.commands import REPOSITORY

HUB = {"path": "someone/not-on-this-machine", "family": "qwen3", "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 64,
       "vocab": 512, "mlp": 128, "head_dim": 16, "tied": True}  # fmt: skip


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
    assert architecture_of(buildable(model, read_shape(model))) == architecture_of(model)
