"""Hostile strings on the command line of a job arrive byte-equal or are rejected in one message; none is executed."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from components.config.compose import read_frozen
from components.config.schema import FinetuneConfig
from tests.config.commands import Commands
from tests.slurm.login import CPU, PROJECT, QUICK, CommandResult, Login, result_of
from tests.slurm.strings import CANARY, HOSTILE, UNSTORABLE, quoted
from tests.suites import TORTURE, in_torture

ONE_NODE = ("cluster=slurm_1node", "cluster.procs_per_node=1", *CPU, *QUICK)
HELD_JOB = (*ONE_NODE, "+cluster.sbatch_extra.hold=''", "cluster.snapshot=false")
"""A job that is submitted but not started."""
ALL_STRINGS = [text for texts in HOSTILE.values() for text in texts]
SELECTED = ALL_STRINGS if TORTURE else [texts[-1] for texts in HOSTILE.values()]

REPORT = """
commands = [Path(f"/proc/{entry}/cmdline") for entry in os.listdir("/proc") if entry.isdigit()]
command_lines = [file.read_bytes().decode().split("\\0") for file in commands if file.exists()]
report = {
    "env": {name: value for name, value in os.environ.items() if name.startswith(("ENV_", "SETUP_"))},
    "prompts": cfg.generation.prompts,
    "srun": next(line for line in command_lines if line[0].endswith("srun") and cfg.cluster.srun_extra[0] in line),
    "folder": os.getcwd(),
}
(HERE / "report.json").write_text(json.dumps(report))
"""


@pytest.fixture(autouse=True)
def no_string_was_executed(login: Login) -> Iterator[None]:
    """Check afterwards that no string created its file: in the run, or where daemons, tests or root might write it."""
    yield
    assert not [*login.folder.rglob(CANARY), *login.cluster.base.rglob(CANARY)]
    folders = (PROJECT, Path.cwd(), Path.home(), Path("/"), Path("/tmp"))
    assert not [folder for folder in folders if (folder / CANARY).exists()]


class CommandRunner:
    """Runs commands in a user's folder and records the jobs they submit."""

    def __init__(self, login: Login, commands: Commands) -> None:
        self.login, self.commands = login, commands
        self.environment = {"SLURM_CONF": login.cluster.environment["SLURM_CONF"]}
        self.recipe = login.write_recipe("pass", "idle.py")
        self.before, self.jobs = login.jobs_ever(), set[str]()

    def run(
        self, *arguments: str, recipe: Path | None = None, folder: Path | None = None, **environment: str
    ) -> CommandResult:
        process = self.commands.run(
            recipe or self.recipe, arguments, folder or self.login.folder, **self.environment, **environment
        )
        submission = CommandResult(process.status, process.output, process.errors, 0.0)
        if submission.status == 0:
            self.jobs.add(submission.job)
        return submission

    def assert_rejected(self, *arguments: str, folder: Path | None = None) -> list[str]:
        """Check that a command is rejected and leaves no files, and return the problems in its message."""
        files_before = sorted((folder or self.login.folder).rglob("*"))
        submission = self.run(*arguments, folder=folder)
        assert (submission.status, submission.output) == (2, ""), (arguments, submission)
        assert sorted((folder or self.login.folder).rglob("*")) == files_before
        problems = submission.errors.splitlines()
        assert "Traceback" not in submission.errors, submission.errors
        assert len(problems) == 1 or problems.pop(0) == f"{len(problems)} problems with this run:", submission.errors
        return problems


@pytest.fixture
def runner(login: Login, commands: Commands) -> Iterator[CommandRunner]:
    runner = CommandRunner(login, commands)
    yield runner
    assert login.jobs_ever() - runner.before == runner.jobs


def listed(texts: Iterable[str]) -> str:
    return "[" + ",".join(map(quoted, texts)) + "]"


def on_one_line(text: str) -> bool:
    return all(character.isprintable() or character == "\t" for character in text)


def test_every_storable_string_reaches_the_rank_unchanged(login: Login, runner: CommandRunner) -> None:
    """As an override, a variable, an export in cluster.setup and an srun argument, all in one job."""
    texts = [text for text in ALL_STRINGS if text not in UNSTORABLE]
    variables = {f"ENV_{number}": text for number, text in enumerate(texts)}
    shell = {f"SETUP_{number}": text for number, text in enumerate(texts) if on_one_line(text)}
    comments = [f"--comment={text}" for text in shell.values()]
    assert len(texts) >= 40
    assert len(shell) >= 40
    submission = runner.run(
        *(*ONE_NODE, "generation.samples=0", f"generation.prompts={listed(texts)}"),
        *(f"cluster.env.{name}={quoted(text)}" for name, text in variables.items()),
        f"cluster.setup={listed(f'export {name}={shlex.quote(text)}' for name, text in shell.items())}",
        f"cluster.srun_extra={listed(comments)}",
        recipe=login.write_recipe(REPORT),
    )
    login.wait_for_end(submission)
    report = json.loads((submission.run_dir / "report.json").read_text())
    assert report["env"] == variables | shell
    assert report["prompts"] == texts
    assert [argument for argument in report["srun"] if argument.startswith("--comment=")] == comments


def test_strings_that_cannot_be_passed_on_are_rejected(runner: CommandRunner) -> None:
    unprintable = [text for text in ALL_STRINGS if not on_one_line(text) and text not in UNSTORABLE]
    assert len(unprintable) >= 10
    texts = listed(f"--a={text}" for text in unprintable)
    options = [f"cluster.sbatch_extra.a{number}={quoted(text)}" for number, text in enumerate(unprintable)]
    problems = runner.assert_rejected(*ONE_NODE, f"cluster.setup={texts}", f"cluster.srun_extra={texts}", *options)
    assert len(problems) == 3 * len(unprintable)
    for number, text in enumerate(unprintable):
        for problem in (f"cluster.setup={f'--a={text}'!r}: must be", f"cluster: {f'--a={text}'!r} must be"):
            assert sum(line.startswith(problem) for line in problems) == 1, problem
        assert sum(line.startswith(f"cluster.sbatch_extra.a{number}={text!r}: must be") for line in problems) == 1
    for text in UNSTORABLE:
        lists = [f"{key}={listed([text])}" for key in ("cluster.setup", "cluster.srun_extra", "generation.prompts")]
        texts = [f"{key}={quoted(text)}" for key in ("cluster.env.A", "cluster.sbatch_extra.comment")]
        problems = runner.assert_rejected(*ONE_NODE, *lists, *texts)
        assert len(problems) == 5
        assert all(repr(text) in line for line in problems)


UNFINISHED = [
    *("echo 'a", 'echo "$(a', "echo `a", "echo \\", "cat <<end", "cat <<'end' >&2", "if true; then", "f() {", "}"),
    *("fi", "(", "a &&", "x |", "}; {", "case a in"),
]


def test_unfinished_setup_line_is_rejected(runner: CommandRunner) -> None:
    problems = runner.assert_rejected(
        *ONE_NODE, f"cluster.setup={listed([*UNFINISHED, 'true', '# a remark', 'module load x'])}"
    )
    assert len(problems) == len(UNFINISHED)
    for line, problem in zip(UNFINISHED, problems, strict=True):
        assert problem.startswith(f"cluster.setup={line!r}: bash cannot parse it"), problem


def test_variables_reserved_by_the_batch_script_are_rejected(runner: CommandRunner) -> None:
    names = ("run_dir", "status", "MASTER_PORT", "UID")
    problems = runner.assert_rejected(*ONE_NODE, *(f"cluster.env.{name}=x" for name in names))
    assert [problem.partition(":")[0] for problem in problems] == [f"cluster.env.{name}" for name in names]


def test_srun_arguments_that_are_not_options_are_rejected(runner: CommandRunner) -> None:
    """srun would take anything else for the program to run."""
    arguments = ["", "-", "--", "x", f"$(touch {CANARY})", " --label"]
    problems = runner.assert_rejected(*ONE_NODE, f"cluster.srun_extra={listed(arguments)}")
    assert [problem.partition(": ")[2].partition(" must")[0] for problem in problems] == [
        repr(argument) for argument in arguments
    ]


@in_torture
def test_job_names_and_comments_arrive_unchanged(login: Login, runner: CommandRunner) -> None:
    """squeue shows them unchanged, and the config contains the name."""
    submitted = {}
    for text in SELECTED:
        overrides = (*HELD_JOB, f"run.name={quoted(text)}", f"cluster.sbatch_extra.comment={quoted(text)}")
        if text.isprintable() and text.strip() and text not in UNSTORABLE:
            submission = runner.run(*overrides)
            assert submission.status == 0, (text, submission.errors)
            assert read_frozen(submission.run_dir / "config.yaml", FinetuneConfig).run.name == text
            submitted[submission.job] = text
        else:
            assert any(problem.startswith("run.name") for problem in runner.assert_rejected(*overrides))
    assert len(submitted) >= (40 if TORTURE else 10)
    for field in ("%j", "%k"):
        shown = login.cluster.run("squeue", "--noheader", f"--format=%i|{field}").stdout
        assert dict(line.split("|", 1) for line in shown.splitlines()) == submitted


@in_torture
def test_folder_names_arrive_unchanged_or_are_rejected(login: Login, runner: CommandRunner) -> None:
    """As the run directory and as the working directory of the command."""
    submitted = 0
    for text in dict.fromkeys(text for text in SELECTED if text.strip() and "/" not in text):
        here = login.folder / "here" / text
        here.mkdir(parents=True)
        elsewhere, overrides = (
            login.folder / "there" / text,
            (*HELD_JOB, f"run.dir={quoted(f'../../there/{text}')}"),
        )
        allowed = text.isprintable() and not set(text) & set("%\\:")
        if not allowed or "${" in text:  # Hydra fails in a working directory with the latter in its name
            runner.assert_rejected(*HELD_JOB, f"run.dir={login.folder}/there", folder=here)
        if not allowed:
            runner.assert_rejected(*overrides)
        elif "${" not in text:
            submission = runner.run(*overrides, folder=here)
            assert submission.status == 0, (text, submission.errors)
            shown = login.cluster.run("scontrol", "show", "job", submission.job).stdout
            found = dict(re.findall(r"^   (WorkDir|StdOut)=(.*)$", shown, re.MULTILINE))
            assert found == {"WorkDir": str(here), "StdOut": f"{here}/../../there/{text}/logs/job.log"}
            assert (elsewhere / "job.sbatch").exists()
            submitted += 1
    assert submitted >= (40 if TORTURE else 10)


def test_job_runs_in_a_folder_with_a_hostile_name(login: Login, runner: CommandRunner) -> None:
    """The code, the logs, the recipe and the working directory are all below it."""
    run = f"touch {CANARY}"
    folder = login.folder / f'-it\'s "a" $({run}) `{run}`; {run} & $HOME * ? [a] {{b}} # ~ ! Grüße'
    folder.mkdir()
    recipe = Login(login.cluster, folder).write_recipe(REPORT)
    recipe = recipe.rename(folder / f"-x $(touch {CANARY}) 'mine'.py")
    submission = runner.run(*ONE_NODE, "cluster.srun_extra=['--comment=x']", recipe=recipe, folder=folder)
    login.wait_for_end(submission)
    assert submission.run_dir.is_relative_to(folder)
    assert json.loads((submission.run_dir / "report.json").read_text())["folder"] == str(folder)
    assert (submission.run_dir / "code" / "recipe" / recipe.name).exists()
    assert (submission.run_dir / "logs" / "latest" / "rank_0.log").exists()


TRAINS = """
    from recipes import finetune
    finetune.main.__wrapped__(cfg)
    """


def test_secrets_in_the_environment_reach_the_rank_but_no_file(login: Login, runner: CommandRunner) -> None:
    """`make torture`: the run takes steps, saves a checkpoint, exports and generates samples."""
    secrets = {name: f"canary-{name.lower()}-4711" for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "AWS_KEY")}
    body = f"""
    from hashlib import sha256
    digests = {{name: sha256(os.environ.get(name, "").encode()).hexdigest() for name in {list(secrets)}}}
    (HERE / "report.json").write_text(json.dumps(digests))
    """ + (TRAINS if TORTURE else "")
    written = ("checkpoint.export=true", "generation.samples=1", "generation.prompts=[Hello]", "logging.examples=1")
    wandb = ["logging.wandb.mode=offline"] if TORTURE else []
    recipe = login.write_recipe(body)
    submission = runner.run(*ONE_NODE, *written, *wandb, "training.max_steps=2", recipe=recipe, **secrets)
    login.wait_for_end(submission)
    if TORTURE:
        assert result_of(submission.run_dir)["steps"] == 2
    digests = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in secrets.items()}
    assert json.loads((submission.run_dir / "report.json").read_text()) == digests
    files = [file for file in submission.run_dir.rglob("*") if file.is_file()]
    assert {"config.yaml", "environment.json", "job.sbatch", "job.log", "rank_0.log", "finetune.py"} <= {
        f.name for f in files
    }
    leaks = [file for file in files if any(value.encode() in file.read_bytes() for value in secrets.values())]
    assert leaks == []
