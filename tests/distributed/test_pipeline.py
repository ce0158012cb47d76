"""Pipeline stages hold only their own parameters; evaluation and generation on any mesh match one process.

The reference is the transformers model in one process, trained with plain PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from components import distributed, models, training
from components.batch import Batch
from components.checkpoint import load_checkpoint, save_checkpoint
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import ModelConfig, WeightInit
from components.config.schema.parallelism import ActivationCheckpointing, ParallelismConfig
from components.config.schema.run import CheckpointConfig
from components.config.shape import stage_layers
from components.distributed.mesh import Mesh
from components.distributed.parallelizer import Layout
from components.distributed.pipeline_schedule import _check_outputs
from components.protocol.errors import ConfigError
from components.training.evaluation import generation_forward
from scripts._memory.ranks import allocations, highest, local_bytes
from tests.distributed import tiny_runs
from tests.distributed.packed import batches_of, packed
from tests.distributed.parity import SMALL, Case, Sample, build, pad, recipe_config, samples_of_step
from tests.harness import run_ranks
from tests.optional import runnable
from tests.suites import PARITY, select
from tests.tiny_models import tiny_config

LAYERS, LR = 8, 0.5
FAMILIES = {"llama": "tied", "llama3": "untied", "gpt2": "tied", "mixtral": "untied"}
PREFIX = {"llama": "model.layers", "llama3": "model.layers", "gpt2": "transformer.h"}
FIRST = {"llama": {"model.embed_tokens.weight"}, "llama3": {"model.embed_tokens.weight"},
         "gpt2": {"transformer.wte.weight", "transformer.wpe.weight"}}  # fmt: skip
LAST = {"llama": {"model.norm.weight"}, "llama3": {"model.norm.weight", "lm_head.weight"},
        "gpt2": {"transformer.ln_f.weight", "transformer.ln_f.bias"}}  # fmt: skip
PROMPTS = ["*7 1,", "the longer of the two prompts"]
NEW_TOKENS = 6
SAMPLING = models.Sampling(temperature=0.8, top_p=0.9, seed=3)


@dataclass
class Run:
    """A model parallelized on a mesh."""

    mesh: Mesh
    config: ParallelismConfig
    model: PreTrainedModel
    layout: Layout
    replica: Any

    @property
    def settings(self) -> training.StepSettings:
        return training.StepSettings(device=torch.device("cpu"), max_grad_norm=0.0, mesh=self.mesh)


def start(cfg: ModelConfig, axes: dict[str, Any]) -> Run:
    """Build, parallelize and load a model in the same way as the recipes."""
    config = ParallelismConfig(**{"dp_shard": 1, **axes})
    mesh = distributed.build_mesh(config, "cpu")
    model = models.build_on_meta(cfg)
    layout = distributed.parallelize(model, mesh, config, torch.float32)
    models.materialize(model, "cpu")
    models.fill_weights(model, cfg, seed=5)
    return Run(mesh, config, model, layout, distributed.wrap_replicas(model, mesh, config, layout))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    """A model of each family with random parameters, saved by transformers."""
    folder = tmp_path_factory.mktemp("models")
    for family, tied in FAMILIES.items():
        torch.manual_seed(3)
        config = tiny_config(family)
        config.num_hidden_layers = LAYERS
        config.use_cache = False
        if hasattr(config, "intermediate_size"):
            config.intermediate_size = 128  # makes a layer larger than the embedding
        for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            if hasattr(config, dropout):
                setattr(config, dropout, 0.0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if "norm" in name or "ln_" in name else 0.0))
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (tied == "tied")
        model.save_pretrained(folder / family)
    return {family: ModelConfig(path=str(folder / family), tokenizer="bytes") for family in FAMILIES}


def reference(cfg: ModelConfig) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(str(cfg.path), dtype=torch.float32).eval()


INTERLEAVED = {"pp_schedule": "Interleaved1F1B"}
STAGES = [(family, *of_mesh) for family in PREFIX for of_mesh in ((2, {}), (4, {}), (2, INTERLEAVED))]
STAGES_AT_EACH_COMMIT = [("llama3", 2, {}), ("gpt2", 4, {}), ("llama", 2, INTERLEAVED)]


@pytest.mark.parametrize(("family", "pp", "axes"), select(STAGES, STAGES_AT_EACH_COMMIT, PARITY))
def test_pipeline_stage_holds_only_its_own_parameters(
    family: str, pp: int, axes: dict[str, Any], saved: dict[str, ModelConfig]
) -> None:
    """Checked by name, by value, and by the bytes allocated while the model is built and loaded."""
    expected_model = reference(saved[family])
    stage_ranks = ParallelismConfig(pp=pp, **axes).stage_ranks(pp)
    ranges = stage_layers(LAYERS, len(stage_ranks))
    mapped = (Path(str(saved[family].path)) / "model.safetensors").stat().st_size
    assert sorted(layer for each in ranges for layer in each) == list(range(LAYERS))

    def body(rank: int) -> dict[str, Any]:
        with allocations() as changes:
            run = start(saved[family], {"pp": pp, **axes})
        # A memory-mapped file is not resident memory.
        changes = [change for change in changes if abs(change) != mapped]
        for name, parameter in run.model.named_parameters():
            assert torch.equal(parameter.full_tensor(), expected_model.get_parameter(name)), name
        stages = run.layout.stages
        assert stages is not None
        copies = [] if stages.tied_head is None else [stages.tied_head.weight]
        counts = models.count_parameters(run.model)
        models.checkpoint_activations(run.model, ActivationCheckpointing.alternate)
        return {
            "counts": (counts.total, counts.trainable, counts.local_bytes),
            "recomputed": [isinstance(layer.forward, partial) for layer in models.decoder_layers(run.model)],
            "names": [name for name, _ in run.model.named_parameters()],
            "copied_bytes": local_bytes(copies),
            "model_bytes": local_bytes([*run.model.parameters(), *copies, *run.model.buffers()]),
            "allocated": sum(changes),
            "peak": highest(changes),
        }

    reports = run_ranks(pp, body, timeout=120)
    names = [name for each in reports for name in each["names"]]
    total = sum(parameter.numel() for parameter in expected_model.parameters())
    # The stages partition the parameters of the model.
    assert sorted(names) == sorted(name for name, _ in expected_model.named_parameters())
    for rank, each in enumerate(reports):
        held = {layer for index, stage_rank in enumerate(stage_ranks) if stage_rank == rank for layer in ranges[index]}
        assert each["recomputed"] == [layer in held and layer % 2 == 0 for layer in range(LAYERS)]
        buffers = local_bytes(expected_model.buffers())
        assert each["counts"] == (total, total, each["model_bytes"] - each["copied_bytes"] - buffers)
        expected = {name for name in names if name.startswith(tuple(f"{PREFIX[family]}.{layer}." for layer in held))}
        expected |= FIRST[family] if stage_ranks[0] == rank else set()
        expected |= LAST[family] if stage_ranks[-1] == rank else set()
        assert set(each["names"]) == expected
        # A tied head is not a parameter: each step, the last stage receives a copy of the embedding for it.
        head = local_bytes([expected_model.get_input_embeddings().weight])
        assert each["copied_bytes"] == (head if FAMILIES[family] == "tied" and stage_ranks[-1] == rank else 0)
        layer = local_bytes(
            p for name, p in expected_model.named_parameters() if name.startswith(f"{PREFIX[family]}.0.")
        )
        assert each["model_bytes"] <= each["allocated"] < each["model_bytes"] + layer / 2
        # Weights are read from disk straight into the parameters.
        assert each["peak"] < each["model_bytes"] + 3 * layer / 4


def local_batches(samples: list[Sample], mesh: Mesh, accumulation: int) -> list[Batch]:
    """Return this rank's micro-batches, each padded to its longest row."""
    per_rank = len(samples) // mesh.size("dp")
    local = samples[mesh.rank("dp") * per_rank :][:per_rank]
    size = per_rank // accumulation
    return [pad(local[first : first + size], mesh.sequence_multiple) for first in range(0, per_rank, size)]


def token_losses(model: PreTrainedModel, samples: list[Sample]) -> tuple[torch.Tensor, int]:
    """Return the sum of the token losses, with each sample forwarded alone, and the number of targets."""
    total, count = torch.zeros(()), 0
    for tokens, labels in samples:
        logits = model(input_ids=tokens[None], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits[:-1], labels[1:], ignore_index=-100, reduction="sum")
        count += int((labels[1:] != -100).sum())
    return total, count


@dataclass
class Results:
    """Held-out losses, and greedy answers before and after a training step, with a sampled one between them."""

    losses: list[float]
    answers: list[list[str]]


def expected_of(cfg: ModelConfig) -> Results:
    """Compute the reference in one process with plain PyTorch."""
    model, tokenizer, results = reference(cfg), models.load_tokenizer(cfg), Results([], [])
    for step in range(2):
        with torch.no_grad():
            total, count = token_losses(model, samples_of_step(50))
        results.losses.append(float(total / count))
        results.answers.append(models.generate(model, tokenizer, PROMPTS, NEW_TOKENS))
        if step == 0:
            results.answers.append(models.generate(model, tokenizer, PROMPTS[:1], NEW_TOKENS, sampling=SAMPLING))
            total, count = token_losses(model, samples_of_step(0))
            (total / count).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= LR * parameter.grad
    assert abs(results.losses[1] - results.losses[0]) > 0.01  # large enough to detect a stale weight
    greedy, sampled, after_step = results.answers
    assert greedy != after_step
    assert greedy[:1] != sampled
    return results


def results_on(run: Run, cfg: ModelConfig) -> Results:
    """Compute the results on a mesh, with four micro-batches of unequal sequence length."""
    tokenizer, results = models.load_tokenizer(cfg), Results([], [])
    optimizer = torch.optim.SGD(run.model.parameters(), lr=LR)
    accumulation = 4
    for step in range(2):
        held_out = local_batches(samples_of_step(50), run.mesh, accumulation)
        prepared = training.Prepared(run.model, run.settings, run.replica, run.config)
        loss = training.evaluate(prepared, held_out).loss
        results.losses.append(loss)
        with generation_forward(prepared, training.RunContext(run.mesh, run.settings.device), 2, 32) as forward:
            results.answers.append(models.generate(run.model, tokenizer, PROMPTS, NEW_TOKENS, forward))
            if step == 0:
                sampled = models.generate(run.model, tokenizer, PROMPTS[:1], NEW_TOKENS, forward, sampling=SAMPLING)
                results.answers.append(sampled)
        if step == 0:
            batches = local_batches(samples_of_step(0), run.mesh, accumulation)
            assert len({batch.shape[1] for batch in batches}) > 1
            training.train_step(prepared, batches, optimizer)
    return results


CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        *((family, {"pp": 2}) for family in (("llama", "llama3", "gpt2") if PARITY else ("gpt2",))),
        ("llama", {"pp": 2, "pp_schedule": "ZBVZeroBubble"}),  # the first and last stages are on one rank
        ("llama3", {"cp": 2}),
        ("llama", {"cp": 2, "cp_attention": "all_gather"}),
        ("llama", {"tp": 2, "sequence_parallel": True}),
        ("mixtral", {"ep": 2}),
    ],
    4: [
        ("llama3", {"pp": 2, "cp": 2}),
        ("llama", {"pp": 2, "tp": 2, "sequence_parallel": True}),
        ("mixtral", {"pp": 2, "ep": 2}),
        # With dp, sequence lengths differ between ranks, too.
        *([("llama3", {"pp": 2, "dp_shard": 2}), ("llama", {"pp": 4})] if PARITY else []),
    ],
}


@pytest.mark.parametrize("world", [2, 4] if PARITY else [4])
def test_losses_and_generations_on_every_mesh_match_one_process(world: int, saved: dict[str, ModelConfig]) -> None:
    cases = runnable(CASES[world])
    expected = {family: expected_of(saved[family]) for family in {family for family, _ in cases}}

    def body(rank: int) -> list[str]:
        problems = []
        for family, axes in cases:
            results, reference_results = results_on(start(saved[family], axes), saved[family]), expected[family]
            if results.losses != pytest.approx(reference_results.losses, rel=1e-5):
                problems.append(f"{family} {axes}: losses {results.losses}, not {reference_results.losses}")
            if results.answers != reference_results.answers:
                problems.append(f"{family} {axes}: answers {results.answers}, not {reference_results.answers}")
        return problems

    problems = [line for lines in run_ranks(world, body, timeout=240) for line in lines]
    assert not problems, "\n".join(sorted(set(problems)))


def test_frozen_tied_embedding_stays_as_it_is_on_both_stages() -> None:
    built = tiny_runs.build("llama_tied")

    def train(mesh: str, world: int) -> list[float]:
        run = tiny_runs.start(tiny_runs.cell_named("llama_tied", mesh, world), built)
        run.model.get_input_embeddings().requires_grad_(False)  # as docs/recipes.md
        losses, _ = run.train(3)
        for name, parameter in run.model.named_parameters():
            is_frozen = torch.equal(parameter.full_tensor(), built.get_parameter(name))
            assert is_frozen == ("embed_tokens" in name), name
        return losses

    (expected,) = run_ranks(1, lambda rank: train("fsdp2", 1))
    for mesh in runnable(["pp2", "pp2 ZBVZeroBubble"]):
        for losses in run_ranks(2, lambda rank, mesh=mesh: train(mesh, 2), timeout=60):
            assert losses == pytest.approx(expected, rel=1e-5)


def test_config_error_of_one_stage_is_raised_on_all_ranks() -> None:
    """Only stages with layers detect that they cannot attend to packed rows; no other stage waits for hidden states."""
    values = {**SMALL, "model_type": "nemotron"}
    case = Case("nemotron", {"strategy": "fsdp2", "dp_shard": 1, "pp": 2})
    model = build("nemotron", torch.float32, values)
    cfg = replace(recipe_config(case), data=DocsDataConfig(pack=True))
    rows = packed()

    def body(rank: int) -> list[str]:
        mesh = distributed.build_mesh(cfg.parallelism, "cpu")
        models.use_causal_sdpa(model)
        layout = distributed.parallelize(model, mesh, cfg.parallelism, torch.float32)
        replica = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout)
        settings = training.StepSettings(device=torch.device("cpu"), max_grad_norm=0.0, mesh=mesh)
        try:
            training.check_kernels(training.Prepared(model, settings, replica), cfg.model, batches_of(rows).at)
        except ConfigError as error:
            return error.problems
        return []

    (first, second) = run_ranks(2, body, timeout=120)
    assert len(first) == 1
    assert "data.pack=true: NemotronForCausalLM does not pass keywords on" in first[0]
    assert second == first


def test_checkpoint_of_one_stage_is_judged_alike_on_all_stages(saved: dict[str, ModelConfig], tmp_path: Path) -> None:
    """The checkpoint lacks a layer of the second stage. One whose norm is frozen now, on this stage only, is loaded."""
    for name, layers in (("shorter", LAYERS - 1), ("same", LAYERS)):
        config = {"num_hidden_layers": layers}
        cfg = ModelConfig(path=saved["llama3"].path, tokenizer="bytes", init=WeightInit.random, config=config)
        model = models.build_on_meta(cfg)
        models.materialize(model, "cpu")
        models.fill_weights(model, cfg, seed=5)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        save_checkpoint(tmp_path / name, 2, model, optimizer, {}, CheckpointConfig(keep=1))

    def body(rank: int) -> list[str]:
        messages = []
        for written in ("shorter", "same"):
            model = start(saved["llama3"], {"pp": 2}).model
            if rank == 1:
                model.model.norm.weight.requires_grad_(False)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            optimizer = torch.optim.AdamW(trained, fused=True)
            try:
                load_checkpoint(tmp_path / written / "checkpoints" / "step_2", model, optimizer)
                messages.append(f"{len(trained) - len(optimizer.state)} without state")
            except ConfigError as error:
                messages.append(str(error))
        return messages

    first, second = run_ranks(2, body)
    assert first == second
    assert f"lacks tensors of this model: model.layers.{LAYERS - 1}.self_attn.q_proj.weight" in first[0]
    assert first[1] == "0 without state"


def test_only_the_last_stage_may_return_another_dtype_than_it_was_built_with() -> None:
    """Nemotron-H returns logits in float32. torch 2.11 calls this check with each micro-batch."""
    sent = SimpleNamespace(stage_index=1, get_outputs_meta=lambda: (torch.empty(2, 4, 8, dtype=torch.bfloat16),))
    _check_outputs(sent, True, (torch.empty(2, 4, 8),))
    for last, shape in ((False, (2, 4, 8)), (True, (2, 4, 7))):
        with pytest.raises(RuntimeError, match="stage 1 of the pipeline returned"):
            _check_outputs(sent, last, (torch.empty(shape),))
