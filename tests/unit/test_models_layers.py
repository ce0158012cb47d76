"""Decoder layers, random initialization, generation and export in one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from components.config.schema.model import DType, ModelConfig, WeightInit
from components.config.schema.parallelism import ActivationCheckpointing
from components.config.schema.run import PeftConfig, PeftExport, PeftMethod
from components.models import (
    RowsForward,
    add_adapters,
    build_on_meta,
    checkpoint_activations,
    compile_layers,
    count_parameters,
    decoder_layers,
    export_model,
    export_run,
    fill_weights,
    generate,
    initialize_weights,
    load_tokenizer,
    materialize,
)
from components.models.layers import _is_truncated, remove_truncated_libraries
from components.models.tokenizer import byte_tokenizer
from components.models.weights.weight_files import NewFolder, WeightFiles
from components.protocol.errors import ConfigError
from tests.tiny_models import FAMILIES, filled, logits, reference, tiny_config, tiny_folder

FULL, ALTERNATE = ActivationCheckpointing.full, ActivationCheckpointing.alternate
SELECTIVE = ActivationCheckpointing.selective


def from_scratch(family: str, seed: int = 0, dtype: DType = DType.float32) -> PreTrainedModel:
    config = dict(FAMILIES[family])
    cfg = ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=config, dtype=dtype)
    return filled(cfg, seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layers_are_found_in_every_family(family: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    assert decoder_layers(model) == list(model.transformer.h if family == "gpt2" else model.model.layers)


@pytest.mark.parametrize(("text", "vision"), [(2, 2), (2, 5), (5, 2)])
def test_layers_of_an_image_encoder_are_not_decoder_layers(text: int, vision: int) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model(
        "gemma3",
        text_config={**sizes, "num_hidden_layers": text, "num_key_value_heads": 1, "vocab_size": 64},
        vision_config={**sizes, "num_hidden_layers": vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert decoder_layers(model) == list(model.model.language_model.layers)


def test_tied_parameters_are_counted_once() -> None:
    model = from_scratch("llama")
    model.model.norm.weight.requires_grad_(False)
    counts = count_parameters(model)
    named = sum(value.numel() for value in model.state_dict().values())
    assert counts.total == named - model.lm_head.weight.numel()  # tied: the state dict lists it under two names
    assert counts.trainable == counts.total - 32
    assert counts.local_bytes == 4 * counts.total


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_follow_the_initialization_of_the_family(family: str) -> None:
    model = from_scratch(family)
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(tiny_config(family))
    for name, value in expected.named_parameters():
        ours = model.get_parameter(name).detach()
        assert ours.mean().item() == pytest.approx(value.mean().item(), abs=0.01), name
        if value.std() == 0:  # ones and zeros
            assert torch.equal(ours, value), name
        else:  # normal, with a smaller std for GPT-2's residual projections
            assert ours.std().item() == pytest.approx(value.std().item(), rel=0.15), name


def test_random_weights_depend_only_on_the_seed_and_the_parameter_name() -> None:
    before = torch.get_rng_state()
    model, again, other = from_scratch("llama"), from_scratch("llama"), from_scratch("llama", seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    up, down = (model.model.layers[0].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)
    assert not torch.equal(up, down)
    for name, value in model.named_parameters():
        assert torch.equal(value, again.get_parameter(name))
        if "norm" not in name:
            assert not torch.equal(value, other.get_parameter(name))
    wide = from_scratch("llama", dtype=DType.float64)
    assert torch.equal(wide.lm_head.weight.float(), model.lm_head.weight)


def test_parameter_without_an_initialization_rule_is_rejected() -> None:
    class Odd(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.odd = torch.nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        model = Odd._from_config(tiny_config("llama"))
    materialize(model, "cpu")
    with pytest.raises(ConfigError, match=r"Odd has no initialization for odd"):
        initialize_weights(model, 0)


def test_offloaded_parameters_are_on_cpu_and_buffers_on_the_device() -> None:
    cfg = ModelConfig(path=None, init=WeightInit.random, tokenizer="bytes", config=dict(FAMILIES["llama"]))
    model = build_on_meta(cfg)
    materialize(model, "meta", offload=True)  # the only other device that every machine has
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    materialize(model, "cpu")
    assert torch.equal(
        model.model.rotary_emb.inv_freq, LlamaForCausalLM(tiny_config("llama")).model.rotary_emb.inv_freq
    )


def train_step(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.arange(48).reshape(2, 24) % 272
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("policy", [FULL, ALTERNATE, SELECTIVE])
def test_recomputed_layers_give_the_same_gradients_with_dropout(family: str, policy: ActivationCheckpointing) -> None:
    plain, recomputed = from_scratch(family), from_scratch(family)
    for model in (plain, recomputed):  # GPT-2 has dropout by default
        for layer in decoder_layers(model) if family == "llama" else []:
            layer.self_attn.attention_dropout = 0.2
    names = list(recomputed.state_dict())
    checkpoint_activations(recomputed, policy)
    assert list(recomputed.state_dict()) == names
    calls = [0] * 2
    for index, layer in enumerate(decoder_layers(recomputed)):
        next(layer.children()).register_forward_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    expected, gradients = train_step(plain), train_step(recomputed)
    assert all(torch.equal(gradients[name], value) for name, value in expected.items())
    assert calls == ([2, 1] if policy == ALTERNATE else [2, 2])


@pytest.mark.slow
@pytest.mark.parametrize("compile_first", [True, False])
def test_compiled_layers_keep_parameter_names_and_gradients(compile_first: bool) -> None:
    torch.set_num_threads(1)
    plain, compiled = from_scratch("llama"), from_scratch("llama")
    names = list(compiled.state_dict())
    steps = [lambda: compile_layers(compiled, backend="aot_eager"), lambda: checkpoint_activations(compiled, FULL)]
    for step in steps if compile_first else reversed(steps):
        step()
    assert list(compiled.state_dict()) == names
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    expected, gradients = train_step(plain), train_step(compiled)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"]
    for name, value in expected.items():
        assert torch.allclose(gradients[name], value, rtol=1e-4, atol=1e-6), name


PROMPT = "*7 1,"


def greedy(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    """Return a model, a tokenizer without a chat template, and the 12 tokens that transformers generates."""
    model = reference(folder)
    model.generation_config.eos_token_id = None
    tokenizer = load_tokenizer(ModelConfig(path="unused", tokenizer="bytes"))
    tokenizer.chat_template = None
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
    assert len(set(expected)) > 2
    return model, tokenizer, expected


def without_cache(model: PreTrainedModel) -> RowsForward:
    """Forward without a KV cache, as under pp."""
    return RowsForward(model, keeps_cache=False)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("cached", [True, False])
def test_generation_matches_greedy_decoding_of_transformers(cached: bool, family: str, tmp_path: Path) -> None:
    model, tokenizer, expected = greedy(tiny_folder(tmp_path, family))
    model.train()
    texts = generate(model, tokenizer, [PROMPT, PROMPT], 12, None if cached else without_cache(model))
    assert texts == [tokenizer.decode(expected, skip_special_tokens=True).strip()] * 2
    assert model.training


def test_generation_does_not_run_compiled_layers(tmp_path: Path) -> None:
    model, tokenizer, expected = greedy(tiny_folder(tmp_path, "llama"))
    compile_layers(model, backend="eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (text,) = generate(model, tokenizer, [PROMPT], 12)
    assert text == tokenizer.decode(expected, skip_special_tokens=True).strip()
    # A graph for each layer and cache state would exceed torch's recompile limit.
    assert not torch._dynamo.utils.counters["stats"]


def test_generation_removes_the_eos_that_the_tokenizer_appends_to_prompts(tmp_path: Path) -> None:
    model, tokenizer, expected = greedy(tiny_folder(tmp_path, "llama"))
    end = tokenizer.eos_token
    ends = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = ends
    assert tokenizer.encode(PROMPT)[-1] == tokenizer.eos_token_id
    assert generate(model, tokenizer, [PROMPT], 12) == [tokenizer.decode(expected, skip_special_tokens=True).strip()]


@pytest.mark.parametrize("cached", [True, False])
def test_generation_stops_at_the_end_of_text_token(cached: bool, tmp_path: Path) -> None:
    model, tokenizer, expected = greedy(tiny_folder(tmp_path, "llama"))
    end = next(token for token in expected if token != expected[0])
    model.generation_config.eos_token_id = [end, 271]
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    (text,) = generate(model, tokenizer, [PROMPT], 12, None if cached else without_cache(model))
    assert text == tokenizer.decode(expected[: expected.index(end)]).strip()
    assert len(forwards) == expected.index(end) + 1


LOAD_SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, report = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto", output_loading_info=True)
assert not any(report.values()), report
ids = torch.arange(32).reshape(2, 16) * 7 % 272
with torch.no_grad():
    torch.save(model(input_ids=ids).logits, sys.argv[2])
print(AutoTokenizer.from_pretrained(sys.argv[1]).encode("az"), model.config.use_cache)
"""


def load_in_subprocess(folder: Path, scratch: Path) -> torch.Tensor:
    command = [sys.executable, "-c", LOAD_SCRIPT, str(folder), str(scratch / "logits.pt")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[97, 122] True"
    return torch.load(scratch / "logits.pt")


@pytest.mark.slow
def test_exported_model_loads_in_another_process_with_equal_logits(tmp_path: Path) -> None:
    cfg = ModelConfig(path=str(tiny_folder(tmp_path / "saved", "llama")), tokenizer="bytes")
    model = filled(cfg)
    folder = export_model(model, load_tokenizer(cfg), tmp_path / "export", shard_bytes=20_000, card="Made by a test.")
    assert torch.equal(load_in_subprocess(folder, tmp_path), logits(model.eval()))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert "lm_head.weight" not in index["weight_map"]  # tied: stored once
    assert index["metadata"]["total_size"] == count_parameters(model).local_bytes
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["eos_token_id"]) == (["LlamaForCausalLM"], 257)
    assert "Made by a test." in (folder / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "logits.pt", "saved"]


@pytest.mark.parametrize("family", ["gpt2", "mixtral", "phi3"])
def test_export_has_the_tensor_names_that_transformers_writes(family: str, tmp_path: Path) -> None:
    saved = tiny_folder(tmp_path / "saved", family)
    cfg = ModelConfig(path=str(saved), tokenizer="bytes")
    model = filled(cfg)
    (tmp_path / "export").mkdir()
    for name in ("model-00001-of-00002.safetensors", "chat_template.json", "notes"):
        (tmp_path / "export" / name).touch()
    export_model(model, load_tokenizer(cfg), tmp_path / "export")
    assert not list((tmp_path / "export").glob("model-*"))
    assert not (tmp_path / "export" / "chat_template.json").exists()
    (tmp_path / "export" / "notes").unlink()  # not of an export, so it was kept
    from safetensors.torch import load_file

    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("export", "saved"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    narrow = export_model(model, load_tokenizer(cfg), tmp_path / "narrow", dtype=torch.bfloat16)
    assert AutoModelForCausalLM.from_pretrained(narrow, dtype="auto").dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(narrow).pad_token_id == 258


def pad_tokens(folder: Path) -> list[object]:
    """Return the pad tokens that a folder names: in its configs, by id, and in its tokenizer's, by text."""
    names = {"config": "pad_token_id", "generation_config": "pad_token_id", "tokenizer_config": "pad_token"}
    return [json.loads((folder / f"{file}.json").read_text()).get(key) for file, key in names.items()]


@pytest.mark.parametrize(
    ("token", "text"), [(None, None), (None, "<|pad|>"), (258, "<|pad|>"), (257, "<|im_end|>"), (0, None)]
)
@pytest.mark.parametrize("peft", [PeftConfig(), PeftConfig(method=PeftMethod.lora, export=PeftExport.both)])
def test_exports_name_the_pad_token_of_the_pretrained_model(
    token: int | None, text: str | None, peft: PeftConfig, tmp_path: Path
) -> None:
    saved = tiny_folder(tmp_path / "saved", "llama", pad_token_id=token)
    own = byte_tokenizer()
    own.pad_token = text
    own.save_pretrained(saved)
    cfg = ModelConfig(path=str(saved))
    tokenizer, model = load_tokenizer(cfg), build_on_meta(cfg)
    assert tokenizer.pad_token_id is not None  # rows are padded
    add_adapters(model, peft)
    materialize(model, "cpu")
    fill_weights(model, cfg, 0)
    for folder in export_run(model, tokenizer, tmp_path, peft):
        assert AutoTokenizer.from_pretrained(folder).pad_token == text
        assert folder.name == "adapter" or pad_tokens(folder) == pad_tokens(saved)


def test_a_pad_token_that_ends_texts_gets_the_gradient_of_rows_without_padding(tmp_path: Path) -> None:
    saved = tiny_folder(tmp_path, "llama3", pad_token_id=257)
    cfg = ModelConfig(path=str(saved), tokenizer="bytes")
    model = filled(cfg)
    rows = [[5, 257, 9, 8, 257, 3], [7, 257, 2]]
    padded = torch.tensor([row + [257] * (6 - len(row)) for row in rows])
    targets = torch.tensor([row[1:] + [-100] * (7 - len(row)) for row in rows])
    F.cross_entropy(model(input_ids=padded).logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    plain = AutoModelForCausalLM.from_pretrained(saved, pad_token_id=None)
    for row in rows:
        logits = plain(input_ids=torch.tensor([row])).logits[0, :-1]
        F.cross_entropy(logits, torch.tensor(row[1:]), reduction="sum").backward()
    ours, theirs = (each.get_input_embeddings().weight.grad for each in (model, plain))
    assert theirs[257].abs().max() > 0.01
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("a bug"), KeyboardInterrupt()])
def test_failed_export_leaves_no_files_and_keeps_the_previous_export(error: BaseException, tmp_path: Path) -> None:
    model = from_scratch("llama")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "older").touch()

    class Unsaveable:
        bos_token_id = eos_token_id = pad_token_id = chat_template = None

        def save_pretrained(self, folder: Path) -> None:
            raise error

    message = r"export: the export could not be written: disk full" if isinstance(error, OSError) else None
    with pytest.raises(type(error), match=message):
        export_model(model, Unsaveable(), tmp_path / "export")
    assert [path.name for path in tmp_path.rglob("*")] == ["export", "older"]


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("published", [True, False])
def test_leftovers_of_killed_exports_are_removed_by_the_next_export(published: bool, tmp_path: Path) -> None:
    """Exports killed midway, and between the two renames, when the published export has a temporary name."""
    others = {"export.tmp-mine/x", "export-step_3.tmp-0123abcd/x", "adapter.tmp-0123abcd/x", "my export.tmp-0123abcd/x"}
    for name in {*others, "export.tmp-0123abcd/x", "export.tmp-89abcdef/x", "export.tmp-89abcdef-old/vocab.json"}:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    if published:
        (tmp_path / "export").mkdir()
        (tmp_path / "export" / "README.md").touch()
    new_folder = NewFolder(tmp_path / "export")
    new_folder.begin()
    assert list(new_folder.path.iterdir()) == []
    assert files_below(tmp_path) == {*others, "export/README.md" if published else "export/vocab.json"}
    (new_folder.path / "newest").touch()
    new_folder.publish()
    assert files_below(tmp_path) == {*others, "export/newest"}
    assert len(list(tmp_path.iterdir())) == len(others) + 1


@pytest.mark.parametrize("kind", ["link", "file"])
def test_export_replaces_a_link_or_a_file(kind: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    export = tmp_path / "here" / "export"
    export.symlink_to(tmp_path / "nowhere") if kind == "link" else export.touch()
    new_folder = NewFolder(export)
    new_folder.begin()
    (new_folder.path / "newest").touch()
    new_folder.publish()
    assert files_below(tmp_path) == {"here/export/newest"}
    assert list((tmp_path / "here").iterdir()) == [export]


def test_later_of_two_concurrent_exports_is_published_and_the_other_fails(tmp_path: Path) -> None:
    first, second = (NewFolder(tmp_path / "export") for _ in range(2))
    planned = {"a": torch.ones(2), "b": torch.ones(2)}
    first.begin()
    files = WeightFiles(first.path, planned, 8)
    files.write("a", [torch.ones(2)])
    second.begin()
    (second.path / "complete").touch()
    with pytest.raises(FileNotFoundError):
        files.write("b", [torch.ones(2)])
    second.publish()
    with pytest.raises(FileNotFoundError):  # as if it had been writing its last file
        first.publish()
    first.abandon()
    assert files_below(tmp_path) == {"export/complete"}
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


COMPILED_RUN = """
import torch
from torch import nn
from transformers import LlamaConfig
from components.models.layers import compile_layers
model = nn.Module()
model.layers, model.config = nn.ModuleList([nn.PReLU()]), LlamaConfig(num_hidden_layers=1)
compile_layers(model)
with torch.no_grad():
    model.layers[0](torch.ones(1, 2))
"""


@pytest.mark.skipif(os.environ.get("MESHBOOK_TORTURE") != "1", reason="make torture: compiles C++ twice")
def test_truncated_library_in_the_compile_cache_is_recompiled(tmp_path: Path) -> None:
    """A killed linker leaves a truncated file, and torch takes any existing file for a complete one."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", COMPILED_RUN]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert run().returncode == 0
    libraries = list(tmp_path.glob("*/*.main.so"))
    assert libraries
    for library in libraries:
        os.truncate(library, 0 if library == libraries[0] else library.stat().st_size // 2)
        os.utime(library, (0, 0))
    again = run()
    assert again.returncode == 0, again.stderr
    assert f"removed {len(libraries)} truncated files from torch's compile cache" in again.stderr
    assert not any(_is_truncated(each) for each in libraries)


def test_only_truncated_libraries_that_no_compiler_is_writing_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.codecache import get_lock_dir

    if shutil.which("g++") is None:
        pytest.skip("no g++, which writes the libraries")
    source, built = tmp_path / "source.cpp", tmp_path / "built.so"  # libraries of torch may be changed by patchelf
    source.write_text("int answer() { return 42; }\n")
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
    content = built.read_bytes()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    sizes = {"complete": len(content), "empty": 0, "header": 20, "half": len(content) // 2, "last": len(content) - 1}
    for name, size in {**sizes, "locked": 8, "recent": 8}.items():
        library = tmp_path / "ab" / f"{name}.main.so"
        library.parent.mkdir(exist_ok=True)
        library.write_bytes(content[:size])
        if name != "recent":
            os.utime(library, (0, 0))
    with FileLock(Path(get_lock_dir()) / "locked.lock"):
        removed = remove_truncated_libraries()
    assert {path.name.partition(".")[0] for path in removed} == {"empty", "header", "half", "last"}
    left = {path.name.partition(".")[0] for path in tmp_path.glob("*/*.so")}
    assert left == {"complete", "locked", "recent"}
