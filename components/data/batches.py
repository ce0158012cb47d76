"""Micro-batches of one rank: selection of its rows, collation and padding."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from components.config.schema.data import DataConfig, MixtureDataConfig
from components.config.schema.training import StageConfig, TrainingConfig
from components.data.dataset import Dataset, Facts, ItemSequence, MixtureFacts, TokenValues
from components.data.examples import IGNORED, Example, PackedRow
from components.data.loading import MixtureDataset, MixtureOrder
from components.data.packing import Order, PackedDataset, SampleOrder, deal_rows, describe_dealing
from components.data.pairs import EMPTY_EXAMPLE, PackedPairRow, PackedPairs, PairedRows, RowPair, with_sequences
from components.data.token_store.rows import TokenRows
from components.protocol.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from components.batch import Batch

Row = Example | PackedRow | RowPair | PackedPairRow
Rows = Dataset | PackedDataset | TokenRows | MixtureDataset | PairedRows | PackedPairs

_PREFETCHED_STEPS = 8  # whose rows are fetched from an object store before they are used
_MEASURED_STEPS = 8  # whose costs the banner states
_CUDA_ROUNDING = 128  # multiple to which the length of unpacked rows is rounded up on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Padding of rows to one tensor: on the right, with ignored targets.

    No attention mask is used. Under causal attention (sliding windows included) a token attends only to earlier
    tokens, so real tokens never attend to padding, and targets at padding are ignored. (Bidirectional models would
    need a mask; causal LMs do not.) Without a mask, attention uses its fastest kernels, and rows of only padding do
    not become NaN, as they would if everything were masked. Position ids continue through the padding, because
    Hugging Face models take restarted positions as the start of another document. Router statistics must exclude
    padding; its start follows from the targets, since every sample of a `Dataset` ends with a target token.

    Unpacked rows are padded to the longest row of their micro-batch, which affects speed but no result. Packed rows
    always have the packed length, so shapes are static; position ids restart at each document, and the padding is the
    last document of a row.
    """

    multiple: int = 1
    """Multiple to which lengths are rounded up: lcm(2 x cp, tp)."""
    rounding: int = 1
    """Further multiple to round up to, but not beyond `limit`."""
    limit: int | None = None
    """Maximum length of a sample in tokens; None: unlimited."""
    length: int | None = None
    """Fixed length of every micro-batch, for packed rows; None: that of its longest row, rounded up."""
    token_id: int = 0
    """Input id at padded positions, any token of the vocabulary; a dataset's pad_token_id takes precedence."""
    documents: int = 0
    """Size of per-document tensors of packed rows, including the padding document; 0: rows are not packed."""

    @classmethod
    def on(cls, device: torch.device, multiple: int, seq_len: int) -> Padding:
        """Return the padding of rows of at most `seq_len` tokens for a device.

        On CUDA, lengths are rounded up to multiples of 128 tokens: this fills the tiles of matmul and attention
        kernels, and fewer distinct lengths mean fewer recompilations and less memory fragmentation.
        """
        rounding = _CUDA_ROUNDING if device.type == "cuda" else 1
        return cls(multiple=multiple, rounding=rounding, limit=seq_len)

    def length_of(self, longest: int) -> int:
        """Return the padded length of a micro-batch whose longest row has `longest` tokens."""
        length = self.length
        if length is None:
            rounded = longest + -longest % self.rounding
            length = max(longest, rounded if self.limit is None else min(rounded, self.limit))
        return length + -length % self.multiple

    def of(self, dataset: Sequence[Row]) -> Padding:
        """Return this padding adapted to a dataset: its pad token, and its fixed length if it is packed."""
        padding = self
        if isinstance(dataset, Rows) and dataset.pad_token_id is not None:
            padding = replace(padding, token_id=dataset.pad_token_id)
        if not isinstance(dataset, PackedDataset | TokenRows | MixtureDataset | PackedPairs) or not dataset.documents:
            return padding
        return replace(padding, length=dataset.seq_len, documents=dataset.documents)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Assignment of the rows of each global batch to ranks and micro-batches.

    A global batch is split into `dp_size` contiguous slices, one per dp rank, and each slice into contiguous
    micro-batches. The concatenation of all slices in rank order is therefore the global batch in the order of
    `SampleOrder`, for every dp_size and micro_batch_size; dealing changes the places of the same rows. Ranks that
    differ only in tp, cp or pp have the same dp_rank and read the same rows.
    """

    global_batch_size: int
    """Sequences per optimizer step, over all dp ranks."""
    micro_batch_size: int
    """Sequences per forward pass of one rank."""
    dp_rank: int = 0
    """Data-parallel rank of this process."""
    dp_size: int = 1
    """Number of data-parallel ranks, which read different samples."""
    steps: int = 0
    """Optimizer steps of the whole run; 0: unknown."""
    padding: Padding = Padding()
    """Padding of rows to one tensor."""
    ramp: tuple[tuple[int, int], ...] = ()
    """Stages with smaller batches at the start of the run: (steps from the start of the run to its end, sequences per
    step); `global_batch_size` follows."""
    deals: bool = False
    """Whether rows are dealt to ranks and micro-batches by their cost (`packing.deal_rows`)."""
    pp: int = 1
    """Pipeline ranks that they go through."""
    length_ramp: tuple[tuple[int, int], ...] = ()
    """Stages with shorter rows at the start of the run: (steps from the start of the run to its end, tokens a row)."""
    stages: tuple[StageConfig, ...] = ()
    """Stages of a run on a mixture (data.stages)."""

    def __post_init__(self) -> None:
        for size in (*(size for _, size in self.ramp), self.global_batch_size):
            if size < 1 or size % (self.micro_batch_size * self.dp_size):
                key = "training.global_batch_size" if size == self.global_batch_size else "training.batch_size_ramp"
                raise ConfigError(
                    f"{key}={size}: must be a multiple of "
                    f"training.micro_batch_size x dp = {self.micro_batch_size} x {self.dp_size}"
                )
        if not 0 <= self.dp_rank < self.dp_size:
            raise ValueError(f"dp_rank={self.dp_rank} must be at least 0 and below dp_size={self.dp_size}")

    @classmethod
    def of(
        cls, training: TrainingConfig, data: DataConfig, dp_rank: int, dp_size: int, padding: Padding | None = None
    ) -> BatchPlan:
        """Return the plan of the sections `training` and `data` of a run."""
        stages = data.stages if isinstance(data, MixtureDataConfig) else []
        return cls(
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            steps=training.max_steps or 0,
            padding=padding or Padding(),
            ramp=training.ramp,
            length_ramp=training.length_ramp,
            stages=tuple(replace(each, seq_len=None) if each.seq_len == training.seq_len else each for each in stages),
        )

    def describe(self, unit: str) -> str:
        """Return the arithmetic of the batch as a formula; `unit`: what batch sizes count, in the plural."""
        factors = f"{self.micro_batch_size} micro_batch_size x {self.dp_size} dp x {self.accumulation} accumulation"
        stages = [f"{size} up to step {until}" for until, size in self.ramp]
        stages += [f"rows of {length} tokens up to step {until}" for until, length in self.length_ramp]
        before = f" (before: {', '.join(stages)})" if stages else ""
        return f"{self.global_batch_size} {unit} a step = {factors}{before}"

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step of one rank, after the ramp."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def size_of(self, step: int) -> int:
        """Return the sequences of optimizer step `step` (0-based) over all dp ranks."""
        return next((size for until, size in self.ramp if step < until), self.global_batch_size)

    def length_of(self, step: int) -> int | None:
        """Return the tokens that the rows of optimizer step `step` (0-based) are cut to; None: they are not cut."""
        stage = next((each for each in self.stages if each.until_step is None or step < each.until_step), None)
        if stage is not None and stage.seq_len is not None:
            return stage.seq_len
        return next((length for until, length in self.length_ramp if step < until), None)

    def samples_before(self, step: int) -> int:
        """Return the sequences of all steps before `step` (0-based)."""
        samples, start = 0, 0
        for until, size in self.ramp:
            samples += size * (min(step, until) - start)
            start = min(step, until)
        return samples + self.global_batch_size * (step - start)

    def steps_for(self, samples: int, step: int = 0, used: int = 0) -> int:
        """Return the optimizer steps of a run that uses at least `samples` sequences, at least `step`.

        Args:
            step, used: Optimizer steps done so far, and the sequences they used, with other batch sizes perhaps.
        """
        wanted = samples - used + self.samples_before(step)  # the steps done count as if they had used these sizes
        reached = start = 0
        for until, size in self.ramp:
            if wanted <= reached + size * (until - start):
                return max(step, start - (reached - wanted) // size)  # rounded up
            reached, start = reached + size * (until - start), until
        return max(step, start - (reached - wanted) // self.global_batch_size)

    @property
    def stage_steps(self) -> list[int]:
        """First step (0-based) of each stage."""
        return [0, *(each.until_step or 0 for each in self.stages[:-1])] if self.stages else []

    def facts(self, dataset: Dataset | PackedDataset | TokenRows | MixtureDataset) -> Facts | MixtureFacts:
        """Return the statistics of a dataset, including the epochs over it in the whole run."""
        return dataset.facts.with_passes(self.samples_before(self.steps))


class TrainBatches:
    """Infinite iterator over this rank's micro-batches, one list per optimizer step.

    The cursor is (seed, epoch, sample), where `sample` counts the samples used by all ranks together. It is independent
    of ranks and batch sizes, so a run can resume on another mesh or with another batch size and still uses every sample
    of an epoch exactly once. The size of a batch depends on the number of its step.
    """

    def __init__(
        self,
        dataset: Sequence[Row],
        plan: BatchPlan,
        *,
        seed: int,
        fingerprint: str = "",
        token_values: TokenValues | None = None,
    ) -> None:
        """Start at sample 0 of the order of `seed`.

        Args:
            fingerprint: `Dataset.fingerprint`, compared on resume; empty: a resume compares only the number of samples.
            token_values: Values of the target tokens of the dataset's rows, for `Batch.token_values`; None: none.
        """
        self.dataset = dataset
        """Dataset that the order indexes."""
        self._fingerprint = fingerprint
        self._token_values = token_values
        self._plan = plan
        self._padding = plan.padding.of(dataset)
        has_costs = Dataset | PackedDataset | MixtureDataset
        self._costs = dataset.costs if plan.deals and isinstance(dataset, has_costs) else None
        self._sample = self._step = 0
        self._starts = [plan.samples_before(step) for step in plan.stage_steps]  # first sample of each stage
        self._order = self._order_of(seed)

    def at(self, step: int) -> list[Batch]:
        """Return the micro-batches of optimizer step `step` (0-based), independent of the cursor."""
        return self._from(self._plan.samples_before(step), step)

    def global_batch(self, step: int) -> list[int]:
        """Return the dataset indices of the rows of step `step` (0-based) of all ranks, in order."""
        return self._order.indices(self._plan.samples_before(step), self._plan.size_of(step))

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        batch = self._from(self._sample, self._step)
        self.advance()
        return batch

    def advance(self) -> None:
        """Move the cursor to the next step without assembling a batch."""
        self._sample += self._plan.size_of(self._step)
        self._step += 1

    def upcoming(self, steps: int) -> Iterator[list[Batch]]:
        """Yield the micro-batches of the next `steps` optimizer steps without moving the cursor.

        Only the start is read from the cursor, so another thread may iterate while this one calls `advance`.
        """
        sample, first = self._sample, self._step
        return self._assembled(sample, range(first, first + steps))

    def _samples_before(self, step: int) -> int:
        """Return the samples used before a step; the steps that are done may have had other batch sizes."""
        used = self._sample - self._plan.samples_before(self._step) if step >= self._step else 0
        return self._plan.samples_before(step) + used

    def _begun(self, starts: Sequence[int]) -> list[int]:
        return [start for start, step in zip(starts, self._plan.stage_steps, strict=False) if step <= self._step]

    def _order_of(self, seed: int) -> Order:
        dataset, stages = self.dataset, self._plan.stages
        if isinstance(dataset, MixtureDataset):
            return dataset.order(seed, zip(self._starts, [each.weights for each in stages], strict=True))
        return dataset.order(seed) if isinstance(dataset, TokenRows) else SampleOrder(len(dataset), seed)

    @property
    def balance(self) -> str:
        """Line about the places of rows in the next steps, for the banner; empty if they are not dealt."""
        if (costs := self._costs) is None or (plan := self._plan).dp_size == 1:
            return ""
        steps = [costs(self.global_batch(step)) for step in range(self._step, self._step + _MEASURED_STEPS)]
        return describe_dealing(steps, plan.dp_size, plan.micro_batch_size, evenly=plan.pp > 1)

    def stages(self, steps: int) -> list[tuple[int, int, list[int]]]:
        """Return each stage of a run of `steps` steps: its first step (0-based), its end, and rows of each source."""
        if not isinstance(self._order, MixtureOrder):
            return []
        counts = [self._order.counts(sample) for sample in (*self._starts, self._samples_before(steps))]
        rows = [[b - a for a, b in zip(*each, strict=True)] for each in pairwise(counts)]
        return [(*each, found) for each, found in zip(pairwise([*self._plan.stage_steps, steps]), rows, strict=True)]

    @property
    def epoch(self) -> float:
        """Epochs so far; for a mixture, rows used divided by the rows of all sources."""
        return self._sample / self._order.size

    def steps_for(self, epochs: float) -> int:
        """Return the optimizer steps of a run that uses every sample `epochs` times, counted from the cursor.

        The last step may begin another epoch. For a mixture, an epoch has as many rows as all sources together.
        """
        samples = math.ceil(Fraction(str(epochs)) * self._order.size)  # exact: 1.1 * 50 is above 55 in floats
        return self._plan.steps_for(samples, self._step, self._sample)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor (0-based epoch, samples over all epochs, begun stages' samples) and the data's identity."""
        return {
            "seed": self._order.seed,
            "epoch": self._sample // self._order.size,
            "sample": self._sample,
            "step": self._step,
            "size": self._order.size,
            "fingerprint": self._fingerprint,
            **({"stage_starts": self._begun(self._starts)} if self._plan.stages else {}),
            **({"drawn": self._order.drawn(self._sample)} if isinstance(self._order, MixtureOrder) else {}),
        }

    def load_state_dict(self, state: dict[str, Any], accepted: Collection[str] = ()) -> None:
        """Move the cursor to `state`: the next batches are those that would have followed.

        Args:
            accepted: Keys that may have changed (run.accept_changes). With another seed the rest of the epoch has
                another order, so that some of its samples repeat and others are skipped. With other data the sample
                count continues.

        Raises:
            ConfigError: The samples or the seed changed and the change is not accepted.
        """
        problems = []
        if state["seed"] != self._order.seed and "run.seed" not in accepted:
            problems.append(
                f"run.seed={self._order.seed}: the checkpoint uses the sample order of seed {state['seed']}; set "
                f"run.seed={state['seed']}, or accept another order: run.accept_changes=[run.seed]"
            )
        same = (state["size"], state["fingerprint"]) == (self._order.size, self._fingerprint)
        if not same and not any(key.startswith(("data", "training.seq_len", "model.")) for key in accepted):
            problems.append(
                f"data: the {self._order.size:,} samples differ from the {state['size']:,} of the checkpoint: a file "
                "or the tokenization was changed, even if the config was not; restore it, or accept other samples: "
                "run.accept_changes=[data]"
            )
        if problems:
            raise ConfigError(problems)
        self._sample = state["sample"]
        self._step = state["step"]
        starts = [self._samples_before(step) for step in self._plan.stage_steps]
        known = self._begun(state.get("stage_starts", []))
        self._starts = [*known, *starts[len(known) :]]
        self._order = self._order_of(self._order.seed)
        if isinstance(self._order, MixtureOrder) and (self._plan.stages or "stage_starts" in state):
            self._order.check_drawn(state.get("drawn", {}), self._sample, self._step)

    def _assembled(self, sample: int, steps: range) -> Iterator[list[Batch]]:
        remote = self.dataset if isinstance(self.dataset, ItemSequence) and self.dataset.is_remote else None
        ahead_sample, ahead = sample, steps.start
        for step in steps:
            while remote is not None and ahead < min(step + _PREFETCHED_STEPS, steps.stop):
                remote.prefetch(self._indices(ahead_sample, ahead))
                ahead_sample, ahead = ahead_sample + self._plan.size_of(ahead), ahead + 1
            yield self._from(sample, step)
            sample += self._plan.size_of(step)

    def _indices(self, sample: int, step: int) -> list[int]:
        """Return the dataset indices of this rank's rows of step `step` (0-based), whose first sample is `sample`."""
        plan, rows = self._plan, self._plan.size_of(step)
        if self._costs is None or plan.length_of(step) is not None:
            count = rows // plan.dp_size
            return self._order.indices(sample + plan.dp_rank * count, count)
        indices = np.array(self._order.indices(sample, rows))
        dealt = deal_rows(self._costs(indices), plan.dp_size, plan.micro_batch_size, evenly=plan.pp > 1)
        return indices[dealt[plan.dp_rank].ravel()].tolist()

    def _from(self, sample: int, step: int) -> list[Batch]:
        """Return this rank's micro-batches of step `step` (0-based), whose first sample is `sample`."""
        plan, indices = self._plan, self._indices(sample, step)
        size = plan.micro_batch_size
        parts = [indices[i : i + size] for i in range(0, len(indices), size)]
        batches = [collate([self.dataset[index] for index in part], self._padding) for part in parts]
        if self._token_values is not None:
            values = [[self._token_values.of_row(index) for index in part] for part in parts]
            batches = [batch.with_token_values(rows) for batch, rows in zip(batches, values, strict=True)]
        length = plan.length_of(step)
        if length is None:
            return batches
        longest = max(batch.shape[1] for batch in batches)  # pipelines need as many rows in each micro-batch
        return [batch.pad_to(longest).cut_rows(length) for batch in batches]


class EvalBatches:
    """This rank's micro-batches of one pass over a held-out dataset, in its order; can be iterated repeatedly.

    Every sample is in exactly one micro-batch of one dp rank. All ranks yield the same number of micro-batches, so that
    the collectives of the forward passes match: the last ones are filled with rows of padding, whose targets are all
    ignored and add nothing to loss sums.
    """

    def __init__(self, dataset: Sequence[Row], plan: BatchPlan, token_values: TokenValues | None = None) -> None:
        """`token_values`: values of the target tokens of the dataset's rows; None: none."""
        self.dataset = dataset
        """Held-out dataset."""
        self._plan = plan
        self._token_values = token_values

    @property
    def facts(self) -> Facts | MixtureFacts | str:
        """Statistics of the held-out dataset, for the banner."""
        return self.dataset.facts if isinstance(self.dataset, Rows) else f"{len(self.dataset):,} held-out rows"

    def __len__(self) -> int:
        """Return the number of micro-batches of a pass, the same on every rank."""
        return math.ceil(len(self.dataset) / (self._plan.micro_batch_size * self._plan.dp_size))

    def __iter__(self) -> Iterator[Batch]:
        dataset, plan, size = self.dataset, self._plan, self._plan.micro_batch_size
        padding = plan.padding.of(dataset)
        empty = dataset.empty if isinstance(dataset, PairedRows | PackedPairs) else EMPTY_EXAMPLE
        rows_at_once = size * plan.dp_size
        for number in range(len(self)):
            start = number * rows_at_once + plan.dp_rank * size
            indices = range(start, start + size)
            batch = collate([dataset[i] if i < len(dataset) else empty for i in indices], padding)
            if self._token_values is not None:
                of_none = {name: each[:0] for name, each in self._token_values.of_row(0).items()}
                values = [self._token_values.of_row(i) if i < len(dataset) else of_none for i in indices]
                batch = batch.with_token_values(values)
            yield batch


def collate(rows: Sequence[Row], padding: Padding) -> Batch:
    """Return rows as a batch on the CPU, padded on the right; a pair becomes two rows unless it is packed.

    Raises ConfigError if a row is longer than `padding.length`.
    """
    pairs = [row for row in rows if isinstance(row, RowPair)]
    packed = [row for row in rows if isinstance(row, PackedPairRow)]
    if packed:
        return with_sequences(_collate_rows([row.row for row in packed], padding), packed, padding.documents)
    if not pairs:
        return _collate_rows([row for row in rows if isinstance(row, Example | PackedRow)], padding)
    import torch

    batch = _collate_rows([answer for pair in pairs for answer in (pair.first, pair.second)], padding)
    names = pairs[0].values
    values = {name: [value for pair in pairs for value in pair.values[name]] for name in names}
    return replace(batch, rows={name: torch.tensor(each, dtype=torch.float64) for name, each in values.items()})


def _collate_rows(rows: Sequence[Example | PackedRow], padding: Padding) -> Batch:
    import torch

    from components.batch import Batch

    longest = max(1, *(len(row.input_ids) for row in rows))
    if padding.length is not None and longest > padding.length:
        raise ConfigError(
            f"a sample of {longest} tokens is longer than the packed rows of {padding.length} tokens; truncate it"
        )
    length = padding.length_of(longest)
    input_ids = torch.full((len(rows), length), padding.token_id, dtype=torch.int64)  # (micro_batch, seq)
    labels = torch.full((len(rows), length + 1), IGNORED, dtype=torch.int64)  # (micro_batch, seq + 1)
    for i, row in enumerate(rows):
        input_ids[i, : len(row.input_ids)] = torch.tensor(row.input_ids, dtype=torch.int64)
        labels[i, : len(row.labels)] = torch.tensor(row.labels, dtype=torch.int64)
        if isinstance(row, PackedRow):
            labels[i, len(row.labels)] = row.next_label
    if not padding.documents:
        return Batch.from_labels(input_ids, labels)
    position_ids = torch.arange(length).repeat(len(rows), 1)  # (micro_batch, seq)
    bounds = torch.full((len(rows), padding.documents + 1), length, dtype=torch.int32)
    longest_document = 1
    for i, row in enumerate(rows):
        ends = row.ends if isinstance(row, PackedRow) else [len(row.input_ids)] if row.input_ids else []
        starts = [0, *ends]
        bounds[i, : len(starts)] = torch.tensor(starts, dtype=torch.int32)
        for start, end in zip(starts, [*ends, length], strict=True):
            position_ids[i, start:end] = torch.arange(end - start)
            longest_document = max(longest_document, end - start)
    return Batch.from_labels(
        input_ids,
        labels,
        position_ids=position_ids,
        document_bounds=bounds,
        # Rounded up to a power of two, because compiled layers are recompiled for every distinct value.
        longest_document=1 << (longest_document - 1).bit_length(),
    )
