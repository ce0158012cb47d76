"""Python programs that start in a fraction of a second, because torch and transformers are imported already.

`PreloadedPopen` is subprocess.Popen, but where the command is this interpreter and a file or module, it forks the
current process instead of starting a new one. The child does what the interpreter would do: it has the environment,
working directory, file descriptors, signal handlers and arguments of the new process, and runs the file as __main__.
Programs that the child starts, such as the ranks of a launcher, are forked in the same way.

A run of two ranks takes one or two seconds instead of ten. What differs from a new process: imported modules stay
imported, /proc/PID/cmdline and environ are those of the parent, and memory shared with the parent counts as resident.
Tests of these start new processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import logging
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import popen_fork
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import datasets  # noqa: F401  (this and the next lines import what recipes import, once for all forks)
import torch
import torch.distributed.run
import transformers.models.llama.modeling_llama  # noqa: F401
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import components
from components.config.compose.command_line import compose_from_command_line
from components.config.schema import FinetuneConfig
from components.data.sources import text

with contextlib.suppress(ImportError):  # the extra `plot`
    import matplotlib.figure  # noqa: F401

ROOT = Path(__file__).resolve().parents[1]
_PR_SET_NAME = 15


class PreloadedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen that forks this process to run Python files and modules."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *more: Any) -> None:
        program = None if executable else _program(args)
        if program is None:
            super()._execute_child(args, executable, preexec_fn, *more)
            return
        close_fds, pass_fds, cwd, env, _startupinfo, _creationflags, shell, *others = more
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, *others = others
        gid, gids, uid, umask, start_new_session, process_group = others
        assert (close_fds, restore_signals, shell, gid, gids, uid) == (True, True, False, None, None, None)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        do_what_all_recipes_do()
        self.pid = os.fork()
        if self.pid:
            self._child_created = True
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            return
        try:
            gc.freeze()  # collections would copy the pages of all inherited objects
            _leave_the_parent((p2cread, c2pwrite, errwrite), pass_fds, dict(os.environ if env is None else env))
            if umask >= 0:
                os.umask(umask)
            if process_group >= 0:
                os.setpgid(0, process_group)
            if start_new_session:
                os.setsid()
            if cwd is not None:
                os.chdir(cwd)
            if preexec_fn is not None:
                preexec_fn()
            os._exit(_run(program))
        except BaseException:
            traceback.print_exc()
        finally:  # never return into the code of the parent
            os._exit(1)


def run_preloaded(
    command: Sequence[str], cwd: Path, environment: dict[str, str] | None = None, timeout: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run a Python file to its end as subprocess.run does, and return its exit status and output."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with PreloadedPopen(list(command), cwd=cwd, env=environment, text=True, process_group=0, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(list(command), process.returncode, output, errors)


@functools.cache
def do_what_all_recipes_do() -> None:
    """Import components, fill caches, and exclude the objects so far from garbage collections: they are many."""
    for module in pkgutil.walk_packages(components.__path__, "components."):
        with contextlib.suppress(ModuleNotFoundError):  # of an optional library
            import_module(module.name)
    import_module("meshbook")  # which examples import; a recipe has the project's folder on its path by installation
    arguments, sys.argv = sys.argv, ["recipe"]
    try:
        compose_from_command_line("finetune", FinetuneConfig, ROOT / "recipes", arguments=[])
    finally:
        sys.argv = arguments
    text.pydocs_conversations("train")
    gc.collect()
    gc.freeze()


def _program(args: Any) -> list[str] | None:
    """Return the arguments of this interpreter if they name a file or module to run; else None."""
    if not isinstance(args, Sequence) or isinstance(args, str) or len(args) < 2 or str(args[0]) != sys.executable:
        return None
    program = [str(each) for each in args[1:]]
    if program[0] == "-u":
        program = program[1:]
    is_file = bool(program) and program[0].endswith(".py") and Path(program[0]).is_file()
    return program if is_file or program[:1] == ["-m"] else None


def _leave_the_parent(streams: tuple[int, int, int], pass_fds: Sequence[int], environment: dict[str, str]) -> None:
    """Give this forked process the descriptors, environment, signal handlers and streams of a new process."""
    faulthandler.disable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    copies = [os.dup(each) if each >= 0 else -1 for each in streams]
    for descriptor, copy in enumerate(copies):
        if copy >= 0:
            os.dup2(copy, descriptor, inheritable=True)
    _close_all_but({0, 1, 2, *pass_fds})
    os.environ.clear()
    os.environ.update(environment)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        by_line = name == "stderr" or os.isatty(descriptor) or "PYTHONUNBUFFERED" in environment
        setattr(sys, name, os.fdopen(descriptor, mode, 1 if by_line else -1, encoding="utf-8", closefd=False))
    if "PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()


def _run(program: list[str]) -> int:
    """Run a file or module as the interpreter would, and return the exit status."""
    if "RANK" in os.environ:  # so that tests find the process of a rank
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank{os.environ['RANK']}".encode())
    atexit._clear()
    logging.root.handlers.clear()
    sys.excepthook = sys.__excepthook__
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    subprocess.Popen = subprocess_handler.Popen = PreloadedPopen  # type: ignore[misc]
    # Processes of multiprocessing are forked too; "spawn" would start new interpreters.
    SpawnProcess._Popen = staticmethod(popen_fork.Popen)  # type: ignore[assignment,method-assign]
    torch.set_grad_enabled(True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count() or 1)
    added = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    inherited = [each for each in sys.path if Path(each or ".").resolve() != ROOT]
    try:
        if program[0] == "-m":
            sys.argv = program[1:]
            sys.path[:] = [os.getcwd(), *added, *inherited]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            sys.path[:] = [str(Path(program[0]).resolve().parent), *added, *inherited]
            runpy.run_path(program[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    return status


def _close_all_but(keep: set[int]) -> None:
    """Close inherited descriptors by pointing them at /dev/null: inherited objects may still use their numbers."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {*keep, devnull}:
            with contextlib.suppress(OSError):
                os.dup2(devnull, int(name), inheritable=False)
