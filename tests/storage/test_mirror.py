"""Copies of checkpoints in an object store: manifest last, retention, damage, and a run that lost its directory."""

from __future__ import annotations

import json
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.checkpoint import Mirror, Saver, find_checkpoint, load_checkpoint, save_checkpoint
from components.checkpoint.manifest import CheckpointError
from components.config.schema.run import CheckpointConfig
from components.protocol.errors import ConfigError
from components.storage import object_store, run_claim
from components.storage.run_claim import problem_before_launch
from tests.distributed.test_checkpoint_crash import start
from tests.harness import run_ranks
from tests.storage.conftest import S3

URL = "s3://bucket/run"
POLICY = CheckpointConfig(keep=2, remote=URL)


def opened(run_dir: Path, policy: CheckpointConfig = POLICY) -> Mirror:
    """Return the mirror of a run."""
    mirror = Mirror.open(policy, run_dir)
    assert mirror is not None
    return mirror


def save(run_dir: Path, step: int, mirror: Mirror) -> Path:
    """Save a step and copy it."""
    path = save_checkpoint(run_dir, step, *start(float(step)), {"step": step}, POLICY)
    mirror.upload(path)
    return path


def resumed_step(run_dir: Path, mirror: Mirror | None) -> int | None:
    """Return the step that a run resumes from."""
    found = find_checkpoint(run_dir, "auto", mirror)
    return None if found is None else int(load_checkpoint(found, *start())["step"])


def steps(s3: S3) -> list[str]:
    """Return the names of the copies that have a manifest."""
    return sorted(name.split("/")[1] for name in s3.names("run/step_") if name.endswith("/manifest.json"))


def test_copies_follow_the_retention_policy_and_outlive_the_directory(s3: S3, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    mirror = opened(run_dir)
    for step in (1, 2, 3):
        last = save(run_dir, step, mirror)
    assert steps(s3) == ["step_2", "step_3"]
    times = s3.times("run/step_3/")
    assert times["run/step_3/manifest.json"] == max(times.values())
    assert {name.split("/")[-1] for name in s3.names("run/step_3")} == {each.name for each in last.iterdir()}
    record = json.loads(s3.get("run/run.json"))
    assert sorted(record["folders"]["step_3"]) == sorted(each.name for each in last.iterdir())
    record["folders"]["step_9"] = ["random-00000.json", "state.json"]
    s3.put("run/run.json", json.dumps(record).encode())
    s3.put("run/step_9/random-00000.json", b"{}")  # a copy that was killed
    shutil.rmtree(run_dir)
    assert resumed_step(run_dir, opened(run_dir)) == 3
    assert [each.name for each in (run_dir / "checkpoints").iterdir()] == ["step_3"]
    save(run_dir, 4, opened(run_dir))
    assert steps(s3) == ["step_3", "step_4"]
    assert s3.names("run/step_9") == []


def test_damaged_copies_are_named_and_skipped(s3: S3, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = tmp_path / "run"
    mirror = opened(run_dir)
    names = {}
    for step in (1, 2):
        names[step] = save(run_dir, step, mirror)
    weights = next(name for name in s3.names("run/step_2") if name.endswith(".safetensors"))
    intact = s3.get(weights)

    def damaged(key: str, content: bytes | None) -> str:
        shutil.rmtree(run_dir, ignore_errors=True)
        caplog.clear()
        kept = s3.get(key)
        s3.delete(key) if content is None else s3.put(key, content)
        assert resumed_step(run_dir, opened(run_dir)) == 1
        s3.put(key, kept)
        assert not list((run_dir / "checkpoints").glob("*.tmp-*"))
        return caplog.text

    flipped = intact[:-1] + bytes([intact[-1] ^ 1])
    assert f"step_2 is skipped: {Path(weights).name} is damaged" in damaged(weights, flipped)
    assert f"step_2 is skipped: {Path(weights).name} has" in damaged(weights, intact[:-1])
    assert f"step_2 is skipped: {Path(weights).name} is missing" in damaged(weights, None)
    manifest = s3.get("run/step_2/manifest.json")
    assert "does not match its own hash" in damaged(
        "run/step_2/manifest.json", manifest.replace(b'"step": 2', b'"step": 7')
    )
    damaged("run/step_2/manifest.json", None)
    shutil.rmtree(run_dir)
    assert resumed_step(run_dir, opened(run_dir)) == 2


def test_ranks_share_the_copies(s3: S3, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def body(rank: int) -> int | None:
        save(run_dir, 5, opened(run_dir))
        return None

    run_ranks(2, body)
    shutil.rmtree(run_dir)

    def resume(rank: int) -> int | None:
        return resumed_step(run_dir, opened(run_dir))

    assert run_ranks(2, resume) == [5, 5]


def test_a_store_that_fails_is_no_damage(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"
    save(run_dir, 1, opened(run_dir))
    mirror = opened(tmp_path / "run")
    monkeypatch.setattr(mirror, "store", SimpleNamespace(list=_fail, repeats=lambda: None))
    with pytest.raises(CheckpointError, match="could not be listed: rank 0: StorageError: out of service"):
        find_checkpoint(run_dir, "auto", mirror)
    with pytest.raises(CheckpointError, match=f"could not be copied to {URL}: rank 0: StorageError: out of service"):
        mirror.upload(run_dir / "checkpoints" / "step_1")


def _fail(*_: object) -> None:
    raise object_store.StorageError("out of service")


def test_a_url_belongs_to_one_run(s3: S3, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    mirror = opened(run_dir)
    assert json.loads(s3.get("run/run.json"))["run"] == str(run_dir)
    taken = f"{URL}: belongs to the run {run_dir}; set it to another URL, .* or remove {URL}/run.json"
    with pytest.raises(ConfigError, match=taken):  # before the first copy too
        opened(tmp_path / "other")
    save(run_dir, 1, mirror)
    # Another run that starts over in the same directory continues the order of the copies.
    shutil.rmtree(run_dir)
    model, optimizer = start(7.0)
    with Saver(run_dir, model, optimizer, POLICY, mirror=opened(run_dir)) as saver:
        saver.save(1, {"step": 7}, last=True)
    assert steps(s3) == ["step_1", "step_1.1"]
    shutil.rmtree(run_dir)
    assert resumed_step(run_dir, opened(run_dir)) == 7


STRANGERS = {
    "run/step_500/model.pt": b"precious",
    "run/step_7/notes.txt": b"mine",
    "run/step_8/manifest.json": b'{"mine": 1}',
    "run/step_8/model.pt": b"mine too",
    "run/export/config.json": b'{"mine": 2}',
    "run/notes.txt": b"?",
}


def test_a_url_with_objects_of_no_run_is_refused(s3: S3, tmp_path: Path) -> None:
    for name, content in STRANGERS.items():
        s3.put(name, content)
    refused = f"{URL}: contains objects, but no run: export/config.json, notes.txt, .* and 1 more; choose another URL"
    with pytest.raises(ConfigError, match=refused):
        opened(tmp_path / "run")
    assert re.search(refused, str(problem_before_launch(URL, str(tmp_path / "run"))))
    assert {name: s3.get(name) for name in s3.names()} == STRANGERS
    s3.put("empty/", b"")  # a folder, as consoles create it
    opened(tmp_path / "run", CheckpointConfig(remote="s3://bucket/empty"))
    assert problem_before_launch("s3://bucket/empty", str(tmp_path / "run")) is None
    assert "belongs to the run" in str(problem_before_launch("s3://bucket/empty", str(tmp_path / "other")))


def test_only_the_objects_of_the_run_are_removed_or_replaced(s3: S3, tmp_path: Path) -> None:
    mirror = opened(tmp_path / "run")
    save(tmp_path / "run", 1, mirror)
    strangers = STRANGERS | {"run/step_1/notes.txt": b"mine", "run/step_1/sub/state.json": b"{}"}
    for name, content in strangers.items():
        s3.put(name, content)
    for step in (2, 3, 4, 7):
        save(tmp_path / "run", step, mirror)
    assert steps(s3) == ["step_4", "step_7.1", "step_8"]  # the stranger's step_8 has a manifest of its own
    export = tmp_path / "export"
    export.mkdir()
    for name in ("config.json", "model.safetensors"):
        (export / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"did not write {URL}/export/config.json; remove them"):
        mirror.upload_export([export])
    assert {name: s3.get(name) for name in strangers} == strangers
    s3.delete("run/export/config.json")
    mirror.upload_export([export])
    opened(tmp_path / "run").upload_export([export])  # the run's own export is replaced
    assert s3.get("run/export/config.json") == b"{}"
    del strangers["run/export/config.json"]
    assert {name: s3.get(name) for name in strangers} == strangers


def test_checkpoints_that_another_run_left_are_used_and_never_removed(s3: S3, tmp_path: Path) -> None:
    mirror = opened(tmp_path / "run")
    for step in (1, 2):
        save(tmp_path / "run", step, mirror)
    s3.delete("run/run.json")
    mirror = opened(tmp_path / "other")
    assert resumed_step(tmp_path / "other", mirror) == 2
    for step in (3, 4, 5):
        save(tmp_path / "other", step, mirror)
    assert steps(s3) == ["step_1", "step_2", "step_4", "step_5"]


@pytest.mark.parametrize("same", [False, True], ids=["two runs", "one run on two machines"])
@pytest.mark.parametrize("resumed", [False, True], ids=["new", "resumed"])
def test_of_two_starts_at_once_one_gets_the_url(s3: S3, tmp_path: Path, same: bool, resumed: bool) -> None:
    run_dirs = [tmp_path / "run", tmp_path / ("run" if same else "other")]
    if resumed:
        save(run_dirs[0], 1, opened(run_dirs[0]))
    outcomes: list[str] = []
    together = threading.Barrier(2)

    def begin(run_dir: Path) -> None:
        together.wait()
        try:
            opened(run_dir)
            outcomes.append("ok")
        except ConfigError as error:
            outcomes.append(str(error))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_claim, "_SETTLE_SECONDS", 0.5)
        threads = [threading.Thread(target=begin, args=[run_dir]) for run_dir in run_dirs]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    refused, accepted = sorted(outcomes, key=lambda text: text == "ok")
    assert accepted == "ok"
    assert ("another start of the run" if same else "belongs to the run") in refused


def test_a_start_that_was_replaced_by_another_ends_at_its_next_save(s3: S3, tmp_path: Path) -> None:
    first, path = opened(tmp_path / "run"), save_checkpoint(tmp_path / "run", 1, *start(1.0), {"step": 1}, POLICY)
    second = opened(tmp_path / "run")
    with pytest.raises(ConfigError, match="another start of the run .*/run uses it now"):
        first.upload(path)
    assert s3.names("run/step") == []
    s3.delete("run/run.json")  # written again
    second.upload(path)
    assert steps(s3) == ["step_1"]


ODD_NAMES = ["", "sub/state.json", "..", "../../../evil", ".", "a\x1b]0;t\x07", "a" * 900, ".DS_Store", "extra.json"]


def test_objects_beside_those_of_the_manifest_change_nothing(
    s3: S3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    mirror = opened(run_dir)
    for step in (1, 2):
        last = save(run_dir, step, mirror)
    files = {each.name: each.read_bytes() for each in last.iterdir()}
    for name in ODD_NAMES:
        s3.put(f"run/step_2/{name}", b"x" if name else b"")
    shutil.rmtree(run_dir)
    mirror = opened(run_dir)
    assert resumed_step(run_dir, mirror) == 2
    assert {each.name: each.read_bytes() for each in (run_dir / "checkpoints" / "step_2").iterdir()} == files
    (line,) = [each for each in caplog.messages if "not of it" in each]
    assert line.count("\n") == 0
    assert "\x1b" not in line
    assert line.endswith("and 3 more")
    save(run_dir, 3, mirror)
    assert steps(s3) == ["step_2", "step_3"]
    assert list(tmp_path.rglob("*evil*")) == []


DEEP = b"[" * 200_000


def test_a_damaged_newest_manifest_is_named_and_skipped(
    s3: S3, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = tmp_path / "run"
    mirror = opened(run_dir)
    for step in (1, 2):
        save(run_dir, step, mirror)
    for manifest in (DEEP, b'{"files": []}', b"\xff\xfe", b""):
        for place in (str(run_dir / "checkpoints"), URL):
            if place != URL:
                (run_dir / "checkpoints" / "step_2" / "manifest.json").write_bytes(manifest)
            else:
                s3.put("run/step_2/manifest.json", manifest)
                shutil.rmtree(run_dir)
            caplog.clear()
            mirror = opened(run_dir)
            assert find_checkpoint(run_dir, "auto", None if place != URL else mirror) == run_dir / "checkpoints/step_1"
            (line,) = [each for each in caplog.messages if "skipped" in each]
            assert line.startswith(f"checkpoint {place}/step_2 is skipped: manifest.json")
        shutil.copytree(run_dir / "checkpoints" / "step_1", run_dir / "checkpoints" / "step_2")
    shutil.rmtree(run_dir / "checkpoints" / "step_2")
    for step in (2, 3):
        save(run_dir, step, mirror)
    assert steps(s3) == ["step_2", "step_2.1", "step_3"]
    assert s3.get("run/step_2/manifest.json") == manifest
    shutil.rmtree(run_dir)
    for name in ("step_2.1", "step_3"):
        s3.put(f"run/{name}/manifest.json", manifest)
    with pytest.raises(ConfigError, match=f"all of its checkpoints are damaged or incomplete: {URL}/step_2"):
        resumed_step(run_dir, opened(run_dir))


@pytest.mark.parametrize(
    "content",
    [
        DEEP,
        b"\xff\xfe",
        b"[]",
        b'{"run": 7}',
        b'{"run": "/x", "folders": {"..": ["a"]}}',
        b'{"run": "/x", "folders": 1}',
    ],
)
def test_a_foreign_run_json_is_refused(s3: S3, tmp_path: Path, content: bytes) -> None:
    s3.put("run/run.json", content)
    with pytest.raises(ConfigError, match=f"{URL}/run.json is not what a run writes .*; choose another URL"):
        opened(tmp_path / "run")
    s3.put("run/run.json", json.dumps({"run": "/x\x1b]0;t"}).encode())
    with pytest.raises(ConfigError, match=r"belongs to the run /x\\x1b]0;t;"):
        opened(tmp_path / "run")


def test_a_damaged_copy_does_not_count_for_retention(s3: S3, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    mirror = opened(run_dir)
    for step in (1, 2):
        save(run_dir, step, mirror)
    state = s3.get("run/step_2/state.json")
    s3.put("run/step_2/state.json", b" " * len(state))
    shutil.rmtree(run_dir)
    mirror = opened(run_dir)
    assert resumed_step(run_dir, mirror) == 1
    again = save(run_dir, 2, mirror)
    assert steps(s3) == ["step_1", "step_2", "step_2.1"]  # the two newest intact ones, and the damaged one
    s3.put("run/step_2.1/state.json", b"")
    mirror.upload(again)
    assert steps(s3) == ["step_1", "step_2", "step_2.1", "step_2.2"]  # an equal manifest does not make a copy intact


def test_only_the_last_copy_must_succeed(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_FIRST_WAIT", 0.01)
    lines: list[str] = []
    model, optimizer = start(1.0)
    mirror = opened(tmp_path / "run")
    monkeypatch.setattr(mirror, "store", SimpleNamespace(list=_fail, repeats=lambda: None))
    with Saver(tmp_path / "run", model, optimizer, POLICY, lines.append, mirror=mirror) as saver:
        saver.save(1, {"step": 1})
        assert lines[-1].endswith("out of service; training continues, and the next save is copied again")
        with pytest.raises(CheckpointError, match="out of service"):
            saver.save(2, {"step": 2}, last=True)
    assert resumed_step(tmp_path / "run", None) == 2


def test_last_checkpoint_whose_copy_failed_is_copied_by_the_next_attempt(s3: S3, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    path = save_checkpoint(run_dir, 1, *start(1.0), {"step": 1}, POLICY)
    lines: list[str] = []
    for _ in range(2):
        with Saver(run_dir, *start(), POLICY, lines.append, mirror=opened(run_dir)) as saver:
            saver.copy(path)
    assert steps(s3) == ["step_1"]
    assert all(line.startswith(f"copied to {URL}/step_1") for line in lines)


def test_wrong_urls_are_config_errors() -> None:
    for value, rule in {
        "/tmp/x": "must be a URL",
        "ftp://x/y": "not supported",
        "s3://": "must be s3://BUCKET",
    }.items():
        with pytest.raises(ConfigError, match=rule):
            CheckpointConfig(remote=value)
