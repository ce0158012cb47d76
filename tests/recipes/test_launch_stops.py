"""How a run ends after a failure, a kill or Ctrl-C. No process may be left in any case."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.recipes.launching import TWO, WAIT_TIMEOUT, Bench, Started, until
from tests.suites import TORTURE

pytestmark = pytest.mark.new_interpreter

FOREVER = "while True:\n    time.sleep(0.05)\n"
TRAP = """
stop = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(number, lambda number, frame: stop.append(number))
note("up")
"""
SAVES = TRAP + "while not stop:\n    time.sleep(0.02)\ntime.sleep(0.3)\nnote('got', [int(one) for one in stop])\n"


def last_lines(errors: str, count: int = 2) -> list[str]:
    return errors.rstrip("\n").splitlines()[-count:]


def test_killed_rank_ends_the_run_and_is_named_last(bench: Bench) -> None:
    """The other rank handles SIGTERM as save-and-stop and would run forever."""
    bench.write(TRAP + "wait_for('up_0', 'up_1')\nif RANK == 1: os.kill(os.getpid(), signal.SIGKILL)\n" + FOREVER)
    started = bench.start(TWO)
    bench.await_notes("up", 2)
    began = time.monotonic()
    done = started.wait()
    assert time.monotonic() - began < 15
    assert done.status == 1
    (run,) = bench.run_directories()
    assert last_lines(done.errors) == [
        "rank 1 was ended by SIGKILL (out of memory, or killed by a person)",
        f"logs: {run}/logs/attempt_0",
    ]
    assert bench.result()["status"] == "failed"
    assert "rank 1" in bench.result()["error"]
    bench.assert_no_process_left()


def test_rank_that_only_lost_its_peer_is_not_reported_as_the_cause(bench: Bench) -> None:
    bench.write("""
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(10**6):
            if RANK == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1))
    """)
    done = bench.run(TWO)
    assert done.status == 1
    assert last_lines(done.errors)[0].startswith("rank 1 was ended by SIGKILL")
    (run,) = bench.run_directories()
    report = json.loads((run / "logs" / "latest" / "rank_0.error.json").read_text())
    assert report["kind"] == "lost_peer"
    assert "Traceback" not in done.errors
    assert "Traceback" in (run / "logs" / "latest" / "rank_0.log").read_text()
    bench.assert_no_process_left()


@pytest.mark.parametrize("leave", ["os._exit(0)", "sys.exit(0)"] if TORTURE else ["os._exit(0)"])
def test_rank_that_leaves_with_status_0_is_named(bench: Bench, leave: str) -> None:
    bench.write(f"""
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        for step in range(10**6):
            if RANK == 1 and step == 5:
                {leave}
            dist.all_reduce(torch.ones(1))
    """)
    done = bench.run(TWO)
    assert done.status == 1
    assert last_lines(done.errors)[0] == "rank 1 exited with status 0 before the end of the run"
    assert bench.result()["error"] == "rank 1: exited with status 0 before the end of the run"
    bench.assert_no_process_left()


@pytest.mark.parametrize("rank", [0, 1] if TORTURE else [1])
def test_exception_is_reported_once_with_rank_and_traceback(bench: Bench, rank: int) -> None:
    bench.write(f"if RANK == {rank}:\n    raise ValueError('no such luck')\n" + FOREVER)
    done = bench.run(TWO)
    assert done.status == 1
    assert done.errors.count("ValueError: no such luck\n") == 2  # the traceback's last line, and the summary
    assert done.errors.count("Traceback") == 1
    message, log_line = last_lines(done.errors)
    assert message == f"rank {rank} exited with status 1: ValueError: no such luck"
    assert log_line.startswith("logs: ")
    assert "components/launch" not in done.errors.partition("Traceback")[2]
    assert done.seconds < 15
    assert bench.result() == {"status": "failed", "error": f"rank {rank}: ValueError: no such luck"}
    bench.assert_no_process_left()


def test_single_process_raises_like_plain_python(bench: Bench) -> None:
    bench.write("raise ValueError('no such luck')")
    done = bench.run()
    assert done.status == 1
    assert last_lines(done.errors, 1) == ["ValueError: no such luck"]
    assert bench.result()["status"] == "failed"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_closed_standard_streams_do_not_fail_a_run(bench: Bench, processes: str) -> None:
    bench.write("print('text', file=sys.stderr)\nnote('up', sys.stdout.isatty())\nos.write(1, b'text')")
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, str(bench.recipe)]
    command = [*closed, f"cluster.procs_per_node={processes}"]
    assert subprocess.run(command, cwd=bench.folder, check=False, timeout=WAIT_TIMEOUT).returncode == 0
    bench.await_notes("up", int(processes))


def test_exit_status_of_main_is_kept(bench: Bench) -> None:
    bench.write("sys.exit(3)")
    assert bench.run().status == 3
    assert bench.result() == {"status": "failed", "error": "rank 0: exited with status 3"}


def test_out_of_memory_error_is_recorded_as_oom(bench: Bench) -> None:
    bench.write("class OutOfMemoryError(RuntimeError): ...\nraise OutOfMemoryError('tried to allocate')")
    for arguments in ([], [TWO]):
        assert bench.run("run.dir=mine", *arguments).status == 1
        assert json.loads((bench.folder / "mine" / "result.json").read_text())["status"] == "oom"


@pytest.mark.parametrize("processes", ["1", "2"])
def test_config_error_raised_on_ranks_is_reported_once_and_leaves_no_files(bench: Bench, processes: str) -> None:
    bench.write("raise ConfigError(\"data.path='x.jsonl': has no rows; set data.path\")")
    done = bench.run(f"cluster.procs_per_node={processes}")
    assert done.status == 2
    first, *rest = done.errors.splitlines()
    assert first.startswith("run ")
    assert rest == ["data.path='x.jsonl': has no rows; set data.path"]
    assert os.listdir(bench.folder) == ["tried.py"]
    bench.assert_no_process_left()


def test_config_error_on_one_rank_does_not_wait_for_the_others(bench: Bench) -> None:
    bench.write(TRAP + "wait_for('up_0', 'up_1')\nif RANK == 0: raise ConfigError('a=1: wrong')\n" + FOREVER)
    started = bench.start(TWO)
    bench.await_notes("up", 2)
    began = time.monotonic()
    done = started.wait()
    assert done.status == 2
    assert last_lines(done.errors, 1) == ["a=1: wrong"]
    assert time.monotonic() - began < 8
    bench.assert_no_process_left()


def test_exit_status_of_a_rank_is_reported(bench: Bench) -> None:
    bench.write("print('almost there')\nif RANK == 1:\n    os._exit(3)\n" + FOREVER)
    done = bench.run(TWO)
    assert done.status == 1
    assert last_lines(done.errors, 3)[:2] == ["almost there", "rank 1 exited with status 3"]


def test_rank_that_hangs_while_exiting_is_still_reported(bench: Bench) -> None:
    bench.write("""
        import threading
        if RANK == 1:
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise ValueError("and then it hangs")
        time.sleep(600)
    """)
    done = bench.run(TWO)
    assert done.status == 1
    assert "ValueError: and then it hangs" in last_lines(done.errors)[0]
    assert done.seconds < 15
    bench.assert_no_process_left()


def test_child_processes_of_a_rank_end_with_the_run(bench: Bench) -> None:
    bench.write("""
        import subprocess
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", __file__])
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """)
    assert bench.run(TWO).status == 1
    bench.assert_no_process_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, *([signal.SIGINT, signal.SIGUSR2] if TORTURE else [])])
def test_signal_reaches_every_rank_once_and_they_save(bench: Bench, number: signal.Signals) -> None:
    bench.write(SAVES)
    started = bench.start(TWO)
    bench.await_notes("up", 2)
    started.signal(number)
    done = started.wait()
    assert (done.status, bench.notes("got")) == (0, [str([int(number)])] * 2)
    answers = ["", "Ctrl-C: stopping after this step or the next; again to abort"] if number == signal.SIGINT else []
    assert done.errors.splitlines()[1:] == answers
    bench.assert_no_process_left()


def start_in_terminal(bench: Bench) -> tuple[int, int]:
    """Start two ranks in a new pseudo-terminal; return the launcher's process id and the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(bench.folder)
        os.execv(sys.executable, [sys.executable, str(bench.recipe), "model=tiny", TWO])
    return pid, terminal


def wait_for_exit(pid: int, terminal: int) -> tuple[int, str]:
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # the other end is closed
        pass
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_ctrl_c_in_a_terminal_reaches_every_rank_once(bench: Bench) -> None:
    """The terminal signals its foreground process group, which must contain the launcher only."""
    bench.write(SAVES)
    pid, terminal = start_in_terminal(bench)
    bench.await_notes("up", 2)
    os.write(terminal, b"\x03")
    status, _ = wait_for_exit(pid, terminal)
    assert (status, bench.notes("got")) == (0, [str([int(signal.SIGINT)])] * 2)
    bench.assert_no_process_left()


def test_closed_terminal_reaches_every_rank_and_they_save(bench: Bench) -> None:
    """Rank 0 prints to the terminal, which is gone."""
    bench.write(SAVES + "print('a line', flush=True)\nnote('saved')\n")
    pid, terminal = start_in_terminal(bench)
    bench.await_notes("up", 2)
    os.close(terminal)
    bench.await_notes("saved", 2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert bench.notes("got") == [str([int(signal.SIGHUP)])] * 2
    bench.assert_no_process_left()


def test_second_ctrl_c_kills_the_run_at_once(bench: Bench) -> None:
    bench.write(TRAP + "while True:\n    time.sleep(0.02)\n    if stop: note('got')\n")
    pid, terminal = start_in_terminal(bench)
    bench.await_notes("up", 2)
    os.write(terminal, b"\x03")
    bench.await_notes("got", 2)
    began = time.monotonic()
    os.write(terminal, b"\x03")
    status, shown = wait_for_exit(pid, terminal)
    assert status == 130
    assert time.monotonic() - began < 5
    assert "interrupted twice" in shown
    assert bench.result()["status"] == "interrupted"
    bench.assert_no_process_left()


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_before_ranks_handle_signals_is_recorded_as_interrupted(bench: Bench, processes: str) -> None:
    bench.write("note('up')\n" + FOREVER)
    started = bench.start(f"cluster.procs_per_node={processes}")
    bench.await_notes("up", int(processes))
    started.signal(signal.SIGINT)
    done = started.wait()
    assert done.status == 130
    assert "Traceback" not in done.errors
    assert bench.result()["status"] == "interrupted"
    bench.assert_no_process_left()


def kill(started: Started) -> None:
    os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait()


def test_no_rank_outlives_a_killed_launcher(bench: Bench) -> None:
    bench.write(TRAP + FOREVER)
    started = bench.start(TWO)
    bench.await_notes("up", 2)
    assert len(bench.processes()) == 4  # the launcher, the copy of its console, two ranks
    kill(started)
    bench.assert_no_process_left()


def test_rank_whose_launcher_died_during_imports_exits(bench: Bench) -> None:
    """The launcher is killed before its ranks set PR_SET_PDEATHSIG: they must check their parent's process id."""
    bench.write("note('ran')\n" + FOREVER)
    text = bench.recipe.read_text()
    slow = 'if "MESHBOOK_WORKER" in os.environ:\n    note("importing")\n    time.sleep(1.5)\n\n@recipe'
    bench.recipe.write_text(text.replace("@recipe", slow, 1))
    started = bench.start(TWO)
    bench.await_notes("importing", 2)
    kill(started)
    bench.assert_no_process_left()
    assert bench.notes("ran") == []


def test_run_directory_of_a_killed_run_can_be_reused(bench: Bench) -> None:
    bench.write("note('up')\n" + FOREVER)
    started = bench.start(TWO, "run.dir=mine")
    bench.await_notes("up", 2)
    kill(started)
    until(lambda: not bench.processes())
    bench.write("note('attempt', os.environ['MESHBOOK_ATTEMPT'])")
    assert bench.run(TWO, "run.dir=mine").status == 0
    assert bench.notes("attempt") == ["1", "1"]
    assert sorted(file.name for file in Path(bench.folder / "mine" / "logs" / "attempt_0").iterdir()) == [
        "config.yaml",
        "environment.json",
        "rank_0.log",
        "rank_1.log",
    ]
