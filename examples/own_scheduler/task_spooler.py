"""Jobs in the queue of task-spooler (`tsp`), which runs one command after the other on one machine."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from components.config.schema.recipes import RecipeConfig
from components.launch.backend import CheckedRun, Job, JobState
from components.launch.job.scheduler import Findings, NoAnswer, Scheduler
from components.protocol.errors import ConfigError

SCRIPT = """#!/bin/bash
{setup}
export MESHBOOK_WORKER=1 MESHBOOK_RUN_DIR={run_dir} MESHBOOK_JOB={job} PYTHONPATH={code}${{PYTHONPATH:+:$PYTHONPATH}}
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
run_dir={run_dir} job=({python} -m components.launch.job) cancelled=
trap 'cancelled=--cancelled' TERM  # from `tsp -k`; the ranks receive it, too, and save

while true; do
    MESHBOOK_ATTEMPT=$("${{job[@]}}" begin "$run_dir" --nodes "$(hostname)" --counts 1) || exit
    export MESHBOOK_ATTEMPT
    {python} -m torch.distributed.run --standalone --nproc-per-node={procs} --shutdown-timeout={lead} \\
        --signals-to-handle=SIGTERM,SIGUSR2 {recipe} >>"$run_dir/logs/attempt_$MESHBOOK_ATTEMPT/node_0.log" 2>&1 &
    status=0
    wait $! || status=$?
    if [ -n "$cancelled" ]; then status=0 && wait $! || status=$?; fi  # the trap interrupted wait
    "${{job[@]}}" conclude "$run_dir" "$status" --left UNLIMITED $cancelled
    status=$?
    [ -e "$run_dir/restart" ] && [ -z "$cancelled" ] || break
done
if [ -e "$run_dir/requeue" ] && [ -z "$cancelled" ]; then tsp -L {tag} bash {file}; fi
exit "$status"
"""
STATES = {"queued": JobState.submitted, "running": JobState.running, "finished": JobState.ended, "gone": JobState.gone}


class TaskSpooler(Scheduler):
    """task-spooler. A job's id is the label of its command, which a requeue keeps; its number changes."""

    name = "task-spooler"

    def problems(self, cfg: RecipeConfig, rejected: Collection[str]) -> Findings:
        """Check that the queue answers, and that the run fits on its one machine."""
        nodes = cfg.cluster.nodes
        problems = [] if nodes == "1" else [f"cluster.nodes={nodes}: task-spooler has one node; set cluster.nodes=1"]
        try:
            if not cfg.cluster.only_renders:
                self._tsp("-S")
        except ConfigError as error:
            problems += error.problems
        return problems, []

    def render(self, run: CheckedRun, tag: str) -> str:
        """Return the script of the job."""
        cluster, folder = run.cfg.cluster, run.directory.path
        variables = {**cluster.network_env, **cluster.env}.items()
        words = {
            "run_dir": folder,
            "file": folder / self.file,
            "code": self.code_folder(run),
            "recipe": self.recipe_file(run),
            "python": cluster.python or sys.executable,
            "tag": tag,
            "job": self.prefix + tag,
        }
        return SCRIPT.format(
            **{name: shlex.quote(str(word)) for name, word in words.items()},
            setup="\n".join([*cluster.setup, *(f"export {name}={shlex.quote(text)}" for name, text in variables)]),
            procs=cluster.procs_per_node,
            lead=cluster.signal_lead_seconds,
        )

    def send(self, run: CheckedRun, file: Path, tag: str) -> str:
        """Append the script to the queue."""
        self._tsp("-L", tag, "bash", str(file))
        return tag

    def find(self, file: Path, tag: str) -> str | None:
        """Return the label if the queue has a command with it."""
        return tag if self._commands(tag) else None

    def query(self, jobs: Sequence[str]) -> dict[str, Job]:
        """Return the jobs by the state of their last command."""
        found = {job: self._commands(job)[-1:] for job in jobs}
        states = {job: commands[0][1] if commands else "gone" for job, commands in found.items()}
        over = {job: state not in ("queued", "running") for job, state in states.items()}
        return {
            job: Job(job, self.name, STATES.get(state, JobState.cancelled), state, over[job])
            for job, state in states.items()
        }

    def cancel(self, job: str) -> bool:
        """Remove a command that waits, and stop one that runs; it saves."""
        for number, state in self._commands(job):
            if state in ("queued", "running"):
                self._tsp("-r" if state == "queued" else "-k", number)
        return True

    def cancel_command(self, job: str) -> str:
        """Return the command that stops the job's running command."""
        return f"tsp -k $(tsp -l | grep -F '[{job}]' | awk '$2 == \"running\" {{print $1}}')"

    def _commands(self, label: str) -> list[tuple[str, str]]:
        """Return number and state of the commands with a label, in the order of their numbers."""
        lines = [line for line in self._tsp("-l").splitlines() if f"[{label}]" in line]
        return sorted(((number, state) for number, state, *_ in map(str.split, lines)), key=lambda each: int(each[0]))

    def _tsp(self, *arguments: str) -> str:
        try:
            return subprocess.run(["tsp", *arguments], capture_output=True, text=True, timeout=10, check=True).stdout
        except subprocess.TimeoutExpired as error:
            raise NoAnswer("task-spooler did not answer within 10 s; try `tsp -l`") from error
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(f"cluster.kind=custom: {error}; install task-spooler, and try `tsp -l`") from error
