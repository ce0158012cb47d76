"""Rewards of sampled answers: functions that ship with Meshbook or are the user's, called in a worker process.

A function may hang, exit, print or leave processes behind; in a process of its own it does so without harm to the rank.
`python -m components.training.rewards` is that process. Its stdin is a socket: it reads a line of JSON that names the
functions, then one for each call, and replies to each with a line of JSON. It imports neither torch nor numpy.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import json
import math
import numbers
import os
import pkgutil
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any

from components.config.schema.rollouts import RewardFunctionsConfig, RewardName
from components.package import COMPONENTS
from components.protocol.errors import ConfigError
from components.protocol.processes import STOP_SIGNALS, without_ranks

_START_SECONDS = 300.0
"""Time limit of the imports of the user's functions, which may read many files of a shared file system."""
_END_SECONDS = 2.0
"""Time in which a worker may end by itself before it is killed."""
_PR_SET_PDEATHSIG = 1
_Columns = dict[str, list[Any]]
_ARGUMENTS = ("prompts", "answer", "token_ids", "stopped", "step")
"""Arguments of functions besides the answers and the other columns of the data."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Rewards of a list of answers."""

    rewards: list[list[float | None]]
    """A list per function with the reward of each answer; None: no reward."""
    failed: int
    """Number of answers without a reward because a function raised an exception, took too long or ended its process."""
    failure: str
    """The first failure: the function, and its traceback or the time limit; empty if no function failed."""


class _FunctionError(Exception):
    """Failure of a function that may be due to some of the answers only: exception, time limit, end of the process."""


class RewardFunctions:
    """The reward functions of a config, called in a worker process that ends with this context.

    The worker starts at the first call of `score`. It is killed when a function exceeds its time limit, with all
    processes that the function has started, and replaced at the next call.
    """

    def __init__(self, cfg: RewardFunctionsConfig, max_new_tokens: int) -> None:
        self._cfg, self._max_new_tokens = cfg, max_new_tokens
        self._worker: _Worker | None = None

    def __enter__(self) -> RewardFunctions:
        return self

    def __exit__(self, *error: object) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def score(self, answers: list[str], columns: _Columns, step: int) -> Scored:
        """Return the rewards of `answers` by every function.

        If a function fails for the list, it is called again with each answer alone, so that only those for which it
        fails again get no reward. Each of these calls may take an equal part of the time limit, but at least a second,
        and all together as long again, but at least 10 s; answers that are left then get no reward either.

        Raises ConfigError, for all answers, if a function cannot be loaded, requires an argument that does not exist,
        or does not return a list with a finite number or None for each answer.

        Args:
            answers: The texts.
            columns: Lists as long as `answers`, by the name under which functions receive them: prompts, token_ids,
                stopped (whether the answer ends with a stop token), answer if the data has such a column, and the
                other columns of the data.
            step: Number of the optimizer step.
        """
        if not answers:
            return Scored([[] for _ in self._cfg.functions], 0, "")
        count, seconds = len(answers), self._cfg.timeout_seconds
        rewards, failed, failure = list[list[float | None]](), set[int](), ""
        for function, name in enumerate(self._cfg.functions):
            try:
                rewards.append(self._call(function, answers, columns, step, seconds))
            except _FunctionError as error:
                failure = failure or f"reward.functions={name}: {error}"
                alone = self._call_one_by_one(function, answers, columns, step) if count > 1 else {}
                rewards.append([alone.get(i) for i in range(count)])
                failed |= set(range(count)) - alone.keys()
        return Scored(rewards, len(failed), failure)

    def _call_one_by_one(
        self, function: int, answers: list[str], columns: _Columns, step: int
    ) -> dict[int, float | None]:
        """Return the reward of each answer for which the function does not fail, by the answer's index."""
        rewards, end = {}, time.monotonic() + self._cfg.retry_seconds
        for i, answer in enumerate(answers):
            if (left := end - time.monotonic()) <= 0:
                break
            column_values = {key: [values[i]] for key, values in columns.items()}
            with suppress(_FunctionError):
                seconds = min(left, max(1.0, self._cfg.timeout_seconds / len(answers)))
                (rewards[i],) = self._call(function, [answer], column_values, step, seconds)
        return rewards

    def _call(
        self, function: int, answers: list[str], columns: _Columns, step: int, seconds: float
    ) -> list[float | None]:
        """Return the rewards by one function. Raises _FunctionError, and ConfigError as `score` does."""
        if self._worker is None or self._worker.ended:
            self._worker = _Worker()
            settings = {"max_new_tokens": self._max_new_tokens, "path": sys.path, "parent": os.getpid()}
            try:
                self._worker.ask(asdict(self._cfg) | settings, _START_SECONDS)
            except _FunctionError as error:
                raise ConfigError(f"reward.functions={self._cfg.functions}: cannot be loaded: {error}") from None
        request = {"function": function, "answers": answers, "columns": columns, "step": step}
        rewards: list[float | None] = self._worker.ask(request, seconds)["rewards"]
        return rewards


class _Worker:
    """Process that calls the functions and leads a process group, and the socket to it."""

    def __init__(self) -> None:
        environment = without_ranks(os.environ) | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        folders = [str(COMPONENTS.parent), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: modules in the current directory do not take the place of those that the worker imports.
                [sys.executable, "-P", "-m", "components.training.rewards"],
                stdin=theirs.fileno(),
                stdout=2,
                start_new_session=True,
                env=environment,
            )

    @property
    def ended(self) -> bool:
        """Whether the process was killed, after which nothing may be asked."""
        return self._process.returncode is not None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the reply to a request.

        Raises _FunctionError, and ConfigError as `RewardFunctions.score` does. Kills the process unless it replies.
        """
        deadline, received = time.monotonic() + seconds, bytearray()
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(json.dumps(request, default=str).encode() + b"\n")
            while not received.endswith(b"\n"):
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                if not (part := self._socket.recv(1 << 16)):
                    raise ConnectionError
                received += part
        except BaseException as error:  # also Ctrl-C: no later call may read the reply to this one
            self.kill()
            if isinstance(error, TimeoutError):
                raise _FunctionError(f"took longer than {seconds:g} s") from None
            if isinstance(error, ConnectionError):
                status = self._process.returncode
                how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
                raise _FunctionError(f"its worker process {how}") from None
            raise
        reply: dict[str, Any] = json.loads(received)
        if "problem" in reply:
            self.kill()
            raise ConfigError(reply["problem"])
        if "failure" in reply:
            raise _FunctionError(reply["failure"])
        return reply

    def close(self) -> None:
        """End the worker, and kill it if it does not end by itself."""
        with suppress(OSError):
            self._socket.settimeout(_END_SECONDS)
            self._socket.sendall(b"null\n")
            self._socket.recv(1)  # returns when the process has ended
        self.kill()

    def kill(self) -> None:
        """Kill the worker and the processes of its group."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._socket.close()


# The worker process


def _serve() -> None:
    """Load the functions that the first line of stdin names, and reply to the following lines until one is null."""
    descriptor = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # functions must not read from the socket
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # answers may hold surrogates
    functions: list[tuple[str, Callable[..., Any]]] = []
    own = os.getpid()
    # closefd: the rank reads the end of the socket when this process has ended, after its exit handlers.
    with open(descriptor, "rb", closefd=False) as requests, open(descriptor, "wb", closefd=False) as replies:
        for line in requests:
            if (request := json.loads(line)) is None:  # `close`
                return
            try:
                if functions:
                    name, function = functions[request.pop("function")]
                    reply = _reply(name, function, **request)
                else:
                    _end_with(request["parent"])
                    sys.path[:] = [os.getcwd(), *request["path"]]
                    functions = [(name, _load(name, request)) for name in request["functions"]]
                    reply = {}
            except ConfigError as error:
                reply = {"problem": str(error)}
            if os.getpid() != own:  # a process that the function has forked, and that returned too
                os._exit(0)
            replies.write(json.dumps(reply).encode() + b"\n")
            replies.flush()
    if functions:  # the rank was killed: leave no process behind that a function has started
        os.killpg(0, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """Kill this process group when `parent` ends, and ignore requests to stop, which `parent` handles.

    An idle worker ends with its stdin. A signal, on Linux only, also ends one that hangs, even in a regular expression;
    the kernel sends it when the thread that started the worker ends, hence the check.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)

    def restore() -> None:  # in processes that a function forks, which may be ended by SIGTERM
        for number in (signal.SIGINT, *STOP_SIGNALS):
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, on_signal)
    os.register_at_fork(after_in_child=restore)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    on_signal(signal.SIGHUP, None)


def _load(name: str, settings: dict[str, Any]) -> Callable[..., Any]:
    """Return a built-in function, or import the user's. Raises ConfigError with the traceback of the import."""
    pattern, form = re.compile(settings["pattern"]), re.compile(settings["format"], re.DOTALL)
    most = settings["max_new_tokens"]

    def group(text: str) -> str | None:
        match = pattern.search(text)
        return match and match[1] and match[1].strip()

    built_in: dict[str, Callable[..., list[float | None]]] = {
        RewardName.gsm8k: _equals(_result, _result),
        RewardName.number: _equals(_last_number, _last_number),
        RewardName.exact: _equals(str.strip, str.strip),
        RewardName.regex: _equals(group, str.strip) if pattern.groups else _matches(pattern.search),
        RewardName.format: _matches(form.fullmatch),
        RewardName.length: lambda answers, token_ids: [1 - len(ids) / most for ids in token_ids],
    }
    if name in built_in:
        return built_in[name]
    module, _, attribute = name.rpartition(":")
    try:
        if module.endswith(".py"):
            module = _import_file(Path(module).resolve())
        function: Callable[..., Any] = pkgutil.resolve_name(f"{module}:{attribute}")
    except BaseException as error:  # SystemExit too: the module is the user's
        raise ConfigError(f"reward.functions={name}: cannot be loaded\n{_traceback(error)}") from error
    if not callable(function):
        raise ConfigError(f"reward.functions={name}: is a {type(function).__name__}; must be a function")
    return function


def _import_file(file: Path) -> str:
    """Import a file, unless it has been, under a name that no other module has, and return that name."""
    name = re.sub(r"\W", "_", str(file))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)  # as dataclasses and pickle require
        spec.loader.exec_module(module)
    return name


def _reply(name: str, function: Callable[..., Any], answers: list[str], columns: _Columns, step: int) -> dict[str, Any]:
    """Return the reply to a call: rewards, or the traceback of an exception. Raises ConfigError as `_checked` does."""
    call = _bound(name, function, answers, columns, step)
    try:
        returned = _plain(call())
    except BaseException as error:  # SystemExit too: it ends this call, not the worker
        return {"failure": _traceback(error)}
    return {"rewards": _checked(name, returned, len(answers))}


def _traceback(error: BaseException) -> str:
    """Return the traceback without the frame of this module."""
    entry = error.__traceback__ and error.__traceback__.tb_next
    return "".join(traceback.format_exception(type(error), error, entry)).rstrip()


def _bound(
    name: str, function: Callable[..., Any], answers: list[str], columns: _Columns, step: int
) -> Callable[[], Any]:
    """Return the call of a function with the answers and with those arguments that its signature takes.

    The first positional parameter receives the answers, unless the function takes them by name: as `answers`, or as
    `completions` and `completion_ids` like the functions of TRL, in which the answer to a conversation is a message.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):  # some functions written in C
        return partial(function, answers)
    named = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    available: dict[str, Any] = {**columns, "step": step}
    positional: list[list[str]] = []
    first = parameters[0].name if parameters and parameters[0].kind <= inspect.Parameter.VAR_POSITIONAL else None
    if first is None or named & {"answers", "completions", "completion_ids"}:
        messages = [[{"role": "assistant", "content": answer}] for answer in answers]
        choices = zip(columns["prompts"], messages, answers, strict=True)
        completions = [message if isinstance(prompt, list) else answer for prompt, message, answer in choices]
        available |= {"answers": answers, "completions": completions, "completion_ids": columns["token_ids"]}
    elif first in _ARGUMENTS:
        raise ConfigError(
            f"reward.functions={name}: its first parameter, {first}, would receive the answers; must have another "
            "name; rename it, or name another parameter answers"
        )
    else:
        available.pop(first, None)
        positional = [answers]
    for each in parameters[len(positional) :]:
        is_given = each.name in available and each.name in named
        if not is_given and each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            remedy = "set data.answer_column" if each.name == "answer" else "rename it, or give it a default"
            raise ConfigError(
                f"reward.functions={name}: requires the argument {each.name}; must be one of {', '.join(available)}; "
                f"{remedy}"
            )
    if all(each.kind is not each.VAR_KEYWORD for each in parameters):
        available = {key: value for key, value in available.items() if key in named}
    return partial(function, *positional, **available)


def _checked(name: str, returned: Any, count: int) -> list[float | None]:
    """Return the rewards as floats. Raises ConfigError unless there is a finite number, or none, for each answer."""
    rule = "must return a list with a finite number, or None for no reward, for each answer"
    if not isinstance(returned, list | tuple):
        raise ConfigError(f"reward.functions={name}: returned a value of type {type(returned).__name__}; {rule}")
    if len(returned) != count:
        raise ConfigError(f"reward.functions={name}: returned {len(returned)} values for {count} answers; {rule}")
    rewards: list[float | None] = []
    for value in map(_plain, returned):
        if value is None:
            rewards.append(None)
            continue
        try:
            number = float(value) if isinstance(value, numbers.Real) else math.inf
        except OverflowError:
            number = math.inf
        if math.isinf(number):
            raise ConfigError(f"reward.functions={name}: returned {value!r:.80}; {rule}")
        rewards.append(None if math.isnan(number) else number)
    return rewards


def _plain(value: Any) -> Any:
    """Return an array or a tensor of the user's as a list or number, other values as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


# The functions that ship with Meshbook

_NUMBER = re.compile(
    r"\$?(?:(?<![\w.)%])([-\u2212]))?\$?"  # the sign, unless it is an operator or a dash: 7-3
    r"([0-9]+(?:,[0-9]+)*(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"((?:[eE][-+]?[0-9]{1,3}(?![0-9]))?)"
)
_MARKED_NUMBER = re.compile(r"####\s*" + _NUMBER.pattern)


def _last_number(text: str, pattern: re.Pattern[str] = _NUMBER) -> Fraction | None:
    """Return the last number of a text exactly, None if it has none.

    A number is written in the digits 0 to 9, with commas between them that do not count, decimals and an exponent of up
    to three digits: -1,234.50 or 1e3. What precedes and follows it does not count: $12, 12% and "12." are 12. A minus
    sign after a letter, a digit, a dot, ")" or "%" is an operator or a dash: 7-3 ends with 3.
    """
    if not (found := pattern.findall(text)):
        return None
    sign, digits, exponent = found[-1]
    try:
        return Fraction(("-" if sign else "") + digits.replace(",", "") + exponent)
    except ValueError:  # more than 4,300 digits
        return None


def _result(text: str) -> Fraction | None:
    """Return the number directly after the last #### that a number follows, else the last number of the text."""
    marked = _last_number(text, _MARKED_NUMBER)
    return _last_number(text) if marked is None else marked


def _equals(of_answer: Callable[[str], object], of_data: Callable[[str], object]) -> Callable[..., list[float | None]]:
    """Return a function that compares what it finds in an answer with what it finds in the answer of the data.

    It returns 1 if both are equal, else 0; None if the data has nothing to compare with.
    """

    def score(answers: list[str], answer: list[Any]) -> list[float | None]:
        data = [None if value is None else of_data(str(value)) for value in answer]
        return [None if y is None else float(of_answer(text) == y) for text, y in zip(answers, data, strict=True)]

    return score


def _matches(match: Callable[[str], re.Match[str] | None]) -> Callable[..., list[float | None]]:
    """Return a function that rewards the answers that a pattern matches."""
    return lambda answers: [float(match(text) is not None) for text in answers]


if __name__ == "__main__":
    _serve()
