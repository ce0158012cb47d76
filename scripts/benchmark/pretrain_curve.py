"""Loss curve of recipes/pretrain.py on a text file, compared with a plain PyTorch loop on the same model and samples.

python scripts/benchmark/pretrain_curve.py tinyshakespeare.txt                              # 200 steps of 8 x 256 bytes
python scripts/benchmark/pretrain_curve.py tinyshakespeare.txt --dtype float64 --steps 50   # almost without rounding

The plain loop uses transformers' model, torch's AdamW and clipping, and samples as documented for data=text; from
Meshbook it uses only the shuffle. Writes pretrain_curve.md and .png to --out. Exits with status 1 if losses or gradient
norms of the first 50 steps differ by more than --bound; later, rounding has grown too much for a comparison.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml

from components.data import SampleOrder
from components.presentation import (
    MISSING,
    draw_curves,
    figure_text,
    finish_axes,
    has_matplotlib,
    new_figure,
    save_figure,
)
from components.terminal import HelpText, fit
from scripts.benchmark.compare_report import GATED_STEPS, gated_difference, worst_difference

ROOT = Path(__file__).resolve().parents[2]
MODEL = "llama_2m"
VOCABULARY, END = 264, 257  # bytes and four special tokens, rounded up to a multiple of 8; the end-of-text token
LR, WARMUP, DECAY, FLOOR = 1e-3, 20, 0.1, 0.1  # as in optimizer=adamw_pretrain
SEED, HELD_OUT = 5, 0.05
BOUNDS = {"float32": 1e-3, "float64": 1e-6}
"""Bounds of the relative differences of losses and gradient norms. Rounding affects norms more than losses, and
transformers computes norm layers in float32 even in a float64 model."""


@dataclass
class Curve:
    """Metrics of a run's steps."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    """Held-out losses before the first step and after the last."""

    def gated(self, other: Curve) -> float:
        """Return the largest relative difference of losses and gradient norms in the first GATED_STEPS."""
        return max(gated_difference(self.losses, other.losses), gated_difference(self.norms, other.norms))

    def differences(self, other: Curve) -> dict[str, float]:
        """Return the largest relative difference over all steps, for each metric."""
        names = ("losses", "norms", "held_out")
        return {name: worst_difference(getattr(self, name), getattr(other, name)) for name in names}


def main() -> int:
    """Run both loops and report their difference; return the exit status."""
    parser = ArgumentParser("pretrain_curve.py", description=__doc__, formatter_class=HelpText)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bound", type=float, help="maximum relative difference; default: 1e-3, float64: 1e-6")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/benchmark/pretrain_curve")
    options = parser.parse_args()
    options.bound = BOUNDS[options.dtype] if options.bound is None else options.bound
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="pretrain-curve-") as folder:
        write_model(Path(folder))
        ours = recipe(options, Path(folder))
        plain = loop(options, Path(folder) / "model")
    return report(options, ours, plain)


def write_model(folder: Path) -> None:
    """Write the model of conf/model/llama_2m.yaml with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = yaml.safe_load((ROOT / "conf/model" / f"{MODEL}.yaml").read_text())["config"]
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, vocab_size=VOCABULARY))
    model.save_pretrained(folder / "model")


def recipe(options: Namespace, folder: Path) -> Curve:
    """Run recipes/pretrain.py in a subprocess, and return its curve."""
    overrides = [
        *("data=text", f"data.path='{options.text.resolve()}'", "data.pack=false", f"data.eval_fraction={HELD_OUT}"),
        *(f"model={MODEL}", f"model.path={folder}/model", "model.init=pretrained", f"model.dtype={options.dtype}"),
        *("parallelism=single", "cluster.device=cpu", f"model.compute_dtype={options.dtype}", f"run.seed={SEED}"),
        *(f"training.max_steps={options.steps}", "training.log_every=1", "training.eval_every=0"),
        *(f"training.global_batch_size={options.rows}", f"training.micro_batch_size={options.rows}"),
        *(f"training.seq_len={options.seq_len}", "generation.samples=0", "checkpoint.last=false"),
        *("checkpoint.export=false", f"run.dir={folder}/run", f"optimizer.warmup_steps={WARMUP}"),
        *(f"optimizer.lr={LR}", f"optimizer.weight_decay={DECAY}", f"optimizer.min_lr_ratio={FLOOR}"),
    ]
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    subprocess.run(
        [sys.executable, ROOT / "recipes/pretrain.py", *overrides], check=True, cwd=folder, env=os.environ | threads
    )
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    names = {"losses": "loss", "norms": "grad_norm", "held_out": "eval_loss"}
    return Curve(**{name: [line[key] for line in lines if key in line] for name, key in names.items()})


def loop(options: Namespace, folder: Path) -> Curve:
    """Train the same model in plain PyTorch, and return the curve."""
    from transformers import AutoModelForCausalLM

    train, held_out = samples(options.text, options.seq_len)
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").train()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    order, curve = SampleOrder(len(train), SEED), Curve()
    curve.held_out.append(mean_loss(model, held_out, options.rows))
    for step in range(options.steps):
        rows = [train[index] for index in order.indices(step * options.rows, options.rows)]
        loss = loss_sum(model, rows) / sum(len(row) - 1 for row in rows)
        loss.backward()
        curve.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps)
        optimizer.step()
        optimizer.zero_grad()
        curve.losses.append(loss.item())
    curve.held_out.append(mean_loss(model, held_out, options.rows))
    return curve


def samples(text: Path, seq_len: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return train and held-out samples of one document, as documented for data=text."""
    content = text.read_text(encoding="utf-8")
    cut = content.index("\n", round(len(content) * (1 - HELD_OUT))) + 1
    splits = []
    for part in (content[:cut], content[cut:]):
        ids = [*part.encode(), END]
        splits.append([ids[first : first + seq_len] for first in range(0, len(ids) - 1, seq_len - 1)])
    return splits[0], splits[1]


def learning_rate(step: int, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then cosine decay to a tenth."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    done = (step - WARMUP + 1) / (steps - WARMUP)
    return LR * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def loss_sum(model: torch.nn.Module, rows: Sequence[list[int]]) -> torch.Tensor:
    """Return the loss sum of rows, padded on the right, where no real token attends to the padding."""
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])  # (rows, seq)
    is_real = torch.tensor([[position < len(row) for position in range(length)] for row in rows])
    targets = torch.where(is_real, ids, -100)[:, 1:]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@torch.no_grad()
def mean_loss(model: torch.nn.Module, rows: Sequence[list[int]], batch_size: int) -> float:
    """Return the mean loss per target token of held-out rows."""
    total = sum(loss_sum(model, rows[i : i + batch_size]).item() for i in range(0, len(rows), batch_size))
    return total / sum(len(row) - 1 for row in rows)


def report(options: Namespace, ours: Curve, plain: Curve) -> int:
    """Print, write and plot both curves; return 1 if they differ by more than the bound."""
    differences = ours.differences(plain)
    lines = [
        f"{options.steps} steps of {options.rows} x {options.seq_len} bytes of {options.text.name}, {options.dtype}",
        f"loss {plain.losses[0]:.4f} to {ours.losses[-1]:.4f} (plain loop {plain.losses[-1]:.4f}), held out "
        f"{ours.held_out[0]:.4f} to {ours.held_out[-1]:.4f} (plain loop {plain.held_out[-1]:.4f})",
        f"largest relative difference: losses {differences['losses']:.1e}, gradient norms {differences['norms']:.1e}, "
        f"held-out losses {differences['held_out']:.1e}; in the first {GATED_STEPS} steps {ours.gated(plain):.1e}, "
        f"bound {options.bound:.0e}",
    ]
    print("\n".join(map(fit, lines)))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "pretrain_curve.md").write_text("".join(f"- {line}\n" for line in lines))
    if has_matplotlib():
        _plot(options.out / "pretrain_curve.png", ours, plain, lines[0])
    else:
        print(f"no plot: {MISSING}")
    return int(not ours.gated(plain) <= options.bound)


def _plot(file: Path, ours: Curve, plain: Curve, title: str) -> None:
    figure = new_figure(8, 6)
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    named = {"plain PyTorch loop": plain, "recipes/pretrain.py": ours}
    draw_curves(curves, {name: list(enumerate(curve.losses, 1)) for name, curve in named.items()})
    for (name, curve), marker in zip(named.items(), "ox", strict=True):
        curves.plot((0, len(curve.losses)), curve.held_out, marker, label=f"held out, {name}")
    finish_axes(curves, xlabel="", ylabel="loss per byte (nats)")
    curves.set_title(figure_text(title, 80), fontsize="medium")
    gaps = [max(worst_difference([a], [b]), 1e-17) for a, b in zip(ours.losses, plain.losses, strict=True)]
    draw_curves(differences, {"relative difference": list(enumerate(gaps, 1))})
    finish_axes(differences, ylabel="relative difference", legend=False)
    save_figure(figure, file)


if __name__ == "__main__":
    sys.exit(main())
