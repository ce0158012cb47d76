"""Exit statuses of a run besides 0 (finished, or stopped as requested) and 1 (failed)."""

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
