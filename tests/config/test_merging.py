"""Values of files and of the command line are merged in order, and every problem of both is reported at once."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.config.compose.frozen import from_yaml, to_yaml
from components.config.compose.sources import CONF
from components.config.compose.sweep import expand_sweep
from components.config.schema import FinetuneConfig
from components.config.schema.data import MixtureDataConfig
from components.config.schema.optimizer import MuonConfig
from tests.config.commands import REPOSITORY, Commands, placeholder_recipe
from tests.config.composed import config_of, problems_of

RECIPES = ("finetune", "pretrain", "evaluate", "dpo", "distill", "classify")


def write(folder: Path, files: dict[str, str]) -> tuple[Path, ...]:
    """Write option files, and return the config folders."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(text)
    return folder, CONF


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["optimizer.lr=1", "optimizer={lr: 2}"], 2.0),
        (["optimizer={lr: 2}", "optimizer.lr=3"], 3.0),
        (["optimizer.lr=1", "optimizer={lr: 2}", "optimizer.lr=3"], 3.0),
        (["optimizer.lr=3", "optimizer={weight_decay: 0}"], 3.0),
        (["optimizer.lr=4", "optimizer=muon"], 4.0),
    ],
)
def test_the_last_override_of_a_key_counts(overrides: list[str], expected: float) -> None:
    assert config_of("finetune", *overrides).optimizer.lr == expected


def test_dicts_of_several_overrides_are_merged_and_keys_are_removed() -> None:
    cfg = config_of("finetune", "cluster.env={A: 1, B: 2}", "cluster.env={C: 3}", "cluster.env.B=4", "~cluster.env.A")
    assert cfg.cluster.env == {"B": "4", "C": "3"}
    assert "tie_word_embeddings" not in config_of("pretrain", "~model.config.tie_word_embeddings").model.config
    assert problems_of("finetune", "~model.config.x") == ["~model.config.x: is not set; remove it"]
    too_early = "~model.config.a.b"
    assert problems_of("finetune", too_early, "model.config.a={b: 1}") == [f"{too_early}: is not set; remove it"]
    assert config_of("finetune", "model.config.a=3", too_early).model.config["a"] == 3
    assert problems_of("finetune", "~run.seed") == ["~run.seed: cannot be removed; set it to another value"]


def test_a_file_selects_a_kind_by_a_key_or_by_the_former_line(tmp_path: Path) -> None:
    """Keys of the kind that was there before are dropped, as they belong to another dataclass."""
    files = {
        "experiment/line": "# @package _global_\n"
        "defaults: [/schema/data/mixture@data, /pydocs@data.sources.a, _self_]\n",
        "optimizer/line": "defaults: [/schema/optimizer/muon@_here_, _self_]\nns_steps: 7\n",
        "optimizer/key": "kind: muon\nns_steps: 7\n",
        "pydocs": (CONF / "data" / "pydocs.yaml").read_text(),
    }
    folders = write(tmp_path, files)
    mixture = config_of("finetune", "experiment=line", folders=folders).data
    assert (type(mixture), list(mixture.sources)) == (MixtureDataConfig, ["a"])
    by_line, by_key = (
        config_of("finetune", f"optimizer={each}", folders=folders).optimizer for each in ("line", "key")
    )
    assert (type(by_line), by_line.ns_steps) == (MuonConfig, 7)
    assert by_line == by_key


def test_texts_are_as_written_in_a_file_whose_package_a_defaults_list_states(tmp_path: Path) -> None:
    files = {
        "experiment/mine": "# @package _global_\ndefaults: [/anywhere/texts@run, _self_]\ncluster: {env: {010: yes}}\n",
        "anywhere/texts": "name: 12:00:00\nseed: 0x10\n",
    }
    cfg = config_of("finetune", "experiment=mine", folders=write(tmp_path, files))
    assert (cfg.run.name, cfg.run.seed, cfg.cluster.env) == ("12:00:00", 16, {"010": "yes"})


def test_all_problems_of_files_and_of_the_command_line_are_reported_at_once(tmp_path: Path) -> None:
    text = "# @package _global_\ntraining: {steps: 1, seq_len: long}\noptimizer: {lrr: 1}\nnowhere: {a: 1, b: 2}\n"
    folders = write(tmp_path, {"experiment/mine": text})
    wrong = ["experiment=mine", "run.sed=1", "checkpoint.keep=0", "parallelism=fsdp3", "logging.plot=7", "data=jsonl"]
    file = "conf file experiment/mine.yaml"
    assert sorted(each.partition("; ")[0] for each in problems_of("finetune", *wrong, folders=folders)) == [
        "checkpoint.keep=0: must be at least 1",
        f"{file}: nowhere: no such key",
        f"{file}: optimizer.lrr: no such key",
        f"{file}: training.seq_len: must be a whole number",
        f"{file}: training.steps: no such key",
        "data.path: not set, and it has no default",
        "logging.plot=7: must be true or false",
        "parallelism=fsdp3: no such option",
        "run.sed=1: no such key",
    ]


def test_interpolations_see_defaults_that_nobody_set_and_cfg_job_keeps_them(commands: Commands, tmp_path: Path) -> None:
    recipe = REPOSITORY / "recipes" / "finetune.py"
    arguments = ["model=tiny", "training.max_steps=${checkpoint.keep}", "run.name=s${run.seed}", "--cfg", "job"]
    shown = yaml.safe_load(commands.run(recipe, arguments, tmp_path).output)
    resolved = yaml.safe_load(commands.run(recipe, [*arguments, "--resolve"], tmp_path).output)
    assert (shown["training"]["max_steps"], shown["run"]["name"]) == ("${checkpoint.keep}", "s${run.seed}")
    assert (resolved["training"]["max_steps"], resolved["run"]["name"]) == (resolved["checkpoint"]["keep"], "s42")
    assert resolved["logging"]["wandb"]["project"] == "meshbook"
    one = commands.run(recipe, [*arguments, "--package", "logging.wandb"], tmp_path)
    assert yaml.safe_load(one.output) == resolved["logging"]["wandb"]


@pytest.mark.parametrize("name", RECIPES)
def test_help_is_an_overview_that_fits_on_a_screen(commands: Commands, tmp_path: Path, name: str) -> None:
    recipe = REPOSITORY / "recipes" / f"{name}.py"
    shown = commands.run(recipe, ["--help", "run.seed=7"], tmp_path, COLUMNS="80")
    lines = shown.output.splitlines()
    assert (shown.status, shown.errors, shown.imported_torch) == (0, "", False)
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    keys = [line.split("=")[0].strip() for line in lines if re.match(r"  [a-z_]+\.[a-z_.]+=", line)]
    assert 15 <= len(keys) <= 20
    assert any(line.startswith(f"python recipes/{name}.py") for line in lines)
    everything = commands.run(recipe, ["--help", "all", "run.seed=7"], tmp_path, COLUMNS="80").output
    assert "\n  run.seed=7\n" in everything
    assert all(f"\n  {key}=" in everything for key in keys)
    section = commands.run(recipe, ["--help", "run", "run.seed=7"], tmp_path, COLUMNS="80").output
    assert section.lstrip().startswith("run: ")
    assert section.strip() in everything
    wrong = commands.run(recipe, ["--help", "runn"], tmp_path)
    assert (wrong.status, wrong.errors.startswith("--help runn: no such section; write one of ")) == (2, True)


def test_a_sweep_over_the_options_of_a_group_has_those_that_the_recipe_accepts() -> None:
    swept = expand_sweep("finetune", FinetuneConfig, REPOSITORY / "recipes", ["-m", "data=glob(p*)"])
    assert [point.values["data"] for point in swept.points] == ["pydocs", "pysource"]


class Color(Enum):
    """Choices whose names are not their values."""

    red = 1
    blue = 2


@dataclass(kw_only=True)
class Stage:
    """An entry of a list or dict of sections."""

    until: int
    note: str = ""


@dataclass(kw_only=True)
class Own:
    """Types that a section of an own recipe may have."""

    stages: list[Stage] = field(default_factory=list)
    named: dict[str, Stage] = field(default_factory=dict)
    maybe: Stage | None = None
    pair: tuple[int, str] = (1, "a")
    color: Color = Color.red
    by_color: dict[Color, int] = field(default_factory=dict)
    raw: bytes = b""


@dataclass(kw_only=True)
class OwnConfig(FinetuneConfig):
    """A config with an own section."""

    own: Own = field(default_factory=Own)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("own.stages=[{until: 3},{until: 4,note: 010}]", [Stage(until=3), Stage(until=4, note="010")]),
        ("own.named={a: {until: 3}}", {"a": Stage(until=3)}),
        ("own.maybe={until: 3}", Stage(until=3)),
        ("own.maybe=null", None),
        ("own.pair=[2,b]", (2, "b")),
        ("own.color=Color.blue", Color.blue),
        ("own.color=2", Color.blue),
        ("own.by_color={blue: 3}", {Color.blue: 3}),
        ("own.stages=[{until: x}]", "own.stages[0].until=x: must be a whole number"),
        ("own.stages=[3]", "own.stages[0]=3: is a section with keys, not a value"),
        ("own.maybe=3", "own.maybe=3: is a section with keys, not a value"),
        ("own.maybe.untill=3", "own.maybe.untill=3: no such key; did you mean own.maybe.until?"),
        ("own.pair=[2]", "own.pair=[2]: must be a list of 2 values"),
        ("own.by_color={green: 3}", "own.by_color={green: 3}: must be one of red, blue"),
        ("own.raw=abc", "own.raw=abc: must be of type bytes"),
    ],
)
def test_own_sections_have_any_type_of_fields(override: str, expected: Any) -> None:
    problems = problems_of("finetune", "model=tiny", override, schema=OwnConfig)
    if isinstance(expected, str):
        assert [problem[: len(expected)] for problem in problems] == [expected]
    else:
        assert problems == []
        cfg = config_of("finetune", "model=tiny", override, schema=OwnConfig)
        name = override.partition("=")[0].rpartition(".")[2]
        assert asdict(cfg.own)[name] == asdict(Own(**{name: expected}))[name]
        assert from_yaml(to_yaml(cfg), OwnConfig) == cfg


WRONG_FILES: list[tuple[str, str, str]] = [
    # name, text, message
    ("experiment/m", "training: {max_steps: 3}\ntraining: {seq_len: 32}\n", "key training twice"),
    ("experiment/m", "optimizer: {kind: muon}\n", "optimizer.kind=muon: the chosen option has kind"),
    ("experiment/m", "training.max_steps: 3\n", "are nested; write `training: {max_steps: ...}`"),
    ("experiment/m", "training: null\n", "file experiment/m.yaml: training: must not be null"),
    ("experiment/m", "training: {steps: 1}\n", "experiment/m.yaml: training.steps: no such key"),
    ("experiment/m", "cluster: {env: {A: ~}}\n", "m.yaml: cluster.env.A: must not be null; put quotes"),
    ("experiment/m", "cluster: {setup: [null]}\n", "m.yaml: cluster.setup: must not be null; put quotes"),
    ("experiment/m", "peft: 3\n", "m.yaml: peft=3: is a section with keys, not a value"),
    ("experiment/m", "peft: lora\n", "peft=lora: is a section with keys, not a value; write `override /peft: lora`"),
    ("experiment/m", "data: {path: x}\n",
     "experiment/m.yaml: data.path: data of kind docs has no such key (kinds with"),
    ("experiment/m", "defaults: 3\n", "m.yaml: defaults must be a list of options, not 3"),
    ("experiment/m", "defaults: [{a: b, c: d}]\n", "m.yaml: each item of its defaults must be FILE or GROUP: OPTION"),
    ("experiment/m", "defaults: [[3]]\n", "m.yaml: each item of its defaults must be FILE or GROUP: OPTION"),
    ("experiment/m", "defaults: [{1: a}]\n", "m.yaml: each item of its defaults must be FILE or GROUP: OPTION"),
    ("experiment/m", "defaults: [{/peft: lora}]\n",
     "m.yaml adds a second option of peft; write `override /peft: lora`"),
    ("experiment/m", "defaults: [override /optimizer: adamm]\n",
     "m.yaml requests optimizer=adamm: no such option; did you mean adamw"),
    ("experiment/m", "defaults: [override /modle: tiny]\n", "requests modle: no such group; did you mean model?"),
    ("experiment/m", "defaults: [override model: tiny]\n",
     "requests experiment/model: no such group; write `override /model"),
    ("experiment/-", "defaults: [/model/nope]\n", "conf file experiment/-.yaml requests model=nope: no such option"),
    ("experiment/-", "3\n", "-.yaml: must hold keys and values, such as lr: 1e-4, not 3"),
    ("experiment/-", "- a\n", "-.yaml: must hold keys and values, such as lr: 1e-4, not"),
    ("experiment/-", "a: [1\nb: 2\n", "-.yaml, line 2: is not valid YAML: expected ',' or ']'"),
    ("experiment/-", "a: b: 2\n", "-.yaml, line 1: is not valid YAML: mapping values are not allowed here"),
    ("experiment/-", "a:\n\t- 1\n", "-.yaml, line 2: is not valid YAML"),
    ("experiment/-", "a: 'b\n", "-.yaml, line 2: is not valid YAML"),
    ("experiment/-", "a: *b\n", "-.yaml, line 1: is not valid YAML: found undefined alias 'b'"),
    ("data/m", "kind: nope\n", "conf file data/m.yaml: data.kind: must be one of docs, sft"),
    ("data/m", "kind: [sft]\n", "conf file data/m.yaml: data.kind: must be one of docs, sft"),
    ("data/m", "path: 3\n", "conf file data/m.yaml: has no kind; add the line `kind: sft` (or chat, text, preferences"),
    ("data/m", "defaults: [/schema/data/sfft@_here_, _self_]\npath: x\n",
     "requests schema/data=sfft: no such option; did you"),
    ("data/m", "defaults: [mixture, gsm8k@sources.maths, _self_]\nsources: {math: {path: x}}\n",
     "data/m.yaml: data.sources.math: the mixture has no source math; did you mean maths?"),
    ("optimizer/m", "learning_rates: 1\n", "optimizer/m.yaml: optimizer.learning_rates: no such key"),
    ("optimizer/m", "lr: fast\n", "optimizer/m.yaml: optimizer.lr: must be a number"),
    ("peft/m", "targets: !!set {a, b}\n", "peft.targets: holds a value of type set"),
    ("peft/m", "# @package\nrank: 3\n", "write `# @package SECTION` as its first line"),
    ("peft/m", "defaults: [nothere]\n", "conf file peft/m.yaml requests peft=nothere: no such option"),
    ("peft/m", "defaults: [m, _self_]\n", "includes itself; remove it there"),
]  # fmt: skip
"""Option files, those of experiment/m below the package _global_, and their message."""


@pytest.mark.parametrize(("name", "text", "message"), WRONG_FILES)
def test_a_wrong_file_has_one_message_with_its_name(tmp_path: Path, name: str, text: str, message: str) -> None:
    text = f"# @package _global_\n{text}" if name == "experiment/m" else text
    folders = write(tmp_path, {name: text})
    problems = problems_of("finetune", name.replace("/", "="), "model=tiny", folders=folders)
    assert len(problems) == 1, problems
    assert message in problems[0]


@pytest.mark.parametrize(
    ("files", "overrides", "message"),
    [
        ({"optimizer/m": "defaults: 3\n"}, "optimizer=adam", "optimizer=adam: no such option; did you mean adamw?"),
        ({"peft/m": "defaults: [n]\n", "peft/n": "defaults: [m]\n"}, "peft=m", "includes itself; remove it there"),
        ({}, "data=mixture +data@data.sources.maths=gsmk8", "sources.maths=gsmk8: no such option; did you mean gsm8k?"),
        ({}, "experiment=[short,3]", "experiment=[short,3]: must be the name of an option"),
        ({}, f"run.seed={'9' * 5000}", "cannot be parsed; write KEY=VALUE"),
        ({}, f"peft.targets={'[' * 300}{']' * 300}", "cannot be parsed; write KEY=VALUE"),
        ({}, f"model.config={'{a:' * 100}1{'}' * 100}", "cannot be parsed; write KEY=VALUE"),
        ({}, f"data={'9' * 5000}", "cannot be parsed; write KEY=VALUE"),
        ({}, "model.config={null:2}", "model.config={null:2}: has the key null; put quotes around it"),
        ({}, "data=mixture +data@data.sources.a=gsm8k data.sources.a=null", "data.sources.a=null: must not be null"),
        ({}, "optimizer={kind:muon}", "optimizer.kind=muon: the chosen option has kind adamw"),
        ({}, "~peft=qlora", "~peft=qlora: Could not delete 'peft=qlora'. No match in the defaults list"),
        ({}, "model@x=tiny", "model@x=tiny: is not in the defaults list; add it with a plus: +model@x=tiny"),
    ],
)
def test_a_wrong_override_has_one_message(tmp_path: Path, files: dict[str, str], overrides: str, message: str) -> None:
    problems = problems_of("finetune", *overrides.split(" "), "model=tiny", folders=write(tmp_path, files))
    assert len(problems) == 1, problems
    assert message in problems[0]


def test_a_wrong_main_config_is_named(commands: Commands, tmp_path: Path) -> None:
    groups = "parallelism: fsdp3, model: tiny, data: pydocs, optimizer: adamw"
    write(tmp_path / "conf", {"main": f"defaults: [schema/finetune, _self_, {groups}]\n"})
    recipe = placeholder_recipe(tmp_path, "finetune", "FinetuneConfig")
    ended = commands.run(recipe, ["--config-name", "main"], tmp_path)
    assert (ended.status, len(ended.errors.splitlines())) == (2, 1)
    assert "conf file main.yaml requests parallelism=fsdp3: no such option; did you mean fsdp2?" in ended.errors


def test_a_file_without_a_kind_has_that_of_the_recipe_and_a_folder_is_no_file(tmp_path: Path) -> None:
    folders = write(tmp_path, {"objective/mine": "beta: 0.3\n"})
    (tmp_path / "peft" / "dora.yaml").mkdir(parents=True)
    cfg = config_of("dpo", "objective=mine", "peft=dora", "data.path=x", "run.name=${now:%Y}", folders=folders)
    assert (cfg.objective.kind, cfg.objective.beta, cfg.peft.dora) == ("dpo", 0.3, True)
    assert re.fullmatch(r"20\d\d", cfg.run.name)
    assert config_of("finetune", "optimizer.weight_decay=99999999999999999999").optimizer.weight_decay == 1e20


def assigned_attributes(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes of names from hydra, omegaconf and sys that a module sets."""
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).partition(".")[0] in ("hydra", "omegaconf", "sys")
    }
    targets = [each for node in ast.walk(tree) if isinstance(node, ast.Assign) for each in node.targets]
    for target in [inner for each in targets for inner in ast.walk(each)]:
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in imported:
            yield f"{target.value.id}.{target.attr}"


def test_no_attribute_of_hydra_or_omegaconf_and_no_command_line_is_replaced() -> None:
    control = "import sys\nfrom omegaconf import DictConfig\nDictConfig.x = 1\nargv, sys.argv = sys.argv, []\n"
    assert list(assigned_attributes(ast.parse(control))) == ["DictConfig.x", "sys.argv"]
    folders = [REPOSITORY / "components", *(REPOSITORY / "scripts" / name for name in ("_plan", "_parity", "_memory"))]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    found = {file.name: names for file in files if (names := list(assigned_attributes(ast.parse(file.read_text()))))}
    replaced = {name for names in found.values() for name in names if not name.startswith("sys.") or name == "sys.argv"}
    assert replaced == set(), found


def test_ranks_read_a_frozen_config_without_hydra() -> None:
    code = "import sys, components.launch.rank, components.config.compose.frozen; print('hydra' in sys.modules)"
    control = code.replace("compose.frozen", "compose.sources")
    shown = [
        subprocess.check_output([sys.executable, "-c", each], text=True, cwd=REPOSITORY) for each in (code, control)
    ]
    assert shown == ["False\n", "True\n"]
