"""One rank of a run at its real world size, on fake tensors: the functions of a run, and what they would allocate.

`python -m components.planning.simulated_step` simulates the rank that a line of JSON on stdin names. The request has
`recipe` (file of the run's recipe) or `schema` (name of a config class in components.config.schema.recipes), `config`
(its YAML), `world` and `rank`. The answer is a line of JSON on stdout: {"result": ...} or {"problems": [...]}.
"""

from __future__ import annotations

import json
import os
import pkgutil
import resource
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch

from components import data, distributed, training
from components.batch import Batch
from components.checkpoint.tensors import Optimizers, list_optimizers
from components.config.compose.frozen import from_yaml
from components.config.compute_rules import CHUNK_LOGITS
from components.config.schema.cluster import ClusterKind, Device
from components.config.schema.data import LabelsDataConfig
from components.config.schema.objective import (
    DPOConfig,
    KTOConfig,
    PreferenceConfig,
    Reference,
    RewardConfig,
    ScoreConfig,
)
from components.config.schema.optimizer import AdamW8bitConfig
from components.config.schema.recipes import (
    ClassifyConfig,
    DistillConfig,
    DpoConfig,
    FinetuneConfig,
    GrpoConfig,
    TrainConfig,
    score_labels,
    section,
)
from components.config.teacher_files import LOG_PROBS, TARGET_LOG_PROB, TOKEN_IDS
from components.data.pairs import DESIRABLE, PairedRows
from components.distributed.mesh import Mesh
from components.models.build import load_config
from components.planning.fake_rank import (
    FakeRank,
    SavedForBackward,
    StorageTracker,
    fake_process_group,
    in_backward,
    local_bytes,
    parameters_in_use,
)
from components.planning.recipe_lines import RecipeLines, import_recipe, read_lines
from components.planning.simulation import (
    DOCUMENTS,
    PROBLEMS,
    RESULT,
    STORED_TOKENS,
    SimulatedGroup,
    SimulatedRank,
    SimulatedTraffic,
    simulated_config,
)
from components.protocol.errors import EXIT_INVALID, ConfigError, field_values
from components.training.attempt import GarbageCollection
from components.training.objectives.policy import ADVANTAGE, COUNTS, OLD, REFERENCE_TOKENS, WEIGHT
from components.training.objectives.preference import REFERENCE
from components.training.step_cost import Traffic, record_traffic, traffic_table

_CPU = torch.device("cpu")
_FORWARD, _BACKWARD, _UPDATE = "forward", "backward", "update"
"""Phases of a step; the gradient norm and clipping, before the update, count as forward."""


@dataclass(slots=True)
class _Built:
    """What a recipe builds before its first step, on fake tensors."""

    model: training.Prepared
    objective: Any
    optimizer: Optimizers
    batches: list[Batch]
    frozen: int
    """Bytes of a second model."""

    @property
    def tied_head(self) -> torch.nn.Module | None:
        """The last pipeline stage's copy of a tied head."""
        return None if self.model.pipeline is None else self.model.pipeline.tied_head

    @property
    def parameters(self) -> list[torch.Tensor]:
        """This rank's parameters, with the copy of a tied head."""
        head = self.tied_head
        return [*self.model.module.parameters(), *(() if head is None else head.parameters())]

    @property
    def state(self) -> list[torch.Tensor]:
        """The optimizer's state."""
        states = [state for optimizer in list_optimizers(self.optimizer) for state in optimizer.state.values()]
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]


def _simulate_step(cfg: TrainConfig, world: int, rank: int, lines: RecipeLines | None = None) -> SimulatedRank:
    """Simulate two optimizer steps of rank `rank` of `world`, and return what the second allocates and sends.

    The first step creates the optimizer's state. Nothing is allocated or read: neither weights nor data. Call it once
    per process, in which no process group exists.

    Args:
        lines: Those of the run's recipe; None: build what Meshbook's recipe for the class of the config builds.

    Raises ConfigError for a config that a run would refuse on these ranks, or that cannot be simulated.
    """
    torch.set_num_threads(1)
    on_gpu = _runs_on_gpus(cfg)
    cfg, notes = simulated_config(cfg, world, on_gpu)
    fake, tracker = FakeRank(as_cuda=on_gpu), StorageTracker(with_gloo_copies=not on_gpu)
    # The compiler needs values for the update by 8-bit optimizers, the only compiled code that is left in the config.
    eager = torch.compiler.set_stance("force_eager") if isinstance(cfg.optimizer, AdamW8bitConfig) else nullcontext()
    with fake_process_group(rank, world), _chunks_of(on_gpu), eager:
        mesh = distributed.build_mesh(cfg.parallelism, _CPU.type)
        built = _build(cfg, training.RunContext(mesh, _CPU, rank), fake, tracker, lines)
        if on_gpu and cfg.parallelism.cpu_offload:
            tracker.leave_out(built.parameters)
        _step(built, fake, tracker)
        if on_gpu and cfg.parallelism.cpu_offload:
            tracker.leave_out(built.state)
        with _gradients_at_update(built, tracker) as gradients, record_traffic() as traffic:
            saved = _step(built, fake, tracker)
        return _result(built, mesh, gradients[0], saved, tracker, traffic, notes)


def _runs_on_gpus(cfg: TrainConfig) -> bool:
    """Return whether the ranks of a config run on GPUs; those of a batch job do unless cluster.device=cpu."""
    if cfg.cluster.device is not Device.auto:
        return cfg.cluster.device is Device.cuda
    return cfg.cluster.kind is not ClusterKind.local or torch.cuda.is_available()


def build_objective(cfg: TrainConfig, run: Any, model: training.Prepared, vocabulary: int) -> Any:
    """Return the objective as the recipe of the config builds it, with its second model if it has one."""
    match cfg:
        case FinetuneConfig():
            return training.NextToken(cfg.objective)
        case DpoConfig():
            return training.build_preference(cfg, run, model, vocabulary)
        case GrpoConfig():
            return training.build_policy(cfg, run, model, vocabulary)
        case DistillConfig():
            return training.build_distillation(cfg, run, model, None)
        case ClassifyConfig():
            return training.build_scoring(cfg.objective, run.mesh)
    raise TypeError(f"_simulate_step: there is no objective for {type(cfg).__name__}")


def _build(
    cfg: TrainConfig, run: training.RunContext, fake: FakeRank, tracker: StorageTracker, lines: RecipeLines | None
) -> _Built:
    """Build the model, the objective, the optimizer and the micro-batches in the order of a recipe."""
    batches = _synthetic_batches(cfg, run.mesh)
    with fake, tracker:
        if lines is None:
            vocabulary = _vocabulary(cfg)
            model = training.prepare(cfg, run, vocabulary)
            before = tracker.bytes
            objective = build_objective(cfg, run, model, vocabulary)
            frozen = tracker.bytes - before
            optimizer = training.build_optimizer(model, cfg.optimizer)
        else:
            model, optimizer, objective, frozen = lines.build(
                cfg, run, partial(_vocabulary, cfg), lambda: tracker.bytes
            )
        fake.allocates_fakes = True
        return _Built(model, objective, optimizer, [_fake_batch(batch, fake) for batch in batches], frozen)


def _vocabulary(cfg: TrainConfig) -> int:
    return int(load_config(cfg.model).get_text_config().vocab_size)


def _step(built: _Built, fake: FakeRank, tracker: StorageTracker) -> int:
    """Run an optimizer step; return the highest bytes of the tensors saved for the backward."""
    tracker.phase = lambda: _BACKWARD if in_backward() else _FORWARD
    tracker.restart()
    saved = SavedForBackward(lambda: parameters_in_use(built.model.module, built.tied_head))
    # As in a run, objects in reference cycles are not freed within a step.
    with GarbageCollection(every=1), fake, tracker, saved:
        training.train_step(built.model, built.batches, built.optimizer, built.objective)
    return saved.peak


@contextmanager
def _gradients_at_update(built: _Built, tracker: StorageTracker) -> Iterator[list[int]]:
    """Yield a list that gets the bytes of the gradients before the first optimizer's update."""
    gradient_bytes: list[int] = []

    def before_update(*_: Any) -> None:
        tracker.phase = lambda: _UPDATE
        gradient_bytes.append(
            local_bytes(parameter.grad for parameter in built.parameters if parameter.grad is not None)
        )

    hooks = [optimizer.register_step_pre_hook(before_update) for optimizer in list_optimizers(built.optimizer)]
    yield gradient_bytes
    for hook in hooks:
        hook.remove()


def _result(
    built: _Built,
    mesh: Mesh,
    gradients: int,
    saved: int,
    tracker: StorageTracker,
    traffic: Traffic,
    notes: list[str],
) -> SimulatedRank:
    model, peak = built.model, tracker.peak
    groups = distributed.groups_of_mesh(mesh)
    rows = traffic_table(traffic, mesh)
    return SimulatedRank(
        rank=torch.distributed.get_rank(),
        world=torch.distributed.get_world_size(),
        mesh=str(mesh.shape),
        coordinates=mesh.coordinates,
        parameters=local_bytes(built.parameters),
        gradients=gradients,
        optimizer=local_bytes(built.state),
        average=0 if model.average is None else model.average.local_bytes,
        frozen=built.frozen,
        buffers=local_bytes(model.module.buffers()),
        saved=saved,
        peak=peak.bytes,
        peak_operator=peak.operator,
        peak_phase=peak.phase,
        groups=tuple(SimulatedGroup(group.axes, len(group.ranks)) for group in groups),
        traffic=tuple(SimulatedTraffic(row.group, row.operation, row.calls, row.bytes) for row in rows),
        micro_batches=len(built.batches),
        micro_batch_rows=built.batches[0].shape[0],
        cpu_seconds=round(time.process_time(), 1),
        resident_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        notes=(*notes, *(str(note) for note in model.notes if note and str(note))),
    )


@contextmanager
def _chunks_of(on_gpu: bool) -> Iterator[None]:
    """Use a GPU's chunks of the loss on the CPU, which the fake tensors are on, within the context."""
    before = CHUNK_LOGITS["cpu"]
    CHUNK_LOGITS["cpu"] = CHUNK_LOGITS["cuda"] if on_gpu else before
    try:
        yield
    finally:
        CHUNK_LOGITS["cpu"] = before


def _fake_batch(batch: Batch, fake: FakeRank) -> Batch:
    """Return a micro-batch with fake tensors; the host has read before what it needs, the number of targets."""

    def convert(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: convert(each) for name, each in value.items()}
        return fake.fake(value) if isinstance(value, torch.Tensor) else value

    return replace(batch, **{name: convert(value) for name, value in field_values(batch).items()})


class _Tokenizer:
    """The only attribute of a tokenizer that a dataset reads."""

    pad_token_id = 0


def _synthetic_batches(cfg: TrainConfig, mesh: Any) -> list[Batch]:
    """Return the micro-batches of one rank in the largest step of a run, on the host.

    Every row has training.seq_len tokens, and every token but the first is a target; under data.pack a row holds
    `DOCUMENTS` documents.

    Args:
        mesh: This rank's mesh.
    """
    training = cfg.training
    # All dp ranks have equal rows, so the share of one rank is built, and it repeats a few rows.
    plan = data.BatchPlan(
        global_batch_size=training.global_batch_size // mesh.size("dp"),
        micro_batch_size=training.micro_batch_size,
        padding=data.Padding(multiple=mesh.sequence_multiple),
    )
    rows = _rows(cfg)
    stored = isinstance(cfg, DistillConfig) and cfg.teacher.path is None
    batches = data.TrainBatches(rows, plan, seed=0, token_values=_StoredValues(rows) if stored else None).at(0)
    return [_as_answers(batch) for batch in batches] if isinstance(cfg, GrpoConfig) else batches


def _as_answers(batch: Batch) -> Batch:
    """Return a micro-batch with the values of sampled answers."""
    zeros = torch.zeros(batch.shape, dtype=torch.float64)
    of_tokens = dict.fromkeys((ADVANTAGE, OLD, REFERENCE_TOKENS, WEIGHT), zeros)
    return replace(batch, token_values=of_tokens, rows=dict.fromkeys((COUNTS, ADVANTAGE, OLD), zeros[:, 0]))


class _StoredValues:
    """Values of a stored teacher's most likely tokens."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def of_row(self, index: int) -> Mapping[str, np.ndarray]:
        """Return zeros for the targets of a row."""
        targets = np.count_nonzero(np.asarray(self._rows[index].labels[1:]) != data.IGNORED)
        return {
            TOKEN_IDS: np.zeros((targets, STORED_TOKENS), np.int32),
            LOG_PROBS: np.zeros((targets, STORED_TOKENS + 1), np.float32),
            TARGET_LOG_PROB: np.zeros(targets, np.float32),
        }


def _rows(cfg: TrainConfig) -> Any:
    """Return a dataset of one row, or of one pair of answers."""
    objective, seq_len, pack = (
        section(cfg, ScoreConfig) or section(cfg, PreferenceConfig),
        cfg.training.seq_len,
        cfg.data.pack,
    )
    if isinstance(objective, PreferenceConfig | RewardConfig):
        return _pairs(objective, seq_len, pack)
    samples = _samples([seq_len // DOCUMENTS] * DOCUMENTS if pack else [seq_len], seq_len)
    if isinstance(cfg.data, LabelsDataConfig):
        labels = np.zeros(len(samples), dtype=np.int64)
        samples = data.LabeledTexts(samples, labels, score_labels(cfg.data, objective) or ())
    return data.PackedDataset(samples, seq_len) if pack else samples


def _samples(lengths: Sequence[int], seq_len: int) -> data.Dataset:
    rows = [data.Example([1] * length, [1] * length) for length in lengths]
    return data.Dataset(rows, _Tokenizer(), facts=data.Facts("a simulation"), seq_len=seq_len)  # type: ignore[arg-type]


def _pairs(objective: PreferenceConfig | RewardConfig, seq_len: int, pack: bool) -> Any:
    count = DOCUMENTS if pack else 1
    length = 2 * seq_len // (2 * count) if pack else seq_len  # a packed row has 2 x seq_len tokens
    answers, indices = _samples([length] * count, seq_len), [(each, each) for each in range(count)]
    if isinstance(objective, RewardConfig):
        return data.ScoredPairs(answers, answers, indices)
    pairs: PairedRows = data.PairDataset(answers, answers, indices)
    values = torch.zeros(count, 2, dtype=torch.float64)
    if isinstance(objective, KTOConfig):
        pairs = pairs.with_values(DESIRABLE, values)
    if isinstance(objective, DPOConfig | KTOConfig) and objective.reference is Reference.precomputed:
        pairs = pairs.with_values(REFERENCE, values)
    return data.pack_pairs(pairs.to_be_packed(seq_len)) if pack else pairs


def _main() -> int:
    """Answer the request on stdin; return the exit status."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to stderr
    request = json.load(sys.stdin)
    answer: dict[str, object]
    try:
        warnings.filterwarnings("ignore")
        if request["recipe"] is None:
            lines, schema = None, pkgutil.resolve_name(f"components.config.schema.recipes:{request['schema']}")
        else:
            main_of_recipe: Any = import_recipe(Path(request["recipe"]))
            lines, (schema, *_) = read_lines(main_of_recipe), get_type_hints(main_of_recipe).values()
        cfg = from_yaml(request["config"], schema)
        answer = {RESULT: _simulate_step(cfg, request["world"], request["rank"], lines).as_json()}
    except ConfigError as error:
        answer = {PROBLEMS: error.problems}
    with answers:
        json.dump(answer, answers)
    return EXIT_INVALID if PROBLEMS in answer else 0


if __name__ == "__main__":
    sys.exit(_main())
