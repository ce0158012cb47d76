"""Rendering of cluster.template, with limits on its time, memory and output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config.errors import ConfigError
from components.protocol.limits import CpuLimitError, limited
from components.protocol.safe_json import read_regular

if TYPE_CHECKING:
    from jinja2 import Environment

LARGEST = 1 << 20
"""Most bytes of a template, and of what it renders to; Slurm accepts scripts of 4 MiB."""
CPU_SECONDS = 5
"""Most CPU time that a template may take; the built-in ones take milliseconds."""
MEMORY = 1 << 29
"""Most bytes that a template may allocate."""


def render_template(environment: Environment, file: Path, values: Mapping[str, Any]) -> str:
    """Return the rendered template. Raises ConfigError, also if it exceeds a limit."""
    from jinja2 import TemplateSyntaxError

    what = f"cluster.template={file}: cannot be rendered"
    try:
        source = read_regular(file, LARGEST).decode()
        with limited(CPU_SECONDS, MEMORY):
            text = environment.from_string(source).render(values)
    except CpuLimitError as error:
        raise ConfigError(f"{what}: it takes more than {CPU_SECONDS} s of CPU time") from error
    except MemoryError as error:
        raise ConfigError(f"{what}: it takes more than {MEMORY >> 20} MiB of memory") from error
    except Exception as error:  # a template can raise anything: ZeroDivisionError, SecurityError
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ConfigError(f"{what}{line}: {str(error)[:1000]}") from error
    if len(text) > LARGEST:
        raise ConfigError(f"{what}: it renders to more than {LARGEST:,} characters")
    return text
