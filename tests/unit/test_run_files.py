"""Files of a run directory: copies resume, damage is repaired or rejected, planted links are not followed."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from components.config.compose.frozen import read_frozen, read_intact
from components.config.schema import FinetuneConfig
from components.config.schema.run import LoggingConfig
from components.config.stored_run import read_run
from components.launch.backend import recorded_job
from components.launch.clusters import job_of
from components.launch.job.attempts import Ended, begin, conclude
from components.launch.job.policy import attempts_of_job
from components.launch.job.scheduler import copy_code
from components.launch.k8s.pod import Pod
from components.launch.run_directory import RunDirectory
from components.launch.run_directory_lease import take_lease
from components.models.weights.weight_files import NewFolder
from components.observability import Reporter, Result
from components.observability.result import lost_work
from components.observability.trackers import TrackedRun
from components.protocol.errors import ConfigError
from components.protocol.failures import read_reports, write_report
from components.protocol.run_files import (
    _remove_own,
    checkpoint_folders,
    checkpoint_name,
    checkpoint_step,
    create_marker,
    keep_only_folder,
    own_folder,
    temporary_name,
    unfinished_checkpoints,
)
from tests.suites import TORTURE
from tests.unit.test_launch_run_directory import config, end, start, take_step


def started(path: Path) -> RunDirectory:
    directory = start(config(str(path)))
    end(directory)
    return directory


def test_copy_with_links_resolved_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`cp -rL`, `scp -r` and `aws s3 sync` turn the link logs/latest into a folder."""
    first = started(tmp_path / "run")
    (first.logs / "rank_1.log").write_text("a line")
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=False)
    latest = tmp_path / "copy" / "logs" / "latest"
    assert latest.is_dir()
    assert not latest.is_symlink()
    second = started(tmp_path / "copy")
    assert latest.is_symlink()
    assert latest.resolve() == second.logs
    assert sorted(os.listdir(latest.parent)) == ["attempt_0", "attempt_1", "latest"]
    assert (first.logs / "rank_1.log").read_text() == "a line"
    assert capsys.readouterr().err == ""


def test_user_folder_at_logs_latest_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = started(tmp_path / "run").path / "logs"
    (logs / "latest").unlink()
    (logs / "latest").mkdir()
    (logs / "latest" / "notes").write_text("mine")
    second = started(tmp_path / "run")
    assert (logs / "latest").resolve() == second.logs
    assert (logs / "latest.damaged" / "notes").read_text() == "mine"
    assert "latest: is a folder of its own; moved to latest.damaged" in capsys.readouterr().err


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    index = data.index(b"seed: 42") + len(b"seed: 4")
    data[index] ^= 1  # 42 becomes 43
    path.write_bytes(data)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "flipped": flip,
    "not UTF-8": lambda path: path.write_bytes(b"\xff" + path.read_bytes()),
    "a folder": folder,
    "a link to an endless file": link,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_config_is_restored_from_the_copy_of_an_attempt(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = started(tmp_path / "run")
    DAMAGE[kind](first.path / "config.yaml")
    second = start(config(str(tmp_path / "run")))
    error = capsys.readouterr().err
    assert f"{first.path}/config.yaml: restored from {first.logs}/config.yaml" in error
    assert second.attempt == 1
    assert read_frozen(second.path / "config.yaml", FinetuneConfig).run.seed == 42
    assert os.path.lexists(second.path / "config.yaml.damaged") == (kind != "missing")
    end(second)


def test_config_is_restored_from_the_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = started(tmp_path / "run")
    text = (first.path / "config.yaml").read_text()
    for step, written in ((9, "seed: 3"), (10, text)):
        (first.path / "checkpoints" / f"step_{step}").mkdir(parents=True)
        (first.path / "checkpoints" / f"step_{step}" / "state.json").write_text(json.dumps({"config": written}))
    shutil.rmtree(first.path / "logs")
    (first.path / "config.yaml").unlink()
    end(start(config(str(tmp_path / "run"))))
    assert f"restored from {first.path}/checkpoints/step_10/state.json: missing" in capsys.readouterr().err


def test_damaged_config_without_intact_copy_is_rejected(tmp_path: Path) -> None:
    first = started(tmp_path / "run")
    for path in (first.path / "config.yaml", first.logs / "config.yaml"):
        flip(path)
    with pytest.raises(ConfigError, match=r"config.yaml: .*damaged.*no copy in logs/attempt_N or checkpoints/step_N"):
        start(config(str(tmp_path / "run")))
    (first.path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"no run \(config.yaml is missing, and no copy of it is intact\)"):
        start(config(str(tmp_path / "run")))


def test_config_without_a_checksum_is_refused_and_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By a rank, and by the next start."""
    first = started(tmp_path / "run")
    file = first.path / "config.yaml"
    text = file.read_text()
    refused = (
        f"{file}: cannot be read as the config of a run: damaged, or edited by hand (change keys on the "
        f"command line instead); an intact copy is in {first.logs}/config.yaml"
    )
    flip(file)
    for damaged in (file.read_text(), text.partition("\n")[2]):
        file.write_text(damaged)
        with pytest.raises(ConfigError) as caught:
            read_frozen(file, FinetuneConfig)
        assert str(caught.value) == refused
    started(tmp_path / "run")
    assert f"restored from {first.logs}/config.yaml: it was damaged or edited by hand" in capsys.readouterr().err
    assert file.read_text() == text


@pytest.mark.parametrize("name", ["environment.json", "result.json", "logs", "logs/attempt_0"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_damaged_files_without_training_state_do_not_stop_a_run(name: str, kind: str, tmp_path: Path) -> None:
    first = started(tmp_path / "run")
    path = first.path / name
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    (tmp_path / "elsewhere").mkdir()
    {
        "file": lambda: path.write_bytes(b"\xff{"),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(tmp_path / "elsewhere"),
    }[kind]()
    second = started(tmp_path / "run")
    take_step(second)
    second.conclude("failed", "boom")
    assert json.loads((second.path / "result.json").read_text()) == {"status": "failed", "error": "boom"}
    assert json.loads((second.path / "environment.json").read_text()) == {"recipe": "finetune"}
    assert (second.logs / "config.yaml").is_file()


def test_checkpoints_path_that_is_a_file_is_rejected(tmp_path: Path) -> None:
    first = started(tmp_path / "run")
    (first.path / "checkpoints").write_text("")
    with pytest.raises(ConfigError, match="checkpoints: is not a directory; move it away"):
        start(config(str(tmp_path / "run")))


NAMES = (
    *(".config.yaml.tmp", ".environment.json.tmp", "environment.json", "metrics.tmp", "metrics.jsonl", "result.tmp"),
    *(".result.json.tmp", "result.json", "loss.png", "logs/attempt_1/rank_1.error.tmp", "logs/attempt_1/rank_1.log"),
)


@pytest.mark.parametrize("dangling", [False, True])
def test_planted_links_are_not_followed_by_writes(dangling: bool, tmp_path: Path) -> None:
    """A link to another file is planted at every name that a start and a report write."""
    target = tmp_path / "precious"
    run = started(tmp_path / "run").path
    if not dangling:
        target.write_text("keep")
    for name in NAMES[:-2]:
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(target)
    directory = start(config(str(run)))
    for name in NAMES[-2:]:
        (run / name).symlink_to(target)
    report = Reporter(LoggingConfig(), str(run), enabled=True)
    report.continue_from(0)
    report.evaluation(step=0, eval_loss=2.0, count=3)
    report.finish(Result(status="ok", steps=0, mesh="", processes=1, wall_seconds=1.0, peak_memory_bytes=1))
    write_report(directory.logs, 1, ValueError("boom"))
    assert read_reports(directory.logs)[1].message == "boom"
    assert json.loads((run / "result.json").read_text())["status"] == "ok"
    assert [line["eval_loss"] for line in report.read()] == [2.0]
    assert target.exists() != dangling
    assert dangling or target.read_text() == "keep"
    end(directory)


@pytest.mark.parametrize(("mask", "files", "folders"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_file_modes_follow_the_umask_except_for_private_files(
    mask: int, files: int, folders: int, tmp_path: Path
) -> None:
    before = os.umask(mask)
    try:
        directory = start(config(str(tmp_path / "run")))
        logging = LoggingConfig(plot=False)  # a thread may draw loss.png after the umask is that of the test again
        Reporter(logging, str(directory.path), enabled=True).evaluation(step=0, eval_loss=2.0, count=3)
        write_report(directory.logs, 1, ValueError("a sample"))
        end(directory)
    finally:
        os.umask(before)
    private = {"environment.json", "rank_1.error.json", ".lock"}
    names = set()
    for entry in [directory.path, *directory.path.rglob("*")]:
        if not entry.is_symlink():
            expected = folders if entry.is_dir() else 0o600 if entry.name in private else files
            assert stat.S_IMODE(entry.stat().st_mode) == expected, entry
            names.add(entry.name)
    assert names >= {*private, "config.yaml", "metrics.jsonl"}


OWNED = (
    *("config.yaml", "environment.json", "result.json", "metrics.jsonl", "metrics.jsonl.damaged", "trackers.json"),
    *("job.sbatch", "job.yaml", "job_id", ".submission", "requeue", "restart", ".lock", ".lease", ".lease/1"),
    *(".lease/7", "logs", "logs/latest", "logs/first_step", "logs/pods", "logs/pods/j", "logs/pods/j/0"),
    *("logs/attempt_0", "logs/attempt_0/config.yaml", "logs/attempt_0/environment.json", "logs/attempt_0/result.json"),
    *("logs/attempt_0/progress.json", "logs/attempt_0/job", "logs/attempt_1", "logs/attempt", ".start"),
    ".start/config.yaml",
    *(".start/environment.json", ".start/before", ".start/before/code", "checkpoints", "checkpoints/step_1"),
    *("checkpoints/step_1/manifest.json", "checkpoints/step_1/state.json", "code", "code.new", "export", "adapter"),
    *("tensorboard", "wandb", "profile"),
)
"""Names of files and folders of a run that something of the project writes, lists, reads or removes."""


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # a longer path is refused
        server.bind(path.name)


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "link to a file": lambda path, outside: path.symlink_to(outside / "17"),
    "link to a folder": lambda path, outside: path.symlink_to(outside),
    "dangling link": lambda path, outside: path.symlink_to(outside / "new"),
    "pipe": lambda path, outside: os.mkfifo(path),
    "socket": lambda path, outside: a_socket(path),
    "file": lambda path, outside: path.write_bytes(b"\xff{"),
    "folder": lambda path, outside: path.mkdir(),
}


def use_run(run: Path, code: bool) -> None:
    """Do in `run` what a start, its ranks, its job and the tools do there. Raises ConfigError."""
    directory = start(config(str(run)))
    os.close(directory.lock or os.open(os.devnull, os.O_RDONLY))
    take_lease(run, lambda error: None).release()
    conclude(run, begin(run, "j", nodes=["n1"], ended=recorded_job(run) or ""), Ended(1))
    attempts_of_job(run, directory.attempt)
    Pod(run, "j", 0, 1, "uid").announce()
    assert "uid" in Pod(run, "j", 0, 1, "uid").announced().values()
    report = Reporter(LoggingConfig(plot=False), str(run), enabled=True)
    report.begin(1)
    report.accept_start()
    report.evaluation(step=1, eval_loss=2.0, count=3)
    report._mark_first_step()
    report.finish(Result(status="ok", steps=1, mesh="", processes=1, wall_seconds=1.0, peak_memory_bytes=1))
    TrackedRun.read(str(run)).store_id("wandb", "abc")
    write_report(directory.logs, 1, ValueError("boom"))
    for name in ("tensorboard", "wandb", "profile"):
        (own_folder(run / name) / "events").write_text("mine")
    for name in ("export", "adapter"):
        folder = NewFolder(run / name)
        folder.begin()
        (folder.path / "config.json").write_text("{}")
        folder.publish()
    if code:
        keep_only_folder(run / "code")
        copy_code(Path(__file__).parents[2] / "recipes" / "finetune.py", run / "code")
    create_marker(run / "requeue")
    job_of(run, search=True)
    read_run(run)
    assert "seed: 42" in read_intact(run / "config.yaml")
    assert json.loads((run / "result.json").read_text())["status"] == "ok"
    directory.discard("refused")


@pytest.mark.parametrize("name", OWNED)
def test_what_is_planted_at_a_name_of_a_run_is_not_followed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start is refused in a sentence, or works; nothing outside of the run changes, and nothing hangs."""
    monkeypatch.setattr("components.launch.slurm.submit.SlurmScheduler.find", lambda *_: None)
    monkeypatch.setattr("components.launch.job.scheduler._project_files", lambda: [Path("recipes/finetune.py")])
    monkeypatch.setattr("components.launch.run_directory_lease._SILENCE", 0.01)
    monkeypatch.setattr("components.launch.run_directory_lease._POLL", 0.01)
    monkeypatch.setenv("MESHBOOK_ATTEMPT", "1")
    monkeypatch.chdir(tmp_path)
    base, outside = tmp_path / "base", tmp_path / "outside"
    end(start(config(str(base))))
    for step in ("checkpoints/step_1", "logs/pods/j", ".start/before", ".lease"):
        (base / step).mkdir(parents=True)
    outside.mkdir()
    for number in (1, 2, 3, 17):
        (outside / str(number)).write_text("precious")
    if not TORTURE:  # they take most of the time, and are tested elsewhere
        monkeypatch.setattr("components.launch.run_directory_lock.from_yaml", lambda text, schema: None)
        monkeypatch.setattr("components.launch.run_directory_lock.check_changes", lambda text, cfg, origin: None)
    link = "link to a file" if Path(name).suffix or name[-1].isdecimal() else "link to a folder"
    for kind in PLANTED if TORTURE else (link, "pipe"):
        plant, run = PLANTED[kind], tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(base, run, symlinks=True)
        path = run / name
        _remove_own(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        plant(path, outside)
        with suppress(ConfigError):
            use_run(run, code=name.startswith("code"))
        assert sorted(each.name for each in outside.iterdir()) == ["1", "17", "2", "3"], kind
        assert {each.read_text() for each in outside.iterdir()} == {"precious"}, kind


def test_names_with_other_digits_are_no_numbers_of_a_run(tmp_path: Path) -> None:
    run = started(tmp_path / "run").path
    take_lease(run, lambda error: None).release()
    for digits in ("\u00b2", "\u0663", "007", "1_0", " 8"):
        (run / ".lease" / digits).touch()
        (run / "logs" / f"attempt_{digits}").mkdir()
        (run / "logs" / f"attempt_{digits}" / "progress.json").touch()
    second = started(run)
    assert second.attempt == 1
    assert lost_work(run).restarts == 0
    assert len(os.listdir(run / ".lease")) == 6


@pytest.mark.parametrize(("step", "again"), [(0, 0), (40, 0), (40, 1), (10**17, 12)])
def test_step_of_a_checkpoints_name_is_parsed(step: int, again: int) -> None:
    assert checkpoint_step(checkpoint_name(step, again)) == step


@pytest.mark.parametrize(
    "name", ["step_", "step_x", "step_4.", "step_4.1.2", "step_-1", "step_4.others", "step_4.tmp-0a"]
)
def test_names_that_are_not_of_a_published_checkpoint(name: str) -> None:
    assert checkpoint_step(name) is None


def test_checkpoint_folders_are_ordered_by_step(tmp_path: Path) -> None:
    names = ["step_2", "step_10", "step_10.1", "step_10.10", "step_100"]
    left = [temporary_name(name) for name in names[:2]]
    for name in (*names[::-1], *left, "notes"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint_folders(tmp_path)] == names
    assert [path.name for path in unfinished_checkpoints(tmp_path)] == sorted(left)
    assert checkpoint_folders(tmp_path / "missing") == unfinished_checkpoints(tmp_path / "missing") == []


CHECKPOINT_NAMES = re.compile(r"step_([\d\\(\[*?]|$)|^(checkpoints|state\.json)$|manifest\\?\.json|^checkpoints/")
"""Text of code that builds or parses names of checkpoints; step_N in messages is neither."""
OTHER_FILES = {
    "components/protocol/run_files.py": "defines the names",
    "components/data/token_store/manifest.py": "manifest.json of a token store",
    "components/config/compose/short_forms.py": "manifest.json of a token store",
    "components/data/sources/split_files.py": "state.json of a dataset that the datasets library saved",
    "components/launch/job/policy.py": "the file `checkpoints` in the logs of an attempt",
}


def checkpoint_literals(text: str) -> list[str]:
    """Return the string constants of Python code, docstrings aside, that build or parse names of checkpoints."""
    nodes = list(ast.walk(ast.parse(text)))
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in documentation]
    return [each.value for each in constants if isinstance(each.value, str) and CHECKPOINT_NAMES.search(each.value)]


@pytest.mark.parametrize(
    "line",
    [
        'path.glob("step_*")',
        'f"step_{step}"',
        'f"checkpoints/step_{step}*"',
        're.compile(r"step_\\d+")',
        're.compile(r"step_[0-9]+/manifest\\.json")',
        'run_dir / "checkpoints" / "step_4"',
        'path / "state.json"',
        'name.startswith("step_")',
    ],
)
def test_literals_of_checkpoint_names_are_found(line: str) -> None:
    assert checkpoint_literals(line)
    assert not checkpoint_literals('"set it to RUN/checkpoints/step_N"; cfg.step_timeout; "step_seconds"')


def test_names_of_checkpoints_are_built_and_parsed_in_one_file() -> None:
    root = Path(__file__).resolve().parents[2]
    found = {
        str(file.relative_to(root)): literals
        for folder in ("components", "scripts", "meshbook")
        for file in (root / folder).rglob("*.py")
        if (literals := checkpoint_literals(file.read_text()))
    }
    assert found.keys() == OTHER_FILES.keys(), {name: found[name] for name in found.keys() - OTHER_FILES.keys()}
