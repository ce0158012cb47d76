"""scripts/export.py on checkpoints of real meshes writes the same files as the run, and transformers loads them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from components import checkpoint, distributed, models
from components.batch import Batch
from components.config.compose.frozen import frozen_text
from components.config.schema import FinetuneConfig, ModelConfig, ParallelismConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import WeightInit
from components.config.schema.run import CheckpointConfig
from components.config.stored_run import MetricsLog
from components.models.weights.weight_files import WeightFiles, write_file
from scripts.export import main
from tests.frozen import frozen
from tests.harness import run_ranks
from tests.tiny_models import FAMILIES, LLAMA3_ROPE, SIZES, logits

LLAMA = {"model_type": "llama", **SIZES, "vocab_size": 264}
TINY: dict[str, dict[str, Any]] = {
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "untied": {**LLAMA, "tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE},
    "deep": {**LLAMA, "tie_word_embeddings": False, "num_hidden_layers": 4},
    "mixtral": FAMILIES["mixtral"],
    "gpt2": FAMILIES["gpt2"],
}
PP2_TP2 = {"strategy": "fsdp2", "dp_shard": 1, "pp": 2, "tp": 2}
EP2 = {"strategy": "fsdp2", "dp_shard": 1, "ep": 2}
FSDP2 = {"strategy": "fsdp2", "dp_shard": 2}
FSDP4 = {"strategy": "fsdp2", "dp_shard": 4}
HSDP = {"strategy": "fsdp2", "dp_shard": 2, "dp_replicate": 2}
TP2 = {"strategy": "fsdp2", "dp_shard": 1, "tp": 2}
INTERLEAVED = {"strategy": "fsdp2", "dp_shard": 1, "pp": 2, "pp_schedule": "Interleaved1F1B"}
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    4: [("tied", PP2_TP2), ("untied", PP2_TP2), ("tied", HSDP), ("mixtral", FSDP4)],
    2: [("mixtral", EP2), ("tied", FSDP2), ("gpt2", FSDP2), ("deep", INTERLEAVED), ("untied", TP2)],
}
SHARD = 30_000
STATE = {"step": 3, "optimizer": "SGD", "tokens": 12345, "skipped": 0, "first_loss": 5.5, "last_loss": 4.25}


def run_config(run_dir: Path, name: str, **model: Any) -> FinetuneConfig:
    """Create the run directory of a model from scratch, with the files that a launcher and a run write."""
    cfg = FinetuneConfig(
        model=ModelConfig(**{"init": WeightInit.random, "config": TINY.get(name), "tokenizer": "bytes", **model}),
        data=DocsDataConfig(),
    )
    cfg.run.dir = str(run_dir)
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(frozen_text(cfg))
    record = {
        "command": "recipes/finetune.py data.path='a|b' X_TOKEN=hf_abcdefghijklmnopqrstuvwx",
        "versions": {"torch": "2.0"},
        "git": {"commit": "c0ffee" * 6 + "beef", "dirty": True},
    }
    (run_dir / "environment.json").write_text(json.dumps(record))
    log = MetricsLog(run_dir)
    for step in (0, 2, 4):
        log.append({"step": step, "eval_loss": 6.0 - step})
    return cfg


def save(cfg: FinetuneConfig, parallelism: dict[str, Any] | None, step: int = 3) -> Any:
    """Save and export a model as the recipe does; return its state dict with global shapes, gathered by torch."""
    model = models.build_on_meta(cfg.model)
    if parallelism is not None:
        config = ParallelismConfig(**parallelism)
        distributed.parallelize(model, distributed.build_mesh(config, "cpu"), config, torch.float32)
    models.materialize(model, "cpu")
    models.fill_weights(model, cfg.model, seed=step)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() + 0.01
    optimizer.step()
    checkpoint.save_checkpoint(cfg.run.dir, step, model, optimizer, {"state": STATE}, CheckpointConfig(keep=5))
    models.export_model(model, models.load_tokenizer(cfg.model), Path(cfg.run.dir) / "export", shard_bytes=SHARD)
    full_tensors = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()
    }
    return {name: value.clone() for name, value in full_tensors.items()}


def export(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("world", CASES)
def test_export_of_any_mesh_equals_the_export_of_the_run(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [run_config(tmp_path / str(index), name) for index, (name, _) in enumerate(CASES[world])]

    def body(rank: int) -> list[Batch]:
        gathered = []
        for cfg, (_, parallelism) in zip(configs, CASES[world], strict=True):
            held = [None] * dist.get_world_size()
            dist.all_gather_object(held, save(cfg, parallelism))
            gathered.append({name: value for each in held for name, value in each.items()})
        return gathered

    gathered = run_ranks(world, body)[0]
    monkeypatch.setattr(
        "components.models.weights.weight_files._BLOCK_BYTES", 2000
    )  # blocks that begin and end within shards
    for cfg, expected in zip(configs, gathered, strict=True):
        run_dir = Path(cfg.run.dir)
        assert export(run_dir, "--shard-size", SHARD) == 0
        run_export, script_export = run_dir / "export", run_dir / "export-step_3"
        assert sorted(path.name for path in script_export.iterdir()) == sorted(
            path.name for path in run_export.iterdir()
        )
        assert len(list(script_export.glob("*.safetensors"))) > 3
        for path in run_export.iterdir():
            assert path.name == "README.md" or path.read_bytes() == (script_export / path.name).read_bytes(), path.name
        loaded = AutoModelForCausalLM.from_pretrained(script_export, dtype="auto")
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, expected[name]), name
        if loaded.config.model_type != "mixtral":  # its experts have other names on disk
            index = json.loads((run_export / "model.safetensors.index.json").read_text())["weight_map"]
            assert list(index) == [name for name in loaded.state_dict() if name in index]  # independent of the stages
            assert len(index) == len(list(loaded.parameters()))  # a tied head is not stored
        assert AutoTokenizer.from_pretrained(script_export)("ab").input_ids == [97, 98]
        sizes = [file.stat().st_size for file in script_export.glob("*.safetensors")]
        largest = max(value.numel() * value.element_size() for value in weights(script_export).values())
        assert max(sizes) < max(SHARD, largest) + 8_000


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory of a single process with the checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    cfg = run_config(folder, "tied")
    save(cfg, None, 2)
    save(cfg, None, 3)
    return folder


def test_newest_or_named_checkpoint_is_exported_in_another_dtype(plain: Path, tmp_path: Path) -> None:
    assert export(plain, "--out", tmp_path / "new") == 0
    (tmp_path / "old").mkdir()  # an empty folder may exist
    assert export(plain / "checkpoints" / "step_2", "--out", tmp_path / "old", "--dtype", "bfloat16") == 0
    new, old, run_export = weights(tmp_path / "new"), weights(tmp_path / "old"), weights(plain / "export")
    assert new.keys() == run_export.keys() == old.keys()
    assert all(torch.equal(new[name], value) for name, value in run_export.items())
    assert {value.dtype for value in old.values()} == {torch.bfloat16}
    stored = weights(plain / "checkpoints" / "step_2")
    assert all(torch.equal(value, stored[f"model/{name}"].bfloat16()) for name, value in old.items())
    assert not torch.equal(new["model.embed_tokens.weight"].bfloat16(), old["model.embed_tokens.weight"])
    assert logits(AutoModelForCausalLM.from_pretrained(tmp_path / "old", dtype="auto")).dtype == torch.bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_model_card_describes_the_training_and_contains_no_secret(plain: Path, tmp_path: Path) -> None:
    assert export(plain / "checkpoints" / "step_3", "--out", tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (
        "| base model | none: llama from scratch |",
        "| optimizer | SGD, lr ",
        "| target tokens | 12,345 |",
        "| loss | 5.5000 in the first step, 4.2500 in the last |",
        "| held-out loss | 6.0000 after 0 steps, 4.0000 after 2 steps |",  # step 4 is after these weights
        "| mesh | 1 process |",
        "| versions | torch 2.0 |",
        "beef with uncommitted changes |",
        "left out: it looks like it contains a secret",
    ):
        assert text in card
    assert "hf_abc" not in card


def edit_config(old: str, new: str) -> Callable[[Path], None]:
    def edit(run_dir: Path) -> None:
        file = run_dir / "config.yaml"
        file.write_text(frozen(file.read_text().partition("\n")[2].replace(old, new)))

    return edit


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


NEWEST = "checkpoints/step_3"
WEIGHTS = f"{NEWEST}/shard-00001-model-00001-of-00001.safetensors"
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped": lambda run_dir: flip_bit(run_dir / WEIGHTS),
    "truncated": lambda run_dir: os.truncate(run_dir / WEIGHTS, 1000),
    "removed": lambda run_dir: (run_dir / WEIGHTS).unlink(),
    "no manifest": lambda run_dir: (run_dir / NEWEST / "manifest.json").unlink(),
    "no config": lambda run_dir: (run_dir / "config.yaml").unlink(),
    "another model": edit_config("num_hidden_layers: 2", "num_hidden_layers: 3"),
    "another shape": edit_config("intermediate_size: 48", "intermediate_size: 64"),
    "code": edit_config("trust_remote_code: false", "trust_remote_code: true"),
    "unfinished": lambda run_dir: (run_dir / NEWEST).rename(run_dir / f"{NEWEST}.tmp-1234"),
}
ARGUMENTS: dict[str, list[str]] = {
    "unfinished": [f"run/{NEWEST}.tmp-1234"],
    "no checkpoint": ["."],
    "not there": ["nothing"],
    "dtype": ["run", "--dtype", "float8"],
    "size": ["run", "--shard-size", "4TBs"],
    "adapter dtype": ["run", "--adapter", "--dtype", "bfloat16"],
    "adapter size": ["run", "--adapter", "--shard-size", "1GB"],
    "taken": ["run", "--out", "run/checkpoints"],
    "no folder": ["run", "--out", "run/config.yaml/out"],
}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("flipped", "step_3: not a complete checkpoint: shard-00001-model-00001-of-00001.safetensors is damaged"),
        ("truncated", "shard-00001-model-00001-of-00001.safetensors has 1000 bytes instead of"),
        ("removed", "shard-00001-model-00001-of-00001.safetensors is missing"),
        ("no manifest", "step_3: not a complete checkpoint: manifest.json is missing; give the path of another one"),
        ("no config", "config.yaml: cannot be read as the config of a run"),
        ("another model", "lacks tensors of this model: model.layers.2."),
        ("another shape", "mlp.down_proj.weight is (32, 48) in the checkpoint and (32, 64) in this model"),
        ("code", "then add --trust-remote-code"),
        ("unfinished", "step_3.tmp-1234: an unfinished save"),
        ("no checkpoint", "neither a checkpoint (no manifest.json) nor a run directory (no checkpoints/)"),
        ("not there", "nothing: no such folder"),
        ("dtype", "--dtype float8: must be one of bfloat16, float16, float32, float64"),
        ("size", "--shard-size 4TBs: must be a size such as 500MB"),
        ("adapter dtype", "--adapter: writes one file in the stored dtype; leave out --dtype and --shard-size"),
        ("adapter size", "--adapter: writes one file in the stored dtype; leave out --dtype and --shard-size"),
        ("taken", "exists and is not an empty folder"),
        ("no folder", "the export could not be written"),
    ],
)
def test_invalid_arguments_and_damage_are_reported_without_a_traceback(
    kind: str,
    message: str,
    plain: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(plain, tmp_path / "run")
    DAMAGE.get(kind, lambda run_dir: None)(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert export(*["--out", "out", *ARGUMENTS.get(kind, ["run"])]) == 2
    stderr = capsys.readouterr().err
    assert message in stderr
    assert "Traceback" not in stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_failed_export_leaves_no_files(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []

    def fail_after_five(self: WeightFiles, name: str, blocks: Any) -> None:
        written.append(name)
        if len(written) > 5:
            raise OSError(28, "No space left on device")
        write(self, name, blocks)

    write = WeightFiles.write
    monkeypatch.setattr(WeightFiles, "write", fail_after_five)
    assert export(plain, "--out", tmp_path / "out") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_written_files_equal_those_of_safetensors(tmp_path: Path) -> None:
    """Also for odd numbers of narrow values, non-ASCII names, scalars and empty tensors."""
    tensors = {
        "b": torch.arange(7).to(torch.bfloat16),
        "z.\u00e4": torch.randn(3, 5, dtype=torch.float64),
        "a": torch.randn(2, 3),
        "flag": torch.tensor([True, False, True]),
        "one": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "i": torch.tensor(7),
    }
    files = WeightFiles(tmp_path, {name: each.to("meta") for name, each in tensors.items()}, 10**6)
    for name, each in tensors.items():
        files.write(name, each.split(2) if each.ndim else [each])
    files.finish()
    save_file(tensors, tmp_path / "expected", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes()
    write_file(tmp_path / "adapter", tensors)
    assert (tmp_path / "adapter").read_bytes() == (tmp_path / "expected").read_bytes()
    other = WeightFiles(tmp_path, {"a": torch.empty(4, 2)}, 10**6)
    (tmp_path / "model.safetensors").unlink()
    for wrong in (torch.empty(3, 2), torch.empty(4, 2, dtype=torch.float64), torch.empty(4, 3)):
        with pytest.raises(ValueError, match="a: .* expected"):
            other.write("a", [wrong])
    with pytest.raises(ValueError, match="0 tensors were written, but 1"):
        other.finish()


MEASURE_PEAK = """
import re, sys
import transformers.models.llama.modeling_llama
from components import checkpoint, models
from scripts.export import main
assert len(sys.argv) == 1 or main(sys.argv[1:]) == 0
print("peak", int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024)
"""


def peak_memory_of_export(*arguments: str) -> int:
    """Return the peak of a new process that exports a run; without arguments it only imports what an export uses."""
    command = [sys.executable, "-c", MEASURE_PEAK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return int(done.stdout.split()[-1])


def test_export_does_not_load_the_model_into_memory(tmp_path: Path) -> None:
    """For 150 MB in two tensors, peak memory beyond that of a tiny model is much less than one of the tensors."""
    peak_memory, sizes = {}, {}
    for name, vocabulary in (("tiny", 264), ("large", 29_296)):
        values = {**TINY["untied"], "hidden_size": 640, "num_attention_heads": 10, "vocab_size": vocabulary}
        cfg = run_config(tmp_path / name, name, config=values)
        model = models.build_on_meta(cfg.model)
        models.materialize(model, "cpu")
        models.fill_weights(model, cfg.model, seed=1)
        checkpoint.save_checkpoint(
            cfg.run.dir, 3, model, torch.optim.SGD(model.parameters()), {}, CheckpointConfig(keep=1)
        )
        peak_memory[name] = peak_memory_of_export(cfg.run.dir)
        sizes[name] = (tmp_path / name / "export-step_3" / "model.safetensors").stat().st_size
    assert sizes["large"] > 150e6
    assert peak_memory["large"] - peak_memory["tiny"] < 40e6
    assert peak_memory["tiny"] - peak_memory_of_export() < 40e6
