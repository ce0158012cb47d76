"""A request to stop is answered at once, and ends evaluation and generation on every rank together."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.forked_runs import Attempt, Command, until
from tests.distributed.test_checkpoint_kills import small_run

ANSWER = "Ctrl-C: stopping after this step; again to abort"
SOON = 120.0
"""Seconds within which a run has ended on a busy machine."""
LONG_ANSWER = (
    "generation.prompts=[hello]",
    "generation.max_new_tokens=1000000",
    "model.config.max_position_embeddings=8192",
)


@contextlib.contextmanager
def started(command: Command) -> Iterator[Attempt]:
    """A run that does not outlive the test; its ranks end with their launcher."""
    attempt = command.start()
    try:
        yield attempt
    finally:
        if attempt.poll() is None:
            os.kill(attempt.pid, signal.SIGKILL)


def ended(attempt: Attempt, command: Command) -> dict[str, object]:
    """result.json of a run that was asked to stop just now."""
    assert attempt.wait(SOON) == 0, attempt.said()
    return json.loads((command.run_dir / "result.json").read_text())


def test_ctrl_c_is_answered_at_once_and_ends_an_evaluation(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} + 1", "response": str(number + 1)} for number in range(20_000)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = small_run(tmp_path, "run", "data.eval_fraction=0.9", "data.max_eval_samples=18000", "logging.examples=1")
    with started(command) as attempt:
        until(lambda: "example 0" in attempt.said(), 120, attempt.said)
        time.sleep(1)
        os.kill(attempt.pid, signal.SIGINT)
        until(lambda: ANSWER in attempt.said(), 10, attempt.said)
        result = ended(attempt, command)
        assert (result["status"], result["steps"], result["eval_loss"]) == ("interrupted", 0, None)
        assert "held-out target tokens" not in attempt.said()


@pytest.mark.parametrize("mesh", ["fsdp2", "pp2_1f1b"])
def test_a_request_to_one_rank_ends_the_generation_of_all(mesh: str, tmp_path: Path) -> None:
    command = small_run(tmp_path, "run", f"parallelism={mesh}", *LONG_ANSWER)
    with started(command) as attempt:
        until(lambda: "held-out target tokens" in attempt.said(), 120, attempt.said)
        time.sleep(1)
        os.kill(attempt.ranks()["rank1"], signal.SIGUSR2)
        result = ended(attempt, command)
        assert (result["status"], result["steps"]) == ("preempted", 0)
        assert "answer after" not in attempt.said()


BUSY = """
import time, torch
from components import training
torch.set_num_threads(1)
one = torch.ones(2000, 2000, dtype=torch.float64)
with training.StopRequest() as stop:
    print("up", flush=True)
    out = torch.linalg.multi_dot([one] * 9)  # one call: Python runs no handler meanwhile
    print(time.monotonic(), stop.flags(), flush=True)
"""


def test_a_single_process_answers_while_it_computes() -> None:
    busy = subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert busy.stdout is not None
    assert busy.stderr is not None
    assert busy.stdout.readline() == "up\n"
    time.sleep(0.2)
    busy.send_signal(signal.SIGINT)
    assert select.select([busy.stderr], [], [], 10)[0]
    answered = time.monotonic()
    done, flags = busy.stdout.readline().split(maxsplit=1)
    assert busy.stderr.read().strip() == ANSWER
    assert flags == "(0.0, 1.0)\n"
    assert answered < float(done) - 0.2
    assert busy.wait(30) == 0
