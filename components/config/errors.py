"""ConfigError, which ends a run with exit status 2 and without a traceback."""

from __future__ import annotations


class ConfigError(ValueError):
    """One or more config errors.

    Each problem is one sentence that states the value, the rule and the key to change. The launcher prints all problems
    at once and exits with `EXIT_INVALID` (components.protocol.exit_codes).
    """

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows for this error, as a terminal does: no frames."""
        return self.problems
