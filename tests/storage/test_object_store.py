"""Object stores: verified and repeated reads and writes, and the node's cache, against a real S3 server."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from components.storage import object_store
from components.storage.node_cache import NodeCache
from components.storage.object_store import ObjectStore, StorageError, StoredObject, package_problems, url_problems
from tests.distributed.disks import small_disk
from tests.storage.conftest import S3, SECRET

ROOT = "s3://bucket/folder"


def test_reads_return_what_was_written(s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(object_store, "_PART_BYTES", 5 << 20)
    store, content = ObjectStore(ROOT), os.urandom((12 << 20) + 1)
    (tmp_path / "large").write_bytes(content)
    store.upload(tmp_path / "large", f"{ROOT}/large")  # three parts
    store.write(f"{ROOT}/small.json", b"{}")
    assert s3.get("folder/large") == content
    found = store.list(ROOT)
    assert [(each.url, each.bytes) for each in found] == [(f"{ROOT}/large", len(content)), (f"{ROOT}/small.json", 2)]
    store.download(found[0], tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == content
    assert store.read(f"{ROOT}/small.json") == b"{}"
    assert store.read_range(f"{ROOT}/large", 5, 9) == content[5:9]
    store.remove([f"{ROOT}/large", f"{ROOT}/absent"])
    assert s3.names() == ["folder/small.json"]
    assert store.repeats() is None


@pytest.mark.parametrize("missing", [None, OSError(errno.ENOSYS, "NotImplemented"), NotImplementedError()])
def test_an_object_is_created_only_if_it_is_new(
    s3: S3, monkeypatch: pytest.MonkeyPatch, missing: Exception | None
) -> None:
    """In one request, or after a look where the store has no conditional writes."""
    store = ObjectStore(ROOT)
    write = store._fs.pipe_file

    def without_condition(url: str, content: bytes, mode: str = "") -> None:
        if mode and missing is not None:
            raise missing
        write(url, content, **({"mode": mode} if mode else {}))

    monkeypatch.setattr(store._fs, "pipe_file", without_condition)
    for content in (b"first", b"second"):
        store.put(f"{ROOT}/new", content, only_new=True)
    assert s3.get("folder/new") == b"first"
    store.put(f"{ROOT}/new", b"third", only_new=False)
    assert s3.get("folder/new") == b"third"


def test_absent_objects_are_reported_at_once(s3: S3) -> None:
    store = ObjectStore(ROOT)
    with pytest.raises(FileNotFoundError):
        store.stat(f"{ROOT}/absent")
    with pytest.raises(FileNotFoundError):
        store.read("s3://no-such-bucket/x")
    assert store.list("s3://no-such-bucket/x") == []


def test_one_failed_request_in_five_changes_nothing(faulty_s3: S3, tmp_path: Path) -> None:
    """Errors 500 and 503, silence, cut and lost answers, at 20 %: all bits arrive, and each fault is counted."""
    faulty_s3.faults(share=0.2)
    store, content = ObjectStore(ROOT), os.urandom(1 << 16)
    (tmp_path / "file").write_bytes(content)
    for number in range(12):
        store.upload(tmp_path / "file", f"{ROOT}/{number}")
        assert store.read(f"{ROOT}/{number}") == content
    injected = sum(faulty_s3.faults().values())
    line = store.repeats()
    assert injected >= 5
    assert line is not None
    # A lost answer of the proxy may be repeated by the HTTP client itself, so the counts may differ by those.
    assert int(line.split(": ")[1].split(" ")[0]) >= injected - faulty_s3.faults().get("lost answer", 0)
    assert SECRET not in line


def test_a_store_that_always_fails_is_an_error(faulty_s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_LONGEST_WAIT", 0.01)
    monkeypatch.setattr(object_store, "_REQUEST_ATTEMPTS", 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(StorageError, match=r"cannot look up s3://bucket/folder/x: .*\(3 attempts\)"):
        ObjectStore(ROOT, attempts=3).stat(f"{ROOT}/x")


def test_urls_and_missing_packages_are_config_errors() -> None:
    assert url_problems("data.path", "s3://bucket/x.jsonl") == url_problems("data.path", "owner/name") == []
    assert "ftp:// are not supported" in url_problems("data.path", "ftp://host/x")[0]
    assert url_problems("data.path", "s3://")[0].endswith("must be s3://BUCKET/NAME, without ? and #")
    assert "hunter2" not in url_problems("data.path", "s3://me:hunter2@bucket/x")[0]
    if problems := package_problems("data.path", "gs://bucket/x"):  # if gcsfs is not installed
        assert problems == [
            "data.path=gs://bucket/x: gcsfs is not installed; run pip install 'meshbook[gcs]', or use a local path"
        ]


def test_the_cache_keeps_parts_below_its_limit_and_repairs_them(tmp_path: Path) -> None:
    limit, part = 64 << 10, 1 << 10
    cache, reads = NodeCache(tmp_path, limit), []

    def read(start: int) -> bytes:
        reads.append(start)
        return bytes([start // part % 256]) * part

    source = StoredObject("s3://bucket/shard", 1 << 30, "v1")
    for start in range(0, 100 * part, part):
        assert cache.part(source, start, lambda start=start: read(start)) == bytes([start // part]) * part
        assert sum(file.stat().st_size for file in tmp_path.rglob("*.part")) <= limit
    assert len(reads) == 100
    cache.part(source, 99 * part, lambda: read(99 * part))
    assert len(reads) == 100, "the newest part was not kept"
    newest = max(tmp_path.rglob("*.part"), key=lambda file: int(file.name.split(".")[0], 16))
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    assert cache.part(source, 99 * part, lambda: read(99 * part)) == bytes([99]) * part
    assert len(reads) == 101, "a damaged part was not read again"
    cache.part(source._replace(version="v2"), 99 * part, lambda: read(99 * part))
    assert len(reads) == 102, "a part of another version was used"


def test_the_cache_leaves_nothing_of_parts_that_a_full_disk_rejects(tmp_path: Path) -> None:
    """A temporary file per part would keep the disk full."""
    if os.geteuid() != 0:
        pytest.skip("mounts a small disk: needs root")
    with small_disk(tmp_path / "disk", "5m"):
        cache, source = NodeCache(tmp_path / "disk", 64 << 20), StoredObject("s3://bucket/shard", 1 << 30, "v1")
        for start in range(0, 12 << 20, 1 << 20):
            assert cache.part(source, start, lambda: b"x" * (1 << 20)) == b"x" * (1 << 20)
        files = [file.name for file in (tmp_path / "disk").rglob("*.part*")]
        assert len(files) == 4  # what fits, without temporary files
        assert not [name for name in files if ".tmp" in name]
