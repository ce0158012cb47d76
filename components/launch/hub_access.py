"""Check that the Hugging Face models and datasets of a run are cached, or that the hub is reachable.

Checked before ranks start: the hub's own client retries for most of a minute, in every process.
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
from components.config.schema.recipes import RecipeConfig, named_models
from components.data.sources.files import is_hub_name

OFFLINE = "HF_HUB_OFFLINE"
"""Variable that restricts Hugging Face libraries to their local cache."""
_TRUE = ("1", "on", "yes", "true")
_CONNECT_TIMEOUT = 5.0
"""Timeout in seconds for connecting to the hub."""
_PROXIES = ("https_proxy", "http_proxy", "all_proxy")


@dataclass(frozen=True, slots=True)
class _HubRepo:
    """A model or dataset that a run reads from the hub."""

    key: str
    name: str
    kind: str
    """model or dataset."""


def check_hub(cfg: RecipeConfig, environ: Mapping[str, str]) -> str | None:
    """Return why the hub is unreachable, or None if it is reachable or not needed.

    Raises ConfigError if the hub is unreachable and `cfg` needs models or datasets that are not cached.
    """
    needed = _hub_repos(cfg)
    why = _unreachable(environ) if needed else None
    if why is None:
        return None
    missing = [each for each in needed if not _is_cached(each, environ)]
    if missing:
        raise ConfigError([_missing_problem(each, why, environ) for each in missing])
    return why


def is_offline(environ: Mapping[str, str]) -> bool:
    """Return whether these environment variables restrict Hugging Face libraries to their local cache."""
    return environ.get(OFFLINE, "").lower() in _TRUE


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the cache folder of huggingface_hub."""
    return Path(environ.get("HF_HUB_CACHE") or _home(environ) / "hub").expanduser()


def _home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(home).expanduser()


def _hub_repos(cfg: RecipeConfig) -> list[_HubRepo]:
    found = []
    for key, path in named_models(cfg).items():
        files = locate(path, key)
        if not files.is_local and not files.gguf_file:
            found.append(_HubRepo(key, files.name_or_folder, "model"))
    sources = {"data": cfg.data}
    if isinstance(cfg.data, MixtureDataConfig):
        sources = {f"data.sources.{name}": source for name, source in cfg.data.sources.items()}
    for section, source in sources.items():
        if isinstance(source, RowsDataConfig):
            paths = {"path": source.path, "eval_path": source.eval_path}
            found += [
                _HubRepo(f"{section}.{name}", path, "dataset")
                for name, path in paths.items()
                if path is not None and is_hub_name(path)
            ]
    return found


def _is_cached(repo: _HubRepo, environ: Mapping[str, str]) -> bool:
    repository = hub_cache(environ) / f"{repo.kind}s--{repo.name.replace('/', '--')}" / "snapshots"
    if any(repository.glob("*/*")):
        return True
    prepared = Path(environ.get("HF_DATASETS_CACHE") or _home(environ) / "datasets").expanduser()
    return repo.kind == "dataset" and (prepared / repo.name.replace("/", "___")).is_dir()


def _unreachable(environ: Mapping[str, str]) -> str | None:
    """Return why the hub is unreachable; None if it accepts a connection, or if a proxy is configured."""
    if is_offline(environ):
        return f"{OFFLINE} is set"
    if any(environ.get(name) or environ.get(name.upper()) for name in _PROXIES):
        return None
    address = urlsplit(_endpoint(environ))
    failed = [f"no connection within {_CONNECT_TIMEOUT:g} s"]

    def connect() -> None:
        port = address.port or (80 if address.scheme == "http" else 443)
        try:
            socket.create_connection((address.hostname or "", port), timeout=_CONNECT_TIMEOUT).close()
            failed.clear()
        except OSError as error:
            failed[:] = [error.strerror or str(error)]

    attempt = Thread(target=connect, daemon=True)  # a thread because DNS resolution has no timeout
    attempt.start()
    attempt.join(_CONNECT_TIMEOUT)
    return failed[0] if failed else None


def _endpoint(environ: Mapping[str, str]) -> str:
    return environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _missing_problem(repo: _HubRepo, why: str, environ: Mapping[str, str]) -> str:
    model = repo.kind == "model"
    option, local = ("", "a local folder") if model else ("--repo-type dataset ", "a local file or folder")
    return (
        f"{repo.key}={repo.name}: is not in the hub's cache {_home(environ)}, and {_endpoint(environ)} cannot be "
        f"reached ({why}); download it on a machine with network access (hf download {option}{repo.name}), or set "
        f"{repo.key} to {local}"
    )
