"""A copied recipe with its own config class: a new section, and a new key in a shared section."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.recipes.test_finetune import ROOT, TINY, curve, result, start

OWN_CONFIG = """
from dataclasses import dataclass, field
from components.protocol.errors import ConfigError
from components.config.schema import FinetuneConfig, TrainingConfig

@dataclass(kw_only=True, slots=True)
class ProbeConfig:
    every: int = 1
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"probe.every={self.every}: must be at least 1")

@dataclass(kw_only=True, slots=True)
class OwnTraining(TrainingConfig):
    patience: int = 3

@dataclass(kw_only=True, slots=True)
class OwnConfig(FinetuneConfig):
    training: OwnTraining = field(default_factory=OwnTraining)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
"""


def own_recipe(folder: Path) -> Path:
    """Copy recipes/finetune.py with OwnConfig instead of FinetuneConfig and a line that prints the new keys."""
    text = (ROOT / "recipes" / "finetune.py").read_text()
    for old, new in (
        ("from components.config.schema import FinetuneConfig\n", OWN_CONFIG),
        ("def main(cfg: FinetuneConfig)", "def main(cfg: OwnConfig)"),
        (
            "        run.finish()\n",
            "        run.finish()\n        print('own', cfg.probe.words, cfg.training.patience)\n",
        ),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "mine.py").write_text(text)
    return folder / "mine.py"


def run(recipe: Path, *overrides: str) -> tuple[int, str]:
    process = start(recipe, *TINY, "checkpoint.export=false", "generation.samples=0", *overrides, cwd=recipe.parent)
    output = process.communicate(timeout=240)[0]
    return process.returncode, output


def test_copied_recipe_with_its_own_config_is_validated_frozen_and_resumed(tmp_path: Path) -> None:
    recipe, directory = own_recipe(tmp_path), tmp_path / "run"
    own = (f"run.dir={directory}", "probe.words=[a,b]", "training.patience=5", "checkpoint.every=2")
    status, output = run(recipe, *own, "probe.evry=2")
    assert (status, output) == (2, "probe.evry=2: no such key; did you mean probe.every?\n")
    wrong = ("probe.every=0", "training.global_batch_size=3", "parallelism=ddp", "cluster.procs_per_node=2")
    status, output = run(recipe, *own, *wrong)
    assert status == 2
    assert "\nprobe.every=0: must be at least 1\n" in output
    assert "\ntraining.global_batch_size=3: must be a multiple of dp=2" in output
    assert not directory.exists()

    mesh = ("parallelism=ddp", "cluster.procs_per_node=2")
    status, output = run(recipe, *own, *mesh, "training.max_steps=2")
    assert (status, "own ['a', 'b'] 5" in output) == (0, True), output
    frozen = yaml.safe_load((directory / "config.yaml").read_text())
    assert frozen["probe"] == {"every": 1, "words": ["a", "b"]}
    assert frozen["training"]["patience"] == 5
    assert frozen["optimizer"]["kind"] == "adamw"

    status, output = run(recipe, *own, *mesh, "training.max_steps=4", "training.patience=6")
    assert status == 0, output
    assert f"resumed from {directory}/checkpoints/step_2" in output
    assert "training.patience: 5 -> 6" in output
    assert result(directory)["steps"] == 4
    assert len(curve(directory)) == 4
