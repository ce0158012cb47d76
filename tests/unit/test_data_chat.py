"""Conversations with tools, reasoning and training flags: the inputs of the chat template, and the loss mask.

Text and masks are compared with `apply_chat_template` of transformers, and with expected text written by hand.
"""

from __future__ import annotations

import importlib.util
import json
import re
import resource
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import models, pre_tokenizers

from components import chat_template, data
from components.chat_template import ChatTemplate, TemplateLimitError
from components.config.schema.data import BadRows, ChatDataConfig, Overlong, SftDataConfig, TrainOn, UnusedKeys
from components.config.schema.model import ModelConfig
from components.config.schema.run import is_defining
from components.conversation import Conversation, Prompt
from components.data import cache
from components.data.dataset import Dataset, Facts
from components.data.examples import IGNORED, Example, NewestTurns, encode_conversations, trimmed
from components.data.loading import build_dataset
from components.data.preflight import check_files
from components.models import build_on_meta, materialize
from components.models.generation import generate
from components.protocol.errors import ConfigError
from tests.tiny_models import tiny_folder
from tests.unit.test_data_examples import fast_tokenizer, target_texts
from tests.unit.test_data_files import problems, write

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "default": None}}}
WEATHER = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


def call(arguments: Any) -> dict[str, Any]:
    return {**CALL, "function": {"name": "weather", "arguments": arguments}}


TEXT_CALL = {**CALL, "function": {"name": "weather", "arguments": '{"city":  "Oslo"}'}}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "4 degrees"}

QWEN3 = """
{%- if tools %}{{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}[BEGIN]
        {%- if loop.index0 > ns.last and (loop.last or message.reasoning_content) %}
            {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}[END]{{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
"""Modeled on Qwen3: reasoning only after the last user message, tool call arguments as objects or as text."""

LLAMA31 = """{{- '<s>' }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|im_start|>system\\n' }}{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: ' + strftime_now('%d %b %Y') + '\\n\\n' + system + '<|im_end|>' }}
{%- if tools is not none %}
    {{- '<|im_start|>user\\nGiven the following functions, respond with JSON.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- messages[0].content | trim + '<|im_end|>' }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception('single tool-calls at once!') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n' }}[BEGIN]
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|im_end|>' }}[END]
    {%- elif message.role == 'tool' %}{{- '<|im_start|>ipython\\n' }}{{- message.content | tojson }}{{- '<|im_end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}[BEGIN]{{- message.content | trim + '<|im_end|>' }}[END]
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Modeled on Llama 3.1: arguments only as objects, one call per message, tools in the first user message, the date."""

HERMES = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}[BEGIN]
        {%- for part in ([message.content] if message.content is string else message.content) %}
            {{- part if part is string else part.text }}
        {%- endfor %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}[END]
    {%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""ChatML with tool calls, modeled on Hermes. It uses neither `tools` nor reasoning."""


def unmarked(template: str) -> str:
    return template.replace("[BEGIN]", "").replace("[END]", "")


def marked(template: str) -> str:
    return template.replace("[BEGIN]", "{%- generation %}").replace("[END]", "{%- endgeneration %}")


def byte_tokenizer(template: str | None) -> Any:
    special = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<think>", "</think>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    model = models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[])
    return fast_tokenizer(model, special, template, "<|im_end|>")


def user(content: Any, **rest: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **rest}


def assistant(content: Any, **rest: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **rest}


AGENT = [
    user("Weather in Oslo?"),
    assistant("", reasoning_content="I need the tool.", tool_calls=[CALL]),
    RESULT,
    assistant("It is cold.", reasoning_content="4 is cold."),
]
"""A tool call and an answer, both rendered by the Qwen3 template exactly as a model would generate them."""


def dataset(tmp_path: Path, rows: list[dict], template: str | None, name: str = "x.jsonl", **values: Any) -> Dataset:
    cfg = ChatDataConfig(path=str(write(tmp_path / name, rows)), **{"eval_fraction": 0, "cache": None, **values})
    made = build_dataset(cfg, byte_tokenizer(template), seq_len=10_000, split="train")
    assert isinstance(made, Dataset)
    return made


def rows_of(messages: list[dict], **columns: Any) -> list[dict]:
    return [{"messages": messages, **columns}]


def problems_of(tmp_path: Path, rows: list[dict], **values: Any) -> list[str]:
    return problems(ChatDataConfig(path=str(write(tmp_path / "x.jsonl", rows)), eval_fraction=0, **values))


# Template inputs and loss mask


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_calls_results_and_reasoning_are_passed_to_the_template(name: str, as_text: bool, tmp_path: Path) -> None:
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "parameters": {"type": "object"}}}]  # without null
    made = dataset(tmp_path, rows_of(AGENT, tools=json.dumps(tools) if as_text else tools), unmarked(QWEN3), name)
    tokenizer = byte_tokenizer(unmarked(QWEN3))
    (example,) = made
    expected = tokenizer.apply_chat_template(AGENT, tools=tools, tokenize=False)
    assert tokenizer.decode(example.input_ids) + "\n" == expected
    assert target_texts(tokenizer, example) == [
        '<think>\nI need the tool.\n</think>\n\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n'
        "</tool_call><|im_end|>",
        "<think>\n4 is cold.\n</think>\n\nIt is cold.<|im_end|>",
    ]
    assert made.facts.unused == ["tool_call_id (role tool)"]


CALLS = [user("a"), assistant("On it.", tool_calls=[CALL]), RESULT, assistant("b"), user("ü"), assistant("ü")]
CONVERSATIONS = {
    "agent": (AGENT, TOOLS),
    "plain": ([user("a"), assistant("b"), user("c"), assistant("d")], None),
    "calls": (CALLS, TOOLS),
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", [QWEN3, LLAMA31, HERMES], ids=["qwen3", "llama31", "hermes"])
def test_prefix_rendering_and_generation_blocks_give_equal_masks(template: str, conversation: str) -> None:
    messages, tools = CONVERSATIONS[conversation]
    record = Conversation("x.jsonl:1", messages, tools)
    by_prefix = encode_conversations(byte_tokenizer(unmarked(template)), [record])
    by_blocks = encode_conversations(byte_tokenizer(marked(template)), [record])
    assert by_prefix == by_blocks
    assert all(set(labels) - {IGNORED} for _, labels in by_prefix)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", [LLAMA31, HERMES], ids=["llama31", "hermes"])
def test_generation_blocks_give_the_same_mask_as_transformers(template: str, conversation: str) -> None:
    messages, tools = CONVERSATIONS[conversation]
    source = marked(template).replace("strftime_now('%d %b %Y')", "'26 Jul 2024'")
    tokenizer = byte_tokenizer(source)
    (example,) = encode_conversations(tokenizer, [Conversation("x.jsonl:1", messages, tools)])
    assert example == reference(tokenizer, messages, tools)


def reference(tokenizer: Any, messages: list[dict], tools: list[dict] | None) -> Example:
    """Return what TRL trains on with assistant_only_loss, trimmed after the last target."""
    rendered = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(rendered["input_ids"], rendered["assistant_masks"], strict=True)
    return trimmed(Example(rendered["input_ids"], [token if is_answer else IGNORED for token, is_answer in pairs]))


def test_template_that_drops_past_reasoning_gives_one_example_per_answer(tmp_path: Path) -> None:
    messages = [*AGENT, user("Thanks!"), assistant("Bye.", reasoning_content="Politely.")]
    tokenizer = byte_tokenizer(unmarked(QWEN3))
    for template in (unmarked(QWEN3), marked(QWEN3)):
        made = list(dataset(tmp_path, rows_of(messages), template))
        assert [target_texts(tokenizer, example)[0] for example in made] == [
            '<think>\nI need the tool.\n</think>\n\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n'
            "</tool_call><|im_end|>",
            "<think>\n4 is cold.\n</think>\n\nIt is cold.<|im_end|>",
            "<think>\nPolitely.\n</think>\n\nBye.<|im_end|>",
        ]
        assert "I need the tool." not in tokenizer.decode(made[2].input_ids)


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (QWEN3, '{"city": "Oslo"}'),
        (QWEN3.replace("arguments | tojson", "arguments"), '{"city": "Oslo"}'),
        (LLAMA31, '{"city": "Oslo"}'),
        (LLAMA31.replace("| tojson }}{{- '}", "| items | list }}{{- '}"), "[('city', 'Oslo')]"),
    ],
    ids=["takes both", "needs text", "encodes", "needs an object"],
)
def test_arguments_given_as_json_text_are_not_encoded_twice(template: str, written: str, tmp_path: Path) -> None:
    messages = [user("Weather?"), assistant("", tool_calls=[TEXT_CALL])]
    tokenizer = byte_tokenizer(unmarked(template))
    (example,) = dataset(tmp_path, rows_of(messages, tools=TOOLS), tokenizer.chat_template)
    (answer,) = target_texts(tokenizer, example)
    assert written in answer
    assert "\\" not in answer


def test_template_kwargs_and_content_parts_are_passed_to_the_template(tmp_path: Path) -> None:
    template = "{{ 'brief. ' if style == 'brief' else '' }}" + unmarked(HERMES)
    messages = [user("a"), assistant([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])]
    tokenizer = byte_tokenizer(template)
    for name in ("x.jsonl", "x.parquet"):
        if name == "x.parquet":  # an Arrow column has a single type
            messages[0] = user([{"type": "text", "text": "a"}])
            template = template.replace("message.content + '<|im_end|>'", "message.content[0].text + '<|im_end|>'")
        made = dataset(tmp_path, rows_of(messages, chat_template_kwargs={"style": "brief"}), template, name)
        assert tokenizer.decode(made[0].input_ids).startswith("brief. <|im_start|>user")
        assert target_texts(tokenizer, made[0]) == ["one two<|im_end|>"]
        assert made.facts.unused == []


def test_sharegpt_roles_and_keys_are_renamed_and_other_keys_kept(tmp_path: Path) -> None:
    messages = [
        {"from": "human", "value": "Weather?"},
        {"from": "gpt", "value": "", "tool_calls": [CALL]},
        {"from": "observation", "value": "4 degrees"},
        {"from": "gpt", "value": "Cold."},
    ]
    tokenizer = byte_tokenizer(unmarked(LLAMA31))
    renamed = {"role_key": "from", "content_key": "value", "user_role": "human", "assistant_role": "gpt"}
    (example,) = dataset(tmp_path, rows_of(messages), tokenizer.chat_template, tool_role="observation", **renamed)
    assert '<|im_start|>ipython\n"4 degrees"<|im_end|>' in tokenizer.decode(example.input_ids)
    assert target_texts(tokenizer, example) == [
        '{"name": "weather", "parameters": {"city": "Oslo"}}<|im_end|>',
        "Cold.<|im_end|>",
    ]


# Forms of other trainers


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_function_calls_of_the_old_openai_form_are_tool_calls(name: str, tmp_path: Path) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "description": "d", "parameters": parameters}
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    result, calls = {"name": "weather", "content": "cold"}, [{"type": "function", "function": call}]
    old = [user("a"), assistant(None, function_call=call), {"role": "function", **result}, assistant("It is cold.")]
    new = [user("a"), assistant("", tool_calls=calls), {"role": "tool", **result}, assistant("It is cold.")]
    template = unmarked(QWEN3)
    of_old = dataset(tmp_path, [{"messages": old, "functions": [function]}], template, name)
    tools = [{"type": "function", "function": function}]
    of_new = dataset(tmp_path, [{"messages": new, "tools": tools}], template, name)
    assert list(of_old) == list(of_new)
    assert "column functions" not in of_old.facts.unused


def test_system_column_of_other_trainers_is_the_system_message(tmp_path: Path) -> None:
    system = {"role": "system", "content": "s"}
    messages = [user("a"), assistant("b", weight=0), user("c"), assistant("d")]
    rows = [{"messages": messages, "system": "s"}, {"messages": messages, "system": " "}]
    expected = dataset(tmp_path, [{"messages": [system, *messages]}, {"messages": messages}], unmarked(HERMES))
    made = dataset(tmp_path, rows, unmarked(HERMES))
    assert (list(made), made.facts.unused) == (list(expected), [])
    assert list(dataset(tmp_path, [{"messages": [system, *messages], "system": "s"}], unmarked(HERMES))) == [made[0]]
    for row, problem in (
        ({"messages": [{**system, "content": "t"}, *messages], "system": "s"}, "are different system messages; remove"),
        ({"messages": messages, "system": {"os": "x"}}, "column 'system' holds dict {'os': 'x'}, not the text of a"),
    ):
        assert problem in problems_of(tmp_path, [row])[0]


# Flags


@pytest.mark.parametrize("template", [unmarked(HERMES), marked(HERMES), None], ids=["prefix", "blocks", "plain"])
@pytest.mark.parametrize(
    "flag",
    [
        *({"weight": 0}, {"train": False}, {"weight": 0.0, "train": False}, {"loss": False}, {"masked": True}),
        *({"loss_mask": 0, "training": False}, {"loss_weight": 0.0, "loss_scale": 0}),
        {"train_on_turn": False, "trainable": False, "step_loss_mask": 0},
    ],
)
@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_messages_flagged_as_untrained_have_no_targets(
    template: str | None, flag: dict[str, Any], name: str, tmp_path: Path
) -> None:
    first, last = [user("a"), assistant("b", **flag)], [user("e"), assistant("f", **flag)]
    messages = [*first, user("c"), assistant("d", weight=1), *last]
    made = dataset(tmp_path, rows_of(messages) + rows_of(first), template, name)
    tokenizer = byte_tokenizer(template)
    (example,) = made
    assert target_texts(tokenizer, example) == ["d<|im_end|>"]
    assert "b<|im_end|>" in tokenizer.decode(example.input_ids)
    assert made.facts.dropped_without_target == 1
    assert made.facts.unused == []


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([user("a"), assistant("b", weight=0.5)], "message 2 of 'messages' has weight=0.5; must be true, false, 0 or"),
        ([user("a", weight=1), assistant("b")], "message 1 of 'messages' has weight=1 and the role 'user'; only the"),
        ([user("a"), assistant("b", weight=1, train=False)], "message 2 of 'messages' has train=False and weight=1,"),
        ([user("a"), assistant("b", loss=True, masked=True)], "message 2 of 'messages' has loss=True and masked=True,"),
        ([user("a", masked=False), assistant("b")], "message 1 of 'messages' has masked=False and the role 'user'; on"),
        ([user("a"), assistant("b", loss_scale=2)], "message 2 of 'messages' has loss_scale=2; must be true, false, 0"),
        ([user("a"), assistant("b", mask=1)], "message 2 of 'messages' has the key 'mask', by which other trainers"),
        ([user("a"), assistant("b", train_detail=[])], "message 2 of 'messages' has the key 'train_detail', by which"),
        ([user("a"), assistant("b", function_call="f")], "message 2 of 'messages' has a function_call that is str 'f'"),
        ([user("a"), assistant("", function_call={"arguments": "{}"})], "tool_calls[0].function.name=None; must be"),
        ([user("a"), assistant("b", train="no")], "message 2 of 'messages' has train='no'; must be true"),
        ([user("a"), assistant("")], "message 2 of 'messages' (role assistant): data.content_key=content: is empty"),
        ([user("a"), {"role": "assistant"}], "data.content_key=content: holds null, not text (the key is missing)"),
        ([user("a"), assistant("b", tool_calls="c")], "message 2 of 'messages' has tool_calls that are str 'c', not a"),
        ([user("a"), assistant("", tool_calls=[call("{")])], "tool_calls[0].function.arguments that are not JSON"),
        ([user("a"), assistant("", tool_calls=[call("[1]")])], "tool_calls[0].function.arguments that are list [1]"),
        ([user("a"), assistant("", tool_calls=[{"function": {}}])], "has tool_calls[0].function.name=None; must be"),
        ([user([{"type": "image", "url": "x"}]), assistant("b")], "holds the part {'type': 'image', 'url': 'x'}; only"),
        ([user("a"), {"role": "assistant", "content": "b", "from": "c"}], ""),
    ],
)  # fmt: skip
def test_invalid_messages_are_reported_as_bad_rows(messages: list[dict], problem: str, tmp_path: Path) -> None:
    if not problem:
        found = problems_of(tmp_path, rows_of(messages), role_key="from", bad_rows=BadRows.refuse)
        assert "has both 'from' and 'role'; remove one of them" in found[0] or "has the role None" in found[0]
        return
    assert problem in problems_of(tmp_path, rows_of(messages))[0]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"tools": "not JSON"}, "data.tools_column=tools: holds text that is not JSON"),
        ({"tools": {"name": "x"}}, "data.tools_column=tools: holds dict {'name': 'x'}, not a list"),
        ({"tools": ["x"]}, "data.tools_column=tools: holds a list with entries other than objects"),
        (
            {"chat_template_kwargs": {"tokenize": True}},
            "tokenize is an argument of apply_chat_template, not a template",
        ),
    ],
)
def test_invalid_tools_and_template_kwargs_columns_are_reported(columns: dict, problem: str, tmp_path: Path) -> None:
    assert problem in problems_of(tmp_path, rows_of([user("a"), assistant("b")], **columns))[0]


def test_missing_chat_template_is_reported(tmp_path: Path) -> None:
    rows = rows_of([user("a"), assistant("b")]) * 3
    assert "the tokenizer has no chat template: messages are joined" in str(dataset(tmp_path, rows, None).facts)
    assert "chat template" not in str(dataset(tmp_path, rows, unmarked(HERMES)).facts)


def test_prompts_of_samples_are_those_that_answers_are_trained_after(tmp_path: Path) -> None:
    """With the system message, the tools and the template arguments of the conversation."""
    messages = [{"role": "system", "content": "Brief."}, *AGENT]
    kwargs = {"enable_thinking": False}
    made = dataset(tmp_path, rows_of(messages, tools=TOOLS, chat_template_kwargs=kwargs), unmarked(QWEN3))
    expected = byte_tokenizer(unmarked(QWEN3)).apply_chat_template(
        messages[:2], tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=True, **kwargs
    )
    assert made.prompts == [Prompt("Weather in Oslo?", expected["input_ids"])]


def test_prompts_of_held_out_tool_calls_are_those_before_the_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the calls of the data; those after long prompts are left out, and samples are of other prompts."""
    monkeypatch.setattr(cache, "_WORTH_BYTES", 0)
    second = [user("And " + "Rome? " * 40), assistant("", tool_calls=[CALL]), RESULT, assistant("Warm.")]
    off = [user("Off?"), assistant("", tool_calls=[CALL], train=False), RESULT, assistant("No.")]
    rows = [*rows_of([*AGENT, *second], tools=TOOLS), *rows_of(off), *rows_of([user("a"), assistant("b")])]
    path, other = str(write(tmp_path / "x.jsonl", rows)), str(write(tmp_path / "y.jsonl", rows_of(LONG)))
    tokenizer = byte_tokenizer(marked(HERMES))
    cfg = ChatDataConfig(path=other, eval_path=path, cache=str(tmp_path / "cache"))
    prompts = [
        tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True)["input_ids"]
        for messages in (AGENT[:1], [*AGENT, second[0]])
    ]
    calls = [["<tool_call>", "weather", {"city": "Oslo"}]]
    for _ in range(2):  # the second is read from the cache
        made = build_dataset(cfg, tokenizer, seq_len=10_000, split="eval")
        assert data.prompts_of_calls(made, 9) == [
            Prompt("Weather in Oslo?", prompts[0], calls),
            Prompt(second[0]["content"], prompts[1], calls),
        ]
        assert [prompt.text for prompt in data.sample_prompts(made, 9)] == ["Weather in Oslo?", "Off?", "a"]
    short = build_dataset(replace(cfg, overlong=Overlong.drop, pack=True), tokenizer, seq_len=200, split="eval")
    assert [prompt.tokens for prompt in data.prompts_of_calls(short, 9)] == prompts[:1]
    assert not [each for each in build_dataset(cfg, tokenizer, seq_len=300, split="train").prompts if each.calls]


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (HERMES.replace("<tool_call>", "<call>"), AGENT, "the tool calls cannot be read from the text that the chat"),
        (HERMES, [user("a"), assistant("b")], "the held-out conversations have no answer with tool calls, or the"),
    ],
)
def test_tool_calls_that_cannot_be_compared_are_refused(
    template: str, messages: list[dict], problem: str, tmp_path: Path
) -> None:
    path = str(write(tmp_path / "x.jsonl", rows_of(messages)))
    cfg = ChatDataConfig(path=path, eval_path=path, cache=None)
    made = build_dataset(cfg, byte_tokenizer(marked(template)), seq_len=10_000, split="eval")
    assert data.prompts_of_calls(made, 0) == []
    with pytest.raises(ConfigError, match=f"generation.tool_calls=4: {problem} .*; set it to 0, or change the data"):
        data.prompts_of_calls(made, 4)


def test_error_of_a_template_names_the_message_and_its_key(tmp_path: Path) -> None:
    start = "{{- '<|im_start|>' + message.role"
    template = unmarked(HERMES).replace(start, f"{start} + message.get('x', '')")
    rows = rows_of([user("a"), assistant("b"), user("c", x=5), assistant("d")])
    with pytest.raises(
        ConfigError, match=r"x.jsonl:1: message 3 \(role user\), key x: the chat template fails .* TypeError"
    ):
        dataset(tmp_path, rows, template)


# Unused keys


def test_unused_keys_are_reported_once_by_name(tmp_path: Path) -> None:
    messages = [*AGENT, user("Bye?", name="Ann"), assistant("Bye.", reasoning_content="r", thumbs=1)]
    rows = rows_of(messages, tools=TOOLS, source="web") * 3 + rows_of([user("a"), assistant("b")], id=7)
    made = dataset(tmp_path, rows, unmarked(HERMES))
    assert made.facts.unused == [
        "column id", "column source", "name (role user)", "reasoning_content (role assistant with tool_calls)",
        "reasoning_content (role assistant)", "thumbs (role assistant)", "tool_call_id (role tool)", "tools",
    ]  # fmt: skip
    assert str(made.facts).count("not used: column id, column source, name (role user)") == 1
    assert dataset(tmp_path, rows, unmarked(QWEN3)).facts.unused == [
        "column id", "column source", "name (role user)", "thumbs (role assistant)", "tool_call_id (role tool)",
    ]  # fmt: skip


def test_content_that_the_template_omits_is_reported_by_role(tmp_path: Path) -> None:
    template = unmarked(HERMES).replace("messages %}", "messages if message.role != 'tool' %}", 1)
    assert "content (role tool)" in dataset(tmp_path, rows_of(AGENT), template).facts.unused
    parts = [user([{"type": "text", "text": "one"}]), assistant("b"), user("c"), assistant("d")]
    assert dataset(tmp_path, rows_of(parts), unmarked(QWEN3)).facts.unused == []  # as text


def test_calls_that_the_template_omits_are_reported(tmp_path: Path) -> None:
    second = {**CALL, "id": "call00002", "function": {"name": "weather", "arguments": {"city": "Bergen", "days": [3]}}}
    messages = [user("a"), assistant("", tool_calls=[CALL, second]), RESULT, assistant("b")]
    first_only = unmarked(HERMES).replace("in message.tool_calls or []", "in (message.tool_calls or [])[:1]")
    assert "part of tool_calls (role assistant)" in dataset(tmp_path, rows_of(messages), first_only).facts.unused
    cutting = unmarked(HERMES).replace("call.function | tojson", "call.function | tojson | replace('3', '')")
    assert "part of tool_calls (role assistant)" in dataset(tmp_path, rows_of(messages), cutting).facts.unused
    assert dataset(tmp_path, rows_of(messages), unmarked(HERMES)).facts.unused == ["tool_call_id (role tool)"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_unused_keys_can_be_rejected(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_WORTH_BYTES", 0)
    rows = rows_of([user("a", name="Ann"), assistant("b")])
    values = {"cache": str(tmp_path / "cache"), "unused_keys": UnusedKeys.refuse}
    for _ in range(2):  # the second time, it is read from the cache
        message = r"data.unused_keys=refuse: .* has keys .*: name \(role user\); remove them"
        with pytest.raises(ConfigError, match=message):
            dataset(tmp_path, rows, unmarked(HERMES), name, **values)
    assert dataset(tmp_path, rows, unmarked(HERMES), name, cache=values["cache"]).facts.unused == ["name (role user)"]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_unused_columns_are_reported_for_sft_data(tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", [{"prompt": "a", "response": "b", "input": "c"}] * 2)
    cfg = SftDataConfig(path=str(file), cache=None, eval_fraction=0)
    assert build_dataset(cfg, byte_tokenizer(None), seq_len=99, split="train").facts.unused == ["column input"]
    refusing = SftDataConfig(path=str(file), cache=None, eval_fraction=0, unused_keys=UnusedKeys.refuse)
    assert "column input" in problems(refusing)[0]
    assert "column input" in check_files(refusing)[0]
    assert [is_defining(f"data.{key}") for key in ("unused_keys", "tools_column")] == [False, True]  # on resume


def test_whatever_changes_the_rendered_text_changes_the_cache_key(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(cache, "_WORTH_BYTES", 0)
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    variants: list[tuple[list[dict], dict]] = [
        (rows_of(messages), {}),
        (rows_of(messages, tools=TOOLS), {}),
        (rows_of(messages, tools=TOOLS), {"tools_column": None}),
        (rows_of([user("a"), assistant("b", weight=0), *messages[2:]]), {}),
        (rows_of(messages, chat_template_kwargs={"enable_thinking": False}), {}),
    ]
    for number, (rows, values) in enumerate(variants, start=1):
        for _ in range(2):
            dataset(tmp_path, rows, unmarked(QWEN3), cache=str(tmp_path / "cache"), **values)
        assert len(list((tmp_path / "cache").iterdir())) == number


# Turns: the loss on the last one, and conversations cut to the newest ones


SEARCH = [user("Find it."), assistant("", tool_calls=[CALL]), RESULT, assistant("Found.")]
LONG = [
    {"role": "system", "content": "Be brief."},
    *(user("Hi " * 9), assistant("Hello."), user("And"), user("now?"), assistant("Later. " * 3)),
    *(*SEARCH, user("Thanks!"), assistant("Bye.")),
]
TURNS = [1, 3, 6, 10]
"""Messages of LONG that begin a turn; the second has two user messages, the third a tool call."""


@pytest.mark.parametrize("template", [unmarked(HERMES), marked(HERMES), None], ids=["prefix", "blocks", "plain"])
@pytest.mark.parametrize(
    ("messages", "off", "targets"),
    [
        (LONG, (), ["Bye."]),
        (LONG[:10], (), [CALL["function"]["name"], "Found."]),
        (LONG[:11], (), [CALL["function"]["name"], "Found."]),
        (LONG[:10], (7,), ["Found."]),
        (LONG[:10], (9,), [CALL["function"]["name"]]),
        (LONG[:10], (7, 9), []),
        (LONG, (11,), []),
    ],
    ids=["answer", "agent", "trailing question", "call off", "answer off", "both off", "last off"],
)
def test_loss_of_the_last_turn_only(
    template: str | None, messages: list[dict], off: tuple[int, ...], targets: list[str], tmp_path: Path
) -> None:
    """All that the assistant wrote after the last user message with an answer, but messages with a flag."""
    flagged = [{**message, "train": False} if index in off else message for index, message in enumerate(messages)]
    made = dataset(tmp_path, rows_of(flagged) + rows_of([user("a"), assistant("b")]), template, train_on=TrainOn.last)
    assert made.facts.dropped_without_target == (not targets)
    *examples, _ = made
    if not targets:
        assert examples == []
        return
    (example,) = examples
    texts = target_texts(byte_tokenizer(template), example)
    assert len(texts) == len(targets)
    if template is not None:
        assert all(target in text for target, text in zip(targets, texts, strict=True))
    first = TURNS[-1] if targets == ["Bye."] else TURNS[-2]
    earlier = [
        {**message, "weight": 0} if message["role"] == "assistant" and index < first else message
        for index, message in enumerate(flagged)
    ]
    assert list(dataset(tmp_path, rows_of(earlier), template)) == [example]


def newest_of(tokenizer: Any, messages: list[dict], answer: int | None, seq_len: int) -> Example | None:
    """Return the sample of the most turns that fit, by plain transformers, trying one after another.

    answer: The only message with a loss, and the last one; None: all answers have one.
    """
    end = len(messages) if answer is None else answer + 1
    for start in [turn for turn in TURNS if turn < end]:
        kept = [messages[0], *messages[start:end]]
        found = reference(tokenizer, kept, TOOLS)
        if answer is not None:
            prompt = tokenizer.apply_chat_template(kept[:-1], tools=TOOLS, add_generation_prompt=True)["input_ids"]
            found = trimmed(Example(found.input_ids, [IGNORED] * len(prompt) + found.input_ids[len(prompt) :]))
        if len(found.input_ids) <= seq_len:
            return found
    return None


@pytest.mark.parametrize("reasons", [False, True], ids=["one sample", "a sample per answer"])
def test_conversations_are_cut_to_the_most_turns_that_fit(reasons: bool, tmp_path: Path) -> None:
    """At every length, bit-equal to what plain transformers makes of the shortened conversation."""
    messages = [
        {**each, "reasoning_content": "Because."} if reasons and each["role"] == "assistant" else each for each in LONG
    ]
    tokenizer = byte_tokenizer(marked(QWEN3 if reasons else HERMES))
    path = write(tmp_path / "x.jsonl", rows_of(messages, tools=TOOLS))
    answers = [i for i, each in enumerate(messages) if each["role"] == "assistant"] if reasons else [None]
    lengths = {len(reference(tokenizer, [messages[0], *messages[turn:]], TOOLS).input_ids) for turn in TURNS}
    seen = set()
    for seq_len in sorted({length + change for length in lengths for change in (-1, 0)} | {90, 10_000}):
        cfg = ChatDataConfig(path=str(path), eval_fraction=0, cache=None, overlong=Overlong.keep_last)
        expected = [newest_of(tokenizer, messages, answer, seq_len) for answer in answers]
        whole = [newest_of(tokenizer, messages, answer, 10**6) for answer in answers]
        kept = [each for each in expected if each is not None]
        if not kept:
            with pytest.raises(ConfigError, match=r"too short for every sample .*longer than seq_len dropped"):
                build_dataset(cfg, tokenizer, seq_len=seq_len, split="train")
            continue
        made = build_dataset(cfg, tokenizer, seq_len=seq_len, split="train")
        assert isinstance(made, Dataset)
        assert list(made) == kept, seq_len
        cut = sum(each is not None and each != other for each, other in zip(expected, whole, strict=True))
        assert (made.facts.cut_to_turns, made.facts.dropped_overlong) == (cut, len(expected) - len(kept))
        assert (f"{cut} cut to their newest turns" in str(made.facts)) == bool(cut)
        seen.add((cut, len(expected) - len(kept)))
        packed = build_dataset(replace(cfg, pack=True), tokenizer, seq_len=seq_len, split="train")
        assert sorted(each for row in packed for each in row.examples) == sorted(kept)
    assert len(seen) >= 2
    assert any(cut for cut, _ in seen)


def test_a_turn_begins_with_the_system_messages_right_before_it() -> None:
    system = {"role": "system", "content": "Speak French."}
    messages = [{"role": "system", "content": "first"}, user("a"), assistant("b"), system, user("q"), assistant("oui")]
    conversation = Conversation("x", messages)
    assert conversation.turns == [1, 3]
    assert conversation.from_turn(3).messages == [messages[0], *messages[3:]]


def test_rows_that_the_template_rejects_are_bad_and_not_cut(tmp_path: Path) -> None:
    """Nor is a conversation of which the template rejects the newest turns: it is dropped as too long."""
    rejects = "{%- if messages | length > 11 or messages[0].content == 'Hi' %}{{ raise_exception('no') }}{%- endif %}"
    long = [user("Hello " * 30), assistant("Ho."), user("Hi"), assistant("Ho.")]
    path = str(write(tmp_path / "x.jsonl", [*rows_of(LONG), *rows_of(long), *rows_of([user("a"), assistant("b")])]))
    cfg = ChatDataConfig(path=path, eval_fraction=0, cache=None, overlong=Overlong.keep_last, bad_rows=BadRows.drop)
    facts = build_dataset(cfg, byte_tokenizer(rejects + unmarked(HERMES)), seq_len=150, split="train").facts
    assert isinstance(facts, Facts)
    assert (facts.samples, facts.dropped_bad_rows, facts.dropped_overlong, facts.cut_to_turns) == (1, 1, 1, 0)


def test_turns_at_which_the_template_rejects_the_rest_do_not_end_the_search(tmp_path: Path) -> None:
    """All others are tried: with every set of rejected starts, the sample is the first that fits."""
    plain = byte_tokenizer(marked(HERMES))
    lengths = {turn: len(reference(plain, [LONG[0], *LONG[turn:]], TOOLS).input_ids) for turn in TURNS}
    for rejected in (each for size in range(4) for each in combinations(TURNS[1:], size)):
        starts = " or ".join(f"messages[1].content == {LONG[turn]['content']!r}" for turn in rejected) or "false"
        tokenizer = byte_tokenizer(
            f"{{%- if {starts} %}}{{{{ raise_exception('no') }}}}{{%- endif %}}" + marked(HERMES)
        )
        for seq_len in lengths.values():
            newest = NewestTurns(seq_len)
            (made,) = encode_conversations(tokenizer, [Conversation("x", LONG, TOOLS)], newest=newest)
            fitting = [lengths[turn] for turn in TURNS if turn not in rejected and lengths[turn] <= seq_len]
            assert len(made.input_ids) == max(fitting, default=lengths[TURNS[0]]), (rejected, seq_len)


def test_turns_that_are_kept_depend_on_the_length_and_are_cached_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_WORTH_BYTES", 0)
    path = str(write(tmp_path / "x.jsonl", rows_of(LONG) * 3))
    cfg = ChatDataConfig(path=path, eval_fraction=0, cache=str(tmp_path / "cache"), overlong=Overlong.keep_last)
    tokenizer, found = byte_tokenizer(marked(HERMES)), []
    for seq_len, overlong in ((150, "keep_last"), (300, "keep_last"), (150, "drop"), (10_000, "truncate")):
        for _ in range(2):
            given = replace(cfg, overlong=Overlong(overlong))
            try:
                found.append(str(build_dataset(given, tokenizer, seq_len=seq_len, split="train").facts))
            except ConfigError as error:
                found.append(error.problems[0])
        assert found[-1] == found[-2]
    assert len(set(found)) == 4
    assert found[0].count("3 cut to their newest turns") == found[2].count("3 cut to their newest turns") == 1
    entries = [file for file in (tmp_path / "cache").iterdir() if file.suffix == ".safetensors"]
    assert len(entries) == 3  # drop and truncate read the same tokens


# Templates that do not terminate


ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) if messages | length > 2 %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 10 ** (10 ** 10) }}",
]


@pytest.mark.parametrize("template", ENDLESS, ids=["loops", "later", "power"])
def test_nonterminating_template_is_rejected_within_seconds(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat_template._RENDER_SECONDS <= 5
    monkeypatch.setattr(chat_template, "_RENDER_SECONDS", 0.5)
    began = time.process_time()
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    with pytest.raises(ConfigError, match=r"x.jsonl:1: the chat template did not finish within 0.5 s of CPU time"):
        encode_conversations(byte_tokenizer(template + unmarked(HERMES)), [Conversation("x.jsonl:1", messages)])
    assert time.process_time() - began < 5


GROWING = [
    "{{ 'x' * 10 ** 10 }}",
    "{{ messages * 10 ** 9 }}",
    "{{ messages[0].content * 10 ** 10 }}",
    "{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s=[1]) %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ 'x'.ljust(10 ** 10) }}",
    "{{ '%999999999d' | format(1) }}{{ '%999999999d' | format(1) }}",
    "{{ messages | tojson(indent=10 ** 10) }}",
    "{% set s = 'x' * 10 ** 7 %}{% for a in range(9000) %}{{ s }}{% endfor %}",
    "{{ 'x' * 10 ** 8 }}",
    "{% generation %}{{ 'x' * 10 ** 10 }}{% endgeneration %}",
]


@pytest.mark.parametrize("template", GROWING)
def test_template_that_takes_too_much_memory_is_rejected(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_RENDER_BYTES", 2**28)
    before, peak = resource.getrlimit(resource.RLIMIT_AS), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    conversation = Conversation("x.jsonl:1", [user("a"), assistant("b")])
    what = r"(needs more than 256 MiB of memory|writes [\d,]+ characters for a conversation of \d+)"
    with pytest.raises(TemplateLimitError, match=rf"x.jsonl:1: the chat template {what}; set model.chat_template"):
        ChatTemplate(byte_tokenizer(template)).render(conversation)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**19  # KiB


def test_long_conversation_stays_within_the_limits() -> None:
    text = "word " * 10**6
    rendered = ChatTemplate(byte_tokenizer(unmarked(HERMES))).render(Conversation("x", [user(text), assistant(text)]))
    assert rendered.text.count("word ") == 2 * 10**6


def test_nonterminating_template_is_rejected_during_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_RENDER_SECONDS", 0.5)
    model = build_on_meta(ModelConfig(path=str(tiny_folder(tmp_path, "llama"))))
    materialize(model, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(ConfigError, match="the chat template did not finish within 0.5 s"):
        generate(model, byte_tokenizer(ENDLESS[0]), ["hi"], 1)


# Comparison with TRL, if it is installed


def trl_templates() -> list[str]:
    spec = importlib.util.find_spec("trl")
    folders = spec.submodule_search_locations if spec else None
    return sorted(map(str, Path(folders[0]).glob("chat_templates/*_training.jinja"))) if folders else []


@pytest.mark.skipif(not trl_templates(), reason="needs TRL, for its training templates")
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_masks_equal_those_of_trl_under_its_training_templates(conversation: str) -> None:
    """Templates that drop past reasoning or end the last answer differently are skipped.

    They give one example per answer here.
    """
    messages, tools = CONVERSATIONS[conversation]
    compared = 0
    for file in trl_templates():
        source = Path(file).read_text()
        tokenizer = byte_tokenizer(source)
        tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(re.findall(r"<\|\w+\|>", source)))})
        try:
            expected = reference(tokenizer, messages, tools)
        except Exception:
            continue
        examples = encode_conversations(tokenizer, [Conversation("x.jsonl:1", messages, tools)])
        takes_parts = re.search("idefics|llava|smolvlm", file)  # the reference omits content that is text
        if len(examples) == 1 and "strftime_now" not in source and not takes_parts:
            assert examples == [expected], file
            compared += 1
    assert compared >= 10
