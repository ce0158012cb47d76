"""The router auxiliary loss and its gradients on every mesh match one process in plain PyTorch.

The reference forwards each sample alone and without padding, and uses the router logits that transformers returns.
float64: the loss of both steps within 1e-12 and the gradient of every parameter within 1e-10, both relative.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.distributed.parity import MOE_MODELS, Case, Curve, build, reference, run_case, samples_of_step
from tests.distributed.test_parity import check
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import in_parity

FULL = {"activation_checkpointing": "full"}
SINGLE = {"strategy": "single", "dp_shard": 1}
FSDP2 = {"strategy": "fsdp2", "dp_shard": -1}
DDP = {"strategy": "ddp", "dp_shard": 1, "dp_replicate": -1}
ONE = {"strategy": "fsdp2", "dp_shard": 1}
EP, TP, CP, PP = ({**ONE, axis: 2} for axis in ("ep", "tp", "cp", "pp"))
SP = {"tp": 2, "sequence_parallel": True}
INTERLEAVED = {**PP, "pp_schedule": "Interleaved1F1B"}
ZBV = {**PP, "pp_schedule": "ZBVZeroBubble"}
SHAPES: dict[int, list[tuple[dict[str, Any], int]]] = {
    1: [(SINGLE, 1), (SINGLE, 2), ({**SINGLE, **FULL}, 2)],
    2: [
        *[(FSDP2, 2), (DDP, 2), (EP, 1), (TP, 1), ({**ONE, **SP}, 2)],
        *[(CP, 2), ({**CP, **FULL}, 1), (PP, 2), ({**INTERLEAVED, **FULL}, 4), (ZBV, 4)],
    ],
    4: [({**EP, **SP, **FULL}, 2), ({**CP, "ep": 2}, 2), ({**CP, "tp": 2}, 1), ({**CP, "pp": 2, **FULL}, 2),
        ({**PP, "ep": 2}, 2)],
}  # fmt: skip
"""World size -> (parallelism, gradient accumulation)."""


def samples(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return samples of unequal lengths and unequal numbers of targets; one has no targets."""
    made = samples_of_step(step)
    made[3][1][:] = -100
    return made


@in_parity
@pytest.mark.parametrize("world_size", SHAPES)
def test_router_loss_and_gradients_match_one_process(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected: dict[str, tuple[torch.nn.Module, Curve]] = {}
    for name in ("mixtral", "qwen3_moe"):
        monkeypatch.setitem(MOE_MODELS, name, {**MOE_MODELS[name], "num_hidden_layers": 4})  # for four stages
        # The coefficient is large, so that the token loss does not hide an error.
        case = Case(name, SINGLE, steps=2, samples=samples, router_aux=0.5)
        model = build(name, torch.float64)
        expected[name] = model, reference(case, copy.deepcopy(model))

    def on_rank(rank: int) -> list[tuple[Case, set[str], list[str]]]:
        found = []
        for shape, accumulation in runnable(SHAPES[world_size]):
            for name, (model, curve) in expected.items():
                case = Case(name, shape, accumulation, steps=2, samples=samples, router_aux=0.5)
                got, different = run_case(case, model)
                problems = check(case, curve, got, different)
                if got.losses != pytest.approx(curve.losses, rel=1e-12):
                    problems.append(f"{case}: losses {got.losses}, not {curve.losses}")
                found.append((case, set(got.gradients), problems))
        return found

    ranks = run_ranks(world_size, on_rank, timeout=240)
    for cases in zip(*ranks, strict=True):
        case = cases[0][0]
        assert not [line for _, _, problems in cases for line in problems], case
        seen = set.union(*(names for _, names, _ in cases))
        assert seen == set(dict(expected[case.model][0].named_parameters())), case
