"""Every option of a hub model composes and is planned, and every ready experiment has a mesh that the planner proposes.

The models are composed with a recipe by one command, as a map of models, since each composition costs half a second;
under MESHBOOK_ALL_PARITY=1, each also by its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from components.config.schema.model import SIZES
from components.config.schema.parallelism import AXES
from components.planning.formulas.hardware import find_hardware
from components.planning.formulas.ranking import usable_bytes
from tests.config.commands import REPOSITORY, Commands
from tests.config.ready import EXPERIMENTS, HUB_MODELS
from tests.config.test_composition import compose

PLAN = REPOSITORY / "scripts" / "plan.py"
LARGEST_FULL = 150e9
"""Parameters up to which 64 GPUs of 80 GB train all of them; the planner gets LoRA for larger models."""
SCRIPT = """
import json, sys
from dataclasses import dataclass, field, replace
from components.config.compose.composition import compose
from components.config.compose.sources import CONF, Request
from components.protocol.errors import ConfigError
from components.config.schema import FinetuneConfig, PretrainConfig
from components.config.schema.model import CausalLMConfig
from components.launch.overrides import _plan_run
from components.planning.formulas.workload import architecture_of

recipe, overrides, names = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
schema = {"finetune": FinetuneConfig, "pretrain": PretrainConfig}[recipe]

@dataclass(kw_only=True, slots=True)
class AllModels(schema):
    models: dict[str, CausalLMConfig] = field(default_factory=dict)

def composed(config, changes):
    found = compose(Request(recipe, config, (CONF,), tuple(changes)))
    assert not found.problems, found.problems
    return found.cfg

base = composed(schema, [f"model={names[0]}", *overrides])
models = composed(AllModels, [*(f"+model@models.{name}={name}" for name in names), *overrides]).models
adapted = replace(base, peft=replace(base.peft, method="lora"))
answers = {}
for name in names:
    model = models[name]
    answers[name] = {"values": {key: getattr(model, key) for key in KEYS}}
    try:
        large = architecture_of(model).parameters > LARGEST_FULL
        plan = _plan_run(replace(adapted if large else base, model=model), overrides, 64, 1)[0]
        answers[name] |= {"peak": plan.memory.peak, "world": plan.candidate.mesh.world}
    except ConfigError as error:
        answers[name] |= {"problems": error.problems}
print(json.dumps(answers))
"""
KEYS = ("path", "attention", "router_aux", "family", *SIZES, "experts_per_token", "window", "tied")
# One pipeline stage, one replica and whole rows: 20 candidates instead of thousands.
OVERRIDES = [
    *("cluster=slurm_8node", "cluster.gpu=h100_80", "training.global_batch_size=128", "training.seq_len=4096"),
    *("data.pack=false", "parallelism.pp=1", "parallelism.cp=1", "parallelism.dp_replicate=1"),
]


@pytest.mark.parametrize("recipe", ["finetune", "pretrain"])
def test_every_hub_model_composes_and_fits_some_mesh(commands: Commands, tmp_path: Path, recipe: str) -> None:
    assert len(HUB_MODELS) >= 25
    script = tmp_path / "ready.py"
    script.write_text(SCRIPT.replace("LARGEST_FULL", str(LARGEST_FULL)).replace("KEYS", str(KEYS)))
    ended = commands.run(script, [recipe, json.dumps(OVERRIDES), *HUB_MODELS], tmp_path)
    assert (ended.status, ended.imported_torch) == (0, False), ended.errors
    answers: dict[str, Any] = json.loads(ended.output)
    limit = usable_bytes(find_hardware("h100_80"))
    for name, answer in answers.items():
        values = {key: value for key, value in HUB_MODELS[name].values.items() if key != "config"}
        stated = dict.fromkeys(KEYS) | {"attention": "sdpa", "router_aux": "sequence"} | values
        assert answer["values"] == stated, name
        assert "problems" not in answer, (name, answer)
        assert answer["world"] == 64, name
        assert 0 < answer["peak"] < limit, name
    assert set(answers) == set(HUB_MODELS)


@pytest.mark.skipif(os.environ.get("MESHBOOK_ALL_PARITY") != "1", reason="make parity")
@pytest.mark.parametrize("recipe", ["finetune", "pretrain", "evaluate"])
def test_every_hub_model_composes_on_its_own(recipe: str) -> None:
    for name, model in HUB_MODELS.items():
        assert compose(recipe, f"model={name}").model.path == model.values["path"]


def test_experiments_are_for_one_gpu_one_node_and_eight_nodes() -> None:
    assert set(EXPERIMENTS.values()) == {1, 8, 64}
    methods = {str(compose("finetune", f"experiment={name}").peft.method) for name in EXPERIMENTS}
    assert methods == {"none", "lora", "qlora"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_mesh_of_an_experiment_can_be_replaced(name: str) -> None:
    mesh = compose("finetune", f"experiment={name}", "parallelism=fsdp2_tp4").parallelism
    assert (mesh.pp, mesh.dp_shard, mesh.ep, mesh.tp, mesh.sequence_parallel) == (1, -1, 1, 4, False)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_mesh_of_a_ready_experiment_is_among_the_planners_best(
    commands: Commands, tmp_path: Path, name: str
) -> None:
    """The planner chooses freely: of the experiment it keeps everything but mesh, policy and micro-batch size."""
    cfg = compose("finetune", f"experiment={name}")
    ended = commands.run(PLAN, [f"experiment={name}", "--top", "3", "--json"], tmp_path)
    assert (ended.status, ended.imported_torch) == (0, False), ended.errors
    rows = json.loads(ended.output)["rows"]
    mesh = cfg.parallelism.resolve(EXPERIMENTS[name])
    schedule = {"pp_schedule": str(cfg.parallelism.pp_schedule)} if mesh.pp > 1 else {}
    chosen = {
        "mesh": {axis: mesh.degree(axis) for axis in AXES},
        "strategy": str(cfg.parallelism.strategy),
        "activation_checkpointing": str(cfg.parallelism.activation_checkpointing),
        "micro_batch_size": cfg.training.micro_batch_size,
        **schedule,
    }
    matches = [row for row in rows if {key: row[key] for key in chosen} == chosen]
    assert matches, (chosen, [{key: row[key] for key in chosen} for row in rows])
    assert matches[0]["peak_memory_bytes"] < usable_bytes(find_hardware(cfg.cluster.gpu))
    assert matches[0]["step_seconds"] <= 1.05 * rows[0]["step_seconds"]
