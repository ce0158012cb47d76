"""Rows of several samples: what a data set is once it is packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import xxhash

from components.data.dataset import Dataset
from components.data.examples import PackedRow

if TYPE_CHECKING:
    from components.data.packing import Plan

_DOCUMENTS_MULTIPLE = 8  # so that the rows of training and evaluation mostly have one shape


class PackedDataset(Sequence[PackedRow]):
    """The samples of a data set in rows of `seq_len` tokens; the same rows on every rank, whatever the seed.

    A row is what an order shuffles and a batch counts. `documents` is the length that tensors of documents have: as
    many as the fullest row holds and the padding after them, rounded up.
    """

    def __init__(self, samples: Dataset, seq_len: int) -> None:
        import numpy as np  # not for those who only look at files

        from components.data.packing import plan_rows

        self.seq_len = seq_len
        self.prompts = samples.prompts
        self.pad_token_id = samples.pad_token_id
        self._samples = samples
        self._plan: Plan = plan_rows(samples.lengths, seq_len)
        most = int(np.diff(self._plan.starts).max())
        self.documents = -(-(most + 1) // _DOCUMENTS_MULTIPLE) * _DOCUMENTS_MULTIPLE
        self.facts = replace(samples.facts, rows=len(self), row_tokens=seq_len, most_documents=most)

    def __len__(self) -> int:
        return len(self._plan.starts) - 1

    @overload
    def __getitem__(self, index: int) -> PackedRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PackedRow]: ...
    def __getitem__(self, index: int | slice) -> PackedRow | list[PackedRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = PackedRow([], [], [])
        for document in self._documents(index % len(self)):
            sample = self._samples[document]
            row.input_ids.extend(sample.input_ids)
            row.labels.extend(sample.labels)
            row.ends.append(len(row.input_ids))
        return row

    @property
    def fingerprint(self) -> str:
        """A hash of every token and label, and of which rows they are in."""
        digest = xxhash.xxh3_128(f"{self._samples.fingerprint} {self.seq_len}".encode())
        digest.update(self._plan.documents.tobytes())
        digest.update(self._plan.starts.tobytes())
        return digest.hexdigest()

    def show(self, index: int) -> str:
        """Return the texts of a row's samples, the part that carries the loss in [[ ]], a line between them."""
        return "\n--- next document ---\n".join(self._samples.show(each) for each in self._documents(index))

    def _documents(self, row: int) -> list[int]:
        starts = self._plan.starts
        return self._plan.documents[starts[row] : starts[row + 1]].tolist()
