"""Chat templates: rendering of conversations, the spans marked as generated, and limits on their time and memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property
from itertools import count, product, takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from components.conversation import ASSISTANT, TOOL, Conversation, Message, arguments_of, function_of, text_of
from components.protocol.errors import ConfigError
from components.protocol.processes import CpuLimitError, limited

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_FIXED_CLOCK = (
    "{%- macro strftime_now(format) -%}"
    "{{- format | replace('%Y', '2024') | replace('%m', '07') | replace('%d', '26')"
    " | replace('%b', 'Jul') | replace('%B', 'July') -}}"
    "{%- endmacro -%}"
)
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBED = "75317"  # digits, which no filter of a template changes
_QUESTION: Message = {"role": "user", "content": "question"}
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "Value."}}},
    },
}
_RENDER_SECONDS = 5.0
"""Limit on the CPU time of a chat template for one conversation; a long conversation takes milliseconds."""
_RENDER_BYTES = 2**29
"""Limit on the memory that a chat template takes for one conversation, 512 MiB."""
_LONGEST_TEXT, _LONGEST_GROWTH = 2**22, 8
"""Most characters of a rendered conversation, or times its length as JSON if that is more: tokens take much memory."""


class Rendering(NamedTuple):
    """A conversation rendered as text."""

    text: str
    blocks: list[tuple[int, int]]
    """Character ranges rendered by the template's {% generation %} blocks; empty if it has none."""


class ChatTemplate:
    """Renderer of conversations: the tokenizer's chat template, or plain text if it has none.

    Messages are given in the form that the template renders without loss, found by rendering probes: content as text or
    in parts, arguments of tool calls as objects or as JSON text, results of tools that are objects as JSON text.

    Templates are untrusted code that comes with a model. They run in transformers' sandbox, with limits on CPU time and
    memory.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._sources: dict[bool, str | None] = {}  # keyed by has_tools: a tokenizer may have a template for each
        self._probed: dict[tuple[Any, ...], Any] = {}
        """Results of probes."""

    def source(self, tools: list[dict[str, Any]] | None) -> str | None:
        """Return the template for conversations with or without tools, or None if the tokenizer has none.

        Raises ConfigError if the tokenizer has several and none is the default.
        """
        has_tools = tools is not None
        if has_tools not in self._sources:
            if names := self._unchosen:
                raise ConfigError(
                    f"model.chat_template=null: the tokenizer has the chat templates {', '.join(names)}, and none is "
                    "named default; set model.chat_template to one of them"
                )
            text = self._tokenizer.get_chat_template(tools=tools) if self._tokenizer.chat_template else None
            if text and "strftime_now" in text:
                # Today's date in a prompt would change the tokens of a run that resumes on another day.
                text = _FIXED_CLOCK + text
            self._sources[has_tools] = text
        return self._sources[has_tools]

    @property
    def _unchosen(self) -> list[str]:
        """Names of the templates of a tokenizer without a default one."""
        templates: Any = self._tokenizer.chat_template
        return sorted(templates) if isinstance(templates, dict) and "default" not in templates else []

    def marks_answers(self, conversation: Conversation) -> bool:
        """Return whether the template has {% generation %} blocks that a fast tokenizer can map to tokens."""
        source = self.source(conversation.tools)
        return bool(source and is_fast(self._tokenizer) and _GENERATION_BLOCK.search(source))

    def render(
        self, conversation: Conversation, stop: int | None = None, *, add_generation_prompt: bool = False
    ) -> Rendering:
        """Render the first `stop` messages.

        Raises ConfigError if the template rejects them or fails, and TemplateLimitError at a limit.
        """
        messages, tools = conversation.messages[:stop], conversation.tools
        if self.source(tools) is None:
            end = self._tokenizer.eos_token
            parts = [text_of(m.get("content")) + (end if m["role"] == ASSISTANT else "") for m in messages]
            return Rendering("\n".join(parts) + ("\n" if add_generation_prompt else ""), [])
        given = {**conversation.template_kwargs, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            adapted = [self._adapted(message, tools) for message in messages]
            return self._run(adapted, given)
        except TemplateLimitError as error:
            raise TemplateLimitError(f"{conversation.where}: {error}") from error
        except _TemplateError as error:
            raise ConfigError(f"{conversation.where}: {self._located(str(error), adapted, given)}") from error

    @cached_property
    def stop_tokens(self) -> dict[str, int]:
        """Tokens that end answers, with their ids: the end-of-text token, and those that the template writes.

        They are the last targets of answers, and end generated answers. A template that writes none after an answer
        leaves the end to the token that begins the next message, which the model then generates: that of a user's
        message, or after a tool call that of its result.
        """
        ends = {self._tokenizer.eos_token} - {None}
        call = {"role": ASSISTANT, "content": "", "tool_calls": [_probe_call(_PROBED)]}
        calls = {**call, "tool_calls": [_probe_call("first"), _probe_call(_PROBED)]}
        answer = {"role": ASSISTANT, "content": _PROBED}
        try:
            for tools in [None, [_PROBE_TOOL]] if not self._unchosen and self.source(None) else []:
                ends |= self._ends(answer, answer, _QUESTION, tools)
                ends |= self._ends(call, calls, _probe_result(_PROBED), tools)
        except TemplateLimitError:
            pass  # the end-of-text token remains
        if self._tokenizer.bos_token != self._tokenizer.eos_token:
            ends.discard(self._tokenizer.bos_token)
        ordered = sorted(ends, key=lambda token: (token != self._tokenizer.eos_token, token))
        ids: Any = self._tokenizer.convert_tokens_to_ids(ordered)
        return dict(zip(ordered, ids, strict=True))

    def with_end(self, conversation: Conversation, answer: int, rendering: Rendering) -> Rendering | None:
        """Return the rendering up to and including message `answer`, extended so that a stop token ends the answer.

        The stop token is added to the last of `rendering.blocks`, or appended if the template begins the next message
        with it. None: the template has no stop token for this answer.
        """
        text, blocks = rendering
        end = blocks[-1][1] if blocks else len(text)
        if text[:end].rstrip().endswith(tuple(self.stop_tokens)):
            return rendering
        following = self._first(self.stop_tokens, text, end)
        if following is None:
            message, tools = conversation.messages[answer], conversation.tools
            roles = [message["role"] for message in conversation.messages[answer + 1 : answer + 2]]
            header = self._header(bool(message.get("tool_calls")), roles[0] if roles else None, tools)
            if not header or text[end:].strip():
                return None
            text += header
            following = len(text)
        return Rendering(text, [*blocks[:-1], (blocks[-1][0], following)] if blocks else [])

    def _run(self, messages: list[Message], given: Mapping[str, Any]) -> Rendering:
        from jinja2 import TemplateError

        source = self.source(given["tools"])
        try:
            with limited(_RENDER_SECONDS, _RENDER_BYTES):
                if is_fast(self._tokenizer) and _GENERATION_BLOCK.search(str(source)):
                    rendering = _traced(str(source), messages, {**self._tokenizer.special_tokens_map, **given})
                else:
                    text = self._tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **given)
                    rendering = Rendering(str(text), [])
            if len(rendering.text) > _LONGEST_TEXT:
                size = len(json.dumps([messages, given], default=str))
                if len(rendering.text) > _LONGEST_GROWTH * size:
                    raise _limit_error(f"writes {len(rendering.text):,} characters for a conversation of {size:,}")
            return rendering
        except CpuLimitError as error:
            raise _limit_error(f"did not finish within {_RENDER_SECONDS:g} s of CPU time") from error
        except MemoryError as error:
            raise _limit_error(f"needs more than {_RENDER_BYTES / 2**20:g} MiB of memory") from error
        except TemplateError as error:
            raise _TemplateError(f"the chat template rejects this conversation: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise _TemplateError(
                f"the chat template fails on this conversation: {type(error).__name__}: {error}; change it to "
                "the form that the template expects, or set model.chat_template to another one"
            ) from error

    def _located(self, problem: str, messages: list[Message], given: Mapping[str, Any]) -> str:
        """Return a problem with the number of the first message that causes it, and the key if one alone does."""
        for number in range(1, len(messages) + 1):
            if self._problem(messages[:number], given) == problem:
                break
        else:
            return problem
        message = messages[number - 1]
        for key in message.keys() - {"role"}:
            without = {name: value for name, value in message.items() if name != key}
            if self._problem([*messages[: number - 1], without], given) is None:
                return f"message {number} (role {message['role']}), key {key}: {problem}"
        return f"message {number} (role {message['role']}): {problem}"

    def _problem(self, messages: list[Message], given: Mapping[str, Any]) -> str | None:
        try:
            self._run(messages, given)
        except (_TemplateError, TemplateLimitError) as error:
            return str(error)
        return None

    def _probe(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> str:
        """Render messages as they are, after a system message if the template requires one. Returns "" if it fails."""
        given = {"tools": tools, "add_generation_prompt": False}
        for opening in ([], [{"role": "system", "content": "probe"}]):
            try:
                return self._run([*opening, *messages], given).text
            except _TemplateError:
                continue
        return ""

    def _adapted(self, message: Message, tools: list[dict[str, Any]] | None) -> Message:
        """Return a message in the form that the template renders."""
        role, content = message["role"], message.get("content")
        if message.get("tool_calls"):
            return self._with_adapted_calls(message, tools)
        if not content:
            return message
        if not isinstance(content, str) and not _has_text_parts(message):
            if role != TOOL or self._renders_result(content, tools):
                return message
            message, content = {**message, "content": text_of(content)}, text_of(content)
        form = self._content_form(role, tools)
        if form is list and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        return {**message, "content": text_of(content)} if form is str and isinstance(content, list) else message

    def _content_form(self, role: str, tools: list[dict[str, Any]] | None) -> type | None:
        """Return the form in which the content of a role is rendered: str, list (of parts), or None for both alike.

        Many templates render a list as its Python representation, others omit it, and some take nothing but lists.
        """
        key = ("content", tools is not None, role)
        if key not in self._probed:
            as_text, as_parts = (
                self._probe(_probe_messages(role, content), tools)
                for content in (_PROBED, [{"type": "text", "text": _PROBED}])
            )
            self._probed[key] = None
            if as_text != as_parts:
                self._probed[key] = str if _PROBED in as_text else list if _PROBED in as_parts else None
        probed: type | None = self._probed[key]
        return probed

    def _renders_result(self, content: Any, tools: list[dict[str, Any]] | None) -> bool:
        """Return whether the template encodes a tool result that is an object or a list, with all of its values."""
        leaves = count()
        content = _with_leaves(content, lambda: f"leaf{next(leaves)}x")
        key = ("result", tools is not None, json.dumps(content))
        if key not in self._probed:
            text = self._probe(_probe_messages(TOOL, content), tools)
            self._probed[key] = "'leaf0x'" not in text and all(f"leaf{i}x" in text for i in range(next(leaves)))
        return bool(self._probed[key])

    def _with_adapted_calls(self, message: Message, tools: list[dict[str, Any]] | None) -> Message:
        """Return a message with the arguments of its calls as objects or as JSON text, as the template encodes them.

        OpenAI's format has JSON text, Hugging Face's an object. With the wrong one, templates fail, encode JSON twice,
        or write a Python representation. Some omit the calls unless the message has no content, or an empty one.
        """
        content = message.get("content")
        contents = [content, "" if content is None else None] if content in (None, "") else [content]
        for form, given in product((dict, str), contents):
            if self._renders_calls(form, given, tools):
                break
        else:
            form, given = dict, content
        calls = []
        for call in message["tool_calls"]:
            function = {**function_of(call), "arguments": arguments_of(call)}
            if form is str and isinstance(function["arguments"], dict):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
            calls.append({**call, "function": function} if "function" in call else function)
        rest = {key: value for key, value in message.items() if key != "content"}
        return {**rest, "tool_calls": calls} | ({} if given is None else {"content": given})

    def _renders_calls(self, form: type, content: Any, tools: list[dict[str, Any]] | None) -> bool:
        """Return whether the template encodes arguments of this form in a message with this content."""
        content = _PROBED if content else content
        key = ("calls", tools is not None, form, content)
        if key not in self._probed:
            call = _probe_call(_PROBED)
            if form is str:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            text = self._probe([_QUESTION, {"role": ASSISTANT, "content": content, "tool_calls": [call]}], tools)
            wrong = ("'probe_key'", '\\"probe_key', '{{"probe_key')
            self._probed[key] = "probe_key" in text and _PROBED in text and not any(each in text for each in wrong)
        return bool(self._probed[key])

    def _ends(
        self, answer: Message, repeated: Message, following: Message, tools: list[dict[str, Any]] | None
    ) -> set[str]:
        """Return the tokens that end a probed answer: where the conversation ends, and before a following message.

        Args:
            repeated: The answer with two tool calls. A token that it has once more closes a call, not the answer.
        """
        answer, repeated, following = (self._adapted(each, tools) for each in (answer, repeated, following))
        text = self._probe([_QUESTION, answer], tools)
        before, found, tail = text.rpartition(_PROBED)
        if not found:
            return set()
        again = self._probe([_QUESTION, repeated], tools)
        tail_of_longer = self._probe([_QUESTION, answer, following], tools)[len(before + found) :]
        pieces, longer = (self._added.split(each) for each in (tail, tail_of_longer))
        shared = [
            piece for piece, other in takewhile(lambda pair: pair[0] == pair[1], zip(pieces, longer, strict=False))
        ]
        ends = set()
        for tokens in (pieces, shared):
            chain = [piece for piece in tokens if piece.strip()][-1:]
            ends |= {
                token for token in chain if self._added.fullmatch(token) and again.count(token) <= text.count(token)
            }
        if ends:
            return ends
        header = self._header("tool_calls" in answer, following["role"], tools)
        return {header.strip()} if header else set()

    def _header(self, has_calls: bool, role: str | None, tools: list[dict[str, Any]] | None) -> str:
        """Return how the template begins a message of a role after an answer, up to its first added token; "": none.

        Args:
            role: None: the role that follows the last answer of a conversation: the user, or the tool that was called.
        """
        role = role or (TOOL if has_calls else "user")
        key = ("header", tools is not None, has_calls, role)
        if key not in self._probed:
            answer: Message = {"role": ASSISTANT, "content": _PROBED}
            if has_calls:
                answer |= {"content": "", "tool_calls": [_probe_call(_PROBED)]}
            following = _probe_result(_PROBED) if role == TOOL else {"role": role, "content": _PROBED}
            messages = [_QUESTION, *(self._adapted(each, tools) for each in (answer, following))]
            text, longer = self._probe(messages[:2], tools), self._probe(messages, tools)
            match = self._added.match(longer.removeprefix(text).lstrip()) if longer.startswith(text) else None
            blank = longer.removeprefix(text).partition(match[0])[0] if match else ""
            # A model that continues its own message has not ended its turn.
            self._probed[key] = blank + match[0] if match and role != ASSISTANT else ""
        return str(self._probed[key])

    def _first(self, tokens: Container[str], text: str, start: int) -> int | None:
        """Return the end of the first of `tokens` at `start`, after whitespace and added tokens only; None: none."""
        while found := self._added.match(text, len(text) - len(text[start:].lstrip())):
            start = found.end()
            if found[0] in tokens:
                return start
        return None

    @cached_property
    def _added(self) -> re.Pattern[str]:
        """Pattern of the tokens that were added to the vocabulary, special or not, without those of whitespace."""
        tokens = {*self._tokenizer.get_added_vocab(), *self._tokenizer.all_special_tokens}
        longest_first = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def is_fast(tokenizer: PreTrainedTokenizerBase) -> TypeGuard[PreTrainedTokenizerFast]:
    """Return whether a tokenizer is backed by the tokenizers library, which maps tokens to characters."""
    from transformers import PreTrainedTokenizerFast

    return isinstance(tokenizer, PreTrainedTokenizerFast)


def _traced(source: str, messages: list[Message], given: dict[str, Any]) -> Rendering:
    """Render with the character ranges of generation blocks.

    Calls the function behind `apply_chat_template`, which returns the blocks only as a token mask.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    kept = [{key: value for key, value in message.items() if value is not None} for message in messages]
    rendered: Any = render_jinja_template(
        conversations=[kept], chat_template=source, return_assistant_tokens_mask=True, **given
    )
    texts, blocks = rendered
    return Rendering(texts[0], blocks[0])


def _has_text_parts(message: Message) -> bool:
    parts = message.get("content")
    return isinstance(parts, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    )


def _with_leaves(value: Any, leaf: Callable[[], str]) -> Any:
    """Return a value of JSON with every leaf replaced by a call of `leaf`."""
    if isinstance(value, dict):
        return {key: _with_leaves(entry, leaf) for key, entry in value.items()}
    return [_with_leaves(entry, leaf) for entry in value] if isinstance(value, list) else leaf()


def _probe_call(value: str) -> dict[str, Any]:
    return {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": {"probe_key": value}}}


def _probe_result(content: Any) -> Message:
    return {"role": TOOL, "tool_call_id": "call00000", "name": "probe", "content": content}


def _probe_messages(role: str, content: Any) -> list[Message]:
    """Return a conversation that ends with a message of this role and content; a system message begins it."""
    match role:
        case "user":
            return [{"role": role, "content": content}]
        case "assistant":
            return [_QUESTION, {"role": role, "content": content}]
        case "tool":
            call = {"role": ASSISTANT, "content": "", "tool_calls": [_probe_call("value")]}
            return [_QUESTION, call, _probe_result(content)]
        case _:
            return [{"role": role, "content": content}, _QUESTION]


class _TemplateError(Exception):
    """A chat template rejects a conversation, or fails on it."""


class TemplateLimitError(ConfigError):
    """A chat template exceeded its limit on CPU time, memory or text."""


def _limit_error(what: str) -> TemplateLimitError:
    return TemplateLimitError(f"the chat template {what}; set model.chat_template to another one")


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, system: str | None = None) -> list[int]:
    """Return the tokens of a user's message with the chat template, or of the plain text if the tokenizer has none.

    At least one token: an empty text is the token that begins a text, or else the one that ends it.

    Args:
        system: System message before it; a tokenizer without a chat template ignores it.
    """
    if tokenizer.chat_template is None:
        tokens = tokenizer.encode(prompt)
        if not tokens:
            return [tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
        # Some tokenizers append an end-of-text token, after which there is nothing to continue.
        return tokens[:-1] if len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id else tokens
    before = [] if system is None else [{"role": "system", "content": system}]
    return encode_messages(tokenizer, [*before, {"role": "user", "content": prompt}])


def encode_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: list[Any] | None = None,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """Return the tokens of a conversation up to the start of the next answer, rendered with the chat template.

    Raises ConfigError if the template rejects the messages, fails on them, or does not finish.
    """
    where = f"the prompt {messages[-1].get('content')!r:.60}"
    conversation = Conversation(where, [dict(message) for message in messages], tools, template_kwargs)
    text = ChatTemplate(tokenizer).render(conversation, add_generation_prompt=True).text
    return tokenizer.encode(text, add_special_tokens=False)
