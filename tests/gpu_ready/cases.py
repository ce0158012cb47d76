"""Cases for `server.py`: training steps built as in the recipes, on fake CUDA tensors, as one rank of any world size.

Each case runs in a separate process and returns JSON-serializable values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.testing._internal.distributed.fake_pg import FakeStore

from components import data, distributed, models, training
from components.checkpoint.tensors import Optimizers, list_optimizers
from components.config.schema import AdamWConfig, FinetuneConfig, ModelConfig, ParallelismConfig, PeftConfig
from components.config.schema.data import DocsDataConfig
from components.config.schema.model import WeightInit
from components.config.schema.optimizer import AdamW8bitConfig, LionConfig, MuonConfig, NorMuonConfig
from components.config.schema.parallelism import ActivationCheckpointing, Strategy
from components.conversation import Prompt
from components.models import generation
from components.planning.fake_rank import StorageTracker
from components.training import evaluation
from components.training.attempt import GarbageCollection
from components.training.optimizers.gradients import SpikeWindow
from components.training.prepared import EmbeddingNoise
from tests.distributed.packed import ROWS, SEQ_LEN
from tests.gpu_ready import objectives
from tests.gpu_ready.device import FakeCuda, Record
from tests.gpu_ready.roofline import Costs
from tests.optional import find_optional

CUDA = torch.device("cuda", 0)
LAYERS = 2
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}  # fmt: skip


OPTIMIZERS = {
    "adamw": AdamWConfig,
    "adamw8bit": AdamW8bitConfig,
    "lion": LionConfig,
    "muon": MuonConfig,
    "normuon": NorMuonConfig,
}


@dataclass
class FakeRun:
    """The objects of a recipe at the start of its training loop."""

    cfg: FinetuneConfig
    model: training.Prepared
    objective: Any
    optimizer: Optimizers
    batches: data.TrainBatches


def import_all() -> None:
    """Import modules that the cases import lazily, so that forked processes inherit them."""
    import torch._dynamo  # noqa: F401
    import transformers.models.gemma3.modeling_gemma3
    import transformers.models.llama.modeling_llama  # noqa: F401

    distributed.parallelize, models.materialize, training.train_step  # noqa: B018


def config_of(
    model: dict[str, Any], axes: dict[str, Any], peft: str = "none", pack: bool = False, optimizer: str = "adamw"
) -> FinetuneConfig:
    """Return the config of a run; axes: the `parallelism` section, `strategy` included."""
    values = {"compile": "false", "config": {**CONFIG, **model.pop("config", {})}, **model}
    axes = {"dp_shard": 1, **axes, "strategy": Strategy(axes.get("strategy", "fsdp2"))}
    return FinetuneConfig(
        model=ModelConfig(init=WeightInit.random, tokenizer="bytes", **values),
        data=DocsDataConfig(pack=pack),
        parallelism=ParallelismConfig(**axes),
        peft=PeftConfig(method=peft),
        optimizer=OPTIMIZERS[optimizer](),
    )


@contextmanager
def fake_run(
    cfg: FinetuneConfig, world: int = 1, rank: int = 0, objective: str = "next_token", rows: Any = None,
    tracker: StorageTracker | None = None,
) -> Iterator[FakeRun]:  # fmt: skip
    """Build a run in the order of the recipes, on the fake device; its collectives return immediately.

    rows: The dataset of `training.micro_batch_size` and `global_batch_size`, the latter for each dp rank; None: small
        rows of the objective.
    tracker: Follows the memory of the device.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    with FakeCuda(), tracker or nullcontext():
        mesh = distributed.build_mesh(cfg.parallelism, "cuda")
        prepared = _prepared(cfg, mesh, objectives.LABELS.get(objective))
        teacher = None
        if objective == "distillation":
            teacher = _prepared(cfg, mesh)
            teacher.module.requires_grad_(False)
        plan = data.BatchPlan(
            global_batch_size=(ROWS if rows is None else cfg.training.global_batch_size) * mesh.size("dp"),
            micro_batch_size=2 if rows is None else cfg.training.micro_batch_size,
            dp_rank=mesh.rank("dp"),
            dp_size=mesh.size("dp"),
            padding=data.Padding(multiple=mesh.sequence_multiple),
        )
        rows = objectives.rows_of(objective, cfg.data.pack) if rows is None else rows
        with_values = objective in ("stored_distillation", "dapo")
        stored = objectives.StoredZeros(rows, sampled=objective == "dapo") if with_values else None
        batches = data.TrainBatches(rows, plan, seed=5, token_values=stored)
        built = objectives.build(objective, cfg.model, prepared, teacher)
        yield FakeRun(cfg, prepared, built, training.build_optimizer(prepared, cfg.optimizer), batches)


def _prepared(cfg: FinetuneConfig, mesh: distributed.Mesh, labels: list[str] | None = None) -> training.Prepared:
    """Prepare a model in the order of `training.prepare`, within `FakeCuda`. labels: Outputs of a score head."""
    stored = training.stored_dtype(cfg.model, CUDA, adapts=cfg.peft.adapts)
    cfg = replace(cfg, model=replace(cfg.model, dtype=stored))
    compute_dtype, _ = training.compute_dtype(cfg.model, CUDA)
    model = models.build_on_meta(cfg.model, cfg.model.config["vocab_size"], labels)
    anatomy = models.read_anatomy(model)
    models.add_adapters(model, cfg.peft)
    if cfg.model.fuses(cfg.parallelism, packs=cfg.data.pack, on_gpu=True):
        models.fuse_layers(model)
    layout = distributed.parallelize(model, mesh, cfg.parallelism, compute_dtype)
    loss_head = None
    if labels is None:
        loss_head = training.attach_loss_head(
            model, cfg.model, cfg.training, cfg.parallelism, mesh, layout.stages, CUDA
        )
    if cfg.parallelism.activation_checkpointing != ActivationCheckpointing.auto:
        models.checkpoint_activations(model, cfg.parallelism.activation_checkpointing)
    if cfg.parallelism.activation_offload:
        models.offload_activations(model, CUDA, smallest=1)
    models.materialize(model, CUDA, offload=cfg.parallelism.cpu_offload)
    replica = distributed.wrap_replicas(model, mesh, cfg.parallelism, layout)
    settings = training.StepSettings(
        device=CUDA,
        defer_grad_sync=cfg.parallelism.defers_grad_sync,
        mesh=mesh,
        autocast=training.autocast_dtype(cfg.parallelism, cfg.model, compute_dtype),
        loss_head=loss_head,
        noise=EmbeddingNoise.attached(model, anatomy, layout.stages, cfg.training, cfg.run.seed),
        spikes=SpikeWindow.of(cfg.training, CUDA),
    )
    return training.Prepared(model, settings, replica, compute_dtype=compute_dtype, anatomy=anatomy)


@contextmanager
def static_pipeline_shapes() -> Iterator[None]:
    """Skip the exchange of shapes between stages: there are no other ranks. torch 2.11 has none if they are given."""
    if not hasattr(_PipelineSchedule, "_warmup_p2p"):
        yield
        return
    from torch.distributed.pipelining.stage import InferenceMode

    def use_static(schedule: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    original = _PipelineSchedule._warmup_p2p
    _PipelineSchedule._warmup_p2p = use_static
    yield
    _PipelineSchedule._warmup_p2p = original


@contextmanager
def values_read() -> Iterator[list[torch.Tensor]]:
    """Collect the CUDA tensors whose values are read with tolist(), which returns zeros."""
    read: list[torch.Tensor] = []

    def tolist(tensor: torch.Tensor) -> list[float]:
        read.append(tensor)
        return [0.0 if tensor.is_floating_point() else 0] * len(tensor)

    original = FakeTensor.tolist
    FakeTensor.tolist = tolist
    yield read
    FakeTensor.tolist = original


def step(
    axes: dict[str, Any], world: int = 1, rank: int = 0, *, model: dict[str, Any] | None = None, peft: str = "none",
    pack: bool = False, optimizer: str = "adamw", objective: str = "next_token", rows: Any = None,
    evaluate: bool = True, sizes: dict[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run two optimizer steps, the first of which creates the optimizer state; return the record of the second.

    objective: "next_token", or one of objectives.py; distillation needs model.loss=chunked.
    sizes: Further values of the section `training`.
    rows: Tokens of full rows, rows of a micro-batch and micro-batches of a step; None: small rows of random length.
    """
    eager: AbstractContextManager[Any] = nullcontext()
    if optimizer == "adamw8bit":
        find_optional()  # torchao
        eager = torch.compiler.set_stance("force_eager")  # the compiler needs a device
    cfg, full_rows, tracker, seq_len = config_of(model or {}, axes, peft, pack, optimizer), None, None, SEQ_LEN
    cfg = replace(cfg, training=replace(cfg.training, **(sizes or {})))
    if rows:
        seq_len, micro_batch_size, count = rows
        cfg.training.seq_len, cfg.training.micro_batch_size = seq_len, micro_batch_size
        cfg.training.global_batch_size = count * micro_batch_size
        full_rows, tracker = objectives.rows_of(objective, pack, seq_len), StorageTracker(device_type="cuda")
    with eager, fake_run(cfg, world, rank, objective, full_rows, tracker) as run:
        dtypes = {f"{each.dtype} {each.requires_grad}" for each in run.model.module.parameters()}
        reported = training.check_kernels(run.model, run.cfg.model, run.batches.at)
        first = run.batches.at(0)
        # One micro-batch is enough, to save time; a pipeline needs the number that it was built for.
        few = 1 if rows and cfg.parallelism.pp == 1 else len(first)
        with static_pipeline_shapes():
            training.train_step(run.model, first[:few], run.optimizer, run.objective)
        micro_batches = run.batches.at(1)
        if tracker is not None:
            tracker.restart()
        with GarbageCollection(every=1), Record(seq_len) as record:
            numbers = training.train_step(run.model, micro_batches, run.optimizer, run.objective)
        peak = None if tracker is None else tracker.peak
        with Record(seq_len) as eval_record, values_read() as read:
            if evaluate:
                training.evaluate(run.model, micro_batches[:few], run.objective)
        optimizers = list_optimizers(run.optimizer)
        states = [each for optimizer in optimizers for state in optimizer.state.values() for each in state.values()]
        trained = [each for optimizer in optimizers for each in optimizer.param_groups[0]["params"]]
        devices = {each.device.type for each in [numbers.vector, *states, *trained]}
    return {
        "reported": reported[0],
        "waits": dict(record.waits),
        "evaluation_waits": dict(eval_record.waits),
        "evaluation_reads": len(read),
        "masks": dict(record.masks),
        "square": dict(record.square + eval_record.square),
        "operators": dict(record.operators),
        "longest": record.longest,
        "key_heads": sorted(record.key_heads),
        "devices": sorted(devices),
        "dtypes": sorted(dtypes),
        "to_host": record.to_host,
        "micro_batches": len(micro_batches),
        "launches": dict(record.launches),
        "moved": dict(record.moved),
        "seq": seq_len,
        "peak": None if peak is None else peak.bytes,
        "peak_operator": None if peak is None else peak.operator,
    }


def sample(axes: dict[str, Any], world: int = 1, *, model: dict[str, Any], gathers: bool = True) -> dict[str, Any]:
    """Sample two answers of 8 tokens, one padded; return how many values were read, and where and in what the cache is.

    gathers: Whether FSDP2 gathers the weights once for all tokens.
    """
    cfg, caches = config_of(model, axes), []
    evaluation._gathers_once = lambda *_: gathers
    generation._of_all_ranks = lambda forward, device, *values: list(values)  # there are no other ranks
    with fake_run(cfg, world) as run, values_read() as read:
        settings = run.model.settings
        context = training.RunContext(settings.mesh, CUDA)
        tokenizer, ranks = models.load_tokenizer(cfg.model), settings.mesh.size("dp_cp")
        prompts = [Prompt("", [1] * length) for length in (40, 21) for _ in range(ranks)]  # two of this rank

        def call(**inputs: Any) -> Any:
            output = run.model.module(**inputs)
            caches.append(output.past_key_values)
            return output

        with training.generation_forward(run.model, context, 64, 48) as forward:
            chosen = models.Sampling(1.0, keeps_stop=True)
            answers = models.generate_tokens(
                run.model.module, tokenizer, prompts, 8, replace(forward, call=call), chosen
            )
    tensors = [each for layer in caches[-1].layers for each in (layer.keys, layer.values)]
    return {
        "lengths": [len(each) for each in answers if each],
        "reads": len(read),
        "dtypes": sorted({str(each.dtype) for each in tensors}),
        "devices": sorted({each.device.type for each in tensors}),
    }


def graphs(
    axes: dict[str, Any], world: int = 1, rank: int = 0, *, model: dict[str, Any] | None = None, peft: str = "none",
    pack: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Run three steps and an evaluation with layers that the compiler has traced; return its graphs after each."""
    cfg = config_of(model or {}, axes, peft, pack)
    counters = torch._dynamo.utils.counters
    with fake_run(cfg, world, rank) as run, static_pipeline_shapes():
        models.compile_layers(run.model.module, backend="eager")
        found = []
        for number in range(3):
            training.train_step(run.model, run.batches.at(number), run.optimizer, run.objective)
            found.append(counters["stats"]["unique_graphs"])
        with values_read():
            training.evaluate(run.model, run.batches.at(3), run.objective)
    return {
        "graphs": found,
        "with_evaluation": counters["stats"]["unique_graphs"],
        "breaks": [each.split("`<function ")[-1].split(" at ")[0] for each in counters["graph_break"]],
    }


def costs(
    model: dict[str, Any], peft: str = "none", seq_len: int = 4096, micro_batch_size: int = 4,
    global_batch_size: int = 8, documents: int = 1, strategy: str = "single",
) -> dict[str, Any]:  # fmt: skip
    """Return the operators of the second step of one device, packed rows of equal documents, for roofline.py."""
    cfg = config_of(model, {"strategy": strategy}, peft, pack=True)
    cfg.training.micro_batch_size, cfg.training.global_batch_size = micro_batch_size, global_batch_size
    cfg.training.seq_len = seq_len
    with fake_run(cfg, rows=objectives.full_rows(seq_len, documents)) as run:
        training.train_step(run.model, run.batches.at(0), run.optimizer, run.objective)
        micro_batches = run.batches.at(1)
        shapes = {tuple(each.shape) for each in run.model.module.parameters()} if strategy == "fsdp2" else ()
        with Costs(cfg.model.config["vocab_size"], frozenset(shapes)) as recorded:
            training.train_step(run.model, micro_batches, run.optimizer, run.objective)
    return {kind: [[*each, number] for each, number in kept.items()] for kind, kept in recorded.operators.items()}
