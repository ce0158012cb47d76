"""Upload of an exported folder to the Hugging Face hub.

The token is that of huggingface_hub: the variable HF_TOKEN, or the one that `hf auth login` has stored. Everything that
can be checked without writing is checked before the export, so that a wrong token is not found hours later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from components.protocol.errors import ConfigError
from components.storage.object_store import shown_names

_COMMIT = "Export of a Meshbook run"
"""Message of the commits, by which a repository with earlier exports is recognized."""


@dataclass(frozen=True, slots=True)
class HubTarget:
    """A model repository on the hub that this user may upload to, as far as can be known before the upload."""

    name: str
    """OWNER/NAME."""
    user: str
    is_public: bool
    exists: bool


def find_target(name: str, *, is_public: bool) -> HubTarget:
    """Check the token and the repository; nothing is created. Raises ConfigError.

    Args:
        name: OWNER/NAME, or NAME in the namespace of the token's user.
        is_public: Whether the repository is to be public. One that exists and differs is rejected.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"--push {name}: must be NAME or OWNER/NAME: {_one_line(error)}") from error
    with _explained(name):
        token = get_token()
        if token is None:
            raise ConfigError(
                f"--push {name}: there is no token of the Hugging Face hub; run `hf auth login`, or set HF_TOKEN"
            )
        api = HfApi(token=token)
        user: str = api.whoami()["name"]
        full = name if "/" in name else f"{user}/{name}"
        try:
            found = api.repo_info(full)
            is_private: bool | None = found.private
            files = [sibling.rfilename for sibling in found.siblings or [] if sibling.rfilename != ".gitattributes"]
            strangers = (
                files if files and all(commit.title != _COMMIT for commit in api.list_repo_commits(full)) else []
            )
        except RepositoryNotFoundError:
            is_private, strangers = None, []
    if is_private is not None and is_private == is_public:
        exists, change = ("private", "leave out --public") if is_private else ("public", "add --public")
        raise ConfigError(f"--push {name}: {full} exists and is {exists}; {change}, or choose another name")
    if strangers:
        raise ConfigError(
            f"--push {name}: {full} holds files that no export has written ({shown_names(strangers)}); choose another "
            "name, or remove them"
        )
    return HubTarget(full, user, is_public, is_private is not None)


def upload(folder: Path, target: HubTarget) -> str:
    """Create the repository unless it exists, upload the folder, and return its address. Raises ConfigError."""
    from huggingface_hub import HfApi

    with _explained(target.name, target.user, folder):
        api = HfApi()
        if not target.exists:
            api.create_repo(target.name, private=not target.is_public)
        api.upload_folder(repo_id=target.name, folder_path=folder, commit_message=_COMMIT)
    return f"{api.endpoint}/{target.name}"


@contextmanager
def _explained(name: str, user: str = "you", folder: Path | None = None) -> Iterator[None]:
    """Turn errors of huggingface_hub and of the network into ConfigError, with the key to change.

    Args:
        folder: The export that could not be uploaded; None: before the export.
    """
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # The HTTP client differs between versions of huggingface_hub; this is the base of its errors in each.
    http_error: type[Exception] = HfHubHTTPError.__bases__[0]
    kept = "" if folder is None else f"; the export in {folder} is complete: `hf upload {name} {folder}` uploads it"
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise ConfigError(f"--push {name}: HF_HUB_OFFLINE is set; unset it, or leave out --push{kept}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = {
            401: "the hub rejects the token; run `hf auth login`, or set HF_TOKEN to a valid one",
            403: f"{user} may not write there; use a token with write access, or a name in a namespace of yours",
        }.get(status, f"the hub answered with status {status}: {_one_line(error.server_message or error)}")
        raise ConfigError(f"--push {name}: {advice}{kept}") from error
    except (http_error, OSError) as error:
        raise ConfigError(
            f"--push {name}: {ENDPOINT} cannot be reached: {_one_line(error)}; check the network and HF_ENDPOINT, or "
            f"leave out --push{kept}"
        ) from error
    except RuntimeError as error:  # a file that the hub's storage did not take, of hf_xet or huggingface_hub
        reason = _one_line(f"{error} {error.__cause__ or ''}")
        raise ConfigError(f"--push {name}: the upload failed: {reason}{kept}") from error


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
