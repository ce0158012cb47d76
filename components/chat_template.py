"""Chat templates: rendering of conversations, the spans marked as generated, and a limit on their CPU time."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from components.config.errors import ConfigError
from components.conversation import ASSISTANT, Conversation, Message, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_FIXED_CLOCK = (
    "{%- macro strftime_now(format) -%}"
    "{{- format | replace('%Y', '2024') | replace('%m', '07') | replace('%d', '26')"
    " | replace('%b', 'Jul') | replace('%B', 'July') -}}"
    "{%- endmacro -%}"
)
_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = '{"probe": "value"}'
_PROBED = "probed"
RENDER_SECONDS = 5.0
"""Limit on the CPU time of a chat template for one conversation; a long conversation takes milliseconds."""


class Rendering(NamedTuple):
    """A conversation rendered as text."""

    text: str
    blocks: list[tuple[int, int]]
    """Character ranges rendered by the template's {% generation %} blocks; empty if it has none."""


class ChatTemplate:
    """Renderer of conversations: the tokenizer's chat template, or plain text if it has none.

    Templates are untrusted code that comes with a model. They run in transformers' sandbox, with a limit on CPU time.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._sources: dict[bool, str | None] = {}  # keyed by has_tools: a tokenizer may have a template for each
        self._encodes_arguments: bool | None = None
        self._joins_parts: dict[tuple[bool, str], bool] = {}  # keyed by has_tools and role

    def source(self, tools: list[dict[str, Any]] | None) -> str | None:
        """Return the template for conversations with or without tools, or None if the tokenizer has none."""
        has_tools = tools is not None
        if has_tools not in self._sources:
            text = self._tokenizer.get_chat_template(tools=tools) if self._tokenizer.chat_template else None
            if text and "strftime_now" in text:
                # Today's date in a prompt would change the tokens of a run that resumes on another day.
                text = _FIXED_CLOCK + text
            self._sources[has_tools] = text
        return self._sources[has_tools]

    def marks_answers(self, conversation: Conversation) -> bool:
        """Return whether the template has {% generation %} blocks that a fast tokenizer can map to tokens."""
        source = self.source(conversation.tools)
        return bool(source and is_fast(self._tokenizer) and _GENERATION_BLOCK.search(source))

    def render(self, conversation: Conversation, stop: int, *, add_generation_prompt: bool = False) -> Rendering:
        """Render the first `stop` messages. Raises ConfigError if the template rejects them or fails."""
        messages = conversation.messages[:stop]
        source = self.source(conversation.tools)
        if source is None:
            end = self._tokenizer.eos_token
            parts = [text_of(m.get("content")) + (end if m["role"] == ASSISTANT else "") for m in messages]
            return Rendering("\n".join(parts) + ("\n" if add_generation_prompt else ""), [])
        if self._encodes_arguments is None and any(map(_has_text_arguments, messages)):
            self._encodes_arguments = self._probe_arguments()
        if self._encodes_arguments:
            messages = [_with_parsed_arguments(message) for message in messages]
        messages = [self._with_joined_parts(source, message, conversation.tools) for message in messages]
        given = {"tools": conversation.tools, "add_generation_prompt": add_generation_prompt}
        return self._run(source, messages, {**conversation.template_kwargs, **given}, conversation.where)

    def _run(self, source: str, messages: list[Message], given: Mapping[str, Any], where: str) -> Rendering:
        from jinja2 import TemplateError

        try:
            with running_template(where):
                if is_fast(self._tokenizer) and _GENERATION_BLOCK.search(source):
                    return _traced(source, messages, {**self._tokenizer.special_tokens_map, **given})
                text = self._tokenizer.apply_chat_template(
                    messages,
                    chat_template=source,
                    tokenize=False,
                    **given,
                )
                return Rendering(str(text), [])
        except ConfigError:
            raise
        except TemplateError as error:
            raise ConfigError(f"{where}: the chat template rejects this conversation: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ConfigError(
                f"{where}: the chat template fails on this conversation: {type(error).__name__}: {error}; change it to "
                "the form that the template expects, or set model.tokenizer to one with another chat template"
            ) from error

    def _with_joined_parts(self, source: str, message: Message, tools: list[dict[str, Any]] | None) -> Message:
        """Return a message with its text parts joined, unless the template renders a part like the same text.

        Many templates render a list as its Python representation, others omit it.
        """
        if not _has_text_parts(message):
            return message
        key = (tools is not None, message["role"])
        if key not in self._joins_parts:
            texts = [
                self._probe_content(source, message["role"], content, tools)
                for content in (_PROBED, [{"type": "text", "text": _PROBED}])
            ]
            # A template that takes nothing but parts does not render the plain text.
            self._joins_parts[key] = _PROBED in texts[0] and texts[0] != texts[1]
        return {**message, "content": text_of(message["content"])} if self._joins_parts[key] else message

    def _probe_content(self, source: str, role: str, content: Any, tools: list[dict[str, Any]] | None) -> str:
        """Render a probe conversation with this content in a message of a role. Returns "" if the template fails."""
        question, message = {"role": "user", "content": "question"}, {"role": role, "content": content}
        call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": {}}}
        match role:
            case "user":
                messages = [message]
            case "assistant":
                messages = [question, message]
            case "tool":
                asking = {"role": ASSISTANT, "content": "", "tool_calls": [call]}
                messages = [question, asking, {**message, "tool_call_id": call["id"], "name": "probe"}]
            case _:
                messages = [message, question]
        try:
            return self._run(source, messages, {"tools": tools}, "content in parts").text
        except ConfigError:
            return ""

    def _probe_arguments(self) -> bool:
        """Return whether the template requires the arguments of tool calls as objects and encodes them itself.

        OpenAI's format has JSON text, Hugging Face's an object. Templates accept one or both: with text, some encode it
        a second time and others fail.
        """
        text = self._probe({"name": "probe", "arguments": _PROBE})
        if text is None:
            return self._probe({"name": "probe", "arguments": json.loads(_PROBE)}) is not None
        return json.dumps(_PROBE) in text

    def _probe(self, function: dict[str, Any]) -> str | None:
        """Render a probe conversation with one tool call. Returns None if the template fails."""
        source = self.source(None)
        if source is None:
            return ""
        call = {"id": "call00000", "type": "function", "function": function}
        answer = {"role": ASSISTANT, "content": "", "tool_calls": [call]}
        try:
            return self._run(source, [{"role": "user", "content": "probe"}, answer], {}, "a call of a tool").text
        except ConfigError:
            return None


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


def _has_text_arguments(message: Message) -> bool:
    return any(isinstance(_function(call).get("arguments"), str) for call in message.get("tool_calls") or ())


def _with_parsed_arguments(message: Message) -> Message:
    """Return a message with the arguments of its tool calls parsed; text that is not a JSON object is kept."""
    if not _has_text_arguments(message):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(_function(call))
        try:
            parsed = json.loads(function["arguments"])
        except (KeyError, TypeError, ValueError):
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object with the name and arguments of a tool call, which most formats nest under `function`."""
    inner = call.get("function")
    return inner if isinstance(inner, dict) else call


class CpuLimitError(RuntimeError):
    """Code exceeded its CPU time limit."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise CpuLimitError in the body once this process has spent `seconds` of CPU time in it.

    The limit is on CPU time rather than wall time, so that a busy or suspended machine does not trigger it. Signal
    handlers run in the main thread only; in any other thread the body runs without a limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _raise)
    # The timer repeats because code such as Jinja's constant folding swallows exceptions and tries again.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def running_template(where: str) -> Iterator[None]:
    """Limit the CPU time of a chat template. Raises ConfigError, with `where` it was rendered, at the limit."""
    try:
        with cpu_limit(RENDER_SECONDS):
            yield
    except CpuLimitError as error:
        raise ConfigError(
            f"{where}: the chat template did not finish within {RENDER_SECONDS:g} s of CPU time; set "
            "model.tokenizer to a tokenizer with another chat template"
        ) from error


def _raise(number: int, frame: FrameType | None) -> None:
    raise CpuLimitError("the CPU time limit was reached")
