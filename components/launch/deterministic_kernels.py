"""Environment variables of libraries that run.deterministic needs; they are read once, when CUDA starts."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from components.config.schema.checks import raise_all
from components.config.schema.run import RunConfig

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable with the sizes of cuBLAS's buffers, which determine the order of its sums."""
WORKSPACES = (":4096:8", ":16:8")
"""Values under which cuBLAS is deterministic. The second takes less memory and is slower."""
_SWITCHES = ("TORCHINDUCTOR_DETERMINISTIC", "FLASH_ATTENTION_DETERMINISTIC")
"""Switches of torch's compiler, which otherwise selects kernels by their measured time, and of flash-attn."""


def determinism_problems(run: RunConfig, environ: Mapping[str, str]) -> list[str]:
    """Return the problems of run.deterministic with the user's environment variables."""
    if not run.deterministic:
        return []
    problems = []
    if (value := environ.get(WORKSPACE, WORKSPACES[0])) not in WORKSPACES:
        problems.append(
            f"run.deterministic=true: cuBLAS is not deterministic with {WORKSPACE}={value}; unset the variable, or set "
            f"it to {' or '.join(WORKSPACES)}"
        )
    problems += [
        f"run.deterministic=true: contradicts {name}={environ[name]}; unset the variable, or set it to 1"
        for name in _SWITCHES
        if environ.get(name, "1") != "1"
    ]
    return problems


def set_deterministic_variables(run: RunConfig, environ: MutableMapping[str, str]) -> None:
    """Set the variables if run.deterministic is set. Call it on a rank before CUDA starts.

    Raises ConfigError if the environment contradicts the setting.
    """
    if not run.deterministic:
        return
    raise_all(determinism_problems(run, environ))
    environ.setdefault(WORKSPACE, WORKSPACES[0])
    for name in _SWITCHES:
        environ[name] = "1"
