"""Score models have the gradients of transformers' AutoModelForSequenceClassification in one process on every mesh."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForSequenceClassification

from components import data, distributed, models, training
from components.config.schema import RewardConfig
from components.data.dataset import Facts
from components.models.classifier import return_token_scores, set_labels
from components.training.objectives.cross_entropy import Classification, Reward
from tests.distributed import curves, grid
from tests.distributed.curves import CP, DDP2, EP, FSDP2, HSDP, PP, TP, Curve
from tests.distributed.parity import Case, compute_in_float64, recipe_config
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import PARITY

GLOBAL_BATCH, STEPS, LR, CENTER = 8, 5, 5e-3, 0.05
CPU = torch.device("cpu")
LABELS = {"classification": 3, "reward": 1}


def reference_model(objective: str, name: str, dtype: torch.dtype, layers: int = 2) -> Any:
    torch.manual_seed(7)
    values = {**grid.values_of(name, layers), "pad_token_id": 0}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    set_labels(config, [f"LABEL_{number}" for number in range(LABELS[objective])])
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    if dtype == torch.float64:
        compute_in_float64(model)
    return model.to(dtype)


def texts() -> list[tuple[list[int], int]]:
    """Token ids of unequal lengths, with labels; some texts end with the pad token, which is not scored."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for index in range(2 * (GLOBAL_BATCH * STEPS + 1)):
        tokens = torch.randint(3, 97, (3 + 5 * index % 17,), generator=generator).tolist()
        found.append((tokens + [0] * (index % 3 == 0), index % 3))
    return found


def dataset(objective: str) -> Any:
    examples = [data.Example([*ids, 0], [*ids, 0]) for ids, _ in texts()]
    labels = [label for _, label in texts()]
    everything = data.Dataset(examples, curves.PadOnlyTokenizer(), facts=Facts("here"), seq_len=32)  # type: ignore[arg-type]
    if objective == "reward":
        return data.ScoredPairs(everything, everything, [(2 * i, 2 * i + 1) for i in range(len(examples) // 2)])
    return data.LabeledTexts(everything, torch.tensor(labels).numpy(), ["a", "b", "c"])


def losses_of(model: Any, objective: str, indices: Any) -> tuple[torch.Tensor, float]:
    """Return the mean loss and accuracy, with transformers' own pooling of one padded row per text."""
    rows = [texts()[row] for i in indices for row in ((2 * i, 2 * i + 1) if objective == "reward" else (i,))]
    longest = max(len(ids) for ids, _ in rows)
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    logits = model(input_ids=padded, attention_mask=(padded != 0).long(), use_cache=False).logits
    if objective == "reward":
        chosen, rejected = logits[0::2, 0], logits[1::2, 0]
        loss = -(chosen - rejected).sigmoid().log() + CENTER * (chosen + rejected) ** 2
        return loss.mean(), float((chosen > rejected).double().mean())
    labels = torch.tensor([label for _, label in rows])
    return F.cross_entropy(logits, labels), float((logits.argmax(1) == labels).double().mean())


def expected(objective: str, plain: Any, steps: int) -> Curve:
    model, count = copy.deepcopy(plain).train(), len(dataset(objective))
    order = data.SampleOrder(count, 5)
    curve = curves.plain_curve(
        model, lambda step: losses_of(model, objective, order.indices(step * GLOBAL_BATCH, GLOBAL_BATCH)), steps, LR
    )
    with torch.no_grad():
        loss, accuracy = losses_of(model, objective, range(count))
    curve.held_out = (loss.item(), accuracy)
    return curve


def train(objective: str, plain: Any, axes: dict[str, Any], steps: int, micro_batch: int, pack: bool = False) -> Curve:
    dtype = next(plain.parameters()).dtype
    cfg = recipe_config(Case("llama", axes))
    mesh = distributed.build_mesh(cfg.parallelism, "cpu")
    model = copy.deepcopy(plain).train()
    return_token_scores(model)
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, cfg.parallelism, dtype)
    called = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout)
    prepared = training.Prepared(
        model, training.StepSettings(device=CPU, max_grad_norm=curves.CLIP, mesh=mesh), called, compute_dtype=dtype
    )
    plan = curves.plan_of(mesh, GLOBAL_BATCH, micro_batch)
    loss = Reward(RewardConfig(center_weight=CENTER), mesh) if objective == "reward" else Classification()
    everything = dataset(objective)
    curve = curves.curve_on_mesh(prepared, loss, data.TrainBatches(everything, plan, seed=5), steps, LR, "accuracy")
    held_out = training.evaluate(prepared, data.EvalBatches(everything, plan), loss)
    assert curve.tokens == [GLOBAL_BATCH * (2 if objective == "reward" else 1)] * steps  # scored tokens
    curve.held_out = (held_out.loss, held_out.metrics["accuracy"])
    return curve


CASES: dict[int, list[dict[str, Any]]] = {
    1: [{"strategy": "single", "dp_shard": 1}],
    2: [
        FSDP2,
        TP,
        {**TP, "sequence_parallel": True},
        CP,
        PP,
        *([{**CP, "cp_attention": "all_gather"}, {**PP, "pp_schedule": "ZBVZeroBubble"}] if PARITY else []),
        *([DDP2] if PARITY else []),
    ],
    4: [HSDP, {**FSDP2, "tp": 2}, {**FSDP2, "cp": 2}, {**TP, "cp": 2}, {**PP, "cp": 2}, {**PP, "tp": 2}],
}
WITH_EXPERTS: dict[int, list[dict[str, Any]]] = {2: [EP], 4: [{**EP, "tp": 2}, {**EP, "dp_shard": 2}]}
RUNS = [(1, "llama"), (2, "llama")]
if PARITY:
    RUNS = [(world, model) for world in CASES for model in ("llama", "qwen3", "gemma3", "mixtral", "qwen3_moe")]


@functools.cache
def reference_step(objective: str, model: str, layers: int) -> tuple[Any, Curve]:
    """Return a model and its curve of one step in one process."""
    plain = reference_model(objective, model, torch.float64, layers)
    return plain, expected(objective, plain, 1)


@pytest.mark.parametrize(("world", "model"), RUNS)
def test_every_mesh_has_the_gradients_of_transformers(world: int, model: str) -> None:
    layers = 4 if PARITY else 2  # ZBVZeroBubble has two stages on each of two ranks
    known = {objective: reference_step(objective, model, layers) for objective in LABELS}
    meshes = [*runnable(CASES[world]), *(WITH_EXPERTS.get(world, []) if model in ("mixtral", "qwen3_moe") else [])]

    def body(rank: int) -> list[str]:
        problems = []
        for number, axes in enumerate(meshes):
            for objective in LABELS if PARITY else [list(LABELS)[number % len(LABELS)]]:
                plain, curve = known[objective]
                got = train(objective, plain, axes, 1, micro_batch=1 + number % 2)
                problems += [f"{objective} {axes}: {each}" for each in curves.differences(got, curve, 1e-10)]
        return problems

    problems = [line for lines in run_ranks(world, body, timeout=400) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))


def test_five_steps_in_float32() -> None:
    plain = reference_model("classification", "llama", torch.float32)
    curve = expected("classification", plain, STEPS)

    def body(rank: int) -> list[str]:
        return curves.differences(train("classification", plain, FSDP2, STEPS, micro_batch=2), curve, 1e-5)

    problems = [line for lines in run_ranks(2, body) for line in lines]
    assert not problems, "\n".join(problems)
