"""Averages of weights, while training and by scripts/average.py, against float64 arithmetic."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from components import checkpoint, models, training
from components.config.compose.frozen import frozen_text
from components.config.schema import AdamWConfig, FinetuneConfig, ModelConfig, PeftConfig, TrainingConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import WeightInit
from components.config.schema.run import CheckpointConfig, PeftMethod
from components.config.schema.training import EvalWeights
from components.training.prepared import WeightAverage
from scripts._export import sources
from scripts.average import main
from tests.tiny_models import FAMILIES, SIZES, filled
from tests.unit.test_training_step import batch, tiny_model

DECAY = 0.7


def prepared(model: nn.Module, device: str = "cpu", evaluated: EvalWeights = EvalWeights.average) -> training.Prepared:
    settings = training.StepSettings(device=torch.device(device))
    config = TrainingConfig(ema_decay=DECAY, eval_weights=evaluated)
    return training.Prepared(model, settings).with_average(config)


def normalized(weights: list[torch.Tensor], decay: float = DECAY) -> torch.Tensor:
    """Return the average of the weights after each applied step in float64."""
    factors = [decay ** (len(weights) - number) for number in range(1, len(weights) + 1)]
    return sum(factor * each.double() for factor, each in zip(factors, weights, strict=True)) / sum(factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_average_is_that_of_the_weights_after_applied_steps(dtype: torch.dtype) -> None:
    model = tiny_model().to(dtype)
    model.lm_head.weight.requires_grad_(False)
    prepared_model = prepared(model)
    optimizer = training.build_optimizer(model, AdamWConfig(lr=0.05))
    history: list[dict[str, torch.Tensor]] = []
    for step in range(4):  # skipped in the third, as one update alone leaves the average at the weights
        poison = model.model.norm.weight.register_hook(lambda gradient: gradient * math.nan) if step == 2 else None
        numbers = training.train_step(prepared_model, [batch(2, 12)], optimizer)
        if poison is not None:
            poison.remove()
        assert numbers["skipped"].item() == (step == 2)
        if step != 2:
            history.append({name: each.detach().clone() for name, each in model.named_parameters()})
    found = prepared_model.average.tensors
    assert found.pop("average_updates") == 3
    assert "average/lm_head.weight" not in found  # not trained
    assert len(found) == sum(each.requires_grad for each in model.parameters())
    for name, average in found.items():
        assert average.dtype == torch.float32
        expected = normalized([weights[name.removeprefix("average/")] for weights in history])
        torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-7)


def test_skipped_first_step_is_not_counted() -> None:
    model = nn.Linear(3, 2)
    average = WeightAverage(model, DECAY)
    before = model.weight.detach().clone()
    average.update(torch.tensor(1.0))
    assert torch.equal(average.tensors["average/weight"], before)
    with torch.no_grad():
        model.weight.add_(1)
    average.update(torch.tensor(0.0))
    torch.testing.assert_close(average.tensors["average/weight"], before + 1)


def test_update_has_no_host_sync() -> None:
    with torch.device("meta"):
        model = tiny_model()
    prepared_model = prepared(model, "meta")
    training.train_step(prepared_model, [batch(2, 12, "meta")], training.build_optimizer(model, AdamWConfig()))


@pytest.mark.parametrize("evaluated", EvalWeights)
def test_evaluation_uses_the_selected_weights_and_restores_the_trained_ones(evaluated: EvalWeights) -> None:
    model, rows = tiny_model(), batch(3, 12)
    prepared_model = prepared(model, evaluated=evaluated)
    optimizer = training.build_optimizer(model, AdamWConfig(lr=0.05))
    for _ in range(3):
        training.train_step(prepared_model, [rows], optimizer)
    trained = {name: each.detach().clone() for name, each in model.named_parameters()}
    averaged = {name.removeprefix("average/"): each for name, each in prepared_model.average.tensors.items()}
    averaged.pop("average_updates")
    plain = training.Prepared(model, prepared_model.settings)
    loss = {"trained": training.evaluate(plain, [rows]).loss}
    copy = tiny_model()
    copy.load_state_dict(averaged)
    loss["average"] = training.evaluate(training.Prepared(copy, plain.settings), [rows]).loss
    assert abs(loss["trained"] - loss["average"]) > 1e-3

    found = training.evaluate(prepared_model, [rows])
    assert found.loss == loss["trained" if evaluated is EvalWeights.trained else "average"]
    assert dict(found.metrics) == ({"loss_trained": loss["trained"]} if evaluated is EvalWeights.both else {})
    assert all(torch.equal(each, trained[name]) for name, each in model.named_parameters())


LLAMA: dict[str, Any] = {"model_type": "llama", **SIZES, "tie_word_embeddings": True}
STEPS = (1, 2, 4)


def save_run(run_dir: Path, config: dict[str, Any], steps: tuple[int, ...] = STEPS, **changes: Any) -> Path:
    """Save random weights as the checkpoints of a run in one process, and export the last."""
    cfg = FinetuneConfig(
        model=ModelConfig(init=WeightInit.random, config=config, tokenizer="bytes"), data=DocsDataConfig(), **changes
    )
    cfg.run.dir = str(run_dir)
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(frozen_text(cfg))
    model = filled(cfg.model, cfg.peft, seed=cfg.run.seed)
    optimizer = torch.optim.SGD(model.parameters())
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        checkpoint.save_checkpoint(run_dir, step, model, optimizer, {}, CheckpointConfig(keep=9))
        models.export_model(model, models.load_tokenizer(cfg.model), run_dir / f"export_{step}")
    return run_dir


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_average(folder: Path, parts: list[tuple[Path, float]], dtype: torch.dtype = torch.float32) -> None:
    """Compare an export with the sum of the weights of other exports in float64."""
    found, stored = weights(folder), [(weights(path), share) for path, share in parts]
    assert found.keys() == stored[0][0].keys()
    for name, value in found.items():
        expected = sum(each[name].double() * share for each, share in stored)
        assert value.dtype == dtype
        torch.testing.assert_close(
            value.double(), expected.to(dtype).double(), rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-7
        )
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for name, value in loaded.state_dict().items():
        assert name not in found or torch.equal(value, found[name])
    assert AutoTokenizer.from_pretrained(folder)("ab").input_ids == [97, 98]


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("plain") / "run", LLAMA)


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ([], {1: 1 / 3, 2: 1 / 3, 4: 1 / 3}),
        (["--steps", 4, 1], {4: 1 / 2, 1: 1 / 2}),
        (["--weights", 1, 2, 5], {1: 1 / 8, 2: 2 / 8, 4: 5 / 8}),
        (["--steps", 4, 1, "--weights", 3, 1, "--dtype", "bfloat16"], {4: 3 / 4, 1: 1 / 4}),
    ],
)
def test_average_of_a_run(
    options: list[Any], shares: dict[int, float], plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("components.models.weights.weight_files._BLOCK_BYTES", 2000)  # several blocks per tensor
    assert run(plain, *options, "--out", tmp_path / "out") == 0
    dtype = torch.bfloat16 if "--dtype" in options else torch.float32
    assert_average(tmp_path / "out", [(plain / f"export_{step}", share) for step, share in shares.items()], dtype)
    card = (tmp_path / "out" / "README.md").read_text()
    assert all(f"| run/step_{step} | {share:.6g} |" in card for step, share in shares.items())


def test_default_folder_and_other_sources(plain: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(plain, copied)
    assert run(copied, "--steps", 1, 2) == 0
    assert_average(copied / "average-step_1-step_2", [(plain / "export_1", 0.5), (plain / "export_2", 0.5)])
    mixed = [copied / "checkpoints" / "step_4", plain / "export_1"]
    assert run(*mixed, "--out", tmp_path / "mixed", "--weights", 1, 3) == 0
    assert_average(tmp_path / "mixed", [(plain / "export_4", 0.25), (plain / "export_1", 0.75)])
    assert run(plain, copied, "--steps", 2, 4, "--weights", 1, 2, 3, 4, "--out", tmp_path / "runs") == 0
    assert_average(tmp_path / "runs", [(plain / "export_2", 0.4), (plain / "export_4", 0.6)])


def test_fused_experts_and_merged_adapters(tmp_path: Path) -> None:
    experts = save_run(tmp_path / "experts", FAMILIES["mixtral"], (1, 2))
    assert run(experts, "--out", tmp_path / "a") == 0
    assert_average(tmp_path / "a", [(experts / "export_1", 0.5), (experts / "export_2", 0.5)])
    adapted = save_run(tmp_path / "lora", LLAMA, (1, 2), peft=PeftConfig(method=PeftMethod.lora, rank=2))
    assert run(adapted, "--out", tmp_path / "b") == 0
    assert_average(tmp_path / "b", [(adapted / "export_1", 0.5), (adapted / "export_2", 0.5)])


def test_blocks_are_summed_in_float64() -> None:
    values = [torch.tensor([1.0]), torch.tensor([1e-8]), torch.tensor([-1.0])]
    parts = [sources.Source(Path(), None, None, {"w": value}, lambda *_, value=value: value) for value in values]
    found = sources.read_average(parts, [1.0, 1.0, 1.0], "w", ())
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(1e-8, rel=1e-6)
    assert [value.item() for value in values] == pytest.approx([1.0, 1e-8, -1.0])  # sources are not changed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run --steps 1 3 7", "--steps: RUN has no checkpoint of steps 3, 7; it keeps those of steps 1, 2, 4"),
        ("run --steps 1 1", "--steps: step 1 given twice"),
        ("run --steps 1", "step_1: is all there is to average; give at least two"),
        ("run --weights 1 2",
         "--weights: 2 given for 3 checkpoints; give one each, for run/step_1, run/step_2, run/step_4"),
        ("run --weights 1 2 0", "--weights 0: each weight must be a finite number above 0"),
        ("run --weights 1 2 nan", "--weights nan: each weight must be a finite number above 0"),
        ("run run/export_1", "--out: needed, because the weights are not those of one run"),
        ("run run/checkpoints/step_1 --out out", "step_1: given twice"),
        ("run/export_1 run/export_2 --steps 1", "--steps: selects checkpoints of run directories, but"),
        ("run nothing --out out", "nothing: no such folder"),
        ("run/export_1 empty --out out", "empty: neither a run directory (no checkpoints/), a checkpoint"),
        ("run/export_1 gpt2 --out out",
         "gpt2: cannot be averaged with RUN/export_1: its architecture is gpt2, that of the other llama"),
        ("run/export_1 wide --out out", "is (64, 32) instead of (48, 32)"),
        ("run/export_1 heads --out out",
         "config.json differs: head_dim is 16 instead of 8, num_attention_heads is 2 instead of 4"),
        ("run --out run/export_1", "exists and is not an empty folder"),
        ("run --dtype int8", "--dtype int8: must be one of"),
    ],
)  # fmt: skip
def test_invalid_command_lines_are_rejected(
    arguments: str,
    message: str,
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "run"
    shutil.copytree(plain, run_dir)
    (tmp_path / "empty").mkdir()
    changes: dict[str, dict[str, Any]] = {"gpt2": FAMILIES["gpt2"], "wide": {**LLAMA, "intermediate_size": 64}}
    for name, config in changes.items():
        if name in arguments:
            save_run(tmp_path / f"of_{name}", config, (1,))
            (tmp_path / f"of_{name}" / "export_1").rename(tmp_path / name)
            shutil.rmtree(tmp_path / f"of_{name}")
    if "heads" in arguments:  # the same shapes with another meaning
        shutil.copytree(plain / "export_2", tmp_path / "heads")
        file = tmp_path / "heads" / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "num_key_value_heads": 1, "head_dim": 16, "num_attention_heads": 2}))
    before = sorted(path.name for path in tmp_path.iterdir())
    assert run(*arguments.split()) == 2
    stderr = capsys.readouterr().err
    assert message.replace("RUN", str(run_dir)) in " ".join(stderr.split())
    assert "Traceback" not in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before
