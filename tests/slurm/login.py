"""A user on the login node: runs a recipe's command, reads its output, and inspects the run directory."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slurm.cluster import WAIT_TIMEOUT, Cluster, Job

PROJECT = Path(__file__).resolve().parents[2]
FINETUNE = PROJECT / "recipes" / "finetune.py"

CPU = ("cluster.device=cpu", "cluster.exclusive=false", "cluster.mem=null", "cluster.env.OMP_NUM_THREADS=1")
"""Overrides that run an option such as cluster=slurm_2node on nodes without GPUs."""

QUICK = (
    *("model=tiny", "training.seq_len=64", "training.global_batch_size=4", "training.micro_batch_size=2"),
    *("training.eval_every=0", "data.max_eval_samples=8", "generation.samples=0", "generation.prompts=[]"),
    *("logging.examples=0", "logging.plot=false", "checkpoint.export=false"),
)
"""The smallest job of a recipe: a real model and a few real steps."""

RECIPE_HEADER = """
import json, os, sys, time
from pathlib import Path
from components.config.schema import FinetuneConfig
from components.launch import recipe

RANK = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
HERE = Path(os.environ.get("MESHBOOK_RUN_DIR", "."))

@recipe("finetune")
def main(cfg: FinetuneConfig) -> None:
"""
RECIPE_FOOTER = '\nif __name__ == "__main__":\n    main()\n'


@dataclass(frozen=True)
class CommandResult:
    """Exit status, output and duration of a command."""

    status: int
    output: str
    errors: str
    seconds: float

    def field(self, name: str) -> str:
        """Return the value of `name` in the lines that a submission prints."""
        return re.search(rf"^{name} +(.*)$", self.output, re.MULTILINE)[1]  # type: ignore[index]

    @property
    def job(self) -> str:
        """The id of the submitted job."""
        assert self.status == 0, self.errors
        return self.field("job")

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        assert self.status == 0, self.errors
        return Path(self.field("run"))


@dataclass(frozen=True)
class Login:
    """A user's folder on the login node."""

    cluster: Cluster
    folder: Path

    def write_recipe(self, body: str, name: str = "mine.py") -> Path:
        """Write a recipe whose main has this body. It can use RANK and HERE, the run directory."""
        file = self.folder / name
        file.write_text(RECIPE_HEADER + textwrap.indent(textwrap.dedent(body), "    ") + RECIPE_FOOTER)
        return file

    def run(
        self,
        *arguments: str,
        recipe: Path = FINETUNE,
        environment: dict[str, str] | None = None,
        python: Iterable[str] = (),
    ) -> CommandResult:
        """Run `python RECIPE ARGUMENTS` in the folder."""
        began = time.monotonic()
        inherited = {name: value for name, value in self.cluster.environment.items() if "MESHBOOK_" not in name}
        done = subprocess.run(
            [sys.executable, *python, str(recipe), *arguments],
            cwd=self.folder,
            env=inherited | {"CUDA_VISIBLE_DEVICES": ""} | (environment or {}),
            capture_output=True,
            text=True,
            timeout=WAIT_TIMEOUT,
            check=False,
        )
        return CommandResult(done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    def wait_for_end(self, submission: CommandResult, states: str | Collection[str] = "COMPLETED") -> Job:
        """Wait until the submitted job has ended in one of these states; otherwise raise an error with its log."""
        assert submission.status == 0, submission.errors
        try:
            return self.cluster.wait_for(submission.job, states)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{log_of(submission.run_dir)}") from None

    def kill_rank(self, node: str) -> None:
        """Send SIGKILL to the rank of recipes/finetune.py on a node."""
        (rank,) = [
            process
            for process in self.cluster.processes(node)
            if (command := Path(f"/proc/{process}/cmdline").read_text()).endswith("finetune.py\0")
            and "torch.distributed.run" not in command
            and "srun" not in command
        ]
        os.kill(rank, signal.SIGKILL)

    def jobs_ever(self) -> set[str]:
        """Return the ids of all jobs, past and present, of the cluster."""
        return {job["JobId"] for job in self.cluster.jobs()}


def log_of(run_dir: Path) -> str:
    """Return the job's log and the end of every rank's log."""
    logs = run_dir / "logs"
    ranks = [f"--- {file}\n{file.read_text()[-2000:]}" for file in sorted(logs.glob("attempt_*/*.log"))]
    job = (logs / "job.log").read_text() if (logs / "job.log").exists() else "(no job.log)"
    return "\n".join([job, *ranks])


def result_of(run_dir: Path) -> dict[str, Any]:
    """Return result.json."""
    return json.loads((run_dir / "result.json").read_text())


def steps_of(run_dir: Path) -> dict[int, float]:
    """Return the loss of every step in metrics.jsonl."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
