"""Loss masks with unusual chat templates and small tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import models, pre_tokenizers

from components.chat_template import ChatTemplate
from components.config.schema.data import SftDataConfig, UnusedKeys
from components.conversation import Conversation
from components.data.examples import encode_conversations
from components.data.loading import build_dataset
from components.protocol.errors import ConfigError
from tests.unit.test_data_examples import byte_tokenizer, chat, encode_one, fast_tokenizer, target_texts
from tests.unit.test_data_files import write

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_template_without_generation_prompt_masks_all_but_the_answers():
    template = (
        "<s>{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% elif m['role'] == 'assistant' %} {{ m['content'] }}</s>"
        "{% else %}{{ raise_exception('no system role here') }}{% endif %}{% endfor %}"
    )
    tokenizer = byte_tokenizer(template, eos="</s>")
    example = encode_one(tokenizer, chat("hi", "yo", "more", "ok"))
    assert tokenizer.decode(example.input_ids) == "<s>[INST] hi [/INST] yo</s>[INST] more [/INST] ok</s>"
    assert target_texts(tokenizer, example) == [" yo</s>", " ok</s>"]
    with pytest.raises(ConfigError, match=r"x.jsonl:1: message 1 \(role system\): .* rejects .* no system role here"):
        encode_one(tokenizer, chat("hi", "yo", system="s"))


def test_template_that_ends_the_last_answer_differently_splits_by_answer():
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{{ '<|return|>' if loop.last and m['role'] == 'assistant' else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = byte_tokenizer(template)
    examples = encode_conversations(tokenizer, [chat("a", "b", "c", "d")])
    assert [target_texts(tokenizer, example) for example in examples] == [["b<|return|>"], ["d<|return|>"]]


def test_text_that_the_generation_prompt_adds_is_not_a_target():
    template = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif")
    tokenizer = byte_tokenizer(template)
    assert target_texts(tokenizer, encode_one(tokenizer, chat("a", "b"))) == ["b<|im_end|>"]
    # If the answer begins with the text that the generation prompt ends with, that text is not a target.
    assert target_texts(tokenizer, encode_one(tokenizer, chat("a", "<think>\nb"))) == ["b<|im_end|>"]


def test_template_that_rewrites_earlier_messages_is_rejected():
    template = (
        "{% for m in messages %}{{ m['role'] }}{{ messages | length }}: {{ m['content'] }}<|im_end|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    with pytest.raises(ConfigError, match="renders the messages before message 1 differently"):
        encode_one(byte_tokenizer(template), chat("a", "b"))


def test_token_that_spans_prompt_and_answer_is_a_target_and_is_reported(tmp_path: Path):
    special = ["<|im_end|>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), ":b"]
    model = models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[(":", "b")])
    template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer = fast_tokenizer(model, special, template, "<|im_end|>")
    assert target_texts(tokenizer, encode_one(tokenizer, chat("a", "cut"))) == ["cut<|im_end|>"]
    assert target_texts(tokenizer, encode_one(tokenizer, chat("a", "but"))) == [":but<|im_end|>"]
    assert "; 1 answers begin within a token that also holds" in notes_of(tmp_path, tokenizer, ["cut", "but"])


def test_end_of_turn_without_a_special_token_is_part_of_the_target():
    template = (
        "{% for m in messages %}{{ '## ' + m['role'] + '\n' + m['content'] + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '## assistant\n' }}{% endif %}"
    )
    tokenizer = byte_tokenizer(template)
    assert target_texts(tokenizer, encode_one(tokenizer, chat("a", "b", "c", "d"))) == ["b\n\n", "d\n\n"]
    assert target_texts(tokenizer, encode_one(tokenizer, chat("a", "<think>m</think>b"))) == ["<think>m</think>b\n\n"]


def notes_of(tmp_path: Path, tokenizer: Any, answers: list[str]) -> str:
    rows = write(tmp_path / "x.jsonl", [{"prompt": "a", "response": answer} for answer in answers])
    cfg = SftDataConfig(path=str(rows), cache=None, eval_fraction=0)
    return str(build_dataset(cfg, tokenizer, seq_len=999, split="train").facts)


def test_answers_without_a_stop_token_are_reported(tmp_path: Path):
    """Vicuna's form; with an end-of-text token, generation stops."""
    template = "{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] }} {% endfor %}"
    endless = byte_tokenizer(template + "{% if add_generation_prompt %}ASSISTANT:{% endif %}", eos="</s>")
    assert "; 2 answers end without a token at which generation stops" in notes_of(tmp_path, endless, ["b", "c"])
    ending = byte_tokenizer(endless.chat_template.replace(" {% endfor %}", "{{ eos_token }}{% endfor %}"), eos="</s>")
    assert "generation stops" not in notes_of(tmp_path, ending, ["b", "c"])
    ignoring = byte_tokenizer(template.replace(" {% endfor %}", "{{ eos_token }}{% endfor %}"), eos="</s>")
    assert target_texts(ignoring, encode_one(ignoring, chat("a", "b"))) == ["ASSISTANT: b</s>"]
    assert "; 2 answers are trained with their header" in notes_of(tmp_path, ignoring, ["b", "c"])
    assert "header" not in notes_of(tmp_path, ending, ["b", "c"])


def form(turn: str, prompt: str = "<|assistant|>", begin: str = "") -> str:
    turns = "{% for m in messages %}<|{{ m.role }}|>" + turn + "{% endfor %}"
    return begin + turns + "{% if add_generation_prompt %}" + prompt + "{% endif %}"


BETWEEN = "{% if not loop.last and m.role == 'assistant' %}{{ eos_token }}{% endif %}"
LAST = "{% if loop.last and m.role == 'assistant' %}</s>{% endif %}"
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "stops", "targets"),
    [
        (form("{{ m.content }}<|end|>"), "</s> <|end|>", ["b<|end|>", "d<|end|>"]),
        (form("{{ m.content | upper }}<|end|>"), "</s> <|end|>", ["B<|end|>", "D<|end|>"]),
        (form("{{ m.content }}<|end|>", begin=NEEDS_SYSTEM), "</s> <|end|>", ["b<|end|>", "d<|end|>"]),
        (form("{{ m.content }}"), "</s> <|user|>", ["b<|user|>", "d<|user|>"]),
        (form("\n{{ m.content }}\n", "<|assistant|>\n"), "</s> <|user|>", ["b\n<|user|>", "d\n<|user|>"]),
        (form("{{ m.content }}" + BETWEEN), "</s>", ["b</s>", "d</s>"]),
        (form("{{ m.content }}" + LAST), "</s>", ["b</s>", "d</s>"]),
        (form("{{ m.content }}<|end|>" + LAST), "</s> <|end|>", ["b<|end|>", "d<|end|>"]),
    ],
    ids=["end", "changed content", "needs system", "header", "header after a line", "between", "last", "end and last"],
)
def test_last_target_of_every_form_of_answer_is_a_stop_token(template: str, stops: str, targets: list[str]):
    """Their tokens are added to the vocabulary, but not special."""
    tokenizer = byte_tokenizer(template, eos="</s>")
    tokenizer.add_tokens(["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"])
    assert " ".join(ChatTemplate(tokenizer).stop_tokens) == stops
    system = "s" if template.startswith(NEEDS_SYSTEM) else None
    examples = encode_conversations(tokenizer, [chat("a", "b", "c", "d", system=system)])
    assert [text for example in examples for text in target_texts(tokenizer, example)] == targets


@pytest.mark.parametrize("end", ["<|im_end|>", "{{ '\n' }}<|im_end|>"])
def test_stop_token_that_a_generation_block_leaves_out_is_a_target(end: str):
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}"
        + end + "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )  # fmt: skip
    tokenizer = byte_tokenizer(template)
    between = "\n" if "\n" in end else ""
    example = encode_one(tokenizer, chat("a", "b", "c", "d"))
    assert target_texts(tokenizer, example) == [f"b{between}<|im_end|>", f"d{between}<|im_end|>"]


def test_template_that_writes_bos_does_not_get_a_second_bos():
    tokenizer = byte_tokenizer("<s>" + CHATML, bos=True)
    assert tokenizer.decode(tokenizer("text")["input_ids"]) == "<s>text"
    assert tokenizer.decode(encode_one(tokenizer, chat("a", "b")).input_ids).startswith("<s><|im_start|>user")


@pytest.mark.parametrize(
    "date",
    [
        "{{ strftime_now('%d %b %Y') }}",
        "{%- macro today() -%}{{ strftime_now('%Y-%m-%d') }}{%- endmacro -%}{{ today() }}",
    ],
)
def test_template_that_writes_the_date_gives_the_same_tokens_every_day(date):
    dated, undated = byte_tokenizer(date + CHATML), byte_tokenizer(CHATML)
    text = dated.decode(encode_one(dated, chat("a", "b")).input_ids)
    assert text.endswith(undated.decode(encode_one(undated, chat("a", "b")).input_ids))
    assert text.startswith(("26 Jul 2024<", "2024-07-26<"))


PARTS = CHATML.replace("m['content']", "(m['content'] if m['content'] is string else m['content'][0]['text'])")


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (CHATML.replace("m['content']", "(m['content'] | string | trim)"), "text"),  # as Llama 3.1: renders the list
        (CHATML.replace("m['content']", "(m['content'] if m['content'] is string else '')"), "text"),  # as Qwen3
        (CHATML, "text"),  # fails on a list
        (PARTS, "parts"),
        (CHATML.replace("m['content']", "m['content'][0]['text']"), "parts"),  # fails on a text
    ],
    ids=["representation", "omitted", "text only", "either", "parts only"],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_unless_the_template_renders_them(template: str, content: str, role: str):
    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    if content == "parts" and role != "user":
        pytest.skip("every message needs parts")
    messages = [{"role": each, "content": f"{each} content"} for each in ("system", "user", "tool", "assistant")]
    expected = encode_conversations(byte_tokenizer(PARTS), [Conversation("x.jsonl:1", messages)])
    for message in messages:
        if content == "parts":
            message["content"] = parts(message["content"])
        elif message["role"] == role:
            message["content"] = parts(f"{role} ", "content")
    assert encode_conversations(byte_tokenizer(template), [Conversation("x.jsonl:1", messages)]) == expected


def test_answers_of_which_the_template_drops_a_part_are_reported(tmp_path: Path):
    answer = "<think>\nlong reasoning\n</think>\n\n<b>yes</b>"
    rows = write(tmp_path / "x.jsonl", [{"prompt": "q", "response": answer}])

    def unused(rendered: str) -> list[str]:
        template = CHATML.replace("m['content']", f"(m['content']{rendered})")
        cfg = SftDataConfig(path=str(rows), cache=None, eval_fraction=0)
        return build_dataset(cfg, byte_tokenizer(template), seq_len=999, split="train").facts.unused

    assert unused(".split('</think>')[-1]") == ["part of content (role assistant)"]  # as DeepSeek-R1
    assert unused(" | escape") == unused("| replace('\n\n', '\n') | trim") == unused("") == []
    refusing = SftDataConfig(path=str(rows), cache=None, eval_fraction=0, unused_keys=UnusedKeys.refuse)
    cutting = byte_tokenizer(CHATML.replace("m['content']", "m['content'].split('</think>')[-1]"))
    with pytest.raises(ConfigError, match=r"data.unused_keys=refuse: .* part of content \(role assistant\)"):
        build_dataset(refusing, cutting, seq_len=999, split="train")
