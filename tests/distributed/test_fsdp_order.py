"""When FSDP2 gathers parameters: parallelism.prefetch and reshard_after_forward. test_step_variants.py: gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.tensor import DTensor

from components import distributed, models, training
from components.batch import Batch
from components.config.schema import AdamWConfig, ParallelismConfig, PeftConfig
from components.config.schema.model import LossMethod, ModelConfig
from components.config.schema.training import TrainingConfig
from components.training.step import forward_loss
from tests.distributed import parity
from tests.distributed.parity import build
from tests.harness import run_ranks

LAYERS = 5
DEEP = {**parity.MODELS["llama"], "num_hidden_layers": LAYERS}
TOKENS = torch.randint(3, 97, (2, 8), generator=torch.Generator().manual_seed(0))


def gathered(layers: list[Any]) -> list[int]:
    """Indices of the layers whose parameters are unsharded or being gathered."""
    groups = [layer._get_fsdp_state()._fsdp_param_group for layer in layers]
    return [index for index, group in enumerate(groups) if group.is_unsharded or group._all_gather_result is not None]


def test_prefetch_gathers_the_next_layers_ahead() -> None:
    def step(prefetch: int, reshard: bool) -> tuple[list[list[int]], list[list[int]]]:
        model: Any = build("llama", torch.float32, DEEP)
        models.use_causal_sdpa(model)
        config = ParallelismConfig(dp_shard=2, prefetch=prefetch, reshard_after_forward=reshard)
        mesh = distributed.build_mesh(config, "cpu")
        distributed.parallelize(model, mesh, config, torch.float32)
        layers: list[nn.Module] = list(model.model.layers)
        assert all(isinstance(layer, FSDPModule) for layer in layers)
        forward: list[list[int]] = []
        backward: list[list[int]] = []
        for layer in layers:
            layer.mlp.register_forward_hook(lambda *_: forward.append(gathered(layers)))
            layer.mlp.register_full_backward_pre_hook(lambda *_: backward.append(gathered(layers)))
        settings = training.StepSettings(device=torch.device("cpu"), mesh=mesh)
        optimizer = training.build_optimizer(model, AdamWConfig())
        training.train_step(training.Prepared(model, settings), [Batch.from_labels(TOKENS, TOKENS)], optimizer)
        return forward, backward

    cases = [(0, True), (1, True), (2, True), (2, False), (9, True)]
    orders = run_ranks(2, lambda _: [step(*case) for case in cases])
    for (prefetch, reshard), (forward, backward) in [
        *zip(cases, orders[0], strict=True),
        *zip(cases, orders[1], strict=True),
    ]:
        for layer, current in enumerate(forward):
            ahead = range(layer + 1, min(LAYERS, layer + 1 + prefetch))
            before = range(layer) if not reshard else []
            assert current == [*before, layer, *ahead]
        for layer, current in zip(reversed(range(LAYERS)), backward, strict=True):
            ahead = range(max(0, layer - max(prefetch, 1)), layer) if reshard else range(layer)
            assert current == [*ahead, layer]


@contextmanager
def recorded_units() -> Iterator[list[str]]:
    """Record the FSDP2 units whose parameters are gathered, "+unit", and whose gradients are reduced, "-unit"."""
    found: list[str] = []

    def recording(name: str, sign: str) -> Any:
        original = getattr(_fsdp_param_group, name)

        def record(parameters: list[Any], *args: Any) -> Any:
            unit = parameters[0]._param_fqn.removeprefix("model.").removeprefix("layers.")
            found.append(sign + unit.partition(".")[0])
            return original(parameters, *args)

        return original, record

    functions = {"foreach_all_gather": "+", "foreach_reduce": "-"}
    originals = {}
    for name, sign in functions.items():
        originals[name], wrapped = recording(name, sign)
        setattr(_fsdp_param_group, name, wrapped)
    yield found
    for name, original in originals.items():
        setattr(_fsdp_param_group, name, original)


def collectives_of_a_step(loss: LossMethod, peft: str = "none", tied: bool = False) -> dict[str, list[str]]:
    """Return the collectives of a forward without gradients and of a step of two micro-batches after it."""
    values = {**parity.MODELS["llama"], "num_hidden_layers": 3, "tie_word_embeddings": tied}
    model: Any = build("llama", torch.float32, values)
    anatomy = models.read_anatomy(model)
    if peft == "lora":
        models.add_adapters(model, PeftConfig(method="lora", targets=["all-linear"]))
    models.use_causal_sdpa(model)
    config, cpu = ParallelismConfig(dp_shard=2), torch.device("cpu")
    mesh = distributed.build_mesh(config, "cpu")
    layout = distributed.parallelize(model, mesh, config, torch.float32, anatomy)
    head = training.attach_loss_head(
        model, ModelConfig(path="x", loss=loss), TrainingConfig(), config, mesh, layout.stages, cpu
    )
    prepared = training.Prepared(model, training.StepSettings(device=cpu, mesh=mesh, loss_head=head))
    optimizer = training.build_optimizer(model, AdamWConfig())
    batch = Batch.from_labels(TOKENS, TOKENS)
    with recorded_units() as found:
        with torch.no_grad():
            forward_loss(prepared, batch)
        first = found.copy()
        found.clear()
        training.train_step(prepared, [batch, batch], optimizer)
    return {"forward": first, "step": found}


def test_norm_and_head_are_gathered_late_and_reduced_first() -> None:
    """The forward without gradients leaves the last layer and the head gathered for the step that follows it."""
    cases = [(LossMethod.logits, "none", False), (LossMethod.chunked, "none", False),
             (LossMethod.chunked, "lora", False), (LossMethod.logits, "none", True)]  # fmt: skip
    found = run_ranks(2, lambda _: [collectives_of_a_step(*case) for case in cases], timeout=120)
    for logits, chunked, lora, tied in found:
        assert logits["forward"] == ["+embed_tokens", "+0", "+1", "+2", "+norm"]
        first = ["+embed_tokens", "+0", "+1", "+1", "+0"]
        second = ["+embed_tokens", "+0", "+1", "+2", "+norm"]
        reduced = ["-norm", "+1", "-2", "+0", "-1", "-0", "-embed_tokens"]
        assert logits["step"] == [*first, *second, *reduced]
        assert chunked == logits
        assert lora["step"] == [*first, *second, "+1", "-2", "+0", "-1", "-0"]  # nothing frozen is gathered or reduced
        assert tied["forward"] == ["+embed_tokens", "+0", "+1", "+2"]
        assert tied["step"][-1] == "-embed_tokens"


def collectives_of_a_pipeline(reshard: str) -> tuple[list[str], bool]:
    """Return the collectives of a step of two micro-batches, and whether it leaves all parameters sharded."""
    model: Any = build("llama", torch.float32, {**parity.MODELS["llama"], "num_hidden_layers": 4})
    models.use_causal_sdpa(model)
    config = ParallelismConfig(pp=2, dp_shard=2, reshard_after_forward=reshard)
    mesh = distributed.build_mesh(config, "cpu")
    layout = distributed.parallelize(model, mesh, config, torch.float32)
    called = distributed.wrap_replicas(model, mesh, config, layout)
    prepared = training.Prepared(model, training.StepSettings(device=torch.device("cpu"), mesh=mesh), called)
    batch = Batch.from_labels(TOKENS, TOKENS)
    with recorded_units() as found:
        training.train_step(prepared, [batch, batch], training.build_optimizer(model, AdamWConfig()))
    return found, all(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_a_pipeline_gathers_each_unit_once_per_step() -> None:
    found = run_ranks(4, lambda _: [collectives_of_a_pipeline(each) for each in ("auto", "true")], timeout=120)
    units = [["embed_tokens", "0", "1"]] * 2 + [["2", "3", "norm"]] * 2
    for stage, ((once, is_sharded), (again, _)) in zip(units, found, strict=True):
        assert sorted(once) == sorted([f"{sign}{unit}" for unit in stage for sign in "+-"])
        assert is_sharded
        assert len(again) > len(once)  # the first layer, for a forward or a backward that follows a forward
