"""Weights & Biases. It is imported only when it is asked for, and whatever it raises never stops a run."""

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
    """A wandb run whose id is the run directory's name, so that a resumed run continues its curve.

    In a group the id begins with the group's name: the points of every sweep are called 0_..., 1_... .
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
        """Log a line of metrics under its step."""
        if self._run is not None:
            self._guard(
                self._run.log,
                {key: value for key, value in values.items() if key != "step"},
                step=values["step"],
            )

    def finish(self, *, failed: bool) -> None:
        """Close the run."""
        if self._run is not None:
            self._guard(self._run.finish, exit_code=int(failed))

    def _start(self, **arguments: Any) -> None:
        import wandb

        Path(arguments["dir"], "wandb").mkdir(mode=0o700, exist_ok=True)  # its files hold host, command, environment
        # save_code would copy the recipe and all uncommitted changes, with whatever secret stands in them.
        settings = wandb.Settings(silent=True, console="off", save_code=False)
        self._run = wandb.init(settings=settings, **arguments)

    def _guard(self, call: Any, *args: Any, **kwargs: Any) -> None:
        # Any failure of a logging service: told once with its reason, and the training goes on without it.
        try:
            call(*args, **kwargs)
        except Exception as error:
            self._run = None
            logger.debug("wandb failed", exc_info=True)
            self._console.print(f"wandb is off from here on: {type(error).__name__}: {error}", markup=False)


def _frozen_config(run_dir: Path) -> dict[str, Any]:
    """Return the run's config.yaml; it holds no secrets, because a config that does is refused before it is written."""
    file = run_dir / CONFIG
    return load_yaml(file.read_text()) if file.is_file() else {}
