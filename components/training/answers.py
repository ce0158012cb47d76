"""Answers to prompts, sampled from the model in training: rewards, their file, and the micro-batches of a rank."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors.numpy import load, save

from components.batch import Batch
from components.config.schema.rollouts import Normalization
from components.data.batches import BatchPlan, collate
from components.data.dataset import LINEAR_TOKENS
from components.data.examples import IGNORED, Example, PackedRow
from components.data.packing import deal_rows, documents_size, plan_rows
from components.data.pairs import PackedPairRow
from components.protocol.run_files import PRIVATE, atomic_write, disk_errors_named
from components.storage.tensor_files import OpenFile, read_header
from components.training.objectives.policy import ADVANTAGE, COUNTS, OLD, REFERENCE_TOKENS, summed_rewards

_HASH = "hash"
"""Key of a file's metadata: hash of its tensors and of the other metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers to the prompts of a batch, in the order of their samples; the same on every rank."""

    group: int
    """Answers of each prompt, neighbors of one another."""
    samples: list[int]
    """Number of each prompt in the order of the data, over all epochs."""
    prompts: list[list[int]]
    """Tokens of each prompt."""
    tokens: list[list[int]]
    """Tokens of each answer, at least one, with the stop token if it has ended."""
    ended: list[bool]
    """Whether an answer ended with a stop token; False: it was cut."""
    rewards: np.ndarray  # (functions, answers) float64
    """Rewards by function; NaN: none."""
    log_probs: Mapping[str, list[np.ndarray]] = field(default_factory=dict)
    """Log-probabilities of each answer's tokens, (tokens,) float64, by name: OLD, REFERENCE_TOKENS."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each answer."""
        return [len(tokens) for tokens in self.tokens]

    def scores(self, weights: Sequence[float]) -> np.ndarray:
        """Return the reward of each answer, (answers,): the weighted sum over functions; NaN: none.

        `weights`: reward.weights.
        """
        return summed_rewards(self.rewards, weights, Normalization.sum_then_normalize, self.group)

    def select(self, groups: Sequence[int]) -> Answers:
        """Return the answers to some of the prompts."""
        places = [place for number in groups for place in range(number * self.group, (number + 1) * self.group)]
        return replace(
            self,
            samples=[self.samples[number] for number in groups],
            prompts=[self.prompts[number] for number in groups],
            tokens=[self.tokens[place] for place in places],
            ended=[self.ended[place] for place in places],
            rewards=self.rewards[:, places],
            log_probs={name: [each[place] for place in places] for name, each in self.log_probs.items()},
        )

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """Return the answers of several parts as one, without log-probabilities."""
        return cls(
            group=parts[0].group,
            samples=[each for part in parts for each in part.samples],
            prompts=[each for part in parts for each in part.prompts],
            tokens=[each for part in parts for each in part.tokens],
            ended=[each for part in parts for each in part.ended],
            rewards=np.concatenate([part.rewards for part in parts], axis=1),
        )

    def write(self, file: Path, metadata: Mapping[str, Any]) -> None:
        """Write the answers atomically, readable by their owner only, since texts may be secret. Raises OSError."""
        arrays: dict[str, np.ndarray] = {
            "samples": np.array(self.samples, np.int64),
            "prompt_tokens": np.array([token for each in self.prompts for token in each], np.int32),
            "prompt_lengths": np.array([len(each) for each in self.prompts], np.int64),
            "tokens": np.array([token for each in self.tokens for token in each], np.int32),
            "lengths": np.array(self.lengths, np.int64),
            "ended": np.array(self.ended, np.uint8),
            "rewards": np.ascontiguousarray(self.rewards, np.float64),
            **{name: np.concatenate(each) for name, each in self.log_probs.items()},
        }
        stated = {"group": str(self.group), **{name: json.dumps(value) for name, value in metadata.items()}}
        stated[_HASH] = _hash_of(arrays, stated)
        with disk_errors_named(file):
            file.parent.mkdir(exist_ok=True)
            atomic_write(file, save(arrays, stated), PRIVATE)

    @classmethod
    def read(cls, file: Path) -> tuple[Answers, dict[str, Any]]:
        """Return the answers in a file, and its metadata. Raises OSError, or ValueError if it is damaged."""
        opened = OpenFile(file)
        stated = dict(read_header(opened).metadata)
        arrays = load(opened.read(opened.size, 0))
        hashed = stated.pop(_HASH, "")
        if hashed != _hash_of(arrays, stated):
            raise ValueError("its hash differs from that of its content")
        lengths = arrays["lengths"].tolist()
        answers = cls(
            group=int(stated.pop("group")),
            samples=arrays["samples"].tolist(),
            prompts=[each.tolist() for each in _split(arrays["prompt_tokens"], arrays["prompt_lengths"].tolist())],
            tokens=[each.tolist() for each in _split(arrays["tokens"], lengths)],
            ended=arrays["ended"].astype(bool).tolist(),
            rewards=arrays["rewards"],
            log_probs={name: _split(arrays[name], lengths) for name in (OLD, REFERENCE_TOKENS) if name in arrays},
        )
        return answers, {name: json.loads(value) for name, value in stated.items()}


def _hash_of(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    digest = xxhash.xxh3_128(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(name.encode() + arrays[name].tobytes())
    return digest.hexdigest()


def _split(values: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    return np.split(values, np.cumsum(lengths)[:-1]) if lengths else []


class _Row(NamedTuple):
    """Row of one answer or several, with the values of its targets and of its answers, by name."""

    row: PackedRow
    of_targets: Mapping[str, np.ndarray]  # each (targets,)
    of_answers: Mapping[str, list[float]]


def micro_batches(
    answers: Answers,
    plan: BatchPlan,
    values: Mapping[str, Sequence[np.ndarray]],
    *,
    masked: Sequence[bool] = (),
    packed: int | None = None,
) -> list[Batch]:
    """Return this rank's micro-batches of answers with their prompts, whose targets are the sampled tokens.

    Rows are dealt to ranks and micro-batches by their cost (data.balance); empty ones fill the last micro-batches.

    Args:
        plan: Of the run, with the padding of rows.
        values: Values of each answer's tokens by name, for `Batch.token_values`. `Batch.rows` gets that of ADVANTAGE
            and the sum of OLD for whole answers.
        masked: Whether an answer has no targets; empty: each has.
        packed: Length in tokens of rows of several answers; None: an answer is a row.
    """
    texts = [answers.prompts[place // answers.group] + tokens for place, tokens in enumerate(answers.tokens)]
    parts, padding = [[place] for place in range(len(texts))], plan.padding
    if packed is not None:
        row_plan = plan_rows([len(text) for text in texts], packed)
        parts = [row_plan.documents[start:stop].tolist() for start, stop in pairwise(row_plan.starts.tolist())]
        padding = replace(padding, length=packed, documents=documents_size(max(map(len, parts))))
    # Any schedule of a pipeline takes a multiple of twice its ranks.
    filled = plan.micro_batch_size * plan.dp_size * (2 * plan.pp if packed is not None and plan.pp > 1 else 1)
    parts += [[]] * (-len(parts) % filled)
    costs = np.array([sum(len(texts[place]) * (len(texts[place]) + LINEAR_TOKENS) for place in part) for part in parts])
    places = np.arange(len(parts)).reshape(plan.dp_size, -1, plan.micro_batch_size)
    if plan.deals:
        places = deal_rows(costs, plan.dp_size, plan.micro_batch_size, evenly=plan.pp > 1)
    batches = []
    for numbers in places[plan.dp_rank].tolist():
        rows = [_row_of(answers, texts, parts[number], values, masked) for number in numbers]
        if packed is None:
            batch = collate([Example(*each.row[:2]) for each in rows], padding)
            names = rows[0].of_answers
            of_rows = {name: [(each.of_answers[name] or [0.0])[0] for each in rows] for name in names}
            batch = replace(
                batch, rows={name: torch.tensor(each, dtype=torch.float64) for name, each in of_rows.items()}
            )
        else:
            batch = collate([PackedPairRow(each.row, each.of_answers) for each in rows], padding)
        batches.append(batch.with_token_values([each.of_targets for each in rows]))
    return batches


def _row_of(
    answers: Answers,
    texts: Sequence[list[int]],
    places: Sequence[int],
    values: Mapping[str, Sequence[np.ndarray]],
    masked: Sequence[bool],
) -> _Row:
    """Return the row of some answers. texts: the tokens of each answer after those of its prompt."""
    row = PackedRow([], [], [])
    for place in places:
        tokens = answers.tokens[place]
        row.input_ids.extend(texts[place])
        row.labels.extend([IGNORED] * (len(texts[place]) - len(tokens)))
        row.labels.extend([IGNORED] * len(tokens) if masked and masked[place] else tokens)
        row.ends.append(len(row.input_ids))
    kept = [place for place in places if not (masked and masked[place])]
    of_targets = {
        name: np.concatenate([each[0][:0], *(each[place] for place in kept)]) for name, each in values.items()
    }
    of_answers = {COUNTS: [1.0] * len(places)}
    if ADVANTAGE in values:
        of_answers[ADVANTAGE] = [float(values[ADVANTAGE][place][0]) for place in places]
    if OLD in values:
        of_answers[OLD] = [math.fsum(values[OLD][place]) for place in places]
    return _Row(row, of_targets, of_answers)
