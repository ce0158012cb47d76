"""What a Hugging Face model is made of, read once and passed as a value to every mesh axis.

`read_anatomy` is the only place that inspects a model of transformers for attributes that one family has and another
lacks. It runs on the meta device, before adapters, sharding or pipeline stages replace modules, and it returns names
and numbers: no module is held, so the value stays true while the model changes. A rule reads every family; where a
rule does not do, a table of families holds the fact. To support a new odd family, add a row and a test.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' names of the kinds of layers that attend causally, to all earlier tokens or to those of a window."""
LAYER_COUNTS = {
    "blenderbot": "decoder_layers",  # num_hidden_layers counts the encoder's
    "blenderbot-small": "decoder_layers",
    "longcat_flash": "num_layers",  # num_hidden_layers counts attention blocks, of which a layer has two
}
"""Model type -> the config value that counts decoder layers, for families where num_hidden_layers counts others."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_DIFFERS = object()


@dataclass(frozen=True, slots=True)
class AttentionWidths:
    """Sizes that decide the FLOPs of attention, equal in all layers."""

    heads: int
    keys: int
    """Width of a head's queries and keys."""
    values: int
    """Width of a head's values."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Parts of a model by name, and what its class and config state about them.

    A model that is not from Hugging Face has decoder layers and experts at most; everything else is at its default.
    """

    layers: tuple[str, ...]
    """Names of the decoder layers, in order; empty for a model without a ModuleList."""
    experts: tuple[str, ...] = ()
    """Names of the modules of fused experts."""
    routers: tuple[str, ...] = ()
    """Names of the routers within the decoder layers."""
    has_router_class: bool = False
    """Whether transformers knows the routers of the class, also where the config leaves every layer dense."""
    inner: str = ""
    """Name of the child that runs the decoder layers; empty if the model itself does."""
    embedding: str | None = None
    """Name of the input embedding."""
    head: str | None = None
    """Name of the LM head."""
    tied: bool = False
    """Whether the head's weight is the embedding's."""
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    """Module path, `*` for one part of it -> style, both in transformers' terms."""
    heads: int | None = None
    """Query heads of a layer; None if the config states none."""
    kv_heads: int | None = None
    """Key-value heads of a layer, as many as query heads without grouped attention."""
    heads_differ: bool = False
    """Whether layers have different numbers of query or key-value heads."""
    widths: AttentionWidths | None = None
    """None if the config states no heads, or layers differ in their widths."""
    kinds: tuple[str, ...] = ()
    """Kind of each decoder layer, by transformers' names."""
    window: int | None = None
    """Tokens that layers of kind `SLIDING` attend to."""
    own_masks: str = ""
    """Why mask-free attention is impossible for this model; empty if it is possible."""
    convolution: str = ""
    """Class of a convolution that mixes neighboring tokens; empty if there is none."""
    hidden_size: int = 0
    """Width of hidden states; 0 if the config states none."""
    vocabulary: int = 0
    """Tokens of the vocabulary; 0 if the config states none."""
    experts_per_token: int | None = None
    router_coefficient: float | None = None
    """Coefficient of the routers' auxiliary loss; None if the config states none."""

    @property
    def needs_whole_rows(self) -> str:
        """Why a part of a row cannot be computed by itself (cp); empty if it can."""
        return self.own_masks or (self.convolution and f"mixes neighboring tokens by {self.convolution}")

    @property
    def needs_unpacked_rows(self) -> str:
        """Why a row cannot hold several documents; empty if it can."""
        return self.own_masks or (self.convolution and f"mixes neighbours by {self.convolution}, across documents too")

    def decoder_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the decoder layers by name, in order, placeholders of other pipeline stages included."""
        return {name: model.get_submodule(name) for name in self.layers}

    def parts(self, model: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
        """Return those of the named modules that this rank's pipeline stages hold."""
        wanted = set(names)
        return {name: module for name, module in model.named_modules() if name in wanted}


def read_anatomy(model: nn.Module) -> Anatomy:
    """Read what a model is made of.

    Args:
        model: On the meta device or not, best before it is parallelized: FSDP hides its class.
    """
    experts = tuple(name for name, module in model.named_modules() if is_experts(module))
    if not _is_pretrained(model):
        return Anatomy(layers=_longest_list(model), experts=experts)
    config = model.config.get_text_config()
    layers = _layer_names(model, config)
    classes, layer_prefixes = _router_classes(model), tuple(f"{layer}." for layer in layers)
    embedding, head = _embedding(model), model.get_output_embeddings()
    heads, kv_heads = _number(config, "num_attention_heads"), _number(config, "num_key_value_heads")
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
        tied=_weight(embedding) is not None and _weight(embedding) is _weight(head),
        tp_plan=_tp_plan(model),
        heads=heads,
        kv_heads=kv_heads or heads,
        heads_differ=any(_raw(config, each) is _DIFFERS for each in ("num_attention_heads", "num_key_value_heads")),
        widths=_widths(config, heads),
        kinds=tuple(kinds),
        window=_window(config),
        own_masks=_own_masks(model, config, set(kinds)),
        convolution=next((type(each).__name__ for each in model.modules() if isinstance(each, CONVOLUTIONS)), ""),
        hidden_size=_number(config, "hidden_size") or 0,
        vocabulary=_number(config, "vocab_size") or 0,
        experts_per_token=_number(config, "num_experts_per_tok"),
        router_coefficient=_value(config, "router_aux_loss_coef"),
    )


def is_experts(module: nn.Module) -> bool:
    """Return whether a module counts its experts and holds matrices of all of them, (experts, ..., ...)."""
    own = list(module.parameters(recurse=False))
    return (
        any(each.dim() == 3 for each in own)
        and len({each.shape[0] for each in own}) == 1
        and isinstance(getattr(module, "num_experts", None), int)
    )


def drops_hidden_states(layer: nn.Module) -> bool:
    """Return whether a layer may call dropout on hidden states: a module of it has a probability of dropout.

    transformers' models hold probabilities in `nn.Dropout` or under a name with "drop"; those of attention weights are
    named for attention.
    """
    return any(
        isinstance(value, float | int) and value > 0
        for module in layer.modules()
        for name, value in ({"drop": module.p} if isinstance(module, nn.Dropout) else vars(module)).items()
        if "drop" in name and not name.startswith("att")
    )


def passes_window(module: nn.Module) -> bool:
    """Return whether a module's forward passes the width of its window on as the keyword `sliding_window`.

    transformers has no flag for this, and a model that does not pass it (its mask alone holds the window) would attend
    to all earlier tokens without a mask. Python stores the names of a call's keywords as a tuple among the constants
    of the calling function, in 3.11 to 3.14; the test that reads real models finds a version that does not.
    """
    forward = inspect.unwrap(type(module).forward)
    return inspect.isfunction(forward) and any(
        isinstance(const, tuple) and "sliding_window" in const for const in forward.__code__.co_consts
    )


def own_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class that transformers built; FSDP2 gives a model a subclass without a constructor of its own."""
    from transformers import PreTrainedModel as Base

    return next(cls for cls in type(model).__mro__ if "__init__" in vars(cls) and issubclass(cls, Base))


def plain_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a module keeps as plain attributes: neither parameters nor buffers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}


def shortened_config(config: PreTrainedConfig, layers: int) -> Any:
    """Return a copy of a text config with fewer decoder layers."""
    shorter: Any = copy.deepcopy(config)
    shorter.num_hidden_layers = layers
    if kinds := _value(config, "layer_types"):
        shorter.layer_types = kinds[:layers]
    return shorter


def config_of(model: nn.Module) -> PreTrainedConfig | None:
    """Return a Hugging Face model's config, None for another model."""
    return model.config if _is_pretrained(model) else None


def _is_pretrained(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    from transformers import PreTrainedModel as Base

    return isinstance(model, Base)


def _raw(config: PreTrainedConfig, name: str) -> Any:
    """Return a config's value, None if its family has none, `_DIFFERS` if it differs between layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers refuses to return one value of what layers differ in (Gemma 4's head_dim)
        return _DIFFERS


def _value(config: PreTrainedConfig, name: str) -> Any:
    """Return a config's value, None if its family has none or its layers differ in it."""
    found = _raw(config, name)
    return None if found is _DIFFERS else found


def _number(config: PreTrainedConfig, name: str) -> int | None:
    found = _value(config, name)
    return found if isinstance(found, int) else None


def _window(config: PreTrainedConfig) -> int | None:
    return _value(config, "sliding_window")


def _widths(config: PreTrainedConfig, heads: int | None) -> AttentionWidths | None:
    """Return the widths of attention, multi-head latent attention (DeepSeek's) included."""
    names = ("num_attention_heads", "head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if not heads or any(_raw(config, name) is _DIFFERS for name in names):
        return None
    width = _value(config, "head_dim") or (_number(config, "hidden_size") or 0) // heads
    latent, rotated = _value(config, "qk_nope_head_dim"), _value(config, "qk_rope_head_dim")
    keys = width if latent is None else latent + (rotated or 0)
    return AttentionWidths(heads, keys, _value(config, "v_head_dim") or width) if keys else None


def _layer_names(model: PreTrainedModel, config: PreTrainedConfig) -> tuple[str, ...]:
    """Return the names of the decoder layers: the first ModuleList of the decoder with as many as the config counts.

    An image encoder may have a list of the same length. Without a list of this length the longest one is taken.
    """
    count = _value(config, LAYER_COUNTS.get(config.model_type, "num_hidden_layers"))
    decoder: Any = model.get_decoder()
    inside = {id(module) for module in decoder.modules()} if isinstance(decoder, nn.Module) else set()
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    lists = {name: layers for name, layers in lists.items() if id(layers) in inside} or lists
    found = next((name for name, layers in lists.items() if len(layers) == count), None)
    return _longest_list(model, lists) if found is None else _names_in(found, lists[found])


def _longest_list(model: nn.Module, lists: Mapping[str, nn.ModuleList] | None = None) -> tuple[str, ...]:
    if lists is None:
        lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    longest = max(lists, key=lambda name: len(lists[name]), default=None)
    return () if longest is None else _names_in(longest, lists[longest])


def _names_in(name: str, layers: nn.ModuleList) -> tuple[str, ...]:
    return tuple(f"{name}.{index}".lstrip(".") for index in range(len(layers)))


def _embedding(model: PreTrainedModel) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None


def _name_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((name for name, module in model.named_modules() if module is wanted), None)


def _weight(module: nn.Module | None) -> nn.Parameter | None:
    return None if module is None else module._parameters.get("weight")


def _tp_plan(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan of transformers: the class's, the instance's and the inner model's, later ones win.

    The inner model's name is put in front of an inner plan's paths.
    """
    merged = {**(type(model)._tp_plan or {}), **(model._tp_plan or {})}
    name = model.base_model_prefix or "model"
    inner = model._modules.get(name) if model.base_model is model else model.base_model
    if inner is None or not _is_pretrained(inner):
        return merged
    for path, style in (inner._tp_plan or type(inner)._tp_plan or {}).items():
        merged[path if path.startswith(f"{name}.") else f"{name}.{path}"] = style
    return merged


def _own_masks(model: PreTrainedModel, config: PreTrainedConfig, kinds: set[str]) -> str:
    if others := kinds - {FULL, SLIDING}:
        return f"has layers of {', '.join(sorted(others))}, which are neither full nor sliding attention"
    if _value(config, "is_causal") is False or _value(config, "use_bidirectional_attention"):
        return "attends to both sides"
    if not model._can_set_attn_implementation():
        return "computes attention in its own code, outside transformers' attention interface"
    if _window(config) and not any(map(passes_window, model.modules())):
        return "applies its sliding window by a mask and does not pass the window to its attention"
    return ""


def _router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    """Return the classes whose outputs transformers records as router logits."""
    found: list[Any] = []
    for module in model.modules():
        recorded = (module._can_record_outputs or {}) if _is_pretrained(module) else {}
        routers: Any = recorded.get("router_logits", [])
        found += routers if isinstance(routers, list) else [routers]
    return tuple(dict.fromkeys(each if isinstance(each, type) else each.target_class for each in found))
