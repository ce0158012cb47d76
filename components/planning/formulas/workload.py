"""Work of one rank in an optimizer step: everything that the formulas of memory and time read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from components.config.micro_batches import fitting_micro_batch
from components.config.schema.model import Attention, DType, Float8, LossMethod, ModelConfig, Qat
from components.config.schema.objective import (
    DistillationConfig,
    DPOConfig,
    KTOConfig,
    PreferenceConfig,
    Reference,
    RewardConfig,
    ScoreConfig,
)
from components.config.schema.optimizer import OptimizerConfig
from components.config.schema.parallelism import MeshShape, ParallelismConfig, Strategy
from components.config.schema.peft import PeftConfig
from components.config.schema.recipes import TrainConfig, frozen_model, score_labels, section
from components.config.shape import read_shape
from components.planning.formulas.architecture import Architecture, read_architecture
from components.planning.formulas.term import three_digits

BYTE_VOCABULARY = 264
"""Embeddings of a model from scratch with the byte tokenizer: 256 bytes and four special tokens, rounded up to 8."""
ITEM_BYTES = {DType.float32: 4, DType.bfloat16: 2, DType.float64: 8}


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
    labels: int = 0
    """Outputs of the score head; 0: an LM head."""
    rows_per_unit: int = 1
    """Rows per unit of the configured batch sizes: 2 for pairs of answers."""

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
        stored_bytes=ITEM_BYTES[model.stored_dtype(frozen_on_gpu=frozen_on_gpu)],
        compute_bytes=_compute_bytes(model, on_gpu=on_gpu),
        float8=model.float8,
        compiled=compiled,
        fused=(compiled or fuses) and not architecture.family.norm_offset,
        loss=LossMethod.chunked if section(cfg, DistillationConfig) else model.loss,
        optimizer=cfg.optimizer,
        peft=cfg.peft,
        eager_attention=model.attention is Attention.eager,
        qat=model.qat,
        averages=training.ema_decay is not None,
        frozen=None if frozen is None else architecture_of(frozen, "model" if frozen is cfg.model else "teacher"),
        frozen_bytes=ITEM_BYTES[(frozen or model).stored_dtype(frozen_on_gpu=frozen_on_gpu and frozen is model)],
        extra_forwards=_extra_forwards(cfg),
        device_memory=device_memory,
        labels=len(score_labels(cfg.data, scores) or ()),
        rows_per_unit=rows_per_unit,
    )


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


def _compute_bytes(model: ModelConfig, *, on_gpu: bool) -> int:
    if model.compute_dtype is not DType.auto:
        return ITEM_BYTES[model.compute_dtype]
    if model.dtype is DType.float64 or not on_gpu:
        return ITEM_BYTES[model.stored_dtype()]
    return ITEM_BYTES[DType.bfloat16]


def _extra_forwards(cfg: TrainConfig) -> float:
    """Return the forwards of the trained model without gradients per forward with gradients."""
    preference = section(cfg, PreferenceConfig)
    if preference is None:
        return 0.0
    adapters_off = isinstance(preference, DPOConfig | KTOConfig) and preference.reference is Reference.adapters_off
    return 1.0 + adapters_off
