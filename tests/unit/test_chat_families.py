"""Chat templates of published models, as TRL ships them: targets, stop tokens, and tools.

The reference is `apply_chat_template` of transformers: of the same template for texts, and for targets of the template
that TRL trains the family with, whose {% generation %} blocks mark what the model has to generate.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from components.chat_template import ChatTemplate
from components.conversation import Conversation, arguments_of, function_of, parse_calls, same_json
from components.data.cache import _turns_with_calls
from components.data.examples import encode_conversations
from components.models import tokenizer as tokenizer_module
from components.models.tokenizer import byte_tokenizer
from tests.unit.test_data_examples import target_texts

SPEC = importlib.util.find_spec("trl")
FOLDER = Path((SPEC.submodule_search_locations or [""])[0]) / "chat_templates" if SPEC else Path()
FAMILIES = sorted(file.stem for file in FOLDER.glob("*.jinja") if not file.stem.endswith("_training"))
EOS = "<|endoftext|>"
STOPS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "diffusion_gemma": "<turn|> <|tool_response>",
    "gemma": "<end_of_turn>",
    "gemma4": "<turn|> <|tool_response>",
    "gemma4_v2": "<turn|>",
    "glm4moe": "<|user|> <|observation|>",
    "gptoss": "<|return|> <|call|>",
    "idefics3": "<end_of_utterance>",
    "lfm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llava_next": "",
    "muse": "<|eot|>",
    "nemotron": "<|im_end|>",
    "phi3": "<|end|>",
    "qwen": "<|im_end|>",
    "smolvlm": "<end_of_utterance>",
}
"""Tokens that end answers, besides the end-of-text token, by the longest beginning of a template's name."""
ENCODES_CALLS = re.compile("deepseekv3|gemma4|diffusion|glm|gptoss|lfm2_|llama3_|muse|nemotron|qwen2_5$|qwen3")
TAKES_TEXT = ("deepseekv3",)
"""Templates that insert the arguments of a call as they are, so that they must be JSON text."""
TAKES_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates that omit content that is not a list of parts."""

USER = {"role": "user", "content": "Weather in Oslo?"}
ANSWER = {"role": "assistant", "content": "Cold."}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "City"}}}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "call00001", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(content: Any) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": content}


def template(name: str) -> str:
    """Return a template with a fixed date."""
    return re.sub(r"strftime_now\([^)]*\)", "'26 Jul 2024'", (FOLDER / f"{name}.jinja").read_text())


@cache
def tokenizer_of(name: str) -> Any:
    """Return a byte tokenizer with the added tokens that the template writes; those of tools are not special."""
    source = template(name)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = source
    written = set(
        re.findall(
            r"<\|[^<>|\s]+\|>|<\|[^<>|\s]+>|<[^<>|\s]+\|>|<\uff5c[^<>\s]+?\uff5c>|<(?:start|end)_of_\w+>", source
        )
    )
    tokenizer.add_special_tokens({"eos_token": EOS, "additional_special_tokens": sorted(written)})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
    return tokenizer


def stops_of(name: str) -> list[str]:
    family = max((each for each in STOPS if name.startswith(each)), key=len)
    return STOPS[family].split()


def encoded(tokenizer: Any, messages: list[dict], tools: list[dict] | None = None) -> list[Any]:
    return encode_conversations(tokenizer, [Conversation("x.jsonl:1", messages, tools)])


def marked(tokenizer: Any, name: str, messages: list[dict]) -> str:
    """Return the last span that TRL's training template marks, rendered and masked by transformers."""
    if name in TAKES_PARTS:
        messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    rendered = tokenizer.apply_chat_template(
        messages,
        chat_template=template(f"{name}_training"),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, mask = rendered["input_ids"], rendered["assistant_masks"]
    end = max(i for i, is_answer in enumerate(mask) if is_answer) + 1
    start = max((i for i in range(end) if not mask[i]), default=-1) + 1
    return str(tokenizer.decode(ids[start:end]))


pytestmark = pytest.mark.skipif(not FAMILIES, reason="needs TRL, for its chat templates")


@pytest.mark.parametrize("name", FAMILIES)
def test_stop_tokens_are_those_of_the_family(name: str) -> None:
    tokenizer = tokenizer_of(name)
    stops = ChatTemplate(tokenizer).stop_tokens
    assert set(stops) == {EOS, *stops_of(name)}
    assert all(tokenizer.convert_ids_to_tokens(number) == token for token, number in stops.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_answer_is_a_target_up_to_a_stop_token(name: str) -> None:
    tokenizer = tokenizer_of(name)
    messages = [USER, ANSWER, {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Warm."}]
    targets = [text for example in encoded(tokenizer, messages) for text in target_texts(tokenizer, example)]
    assert len(targets) == 2
    for text, (stop, content) in zip(targets, ((2, "Cold."), (4, "Warm.")), strict=True):
        assert content in text
        if stops_of(name):
            assert text.rstrip().endswith(stops_of(name)[0])
        if (FOLDER / f"{name}_training.jinja").exists():
            # TRL marks headers too that the generation prompt has, and the line break after the stop token.
            prompt = ChatTemplate(tokenizer).render(Conversation("", messages[: stop - 1]), add_generation_prompt=True)
            header, found, _ = marked(tokenizer, name, messages[:stop]).rstrip().rpartition(text.rstrip())
            assert found
            assert header.rstrip() in prompt.text[-50:]


@pytest.mark.parametrize("content", ["Cold.", " \n Cold. \n\n", "  ", "<think>\nIce.\n</think>\n\nCold. "])
@pytest.mark.parametrize("name", FAMILIES)
def test_text_is_that_of_transformers(name: str, content: str) -> None:
    """Also if the template trims the content or cuts its reasoning; nothing that it trims is a target."""
    tokenizer = tokenizer_of(name)
    messages = [{**USER, "content": f"\n{USER['content']} "}, {"role": "assistant", "content": content}]
    given = messages
    if name in TAKES_PARTS:
        given = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    expected = tokenizer.apply_chat_template(given, tokenize=False)
    (example,) = encoded(tokenizer, messages)
    header = "<|user|>" if name == "glm4moe" else ""
    text = tokenizer.decode(example.input_ids)
    assert expected.startswith(text.removesuffix(header))
    assert not expected.removeprefix(text.removesuffix(header)).strip() or name.startswith("phi")
    (targets,) = target_texts(tokenizer, example)
    assert text.endswith(targets)
    if not stops_of(name):
        return
    answer = targets.rstrip().removesuffix(stops_of(name)[0])
    assert content.strip().rpartition("\n")[2] in answer


@pytest.mark.parametrize("name", [name for name in FAMILIES if ENCODES_CALLS.match(name)])
def test_calls_are_rendered_alike_from_text_and_object(name: str) -> None:
    tokenizer = tokenizer_of(name)
    arguments = {"city": "Oslo", "days": 2}
    given = json.dumps(arguments) if name.startswith(TAKES_TEXT) else arguments
    expected = tokenizer.apply_chat_template([USER, call(given)], tools=TOOLS, tokenize=False)
    for form in (arguments, json.dumps(arguments), json.dumps(arguments, indent=2)):
        (example,) = encoded(tokenizer, [USER, call(form)], TOOLS)
        text = tokenizer.decode(example.input_ids)
        assert text.removesuffix("<|observation|>") == expected.rstrip() if "glm" in name else expected.startswith(text)
        (targets,) = target_texts(tokenizer, example)
        assert "weather" in targets
        assert targets.rstrip().endswith(stops_of(name)[-1])


@pytest.mark.parametrize("name", [name for name in FAMILIES if ENCODES_CALLS.match(name)])
def test_missing_arguments_are_an_empty_object(name: str) -> None:
    tokenizer = tokenizer_of(name)
    expected = encoded(tokenizer, [USER, call({})], TOOLS)
    for arguments in ("", " ", "null", None, "{}"):
        assert encoded(tokenizer, [USER, call(arguments)], TOOLS) == expected


@pytest.mark.parametrize("content", [{"temp": 4, "sky": "grey"}, [{"temp": 4}, {"sky": "grey"}], ["4", "grey"]])
@pytest.mark.parametrize("name", [name for name in FAMILIES if ENCODES_CALLS.match(name)])
def test_no_value_of_a_tool_result_is_lost(name: str, content: Any) -> None:
    """It is rendered as JSON text is, unless the template encodes objects itself."""
    tokenizer = tokenizer_of(name)
    messages = [USER, call({"city": "Oslo"}), result(content), ANSWER]
    text = tokenizer.decode(encoded(tokenizer, messages, TOOLS)[-1].input_ids)
    assert "4" in text.rpartition("weather")[2]
    assert "grey" in text
    assert "'sky'" not in text
    as_text = encoded(tokenizer, [*messages[:2], result(json.dumps(content)), ANSWER], TOOLS)
    if text != tokenizer.decode(as_text[-1].input_ids):
        natively = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
        assert natively.startswith(text.removesuffix("<|user|>"))


# The templates that Meshbook ships


SHIPPED = Path(tokenizer_module.__file__).parent / "chat_templates"
SYSTEM = {"role": "system", "content": "Be brief. "}
THOUGHT = {"role": "assistant", "content": "Bye", "reasoning_content": "\nhm\n"}
WRITTEN = {"role": "assistant", "content": "\n<think>\nin\n</think>\n\nBye"}
TWO = {**call({"city": "Oslo", "n": [1, None, True]}), "content": "On it."}
TWO["tool_calls"] = TWO["tool_calls"] + call({})["tool_calls"]
WRAPPED = {"role": "user", "content": "<tool_response>x</tool_response>"}
CHATS = [
    [USER],
    [USER, ANSWER, {"role": "user", "content": " Hi \u00e9\n"}, ANSWER],
    [USER, call({"city": "Oslo"}), result("4")],
    [USER, call({}), result('"4"'), call({}), result("5"), ANSWER, USER, ANSWER],
    [USER, TWO, result("4"), result("5"), ANSWER],
    [USER, THOUGHT],
    [USER, THOUGHT, USER, THOUGHT],
    [USER, WRITTEN, USER, WRITTEN],
    [USER, ANSWER, WRAPPED, ANSWER],
    [USER, {**call({}), "reasoning_content": "why"}, result("4"), THOUGHT, USER, ANSWER],
    [USER, ANSWER, SYSTEM, USER],
]


@pytest.mark.parametrize(
    ("name", "original"), [("qwen3", "qwen3"), ("llama3", "llama3"), ("llama3", "llama3_1"), ("chatml", "qwen2_5")]
)
def test_shipped_templates_render_what_the_originals_render(name: str, original: str) -> None:
    """Of Llama 3 without tools, of Llama 3.1 with them; ChatML is Qwen2.5 without its own system message."""
    tokenizer, compared = tokenizer_of(original), 0
    tokenizer.bos_token = "<|begin_of_text|>"
    own, theirs = (SHIPPED / f"{name}.jinja").read_text(), template(original)
    options = [{}, {"add_generation_prompt": True}, {"add_generation_prompt": True, "enable_thinking": False}]
    for chat, tools, values in product(CHATS + [[SYSTEM, *chat] for chat in CHATS], (None, TOOLS), options):
        is_agent = tools is not None or any(each["role"] == "tool" for each in chat)
        if (name == "llama3" and (is_agent, tools is not None) != (original == "llama3_1",) * 2) or (
            name == "chatml" and chat[0] is not SYSTEM
        ):
            continue
        given: Any = {"tools": tools, "tokenize": False, **values}
        try:
            expected = tokenizer.apply_chat_template(chat, chat_template=theirs, **given)
        except TemplateError:  # Llama 3.1 writes one call per message
            with pytest.raises(TemplateError):
                tokenizer.apply_chat_template(chat, chat_template=own, **given)
            continue
        assert tokenizer.apply_chat_template(chat, chat_template=own, **given) == expected
        compared += 1
    assert compared >= 40


@pytest.mark.parametrize("name", ["chatml", "llama3", "qwen3"])
def test_generation_blocks_of_shipped_templates_mark_what_a_model_generates(name: str) -> None:
    """The targets are those of the template without blocks, found by rendering prompts, and end with a stop token."""
    source = (SHIPPED / f"{name}.jinja").read_text()
    tokenizer, plain = (copy.deepcopy(tokenizer_of({"chatml": "qwen2_5"}.get(name, name))) for _ in range(2))
    tokenizer.chat_template, plain.chat_template = source, re.sub(r"\{%- (end)?generation %\}", "", source)
    stop = "<|eot_id|>" if name == "llama3" else "<|im_end|>"
    assert set(ChatTemplate(tokenizer).stop_tokens) == {EOS, stop}
    for chat in CHATS:
        for tools in (None, TOOLS):
            if chat[-1]["role"] != "assistant" or (name == "llama3" and TWO in chat):
                continue
            examples = encoded(tokenizer, chat, tools)
            assert examples == encoded(plain, chat, tools)
            texts = [text for example in examples for text in target_texts(tokenizer, example)]
            assert len(texts) == sum(each["role"] == "assistant" for each in chat)
            assert all(text.endswith(stop) for text in texts)
    chat = Conversation("", [USER, ANSWER], None, {"enable_thinking": False})
    assert encode_conversations(tokenizer, [chat]) == encode_conversations(plain, [chat])


# Tool calls read from texts


READ = re.compile("deepseekv3|glm4|gptoss|llama3_|nemotron|qwen2_5$|qwen3")
"""Families whose rendered calls are read; of the others, gemma4, lfm2 and muse write calls in forms of their own."""
VALUES = {"city": 'Os"lo\u00e9', "n": 3, "x": "5", "on": True, "no": None, "of": {"a": [1.5, "b"]}, "t": "a\nb"}


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_read_from_the_turn_that_the_template_renders(name: str) -> None:
    """All of their values. XML-like forms write the text 5 as the number, so that both are read as the number."""
    tokenizer = tokenizer_of(name)
    for message in (call(VALUES), call({}), {**TWO, "content": "<think>\n{}\n</think>\n\nOn it."}):
        conversation = Conversation("", [USER, message], TOOLS)
        turns = list(_turns_with_calls(ChatTemplate(tokenizer), tokenizer, conversation))
        if not READ.match(name) or (message["content"] and name == "gptoss"):  # which renders one of two calls
            assert [turn.calls for turn in turns] in ([], [[]])
            continue
        if not turns:
            assert name.startswith("llama3")  # rejects two calls
            continue
        (turn,) = turns
        found = [(function, arguments) for _, function, arguments in turn.calls or []]
        typed = re.match("deepseek|gptoss|llama3_|qwen2_5$|qwen3$|qwen3_vl|qwen3_instruct", name)
        expected = [(function_of(each)["name"], arguments_of(each)) for each in message["tool_calls"]]
        assert found == [
            (function, {**arguments, "x": 5} if "x" in arguments and not typed else arguments)
            for function, arguments in expected
        ]
        rendered = tokenizer.apply_chat_template([USER], tools=TOOLS, add_generation_prompt=True)
        assert turn.tokens == rendered["input_ids"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "x"}, {"name": "g", "arguments": "{}"}]</s>',
         [["[TOOL_CALLS] list", "f", {"a": 1}], ["[TOOL_CALLS] list", "g", {}]]),
        ('[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}</s>',
         [["[TOOL_CALLS]", "f", {"a": "]"}], ["[TOOL_CALLS]", "g", {}]]),
        ('<function=f>{"a": [1]}</function>', [["<function=>", "f", {"a": [1]}]]),
        ('<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": 1}}<|eom_id|>',
         [["json", "f", {"a": 1}]]),
        ('<think>{"name": "g", "arguments": {}}</think>{"name": "f", "arguments": {}}', [["json", "f", {}]]),
        ('Use {"name": "f", "arguments": {}}.', []),
        ("It is cold.", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}', []),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [["<tool_call>", None, None]]),
        ('<tool_call>{"name": "f",}</tool_call>', [["<tool_call>", None, None]]),
        (f"<tool_call>{'[' * 9999}</tool_call>", [["<tool_call>", None, None]]),
        ("[1]", [["json", None, None]]),
    ],
)  # fmt: skip
def test_texts_of_other_forms_and_broken_ones_are_read(text: str, expected: list[Any]) -> None:
    assert parse_calls(text) == expected
    assert same_json(parse_calls(text), expected)


def test_arguments_are_equal_as_values_of_json() -> None:
    began = time.perf_counter()
    assert parse_calls("<tool_call>" + "\n" * 20_000) == []  # a model may never end a call
    assert time.perf_counter() - began < 1
    first = parse_calls(json.dumps({"name": "f", "arguments": {"a": 1, "b": [{"c": 0.5}], "d": None}}))
    for arguments, equal in (
        ({"d": None, "b": [{"c": 0.5}], "a": 1.0}, True),
        ({"a": True, "b": [{"c": 0.5}], "d": None}, False),
        ({"a": "1", "b": [{"c": 0.5}], "d": None}, False),
        ({"a": 1, "b": [{"c": 0.5}]}, False),
        ({"a": 1, "b": [{"c": 0.5}, 1], "d": None}, False),
    ):
        assert same_json(first, parse_calls(json.dumps({"name": "f", "arguments": arguments}))) == equal
