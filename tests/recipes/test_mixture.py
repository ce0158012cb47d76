"""A mixture of two texts on two processes, against a plain PyTorch loop over the same rows in the same order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.recipes.test_finetune import curve, run
from tests.recipes.test_pretrain import (
    BATCH,
    DECAY,
    LLAMA,
    LR,
    SEED,
    SEQ,
    STEPS,
    WARMUP,
    documents,
    mean_loss,
    plain_loop,
)
from tests.suites import in_parity
from tests.unit.test_data_mixture import reference_order

WEIGHTS = {"long": 0.25, "short": 0.75}
HUGE = dict.fromkeys(WEIGHTS, 10**6)


STAGES = [(4, {"long": 1.0, "short": 3.0}), (5, {"short": 1.0}), (3, {"long": 2.0, "short": 1.0})]
"""Steps and weights of each stage; in the last one, the learning rate falls to 0."""
STAGES_KEY = (
    "data.stages=[{until_step:4,weights:{long:1,short:3}},{until_step:9,weights:{short:1}},"
    "{weights:{long:2,short:1},lr_ratio:0}]"
)


def write_sources(tmp_path: Path) -> list[str]:
    """Write two texts and a model, and return the arguments that train it on them on two processes."""
    for name, count in (("long", 40), ("short", 12)):
        lines = [f"{i} of {name} is {i * j}\n" for i in range(count) for j in range(20)]
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA)).save_pretrained(tmp_path / "model")
    sources = ["data=mixture", "model=tiny", "model.init=pretrained", "model.config={}", "cluster.device=cpu"]
    for name in WEIGHTS:
        sources += [f"+data@data.sources.{name}=text", f"data.sources.{name}.path={tmp_path}/{name}.txt"]
        sources += [f"data.sources.{name}.pack=false"]
    return sources


def train(tmp_path: Path, *arguments: str) -> str:
    return run(
        "pretrain.py",
        *(*arguments, "cluster=local_2proc", f"model.path={tmp_path}/model", f"run.dir={tmp_path}/run"),
        *(f"training.max_steps={STEPS}", f"training.seq_len={SEQ}", f"training.global_batch_size={BATCH}"),
        *("training.micro_batch_size=2", "training.eval_every=0", "training.log_every=1", f"run.seed={SEED}"),
        *(f"optimizer.lr={LR}", f"optimizer.warmup_steps={WARMUP}", f"optimizer.weight_decay={DECAY}"),
        *("generation.samples=0", "logging.plot=false", "checkpoint.export=true"),
        cwd=tmp_path,
    )


@in_parity
def test_run_with_stages_matches_a_plain_loop(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    train(tmp_path, *sources, "optimizer.schedule=constant", STAGES_KEY)
    rows, held_out = zip(*(documents(tmp_path / f"{name}.txt") for name in WEIGHTS), strict=True)
    of_source = dict(zip(WEIGHTS, rows, strict=True))
    orders = {name: iter(reference_order({name: 1.0}, SEED, 99, {name: len(of_source[name])})) for name in WEIGHTS}
    names = [name for steps, weights in STAGES for name, _ in reference_order(weights, SEED, steps * BATCH, HUGE)]

    def rate(step: int) -> float:
        return LR * min(1.0, (step + 1) / WARMUP) * min(1.0, (STEPS - 1 - step) / STAGES[-1][0])

    losses, norms, evaluations = plain_loop(
        tmp_path / "model",
        [of_source[name][next(orders[name])[1]] for name in names],
        [*held_out[0], *held_out[1]],
        rate,
    )
    assert curve(tmp_path / "run") == pytest.approx(losses, rel=1e-5)
    assert curve(tmp_path / "run", "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert curve(tmp_path / "run", "eval_loss") == pytest.approx(evaluations, rel=1e-5)


@in_parity
def test_mixture_run_matches_a_plain_loop(tmp_path: Path) -> None:
    sources = write_sources(tmp_path)
    weights = [f"data.sources.{name}.weight={weight}" for name, weight in WEIGHTS.items()]
    output = train(tmp_path, *sources, *weights)
    train_rows, held_out = zip(*(documents(tmp_path / f"{name}.txt") for name in WEIGHTS), strict=True)
    rows = dict(zip(WEIGHTS, train_rows, strict=True))
    order = reference_order(WEIGHTS, SEED, STEPS * BATCH, {name: len(each) for name, each in rows.items()})
    losses, _, evaluations = plain_loop(
        tmp_path / "model", [rows[name][index] for name, index in order], [*held_out[0], *held_out[1]]
    )
    assert curve(tmp_path / "run") == pytest.approx(losses, rel=1e-5)
    assert curve(tmp_path / "run", "eval_loss") == pytest.approx(evaluations, rel=1e-5)
    text = " ".join(output.split())
    for name, weight in WEIGHTS.items():
        passes = weight * STEPS * BATCH / len(rows[name])
        assert re.search(rf"{name}, {100 * weight:.2f} % of rows, [\d.]+ % of tokens with loss: ", text)
        assert f"{passes:.2f} passes in the whole run" in text

    output = run("evaluate.py", *sources, *weights, f"model.path={tmp_path}/run/export", f"evaluation.seq_len={SEQ}",
               "generation.samples=0", cwd=tmp_path)  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    for name, held_out_rows in zip(WEIGHTS, held_out, strict=True):
        (loss,) = re.findall(rf"^{name}: held-out loss ([\d.]+) over", output, re.MULTILINE)
        assert float(loss) == pytest.approx(mean_loss(model, held_out_rows), abs=1e-4)
