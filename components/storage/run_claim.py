"""run.json below a URL: the run that the URL belongs to, and the objects that it has written there."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field

from components.protocol.errors import ConfigError
from components.protocol.run_files import CHECKPOINT_MANIFEST, checkpoint_step
from components.protocol.safe_parsing import parse_json
from components.storage.object_store import ObjectStore, join, shown_names

OWNER = "run.json"
_SETTLE_SECONDS = 1.0
"""Time between a claim and its check, in which the claim of another start at the same time becomes visible."""


@dataclass(slots=True)
class RunClaim:
    """Content of run.json."""

    run: str
    """Run directory."""
    token: str = ""
    """Random number of the start that wrote it."""
    folders: dict[str, list[str]] = field(default_factory=dict)
    """Names of the objects that the run has written, by folder below the URL; nothing else is removed or replaced."""


def _claim_problem(claim: RunClaim | None, url: str, run: str | None, strangers: Collection[str]) -> str | None:
    """Return why checkpoint.remote=`url` cannot belong to a run; None if it can.

    Args:
        claim: What `_read_claim` returns.
        run: Run directory; None: a new one.
        strangers: Names below the URL if they are those of no run; ignored if there is a claim.
    """
    if claim is None:
        if not strangers:
            return None
        return f"checkpoint.remote={url}: contains objects, but no run: {shown_names(strangers)}; choose another URL"
    if claim.run == run:
        return None
    return (
        f"checkpoint.remote={url}: belongs to the run {shown_names([claim.run])}; set it to another URL, or run.dir to "
        f"that run's directory, or remove {join(url, OWNER)} if that run needs its copies no longer"
    )


def _read_claim(store: ObjectStore, url: str) -> RunClaim | None:
    """Return the claim below `url`; None if there is none. Raises ConfigError for another content, and StorageError."""
    file = join(url, OWNER)
    try:
        stored = parse_json(store.read(file))
        run = stored["run"]
        folders = {name: list(files) for name, files in dict(stored.get("folders", {})).items()}
        names = [name for folder, files in folders.items() for name in (folder, *files)]
        if not isinstance(run, str) or not all(_is_plain(name) for name in names):
            raise ValueError("it names no run, or objects elsewhere")
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"checkpoint.remote={url}: {file} is not what a run writes ({type(error).__name__}: "
            f"{shown_names([str(error)])}); choose another URL, or remove it if the checkpoints there are this run's"
        ) from error
    return RunClaim(run, str(stored.get("token", "")), folders)


def problem_before_launch(url: str, run: str) -> str | None:
    """Return why checkpoint.remote=`url` cannot belong to a run, as far as the names below it show; None if it can.

    A store that cannot be read from here is left to the ranks, as are the checkpoints of an unknown run.
    """
    try:
        store = ObjectStore(url, attempts=1)
        claim = _read_claim(store, url)
        prefix = join(url, "")
        names = [] if claim is not None else [each.url.removeprefix(prefix) for each in store.list(url)]
        if any(_is_manifest(store, join(url, name)) for name in names if _is_named_manifest(name)):
            names = []
    except ConfigError as error:
        return str(error)
    except OSError:
        return None
    return _claim_problem(claim, url, run, names)


def take_claim(store: ObjectStore, url: str, run: str, strangers: Collection[str]) -> RunClaim:
    """Write that `url` belongs to this start of a run, and return the claim, with what earlier starts have written.

    Of two starts at the same time one gets the URL. Arguments as in `_claim_problem`. Raises ConfigError if the URL
    cannot belong to the run, or another start got it, and StorageError.
    """
    claim = _read_claim(store, url)
    if problem := _claim_problem(claim, url, run, strangers):
        raise ConfigError(problem)
    mine = RunClaim(run, secrets.token_hex(16), {} if claim is None else claim.folders)
    store.put(join(url, OWNER), _encode(mine), only_new=claim is None)
    time.sleep(_SETTLE_SECONDS)
    check_claim(store, url, mine)
    return mine


def check_claim(store: ObjectStore, url: str, mine: RunClaim) -> None:
    """Raise ConfigError if another start has taken the URL over; write the claim again if it was removed."""
    claim = _read_claim(store, url)
    if claim is None:
        store.put(join(url, OWNER), _encode(mine), only_new=True)
        claim = _read_claim(store, url)
    if problem := _claim_problem(claim, url, mine.run, ()):
        raise ConfigError(problem)
    if claim is not None and claim.token != mine.token:
        raise ConfigError(
            f"checkpoint.remote={url}: another start of the run {shown_names([mine.run])} uses it now; wait until that "
            "has ended, or set checkpoint.remote to another URL"
        )


def write_claim(store: ObjectStore, url: str, mine: RunClaim) -> None:
    """Store a claim whose folders have changed, after `check_claim`. Raises ConfigError like it, and StorageError."""
    check_claim(store, url, mine)
    store.write(join(url, OWNER), _encode(mine))


def _is_named_manifest(name: str) -> bool:
    folder, _, file = name.partition("/")
    return file == CHECKPOINT_MANIFEST and checkpoint_step(folder) is not None


def _is_manifest(store: ObjectStore, url: str) -> bool:
    """Return whether an object looks like the manifest of a checkpoint, which a rank reads."""
    try:
        return set(parse_json(store.read(url))) == {"sha256", "body"}
    except (ValueError, TypeError):
        return False


def _encode(claim: RunClaim) -> bytes:
    return json.dumps(asdict(claim)).encode()


def _is_plain(name: object) -> bool:
    """Return whether a name is that of an object below a folder."""
    return isinstance(name, str) and all(part not in ("", ".", "..") for part in name.split("/"))
