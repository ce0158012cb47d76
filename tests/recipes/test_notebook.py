"""`meshbook.run` and the names of the library, in plain Python and with a fake notebook kernel."""

from __future__ import annotations

import ast
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import meshbook
from components.config.stored_run import MetricsLog
from meshbook.notebook import _STEP, _failed_points, _overrides

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "model": "tiny",
    "experiment": "smoke",
    "cluster": {"device": "cpu"},
    "checkpoint": {"export": False},
    "generation": {"samples": 0},
    "training": {"seq_len": 64, "max_steps": 5000, "eval_every": 5000},
}
LETTERS = "ab \\\"'=,:{}[]()$#%@?|/.+-~*!&;<>\n\t0159eE_éλ😀`"
WORDS = (
    *(
        "null",
        "True",
        "inf",
        "NaN",
        "1e5",
        "010",
        "12:00:00",
        "${a.b}",
        "\\${x}",
        "\\\\${x}",
        "choice(1,2)",
        "on",
        "a\\",
    ),
    *(
        "",
        "x=y",
        "'",
        '"',
        "\\",
        '\\"',
        "/p/a b/c.jsonl",
        "s3://b/c?x=1",
        "~x",
        "2024_06_15",
        "a,b",
        "${",
        " lead",
        "-",
    ),
)


class Kernel:
    """What `meshbook.run` uses of IPython: the number of the cell, and displays that it can update."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages: list[str] = []
        self.execution_count = 1
        ipython, shown = ModuleType("IPython"), ModuleType("IPython.display")
        handle = SimpleNamespace(update=self.pages.append)
        vars(ipython).update(get_ipython=lambda: self, version_info=(9, 0))  # matplotlib reads the version
        vars(shown).update(HTML=str, display=self.display, handle=handle)
        for module in (ipython, shown, ModuleType("ipykernel")):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        self.handle = handle

    def display(self, page: Any, *, display_id: bool = False, raw: bool = False) -> Any:
        self.pages.append(page["text/html"] if raw and "text/html" in page else "" if raw else page)
        return self.handle


def call_when(condition: Callable[[], bool], action: Callable[[], None]) -> None:
    """Call `action` from a thread once `condition` holds."""

    def wait() -> None:
        while not condition():
            time.sleep(0.05)
        action()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.slow
def test_interrupted_cell_shows_progress_table_and_picture_of_a_run_that_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does; a pipe would count as a terminal
    monkeypatch.setenv("RANK", "0")  # of some torch code in an earlier cell
    kernel = Kernel(monkeypatch)
    Path("a b.jsonl").write_text("".join(f'{{"prompt": "{n} + 1", "response": "{n + 1}"}}\n' for n in range(64)))
    stepped = re.compile(r"<p>step [1-9][\d,]* of 5,000, no result yet")
    call_when(lambda: any(map(stepped.search, kernel.pages)), lambda: os.kill(os.getpid(), signal.SIGINT))
    before = {name for name in sys.modules if name.partition(".")[0] == "torch"}
    with pytest.raises(KeyboardInterrupt):
        meshbook.run("finetune", TINY, data="jsonl", run={"dir": Path("mine")}, **{"data.path": Path("a b.jsonl")})
    assert {name for name in sys.modules if name.partition(".")[0] == "torch"} == before
    ended = meshbook.RunResult("mine")
    assert ended.result["status"] == "interrupted"
    steps = ended.result["steps"]
    assert (tmp_path / "mine" / "checkpoints" / f"step_{steps}").is_dir()
    assert [line["step"] for line in ended.metrics if "loss" in line] == [*range(1, steps + 1)]
    assert f"interrupted: {steps} step" in kernel.pages[-1]
    assert "<th>step</th><th>loss</th>" in kernel.pages[-1]
    assert 'src="data:image/png;base64,' in kernel.pages[-1]
    output = capsys.readouterr().out
    assert output.startswith("meshbook finetune model=tiny ")
    assert "'data.path=\"a b.jsonl\"'" in output.splitlines()[0]
    assert "\x1b" not in output
    assert "loss 5." not in output.partition("interrupted: ")[0]  # lines of steps are in the table


def test_failure_of_a_recipe_of_the_users_own_is_raised_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = "import meshbook\n@meshbook.recipe('finetune')\ndef main(cfg: meshbook.FinetuneConfig): 1 / 0\nmain()\n"
    Path("mine.py").write_text(own)
    with pytest.raises(meshbook.RunFailed, match=r"^rank 0: ZeroDivisionError: division by zero$") as failed:
        meshbook.run("mine.py", "run.dir=mine", model="tiny", cluster={"device": "cpu"})
    assert failed.value.result is not None
    assert failed.value.result.directory == tmp_path / "mine"


def test_run_is_stopped_when_the_process_that_called_it_is_killed(tmp_path: Path) -> None:
    """As a kernel is that does not end in time; a run that goes on would use the GPUs unseen."""
    (tmp_path / "mine.py").write_text(
        """import pathlib, signal, sys, time, meshbook
@meshbook.recipe("finetune")
def main(cfg: meshbook.FinetuneConfig):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path("stopped").touch()))
    pathlib.Path("started").touch()
    time.sleep(60)
main()
"""
    )
    code = "import meshbook; meshbook.run('mine.py', 'run.dir=mine', model='tiny', cluster={'device': 'cpu'})"
    caller = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.DEVNULL)
    for name in ("started", "stopped"):
        deadline = time.monotonic() + 60
        while not (tmp_path / name).exists():
            assert time.monotonic() < deadline, name
            time.sleep(0.05)
        caller.kill()
    caller.wait()


@pytest.mark.parametrize(
    ("arguments", "keys", "problems"),
    [
        (("finetune",), {"training": {"max_step": 3}, "optimizer": {"lr": "x"}},
         ["training.max_step=3: no such key; did you mean training.max_steps?", "optimizer.lr=x: must be a number"]),
        (("fintune",), {}, ["fintune: is neither a recipe", "did you mean finetune?"]),
        (("finetune",), {"training": {"max_steps": object()}}, ["training.max_steps=<object", "of type object"]),
        (("finetune",), {"data": {"path": "a\nb.jsonl"}}, ['data.path="a\nb.jsonl": the chosen option', "data=jsonl"]),
        (("finetune", 3), {}, ["3: is no override"]),
        (("finetune",), {"data": {"path": "a\0b"}}, ["holds what a command line cannot"]),
        (("finetune",), {"cluster": {"env": {"a=b": 1}}}, ["cluster.env.a=b: no key can have this name"]),
        (("plan",), {}, ["plan: is a tool, not a recipe; write !meshbook plan in a cell"]),
    ],
)  # fmt: skip
def test_rejected_call_raises_the_sentences_of_the_command(
    arguments: tuple[Any, ...], keys: dict[str, Any], problems: list[str]
) -> None:
    with pytest.raises(meshbook.ConfigError) as rejected:
        meshbook.run(*arguments, **keys)
    assert all(text in str(rejected.value) for text in problems)
    assert len(rejected.value.problems) == (2 if "optimizer" in keys else 1)
    assert rejected.value._render_traceback_() == rejected.value.problems


def test_sweep_is_shown_with_its_table_and_first_failure(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    (tmp_path / "report.csv").write_text(
        "run,optimizer.lr,eval_loss,mfu,best,reason\n0_0.01,0.01,2.5,,True,\n1_<b>,1e-3,,,False,rank 0: out of memory\n"
    )
    sweep = meshbook.RunResult(tmp_path)
    assert [*sweep.metrics[0].values()] == ["0_0.01", 0.01, 2.5, None, True, None]
    page = sweep._repr_html_()
    assert "<p>sweep: 2 points</p>" in page
    assert "<th>run</th><th>optimizer.lr</th><th>eval_loss</th><th>best</th><th>reason</th>" in page
    assert "<td>0_0.01</td><td>0.01</td><td>2.5000</td><td>True</td><td></td>" in page
    assert "<td>1_&lt;b&gt;</td><td>0.001</td><td></td><td>False</td><td>rank 0: out of memory</td>" in page
    assert _failed_points(sweep.metrics) == "1 of 2 points are not ok, such as 1_<b>: rank 0: out of memory"


@pytest.mark.parametrize("ended", [True, False])
def test_run_with_rewards_is_shown_by_its_rewards(ended: bool, tmp_path: Path) -> None:
    lines = [
        {"step": 0, "eval_reward": 0.03125},
        {"step": 1, "reward": 0.1234, "loss": 0.0, "grad_norm": 0.5},
        {"step": 1, "eval_reward": 0.5, "eval_cut": 0.25},
    ]
    log = MetricsLog(tmp_path)
    for line in lines:
        log.append(line)
    rewards = {"first_reward": 0.1234, "last_reward": 0.75, "first_eval_reward": 0.03125, "eval_reward": 0.5}
    if ended:
        losses = {"first_loss": 0.0, "last_loss": 0.0, "eval_loss": None}
        (tmp_path / "result.json").write_text(json.dumps({"status": "ok", "steps": 1, **losses, **rewards}))
    for name in ("reward.png", "loss.png"):
        (tmp_path / name).touch()
    shown = meshbook.RunResult(tmp_path)
    page = shown._repr_html_()
    assert ("<p>ok: 1 step, reward 0.123 to 0.750, held-out reward 0.031 to 0.500</p>" in page) == ended
    assert "<th>step</th><th>reward</th><th>eval_reward</th><th>grad_norm</th><th>eval_cut</th>" in page
    assert "<td>1</td><td>0.1234</td><td>0.5000</td><td>0.5</td><td>0.25</td>" in page
    assert shown.picture == tmp_path / "reward.png"


def test_lines_of_steps_are_recognized() -> None:
    """A notebook shows them in its table."""
    shown = (
        "step      7  reward 0.1234  lr 1",
        "step 0  eval_reward 0.0312  over",
        "step 1  loss 2",
        "step 1  eval_loss 2",
    )
    other = ("step      7  update skipped: x", "step 1  task  reward 1", "reward 0.031 to 1.000")
    assert [bool(_STEP.match(line)) for line in (*shown, *other)] == [True] * 4 + [False] * 3


def test_dry_run_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert meshbook.run("finetune", "cluster.dry_run=true", model="tiny") is None
    assert not [*tmp_path.iterdir()]


def test_values_arrive_as_they_are() -> None:
    """Hydra's own parser returns each value that was written for it."""
    generator, parser = random.Random(0), OverridesParser.create()

    def text() -> str:
        letters = (generator.choice(LETTERS) for _ in range(generator.randint(0, 8)))
        return generator.choice(WORDS) if generator.random() < 0.4 else "".join(letters)

    def value(depth: int = 0) -> Any:
        kind = generator.random() if depth < 3 else 0
        if kind < 0.5:
            return text()
        if kind < 0.8:
            return generator.choice([True, False, None, 0, -3, 10**20, 1e-5, -2.5, 1e300, math.inf, 5e-324, 1.0])
        if kind < 0.9:
            return [value(depth + 1) for _ in range(generator.randint(0, 3))]
        return {generator.choice(["a", "b_c", "hidden-size"]): value(depth + 1) for _ in range(generator.randint(0, 2))}

    for _ in range(400):
        given = [value()]
        (override,) = _overrides({"key": given})
        read = OmegaConf.create({"key": parser.parse_override(override).value()})
        assert OmegaConf.to_container(read, resolve=True) == {"key": given}, override


def test_other_values_and_nested_keys() -> None:
    kind = Enum("kind", {"a": "one two"}).a
    given = {"model": "Qwen/Qwen3-0.6B", "optimizer": {"lr": np.float64(1e-5), "x.y": (1, "a")}, "peft": {}, "k": kind}
    assert [*_overrides(given)] == [
        *("model=Qwen/Qwen3-0.6B", "optimizer.lr=1e-05", "optimizer.x.y=[1,a]", "peft={}", 'k="one two"'),
    ]


def test_library_imports_little_and_documents_each_name() -> None:
    code = "import meshbook, sys; from meshbook import data, models, training, recipe; meshbook.run; " + (
        "assert not {'torch', 'transformers', 'numpy', 'IPython'} & {*sys.modules}; print(*dir(meshbook))"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    names = ended.stdout.split()
    assert {"run", "recipe", "data", "models", "training", "ConfigError", "FinetuneConfig"} <= {*names}
    documented = (ROOT / "docs" / "command.md").read_text() + (ROOT / "docs" / "recipes.md").read_text()
    assert [name for name in names if f"`{name}`" not in documented] == []
    for name in names:
        assert (ast.get_docstring(ast.parse(Path(str(each.__file__)).read_text())) if isinstance(
            each := vars(meshbook).get(name) or getattr(meshbook, name), ModuleType
        ) else each.__doc__), name  # fmt: skip
    with pytest.raises(AttributeError, match="no attribute 'trainning'; did you mean training?"):
        _ = meshbook.trainning
