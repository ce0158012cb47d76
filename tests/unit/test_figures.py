"""Figures drawn by matplotlib: tick labels, scales, and lines that hide none, read from the drawn figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `plot`")

from matplotlib.axis import Axis
from matplotlib.figure import Figure

from components.config.stored_run import MetricsLog
from components.launch.sweep.plan import Point, PointRecord, StudyPlan, Sweep, write_record
from components.launch.sweep.report import report_now
from components.observability.result import RunPlot

LONG = "a_very_long_name_of_a_corpus_that_goes_on_and_on"
CURVE = [5 - math.log(step) / 2 for step in range(1, 31)]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that were written, drawn but not rendered."""
    found: list[Figure] = []

    def draw(figure: Figure, *_: object, **__: object) -> None:
        figure.draw_without_rendering()
        found.append(figure)

    monkeypatch.setattr(Figure, "savefig", draw)
    return found


def ticks(axis: Axis) -> dict[str, float]:
    """Return the visible tick labels of an axis with their positions."""
    low, high = sorted(axis.get_view_interval())
    visible = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return {tick.label1.get_text().replace("\u2212", "-"): tick.get_loc() for tick in visible if tick.label1.get_text()}


def misplaced(figure: Figure) -> list[str]:
    """Return the tick labels of an axis that overlap, and the texts that lie outside the figure."""
    found, texts = [], [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    for axes in figure.axes:
        legend = axes.get_legend()
        texts += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts, *(legend.get_texts() if legend else [])]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            visible = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            shown = [text for tick in visible for text in (tick.label1, tick.label2) if text.get_visible()]
            texts += shown
            straight = [(each.get_text(), each.get_window_extent()) for each in shown if not each.get_rotation()]
            pairs = combinations([each for each in straight if each[0]], 2)
            found += [f"{one} over {other}" for (one, box), (other, second) in pairs if box.overlaps(second)]
    page = figure.bbox.padded(2)
    for text in texts:
        if text.get_text() and (box := text.get_window_extent()) and page.union([page, box]).bounds != page.bounds:
            found.append(f"{text.get_text()} is cut")
    return found


def sweep(
    folder: Path,
    values: Sequence[dict[str, str]],
    losses: Sequence[Sequence[float]],
    *,
    names: Sequence[str] = (),
    steps: Sequence[int] = (),
    stopped: int = -1,
) -> None:
    """Write a study whose points have these losses, each also its held-out loss, and report it."""
    points = [Point(n, names[n] if names else str(n), each, []) for n, each in enumerate(values)]
    plan = StudyPlan(len(points), 0, {}, [])
    study = Sweep(folder, "id", "finetune", Path("/r.py"), Path("/"), "r.py", [], list(values[0]), points, study=plan)
    study.write()
    for point, curve in zip(points, losses, strict=True):
        run_dir = study.run_dir(point)
        run_dir.mkdir()
        log = MetricsLog(run_dir)
        for step, loss in zip(steps or range(1, len(curve) + 1), curve, strict=True):
            log.append({"step": step, "loss": loss, "eval_loss": loss})
        is_stopped = point.number == stopped
        result = {"status": "preempted" if is_stopped else "ok", "eval_loss": curve[-1], "tokens_per_second": 1000.0}
        (run_dir / "result.json").write_text(json.dumps(result))
        write_record(study, point, PointRecord(0.0, 0, stopped_early="loses" if is_stopped else ""))
    report_now(study)


def test_swept_names_and_numbers_are_the_tick_labels(tmp_path: Path, figures: list[Figure]) -> None:
    names, rates = ("single", "fsdp2_tp2", "ddp"), ("1e-4", "3e-4", "1e-3")
    values = [{"parallelism": name, "optimizer.lr": rate} for name in names for rate in rates]
    losses = [[5.0, 4.0 + abs(number - 4) / 10] for number in range(9)]
    sweep(tmp_path, values, losses, stopped=8, steps=(1, 2))
    curves, by_name, by_rate, parallel, _ = figures[1].axes
    assert list(ticks(curves.xaxis)) == ["1", "2"]
    assert ticks(by_name.xaxis) == {"single": 0, "fsdp2_tp2": 1, "ddp": 2}
    assert by_rate.get_xscale() == "log"
    assert ticks(by_rate.xaxis) == {"1e-4": 1e-4, "3e-4": 3e-4, "1e-3": 1e-3}
    assert {*names, *rates} <= {text.get_text() for text in parallel.texts}
    assert misplaced(figures[1]) == []
    # Point 4 is the best: a star, at its values.
    stars = [
        [line.get_xydata()[-1].tolist() for line in axes.lines if line.get_marker() == "*"] for axes in figures[1].axes
    ]
    assert stars[:3] == [[[2, 4.0]], [[1, 4.0]], [[3e-4, 4.0]]]
    assert len(stars[3]) == 1
    assert [line.get_marker() for line in by_name.lines] == ["x", "o", "*"]
    assert "best" in {text.get_text() for text in by_name.get_legend().get_texts()}


@pytest.mark.parametrize(
    ("key", "values", "scale", "labels"),
    [
        ("optimizer.lr", ("1e-4", "1e-3"), "log", ["1e-4", "1e-3"]),
        ("training.global_batch_size", ("8", "16", "32", "64"), "log", ["8", "16", "32", "64"]),
        ("training.max_steps", ("100", "200", "300"), "linear", ["100", "200", "300"]),
        ("optimizer.weight_decay", ("0", "0.001", "0.1"), "linear", ["0", "0.001", "0.1"]),
        ("training.compile", ("true", "false"), "linear", ["true", "false"]),
        ("data.path", tuple(f"/data/{LONG}/{n}.jsonl" for n in range(12)), "linear", None),
        ("optimizer.lr", tuple(f"{10 ** (-5 + n / 10):.5g}" for n in range(31)), "log", None),
        ("run.seed", ("$a_1$", "中文"), "linear", ["$a_1$", "??"]),
    ],
)
def test_scale_of_a_swept_key(
    key: str, values: tuple[str, ...], scale: str, labels: list[str] | None, tmp_path: Path, figures: list[Figure],
    recwarn: pytest.WarningsRecorder,
) -> None:  # fmt: skip
    sweep(tmp_path, [{key: value} for value in values], [[4.0 + n / 100] for n in range(len(values))])
    axes = figures[1].axes[1]
    found = [label.replace(r"\$", "$") for label in ticks(axes.xaxis)]
    assert axes.get_xscale() == scale
    assert found == labels if labels else len(found) > 2
    assert list(ticks(figures[1].axes[0].xaxis)) == ["0", "1", "2"]  # one step
    assert misplaced(figures[1]) == []
    assert not recwarn.list


@pytest.mark.parametrize(
    ("losses", "widths"),
    [
        ([CURVE], [1.5]),
        ([CURVE, [loss + 1 for loss in CURVE], [loss + 2 for loss in CURVE]], [1.5, 1.5, 1.5]),
        ([CURVE, [loss + 1 for loss in CURVE], [loss + 1e-5 for loss in CURVE]], [3.5, 1.5, 1.5]),
        ([[3.0] * 30, [3.0] * 30], [3.5, 1.5]),
        ([CURVE] * 12, [1.5 + number * 6.5 / 11 for number in reversed(range(12))]),
        ([CURVE, [math.nan] * 30], [1.5, 1.5]),
    ],
    ids=["one", "apart", "coinciding", "constant", "twelve", "nan"],
)
def test_only_coinciding_curves_are_drawn_wide(
    losses: list[list[float]], widths: list[float], tmp_path: Path, figures: list[Figure]
) -> None:
    names = [f"{number}_{LONG}" for number in range(len(losses))]
    sweep(tmp_path, [{"run.seed": str(number)} for number in range(len(losses))], losses, names=names)
    speeds, curves = figures[0].axes
    assert [line.get_linewidth() for line in curves.lines][: len(losses)] == pytest.approx(widths)
    labels = {text.replace("\n", "") for text in ticks(speeds.yaxis)}
    assert all(any(name in label for label in labels) for name in names)
    legend = curves.get_legend()
    assert legend is not None
    assert {text.get_text().replace("\n", "") for text in legend.get_texts()} >= set(names)
    assert misplaced(figures[0]) == []
    assert not legend.get_window_extent().overlaps(curves.get_window_extent())  # long names would hide curves


def run_with_rewards(steps: int, **more: float) -> list[dict[str, Any]]:
    """Return the lines of a run whose reward rises 1,000-fold, for which a loss would have a logarithmic axis."""
    lines: list[dict[str, Any]] = [{"step": 0, "eval_reward": 0.001}]
    for step in range(1, steps + 1):
        lines.append({"step": step, "reward": step / steps, "loss": -0.0, "reward_std": 0.2, **more})
    return [*lines, {"step": steps, "eval_reward": 0.9, "eval_answer_tokens": 1234.5}]


@pytest.mark.parametrize("steps", [1, 2, 100])
@pytest.mark.parametrize("more", [{}, {"entropy": 1.5}, {"answer_tokens": 21000.5, "entropy": 1.5, "expert_load": 2.0}])
def test_rewards_are_plotted_above_length_and_entropy(
    more: dict[str, float], steps: int, tmp_path: Path, figures: list[Figure]
) -> None:
    metrics = run_with_rewards(steps, **more, **({"expert_entropy": 0.9} if "expert_load" in more else {}))
    title = f"tiny on {LONG}.jsonl, dp_shard=2 x tp=2 x pp=2 x cp=2"
    assert RunPlot(tmp_path, title, lambda: metrics).finish() is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["experts.png"] * ("expert_load" in more) + [
        "reward.png"
    ]
    rewards, *below = figures[0].axes
    entropy = ["entropy (nats per token)"] * ("entropy" in more)
    assert [axes.get_ylabel() for axes in below] == ["answer length (tokens)", *entropy]
    assert (rewards.get_ylabel(), rewards.get_yscale()) == ("reward", "linear")
    assert {str(line.get_label()): line.get_ydata().tolist()[-1] for line in rewards.lines} == {
        "training": 1.0,
        "held out": 0.9,
    }
    assert [text.get_text() for text in rewards.get_legend().get_texts()] == [
        "training",
        "held out",
        "training ± reward_std",
    ]
    (band,) = rewards.collections
    (corners,) = [path.vertices for path in band.get_paths()]
    assert {round(float(height), 6) for _, height in corners} >= {0.8, 1.2}
    assert [axes.get_xlabel() for axes in (rewards, *below)] == [*[""] * len(below), "optimizer step"]
    low, high = below[-1].get_xlim()
    assert low <= 0 < steps <= high
    assert misplaced(figures[0]) == []


def test_run_without_rewards_or_with_a_loss_beside_them_has_a_plot_of_losses(
    tmp_path: Path, figures: list[Figure]
) -> None:
    """As in KTO, which has a metric `reward`."""
    metrics = [{"step": 0, "eval_loss": 2.0, "eval_reward": 0.1}, {"step": 1, "loss": 1.0, "reward": 0.2}]
    assert RunPlot(tmp_path, "title", lambda: metrics).finish() is None
    assert [file.name for file in tmp_path.iterdir()] == ["loss.png"]
    assert [axes.get_ylabel() for axes in figures[0].axes] == ["loss per target token (nats)"]
    assert RunPlot(tmp_path, "title", lambda: [{"step": 1, "lr": 1.0}]).finish() == "no plot: no loss was logged"


@pytest.mark.parametrize(
    ("training", "held_out", "scale", "steps"),
    [
        ({10: 3.0}, {}, "linear", ["9", "10", "11"]),
        ({1: 3.0}, {0: 4.0, 1: 3.0}, "linear", ["0", "1"]),
        ({step: 2.0 * 10 ** (step / 50) for step in range(1, 151)}, {}, "log", None),
        ({1: 3.0, 2: math.nan, 3: math.nan}, {}, "linear", ["1", "2", "3"]),
        ({1: math.nan}, {}, "linear", ["0", "1", "2"]),
        ({10**6 + step: 2.5 for step in range(4)}, {}, "linear", [f"1,000,00{step}" for step in range(4)]),
    ],
)
def test_loss_plot_shows_every_loss_at_whole_steps(
    training: dict[int, float], held_out: dict[int, float], scale: str, steps: list[str] | None, tmp_path: Path,
    figures: list[Figure],
) -> None:  # fmt: skip
    metrics: list[dict[str, Any]] = [{"step": step, "loss": loss} for step, loss in training.items()]
    metrics += [{"step": step, "eval_loss": loss} for step, loss in held_out.items()]
    title = f"tiny on $x_1$ and {LONG}.jsonl, dp_shard=2 x tp=2 x pp=2 x cp=2"
    assert RunPlot(tmp_path, title, lambda: metrics).finish() is None
    (axes,) = figures[0].axes
    assert axes.get_yscale() == scale
    assert steps is None or list(ticks(axes.xaxis)) == steps
    visible = {
        round(x) for line in axes.lines if line.get_marker() not in ("None", None) or len(line.get_xdata()) > 1
        for x in line.get_xdata()
    }  # fmt: skip
    assert visible == training.keys() | held_out.keys()
    assert axes.get_title().replace("\n", " ").replace("\\", "").split() == title.split()
    assert misplaced(figures[0]) == []
