"""Faults by MESHBOOK_FAULT and full disks, what they leave behind, and files of others: kept, or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from components.checkpoint.manifest import removable, remove, write_json
from components.config.schema.run import CheckpointConfig, LoggingConfig, WandbConfig, WandbMode
from components.config.stored_run import MetricsLog
from components.data.token_store.corpus import StoreFolder, remove_leftovers, remove_scratch
from components.launch.sweep.plan import Point, Sweep
from components.launch.sweep.report import report_now
from components.models.weights.weight_files import NewFolder
from components.observability import Reporter
from components.observability.result import record_start
from components.protocol.errors import ConfigError
from components.protocol.failures import write_report
from components.watch.faults import POINTS, VARIABLE, fault_point
from scripts import checkpoints, compare, gpu, plan, score
from scripts._memory.options import read_options as memory_options
from scripts._parity.options import read_options as parity_options
from tests.unit.full_disk import full_disk
from tests.unit.test_launch_run_directory import config, end, start, take_step


def test_fault_points_do_nothing_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for point in POINTS:
        fault_point(point)
    assert VARIABLE not in os.environ


def test_fault_occurs_at_the_named_point_rank_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(VARIABLE, "eio:after_random:rank1:2,erofs:after_random:rank0,enospc:at_load:all:*")
    fault_point("after_folder")
    fault_point("after_random")
    with pytest.raises(OSError, match=r"\[Errno 5\] Input/output error \(MESHBOOK_FAULT=eio:after_random:rank1:1\)"):
        fault_point("after_random")
    fault_point("after_random")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left on device"):
            fault_point("at_load")
    assert os.environ[VARIABLE] == "erofs:after_random:rank0:1,enospc:at_load:all:*"
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(OSError, match="Read-only file system"):
        fault_point("after_random")


def test_slow_fault_delays_the_fault_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "slow=0.1:after_shards")
    began = time.monotonic()
    fault_point("after_shards")
    assert 0.1 <= time.monotonic() - began < 5
    assert os.environ[VARIABLE] == ""


@pytest.mark.parametrize(
    "text",
    ["kill", "kill:nowhere", "maim:at_load", "kill:at_load:one", "kill:at_load:rank0:0", "kill:at_load:all:1:1",
     "slow:at_load", "slow=x:at_load", "kill=3:at_load", "kill:at_load,", "kill:at_load:rank"],
)  # fmt: skip
def test_invalid_fault_is_rejected(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=rf"^{VARIABLE}=.*: must be KIND:POINT.*; unset it$"):
        fault_point("after_rename")


def test_faults_module_does_not_import_torch() -> None:
    code = "import sys, components.watch.faults; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


def test_run_directory_with_only_a_temporary_config_file_counts_as_fresh(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.yaml.tmp-0123456789abcdef").write_text("run:\n  di")
    directory = start(config(str(tmp_path / "run")))
    assert directory.fresh
    end(directory)


def test_truncated_line_of_metrics_is_dropped_on_resume(tmp_path: Path) -> None:
    metrics, log = tmp_path / "metrics.jsonl", MetricsLog(tmp_path)
    for step, name, loss in ((0, "eval_loss", 2.5), (1, "loss", 2.0), (1, "eval_loss", 0.5), (2, "loss", 1.0)):
        log.append({"step": step, name: loss})
    with metrics.open("a") as file:
        file.write('{"step": 3, "lo')
    reporter = Reporter(LoggingConfig(wandb=WandbConfig(mode=WandbMode.disabled)), str(tmp_path), enabled=True)
    assert [line["step"] for line in reporter.read()] == [0, 1, 1, 2]
    reporter.continue_from(1)
    reporter.evaluation(step=1, eval_loss=0.5, count=3)  # the resumed attempt logs it first; it must not appear twice
    logged = [
        (line["step"], *line.keys() - {"step", "check"}) for line in map(json.loads, metrics.read_text().splitlines())
    ]
    assert logged == [(0, "eval_loss"), (1, "loss"), (1, "eval_loss")]


def test_failed_metrics_write_reports_the_path_and_free_bytes(tmp_path: Path) -> None:
    reporter = Reporter(LoggingConfig(wandb=WandbConfig(mode=WandbMode.disabled)), str(tmp_path), enabled=True)
    with (
        full_disk(),
        pytest.raises(OSError, match=rf"File too large \([\d,]+ bytes are free\): '{tmp_path}/metrics.jsonl'"),
    ):
        reporter.evaluation(step=1, eval_loss=0.5, count=3)


def test_failed_write_of_the_times_of_an_attempt_reports_the_path_and_free_bytes(tmp_path: Path) -> None:
    (tmp_path / "logs" / "attempt_1").mkdir(parents=True)
    path = tmp_path / "logs" / "attempt_1" / "progress.json"
    with full_disk(), pytest.raises(OSError, match=rf"File too large \([\d,]+ bytes are free\): '{path}'"):
        record_start(tmp_path, 1, 3, 100.0)


def test_failed_write_of_an_error_report_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with full_disk():
        write_report(tmp_path, 1, ValueError("the reason"))
    stderr = capsys.readouterr().err
    assert stderr.startswith("rank 1: ValueError: the reason\n")
    assert f"{tmp_path}/rank_1.error.json could not be written: [Errno 27] File too large" in stderr


def test_failed_write_of_the_result_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = start(config(str(tmp_path / "run")))
    with full_disk():
        directory.conclude("failed", "rank 0: OSError")
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"{directory.path}/result.json could not be written: File too large (")
    end(directory)


def test_json_file_on_a_full_disk_raises_one_error(tmp_path: Path) -> None:
    """The file is closed after the error without a second attempt to write, whose error would follow the first."""
    with full_disk(), pytest.raises(OSError, match="File too large") as caught:
        write_json(tmp_path / "state.json", {"step": 3})
    assert caught.value.__context__ is None
    assert (tmp_path / "state.json").read_bytes() == b""


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
