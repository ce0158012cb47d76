"""The chunked loss on every kind of mesh, against full logits and cross-entropy of plain PyTorch in one process.

float64: the gradient of every parameter within 1e-10 relative. float32: loss and gradient norm within 1e-6. A chunk
holds only a few tokens, so that every case has several chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from components import distributed, training
from components.config.schema.model import LossMethod
from components.planning.parity_reference import Curve
from components.training.objectives import chunked_loss
from tests.distributed import parity
from tests.distributed.parity import SMALL, Case, build, recipe_config, reference, run_case
from tests.distributed.test_parity import DDP, FSDP2, FSDP2_TP2, SP, TP, check
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import PARITY

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": parity.MODELS["llama"],
    "llama_tied": parity.MODELS["llama_tied"],
    "gemma3": {**SMALL, "model_type": "gemma3_text", "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8,
               "final_logit_softcapping": 0.5, "tie_word_embeddings": True},
    "gemma4": {**SMALL, "model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16, "sliding_window": 8,
               "hidden_size_per_layer_input": 0, "final_logit_softcapping": 0.5, "tie_word_embeddings": True},
    "cohere": {**SMALL, "model_type": "cohere", "logit_scale": 0.3, "tie_word_embeddings": True},
    "granite": {**SMALL, "model_type": "granite", "logits_scaling": 3.0, "tie_word_embeddings": False},
    "phi": {**SMALL, "model_type": "phi", "num_key_value_heads": 4, "tie_word_embeddings": False},  # a head with a bias
    # tp replicates its head.
    "stablelm": {**SMALL, "model_type": "stablelm", "tie_word_embeddings": False, "rope_parameters": ROPE},
    "deep": {**parity.MODELS["llama"], "num_hidden_layers": 4},
    "mixtral": parity.MOE_MODELS["mixtral"],
}  # fmt: skip
PP = {"strategy": "fsdp2", "dp_shard": -1, "pp": 2}
CP = {"strategy": "fsdp2", "dp_shard": -1, "cp": 2}
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    # The others are on two ranks.
    1: [(name, {"strategy": "single", "dp_shard": 1}) for name in ("phi", "gemma3", "granite")],
    2: [
        ("phi", DDP),
        ("cohere", FSDP2),
        ("llama", {**FSDP2, "defer_grad_sync": False}),
        ("llama", TP),
        ("llama_tied", {**TP, **SP}),
        ("gemma3", TP),
        ("gemma4", FSDP2),
        ("stablelm", TP),
        ("gemma3", CP),
        ("llama_tied", PP),
        ("deep", {**PP, "pp_schedule": "ZBVZeroBubble"}),
        ("mixtral", FSDP2),
    ],
    4: [
        ("llama_tied", {**FSDP2_TP2, **SP}),
        ("llama", {**PP, "tp": 2, "dp_shard": 1}),
    ],
}
CHUNK = 300
"""Logits per chunk: three tokens with a vocabulary of 97, or six tokens with a half of it under tp."""


def cases(world: int) -> list[Case]:
    chosen = CASES[world] if not PARITY else [(name, mesh) for name in MODELS for _, mesh in CASES[world]]
    found = []
    for index, (name, mesh) in enumerate(chosen):
        accumulation = 4 if mesh.get("pp_schedule") else 2
        aux = 0.1 if name == "mixtral" else 0.0
        case = Case(name, mesh, accumulation, steps=1, router_aux=aux, loss=LossMethod.chunked)
        if PARITY and (("pp" in mesh) != (name == "deep") or ("tp" in mesh and name == "phi")):
            continue
        found.append(case)
        if PARITY or index == 0:
            found.append(replace(case, dtype=torch.float32, steps=3))
    return found


TERMS: dict[int, list[Case]] = {
    world: [
        Case(name, mesh, accumulation, steps=2, loss=loss, label_smoothing=0.1, z_loss=0.02)
        for name, mesh, accumulation, loss in chosen
    ]
    for world, chosen in {
        1: [("gemma3", {"strategy": "single", "dp_shard": 1}, 2, LossMethod.chunked)],
        2: [
            ("llama", FSDP2, 2, LossMethod.logits),
            ("phi", DDP, 2, LossMethod.chunked),
            ("llama_tied", {**TP, **SP}, 2, LossMethod.chunked),
            ("gemma3", TP, 2, LossMethod.chunked),
            ("llama", TP, 2, LossMethod.logits),
            ("gemma3", CP, 2, LossMethod.chunked),
            ("llama_tied", PP, 2, LossMethod.chunked),
            ("llama", PP, 2, LossMethod.logits),
        ],
        4: [("llama", {**PP, "tp": 2, "dp_shard": 1}, 2, LossMethod.chunked)],
    }.items()
}
"""No tp degree divides the vocabulary of 97, so label smoothing runs over unequal shards."""


def run(world: int, work: list[Case], chunk: int = CHUNK) -> list[str]:
    work = runnable(work)
    models = {(case.model, case.dtype): build(case.model, case.dtype, MODELS[case.model]) for case in work}

    def on_rank(rank: int) -> list[tuple[Curve, list[str]]]:
        chunked_loss.CHUNK_LOGITS = {"cpu": chunk, "cuda": chunk}  # in this forked process
        return [run_case(case, models[case.model, case.dtype]) for case in work]

    ranks = run_ranks(world, on_rank, timeout=240)
    problems = []
    expected_curves: dict[tuple[object, ...], Curve] = {}
    for index, case in enumerate(work):
        key = (case.model, case.dtype, case.steps, case.router_aux, case.label_smoothing, case.z_loss)
        if key not in expected_curves:  # it does not depend on the mesh
            expected_curves[key] = reference(case, build(case.model, case.dtype, MODELS[case.model]))
        expected = expected_curves[key]
        for curve, different in (results[index] for results in ranks):
            problems += check(case, expected, curve, different)
            losses = zip(curve.losses, expected.losses, strict=True)
            problems += [f"{case}: loss {a} is not {b}" for a, b in losses if not abs(a - b) <= 1e-6 * b]
        if case.dtype == torch.float64:
            found = set().union(*(results[index][0].gradients for results in ranks))
            problems += [f"{case}: no gradient of {name}" for name in set(expected.gradients) - found]
    return problems


@pytest.mark.parametrize("world", CASES)
def test_chunked_loss_and_gradients_match_full_logits(world: int) -> None:
    problems = run(world, cases(world))
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("world", TERMS if PARITY else [1, 4])
def test_label_smoothing_and_z_loss_match_one_process(world: int) -> None:
    problems = run(world, TERMS[world])
    assert not problems, "\n".join(problems)


def test_auto_avoids_the_logits_that_every_tp_rank_would_gather() -> None:
    """Logits of the whole vocabulary exceed a chunk here, those of a rank's shard do not."""
    model, recipe = build("llama", torch.float32), recipe_config(Case("llama", TP, 1, loss=LossMethod.auto))
    tokens = recipe.training.micro_batch_size * recipe.training.seq_len

    def on_rank(rank: int) -> LossMethod:
        chunked_loss.CHUNK_LOGITS = dict.fromkeys(("cpu", "cuda"), tokens * 97 - 1)  # in this forked process
        mesh = distributed.build_mesh(recipe.parallelism, "cpu")
        sizes = (recipe.training, recipe.parallelism, mesh, None, torch.device("cpu"))
        return training.attach_loss_head(model, recipe.model, *sizes).method

    assert run_ranks(2, on_rank) == [LossMethod.chunked] * 2
