"""`model`: a Hugging Face model, its precision and its kernels. One class per kind of model."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from components.config.schema.parallelism import SPLIT_BACKWARD, ActivationCheckpointing, ParallelismConfig
from components.protocol.errors import above, at_least, field_values, own_kind, raise_all
from components.protocol.safe_parsing import check_jinja, is_template, read_regular

CAUSAL_SDPA = "causal_sdpa"
"""Name registered with transformers for model.attention=sdpa without a mask; never written to a config.json."""
CAUSAL_FLASH = "causal_one_kernel"
"""The same for model.attention=sdpa_flash; transformers treats a name that contains "flash" as a package."""
CAUSAL_EAGER = "causal_eager"
"""The same for model.attention=eager of a model that has no sdpa, such as GPT-OSS."""
NO_FLEX_BACKWARD = (
    "model.attention=flex_attention: torch has no backward for it on CPUs; set model.attention=sdpa, or "
    "cluster.device=cuda"
)
DOCUMENTS = "documents"
"""Document bounds of packed rows: a tensor of the micro-batch, passed to attention under this keyword. Shape
(batch, max documents + 1), int32: 0, then the end of each document in the row, padded with the row length."""
ROW_SHARD = "row_shard"
"""Keyword of layers that mix tokens without attention, where cp divides rows: what exchanges values between ranks."""
CONVOLUTION = "causal_conv1d_fn"
_DELTA_RULE = (CONVOLUTION, "torch_chunk_gated_delta_rule")
_KIMI_DELTA = (CONVOLUTION, "chunk_kimi_delta_attention")
_MAMBA2 = (CONVOLUTION, "mamba2_chunk_scan")
MIXERS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), _DELTA_RULE),
    **dict.fromkeys(("kimi_linear", "bailing_hybrid"), _KIMI_DELTA),
    **dict.fromkeys(("bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"), _MAMBA2),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), (CONVOLUTION,)),
}
"""Model type -> functions of its transformers modeling file by which layers other than attention mix tokens."""
LONGEST_DOCUMENT = "longest_document"
"""Keyword that accompanies it: host-side upper bound on the length of those documents in tokens, an int."""


class ModelKind(StrEnum):
    """causal_lm: a decoder with a language-model head."""

    causal_lm = "causal_lm"


_COMPILE = ("auto", "true", "false")
"""Values of model.compile."""


class DType(StrEnum):
    """Floating-point types. auto: chosen by the device, see the keys of this type."""

    auto = "auto"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


class WeightInit(StrEnum):
    """pretrained: load the weights from model.path; random: initialize them from run.seed."""

    pretrained = "pretrained"
    random = "random"


class Attention(StrEnum):
    """Attention implementations.

    sdpa: torch's scaled_dot_product_attention, which picks a kernel by device, dtype and mask; on a GPU, the installed
    kernels are timed at the start and the fastest is used; sdpa_flash: only torch's flash kernel, so that a run fails
    instead of falling back to a slower one; eager, flash_attention_2 (an optional package) and flex_attention (no
    backward on CPUs): transformers' implementations, which build masks and synchronize the host with the device.
    """

    sdpa = "sdpa"
    sdpa_flash = "sdpa_flash"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"
    flex_attention = "flex_attention"


class Float8(StrEnum):
    """Float8 matmuls of linear layers. none; tensorwise: one scale per operand; rowwise: one scale per row."""

    none = "none"
    tensorwise = "tensorwise"
    rowwise = "rowwise"


class Qat(StrEnum):
    """Quantization that training prepares for. none; int8_int4: activations in 8 bits per token, weights in 4 bits per
    group; int4_weight_only: weights in 4 bits per group, activations in bfloat16."""

    none = "none"
    int8_int4 = "int8_int4"
    int4_weight_only = "int4_weight_only"


QAT_GROUP_SIZES = (32, 64, 128, 256)
"""Group sizes of torchao's kernels for weights in 4 bits; the first is the default."""


class Fused(StrEnum):
    """Layers computed in fewer kernels than transformers' own. auto: all on GPUs, unless the layers are compiled."""

    auto = "auto"
    all = "all"
    none = "none"


class LossMethod(StrEnum):
    """Ways to compute the cross-entropy from the last hidden states.

    logits: materialize the logits of all tokens (tokens x vocabulary); chunked: project and differentiate a chunk of
    tokens at a time, in plain PyTorch on any device; liger: liger-kernel's fused kernel on a GPU (an optional package;
    synchronizes the host with the device once per micro-batch); auto: chunked if the model supports it and its logits
    are large, else logits. auto never selects liger.
    """

    auto = "auto"
    logits = "logits"
    chunked = "chunked"
    liger = "liger"


class RouterAux(StrEnum):
    """Load-balancing loss of a mixture of experts. none; sequence: computed per layer and sequence.

    Hugging Face's form is left out on purpose. It pools the tokens of a micro-batch over all layers, so its value
    depends on the micro-batch size, and under pipeline parallelism no rank holds all layers.
    """

    none = "none"
    sequence = "sequence"


class RopeType(StrEnum):
    """Ways to extend the context of rotary position embeddings; transformers' `rope_type`.

    none: the model's own; linear: all frequencies divided by a factor (Chen et al. 2023); yarn: low ones divided,
    high ones kept, attention sharpened (Peng et al. 2023); llama3: as in Llama 3.1. Dynamic NTK scaling is left out on
    purpose: its frequencies follow the longest sequence so far, so the loss would depend on how samples are batched.
    """

    none = "none"
    linear = "linear"
    yarn = "yarn"
    llama3 = "llama3"


@dataclass(kw_only=True, slots=True)
class RopeConfig:
    """Extension of the context of a model with rotary position embeddings. It becomes part of the model's config, so
    that an export has it."""

    type: RopeType = RopeType.none
    """none (the model's own positions), linear, yarn or llama3; replaces the model's own scaling."""
    factor: float | None = None
    """New context length divided by the original one, greater than 1."""
    original_max_position_embeddings: int | None = None
    """Context length in tokens that the model was trained with; null: its max_position_embeddings."""
    beta_fast: float | None = None
    """yarn: dims that rotate more often than this within the original context keep their frequency; null: 32."""
    beta_slow: float | None = None
    """yarn: dims that rotate less often than this have their frequency divided by factor; null: 1."""
    attention_factor: float | None = None
    """yarn: factor of the rotated queries and keys, greater than 0; null: 0.1 ln(factor) + 1."""
    low_freq_factor: float | None = None
    """llama3: wavelengths above original / low_freq_factor have their frequency divided by factor; null: 1."""
    high_freq_factor: float | None = None
    """llama3: wavelengths below original / high_freq_factor keep their frequency; null: 4."""

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> list[str]:
        set_keys = {name: value for name, value in field_values(self).items() if name != "type" and value is not None}
        if self.type is RopeType.none:
            return [
                f"model.rope.{name}={value}: model.rope.type=none does not scale positions; add model/rope=yarn, "
                "linear or llama3, or remove it"
                for name, value in set_keys.items()
            ]
        problems = [
            f"model.rope.{name}={set_keys[name]}: only model.rope.type={kind} has this key; remove it, or add "
            f"model/rope={kind}"
            for kind, names in _ROPE_KEYS.items()
            for name in names
            if name in set_keys and kind is not self.type
        ]
        if self.factor is None:
            problems.append(
                f"model.rope.factor=null: model.rope.type={self.type} needs a factor greater than 1; set it"
            )
        else:
            problems += above("model.rope.factor", self.factor, 1)
        problems += at_least("model.rope.original_max_position_embeddings", self.original_max_position_embeddings, 1)
        for name in ("beta_fast", "beta_slow", "attention_factor", "low_freq_factor", "high_freq_factor"):
            if name in set_keys:
                problems += above(f"model.rope.{name}", set_keys[name], 0)
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            defaults = {"beta_slow": 1.0, "beta_fast": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            values = [set_keys.get(name, defaults[name]) for name in (low, high)]
            if values[0] >= values[1]:
                problems.append(f"model.rope.{low}={values[0]}: must be less than model.rope.{high}={values[1]}")
        return problems


_ROPE_KEYS = {
    RopeType.yarn: ("beta_fast", "beta_slow", "attention_factor"),
    RopeType.llama3: ("low_freq_factor", "high_freq_factor"),
}
"""Type of scaling -> keys that only it has."""

_LARGEST_LIST, _LARGEST_TEMPLATE = 1 << 24, 1 << 20
"""Maximum sizes in bytes of a file of tokens and of one with a chat template."""
_NEL = "\x85"
"""Character that the config of a run cannot store."""
_SHOWN_TOKENS = 4
"""Maximum number of wrong tokens in an error."""
SIZES = ("layers", "heads", "kv_heads", "hidden", "vocab", "experts", "head_dim", "linear_heads", "mlp", "expert_mlp")
"""Keys that state sizes of the model before it is loaded."""


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """A model from the Hugging Face Hub, a local folder, a GGUF file or an installed package, or one from scratch."""

    kind: ModelKind = ModelKind.causal_lm
    """Selects one of the subclasses below; default: causal_lm."""
    path: str | None = None
    """Hub name (owner/model), local folder, .gguf file, or package:NAME/FILE for a file in an installed package; null:
    a model from scratch, described by model.config."""
    revision: str | None = None
    """Branch, tag or commit of a hub model; null: the default branch."""
    init: WeightInit = WeightInit.pretrained
    """pretrained: load the weights from model.path; random: initialize them from run.seed."""
    config: dict[str, Any] = field(default_factory=dict)
    """Overrides of the model's config.json, any key; if model.path is null, the whole config, including model_type."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    """Extension of the context of a model with rotary position embeddings."""
    tokenizer: str | None = None
    """Where the tokenizer comes from: like path; bytes: one token per byte, nothing to load; null: from path."""
    chat_template: str | None = None
    """Name of one of the tokenizer's chat templates, a file with one (./NAME if it has no suffix), another model whose
    template is used (a folder or a hub name), or one for base models: chatml, llama3 or qwen3; null: the tokenizer's,
    and of several the one named default. It becomes the default of the exported tokenizer, which keeps the others. A
    run stores the text of a file, so that it keeps its template if the file changes. As in transformers, conversations
    with tools use the tokenizer's template named tool_use instead, if there is one."""
    new_tokens: list[str] = field(default_factory=list)
    """Tokens to add to the tokenizer, in this order, or file:PATH for those in the lines of a text file. Those of the
    form <|...|> are special: decoding leaves them out. Their rows of the embedding and the head begin as the mean of
    the other tokens' rows, and a vocabulary that is too small grows by them. []: none."""
    dtype: DType = DType.auto
    """Dtype of the stored parameters, gradients and optimizer state: float32, bfloat16 (pure bfloat16), float64 or auto
    (float32, but bfloat16 for the frozen weights of adapters on a GPU that computes in bfloat16). Adapters, their
    gradients and optimizer state are at least float32, and so are tensors that transformers keeps in float32, such as
    biases that balance experts."""
    compute_dtype: DType = DType.auto
    """Dtype of matmuls: auto (bfloat16 if the device supports it natively, else float32), bfloat16, float32 or float64.
    Losses, gradient norms and optimizer updates are computed in float32 or wider."""
    attention: Attention = Attention.sdpa
    """sdpa, sdpa_flash, eager, flash_attention_2 or flex_attention. The banner prints the kernel that runs."""
    float8: Float8 = Float8.none
    """Compute all linear layers except the output head in float8 with torchao: none, tensorwise (fastest) or rowwise
    (more accurate)."""
    float8_emulate: bool = False
    """Round operands to float8 but compute in bfloat16: slow, runs on any device; shows the effect of float8 on the
    loss."""
    float8_bound: float = 0.01
    """Largest relative change of the loss of the first micro-batch that float8 may cause; above it, the run fails at
    its start."""
    qat: Qat = Qat.none
    """Quantization-aware training with torchao: round weights (int4_weight_only) and activations (int8_int4) of the
    decoder's linear layers to the values that they have when the export is quantized that way; none: no rounding."""
    qat_group_size: int = QAT_GROUP_SIZES[0]
    """Consecutive weights of a row that share a scale, with model.qat."""
    loss: LossMethod = LossMethod.auto
    """How to compute the loss from the last hidden states: auto, logits (all logits at once), chunked (less memory) or
    liger (fused GPU kernel, an optional package)."""
    compile: str = "auto"
    """Apply torch.compile to each decoder layer and to the chunked loss: true, false or auto (on GPUs, unless another
    setting excludes it; the banner then reports why not)."""
    fused: Fused = Fused.auto
    """Compute RMSNorms, rotary embeddings and SwiGLUs in fewer kernels than transformers, where the result is the same:
    auto (on GPUs, unless the layers are compiled, which fuses more), all or none. The banner reports how many."""
    router_aux: RouterAux = RouterAux.sequence
    """Load-balancing loss of a mixture of experts: sequence (per layer and sequence) or none. Part of the training
    loss, not of eval_loss."""
    router_aux_coef: float | None = None
    """Coefficient of the load-balancing loss, at least 0; null: router_aux_loss_coef of the model's config, or no such
    loss if the config lacks it."""
    router_z_coef: float = 0.0
    """Coefficient of the z-loss of routers, the mean square of the logarithm of the sum of their logits' exponentials,
    which keeps logits small; usual is 1e-3. 0: none. Part of the training loss, not of eval_loss."""
    router_bias_rate: float = 0.0
    """Balance experts without a loss: change the bias of an expert's score by this after each step, up if it received
    fewer tokens than the mean of its layer, else down. DeepSeek-V3 used 1e-3. For routers with such a bias, and full
    training only. 0: biases stay as they are."""
    trust_remote_code: bool = False
    """Allow transformers to run Python code from the model's repository; read that code first."""
    layers: int | None = None
    """Number of decoder layers. This and the keys below are only used before the model is loaded, to check the mesh and
    to plan; a local config.json or GGUF header overrides them. Those of an option of conf/model are dropped if
    model.path is set to another model. null: unknown."""
    heads: int | None = None
    """Number of attention (query) heads."""
    kv_heads: int | None = None
    """Number of key/value heads."""
    hidden: int | None = None
    """Hidden size."""
    vocab: int | None = None
    """Vocabulary size."""
    experts: int | None = None
    """Number of experts per mixture-of-experts layer; null: a dense model, or unknown."""
    family: str | None = None
    """transformers' model type, such as llama."""
    head_dim: int | None = None
    """Width of an attention head; null: hidden / heads, unless the family has another default."""
    linear_heads: int | None = None
    """Value heads of linear attention; null: none, or the default of the family."""
    mlp: int | None = None
    """Intermediate size of the dense MLPs."""
    expert_mlp: int | None = None
    """Intermediate size of one expert."""
    experts_per_token: int | None = None
    """Number of experts that a token is routed to."""
    window: int | None = None
    """Sliding window, in tokens, of the layers that have one; null: full attention, or unknown."""
    tied: bool | None = None
    """Whether the LM head shares its weight with the embedding; null: the family's default."""

    def __post_init__(self) -> None:
        self.compile = str(self.compile).lower()  # YAML's true and false become True and False
        # The frozen config does not need the files.
        self.new_tokens, problems = _tokens_in(self.new_tokens)
        self.chat_template, more = _template_in(self.chat_template)
        raise_all([*problems, *more, *self._problems()])

    @property
    def origin(self) -> str:
        """Where the weights of a new run are from, for the banner."""
        if self.path is None:
            return "from scratch"
        return f"architecture of {self.path}, random weights" if self.init is WeightInit.random else self.path

    @property
    def template_model(self) -> str | None:
        """The other model whose chat template is used: a folder, or a hub name (owner/model)."""
        name = self.chat_template or ""
        is_hub_name = re.fullmatch(r"\w[\w.-]*/[\w.-]+(?<!\.jinja)(?<!\.jinja2)(?<!\.j2)(?<!\.txt)", name)
        return name if is_hub_name or os.path.isdir(os.path.expanduser(name)) else None

    @property
    def template_name(self) -> str:
        """The chat template for messages: its name, or the beginning of its text."""
        name = self.chat_template or ""
        return f"{' '.join(name.split())[:40]}..." if is_template(name) else name

    def stored_dtype(self, *, frozen_on_gpu: bool = False) -> DType:
        """Return the dtype of stored parameters: `dtype`, with auto resolved.

        Args:
            frozen_on_gpu: Whether adapters are trained over these weights, on a GPU with bfloat16 matmuls.
        """
        if self.dtype != DType.auto:
            return self.dtype
        computes_bfloat16 = self.compute_dtype in (DType.auto, DType.bfloat16)
        return DType.bfloat16 if frozen_on_gpu and computes_bfloat16 else DType.float32

    def compiles(self, parallelism: ParallelismConfig, *, packs: bool, on_gpu: bool) -> bool:
        """Whether the layers are compiled (`compile`) in a run on a GPU or on a CPU. packs: data.pack."""
        if self.compile == "auto":
            return on_gpu and not self.uncompiled_because(parallelism, packs=packs)
        return self.compile == "true"

    def uncompiled_because(self, parallelism: ParallelismConfig, *, packs: bool) -> str:
        """Return the setting, as KEY=VALUE, for which `auto` does not compile, and why; empty if there is none."""
        schedule, policy = parallelism.pp_schedule, parallelism.activation_checkpointing
        if parallelism.pp > 1 and schedule in SPLIT_BACKWARD:
            return f"parallelism.pp_schedule={schedule}: splits the backward, which compiled layers do not support"
        if policy == ActivationCheckpointing.selective:
            return (
                f"parallelism.activation_checkpointing={policy}: a compiled layer is recomputed as one unit (the "
                "compiler already stores what is expensive)"
            )
        if parallelism.tp > 1 and not packs:
            return f"parallelism.tp={parallelism.tp} without data.pack: each row length would be compiled separately"
        if DType.float64 in (self.dtype, self.compute_dtype):
            return "float64: the compiler rounds constants to float32"
        return ""

    def fuses(self, parallelism: ParallelismConfig, *, packs: bool, on_gpu: bool) -> bool:
        """Whether norms, rotary embeddings and SwiGLUs are replaced (`fused`) in a run on a GPU or on a CPU."""
        if self.fused == Fused.auto:
            return on_gpu and not self.compiles(parallelism, packs=packs, on_gpu=on_gpu)
        return self.fused == Fused.all

    def _problems(self) -> list[str]:
        problems = own_kind("model", self)
        values = field_values(self)
        if self.compile not in _COMPILE:
            problems.append(f"model.compile={self.compile}: must be {', '.join(_COMPILE[:-1])} or {_COMPILE[-1]}")
        for name in (*SIZES, "experts_per_token", "window"):
            problems += at_least(f"model.{name}", values[name], 1)
        for name in ("router_aux_coef", "router_z_coef", "router_bias_rate"):
            problems += at_least(f"model.{name}", values[name], 0)
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
            problems.append(
                "model.tokenizer=null: required without model.path; set a tokenizer, or bytes (a token per byte)"
            )
        if self.rope.type is not RopeType.none and "rope_parameters" in self.config:
            problems.append(
                f"model.rope.type={self.rope.type}: model.config.rope_parameters is set too; set one of them"
            )
        problems += at_least("model.qat_group_size", self.qat_group_size, 2)
        if self.qat == Qat.none and self.qat_group_size != QAT_GROUP_SIZES[0]:
            problems.append(f"model.qat_group_size={self.qat_group_size}: needs model.qat; set model.qat=int8_int4")
        if self.qat == Qat.int4_weight_only and self.qat_group_size not in QAT_GROUP_SIZES:
            problems.append(
                f"model.qat_group_size={self.qat_group_size}: with model.qat={self.qat} it must be one of "
                f"{', '.join(map(str, QAT_GROUP_SIZES))}"
            )
        problems += above("model.float8_bound", self.float8_bound, 0)
        if self.float8_emulate and self.float8 == Float8.none:
            problems.append("model.float8_emulate=true: needs float8; set model.float8=tensorwise")
        computed = DType.float64 if self.dtype == DType.float64 else self.compute_dtype
        if self.float8 != Float8.none and not self.float8_emulate and computed not in (DType.auto, DType.bfloat16):
            problems.append(
                f"model.float8={self.float8}: replaces bfloat16 matmuls, but model.dtype={self.stored_dtype()} with "
                f"model.compute_dtype={self.compute_dtype} has none; set "
                "model.compute_dtype=bfloat16 or model.float8=none"
            )
        return problems


def _tokens_in(tokens: list[str]) -> tuple[list[str], list[str]]:
    """Return tokens with each file:PATH replaced by the file's lines, and their problems."""
    found: list[str] = []
    problems = []
    for token in tokens:
        if not token.startswith("file:"):
            found.append(token)
            continue
        try:
            text = read_regular(Path(os.path.expanduser(token.removeprefix("file:"))), _LARGEST_LIST).decode(
                "utf-8-sig"
            )
            found += [line for line in re.split(r"\r\n|\r|\n", text) if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            problems.append(
                f"model.new_tokens={token}: cannot be read ({error}); give a text file with a token per line"
            )
    for token, count in Counter(found).items():
        if count > 1 or token != token.strip() or not token or _NEL in token:
            problems.append(
                f"model.new_tokens={token!r}: is empty, begins or ends with a space, has the character U+0085, or is "
                "given twice; correct it"
            )
    return found, problems[:_SHOWN_TOKENS]


def _template_in(chosen: str | None) -> tuple[str | None, list[str]]:
    """Return model.chat_template with a file replaced by its text, and its problems."""
    path = Path(os.path.expanduser(chosen or ""))
    # os.path.isfile returns False for a name that is too long for a file.
    if chosen is None or not (is_template(chosen) or (os.path.isfile(path) and not re.fullmatch(r"\w+", chosen))):
        return chosen, []
    try:
        text = chosen if is_template(chosen) else read_regular(path, _LARGEST_TEMPLATE).decode("utf-8-sig")
        check_jinja(text)
        if _NEL in text:
            raise ValueError("it has the character U+0085, which YAML reads as a line break")
    except (OSError, ValueError) as error:
        shown = "the text" if is_template(chosen) else chosen
        return None, [f"model.chat_template={shown}: is no Jinja template: {error}; correct it, or choose another"]
    return text, []


@dataclass(kw_only=True, slots=True)
class CausalLMConfig(ModelConfig):
    """A causal language model."""
