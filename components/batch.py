"""Micro-batch of a rank: output of the collator, input of every forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from components.config.schema.data import IGNORED
from components.config.schema.model import DOCUMENTS, LONGEST_DOCUMENT
from components.protocol.errors import ConfigError

HEAD_KEYWORDS = (
    "targets",
    "token_weight_bits",
    "token_values",
    "target_count",
    "token_loss",
    "output",
)
"""Keywords of a model's forward for the LM head only, which computes the loss (training/objectives/loss_head.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Micro-batch of one rank: full rows, or this rank's shard of each row under cp."""

    input_ids: torch.Tensor  # (rows, seq) int64
    """Tokens, padded on the right."""
    targets: torch.Tensor  # (rows, seq) int64
    """Target of each position: the labels shifted left by one; IGNORED where there is none."""
    position_ids: torch.Tensor | None = None  # (rows, seq) int64
    """Positions within the document, for packed rows and for shards of rows; None: 0 to seq - 1, set by the model."""
    document_bounds: torch.Tensor | None = None  # (rows, documents + 1) int32
    """Bounds of the documents in packed rows: 0, each document's end (padding is the last one), then seq as filler."""
    longest_document: int | None = None
    """Host-side upper bound on the tokens of a document; None: unknown."""
    target_count: int | None = None
    """Host-side upper bound on the number of targets that are not ignored; None: unknown."""
    token_weights: torch.Tensor | None = None  # (rows, seq)
    """Factor of each token's loss; None: 1."""
    token_values: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each (rows, seq, ...)
    """Values per token for the token loss, such as a teacher's hidden states; never passed to decoder layers."""
    layer_inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each (rows, seq, ...) of integers
    """Keyword arguments of every decoder layer."""
    rows: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each (rows, ...)
    """Values per row for the objective, or per sequence (rows, sequences) if it has `sequence_ids`; never passed to the
    model."""
    sequence_ids: torch.Tensor | None = None  # (rows, seq) int64
    """Sequence within its row that a token belongs to, if the objective scores several per row (packed preference
    pairs), from 0 to `sequences` - 1; None: a row is one sequence."""
    sequences: int = 1
    """Sequences per row; those without tokens count."""

    @classmethod
    def from_labels(cls, input_ids: torch.Tensor, labels: torch.Tensor, **others: Any) -> Batch:
        """Return a batch from labels that are aligned with the inputs, as in Hugging Face datasets.

        Labels have the shape of the inputs, (rows, seq), or one more column: the labels of the tokens after the rows.
        The targets are counted for labels on the CPU only, where counting does not make the host wait for a device.
        """
        targets = F.pad(labels[:, 1:], (0, input_ids.shape[1] + 1 - labels.shape[1]), value=IGNORED)
        count = int((targets != IGNORED).sum()) if labels.device.type == "cpu" else None
        return cls(input_ids=input_ids, targets=targets, target_count=count, **others)

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """Return batches of the same length as one batch; host-side bounds are the largest of the batches."""
        first = batches[0]
        return cls(
            input_ids=torch.cat([batch.input_ids for batch in batches]),
            targets=torch.cat([batch.targets for batch in batches]),
            position_ids=_joined([batch.position_ids for batch in batches]),
            document_bounds=_joined([batch.document_bounds for batch in batches]),
            longest_document=_largest([batch.longest_document for batch in batches]),
            target_count=_largest([batch.target_count for batch in batches]),
            token_weights=_joined([batch.token_weights for batch in batches]),
            token_values={key: torch.cat([batch.token_values[key] for batch in batches]) for key in first.token_values},
            layer_inputs={key: torch.cat([batch.layer_inputs[key] for batch in batches]) for key in first.layer_inputs},
            rows={key: torch.cat([batch.rows[key] for batch in batches]) for key in first.rows},
            sequence_ids=_joined([batch.sequence_ids for batch in batches]),
            sequences=first.sequences,
        )

    @staticmethod
    def joined_rows(batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
        """Return the concatenated values per sequence of several batches, by name."""
        joined = {key: torch.cat([batch.rows[key] for batch in batches]) for key in batches[0].rows}
        return joined if batches[0].sequence_ids is None else {key: each.flatten(0, 1) for key, each in joined.items()}

    def sum_sequences(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sums over each sequence's tokens on this rank, (rows, seq) -> (rows x sequences,) in float64."""
        if self.sequence_ids is None:
            return values.double().sum(1)
        # A sum over a mask rather than index_add, whose order of additions differs from run to run on a GPU.
        numbers = torch.arange(self.sequences, device=values.device)
        members = self.sequence_ids[:, None] == numbers[:, None]  # (rows, sequences, seq)
        return (values.double()[:, None] * members).sum(-1).flatten()

    def spread_sequences(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of each token's sequence, (rows x sequences,) -> (rows, seq)."""
        of_rows = values.view(self.shape[0], -1)  # (rows, sequences)
        if self.sequence_ids is None:
            return of_rows.expand(self.shape).contiguous()
        return of_rows.gather(1, self.sequence_ids)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, seq)."""
        rows, seq = self.input_ids.shape
        return rows, seq

    def pinned(self) -> Batch:
        """Return the batch in pinned host memory, from which copies to a GPU do not block the host."""
        pin = torch.Tensor.pin_memory
        return self._map(pin, pin, pin)

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device without blocking the host."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if device.type == "cuda":
                return tensor.pin_memory().to(device, non_blocking=True)  # itself if `ReadAhead` has pinned it
            return tensor.to(device)

        return self._map(move, move, move)

    def with_token_values(self, rows: Sequence[Mapping[str, np.ndarray]]) -> Batch:
        """Return a copy with the values of the targets of each row, and zeros at positions without a target."""
        is_target = (self.targets != IGNORED).numpy()  # (rows, seq)
        token_values = {}
        for name, first in rows[0].items():
            if [len(row[name]) for row in rows] != is_target.sum(1).tolist():
                raise ConfigError(f"{name}: there are not as many stored values as targets; store them again")
            values = np.zeros((*is_target.shape, *first.shape[1:]), first.dtype)
            values[is_target] = np.concatenate([row[name] for row in rows])  # row by row, as a mask selects
            token_values[name] = torch.from_numpy(values)
        return replace(self, token_values=token_values)

    def pad_to(self, seq: int) -> Batch:
        """Pad the rows on the right to `seq` tokens. Raises ValueError for packed rows and for shards of rows."""
        missing = seq - self.input_ids.shape[1]
        if missing == 0:
            return self
        if self.document_bounds is not None or self.position_ids is not None:
            raise ValueError("packed rows and shards of rows cannot be padded")
        weights = self.token_weights
        return replace(
            self,
            input_ids=F.pad(self.input_ids, (0, missing)),
            targets=F.pad(self.targets, (0, missing), value=IGNORED),
            token_weights=None if weights is None else F.pad(weights, (0, missing)),
            token_values={name: _pad_tokens(value, missing) for name, value in self.token_values.items()},
        )

    def cut_rows(self, length: int) -> Batch:
        """Return the rows cut into parts of `length` tokens that do not attend to each other, for host tensors.

        Targets stay: the last token of a part predicts the first token of the next part. Rows become several rows,
        (rows, seq) -> (rows x seq / length, length), padded on the right to a multiple of `length` before. Packed rows
        keep their shape, and their documents end at multiples of `length` too. For batches without values per row or
        token.
        """
        if self.document_bounds is not None:
            return self._cut_documents(self.document_bounds, length)
        seq = self.input_ids.shape[1]
        padded = self.pad_to(seq + -seq % length)
        return replace(padded, input_ids=padded.input_ids.view(-1, length), targets=padded.targets.view(-1, length))

    def _cut_documents(self, bounds: torch.Tensor, length: int) -> Batch:
        rows, seq = self.input_ids.shape
        cuts = torch.arange(length, seq, length, dtype=bounds.dtype).expand(rows, -1)  # (rows, cuts)
        both = torch.cat([bounds, cuts], dim=1).sort(1).values
        is_repeated = F.pad(both[:, 1:] == both[:, :-1], (1, 0))
        both = both.masked_fill(is_repeated, seq).sort(1).values  # (rows, documents + cuts + 1)
        positions = torch.arange(seq).expand(rows, -1).contiguous()  # (rows, seq)
        starts = both.long().gather(1, torch.searchsorted(both.long(), positions, right=True) - 1)
        longest = 1 << (length - 1).bit_length()
        return replace(
            self,
            position_ids=positions - starts,
            document_bounds=both,
            longest_document=min(longest, self.longest_document or longest),
        )

    def at_positions(self, positions: torch.Tensor) -> Batch:
        """Return the tokens at `positions` (seq,) of every row with their position ids: one rank's shard under cp."""

        def select(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(1, positions)

        rows = self.input_ids.shape[0]
        shard = self._map(select, lambda bounds: bounds, lambda values: values)
        return shard if shard.position_ids is not None else replace(shard, position_ids=positions.expand(rows, -1))

    def select_rows(self, rows: slice) -> Batch:
        """Return some of the rows; host-side bounds remain."""

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[rows]

        return self._map(cut, cut, cut)

    def model_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of the model's forward."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, **self.layer_keywords()}
        return inputs if self.position_ids is None else {**inputs, "position_ids": self.position_ids}

    def layer_keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of decoder layers besides hidden states and positions."""
        keywords: dict[str, Any] = dict(self.layer_inputs)
        if self.document_bounds is not None:
            keywords[DOCUMENTS] = self.document_bounds
        if self.longest_document is not None:
            keywords[LONGEST_DOCUMENT] = self.longest_document
        return keywords

    def head_inputs(self) -> dict[str, Any]:
        """Return the keyword arguments of an LM head that computes the loss (components.training.objectives.loss_head).

        Token weights are passed as int64 bits of float64, and token values as `bits_of`, since FSDP2 casts floating
        inputs to its compute dtype.
        """
        inputs: dict[str, Any] = {"targets": self.targets}
        if self.token_weights is not None:
            inputs["token_weight_bits"] = self.token_weights.double().view(torch.int64)
        if self.token_values:
            inputs["token_values"] = {name: bits_of(value) for name, value in self.token_values.items()}
        return inputs

    def _map(self, tokens: Any, bounds: Any, rows: Any) -> Batch:
        """Return the batch with one function each applied to per-token tensors, document bounds and per-row tensors."""
        position_ids, weights, document_bounds = self.position_ids, self.token_weights, self.document_bounds
        return replace(
            self,
            input_ids=tokens(self.input_ids),
            targets=tokens(self.targets),
            position_ids=None if position_ids is None else tokens(position_ids),
            token_weights=None if weights is None else tokens(weights),
            document_bounds=None if document_bounds is None else bounds(document_bounds),
            sequence_ids=None if self.sequence_ids is None else tokens(self.sequence_ids),
            token_values={name: tokens(value) for name, value in self.token_values.items()},
            layer_inputs={name: tokens(value) for name, value in self.layer_inputs.items()},
            rows={name: rows(value) for name, value in self.rows.items()},
        )


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor as integers of its size, which mixed precision does not cast; others as they are.

    The receiver restores it with `tensor.view(dtype)`.
    """
    if not tensor.is_floating_point():
        return tensor
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _pad_tokens(values: torch.Tensor, missing: int) -> torch.Tensor:
    """Pad values per token (rows, seq, ...) on the right with zeros."""
    return F.pad(values, (*(0, 0) * (values.dim() - 2), 0, missing))


def _joined(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(present) if present else None


def _largest(bounds: Sequence[int | None]) -> int | None:
    known = [bound for bound in bounds if bound is not None]
    return max(known) if len(known) == len(bounds) else None
