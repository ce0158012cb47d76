"""ConfigError, which ends a run with exit status 2 and without a traceback; and the exit statuses.

A run that finishes, or that stops as requested by a signal and has saved, exits 0.
"""

from __future__ import annotations

EXIT_INVALID = 2
"""The configuration was rejected: the run never started."""
EXIT_HUNG = 75
"""The watchdog ended a run without progress. EX_TEMPFAIL of sysexits.h: it may be tried again."""
EXIT_CORRUPTED = 76
"""The replicas of a run hold different bits: a rank computes wrong numbers."""
EXIT_RESTART = 86
"""A pod stopped and can continue in a new one: its Kubernetes job replaces it and does not count a failure."""
EXIT_INTERRUPTED = 130
"""Ctrl-C ended the run (128 + SIGINT, as in shells)."""


class ConfigError(ValueError):
    """One or more config errors.

    Each problem is one sentence that states the value, the rule and the key to change. The launcher prints all problems
    at once and exits with `EXIT_INVALID` (components.protocol.errors).
    """

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows for this error, as a terminal does: no frames."""
        return self.problems
