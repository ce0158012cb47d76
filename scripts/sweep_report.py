"""How a sweep stands: its table, printed and written to SWEEP_DIR/report.md, report.csv and report.png.

python scripts/sweep_report.py outputs/sweeps/finetune/SWEEP                      # the table as of now
python scripts/sweep_report.py outputs/sweeps/finetune/SWEEP --watch              # until every point has ended
python scripts/sweep_report.py outputs/sweeps/finetune/SWEEP --retry              # every point that is not ok, again
python scripts/sweep_report.py outputs/sweeps/finetune/SWEEP --retry failed,oom   # those in these states

A point that is tried again keeps its run directory: where its run has saved, it continues. Ends with status 0 where
every point is ok or on its way and the losses of one curve agree, 1 where not, and 2 for a mistake.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from components.config.errors import ConfigError
from components.launch.sweep.plan import read_sweep
from components.launch.sweep.points import retry
from components.launch.sweep.report import report_now, watch
from components.protocol.exit_codes import EXIT_INTERRUPTED, EXIT_INVALID
from components.protocol.failures import print_problems


def main(arguments: list[str]) -> int:
    """Report, watch or retry; return the exit status."""
    parser = ArgumentParser(
        prog="scripts/sweep_report.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep_dir", type=Path, metavar="SWEEP_DIR", help="folder of the sweep, with its sweep.json")
    parser.add_argument("--watch", action="store_true", help="show the table until nothing runs or waits any more")
    parser.add_argument(
        "--retry",
        nargs="?",
        const="",
        metavar="STATES",
        help="run again: states separated by commas, such as failed,oom (default: all but ok, running, submitted)",
    )
    options = parser.parse_args(arguments)
    try:
        sweep = read_sweep(options.sweep_dir)
        if options.retry is not None:
            status = retry(sweep, [state.strip() for state in options.retry.split(",") if state.strip()])
            return watch(sweep) if options.watch else status
        return watch(sweep) if options.watch else report_now(sweep)
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
