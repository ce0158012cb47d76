"""scripts/chat.py rejects invalid options and folders before torch is imported, each in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.config.compose.frozen import frozen_text
from tests.config.commands import REPOSITORY, Commands
from tests.config.test_composition import compose

CHAT = REPOSITORY / "scripts" / "chat.py"
OPTIONS = {
    ("--temperature", "-1"): "--temperature -1: must be a finite number of at least 0",
    ("--temperature", "nan"): "--temperature nan: must be a finite number of at least 0",
    ("--temperature", "1", "--top-p", "0"): "--top-p 0: must be greater than 0 and at most 1",
    ("--temperature", "1", "--top-p", "1.1"): "--top-p 1.1: must be greater than 0 and at most 1",
    ("--temperature", "1", "--top-k", "-2"): "--top-k -2: must be at least 0; 0 samples from all tokens",
    ("--top-p", "0.9"): "--top-p 0.9: has no effect without sampling; add --temperature 0.8, or leave it out",
    ("--top-k", "5"): "--top-k 5: has no effect without sampling; add --temperature 0.8, or leave it out",
    ("--max-new-tokens", "0"): "--max-new-tokens 0: must be at least 1",
    ("--seed", "-1"): "--seed -1: must be in [0, 2**32 - 1]",
    ("--device", "tpu"): "--device tpu: must be one of auto, cpu, cuda",
    ("--device", "cuda"): "--device cuda: no GPU is visible to this process; use --device cpu",
}
REWARD = {"architectures": ["LlamaForSequenceClassification"]}
ADAPTER = {"base_model_name_or_path": "base", "task_type": "CAUSAL_LM"}
FOLDERS: dict[str, tuple[dict[str, object], str]] = {
    "nothing": ({"notes.json": {}}, "nothing: neither a run directory (no config.yaml), a checkpoint (no manifest"),
    "reward": ({"config.json": REWARD}, "reward: has a score head, which generates no text; use scripts/score.py"),
    "no_weights": ({"config.json": {}}, "no_weights: the folder has no weights (*.safetensors)"),
    "broken": ({"config.json": [1]}, "broken/config.json: must hold an object of keys; give a complete folder"),
    "step_3": ({"state.json": {}}, "step_3: not a complete checkpoint: manifest.json is missing; give another one"),
    "scratch": ({"adapter_config.json": {"base_model_name_or_path": None}}, "in adapter_config.json is None, not the"),
    "no_adapter": ({"adapter_config.json": ADAPTER}, "the adapter has no weights (adapter_model.safetensors)"),
    "no_base": (
        {"adapter_config.json": {"base_model_name_or_path": "./away"}, "adapter_model.safetensors": {}},
        "no_base/adapter_config.json=./away: no such folder",
    ),
}
"""Folder -> its JSON files by name, and the problem."""


@pytest.mark.parametrize("arguments", OPTIONS, ids=" ".join)
def test_invalid_option_is_rejected(arguments: tuple[str, ...], commands: Commands, tmp_path: Path) -> None:
    ended = commands.run(CHAT, ["nowhere", *arguments], tmp_path)
    assert (ended.status, ended.output, ended.errors) == (2, "", f"{OPTIONS[arguments]}\n")
    assert not ended.imported_torch


def test_folder_that_is_no_model_is_rejected(commands: Commands, tmp_path: Path) -> None:
    for name, (files, problem) in FOLDERS.items():
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_text(json.dumps(content))
        ended = commands.run(CHAT, [name], tmp_path)
        assert (ended.status, ended.output, ended.imported_torch) == (2, "", False), ended
        assert problem in ended.errors
        assert ended.errors.count("\n") == 1
    ended = commands.run(CHAT, ["nowhere"], tmp_path)
    assert (ended.status, ended.errors.count("nowhere: no such folder; give a run directory")) == (2, 1)


def test_run_without_a_checkpoint_is_rejected(commands: Commands, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(frozen_text(compose("finetune", "model=tiny")))
    ended = commands.run(CHAT, ["run"], tmp_path)
    assert (ended.status, ended.imported_torch) == (2, False)
    assert "run: no complete checkpoint in checkpoints/; wait for the run's first save" in ended.errors
