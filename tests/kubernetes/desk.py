"""A user who submits runs to the test API server with the machine's kubectl."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.config.commands import Commands
from tests.kubernetes.api import ApiServer

PROJECT = Path(__file__).resolve().parents[2]
FINETUNE = PROJECT / "recipes" / "finetune.py"
QUICK = (
    *("model=tiny", "training.seq_len=64", "training.global_batch_size=4", "training.micro_batch_size=2"),
    *("training.eval_every=0", "data.max_eval_samples=8", "generation.samples=0", "generation.prompts=[]"),
    *("logging.examples=0", "logging.plot=false", "checkpoint.export=false"),
)
"""The smallest run of a recipe: a real model and a few real steps."""


@dataclass(frozen=True)
class Submission:
    """Exit status and output of a command."""

    status: int
    output: str
    errors: str
    imported_torch: bool

    def field(self, name: str) -> str:
        """Return the value of `name` in the lines that a submission prints."""
        assert self.status == 0, self.errors
        return re.search(rf"^{name} +(.*)$", self.output, re.MULTILINE)[1]  # type: ignore[index]

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return Path(self.field("run"))

    @property
    def objects(self) -> list[dict[str, Any]]:
        """Objects of the manifest in the run directory."""
        return list(yaml.safe_load_all((self.run_dir / "job.yaml").read_text()))


@dataclass
class Desk:
    """A user's folder on the shared volume, and the API server."""

    api: ApiServer
    folder: Path
    commands: Commands
    environment: dict[str, str] = field(default_factory=dict)
    """Additional environment variables."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides for two CPU pods of one process each, in the namespace of the test API server."""
        return (
            *("cluster=k8s", "cluster.nodes=2", "cluster.procs_per_node=1", "cluster.device=cpu"),
            *("cluster.k8s.namespace=train", "cluster.k8s.image=ghcr.io/me/meshbook:1"),
            *(f"cluster.k8s.volumes.runs={self.folder}", "cluster.env.OMP_NUM_THREADS=1", *QUICK),
        )

    def run(self, *arguments: str, recipe: Path = FINETUNE) -> Submission:
        """Run `python RECIPE OVERRIDES ARGUMENTS` in the folder."""
        environment = {**self.api.variables, **self.environment}
        ended = self.commands.run(recipe, [*self.overrides, *arguments], self.folder, **environment)
        return Submission(ended.status, ended.output, ended.errors, ended.imported_torch)


def path_without_kubectl() -> str:
    """Return a PATH on which there is no kubectl."""
    return os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if not Path(each, "kubectl").exists())
