"""Check that what a run needs from the Hugging Face hub is in its cache or within reach.

Done before anything starts: the hub's own clients retry for most of a minute, in every process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

from components.config.errors import ConfigError
from components.config.model_files import locate
from components.config.schema.data import MixtureDataConfig, RowsDataConfig
from components.config.schema.recipes import RecipeConfig
from components.data.sources.files import is_local

OFFLINE = "HF_HUB_OFFLINE"
"""Variable that makes the hub's clients use their cache alone."""
_TRUE = ("1", "on", "yes", "true")
_PATIENCE = 5.0
"""Seconds that the hub's address may take to answer."""
_PROXIES = ("https_proxy", "http_proxy", "all_proxy")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A model or dataset of the hub that a run reads."""

    key: str
    name: str
    kind: str
    """model or dataset."""


def check_hub(cfg: RecipeConfig, environ: Mapping[str, str]) -> str | None:
    """Return why the hub is out of reach if all that `cfg` needs is cached; None if it is reachable or not needed.

    Raises ConfigError naming what is neither cached nor within reach.
    """
    wanted = _wanted(cfg)
    why = _unreachable(environ) if wanted else None
    if why is None:
        return None
    missing = [each for each in wanted if not _is_cached(each, environ)]
    if missing:
        raise ConfigError([_told(each, why, environ) for each in missing])
    return why


def is_offline(environ: Mapping[str, str]) -> bool:
    """Return whether processes with these variables use the hub's cache alone."""
    return environ.get(OFFLINE, "").lower() in _TRUE


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder in which the hub's client keeps files."""
    return Path(environ.get("HF_HUB_CACHE") or _home(environ) / "hub").expanduser()


def _home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser()


def _wanted(cfg: RecipeConfig) -> list[_Wanted]:
    found = []
    for key, path in (("model.path", cfg.model.path), ("model.tokenizer", cfg.model.tokenizer)):
        if path not in (None, "bytes"):
            files = locate(path, key)
            if not files.is_local and not files.gguf_file:
                found.append(_Wanted(key, files.name_or_folder, "model"))
    sources = {"data": cfg.data}
    if isinstance(cfg.data, MixtureDataConfig):
        sources = {f"data.sources.{name}": source for name, source in cfg.data.sources.items()}
    for section, source in sources.items():
        if isinstance(source, RowsDataConfig):
            paths = {"path": source.path, "eval_path": source.eval_path}
            found += [
                _Wanted(f"{section}.{name}", path, "dataset")
                for name, path in paths.items()
                if path is not None and not is_local(path)
            ]
    return found


def _is_cached(wanted: _Wanted, environ: Mapping[str, str]) -> bool:
    repository = hub_cache(environ) / f"{wanted.kind}s--{wanted.name.replace('/', '--')}" / "snapshots"
    if any(repository.glob("*/*")):
        return True
    prepared = Path(environ.get("HF_DATASETS_CACHE") or _home(environ) / "datasets").expanduser()
    return wanted.kind == "dataset" and (prepared / wanted.name.replace("/", "___")).is_dir()


def _unreachable(environ: Mapping[str, str]) -> str | None:
    """Return why nothing answers at the hub's address; None if something does, or if there is a proxy."""
    if is_offline(environ):
        return f"{OFFLINE} is set"
    if any(environ.get(name) or environ.get(name.upper()) for name in _PROXIES):
        return None
    address = urlsplit(_endpoint(environ))
    failed = ["it does not answer"]

    def connect() -> None:
        port = address.port or (80 if address.scheme == "http" else 443)
        try:
            socket.create_connection((address.hostname or "", port), timeout=_PATIENCE).close()
            failed.clear()
        except OSError as error:
            failed[:] = [error.strerror or str(error)]

    attempt = Thread(target=connect, daemon=True)  # looking up a name has no timeout of its own
    attempt.start()
    attempt.join(_PATIENCE)
    return failed[0] if failed else None


def _endpoint(environ: Mapping[str, str]) -> str:
    return environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _told(wanted: _Wanted, why: str, environ: Mapping[str, str]) -> str:
    model = wanted.kind == "model"
    option, local = ("", "a local folder") if model else ("--repo-type dataset ", "a local file or folder")
    return (
        f"{wanted.key}={wanted.name}: is not in the hub's cache {_home(environ)}, and {_endpoint(environ)} cannot be "
        f"reached ({why}); download it where there is a network (hf download {option}{wanted.name}), or set "
        f"{wanted.key} to {local}"
    )
