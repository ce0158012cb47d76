"""The cases of cases.py for commit 0a6a30f, the code before it was prepared for GPUs: see before.py.

Runs within a checkout of that commit, so its imports are those of that commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.pipelining.stage import InferenceMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from components import data, distributed, models, training
from components.config.schema import FinetuneConfig, ModelConfig, OptimizerConfig, ParallelismConfig, PeftConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import WeightInit
from components.config.schema.parallelism import ActivationCheckpointing, Strategy
from components.data.dataset import Dataset, Facts
from tests.gpu_ready.device import FakeCuda, Record, decomposed_silu
from tests.gpu_ready.roofline import Costs

CUDA = torch.device("cuda", 0)
CONFIG: dict[str, Any] = {"model_type": "llama", "vocab_size": 128, "tie_word_embeddings": False}


@dataclass
class FakeRun:
    """The objects of a recipe at the start of its training loop."""

    replica: Any
    optimizer: torch.optim.Optimizer
    settings: training.StepSettings
    batches: data.TrainBatches


def import_all() -> None:
    """Import modules that the cases import lazily, so that forked processes inherit them."""
    import torch._dynamo  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    distributed.parallelize, models.materialize, training.train_step  # noqa: B018


def config_of(model: dict[str, Any], axes: dict[str, Any], peft: str, pack: bool) -> FinetuneConfig:
    """Return the config of a run; axes: the `parallelism` section, `strategy` included."""
    values = {each: value for each, value in model.items() if each not in ("config", "fused")}  # it has no model.fused
    axes = {"dp_shard": 1, **axes, "strategy": Strategy(axes.get("strategy", "fsdp2"))}
    return FinetuneConfig(
        model=ModelConfig(
            init=WeightInit.random, tokenizer="bytes", config={**CONFIG, **model.get("config", {})}, **values
        ),
        data=DocsDataConfig(pack=pack),
        parallelism=ParallelismConfig(**axes),
        peft=PeftConfig(method=peft),
    )


def full_rows(seq_len: int, documents: int, pack: bool) -> Any:
    """Return rows of equally long documents whose tokens are all targets."""
    examples = [data.Example([1] * (seq_len // documents), [1] * (seq_len // documents))] * (64 * documents)
    if not pack:
        return examples
    return data.PackedDataset(Dataset(examples, None, facts=Facts("here"), seq_len=seq_len), seq_len)


@contextmanager
def fake_run(cfg: FinetuneConfig, rows: Any, world: int, rank: int) -> Iterator[FakeRun]:
    """Build a run in the order of that commit's recipes/finetune.py; its collectives return immediately."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    with FakeCuda():
        mesh = distributed.build_mesh(cfg.parallelism, "cuda")
        compute_dtype, _ = training.compute_dtype(cfg.model, CUDA)
        model = models.build_on_meta(cfg.model, cfg.model.config["vocab_size"])
        models.add_adapters(model, cfg.peft)
        layout = distributed.parallelize(model, mesh, cfg.parallelism, compute_dtype)
        token_loss = training.attach_token_loss(model, cfg, mesh, layout.stages, CUDA)
        if cfg.parallelism.activation_checkpointing != ActivationCheckpointing.auto:
            models.checkpoint_activations(model, cfg.parallelism.activation_checkpointing)
        models.materialize(model, CUDA)
        replica = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout)
        settings = training.StepSettings(
            device=CUDA,
            defer_grad_sync=cfg.parallelism.defer_grad_sync,
            mesh=mesh,
            autocast=training.autocast_dtype(cfg.parallelism, cfg.model, compute_dtype),
            token_loss=token_loss,
        )
        plan = data.BatchPlan(
            global_batch_size=cfg.training.global_batch_size,
            micro_batch_size=cfg.training.micro_batch_size,
            dp_rank=mesh.rank("dp"),
            dp_size=mesh.size("dp"),
        )
        padding = data.Padding(multiple=mesh.sequence_multiple)
        batches = data.TrainBatches(rows, plan, seed=5, padding=padding)
        yield FakeRun(replica, training.build_optimizer(model, OptimizerConfig()), settings, batches)


@contextmanager
def without_votes() -> Iterator[None]:
    """Skip the exchange of shapes between stages, and the read of routing by the host: no ranks and no values."""

    def use_static(schedule: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    def balanced(counts: torch.Tensor) -> list[list[int]]:
        return [[BALANCED.rows // counts.shape[1]] * counts.shape[1]] * 2

    votes, tolist = _PipelineSchedule._warmup_p2p, FakeTensor.tolist
    _PipelineSchedule._warmup_p2p, FakeTensor.tolist = use_static, balanced
    yield
    _PipelineSchedule._warmup_p2p, FakeTensor.tolist = votes, tolist


@dataclass
class Balanced:
    """Routing in which each rank gets as many tokens."""

    rows: int = 0
    """Tokens of a micro-batch times experts per token."""


BALANCED = Balanced()


def step(
    axes: dict[str, Any], world: int = 1, rank: int = 0, *, rows: list[int], model: dict[str, Any], peft: str = "none",
    pack: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Run two optimizer steps on full rows; return the record of the second."""
    cfg = config_of(model, axes, peft, pack)
    seq_len, cfg.training.micro_batch_size, count = rows
    cfg.training.seq_len = seq_len
    dp = cfg.parallelism.dp_replicate * cfg.parallelism.dp_shard * cfg.parallelism.ep
    cfg.training.global_batch_size = count * cfg.training.micro_batch_size * dp
    BALANCED.rows = cfg.training.micro_batch_size * seq_len * cfg.model.config.get("num_experts_per_tok", 0)
    with fake_run(cfg, full_rows(seq_len, 8 if pack else 1, pack), world, rank) as run, without_votes():
        training.train_step(run.replica, run.batches.at(0), run.optimizer, run.settings)
        micro_batches = run.batches.at(1)
        with Record(seq_len) as record:
            training.train_step(run.replica, micro_batches, run.optimizer, run.settings)
    return {
        "waits": dict(record.waits),
        "masks": dict(record.masks),
        "operators": dict(record.operators),
        "micro_batches": len(micro_batches),
        "launches": dict(record.launches),
        "moved": dict(record.moved),
    }


def costs(
    model: dict[str, Any], peft: str = "none", seq_len: int = 4096, micro_batch_size: int = 4,
    global_batch_size: int = 8, documents: int = 1, whole_silu: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Return the operators of the second step of one device, packed rows of equal documents, for roofline.py.

    whole_silu: Whether the backward of SiLU counts as one operator, as on a GPU, or as the six of fake tensors.
    """
    cfg = config_of(model, {"strategy": "single"}, peft, pack=True)
    cfg.training.micro_batch_size, cfg.training.global_batch_size = micro_batch_size, global_batch_size
    cfg.training.seq_len = seq_len
    silu = nullcontext() if whole_silu else decomposed_silu()
    with silu, fake_run(cfg, full_rows(seq_len, documents, pack=True), 1, 0) as run:
        training.train_step(run.replica, run.batches.at(0), run.optimizer, run.settings)
        micro_batches = run.batches.at(1)
        with Costs(cfg.model.config["vocab_size"]) as recorded:
            training.train_step(run.replica, micro_batches, run.optimizer, run.settings)
    return {kind: [[*each, number] for each, number in kept.items()] for kind, kept in recorded.operators.items()}
