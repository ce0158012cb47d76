"""Prompts of recipes/grpo.py, whose answers are sampled during training, and their order."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import xxhash

from components.chat_template import ChatTemplate, encode_messages, encode_prompt
from components.config.schema.data import BadRows, Overlong, UnusedKeys
from components.config.schema.rollouts import PromptsDataConfig, RolloutsConfig
from components.conversation import Message, Prompt, text_of
from components.data.batches import BatchPlan, TrainBatches
from components.data.dataset import Facts, ItemSequence
from components.data.examples import KeyUsage
from components.data.sources.columns import PromptRow
from components.data.sources.rows import BadRowReport, no_good_row, refused_rows, unused_problem
from components.data.sources.split import SourceSplit, describe, holds_out
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from components.batch import Batch

_SHOWN = 400
"""Characters of a prompt in the banner."""


class RewardedPrompt(NamedTuple):
    """A prompt, and what reward functions receive of it."""

    prompt: Prompt
    content: str | list[Message]
    """The prompt as the data has it."""
    columns: Mapping[str, Any]
    """The other columns of its row; that of data.answer_column also as `answer`."""


@dataclass(slots=True)
class _PromptFacts(Facts):
    """Statistics of prompts, of each of which a group of answers is sampled."""

    group: int = 1

    @property
    def order_size(self) -> int:
        """Number of answers of an epoch."""
        return self.samples * self.group

    @property
    def batch_unit(self) -> str:
        """What batch sizes count, in the plural."""
        return "answers"

    def __str__(self) -> str:
        parts = [f"{self.source}: {self.samples:,} prompts, {self.tokens:,} tokens"]
        if self.dropped_overlong:
            parts.append(f"{self.dropped_overlong:,} dropped, which leave no room for an answer in seq_len")
        parts += [f"{self.dropped_bad_rows:,} bad rows dropped"] if self.dropped_bad_rows else []
        parts += [f"{self.passes:.2f} passes in the whole run"] if self.passes else []
        parts += [f"not used: {', '.join(self.unused)}"] if self.unused else []
        return "; ".join(parts)


class Prompts(ItemSequence[RewardedPrompt]):
    """Prompts of one split, in the order of their source."""

    item_name = "prompt"

    def __init__(self, rows: Sequence[RewardedPrompt], facts: Facts) -> None:
        self._rows, self.facts = rows, facts
        """`facts`: Statistics, for the banner."""
        self.prompts = [row.prompt for row in rows]
        """The prompts without their columns."""

    def __len__(self) -> int:
        return len(self._rows)

    def item(self, index: int) -> RewardedPrompt:
        """Return the prompt at `index`."""
        return self._rows[index]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the tokens of all prompts, and of what reward functions receive."""
        digest = xxhash.xxh3_128()
        for row in self._rows:
            digest.update(json.dumps([row.prompt.tokens, row.content, dict(row.columns)], default=str).encode())
        return digest.hexdigest()

    def show(self, index: int) -> str:
        """Return the text of a prompt, and its answer if the data has one."""
        row = self._rows[index]
        answer = row.columns.get("answer")
        return f"{row.prompt.text[:_SHOWN]}{'' if answer is None else f' [[{answer}]]'}"


def build_prompts(
    cfg: PromptsDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    rollouts: RolloutsConfig,
    *,
    seq_len: int,
    split: Literal["train", "eval"],
) -> Prompts:
    """Read and tokenize the prompts of the train split or the held-out split.

    A prompt that leaves no room for rollouts.max_new_tokens in `seq_len` tokens is dropped. The held-out prompts are
    selected as those of `build_dataset`.

    Raises ConfigError if a file, column, row or split is invalid, or if no prompt remains.
    """
    is_eval = split == "eval"
    source, room = SourceSplit(cfg, is_eval), seq_len - rollouts.max_new_tokens
    facts, rows, bad = (
        _PromptFacts(describe(cfg, is_eval), group=rollouts.group),
        list[RewardedPrompt](),
        BadRowReport(),
    )
    usage = KeyUsage(ChatTemplate(tokenizer))
    for record in source:
        if not isinstance(record, PromptRow):
            raise TypeError("expected rows with prompts")
        try:
            row = _tokenized(cfg, tokenizer, record)
            if record.conversation is not None:
                usage.observe(record.conversation)
        except ConfigError as error:
            bad.add({record.where: str(error)})
            continue
        if len(row.prompt.tokens) > room:
            facts.dropped_overlong += 1
            continue
        rows.append(row)
        facts.tokens += len(row.prompt.tokens)
    bad.add(source.bad.problems, source.bad.count)
    facts.unused = usage.unused
    if facts.unused and cfg.unused_keys is UnusedKeys.refuse:
        raise ConfigError(unused_problem(facts.source, facts.unused))
    if facts.dropped_overlong and cfg.overlong is Overlong.refuse:
        raise ConfigError(
            f"data.overlong=refuse: {facts.dropped_overlong:,} prompts of {facts.source} have more than {room} tokens, "
            f"which leaves no room for rollouts.max_new_tokens={rollouts.max_new_tokens} in training.seq_len="
            f"{seq_len}; raise training.seq_len, or set data.overlong=drop"
        )
    if bad.count and cfg.bad_rows is BadRows.refuse:
        raise ConfigError(refused_rows(bad, len(rows)))
    facts.samples, facts.dropped_bad_rows = len(rows), bad.count
    if not rows:
        raise ConfigError(_none_left(cfg, facts, bad, seq_len, rollouts, is_eval))
    return Prompts(rows, facts)


def _none_left(
    cfg: PromptsDataConfig, facts: Facts, bad: BadRowReport, seq_len: int, rollouts: RolloutsConfig, is_eval: bool
) -> str:
    if is_eval and not holds_out(cfg):
        return "data.eval_fraction=0: there are no held-out prompts; set it, data.eval_split or data.eval_path"
    if not facts.dropped_overlong and bad.count:
        return no_good_row(facts.source, bad, "correct these")
    if not facts.dropped_overlong:
        return (
            f"{facts.source}: too few prompts; holding out data.eval_fraction={cfg.eval_fraction} requires at least "
            "two different ones; add some, or set data.eval_split or data.eval_path"
        )
    return (
        f"training.seq_len={seq_len}: no prompt of {facts.source} leaves room for rollouts.max_new_tokens="
        f"{rollouts.max_new_tokens}; raise training.seq_len, or lower rollouts.max_new_tokens"
    )


def _tokenized(cfg: PromptsDataConfig, tokenizer: PreTrainedTokenizerBase, row: PromptRow) -> RewardedPrompt:
    """Raises ConfigError if the chat template rejects the prompt."""
    content, columns, conversation = row.content, dict(row.columns), row.conversation
    if cfg.answer_column is not None:
        columns["answer"] = columns[cfg.answer_column]
    if conversation is None:
        text = str(content)
        return RewardedPrompt(Prompt(text, encode_prompt(tokenizer, text, cfg.system_prompt)), text, columns)
    _, messages, tools, kwargs, *_ = conversation.with_system(cfg.system_prompt)
    prompt = Prompt(text_of(messages[-1].get("content")), encode_messages(tokenizer, messages, tools, kwargs))
    return RewardedPrompt(prompt, content if isinstance(content, str) else messages, columns)


class PromptBatches(TrainBatches):
    """Order of the prompts, and the cursor in it: prompts drawn so far, which may be more than those trained on.

    It has no micro-batches: the answers are sampled when a step needs them.
    """

    def __init__(self, prompts: Prompts, plan: BatchPlan, rollouts: RolloutsConfig, *, seed: int) -> None:
        super().__init__(prompts, replace(plan, deals=False), seed=seed, fingerprint=prompts.fingerprint)  # type: ignore[arg-type]
        self._rollouts = rollouts

    @property
    def drawn(self) -> int:
        """Prompts drawn so far, over all epochs."""
        return self._sample

    @drawn.setter
    def drawn(self, prompts: int) -> None:
        self._sample = prompts

    def indices(self, start: int, count: int) -> list[int]:
        """Return the dataset indices of `count` prompts of the order, from the one with the number `start` on."""
        return self._order.indices(start, count)

    def advance(self) -> None:
        """Count a step; the prompts were counted when they were drawn."""
        self._step += 1

    def upcoming(self, steps: int) -> Iterator[list[Batch]]:
        """Yield an empty list for each step."""
        return iter([[] for _ in range(steps)])

    def steps_for(self, epochs: float) -> int:
        """Return the optimizer steps of a run that draws every prompt `epochs` times, counted from the cursor."""
        prompts = math.ceil(Fraction(str(epochs)) * self._order.size)
        uses = self._rollouts.group * self._rollouts.passes  # of a prompt: an answer in a step
        # The prompts of a begun batch are all drawn, but some of its steps remain.
        remaining = -self._step % self._rollouts.updates * self._plan.global_batch_size
        return self._plan.steps_for(prompts * uses, self._step, self._sample * uses - remaining)
