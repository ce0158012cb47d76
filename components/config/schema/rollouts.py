"""`rollouts`, `reward` and `data=prompts`: what recipes/grpo.py samples, and how answers are rewarded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from components.config.schema.data import DataKind, Overlong, RowsDataConfig
from components.protocol.errors import IMPORT_PATH, above, at_least, distinct_names, raise_all, within

_FILE_FUNCTION = re.compile(r".+\.py:[A-Za-z_]\w*")
"""A function in a file: rewards.py:score."""
_DEFAULT_FORMAT = r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*"


class CutAnswers(StrEnum):
    """Answers without an end, which rollouts.max_new_tokens cut. keep: train on them as on others; mask: not on their
    tokens; penalty: subtract from the reward of those that come close to the limit."""

    keep = "keep"
    mask = "mask"
    penalty = "penalty"


class GroupFilter(StrEnum):
    """Prompts that are left out. none: no prompt; zero_variance: those whose answers all have the same reward."""

    none = "none"
    zero_variance = "zero_variance"


class RewardName(StrEnum):
    """Reward functions that ship with Meshbook.

    gsm8k: the number after ####, or else the last one, is that of the data; number: the last number is; exact: the
    whole answer is that of the data; regex: `pattern` is found, and its first group, if it has one, is the answer of
    the data; format: `format` matches the whole answer; length: 1 - tokens / rollouts.max_new_tokens.
    """

    gsm8k = "gsm8k"
    number = "number"
    exact = "exact"
    regex = "regex"
    format = "format"  # type: ignore[assignment]  # hides str.format, which nothing calls
    length = "length"


class Normalization(StrEnum):
    """Order in which the rewards of several functions become one advantage."""

    sum_then_normalize = "sum_then_normalize"
    normalize_then_sum = "normalize_then_sum"


@dataclass(kw_only=True, slots=True)
class PromptsDataConfig(RowsDataConfig):
    """One prompt per row, for recipes/grpo.py, which samples answers. Reward functions receive the other columns."""

    kind: DataKind = DataKind.prompts
    """prompts."""
    overlong: Overlong = Overlong.drop
    """Prompts that leave no room for rollouts.max_new_tokens in training.seq_len: drop (skip and count them) or refuse
    (fail the run)."""
    prompt_column: str = "prompt"
    """Column that holds the prompt: a text, or a list of messages that ends with the one to answer. A column system
    holds the system message."""
    answer_column: str | None = None
    """Column that reward functions receive as `answer`; null: the column answer, if there is one."""
    system_prompt: str | None = None
    """System message inserted before prompts without one; null: the default of the chat template."""
    tools_column: str | None = "tools"
    """Optional column with the tools of a prompt: a list of JSON schemas, or the same as JSON text; null: none."""
    template_kwargs_column: str | None = "chat_template_kwargs"
    """Optional column with further variables for the chat template, an object or the same as JSON text; null: none."""

    def _problems(self) -> list[str]:
        columns = {
            "prompt_column": self.prompt_column,
            "answer_column": self.answer_column,
            "tools_column": self.tools_column,
            "template_kwargs_column": self.template_kwargs_column,
        }
        return RowsDataConfig._problems(self) + distinct_names("data", columns)


@dataclass(kw_only=True, slots=True)
class RolloutsConfig:
    """Answers that recipes/grpo.py samples from the model in training."""

    group: int = 8
    """Answers of each prompt, at least 2. training.global_batch_size counts answers, and must be a multiple of it."""
    max_new_tokens: int = 256
    """Maximum length of an answer in tokens, at least 1. training.seq_len must hold it with its prompt."""
    temperature: float = 1.0
    """Temperature of sampling, greater than 0. All log-probabilities of the loss are those at this temperature."""
    rows: int = 64
    """Most answers that a process samples at once, at least 1. Fewer need less memory for keys and values, and more
    time."""
    batches: int = 1
    """Optimizer steps that each batch of answers is divided into, at least 1. More than one are off-policy: the answers
    are of the weights before the first of these steps."""
    passes: int = 1
    """Times that each answer is trained on, at least 1."""
    overlong: CutAnswers = CutAnswers.keep
    """Answers without an end: keep; mask (no loss on their tokens; the mean over answers counts them, the mean over
    tokens does not); penalty: 0 up to max_new_tokens - overlong_margin tokens, from there linearly to -1, added to the
    reward."""
    overlong_margin: int = 0
    """Tokens below max_new_tokens at which the penalty begins."""
    filter: GroupFilter = GroupFilter.none
    """zero_variance: leave out prompts whose answers all have the same reward, which teach nothing, and sample further
    prompts until the step is full (DAPO's dynamic sampling)."""
    max_draws: int = 3
    """With filter: most prompts that are sampled for a step, as a multiple of those it trains on. If they do not
    suffice, prompts whose answers have the same reward fill the step."""
    replay: str | None = None
    """Run directory whose stored answers and rewards to train on, on any mesh and in any precision; only answers to
    held-out prompts are sampled then. null: sample."""

    def __post_init__(self) -> None:
        problems = [
            *at_least("rollouts.group", self.group, 2),
            *at_least("rollouts.max_new_tokens", self.max_new_tokens, 1),
            *above("rollouts.temperature", self.temperature, 0),
            *at_least("rollouts.rows", self.rows, 1),
            *at_least("rollouts.batches", self.batches, 1),
            *at_least("rollouts.passes", self.passes, 1),
            *at_least("rollouts.max_draws", self.max_draws, 1),
            *within("rollouts.overlong_margin", self.overlong_margin, 0, self.max_new_tokens),
        ]
        if self.overlong is CutAnswers.penalty and self.overlong_margin == 0:
            problems.append(
                "rollouts.overlong_margin=0: rollouts.overlong=penalty grows over this many tokens below the limit; "
                f"set it, for example to {max(1, self.max_new_tokens // 4)}"
            )
        elif self.overlong is not CutAnswers.penalty and self.overlong_margin:
            problems.append(
                f"rollouts.overlong_margin={self.overlong_margin}: has no effect with rollouts.overlong="
                f"{self.overlong}; remove it, or set rollouts.overlong=penalty"
            )
        if self.replay is not None and self.filter is not GroupFilter.none:
            problems.append(
                f"rollouts.filter={self.filter}: rollouts.replay={self.replay} trains on the groups that the other run "
                "stored, filtered or not; remove it"
            )
        raise_all(problems)

    @property
    def updates(self) -> int:
        """Optimizer steps that use each batch of answers."""
        return self.batches * self.passes


@dataclass(kw_only=True, slots=True)
class RewardFunctionsConfig:
    """Functions that reward the answers of recipes/grpo.py. Each worker process of a rank calls all of them."""

    functions: list[str] = field(default_factory=lambda: [RewardName.number.value])
    """gsm8k, number, exact, regex, format or length, or your own: mine.py:score or my_package.rewards:score, called as
    score(answers, ...) with lists of equal length. It takes any of prompts, answer, token_ids, stopped, step and the
    columns of the data by name, and returns a number for each answer, or None for none."""
    weights: list[float] = field(default_factory=list)
    """Factor of each function's reward in the sum; []: 1."""
    normalize: Normalization = Normalization.sum_then_normalize
    """sum_then_normalize: advantages are of the weighted sum; normalize_then_sum: of each function in its group first
    (GDPO), so that a reward of small spread counts as much as another."""
    pattern: str = ""
    """Regular expression of the function regex; its first group, if it has one, must be the answer of the data."""
    format: str = _DEFAULT_FORMAT
    """Regular expression that the function format matches with the whole answer; a dot also matches a line break."""
    timeout_seconds: float = 60.0
    """Seconds that a function may take for the answers of a rank; then its worker is killed, the answers are rewarded
    one by one in as long again (at least 10 s), and those that take too long or are not reached get no reward."""
    max_failures: float = 0.01
    """Share of a batch's answers in [0, 1] that may get no reward because a function raised an error or took too long;
    more of them end the run. With 0.01, one such answer ends it if the batch has fewer than 100."""

    def __post_init__(self) -> None:
        problems = [
            *above("reward.timeout_seconds", self.timeout_seconds, 0),
            *within("reward.max_failures", self.max_failures, 0, 1),
        ]
        if not self.functions:
            problems.append(f"reward.functions=[]: must name a function; choose from {', '.join(RewardName)}")
        if len(set(self.functions)) < len(self.functions):
            problems.append(f"reward.functions={self.functions}: must name each function once")
        problems += [
            f"reward.functions: {name!r} is no function; write one of {', '.join(RewardName)}, or your own as "
            "mine.py:score or my_package.rewards:score"
            for name in self.functions
            if name not in list(RewardName) and not (_FILE_FUNCTION.fullmatch(name) or re.fullmatch(IMPORT_PATH, name))
        ]
        if self.weights and len(self.weights) != len(self.functions):
            problems.append(
                f"reward.weights={self.weights}: must have one weight for each of the {len(self.functions)} "
                "reward.functions; correct either, or set reward.weights=[]"
            )
        problems += [problem for weight in self.weights for problem in within("reward.weights", weight, -1e6, 1e6)]
        if self.weights and not any(self.weights):
            problems.append(f"reward.weights={self.weights}: every reward counts 0; set one to another number")
        problems += self._pattern_problems()
        raise_all(problems)

    @property
    def retry_seconds(self) -> float:
        """Seconds in which the answers of a rank are rewarded one by one; 10 or more, to restart workers."""
        return max(10.0, self.timeout_seconds)

    def _pattern_problems(self) -> list[str]:
        problems = []
        for key, pattern, name in (
            ("pattern", self.pattern, RewardName.regex),
            ("format", self.format, RewardName.format),
        ):
            try:
                re.compile(pattern)
            except re.error as error:
                problems.append(f"reward.{key}={pattern}: must be a regular expression ({error}); correct it")
                continue
            is_used, default = name.value in self.functions, "" if key == "pattern" else _DEFAULT_FORMAT
            if is_used and not pattern:
                problems.append(f"reward.{key}='': reward.functions has {name}, which needs an expression; set it")
            elif not is_used and pattern != default:
                problems.append(f"reward.{key}={pattern}: has no effect unless reward.functions has {name}; add it")
        return problems
