"""The commands of a batch script, on every scheduler.

    run=RUN_DIR job="python -m components.launch.job"
    export MESHBOOK_WORKER=1 MESHBOOK_RUN_DIR=$run PYTHONPATH=CODE
    export MESHBOOK_JOB=ID                      # as in RUN_DIR/job_id
    while true; do
        MESHBOOK_ATTEMPT=$($job begin $run) || exit
        export MESHBOOK_ATTEMPT
        log=$run/logs/attempt_$MESHBOOK_ATTEMPT/node_0.log
        torchrun --standalone --nproc-per-node=N RECIPE >$log 2>&1
        $job conclude $run $? --left UNLIMITED
        status=$?
        [ -e $run/restart ] || break
    done
    [ ! -e $run/requeue ] || REQUEUE_THIS_JOB
    exit $status

RECIPE has no arguments: the ranks read RUN_DIR/config.yaml. When the job is cancelled, the script waits until the ranks
have saved, and passes --cancelled. `check` may run on each node before the
ranks; then, too, `conclude` follows, with its status.

`begin` prints the number of the attempt, and messages to stderr; it fails if the job must end. If RUN_DIR/requeue
exists afterwards, the ranks must not be started. `conclude` exits with the job's exit status; then RUN_DIR/restart asks
for the ranks to be started again with another `begin`, and RUN_DIR/requeue for the job to be requeued without the nodes
that it lists.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from components.launch.job.attempts import Ended, Refused, begin, conclude, seconds_left
from components.launch.machine import node_problems
from components.protocol.errors import EXIT_INVALID, ConfigError
from components.protocol.failures import print_problems
from components.protocol.processes import ATTEMPT, JOB, whole_number
from components.protocol.run_files import REQUEUE, create_marker
from components.terminal import HelpText, keep_running, open_output, print_text


def run_command(arguments: Sequence[str]) -> int:
    """Run a command of a batch script, and return its exit status."""
    open_output()
    keep_running()
    options = _parser().parse_args(arguments)
    requests: list[int] = []
    # The stop request comes before the ranks could save anything, or after they have: it only asks for a requeue.
    signal.signal(signal.SIGUSR2, lambda number, frame: requests.append(number))
    try:
        status = options.run(options)
        if requests and not options.ends:
            create_marker(options.run_dir / REQUEUE)
        return status
    except ConfigError as error:
        print_problems(error.problems)
        return EXIT_INVALID
    except Refused as error:
        print_text(error, file=sys.stderr, flush=True)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="components.launch.job", description=__doc__, formatter_class=HelpText)
    commands = parser.add_subparsers(required=True)
    start = commands.add_parser("begin", help="claim the next attempt, and choose its nodes")
    start.set_defaults(run=_begin, ends=False)
    start.add_argument("run_dir", type=Path)
    start.add_argument(
        "--job", default=os.environ.get(JOB), help=f"id of the job, as in RUN_DIR/job_id (default: {JOB})"
    )
    start.add_argument("--nodes", default="", help="nodes of the job, separated by spaces")
    start.add_argument("--counts", type=int, nargs="+", default=[], help="numbers of nodes that the run can use")
    start.add_argument("--down", metavar="FILE", help="nodes that are down, each NODE|STATE|REASON; - is stdin")
    start.add_argument("--ended", default="", help="the job in RUN_DIR/job_id, if it is another one that has ended")
    check = commands.add_parser("check", help="check a node")
    check.set_defaults(run=_check, ends=False)
    check.add_argument("run_dir", type=Path)
    check.add_argument("gpus", type=int, help="GPUs that the ranks of this node need")
    end = commands.add_parser("conclude", help="report how the attempt ended, and decide what follows")
    end.set_defaults(run=_conclude, ends=True)
    end.add_argument("run_dir", type=Path)
    end.add_argument(
        "status",
        type=int,
        help="exit status of the ranks' parent, above 128 if one was killed (or see node_K.log)",
    )
    end.add_argument("--cancelled", action="store_true", help="the user cancelled the job")
    end.add_argument(
        "--left", metavar="TIME", help="time left, H:M:S or UNLIMITED; without it the ranks are never started again"
    )
    end.add_argument(
        "--up", metavar="FILE", help="nodes that a requeued job can get, each NODE|FEATURE,FEATURE; - is stdin"
    )
    end.add_argument("--excluded", default="", help="nodes that the job excludes already, separated by spaces")
    return parser


def _begin(given: argparse.Namespace) -> int:
    if not given.job:
        raise ConfigError(f"--job and {JOB} are not set; pass the id of the job, as in RUN_DIR/job_id")
    if given.counts and not given.nodes.split():
        raise ConfigError("--nodes: lists no node of the job; compare cluster.template with slurm/train.sbatch.j2")
    with redirect_stdout(sys.stderr):
        attempt = begin(
            given.run_dir,
            given.job,
            nodes=given.nodes.split(),
            counts=given.counts,
            down=_lines(given.down) or [],
            ended=given.ended,
        )
    print_text(attempt, flush=True)
    return 0


def _check(given: argparse.Namespace) -> int:
    """Print one line per problem of this node; return 1 if there is any, else 0."""
    problems = node_problems(given.run_dir, given.gpus)
    for problem in problems:
        print_text(f"node {socket.gethostname()}: {problem}", file=sys.stderr, flush=True)
    return 1 if problems else 0


def _conclude(given: argparse.Namespace) -> int:
    attempt = whole_number(os.environ.get(ATTEMPT, ""))
    if attempt is None:
        raise ConfigError(f"{ATTEMPT}={os.environ.get(ATTEMPT)}: is no number; export the one that `begin` printed")
    left = None if given.left is None else seconds_left(given.left)
    up, excluded = _lines(given.up), given.excluded.split()
    return conclude(given.run_dir, attempt, Ended(given.status, given.cancelled, left, up=up, excluded=excluded))


def _lines(file: str | None) -> list[str] | None:
    if file is None:
        return None
    return (sys.stdin.read() if file == "-" else Path(file).read_text(errors="replace")).splitlines()


if __name__ == "__main__":
    sys.exit(run_command(sys.argv[1:]))
