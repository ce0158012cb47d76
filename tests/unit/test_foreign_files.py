"""Files of others beside, or at the names of, what the tools and recipes write: left as they are, or refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from components.checkpoint.manifest import removable, remove
from components.config.schema.run import CheckpointConfig
from components.data.token_store.corpus import StoreFolder, remove_leftovers, remove_scratch
from components.launch.sweep.plan import Point, Sweep
from components.launch.sweep.report import report_now
from components.models.weights.weight_files import NewFolder
from components.protocol.errors import ConfigError
from scripts import checkpoints, compare, gpu, plan, score
from scripts._memory.options import read_options as memory_options
from scripts._parity.options import read_options as parity_options
from tests.unit.test_launch_run_directory import config, end, start, take_step


def a_run(folder: Path) -> Path:
    directory = start(config(str(folder)))
    end(directory)
    return directory.path


def resume(folder: Path) -> None:
    a_run(folder / "run")
    directory = start(config(str(folder / "run")))
    take_step(directory)
    end(directory)


def export(folder: Path) -> None:
    new = NewFolder(folder / "export")
    new.begin()
    (new.path / "model.safetensors").write_text("new")
    new.publish()


def prune(folder: Path) -> None:
    remove([entry.path for entry in removable(folder, CheckpointConfig(keep=1))[0]])
    remove(removable(folder, CheckpointConfig(keep=1))[1])


def prune_through_a_link(folder: Path) -> int:
    run = a_run(folder / "run")
    (run / "checkpoints").symlink_to(folder / "elsewhere")
    return checkpoints.main(["prune", str(run), "--keep", "1", "--yes"])


def run_compare(folder: Path) -> int:
    return compare.main([str(a_run(folder / "run")), "--out", str(folder)])


def run_score(folder: Path) -> None:
    (folder / "data.jsonl").touch()
    score.read_options([str(folder), str(folder / "data.jsonl"), "--out", str(folder / "rewards.jsonl")])


def tokenize(folder: Path) -> None:
    remove_leftovers(folder)
    remove_scratch(folder)
    StoreFolder(str(folder)).check()


def report_sweep(folder: Path) -> int:
    point = Point(0, "0_a", {"optimizer.lr": "1"}, [])
    return report_now(Sweep(folder, "id", "finetune", Path("finetune.py"), folder, "", [], ["optimizer.lr"], [point]))


KEPT, REFUSED = "kept", "refused"
CASES: dict[str, tuple[Callable[[Path], object], list[str], str]] = {
    "resume": (resume, ["run/.notes.tmp", "run/.a.tmp-1", "run/checkpoints/notes", "run/logs/7", "run/notes"], KEPT),
    "export": (export, ["export/notes.txt", "export/top_k_train.safetensors", "export/a/b", "export.tmp-1/a"], KEPT),
    "prune": (prune, ["checkpoints/step_7/a", "checkpoints/step_9.tmp-mine/a", "checkpoints/x.tmp-1"], KEPT),
    "prune through a link": (prune_through_a_link, ["elsewhere/step_1", "checkpoints"], REFUSED),
    "compare": (run_compare, ["compare.md"], REFUSED),
    "compare's plot": (run_compare, ["compare.png"], REFUSED),
    "plan": (
        lambda folder: plan.main(["model=tiny", "cluster.gpu=h100_80", "--draw", str(folder / "a.svg")]),
        ["a.svg"],
        REFUSED,
    ),
    "memory": (lambda folder: memory_options(["--out", str(folder / "a.md")], ""), ["a.md"], REFUSED),
    "parity": (lambda folder: parity_options(["--out", str(folder / "a")], ""), ["a"], REFUSED),
    "gpu": (lambda folder: gpu.parse(["--out", str(folder), "--device", "cpu"]), ["log.txt", "verdict.md"], REFUSED),
    "score": (run_score, ["rewards.jsonl"], REFUSED),
    "tokenize": (tokenize, ["manifest.json", ".a.tmp"], REFUSED),
    "tokenize's shards": (tokenize, ["top_k_train.safetensors"], REFUSED),
    "sweep": (report_sweep, ["report.md"], REFUSED),
    "sweep's table": (report_sweep, ["report.csv"], REFUSED),
}


@pytest.mark.parametrize("case", CASES)
def test_files_of_others_are_kept_or_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    act, names, outcome = CASES[case]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.startswith("run/"):  # beside the files of a run, not before them
            continue
        (tmp_path / name).write_text("precious")
        os.utime(tmp_path / name, (0, 0))
    if case == "resume":
        (tmp_path / "run" / "checkpoints").rmdir()
        (tmp_path / "run" / "logs").rmdir()
        a_run(tmp_path / "run")
        for name in names:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("precious")
    printed = ""
    try:
        refused = act(tmp_path) == 2
    except (ConfigError, SystemExit) as error:
        refused, printed = getattr(error, "code", 2) == 2, str(error)
    printed += "".join(capsys.readouterr())
    assert refused == (outcome == REFUSED), printed
    assert not refused or any(name in printed for name in names), printed
    assert {(tmp_path / name).read_text() for name in names} == {"precious"}


def test_own_files_are_replaced(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    arguments = [str(run), "--out", str(tmp_path / "out")]
    assert [compare.main(arguments), compare.main(arguments)] == [0, 0]
    for shards in (2, 1):
        new = NewFolder(tmp_path / "export")
        new.begin()
        for number in range(shards):
            (new.path / f"model-{number + 1:05}-of-{shards:05}.safetensors").write_text("new")
        new.publish()
    assert os.listdir(tmp_path / "export") == ["model-00001-of-00001.safetensors"]
