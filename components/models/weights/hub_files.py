"""Errors of transformers and the Hugging Face hub, converted to config errors that name the key to change."""

from __future__ import annotations

from components.config.shape import ModelFiles
from components.protocol.errors import ConfigError


def explain_loading_error(error: Exception, files: ModelFiles, key: str, what: str) -> ConfigError:
    """Return the ConfigError for an exception that transformers raised while loading `what` from `files`.

    Args:
        key: Config key of the path.
        what: "config", "tokenizer" or "weights".
    """
    given = f"{key}={files.name_or_folder}"
    causes = _causes(error)
    names = {type(cause).__name__ for cause in causes}
    text = " ".join(str(cause) for cause in causes)
    if "trust_remote_code" in text:
        return ConfigError(
            f"{given}: its {what} runs code from its repository; review that code, then set "
            "model.trust_remote_code=true"
        )
    if names & {"GatedRepoError"}:
        return ConfigError(
            f"{given}: access is gated; accept its license on the hub and log in (hf auth login), or set {key} to a "
            "local folder"
        )
    if names & {"RepositoryNotFoundError", "RevisionNotFoundError"}:
        return ConfigError(f"{given}: the hub has no such model or revision; check {key} and model.revision")
    if not files.is_local and (names & _UNREACHABLE or "offline" in text or "connect" in text.lower()):
        return ConfigError(
            f"{given}: its {what} is not in the local cache and the hub cannot be reached; set {key} to a local folder"
        )
    return ConfigError(f"{given}: the {what} cannot be read: {error_line(error)}")


def error_line(error: Exception) -> str:
    """Return the first line of an exception's message, with the next one after a colon; or the name of its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


_UNREACHABLE = {
    "ConnectError",
    "ConnectionError",
    "ConnectTimeout",
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "ProxyError",
    "ReadTimeout",
}
"""Exceptions of huggingface_hub and its HTTP client; by name, because the client library differs between versions."""


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain
