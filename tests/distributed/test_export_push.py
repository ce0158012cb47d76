"""scripts/export.py --push to a hub on this machine: an upload, or none if the export or a check fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from scripts.export import main
from tests.distributed.local_hub import TOKEN, LocalHub, Repository, local_hub
from tests.distributed.test_export_script import run_config, save

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a single process with a checkpoint."""
    folder = tmp_path_factory.mktemp("push") / "run"
    save(run_config(folder, "tied"), None)
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    """A hub that huggingface_hub in this process uses; nobody is logged in but by HF_TOKEN."""
    with local_hub() as served:
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # read from the environment of the tests at import
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the local server has no xet storage
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        yield served


def push(run_dir: Path, out: Path, *arguments: str) -> int:
    return main([str(run_dir), "--out", str(out), *arguments])


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_export_is_uploaded_to_a_private_repository_by_a_real_process(
    run_dir: Path, hub: LocalHub, tmp_path: Path
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE"))}
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.address}
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN)  # as `hf auth login` stores it
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/export.py", run_dir, "--out", "out", "--push", "mine"],
        cwd=tmp_path,
        env={**clean, **home},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"uploaded {hub.address}/me/mine"
    assert TOKEN not in done.stdout + done.stderr
    assert hub.repositories.keys() == {"me/mine"}
    repository = hub.repositories["me/mine"]
    assert repository.private
    assert repository.files == files_in(tmp_path / "out")
    assert {"model.safetensors", "config.json", "README.md"} <= repository.files.keys()


def test_existing_public_repository_is_updated_only_with_public(
    run_dir: Path, hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories |= {"me/open": Repository(private=False), "me/closed": Repository(private=True)}
    assert push(run_dir, tmp_path / "no", "--push", "open") == 2
    assert "--push open: me/open exists and is public; add --public, or choose" in capsys.readouterr().err
    assert push(run_dir, tmp_path / "no", "--push", "me/closed", "--public") == 2
    assert "me/closed exists and is private; leave out --public, or choose" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    foreign = {"config.json": b'{"mine": 1}', "notes.txt": b"mine"}
    hub.repositories["me/foreign"] = Repository(private=True, files=dict(foreign))
    assert push(run_dir, tmp_path / "no", "--push", "foreign") == 2
    assert "me/foreign holds files that no export has written (config.json, notes.txt)" in capsys.readouterr().err
    assert hub.repositories["me/foreign"].files == foreign
    assert hub.writes == []
    for name in ("out", "again"):
        assert push(run_dir, tmp_path / name, "--push", "open", "--public") == 0
        assert hub.repositories["me/open"].files == files_in(tmp_path / name)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no token", "--push mine: there is no token of the Hugging Face hub; run `hf auth login`, or set HF_TOKEN"),
        ("wrong token", "--push mine: the hub rejects the token; run `hf auth login`, or set HF_TOKEN to a valid one"),
        (
            "no network",
            "cannot be reached: [Errno 111] Connection refused; check the network and HF_ENDPOINT, or leave",
        ),
        ("offline", "--push mine: HF_HUB_OFFLINE is set; unset it, or leave out --push"),
        ("name", "--push a/b/c: must be NAME or OWNER/NAME"),
        ("public", "--public: only affects an upload; add --push NAME, or leave out --public"),
        ("damaged", "step_3: not a complete checkpoint: manifest.json is missing"),
    ],
)
def test_nothing_is_exported_or_uploaded_if_a_check_fails(
    kind: str,
    message: str,
    run_dir: Path,
    hub: LocalHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = {"name": ("--push", "a/b/c"), "public": ("--public",)}.get(kind, ("--push", "mine"))
    source = run_dir
    if kind == "no token":
        monkeypatch.delenv("HF_TOKEN")
    elif kind == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_other")
    elif kind == "no network":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    elif kind == "offline":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    elif kind == "damaged":
        source = tmp_path / "run"
        shutil.copytree(run_dir, source)
        (source / "checkpoints" / "step_3" / "manifest.json").unlink()
    assert push(source, tmp_path / "out", *arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "hf_other" not in shown
    assert not (tmp_path / "out").exists()
    assert hub.writes == []


@pytest.mark.parametrize(("name", "may_write"), [("others/mine", True), ("mine", False)])
def test_missing_permission_keeps_the_export(
    name: str,
    may_write: bool,
    run_dir: Path,
    hub: LocalHub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hub.may_write = may_write
    out = tmp_path / "out"
    assert push(run_dir, out, "--push", name) == 2
    shown = capsys.readouterr()
    assert f"exported {out}" in shown.out
    assert "me may not write there; use a token with write access, or a name in a namespace of yours" in shown.err
    assert f"the export in {out} is complete: `hf upload" in shown.err
    assert (out / "model.safetensors").is_file()
    assert hub.repositories == {}
