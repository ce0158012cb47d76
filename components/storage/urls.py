"""URLs of object stores: parsing and validation. Imports neither torch nor fsspec."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection
from typing import NamedTuple

from components.terminal import printable


class Backend(NamedTuple):
    """Package that implements a scheme for fsspec."""

    package: str
    install: str
    """Command that installs it."""


BACKENDS = {
    "s3": Backend("s3fs", "pip install 'meshbook[s3]'"),
    "gs": Backend("gcsfs", "pip install 'meshbook[gcs]'"),
    "az": Backend("adlfs", "pip install 'meshbook[azure]'"),
    "hf": Backend("huggingface_hub", "pip install huggingface_hub"),
}
"""Supported schemes."""
_LONGEST = 160  # characters of a name that are shown
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)


def is_url(path: str) -> bool:
    """Return whether a path is a URL rather than a file, a folder or a name on the hub."""
    return _URL.fullmatch(path) is not None


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, such as s3; empty for other strings."""
    found = _URL.fullmatch(url)
    return found["scheme"] if found else ""


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
    found = _URL.fullmatch(url or "")
    if found is None:
        return []
    bucket = found["rest"].partition("/")[0]
    if "@" in bucket:  # the message must not repeat it
        return [
            f"{key}: is a URL with a user name or a password; remove them, and set the credentials in the environment"
        ]
    if found["scheme"] not in BACKENDS:
        schemes = ", ".join(f"{scheme}://" for scheme in BACKENDS)
        return [f"{key}={url}: URLs with {found['scheme']}:// are not supported; use {schemes} or a local path"]
    if not bucket or "?" in found["rest"] or "#" in found["rest"]:
        return [f"{key}={url}: must be {found['scheme']}://BUCKET/NAME, without ? and #"]
    return []


def package_problems(key: str, url: str | None, otherwise: str = "use a local path") -> list[str]:
    """Return the missing package that a URL needs, one message at most; other strings and None pass.

    Args:
        otherwise: What to do without the package, for the message.
    """
    backend = BACKENDS.get(scheme_of(url or ""))
    if backend is None or importlib.util.find_spec(backend.package) is not None:
        return []
    return [f"{key}={url}: {backend.package} is not installed; run {backend.install}, or {otherwise}"]
