"""--out URL: an export that is written to a local folder first and then uploaded to an object store."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.protocol.errors import ConfigError
from components.storage.object_store import (
    ObjectStore,
    describe,
    is_url,
    name_of,
    package_problems,
    upload_folder,
    url_problems,
)
from components.terminal import print_text
from scripts._export.options import new_folder

LAST = "config.json"
"""File that is uploaded last: transformers rejects a folder without it."""


def output_folder(out: str | None, default: Path, beside: Path) -> Path:
    """Return the new folder to write to: `out`, `default` without it, or a temporary one in `beside` if `out` is a URL.

    Raises ConfigError if the folder exists, or if objects below the URL do, or its store cannot be read.
    """
    if out is None or not is_url(out):
        return new_folder(Path(out) if out else default)
    if problems := [*url_problems("--out", out), *package_problems("--out", out)]:
        raise ConfigError(problems)
    try:
        exists = bool(ObjectStore(out, attempts=2).list(out))
    except OSError as error:
        raise ConfigError(f"--out {out}: {describe(error)}") from error
    if exists:
        raise ConfigError(f"--out {out}: there are objects below it; choose another one, or remove them")
    return new_folder(beside / f".upload-{secrets.token_hex(4)}" / name_of(out))


@contextmanager
def removed_on(kind: type[BaseException], folder: Path, out: str | None) -> Iterator[None]:
    """Remove the temporary folder of `output_folder` if the body raises `kind`; nothing if `out` is no URL."""
    try:
        yield
    except kind:
        if out is not None and is_url(out):
            shutil.rmtree(folder.parent, ignore_errors=True)
        raise


def upload_output(folder: Path, out: str | None) -> None:
    """Upload the folder and remove it, if `out` is a URL. Raises ConfigError, and keeps the folder then."""
    if out is None or not is_url(out):
        return
    store = ObjectStore(out)
    try:
        with removed_on(KeyboardInterrupt, folder, out):
            if store.list(out):
                raise FileExistsError("objects were written below it during the export")
            upload_folder(store, folder, out, LAST)
    except OSError as error:
        raise ConfigError(f"--out {out}: {describe(error)}; the export in {folder} is complete") from error
    if (repeats := store.repeats()) is not None:
        print_text(repeats)
    shutil.rmtree(folder.parent)
    print_text(f"uploaded {out}")
