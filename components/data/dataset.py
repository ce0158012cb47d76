"""The tokenized samples of one side (training or held-out), kept as plain integers in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, overload

from components.config.errors import ConfigError
from components.config.schema.data import Overlong
from components.data.examples import Example, render_example, trimmed
from components.data.tokens import Tokens, flattened, shortened

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class Facts:
    """What became of the source's rows on the way to samples."""

    source: str
    """Where they come from: path and split."""
    samples: int = 0
    """Samples that are there."""
    tokens: int = 0
    """Tokens of all samples."""
    target_tokens: int = 0
    """Tokens that carry the loss."""
    truncated: int = 0
    """Samples that were cut to seq_len tokens."""
    dropped_overlong: int = 0
    """Samples left out because they were longer than seq_len (`data.overlong=drop`)."""
    dropped_without_target: int = 0
    """Samples left out because no token with loss was left."""
    dropped_bad_rows: int = 0
    """Rows left out because they had no prompt or no response (`data.bad_rows=drop`)."""
    unused: list[str] = field(default_factory=list)
    """Columns and keys of messages that neither the chat template nor Meshbook uses."""
    rows: int = 0
    """Rows that the samples are packed into; 0: each is a row of its own."""
    row_tokens: int = 0
    """Tokens that a packed row has room for."""
    most_documents: int = 0
    """Samples in the row that has most of them."""
    passes: float = 0.0
    """Over all of it, that a run makes; 0: not known."""

    @property
    def drawn_from(self) -> int:
        """What an order draws from: packed rows, or samples."""
        return self.rows or self.samples

    def after(self, rows: float) -> Facts:
        """Return the same with the passes that so many rows of the order make."""
        return replace(self, passes=rows / self.drawn_from)

    def __str__(self) -> str:
        counted = {
            "cut to seq_len": self.truncated,
            "longer than seq_len dropped": self.dropped_overlong,
            "without a target left dropped": self.dropped_without_target,
            "bad rows dropped": self.dropped_bad_rows,
        }
        total = f"{self.samples:,} samples, {self.tokens:,} tokens, {self.target_tokens:,} with loss"
        parts = [f"{self.source}: {total}", *(f"{count:,} {what}" for what, count in counted.items() if count)]
        if self.rows:
            full = 100 * self.tokens / (self.rows * self.row_tokens)
            parts.append(
                f"packed into {self.rows:,} rows of {self.row_tokens:,} tokens, {full:.2f} % full, "
                f"{self.samples / self.rows:.1f} samples each (at most {self.most_documents:,}); batch sizes count rows"
            )
        parts += [f"not used: {', '.join(self.unused)}"] if self.unused else []
        parts += [f"{self.passes:.2f} passes in the whole run"] if self.passes else []
        return "; ".join(parts)


class Dataset(Sequence[Example]):
    """Samples in the order of their source, 8 bytes per token; `facts` counts them and what was left out.

    A sample longer than `seq_len` is cut on the right, dropped or refused, as `overlong` says; one that is
    left without a target token is dropped. Every sample ends with a target token (see `trimmed`).
    `prompts` holds questions of the source as they were asked, to show what the model answers to them.
    """

    def __init__(
        self,
        examples: Iterable[Example] | Tokens,
        tokenizer: PreTrainedTokenizerBase,
        *,
        facts: Facts,
        seq_len: int,
        overlong: Overlong = Overlong.truncate,
        prompts: Sequence[str] = (),
    ) -> None:
        self.facts = facts
        self.prompts = prompts
        self.pad_token_id: int | None = tokenizer.pad_token_id
        """Input at padded positions."""
        self.sources: np.ndarray
        """Of each sample, its place among the samples before any was left out, (samples,) int64."""
        self._tokenizer = tokenizer
        whole = examples if isinstance(examples, Tokens) else flattened(trimmed(example) for example in examples)
        self._tokens = self._fitted(whole, seq_len, overlong)

    def __len__(self) -> int:
        return len(self._tokens.starts)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        ids, labels, starts, stops = self._tokens
        sample = slice(starts[index % len(self)], stops[index % len(self)])
        return Example(ids[sample].tolist(), labels[sample].tolist())

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, (samples,) int64."""
        return self._tokens.stops - self._tokens.starts

    @property
    def fingerprint(self) -> str:
        """A hash of every token and label: equal where, and only where, the samples are."""
        return self._tokens.fingerprint

    def show(self, index: int) -> str:
        """Return the text of a sample, the part that carries the loss in [[ ]]."""
        return render_example(self._tokenizer, self[index])

    def _fitted(self, tokens: Tokens, seq_len: int, overlong: Overlong) -> Tokens:
        """Return the samples that fit rows of `seq_len` tokens, and count them and the others."""
        import numpy as np

        facts, before = self.facts, tokens.stops - tokens.starts
        long = np.flatnonzero(before > seq_len)
        if len(long) and overlong is Overlong.refuse:
            start, stop = tokens.starts[long[0]], tokens.stops[long[0]]
            begins = self._tokenizer.decode(tokens.ids[start : min(start + 40, stop)].tolist())
            raise ConfigError(
                f"data.overlong=refuse: a sample of {facts.source} has {before[long[0]]:,} tokens, more than "
                f"seq_len={seq_len:,}; raise training.seq_len (in evaluate.py evaluation.seq_len), or set "
                f"data.overlong to truncate or drop; the sample begins {begins!r}"
            )
        fitted, after = shortened(tokens, seq_len, drop=overlong is Overlong.drop)
        if overlong is Overlong.drop:
            facts.dropped_overlong = len(long)
        else:
            facts.truncated = int(np.count_nonzero(after[long]))
        self.sources = np.flatnonzero(after > 0)
        facts.samples = len(fitted.starts)
        facts.dropped_without_target = len(before) - facts.samples - facts.dropped_overlong
        facts.tokens = int(after.sum())
        facts.target_tokens = fitted.targets
        return fitted


class HasPrompts(Protocol):
    """A data set that knows the questions of its source."""

    @property
    def prompts(self) -> Sequence[str]: ...


def sample_prompts(dataset: HasPrompts, count: int) -> list[str]:
    """Return up to `count` of a data set's questions, evenly spread, as they were asked (without a template)."""
    prompts = dataset.prompts
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]
