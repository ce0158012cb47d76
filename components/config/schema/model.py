"""`model`: which Hugging Face model, in which precision. One class per kind of model."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from components.config.schema.checks import above, at_least, field_values, own_kind, raise_all

CAUSAL_SDPA = "causal_sdpa"
"""What model.attention=sdpa is called within transformers once it needs no mask; never written to a config.json."""
CAUSAL_FLASH = "causal_one_kernel"
"""The same of model.attention=sdpa_flash; transformers takes names with flash in them for packages."""
NO_FLEX_BACKWARD = (
    "model.attention=flex_attention: torch has no backward of it on CPUs; set model.attention=sdpa, or "
    "cluster.device=cuda"
)
DOCUMENTS = "documents"
"""Of packed rows: where their documents are. A tensor of a micro-batch and the keyword by which it gets to attention:
(batch, documents + 1) int32 of 0, each document's end in the row, and the row's length as often as needed."""
LONGEST_DOCUMENT = "longest_document"
"""Keyword beside it: an int, the host's bound on the length in tokens of those documents."""


class ModelKind(StrEnum):
    """causal_lm: a decoder with a language-model head."""

    causal_lm = "causal_lm"


class DType(StrEnum):
    """Floating-point types; auto: bfloat16 where the device computes it natively, else float32."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


class WeightInit(StrEnum):
    """pretrained: weights are loaded from model.path; random: initialised from run.seed."""

    pretrained = "pretrained"
    random = "random"


class Attention(StrEnum):
    """How a model attends.

    sdpa: torch's scaled_dot_product_attention, which chooses its kernel by what there is; sdpa_flash: its flash kernel
    or none, so that a run ends where it would be slow; the others are transformers' own, with its masks and its host
    sync: eager, flash_attention_2 (an optional package), flex_attention (no backward on CPUs).
    """

    sdpa = "sdpa"
    sdpa_flash = "sdpa_flash"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"
    flex_attention = "flex_attention"


class Float8(StrEnum):
    """Products of linear layers in float8: none; tensorwise or rowwise: how many scales an operand has."""

    none = "none"
    tensorwise = "tensorwise"
    rowwise = "rowwise"


class LossMethod(StrEnum):
    """How logits become a loss.

    logits: those of all tokens are made, tokens x vocabulary values; chunked: some tokens at a time, forward and
    gradients in one pass, in plain PyTorch on any device; liger: liger-kernel's fused kernel on a GPU (an optional
    package; it makes the host wait once per micro-batch); auto: chunked where the model allows it and its logits are
    large, else logits. It never picks liger.
    """

    auto = "auto"
    logits = "logits"
    chunked = "chunked"
    liger = "liger"


class RouterAux(StrEnum):
    """The load-balancing loss of a mixture of experts: none, or sequence: per layer and sequence.

    Hugging Face's own form pools the tokens of a micro-batch and of all layers: its value changes with the size of
    the micro-batch, and pipeline parallelism has no place where all layers are. It is left out on purpose.
    """

    none = "none"
    sequence = "sequence"


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """A model from the hub, a local folder, a GGUF file, a package that carries one, or from scratch."""

    kind: ModelKind = ModelKind.causal_lm
    """Selects one of the subclasses below; a config that names no kind is a causal LM."""
    path: str | None = None
    """Hub name, local folder, .gguf file, or package:NAME/FILE for a file inside an installed package."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    init: WeightInit = WeightInit.pretrained
    """pretrained or random."""
    config: dict[str, Any] = field(default_factory=dict)
    """Values that replace those of the model's own config; with path=null the whole config, model_type included."""
    tokenizer: str | None = None
    """Where the tokenizer comes from: like path; bytes: one token per byte, nothing to load; null: from path."""
    dtype: DType = DType.float32
    """Type of the stored parameters, gradients and optimizer state: float32, or bfloat16 for all (pure bfloat16)."""
    compute_dtype: DType = DType.auto
    """Type of matrix products; losses, norms of gradients and updates are never below float32."""
    attention: Attention = Attention.sdpa
    """sdpa, sdpa_flash, eager, flash_attention_2 or flex_attention; the banner says what that comes to here."""
    float8: Float8 = Float8.none
    """Compute linear layers but the output head in float8, by torchao: none, tensorwise (fastest) or rowwise."""
    float8_emulate: bool = False
    """Only round as float8 does and compute as usual: slow, on any device, to see what it costs in quality."""
    float8_bound: float = 0.01
    """A run ends at its start when float8 changes the loss of its first micro-batch by more, relatively."""
    loss: LossMethod = LossMethod.auto
    """How the loss is computed from the last hidden states: auto, logits, chunked or liger."""
    compile: bool = False
    """torch.compile each decoder layer."""
    router_aux: RouterAux = RouterAux.sequence
    """Load-balancing loss of a mixture of experts, part of the training loss and not of eval_loss: sequence or none."""
    router_aux_coef: float | None = None
    """Its coefficient; null: router_aux_loss_coef of the model's own config (models without one take no such loss)."""
    trust_remote_code: bool = False
    """Allow code from the model's repository to run; read that code first."""
    layers: int | None = None
    """Decoder layers, for checks before anything is loaded; a local config.json or GGUF header overrides it."""
    heads: int | None = None
    """Attention heads."""
    kv_heads: int | None = None
    """Key and value heads."""
    hidden: int | None = None
    """Hidden size."""
    vocab: int | None = None
    """Vocabulary size."""
    experts: int | None = None
    """Experts per mixture-of-experts layer; null: none, or not known before the model is read."""

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> list[str]:
        problems = own_kind("model", self)
        values = field_values(self)
        for name in ("layers", "heads", "kv_heads", "hidden", "vocab", "experts"):
            problems += at_least(f"model.{name}", values[name], 1)
        problems += at_least("model.router_aux_coef", self.router_aux_coef, 0)
        if self.path is None and self.init == WeightInit.pretrained:
            problems.append(
                "model.path=null: pretrained weights need a path; set model.path to a hub name, folder or .gguf "
                "file, or model.init=random to start from scratch"
            )
        if self.path is None and "model_type" not in self.config:
            problems.append(
                "model.config: without model.path it must name the architecture, for example "
                "model.config.model_type=llama"
            )
        if self.path is None and self.tokenizer is None:
            problems.append("model.tokenizer=null: without model.path name one, or bytes for one token per byte")
        problems += above("model.float8_bound", self.float8_bound, 0)
        if self.float8_emulate and self.float8 == Float8.none:
            problems.append("model.float8_emulate=true: there is no float8 to emulate; set model.float8=tensorwise")
        computed = DType.float64 if self.dtype == DType.float64 else self.compute_dtype
        if self.float8 != Float8.none and not self.float8_emulate and computed not in (DType.auto, DType.bfloat16):
            problems.append(
                f"model.float8={self.float8}: rounds what is computed in bfloat16, and model.dtype={self.dtype} with "
                f"model.compute_dtype={self.compute_dtype} is not; set "
                "model.compute_dtype=bfloat16 or model.float8=none"
            )
        if self.dtype == DType.auto:
            problems.append("model.dtype=auto: the stored type must be stated: float32, bfloat16 or float64")
        return problems


@dataclass(kw_only=True, slots=True)
class CausalLMConfig(ModelConfig):
    """A causal language model."""
