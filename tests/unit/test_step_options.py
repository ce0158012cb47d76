"""Steps that combine options without host syncs, and run.deterministic."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from components import distributed, models, training
from components.config.mesh_rules import layout_of
from components.config.schema import ActivationCheckpointing, FinetuneConfig, ModelConfig, ParallelismConfig, PeftConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import DType, Float8, LossMethod, WeightInit
from components.config.schema.optimizer import AdamWConfig
from components.config.schema.run import RunConfig
from components.config.schema.training import TrainingConfig
from components.launch.machine import set_deterministic_variables
from components.models.quantization import float8_layers
from components.models.weights.shards import local_part
from components.protocol.errors import ConfigError
from components.training.prepared import deterministic_kernels
from tests.distributed.adapted import DORA, LORA, QLORA
from tests.distributed.packed import SEQ_LEN, batches_of, packed
from tests.distributed.tiny_runs import build, cell_named, start
from tests.harness import run_ranks
from tests.optional import SHARDS_BYTES, need_torchao
from tests.tiny_models import FAMILIES

SYNC_OPERATORS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "unique2")
"""aten operators that sync: the host needs their result, or an output shape depends on it."""


@dataclass(frozen=True)
class StepOptions:
    """Options of a step on packed rows with the chunked loss."""

    peft: PeftConfig
    recompute: ActivationCheckpointing
    compile: bool = False
    float8: Float8 = Float8.none

    def __str__(self) -> str:
        parts = [self.peft.method, self.recompute, "compile" if self.compile else "", self.float8]
        return " ".join(str(part) for part in parts if part not in ("", "none"))


PLAIN = StepOptions(changed(LORA, dropout=0.1), ActivationCheckpointing.none)
ADAPTED = StepOptions(changed(DORA, dropout=0.1), ActivationCheckpointing.selective)
QUANTIZED = StepOptions(changed(QLORA, dropout=0.1), ActivationCheckpointing.selective)
COMPILED = StepOptions(changed(QLORA, dropout=0.1), ActivationCheckpointing.full, compile=True)
FLOAT8 = [
    StepOptions(PeftConfig(), ActivationCheckpointing.selective, float8=recipe)
    for recipe in (Float8.tensorwise, Float8.rowwise)
]


def build_model(
    options: StepOptions, layout: ParallelismConfig | None = None
) -> tuple[Any, training.TokenLoss, ModelConfig]:
    """Build a model as a recipe does, on the meta device."""
    cfg = FinetuneConfig(
        model=ModelConfig(
            init=WeightInit.random, tokenizer="bytes", config={**FAMILIES["qwen3"], "num_hidden_layers": 1},
            dtype=DType.bfloat16, loss=LossMethod.chunked, float8=options.float8,
            float8_emulate=options.float8 != Float8.none,
        ),
        data=DocsDataConfig(pack=True), training=TrainingConfig(seq_len=SEQ_LEN, micro_batch_size=2),
    )  # fmt: skip
    model = models.build_on_meta(cfg.model)
    models.add_adapters(model, options.peft)
    mesh = None
    if layout is not None:
        mesh = distributed.build_mesh(layout, "cpu")
        distributed.parallelize(model, mesh, layout, torch.bfloat16)
    loss = training.attach_loss_head(model, cfg.model, cfg.training, cfg.parallelism, mesh, None, torch.device("meta"))
    assert loss.takes_targets
    models.checkpoint_activations(model, options.recompute)
    if options.compile:
        models.compile_layers(model, backend="eager")
    return model, loss, cfg.model


@pytest.mark.parametrize("options", [PLAIN, ADAPTED, QUANTIZED, COMPILED, *FLOAT8], ids=str)
def test_step_with_combined_options_has_no_host_sync(options: StepOptions) -> None:
    """On the meta device every host sync raises. Rows come from the host, as in a recipe."""
    if options.float8 != Float8.none:
        need_torchao()
    model, loss, _ = build_model(options)
    assert bool(float8_layers(model)) == (options.float8 != Float8.none)
    optimizer = training.build_optimizer(model, AdamWConfig())
    settings = training.StepSettings(torch.device("meta"), loss_head=loss)
    vector = training.train_step(training.Prepared(model, settings), batches_of(packed(), micro=2).at(0), optimizer)
    assert vector.vector.is_meta
    assert vector.vector.shape == (len(training.FIELDS),)


class NoHostSync(TorchDispatchMode):
    """Raises on operators that would make the host wait for a GPU; a CPU never does."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if func.overloadpacket.__name__ in SYNC_OPERATORS:
            raise RuntimeError(f"{func}: host sync")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [QUANTIZED if SHARDS_BYTES else ADAPTED], ids=str)
def test_fsdp2_step_with_prefetch_has_no_host_sync(options: StepOptions) -> None:
    """FSDP2 does not run on the meta device, so two CPU ranks raise on operators that would sync."""

    def body(rank: int) -> int:
        layout = layout_of("dp_shard2", ParallelismConfig(prefetch=1))
        model, loss, cfg = build_model(options, layout)
        models.materialize(model, "cpu")
        models.fill_weights(model, cfg, 0)
        optimizer = training.build_optimizer(model, AdamWConfig())
        settings = training.StepSettings(torch.device("cpu"), loss_head=loss)
        batches = batches_of(packed(), rank, 2, micro=1)
        # The first step initializes FSDP2 and the optimizer state.
        training.train_step(training.Prepared(model, settings), batches.at(0), optimizer)
        on_host = batches.at(1)
        no_sync = NoHostSync()
        with no_sync:
            training.train_step(training.Prepared(model, settings), on_host, optimizer)
        return no_sync.count

    assert min(run_ranks(2, body)) > 500


def test_no_host_sync_mode_raises_on_item() -> None:
    with pytest.raises(RuntimeError, match="host sync"), NoHostSync():
        torch.ones(3).sum().item()


ON = RunConfig(deterministic=True)


def state() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    filled = torch.utils.deterministic.fill_uninitialized_memory
    return (torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark, filled)


def test_context_restores_the_state_also_after_an_error() -> None:
    before = state()
    with deterministic_kernels():
        assert state() == (True, True, False, False)
    assert state() == before
    named = "run.deterministic=true: put_ has no deterministic kernel; set run"
    with pytest.raises(RuntimeError, match=named), deterministic_kernels():
        torch.ones(2).put_(torch.tensor([0]), torch.ones(1))
    with pytest.raises(RuntimeError, match=r"^another$"), deterministic_kernels():
        raise RuntimeError("another")
    assert state() == before


def test_variables_are_set_before_cuda_starts_and_keep_a_smaller_workspace() -> None:
    environ: dict[str, str] = {}
    set_deterministic_variables(RunConfig(), environ)
    assert environ == {}
    set_deterministic_variables(ON, environ)
    assert environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environ["FLASH_ATTENTION_DETERMINISTIC"] == environ["TORCHINDUCTOR_DETERMINISTIC"] == "1"
    environ = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    set_deterministic_variables(ON, environ)
    assert environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", "cuBLAS is not deterministic with CUBLAS_WORKSPACE_CONFIG=:0:0"),
        ("TORCHINDUCTOR_DETERMINISTIC", "0", "contradicts TORCHINDUCTOR_DETERMINISTIC=0"),
    ],
)
def test_variable_that_contradicts_the_setting_is_rejected(name: str, value: str, rule: str) -> None:
    environ = {name: value}
    with pytest.raises(ConfigError, match=f"run.deterministic=true: {rule}; unset the variable, or set it to"):
        set_deterministic_variables(ON, environ)
    set_deterministic_variables(RunConfig(), environ)
    assert environ == {name: value}


def test_two_runs_on_two_ranks_are_bit_equal() -> None:
    """The whole step of a mixture of experts under FSDP2: none of its operators lacks a deterministic kernel."""
    cell, built = cell_named("mixtral", "fsdp2", 2), build("mixtral")

    def weights(rank: int) -> list[torch.Tensor]:
        with deterministic_kernels():
            run = start(cell, built)
            losses, _ = run.train(2)
        return [torch.tensor(losses), *(local_part(each).detach() for each in run.model.parameters())]

    def compare(rank: int) -> bool:
        return all(torch.equal(one, other) for one, other in zip(weights(rank), weights(rank), strict=True))

    assert run_ranks(2, compare) == [True, True]
