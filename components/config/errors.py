"""The error of a configuration that is rejected: one message, exit status 2, no traceback."""

from __future__ import annotations


class ConfigError(ValueError):
    """One or more problems with the configuration of a run.

    Each problem is one sentence that states the value, the rule and the key to change. The launcher
    prints them all at once and exits with status `EXIT_INVALID` of components.protocol.exit_codes.
    """

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))
