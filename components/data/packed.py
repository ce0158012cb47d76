"""Packed dataset: rows of several samples each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import xxhash

from components.data.dataset import Dataset
from components.data.examples import PackedRow

if TYPE_CHECKING:
    from components.data.packing import Plan

_DOCUMENTS_MULTIPLE = 8  # so that document tensors of train and eval batches mostly have one shape


class PackedDataset(Sequence[PackedRow]):
    """The samples of a dataset packed into rows of `seq_len` tokens; the same rows on every rank and for every seed.

    The order shuffles rows, and batch sizes count rows. `documents` is the size of per-document tensors: the largest
    number of samples in a row, plus one for the padding, rounded up.
    """

    def __init__(self, samples: Dataset, seq_len: int) -> None:
        import numpy as np  # here, because checking files on a login node does not need it

        from components.data.packing import plan_rows

        self.seq_len = seq_len
        self.prompts = samples.prompts
        self.pad_token_id = samples.pad_token_id
        self._samples = samples
        self._plan: Plan = plan_rows(samples.lengths, seq_len)
        max_documents = int(np.diff(self._plan.starts).max())
        self.documents = -(-(max_documents + 1) // _DOCUMENTS_MULTIPLE) * _DOCUMENTS_MULTIPLE
        self.facts = replace(samples.facts, rows=len(self), row_tokens=seq_len, max_documents=max_documents)

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
        """Hash of all token ids, labels and the assignment of samples to rows."""
        digest = xxhash.xxh3_128(f"{self._samples.fingerprint} {self.seq_len}".encode())
        digest.update(self._plan.documents.tobytes())
        digest.update(self._plan.starts.tobytes())
        return digest.hexdigest()

    def show(self, index: int) -> str:
        """Return the texts of a row's samples, separated by a line, with the spans that contribute to the loss in
        [[ ]]."""
        return "\n--- next document ---\n".join(self._samples.show(each) for each in self._documents(index))

    def _documents(self, row: int) -> list[int]:
        starts = self._plan.starts
        return self._plan.documents[starts[row] : starts[row + 1]].tolist()
