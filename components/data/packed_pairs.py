"""Preference pairs packed into rows: several pairs per row, each as two neighboring documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import xxhash

from components.conversation import Prompt
from components.data.dataset import Facts, ItemSequence
from components.data.examples import PackedRow
from components.data.packing import documents_size, plan_rows
from components.data.pairs import PairedRows


class PackedPairRow(NamedTuple):
    """A row of several pairs. Documents 2i and 2i + 1 are the first and the second answer of its pair i."""

    row: PackedRow
    values: Mapping[str, list[float]]
    """Values of the documents by name; they become `Batch.rows`."""


class PackedPairs(ItemSequence[PackedPairRow]):
    """The pairs of a data set packed into rows of 2 x `seq_len` tokens, which hold the longest pair.

    The two answers of a pair are in the same row, and so in the same micro-batch. The rows are the same on every rank
    and for every seed. The order shuffles rows, and batch sizes count rows.
    """

    item_name = "row of pairs"

    def __init__(self, pairs: PairedRows, seq_len: int) -> None:
        self.pairs, self.seq_len = pairs, 2 * seq_len
        """`seq_len`: Tokens of a row."""
        answers = [pairs.rows_of(index) for index in range(len(pairs))]
        lengths = [len(first.input_ids) + len(second.input_ids) for first, second in answers]
        self._plan = plan_rows(lengths, self.seq_len)
        most = 2 * int(np.diff(self._plan.starts).max())
        self.documents = documents_size(most)
        """Size of per-document tensors, an even number that includes the document of padding."""
        self.facts: Facts = replace(
            pairs.facts,
            samples=2 * len(pairs),
            tokens=sum(lengths),
            rows=len(self),
            row_tokens=self.seq_len,
            max_documents=most,
        )

    def __len__(self) -> int:
        return len(self._plan.starts) - 1

    def item(self, index: int) -> PackedPairRow:
        """Return the row at `index`."""
        row, values = PackedRow([], [], []), self.empty.values
        for number in self._pairs_of(index):
            pair = self.pairs[number]
            for answer in (pair.first, pair.second):
                row.input_ids.extend(answer.input_ids)
                row.labels.extend(answer.labels)
                row.ends.append(len(row.input_ids))
            for name, (first, second) in pair.values.items():
                values[name].extend((first, second))
        return PackedPairRow(row, values)

    @property
    def empty(self) -> PackedPairRow:
        """Row of padding."""
        return PackedPairRow(PackedRow([], [], []), {name: [] for name in self.pairs.values})

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Prompts of the source."""
        return self.pairs.prompts

    @property
    def pad_token_id(self) -> int | None:
        """Input id at padded positions."""
        return self.pairs.pad_token_id

    @property
    def fingerprint(self) -> str:
        """Hash of all token ids, labels and the assignment of pairs to rows."""
        digest = xxhash.xxh3_128(f"{self.pairs.fingerprint} {self.seq_len}".encode())
        digest.update(self._plan.documents.tobytes())
        digest.update(self._plan.starts.tobytes())
        return digest.hexdigest()

    def show(self, index: int) -> str:
        """Return the texts of a row's pairs, with the spans that contribute to the loss in [[ ]]."""
        return "\n--- next pair ---\n".join(self.pairs.show(each) for each in self._pairs_of(index))

    def _pairs_of(self, row: int) -> list[int]:
        starts = self._plan.starts
        return self._plan.documents[starts[row] : starts[row + 1]].tolist()


def pack_pairs(pairs: PairedRows) -> PairedRows | PackedPairs:
    """Return the pairs in packed rows if they were read with data.pack, else unchanged."""
    return pairs if pairs.packed_seq_len is None else PackedPairs(pairs, pairs.packed_seq_len)
