"""Complete runs of recipes/finetune.py, launcher and ranks, without the start-up time of Python.

The runs do everything that the command does: the launcher composes the config, creates the run directory, starts and
watches the ranks; the ranks train and save. But where the launcher would start `python recipes/finetune.py`, the
process is forked, with the environment, file descriptors and output of the new process. A run of two ranks therefore
takes a second or two, and a test can kill hundreds.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  (imported once, for all forks)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import components.launch.local
import components.launch.rank
from components.config.compose import read_frozen  # noqa: F401
from components.protocol.signals import FORWARDED_SIGNALS
from recipes import finetune

_PR_SET_NAME = 15
RECIPE = Path(finetune.__file__)


class ForkedPopen:
    """The subset of subprocess.Popen that the launcher uses, for a forked rank."""

    def __init__(
        self,
        arguments: list[str],
        *,
        env: dict[str, str],
        stdin: int,
        stdout: IO[bytes] | None,
        stderr: IO[bytes] | None,
        pass_fds: tuple[int, ...],
        process_group: int,
    ) -> None:
        assert (arguments, process_group) == ([sys.executable, str(RECIPE)], 0)
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid:
            return
        try:
            self._run_rank(arguments, env, (stdout, stderr), {0, 1, 2, *pass_fds})
        finally:  # never return into the code of the parent
            os._exit(1)

    def _run_rank(
        self,
        arguments: list[str],
        env: dict[str, str],
        outputs: tuple[IO[bytes] | None, IO[bytes] | None],
        descriptors: set[int],
    ) -> None:
        for number in FORWARDED_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        for output, descriptor in zip(outputs, (1, 2), strict=True):
            if output is not None:
                os.dup2(output.fileno(), descriptor)
        _close_all_but(descriptors)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = arguments[1:]
        os._exit(run_main(f"rank{env['RANK']}"))

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self.wait(os.WNOHANG)

    def wait(self, options: int = 0) -> int | None:
        """Wait for the process to end and return its exit status."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def run_main(name: str) -> int:
    """Run the recipe in this forked process as the interpreter would, and return the exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    atexit._clear()
    status = 1
    try:
        torch.set_num_threads(1)
        finetune.main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
    return status


def _elastic_rank() -> None:
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
    ):  # a new process does not inherit the agent's handlers
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    # The agent waits for the function to return, because it forked the rank; it starts real ranks as commands.
    components.launch.rank.end_rank = sys.exit  # type: ignore[assignment]
    status = run_main(f"rank{os.environ['RANK']}")
    if status:
        os._exit(status)


def _torchrun() -> None:
    """Run `torchrun --nproc-per-node 2 recipes/finetune.py`: TorchElastic's agent in this process, and its ranks."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        start_method="fork",
        monitor_interval=0.05,
        max_restarts=0,
    )
    elastic_launch(config, _elastic_rank)()


@dataclass
class Attempt:
    """One start of the command."""

    pid: int
    log: Path
    began: float = field(default_factory=time.monotonic)
    status: int | None = None

    def ranks(self) -> dict[str, int]:
        """Return the process ids of the running ranks by name (rank0, rank1)."""
        found = {}
        for child in _children(self.pid):
            name = _comm(child)
            if name.startswith("rank"):
                found[name] = child
        return found

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status

    def wait(self, seconds: float) -> int:
        """Wait for the end, at most `seconds`, and return the exit status."""
        until(lambda: self.poll() is not None, seconds, self.output)
        assert self.status is not None
        return self.status

    def kill(self, target: str) -> list[int]:
        """Send SIGKILL to the launcher (or agent), all ranks or one rank; to the launcher if the rank has not started.

        Returns the process ids of the ranks that were running.
        """
        ranks = self.ranks()
        victims = list(ranks.values()) if target == "all" else [ranks[target]] if target in ranks else []
        for victim in victims or [self.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        return list(ranks.values())

    def output(self) -> str:
        """Return the output of the launcher and rank 0."""
        return self.log.read_text(errors="replace")


@dataclass
class Command:
    """`python recipes/finetune.py ARGUMENTS run.dir=RUN_DIR`, or the same under torchrun."""

    folder: Path
    """Folder for the output, one file per start."""
    run_dir: Path
    arguments: list[str]
    elastic: bool = False

    def start(self, environment: dict[str, str] | None = None) -> Attempt:
        """Start the command in a new process group."""
        number = len(list(self.folder.glob(f"{self.run_dir.name}.*.log")))
        log = self.folder / f"{self.run_dir.name}.{number}.log"
        log.touch()
        pid = os.fork()
        if pid:
            return Attempt(pid, log)
        try:
            self._run_launcher(log, environment or {})
        except BaseException:
            traceback.print_exc()
        finally:  # never return into the test
            os._exit(1)

    def _run_launcher(self, log: Path, environment: dict[str, str]) -> None:
        os.setpgid(0, 0)
        with log.open("wb") as output:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        _close_all_but({0, 1, 2})
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        for name in [name for name in os.environ if name.startswith(("MESHBOOK_", "SLURM_", "TORCHELASTIC_"))]:
            del os.environ[name]
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", **environment}
        sys.argv = [str(RECIPE), *self.arguments, f"run.dir={self.run_dir}"]
        sys.excepthook = sys.__excepthook__
        if self.elastic:
            atexit._clear()
            _torchrun()
            os._exit(0)
        components.launch.local.subprocess = _Forking  # type: ignore[assignment]
        os._exit(run_main("launcher"))


class _Forking:
    Popen = ForkedPopen
    DEVNULL = -3


def until(condition: Callable[[], bool], seconds: float, output: Callable[[], str] = str) -> None:
    """Wait for a condition; after `seconds` fail with `output()` in the message."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"condition not met after {seconds} s\n{output()}"
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def steps_logged(run_dir: Path) -> int:
    """Return the last optimizer step in metrics.jsonl."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    written: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
    return max((line["step"] for line in written if "loss" in line), default=0)


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of a process."""
    return [each for child in _children(pid) for each in (child, *descendants(child))]


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _close_all_but(keep: set[int]) -> None:
    """Close inherited descriptors by pointing them at /dev/null: inherited objects may still use their numbers."""
    devnull = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in {*keep, devnull}:
            with contextlib.suppress(OSError):
                os.dup2(devnull, int(name), inheritable=False)
