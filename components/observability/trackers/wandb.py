"""Weights & Biases."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.config.schema.logging import WandbConfig, WandbMode
from components.observability.trackers.tracker import TrackedRun, name_in_group
from components.protocol.run_files import own_folder


class WandbTracker:
    """A wandb run whose id is stored in the run directory, so that a resumed run continues its curve.

    wandb keeps the first values of steps that a resumed run repeats.
    """

    def __init__(self, config: WandbConfig) -> None:
        self._config = config
        self._run: Any = None

    def start(self, run: TrackedRun) -> str:
        """Start the wandb run, or continue it."""
        import wandb

        config = self._config
        run_id = run.stored_id("wandb")
        if run_id is None:
            # The name alone would merge runs of directories with the same name, and wandb rejects these characters.
            name = re.sub(r"[/\\#?%:\s]", "-", name_in_group(run.directory, config.group))
            run_id = f"{name[-80:]}-{secrets.token_hex(4)}"
            run.store_id("wandb", run_id)
        # Private, because wandb's files contain the host, the command and the environment.
        own_folder(run.directory / "wandb", 0o700)
        self._run = wandb.init(
            # save_code would upload the recipe and all uncommitted changes, including any secrets in them.
            settings=wandb.Settings(silent=True, console="off", save_code=False),
            dir=str(run.directory),
            id=run_id,
            name=run.directory.name,
            resume="allow",
            mode=config.mode.value,
            project=config.project,
            entity=config.entity,
            tags=config.tags,
            group=config.group,
            config=run.config,
        )
        if config.mode is not WandbMode.offline and self._run.url:  # wandb warns if it is read offline
            return str(self._run.url)
        folder = Path(self._run.dir).parent  # of this attempt
        return f"{folder}; upload it with: wandb sync {shlex.quote(str(folder))}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values at the step."""
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        """Finish the wandb run."""
        self._run.finish(exit_code=int(failed))
