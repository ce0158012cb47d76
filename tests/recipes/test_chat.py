"""scripts/chat.py on what two small runs saved, against transformers and PEFT, and evaluate.py run=RUN."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from rich.cells import cell_len
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from components.models import Sampling
from components.models.tokenizer import byte_tokenizer
from scripts import chat
from scripts._chat.answer_screen import WordWrap
from scripts._chat.chat_model import load_chat_model
from scripts._chat.chat_source import AdapterSource, CheckpointSource, ExportSource, find_source
from scripts._chat.conversation import StreamedText
from tests.recipes.small_jobs import RECIPES, write_rows, write_teacher

ANSWERS = {
    "who?": "one two three four five six",
    "what?": "seven eight nine ten eleven",
    "why?": "twelve é thirteen 中文 fourteen",
}
JOB = (
    *(
        "training.global_batch_size=8",
        "training.micro_batch_size=8",
        "training.seq_len=128",
        "optimizer.lr=1e-2",
        "cluster.device=cpu",
    ),
    *("generation.samples=0", 'generation.prompts=["who?","what?"]', "generation.max_new_tokens=20"),
    *("logging.plot=false", "logging.examples=0"),
)
CHATS = ("data=chat_jsonl", "data.path=chat.jsonl", "data.eval_path=chat.jsonl")
SYSTEM = "Answer with words."
PAIRS = ("data=jsonl", "data.path=pairs.jsonl", "data.eval_path=pairs.jsonl", f"data.system_prompt={SYSTEM}")
FULL = (
    *JOB,
    *CHATS,
    "model=tiny",
    "parallelism=single",
    "training.max_steps=40",
    "training.ema_decay=0.5",
    "run.dir=full",
)
LORA = (*JOB, *PAIRS, "model.path=full/export", "peft=lora", "training.max_steps=60", "run.dir=lora")
TOKENS = 20
SHORT = ("--max-new-tokens", str(TOKENS))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, fork_programs: None) -> Path:
    """A folder with the run directories full and lora, and the printed generations in full.txt."""
    folder = tmp_path_factory.mktemp("chat")
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in ANSWERS.items()]
    rows.append([*rows[0], rows[1][0], {"role": "assistant", "content": "again ten"}])
    write_rows(folder / "chat.jsonl", [{"messages": messages} for messages in rows] * 8)
    write_rows(folder / "pairs.jsonl", [{"prompt": q, "response": a} for q, a in ANSWERS.items()] * 8)
    for arguments in (FULL, LORA):
        done = recipe(folder, "finetune", *arguments)
        (folder / f"{arguments[-1].removeprefix('run.dir=')}.txt").write_text(done)
    return folder


def recipe(folder: Path, name: str, *arguments: str) -> str:
    """Run a recipe in a folder; return its output."""
    command = [sys.executable, str(RECIPES / f"{name}.py"), *arguments]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def talk(monkeypatch: pytest.MonkeyPatch, lines: Sequence[str], *arguments: str) -> str:
    """Return what the chat prints for lines of stdin without a terminal."""
    typed = io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode()))
    printed = io.StringIO()
    with monkeypatch.context() as patched:  # undone at once: capsys would be closed first, and its closed stream stay
        patched.setattr(sys, "stdin", typed)
        patched.setattr(sys, "stdout", printed)
        assert chat.main([*arguments, *SHORT]) == 0
    return printed.getvalue()


def reference(model: Any, tokenizer: Any, *conversation: str, system: str = "") -> str:
    """Return transformers' greedy answer to a conversation of alternating users and assistants."""
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(conversation)]
    messages = [*([{"role": "system", "content": system}] if system else []), *messages]
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    stop = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tokens = model.generate(**given, do_sample=False, max_new_tokens=TOKENS, **stop)[0, given["input_ids"].shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True).strip()


def loaded(folder: Path, adapter: Path | None = None) -> tuple[Any, Any]:
    """Return an export as transformers loads it, with an adapter as PEFT loads it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return (model if adapter is None else PeftModel.from_pretrained(model, adapter)), AutoTokenizer.from_pretrained(
        folder
    )


def test_adapter_is_not_applied_to_other_base_weights(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter, base = (Path(shutil.copytree(trained / name, tmp_path / name)) for name in ("lora/adapter", "full/export"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    assert load_chat_model(find_source(adapter), torch.device("cpu")).notes == []
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert chat.main([str(adapter), *SHORT]) == 2
    assert "the adapter was trained over other base weights (fingerprint" in " ".join(capsys.readouterr().err.split())
    file = adapter / "adapter_model.safetensors"
    for header, note in (({}, "does not state the weights"), ({"base_format": "nf4"}, "weights in 4 bits (QLoRA)")):
        save_file(load_file(file), file, {"format": "pt", **header})
        (found,) = load_chat_model(find_source(adapter), torch.device("cpu")).notes
        assert note in found


@pytest.mark.parametrize(
    ("given", "export", "adapter"),
    [
        ("full", "full/export", None),
        ("full/checkpoints/step_40", "full/export", None),
        ("full/export", "full/export", None),
        ("lora/checkpoints/step_60", "lora/export", None),
        ("lora/adapter", "full/export", "lora/adapter"),
    ],
)
def test_answers_equal_those_of_transformers(
    given: str, export: str, adapter: str | None, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained)
    """The system message of a run's data is part of the conversations with its model."""
    model, tokenizer = loaded(trained / export, None if adapter is None else trained / adapter)
    system = SYSTEM if given.startswith("lora") else ""
    first = reference(model, tokenizer, "who?", system=system)
    second = reference(model, tokenizer, "who?", first, "what?", system=system)
    alone = reference(model, tokenizer, "what?", system=system)
    assert second != alone
    assert talk(monkeypatch, ["who?", "what?", "/reset", "", "what?"], given) == f"{first}\n{second}\n{alone}\n"


@pytest.mark.parametrize("name", ["full", "lora"])
def test_answers_equal_the_generations_of_the_run(name: str, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generated = re.findall(r"answer after [1-9]\d* steps: (.+)", (trained / f"{name}.txt").read_text())
    assert len(set(generated)) == 2
    (checkpoint,) = (trained / name / "checkpoints").iterdir()
    monkeypatch.chdir(trained)
    assert talk(monkeypatch, ["who?", "/reset", "what?"], str(checkpoint)).splitlines() == generated


def test_averaged_weights_are_used_if_the_run_evaluates_them(trained: Path) -> None:
    run = trained / "full"
    exported = load_file(run / "export" / "model.safetensors")  # the average
    model = load_chat_model(find_source(run / "checkpoints" / "step_40"), torch.device("cpu")).model
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in exported.items())


def test_run_directory_selects_the_export_unless_a_checkpoint_is_newer(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.symlink_to(trained / "lora")
    manifest, export = run / "checkpoints" / "step_60" / "manifest.json", run / "export" / "config.json"
    assert isinstance(find_source(run), ExportSource)
    written = manifest.stat().st_mtime_ns
    try:
        os.utime(manifest, ns=(0, export.stat().st_mtime_ns + 1))
        source = find_source(run)
    finally:
        os.utime(manifest, ns=(written, written))
    assert isinstance(source, CheckpointSource)
    assert (source.step, source.peft.adapts, source.averaged) == (60, True, False)
    assert isinstance(find_source(trained / "lora" / "adapter"), AdapterSource)


@pytest.mark.parametrize(("name", "mesh"), [("full", ()), ("lora", ("parallelism=fsdp2", "cluster.procs_per_node=2"))])
def test_evaluation_of_a_run_equals_its_eval_loss(name: str, mesh: tuple[str, ...], trained: Path) -> None:
    options = (f"run={name}", "generation.samples=0", "cluster.device=cpu", f"run.dir=evaluated_{name}", *mesh)
    recipe(trained, "evaluate", *options)
    losses = [json.loads((trained / run / "result.json").read_text()) for run in (name, f"evaluated_{name}")]
    assert losses[1]["eval_loss"] == pytest.approx(losses[0]["eval_loss"], rel=1e-5 if mesh else 1e-6)
    assert losses[0]["eval_loss"] != losses[0]["first_eval_loss"]


def test_text_arrives_token_by_token(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    tokens: list[int] = []
    choose = Sampling.choose

    def recorded(*given: Any, **options: Any) -> torch.Tensor:
        seen.append(sys.stdout.getvalue())
        tokens.append(int(token := choose(*given, **options)))
        return token

    monkeypatch.setattr(Sampling, "choose", recorded)
    tokenizer = byte_tokenizer()
    answer = talk(monkeypatch, ["why?"], str(trained / "full")).strip()
    assert len(answer.encode()) > 10
    for count, text in enumerate(seen):  # what was printed before token `count` was chosen
        assert text == tokenizer.decode(tokens[:count]).rstrip("\ufffd").strip()


def test_system_message_and_unknown_command(trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    export = str(trained / "full" / "export")
    plain = talk(monkeypatch, ["who?"], export)
    system = ("--system", "twelve fourteen")
    told = talk(monkeypatch, ["who?"], export, *system)
    assert told != plain
    assert talk(monkeypatch, ["/system", "who?", "/exit", "what?"], export, *system) == plain
    assert talk(monkeypatch, ["/system twelve fourteen", "who?"], export) == told
    typed = io.TextIOWrapper(io.BytesIO(b"/restart\n"))
    monkeypatch.setattr(sys, "stdin", typed)
    assert chat.main([export]) == 2
    assert "/restart: no such command; use /reset, /system TEXT or /exit" in capsys.readouterr().err


def test_sampled_answers_depend_on_the_seed(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export, hot = str(trained / "full" / "export"), ("--temperature", "1.5", "--top-p", "0.99")
    answers = [talk(monkeypatch, ["why?"], export, *hot, "--seed", seed) for seed in ("1", "1", "2")]
    assert answers[0] == answers[1] != answers[2]
    greedy = talk(monkeypatch, ["why?"], export)
    assert talk(monkeypatch, ["why?"], export, "--temperature", "1.5", "--top-k", "1") == greedy


def test_pipe_gets_answers_only(trained: Path) -> None:
    command = [sys.executable, str(RECIPES.parent / "scripts" / "chat.py"), "full", *SHORT]
    done = subprocess.run(command, cwd=trained, check=False, input=b"who?\n\xff\n", capture_output=True)
    assert done.returncode == 2
    assert done.stdout.decode().count("\n") == 1
    assert b"\x1b" not in done.stdout
    assert "line 2 of stdin: is not valid UTF-8" in done.stderr.decode()


def test_terminal_stops_an_answer_on_ctrl_c(tmp_path: Path) -> None:
    """The model answers with byte 0 without end, which is escaped."""
    write_teacher(tmp_path / "model")
    endless = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        endless.model.norm.weight.zero_()  # all logits are 0
    endless.save_pretrained(tmp_path / "model")
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(RECIPES.parent / "scripts" / "chat.py"), "model", "--max-new-tokens", "1900"],
        cwd=tmp_path, env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}, start_new_session=True,
        stdin=other_end, stdout=other_end, stderr=other_end,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 (so that Ctrl-C is a signal)
    )  # fmt: skip
    os.close(other_end)
    shown = ""

    def wait(condition: Callable[[str], object]) -> None:
        """Read until the text since the last key satisfies a condition."""
        nonlocal shown
        start, deadline = len(shown), time.monotonic() + 240
        while not condition(shown[start:]):
            assert time.monotonic() < deadline, shown
            if select.select([terminal], [], [], 0.5)[0]:
                shown += os.read(terminal, 1 << 16).decode()

    prompt = re.compile(r">(\x1b\[0m)? $")
    wait(prompt.search)
    assert "model: llama, 0.0" in shown
    os.write(terminal, b"hello\n")
    wait(lambda text: text.count(r"\x00") > 60)  # three lines
    os.write(terminal, b"\x03")
    wait(prompt.search)
    assert "[stopped]" in shown
    os.write(terminal, b"/reset\n")
    wait(prompt.search)
    assert "the turns are forgotten" in shown
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        os.write(terminal, b"\x03")  # again if the key came before readline waited for it
        time.sleep(0.5)
    assert process.returncode == 128 + signal.SIGINT
    os.close(terminal)
    assert shown.count(r"\x00") < 1900
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (12, ["one two", "three four", "中文 five", "sixseveneig", "htnineten", "", "A  eleven,", "twelve"]),
        (40, ["one two three four 中文 five", "sixseveneightnineten", "", "A  eleven, twelve"]),
        (80, ["one two three four 中文 five sixseveneightnineten", "", "A  eleven, twelve"]),
    ],
)
def test_words_wrap_at_the_edge(columns: int, expected: list[str]) -> None:
    wrap = WordWrap(columns)
    written = "".join(map(wrap.add, "one two three four 中文 five sixseveneightnineten\n\nA  eleven, twelve"))
    lines = [""]
    for part in re.findall(r"\x1b\[\d*[DK]|.|\n", written):
        if part == "\n":
            lines.append("")
        elif part[0] != "\x1b":
            lines[-1] += part
        elif part != "\x1b[K":
            lines[-1] = lines[-1][: -int(part[2:-1])]
        assert cell_len(lines[-1]) < columns
    assert [line.rstrip() for line in lines] == expected


def test_streamed_text_holds_back_incomplete_characters() -> None:
    tokenizer = byte_tokenizer()
    text = StreamedText(tokenizer)
    pieces = [text.add(byte) for byte in "  aé \n中 b".encode()] + [text.add(0xE4), text.finish()]
    assert pieces == ["", "", "a", "", "é", "", "", "", "", " \n中", "", " b", "", "\ufffd"]
    assert text.printed == tokenizer.decode([*"  aé \n中 b".encode(), 0xE4]).strip()
