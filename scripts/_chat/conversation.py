"""A conversation with a model: turns, system message, and answers that arrive piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from components import models
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from scripts._chat.chat_model import ChatModel

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes the first bytes of a character to."""


class Conversation:
    """Turns so far, and the settings of the next answer.

    With a chat template, each answer sees the turns before it. Without one, each message is continued as plain text, on
    its own, as a run's generations are.
    """

    def __init__(self, chat_model: ChatModel, sampling: models.Sampling, max_new_tokens: int) -> None:
        self._chat_model, self._sampling, self._max_new_tokens = chat_model, sampling, max_new_tokens
        self._stops = models.stop_tokens(chat_model.model, chat_model.tokenizer)
        self._system: list[dict[str, str]] = []
        self._turns: list[dict[str, str]] = []
        self._asked = 0
        self.cut = ""
        """Limit at which the last answer was cut; empty: it is complete."""

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._chat_model.tokenizer.chat_template is not None

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self._turns, self._asked = [], 0

    def set_system(self, text: str) -> None:
        """Set the system message; empty: none. Raises ConfigError if the chat template has no place for it."""
        system = [{"role": "system", "content": text}] if text else []
        if text:
            tokenizer, probe = self._chat_model.tokenizer, [{"role": "user", "content": "probe"}]
            given = f"system message {text!r:.60}"
            if not self.has_template:
                raise ConfigError(f"{given}: the tokenizer has no chat template; leave the system message out")
            if models.encode_messages(tokenizer, [*system, *probe]) == models.encode_messages(tokenizer, probe):
                raise ConfigError(f"{given}: the chat template ignores it; write it into the first message instead")
        self._system = system

    def answer(self, message: str) -> Iterator[str]:
        """Yield the pieces of the answer to a message as its tokens are generated, and then store the turn.

        The turn is stored too if the iterator is closed early, unless there is no text yet. Raises ConfigError if the
        chat template rejects the conversation, or if it is too long for the model.
        """
        model, tokenizer = self._chat_model.model, self._chat_model.tokenizer
        user = {"role": "user", "content": message}
        if self.has_template:
            tokens = models.encode_messages(tokenizer, [*self._system, *self._turns, user])
        else:
            tokens = models.encode_prompt(tokenizer, message)
        most, limit = self._limit(len(tokens))
        text, complete, count = StreamedText(tokenizer), False, 0
        try:
            with self._chat_model.computing():
                choose = self._sampling.of_prompt(self._asked)
                for token in models.stream_tokens(model, self._stops, tokens, most, choose):
                    count += 1
                    if piece := text.add(token):
                        yield piece
            complete, self.cut = True, limit if count == most else ""
            if piece := text.finish():
                yield piece
        finally:
            if complete or text.printed:
                self._turns += [user, {"role": "assistant", "content": text.printed}]
                self._asked += 1

    def _limit(self, used: int) -> tuple[int, str]:
        """Return the most tokens of an answer after `used` ones, and what limits them. Raises ConfigError for 0."""
        most = self._max_new_tokens
        context = models.context_length(self._chat_model.model)
        if context is None or used + most <= context:
            return most, f"cut at {most:,} tokens, see --max-new-tokens"
        if used >= context:
            raise ConfigError(
                f"the conversation has {used:,} tokens, and the model's context {context:,}; start again with /reset, "
                "or shorten the message"
            )
        return context - used, f"cut at the model's context of {context:,} tokens; start again with /reset"


class StreamedText:
    """Decoder of a growing list of tokens: returns complete characters only, without whitespace at the ends.

    transformers' TextStreamer holds back the last word, and tokenizers' DecodeStream fails on some byte sequences.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self.printed = ""
        """Text returned so far."""

    def add(self, token: int) -> str:
        """Return the text that a token adds; empty if it ends within a character or adds only whitespace."""
        self._tokens.append(token)
        return self._grow(self._text().rstrip(INCOMPLETE).rstrip())

    def finish(self) -> str:
        """Return the rest of the text, with incomplete characters."""
        return self._grow(self._text())

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True)).strip()

    def _grow(self, text: str) -> str:
        added = text[len(self.printed) :]
        self.printed += added
        return added
