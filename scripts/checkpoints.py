"""List, verify and prune the checkpoints of a run.

python scripts/checkpoints.py list outputs/finetune/RUN             # a table, with the reason each one is kept
python scripts/checkpoints.py verify outputs/finetune/RUN           # verify all hashes; status 1 if one differs
python scripts/checkpoints.py prune outputs/finetune/RUN            # show what the run's retention policy removes
python scripts/checkpoints.py prune outputs/finetune/RUN --keep 1   # the same with checkpoint.keep=1
python scripts/checkpoints.py prune outputs/finetune/RUN --yes      # remove it

`list` and `prune` check the sizes of files; `prune` also verifies the newest checkpoint. Pruning removes complete
checkpoints and leftovers of killed attempts. It never removes the newest complete checkpoint or a damaged one, and does
nothing while a run or a job uses the directory. Exit status 2 for an invalid command line or run directory.
"""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

from components.checkpoint.manifest import ListedCheckpoint, check_contents, list_checkpoints, removable, remove
from components.config.compose.frozen import read_section
from components.config.schema.run import CheckpointConfig
from components.launch.run_directory_lock import exclude_starts
from components.presentation import number_text
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.protocol.run_files import CHECKPOINTS, CONFIG
from components.terminal import HelpText, exit_with, print_text

_LOSS, _REWARD = "eval loss", "eval reward"
"""Column of the evaluations: rewards if a checkpoint has one."""
COLUMNS = ("checkpoint", "step", "saved", "size", "mesh", _LOSS, "kept because", "state")


def main(arguments: list[str]) -> int:
    """List, verify or prune checkpoints; return the exit status."""
    parser = ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("action", choices=("list", "verify", "prune"))
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run directory, which contains config.yaml")
    parser.add_argument("--keep", type=int, metavar="N", help="list and prune: replaces the run's checkpoint.keep")
    parser.add_argument("--yes", action="store_true", help="prune: remove the checkpoints instead of showing them")
    options = parser.parse_args(arguments)
    run_dir: Path = options.run_dir
    try:
        if not (run_dir / CONFIG).is_file():
            raise ConfigError(f"{run_dir}: not a run directory, it has no {CONFIG}; give the directory of a run")
        if options.action == "verify":
            return verify(run_dir)
        policy = read_section(run_dir / CONFIG, "checkpoint", CheckpointConfig)
        if options.keep is not None:
            policy = replace(policy, keep=options.keep)
        if options.action == "list":
            return show(run_dir, policy)
        if (run_dir / CHECKPOINTS).is_symlink():
            raise ConfigError(f"{run_dir / CHECKPOINTS}: is a link; give the directory of the run that it belongs to")
        return prune(run_dir, policy, options.yes)
    except ConfigError as error:
        print_problems(error.problems)
    except OSError as error:
        print_problems([f"{error.filename or run_dir}: {error.strerror or error}"])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_INVALID


def show(run_dir: Path, policy: CheckpointConfig) -> int:
    """Print a table of the checkpoints."""
    entries = list_checkpoints(run_dir, policy)
    if not entries:
        print_text(f"{run_dir}: no checkpoints")
        return 0
    column = _REWARD if any(entry.manifest and entry.manifest.eval_reward is not None for entry in entries) else _LOSS
    header = tuple(column if name == _LOSS else name for name in COLUMNS)
    rows = [header, *(_row(entry, column) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print_text("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def verify(run_dir: Path) -> int:
    """Verify every checkpoint and print the result; return 1 if one is incomplete or damaged."""
    entries = list_checkpoints(run_dir, CheckpointConfig())
    for entry in entries:
        print_text(f"{entry.path.name}: {'; '.join(check_contents(entry)) or 'complete'}", flush=True)
    if not entries:
        print_text(f"{run_dir}: no checkpoints")
    return 1 if any(entry.problems for entry in entries) else 0


def prune(run_dir: Path, policy: CheckpointConfig, confirmed: bool) -> int:
    """Remove the checkpoints that the policy does not keep; without confirmation, only list them."""
    if not confirmed:
        _print_removals("would remove", *removable(run_dir, policy))
        return 0
    with exclude_starts(run_dir):
        entries, leftovers = removable(run_dir, policy)
        remove([*(entry.path for entry in entries), *leftovers])
    _print_removals("removed", entries, leftovers)
    return 0


def _print_removals(verb: str, entries: list[ListedCheckpoint], leftovers: list[Path]) -> None:
    for entry in entries:
        print_text(f"{verb} {entry.path.name} ({_size(entry)})")
    for path in leftovers:
        print_text(f"{verb} {path.name}, left by a killed attempt")
    if not entries and not leftovers:
        print_text("nothing to remove")
    elif verb != "removed":
        print_text("add --yes to remove")


def _row(entry: ListedCheckpoint, column: str) -> tuple[str, ...]:
    state = "; ".join(entry.problems) or "complete"
    manifest = entry.manifest
    if manifest is None:
        return (entry.path.name, *[""] * (len(COLUMNS) - 2), state)
    mesh = " ".join(f"{axis} {size}" for axis, size in manifest.mesh.items() if size > 1 or axis == "world")
    evaluation = number_text(manifest.eval_reward if column == _REWARD else manifest.eval_loss, ".4f")
    kept = ", ".join(entry.reasons) or ("not kept" if not entry.problems else "")
    return entry.path.name, str(manifest.step), manifest.saved, _size(entry), mesh, evaluation, kept, state


def _size(entry: ListedCheckpoint) -> str:
    size = float(entry.manifest.bytes if entry.manifest else 0)
    for unit in ("bytes", "KB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


if __name__ == "__main__":
    exit_with(main)
