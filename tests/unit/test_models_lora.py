"""LoRA adapters in one process: initialization, rejected targets, and exports for peft and transformers."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from components import models
from components.checkpoint.stored_tensors import base_fingerprint, load_adapter
from components.config.model_files import PEFT_DEFAULTS, adapter_problems, check_adapter
from components.config.schema import ModelConfig, PeftConfig
from components.config.schema.model import DType, WeightInit
from components.config.schema.run import PeftExport
from components.models.lora import adapted_layers
from components.models.tokenizer import byte_tokenizer
from components.models.weights.weight_files import _base_name
from components.protocol.errors import ConfigError
from components.training.objectives import PLAIN
from components.training.objectives.base import Vocabulary
from components.training.objectives.chunked_loss import Head, Targets, linear_token_loss
from tests.distributed.adapted import lora_config, our_name
from tests.tiny_models import FAMILIES, SIZES, VOCAB, filled, logits, reference, tiny_folder

LORA = PeftConfig(method="lora", rank=4, alpha=6.0)


def adapted(family: str, peft: PeftConfig = LORA, seed: int = 0, **more: object) -> PreTrainedModel:
    """Build a model from scratch with adapters, as the recipe does."""
    cfg = ModelConfig(init=WeightInit.random, tokenizer="bytes", config=FAMILIES[family], **more)
    return filled(cfg, peft, seed=seed)


def perturb_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Move all adapter weights away from their initialization."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.mark.parametrize("peft", [LORA, replace(LORA, dora=True)], ids=["lora", "dora"])
def test_new_adapters_do_not_change_the_logits(peft: PeftConfig) -> None:
    model, plain = adapted("llama", peft).eval(), adapted("llama", PeftConfig()).eval()
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-5, atol=1e-6)
    layers = adapted_layers(model)
    assert len(layers) == 2 * 7
    for layer in layers.values():
        bound = 1 / math.sqrt(layer.lora_A.shape[1])
        assert 0.8 * bound < layer.lora_A.abs().max() <= bound
        assert abs(layer.lora_A.std() - bound / math.sqrt(3)) < 0.2 * bound
    first, second = (layers[f"model.layers.{index}.mlp.up_proj"].lora_A for index in (0, 1))
    assert not torch.equal(first, second)
    again, other = (adapted_layers(adapted("llama", peft, seed))["model.layers.0.mlp.up_proj"] for seed in (0, 1))
    assert torch.equal(first, again.lora_A)
    assert not torch.equal(first, other.lora_A)


def test_only_adapters_are_trained_and_counted_as_trainable() -> None:
    model = adapted("llama", replace(LORA, targets=["q_proj", "mlp.up_proj"]))
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {
        f"model.layers.{index}.{layer}.lora_{matrix}"
        for index in (0, 1)
        for layer in ("self_attn.q_proj", "mlp.up_proj")
        for matrix in "AB"
    }
    counts = models.count_parameters(model)
    assert counts.trainable == sum(model.get_parameter(name).numel() for name in trained)
    assert str(counts).endswith(
        f"parameters, {counts.trainable:,} of them trained ({counts.trainable / counts.total:.2%})"
    )


@pytest.mark.parametrize(
    ("family", "peft", "message"),
    [
        ("llama", {"targets": ["q_prj"]},
         r"peft.targets=\[q_prj\]: LlamaForCausalLM has no such layer; did you mean q_proj\?; choose all-lin"),
        ("llama", {"targets": ["lm_head"]}, r"peft.targets=\[lm_head\]: the LM head cannot be adapted"),
        ("llama", {"targets": ["embed_tokens"]}, r"peft.targets=\[embed_tokens\]: Embedding is not a linear layer"),
        ("mixtral", {"targets": ["experts"]},
         r"peft.targets=\[experts\]: MixtralExperts is not a linear layer; choose"),
    ],
)  # fmt: skip
def test_invalid_targets_are_rejected(family: str, peft: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapted(family, replace(LORA, **peft))


def test_adapters_that_peft_mistakes_for_expert_adapters_are_rejected_unless_merged() -> None:
    """The layers of GLM-4.5's shared expert have the names of its routed experts in transformers 4."""
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    values = {**SIZES, "model_type": "glm4_moe", "first_k_dense_replace": 1, **experts}
    cfg = ModelConfig(init=WeightInit.random, tokenizer="bytes", config={**values, "n_group": 1, "topk_group": 1})
    message = (
        "mistakes adapters on down_proj, gate_proj, up_proj of Glm4MoeForCausalLM for "
        ".* set peft.export=merged, or remove"
    )
    with pytest.raises(ConfigError, match=message):
        models.add_adapters(models.build_on_meta(cfg), LORA)
    with pytest.raises(ConfigError, match="mistakes adapters on gate_proj of Glm4MoeForCausalLM"):
        models.add_adapters(models.build_on_meta(cfg), replace(LORA, targets=["q_proj", "gate_proj"]))
    for readable in (replace(LORA, export=PeftExport.merged), replace(LORA, targets=["q_proj", "o_proj"])):
        models.add_adapters(models.build_on_meta(cfg), readable)
    models.add_adapters(models.build_on_meta(cfg), LORA, exports=False)


@pytest.mark.parametrize(
    ("family", "peft"),
    [
        ("llama", replace(LORA, dora=True)),
        ("gpt2", replace(LORA, rslora=True, dora=True, targets=["c_attn", "mlp.c_proj"])),
    ],
)
def test_peft_and_transformers_load_the_exported_adapter_and_merged_model(
    family: str, peft: PeftConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter on its base weights and the merged model both give the logits of the adapted model."""
    monkeypatch.setattr("components.models.weights.weight_files._BLOCK_BYTES", 1500)  # merge a few rows at a time
    folder = tiny_folder(tmp_path / "base", family)
    cfg = ModelConfig(path=str(folder), tokenizer="bytes", config={})
    model = filled(cfg, peft)
    expected = logits(perturb_adapters(model))
    adapter, merged = models.export_run(model, models.load_tokenizer(cfg), tmp_path, peft)
    with safe_open(adapter / "adapter_model.safetensors", framework="pt") as stored:
        assert len(list(stored.keys())) == sum(each.requires_grad for each in model.parameters())
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)
    theirs = PeftModel.from_pretrained(reference(folder), adapter).eval()
    torch.testing.assert_close(logits(theirs), expected, rtol=1e-5, atol=1e-5)
    loaded = AutoModelForCausalLM.from_pretrained(merged).eval()
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=1e-5)
    assert (logits(reference(folder)) - expected).abs().max() > 0.1


CONTINUED = {
    "lora": ("llama3", LORA),
    "dora": ("llama3", replace(LORA, dora=True)),
    "conv1d": ("gpt2", replace(LORA, rslora=True, targets=["c_attn", "mlp.c_proj"])),
    "saved": ("llama3", replace(LORA, modules_to_save=["embed_tokens", "lm_head", "model.norm"])),
    "tied": ("llama", replace(LORA, modules_to_save=["embed_tokens", "lm_head"])),
}


@pytest.mark.parametrize("case", CONTINUED)
def test_adapter_that_peft_wrote_is_continued(case: str, tmp_path: Path) -> None:
    """As by PeftModel.from_pretrained(is_trainable=True): the same parameters train, with the same values."""
    family, peft = CONTINUED[case]
    folder = tiny_folder(tmp_path / "base", family)
    theirs = get_peft_model(reference(folder), lora_config(peft, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        trained = [parameter for parameter in theirs.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        if case == "tied":  # PEFT trains two copies; a user's are equal if he ties them
            base = theirs.base_model.model
            base.lm_head.weight.copy_(base.model.embed_tokens.weight)
    theirs.save_pretrained(tmp_path / "adapter")
    cfg = ModelConfig(path=str(folder), tokenizer="bytes", config={})
    ours = filled(cfg, continued := replace(peft, path=str(tmp_path / "adapter")))
    assert models.read_adapter(ours, continued) == ""
    loaded = PeftModel.from_pretrained(reference(folder), tmp_path / "adapter", is_trainable=True)
    torch.testing.assert_close(logits(ours.eval()), logits(loaded.eval()), rtol=1e-5, atol=1e-5)
    values = {
        our_name(name).removeprefix("base_model.model."): parameter
        for name, parameter in loaded.named_parameters()
        if parameter.requires_grad
    }
    own = {name: parameter for name, parameter in ours.named_parameters() if parameter.requires_grad}
    assert own.keys() == values.keys() - ({"lm_head.weight"} if case == "tied" else set())
    assert all(torch.equal(parameter, values[name]) for name, parameter in own.items())

    exported = models.export_run(ours, models.load_tokenizer(cfg), tmp_path, peft, fingerprint="float32 0123")
    again = PeftModel.from_pretrained(reference(folder), exported[0]).eval()
    torch.testing.assert_close(logits(again), logits(ours), rtol=1e-5, atol=1e-5)
    merged = AutoModelForCausalLM.from_pretrained(exported[1]).eval()
    torch.testing.assert_close(logits(merged), logits(ours), rtol=1e-5, atol=1e-5)
    assert models.read_adapter(filled(cfg, peft), replace(peft, path=str(tmp_path))) == "float32 0123"  # of a run


def test_missing_keys_of_an_adapter_mean_what_peft_takes_for_them(tmp_path: Path) -> None:
    assert {name: getattr(LoraConfig(), name) for name in PEFT_DEFAULTS} == PEFT_DEFAULTS
    folder = tiny_folder(tmp_path / "base", "llama3")
    model = get_peft_model(reference(folder), LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"]))
    perturb_adapters(model).save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    peft = replace(LORA, targets=["q_proj"], path=str(file.parent))
    for key, missing, own in (
        ("rslora", "use_rslora", True),
        ("dora", "use_dora", True),
        ("alpha", "lora_alpha", 6.0),
        ("rank", "r", 4),
    ):
        file.write_text(json.dumps({name: each for name, each in config.items() if name != missing}))
        default = PEFT_DEFAULTS[missing]
        (problem,) = check_adapter(replace(peft, **{key: own}))
        assert problem.endswith(f"has {default}; set peft.{key}={str(default).lower()}"), problem
        if key != "rank":  # the file has other shapes
            same = replace(peft, **{key: default})
            models.read_adapter(ours := filled(ModelConfig(path=str(folder), tokenizer="bytes"), same), same)
            theirs = PeftModel.from_pretrained(reference(folder), file.parent)
            torch.testing.assert_close(logits(ours.eval()), logits(theirs.eval()), rtol=1e-5, atol=1e-5)
    file.write_text(json.dumps({name: each for name, each in config.items() if name != "target_modules"}))
    assert "has no target_modules, for which PEFT takes layers by the type" in check_adapter(peft)[0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["embed_tokens", "lm_head"],
            "its LM head and its embedding differ, but the model ties them; merge it by PEFT's",
        ),
        (["embed_tokens"], "trained the embedding apart from the LM head, but the model ties them; merge it by PEFT's"),
    ],
)
def test_ends_of_a_tied_model_that_peft_trained_apart_are_rejected(
    names: list[str], message: str, tmp_path: Path
) -> None:
    peft = replace(LORA, modules_to_save=names)
    folder = tiny_folder(tmp_path / "base", "llama")
    theirs = get_peft_model(reference(folder), lora_config(peft, task_type="CAUSAL_LM"))
    with torch.no_grad():
        theirs.get_input_embeddings().weight.add_(1)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = filled(ModelConfig(path=str(folder), tokenizer="bytes"), peft)
    with pytest.raises(ConfigError, match=message):
        models.read_adapter(ours, replace(peft, path=str(tmp_path / "adapter")))


def test_adapters_that_would_load_wrong_are_rejected(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "base", "llama3")
    base = ModelConfig(path=str(folder), tokenizer="bytes")
    peft = replace(LORA, path=str(tmp_path / "adapter"))
    models.export_run(filled(base, peft), models.load_tokenizer(base), tmp_path, replace(peft, export="adapter"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    good = load_file(file)
    first = next(iter(good))
    for changed, message in (
        ({first: good[first].index_fill(0, torch.tensor([0]), torch.nan)}, f"{first} holds NaN or infinite values"),
        ({first: good[first].int()}, "lora_A.weight hold no floating-point numbers"),
        ({"base_model.model.model.embed_tokens.weight": torch.zeros(4, 4)}, "also has weights of model.embed_tokens"),
        ({"base_model.model.lm_head.lora_A.weight": torch.zeros(4, 4)}, "has adapters of lm_head.lora_A.weight; merge"),
        ({"base_model.model.score.weight": torch.zeros(4, 4)}, "is the adapter of a classifier, with a score head"),
    ):
        save_file({**good, **changed}, file)
        with pytest.raises(ConfigError, match=message):
            models.read_adapter(filled(base, peft), peft)
    save_file(good, file, {"base_weights": "foo bar"})
    with pytest.raises(ConfigError, match=r"the header of its weights is damaged \('foo bar'\)"):
        load_adapter(filled(base, peft), peft, torch.float32)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for change, message in (
        ({"init_lora_weights": "pissa"}, "was initialized by pissa, which changes the base weights"),
        ({"target_modules": 5}, "target_modules must be a list of names"),
        ({"peft_type": "LOHA"}, "is of kind LOHA"),
        ({"lora_alpha": -6}, "lora_alpha=-6 in its adapter_config.json must be a number above 0; give another"),
        ({"r": "4"}, "r='4' in its adapter_config.json must be a whole number of at least 1; give another adapter"),
        ({"r": None}, "r=None in its adapter_config.json must be"),
        ({"use_dora": "no"}, "use_dora='no' in its adapter_config.json must be true or false"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "(embed_tokens), which peft.targets cannot select; merge it"),
        ({"target_modules": ["lm_head", "q_proj"]}, "or the LM head (lm_head), which peft.targets cannot select"),
    ):
        (problem,) = adapter_problems(peft, {**config, **change})
        assert message in problem
    assert not adapter_problems(peft, {**config, "use_rslora": None, "modules_to_save": ["score"]})
    assert "holds no JSON object" in adapter_problems(peft, [])[0]


def test_scores_begin_with_a_new_head_over_the_adapter_of_a_causal_lm(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "base", "llama3")
    base = ModelConfig(path=str(folder), tokenizer="bytes")
    model = perturb_adapters(filled(base, LORA))
    models.export_run(model, models.load_tokenizer(base), tmp_path, replace(LORA, export="adapter"))
    scores = models.build_on_meta(base, labels=["good", "bad"])
    models.add_adapters(scores, LORA)
    models.materialize(scores, "cpu")
    models.fill_weights(scores, base, 0)
    head = scores.score.weight.clone()
    models.read_adapter(scores, replace(LORA, path=str(tmp_path)))
    assert torch.equal(scores.score.weight, head)
    adapted = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert all(torch.equal(scores.get_parameter(name), each) for name, each in adapted.items())


@pytest.mark.parametrize(("family", "dtype"), [("llama3", "float32"), ("llama3", "bfloat16"), ("llama", "float32")])
def test_scores_begin_over_the_base_weights_of_an_adapter_only(family: str, dtype: str, tmp_path: Path) -> None:
    """The LM head is part of what an adapter of an untied model was trained over, and no part of a score model."""
    folder = tiny_folder(tmp_path / "base", family)
    base = ModelConfig(path=str(folder), tokenizer="bytes", dtype=DType(dtype))
    model = filled(base, LORA)
    fingerprint, peft = f"{dtype} {base_fingerprint(model)}", replace(LORA, path=str(tmp_path))
    models.export_run(model, models.load_tokenizer(base), tmp_path, replace(LORA, export="adapter"), "", fingerprint)
    wide = replace(base, dtype=DType.float32)
    weights = load_file(folder / "model.safetensors")

    def started() -> str:
        scores = models.build_on_meta(wide, labels=["good", "bad"])
        models.add_adapters(scores, LORA)
        models.materialize(scores, "cpu")
        models.fill_weights(scores, wide, 0)
        return load_adapter(scores, peft, torch.float32)

    assert started().endswith("trained over these base weights")
    for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight")[family == "llama" :]:
        changed = {**weights, name: weights[name] + 1}
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match="was trained over other base weights"):
            started()


@pytest.mark.parametrize(
    ("family", "tokens", "labels"),
    [
        ("llama3", 0, None),
        ("llama3", 2, None),  # in unused rows of the embedding
        ("llama3", 20, None),  # more than it has
        ("llama", 20, None),
        ("llama3", 20, ["good", "bad", "other"]),
    ],
)
def test_code_in_the_card_of_an_adapter_loads_the_exported_model(
    family: str, tokens: int, labels: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(tmp_path / "base", family)
    byte_tokenizer().save_pretrained(folder)
    cfg = ModelConfig(path=str(folder), new_tokens=[f"<{number}>" for number in range(tokens)])
    ends = ["embed_tokens", "lm_head"][: 1 if labels else 2] if tokens else []
    model, peft = models.build_on_meta(cfg, labels=labels), replace(LORA, modules_to_save=ends)
    models.add_adapters(model, peft)
    models.materialize(model, "cpu")
    models.fill_weights(model, cfg, 0)
    adapter, export = models.export_run(perturb_adapters(model), models.load_tokenizer(cfg), tmp_path, peft)
    code = re.search("```python\n(.*)```", (adapter / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    assert code is not None
    exec(code[1], names)
    assert len(names["tokenizer"]) == 260 + tokens
    auto = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    merged = auto.from_pretrained(export).eval()
    ids = torch.tensor([[5, 7, 260 + max(tokens, 1) - 1]])
    with torch.no_grad():
        expected, found = merged(ids).logits, names["model"].eval()(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stated", ["header", "tokenizer", "both", "neither"])
def test_rows_of_new_tokens_are_continued_with_the_same_tokens_only(stated: str, tmp_path: Path) -> None:
    """Also where the tokens fit into unused rows: the shapes are then those of the base."""
    folder = tiny_folder(tmp_path / "base", "llama3")
    byte_tokenizer().save_pretrained(folder)
    peft = replace(LORA, modules_to_save=["embed_tokens", "lm_head"], path=str(tmp_path))
    base = ModelConfig(path=str(folder))
    cfg = replace(base, new_tokens=["<b>", "<a>"])
    adapter, *_ = models.export_run(filled(cfg, peft), models.load_tokenizer(cfg), tmp_path, peft)
    if stated in ("tokenizer", "neither"):
        file = adapter / "adapter_model.safetensors"
        save_file(load_file(file), file)
    if stated in ("header", "neither"):
        for file in adapter.glob("*token*"):
            file.unlink()
    models.read_adapter(filled(cfg, peft), peft)
    change = {
        "header": "model.tokenizer and model.new_tokens as in the run that trained it",
        "both": """'model.new_tokens=["<b>", "<a>"]'""",
        "tokenizer": f"model.tokenizer={adapter} and model.new_tokens=[]",
    }.get(stated)
    for tokens, own in (([], "[]"), (["<a>", "<b>"], '["<a>", "<b>"]'), (["<b>"], '["<b>"]')):
        other = filled(replace(base, new_tokens=tokens), peft)
        if stated == "neither":
            models.read_adapter(other, peft)
            continue
        with pytest.raises(ConfigError, match=re.escape(f"(model.new_tokens={own}); set {change}")):
            models.read_adapter(other, peft)
    if stated == "both":  # the header decides, so that the tokenizer beside it is not read
        (adapter / "tokenizer.json").write_text("{")
        models.read_adapter(filled(cfg, peft), peft)
        models.load_tokenizer(cfg).save_pretrained(adapter)
    if stated in ("tokenizer", "both"):
        models.read_adapter(filled(replace(base, tokenizer=str(adapter)), peft), peft)
        vocabulary = dict(byte_tokenizer().get_vocab())
        vocabulary["x"], vocabulary["y"] = vocabulary["y"], vocabulary["x"]
        other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocabulary, [])), eos_token="<|im_end|>")
        other.save_pretrained(tmp_path / "other")
        model = filled(replace(base, tokenizer=str(tmp_path / "other")), peft)
        with pytest.raises(ConfigError, match=re.escape(f"set model.tokenizer={adapter}")):
            models.read_adapter(model, peft)


def test_adapters_of_other_layers_or_settings_are_rejected_by_name(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "base", "llama3")
    base = ModelConfig(path=str(folder), tokenizer="bytes")
    peft = replace(LORA, targets=["q_proj", "v_proj"], path=str(tmp_path))
    models.export_run(filled(base, peft), models.load_tokenizer(base), tmp_path, replace(peft, export="adapter"))
    wrong = {
        "rank": (replace(peft, rank=8), "peft.rank=8: the adapter at peft.path=.* has 4; set peft.rank=4"),
        "dora": (replace(peft, dora=True), "peft.dora=True: the adapter at .* has False; set peft.dora=false"),
        "targets": (replace(peft, targets=["q_proj"]), r"set peft.targets=\[q_proj,v_proj\]"),
        "saved": (replace(peft, modules_to_save=["norm"]), r"peft.modules_to_save=\[norm\]: .*set .*=\[\]"),
    }
    for other, message in wrong.values():
        (problem,) = check_adapter(other)
        assert re.search(message, problem), problem
    assert not check_adapter(peft)
    for targets, message in (
        (["all-linear"], r"has no adapter for model.layers.0.mlp.down_proj.lora_A.weight, .* and 16 more, which"),
        (
            ["layers.0.self_attn.q_proj", "v_proj"],
            "has adapters of model.layers.1.self_attn.q_proj.lora_A.weight, .*; add these",
        ),
    ):
        other = replace(peft, targets=targets)
        with pytest.raises(ConfigError, match=message):
            models.read_adapter(filled(base, other), other)
    for path, message in (
        (str(folder), "the folder has no adapter_config.json; give the folder of an adapter, or of its run"),
        (str(tmp_path / "none"), "no such folder"),
    ):
        assert message in check_adapter(replace(peft, path=path))[0]
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "rank_pattern": {"q_proj": 3}, "peft_type": "LORA"})
    )
    assert "uses PEFT's rank_pattern={'q_proj': 3}, which is not supported" in check_adapter(peft)[0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["embed_tokenz"],
            r"modules_to_save=\[embed_tokenz\]: LlamaForCausalLM has no such module .* choose some of embed",
        ),
        (["q_proj"], r"model.layers.0.self_attn.q_proj has an adapter; remove it here, or from peft.targets"),
    ],
)
def test_modules_that_cannot_be_saved_are_rejected(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adapted("llama", replace(LORA, modules_to_save=names))


def test_trained_modules_are_float32_over_bfloat16_and_compute_in_it() -> None:
    """The forward has the dtypes of the frozen model, and the chunked loss the gradient of a float32 copy."""
    peft = replace(LORA, modules_to_save=["embed_tokens", "lm_head", "model.norm"])
    model = adapted("llama3", peft, dtype=DType.bfloat16)
    tied = adapted("llama", replace(LORA, modules_to_save=["embed_tokens"]), dtype=DType.bfloat16)
    assert tied.lm_head.weight.dtype == torch.float32
    assert tied(input_ids=torch.arange(8)[None], use_cache=False).logits.dtype == torch.bfloat16
    with pytest.raises(ConfigError, match="model.layers.0.mlp.gate is a MixtralTopKRouter, which cannot be trained in"):
        adapted("mixtral", replace(LORA, targets=["q_proj"], modules_to_save=["gate"]), dtype=DType.bfloat16)
    for name in ("model.embed_tokens", "lm_head", "model.norm"):
        assert model.get_parameter(f"{name}.weight").dtype == torch.float32
    output = model(input_ids=torch.arange(8)[None], use_cache=False).logits
    assert output.dtype == torch.bfloat16
    hidden = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    targets = Targets(torch.arange(8), 8)
    head = Head(Vocabulary(), chunk_logits=4 * VOCAB)
    linear_token_loss(hidden, model.lm_head.weight, None, targets, head, PLAIN.token_loss).backward()
    wide = model.lm_head.weight.detach().bfloat16().float().requires_grad_()
    logits_of = hidden.detach().float() @ wide.T
    torch.nn.functional.cross_entropy(logits_of, torch.arange(8), reduction="sum").backward()
    assert model.lm_head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(model.lm_head.weight.grad, wide.grad, rtol=2e-2, atol=2e-2)


def test_adapter_names_a_base_model_that_peft_can_open_or_explains_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert _base_name(ModelConfig(path="./base")) == str(tmp_path / "base")
    assert _base_name(ModelConfig(path="owner/model")) == "owner/model"
    assert "a GGUF file, which PEFT cannot open" in (_base_name(ModelConfig(path="base.gguf")) or "")
    assert _base_name(ModelConfig(init=WeightInit.random, tokenizer="bytes", config=FAMILIES["llama"])) is None


@pytest.mark.parametrize(("export", "folders"), [("adapter", ["adapter"]), ("merged", ["export"])])
def test_adapter_and_merged_export_can_each_be_written_alone(export: str, folders: list[str], tmp_path: Path) -> None:
    model = adapted("llama", peft := replace(LORA, export=export))
    cfg = ModelConfig(init=WeightInit.random, tokenizer="bytes", config=FAMILIES["llama"])
    (tmp_path / f"{folders[0]}.tmp-0123abcd").mkdir()  # left by a killed attempt
    paths = models.export_run(model, models.load_tokenizer(cfg), tmp_path, peft)
    assert [path.name for path in paths] == [path.name for path in tmp_path.iterdir()] == folders


def test_adapters_are_float32_with_base_weights_in_bfloat16() -> None:
    model = adapted("llama", dtype=DType.bfloat16)
    layer = adapted_layers(model)["model.layers.0.mlp.up_proj"]
    assert (layer.weight.dtype, layer.lora_A.dtype) == (torch.bfloat16, torch.float32)
    output = model(input_ids=torch.arange(8)[None]).logits
    output.float().square().mean().backward()
    assert layer.lora_B.grad.dtype == torch.float32
