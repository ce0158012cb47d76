"""What a person got wrong: told in one message, exit status 2, no traceback."""

from __future__ import annotations

EXIT_INVALID = 2
"""Exit status of a run that never started because of what the person asked for."""

EXIT_HUNG = 75
"""Exit status of a run that was ended because it stood still: EX_TEMPFAIL of sysexits.h, it may be tried again."""


class ConfigError(ValueError):
    """One or more mistakes of the person who started the run.

    Each problem is one sentence that states the value, the rule and the key to change. The launcher
    prints them all at once and exits with status `EXIT_INVALID`.
    """

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))
