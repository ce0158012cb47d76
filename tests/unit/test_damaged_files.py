"""Damage of any file that is read again: an error with a sentence or a skipped file, within a second, nothing else.

Each draw damages one file of a kind: values, keys and numbers of its JSON, its bytes, its length, or what it is. The
seed of a draw is in the name of the failing file; DRAWS=1000 is the number in `make torture`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from xxhash import xxh3_128_hexdigest

from components.checkpoint.manifest import (
    Manifest,
    ManifestError,
    check_contents,
    list_checkpoints,
    newest_complete,
    write_json,
)
from components.config.compose.frozen import frozen_text, intact_copy, read_frozen
from components.config.model_files import ModelFiles
from components.config.schema import FinetuneConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import ModelConfig
from components.config.schema.run import CheckpointConfig
from components.config.shape import read_shape
from components.config.stored_run import MetricsLog, StoredRun, read_run
from components.config.teacher_files import TeacherHeader, check_stored_teacher
from components.conversation import Prompt
from components.data import cache
from components.data.examples import Example
from components.data.sources.rows import BadRowReport
from components.data.token_store.manifest import (
    _checksum,
    read_manifest,
    shard_problems,
    vocabulary_problems,
    write_manifest,
)
from components.data.token_store.rows import TokenRows
from components.data.token_store.writer import read_entry, write_shard
from components.launch import run_directory_lease
from components.launch.run_directory_lock import _check_second_start, _check_source
from components.launch.sweep.plan import Point, Sweep, read_record, read_sweep
from components.models.tokenizer import byte_tokenizer
from components.models.weights.weight_sources import find_safetensors
from components.protocol.errors import ConfigError
from components.protocol.failures import error_file, first_failure, read_reports, write_report
from components.training.objectives import reference_model
from components.training.objectives.teacher import StoredTeacher
from components.training.objectives.teacher_store import TargetSlots, write_file
from tests.suites import TORTURE
from tests.unit.test_preference_objectives import LOG_PROBS, Pairs, scored, with_reference  # noqa: F401
from tests.unit.test_teacher import blocks
from tests.unit.token_shards import documents_of, store_of

DRAWS = 1000 if TORTURE else 60
SLOW = ("state.json", "config.yaml", "known numbers")
"""Kinds of files that take 0.1 s to compose or to write; an eighth of the draws."""
SECONDS = 2.0
"""Processor time of a draw. The files are small; what is read of a large one is limited."""
TOKENIZER = byte_tokenizer()


def a_config(folder: Path, **run: Any) -> FinetuneConfig:
    cfg = FinetuneConfig(
        model=ModelConfig(path=None, init="random", tokenizer="bytes", config={"model_type": "llama"}),
        data=DocsDataConfig(),
    )
    cfg.run.dir = str(folder)
    for key, value in run.items():
        setattr(cfg.run, key, value)
    return cfg


def write_checkpoint(folder: Path) -> Path:
    step = folder / "checkpoints" / "step_1"
    step.mkdir(parents=True)
    state = {"step": 1, "config": frozen_text(a_config(folder)), "extra": {"state": {"step": 1}}}
    files = write_json(step / "state.json", state)
    Manifest(
        step=1, serial=1, mesh={"world": 1}, versions={"torch": "2"}, files=files, saved="2026-01-01T00:00:00"
    ).write(step)
    return step


def checkpoint_manifest(folder: Path) -> Path:
    return write_checkpoint(folder) / "manifest.json"


def read_checkpoints(file: Path) -> None:
    with suppress(ManifestError):
        Manifest.read(file.parent)
    for entry in list_checkpoints(file.parents[2], CheckpointConfig()):
        if entry.manifest is not None:
            check_contents(entry)
    newest_complete(file.parents[2])


def state(folder: Path) -> Path:
    return write_checkpoint(folder) / "state.json"


def read_state(file: Path) -> None:
    intact_copy(file.parents[2])
    _check_second_start(file.parents[2], a_config(file.parents[2], resume="/some/checkpoint"))
    _check_source(a_config(file.parents[2], resume=str(file.parent)))


def run_directory(folder: Path) -> Path:
    (folder / "config.yaml").write_text("model: {path: x, config: {model_type: llama}}\n")
    log = MetricsLog(folder)
    for step in range(1, 6):
        log.append({"step": step, "loss": 1 / step, "tokens": 10 * step, "tokens_per_second": 5.0})
    result = {"steps": 5, "mesh": "tp=2 x dp=1", "eval_loss": 1.5, "wall_seconds": 3.0, "status": "ok"}
    result |= {"peak_memory_bytes": 5, "peak_reserved_bytes": 6, "tokens_per_second": 2.5, "eval_accuracy": 0.5}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "environment.json").write_text(json.dumps({"recipe": "finetune", "started": "2026-01-01T00:00:00"}))
    return folder


def read_run_directory(file: Path) -> None:
    run = read_run(file.parent)
    for name in (each for each in dir(StoredRun) if isinstance(getattr(StoredRun, each, None), property)):
        getattr(run, name)
    [run.last(metric) for metric in run.metrics]
    if file.name == "config.yaml":
        read_frozen(file, FinetuneConfig)
    MetricsLog(file.parent).continue_from(3)


def frozen_config(folder: Path) -> Path:
    run_directory(folder)
    (folder / "config.yaml").write_text(frozen_text(a_config(folder)))
    return folder / "config.yaml"


def report(folder: Path) -> Path:
    write_report(folder, 0, RuntimeError("lost"))
    return error_file(folder, 0)


def read_error_reports(file: Path) -> None:
    if (failure := first_failure([], read_reports(file.parent))) is not None:
        str(failure.error), failure.status


def a_lease(folder: Path) -> Path:
    (folder / ".lease").mkdir()
    (folder / ".lease" / "1").write_text(json.dumps(asdict(run_directory_lease.Holder.this(os.environ))))
    return folder / ".lease" / "1"


def read_lease(file: Path) -> None:
    run_directory_lease.is_held(file.parents[1])
    with suppress(OSError):  # which `take_lease` reports
        str(run_directory_lease._parse(run_directory_lease._text(file) or ""))


def sweep_plan(folder: Path) -> Path:
    points = [Point(0, "p0", {"a": "1"}, ["a=1"])]
    Sweep(folder, "id", "finetune", Path("/x.py"), folder, "command", [], ["a"], points).write()
    return folder / "sweep.json"


def read_plan(file: Path) -> None:
    sweep = read_sweep(file.parent)
    [read_record(sweep, point) for point in sweep.points]


def teacher(folder: Path) -> Path:
    slots = TargetSlots(np.asarray([0, 4, 4, 13], np.int64))
    header = TeacherHeader(samples="s", tokenizer="t", vocabulary=200, top_k=3, temperature=1.5, teacher="T")
    for split in ("train", "eval"):
        write_file(folder / f"top_k_{split}.safetensors", header, slots, blocks(13))
    return folder / "top_k_train.safetensors"


def read_teacher(file: Path) -> None:
    if problems := check_stored_teacher(str(file.parent), 1.5, 200):
        raise ConfigError(problems)
    stored = StoredTeacher(file)
    [stored.of_row(row) for row in range(stored.rows)]


def store(folder: Path) -> Path:
    return write_manifest(store_of(folder, [documents_of(1, 40), documents_of(2, 30)]))


def shard(folder: Path) -> Path:
    return store(folder).parent / sorted(each.name for each in folder.glob("*.safetensors"))[0]


def read_store(file: Path) -> None:
    manifest = read_manifest(str(file.parent))
    if problems := shard_problems(manifest, "k") + vocabulary_problems(manifest, "k", size=300, tokenizer_hash=None):
        raise ConfigError(problems)
    rows = TokenRows(manifest, TOKENIZER, source="", seq_len=64)
    [rows[index] for index in range(min(len(rows), 50))]
    for each in file.parent.glob("*.safetensors"):
        with suppress(ValueError):  # which its callers report
            read_entry(each)


def reference(folder: Path) -> Path:
    with_reference(folder, resumes=False)
    (file,) = folder.iterdir()
    return file


def read_reference(file: Path) -> None:
    assert torch.equal(with_reference(file.parent, resumes=True), LOG_PROBS)
    found, problem = reference_model._read(file, Pairs(), "w")  # type: ignore[arg-type]
    assert (found is None) == bool(problem)


def tokens(folder: Path) -> Path:
    file = folder / f"{'a' * 32}.safetensors"
    result = json.dumps({"prompts": [["a", [1]]], "bad": asdict(BadRowReport()), "unused": [], "notes": []})
    summary = {"result": result, "hash": xxh3_128_hexdigest(result.encode())}
    write_shard(file, [[Example([1, 2, 3], [-100, 2, 3])] * 9], 2, summary)
    return file


def read_token_cache(file: Path) -> None:
    """Whatever is read of a damaged entry is what was written."""
    if (found := cache._read_entry(file)) is not None:
        assert (found.tokens.targets, len(found.tokens.starts), found.prompts) == (18, 9, [Prompt("a", [1])])
        assert found.tokens.ids[:].tolist() == [1, 2, 3] * 9


def known(folder: Path) -> Path:
    file = tokens(folder)
    os.utime(file, (1, 1))
    read_token_cache(file)
    return file.with_suffix(".known.json")


def model_config(folder: Path) -> Path:
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 99, "architectures": ["LlamaForCausalLM"]}))
    return folder / "config.json"


def index(folder: Path) -> Path:
    names = {f"layer.{i}": f"model-{i % 2}.safetensors" for i in range(6)}
    for name in names.values():
        (folder / name).write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder / "model.safetensors.index.json"


KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], object]]] = {
    "checkpoint manifest": (checkpoint_manifest, read_checkpoints),
    "state.json": (state, read_state),
    "metrics.jsonl": (lambda folder: run_directory(folder) / "metrics.jsonl", read_run_directory),
    "result.json": (lambda folder: run_directory(folder) / "result.json", read_run_directory),
    "environment.json": (lambda folder: run_directory(folder) / "environment.json", read_run_directory),
    "config.yaml": (frozen_config, read_run_directory),
    "error report": (report, read_error_reports),
    "lease": (a_lease, read_lease),
    "sweep plan": (sweep_plan, read_plan),
    "stored teacher": (teacher, read_teacher),
    "token store": (store, read_store),
    "token shard": (shard, read_store),
    "reference": (reference, read_reference),
    "token cache": (tokens, read_token_cache),
    "known numbers": (known, lambda file: read_token_cache(file.parent / f"{'a' * 32}.safetensors")),
    "config.json": (model_config, lambda file: read_shape(ModelConfig(path=str(file.parent)))),
    "index of weights": (index, lambda file: find_safetensors(ModelFiles(str(file.parent)), None)),
}

VALUES = [
    *(None, True, False, 0, -1, 1, 7, 1.5, -0.0, 10**30, -(10**18), 2**63, float("nan"), float("inf"), 1e308),
    *("", "x", "../..", "/dev/zero", "a\0b", "\ud800", "\x1b[31m", "9" * 400),
    *([], {}, [[]], [1], ["a"], {"a": 1}, {"": {}}),
]
TEXTS = [
    *("[" * 100_000, '{"a":' * 50_000, "9" * 5000, '"\\ud800"', "NaN", "", "[1]", "null", "{}", "5", '"text"'),
    *("\0" * 50, "---\n- &a [*a]"),
]


def changed(value: Any, draw: random.Random) -> Any:
    """Return a JSON value with one value within it replaced, removed, renamed or repeated."""
    value = copy.deepcopy(value)
    parent, place = [value], 0
    while draw.random() < 0.85 and isinstance(parent[place], list | dict) and parent[place]:  # type: ignore[index]
        parent = parent[place]  # type: ignore[assignment,index]
        place = draw.choice(list(parent)) if isinstance(parent, dict) else draw.randrange(len(parent))  # type: ignore[assignment]
    action = draw.random()
    if action < 0.7 or parent is value:
        parent[place] = draw.choice(VALUES)
    elif action < 0.85:
        del parent[place]
    elif isinstance(parent, dict):
        parent[str(draw.choice(VALUES))] = parent.pop(place)
    else:
        parent.append(parent[place])
    return value


def signed(value: Any) -> Any:
    """Return a manifest with a hash of its own that is right, so that readers look at its values."""
    if isinstance(value, dict) and "body" in value:
        digest = hashlib.sha256(json.dumps(value["body"], sort_keys=True).encode()).hexdigest()
        return value | {"sha256": digest}
    if isinstance(value, dict):
        values = {name: each for name, each in value.items() if name != "checksum"}
        return values | ({"checksum": _checksum(values)} if "checksum" in value else {})
    return value


def structure_damaged(content: bytes, draw: random.Random) -> bytes | None:
    """Return content with a change in its JSON: of the file, of a line, or of a safetensors header and its texts."""
    if content[:1] == b"{":
        lines = content.splitlines(keepends=True) if content.count(b"}\n{") else [content]
        number = draw.randrange(len(lines))
        value = changed(json.loads(lines[number]), draw)
        value = signed(value) if draw.random() < 0.7 else value
        lines[number] = json.dumps(value).encode() + b"\n" * (len(lines) > 1)
        return b"".join(lines)
    size = int.from_bytes(content[:8], "little")
    if size > len(content):
        return None
    header = json.loads(content[8 : 8 + size])
    texts = [name for name, text in header["__metadata__"].items() if text[:1] == "{"]
    if texts and draw.random() < 0.5:
        name = draw.choice(texts)
        values = json.loads(header["__metadata__"][name])
        text = json.dumps(changed(values, draw)) if draw.random() < 0.8 else draw.choice(TEXTS)
        header["__metadata__"][name] = text
    else:
        header = changed(header, draw)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Return content with one damage."""
    if draw.random() < 0.6 and (found := structure_damaged(content, draw)) is not None:
        return found
    place, end = sorted(draw.choices(range(len(content) + 1), k=2))
    flipped = bytearray(content)
    flipped[min(place, len(content) - 1)] ^= 1 << draw.randrange(8)
    return draw.choice(
        [
            bytes(flipped),
            content[:place],
            content[:place] + content[end:],
            content[:end] + content[place:],
            content[:place] + draw.randbytes(20) + content[place + 20 :],
            draw.randbytes(draw.randrange(200)),
            draw.choice(TEXTS).encode(),
            content + draw.choice(TEXTS).encode(),
            (1 << draw.randrange(64)).to_bytes(8, "little") + content[8:],
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_reported_or_skipped(
    kind: str,
    tmp_path: Path,
    scored: list[int],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    write, read = KINDS[kind]
    (tmp_path / "intact").mkdir()
    file = write(tmp_path / "intact")
    read(file)  # raises nothing
    content, below = file.read_bytes(), file.relative_to(tmp_path / "intact")
    shutil.rmtree(tmp_path / "intact")
    (tmp_path / "intact").mkdir()
    assert write(tmp_path / "intact") == file
    for seed in range(DRAWS // 8 if kind in SLOW else DRAWS):
        draw, folder = random.Random(f"{kind} {seed}"), tmp_path / f"seed_{seed}"
        shutil.copytree(tmp_path / "intact", folder, symlinks=True)
        damage_file(folder / below, content, draw, seed)
        began = time.process_time()
        with suppress(ConfigError, ManifestError):
            read(folder / below)
        assert time.process_time() - began < SECONDS, f"{kind}, seed {seed}"
        shutil.rmtree(folder)


def damage_file(file: Path, content: bytes, draw: random.Random, seed: int) -> None:
    """Damage a file; the first draws replace it by a pipe, a folder, a link to nothing or to a device, or remove it."""
    if seed < 5:
        file.unlink()
    if seed == 0:
        os.mkfifo(file)
    elif seed == 1:
        file.mkdir()
    elif seed in (2, 3):
        file.symlink_to("/dev/zero" if seed == 2 else "nothing")
    elif seed > 4:
        file.write_bytes(damaged(content, draw))
