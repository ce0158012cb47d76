"""Recipes are identical except where their tasks differ; the lines of a recipe that a simulation executes."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from difflib import ndiff
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components.planning.recipe_lines import import_recipe, read_lines
from components.planning.simulated_step import _simulate_step
from components.protocol.errors import ConfigError
from tests.distributed.simulation_cases import finetune
from tests.examples import copy_example
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
PREPARE = "model = training.prepare(cfg, run, len(tokenizer))"
OPTIMIZER = "optimizer = training.build_optimizer(model, cfg.optimizer)"
OBJECTIVE = "objective = training.NextToken(cfg.objective)"
LINES = {
    "recipes/finetune.py": [PREPARE, OPTIMIZER, OBJECTIVE],
    "recipes/pretrain.py": [PREPARE, OPTIMIZER, OBJECTIVE],
    "recipes/classify.py": [PREPARE, "scoring = training.build_scoring(cfg.objective, run.mesh)", OPTIMIZER],
    "recipes/dpo.py": [PREPARE, "preference = training.build_preference(cfg, run, model, len(tokenizer))", OPTIMIZER],
    "recipes/distill.py": [
        PREPARE.replace("model", "student"),
        "distillation = training.build_distillation(cfg, run, student, tokenizer)",
        OPTIMIZER.replace("(model", "(student"),
    ],
    "examples/own_recipe/train.py": [PREPARE, OPTIMIZER, "objective = training.NextToken()"],
    "examples/own_loss/train.py": [PREPARE, OPTIMIZER, "objective = Focal(cfg.focal)"],
    "examples/own_optimizer/train.py": [
        PREPARE,
        "optimizer = Lion(model.module.parameters(), lr=cfg.optimizer.lr, weight_decay=cfg.optimizer.weight_decay)",
        OBJECTIVE,
    ],
    "examples/own_model_family/train.py": ["register()", PREPARE, OPTIMIZER, OBJECTIVE],
}
"""Recipe -> its lines that say what a step trains."""


@pytest.fixture(autouse=True)
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("recipe", LINES)
def test_lines_that_say_what_a_step_trains(recipe: str, tmp_path: Path) -> None:
    file = ROOT / recipe
    if recipe.startswith("examples/"):
        file = copy_example(file.parent.name, tmp_path) / file.name
    lines = read_lines(import_recipe(file))
    shown = [each for each in lines.statements if not isinstance(getattr(each, "value", None), ast.Constant)]
    assert [ast.unparse(each) for each in shown] == LINES[recipe]


def test_a_script_that_starts_without_a_guard_is_not_started(tmp_path: Path) -> None:
    recipe = copy_of(tmp_path, ('if __name__ == "__main__":\n    main()', "print(5)\nmain()"))
    assert import_recipe(recipe).__name__ == "main"


def copy_of(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write a copy of recipes/finetune.py, changed, in a folder."""
    text = (ROOT / "recipes/finetune.py").read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    file = folder / "mine.py"
    file.write_text(text)
    return file


SAVE = "            if step.due_save"
REFUSED = {
    "0 different calls of train_step; a simulation needs one": [("training.train_step(", "my_step(")],
    "2 different calls of train_step": [(SAVE, f"            training.train_step(model, 0, optimizer, other)\n{SAVE}")],
    "objective is assigned again": [(SAVE, f"            objective = None\n{SAVE}")],
    "depends on data (frequencies)": [
        (OBJECTIVE, "frequencies = data.sources_of(train_set)\n        objective = Mine(frequencies)")
    ],
    "has 0 functions with @recipe": [('@recipe("finetune")\n', "")],
    "needs a model, batches, an optimizer and an objective": [("step.batches, optimizer, objective", "*step")],
}


@pytest.mark.parametrize("message", REFUSED)
def test_recipe_whose_step_cannot_be_read_is_refused(message: str, tmp_path: Path) -> None:
    """The file, the line and the way out are named."""
    with pytest.raises(ConfigError) as caught:
        read_lines(import_recipe(copy_of(tmp_path, *REFUSED[message])))
    (problem,) = caught.value.problems
    assert problem.startswith(f"cluster.dry_run=plan: {tmp_path}/mine.py:")
    assert message in problem
    assert problem.endswith("; set cluster.dry_run=true, which simulates no step")


def test_attributes_of_meshbook_are_read_as_its_names(tmp_path: Path) -> None:
    """`import meshbook` and `meshbook.data`, in a copy that a simulation reads and in one that it refuses."""
    used = [(name, f"{name[0]}meshbook.{name[1:]}") for name in (" data.", " training.", "(training.", " models.")]
    imported = [
        ("from components import data, models, training\n", "import meshbook\n"),
        ("from components.config.schema import FinetuneConfig\nfrom components.launch import recipe\n", ""),
        ('@recipe("finetune")\n', '@meshbook.recipe("finetune")\n'),
        ("def main(cfg: FinetuneConfig)", "def main(cfg: meshbook.FinetuneConfig)"),
    ]
    lines = read_lines(import_recipe(copy_of(tmp_path, *imported, *used)))
    found = [ast.unparse(each).replace("meshbook.", "") for each in lines.statements[-3:]]
    assert found == [PREPARE, OPTIMIZER, OBJECTIVE]
    counted = (OBJECTIVE, "frequencies = data.sources_of(train_set)\n        objective = Mine(frequencies)")
    with pytest.raises(ConfigError, match=r"depends on data \(frequencies\)"):
        read_lines(import_recipe(copy_of(tmp_path, *imported, counted, *used)))


OWN = [
    (
        OPTIMIZER,
        """import torch
        model.module.get_input_embeddings().requires_grad_(False)
        for each in model.module.lm_head.parameters():
            each.requires_grad_(False)
        parameters = [each for each in model.module.parameters() if each.requires_grad]
        flat, others = ([each for each in parameters if (each.dim() < 2) is is_flat] for is_flat in (True, False))
        optimizer = {"flat": torch.optim.SGD(flat, lr=1), "others": torch.optim.SGD(others, lr=1, momentum=0.9)}""",
    ),
    (
        OBJECTIVE,
        """if cfg.training.seq_len:
            objective = Mine(cfg.objective)
        else:
            objective = None""",
    ),
    (
        "@recipe(",
        """class Mine(training.NextToken):
    def __init__(self, cfg):
        import torch
        super().__init__(cfg)
        self.table = torch.zeros(1024, 1024)


@recipe(""",
    ),
]
"""Changes of a copy: frozen parts, two optimizers, an objective with a tensor of its own."""


def test_a_copy_is_played_with_its_own_optimizers_and_objective(tmp_path: Path) -> None:
    cfg = finetune(world=1, strategy="single", rows=1)
    cfg = replace(cfg, model=replace(cfg.model, config={**cfg.model.config, "tie_word_embeddings": False}))
    recipe = copy_of(tmp_path, *OWN)

    (simulated,) = run_ranks(
        1, lambda _: _simulate_step(cfg, 1, 0, read_lines(import_recipe(recipe))), init=False, timeout=120
    )

    sizes = {name: each.numel() * 4 for name, each in meta_model(cfg.model.config).named_parameters()}
    trained = {name: size for name, size in sizes.items() if "embed" not in name and "lm_head" not in name}
    matrices = {name: size for name, size in trained.items() if "norm" not in name}
    assert simulated.parameters == sum(sizes.values())
    assert simulated.gradients == sum(trained.values())
    assert simulated.optimizer == sum(matrices.values())
    assert simulated.frozen == 4 * 1024 * 1024


def meta_model(config: dict[str, Any]) -> torch.nn.Module:
    """Build a model without memory by plain transformers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def test_pretrain_and_finetune_differ_only_in_the_listed_lines() -> None:
    """A fix in one recipe must also be made in the other."""
    texts = [(RECIPES / name).read_text() for name in ("finetune.py", "pretrain.py")]
    finetune, pretrain = (text[text.index("from __future__") :].splitlines() for text in texts)
    changes = [line for line in ndiff(finetune, pretrain) if line[0] in "+-"]
    assert sorted(line[0] + line[2:].strip().partition("  # ")[0] for line in changes) == sorted(
        [
            "-from components.config.schema import FinetuneConfig",
            "+from components.config.schema import PretrainConfig",
            '-@recipe("finetune")',
            "-def main(cfg: FinetuneConfig) -> None:",
            '+@recipe("pretrain")',
            "+def main(cfg: PretrainConfig) -> None:",
            "+tokenizer.chat_template = None",
        ]
    )
