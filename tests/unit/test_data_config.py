"""The `data` section: the options of conf/data/, and the errors that the schema reports."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from components.config.compose.frozen import _conf_resolvers
from components.config.kinds import KINDS
from components.config.schema.data import (
    ChatDataConfig,
    CustomDataConfig,
    DataConfig,
    DataKind,
    DocsDataConfig,
    LabelsDataConfig,
    MixtureDataConfig,
    PreferencesDataConfig,
    SftDataConfig,
    TextDataConfig,
    TokensDataConfig,
)
from components.protocol.errors import ConfigError

OPTIONS = Path(__file__).parents[2] / "conf" / "data"


def option(name: str, **values: object) -> DataConfig:
    """Merge an option of conf/data/ into the schema that it names, by omegaconf."""
    yaml = OmegaConf.to_container(OmegaConf.load(OPTIONS / f"{name}.yaml"))
    kind = yaml["kind"]
    merged = OmegaConf.merge(OmegaConf.structured(KINDS["data"][DataKind(kind)]), yaml, values)
    with _conf_resolvers():
        return OmegaConf.to_object(merged)


def errors_of(schema: type[DataConfig], **values: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        schema(**values)
    return caught.value.problems


def test_every_option_has_its_schema_and_is_complete_except_for_the_path():
    kinds = {
        "pydocs": DocsDataConfig,
        "gsm8k": SftDataConfig,
        "jsonl": SftDataConfig,
        "chat_jsonl": ChatDataConfig,
        "alpaca": SftDataConfig,
        "text": TextDataConfig,
        "pysource": TextDataConfig,
        "mixture": MixtureDataConfig,
        "custom": CustomDataConfig,
        "preferences": PreferencesDataConfig,
        "labels": LabelsDataConfig,
        "tokens": TokensDataConfig,
    }
    assert {file.stem for file in OPTIONS.glob("*.yaml")} == set(kinds)
    for name, kind in kinds.items():
        required = {
            "pydocs": {},
            "mixture": {"sources": {"docs": DocsDataConfig()}},
            "custom": {"factory": "a:b"},
            "labels": {"path": "my.jsonl", "num_labels": 2},
        }
        values = required.get(name, {"path": "my.jsonl"})
        assert type(option(name, **values)) is kind


def test_options_without_a_default_source_require_a_path():
    for name in ("jsonl", "chat_jsonl", "text", "preferences", "labels", "tokens"):
        assert OmegaConf.is_missing(OmegaConf.load(OPTIONS / f"{name}.yaml"), "path")
    gsm8k = option("gsm8k")
    assert (gsm8k.path, gsm8k.subset) == ("openai/gsm8k", "main")
    assert (gsm8k.prompt_column, gsm8k.response_column) == ("question", "answer")
    alpaca = option("alpaca")
    columns = (alpaca.prompt_column, alpaca.input_column, alpaca.response_column)
    assert columns == ("instruction", "input", "output")


@pytest.mark.parametrize("kind", [kind for kind in DataKind if kind != DataKind.mixture])
def test_frozen_config_is_restored_by_its_kind(kind):
    required = {
        SftDataConfig: {"path": "x"},
        ChatDataConfig: {"path": "x"},
        TextDataConfig: {"path": "x"},
        CustomDataConfig: {"factory": "a:b"},
        PreferencesDataConfig: {"path": "x"},
        LabelsDataConfig: {"path": "x", "label_names": ["ham", "spam"]},
        TokensDataConfig: {"path": "x"},
    }
    schema = KINDS["data"][kind]
    cfg = schema(**required.get(schema, {}), max_samples=3)
    frozen = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(cfg))))
    assert frozen["kind"] == kind == kind.value == kind.name
    result = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(KINDS["data"][DataKind(frozen["kind"])]), frozen))
    assert result == cfg
    assert type(result) is schema


@pytest.mark.parametrize("kind", DataKind)
def test_every_kind_has_the_common_keys_and_rejects_unknown_ones(kind):
    common = {field.name for field in fields(DataConfig)}
    assert common <= {field.name for field in fields(KINDS["data"][kind])}
    with pytest.raises(TypeError, match="typo"):
        KINDS["data"][kind](typo=1)


def test_all_config_errors_are_reported_at_once():
    assert errors_of(
        SftDataConfig,
        path="",
        eval_fraction=1.0,
        max_samples=0,
        max_eval_samples=-1,
        prompt_column="text",
        response_column="text",
        input_column="",
    ) == [
        "data.max_samples=0: must be at least 1",
        "data.max_eval_samples=-1: must be at least 1",
        "data.eval_fraction=1.0: must be at least 0 (nothing held out) and less than 1",
        "data.path='': is empty; set data.path to a file, a folder or a hub name",
        "data.input_column='': is empty; name it as in the data",
        "data.response_column=text: is also data.prompt_column; the two must differ",
    ]


def test_evaluation_on_the_train_split_is_rejected():
    (problem,) = errors_of(SftDataConfig, path="x.jsonl", eval_split="train")
    assert problem.startswith("data.eval_split=train: is also the train split, data.split; choose another, or null")
    SftDataConfig(path="x.jsonl", eval_split="train", eval_path="y.jsonl")


def test_setting_the_kind_is_rejected():
    (problem,) = errors_of(SftDataConfig, path="x.jsonl", kind=DataKind.chat)
    assert problem.startswith("data.kind=chat: the chosen option has kind sft; choose another option of conf/data/")


def test_equal_roles_or_keys_are_rejected():
    assert errors_of(ChatDataConfig, path="x.jsonl", role_key="content", user_role="assistant") == [
        "data.content_key=content: is also data.role_key; the two must differ",
        "data.assistant_role=assistant: is also data.user_role; the two must differ",
    ]


@pytest.mark.parametrize(
    "factory", ["my_module", "my_module:", ":build", "my module:build", "a..b:build", "a:b:c", "../a:b"]
)
def test_factory_that_is_not_module_and_function_is_rejected(factory):
    assert errors_of(CustomDataConfig, factory=factory) == [
        f"data.factory={factory}: must be module:function, such as my_package.my_data:build"
    ]
