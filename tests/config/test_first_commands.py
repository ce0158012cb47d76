"""The first commands of users of other trainers: short forms, data of another recipe, and the answers in the guide."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.config.compose.composition import compose, no_check
from components.config.compose.explain import no_option
from components.config.compose.frozen import to_yaml
from components.config.compose.help_text import RECIPES
from components.config.compose.short_forms import long_forms
from components.config.compose.sources import CONF
from components.config.compose.sweep import compose_point, expand_sweep
from components.config.compose.typed import known_keys
from components.config.rules import validate
from components.config.schema import RecipeConfig
from components.data.preflight import check_files
from components.launch.machine import processes_of
from tests.config.commands import REPOSITORY
from tests.config.composed import request

SFT = {"prompt": "q", "response": "a"}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}
ALPACA = {"instruction": "q", "input": "", "output": "a"}
ROWS: dict[str, dict[str, Any]] = {
    "mine": SFT,
    "chat": CHAT,
    "sharegpt": SHAREGPT,
    "pairs": PAIR,
    "alpaca": ALPACA,
    "plain": {"text": "a", "url": "u"},
    "labels": {"text": "a", "label": 1},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of each kind of rows, in the current folder."""
    for name, row in ROWS.items():
        write(tmp_path / f"{name}.jsonl", row)
    write(tmp_path / "lr=1,x y.jsonl", SFT)
    write(tmp_path / "part" / "train.jsonl", CHAT)
    for name in ("a.txt", "texts/a.txt", "store/manifest.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "mine.csv").write_text("prompt,response\nq,a\n")
    (tmp_path / "alpaca.json").write_text(json.dumps([ALPACA, ALPACA]))
    pq.write_table(pa.table({key: [value] for key, value in SFT.items()}), tmp_path / "mine.parquet")
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows * (4 // len(rows))))
    return file


def result(recipe: str, arguments: Sequence[str], folders: tuple[Path, ...] = (CONF,)) -> RecipeConfig | list[str]:
    """Return the config of a command line on a machine without GPUs, or its problems, as the command would."""
    options = [no_option(each, known_keys(RECIPES[recipe])) for each in arguments if each.startswith("--")]
    composed = compose(request(recipe, *(each for each in arguments if not each.startswith("--")), folders=folders))
    if (cfg := composed.cfg) is None:
        return options + composed.problems
    return options + validate(cfg, processes_of(cfg, 0)) + check_files(cfg.data) or cfg


@pytest.mark.parametrize(
    ("recipe", "short", "long"),
    [
        ("finetune", "data=mine.jsonl", "data=jsonl data.path=mine.jsonl"),
        ("finetune", "data=./mine.csv", "data=jsonl data.path=./mine.csv"),
        ("finetune", "data=mine.parquet", "data=jsonl data.path=mine.parquet"),
        ("finetune", "data=~/mine.jsonl", "data=jsonl data.path='~/mine.jsonl'"),
        ("finetune", "data=lr=1,x y.jsonl", "data=jsonl data.path='lr=1,x y.jsonl'"),
        ("finetune", 'data="lr=1,x y.jsonl"', "data=jsonl data.path='lr=1,x y.jsonl'"),
        ("finetune", "data=s3://bucket/x.jsonl", "data=jsonl data.path=s3://bucket/x.jsonl"),
        ("finetune", "data=hf://datasets/a/b/x.csv", "data=jsonl data.path=hf://datasets/a/b/x.csv"),
        ("finetune", "data=missing.jsonl", "data=jsonl data.path=missing.jsonl"),
        ("finetune", "data=chat.jsonl", "data=chat_jsonl data.path=chat.jsonl"),
        ("finetune", "data=part", "data=chat_jsonl data.path=part"),
        ("finetune", "data=alpaca.json", "data=alpaca data.path=alpaca.json"),
        ("finetune", "data=plain.jsonl", "data=text data.path=plain.jsonl"),
        ("finetune", "data=texts", "data=text data.path=texts"),
        ("finetune", "data=tatsu-lab/alpaca", "data=alpaca data.path=tatsu-lab/alpaca"),
        ("pretrain", "data=plain.jsonl", "data=text data.path=plain.jsonl"),
        ("pretrain", "data=store", "data=tokens data.path=store"),
        ("dpo", "data=pairs.jsonl", "data=preferences data.path=pairs.jsonl"),
        ("dpo", "data=owner/pairs", "data=preferences data.path=owner/pairs"),
        ("classify", "data=labels.jsonl", "data=labels data.path=labels.jsonl"),
        ("classify", "objective=reward data=pairs.jsonl", "objective=reward data=preferences data.path=pairs.jsonl"),
        ("finetune", "model=Qwen/Qwen3-0.6B", "model=smollm2_135m model.path=Qwen/Qwen3-0.6B"),
        ("pretrain", "model=./model", "model=smollm2_135m model.path=./model"),
        ("evaluate", "model=model", "model=smollm2_135m model.path=model"),
        ("finetune", "data=chat_jsonl data=chat.jsonl", "data=chat_jsonl data.path=chat.jsonl"),
        ("finetune", "data=mixture +data@data.sources.a=mine.jsonl",
         "data=mixture +data@data.sources.a=jsonl data.sources.a.path=mine.jsonl"),
        ("finetune", "data=jsonl model=tiny", "data=jsonl model=tiny"),
        ("finetune", "data=jsonll", "data=jsonll"),
        ("finetune", "data=owner/rows", "data=owner/rows"),
        ("finetune", "model=gpt2", "model=gpt2"),
        ("finetune", "data=missing.xlsx", "data=missing.xlsx"),
        ("finetune", "+data=mine.jsonl", "data=jsonl data.path=mine.jsonl"),
        ("finetune", "model=https://huggingface.co/a/b", "model=smollm2_135m model.path=a/b"),
        ("finetune", "model=hf://a/b", "model=smollm2_135m model.path=a/b"),
        ("dpo", "data=https://huggingface.co/datasets/a/b", "data=preferences data.path=a/b"),
        ("finetune", "data=https://huggingface.co/datasets/a/b/resolve/main/c/x.csv",
         "data=jsonl data.path=hf://datasets/a/b/c/x.csv"),
    ],
)  # fmt: skip
def test_short_forms_are_options_with_their_path(folder: Path, recipe: str, short: str, long: str) -> None:
    arguments = [short] if " y." in short else short.split()
    expected = long.replace("lr=1,x y", "lr=1,x_y").split()
    found = long_forms(arguments, RECIPES[recipe], (CONF,))
    assert found == [each.replace("x_y", "x y") for each in expected]


def test_the_frozen_config_and_the_points_of_a_sweep_are_those_of_the_long_form(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def frozen(*overrides: str) -> str:
        cfg = result("finetune", overrides)
        assert isinstance(cfg, RecipeConfig), cfg
        return to_yaml(cfg)

    single = frozen("model.path=Qwen/Qwen3-0.6B", "data=jsonl", "data.path=mine.jsonl")
    assert frozen("model=Qwen/Qwen3-0.6B", "data=mine.jsonl") == single
    given = ["-m", "model=Qwen/Qwen3-0.6B,tiny", "data=mine.jsonl,~/mine.jsonl"]
    sweep = expand_sweep("finetune", RECIPES["finetune"], REPOSITORY / "recipes", given)
    points = [compose_point(sweep, point, no_check)[0] for point in sweep.points]
    assert [point.values["model"] for point in sweep.points] == ["Qwen/Qwen3-0.6B"] * 2 + ["tiny"] * 2
    assert to_yaml(points[0]) == single  # type: ignore[arg-type]
    assert points[3] == result("finetune", ["model=tiny", "data=jsonl", f"data.path={folder}/mine.jsonl"])


REMEDY = re.compile(r"; (?:use recipes/(?P<recipe>\w+)\.py|write) (?P<line>[\w+@\"]+[=.].*)")


@pytest.mark.parametrize(
    ("recipe", "line", "row", "answer"),
    [
        ("finetune", "data=x.jsonl", {"prompt": "q", "output": "a"}, "write data.response_column=output"),
        (*("finetune", "data=x.jsonl", {"question": "q", "answer": "a"}),
         "write data.prompt_column=question data.response_column=answer"),
        ("finetune", "data=jsonl data.path=x.jsonl", ALPACA, "write data=alpaca data.path=x.jsonl"),
        ("finetune", "data=jsonl data.path=x.jsonl", CHAT, "write data=chat_jsonl data.path=x.jsonl"),
        ("finetune", "data=jsonl data.path=x.jsonl", {"text": "a"}, "write data=text data.path=x.jsonl"),
        (
            *("finetune", "data=x.jsonl", SHAREGPT),
            "write data=chat_jsonl data.path=x.jsonl data.messages_column=conversations data.role_key=from "
            "data.content_key=value data.user_role=human data.assistant_role=gpt",
        ),
        (
            *("finetune", "data=mixture +data@data.sources.a=x.jsonl", SHAREGPT),
            "write +data@data.sources.a=chat_jsonl data.sources.a.path=x.jsonl data.sources.a.messages_column=conversat"
            "ions data.sources.a.role_key=from data.sources.a.content_key=value data.sources.a.user_role=human "
            "data.sources.a.assistant_role=gpt",
        ),
        ("finetune", "data=x.jsonl", PAIR, "use recipes/dpo.py data=preferences data.path=x.jsonl"),
        (*("finetune", "data=x.jsonl", [{"text": "a", "label": "ham"}, {"text": "b", "label": "spam"}]),
         "use recipes/classify.py data=labels data.path=x.jsonl data.label_names=[ham,spam]"),
        (*("finetune", "data=x.jsonl", {"prompt": "q", "completion": "a", "label": True}),
         "use recipes/dpo.py objective=kto data=preferences data.path=x.jsonl"),
        ("pretrain", "data=x.jsonl", SFT, "use recipes/finetune.py data=jsonl data.path=x.jsonl"),
        ("dpo", "data=x.jsonl", SFT, "use recipes/finetune.py data=jsonl data.path=x.jsonl"),
        ("dpo", "data=x.jsonl", {"prompt": "q", "completion": "a", "label": True}, "write objective=kto"),
        (*("dpo", "data=x.jsonl", {"query": "q", "better": "a", "worse": "b"}),
         "write data.prompt_column=query data.chosen_column=better data.rejected_column=worse"),
        (*("classify", "data=x.jsonl data.num_labels=2", PAIR),
         "write objective=reward data=preferences data.path=x.jsonl"),
        (*("classify", "data=x.jsonl data.num_labels=2", {"sentence": "a", "class": 1}),
         "write data.text_column=sentence data.label_column=class"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_rows_with_other_columns_are_answered_with_settings_that_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, line: str, row: Any, answer: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "x.jsonl", *(row if isinstance(row, list) else [row]))
    problems = result(recipe, line.split())
    assert isinstance(problems, list)
    assert len(problems) == 1
    assert problems[0].endswith(f"; {answer}")
    remedy = REMEDY.search(problems[0])
    assert remedy
    kept = [] if "data=" in remedy["line"] or "data@" in remedy["line"] else [each for each in line.split() if each]
    mixture = [each for each in line.split() if each == "data=mixture"]
    accepted = result(remedy["recipe"] or recipe, [*mixture, *kept, *shlex.split(remedy["line"])])
    assert isinstance(accepted, RecipeConfig), accepted


@pytest.mark.parametrize(
    ("recipe", "line", "answer"),
    [
        ("finetune", "mine.jsonl", "has no key; write data=mine.jsonl"),
        ("finetune", "Qwen/Qwen3-0.6B", "has no key; write model=Qwen/Qwen3-0.6B or data=Qwen/Qwen3-0.6B"),
        ("finetune", "lora", "has no key; write peft=lora"),
        ("evaluate", "run", "has no key; write run=run"),
        ("finetune", "peft.targets=q_proj,v_proj", "is a list; write 'peft.targets=[q_proj,v_proj]'"),
        ("finetune", "data.split=train[:10%]", "a split has no slices; write data.split=train data.max_samples=N"),
        ("finetune", "data=preferences", "does not train on; use recipes/dpo.py, or choose another option of data"),
        ("finetune", "logging=wandb", "is a section with keys, not a value; write logging.wandb.mode=online"),
        ("finetune", "logging.mlflow=true", "is a section with keys, not a value; write logging.mlflow.enabled=true"),
        ("finetune", "run=outputs/x", "is a section with keys, not a value; write run.dir=outputs/x"),
        ("finetune", "model=qwen3-0.6b", "did you mean qwen3_0_6b? (there are 70, see meshbook help model)"),
        ("finetune", "model=gpt2", "for a model of the hub, write model.path=gpt2"),
        ("finetune", "data=mine.jsonl data.path=b", "mine.jsonl: data.path=b sets a path, too; remove one of them"),
        ("finetune", "experiment=bare", "conf file experiment/bare.yaml overrides peft below its own package; make"),
        ("finetune", "experiment=misspelt", "its package is read as global; make `# @package _global_` its first line"),
    ],
)
def test_first_commands_are_answered_with_what_to_write(folder: Path, recipe: str, line: str, answer: str) -> None:
    (folder / "run").mkdir()
    (folder / "run/config.yaml").write_text("")
    experiments = folder / "conf/experiment"
    experiments.mkdir(parents=True)
    (experiments / "bare.yaml").write_text("defaults: [override /peft: lora]\n")
    (experiments / "misspelt.yaml").write_text("# @package global\ntraining: {max_steps: 3}\n")
    problems = result(recipe, line.split(), (folder / "conf", CONF))
    assert isinstance(problems, list)
    assert [answer in problem for problem in problems] == [True]


def documented_answers() -> list[tuple[str, list[str], str]]:
    """Return the recipe, the arguments and the answer of each command in the guide."""
    text = (REPOSITORY / "docs/troubleshooting.md").read_text()
    section = text.partition("## First commands from other trainers")[2].partition("\n## ")[0]
    found = re.findall(r"^\$ meshbook (\w+) (.+)\n((?:(?!\$|```).+\n)+)", section, re.MULTILINE)
    return [
        (recipe, line.replace("_path Q", "_path=Q").split(), " ".join(answer.split())) for recipe, line, answer in found
    ]


def test_the_guide_has_the_answers_to_first_commands(folder: Path) -> None:
    """All keys and options are on one command line; files are not, since each would hide the others."""
    answers = documented_answers()
    assert len(answers) >= 24
    write(folder / "output.jsonl", {"prompt": "q", "output": "a"})
    alone = [each for each in answers if each[1][0].startswith("data=")]
    together = [each for each in answers if each not in alone]
    problems = result("finetune", [argument for _, arguments, _ in together for argument in arguments])
    assert isinstance(problems, list)
    assert sorted(problems) == sorted(answer for _, _, answer in together)
    for recipe, arguments, answer in alone:
        assert result(recipe, arguments) == [answer]
