"""Programs that read a run: `evaluate.py run=RUN` composes its config, scripts/chat.py rejects wrong options."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from components.config.compose.command_line import Rewritten, compose_from_command_line
from components.config.compose.frozen import frozen_text
from components.config.compose.typed import literal
from components.config.schema import EvaluateConfig, FinetuneConfig, PeftConfig, RecipeConfig
from components.config.schema.data import DocsDataConfig
from components.launch.backend import Recipe
from components.launch.overrides import rewriting
from scripts._export.checkpoints import read_run
from tests.config.commands import REPOSITORY, Commands
from tests.config.test_composition import compose
from tests.frozen import frozen

SOURCES = (
    "data=mixture",
    "+data@data.sources.a=jsonl",
    "data.sources.a.path='{a}: [1].jsonl'",
    "+data@data.sources.b=pydocs",
)
CASES: dict[str, tuple[str, ...]] = {
    "pretrain": ("pretrain", "data=text", "data.path=x.txt", "model/rope=yarn", "run.seed=7"),
    "mixture": ("finetune", *SOURCES, "data.sources.a.weight=0.3", "data.pack=true", "run.private=true"),
    "lora": ("finetune", "peft=lora", "peft.targets=[q_proj,v_proj]", "model=tiny", "model.config.hidden_size=32"),
    "chat": ("finetune", "data=chat_jsonl", "data.path='it\\'s \"odd\", [1]: # *x'", "training.ema_decay=0.9"),
    "distill": ("distill", "data=text", "data.path=x.txt", "teacher.path=package:a/b.gguf"),
}


def write_run(folder: Path, name: str, *overrides: str) -> RecipeConfig:
    """Write the config.yaml of a run that composes from `overrides`."""
    cfg = compose(name, *overrides)
    folder.mkdir()
    (folder / "config.yaml").write_text(frozen_text(cfg))
    return cfg


EVALUATE = Recipe("evaluate", print, EvaluateConfig, REPOSITORY / "recipes" / "evaluate.py")


def compose_evaluation(*arguments: str) -> EvaluateConfig:
    rewrite = rewriting(EVALUATE, None)
    cfg = compose_from_command_line(
        "evaluate", EvaluateConfig, REPOSITORY / "recipes", arguments=arguments, rewrite=rewrite
    )
    assert cfg is not None
    return cfg


@pytest.mark.parametrize("case", CASES)
def test_sections_of_the_run_are_composed(case: str, tmp_path: Path) -> None:
    run = tmp_path / "a run"
    trained = write_run(run, *CASES[case])
    cfg = compose_evaluation(f"run={run}")
    assert (cfg.model, cfg.data, cfg.peft) == (trained.model, trained.data, trained.peft)
    assert (cfg.run.seed, cfg.run.private) == (trained.run.seed, trained.run.private)
    evaluation = cfg.evaluation
    assert (evaluation.checkpoint, evaluation.average) == (str(run), trained.training.ema_decay is not None)
    assert evaluation.seq_len == trained.training.seq_len
    assert evaluation.micro_batch_size == trained.training.micro_batch_size


def test_run_of_an_own_recipe_has_neither_objective_nor_adapters(tmp_path: Path) -> None:
    trained = write_run(tmp_path / "run", "finetune", "model=tiny")
    sections = {name: each for name, each in asdict(trained).items() if name not in ("objective", "peft")}
    (tmp_path / "run" / "config.yaml").write_text(frozen(OmegaConf.to_yaml(OmegaConf.create(literal(sections)))))
    cfg = compose_evaluation(f"run={tmp_path}/run")
    assert (cfg.model, cfg.peft) == (trained.model, PeftConfig())
    read = read_run(tmp_path / "run", trust_remote_code=False)
    assert (read.peft, read.labels) == (PeftConfig(), None)


def test_other_arguments_override_the_run_in_any_order(tmp_path: Path) -> None:
    trained = write_run(tmp_path / "run", "finetune", "data=jsonl", "data.path=a.jsonl", "data.max_samples=9")
    before = ("data.path=b.jsonl", "evaluation.checkpoint=x", "parallelism=ddp", "run.seed=5")
    cfg = compose_evaluation(*before, f"run={tmp_path}/run", "evaluation.seq_len=64")
    assert cfg.data == replace(trained.data, path="b.jsonl")
    assert (cfg.evaluation.checkpoint, cfg.evaluation.seq_len, cfg.run.seed) == ("x", 64, 5)
    cfg = compose_evaluation(f"run={tmp_path}/run", "data=pydocs")
    assert isinstance(cfg.data, DocsDataConfig)
    assert cfg.model == trained.model


def test_other_recipes_have_no_such_argument() -> None:
    finetune = replace(EVALUATE, name="finetune", schema=FinetuneConfig)
    assert rewriting(finetune, None)(["run=x"]) == Rewritten(["run=x"])


def test_runs_that_cannot_be_evaluated_are_rejected_without_torch(commands: Commands, tmp_path: Path) -> None:
    evaluate = REPOSITORY / "recipes" / "evaluate.py"
    write_run(tmp_path / "dpo", "dpo", "data.path=pairs.jsonl")
    write_run(tmp_path / "reward", "classify", "objective=reward", "data=preferences", "data.path=pairs.jsonl")
    write_run(tmp_path / "unsaved", "finetune", "model=tiny")
    write_run(tmp_path / "evaluation", "evaluate")
    problems = {
        ("run=nowhere",): "run=nowhere: not a run directory, it has no config.yaml; give the directory of a training",
        ("run=evaluation",): "the config of this run has no section training; give the directory of a training run",
        ("run=dpo",): "run=dpo: its data are preferences, which have no loss per token; its eval_loss is in dpo/result",
        ("run=reward",): "run=reward: its model has a score head and no loss per token",
        ("run=unsaved",): "evaluation.checkpoint=unsaved: the run has no complete checkpoint; wait for its first save",
        ("run=unsaved", "run=dpo"): "run=unsaved run=dpo: one evaluation takes one run; remove all but one",
        ("-m", "run=unsaved"): "run=unsaved: -m cannot sweep over the settings of a run; remove -m",
        ("run=unsaved", "data.path=1", "evaluation.seq_len=1"): "evaluation.seq_len=1: must be at least 2",
    }
    for arguments, problem in problems.items():
        ended = commands.run(evaluate, arguments, tmp_path)
        assert (ended.status, ended.imported_torch) == (2, False), ended
        assert problem in ended.errors
        assert "Traceback" not in ended.errors
    assert not (tmp_path / "outputs").exists()


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
