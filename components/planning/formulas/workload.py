"""Inputs of the memory and time estimates: the work of one rank in an optimizer step."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from components.config.mesh_rules import fitting_micro_batch
from components.config.schema.model import Attention, DType, Float8, LossMethod, ModelConfig, Qat
from components.config.schema.objective import (
    DistillationConfig,
    DPOConfig,
    GSPOConfig,
    KLEstimator,
    KTOConfig,
    PolicyConfig,
    PreferenceConfig,
    Reference,
    RewardConfig,
    RLOOConfig,
    ScoreConfig,
)
from components.config.schema.optimizer import OptimizerConfig
from components.config.schema.parallelism import (
    MeshShape,
    ParallelismConfig,
    Strategy,
)
from components.config.schema.recipes import (
    GrpoConfig,
    TrainConfig,
    frozen_model,
    policy_reference,
    score_labels,
    section,
)
from components.config.schema.run import PeftConfig
from components.config.shape import read_shape
from components.planning.formulas.architecture import Architecture, read_architecture
from components.planning.formulas.families import LinearKind

BYTE_VOCABULARY = 264
"""Embeddings of a model from scratch with the byte tokenizer: 256 bytes and four special tokens, rounded up to 8."""
_ITEM_BYTES = {DType.float32: 4, DType.bfloat16: 2, DType.float64: 8}


@dataclass(frozen=True, slots=True)
class Workload:
    """Model, mesh, batch and policies of a step. Sequences are rows: a pair of answers counts as two."""

    architecture: Architecture
    mesh: MeshShape
    parallelism: ParallelismConfig
    """Strategy, schedule and policies; the degrees are those of `mesh`."""
    seq_len: int
    """Tokens per row, before cp splits it."""
    micro_batch: int
    """Rows per forward of a rank."""
    micro_batches: int
    """Forwards of a rank per optimizer step."""
    stored_bytes: int
    """Bytes per element of stored parameters."""
    compute_bytes: int
    """Bytes per element of activations."""
    float8: Float8
    compiled: bool
    fused: bool
    """Whether norms, rotary embeddings and SwiGLUs run in few kernels (model.fused)."""
    loss: LossMethod
    """auto, logits, chunked or liger, as configured."""
    optimizer: OptimizerConfig
    peft: PeftConfig
    eager_attention: bool = False
    """Whether attention materializes its scores (model.attention=eager)."""
    qat: Qat = Qat.none
    """Quantization that the training emulates (model.qat)."""
    averages: bool = False
    """Whether an average of the weights is kept (training.ema_decay)."""
    frozen: Architecture | None = None
    """A second model that is not trained, a teacher or a reference; None: there is none."""
    frozen_bytes: int = 4
    """Bytes per element of its stored parameters."""
    extra_forwards: float = 0.0
    """Forwards of the trained model without gradients, per forward with gradients: a preference loss computes the
    log-probabilities of the rows first, and a reference without adapters once more."""
    device_memory: float | None = None
    """Bytes of memory of a GPU; None: unknown."""
    on_gpu: bool = False
    """Whether the device is a GPU, whose attention kernels take values narrower than keys."""
    kernels: bool = False
    """Whether linear attention and Mamba-2 run in the kernels of fla and mamba-ssm: on a GPU, if they are installed."""
    labels: int = 0
    """Outputs of the score head; 0: an LM head."""
    rows_per_unit: int = 1
    """Rows per unit of the configured batch sizes: 2 for pairs of answers."""
    generated_answers: int = 0
    """Answers that all ranks generate together; 0: none."""
    rows_at_once: int = 1
    """Most of them that a rank generates at once."""
    generated_tokens: int = 0
    """Most tokens of such a row, its prompt and its answer."""
    sampled_tokens: float = 0.0
    """Tokens of each answer per optimizer step that uses it; 0 outside of reinforcement learning."""

    def on_mesh(
        self, parallelism: ParallelismConfig, mesh: MeshShape, micro_batch_size: int, compiled: bool
    ) -> Workload:
        """Return the same global batch on another mesh.

        Args:
            micro_batch_size: In units of the configured batch sizes.
            compiled: Whether layers are compiled there.
        """
        micro_batch = micro_batch_size * self.rows_per_unit
        return replace(
            self,
            parallelism=parallelism,
            mesh=mesh,
            compiled=compiled,
            micro_batch=micro_batch,
            micro_batches=max(1, self.rows_per_step // (mesh.dp * micro_batch)),
        )

    @property
    def generated_rows(self) -> int:
        """Answers that a rank generates at once; 0 under pp, which keeps no keys and values."""
        if self.mesh.pp > 1:
            return 0
        return min(self.rows_at_once, -(-self.generated_answers // (self.mesh.dp * self.mesh.cp)))

    @property
    def sampling_forwards(self) -> float:
        """Forwards of one token of `generated_rows` rows on a rank, per optimizer step."""
        own = -(-self.generated_answers // (self.mesh.dp * self.mesh.cp))
        return self.sampled_tokens * -(-own // self.rows_at_once)

    @property
    def rows_per_step(self) -> int:
        """Rows of all ranks in one optimizer step."""
        return self.micro_batch * self.micro_batches * self.mesh.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all ranks in one optimizer step."""
        return self.rows_per_step * self.seq_len

    @property
    def parameters(self) -> int:
        """Number of parameters of the trained model, which has a score head instead of an LM head if it has labels."""
        architecture = self.architecture
        head = 0 if architecture.tied else architecture.vocab
        return architecture.parameters + (self.labels - head if self.labels else 0) * architecture.hidden

    @property
    def parameters_text(self) -> str:
        """Number of parameters in words: `8.03B parameters`."""
        unit, name = next((each for each in ((1e9, "B"), (1e6, "M")) if self.parameters >= each[0]), (1e3, "K"))
        return f"{three_digits(self.parameters / unit)}{name} parameters"

    @property
    def tokens_text(self) -> str:
        """Tokens and rows of a step in words."""
        pairs = ", two per pair" if self.rows_per_unit > 1 else ""
        return f"{self.tokens_per_step:,} tokens per step ({self.rows_per_step:,} rows of {self.seq_len:,}{pairs})"

    @property
    def micro_batches_text(self) -> str:
        """Number and size of a rank's micro-batches: `64 of 1`."""
        return f"{self.micro_batches:,} of {self.micro_batch // self.rows_per_unit:,}"

    @property
    def local_tokens(self) -> int:
        """Tokens of a rank per forward: rows x seq_len / cp."""
        return self.micro_batch * self.seq_len // self.mesh.cp

    @property
    def fsdp(self) -> int:
        """Number of ranks that a dense parameter is sharded over."""
        return self.mesh.dp_shard * self.mesh.ep * self.mesh.cp if self.is_sharded else 1

    @property
    def expert_fsdp(self) -> int:
        """Number of ranks that each expert is sharded over."""
        return self.mesh.dp_shard * self.mesh.cp if self.is_sharded else 1

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the parameters."""
        return self.parallelism.strategy is Strategy.fsdp2

    @property
    def trained_bytes(self) -> int:
        """Bytes of a stored trained element; adapters are at least float32."""
        return max(4, self.stored_bytes) if self.peft.adapts else self.stored_bytes

    @property
    def sequence_shards(self) -> int:
        """Number of tp ranks that hidden states between matmuls are sharded over."""
        return self.mesh.tp if self.parallelism.sequence_parallel else 1


def build_workload(
    cfg: TrainConfig,
    mesh: MeshShape,
    *,
    on_gpu: bool,
    architecture: Architecture | None = None,
    device_memory: float | None = None,
) -> Workload:
    """Return the work of a run on a mesh, with the micro-batch size that the mesh allows.

    Args:
        on_gpu: Whether the device computes in bfloat16 by default.
        architecture: That of the trained model; None: by the config.
        device_memory: Bytes of memory of the GPU, for chunks of the loss; None: unknown.

    Raises ConfigError if the sizes of a model are unknown.
    """
    training, model = cfg.training, cfg.model
    rows_per_unit = 2 if section(cfg, PreferenceConfig) or section(cfg, RewardConfig) else 1
    micro_batch = fitting_micro_batch(training, cfg.parallelism, mesh) or training.micro_batch_size
    frozen, frozen_on_gpu = frozen_model(cfg), cfg.peft.adapts and on_gpu
    scores = section(cfg, ScoreConfig)
    architecture = architecture or architecture_of(model)
    compiled = model.compiles(cfg.parallelism, packs=cfg.data.pack, on_gpu=on_gpu)
    fuses = model.fuses(cfg.parallelism, packs=cfg.data.pack, on_gpu=on_gpu)
    return Workload(
        architecture=architecture,
        mesh=mesh,
        parallelism=cfg.parallelism,
        seq_len=training.seq_len,
        micro_batch=micro_batch * rows_per_unit,
        micro_batches=max(1, training.global_batch_size // (mesh.dp * micro_batch)),
        stored_bytes=_ITEM_BYTES[model.stored_dtype(frozen_on_gpu=frozen_on_gpu)],
        compute_bytes=_compute_bytes(model, on_gpu=on_gpu),
        float8=model.float8,
        compiled=compiled,
        fused=(compiled or fuses) and not architecture.family.norm_offset,
        loss=LossMethod.chunked if section(cfg, DistillationConfig) or section(cfg, PolicyConfig) else model.loss,
        optimizer=cfg.optimizer,
        peft=cfg.peft,
        eager_attention=model.attention is Attention.eager,
        qat=model.qat,
        averages=training.ema_decay is not None,
        frozen=None if frozen is None else architecture_of(frozen, "model" if frozen is cfg.model else "teacher"),
        frozen_bytes=_ITEM_BYTES[(frozen or model).stored_dtype(frozen_on_gpu=frozen_on_gpu and frozen is model)],
        extra_forwards=_extra_forwards(cfg),
        device_memory=device_memory,
        on_gpu=on_gpu,
        kernels=on_gpu and _has_kernels(architecture.family.linear),
        labels=len(score_labels(cfg.data, scores) or ()),
        rows_per_unit=rows_per_unit,
        **_generation(cfg),
    )


def _generation(cfg: TrainConfig) -> dict[str, Any]:
    """Return the fields of a workload about answers that are generated."""
    how = cfg.generation
    if isinstance(cfg, GrpoConfig):
        rollouts = cfg.rollouts
        return {
            "generated_answers": rollouts.batches * cfg.training.global_batch_size,
            "rows_at_once": rollouts.rows,
            "generated_tokens": cfg.training.seq_len,
            "sampled_tokens": 0.0 if rollouts.replay is not None else rollouts.max_new_tokens / rollouts.updates,
        }
    return {
        "generated_answers": max(how.samples + len(how.prompts), how.tool_calls),
        "rows_at_once": how.rows,
        "generated_tokens": cfg.training.seq_len + how.max_new_tokens,
    }


def architecture_of(model: ModelConfig, section: str = "model") -> Architecture:
    """Return the architecture of a configured model, by its files, its stated sizes, or an option with its path.

    Args:
        section: Config section of the model, for messages.

    Raises ConfigError if its sizes are unknown.
    """
    shape = read_shape(model)
    if shape.vocab is None and model.path is None and model.tokenizer == "bytes":
        shape = replace(shape, vocab=BYTE_VOCABULARY)
    return read_architecture(shape, model.path or str(model.config.get("model_type")), section)


def _has_kernels(linear: LinearKind) -> bool:
    """Return whether the package with the kernels of linear attention or Mamba-2 is installed."""
    return importlib.util.find_spec("mamba_ssm" if linear is LinearKind.mamba2 else "fla") is not None


def _compute_bytes(model: ModelConfig, *, on_gpu: bool) -> int:
    if model.compute_dtype is not DType.auto:
        return _ITEM_BYTES[model.compute_dtype]
    if model.dtype is DType.float64 or not on_gpu:
        return _ITEM_BYTES[model.stored_dtype()]
    return _ITEM_BYTES[DType.bfloat16]


def _extra_forwards(cfg: TrainConfig) -> float:
    """Return the forwards of the trained model without gradients per forward with gradients."""
    if isinstance(cfg, GrpoConfig):
        objective, rollouts = cfg.objective, cfg.rollouts
        is_of_answers = isinstance(objective, GSPOConfig | RLOOConfig) and rollouts.updates > 1
        scores_old = rollouts.updates > 1 or (objective.beta > 0 and objective.kl is KLEstimator.k1)
        scored = scores_old + (policy_reference(cfg) is Reference.adapters_off)
        return is_of_answers + scored / rollouts.passes
    preference = section(cfg, PreferenceConfig)
    if preference is None:
        return 0.0
    adapters_off = isinstance(preference, DPOConfig | KTOConfig) and preference.reference is Reference.adapters_off
    return 1.0 + adapters_off


@dataclass(frozen=True, slots=True)
class Implementation:
    """What a training program sends, recomputes and overlaps. Other values describe other programs."""

    name: str = "Meshbook"
    eager_hidden: float = 9.4
    """Bytes that norms and residuals move uncompiled, relative to fused kernels. Meshbook's: the layers of Llama 3.2 1B
    move 679 GB per 32,768 trained tokens, apart from matmuls and attention, by the sizes of all operators' tensors."""
    adapter_passes: tuple[float, float] = (1.5, 3.4)
    """Reads and writes of a linear layer's input and output for its adapter, forward and backward. Meshbook's: A and B
    read the input and the output gradient twice; their products are added to the output and to the input gradient."""
    tp_gathers: int = 2
    """All-gathers of hidden states over tp in a layer's forward: one before attention, one before the MLP."""
    float8_gathers: bool = False
    """Whether float8 casts hidden states before tp gathers them."""
    tp_overlap: float = 0.0
    """Share of the tp communication that runs beside matmuls (asynchronous tensor parallelism)."""
    shards_head: bool = True
    """Whether tp shards the LM head over the vocabulary."""
    gathers_logits: bool = False
    """Whether the logits of a sharded head are all-gathered over tp for the loss."""
    selective_matmuls: float = 0.0
    """Share of the matmuls that activation_checkpointing=selective recomputes."""
    compiles_recomputation: bool = False
    """Whether recomputation is inside the compiled region, so that dead code is removed: the last matmul of a layer and
    its communication, which the backward does not need. Without a compiler, torch stops before them."""
    gather_bytes: int | None = None
    """Bytes per element of all-gathered parameters; None: those of activations."""
    reduce_bytes: int = 4
    """Bytes per element of reduced gradients."""
    attention_speed: float = 1.0
    """Speed of its attention kernel, relative to torch's flash attention."""
    ring_attention: float = 0.0
    """Speed of attention over cp with keys and values passed around a ring or gathered, relative to one kernel; 0: the
    program follows parallelism.cp_attention."""
    waits_for_routing: bool = True
    """Whether the host waits for the routing of the tokens in each layer with expert parallelism."""
    expert_imbalance: float = 1.15
    """Tokens of the fullest ep rank, relative to the mean. 1 if the routing is forced to be even."""


MESHBOOK = Implementation()


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of an estimate."""

    name: str
    value: float
    """Bytes or seconds."""
    formula: str
    """The formula with its numbers: `4 B x 1,024 x 512`."""
    source: str = ""
    """Origin of the constants in the formula; empty if they follow from the definition."""


def total(terms: Iterable[Term]) -> float:
    """Return the sum of the values."""
    return sum(term.value for term in terms)


def three_digits(value: float) -> str:
    """Return a number in three digits, more for those above 1,000."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 2
    return f"{value:,.{max(0, digits)}f}"


def bytes_text(value: float) -> str:
    """Return bytes in the largest unit of which there is one."""
    units = [(size, unit) for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if value >= size]
    return f"{three_digits(value / units[0][0])} {units[0][1]}" if units else f"{value:,.0f} B"


def seconds_text(value: float) -> str:
    """Return a time in seconds or milliseconds."""
    return f"{three_digits(value)} s" if value >= 1 else f"{three_digits(value * 1e3)} ms"
