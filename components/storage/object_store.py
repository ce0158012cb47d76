"""Object stores: URLs, and reads and writes that are verified and repeated a bounded number of times if they fail."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from components.protocol.failures import StatedFailure
from components.protocol.safe_parsing import LARGEST
from components.terminal import printable

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
ATTEMPTS = 4
"""How often an operation is tried. On S3, each request of an operation is tried `_REQUEST_ATTEMPTS` times."""
_READ_BYTES = 32 * 1024**2
"""Bytes per request of a download."""
_PART_BYTES = 64 * 1024**2
"""Bytes per part of a multi-part upload."""
_REQUEST_ATTEMPTS = 4
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 10.0  # seconds between attempts: doubled each time, times a random factor
_PARALLEL = 4  # requests of one download at a time
_CONNECT_SECONDS, _SILENT_SECONDS = 10, 30
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "LastModified", "mtime")
_REPEATED_CODES = ("RequestTimeout", "RequestTimeTooSkewed", "SlowDown", "Throttling", "ThrottlingException")
_PERMANENT = (PermissionError, IsADirectoryError, NotADirectoryError)


class StorageError(StatedFailure, OSError):
    """An operation on an object store failed, with its reason; repeating it did not help."""


class StoredObject(NamedTuple):
    """An object in a store."""

    url: str
    bytes: int
    version: str
    """Changes with the content: its ETag, generation, hash or time, whichever the store has."""


@dataclass(slots=True)
class _Repeats:
    """Requests and operations that failed and were repeated."""

    reasons: Counter[str]
    seconds: float = 0.0
    """Time in failed operations and in waiting after them."""


class ObjectStore:
    """Objects of one scheme; safe to use from several threads, not after a fork.

    Credentials and endpoints are those that the backend finds in the environment, such as AWS_ACCESS_KEY_ID,
    AWS_PROFILE and AWS_ENDPOINT_URL. All methods raise StorageError once `ATTEMPTS` attempts have failed, or at once
    for an error that another attempt cannot change, and FileNotFoundError for an object that does not exist.
    """

    def __init__(self, url: str, attempts: int = ATTEMPTS) -> None:
        """Open the store that a URL belongs to. Nothing is requested yet."""
        self._attempts = attempts
        self.scheme = _scheme_of(url)
        self._place = f"{self.scheme}://{url.partition('://')[2].partition('/')[0]}"
        self._repeats = _Repeats(Counter())
        self._lock = threading.Lock()
        self._random = random.Random()  # the state of the global one belongs to the run
        self._fs = self._open()

    def stat(self, url: str) -> StoredObject:
        """Return the size and version of an object."""
        return self._retry(f"look up {url}", lambda: self._described(self._fs.info(url)))

    def list(self, url: str) -> list[StoredObject]:
        """Return all objects below `url`, in folders too, sorted by name; empty if there are none.

        Leaves out the empty objects that consoles write to show a folder, and an object at `url` itself.
        """

        def find() -> list[StoredObject]:
            listing = self._fs.find(url.rstrip("/") + "/", detail=True)
            listed = [self._described(each) for _, each in sorted(listing.items())]
            return [
                each for each in listed if each.url != url.rstrip("/") and (each.bytes or not each.url.endswith("/"))
            ]

        try:
            return self._retry(f"list {url}", find)
        except FileNotFoundError:
            return []

    def read(self, url: str) -> bytes:
        """Return the content of a small object. Raises ValueError for one of more than `LARGEST` bytes."""

        def read() -> bytes:
            size = int(self._fs.info(url)["size"])
            if size > LARGEST:
                raise ValueError(f"it has {size:,} bytes, more than {LARGEST:,}")
            return _of_length(self._fs.cat_file(url), size)

        return self._retry(f"read {url}", read)

    def read_range(self, url: str, start: int, stop: int) -> bytes:
        """Return the bytes from `start` to `stop` of an object."""
        if start >= stop:
            return b""
        return self._retry(
            f"read {url}", lambda: _of_length(self._fs.cat_file(url, start=start, end=stop), stop - start)
        )

    def download(self, source: StoredObject, file: Path) -> None:
        """Copy an object to a new file, and fsync it. Raises OSError, in which case the file is removed."""
        try:
            with file.open("xb") as output, ThreadPoolExecutor(_PARALLEL) as pool:
                descriptor = output.fileno()
                os.ftruncate(descriptor, source.bytes)

                def copy(start: int) -> None:
                    data = self.read_range(source.url, start, min(start + _READ_BYTES, source.bytes))
                    written = 0
                    while written < len(data):
                        written += os.pwrite(descriptor, data[written:], start + written)

                list(pool.map(copy, range(0, source.bytes, _READ_BYTES)))
                os.fsync(descriptor)
        except BaseException:
            file.unlink(missing_ok=True)
            raise

    def upload(self, file: Path, url: str) -> None:
        """Copy a file to an object, in parts if it is large, and compare their sizes."""
        options = {"chunksize": _PART_BYTES} if self.scheme == "s3" else {}
        size = file.stat().st_size

        def put() -> None:
            self._fs.put_file(str(file), url, **options)
            stored = int(self._fs.info(url)["size"])
            if stored != size:
                raise OSError(f"{stored:,} bytes were stored instead of {size:,}")

        self._retry(f"write {url}", put)

    def write(self, url: str, content: bytes) -> None:
        """Write a small object, and compare what the store returns with it."""

        def put() -> None:
            self._fs.pipe_file(url, content)
            if self._fs.cat_file(url) != content:
                raise OSError("the store returned different content from what was written")

        self._retry(f"write {url}", put)

    def put(self, url: str, content: bytes, *, only_new: bool) -> None:
        """Write a small object that other processes may write at the same time; `read` returns which one it became.

        Args:
            only_new: Leave an object that exists, in one request where the store has conditional writes.
        """

        def put() -> None:
            if only_new:
                try:
                    self._fs.pipe_file(url, content, mode="create")
                    return
                except (OSError, NotImplementedError) as error:
                    if self._fs.isfile(url):
                        return
                    if isinstance(error, OSError) and error.errno != errno.ENOSYS:
                        raise
            self._fs.pipe_file(url, content)  # also for a store without conditional writes

        self._retry(f"write {url}", put)

    def remove(self, urls: Iterable[str]) -> None:
        """Remove objects, one after another in this order; one that does not exist is not an error."""
        for url in urls:
            try:
                self._retry(f"remove {url}", lambda url=url: self._fs.rm_file(url))  # type: ignore[misc]
            except FileNotFoundError:
                continue

    def repeats(self) -> str | None:
        """Return a line about the requests that were repeated since the last call; None if there were none."""
        with self._lock:
            repeats, self._repeats = self._repeats, _Repeats(Counter())
        if not repeats.reasons:
            return None
        reasons = ", ".join(f"{reason}: {count}" for reason, count in repeats.reasons.most_common())
        lost = f", {repeats.seconds:.1f} s lost" if repeats.seconds >= 0.1 else ""
        return f"{self._place}: {repeats.reasons.total()} failed requests were repeated ({reasons}{lost})"

    def _open(self) -> Any:
        import fsspec
        from fsspec.config import conf

        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
        if self.scheme != "s3":
            return fsspec.filesystem(self.scheme, **options)
        timeouts = {
            "connect_timeout": _CONNECT_SECONDS,
            "read_timeout": _SILENT_SECONDS,
            "retries": {"mode": "standard", "total_max_attempts": 1},
        }
        # The user's own settings (FSSPEC_S3_CONFIG_KWARGS, ~/.config/fsspec) take precedence.
        options["config_kwargs"] = timeouts | dict(conf.get("s3", {}).get("config_kwargs", {}))
        fs = fsspec.filesystem("s3", **options)
        fs.retries = 1  # requests are repeated as `_seconds_to_repeat` decides, and operations by `_retry`
        return fs

    def _connect(self) -> None:
        """Take over the repeats of S3 requests from botocore, once s3fs has made its client.

        botocore neither counts them nor reports them, and draws its waits from Python's global random numbers, whose
        state belongs to the run.
        """
        if self.scheme != "s3" or self._fs._s3 is not None:
            return
        with self._lock:
            if self._fs._s3 is None:
                self._fs.connect()
                self._fs.s3.meta.events.register("needs-retry.s3", self._seconds_to_repeat)

    def _seconds_to_repeat(
        self, response: tuple[Any, dict[str, Any]] | None, caught_exception: Any, attempts: int, **_: object
    ) -> float | None:
        """Return how long to wait before a request is sent again; None: it succeeded, or is not repeated."""
        status, code = 0, ""
        if response is not None:
            status, code = response[0].status_code, response[1].get("Error", {}).get("Code", "")
        has_failed = caught_exception is not None or status >= 500 or status == 429 or code in _REPEATED_CODES
        if not has_failed or attempts >= _REQUEST_ATTEMPTS:
            return None
        wait = self._wait_after(attempts)
        with self._lock:
            self._repeats.reasons[str(status or type(caught_exception).__name__)] += 1
            self._repeats.seconds += wait
        return wait

    def _wait_after(self, attempt: int) -> float:
        return min(_FIRST_WAIT * 2**attempt, _LONGEST_WAIT) * self._random.uniform(0.5, 1.0)

    def _described(self, info: dict[str, Any]) -> StoredObject:
        version = next((str(info[name]) for name in _VERSIONS if info.get(name) is not None), "")
        return StoredObject(f"{self.scheme}://{info['name']}", int(info["size"] or 0), version.strip('"'))

    def _retry(self, what: str, operation: Callable[[], Result]) -> Result:
        attempt = 0
        while True:
            attempt += 1
            began = time.monotonic()
            try:
                self._connect()
                return operation()
            except FileNotFoundError:
                raise
            # Backends and their HTTP clients have no common base of their errors. Each is raised in the end.
            except Exception as error:
                if type(error).__module__ == "builtins" and not isinstance(error, OSError):
                    raise  # a bug
                if attempt == self._attempts or isinstance(error, _PERMANENT) or "Credentials" in type(error).__name__:
                    times = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise StorageError(f"cannot {what}: {describe(error)}{times}") from error
                reason = type(error).__name__
            time.sleep(self._wait_after(attempt))
            with self._lock:
                self._repeats.reasons[reason] += 1
                self._repeats.seconds += time.monotonic() - began


def _of_length(data: bytes, length: int) -> bytes:
    """Return `data`. Raises OSError if it has another length, as after a connection that was cut."""
    if len(data) != length:
        raise OSError(f"{len(data):,} bytes were received instead of {length:,}")
    return data


def describe(error: Exception) -> str:
    """Return an error on one line, without the queries of URLs, which may hold signatures."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {re.sub(r'[?][^ ]*', '', text)}" if text else type(error).__name__


def upload_folder(store: ObjectStore, folder: Path, url: str, last: str) -> None:
    """Upload the files of a folder, in subfolders too.

    Args:
        last: Name of the file to write last: without it, readers reject the folder.
    """
    files = sorted(each for each in folder.rglob("*") if each.is_file())
    files.sort(key=lambda each: each.name == last)
    if any(name_of(each.url) == last for each in store.list(url)):
        store.remove([f"{url.rstrip('/')}/{last}"])
    for file in files:
        store.upload(file, f"{url.rstrip('/')}/{file.relative_to(folder).as_posix()}")


class _Backend(NamedTuple):
    """Package that implements a scheme for fsspec."""

    package: str
    install: str
    """Command that installs it."""


_BACKENDS = {
    "s3": _Backend("s3fs", "pip install 'meshbook[s3]'"),
    "gs": _Backend("gcsfs", "pip install 'meshbook[gcs]'"),
    "az": _Backend("adlfs", "pip install 'meshbook[azure]'"),
    "hf": _Backend("huggingface_hub", "pip install huggingface_hub"),
}
"""Supported schemes."""

_LONGEST = 160  # characters of a name that are shown

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)


def is_url(path: str) -> bool:
    """Return whether a path is a URL rather than a file, a folder or a name on the hub."""
    return _URL.fullmatch(path) is not None


def _scheme_of(url: str) -> str:
    """Return the scheme of a URL, such as s3; empty for other strings."""
    match = _URL.fullmatch(url)
    return match["scheme"] if match else ""


def join(url: str, *names: str) -> str:
    """Return the URL of an object below `url`."""
    return "/".join([url.rstrip("/"), *names])


def name_of(url: str) -> str:
    """Return the last part of a URL, after the last slash."""
    return url.rstrip("/").rpartition("/")[2]


def is_plain_name(name: str) -> bool:
    """Return whether a string can be the name of a file in a folder, on any file system and on one line."""
    return (
        name not in ("", ".", "..")
        and len(name.encode()) <= 255
        and not set(name) & {"/", "\\"}
        and "\n" not in name
        and printable(name) == name
    )


def shown_names(names: Collection[str], most: int = 5) -> str:
    """Return the first names on one line with control characters escaped and long ones cut, and how many more exist."""
    shown = [printable(name).replace("\n", r"\n") for name in list(names)[:most]]
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in shown) + more


def url_problems(key: str, url: str | None) -> list[str]:
    """Return at most one config error, for a malformed URL; none for local paths and None."""
    match = _URL.fullmatch(url or "")
    if match is None:
        return []
    bucket = match["rest"].partition("/")[0]
    if "@" in bucket:  # the message must not repeat it
        return [
            f"{key}: is a URL with a user name or a password; remove them, and set the credentials in the environment"
        ]
    if match["scheme"] not in _BACKENDS:
        schemes = ", ".join(f"{scheme}://" for scheme in _BACKENDS)
        return [f"{key}={url}: URLs with {match['scheme']}:// are not supported; use {schemes} or a local path"]
    if not bucket or "?" in match["rest"] or "#" in match["rest"]:
        return [f"{key}={url}: must be {match['scheme']}://BUCKET/NAME, without ? and #"]
    return []


def package_problems(key: str, url: str | None, otherwise: str = "use a local path") -> list[str]:
    """Return the missing package that a URL needs, one message at most; other strings and None pass.

    Args:
        otherwise: What to do without the package, for the message.
    """
    backend = _BACKENDS.get(_scheme_of(url or ""))
    if backend is None or importlib.util.find_spec(backend.package) is not None:
        return []
    return [f"{key}={url}: {backend.package} is not installed; run {backend.install}, or {otherwise}"]
