"""No message shows a secret, whichever way it leaves the process."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import pytest

from components.config.compose.command_line import compose_from_command_line
from components.config.compose.typed import typed
from components.config.schema import FinetuneConfig
from components.config.schema.run import LoggingConfig, WandbConfig, WandbMode
from components.launch.run_directory import start_record
from components.observability import Reporter
from components.observability.trackers import Trackers
from components.presentation import PlainConsole, new_table
from components.protocol.errors import ConfigError
from components.protocol.failures import Failure, error_file, print_failure, print_problems, write_report
from components.protocol.run_files import log_file, record_result
from components.protocol.secrets import masked
from components.terminal import guard_output, print_text
from tests.suites import in_torture
from tests.unit.test_secrets import CONF, CREDENTIALS, HARMLESS, HEX_KEY, LINES

KEY = "aB3dE6gH9jK2mN5pQ8sT"
QUOTED = 'it\'s "quoted" & 100%'
ENVIRONMENT = {"MY_TOKEN": "correct horse", "DB_PASSWORD": QUOTED, "HTTPS_PROXY": "http://u:p@ssw0rd@proxy:1"}
SIGNED_NAMES = ("token", "access_token", "api_key", "sig", "Signature")
OTHER_KINDS = {kind: text for kind, text in CREDENTIALS.items() if kind not in ("wandb", "url", "database")}
SECRETS = [  # (text of a message, the secret in it)
    *((f"x{text}" if kind == "azure" else text, text) for kind, text in OTHER_KINDS.items()),
    *((line, secret) for line, secret in LINES if len(secret) > 5),
    *((f"https://host/a?b=1&{name}={KEY}&c=2", KEY) for name in SIGNED_NAMES),
    *((f"https://host/a?{name}={KEY}%2F", KEY) for name in ("X-Amz-Signature", "X-Amz-Credential", "X-Goog-Signature")),
    ("https://user:hunter22@example.org/data.jsonl", "hunter22"),
    ("https://user:p@ss/w0rd2@example.org/data.jsonl".replace("/w", "w"), "w0rd2"),
    ("redis://:hunter22@db:5432/runs", "hunter22"),
    (f"https://{KEY}@example.org/me/x.git", KEY),
    (f"Authorization: Basic {KEY}==", KEY),
    (f"{{'headers': {{'Authorization': 'token {KEY}'}}}}", KEY),
    ("{'HF_TOKEN': 'two words', 'A': 1}", "two words"),
    ("{'API_KEY': ['hunter22', 'other words']}", "other words"),
    ("cluster.env={A:1,HF_TOKEN:hunter22}", "hunter22"),
    ("model.api_key=hunter22: no such key", "hunter22"),
    ("--wandb-api-key hunter22", "hunter22"),
    *((f"text {value} text", value) for value in ("correct horse", QUOTED, "p@ssw0rd")),
    ("the file " + quote(QUOTED, ""), "quoted"),
]


def _raised(text: str) -> Exception:
    try:
        raise OSError(f"request failed: {text}")
    except OSError as error:
        return error


def _logs(name: str) -> Callable[[str, Path], None]:
    """Return a way that logs the text with the traceback of an error that holds it."""

    def log(text: str, folder: Path) -> None:
        handler = logging.StreamHandler(sys.stderr)
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        try:
            logger.warning("request failed: %r", text, exc_info=_raised(text))
        finally:
            logger.removeHandler(handler)

    return log


def _rejected_argument(text: str, folder: Path) -> None:
    with suppress(SystemExit):
        argparse.ArgumentParser().parse_args([f"--unknown={text}"])


def _rejected_choice(text: str, folder: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["a", "b"])
    with suppress(SystemExit):
        parser.parse_args([text])


def _table(text: str, folder: Path) -> None:
    table = new_table(["name", "value"], {0, 1}, wrap=True)
    table.add_row(text, text)
    PlainConsole(width=60).print(table)


def _tracker(text: str, folder: Path) -> None:
    class Failing:
        def start(self, run: object) -> None:
            raise _raised(text)

    (folder / "metrics.jsonl").touch()
    Trackers({"wandb": Failing()}, str(folder), PlainConsole(width=10_000))  # type: ignore[dict-item]


def _reporter(text: str, folder: Path) -> None:
    with Reporter(LoggingConfig(wandb=WandbConfig(mode=WandbMode.disabled)), str(folder), enabled=True) as reporter:
        reporter.print(text)


def _rank_report(text: str, folder: Path) -> None:
    write_report(folder, 0, _raised(text))
    print(error_file(folder, 0).read_text())


def _rejected_on_a_rank(text: str, folder: Path) -> None:
    write_report(folder, 0, ConfigError([f"data.path={text}: no such file", text]))
    print(error_file(folder, 0).read_text())


def _killed(text: str, folder: Path) -> None:
    log_file(folder, 0).write_text(text)
    print_failure(Failure(0, "was ended by SIGKILL", None), folder)


def _result(text: str, folder: Path) -> None:
    record_result(folder, {"status": "failed", "error": text})
    print((folder / "result.json").read_text())


def _command(text: str, folder: Path) -> None:
    sys.argv = ["finetune.py", text]
    record = start_record("finetune", Path("/x/finetune.py"), 1, 0)
    print(json.dumps(record))


def _rejected_values(text: str, folder: Path) -> None:
    """As in a config file, whose values are in no argument."""
    values = {"training": {"max_steps": text, "unknown": text}, "cluster": {"env": {"A": [text]}}, "model": text}
    with pytest.raises(ConfigError) as error:
        typed(values, FinetuneConfig)
    assert len(error.value.problems) > 3
    print_problems(error.value.problems)


WAYS: dict[str, Callable[[str, Path], object]] = {
    "config error": lambda text, _: print_problems([f"data.path={text}: no such file; give one", text]),
    "notice": lambda text, _: print_text(f"{text}: moved", {"nested": [text]}),
    "print of a library": lambda text, _: print(text, [text], file=sys.stderr),
    "write of a library": lambda text, _: sys.stdout.write(f"{json.dumps({'value': text})}\n"),
    "lines of a library": lambda text, _: sys.stderr.writelines([f"{text}\n"]),
    "log": _logs("components.any"),
    "log of a library": _logs("library"),
    "unknown option": _rejected_argument,
    "invalid choice": _rejected_choice,
    "traceback": lambda text, _: sys.excepthook(OSError, _raised(text), None),
    "report of a rank": _rank_report,
    "config error of a rank": _rejected_on_a_rank,
    "log of a rank that was killed": _killed,
    "values of a config": lambda text, _: print_text({"cluster": {"setup": [text, {"nested": (text,)}]}}),
    "result.json": _result,
    "environment.json": _command,
    "table": _table,
    "line of the reporter": _reporter,
    "tracker": _tracker,
    "rejected values": _rejected_values,
}


@pytest.fixture
def secret_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["finetune.py"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())


@pytest.mark.usefixtures("secret_variables")
@pytest.mark.parametrize("way", WAYS)
def test_no_message_shows_a_secret(way: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert len(SECRETS) >= 60
    assert len(WAYS) == 20
    guard_output(sys.stdout, sys.stderr)
    for text, secret in SECRETS:
        WAYS[way](text, tmp_path)
        printed = "".join(capsys.readouterr())
        assert printed.strip()
        joined = "".join(printed.split())  # of a table, whose cells are wrapped
        for form in (secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], quote(secret)):
            assert "".join(form.split()) not in joined, (text, printed)


HARMLESS_OUTPUT = [
    *("/cache/models--x/snapshots/" + HEX_KEY, f"commit {HEX_KEY}", f"sha256 {HEX_KEY}{HEX_KEY[:24]}", "hf_llama"),
    *("~/data/x.jsonl", "outputs/2026-01-02/12-30-00", "run finetune-smollm2-lora-r16", "pad_token=<pad>", "key=value"),
    *("HuggingFaceTB/SmolLM2-135M-Instruct", "pad_token=[PAD], eos_token='</s>'", "pad_token_id=50256", "token 7"),
    *("tokens=1,024 tokens/s=5.2e3", "{'eos_token': '<|im_end|>', 'bos_token_id': 1}", "num_key_value_heads=3"),
    *("write KEY=VALUE", "keys: a", "export HF_TOKEN=$HF_TOKEN", "set HF_TOKEN=... in the shell", "--max-tokens 100"),
    *("export WANDB_API_KEY=<your key>", "lr=2e-4 loss=1.234 grad_norm=0.5", "http://127.0.0.1:8080/v1"),
    *("http://[::1]:8080/a@b", "s3://bucket/key?versionId=3", "git@github.com:me/x.git", "mail a@b.org", "sk-learn"),
    *("https://example.org/a?b=1&page=2", "postgresql://user@db/runs", "Bearer of news", "the token is not valid"),
    *("cluster.env.HF_TOKEN: holds a secret, according to its name", "model.chat_template=null: must be set"),
    *("training.max_steps=x: must be a whole number", "a password: must be given", "PWD=/home/me", "tokenizer=bytes"),
    *("2 problems with this run:", "task-force-of-2000-people", "secret sharing of keys", "Authorization failed"),
    *("authorization: none", "rank 0: exited with status 1", "signature=main(cfg)", "ssh -p 22 host"),
]


@pytest.mark.usefixtures("secret_variables")
def test_harmless_output_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    guard_output(sys.stdout, sys.stderr)
    assert len(HARMLESS_OUTPUT) >= 40
    for text in [*HARMLESS_OUTPUT, *HARMLESS]:
        print_text(text)
        assert capsys.readouterr().out == f"{text}\n"


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("cluster.env.HF_TOKEN=hunter22", "cluster.env.HF_TOKEN: holds a secret"),
        ("data.nonsense='two words'", "data.nonsense=***: no such key"),
    ],
)
def test_answers_to_the_command_line_show_no_secret(
    argument: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_TOKEN", "two words")
    given = [argument, "--cfg", "job"]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *given])
    with pytest.raises(ConfigError) as error:
        compose_from_command_line("finetune", FinetuneConfig, CONF.parent / "recipes", arguments=given)
    print_problems(error.value.problems)
    output = capsys.readouterr()
    assert reason in output.err
    assert "hunter22" not in output.out + output.err
    assert "two words" not in output.out + output.err


def test_masked_texts_stay_readable() -> None:
    assert masked(f"data.path=https://u:hunter22@host/a?x=1&token={KEY}&y=2: no such file") == (
        "data.path=https://u:***@host/a?x=1&token=***&y=2: no such file"
    )
    assert masked(masked("HF_TOKEN=abc x")) == masked("HF_TOKEN=abc x") == "HF_TOKEN=*** x"


HF, SIGNED = CREDENTIALS["hf"], f"https://b.example/x.jsonl?X-Amz-Signature={KEY}&token=hunter22"
LINES_OF_FINETUNE = [
    *(["model=wrong"], ["model=broken"], [f"model.path={HF}"], [f"~{HF}"]),
    *(["data=jsonl", f"data.path={url}"] for url in (SIGNED, f"s3://{HF}/x", f"'{SIGNED}'")),
    *([f"training.max_steps={value}"] for value in (HF, "${oc.env:PIN}", "${oc.decode:${oc.env:PIN}}")),
    *([*option, f"model.path={HF}"] for option in (["-m"], ["--cfg", "job"], ["--help"])),
    *([f"cluster={name}", "cluster.env={A: 1, API_KEY: hunter22}"] for name in ("slurm_1node", "k8s_1node")),
    *([f"{option}={HF}"] for option in ("--config-dir", "--config-name", "--cfg", "--nonsense", "run.dir")),
    ["model.path=${oc.env:PIN}", "--cfg", "job", "--resolve"],
]
TOOLS = ("export", "average", "score", "compare", "plan", "doctor")
COMMANDS = [
    *(["recipes/finetune.py", *arguments] for arguments in LINES_OF_FINETUNE),
    ["recipes/evaluate.py", f"run=/nowhere/{HF}"],
    *([f"scripts/{tool}.py", f"--nonsense={HF}", SIGNED] for tool in TOOLS),
    *([f"scripts/{tool}.py", HF] for tool in ("export", "checkpoints", "chat", "sweep_report")),
    ["scripts/tokenize_corpus.py", SIGNED, "--tokenizer", HF, "--out", "out"],
    *(["-m", "meshbook", *arguments] for arguments in (["help", HF], [HF], ["copy", HF, "x.py"])),
]


@in_torture
@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_no_command_prints_a_secret(command: list[str], tmp_path: Path) -> None:
    """Real processes, with config files that hold secrets."""
    options = tmp_path / "conf" / "model"
    options.mkdir(parents=True)
    (options / "wrong.yaml").write_text("defaults: [/schema/model/causal_lm@_here_]\npath: x\napi_key: hunter22\n")
    (options / "broken.yaml").write_text(f"path: {HF}\n  revision: [x\n")
    root = CONF.parent
    arguments = command if command[0] == "-m" else [str(root / command[0]), *command[1:]]
    environment = os.environ | ENVIRONMENT | {"PIN": "sesame-open-wide", "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
    options = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, check=False, **options)
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert "Traceback" not in output
    for secret in (HF, KEY, "hunter22", "sesame-open-wide", "correct horse", "p@ssw0rd"):
        assert secret not in output
