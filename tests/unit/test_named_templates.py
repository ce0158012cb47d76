"""Tokenizers with several named chat templates, compared with plain transformers."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from components import data, models
from components.chat_template import ChatTemplate
from components.config.compose.frozen import frozen_text, read_frozen, read_section
from components.config.model_files import check_template
from components.config.schema import FinetuneConfig, ModelConfig, PretrainConfig
from components.config.schema.data import BadRows, DocsDataConfig, SftDataConfig
from components.config.schema.model import WeightInit
from components.config.schema.recipes import named_models
from components.config.schema.training import TasksConfig
from components.conversation import Conversation
from components.data.sources import text
from components.models import tokenizer as tokenizer_module
from components.models.tokenizer import BYTE_CHAT_TEMPLATE, byte_tokenizer
from components.protocol.errors import ConfigError
from components.protocol.run_files import RECORD
from components.training.harness import load_tasks
from scripts import chat

PLAIN = BYTE_CHAT_TEMPLATE
SHOUT, RAG, TOOLS = (PLAIN.replace("<|im_start|>", f"<|im_start|>{name} ") for name in ("!", "rag", "tools"))
NAMED = {"shout": SHOUT, "rag": RAG}
ASKED = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
NAMES = r"model\.chat_template=null: the tokenizer has the chat templates rag, shout, and none is named default; set"


def saved(folder: Path, templates: Any) -> str:
    """Save the byte tokenizer with these templates by plain transformers."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(folder)
    return str(folder)


def loaded(folder: Path, templates: Any, chosen: str | None = None) -> Any:
    path = saved(folder / "tokenizer", templates)
    cfg = ModelConfig(tokenizer=path, chat_template=chosen, init=WeightInit.random, config={"model_type": "llama"})
    return models.load_tokenizer(cfg)


@pytest.mark.parametrize("in_list", [False, True])
def test_names_of_no_template_are_rejected_before_launch(in_list: bool, tmp_path: Path) -> None:
    """As transformers saves several templates, and as older versions did: in a list in tokenizer_config.json."""
    path = saved(tmp_path / "tokenizer", {**NAMED, "default": PLAIN})
    if in_list:
        file = tmp_path / "tokenizer" / "tokenizer_config.json"
        listed = [{"name": name, "template": text} for name, text in {**NAMED, "default": PLAIN}.items()]
        file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": listed}))
        for each in (tmp_path / "tokenizer").rglob("*.jinja"):
            each.unlink()
    (tmp_path / "own").write_text(PLAIN)
    for chosen in ("rag", "shout", "default", "chatml", "qwen3", str(tmp_path / "own"), "owner/model"):
        assert check_template(ModelConfig(path=path, chat_template=chosen)) == [], chosen
    for wrong in ("rags", str(tmp_path / "absent.jinja")):
        (problem,) = check_template(ModelConfig(path=path, chat_template=wrong))
        assert problem.startswith(
            f"model.chat_template={wrong}: is neither the name of a chat template of the tokenizer"
        )
        assert "(default, rag, shout) nor one of Meshbook (chatml, llama3, qwen3)" in problem
        with pytest.raises(ConfigError, match="is neither the name of a chat template of the tokenizer"):
            models.load_tokenizer(
                ModelConfig(tokenizer=path, chat_template=wrong, init=WeightInit.random, config={"model_type": "llama"})
            )


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize(
    ("templates", "chosen", "plain", "with_tools"),
    [
        (NAMED, "rag", RAG, RAG),
        (NAMED, "FILE", TOOLS, TOOLS),
        ({**NAMED, "default": PLAIN}, None, PLAIN, PLAIN),
        ({**NAMED, "default": PLAIN}, "shout", SHOUT, SHOUT),
        ({**NAMED, "default": PLAIN, "tool_use": TOOLS}, None, PLAIN, TOOLS),
        ({**NAMED, "tool_use": TOOLS}, "rag", RAG, TOOLS),
        ({**NAMED, "tool_use": TOOLS}, "tool_use", TOOLS, TOOLS),
        (PLAIN, "default", PLAIN, PLAIN),
        (PLAIN, "FILE", TOOLS, TOOLS),
        (None, "FILE", TOOLS, TOOLS),
    ],
)
def test_the_chosen_template_is_used_and_exported_as_the_default(
    templates: Any, chosen: str | None, plain: str, with_tools: str, tools: Any, tmp_path: Path
) -> None:
    """Training, prompts and the saved tokenizer read by plain transformers; no template of the base is lost."""
    file = tmp_path / "my.jinja"
    file.write_text(TOOLS)
    tokenizer = loaded(tmp_path, templates, str(file) if chosen == "FILE" else chosen)
    source = with_tools if tools else plain
    options: Any = {"tools": tools, "tokenize": False}
    expected = byte_tokenizer().apply_chat_template(ASKED, chat_template=source, **options)

    conversation = Conversation("here", ASKED, tools)
    assert ChatTemplate(tokenizer).render(conversation).text == expected
    (sample,) = data.encode_conversations(tokenizer, [conversation])
    assert tokenizer.decode(sample.input_ids) == expected.rstrip("\n")
    if tools is None:
        prompt = byte_tokenizer().apply_chat_template(ASKED[:1], chat_template=source, add_generation_prompt=True)
        assert models.encode_messages(tokenizer, ASKED[:1]) == prompt["input_ids"]
        assert models.encode_prompt(tokenizer, "Why?") == prompt["input_ids"]

    tokenizer.save_pretrained(tmp_path / "export")
    again: Any = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert again.apply_chat_template(ASKED, **options) == expected
    if isinstance(templates, dict):
        kept = {name: text for name, text in templates.items() if name != "default"}
        assert kept.items() <= again.chat_template.items()
        assert set(templates.values()) <= set(again.chat_template.values())


TRL_TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))


@pytest.mark.parametrize("name", [*(file.name for file in TRL_TEMPLATES), "dollar.jinja"])
def test_a_run_keeps_the_template_of_a_file_that_changes(name: str, tmp_path: Path) -> None:
    """Its frozen config, read whole or by section, holds the text, without a byte order mark."""
    odd = PLAIN + "{# ${a} \\${b} #}\u2028\u00a0 \t\r\n"
    text = {file.name: file.read_text() for file in TRL_TEMPLATES}.get(name, odd)
    file = tmp_path / name
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    tokenizer = saved(tmp_path / "tokenizer", PLAIN)
    model = ModelConfig(
        tokenizer=tokenizer, chat_template=str(file), init=WeightInit.random, config={"model_type": "llama"}
    )
    frozen = tmp_path / "config.yaml"
    frozen.write_text(frozen_text(FinetuneConfig(model=model, data=DocsDataConfig())))
    file.write_text(PLAIN.replace("im_start", "changed"))
    for read in (read_frozen(frozen, FinetuneConfig).model, read_section(frozen, "model", ModelConfig)):
        assert models.load_tokenizer(read).chat_template == text
        assert check_template(read) == []
    assert models.load_tokenizer(replace(model, chat_template=str(file))).chat_template != text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it has neither"),
        (b"  \n", "it has neither"),
        (b"<|im_start|>user\n", "it has neither"),
        (json.dumps({"chat_template": PLAIN}).encode(), "it is JSON; write the text of its chat_template to a file"),
        (PLAIN.replace("{% endfor %}", "").encode(), r"line 4: Unexpected end of template"),
        (b"{{ messages[0].content }", r"line 1: unexpected '}'"),
        (b"{{ " + b"(" * 5000 + b"x" + b")" * 5000 + b" }}", "it nests too deep"),
        (PLAIN.encode("utf-16"), "codec can't decode"),
        (b"\xff{{ x }}", "codec can't decode"),
        ("{{ x }}\x85".encode(), r"has the character U\+0085"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_template_is_rejected_with_its_name(content: bytes, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "my.jinja"
    file.write_bytes(content)
    with pytest.raises(
        ConfigError, match=rf"model\.chat_template={file}: is no Jinja template: .*{problem}.*; correct it"
    ):
        ModelConfig(path="x", chat_template=str(file))


def test_a_text_that_is_neither_a_name_nor_a_template_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template=hello hello .*: is neither the name"):
        loaded(tmp_path, NAMED, "hello " * 60)


def test_a_file_without_a_suffix_needs_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text(SHOUT)
    with pytest.raises(ConfigError, match=r"model\.chat_template=mine: .*\(write \./mine for the one here\); set one"):
        loaded(tmp_path, NAMED, "mine")
    assert loaded(tmp_path, NAMED, "./mine").chat_template["default"] == SHOUT


@pytest.mark.parametrize("chosen", ["Rag", "nowhere.jinja"])
def test_a_template_that_does_not_exist_is_refused_with_the_names(chosen: str, tmp_path: Path) -> None:
    names = rf"model\.chat_template={chosen}: .*\(rag, shout\).*\(chatml, llama3, qwen3\), nor a model .* set one"
    with pytest.raises(ConfigError, match=names):
        loaded(tmp_path, NAMED, chosen)


@pytest.mark.parametrize("templates", [None, PLAIN, {**NAMED, "default": PLAIN, "tool_use": TOOLS}])
def test_a_shipped_template_and_that_of_another_model_replace_the_own(
    templates: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for conversations with tools; the exported tokenizer keeps the others, and answers end alike."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "other", {"default": SHOUT, "rag": RAG})
    shipped = (Path(tokenizer_module.__file__).parent / "chat_templates" / "chatml.jinja").read_text()
    for chosen, source in (("chatml", shipped), ("other", SHOUT), (str(tmp_path / "other"), SHOUT)):
        tokenizer = loaded(tmp_path, templates, chosen)
        expected = byte_tokenizer().apply_chat_template(ASKED, chat_template=source, tokenize=False)
        assert ChatTemplate(tokenizer).render(Conversation("here", ASKED)).text == expected
        with_tools = byte_tokenizer().apply_chat_template(ASKED, [TOOL], chat_template=source, tokenize=False)
        assert ChatTemplate(tokenizer).render(Conversation("here", ASKED, [TOOL])).text == with_tools
        assert ChatTemplate(tokenizer).stop_tokens == {"<|im_end|>": tokenizer.eos_token_id}
        tokenizer.save_pretrained(tmp_path / "export")
        again: Any = AutoTokenizer.from_pretrained(tmp_path / "export")
        assert again.apply_chat_template(ASKED, tokenize=False) == expected
        if isinstance(templates, dict):
            assert set(templates.values()) <= set(again.chat_template.values())


def test_a_name_that_may_mean_two_templates_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rag").write_text(TOOLS)
    saved(tmp_path / "llama3", SHOUT)
    for chosen in ("rag", "llama3"):
        with pytest.raises(
            ConfigError, match=rf"chat_template={chosen}: is the name .* write \./{chosen} for the latter"
        ):
            loaded(tmp_path, NAMED, chosen)
    assert loaded(tmp_path, NAMED, "./rag").chat_template["default"] == TOOLS
    assert loaded(tmp_path, NAMED, "./llama3").chat_template["default"] == SHOUT


@pytest.mark.parametrize(
    ("templates", "problem"),
    [
        (None, "needs one chat template, but the tokenizer of that model has none; set it to a file"),
        (NAMED, r"has several \(rag, shout\), none of them named default"),
        ("", "the folder has no tokenizer .*; set it to a folder that has one, or to a file"),
    ],
)
def test_a_model_without_a_template_to_use_is_refused(templates: Any, problem: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    if templates != "":
        saved(other, templates)
    with pytest.raises(ConfigError, match=rf"model\.chat_template={other}: .*{problem}"):
        loaded(tmp_path, PLAIN, str(other))
    cfg = ModelConfig(
        tokenizer="bytes", chat_template=str(other), init=WeightInit.random, config={"model_type": "llama"}
    )
    assert named_models(FinetuneConfig(model=cfg, data=DocsDataConfig()))["model.chat_template"] == str(other)


def test_control_tokens_that_the_tokenizer_would_split_are_refused(tmp_path: Path, caplog: Any) -> None:
    """The tokens that the message names are all that the template needs; those of a file are a warning."""
    with pytest.raises(ConfigError) as raised:
        loaded(tmp_path, PLAIN, "llama3")
    (problem,) = raised.value.problems
    named = json.loads("[" + problem.partition("model.new_tokens=[")[2].partition("]'")[0] + "]")
    assert named == ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    saved(tmp_path / "zephyr", PLAIN.replace("<|im_start|>", "<|says|>"))
    with pytest.raises(ConfigError, match=r"zephyr: the tokenizer has no tokens <\|says\|>, with which"):
        loaded(tmp_path, PLAIN, str(tmp_path / "zephyr"))
    (tmp_path / "my.jinja").write_text(PLAIN.replace("<|im_start|>", "<|says|>"))
    loaded(tmp_path, PLAIN, str(tmp_path / "my.jinja"))
    assert "the tokenizer has no tokens <|says|>" in caplog.text

    saved(tmp_path / "oss", (Path(trl.__file__).parent / "chat_templates" / "gptoss_training.jinja").read_text())
    with pytest.raises(ConfigError, match=r"<\|return\|>.*<\|call\|>"):  # which end answers and calls
        loaded(tmp_path, PLAIN, str(tmp_path / "oss"))

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *named]})
    tokenizer.save_pretrained(tmp_path / "extended")
    cfg = ModelConfig(tokenizer=str(tmp_path / "extended"), chat_template="llama3", init=WeightInit.random,
                      config={"model_type": "llama"})  # fmt: skip
    ends = ChatTemplate(models.load_tokenizer(cfg)).stop_tokens
    assert ends == {"<|im_end|>": tokenizer.eos_token_id, "<|eot_id|>": tokenizer.convert_tokens_to_ids("<|eot_id|>")}


def test_a_tokenizer_without_a_default_template_is_refused_where_one_is_needed(tmp_path: Path) -> None:
    """All rows are refused alike, not one by one as bad rows; plain text needs no template."""
    tokenizer = loaded(tmp_path, NAMED)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Why?", "response": "Because."}\n')
    cfg = SftDataConfig(path=str(tmp_path / "rows.jsonl"), bad_rows=BadRows.drop, eval_fraction=0.5, cache=None)
    conversation = Conversation("here", ASKED)
    for needs_it in (
        lambda: data.build_dataset(cfg, tokenizer, seq_len=64, split="train"),
        lambda: text.encode_scored(tokenizer, [conversation]),
        lambda: models.encode_prompt(tokenizer, "Why?"),
        lambda: load_tasks(TasksConfig(tasks=["x"], apply_chat_template=True), tokenizer),
    ):
        with pytest.raises(ConfigError, match=NAMES):
            needs_it()
    assert ChatTemplate(tokenizer).stop_tokens == {"<|im_end|>": tokenizer.eos_token_id}


def test_pretraining_has_no_template_to_choose() -> None:
    model = ModelConfig(tokenizer="bytes", chat_template="x", init=WeightInit.random, config={"model_type": "llama"})
    with pytest.raises(ConfigError, match="model.chat_template=x: a pretraining run has no chat template; remove it"):
        PretrainConfig(model=model, data=DocsDataConfig())


def test_a_pretrained_model_has_no_template_but_a_chosen_one(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoints" / "step_2"
    step.mkdir(parents=True)
    (tmp_path / "run" / RECORD).write_text('{"recipe": "pretrain"}')
    model = ModelConfig(tokenizer="bytes", init=WeightInit.random, config={"model_type": "llama"})
    assert models.load_tokenizer(model, step).chat_template is None
    shipped = models.load_tokenizer(replace(model, chat_template="chatml"), step)
    assert shipped.apply_chat_template(ASKED, tokenize=False).startswith("<|im_start|>user\nWhy?<|im_end|>")


def test_chats_need_the_name_of_a_template_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The option that the message names works, for a model trained on text whose tokenizer has no default template."""
    folder, vocabulary = saved(tmp_path, NAMED), len(byte_tokenizer())
    config = LlamaConfig(vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Why?\n")))
    command = [folder, "--device", "cpu", "--max-new-tokens", "2"]
    assert chat.main(command) == 2
    assert "--chat-template=null: the tokenizer has the chat templates rag, shout, and none" in capsys.readouterr().err
    for name in ("rag", "chatml"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Why?\n")))
        assert chat.main([*command, "--chat-template", name]) == 0
