"""Structure of a Hugging Face model, read once and passed as a value to every mesh axis.

`read_anatomy` is the only place that inspects a transformers model for attributes that some families lack. It runs on
the meta device, before adapters, sharding or pipeline stages replace modules. It returns names and numbers and holds no
module, so the value stays valid while the model changes. Most facts follow from a rule that covers every family;
exceptions are listed in tables by model type. To support an unusual family, add a row and a test.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from components.config.schema.model import MIXERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' layer types with causal attention: to all earlier tokens, or to those within a window."""
MIXING = ("linear_attention", "conv", "hybrid")
"""transformers' layer types that mix tokens by a convolution or a recurrence; hybrid: beside full attention."""
ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of the tensors that transformers' routers add to the scores of experts for their choice."""
WITHOUT_MASK = (*MIXING, "mlp", "moe")
"""Layer types that need no mask, in families of `MIXERS`; mlp and moe: an MLP only (Nemotron-H)."""
_LAYER_COUNTS = {
    "blenderbot": "decoder_layers",  # num_hidden_layers counts encoder layers
    "blenderbot-small": "decoder_layers",
    "longcat_flash": "num_layers",  # num_hidden_layers counts attention blocks, two per layer
}
"""Model type -> the config key that counts decoder layers, for families where num_hidden_layers counts others."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = {"Llama4TextExperts"}
"""Classes of fused experts that store matrices (experts, in, out) without transformers' flag `is_transposed`."""
_DIFFERS = object()


class ChangedForward:
    """Base of classes that are mixed into the transformers class of a model to change its forward."""


class Adapted:
    """Base of the classes of modules with adapters."""


def has_adapters(model: nn.Module) -> bool:
    """Return whether any module of a model has adapters."""
    return any(isinstance(module, Adapted) for module in model.modules())


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Parameter counts of a model; a tied parameter counts once."""

    total: int
    """Elements of all parameters of the unsharded model."""
    trainable: int
    """Elements of trainable parameters."""
    local_bytes: int
    """Bytes of this rank's shards."""
    packed: int = 0
    """Elements of parameters stored in 4 bits."""

    def __str__(self) -> str:
        if self.trainable == self.total:
            return f"{self.total:,} parameters"
        trained = f"{self.total:,} parameters, {self.trainable:,} of them trained ({self.trainable / self.total:.2%})"
        return f"{trained}, {self.packed:,} frozen in NF4" if self.packed else trained


@dataclass(frozen=True, slots=True)
class _LayerHeads:
    """Attention heads of a layer, and their widths."""

    heads: int
    kv_heads: int
    keys: int
    """Width of a head's queries and keys."""
    values: int
    """Width of a head's values."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Module names of a model's parts, and facts from its class and config.

    For a model that is not from Hugging Face only decoder layers, experts, the embedding, the tensor-parallel plan and
    the numbers of heads are found; all other fields have their defaults.
    """

    layers: tuple[str, ...]
    """Names of the decoder layers, in order; empty for a model without a ModuleList."""
    experts: tuple[str, ...] = ()
    """Names of the modules of fused experts."""
    routers: tuple[str, ...] = ()
    """Names of the routers within the decoder layers."""
    has_router_class: bool = False
    """Whether the class declares routers to transformers, even if this config makes every layer dense."""
    inner: str = ""
    """Name of the child module that runs the decoder layers; empty if the model itself runs them."""
    embedding: str | None = None
    """Name of the input embedding."""
    head: str | None = None
    """Name of the LM head."""
    norm: str | None = None
    """Name of the norm between the decoder layers and the head; None if there is no single module for it."""
    tied: bool = False
    """Whether the head shares its weight with the embedding."""
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    """transformers' tensor-parallel plan: module path (`*` matches one component) -> style."""
    heads: int | None = None
    """Query heads of a layer; None if the config states none."""
    kv_heads: int | None = None
    """Key-value heads of a layer; equal to `heads` without grouped-query attention."""
    layer_heads: tuple[_LayerHeads, ...] = ()
    """Those of each decoder layer; empty if the config states none."""
    kinds: tuple[str, ...] = ()
    """transformers' layer type of each decoder layer."""
    window: int | None = None
    """Window in tokens of layers of type `SLIDING`."""
    needs_masks: str = ""
    """Why mask-free attention is impossible for this model; empty if it is possible."""
    mixers: tuple[str, ...] = ()
    """Functions of the modeling file by which layers of the types `MIXING` mix tokens, if Meshbook knows them."""
    convolution: str = ""
    """Class of another convolution that mixes neighboring tokens; empty if there is none."""
    float32: tuple[str, ...] = ()
    """Names of the parameters that are in float32 in a model in 16 bits."""
    transposed: frozenset[str] = frozenset()
    """Names of the matrices that are stored as (in, out) or (experts, in, out)."""
    hidden_size: int = 0
    """Width of hidden states; 0 if the config states none."""
    vocabulary: int = 0
    """Vocabulary size; 0 if the config states none."""
    experts_per_token: int | None = None
    router_coefficient: float | None = None
    """Coefficient of the routers' auxiliary loss; None if the config states none."""

    @property
    def needs_unsharded_rows(self) -> str:
        """Why a row cannot be divided over ranks (cp); empty if it can."""
        return self.needs_masks or (self.convolution and f"mixes neighboring tokens by {self.convolution}")

    @property
    def needs_unpacked_rows(self) -> str:
        """Why a row cannot hold several documents; empty if it can."""
        return self.needs_masks or (
            self.convolution and f"mixes neighboring tokens by {self.convolution}, also across documents"
        )

    def decoder_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the decoder layers by name, in order, placeholders of other pipeline stages included."""
        return {name: model.get_submodule(name) for name in self.layers}

    def parts(self, model: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
        """Return the named modules that exist in this rank's pipeline stages."""
        wanted = set(names)
        return {name: module for name, module in model.named_modules() if name in wanted}


def read_anatomy(model: nn.Module) -> Anatomy:
    """Read the structure of a model.

    Args:
        model: On any device, meta included. Read it before it is parallelized, because FSDP replaces its class.
    """
    experts = tuple(name for name, module in model.named_modules() if is_experts(module))
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if _is_pretrained(model) else _raw(config, "text_config") or config
    heads, kv_heads = _number(config, "num_attention_heads"), _number(config, "num_key_value_heads")
    if not _is_pretrained(model):
        own = _embedding(model)
        sharers = [module for module in model.modules() if _weight(module) is _weight(own) is not None]
        # A head that is tied later needs the layout of the embedding, which is left out of the plan.
        ties_later = bool(_value(config, "tie_word_embeddings")) and len(sharers) < 2
        return Anatomy(
            layers=_longest_list(model),
            experts=experts,
            embedding=None if ties_later else _name_of(model, own),
            tp_plan=_tp_plan(model),
            heads=heads,
            kv_heads=kv_heads or heads,
            transposed=_transposed(model),
        )
    layers = _layer_names(model, config)
    classes, layer_prefixes = _router_classes(model), tuple(f"{layer}." for layer in layers)
    embedding, head = _embedding(model), model.get_output_embeddings()
    kinds = _value(config, "layer_types") or [FULL if _window(config) is None else SLIDING] * (
        _number(config, "num_hidden_layers") or len(layers)
    )
    return Anatomy(
        layers=layers,
        experts=experts,
        routers=tuple(
            name
            for name, module in model.named_modules()
            if isinstance(module, classes) and name.startswith(layer_prefixes)
        ),
        has_router_class=bool(classes),
        inner=model.base_model_prefix if model.base_model_prefix in model._modules else "",
        embedding=_name_of(model, embedding),
        head=_name_of(model, head),
        norm=_final_norm(model, layers),
        tied=_weight(embedding) is not None and _weight(embedding) is _weight(head),
        tp_plan=_tp_plan(model),
        heads=heads,
        kv_heads=kv_heads or heads,
        layer_heads=_layer_heads(config, len(layers)),
        kinds=tuple(kinds),
        window=_window(config),
        needs_masks=_needs_masks(model, config, set(kinds)),
        mixers=(mixers := MIXERS.get(config.model_type, ())),
        convolution="" if mixers else _convolution(model),
        float32=_float32_parameters(model),
        transposed=_transposed(model),
        hidden_size=_number(config, "hidden_size") or 0,
        vocabulary=_number(config, "vocab_size") or 0,
        experts_per_token=_number(config, "num_experts_per_tok") or _number(config, "top_k_experts"),
        router_coefficient=_value(config, "router_aux_loss_coef"),
    )


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds fused experts: `num_experts` and stacked matrices, (experts, ..., ...)."""
    parameters = list(module.parameters(recurse=False))
    return (
        any(parameter.dim() == 3 for parameter in parameters)
        and len({parameter.shape[0] for parameter in parameters}) == 1
        and isinstance(getattr(module, "num_experts", None), int)
    )


def stores_transposed(experts: nn.Module) -> bool:
    """Return whether matrices are (experts, in, out), as GPT-OSS's, rather than (experts, out, in)."""
    return bool(getattr(experts, "is_transposed", False))


def is_transposed(layer: nn.Module) -> bool:
    """Return whether the weight of a linear layer is (in, out): transformers' Conv1D (GPT-2), adapted or not."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D) or bool(getattr(layer, "is_conv1d", False))


def encoder_parameters(model: nn.Module) -> set[str]:
    """Return the names of the parameters that text does not use, of a model that also reads images or sound.

    They belong to the encoders of images and sound, and to their projections to the decoder's width.
    """
    if not _is_pretrained(model):
        return set()
    config, text = model.config, model.config.get_text_config()
    if not any(name.startswith(("vision", "audio")) for name in config.sub_configs):
        return set()
    models = [(name, module) for name, module in model.named_modules() if _is_pretrained(module)]
    unused = tuple(f"{name}." for name, module in models if module.config is not config and module.config is not text)
    used: tuple[str, ...] = ("",)
    if text is not config:
        parts = (model.get_decoder(), _embedding(model), model.get_output_embeddings())
        used = tuple(f"{path}." for part in parts if (path := _name_of(model, part)) is not None)
    names = [name for name, _ in model.named_parameters()]
    return {name for name in names if name.startswith(unused) or not name.startswith(used)}


def kept_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Return the pattern of the names of tensors that stay in float32 when the model is loaded in `dtype`, if any.

    Those of transformers, and biases that balance experts: some classes do not list them, but 16 bits of a bias do not
    change by the rate of `model.router_bias_rate`.
    """
    plan = [*model._get_dtype_plan(dtype)]  # a private method; `from_pretrained` searches for its keys in names
    plan += [rf"\b{name}$" for name in ROUTER_BIASES if dtype.itemsize == 2]
    return re.compile("|".join(each.replace("*", ".*") for each in plan)) if plan else None


def drops_hidden_states(layer: nn.Module) -> bool:
    """Return whether a layer may apply dropout to hidden states: one of its modules has a dropout probability > 0.

    transformers stores these probabilities in `nn.Dropout` or in an attribute with "drop" in its name. The names for
    attention weights begin with "att".
    """
    return any(
        isinstance(value, float | int) and value > 0
        for module in layer.modules()
        for name, value in ({"drop": module.p} if isinstance(module, nn.Dropout) else vars(module)).items()
        if "drop" in name and not name.startswith("att")
    )


def _passes_window(module: nn.Module) -> bool:
    """Return whether a module's forward passes its window to the attention function as keyword `sliding_window`.

    A model that applies the window in its mask only would attend to all earlier tokens without that mask, and
    transformers has no flag that distinguishes the two. So this inspects bytecode: Python 3.11 to 3.14 store the
    keyword names of a call as a tuple in the constants of the calling function. A test on real models fails under a
    Python version that does not.
    """
    forward = inspect.unwrap(type(module).forward)
    return inspect.isfunction(forward) and any(
        isinstance(const, tuple) and "sliding_window" in const for const in forward.__code__.co_consts
    )


def transformers_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the transformers class of a model; FSDP2 and score models change the class to a subclass."""
    from transformers import PreTrainedModel as Base

    changed = (FSDPModule, ChangedForward)
    return next(cls for cls in type(model).__mro__ if issubclass(cls, Base) and not issubclass(cls, changed))


def plain_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a module stores as plain attributes, neither parameters nor buffers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def config_of(model: nn.Module) -> PreTrainedConfig | None:
    """Return the config of a Hugging Face model, None for any other model."""
    return model.config if _is_pretrained(model) else None


def _is_pretrained(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    from transformers import PreTrainedModel as Base

    return isinstance(model, Base)


def _raw(config: PreTrainedConfig | None, name: str) -> Any:
    """Return a config value, None if this family lacks it, `_DIFFERS` if it differs between layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers raises for a value that differs between layers (Gemma 4's head_dim)
        return _DIFFERS


def _value(config: PreTrainedConfig, name: str) -> Any:
    """Return a config value, None if this family lacks it or if it differs between layers."""
    value = _raw(config, name)
    return None if value is _DIFFERS else value


def _number(config: PreTrainedConfig, name: str) -> int | None:
    value = _value(config, name)
    return value if isinstance(value, int) else None


def _window(config: PreTrainedConfig) -> int | None:
    return _value(config, "sliding_window")


def _layer_heads(config: PreTrainedConfig, layers: int) -> tuple[_LayerHeads, ...]:
    """Return the heads of each layer, of multi-head latent attention (DeepSeek) too."""
    own, found = _value(config, "per_layer_config"), []
    for each in [config] * layers if own is None else [own[index] for index in range(layers)]:
        heads = _number(each, "num_attention_heads")
        width = _value(each, "head_dim") or (_number(each, "hidden_size") or 0) // (heads or 1)
        latent, rotated = _value(each, "qk_nope_head_dim"), _value(each, "qk_rope_head_dim")
        keys = width if latent is None else latent + (rotated or 0)
        if not heads or not keys:
            return ()
        kv_heads = _number(each, "num_key_value_heads") or heads
        found.append(_LayerHeads(heads, kv_heads, keys, _value(each, "v_head_dim") or width))
    return tuple(found)


def _layer_names(model: PreTrainedModel, config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the names of the decoder layers: those of the decoder's first ModuleList with the config's layer count.

    Lists outside the decoder are skipped, because an image encoder may have as many layers. If no list has this length,
    the longest one is used.
    """
    count = _value(config, _LAYER_COUNTS.get(config.model_type, "num_hidden_layers"))
    decoder: Any = model.get_decoder()
    inside = {id(module) for module in decoder.modules()} if isinstance(decoder, nn.Module) else set()
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    lists = {name: layers for name, layers in lists.items() if id(layers) in inside} or lists
    named = next((name for name, layers in lists.items() if len(layers) == count), None)
    return _longest_list(model, lists) if named is None else _names_in(named, lists[named])


def _longest_list(model: nn.Module, lists: Mapping[str, nn.ModuleList] | None = None) -> tuple[str, ...]:
    if lists is None:
        lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    longest = max(lists, key=lambda name: len(lists[name]), default=None)
    return () if longest is None else _names_in(longest, lists[longest])


def _names_in(name: str, layers: nn.ModuleList) -> tuple[str, ...]:
    return tuple(f"{name}.{index}".lstrip(".") for index in range(len(layers)))


def _embedding(model: nn.Module) -> nn.Module | None:
    """Return the input embedding: by transformers' method, otherwise the first one named `embed_tokens`."""
    if callable(getter := getattr(model, "get_input_embeddings", None)):
        try:
            return getter()
        except NotImplementedError:
            return None
    named = (module for name, module in model.named_modules() if name.rpartition(".")[2] == "embed_tokens")
    return next((module for module in named if isinstance(module, nn.Embedding)), None)


def _name_of(model: nn.Module, target: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is target), None)


def _final_norm(model: nn.Module, layers: tuple[str, ...]) -> str | None:
    """Return the name of the norm after the layers: the only child of their parent that follows and has parameters."""
    parent, _, children = next(iter(layers), "").rpartition(".")[0].rpartition(".")
    siblings = list(model.get_submodule(parent).named_children())
    position = next((index for index, (name, _) in enumerate(siblings) if name == children), len(siblings))
    after = [(name, child) for name, child in siblings[position + 1 :] if any(True for _ in child.parameters())]
    if len(after) != 1 or "norm" not in type(after[0][1]).__name__.lower():
        return None
    return f"{parent}.{after[0][0]}".lstrip(".")


def _convolution(model: PreTrainedModel) -> str:
    """Return the class of a convolution over text; the patches of an image encoder are none."""
    unused = encoder_parameters(model)
    found = (
        type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _CONVOLUTIONS) and f"{name}.weight" not in unused
    )
    return next(found, "")


def _float32_parameters(model: PreTrainedModel) -> tuple[str, ...]:
    kept, is_narrow = kept_in_float32(model, torch.bfloat16), model.dtype.itemsize == 2
    # Not adapters, which are in float32 too, but are computed in the dtype of the model.
    named = [(name, parameter) for name, parameter in model.named_parameters() if "lora_" not in name]
    return tuple(
        name
        for name, parameter in named
        if (kept is not None and kept.search(name)) or (is_narrow and parameter.dtype == torch.float32)
    )


def _transposed(model: nn.Module) -> frozenset[str]:
    found = set()
    for path, module in model.named_modules():
        if is_transposed(module):
            found.add(f"{path}.weight")
        elif is_experts(module) and (stores_transposed(module) or type(module).__name__ in _TRANSPOSED):
            matrices = (name for name, each in module.named_parameters(recurse=False) if each.dim() == 3)
            found |= {f"{path}.{name}" for name in matrices}
    return frozenset(found)


def _weight(module: nn.Module | None) -> nn.Parameter | None:
    return None if module is None else module._parameters.get("weight")


def _tp_plan(model: nn.Module) -> dict[str, str]:
    """Merge the `_tp_plan` of every module, its class before its instance and inner modules last; later ones win.

    Paths of an inner module's plan are prefixed with its name, unless they are relative to the model already.
    """
    merged: dict[str, str] = {}
    for name, module in model.named_modules():
        own: dict[str, str] = {}
        for owner in (type(module), module):
            own |= getattr(owner, "_tp_plan", None) or {}
        for path, style in own.items():
            is_prefixed = path.startswith(f"{name}.") and path.partition(".")[0] not in module._modules
            merged[path if is_prefixed else f"{name}.{path}".lstrip(".")] = style
    return merged


def _needs_masks(model: PreTrainedModel, config: PreTrainedConfig, kinds: set[str]) -> str:
    known = {FULL, SLIDING, *(WITHOUT_MASK if config.model_type in MIXERS else ())}
    if others := kinds - known:
        return f"has layers of type {', '.join(sorted(others))}, which are neither full nor sliding attention"
    if _value(config, "is_causal") is False or _value(config, "use_bidirectional_attention"):
        return "uses bidirectional attention"
    if not model._can_set_attn_implementation():
        return "computes attention in its own code, outside transformers' attention interface"
    if _window(config) and not any(map(_passes_window, model.modules())):
        return "applies its sliding window in a mask and does not pass the window to its attention"
    return ""


def _router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """Return the classes whose outputs transformers records as router logits."""
    recorders: list[Any] = []
    for module in model.modules():
        recorded = (module._can_record_outputs or {}) if _is_pretrained(module) else {}
        routers: Any = recorded.get("router_logits", [])
        recorders += routers if isinstance(routers, list) else [routers]
    return tuple(dict.fromkeys(each if isinstance(each, type) else each.target_class for each in recorders))
