"""A checked run becomes a job: the code copied, the script written, handed to sbatch, and a person told."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from components.config.errors import ConfigError
from components.config.run_files import PRIVATE, keep_only_folder, open_append
from components.config.schema.parallelism import describe_processes
from components.config.schema.recipes import RecipeConfig
from components.launch.files import write_text
from components.launch.prepare import Prepared
from components.launch.rank import Recipe
from components.launch.run_directory import CODE, JOB_ID, LOGS, SCRIPT
from components.launch.slurm.commands import ask
from components.launch.slurm.preflight import refusal
from components.launch.slurm.script import Job, render
from components.launch.slurm.snapshot import PROJECT, place_of_copy, take_snapshot
from components.terminal import print_text


def submit(recipe: Recipe, prepared: Prepared) -> int:
    """Submit the run, tell how to follow and stop it, and return 0.

    Raises ConfigError where it cannot be submitted; what was written of a new run directory is then gone again.
    """
    cfg, directory = prepared.cfg, prepared.directory
    code, script = directory.path / CODE, directory.path / SCRIPT
    try:
        keep_only_folder(code, links=False)
        files = take_snapshot(recipe.file, code) if cfg.cluster.snapshot else 0
        write_text(script, render(_job(recipe, cfg, directory.path, directory.attempt)), PRIVATE)
        open_append(directory.path / LOGS / "job.log", PRIVATE).close()  # Slurm appends to it
        answer = ask(["sbatch", "--parsable", str(script)])
        if answer.status:
            raise ConfigError(refusal(answer.errors.splitlines(), cfg.cluster))
    except ConfigError as error:
        directory.discard(str(error))
        raise
    except OSError as error:
        directory.discard(str(error))
        raise ConfigError(f"run.dir={directory.path}: cannot be written: {error}; choose another run.dir") from error
    job = answer.output.partition(";")[0]
    write_text(directory.path / JOB_ID, f"{job}\n")
    _tell(prepared, job, files)
    return 0


def show(recipe: Recipe, cfg: RecipeConfig, notes: list[str]) -> None:
    """Print the script that would be submitted."""
    run_dir = Path(os.path.expanduser(cfg.run.dir or Path("outputs") / recipe.name / "TIME-HEX")).absolute()
    print_text(render(_job(recipe, cfg, run_dir, 0)), end="")
    for note in ("cluster.dry_run=true: would submit this script with sbatch", *notes):
        print_text(f"# {note}")


def _job(recipe: Recipe, cfg: RecipeConfig, run_dir: Path, attempt: int) -> Job:
    copied = cfg.cluster.snapshot
    return Job(
        cluster=cfg.cluster,
        name=cfg.run.name or recipe.name,
        run_dir=run_dir,
        attempt=attempt,
        private=cfg.run.private,
        code=run_dir / CODE if copied else PROJECT,
        recipe=place_of_copy(recipe.file, run_dir / CODE) if copied else recipe.file,
        folder=Path.cwd(),
    )


def _tell(prepared: Prepared, job: str, files: int) -> None:
    cluster, logs = prepared.cfg.cluster, prepared.directory.path / LOGS
    followed = shlex.join([str(logs / "job.log"), str(logs / "latest" / "rank_0.log")])
    rows = [
        ("run", str(prepared.directory.path)),
        ("mesh", f"{prepared.cfg.parallelism.resolve(prepared.processes)}: {describe_processes(prepared.processes)} on "
         f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''}"),
        ("code", f"{files} files copied: an edit from here on does not reach the job" if files else str(PROJECT)),
        *(("note", note) for note in prepared.notes),
        ("job", job),
        ("follow", f"tail -F {followed}"),
        ("stop", f"scancel {job}"),
        ("save, requeue", f"scancel --signal=USR2 {job}"),
    ]  # fmt: skip
    for name, value in rows:
        print_text(f"{name:<14} {value}")
