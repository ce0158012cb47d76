"""Hostile strings from a command line to a job: they arrive byte-equal or are refused in one message; none is run."""

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
from tests.config.commands import Commands, served
from tests.slurm.login import CPU, PROJECT, QUICK, TORTURE, Answer, Login, result_of
from tests.slurm.strings import CANARY, HOSTILE, UNSTORABLE, quoted

ONE = ("cluster=slurm_1node", "cluster.procs_per_node=1", *CPU, *QUICK)
HELD = (*ONE, "+cluster.sbatch_extra.hold=''", "cluster.snapshot=false")
"""A job that is only looked at."""
EVERY = [text for texts in HOSTILE.values() for text in texts]
SOME = EVERY if TORTURE else [texts[-1] for texts in HOSTILE.values()]

TELL = """
commands = [Path(f"/proc/{entry}/cmdline") for entry in os.listdir("/proc") if entry.isdigit()]
words = [file.read_bytes().decode().split("\\0") for file in commands if file.exists()]
told = {
    "env": {name: value for name, value in os.environ.items() if name.startswith(("ENV_", "SETUP_"))},
    "prompts": cfg.generation.prompts,
    "srun": next(line for line in words if line[0].endswith("srun") and cfg.cluster.srun_extra[0] in line),
    "folder": os.getcwd(),
}
(HERE / "told.json").write_text(json.dumps(told))
"""


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    """Types a command in a fraction of a second."""
    with served() as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_was_run(login: Login) -> Iterator[None]:
    """No string has made its file: neither among a run's files nor where the daemons, the tests and root live."""
    yield
    assert not [*login.folder.rglob(CANARY), *login.cluster.base.rglob(CANARY)]
    places = (PROJECT, Path.cwd(), Path.home(), Path("/"), Path("/tmp"))
    assert not [place for place in places if (place / CANARY).exists()]


class Typist:
    """Types commands in a person's folder, and keeps which jobs came of it."""

    def __init__(self, login: Login, commands: Commands) -> None:
        self.login, self.commands = login, commands
        self.environment = {"SLURM_CONF": login.cluster.environment["SLURM_CONF"]}
        self.recipe = login.write_recipe("pass", "idle.py")
        self.before, self.jobs = login.jobs_ever(), set[str]()

    def type(
        self, *arguments: str, recipe: Path | None = None, folder: Path | None = None, **environment: str
    ) -> Answer:
        ended = self.commands.run(
            recipe or self.recipe, arguments, folder or self.login.folder, **self.environment, **environment
        )
        answer = Answer(ended.status, ended.output, ended.errors, 0.0)
        if answer.status == 0:
            self.jobs.add(answer.job)
        return answer

    def refused(self, *arguments: str, folder: Path | None = None) -> list[str]:
        """The problems that a command is refused for; nothing is left of it."""
        there = sorted((folder or self.login.folder).rglob("*"))
        answer = self.type(*arguments, folder=folder)
        assert (answer.status, answer.output) == (2, ""), (arguments, answer)
        assert sorted((folder or self.login.folder).rglob("*")) == there
        told = answer.errors.splitlines()
        assert "Traceback" not in answer.errors, answer.errors
        assert len(told) == 1 or told.pop(0) == f"{len(told)} problems with this run:", answer.errors
        return told


@pytest.fixture
def typist(login: Login, commands: Commands) -> Iterator[Typist]:
    typing = Typist(login, commands)
    yield typing
    assert login.jobs_ever() - typing.before == typing.jobs


def listed(texts: Iterable[str]) -> str:
    return "[" + ",".join(map(quoted, texts)) + "]"


def on_one_line(text: str) -> bool:
    return all(character.isprintable() or character == "\t" for character in text)


def test_every_string_reaches_the_rank(login: Login, typist: Typist) -> None:
    """As an override, as a variable, behind an export in setup, and as an argument of srun's: in one job."""
    texts = [text for text in EVERY if text not in UNSTORABLE]
    variables = {f"ENV_{number}": text for number, text in enumerate(texts)}
    shell = {f"SETUP_{number}": text for number, text in enumerate(texts) if on_one_line(text)}
    comments = [f"--comment={text}" for text in shell.values()]
    assert len(texts) >= 40
    assert len(shell) >= 40
    answer = typist.type(
        *(*ONE, "generation.samples=0", f"generation.prompts={listed(texts)}"),
        *(f"cluster.env.{name}={quoted(text)}" for name, text in variables.items()),
        f"cluster.setup={listed(f'export {name}={shlex.quote(text)}' for name, text in shell.items())}",
        f"cluster.srun_extra={listed(comments)}",
        recipe=login.write_recipe(TELL),
    )
    login.ended(answer)
    told = json.loads((answer.run_dir / "told.json").read_text())
    assert told["env"] == variables | shell
    assert told["prompts"] == texts
    assert [word for word in told["srun"] if word.startswith("--comment=")] == comments


def test_what_cannot_arrive_is_refused(typist: Typist) -> None:
    two_lines = [text for text in EVERY if not on_one_line(text) and text not in UNSTORABLE]
    assert len(two_lines) >= 10
    texts = listed(f"--a={text}" for text in two_lines)
    options = [f"cluster.sbatch_extra.a{number}={quoted(text)}" for number, text in enumerate(two_lines)]
    told = typist.refused(*ONE, f"cluster.setup={texts}", f"cluster.srun_extra={texts}", *options)
    assert len(told) == 3 * len(two_lines)
    for number, text in enumerate(two_lines):
        for said in (f"cluster.setup={f'--a={text}'!r}: must be", f"cluster: {f'--a={text}'!r} must be"):
            assert sum(line.startswith(said) for line in told) == 1, said
        assert sum(line.startswith(f"cluster.sbatch_extra.a{number}={text!r}: must be") for line in told) == 1
    for text in UNSTORABLE:
        lists = [f"{key}={listed([text])}" for key in ("cluster.setup", "cluster.srun_extra", "generation.prompts")]
        texts = [f"{key}={quoted(text)}" for key in ("cluster.env.A", "cluster.sbatch_extra.comment")]
        told = typist.refused(*ONE, *lists, *texts)
        assert len(told) == 5
        assert all(repr(text) in line for line in told)


UNFINISHED = [
    *("echo 'a", 'echo "$(a', "echo `a", "echo \\", "cat <<end", "cat <<'end' >&2", "if true; then", "f() {", "}"),
    *("fi", "(", "a &&", "x |", "}; {", "case a in"),
]


def test_a_setup_line_that_would_swallow_the_next_is_refused(typist: Typist) -> None:
    told = typist.refused(*ONE, f"cluster.setup={listed([*UNFINISHED, 'true', '# a remark', 'module load x'])}")
    assert len(told) == len(UNFINISHED)
    for line, said in zip(UNFINISHED, told, strict=True):
        assert said.startswith(f"cluster.setup={line!r}: bash cannot parse it"), said


def test_names_that_the_script_has_taken_are_refused(typist: Typist) -> None:
    names = ("run_dir", "status", "MASTER_PORT", "UID")
    told = typist.refused(*ONE, *(f"cluster.env.{name}=x" for name in names))
    assert [said.partition(":")[0] for said in told] == [f"cluster.env.{name}" for name in names]


def test_srun_arguments_are_options(typist: Typist) -> None:
    """Anything else srun would take for the program."""
    words = ["", "-", "--", "x", f"$(touch {CANARY})", " --label"]
    told = typist.refused(*ONE, f"cluster.srun_extra={listed(words)}")
    assert [said.partition(": ")[2].partition(" must")[0] for said in told] == [repr(word) for word in words]


def test_names_and_comments(login: Login, typist: Typist) -> None:
    """As squeue shows them; the name is in the config too."""
    sent = {}
    for text in SOME:
        overrides = (*HELD, f"run.name={quoted(text)}", f"cluster.sbatch_extra.comment={quoted(text)}")
        if text.isprintable() and text.strip() and text not in UNSTORABLE:
            answer = typist.type(*overrides)
            assert answer.status == 0, (text, answer.errors)
            assert read_frozen(answer.run_dir / "config.yaml", FinetuneConfig).run.name == text
            sent[answer.job] = text
        else:
            assert any(told.startswith("run.name") for told in typist.refused(*overrides))
    assert len(sent) >= (40 if TORTURE else 10)
    for field in ("%j", "%k"):
        shown = login.cluster.run("squeue", "--noheader", f"--format=%i|{field}").stdout
        assert dict(line.split("|", 1) for line in shown.splitlines()) == sent


def test_folders(login: Login, typist: Typist) -> None:
    """As the run directory and as the folder in which the command is typed."""
    sent = 0
    for text in dict.fromkeys(text for text in SOME if text.strip() and "/" not in text):
        here = login.folder / "here" / text
        here.mkdir(parents=True)
        elsewhere, overrides = login.folder / "there" / text, (*HELD, f"run.dir={quoted(f'../../there/{text}')}")
        fits = text.isprintable() and not set(text) & set("%\\:")
        if not fits or "${" in text:  # Hydra does not bear the latter in the name of the folder it starts from
            typist.refused(*HELD, f"run.dir={login.folder}/there", folder=here)
        if not fits:
            typist.refused(*overrides)
        elif "${" not in text:
            answer = typist.type(*overrides, folder=here)
            assert answer.status == 0, (text, answer.errors)
            shown = login.cluster.run("scontrol", "show", "job", answer.job).stdout
            found = dict(re.findall(r"^   (WorkDir|StdOut)=(.*)$", shown, re.MULTILINE))
            assert found == {"WorkDir": str(here), "StdOut": f"{here}/../../there/{text}/logs/job.log"}
            assert (elsewhere / "job.sbatch").exists()
            sent += 1
    assert sent >= (40 if TORTURE else 10)


def test_a_job_runs_in_a_hostile_folder(login: Login, typist: Typist) -> None:
    """Its code, its logs, the recipe and the folder of the command, all in one."""
    run = f"touch {CANARY}"
    folder = login.folder / f'-it\'s "a" $({run}) `{run}`; {run} & $HOME * ? [a] {{b}} # ~ ! Grüße'
    folder.mkdir()
    recipe = Login(login.cluster, folder).write_recipe(TELL)
    recipe = recipe.rename(folder / f"-x $(touch {CANARY}) 'mine'.py")
    answer = typist.type(*ONE, "cluster.srun_extra=['--comment=x']", recipe=recipe, folder=folder)
    login.ended(answer)
    assert answer.run_dir.is_relative_to(folder)
    assert json.loads((answer.run_dir / "told.json").read_text())["folder"] == str(folder)
    assert (answer.run_dir / "code" / "recipe" / recipe.name).exists()
    assert (answer.run_dir / "logs" / "latest" / "rank_0.log").exists()


def test_secrets_of_the_shell_reach_the_rank_and_no_file(login: Login, typist: Typist) -> None:
    """Of a run that does everything a run does: steps, checkpoint, export, samples."""
    secrets = {name: f"canary-{name.lower()}-4711" for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "AWS_KEY")}
    body = f"""
    from hashlib import sha256
    told = {{name: sha256(os.environ.get(name, "").encode()).hexdigest() for name in {list(secrets)}}}
    (HERE / "told.json").write_text(json.dumps(told))
    from recipes import finetune
    finetune.main.__wrapped__(cfg)
    """
    written = ("checkpoint.export=true", "generation.samples=1", "generation.prompts=[Hello]", "logging.examples=1")
    wandb = ["logging.wandb.mode=offline"] if TORTURE else []
    recipe = login.write_recipe(body)
    answer = typist.type(*ONE, *written, *wandb, "training.max_steps=2", recipe=recipe, **secrets)
    login.ended(answer)
    assert result_of(answer.run_dir)["steps"] == 2
    digests = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in secrets.items()}
    assert json.loads((answer.run_dir / "told.json").read_text()) == digests
    files = [file for file in answer.run_dir.rglob("*") if file.is_file()]
    assert {"config.yaml", "environment.json", "job.sbatch", "job.log", "rank_0.log", "finetune.py"} <= {
        f.name for f in files
    }
    leaks = [file for file in files if any(value.encode() in file.read_bytes() for value in secrets.values())]
    assert leaks == []
