"""A person on the login node: types a recipe's command, reads what it says, and looks at the run afterwards."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slurm.cluster import PATIENCE, Cluster, Job

PROJECT = Path(__file__).resolve().parents[2]
FINETUNE = PROJECT / "recipes" / "finetune.py"

CPU = ("cluster.device=cpu", "cluster.exclusive=false", "cluster.mem=null", "cluster.env.OMP_NUM_THREADS=1")
"""What makes an option such as cluster=slurm_2node fit nodes without GPUs."""

TORTURE = os.environ.get("MESHBOOK_TORTURE") == "1"
"""Whether the tests that take minutes run too."""

QUICK = (
    *("model=tiny", "training.seq_len=64", "training.global_batch_size=4", "training.micro_batch_size=2"),
    *("training.eval_every=0", "data.max_eval_samples=8", "generation.samples=0", "generation.prompts=[]"),
    *("logging.examples=0", "logging.plot=false", "checkpoint.export=false"),
)
"""The recipe's job at its smallest: a real model, a few real steps."""

OWN_RECIPE = """
import json, os, sys
from pathlib import Path
from components.config.schema import FinetuneConfig
from components.launch import recipe

RANK = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
HERE = Path(os.environ.get("MESHBOOK_RUN_DIR", "."))

@recipe("finetune")
def main(cfg: FinetuneConfig) -> None:
"""
OWN_END = '\nif __name__ == "__main__":\n    main()\n'


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    status: int
    output: str
    errors: str
    seconds: float

    def field(self, name: str) -> str:
        """What stands behind `name` in the lines that a submission prints."""
        return re.search(rf"^{name} +(.*)$", self.output, re.MULTILINE)[1]  # type: ignore[index]

    @property
    def job(self) -> str:
        """The number of the job that was submitted."""
        assert self.status == 0, self.errors
        return self.field("job")

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        assert self.status == 0, self.errors
        return Path(self.field("run"))


@dataclass(frozen=True)
class Login:
    """A person's folder on the login node."""

    cluster: Cluster
    folder: Path

    def write_recipe(self, body: str, name: str = "mine.py") -> Path:
        """Write a recipe of one's own; its main finds RANK and HERE, the run directory."""
        file = self.folder / name
        file.write_text(OWN_RECIPE + textwrap.indent(textwrap.dedent(body), "    ") + OWN_END)
        return file

    def type(
        self,
        *arguments: str,
        recipe: Path = FINETUNE,
        environment: dict[str, str] | None = None,
        python: Iterable[str] = (),
    ) -> Answer:
        """Type `python RECIPE ARGUMENTS` here."""
        began = time.monotonic()
        inherited = {name: value for name, value in self.cluster.environment.items() if "MESHBOOK_" not in name}
        done = subprocess.run(
            [sys.executable, *python, str(recipe), *arguments],
            cwd=self.folder,
            env=inherited | {"CUDA_VISIBLE_DEVICES": ""} | (environment or {}),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    def ended(self, answer: Answer, states: str | Collection[str] = "COMPLETED") -> Job:
        """Wait until the job of a submission has ended like this; its log is in the error otherwise."""
        assert answer.status == 0, answer.errors
        try:
            return self.cluster.wait_for(answer.job, states)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{log_of(answer.run_dir)}") from None

    def jobs_ever(self) -> set[str]:
        """Every job that the cluster knows."""
        return {job["JobId"] for job in self.cluster.jobs()}


def log_of(run_dir: Path) -> str:
    """The job's log and the end of every rank's."""
    logs = run_dir / "logs"
    ranks = [f"--- {file}\n{file.read_text()[-2000:]}" for file in sorted(logs.glob("attempt_*/*.log"))]
    job = (logs / "job.log").read_text() if (logs / "job.log").exists() else "(no job.log)"
    return "\n".join([job, *ranks])


def result_of(run_dir: Path) -> dict[str, Any]:
    """result.json."""
    return json.loads((run_dir / "result.json").read_text())


def steps_of(run_dir: Path) -> dict[int, float]:
    """The loss of every step that metrics.jsonl holds."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
