"""scripts/average.py merges changes of a base model by task arithmetic and TIES, compared with the peft library."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.merge_utils import task_arithmetic, ties
from safetensors.torch import load_file, save_file

from components import models
from components.checkpoint.stored_tensors import base_fingerprint
from components.config.schema import ModelConfig, PeftConfig
from components.config.schema.model import DType
from components.models.tokenizer import byte_tokenizer, load_tokenizer
from scripts import average
from tests.tiny_models import filled, reference, tiny_folder

LORA = PeftConfig(method="lora", rank=4, alpha=6.0, modules_to_save=["lm_head"])


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """A base model, two models of other random weights, and two adapters of the base, with tokenizers."""
    base = tiny_folder(tmp_path / "base", "llama3")
    others = [tiny_folder(tmp_path / name, "llama3", seed=seed) for seed, name in ((1, "one"), (2, "two"))]
    for folder in (base, *others):
        byte_tokenizer().save_pretrained(folder)
    adapters = []
    for seed, name in enumerate(("first", "second")):
        cfg = ModelConfig(path=str(base))
        model = filled(cfg, LORA)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        adapters += models.export_run(model, models.load_tokenizer(cfg), tmp_path / name, LORA)[:1]
    return [base, *others, *adapters]


def merged(folder: Path, *arguments: str) -> dict[str, torch.Tensor]:
    assert average.main([*arguments, "--out", str(folder)]) == 0
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("density", [None, 0.3, 1.0])
def test_models_are_merged_like_peft_merges_task_vectors(
    density: float | None, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block: TIES selects the largest changes of whole tensors."""
    monkeypatch.setattr("components.models.weights.weight_files._BLOCK_BYTES", 1500)
    base, one, two = (load_file(folder / "model.safetensors") for folder in folders[:3])
    method = ["task-arithmetic"] if density is None else ["ties", "--density", str(density)]
    sources = (str(folders[1]), str(folders[2]), "--base", str(folders[0]), "--weights", "0.7", "0.5")
    found = merged(tmp_path / "out", *sources, "--method", *method)
    weights = torch.tensor([0.7, 0.5], dtype=torch.float64)
    for name, start in base.items():
        # Ties of equal magnitudes do not occur: all weights are random.
        changes = [each[name].double() - start.double() for each in (one, two)]
        change = task_arithmetic(changes, weights) if density is None else ties(changes, weights, density)
        torch.testing.assert_close(found[name].double(), start.double() + change, rtol=1e-6, atol=1e-6)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"Merged by {method[0]}." in card
    assert "| 0.5 |" in card


def test_adapters_are_merged_over_their_own_base(folders: list[Path], tmp_path: Path) -> None:
    """The changes of an adapter are those of PEFT's merged model."""
    base = load_file(folders[0] / "model.safetensors")
    adapted = []
    for adapter in folders[3:]:
        model = PeftModel.from_pretrained(reference(folders[0]), adapter).merge_and_unload()
        adapted.append({name: parameter.detach() for name, parameter in model.named_parameters()})
    adapters = tuple(map(str, folders[3:]))
    found = merged(tmp_path / "sum", *adapters, "--method", "task-arithmetic")
    mean = merged(tmp_path / "mean", *adapters, "--weights", "3", "1")
    for name, start in base.items():
        first, second = (each[name] for each in adapted)
        torch.testing.assert_close(found[name], first + second - start, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mean[name], (3 * first + second) / 4, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found["lm_head.weight"], base["lm_head.weight"], atol=0.1)


@pytest.mark.parametrize("density", [None, 0.2])
def test_small_changes_of_a_base_in_bfloat16_are_merged_before_rounding(
    density: float | None, folders: list[Path], tmp_path: Path
) -> None:
    base, name = folders[0], "model.layers.0.self_attn.q_proj"
    reference(base, torch.bfloat16).save_pretrained(base)
    changes = []
    for seed in (1, 2):
        generator, config = torch.Generator().manual_seed(seed), LoraConfig(r=4, lora_alpha=8, target_modules=[name])
        model = get_peft_model(reference(base), config)
        A, B = (each for parameter, each in model.named_parameters() if "lora_" in parameter)
        with torch.no_grad():
            B.copy_(0.002 * torch.randn(B.shape, generator=generator))
        model.save_pretrained(tmp_path / str(seed))
        changes.append(2 * B.detach().double() @ A.detach().double())
    method = ["task-arithmetic"] if density is None else ["ties", "--density", str(density)]
    sources = (str(tmp_path / "1"), str(tmp_path / "2"), "--method", *method, "--dtype", "float32")
    start = load_file(base / "model.safetensors")[f"{name}.weight"].double()
    found = merged(tmp_path / "out", *sources)[f"{name}.weight"].double() - start
    weights = torch.ones(2, dtype=torch.float64)
    expected = task_arithmetic(changes, weights) if density is None else ties(changes, weights, density)
    assert changes[0].norm() < 0.01 * start.norm()
    assert (found - expected).norm() < 1e-4 * expected.norm()  # float32 of the output; in bfloat16 it was above 0.3


def exported(folder: Path, base: Path, peft: PeftConfig, seed: int, **model: object) -> list[Path]:
    """Export an adapter with the fingerprint of its base, and the merged model, as a run does."""
    cfg = ModelConfig(path=str(base), config={}, **model)
    adapted, generator = filled(cfg, peft), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    fingerprint = f"{cfg.stored_dtype()} {base_fingerprint(adapted)}"
    return models.export_run(adapted, models.load_tokenizer(cfg), folder, peft, fingerprint=fingerprint)


@pytest.mark.parametrize("density", [None, 0.3])
def test_changes_of_qlora_adapters_are_without_the_error_of_quantization(density: float | None, tmp_path: Path) -> None:
    """The error, far larger than small changes, is that of the base, and counts once."""
    base = tiny_folder(tmp_path / "base", "llama3", hidden_size=128, intermediate_size=128)
    byte_tokenizer().save_pretrained(base)
    peft = PeftConfig(method="qlora", rank=4, alpha=0.01)
    runs = [exported(tmp_path / str(seed), base, peft, seed) for seed in (1, 2)]
    method = ["task-arithmetic"] if density is None else ["ties", "--density", str(density)]
    found = merged(tmp_path / "out", *(str(adapter) for adapter, _ in runs), "--method", *method)
    exports = [load_file(export / "model.safetensors") for _, export in runs]
    factors = [load_file(adapter / "adapter_model.safetensors") for adapter, _ in runs]
    for name, each in found.items():
        first = f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight"
        if first not in factors[0]:
            torch.testing.assert_close(each, exports[0][name])
            continue
        changes = [
            0.01 / 4 * (own[first.replace("lora_A", "lora_B")].double() @ own[first].double()) for own in factors
        ]
        start, weights = exports[0][name].double() - changes[0], torch.ones(2, dtype=torch.float64)
        change = task_arithmetic(changes, weights) if density is None else ties(changes, weights, density)
        # Rounding decides which of two nearly equal changes at the threshold of TIES is kept.
        assert ((each.double() - start - change).abs() > 1e-6).sum() <= (0 if density is None else 4)
        assert change.abs().max() > 1e-4


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_adapters_of_qlora_are_merged_over_the_weights_in_4_bits(dtype: DType, tmp_path: Path) -> None:
    base = tiny_folder(tmp_path / "base", "llama3", hidden_size=128, intermediate_size=128)
    byte_tokenizer().save_pretrained(base)
    peft = PeftConfig(method="qlora", rank=4, alpha=6.0)
    runs = [exported(tmp_path / str(seed), base, peft, seed, dtype=dtype) for seed in (1, 2)]
    found = merged(tmp_path / "mean", *(str(adapter) for adapter, _ in runs), "--dtype", "float32")
    first, second = (load_file(export / "model.safetensors") for _, export in runs)
    tolerance = 1e-6 if dtype == DType.float32 else 2**-7  # exports in bfloat16 are rounded, unlike the merge
    for name, each in found.items():
        expected = (first[name].double() + second[name].double()) / 2
        torch.testing.assert_close(each.double(), expected, rtol=tolerance, atol=tolerance)


def test_adapters_are_not_merged_over_other_base_weights(
    folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, other = folders[:2]
    one, two = (str(exported(tmp_path / str(seed), base, LORA, seed)[0]) for seed in (1, 2))
    third = str(exported(tmp_path / "3", other, LORA, 3)[0])
    output = ("--out", str(tmp_path / "out"))

    def refused(*arguments: str) -> str:
        assert average.main([*arguments, *output]) == 2
        return " ".join(capsys.readouterr().err.split())

    task, change = ("--method", "task-arithmetic"), "the difference would count as a change"
    copied = shutil.copytree(base, tmp_path / "copied")
    merged(tmp_path / "same", one, two, *task, "--base", str(copied))
    assert f"--base {other}: has other weights than {base}, over which {one} was" in refused(
        one, two, *task, "--base", str(other)
    )
    assert change in refused(one, third, *task, "--base", str(base))
    assert change in refused(*map(str, folders[3:]), *task, "--base", str(other))  # without a fingerprint
    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    for method in ((), task):
        assert f"{one}: the adapter was trained over other base weights (fingerprint" in refused(one, two, *method)


@pytest.mark.parametrize(
    "selected",
    [
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1]},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["model.layers.0.self_attn.q_proj"]},
        {"target_modules": ".*[qk]_proj", "exclude_modules": ".*0.*k_proj"},
        {"target_modules": "all-linear", "use_dora": True},
    ],
)
def test_adapters_of_the_layers_that_peft_selects_are_merged(
    selected: dict[str, Any], folders: list[Path], tmp_path: Path
) -> None:
    adapters, adapted = [], []
    for seed in (1, 2):
        model = get_peft_model(reference(folders[0]), LoraConfig(r=4, lora_alpha=6, **selected))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * parameter.requires_grad * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / str(seed))
        adapters.append(str(tmp_path / str(seed)))
        alone = PeftModel.from_pretrained(reference(folders[0]), adapters[-1]).merge_and_unload()
        adapted.append({name: parameter.detach() for name, parameter in alone.named_parameters()})
    found = merged(tmp_path / "sum", *adapters, "--method", "task-arithmetic")
    for name, start in load_file(folders[0] / "model.safetensors").items():
        torch.testing.assert_close(found[name], adapted[0][name] + adapted[1][name] - start, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", [None, ".*q_proj"])
def test_adapters_of_experts_are_merged(pattern: str | None, tmp_path: Path) -> None:
    base = tiny_folder(tmp_path / "base", "mixtral")
    byte_tokenizer().save_pretrained(base)
    matrices = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    peft = PeftConfig(method="lora", rank=2, alpha=6.0, targets=["q_proj"], target_parameters=matrices)
    runs = [exported(tmp_path / str(seed), base, peft, seed) for seed in (1, 2)]
    for adapter, _ in runs:
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(
            json.dumps({**config, "target_modules": pattern or config["target_modules"]})
        )
    found = merged(tmp_path / "mean", *(str(adapter) for adapter, _ in runs))
    first, second = (load_file(export / "model.safetensors") for _, export in runs)
    for name, each in found.items():
        torch.testing.assert_close(each, (first[name] + second[name]) / 2, rtol=1e-5, atol=1e-5)


def test_adapters_over_a_base_without_tokenizer_are_merged_with_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_folder(tmp_path / "base", "llama3")
    runs = [exported(tmp_path / str(seed), base, LORA, seed, tokenizer="bytes") for seed in (1, 2)]
    adapters = [str(adapter) for adapter, _ in runs]
    first, second = (load_file(export / "model.safetensors") for _, export in runs)
    start = load_file(base / "model.safetensors")
    mean, total = (
        merged(tmp_path / "mean", *adapters),
        merged(tmp_path / "sum", *adapters, "--method", "task-arithmetic"),
    )
    for name, each in start.items():
        torch.testing.assert_close(mean[name], (first[name] + second[name]) / 2, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(total[name], first[name] + second[name] - each, rtol=1e-5, atol=1e-5)
    assert load_tokenizer(ModelConfig(path=str(tmp_path / "mean"))).get_vocab() == byte_tokenizer().get_vocab()
    tokens, ends = [f"<{number}>" for number in range(20)], ["embed_tokens", "lm_head"]
    grown = exported(tmp_path / "3", base, replace(LORA, modules_to_save=ends), 3, tokenizer="bytes", new_tokens=tokens)
    assert average.main([adapters[0], str(grown[0]), "--out", str(tmp_path / "out")]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"280 tokens, more than the 272 rows of {base}, which has no tokenizer" in error


def test_adapters_with_new_tokens_and_a_pattern_of_layers_are_merged(folders: list[Path], tmp_path: Path) -> None:
    cfg = ModelConfig(path=str(folders[0]), new_tokens=[f"<{number}>" for number in range(20)])  # 280 tokens, 272 rows
    peft = replace(LORA, modules_to_save=["embed_tokens", "lm_head"], targets=["q_proj"])
    paths = []
    for seed in (0, 1):
        model = filled(cfg, peft)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * parameter.requires_grad * torch.randn(parameter.shape))
        paths += models.export_run(model, models.load_tokenizer(cfg), tmp_path / str(seed), peft)[:1]
        config = json.loads((paths[-1] / "adapter_config.json").read_text())
        (paths[-1] / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ".*q_proj"}))
    adapted = [load_file(path.parent / "export" / "model.safetensors") for path in paths]
    found = merged(tmp_path / "sum", *map(str, paths), "--method", "task-arithmetic")
    start = {name: parameter.detach() for name, parameter in filled(cfg).named_parameters()}
    for name, each in found.items():
        torch.testing.assert_close(each, adapted[0][name] + adapted[1][name] - start[name], rtol=1e-5, atol=1e-5)
    assert len(found["lm_head.weight"]) == 280


def test_threshold_of_a_tensor_with_equal_changes_keeps_them(folders: list[Path], tmp_path: Path) -> None:
    base = load_file(folders[0] / "model.safetensors")
    for number, folder in enumerate(folders[1:3]):
        changed = {name: each.clone() for name, each in base.items()}
        changed["model.norm.weight"] += torch.where(torch.arange(32) < 4, 1.0 + number, 0.0)
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
    sources = (str(folders[1]), str(folders[2]), "--base", str(folders[0]), "--method", "ties", "--density", "0.25")
    found = merged(tmp_path / "out", *sources)
    torch.testing.assert_close(found["model.norm.weight"][:4], base["model.norm.weight"][:4] + 1.5, rtol=1e-6, atol=0)
    assert torch.equal(found["model.norm.weight"][4:], base["model.norm.weight"][4:])


def test_wrong_merges_are_refused(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, first, second = map(str, folders[1:])
    other = tiny_folder(tmp_path / "other", "llama3", num_hidden_layers=1)
    byte_tokenizer().save_pretrained(other)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "adapter_config.json").write_text(json.dumps({"r": 4}))
    cases = {
        (one, two, "--method", "ties"): "--base: needed, because the sources name no base model; give that which",
        (one, two, "--density", "0.5"): "--density 0.5: must be in (0, 1], and only --method ties has it",
        (one, two, "--base", one): "--base " + one + ": --method average needs none",
        (first, second, "--method", "ties", "--base", str(other)): "is not the base of " + first + ": tensors differ",
        (first, str(damaged)): "is not the config of a LoRA adapter: KeyError('base_model_name_or_path')",
    }
    for arguments, message in cases.items():
        assert average.main([*arguments, "--out", str(tmp_path / "out")]) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")
        assert not (tmp_path / "out").exists()
