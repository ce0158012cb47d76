"""Rendering of cluster.template in a process of its own, with limits on its time, memory and output."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config.errors import ConfigError
from components.protocol.safe_json import read_regular

if TYPE_CHECKING:
    from jinja2 import Environment

LARGEST = 1 << 20
"""Most bytes of a template, and of what it renders to; Slurm accepts scripts of 4 MiB."""
CPU_SECONDS, SECONDS = 5, 30
"""Limits on the processor time and the time that a template takes; the built-in ones take milliseconds."""
MEMORY = 1 << 29
"""Most bytes that a template may allocate."""


def render_template(environment: Environment, file: Path, values: Mapping[str, Any]) -> str:
    """Return the rendered template. Raises ConfigError, also if it exceeds a limit."""
    what = f"cluster.template={file}"
    try:
        source = read_regular(file, LARGEST).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}: cannot be rendered: {error}") from error
    context = get_context("fork")  # inherits the environment, whose filters cannot be pickled
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(sender, environment, source, values), daemon=True)
    process.start()
    sender.close()
    try:
        text, problem = receiver.recv() if receiver.poll(SECONDS) else (None, f": it takes more than {SECONDS} s")
    except EOFError:  # killed at the limit of processor time, or for memory
        text, problem = None, f": it takes more than {CPU_SECONDS} s of processor time, or too much memory"
    finally:
        process.kill()
        process.join()
        receiver.close()
    if text is None:
        raise ConfigError(f"{what}: cannot be rendered{problem}")
    return text


def _render(sender: Connection, environment: Environment, source: str, values: Mapping[str, Any]) -> None:
    """Send (text, "") or (None, problem), in a process whose limits are set."""
    from jinja2 import TemplateSyntaxError

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):  # not Linux
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    try:
        text, problem = environment.from_string(source).render(values), ""
    except MemoryError:
        text, problem = None, f": it takes more than {MEMORY >> 20} MiB of memory"
    except Exception as error:  # a template can raise anything: ZeroDivisionError, SecurityError
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        text, problem = None, f"{line}: {error}"
    if text is not None and len(text) > LARGEST:
        text, problem = None, f": it renders to more than {LARGEST:,} characters"
    sender.send((text, problem[:1000]))
