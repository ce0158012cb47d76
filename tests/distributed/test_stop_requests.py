"""Stop requests are acknowledged immediately, and end evaluation and generation on all ranks together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from select import select as wait_for_any

import pytest

from components.watch.faults import VARIABLE
from tests.distributed.forked_runs import Attempt, Command, steps_logged, until
from tests.distributed.test_checkpoint_kills import small_run
from tests.suites import TORTURE, select

ACKNOWLEDGMENT = "Ctrl-C: stopping after this step or the next; again to abort"
EXIT_TIMEOUT = 120.0
"""Maximum seconds for a run to exit on a busy machine."""
LONG_GENERATION = (
    "generation.prompts=[hello]",
    "generation.max_new_tokens=1000000",
    "model.config.max_position_embeddings=8192",
)


@contextlib.contextmanager
def started(command: Command, environment: dict[str, str] | None = None) -> Iterator[Attempt]:
    """Start a run and kill its launcher, and thereby its ranks, at the end of the test."""
    attempt = command.start(environment)
    try:
        yield attempt
    finally:
        if attempt.poll() is None:
            os.kill(attempt.pid, signal.SIGKILL)


def wait_for_result(attempt: Attempt, command: Command) -> dict[str, object]:
    """Wait for a run to exit after a stop request and return its result.json."""
    assert attempt.wait(EXIT_TIMEOUT) == 0, attempt.output()
    return json.loads((command.run_dir / "result.json").read_text())


def test_ctrl_c_is_acknowledged_immediately_and_ends_evaluation(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} + 1", "response": str(number + 1)} for number in range(2_400)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    long = ("data.eval_fraction=0.9", "data.max_eval_samples=2160", "training.micro_batch_size=1")
    command = small_run(tmp_path, "run", *long, "logging.examples=1")
    with started(command) as attempt:
        until(lambda: "example 0" in attempt.output(), 120, attempt.output)
        time.sleep(0.5)
        os.kill(attempt.pid, signal.SIGINT)
        until(lambda: ACKNOWLEDGMENT in attempt.output(), 10, attempt.output)
        result = wait_for_result(attempt, command)
        assert (result["status"], result["steps"], result["eval_loss"]) == ("interrupted", 0, None)
        assert "held-out target tokens" not in attempt.output()


@pytest.mark.parametrize("mesh", ["fsdp2", "pp2_1f1b"])
def test_stop_request_to_one_rank_ends_generation_on_all_ranks(mesh: str, tmp_path: Path) -> None:
    command = small_run(tmp_path, "run", f"parallelism={mesh}", *LONG_GENERATION)
    with started(command) as attempt:
        until(lambda: "held-out target tokens" in attempt.output(), 120, attempt.output)
        time.sleep(1)
        os.kill(attempt.ranks()["rank1"], signal.SIGUSR2)
        result = wait_for_result(attempt, command)
        assert (result["status"], result["steps"]) == ("preempted", 0)
        assert "answer after" not in attempt.output()


BUSY = """
import time, torch
from components import training
torch.set_num_threads(1)
one = torch.ones(2000, 2000, dtype=torch.float64)
with training.StopRequest() as stop:
    print("up", flush=True)
    out = torch.linalg.multi_dot([one] * 5)  # a single call, during which Python runs no signal handler
    print(time.monotonic(), stop.flags.tolist(), flush=True)
"""


def test_single_process_acknowledges_stop_during_computation() -> None:
    busy = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert busy.stdout is not None
    assert busy.stderr is not None
    assert busy.stdout.readline() == "up\n"
    time.sleep(0.2)
    busy.send_signal(signal.SIGINT)
    assert wait_for_any([busy.stderr], [], [], 10)[0]
    acknowledged_at = time.monotonic()
    finished_at, flags = busy.stdout.readline().split(maxsplit=1)
    assert busy.stderr.read().strip() == ACKNOWLEDGMENT
    assert flags == "[0.0, 1.0, 0.0]\n"
    assert acknowledged_at < float(finished_at) - 0.2
    assert busy.wait(30) == 0


STOPS = [
    (mesh, number)
    for mesh in ("fsdp2", "pp2_1f1b", "ddp", "tp2")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGHUP)
]
AT_EACH_COMMIT = [("fsdp2", signal.SIGHUP), ("pp2_1f1b", signal.SIGUSR2)]


@pytest.mark.parametrize(("mesh", "number"), select(STOPS, AT_EACH_COMMIT, TORTURE))
def test_stop_request_to_one_rank_is_agreed_in_the_step_it_arrives_in(mesh: str, number: int, tmp_path: Path) -> None:
    """The checkpoint is of this step, or of the next one if the request comes after the reduction at its end.

    docs/resume.md states the seconds to the exit that this test prints in torture.
    """
    seconds = 5 if TORTURE else 0.5
    command = small_run(tmp_path, "run", f"parallelism={mesh}", "training.max_steps=100", "training.micro_batch_size=1")
    with started(command, {VARIABLE: f"slow={seconds}:weights:all:*"}) as attempt:
        until(lambda: steps_logged(command.run_dir) >= 2, 120, attempt.output)
        time.sleep(seconds / 2)
        arrived_in, sent_at = steps_logged(command.run_dir) + 1, time.monotonic()
        os.kill(attempt.ranks()["rank1"], number)
        result = wait_for_result(attempt, command)
    seconds_to_exit = time.monotonic() - sent_at
    late = result["steps"] - arrived_in
    print(f"{mesh}, {signal.Signals(number).name}: exit after {seconds_to_exit:.1f} s, {late} steps late")
    assert seconds_to_exit < 2 * seconds + 10
    assert result["status"] == ("interrupted" if number == signal.SIGINT else "preempted")
    assert result["steps"] in (arrived_in, arrived_in + 1)
    assert [folder.name for folder in (command.run_dir / "checkpoints").iterdir()] == [f"step_{result['steps']}"]
