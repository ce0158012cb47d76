"""No reader unpickles: thirty files that run code when unpickled replace each file that a run or a script reads.

None of them runs, and Python's audit hook reports that no pickle looked up a class. Other errors are ignored; almost
all of the files are rejected by name. The manifest of a checkpoint gets the hashes of the replaced files, because an
attacker who can write files there can also hash them.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.checkpoint import StoredWeights, choose_checkpoint, find_checkpoint, load_checkpoint, load_model_weights
from components.checkpoint.manifest import FileRecord, HashedFile, Manifest, check_contents, list_checkpoints
from components.config.compose import read_frozen
from components.config.compose.frozen import frozen_text
from components.config.schema import FinetuneConfig
from components.config.schema.model import ModelConfig
from components.config.schema.run import CheckpointConfig, LoggingConfig, WandbConfig, WandbMode
from components.config.shape import read_shape
from components.data.sources.files import Location, columns_of, read_rows
from components.data.sources.split_files import files_of_split
from components.launch.run_directory_lock import open_run_directory
from components.launch.sweep.plan import read_sweep
from components.models import build_on_meta, load_tokenizer, load_weights, materialize
from components.models.tokenizer import byte_tokenizer
from components.observability import Reporter
from components.observability.result import render_model_card
from components.protocol.failures import read_reports
from tests.distributed.test_checkpoint_crash import save, start
from tests.tiny_models import tiny_folder
from tests.unit.gadgets import gadgets
from tests.unit.test_launch_run_directory import config

Read = Callable[[Path], Any]


def read_checkpoint(run_dir: Path) -> None:
    """Read a checkpoint in every way: resume, evaluation, export, listing."""
    path = run_dir / "checkpoints" / "step_1"
    readers: list[Callable[[], Any]] = [
        lambda: load_checkpoint(find_checkpoint(run_dir, "auto") or path, *start()),
        lambda: load_checkpoint(path, *start()),
        lambda: load_model_weights(path, start()[0]),
        lambda: [StoredWeights(choose_checkpoint(run_dir)).read(name, ()) for name in ("0.bias", "1.bias")],
        lambda: [check_contents(entry) for entry in list_checkpoints(run_dir, CheckpointConfig())],
    ]
    for reader in readers:
        with contextlib.suppress(Exception):
            reader()


def read_model(folder: Path) -> None:
    cfg = ModelConfig(path=str(folder))
    readers: list[Callable[[], Any]] = [
        lambda: read_shape(cfg),
        lambda: load_tokenizer(cfg),
        lambda: materialize(build_on_meta(cfg), "cpu"),
        lambda: load_weights(built(cfg), cfg),
    ]
    for reader in readers:
        with contextlib.suppress(Exception):
            reader()


def built(cfg: ModelConfig) -> Any:
    model = build_on_meta(cfg)
    materialize(model, "cpu")
    return model


def read_run(run_dir: Path) -> None:
    cfg = config(str(run_dir))
    quiet = LoggingConfig(wandb=WandbConfig(mode=WandbMode.disabled))
    readers: list[Callable[[], Any]] = [
        lambda: read_frozen(run_dir / "config.yaml", FinetuneConfig),
        lambda: open_run_directory(cfg, "finetune"),
        lambda: render_model_card(run_dir, {}, "alone"),
        lambda: Reporter(quiet, str(run_dir), enabled=True).continue_from(3),
        lambda: Reporter(quiet, str(run_dir), enabled=True).read(),
        lambda: read_reports(run_dir),
        lambda: read_sweep(run_dir),
    ]
    for reader in readers:
        with contextlib.suppress(Exception):
            reader()


def read_data(folder: Path) -> None:
    for split in ("train", "test"):
        with contextlib.suppress(Exception):
            for file in files_of_split(Location("data.path", str(folder), split)):
                with contextlib.suppress(Exception):
                    columns_of(file)
                with contextlib.suppress(Exception):
                    list(read_rows(file))


CHECKPOINT = ("manifest.json", "state.json", "random-00000.json", "shard-00001-model-00001-of-00001.safetensors",
              ".metadata", "optimizer.pt", "rng_state.pth", "model.safetensors.index.json")  # fmt: skip
RUN = ("config.yaml", "environment.json", "result.json", "metrics.jsonl", "rank_0.error.json", "sweep.json", "job_id")
MODEL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "vocab.json", "spiece.model",
         "added_tokens.json", "chat_template.jinja", "model.gguf", "training_args.bin")  # fmt: skip
DATA = ("train.jsonl", "train.json", "train.csv", "train.tsv", "train.parquet", "cache.pkl", "dataset_info.json",
        "state.json", "train.arrow")  # fmt: skip
TARGETS: list[tuple[str, str, Read]] = [
    *(("checkpoint", name, read_checkpoint) for name in CHECKPOINT),
    *(("run", name, read_run) for name in RUN),
    *(("model", name, read_model) for name in MODEL),
    *(("data", name, read_data) for name in DATA),
]


def create_files(kind: str, folder: Path) -> None:
    """Write the original files, of which one at a time is replaced."""
    if kind == "checkpoint":
        save(folder, 1)
        return
    folder.mkdir()
    if kind == "model":
        tiny_folder(folder, "llama")
        byte_tokenizer().save_pretrained(folder)
    elif kind == "run":
        (folder / "config.yaml").write_text(frozen_text(config(str(folder))))


def replace_file(kind: str, folder: Path, name: str, payload: bytes) -> None:
    """Replace or add a file."""
    parent = folder / "checkpoints" / "step_1" if kind == "checkpoint" else folder
    written: dict[str, FileRecord] = {}
    (parent / name).unlink(missing_ok=True)
    with HashedFile(parent / name, written) as file:
        file.write(payload)
    if kind == "checkpoint" and name != "manifest.json":
        manifest = Manifest.read(parent)
        manifest.files.update(written)
        (parent / "manifest.json").unlink()
        manifest.write(parent)


def in_a_fork(body: Callable[[], Any]) -> Any:
    """Call `body` in a child process, because an audit hook cannot be removed."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(1)
        sender.send_bytes(json.dumps(body()).encode())
        os._exit(0)

    process = context.Process(target=child)
    process.start()
    sender.close()
    try:
        return json.loads(receiver.recv_bytes())
    except EOFError:
        return None
    finally:
        process.join(30)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["checkpoint", "run", "model", "data"])
def test_no_gadget_is_unpickled(kind: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    payloads = gadgets(canary)
    assert len(payloads) == 30
    create_files(kind, tmp_path / "original")

    def body() -> list[str]:
        lookups: list[str] = []
        sys.addaudithook(lambda event, args: lookups.append(str(args)) if event == "pickle.find_class" else None)
        problems = []
        for number, (_, name, read) in enumerate(target for target in TARGETS if target[0] == kind):
            every = 1 if kind == "data" or os.environ.get("MESHBOOK_TORTURE") else 5 if kind == "checkpoint" else 10
            for gadget, (payload, _) in list(payloads.items())[number % every :: every]:
                folder = tmp_path / "copy"
                shutil.copytree(tmp_path / "original", folder)
                replace_file(kind, folder, name, payload)
                read(folder)
                if lookups or canary.exists():
                    problems.append(f"{gadget} in {name}: {lookups}{' ran' if canary.exists() else ''}")
                    lookups.clear()
                    canary.unlink(missing_ok=True)
                shutil.rmtree(folder)
        return problems

    assert in_a_fork(body) == []


def test_every_gadget_runs_and_is_detected_when_unpickled(tmp_path: Path) -> None:
    """Control for the test above: unpickling runs every gadget, and the audit hook reports it."""
    canary = tmp_path / "canary"
    payloads = gadgets(canary)

    def body() -> list[str]:
        lookups: list[str] = []
        sys.addaudithook(lambda event, args: lookups.append(str(args)) if event == "pickle.find_class" else None)
        harmless = []
        for gadget, (payload, run) in payloads.items():
            lookups.clear()
            with contextlib.suppress(Exception):
                run(payload)
            if not canary.exists() or not lookups:
                harmless.append(f"{gadget}: canary {canary.exists()}, audit {lookups}")
            canary.unlink(missing_ok=True)
        return harmless

    assert in_a_fork(body) == []


def test_readers_load_unmodified_files(tmp_path: Path) -> None:
    """Control: the readers above do reach the files, because unmodified ones load."""
    save(tmp_path, 1)
    path = find_checkpoint(tmp_path, "auto")
    assert path is not None
    assert load_checkpoint(path, *start())["step"] == 1
    assert len(StoredWeights(choose_checkpoint(tmp_path)).read("0.bias", (slice(0, 16),))) == 16
    folder = tiny_folder(tmp_path, "llama")
    load_weights(built(ModelConfig(path=str(folder))), ModelConfig(path=str(folder)))
