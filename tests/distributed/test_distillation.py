"""Distillation has the same curve on every mesh as the formulas in plain PyTorch in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from components import data, distributed, models, training
from components.config.schema.objective import DistillationConfig, Divergence
from components.config.teacher_files import LOG_PROBS, TARGET_LOG_PROB, TOKEN_IDS, TeacherHeader, teacher_file
from components.data.dataset import Facts
from components.json_collectives import all_gather_json, this_rank
from components.training.objectives.distillation import Distillation
from components.training.objectives.teacher import StoredTeacher, _hidden_states_of
from components.training.objectives.teacher_store import TeacherStore
from tests.distributed import curves
from tests.distributed.curves import CP, DDP2, FSDP2, HSDP, PP, TP, Curve
from tests.distributed.parity import MODELS, SMALL, Case, build, recipe_config
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import PARITY

GLOBAL_BATCH, STEPS, LR = 8, 3, 5e-3
CPU = torch.device("cpu")
STUDENT = {**MODELS["llama"], "num_hidden_layers": 4}
TEACHER = {**SMALL, "model_type": "gemma3_text", "hidden_size": 40, "head_dim": 10, "num_hidden_layers": 6,
           "final_logit_softcapping": 5.0, "sliding_window": 8, "query_pre_attn_scalar": 10}  # fmt: skip
"""Another family, hidden size and number of layers, tied embeddings and a transform of the logits."""


def samples() -> data.Dataset:
    """Samples of unequal lengths and numbers of targets."""
    generator = torch.Generator().manual_seed(4)
    examples = []
    for index in range(GLOBAL_BATCH * STEPS + 3):
        tokens = torch.randint(3, 97, (6 + 5 * index % 17,), generator=generator).tolist()
        prompt = 1 + index % 4
        examples.append(data.Example(tokens, [-100] * prompt + tokens[prompt:]))
    return data.Dataset(examples, curves.PadOnlyTokenizer(), facts=Facts("here"), seq_len=32)  # type: ignore[arg-type]


class PlainTopK:
    """The k most likely tokens of a teacher at each target, by plain transformers, a sample at a time."""

    def __init__(self, teacher: Any, k: int, temperature: float) -> None:
        self.rows: list[Mapping[str, np.ndarray]] = []
        for example in samples():
            ids, labels = torch.tensor([example.input_ids]), torch.tensor(example.labels[1:])
            kept = labels >= 0
            with torch.no_grad():
                logits = teacher(input_ids=ids, use_cache=False).logits[0, :-1, :97][kept]
            order = logits.sort(descending=True)
            likely = (order.values / temperature).log_softmax(-1)
            outcomes = torch.cat([likely[:, :k], likely[:, k:].logsumexp(-1, keepdim=True)], dim=1)
            of_targets = -F.cross_entropy(logits, labels[kept], reduction="none")
            self.rows.append(
                {
                    TOKEN_IDS: order.indices[:, :k].int().numpy(),
                    LOG_PROBS: outcomes.float().numpy(),
                    TARGET_LOG_PROB: of_targets.float().numpy(),
                }
            )

    def of_row(self, index: int) -> Mapping[str, np.ndarray]:
        return self.rows[index]


class PackedTopK:
    """The values of a `PlainTopK` in the order of packed rows."""

    def __init__(self, stored: PlainTopK, rows: data.PackedDataset) -> None:
        self._stored, self._rows = stored, rows

    def of_row(self, index: int) -> Mapping[str, np.ndarray]:
        rows = [self._stored.rows[sample] for sample in self._rows._documents(index)]
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def packed_rows(everything: data.Dataset) -> data.PackedDataset:
    """Rows of 32 tokens with one to four samples."""
    return data.PackedDataset(everything, 32)


def sample_order(everything: data.Dataset, packed: bool, steps: int) -> list[list[int]]:
    """Return the samples of each step: GLOBAL_BATCH samples, or those of GLOBAL_BATCH packed rows."""
    rows = packed_rows(everything) if packed else None
    order = data.SampleOrder(len(rows or everything), 5)
    chosen = [order.indices(step * GLOBAL_BATCH, GLOBAL_BATCH) for step in range(steps)]
    return chosen if rows is None else [[each for row in step for each in rows._documents(row)] for step in chosen]


def divergence(kind: Divergence, teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Divergence of logits (tokens, vocabulary), summed over tokens."""
    return divergence_of(kind, teacher.softmax(-1), student.softmax(-1))


def divergence_of(kind: Divergence, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Divergence of probabilities (tokens, outcomes), summed over tokens."""
    if kind == Divergence.forward_kl:
        return (p * (p / q).log()).sum()
    if kind == Divergence.reverse_kl:
        return (q * (q / p).log()).sum()
    middle = (p + q) / 2
    return ((p * (p / middle).log()).sum() + (q * (q / middle).log()).sum()) / 2


def mean_losses(
    student: Any, teacher: Any, cfg: DistillationConfig, indices: Iterable[int], stored: PlainTopK | None = None
) -> torch.Tensor:
    """Means over targets (4,): loss, divergence, both models' cross-entropy; a sample at a time, without padding.

    With `stored`, the teacher's tokens except the most likely ones count as one.
    """
    everything = samples()
    sums, targets = torch.zeros(3, dtype=torch.float64), 0
    for index in indices:
        example = everything[index]
        ids, labels = torch.tensor([example.input_ids]), torch.tensor(example.labels[1:])
        kept = labels >= 0
        with torch.no_grad():
            known = teacher(input_ids=ids, use_cache=False).logits[0, :-1, :97][kept]
        logits = student(input_ids=ids, use_cache=False).logits[0, :-1][kept]
        apart = divergence(cfg.divergence, known / cfg.temperature, logits / cfg.temperature)
        entropies = [F.cross_entropy(each, labels[kept], reduction="sum") for each in (logits, known)]
        if stored is not None:
            likely, outcomes, of_targets = (torch.from_numpy(each) for each in stored.rows[index].values())
            q = (logits / cfg.temperature).softmax(-1)
            of_k = q.gather(1, likely.long())
            rest = q.scatter(1, likely.long(), 0).sum(-1, keepdim=True)
            p = outcomes.double().softmax(-1)  # the float32 values, normalized
            apart = divergence_of(cfg.divergence, p, torch.cat([of_k, rest], dim=1))
            entropies[1] = -of_targets.double().sum()
        sums = sums + torch.stack([apart, *entropies])
        targets += int(kept.sum())
    share = cfg.cross_entropy_weight
    loss = (1 - share) * cfg.temperature**2 * sums[0] + share * sums[1]
    return torch.cat([loss[None], sums]) / targets


def expected(
    student: Any,
    teacher: Any,
    cfg: DistillationConfig,
    stored: PlainTopK | None = None,
    packed: bool = False,
    router_aux: float = 0.0,
    steps: int = STEPS,
    lr: float = LR,
) -> Curve:
    """Curve of plain transformers in one process."""
    model, everything = copy.deepcopy(student).train(), samples()
    order = sample_order(everything, packed, steps)

    def loss_of(step: int) -> tuple[torch.Tensor, float]:
        loss, apart, *_ = mean_losses(model, teacher, cfg, order[step], stored)
        if router_aux:
            loss = loss + router_aux * curves.mean_balance(model, [everything[index] for index in order[step]])
        return loss, apart.item()

    curve = curves.plain_curve(model, loss_of, steps, lr)
    with torch.no_grad():
        _, divergence, *entropies = mean_losses(model, teacher, cfg, range(len(everything)), stored).tolist()
        curve.held_out = (entropies[0], divergence, entropies[1])  # eval_loss is the cross-entropy of the data
    return curve


def prepared(
    plain: Any,
    axes: dict[str, Any],
    *,
    trains: bool,
    mesh: distributed.Mesh | None = None,
    router_aux: float = 0.0,
) -> training.Prepared:
    """Prepare a copy of a model in the dtype of its parameters. mesh: None: build it."""
    dtype = next(plain.parameters()).dtype
    cfg = recipe_config(Case("llama", axes, loss="chunked", router_aux=router_aux))
    mesh = mesh or distributed.build_mesh(cfg.parallelism, "cpu")
    model = copy.deepcopy(plain).train(trains)
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, cfg.parallelism, dtype)
    router_loss = training.attach_routers(model, cfg.model, mesh)
    head = training.attach_loss_head(model, cfg.model, cfg.training, cfg.parallelism, mesh, layout.stages, CPU)
    called = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout) if trains or axes.get("pp") else None
    if not trains:
        model.requires_grad_(False)
    settings = training.StepSettings(
        device=CPU, max_grad_norm=curves.CLIP, mesh=mesh, loss_head=head, routers=router_loss
    )
    return training.Prepared(model, settings, called, compute_dtype=dtype)


def train(
    student: Any,
    teacher: Any,
    axes: dict[str, Any],
    cfg: DistillationConfig,
    micro_batch: int,
    packed: bool = False,
    router_aux: float = 0.0,
    steps: int = STEPS,
    lr: float = LR,
) -> Curve:
    """Train with the teacher, a model on the same mesh or a `PlainTopK`."""
    model = prepared(student, axes, trains=True, router_aux=router_aux)
    mesh, everything = model.settings.mesh, samples()
    rows = packed_rows(everything) if packed else everything
    if isinstance(teacher, PlainTopK):
        stored = PackedTopK(teacher, rows) if isinstance(rows, data.PackedDataset) else teacher
        objective = Distillation(cfg, lambda batches: ([None] * len(batches), None))
    else:
        stored = None
        objective = Distillation(cfg, _hidden_states_of(prepared(teacher, axes, trains=False, mesh=mesh), 97))
    plan = curves.plan_of(mesh, GLOBAL_BATCH, micro_batch)
    batches = data.TrainBatches(rows, plan, seed=5, token_values=stored)
    curve = curves.curve_on_mesh(model, objective, batches, steps, lr, "divergence")
    held_out = training.evaluate(model, data.EvalBatches(rows, plan, stored), objective)
    curve.held_out = (held_out.loss, *held_out.metrics.values())
    return curve


CASES: dict[int, list[dict[str, Any]]] = {
    1: [{"strategy": "single", "dp_shard": 1}],
    2: [
        DDP2,
        FSDP2,
        TP,
        {**TP, "sequence_parallel": True},
        CP,
        PP,
        *([{**CP, "cp_attention": "all_gather"}, {**PP, "pp_schedule": "ZBVZeroBubble"}] if PARITY else []),
    ],
    4: [
        {**FSDP2, "tp": 2, "sequence_parallel": True},  # test_preferences.py has the other axes at each commit
        *([{**PP, "cp": 2}, {**FSDP2, "cp": 2}, {**TP, "cp": 2}, {**PP, "tp": 2}] if PARITY else []),
        *([{**PP, "dp_shard": 2}, HSDP] if PARITY else []),
    ],
}
OBJECTIVES = [
    DistillationConfig(temperature=2.0, cross_entropy_weight=0.25),
    DistillationConfig(divergence=Divergence.reverse_kl, temperature=1.5),
    DistillationConfig(divergence=Divergence.jensen_shannon, cross_entropy_weight=0.5),
]


def chosen(world: int, first: int = 0, meshes: Sequence[dict[str, Any]] = ()) -> list[tuple[int, dict[str, Any], int]]:
    """Return (number, mesh, index of the objective): every objective on every mesh, or one of them in turn.

    Args:
        meshes: At each commit only these; empty: all.
    """
    return [
        (number, axes, index)
        for number, axes in enumerate(runnable(CASES[world]))
        for index in range(len(OBJECTIVES))
        if PARITY or (index == (number + first) % len(OBJECTIVES) and (not meshes or axes in meshes))
    ]


@pytest.mark.parametrize("world", [1, 2, 4] if PARITY else [4])
def test_every_mesh_has_the_curve_of_the_formulas(world: int) -> None:
    student = build("llama", torch.float64, STUDENT)
    sizes = [97, 101, 97]  # the second teacher's vocabulary is padded to more entries than the student's
    teachers = [build("gemma3", torch.float64, {**TEACHER, "vocab_size": size}).eval() for size in sizes]
    work = chosen(world, first=1)
    expected_curves = {index: expected(student, teachers[index], OBJECTIVES[index]) for _, _, index in work}

    def body(rank: int) -> list[str]:
        problems = []
        for number, axes, index in work:
            got = train(student, teachers[index], axes, OBJECTIVES[index], micro_batch=1 + number % 2)
            where = f"{OBJECTIVES[index].divergence} {axes}"
            problems += [f"{where}: {problem}" for problem in curves.differences(got, expected_curves[index])]
        return problems

    problems = [line for lines in run_ranks(world, body, timeout=400) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))


@pytest.mark.parametrize("world", [1, 2, 4] if PARITY else [2])
def test_stored_teacher_has_the_curve_of_the_formulas_on_every_mesh(world: int, tmp_path: Path) -> None:
    student = build("llama", torch.float64, STUDENT)
    teacher = build("gemma3", torch.float64, {**TEACHER, "vocab_size": 101}).eval()
    work = chosen(world, meshes=(TP, PP))
    plain = {index: PlainTopK(teacher, 9, OBJECTIVES[index].temperature) for _, _, index in work}
    expected_curves = {index: expected(student, teacher, OBJECTIVES[index], stored) for index, stored in plain.items()}

    def body(rank: int) -> list[str]:
        problems = []
        for number, axes, index in work:
            cfg, micro_batch = OBJECTIVES[index], 1 + (number + 1) % 2
            got = train(student, plain[index], axes, cfg, micro_batch)
            found = curves.differences(got, expected_curves[index])
            stored = store(teacher, axes, cfg.temperature, micro_batch, tmp_path / f"{number}_{index}")
            found += other_values(stored, plain[index])
            problems += [f"{cfg.divergence} {axes}: {problem}" for problem in found]
        return problems

    problems = [line for lines in run_ranks(world, body, timeout=400) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))


def store(teacher: Any, axes: dict[str, Any], temperature: float, micro_batch: int, folder: Path) -> StoredTeacher:
    """Store the 9 most likely tokens on a mesh, and read them on every rank."""
    folder.mkdir(exist_ok=True)
    known = prepared(teacher, axes, trains=False)
    mesh = known.settings.mesh
    run = training.RunContext(mesh, CPU, this_rank(), str(folder), curves.plan_of(mesh, GLOBAL_BATCH, micro_batch))
    header = TeacherHeader(samples="", tokenizer="", vocabulary=97, top_k=9, temperature=temperature, teacher="")
    TeacherStore(known, header, run).store(samples(), "train")
    all_gather_json(None)  # rank 0 has written the file
    return StoredTeacher(teacher_file(str(folder), "train"))


def other_values(stored: StoredTeacher, plain: PlainTopK) -> list[str]:
    problems = []
    for index, row in enumerate(plain.rows):
        got = stored.of_row(index)
        if not np.array_equal(got[TOKEN_IDS], row[TOKEN_IDS]):
            problems.append(f"tokens of row {index}")
        for name in (LOG_PROBS, TARGET_LOG_PROB):
            if got[name] != pytest.approx(row[name], rel=1e-6):
                problems.append(f"{name} of row {index}")
    return problems
