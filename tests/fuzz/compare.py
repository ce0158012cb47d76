"""Run one case with a recipe, as a user would, and compare its run directory with the reference."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.fuzz import reference
from tests.fuzz.cases import Case, Row
from tests.fuzz.ranks import run_ranks
from tests.fuzz.reference import Curve

ROOT = Path(__file__).resolve().parents[2]
EXIT_INVALID = 2
"""Exit status of a recipe that rejects its config."""
TIMEOUT = 420.0
"""Seconds after which a run is considered hung."""
BOUND = 1e-6
"""Largest relative difference considered equal. The models are float64, but transformers computes norms, rotary
embeddings and routers in float32: if their inputs differ in the 16th digit, their outputs may differ in the 8th (up to
2e-7 measured). Real errors are larger by orders of magnitude."""

_TRANSFORMERS = threading.Lock()
"""Serializes model loading. While transformers loads a model, it patches functions of its classes (tie_weights,
initialization) for all threads: a model built meanwhile would have an untied head or parameters on meta."""


@dataclass
class Finding:
    """Result of a case."""

    name: str
    outcome: str
    """equal, rejected, different, crashed, hung, or reference failed."""
    detail: str = ""
    """The error, if any."""
    commands: list[str] = field(default_factory=list)
    """The model family and the command lines of the runs."""
    seconds: float = 0.0
    differences: dict[str, float] = field(default_factory=dict)
    """Relative differences: loss, norm, eval_loss, weights."""

    @property
    def is_failure(self) -> bool:
        """Whether the outcome is a failure of the project."""
        return self.outcome not in ("equal", "rejected")

    def __str__(self) -> str:
        worst = ", ".join(f"{name} {value:.0e}" for name, value in self.differences.items())
        text = f"{self.name} {self.outcome} ({self.seconds:.0f} s) {worst}"
        if self.outcome == "equal":
            return text
        return "\n  ".join([text, *self.detail.splitlines()[-12:], *(self.commands if self.is_failure else [])])


class _RunFailed(Exception):
    """Raised if a run did not complete: (outcome, detail)."""


def run_case(case: Case, folder: Path) -> Finding:
    """Train a case with its recipe and with the reference in `folder`, and compare them."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with _TRANSFORMERS:
        reference.write_model(case, folder / "model")
    _write_rows(case, folder / "train.jsonl", case.train)
    _write_rows(case, folder / "eval.jsonl", case.held_out)
    commands = [case.family, *(" ".join(_arguments(case, folder, run)) for run in range(len(case.steps)))]
    try:
        differences = _differences(case, folder)
    except _RunFailed as failure:
        outcome, text = failure.args
        return Finding(case.name, outcome, text, commands, time.monotonic() - began)
    equal = all(value <= BOUND for value in differences.values())
    outcome = "equal" if equal else "different"
    return Finding(case.name, outcome, "", commands, time.monotonic() - began, differences)


def _differences(case: Case, folder: Path) -> dict[str, float]:
    start = folder / "model"
    if case.adapters:  # one step with a vanishing learning rate exports the initial adapters
        probe = ["parallelism=single", "cluster.procs_per_node=1", "optimizer.lr=1e-300", "training.max_steps=1"]
        _run([*_recipe(case, folder), *probe, f"run.dir={folder / 'probe'}"], folder)
    for run in range(len(case.steps)):
        _run(_arguments(case, folder, run), folder)
    with _TRANSFORMERS:
        model = reference.load(case, folder / "probe/export" if case.adapters == "qlora" else start)
        if case.adapters:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, str(folder / "probe/adapter"), is_trainable=True)
        expected = reference.train(case, model)
        found = _curve_of(case, folder / "run")
    return _compare(found, expected)


def _compare(found: Curve, expected: Curve) -> dict[str, float]:
    missing = sorted(set(expected.weights) ^ set(found.weights))
    if missing:
        raise _RunFailed("different", f"tensors in only one of the models: {missing[:5]}")
    pairs = [(found.weights[name].double(), tensor.double()) for name, tensor in expected.weights.items()]
    return {
        "loss": _worst(found.losses, expected.losses),
        "norm": _worst(found.norms, expected.norms),
        "eval_loss": _worst(found.eval_losses, expected.eval_losses),
        "weights": max(
            torch.nan_to_num((a - b).norm() / b.norm().clamp(min=1e-3), nan=math.inf).item() for a, b in pairs
        ),
    }


def _worst(found: Sequence[float], expected: Sequence[float]) -> float:
    if len(found) != len(expected):
        raise _RunFailed("different", f"{len(found)} values instead of {len(expected)}")
    return max(_relative(a, b) for a, b in zip(found, expected, strict=True))


def _relative(found: float | None, expected: float) -> float:
    """Return inf for non-finite values, which metrics.jsonl stores as null: max() would ignore NaN."""
    difference = math.inf if found is None else abs(found - expected) / max(abs(expected), 1e-12)
    return difference if math.isfinite(difference) else math.inf


def _curve_of(case: Case, run: Path) -> Curve:
    """Read the curve and the final weights from a run directory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "loss" in line}
    result = json.loads((run / "result.json").read_text())
    order = range(1, case.total_steps + 1)
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    return Curve(
        losses=[steps[step]["loss"] for step in order if step in steps],
        norms=[steps[step]["grad_norm"] for step in order if step in steps],
        eval_losses=[held_out[0], result["eval_loss"]],
        weights=reference.load(case, run / "export").state_dict(),
    )


def _write_rows(case: Case, file: Path, rows: Iterable[Row]) -> None:
    def text(ids: Iterable[int]) -> str:
        return " ".join(f"w{token}" for token in ids)

    if case.recipe == "pretrain":
        values = [{"text": text(row.response)} for row in rows]
    else:
        values = [{"prompt": text(row.prompt), "response": text(row.response)} for row in rows]
    file.write_text("".join(json.dumps(value) + "\n" for value in values))


def _recipe(case: Case, folder: Path) -> list[str]:
    data = "text" if case.recipe == "pretrain" else "jsonl"
    return [
        str(ROOT / "recipes" / f"{case.recipe}.py"),
        *("model=smollm2_135m", "model.init=pretrained", "model.dtype=float64"),
        *(f"model.path={folder / 'model'}", f"model.tokenizer={folder / 'model/tokenizer'}"),
        *(f"data={data}", f"data.path={folder / 'train.jsonl'}", f"data.eval_path={folder / 'eval.jsonl'}"),
        *("data.cache=null", "cluster.device=cpu", "generation.samples=0", "logging.examples=0"),
        *("training.log_every=1", *case.common),
    ]


def _arguments(case: Case, folder: Path, run: int) -> list[str]:
    steps = f"training.max_steps={case.steps[run]}"
    return [*_recipe(case, folder), *case.meshes[run], steps, f"run.dir={folder / 'run'}"]


def _run(arguments: Sequence[str], folder: Path) -> None:
    """Run a recipe. Raises _RunFailed unless the exit status is 0."""
    (size,) = (int(each.partition("=")[2]) for each in arguments if each.startswith("cluster.procs_per_node="))
    status, output = run_ranks(arguments, size, folder, TIMEOUT)
    if status is None:
        raise _RunFailed("hung", output[-2000:])
    if status == EXIT_INVALID and "Traceback" not in output:
        reasons = [line for line in output.splitlines() if not line.startswith("run /")]
        raise _RunFailed("rejected", "\n".join(reasons).strip())
    if status != 0:
        raise _RunFailed("crashed", f"status {status}: {output[-3000:]}")
