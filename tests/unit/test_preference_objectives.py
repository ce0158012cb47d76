"""Preference objectives on given log-probabilities: row weights against automatic differentiation of the formulas."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from components import training
from components.config.schema import DpoConfig
from components.config.schema.data import PreferencesDataConfig
from components.config.schema.model import ModelConfig
from components.config.schema.objective import DPOConfig, KTOConfig, ORPOConfig, PairLoss, SimPOConfig
from components.config.schema.parallelism import MeshShape
from components.data.pairs import DESIRABLE
from components.distributed.mesh import Mesh
from components.protocol.errors import ConfigError
from components.training import DPO, KTO, ORPO, SimPO
from components.training.objectives import RowScores, reference_model
from components.training.objectives.chunked_loss import Head, Targets, linear_token_loss
from components.training.objectives.preference import REFERENCE


def scores(log_probs: list[float], reference: list[float], lengths: list[float], desirable: list[float]) -> RowScores:
    def vector(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    values = {REFERENCE: vector(reference), DESIRABLE: vector(desirable)}
    return RowScores(vector(log_probs), vector(lengths), values)


def test_kto_subtracts_the_reference_point_of_all_ranks_without_differentiating_it() -> None:
    """Two answers on this rank, two on another one whose sums arrive by `step_sums`; the last unit is padding."""
    objective = KTO(KTOConfig(beta=0.5, desirable_weight=1.5, undesirable_weight=0.5))
    here = scores([-10, -7, -12, -9, 0, 0], [-11, -9, -10, -12, 0, 0], [5, 4, 6, 3, 0, 0], [1, 1, 0, 0, 0, 0])
    assert objective.step_sums(here).tolist() == [2 + 3, 2]
    weights = objective.weights(here, torch.tensor([6.0, 4.0], dtype=torch.float64))
    point, sigmoid = 6 / 4, lambda value: 1 / (1 + torch.exp(torch.tensor(-value, dtype=torch.float64)))
    good, bad = sigmoid(0.5 * (1 - point)), sigmoid(0.5 * (point - -2))
    assert weights.loss_sum.item() == pytest.approx(float(1.5 * (1 - good) + 0.5 * (1 - bad)), rel=1e-14)
    expected = [float(1.5 * 0.5 * good * (1 - good)), 0, -float(0.5 * 0.5 * bad * (1 - bad)), 0, 0, 0]
    assert weights.factors.tolist() == pytest.approx(expected, rel=1e-14)
    assert weights.every == 2
    assert weights.metrics["kl"].item() == 2 * point  # a sum over the units of this rank
    assert weights.metrics["accuracy"].item() == 1


def test_kto_reference_point_is_at_least_zero() -> None:
    objective = KTO(KTOConfig(beta=0.5))
    here = scores([-10, -9, -12, -9], [-11, -7, -10, -8], [5, 4, 6, 3], [1, 1, 0, 0])
    weights = objective.weights(here, objective.step_sums(here))
    assert weights.metrics["kl"].item() == 0
    with pytest.raises(ValueError, match="step_sums"):
        objective.weights(here)


@pytest.mark.parametrize(
    "objective",
    [
        DPO(DPOConfig(beta=0.3, label_smoothing=0.1)),
        DPO(DPOConfig(beta=0.3, loss=PairLoss.hinge, sft_weight=0.5)),
        DPO(DPOConfig(beta=0.3, loss=PairLoss.ipo)),
        SimPO(SimPOConfig()),
        ORPO(ORPOConfig()),
    ],
)
def test_row_weights_are_minus_the_derivative_of_the_loss(objective: DPO | SimPO | ORPO) -> None:
    rows = ([-10.0, -14, -3, -2, 0, 0], [-11.0, -13, -4, -2.5, 0, 0], [5.0, 4, 6, 3, 0, 0])
    weights = objective.weights(scores(*rows, [0.0] * 6))
    assert weights.factors[4:].tolist() == [0, 0]  # padding
    for row in range(4):
        change = 1e-6
        losses = []
        for sign in (1, -1):
            moved = list(rows[0])
            moved[row] += sign * change
            losses.append(objective.weights(scores(moved, rows[1], rows[2], [0.0] * 6)).loss_sum.item())
        assert weights.factors[row].item() == pytest.approx(-(losses[0] - losses[1]) / (2 * change), abs=1e-8)


def orpo_of_logits(logits: torch.Tensor, targets: torch.Tensor, method: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ORPO's loss of logits (2, seq, vocabulary) and their gradient, as a training step computes them."""
    objective = ORPO(ORPOConfig(beta=0.1))
    identity = torch.eye(logits.shape[-1], dtype=logits.dtype)
    values = logits.clone().requires_grad_()

    def per_token(weights: torch.Tensor | None) -> torch.Tensor:
        if method == "logits":
            loss = objective.token_loss
            return loss.per_token(values, targets) if weights is None else loss.of_logits(values, targets, weights)
        flat = Targets(targets.flatten(), None, None if weights is None else weights.flatten())
        losses = linear_token_loss(
            values.flatten(0, 1), identity, None, flat, Head(), objective.token_loss, per_token=weights is None
        )
        return losses.view(targets.shape) if weights is None else losses

    is_target = targets != -100
    with torch.no_grad():
        log_probs = -per_token(None).double().sum(1)
    rows = objective.weights(RowScores(log_probs, is_target.sum(1).double(), {}))
    per_token(rows.factors[:, None] * is_target).backward()
    return rows.loss_sum, values.grad


@pytest.mark.parametrize("certain", [12.0, 17.0, 40.0])
@pytest.mark.parametrize("method", ["logits", "chunked"])
def test_orpo_of_a_nearly_certain_answer_is_that_of_float64(method: str, certain: float) -> None:
    """The rejected answer's log-probability rounds to 0 in float32; 1 - its probability must not."""
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, 3, -100], [4, 5, 0, -100]])
    logits[1] += certain * torch.nn.functional.one_hot(targets[1].clamp(min=0), 6)
    exact = logits.double().requires_grad_()
    others = exact.scatter(2, targets.clamp(min=0)[..., None], -torch.inf).logsumexp(-1)
    target_logits = exact.gather(2, targets.clamp(min=0)[..., None])[..., 0]
    means = -((others - target_logits).exp().log1p() * (targets >= 0)).sum(1) / 3  # log p = -log(1 + odds of others)
    log_odds = means - (-means.expm1()).log()
    loss = -0.1 * torch.nn.functional.logsigmoid(log_odds[0] - log_odds[1]) - means[0]
    loss.backward()
    ours, gradient = orpo_of_logits(logits, targets, method)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    torch.testing.assert_close(gradient, exact.grad.float(), rtol=1e-4, atol=1e-6)


def test_kto_loss_of_a_large_margin_does_not_round_to_zero() -> None:
    rows = scores([-10, -7], [-60, -7], [5, 4], [1, 1])
    weights = KTO(KTOConfig(beta=1.0)).weights(rows, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert weights.loss_sum.item() == pytest.approx(1 / (1 + math.exp(50)), rel=1e-12, abs=0)
    assert weights.factors[0].item() == pytest.approx(weights.loss_sum.item(), rel=1e-12, abs=0)


def test_orpo_is_finite_for_answers_of_probability_one() -> None:
    weights = ORPO(ORPOConfig()).weights(scores([0.0, 0.0, -1e-18, -3.0], [0.0] * 4, [5.0] * 4, [0.0] * 4))
    assert torch.isfinite(weights.loss_sum)
    assert torch.isfinite(weights.factors).all()


class Pairs:
    """40 pairs as `with_reference` uses them."""

    def __init__(self, fingerprint: str = "a" * 32, count: int = 40) -> None:
        self.fingerprint, self.count = fingerprint, count
        self.values: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return self.count

    def with_values(self, name: str, values: torch.Tensor) -> Pairs:
        copied = Pairs(self.fingerprint, self.count)
        copied.values = {name: values}
        return copied


LOG_PROBS = -torch.rand(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 1


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Append an item to this list for each pass over the pairs, which returns LOG_PROBS."""
    passes: list[int] = []

    def _score_pairs(model: Any, pairs: Pairs, plan: Any) -> torch.Tensor:
        passes.append(len(pairs))
        return LOG_PROBS.clone()

    monkeypatch.setattr(reference_model, "_score_pairs", _score_pairs)
    monkeypatch.setattr(reference_model.data, "pack_pairs", lambda pairs: pairs)
    monkeypatch.setattr(reference_model.models, "has_adapters", lambda module: False)
    return passes


def with_reference(folder: Path, *, resumes: bool, weights: str = "w", pairs: Pairs | None = None) -> torch.Tensor:
    mesh = Mesh(None, MeshShape())
    run = training.RunContext(mesh, torch.device("cpu"), dir=str(folder), resume_from=folder if resumes else None)
    preference = DPO(DPOConfig())
    preference.load_reference, preference.reference_weights = lambda: None, weights
    model: Any = SimpleNamespace(module=None)
    found: Any = reference_model.with_reference(model, pairs or Pairs(), preference, run)
    return found.values[REFERENCE]


def rewritten(file: Path, change: Any, keeps_hash: bool = True) -> None:
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata() if keeps_hash else None
    save_file({name: change(each).contiguous() for name, each in load_file(file).items()}, file, metadata)


DAMAGES = {
    "doubled": lambda each: each * 2,
    "NaN": lambda each: each * math.nan,
    "above 0": lambda each: -each,
    "fewer pairs": lambda each: each[:-3],
    "one answer": lambda each: each[:, 0],
    "int64": lambda each: each.long(),
    "float32": lambda each: each.float(),
    "intact": lambda each: each,
}


@pytest.mark.parametrize("keeps_hash", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_reference_log_probs_are_computed_again(
    damage: str, keeps_hash: bool, tmp_path: Path, scored: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Without a hash, even intact ones are computed again."""
    assert torch.equal(with_reference(tmp_path, resumes=False), LOG_PROBS)
    (file,) = tmp_path.iterdir()
    assert torch.equal(load_file(file)[REFERENCE], LOG_PROBS)
    rewritten(file, DAMAGES[damage], keeps_hash)
    is_used = damage == "intact" and keeps_hash
    assert torch.equal(with_reference(tmp_path, resumes=True), LOG_PROBS)
    assert len(scored) == 1 + (not is_used)
    assert is_used == ("computed again" not in caplog.text)
    assert torch.equal(with_reference(tmp_path, resumes=True), LOG_PROBS)  # the file is intact again
    assert len(scored) == 1 + (not is_used)


def test_every_damaged_byte_of_the_reference_file_is_found(tmp_path: Path, scored: list[int]) -> None:
    with_reference(tmp_path, resumes=False)
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    padding = len(content) - 40 * 16 - 1
    for place in range(0, len(content), 5):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 7
        file.write_bytes(damaged)
        before = len(scored)
        assert torch.equal(with_reference(tmp_path, resumes=True), LOG_PROBS)
        assert len(scored) == before + 1 or content[place : padding + 1].isspace(), place
    for damaged_file in (file.write_bytes, lambda data: os.mkfifo(file)):
        file.unlink()
        damaged_file(content[:-4])
        before = len(scored)
        assert torch.equal(with_reference(tmp_path, resumes=True), LOG_PROBS)
        assert len(scored) == before + 1


def test_reference_log_probs_of_other_weights_or_pairs_are_not_used(tmp_path: Path, scored: list[int]) -> None:
    with_reference(tmp_path, resumes=False)
    message = r"reference-a+\.safetensors: was computed with other base weights, another adapter .*peft.path.*run.dir"
    with pytest.raises(ConfigError, match=message):
        with_reference(tmp_path, resumes=True, weights="other")
    assert scored == [40]
    with_reference(tmp_path, resumes=True, pairs=Pairs("a" * 31 + "b"))  # the name has half of the fingerprint
    assert scored == [40, 40]


def test_identity_of_base_weights_is_that_of_their_content_and_dtype(tmp_path: Path) -> None:
    def identity(folder: Path, **changed: Any) -> str:
        model = ModelConfig(path=str(folder), **changed)
        return reference_model._identity_of_weights(DpoConfig(model=model, data=PreferencesDataConfig(path="x")))

    (tmp_path / "a").mkdir()
    values = torch.arange(1 << 21, dtype=torch.int32)  # 8 MiB: sampled
    save_file({"w": values}, tmp_path / "a" / "model.safetensors")
    first = identity(tmp_path / "a")
    assert identity(tmp_path / "a", compile="false", attention="eager") == first
    assert identity(tmp_path / "a", dtype="bfloat16") != first
    assert identity(tmp_path / "a", config={"rms_norm_eps": 1e-3}) != first
    (tmp_path / "a").rename(tmp_path / "b")
    assert identity(tmp_path / "b") == first
    values[: 1 << 19] += 1  # a quarter of the weights
    save_file({"w": values}, tmp_path / "b" / "model.safetensors")
    assert identity(tmp_path / "b") != first
