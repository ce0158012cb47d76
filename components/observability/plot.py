"""loss.png: the curve of a run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from components.config.run_files import replacing


def plot_losses(metrics: list[dict[str, Any]], file: Path, title: str) -> str | None:
    """Draw training and held-out loss over the optimizer steps; return why nothing was drawn, or None.

    Args:
        metrics: The objects of metrics.jsonl.
        file: Where the PNG goes.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install 'meshbook[plot]')"
    from matplotlib.figure import Figure

    training = [(line["step"], line["loss"]) for line in metrics if "loss" in line]
    held_out = [(line["step"], line["eval_loss"]) for line in metrics if "eval_loss" in line]
    if not training and not held_out:
        return "no plot: nothing was logged"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    if training:
        axes.plot(*zip(*training, strict=True), label="training", linewidth=1)
    if held_out:
        axes.plot(*zip(*held_out, strict=True), label="held out", marker="o")
    axes.set(xlabel="optimizer step", ylabel="loss per target token (nats)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(file) as picture:
        figure.savefig(picture, dpi=120, format="png")
    return None
