"""Backend that submits runs as jobs: what all schedulers share, and what each of them states.

`submit` is the same for all: copy the code, render the script, record the submission, send it, adopt the job if the
answer came too late, and print a summary. A scheduler states how to render, send, find, query and cancel a job. A job
runs the copy of the code in its run directory, regardless of later edits.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config.schema.data import MixtureDataConfig
from components.config.schema.parallelism import describe_processes
from components.config.schema.recipes import RecipeConfig, named_models
from components.launch.backend import CheckedRun, Job, print_job, record_job, recorded_job
from components.package import COMPONENTS, PROJECT
from components.protocol.errors import ConfigError, field_values
from components.protocol.processes import CpuLimitError, limited
from components.protocol.run_files import (
    CODE,
    JOB_ID,
    JOB_SCRIPT,
    LOGS,
    PRIVATE,
    SUBMISSION,
    atomic_write,
    keep_only_folder,
)
from components.protocol.safe_parsing import read_regular
from components.terminal import print_text

if TYPE_CHECKING:
    from jinja2 import Environment

Findings = tuple[list[str], list[str]]
"""Problems, and notes for the user."""

TAG = "meshbook:"
"""Prefix of the unique tag of a submission."""
_QUERIES, PAUSE = 5, 2.0
"""Number of queries for a job whose submission was not confirmed, and the seconds between them."""
LOCAL_FILE_SYSTEMS = {"tmpfs", "ramfs", "overlay", "ext2", "ext3", "ext4", "xfs", "btrfs", "squashfs", "fuse.snapfuse"}
"""Types of file systems that other machines cannot access, unless this one exports them."""
_LARGEST = 1 << 20
"""Most bytes of a template, and of what it renders to; Slurm accepts scripts of 4 MiB."""
_CPU_SECONDS = 5
"""Most CPU time that a template may take; the built-in ones take milliseconds."""
_MEMORY = 1 << 29
"""Most bytes that a template may allocate."""
_LARGEST_COPY = 64 * 2**20
"""Maximum size of a snapshot in bytes; more is probably not only code."""
ROOT = COMPONENTS.parent
"""Folder of `components`: its copy is prepended to PYTHONPATH."""
_SUFFIXES = {".py", ".yaml", ".yml", ".json", ".toml", ".j2", ".jinja", ".txt", ".md", ".sh"}
_EXCLUDED = {"tests", "outputs", "__pycache__"}


class NoAnswer(ConfigError):
    """The scheduler did not answer in time; it may still carry out the request."""


class UnknownSubmission(Exception):
    """The scheduler did not answer: it may or may not have accepted the job."""


class Scheduler(ABC):
    """Backend that submits runs as jobs; a subclass states what differs between schedulers.

    A subclass is created without arguments. For a scheduler of your own, see examples/own_scheduler.
    """

    runs_here = False
    name = "the scheduler"
    """Name in messages."""
    file = JOB_SCRIPT
    """Name of the file in the run directory that is submitted."""
    unit = ("on", "node")
    """Words for the place of the ranks: "on 2 nodes"."""
    copies_code = True
    """Whether cluster.snapshot applies."""
    prefix = ""
    """Beginning of the ids of this scheduler's jobs in RUN/job_id, for one of the user's own (cluster.factory)."""

    def problems(self, cfg: RecipeConfig, rejected: Collection[str]) -> Findings:
        """Return the problems of submitting `cfg`, and notes. See `Backend.validate`; never called with `quick`.

        Do not ask the scheduler if `cfg.cluster.only_renders`. The keys of `cfg.cluster` that the script follows are up
        to `render`; `requeue` and `snapshot` apply to every scheduler.
        """
        return [], []

    @abstractmethod
    def render(self, run: CheckedRun, tag: str) -> str:
        """Return the text of `file`. Raises ConfigError."""

    @abstractmethod
    def send(self, run: CheckedRun, file: Path, tag: str) -> str:
        """Submit `file`, and return the id of the job, without `prefix`. Put no other file into the run directory.

        Raises:
            NoAnswer: The scheduler may have accepted the job.
            ConfigError: It has not.
        """

    @abstractmethod
    def find(self, file: Path, tag: str) -> str | None:
        """Return the id of the job that a submission created; None if there is none.

        Raises ConfigError if the scheduler does not answer.
        """

    @abstractmethod
    def query(self, jobs: Sequence[str]) -> dict[str, Job]:
        """Return the jobs with these ids, without `prefix`, in as few queries as possible.

        One that is no longer listed is `JobState.gone` and over. Raises ConfigError if the scheduler does not answer.
        """

    @abstractmethod
    def cancel(self, job: str) -> bool:
        """Cancel a job, and return whether the scheduler accepted the request. Raises ConfigError without an answer."""

    @abstractmethod
    def cancel_command(self, job: str) -> str:
        """Return the shell command that cancels a job, without asking the scheduler."""

    def new_tag(self, run: CheckedRun) -> str:
        """Return a unique tag for a submission, by which `find` finds its job."""
        return f"{TAG}{secrets.token_hex(8)}"

    def find_command(self, file: Path, tag: str) -> str:
        """Return a shell command with which a user finds the job of a submission."""
        return f"a search for {tag}"

    def summary(self, run: CheckedRun, job: str) -> list[tuple[str, str]]:
        """Return what to print of a submitted job, each a name and a text: how to follow, stop and requeue it."""
        return [
            ("follow", f"tail -F {run.directory.path / LOGS / 'latest' / 'rank_0.log'}"),
            ("stop", self.cancel_command(job)),
        ]

    def validate(
        self, cfg: RecipeConfig, processes: int, rejected: Collection[str], *, quick: bool = False
    ) -> Findings:
        """Return the problems specific to this scheduler, and notes. See `Backend.validate`."""
        return ([], []) if quick else self.problems(cfg, rejected)

    def show(self, run: CheckedRun) -> None:
        """Print what `submit` would submit."""
        text = self.render(run, self.new_tag(run))
        print_job(run, text, f"submit this to {self.name} as {run.directory.path / self.file}")

    def submit(self, run: CheckedRun, run_here: Callable[[], int]) -> int:
        """Submit a run and print a summary; return 0, or 1 if it is unknown whether the scheduler accepted the job."""
        directory, path = run.directory, run.directory.path
        try:
            files = self._copy_code(run)
            tag = self.new_tag(run)
            atomic_write(path / self.file, self.render(run, tag), PRIVATE)
            job = self._submit(run, path / self.file, tag)
        except UnknownSubmission as error:
            print_text(error, file=sys.stderr, flush=True)
            return 1
        except ConfigError as error:
            directory.discard(str(error))
            raise
        except OSError as error:
            directory.discard(str(error))
            raise ConfigError(f"run.dir={path}: cannot be written: {error}; choose another run.dir") from error
        except KeyboardInterrupt:
            directory.discard("interrupted during submission")
            raise
        (place, word), nodes = self.unit, run.cfg.cluster
        where = f"{place} {nodes.nodes} {word}{'s' if nodes.most_nodes > 1 else ''}"
        rows = [
            ("run", str(path)),
            ("mesh", f"{run.cfg.parallelism.resolve(run.processes)}: {describe_processes(run.processes)} {where}"),
            *([("nodes", f"each attempt uses {' or '.join(map(str, run.node_counts))}")] * (len(run.node_counts) > 1)),
            ("code", f"{files} files copied: later edits do not affect the job" if files else self.code_folder(run)),
            *(("note", note) for note in run.notes),
            ("job", self.prefix + job),
            *self.summary(run, job),
        ]
        for name, value in rows:
            print_text(f"{name:<14} {value}")
        return 0

    def code_folder(self, run: CheckedRun) -> str:
        """Return the folder of the code that the ranks run, for PYTHONPATH."""
        return str(run.directory.path / CODE if self._copies(run) else ROOT)

    def recipe_file(self, run: CheckedRun) -> Path:
        """Return the recipe's file that the ranks run."""
        file = run.recipe.file
        return _copied_recipe_path(file, run.directory.path / CODE) if self._copies(run) else file

    def _copies(self, run: CheckedRun) -> bool:
        return self.copies_code and run.cfg.cluster.snapshot

    def _copy_code(self, run: CheckedRun) -> int:
        """Copy the code to the run directory if cluster.snapshot is set, and return the number of files."""
        if not self._copies(run):
            return 0
        keep_only_folder(run.directory.path / CODE)
        return copy_code(run.recipe.file, run.directory.path / CODE)

    def _submit(self, run: CheckedRun, file: Path, tag: str) -> str:
        """Submit a file, record the job in the run directory, and return its id.

        A submission may fail although the scheduler accepted the job, if the answer is late or lost. The tag is
        therefore recorded first, and the job is searched for by it.

        Raises:
            ConfigError: The scheduler rejected the job, or has no such job.
            UnknownSubmission: It answers neither the submission nor the search.
        """
        run_dir = file.parent
        earlier = recorded_job(run_dir)  # has ended: checked when the run directory was opened
        atomic_write(run_dir / SUBMISSION, self.prefix + tag)
        (run_dir / JOB_ID).unlink(missing_ok=True)
        try:
            job = self._sent_or_found(run, file, tag).strip()
            record_job(run_dir, self.prefix + job)
        except ConfigError:
            (run_dir / SUBMISSION).unlink()
            if earlier is not None:
                record_job(run_dir, earlier)
            raise
        except (KeyboardInterrupt, OSError):
            self._cancel_submission(file, tag)
            raise
        return job

    def _sent_or_found(self, run: CheckedRun, file: Path, tag: str) -> str:
        """Submit a file, and return the id of the job; search for it if the answer came too late."""
        try:
            return self.send(run, file, tag)
        except NoAnswer as error:
            job = self._find_late(file, tag, error)
            if job is None:
                raise
            run.notes.append(f"the submission failed, but {self.name} had accepted the job: {error}")
            return job

    def _find_late(self, file: Path, tag: str, failure: ConfigError) -> str | None:
        """Return the job of a failed submission, which may take seconds to appear; None if there is none."""
        for query in range(_QUERIES):
            time.sleep(PAUSE if query else 0)
            try:
                if (job := self.find(file, tag)) is not None:
                    return job
            except ConfigError as error:
                raise UnknownSubmission(
                    f"{failure}\nIt is unknown whether {self.name} accepted the job, since a search for it fails, too: "
                    f"{error}\nThe run directory {file.parent} is kept. Once {self.name} responds, find the job with "
                    f"{self.find_command(file, tag)}, or run the command again with this run.dir: it looks for the job "
                    "first"
                ) from error
        return None

    def _cancel_submission(self, file: Path, tag: str) -> None:
        """Cancel the job of an interrupted submission if the scheduler has accepted it, and print the outcome."""
        try:
            job = self.find(file, tag)
            done = job is None or self.cancel(job)
        except ConfigError:
            print_text(f"interrupted: look for the job with {self.find_command(file, tag)}", file=sys.stderr)
            return
        if job is not None:
            ending = "was cancelled" if done else f"could not be cancelled: run {self.cancel_command(job)}"
            print_text(f"interrupted: job {job}, which {self.name} had accepted, {ending}", file=sys.stderr)


def named_paths(cfg: RecipeConfig) -> dict[str, str | None]:
    """Return the paths that a config names, by key; a model's may be a name on the hub."""
    sources = cfg.data.sources if isinstance(cfg.data, MixtureDataConfig) else {}
    return {
        "run.dir": cfg.run.dir or str(Path.cwd()),
        **named_models(cfg),
        "data.path": field_values(cfg.data).get("path"),
        **{f"data.sources.{name}.path": field_values(each).get("path") for name, each in sources.items()},
    }


def _mounts() -> dict[str, str]:
    """Return the file system type of each mount point."""
    table = Path("/proc/self/mounts")
    lines = table.read_text().splitlines() if table.exists() else []
    return {entry[1].replace("\\040", " "): entry[2] for entry in map(str.split, lines) if len(entry) > 2}


def file_system(path: Path) -> str | None:
    """Return the type of the file system that contains a path; None if unknown."""
    absolute, mounts = path.absolute(), _mounts()
    return next((mounts[str(folder)] for folder in (absolute, *absolute.parents) if str(folder) in mounts), None)


def render_template(environment: Environment, file: Path, values: Mapping[str, Any]) -> str:
    """Return the rendered template. Raises ConfigError, also if it exceeds a limit."""
    from jinja2 import TemplateSyntaxError

    what = f"cluster.template={file}: cannot be rendered"
    try:
        source = read_regular(file, _LARGEST).decode()
        with limited(_CPU_SECONDS, _MEMORY):
            text = environment.from_string(source).render(values)
    except CpuLimitError as error:
        raise ConfigError(f"{what}: it takes more than {_CPU_SECONDS} s of CPU time") from error
    except MemoryError as error:
        raise ConfigError(f"{what}: it takes more than {_MEMORY >> 20} MiB of memory") from error
    except Exception as error:  # a template can raise anything: ZeroDivisionError, SecurityError
        line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
        raise ConfigError(f"{what}{line}: {str(error)[:1000]}") from error
    if len(text) > _LARGEST:
        raise ConfigError(f"{what}: it renders to more than {_LARGEST:,} characters")
    return text


def _copied_recipe_path(recipe_file: Path, target: Path) -> Path:
    """Return the path of the recipe in a snapshot in `target`."""
    if recipe_file.is_relative_to(PROJECT):
        return target / recipe_file.relative_to(ROOT)
    return target / "recipe" / recipe_file.name


def copy_code(recipe_file: Path, target: Path) -> int:
    """Replace `target` by a copy of the project, and of the recipe's folder if it is outside; return the file count.

    In a git repository, copy tracked and new files, but not ignored ones. Elsewhere, and if the repository ignores the
    project or an outside recipe, copy code and text files: the whole project, but only the top level and the packages
    of the recipe's folder.

    Raises ConfigError if that is more than `_LARGEST` bytes.
    """
    copy, folder = _copied_recipe_path(recipe_file, target), recipe_file.parent
    pairs = [(ROOT / name, target / name) for name in _project_files()]
    if not recipe_file.is_relative_to(PROJECT):
        names = _files(folder, include_all=False, recipe=recipe_file.name)
        pairs += [(folder / name, copy.parent / name) for name in names]
    pairs = list(dict.fromkeys([*pairs, (recipe_file, copy)]))
    size = sum(source.stat().st_size for source, _ in pairs)
    if size > _LARGEST_COPY:
        raise ConfigError(
            f"cluster.snapshot=true: the code at {PROJECT} and {folder} is {size / 2**20:.0f} MiB, more "
            f"than {_LARGEST_COPY // 2**20}; add files that are not code to .gitignore, or set cluster.snapshot=false"
        )
    # A file that no longer exists must not stay: Python prefers an old package to a new module of its name.
    fresh = target.with_name(f"{target.name}.new")
    keep_only_folder(fresh)
    shutil.rmtree(fresh, ignore_errors=True)
    for source, copied in pairs:
        new = fresh / copied.relative_to(target)
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, new)
    if target.exists():
        shutil.rmtree(target)
    fresh.rename(target)
    return len(pairs)


def _project_files() -> list[Path]:
    """Return the code files of Meshbook, relative to `ROOT`."""
    if PROJECT == ROOT:
        return _files(ROOT, include_all=True)
    installed = [file for folder in (COMPONENTS, PROJECT) for file in _walk(folder, include_all=True)]
    return [file.relative_to(ROOT) for file in installed]


def _files(folder: Path, *, include_all: bool, recipe: str | None = None) -> list[Path]:
    """Return the code files under `folder`, relative to it; `recipe` is one of them if it is an outside recipe."""
    listed = _git_files(folder)
    # A home directory may be a repository of dotfiles that ignores everything else: git then lists few files or none.
    if not listed or (recipe is not None and Path(recipe) not in listed):
        listed = [path.relative_to(folder) for path in _walk(folder, include_all=include_all)]
    return [name for name in listed if _is_code(name) and (folder / name).is_file()]


def _is_code(name: Path) -> bool:
    """Return whether to copy a file. Hidden files are excluded, since they may hold secrets (.env)."""
    return name.parts[0] not in _EXCLUDED and not any(part.startswith(".") for part in name.parts)


def _git_files(folder: Path) -> list[Path] | None:
    """Return the tracked and new files of a git repository; None without git or a repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return [Path(os.fsdecode(name)) for name in done.stdout.split(b"\0") if name]


def _walk(folder: Path, *, include_all: bool) -> list[Path]:
    """Return code and text files under `folder`; without `include_all`, only those at its top level and in packages."""
    files_below: list[Path] = []
    for path, folders, files in os.walk(folder):
        here = Path(path)
        folders[:] = sorted(
            name
            for name in folders
            if not (name.startswith(".") or name in _EXCLUDED or (here / name / "pyvenv.cfg").exists())
            and (include_all or (here / name / "__init__.py").exists())
        )
        files_below += [here / name for name in sorted(files) if Path(name).suffix in _SUFFIXES]
    return files_below
