"""LoRA on fused experts (peft.target_parameters), compared with the peft library in one process of plain PyTorch.

float64: the gradient of every factor in the first step, within 1e-10 relative. The exported adapter is loaded by
`PeftModel.from_pretrained`, and a checkpoint resumes on another mesh.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from components import checkpoint, models
from components.config.schema import ModelConfig
from components.config.schema.run import CheckpointConfig
from components.models.weights.shards import gathered_tensors
from components.planning.parity_reference import Curve
from components.protocol.errors import ConfigError
from tests.distributed import grid
from tests.distributed.adapted import ATTENTION, LORA, Adapted, adapter_values, build, lora_config, ours, problems_of
from tests.distributed.parity import reference
from tests.distributed.test_lora import place_on_mesh
from tests.distributed.tiny_runs import cell_named, start, whole
from tests.harness import run_ranks
from tests.suites import PARITY
from tests.tiny_models import logits

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EXPERTS = replace(ATTENTION, target_parameters=BOTH)
ONLY_DOWN = replace(LORA, targets=[], target_parameters=["experts.down_proj"])
GPT_OSS = {"num_experts_per_tok": 2, "num_local_experts": 4, "head_dim": 8, "sliding_window": 6}
CASES = {
    2: [
        Adapted("qwen3_moe", "ep2", peft=EXPERTS),
        Adapted("qwen3_moe", "dp_shard2", peft=EXPERTS),
        Adapted("mixtral", "tp2_sp", peft=EXPERTS),
        Adapted("mixtral", "ep2", peft=ONLY_DOWN),
    ]
}
MORE_CASES = {
    2: [
        *(Adapted(name, mesh, peft=EXPERTS) for name in ("mixtral", "qwen3_moe") for mesh in ("ddp2", "tp2", "pp2")),
        *(Adapted("qwen3_moe", mesh, torch.float32, EXPERTS) for mesh in ("ep2", "dp_shard2", "tp2")),
    ],
    4: [
        Adapted(name, mesh, peft=EXPERTS)
        for name in ("mixtral", "qwen3_moe")
        for mesh in ("ep2_tp2", "dp_shard2_ep2", "pp2_ep2", "dp_shard2_tp2_sp", "ep2_cp2")
    ],
}
"""Cases of `make parity`."""
CHOSEN = {2: CASES[2] + MORE_CASES[2], 4: MORE_CASES[4]} if PARITY else CASES


def of_peft(model: nn.Module, values: dict[str, torch.Tensor]) -> dict[str, tuple[str, torch.Tensor]]:
    """Return peft's name and value of each of our adapter parameters, by our name."""
    found = {}
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        if leaf in ("lora_A", "lora_B"):
            found[name] = (f"{name}.default.weight", value)
            continue
        adapted = list(model.get_submodule(path).adapted)
        matrix, factor = leaf[: -len("_lora_A")], leaf[-len("lora_A") :]
        wrapper = path + ".base_layer" * (len(adapted) - 1 - adapted.index(matrix))
        experts = value.shape[0]
        if factor == "lora_A":
            flat = torch.cat([value[expert] for expert in range(experts)])
        else:
            ranks = range(value.shape[2])
            flat = torch.stack([value[expert, :, rank] for rank in ranks for expert in range(experts)], dim=1)
        found[name] = (f"{wrapper}.{factor}.default.weight", flat)
    return found


def expected_curve(case: Adapted) -> Curve:
    """Train with the peft library in one process, from the values that our adapters have."""
    adapted, model = ours(replace(case, dtype=torch.float64)), build(replace(case, dtype=torch.float64))
    peft.inject_adapter_in_model(lora_config(case.peft, target_parameters=case.peft.target_parameters), model)
    values = of_peft(adapted, adapter_values(adapted))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in values.values()}
    with torch.no_grad():
        for name, value in values.values():
            model.get_parameter(name).copy_(value)
    curve = reference(grid.case_of(case.model, case.dtype), model)
    layout = of_peft(adapted, {name: torch.arange(each.numel()).reshape(each.shape) for name, each in
                               adapter_values(adapted).items()})  # fmt: skip
    gradients = {}
    for name, (theirs, positions) in layout.items():
        flat = torch.empty(positions.numel(), dtype=torch.float64)
        flat[positions.flatten()] = curve.gradients[theirs].flatten()
        gradients[name] = flat.reshape(adapted.get_parameter(name).shape)
    curve.gradients = gradients
    return curve


@pytest.mark.parametrize("world", CHOSEN)
@pytest.mark.timeout(3600)
def test_experts_adapters_match_the_peft_library(world: int) -> None:
    built = [(case, ours(case), expected_curve(case)) for case in CHOSEN[world]]

    def on_rank(rank: int) -> list[grid.Finding]:
        return [grid.run_cell(world, case.cell(world), case.dtype, model, curve) for case, model, curve in built]

    findings = [grid.merge(each) for each in zip(*run_ranks(world, on_rank, timeout=1200), strict=True)]
    assert not problems_of(findings), problems_of(findings)


class _Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        """Write nothing: the adapter is loaded without a tokenizer."""


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_exported_adapter_is_loaded_by_peft_and_merges(name: str, tmp_path: Path) -> None:
    """gpt_oss stores its matrices as (experts, in, out)."""
    case = Adapted("qwen3_moe", "", torch.float32, EXPERTS, config={"vocab_size": 272})
    if name == "mixtral":
        case = replace(case, model=name)
    if name == "gpt_oss":
        case = replace(case, config={"model_type": name, "vocab_size": 272, **GPT_OSS})
    base, model = build(case).eval(), ours(case).eval()
    base.save_pretrained(tmp_path / "base")
    tokenizer: Any = _Tokenizer()
    model.built_from = ModelConfig(path=str(tmp_path / "base"))
    models.write_adapter(
        model,
        tokenizer,
        tmp_path / "adapter",
        {key: full for key, full in gathered_tensors(model, [], trained=True) if full is not None},
        case.peft,
    )
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).eval(), tmp_path / "adapter"
    )
    expected = logits(model)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)
    assert (logits(base) - expected).abs().max() > 1e-2
    with models.adapters_off(model):
        torch.testing.assert_close(logits(model), logits(base))
    models.export_model(model, tokenizer_with_ids(), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)


def tokenizer_with_ids() -> Any:
    tokenizer: Any = _Tokenizer()
    tokenizer.bos_token_id = tokenizer.eos_token_id = tokenizer.pad_token_id = tokenizer.chat_template = None
    return tokenizer


def test_run_with_adapted_experts_resumes_on_another_mesh(tmp_path: Path) -> None:
    case = Adapted("qwen3_moe", "", torch.float32, EXPERTS)
    model, other = ours(case), ours(case)
    for parameter in other.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter)  # loading must replace all of them

    def run(rank: int) -> Any:
        first = start(cell_named("qwen3_moe", "ep2", 2), model)
        first.train(2)
        checkpoint.save_checkpoint(
            tmp_path, first.state.step, first.model, first.optimizer, first.extra(), CheckpointConfig(keep=1)
        )
        saved, losses = whole(first), first.train(2)[0]
        second = start(cell_named("qwen3_moe", "tp2", 2), other)
        found = checkpoint.find_checkpoint(tmp_path, "auto")
        assert found is not None
        second.take(checkpoint.load_checkpoint(found, second.model, second.optimizer))
        return saved, whole(second), losses, second.train(2)[0]

    saved, loaded, losses, resumed = run_ranks(2, run, timeout=120)[0]
    adapters = [name for name in saved if "lora_" in name]
    assert any("experts.gate_up_proj_lora_B" in name for name in adapters)
    assert all(torch.equal(saved[name], loaded[name]) for name in adapters)
    assert resumed == pytest.approx(losses, rel=1e-5)


def test_initial_factors_do_not_depend_on_the_mesh() -> None:
    model = ours(Adapted("qwen3_moe", "", torch.float32, EXPERTS))

    def factors(rank: int) -> dict[str, torch.Tensor]:
        placed = place_on_mesh(model, "ep2", torch.float32)
        models.lora.initialize_adapters(placed, 5)
        return {name: each.full_tensor().detach() for name, each in placed.named_parameters() if "experts." in name}

    models.lora.initialize_adapters(model, 5)
    for name, value in run_ranks(2, factors)[0].items():
        assert torch.equal(value, model.get_parameter(name)), name
        assert (value.abs().max() > 0) != name.endswith("lora_B"), name


@pytest.mark.parametrize(
    ("model", "target", "message"),
    [
        (
            "mixtral",
            "experts.gate_up",
            "MixtralForCausalLM has no such parameter; did you mean mlp.experts.gate_up_proj",
        ),
        ("mixtral", "mlp.gate.weight", "is not a matrix of fused experts; linear layers belong into peft.targets"),
        ("llama", "experts.down_proj", "LlamaForCausalLM has no fused experts; remove peft.target_parameters"),
    ],
)
def test_wrong_names_are_rejected(model: str, target: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ours(Adapted(model, "", peft=replace(ATTENTION, target_parameters=[target])))
    assert message in str(caught.value)
