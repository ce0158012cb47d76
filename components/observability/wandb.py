"""Weights & Biases. It is imported only if it is enabled, and its errors never stop a run."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from components.config.safe_yaml import load_yaml
from components.config.schema.logging import WandbConfig, WandbMode
from components.protocol.run_files import CONFIG

logger = logging.getLogger(__name__)


class WandbRun:
    """A wandb run whose id is the name of the run directory, so that a resumed run continues its curve.

    In a group, the id is prefixed with the group's name: the run directories of every sweep are named 0_..., 1_..., so
    that names alone are not unique.
    """

    def __init__(self, config: WandbConfig, run_dir: str, console: Console) -> None:
        self._console = console
        self._run: Any = None
        if config.mode is WandbMode.disabled:
            return
        folder = Path(run_dir).resolve()
        group = re.sub(r"[/\\#?%:\s]", "-", config.group or "")
        self._guard(
            self._start,
            dir=str(folder),
            id=f"{group}-{folder.name}" if group else folder.name,
            name=folder.name,
            resume="allow",
            mode=str(config.mode),
            project=config.project,
            entity=config.entity,
            tags=config.tags,
            group=config.group,
            config=_frozen_config(folder),
        )

    def log(self, values: dict[str, Any]) -> None:
        """Log one line of metrics at its step."""
        if self._run is not None:
            self._guard(
                self._run.log,
                {key: value for key, value in values.items() if key != "step"},
                step=values["step"],
            )

    def finish(self, *, failed: bool) -> None:
        """Finish the wandb run, marked as failed if `failed`."""
        if self._run is not None:
            self._guard(self._run.finish, exit_code=int(failed))

    def _start(self, **arguments: Any) -> None:
        import wandb

        # Private, because wandb's files contain the host, the command and the environment.
        Path(arguments["dir"], "wandb").mkdir(mode=0o700, exist_ok=True)
        # save_code would upload the recipe and all uncommitted changes, including any secrets in them.
        settings = wandb.Settings(silent=True, console="off", save_code=False)
        self._run = wandb.init(settings=settings, **arguments)

    def _guard(self, call: Any, *args: Any, **kwargs: Any) -> None:
        """Call a function of wandb; on any error print the reason once and disable wandb for the rest of the run."""
        try:
            call(*args, **kwargs)
        except Exception as error:
            self._run = None
            logger.debug("wandb failed", exc_info=True)
            self._console.print(
                f"wandb failed and is off for the rest of the run: {type(error).__name__}: {error}", markup=False
            )


def _frozen_config(run_dir: Path) -> dict[str, Any]:
    """Return the run's config.yaml. It contains no secrets: validation rejects a config that does."""
    file = run_dir / CONFIG
    return load_yaml(file.read_text()) if file.is_file() else {}
