"""Control characters in data, names and messages are escaped before they reach a terminal or a log."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from components.config.schema.run import LoggingConfig, WandbConfig, WandbMode
from components.launch.sweep.plan import Point, Sweep, SweepRow
from components.launch.sweep.ranking import Agreement, SweepReport, print_table, to_markdown
from components.launch.sweep.report import _console
from components.observability import Reporter
from components.protocol.failures import (
    Kind,
    RankExit,
    RankReport,
    error_file,
    first_failure,
    print_failure,
    print_problems,
    write_report,
)
from components.terminal import printable

ROOT = Path(__file__).resolve().parents[2]
EVIL = "\x1b[2J\x1b]0;owned\x07 \r\x9b31m \u202edesrever\u2066 \x7f\x08 \udc80"
"""Clears the screen, sets the title, returns to the start of the line, colors by C1, reverses text, deletes."""


def is_clean(text: str) -> bool:
    return not [each for each in text if unicodedata.category(each) in ("Cc", "Cs") and each not in "\n\t"] and not (
        set(text) & set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029")
    )


def escaped_output(captured: Any) -> str:
    text = captured.out + captured.err
    assert is_clean(text), ascii(text)
    assert "\\x1b[2J" in text
    assert "\\u202e" in text
    return text


def test_printable_escapes_control_characters_and_keeps_text() -> None:
    every = "".join(map(chr, range(0x3000)))
    assert is_clean(printable(every + "\ud800\udfff"))
    kept = "Grüße, 数学 \t\n العربية עברית \U0001f600 \\x1b \u200d\u0301"
    assert printable(kept) == kept
    assert printable("\x1b\u202e\x85\x7f") == "\\x1b\\u202e\\x85\\x7f"


def test_samples_and_generations_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = LoggingConfig(wandb=WandbConfig(mode=WandbMode.disabled))
    with Reporter(cfg, str(tmp_path), enabled=True) as reporter:
        reporter.print(f"sample: {EVIL} [bold]:smile:[/bold] [/]")
        reporter.generations([EVIL], [EVIL], when="after")
    text = escaped_output(capsys.readouterr())
    assert text.count("\\u202e") == 3
    assert "[bold]:smile:[/bold] [/]" in text  # markup and emoji codes are not interpreted


def test_config_errors_and_rank_failures_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_problems([f"data.path={EVIL}: no such file", "other"])
    escaped_output(capsys.readouterr())
    error: BaseException = ValueError(EVIL)
    write_report(tmp_path, 1, error)
    report = RankReport(**{**json.loads(error_file(tmp_path, 1).read_text()), "kind": Kind.exception})
    failure = first_failure([RankExit(rank=1, status=1, time=0.0, terminated=False)], {1: report})
    assert failure is not None
    print_failure(failure, tmp_path)
    escaped_output(capsys.readouterr())
    (tmp_path / "rank_2.log").write_text(EVIL, errors="surrogatepass")
    failure = first_failure([RankExit(rank=2, status=1, time=0.0, terminated=False)], {})
    assert failure is not None
    print_failure(failure, tmp_path)
    escaped_output(capsys.readouterr())


def test_sweep_table_is_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    point = Point(0, f"0_{EVIL}", {"run.name": f"[/]{EVIL}"}, [])
    sweep = Sweep(tmp_path, "id", "finetune", tmp_path, tmp_path, EVIL, [], ["run.name"], [point])
    report = SweepReport(sweep, [SweepRow(point, "failed", EVIL)], Agreement(), None)
    print_table(report, _console())
    assert "[/]" in escaped_output(capsys.readouterr())
    assert is_clean(to_markdown(report))


SCRIPT = """
import logging, sys
from components.terminal import guard_output
guard_output()
logging.getLogger("components.data.cache").warning("%s is damaged", sys.argv[1])
raise ValueError(sys.argv[1])
"""


def test_log_messages_and_uncaught_exceptions_are_escaped() -> None:
    evil = EVIL.replace("\udc80", "")
    process = subprocess.run([sys.executable, "-c", SCRIPT, evil], capture_output=True, cwd=ROOT, check=False)
    text = process.stderr.decode()
    assert process.returncode == 1
    assert is_clean(text)
    assert text.count("\\u202edesrever") == 2


OUTPUT = r"""
import argparse, os, sys
from components.presentation import PlainConsole, new_table
from components.terminal import exit_with, keep_running, print_text

def main(arguments):
    if "run" in arguments:
        keep_running("utf-8" if "log" in arguments else None)
    table = new_table(["n\xe4me"], [0])
    table.add_row("\U0001f389")
    for _ in range(300):
        print_text("\xe9\U0001f600")
        PlainConsole().print(table)
    print(argparse.ArgumentParser(description="\xfc\u4e2d").format_help(), flush=True)
    print_text("done \xe9", file=sys.stderr, flush=True)
    return 0

exit_with(main)
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LOST = "the output cannot be written: {}; the run continues and logs to metrics.jsonl\n"


def run_output(arguments: str, redirection: str, environment: dict[str, str]) -> tuple[int, bytes, bytes]:
    program = ["bash", "-o", "pipefail", "-c", f'"$0" -c "$1" {arguments} {redirection}', sys.executable, OUTPUT]
    done = subprocess.run(program, capture_output=True, env={**os.environ, **environment}, cwd=ROOT, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("environment", "arguments", "line"),
    [
        (ASCII, "", rb"\xe9\U0001f600"),
        ({"PYTHONIOENCODING": "latin-1"}, "", b"\xe9\\U0001f600"),
        ({**ASCII, "PYTHONUNBUFFERED": "1"}, "run log", "é\U0001f600".encode()),
    ],
)
def test_characters_that_the_locale_cannot_encode_are_escaped(
    environment: dict[str, str], arguments: str, line: bytes
) -> None:
    status, output, errors = run_output(arguments, "", environment)
    assert (status, output.splitlines().count(line)) == (0, 300), errors
    assert errors.startswith(b"done ")


@pytest.mark.parametrize(
    ("arguments", "redirection", "status", "errors"),
    [
        ("", "| head -1", 128 + signal.SIGPIPE, ""),
        ("", ">/dev/full", 1, "the output cannot be written: No space left on device\n"),
        ("", "<&- >&-", 0, "done é\n"),
        ("", "2>&-", 0, ""),
        ("run", "| head -1", 0, LOST.format("Broken pipe") + "done é\n"),
        ("run", ">/dev/full", 0, LOST.format("No space left on device") + "done é\n"),
        ("run", ">/dev/full 2>&1", 0, ""),
    ],
)
def test_output_that_cannot_be_written_ends_a_tool_but_not_a_run(
    arguments: str, redirection: str, status: int, errors: str
) -> None:
    ended, _, printed = run_output(arguments, redirection, {"PYTHONUTF8": "1"})
    assert (ended, printed.decode()) == (status, errors)


KEPT = r"""
import os, signal, sys
from pathlib import Path
from components.protocol.console_log import keep_console
from components.terminal import guard_output, open_output
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
open_output()
guard_output(sys.stdout, sys.stderr)
keep_console(Path(sys.argv[1]))
print("width", os.get_terminal_size().columns if sys.stdout.isatty() else None, flush=True)
print("\x1b[1mbold\x1b[0m", "key hf_" + "a1" * 17, file=sys.stderr, flush=True)
os.system("echo of a child; echo error of a child >&2; echo hf_" + "b2" * 17)
os.write(1, b"bar 1\rbar 2\none\ntwo\x1b[1A\r\x1b[2Kthree\n\r\x1b[2K")
os.write(2, b"of C++\n")
if sys.argv[2] == "error":
    raise ValueError("wrong")
os.killpg(0, signal.Signals[sys.argv[2]])
"""


@pytest.mark.parametrize("ending", ["error", "SIGINT", "SIGKILL"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_log_keeps_the_whole_console(tmp_path: Path, ending: str, is_terminal: bool) -> None:
    """Of Python, C and children, in order, whatever ends the process; the terminal stays a terminal."""
    reader, writer = pty.openpty() if is_terminal else os.pipe()
    if is_terminal:
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 70, 0, 0))
    command = [sys.executable, "-c", KEPT, str(tmp_path / "log"), ending]
    process = subprocess.Popen(command, stdout=writer, stderr=writer, cwd=ROOT, process_group=0)
    os.close(writer)
    output = b""
    with suppress(OSError):  # EIO at the end of a terminal
        while data := os.read(reader, 1 << 16):
            output += data
    os.close(reader)
    assert process.wait() == {"error": 1, "SIGINT": -2, "SIGKILL": -9}[ending]
    first = [f"width {70 if is_terminal else None}", "bold key ***", "of a child", "error of a child"]
    log = (tmp_path / "log").read_text()
    assert log.splitlines()[:8] == [*first, "***", "bar 2", "three", "of C++"]
    assert {"error": "ValueError: wrong", "SIGINT": "KeyboardInterrupt", "SIGKILL": ""}[ending] in log
    shown = output.decode().replace("\r\n", "\n")
    assert shown.startswith("\n".join(first).replace("bold", "\x1b[1mbold\x1b[0m") + "\nhf_")
    assert "bar 1\rbar 2\n" in shown
    assert shown.endswith(log[-7:])


def test_invalid_command_line_is_escaped(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "recipes/finetune.py", f"data.path={EVIL}", "data=jsonl", f"run.nam={EVIL}"]
    process = subprocess.run(command, capture_output=True, cwd=tmp_path, check=False)
    text = (process.stdout + process.stderr).decode()
    assert process.returncode == 2
    assert is_clean(text), ascii(text)


def test_no_module_prints_without_escaping() -> None:
    """Only the two modules that escape may call the builtin `print` and rich's Console."""
    found = []
    for file in [*(ROOT / "components").rglob("*.py"), *(ROOT / "recipes").glob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "Console"):
                found.append(f"{file.relative_to(ROOT)}: {ast.unparse(node)[:60]}")
    allowed = ("components/terminal.py: print(printable", "components/data/cache.py: Console(stderr=True)")
    assert [each for each in found if not each.startswith(allowed)] == []


def test_run_goes_on_if_its_console_cannot_be_copied(tmp_path: Path) -> None:
    code = "import sys; sys.executable = '/bin/false'\n" + KEPT.replace("os.killpg", "print('end') #")
    command = [sys.executable, "-c", code, str(tmp_path / "log"), "SIGINT"]
    ended = subprocess.run(command, capture_output=True, cwd=ROOT, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1][-3:]) == (0, "end"), ended.stderr
    assert not (tmp_path / "log").exists()
