"""What transformers raises when files are missing or unreachable, in one sentence with the key to change."""

from __future__ import annotations

from components.config.errors import ConfigError
from components.config.model_files import ModelFiles


def explain_loading_error(error: Exception, files: ModelFiles, key: str, what: str) -> ConfigError:
    """Return the ConfigError for `error`, raised while `what` was read from `files`.

    Args:
        key: The config key that named the files.
        what: "config", "tokenizer" or "weights".
    """
    given = f"{key}={files.name_or_folder}"
    causes = _causes(error)
    names = {type(cause).__name__ for cause in causes}
    text = " ".join(str(cause) for cause in causes)
    if "trust_remote_code" in text:
        return ConfigError(
            f"{given}: its {what} needs code from its own repository; read that code, then set "
            "model.trust_remote_code=true"
        )
    if names & {"GatedRepoError"}:
        return ConfigError(
            f"{given}: access is gated; accept its licence on the hub and log in (hf auth login), or set {key} to a "
            "local folder"
        )
    if names & {"RepositoryNotFoundError", "RevisionNotFoundError"}:
        return ConfigError(f"{given}: no such model or revision on the hub; check {key} and model.revision")
    if not files.is_local and (names & _UNREACHABLE or "offline" in text or "connect" in text.lower()):
        return ConfigError(
            f"{given}: its {what} is not in the local cache and the hub cannot be reached; set {key} to a local folder"
        )
    first_line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ConfigError(f"{given}: the {what} cannot be read: {first_line}")


_UNREACHABLE = {
    "ConnectError",
    "ConnectionError",
    "ConnectTimeout",
    "LocalEntryNotFoundError",
    "OfflineModeIsEnabled",
    "ProxyError",
    "ReadTimeout",
}
"""Names of exceptions of huggingface_hub and its HTTP client; by name, because the client changes."""


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain
