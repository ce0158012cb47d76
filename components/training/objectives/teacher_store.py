"""Storing of a teacher's most likely tokens for each target token of a dataset (scripts/teacher.py)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from components import data, models
from components.batch import bits_of
from components.config.compute_rules import top_k_problem
from components.config.schema.data import IGNORED
from components.config.schema.recipes import StoreTeacherConfig
from components.config.teacher_files import (
    HASHES,
    LOG_PROBS,
    METADATA,
    REMEDY,
    STARTS,
    TARGET_LOG_PROB,
    TOKEN_IDS,
    TeacherHeader,
    entries_of,
    header_text,
    read_teacher_file,
    teacher_file,
)
from components.distributed.collectives import all_gather
from components.json_collectives import broadcast_json
from components.protocol.errors import ConfigError
from components.protocol.run_files import PRIVATE, atomic_file
from components.storage.tensor_files import BlockHashes, SafetensorsWriter
from components.training.context import RunContext
from components.training.objectives.chunked_loss import chunk_tokens
from components.training.objectives.cross_entropy import log_softmax, sum_over_shards
from components.training.objectives.distillation import TeacherHead, find_top_k
from components.training.objectives.loss_head import vocabulary_of
from components.training.objectives.teacher import Rows, hash_of_vocabulary, head_of, load_teacher, value_problem
from components.training.prepared import Prepared
from components.training.step import last_hidden, local_batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SLOT = "slot"
"""Name in `Batch.token_values` of the number of each target token, while a teacher is stored."""


def build_teacher_store(cfg: StoreTeacherConfig, run: RunContext, tokenizer: PreTrainedTokenizerBase) -> TeacherStore:
    """Load the teacher on the mesh of the run, and return the store that writes to the run directory. A collective.

    Args:
        tokenizer: The student's tokenizer.

    Raises ConfigError if the teacher has another tokenizer or a smaller vocabulary, if the mesh cannot run it, or if
    teacher.top_k exceeds the student's vocabulary.
    """
    vocabulary = vocabulary_of(models.build_on_meta(cfg.model, len(tokenizer)))
    if cfg.teacher.top_k > vocabulary:
        raise ConfigError(top_k_problem(cfg.teacher.top_k, vocabulary))
    header = TeacherHeader(
        samples="",
        tokenizer=hash_of_vocabulary(tokenizer),
        vocabulary=vocabulary,
        top_k=cfg.teacher.top_k,
        temperature=cfg.objective.temperature,
        teacher=str(cfg.teacher.path),
    )
    return TeacherStore(load_teacher(cfg, run, tokenizer, vocabulary), header, run)


class TeacherStore:
    """Storing of a teacher's most likely tokens in the run directory.

    Args:
        teacher: The teacher.
        header: Description of the files, without the fingerprint of the samples.
    """

    def __init__(self, teacher: Prepared, header: TeacherHeader, run: RunContext) -> None:
        self.teacher = teacher
        self._header, self._run = header, run

    @torch.no_grad()
    def store(self, dataset: Rows, split: str) -> None:
        """Write the file of a split, unless it exists already. A collective. A stop request leaves no file.

        Raises ConfigError if the file exists and belongs to other data, another teacher or other settings.
        """
        run, header = self._run, replace(self._header, samples=dataset.fingerprint)
        file = teacher_file(run.dir, split)
        if broadcast_json(file.exists()):
            self._check(file, header)
            run.print(f"{file}: already stored")
            return
        slots = TargetSlots.of(dataset)
        with run.status(f"storing {split}"):
            blocks = self._blocks(dataset, slots)
            if run.rank != 0:
                for _ in blocks:
                    pass
                return
            mass = write_file(file, header, slots, blocks)
        if mass is not None:
            run.print(
                f"{file}: {slots.total:,} target tokens, {file.stat().st_size:,} bytes; the {header.top_k} most likely "
                f"tokens hold {mass:.2%} of the probability"
            )

    def _check(self, file: Path, header: TeacherHeader) -> None:
        """Raise ConfigError unless the existing file was written for the same data with the same settings."""
        try:
            stored = read_teacher_file(file).header
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read ({error}); {REMEDY}") from error
        if stored != header:
            raise ConfigError(
                f"run.dir={self._run.dir}: its {file.name} was stored from other data, another teacher or other "
                f"settings (top_k {stored.top_k}, temperature {stored.temperature:g}, teacher {stored.teacher}); "
                "choose another run.dir"
            )

    def _blocks(self, dataset: Rows, slots: TargetSlots) -> Iterator[dict[str, np.ndarray]]:
        """Yield the values of consecutive target tokens of all ranks, by tensor name. A collective.

        Ends early, before the last target, if any rank has a stop request.
        """
        run, teacher, done = self._run, self.teacher, 0
        settings = teacher.settings
        for host_batch in data.EvalBatches(dataset, run.plan, slots):
            if run.agreed_to_stop():
                return
            batch = local_batch(host_batch.to(run.device), settings)
            hidden, head = last_hidden(teacher, batch), head_of(teacher, self._header.vocabulary)
            is_target = batch.targets != IGNORED
            own = _no_values(self._header.top_k, run.device)
            if hidden is not None and head is not None:
                rows = hidden.to(teacher.compute_dtype)[is_target]  # (targets, hidden)
                stored = self._values(head, rows, batch.targets[is_target])
                if settings.counts_tokens:
                    own = {**stored, _SLOT: batch.token_values[_SLOT][is_target]}
            everyone = {name: torch.cat([each.cpu() for each in all_gather(own[name])]) for name in own}
            order = everyone.pop(_SLOT).sort()
            expected = torch.arange(done, done + len(order.values))
            if not torch.equal(order.values, expected):
                raise RuntimeError("the ranks' target tokens are not those of consecutive rows: this is a bug")
            done += len(expected)
            yield {name: each[order.indices].numpy() for name, each in everyone.items()}

    def _values(self, head: TeacherHead, hidden: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the values of target tokens by tensor name, a chunk of logits at a time. A collective over tp."""
        k, temperature = self._header.top_k, self._header.temperature
        vocabulary, local = head.vocabulary, len(head.weight)
        size = chunk_tokens(vocabulary.largest_shard or local, hidden.device)
        parts = [_no_values(k, hidden.device)]
        for start in range(0, len(hidden), size):
            chunk = slice(start, start + size)
            log_p = log_softmax(head.logits(bits_of(hidden[chunk])), vocabulary.group, False)[0]
            index = (targets[chunk] - vocabulary.first)[:, None]
            is_local = (index >= 0) & (index < local)
            of_targets = log_p.gather(1, index.clamp(0, local - 1)).where(is_local, 0)[:, 0]
            of_targets = sum_over_shards(of_targets, vocabulary.group)
            if temperature != 1:
                log_p = log_softmax(log_p.div_(temperature), vocabulary.group, False)[0]
            top_k = find_top_k(log_p, k, vocabulary)
            columns = {TOKEN_IDS: top_k.ids.int(), LOG_PROBS: top_k.log_probs, TARGET_LOG_PROB: of_targets}
            parts.append({name: each if name == TOKEN_IDS else each.float() for name, each in columns.items()})
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != _SLOT}


class TargetSlots(NamedTuple):
    """Numbers of the target tokens of a dataset, in the order of its rows."""

    starts: np.ndarray  # (rows + 1,) int64
    """Target tokens before each row."""

    @classmethod
    def of(cls, dataset: Rows) -> TargetSlots:
        """Count the targets of all rows."""
        counts = [
            np.count_nonzero(np.asarray(row.labels[1:]) != IGNORED)
            + (isinstance(row, data.PackedRow) and row.next_label != IGNORED)
            for row in dataset
        ]
        return cls(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))

    @property
    def total(self) -> int:
        """All target tokens."""
        return int(self.starts[-1])

    def of_row(self, index: int) -> Mapping[str, np.ndarray]:
        """Return the numbers of a row's targets, for `Batch.token_values`."""
        return {_SLOT: np.arange(self.starts[index], self.starts[index + 1])}


class _StoppedError(Exception):
    """The run stops before the last target token."""


def write_file(
    file: Path, header: TeacherHeader, slots: TargetSlots, blocks: Iterator[dict[str, np.ndarray]]
) -> float | None:
    """Write a file, and return the mean probability of the most likely tokens; None if the blocks end early.

    The file gets its name once it is complete. Raises ConfigError for values that are no probabilities.
    """
    count = slots.total
    entries = entries_of(header, count, len(slots.starts) - 1)
    hashes = {name: BlockHashes() for name in entries}

    def metadata(texts: Mapping[str, str]) -> dict[str, str]:
        return {METADATA: header_text(header), HASHES: json.dumps(texts)}

    written, others = 0, 0.0
    try:
        with atomic_file(file, PRIVATE) as output:  # private because token ids disclose samples, which may be secret
            empty = {name: BlockHashes.placeholder(entry.bytes) for name, entry in entries.items()}
            writer = SafetensorsWriter(output, entries, metadata(empty))
            writer.write(STARTS, [slots.starts.data.cast("B")], hashes[STARTS])
            for block in blocks:
                if problem := value_problem(block, header.vocabulary):
                    raise ConfigError(f"teacher.path={header.teacher}: this model returned {problem}; use another one")
                for name, values in block.items():
                    part = values.tobytes()
                    writer.write_part(name, written * (entries[name].bytes // count), part)
                    hashes[name].update(part)
                written += len(block[TOKEN_IDS])
                others += float(np.exp(block[LOG_PROBS][:, -1].astype(np.float64)).sum())
            if written < count:
                raise _StoppedError
            writer.replace_metadata(metadata({name: each.hexdigest() for name, each in hashes.items()}))
    except _StoppedError:
        return None
    return 1 - others / count


def _no_values(k: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the values of no target tokens."""
    return {
        TOKEN_IDS: torch.empty(0, k, dtype=torch.int32, device=device),
        LOG_PROBS: torch.empty(0, k + 1, device=device),
        TARGET_LOG_PROB: torch.empty(0, device=device),
        _SLOT: torch.empty(0, dtype=torch.int64, device=device),
    }
