"""Runs started from Python: `meshbook.run`, and the table and the picture of a run in a notebook."""

from __future__ import annotations

import base64
import csv
import html
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from enum import Enum
from io import TextIOWrapper
from numbers import Integral, Real
from pathlib import Path
from typing import IO, Any

from yaml import YAMLError

from components.config.compose.explain import did_you_mean, nearest
from components.config.compose.typed import literal
from components.config.stored_run import MetricsLog, has_rewards
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError
from components.protocol.failures import describe_exit
from components.protocol.processes import LAUNCHER_PID, collected_signals, without_ranks
from components.protocol.run_files import current_config, read_result
from components.protocol.safe_parsing import load_yaml
from meshbook.programs import COMMAND, recipes, tools

MOST_ROWS = 16
"""Rows of the table; of a longer run every n-th step."""
REFRESH_SECONDS = 1.0
"""Minimum time between two updates of the table in a notebook."""
HOLD_SECONDS = 2.0
"""Time for which lines of stderr are held back: those of a run that is rejected are raised instead of printed."""

_PLAIN_TEXT = re.compile(r"[A-Za-z_/][\w./:@+-]*", re.ASCII)
_PLAIN_KEY = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_NOT_TEXT = {"null", "true", "false", "inf", "nan"}
"""Words that Hydra's grammar does not read as text, in any case."""
_STARTED = re.compile(r"(?:run|sweep|study) +(/.+?)(?:: \d+ (?:process|point).*)?\n")
"""Line with which a run, a job or a sweep states its directory."""
_SEVERAL_PROBLEMS = re.compile(r"\d+ problems with this run:\n")
_STEP = re.compile(r"step +\d+  (?:eval_)?(?:loss|reward) ")
"""Line of a step, which a notebook shows in the table."""


class RunResult:
    """A run or a sweep as its directory shows it; in a notebook its table and its picture.

    Args:
        directory: The run directory, or that of a sweep.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory).expanduser().absolute()
        if not self.directory.is_dir():
            raise ConfigError(f"{self.directory}: no such folder; give the directory of a run or a sweep")
        self._shown_in: int | None = None  # number of the notebook cell that shows the result already

    @property
    def result(self) -> dict[str, Any]:
        """Contents of result.json: status, losses or rewards, speed; empty until the run has ended, and for a sweep."""
        return read_result(self.directory)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl, a dict per logged step or evaluation; of a sweep the rows of its table."""
        table = self.directory / "report.csv"
        if not table.is_file():
            return MetricsLog(self.directory).read()
        with table.open(newline="", encoding="utf-8") as file:
            return [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(file)]

    @property
    def picture(self) -> Path | None:
        """File of the curve of losses or rewards, of a sweep its plot; None if there is none."""
        files = (self.directory / name for name in ("reward.png", "loss.png", "sweep.png", "report.png"))
        return next((file for file in files if file.is_file()), None)

    def __repr__(self) -> str:
        return f"{self._summary() or self._progress(self.metrics)}\n{self.directory}"

    def _repr_html_(self) -> str:
        """Return the summary, the table and the picture."""
        rows: dict[object, dict[str, Any]] = {}
        lines = self.metrics
        for number, line in enumerate(lines):
            rows.setdefault(line.get("step", f"row {number}"), {}).update(line)
        shown = _spread([*rows.values()])
        left_out = f"{len(shown)} of {len(rows)} steps; all are in metrics.jsonl" if len(shown) < len(rows) else ""
        texts = (f"<p>{html.escape(text)}</p>" for text in (self._summary() or self._progress(lines), left_out))
        path = f"<p><code>{html.escape(str(self.directory))}</code></p>"
        return next(texts) + _table(shown) + next(texts) * bool(left_out) + self._image() + path

    def _ipython_display_(self) -> None:
        """Show the table and the picture, or one line if this cell of a notebook has shown them already."""
        from IPython.display import display

        shows_all = _cell() is not None and self._shown_in != _cell()
        page = {"text/html": self._repr_html_()} if shows_all else {}
        display({"text/plain": repr(self), **page}, raw=True)

    def _summary(self) -> str:
        """Return how the run ended; empty if it has not."""
        values = self.result
        if not values:
            return ""
        if error := values.get("error"):
            return f"{values.get('status')}: {error}"
        steps = values.get("steps")
        parts = [f"{values.get('status')}: {steps} step{'' if steps == 1 else 's'}"]
        kind = "loss" if values.get("last_reward") is None and values.get("eval_reward") is None else "reward"
        ends = ((kind, f"first_{kind}", f"last_{kind}"), (f"held-out {kind}", f"first_eval_{kind}", f"eval_{kind}"))
        for name, first, last in ends:
            if values.get(last) is not None:
                before = "" if values.get(first) is None else f"{values[first]:.3f} to "
                parts.append(f"{name} {before}{values[last]:.3f}")
        return ", ".join(parts)

    def _progress(self, lines: list[dict[str, Any]]) -> str:
        """Return the newest step of a run that has not ended, and the last one if it is known."""
        if (self.directory / "sweep.json").is_file():
            return f"sweep: {len(lines)} points" if lines else "sweep, no result yet"
        newest = max((line["step"] for line in lines if "step" in line), default=0)
        last: Any = None
        with suppress(OSError, YAMLError, TypeError, KeyError):
            last = load_yaml(current_config(self.directory).read_text("utf-8"))["training"]["max_steps"]
        return f"step {newest:,}{f' of {last:,}' if isinstance(last, int) else ''}, no result yet"

    def _image(self) -> str:
        if self.picture is None:
            return ""
        data = base64.b64encode(self.picture.read_bytes()).decode()
        return f'<img alt="{self.picture.stem}" style="max-width: 100%" src="data:image/png;base64,{data}">'


class RunFailed(RuntimeError):
    """Run that failed; the message is its cause.

    Args:
        cause: The cause in one sentence.
        result: The run; None if it had no directory yet.
    """

    def __init__(self, cause: str, result: RunResult | None) -> None:
        super().__init__(cause)
        self.result = result

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the frames of this module explain nothing."""
        return [f"RunFailed: {self}"]


def run(recipe: str | os.PathLike[str], /, *overrides: str | Mapping[str, Any], **keys: Any) -> RunResult | None:
    """Run a recipe in a child process, with the command line that is printed first, and wait for its end.

    run("finetune", model="tiny", training={"max_steps": 20})
    run("mine.py", "cluster=local_2proc", {"optimizer.lr": 1e-3})
    run("finetune", "-m", "optimizer.lr=1e-4,1e-3")

    A notebook shows the table and the curve while the run trains. Interrupting the cell saves and stops the run,
    as Ctrl-C does; the end of the calling process does so too.

    Args:
        recipe: Name of a recipe, or the file of your own.
        overrides: Arguments as in a shell, and dicts of keys and values.
        keys: Options and sections. A dict sets keys of its section.

    Returns the run, or None if nothing was started (a dry run, --help). Raises ConfigError for a rejected config,
    RunFailed for a failed run, and KeyboardInterrupt after an interrupted one has stopped.
    """
    given = [values for values in overrides if isinstance(values, Mapping)]
    arguments = [override for override in overrides if not isinstance(override, Mapping)]
    if wrong := [argument for argument in arguments if not isinstance(argument, str)]:
        raise ConfigError(f"{wrong[0]!r}: is no override; give a string such as 'training.max_steps=20', or a dict")
    arguments += [override for values in (*given, keys) for override in _overrides(values)]
    file, shown = _program(os.fspath(recipe))
    print(shlex.join([*shown, *arguments]), flush=True)
    return _Child(file, arguments).wait()


def _program(name: str) -> tuple[Path, list[str]]:
    """Return the file of a recipe, and the words of a shell that start it. Raises ConfigError if there is none."""
    if name in recipes():
        return recipes()[name].file, [COMMAND, name]
    file = Path(name).expanduser()
    if file.is_file():
        return file.absolute(), ["python", str(file)]
    if name in tools():
        raise ConfigError(f"{name}: is a tool, not a recipe; write !{COMMAND} {name} in a cell")
    like = did_you_mean(nearest(name, recipes()))
    raise ConfigError(f"{name}: is neither a recipe ({', '.join(recipes())}) nor a file in {Path.cwd()}{like}")


def _overrides(values: Mapping[str, Any], section: str = "") -> Iterator[str]:
    """Yield the overrides that set these values, in Hydra's grammar."""
    for name, value in values.items():
        if not isinstance(name, str) or (section and not _PLAIN_KEY.fullmatch(name)):
            raise ConfigError(f"{section}{name}: no key can have this name on a command line; set it in a config file")
        if isinstance(value, Mapping) and value:
            yield from _overrides(value, f"{section}{name}.")
        else:
            yield f"{section}{name}={_written(value, section + name)}"


def _written(value: Any, key: str) -> str:
    """Return a value in Hydra's grammar. Raises ConfigError for what a config cannot hold."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case Enum():
            return _written(value.value, key)
        case str() | os.PathLike():
            return _text(os.fspath(value), key)
        case Integral():
            return str(int(value))
        case Real():
            return repr(float(value))
        case list() | tuple():
            return f"[{','.join(_written(each, key) for each in value)}]"
        case Mapping():
            return f"{{{','.join(_entries(value, key))}}}"
    raise ConfigError(
        f"{key}={value!r}: is of type {type(value).__name__}, which a config cannot hold; give text, a number, True, "
        "False, None, a path, or a list or dict of them"
    )


def _entries(values: Mapping[Any, Any], key: str) -> Iterator[str]:
    for name, value in values.items():
        if not isinstance(name, str) or not _PLAIN_KEY.fullmatch(name) or name.lower() in _NOT_TEXT:
            raise ConfigError(f"{key}: no dict on a command line can have the key {name!r}; set it in a config file")
        yield f"{name}:{_written(value, key)}"


def _text(text: str | bytes, key: str) -> str:
    """Return text in Hydra's grammar, in quotes if it needs them."""
    if isinstance(text, bytes) or "\0" in text or re.search("[\ud800-\udfff]", text):
        raise ConfigError(f"{key}={text!r}: holds what a command line cannot; remove it")
    if _PLAIN_TEXT.fullmatch(text) and text.lower() not in _NOT_TEXT:
        return text
    # Backslashes before a quote are doubled, others stay: the rule of Hydra's quoted strings.
    return '"' + re.sub(r'(\\*)(?="|\Z)("?)', _escaped_quote, literal(text)) + '"'


def _escaped_quote(found: re.Match[str]) -> str:
    return found[1] * 2 + ('\\"' if found[2] else "")


class _Child:
    """The process of a run, its output and its end."""

    def __init__(self, file: Path, arguments: list[str]) -> None:
        own = {LAUNCHER_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
        # ipykernel asks for colors, with which a pipe counts as a terminal, and for its own backend of matplotlib.
        kernel = {"FORCE_COLOR", "CLICOLOR_FORCE", "MPLBACKEND"}
        inherited = {name: value for name, value in without_ranks(os.environ).items() if name not in kernel}
        self.result: RunResult | None = None
        self.errors: list[str] = []
        """Lines of stderr that are held back: all before the run has its directory, then the newest."""
        self.last = ""
        self.sent: list[int] = []
        """Signals that were forwarded."""
        self._held_until = 0.0
        self._lines: queue.Queue[tuple[bool, str]] = queue.Queue()
        self._panel: Callable[[str], None] | None = None
        self._next = 0.0
        self.process = subprocess.Popen(
            [sys.executable, str(file), *arguments],
            env=inherited | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # an interrupt then reaches only this process, which forwards it once
        )
        streams = ((self.process.stdout, False), (self.process.stderr, True))
        self._readers = [threading.Thread(target=self._read, args=stream, daemon=True) for stream in streams]
        for reader in self._readers:
            reader.start()

    def wait(self) -> RunResult | None:
        """Show the run until it ends, and return it; see `run`."""
        is_main = threading.current_thread() is threading.main_thread()
        try:
            with collected_signals() if is_main else nullcontext(deque[int]()) as signals:
                while any(reader.is_alive() for reader in self._readers) or not self._lines.empty():
                    while signals:
                        self.sent.append(signals.popleft())
                        self.process.send_signal(self.sent[-1])
                    self._show_lines()
                    self._refresh()
                self.process.wait()
        finally:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
        return self._conclude()

    def _read(self, stream: IO[bytes], is_error: bool) -> None:
        for line in TextIOWrapper(stream, "utf-8", "replace", newline=""):
            self._lines.put((is_error, line))

    def _show_lines(self) -> None:
        """Print the lines that have arrived, but not those of rejected configs, which are raised."""
        if self.result is not None and (self.sent or time.monotonic() >= self._held_until):
            self._release()
        shown: list[str] = []
        with suppress(queue.Empty):
            # Not until there are none: short steps write lines without a pause, and the table would not be refreshed.
            for _ in range(max(1, self._lines.qsize())):
                is_error, line = self._lines.get(timeout=0.1)
                self.last = line.strip() or self.last
                if self.result is None and (found := _STARTED.fullmatch(line)) and Path(found[1]).is_dir():
                    self.result = RunResult(found[1])
                    self._panel = _open_panel()
                if is_error:
                    self._held_until = self._held_until if self.errors else time.monotonic() + HOLD_SECONDS
                    self.errors.append(line)
                elif not (self._panel and _STEP.match(line)):
                    shown.append(line)
        if shown:
            print(*shown, sep="", end="", flush=True)

    def _release(self) -> None:
        """Print the lines that are held back."""
        print(*self.errors, sep="", end="", flush=bool(self.errors))
        self.errors.clear()

    def _refresh(self, *, now: bool = False) -> None:
        began = time.monotonic()
        if self.result is None or self._panel is None or (began < self._next and not now):
            return
        self._panel(self.result._repr_html_())
        # Most of the time remains for the output, however long the history of the run is.
        self._next = time.monotonic() + max(REFRESH_SECONDS, 10 * (time.monotonic() - began))

    def _conclude(self) -> RunResult | None:
        """Return the run, or raise what ended it."""
        status, result = self.process.returncode, self.result
        if status == EXIT_INVALID:
            if self._panel is not None:
                self._panel("")
            raise ConfigError(self._problems())
        self._refresh(now=True)
        self._release()
        if result is not None:
            result._shown_in = _cell()
        if signal.SIGINT in self.sent or status == EXIT_INTERRUPTED:
            if result is not None:
                print(f"interrupted; {COMMAND}.RunResult({str(result.directory)!r}) shows the run")
            raise KeyboardInterrupt
        for number in self.sent:
            signal.raise_signal(number)  # the child has stopped: this process goes on to do so
        if status != 0:
            cause = "" if result is None else result.result.get("error") or _failed_points(result.metrics)
            raise RunFailed(cause or f"{describe_exit(status)}: {self.last}", result)
        return result

    def _problems(self) -> list[str]:
        """Return the config errors at the end of stderr, and print what precedes them."""
        headings = [number for number, line in enumerate(self.errors) if _SEVERAL_PROBLEMS.fullmatch(line)]
        first = headings[-1] + 1 if headings else len(self.errors) - 1 if self.result is not None else 0
        problems = [line.rstrip("\n") for line in self.errors[first:]]
        if not headings or int(self.errors[headings[-1]].split()[0]) != len(problems):
            problems = ["\n".join(problems)]  # one problem, or several of which one quotes a value with line breaks
        self.errors = self.errors[: headings[-1] if headings else first]
        self._release()
        return problems


def _failed_points(rows: list[dict[str, Any]]) -> str:
    """Return which points of a sweep failed, and why the first one did; empty for a run."""
    failed = [row for row in rows if row.get("reason")]
    if not failed:
        return ""
    return f"{len(failed)} of {len(rows)} points are not ok, such as {failed[0].get('run')}: {failed[0]['reason']}"


def _cell() -> int | None:
    """Return the number of the notebook cell that runs; None outside a notebook."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython import get_ipython

    shell = get_ipython()
    return None if shell is None else shell.execution_count


def _open_panel() -> Callable[[str], None] | None:
    """Return a function that replaces the HTML at this place of the notebook; None outside a notebook."""
    if _cell() is None:
        return None
    from IPython.display import HTML, display

    handle = display(HTML("starting"), display_id=True)
    return lambda text: handle.update(HTML(text))


def _spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return at most MOST_ROWS rows at equal distances, with the first and the last one."""
    if len(rows) <= MOST_ROWS:
        return rows
    return [rows[round(number * (len(rows) - 1) / (MOST_ROWS - 1))] for number in range(MOST_ROWS)]


def _table(rows: list[dict[str, Any]]) -> str:
    kind = "reward" if has_rewards(rows) else "loss"
    first = ("step", kind, f"eval_{kind}") if any("step" in row for row in rows) else ()
    order = dict.fromkeys([*first, *(name for row in rows for name in row)])
    if first and kind == "reward":  # beside which the loss means nothing
        order.pop("loss", None)
    names = [name for name in order if any(row.get(name) is not None for row in rows)]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    cells = ("".join(f"<td>{_cell_text(name, row.get(name))}</td>" for name in names) for row in rows)
    body = "".join(f"<tr>{cell}</tr>" for cell in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""


def _cell_text(name: str, value: Any) -> str:
    match value:
        case None:
            return ""
        case float() if name.endswith(("loss", "reward")):
            return f"{value:.4f}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        case int() if not isinstance(value, bool):
            return f"{value:,}"
    return html.escape(str(value))


def _number(text: str) -> Any:
    """Return the value of a field of a CSV file: None, a boolean, a number or text."""
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    for kind in (int, float):
        with suppress(ValueError):
            return text if "_" in text else kind(text)  # 1_0.01 is the name of a point, and a number to Python
    return text
