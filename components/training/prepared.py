"""A parallelized model with its step settings, compute dtype, autocast, noise of embeddings and average of weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from components.batch import Batch
from components.checkpoint.tensors import AVERAGE, AVERAGE_UPDATES, MODEL, Tensors, model_tensors
from components.config.schema.data import IGNORED
from components.config.schema.model import DType, ModelConfig
from components.config.schema.parallelism import ParallelismConfig, Strategy
from components.config.schema.training import EvalWeights, TrainingConfig
from components.distributed.mesh import Mesh
from components.distributed.pipeline_schedule import Pipeline
from components.protocol.errors import ConfigError
from components.torch_kernels import INCREMENT, hashed, signed, torch_dtype
from components.training.objectives.loss_head import LossHead
from components.training.optimizers.gradients import SpikeWindow, local_tensor
from components.training.routers import Routers
from components.training.step_cost import StepFlops

if TYPE_CHECKING:
    from components.distributed.pipeline_stages import Stages
    from components.models.anatomy import Anatomy, ParameterCounts

_CHUNK_BYTES = 64 * 1024**2
"""Approximate bytes of the averages that are updated at a time: an update needs as much temporary memory."""


class WeightAverage:
    """Exponential moving average of a model's trained weights, in float32 or in their dtype if that is wider.

    After n applied updates the average is sum_i d^(n-i) w_i / sum_i d^(n-i) with decay d and the weights w_1 ... w_n
    after each update. Without the normalization the weights before training would dominate the first 1 / (1 - d)
    steps; Adam corrects its moments in the same way (Kingma and Ba 2015, section 3). Each rank averages its own shards,
    without communication.
    """

    def __init__(self, module: nn.Module, decay: float, evaluated: EvalWeights = EvalWeights.average) -> None:
        """Begin with the current weights of `module`, which must be sharded and loaded.

        Args:
            decay: Weight of the average relative to new weights, in (0, 1).
            evaluated: The weights that `training.evaluate` evaluates.
        """
        self.decay, self.evaluated = decay, evaluated
        self._module = module
        self._parameters = self._trained()
        self._averages: Tensors = {}
        for name, parameter in self._parameters.items():
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            self._averages[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        device = next((each.device for each in self._parameters.values()), torch.device("cpu"))
        self._updates = torch.zeros((), dtype=torch.float64, device=device)
        self.restart()

    @property
    def tensors(self) -> Tensors:
        """This rank's shards of the average and the number of applied updates, by their names in a checkpoint."""
        return {AVERAGE + name: each for name, each in self._averages.items()} | {AVERAGE_UPDATES: self._updates}

    @property
    def local_bytes(self) -> int:
        """Bytes of this rank's shards of the average."""
        shards = [local_tensor(average) for average in self._averages.values()]
        return sum(shard.numel() * shard.element_size() for shard in shards)

    @torch.no_grad()
    def restart(self) -> None:
        """Set the average to the current weights, which later updates do not count."""
        self._updates.zero_()
        for name, parameter in self._parameters.items():
            local_tensor(self._averages[name]).copy_(local_tensor(parameter))

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Add the current weights to the average, without effect if `skipped`, a scalar, is not 0.

        The decision is made on the device, so the host does not wait.
        """
        applied = 1 - skipped.to(self._updates).clamp(max=1)
        self._updates += applied
        # (1 - d) / (1 - d^n); expm1 is exact for decays near 1. The bound is reached at n = 1, and replaces n = 0.
        total = -torch.expm1(self._updates * math.log(self.decay))
        weight = applied * (1 - self.decay) / total.clamp(min=1 - self.decay)
        for averages, weights in self._chunks():
            change = torch._foreach_sub([each.to(averages[0].dtype) for each in weights], averages)
            torch._foreach_mul_(change, weight.to(averages[0].dtype))
            torch._foreach_add_(averages, change)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Context in which the module holds the averaged weights, cast to its dtypes.

        The trained weights are copied meanwhile, which takes the memory of the gradients that a step frees.
        """
        with torch.no_grad():
            self._trained()
            shards = {name: local_tensor(parameter) for name, parameter in self._parameters.items()}
            trained = {name: shard.clone() for name, shard in shards.items()}
            for name, shard in shards.items():
                shard.copy_(local_tensor(self._averages[name]))
        try:
            yield
        finally:
            with torch.no_grad():
                self._trained()
                for name, shard in shards.items():
                    shard.copy_(trained[name])

    def _trained(self) -> Tensors:
        """Return the trained parameters by name.

        `model_tensors` makes FSDP2 reshard. A forward without a backward may leave parameters all-gathered, and the
        next forward would use these values although the shards have changed.
        """
        stored = model_tensors(self._module)
        return {name.removeprefix(MODEL): each for name, each in stored.items() if each.requires_grad}

    def _chunks(self) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Yield the local shards of averages of one dtype, _CHUNK_BYTES at a time, and those of their weights."""
        averages: list[torch.Tensor] = []
        weights: list[torch.Tensor] = []
        size = 0
        for name, parameter in self._parameters.items():
            average = local_tensor(self._averages[name])
            if averages and (size > _CHUNK_BYTES or averages[0].dtype != average.dtype):
                yield averages, weights
                averages, weights, size = [], [], 0
            averages.append(average)
            weights.append(local_tensor(parameter.detach()))
            size += average.numel() * average.element_size()
        if averages:
            yield averages, weights


class EmbeddingNoise:
    """Uniform noise that is added to the output of a model's input embedding in training (NEFTune, Jain et al. 2023,
    https://arxiv.org/abs/2310.05914).

    The noise of a token is a hash of the seed, the step, its document's tokens, its position in the document and the
    channel. So it depends neither on the mesh, micro-batches and packing, nor on the rank that computes a row; equal
    documents of a step get the same noise. A document ends with the token that its last target predicts: what follows
    is padding, or cannot affect a target.
    """

    KEYWORD = "embedding_noise_keys"
    """Layer input of a batch, from `with_keys`."""

    def __init__(self, alpha: float, seed: int) -> None:
        self.alpha, self.seed = alpha, seed
        self.step = 0
        """Number of the step, which `training.Run` sets."""
        self._keys: torch.Tensor | None = None

    def __str__(self) -> str:
        return f"embeddings: noise of NEFTune, alpha {self.alpha:g}, in training only"

    @classmethod
    def attached(
        cls, model: nn.Module, anatomy: Anatomy, stages: Stages | None, training: TrainingConfig | None, seed: int
    ) -> EmbeddingNoise | None:
        """Return the noise of a run, with hooks on its parallelized model; None without training.neftune_alpha."""
        if training is None or not training.neftune_alpha:
            return None
        if anatomy.embedding is None:
            raise ConfigError(
                f"training.neftune_alpha={training.neftune_alpha:g}: {type(model).__name__} has no input embedding for "
                "the noise; set it to 0"
            )
        noise = cls(training.neftune_alpha, seed)
        for module in [model] if stages is None else [each.module for each in stages.own]:
            module.register_forward_pre_hook(noise._take_keys, with_kwargs=True)
        model.get_submodule(anatomy.embedding).register_forward_hook(noise._add)
        return noise

    def with_keys(self, batch: Batch, *, predicts_next: bool) -> Batch:
        """Return a batch of whole rows with the hash of each token and its document's length, (rows, seq, 2) int64.

        Args:
            predicts_next: Whether a target is the next token, which its document has, too; False for score heads.
        """
        rows, seq = batch.shape
        position = torch.arange(seq, device=batch.input_ids.device).repeat(rows, 1)
        bounds = batch.document_bounds
        bounds = (torch.arange(2, device=position.device) * seq).expand(rows, 2) if bounds is None else bounds.long()
        starts, ends = bounds[:, :-1], bounds[:, 1:]  # (rows, documents)
        document = torch.searchsorted(ends.contiguous(), position, right=True)  # (rows, seq)
        within = position - starts.gather(1, document)

        def totals(values: torch.Tensor) -> torch.Tensor:
            """Return the sum of int64 values (rows, seq) over the document of each token."""
            before = F.pad(values.cumsum(1), (1, 0))
            return (before.gather(1, ends) - before.gather(1, starts)).gather(1, document)

        is_target = (batch.targets != IGNORED).long()
        before = F.pad(is_target.cumsum(1), (1, 0))  # targets before each position
        counts = before.gather(1, ends).gather(1, document) > before[:, :seq]  # this token or a later one has a target
        if predicts_next:
            counts = counts | (F.pad(counts[:, :-1], (1, 0)) & (within > 0))
        start = signed(self.seed * INCREMENT + self.step * _STEPS)
        text = totals(hashed(batch.input_ids * INCREMENT + hashed(within)) * counts)
        keys = hashed(hashed(text + start) + hashed(within + 1))
        values = torch.stack([keys, totals(counts.long()) * counts], dim=-1)
        return replace(batch, layer_inputs={**batch.layer_inputs, self.KEYWORD: values})

    def _take_keys(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self._keys = kwargs.pop(self.KEYWORD, None)
        return args, kwargs

    def _add(self, embedding: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Return the embeddings (batch, seq, hidden) of a micro-batch with noise; unchanged for one without keys."""
        if self._keys is None:
            return output
        hidden, dtype = output.shape[-1], torch.promote_types(output.dtype, torch.float32)
        keys, lengths = self._keys.flatten(0, 1).unbind(-1)  # (tokens,)
        scales = self.alpha * (lengths > 0) * (lengths.clamp(min=1) * hidden).to(dtype).rsqrt()
        channels = (torch.arange(hidden, device=output.device) + 1) * INCREMENT
        size = max(1, _NOISE_CHUNK // hidden)
        noise = [
            ((hashed(key[:, None] + channels) >> 40).to(dtype) * (scale[:, None] * 2.0**-23)).to(output.dtype)
            for key, scale in zip(keys.split(size), scales.split(size), strict=True)
        ]  # the upper 24 bits, from -2^23 to 2^23 - 1: float32 represents them exactly
        return output + torch.cat(noise).view(output.shape)


_NOISE_CHUNK = 2**22
"""Values of noise that are computed at a time: they need several int64 tensors of this size."""
_STEPS = 0xBF58476D1CE4E5B9
"""Factor of the number of the step in the hashes of the noise."""
NOTE = (
    "deterministic: torch selects deterministic kernels; runs on the same mesh, devices and versions are bit-equal, "
    "and an operator without such a kernel ends the run"
)
"""Line of the banner."""
_TORCH_MESSAGE = "does not have a deterministic implementation"


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings that stay the same over all steps of a run."""

    device: torch.device
    """This rank's device."""
    max_grad_norm: float = 1.0
    """Global norm that gradients are clipped to; 0: no clipping."""
    defer_grad_sync: bool = True
    """Whether gradients are reduced in the last micro-batch only."""
    mesh: Mesh | None = None
    """The mesh, for sharding rows over cp and for sums over all ranks; None: one process."""
    autocast: torch.dtype | None = None
    """Autocast dtype, for strategies that do not set the compute dtype themselves (single, ddp); None: no autocast."""
    routers: Routers | None = None
    """Losses of routers and loads of experts in training steps; evaluation leaves them out."""
    loss_head: LossHead | None = None
    """How the loss is computed from hidden states; None: the model returns logits."""
    noise: EmbeddingNoise | None = None
    """Noise of embeddings in training steps; None: none."""
    spikes: SpikeWindow | None = None
    """Recent losses and gradient norms, by which the updates of spikes are skipped; None: no update is."""
    flops: StepFlops | None = None
    """Model FLOPs and the devices' peak; None: the MFU is not measured."""
    counts_inputs: bool = False
    """Whether the tokens of a step are all that the model reads, since only the last one of a row is a target."""

    @property
    def takes_targets(self) -> bool:
        """Whether the model takes targets and returns the sum of their losses instead of logits."""
        return self.loss_head is not None and self.loss_head.takes_targets

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank's tokens, under cp a shard of each row, count in sums over all ranks."""
        return self.mesh is None or self.mesh.counts_tokens

    @property
    def counts_rows(self) -> bool:
        """Whether this rank's rows count in sums over all ranks: of the cp ranks, which share rows, only the first."""
        return self.mesh is None or (self.mesh.counts_tokens and self.mesh.rank("cp") == 0)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is ready for its first step, from `prepare`. For a custom model the first two fields suffice."""

    module: Any
    """This rank's shards of the model; parameters keep the names of the unsharded model."""
    settings: StepSettings
    """Settings of all steps."""
    replica: nn.Module | Pipeline | None = None
    """The DDP wrapper of `module`, or the pipeline; None: `module` itself is called."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """Parallelism the model was prepared with."""
    compute_dtype: torch.dtype = torch.float32
    """Dtype of matmuls."""
    stored_dtype: str | None = None
    """Dtype of the parameters, for checkpoints; None: not recorded."""
    anatomy: Anatomy | None = None
    """Structure of the model without adapters, which optimizer=muon needs; None for a custom model."""
    counts: ParameterCounts | None = None
    """Parameters of the whole model, and bytes of this rank's shard."""
    summary: str = ""
    """Parameter counts and dtypes, for the banner."""
    notes: list[object] = field(default_factory=list)
    """Automatic choices, for the banner."""
    average: WeightAverage | None = None
    """Moving average of the trained weights, which `train_step` updates; None: there is none."""

    def with_average(self, training: TrainingConfig) -> Prepared:
        """Return this model with a moving average of its weights if `training.ema_decay` is set, else unchanged."""
        if training.ema_decay is None:
            return self
        average = WeightAverage(self.module, training.ema_decay, training.eval_weights)
        note = f"weight average: exponential, decay {training.ema_decay}, {average.local_bytes:,} bytes on this rank"
        return replace(self, average=average, notes=[*self.notes, f"{note}; {training.eval_weights.described}"])

    @contextmanager
    def with_weights(self, averaged: bool) -> Iterator[None]:
        """Context in which the module holds the averaged weights, if `averaged` and there is an average."""
        if not averaged or self.average is None:
            yield
            return
        try:
            with self.average.swapped_in():
                self._weights_changed()
                yield
        finally:
            self._weights_changed()

    def _weights_changed(self) -> None:
        if self.pipeline is not None:  # its copy of a tied embedding is of the other weights
            self.pipeline.weights_changed()

    @property
    def evaluates_average(self) -> bool:
        """Whether held-out losses and generated texts are those of the averaged weights."""
        return self.average is not None and self.average.evaluated is not EvalWeights.trained

    @property
    def called(self) -> Any:
        """The module or pipeline that a training forward calls."""
        return self.module if self.replica is None else self.replica

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline; None without pipeline parallelism."""
        return self.replica if isinstance(self.replica, Pipeline) else None

    @property
    def called_modules(self) -> list[nn.Module]:
        """The modules of this rank whose forwards run: those of its pipeline stages, or `module`."""
        return [self.module] if self.pipeline is None else self.pipeline.stage_modules


def stored_dtype(model: ModelConfig, device: torch.device, *, adapts: bool) -> DType:
    """Return the dtype of a model's stored parameters on `device`. adapts: They are frozen under adapters."""
    return model.stored_dtype(frozen_on_gpu=adapts and device.type == "cuda" and _has_bfloat16(device))


def compute_dtype(model: ModelConfig, device: torch.device, *, adapts: bool = False) -> tuple[torch.dtype, str]:
    """Return the dtype of matmuls on `device`, and a description of the precision mode with the reason for it.

    auto is bfloat16 if the device has instructions for it, else float32, because emulated bfloat16 is slower and less
    accurate. A float64 model is computed in float64.

    Args:
        adapts: Whether only adapters are trained; for the description.
    """
    stored = torch_dtype(model.stored_dtype())
    compute, reason = _choose(model, stored, device)
    return compute, f"{_mode(stored, compute, adapts)}{reason}"


def _choose(model: ModelConfig, stored: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    if model.compute_dtype is not DType.auto:
        return torch_dtype(model.compute_dtype), ""
    if stored == torch.float64:
        return stored, ", as stored"
    if _has_bfloat16(device):
        return torch.bfloat16, f" ({device.type} has instructions for it)"
    return torch.float32, f" (this {device.type} has no bfloat16 instructions)"


def _mode(stored: torch.dtype, compute: torch.dtype, adapts: bool) -> str:
    """Describe the precision mode; pure and mixed bfloat16 differ in memory and in convergence."""
    name, of = str(compute).removeprefix("torch."), str(stored).removeprefix("torch.")
    if adapts and stored == torch.bfloat16:
        return f"computed in {name}; frozen weights in {of}, adapters, their gradients and optimizer state in float32"
    if compute != stored:
        return f"mixed: computed in {name}; weights, gradients and optimizer state in {of}"
    if stored == torch.bfloat16:
        return "pure bfloat16: weights, gradients, optimizer state and matmuls; updates below 1/256 of a weight vanish"
    return f"computed in {name}"


def autocast_dtype(parallelism: ParallelismConfig, model: ModelConfig, compute: torch.dtype) -> torch.dtype | None:
    """Return the autocast dtype of a forward, or None if it needs no autocast.

    FSDP2 casts the parameters that it gathers; single and ddp compute with stored parameters and need autocast.
    """
    if parallelism.strategy == Strategy.fsdp2 or compute == torch_dtype(model.stored_dtype()):
        return None
    return compute


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # torch has no public function for this.
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Context in which torch and cuDNN run deterministic kernels, or raise if an operator has none.

    torch would also fill memory that is not initialized, which costs a pass over each new tensor and would only
    matter to code that reads such memory.

    Raises RuntimeError, with the key to change, where torch's message names only its own function.
    """
    cudnn: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    before = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    flags = (cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory)
    try:
        torch.use_deterministic_algorithms(True)
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = True, False, False
        yield
    except RuntimeError as error:
        if _TORCH_MESSAGE not in str(error):
            raise
        operator = str(error).partition(f" {_TORCH_MESSAGE}")[0]
        raise RuntimeError(
            f"run.deterministic=true: {operator} has no deterministic kernel; set run.deterministic=false, or avoid "
            "the operator"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark, memory.fill_uninitialized_memory = flags
