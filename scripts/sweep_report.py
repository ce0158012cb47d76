"""Report the state of a sweep as a table, printed and written to SWEEP_DIR/report.md and report.csv, and as plots.

python scripts/sweep_report.py outputs/sweeps/finetune/SWEEP                      # the current state
python scripts/sweep_report.py outputs/sweeps/finetune/SWEEP --watch              # update until every point has ended
python scripts/sweep_report.py outputs/sweeps/finetune/SWEEP --retry              # run every point that is not ok again
python scripts/sweep_report.py outputs/sweeps/finetune/SWEEP --retry failed,oom   # only the points in these states
python scripts/sweep_report.py outputs/sweeps/finetune/SWEEP --metric mfu         # judge the points by another metric

A retried point keeps its run directory and resumes from its last checkpoint. Exit status 0: all points are ok, running
or submitted, and losses that must be equal agree, and the metric exists; 1: otherwise; 2: invalid options.
"""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

from components.config.compose.sweep_keys import Goal, SweepConfig
from components.launch.sweep.plan import read_sweep
from components.launch.sweep.points import retry
from components.launch.sweep.report import report_now, watch
from components.protocol.errors import EXIT_INTERRUPTED, EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.terminal import HelpText, exit_with


def main(arguments: list[str]) -> int:
    """Report, watch or retry a sweep; return the exit status."""
    parser = ArgumentParser(description=__doc__, formatter_class=HelpText)
    parser.add_argument("sweep_dir", type=Path, metavar="SWEEP_DIR", help="sweep directory, which contains sweep.json")
    parser.add_argument("--watch", action="store_true", help="update the table until no point is running or waiting")
    parser.add_argument(
        "--retry",
        nargs="?",
        const="",
        metavar="STATES",
        help="run the points in these states again, such as failed,oom (default: all but ok, running, submitted)",
    )
    parser.add_argument("--metric", help="judge the points by this metric instead of sweep.metric")
    parser.add_argument(
        "--goal", choices=list(Goal), help="the better value of --metric, if its name does not imply it"
    )
    options = parser.parse_args(arguments)
    try:
        sweep = judged = read_sweep(options.sweep_dir)
        if options.metric is not None:
            keys = SweepConfig(metric=options.metric, goal=options.goal and Goal(options.goal))
            judged = replace(sweep, metric=keys.metric, goal=keys.direction)
        if options.retry is not None:
            status = retry(sweep, [state.strip() for state in options.retry.split(",") if state.strip()], judged)
            return watch(judged) if options.watch else status
        return watch(judged) if options.watch else report_now(judged)
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    exit_with(main)
