"""Packed rows on every mesh match their documents, forwarded one by one in one process.

float64: the logged loss and the gradient of every parameter within 1e-10, relative. The loss includes the router
auxiliary loss, which is computed per document.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch

from components import data, distributed, models, training
from components.config.schema import ModelConfig, ParallelismConfig, TrainingConfig
from components.config.schema.parallelism import ActivationCheckpointing
from components.protocol.errors import ConfigError
from tests.distributed.packed import (
    MODELS,
    ROWS,
    Step,
    batches_of,
    differences,
    documents,
    one_step,
    packed,
    reference,
)
from tests.distributed.parity import HYBRID_MODELS, build, build_hybrid, exact_loss
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import PARITY

AUX = 0.5
ONE = {"strategy": "fsdp2", "dp_shard": 1}
FSDP2 = {"strategy": "fsdp2", "dp_shard": -1}
GATHER, ULYSSES = ({**ONE, "cp": 2, "cp_attention": method} for method in ("all_gather", "ulysses"))
SP = {**ONE, "tp": 2, "sequence_parallel": True}
PP = {**ONE, "pp": 2}
HEADS, STATES = ({**ONE, "cp": 2, "cp_linear": method} for method in ("heads", "states"))
ROUTED = ("mixtral", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "granitemoehybrid")
UNSTAGED = ("zamba2",)  # and without a tp plan
SHAPES: dict[int, list[tuple[dict[str, Any], str, str]]] = {
    2: [
        *[(GATHER, "mixtral", ""), (ULYSSES, "mistral", ""), (ULYSSES, "mixtral", "full"), (GATHER, "gpt2", "full")],
        *[(PP, "mixtral", ""), ({**PP, "pp_schedule": "GPipe"}, "gpt2", "full"), ({**ONE, "tp": 2}, "mistral", "")],
        *[(SP, "mixtral", ""), (FSDP2, "mistral", "full"), ({**ONE, "ep": 2}, "mixtral", "full")],
        *[({"strategy": "ddp", "dp_shard": 1, "dp_replicate": 2}, "mistral", "")],
        *[({**PP, "pp_schedule": "ZBVZeroBubble"}, "mistral", "")],
        *[(GATHER, "deepseek_v3", ""), (ULYSSES, "deepseek_v3", ""), (GATHER, "gpt_oss", ""), (ULYSSES, "gpt_oss", "")],
        *[(HEADS, "qwen3_5_text", ""), (STATES, "qwen3_next", "full"), (HEADS, "nemotron_h", "full")],
        *[(STATES, "nemotron_h", ""), (STATES, "kimi_linear", ""), (HEADS, "kimi_linear", "full")],
        *[(HEADS, "lfm2", ""), (FSDP2, "bamba", ""), (PP, "falcon_h1", ""), (PP, "qwen3_5_text", "full")],
        *[({**PP, "pp_schedule": "ZBVZeroBubble"}, "nemotron_h", "")],  # a stage of an MLP only
    ],
    4: [
        *[({**GATHER, "pp": 2}, "mixtral", ""), ({**GATHER, "ep": 2}, "mixtral", ""), ({**SP, "cp": 2}, "mistral", "")],
        *[({**PP, "tp": 2}, "mistral", ""), ({**ULYSSES, "pp": 2}, "gpt2", "")],
        *[({**FSDP2, "cp": 2}, "mixtral", "full"), ({**PP, "ep": 2}, "mixtral", "")],
        *[({**FSDP2, "cp": 2}, "gpt_oss", "full"), ({**GATHER, "tp": 2}, "gpt_oss", "")],
        *[({**ONE, "cp": 4, "cp_linear": method}, name, "") for name in HYBRID_MODELS for method in ("auto", "states")],
        *[({**HEADS, "pp": 2}, name, "full") for name in HYBRID_MODELS if name not in UNSTAGED],
        *[({**STATES, "dp_shard": 2}, name, "selective") for name in HYBRID_MODELS],
        *[({**ONE, "tp": 4}, name, "") for name in HYBRID_MODELS if name not in UNSTAGED],
        *[({**HEADS, "tp": 2}, name, "full") for name in HYBRID_MODELS if name not in UNSTAGED],
        *[({**FSDP2, "tp": 2, "sequence_parallel": True}, name, "") for name in HYBRID_MODELS if name not in UNSTAGED],
        *[({**HEADS, "ep": 2}, name, "") for name in ("qwen3_next", "nemotron_h", "kimi_linear", "granitemoehybrid")],
    ],
}  # fmt: skip
if PARITY:
    SHAPES[2] += [(shape, name, "full") for shape in (HEADS, STATES, FSDP2) for name in HYBRID_MODELS]
    SHAPES[2] += [(PP, name, "") for name in HYBRID_MODELS if name not in UNSTAGED]
"""World size -> (parallelism, model, recompute policy of layers and whether they are compiled)."""
WORLDS = (2, 4) if PARITY else (2,)


def on_mesh(plain: torch.nn.Module, shape: dict[str, Any], recompute: str) -> tuple[Step, float]:
    """Return the logged loss, the full gradients of this rank's parameters, and the evaluation loss of all rows."""
    config = ParallelismConfig(**shape)
    mesh = distributed.build_mesh(config, "cpu")
    model: Any = copy.deepcopy(plain).train()
    models.use_causal_sdpa(model)
    layout = distributed.parallelize(model, mesh, config, torch.float64)
    cfg = ModelConfig(path="made here", router_aux_coef=AUX if model.config.model_type in ROUTED else None)
    cfg.loss = exact_loss(model.config.model_type)
    loss = training.attach_routers(model, cfg, mesh)
    if policy := recompute.removesuffix(" compiled"):
        models.checkpoint_activations(model, ActivationCheckpointing(policy))
    if "compiled" in recompute:
        models.compile_layers(model, backend="aot_eager")
    called = distributed.wrap_replicas(model, mesh, config, layout)
    head = training.attach_loss_head(model, cfg, TrainingConfig(), config, mesh, layout.stages, torch.device("cpu"))
    settings = training.StepSettings(torch.device("cpu"), max_grad_norm=0.0, mesh=mesh, routers=loss, loss_head=head)
    rows, dp = packed(), (mesh.rank("dp"), mesh.size("dp"))
    # Rows in the places that a run gives them: the reference takes them as they are drawn.
    batches = batches_of(rows, *dp, deals=True, pp=mesh.size("pp"))
    step = one_step(model, called, batches.at(0), settings)
    padding = data.Padding(multiple=mesh.sequence_multiple)
    plan = data.BatchPlan(
        global_batch_size=2 * dp[1], micro_batch_size=2, dp_rank=dp[0], dp_size=dp[1], padding=padding
    )
    held_out = data.EvalBatches(rows, plan)
    return step, training.evaluate(training.Prepared(model, settings, called), held_out).loss


@pytest.mark.parametrize("world_size", WORLDS)
def test_packed_rows_match_separate_documents_on_every_mesh(world_size: int) -> None:
    rows = packed()
    trained = dict.fromkeys(name for _, name, _ in SHAPES[world_size])
    built = {
        name: build_hybrid(name) if name in HYBRID_MODELS else build(name, torch.float64, MODELS[name])
        for name in trained
    }
    expected = {name: reference(model, documents(rows), AUX * (name in ROUTED)) for name, model in built.items()}
    samples = list(rows._samples)
    held_out = {name: reference(model, samples)[0] for name, model in built.items()}
    assert len(documents(rows)) > 2 * ROWS

    def on_rank(rank: int) -> list[tuple[str, set[str], list[str]]]:
        found = []
        for shape, name, recompute in runnable(SHAPES[world_size]):
            step, evaluated = on_mesh(built[name], shape, recompute)
            problems = differences(expected[name], step)
            if evaluated != pytest.approx(held_out[name], rel=1e-12):
                problems.append(f"evaluation {evaluated!r}, not {held_out[name]!r}")
            found.append((f"{name} {shape} {recompute}", set(step[1]), problems))
        return found

    ranks = run_ranks(world_size, on_rank, timeout=600)
    for cases in zip(*ranks, strict=True):
        name = cases[0][0]
        assert not [line for _, _, problems in cases for line in problems], name
        seen = set.union(*(names for _, names, _ in cases))
        assert seen == set(dict(built[name.split()[0]].named_parameters())), name


def test_a_function_that_does_not_get_its_shard_of_rows_is_rejected() -> None:
    """Without packed rows too, where no document bounds would show it."""
    plain: Any = build("bamba", torch.float64)
    config = ParallelismConfig(**HEADS)

    def problems_of_rank(rank: int) -> list[str]:
        model: Any = copy.deepcopy(plain)
        models.use_causal_sdpa(model)
        distributed.parallelize(model, distributed.build_mesh(config, "cpu"), config, torch.float64)
        modeling: Any = sys.modules[type(plain).__module__]
        tokens = torch.arange(3, 11)[None]
        modeling.mamba2_chunk_scan = modeling.mamba2_chunk_scan.args[0]  # transformers' own, in this process
        with pytest.raises(ConfigError) as caught:
            model(input_ids=tokens, position_ids=tokens)
        return caught.value.problems

    for problems in run_ranks(2, problems_of_rank):
        assert "parallelism.cp=2: BambaForCausalLM did not pass its keywords to mamba2_chunk_scan," in problems[0]


@pytest.mark.skipif(not PARITY, reason="compiles on four ranks: make parity")
def test_compiled_layers_with_gathered_keys_and_tp_match_one_process() -> None:
    """torch cannot compile the recomputation of this attention, so it stays outside the graphs of the layers."""
    model, rows = build("phi3", torch.float64), packed()
    expected = reference(model, documents(rows))
    ranks = run_ranks(4, lambda rank: on_mesh(model, {**GATHER, "tp": 2}, "full compiled")[0], timeout=240)
    assert not [line for step in ranks for line in differences(expected, step)]
