"""Tensor-parallel plans (module path -> style): reading, loading, adjusting and checking them.

`FAMILY_PLANS` holds the plans of families for which transformers has none, or one without their per-head parameters. To
add a family: add a row, and a case in tests/distributed/test_tp_plan.py.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from components.config.shape import AttentionLayout, attention_layout
from components.distributed.expert import ExpertParallel
from components.distributed.tensor_parallel import (
    KVHeadSlice,
    PerHead,
    PerHeadNorms,
    ReplicatedConvolution,
    ReplicatedParameters,
    TransformersStyle,
)
from components.models.anatomy import Anatomy, config_of, is_experts, is_transposed, read_anatomy
from components.protocol.errors import ConfigError

TpPlan = dict[str, ParallelStyle]
"""Module path -> style; `*` matches one path component."""
_TORCH_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_rep": partial(ColwiseParallel, output_layouts=Replicate()),
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
    "embedding_colwise": partial(ColwiseParallel, output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_rep": partial(RowwiseParallel, input_layouts=Replicate()),
    "rowwise_split_input": partial(RowwiseParallel, input_layouts=Replicate()),
    "embedding_rowwise": partial(RowwiseParallel, input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    "replicate": ReplicatedParameters,
    "replicated_with_grad_allreduce": partial(ReplicatedParameters, partial_grad=True),
    "moe_tp_experts": ExpertParallel,
    "per_head": PerHead,
    "per_head_norms": PerHeadNorms,
    "replicated_convolution": ReplicatedConvolution,
}
"""Style name of transformers or of `FAMILY_PLANS` -> constructor of the style."""
_TRANSFORMERS_STYLES = (
    "packed_colwise",
    "packed_rowwise",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "local_params",
    "all_reduce",
)
"""Styles for which transformers' implementation is used, because torch has none."""
_MISSING = object()
_QKV = {f"self_attn.{name}_proj": "colwise" for name in "qkv"}
_ATTENTION = {**_QKV, "self_attn.o_proj": "rowwise"}
_MLP = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
_LATENT = {  # multi-head latent attention, which transformers' plans of DeepSeek V3 and Mistral 4 leave out
    "self_attn.q_proj": "colwise",
    "self_attn.q_b_proj": "colwise",
    "self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
    "self_attn.kv_b_proj": "colwise",
    "self_attn.o_proj": "rowwise",
}
_FEED_FORWARD = {f"feed_forward{name.removeprefix('mlp')}": style for name, style in _MLP.items()}
_SHORT_CONVOLUTIONS = {  # replicated: their cost is small next to the projections around them
    **_QKV,
    "self_attn.out_proj": "rowwise",
    "self_attn.q_layernorm": "replicated_with_grad_allreduce",
    "self_attn.k_layernorm": "replicated_with_grad_allreduce",
    "conv": "replicated_convolution",
    "conv.conv": "replicate",
    "conv.in_proj": "colwise_gather_output",
    "conv.out_proj": "rowwise_split_input",
    "feed_forward.w1": "colwise",
    "feed_forward.w3": "colwise",
    "feed_forward.w2": "rowwise",
}
FAMILY_PLANS: Mapping[str, Mapping[str, str]] = {
    "bailing_hybrid": {**_LATENT, "self_attn.g_proj": "colwise"},
    "bamba": {**_ATTENTION, **_FEED_FORWARD},
    "cohere": {  # Command R+: the norms of queries and keys have one row of weights per head
        "self_attn.q_norm": "per_head",
        "self_attn.k_norm": "per_head",
    },
    "deepseek_v3": _LATENT,
    "falcon_h1": {**_ATTENTION, **_FEED_FORWARD},
    "gpt2": {  # the forward slices queries, keys and values out of one matrix, so its output is gathered
        "attn.c_attn": "colwise_gather_output",
        "attn.c_proj": "rowwise_split_input",
        "mlp.c_fc": "colwise",
        "mlp.c_proj": "rowwise",
    },
    "gpt_oss": {  # one attention sink per head; the experts, with their biases, are sharded as a whole
        **_ATTENTION,
        "self_attn": "per_head",
    },
    "granitemoehybrid": {
        **_ATTENTION,
        "shared_mlp.input_linear": "colwise_gather_output",  # gate and up in one matrix
        "shared_mlp.output_linear": "rowwise_split_input",
    },
    "hunyuan_v1_dense": {  # norms of queries and keys after the rotary embedding, shared by all heads
        **_ATTENTION,
        **_MLP,
        "self_attn.query_layernorm": "replicated_with_grad_allreduce",
        "self_attn.key_layernorm": "replicated_with_grad_allreduce",
    },
    "kimi_linear": _LATENT,
    "lfm2": _SHORT_CONVOLUTIONS,
    "lfm2_moe": _SHORT_CONVOLUTIONS,
    "mistral4": _LATENT,
    "nemotron_h": {  # attention, MLP and experts are all named mixer, one to a layer
        **{f"mixer.{name}_proj": "colwise" for name in ("q", "k", "v", "up")},
        **{f"mixer.{name}_proj": "rowwise" for name in ("o", "down")},
        "mixer.shared_experts.up_proj": "colwise",
        "mixer.shared_experts.down_proj": "rowwise",
    },
    "stablelm": {  # its attention counts its heads itself; optionally one LayerNorm per head
        **_ATTENTION,
        **_MLP,
        "self_attn": "per_head",
        "self_attn.q_layernorm": "per_head_norms",
        "self_attn.k_layernorm": "per_head_norms",
    },
}
"""Model type -> module path within a decoder layer -> style name. Entries are added to transformers' plan of the model;
paths that match no module (an option of the config is off) are ignored."""


class MissingPlanError(ConfigError, AssertionError):
    """Error for a model without a tensor-parallel plan; also an AssertionError, as in NeMo AutoModel."""


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """Return a new torch style for a style name of transformers 4 or 5.

    Same signature as in NeMo AutoModel's parallelizer. Styles that torch lacks use transformers' implementation.
    Raises ValueError for an unknown name, and TypeError (also an AssertionError, as in NeMo AutoModel) if `style` is
    not a string.
    """
    if not isinstance(style, str):
        raise _NotAStyleNameError(f"the name of a parallel style must be a string, not {style!r}")
    if style in _TRANSFORMERS_STYLES:
        return TransformersStyle(style)
    if style in _TORCH_STYLES:
        return _TORCH_STYLES[style]()
    raise ValueError(f"Unknown parallel style: {style!r}; set parallelism.tp_plan=module:name to use another plan")


class _NotAStyleNameError(TypeError, AssertionError):
    """Error for a style name that is not a string."""


def get_hf_tp_shard_plan(model: nn.Module) -> TpPlan:
    """Return the tensor-parallel plan of a model, from Hugging Face or not.

    Same signature as in NeMo AutoModel's parallelizer. Merges the `_tp_plan` of the class, the instance and the inner
    models, of which later ones win; paths of an inner model's plan get its name as a prefix. The input embedding is
    added, unless it is tied to a head that the plan leaves out. Raises MissingPlanError if the plan would shard
    nothing.
    """
    return shard_plan(model, read_anatomy(model))


def shard_plan(model: nn.Module, anatomy: Anatomy) -> TpPlan:
    """Return the plan of a model's anatomy and family as torch styles, with the input embedding added.

    Raises MissingPlanError if the plan would shard nothing.
    """
    styles = {**anatomy.tp_plan, **_family_plan(model, anatomy)}
    if not shards_any(model, _translated(model, styles)):
        raise MissingPlanError(missing_plan(model))
    if anatomy.embedding is not None and not _is_tied_to_unplanned(model, anatomy.embedding, styles):
        styles.setdefault(anatomy.embedding, "embedding_rowwise")
    return _translated(model, styles)


def _is_tied_to_unplanned(model: nn.Module, embedding: str, styles: dict[str, str]) -> bool:
    """Return whether an embedding shares its weight with a module that a plan leaves out, so that both replicate it."""
    weight = model.get_submodule(embedding)._parameters.get("weight")
    return any(
        name != embedding and module._parameters.get("weight") is weight and not _planned(styles, name)
        for name, module in model.named_modules()
    )


def _family_plan(model: nn.Module, anatomy: Anatomy) -> dict[str, str]:
    """Return the entries of FAMILY_PLANS that match a module of the model, by module path."""
    config = config_of(model)
    if config is None or not anatomy.layers:
        return {}
    layers = anatomy.layers[0].rpartition(".")[0]
    plan = FAMILY_PLANS.get(config.model_type, {})
    paths = {f"{layers}.*.{path}": style for path, style in plan.items()}
    return {path: style for path, style in paths.items() if matching(model, path)}


def _translated(model: nn.Module, styles: dict[str, str]) -> TpPlan:
    plan: TpPlan = {}
    for path, style in styles.items():
        try:
            plan[path] = translate_to_torch_parallel_style(style)
        except ValueError as error:
            raise ConfigError(f"parallelism.tp: the plan of {type(model).__name__} for {path}: {error}") from error
    return plan


def missing_plan(model: nn.Module) -> str:
    """Return the error message for a model without a tensor-parallel plan."""
    return (
        f"parallelism.tp: {type(model).__name__} has no tensor-parallel plan for its decoder layers; set "
        "parallelism.tp=1, or provide a plan by parallelism.tp_plan=module.path:name"
    )


def shards_any(model: nn.Module, plan: TpPlan, within: Iterable[str] = ("",)) -> bool:
    """Return whether a plan shards any module of the model whose name starts with one of `within`."""
    prefixes = tuple(within)
    for path in (path for path, style in plan.items() if _shards(style)):
        names = [name for name, _ in matching(model, path)] or ([path] if names_experts_parameter(model, path) else [])
        if any(name.startswith(prefixes) for name in names):
            return True
    return False


def _shards(style: ParallelStyle) -> bool:
    packed = isinstance(style, TransformersStyle) and style.name.startswith("packed_")
    return packed or isinstance(style, ColwiseParallel | RowwiseParallel | ExpertParallel)


def names_experts_parameter(model: nn.Module, path: str) -> bool:
    """Return whether a path names a parameter of fused experts, which are sharded by their module's style."""
    module_path, _, leaf = path.rpartition(".")
    return any(is_experts(module) and leaf in module._parameters for _, module in matching(model, module_path))


def load_plan(path: str, model: nn.Module) -> TpPlan:
    """Import a user's plan from `package.module:name`, a dict or a function that returns one.

    The function may take the model. Values are torch styles, or names of transformers' styles. Raises ConfigError for
    anything else.
    """
    imported = import_class_from_path(path)
    plan = _call_with(imported, model, path) if callable(imported) else imported
    if not isinstance(plan, dict):
        raise ConfigError(f"parallelism.tp_plan={path}: must be a dict or return one, not {type(plan).__name__}")
    return {
        name: translate_to_torch_parallel_style(style) if isinstance(style, str) else style
        for name, style in plan.items()
    }


def _call_with(function: Callable[..., Any], model: nn.Module, path: str) -> Any:
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # some builtins have no signature
        raise ConfigError(f"parallelism.tp_plan={path}: {error}; use a dict or a function of the model") from error
    for arguments in ((model,), ()):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return function(*arguments)
    raise ConfigError(f"parallelism.tp_plan={path}: {path}{signature} must take the model, or no argument")


def import_class_from_path(name: str) -> Any:
    """Import `package.module.Name` (nested names allowed) or `package.module:name`.

    Same signature as in NeMo AutoModel's parallelizer. Raises ImportPathError (a ConfigError and an ImportError) with
    the missing component.
    """
    module_path, _, attributes = name.partition(":")
    parts = module_path.split(".")
    if not all(part.isidentifier() for part in parts) or (not attributes and len(parts) < 2):
        raise _ImportPathError(f"{name!r} is not an import path; write package.module:name or package.module.Name")
    for length in range(len(parts), 0, -1):
        candidate = ".".join(parts[:length])
        try:
            value: Any = importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name and (candidate == error.name or candidate.startswith(f"{error.name}.")):
                continue
            raise
        for attribute in parts[length:] + (attributes.split(".") if attributes else []):
            value = getattr(value, attribute, _MISSING)
            if value is _MISSING:
                raise _ImportPathError(f"{name!r}: {candidate} has no {attribute!r}")
        return value
    raise _ImportPathError(f"{name!r}: there is no module {parts[0]!r}; install it, or add its folder to PYTHONPATH")


class _ImportPathError(ConfigError, ImportError):
    """Error for an import path that cannot be resolved."""


def import_classes_from_paths(class_paths: list[str]) -> list[Any]:
    """Import every path of a list, with the signature of NeMo AutoModel's parallelizer.

    Raises ImportPathError listing all paths that fail.
    """
    classes, problems = [], []
    for path in class_paths or []:
        try:
            classes.append(import_class_from_path(path))
        except _ImportPathError as error:
            problems += error.problems
    if problems:
        raise _ImportPathError(problems)
    return classes


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a layer and their layout over the tp axis."""

    heads: int
    kv_heads: int
    layout: AttentionLayout


def read_heads(anatomy: Anatomy, tp: int) -> dict[str, Heads]:
    """Return the heads of each decoder layer and their layout over tp, by the layer's name (of a model without a list
    of layers, by ""); empty if the config has none."""
    layers = anatomy.layers or ("",)
    counts = [(each.heads, each.kv_heads) for each in anatomy.layer_heads]
    if not counts and anatomy.heads is not None and anatomy.kv_heads is not None:
        counts = [(anatomy.heads, anatomy.kv_heads)] * len(layers)
    return {
        layer: Heads(heads, kv_heads, attention_layout(heads, kv_heads, tp))
        for layer, (heads, kv_heads) in zip(layers, counts, strict=bool(counts))
    }


def fit_attention(model: nn.Module, plan: TpPlan, tp: int, anatomy: Anatomy) -> TpPlan:
    """Return the plan adjusted to the model's heads, with the q/k norms that published plans omit.

    If tp does not divide the heads of a layer, its attention is replicated, and removed from the plan if that holds for
    every layer. If a layer has fewer kv heads than ranks, each kv head is computed by several ranks. The gradients of
    q_norm and k_norm of sharded heads are summed.
    """
    by_layer = read_heads(anatomy, tp)
    attention = {path.rpartition(".")[0] for path, style in plan.items() if _shards_heads(path, style)}
    if not by_layer or not attention:
        return plan
    if all(heads.layout == AttentionLayout.replicated for heads in by_layer.values()):
        return {path: style for path, style in plan.items() if {path, path.rpartition(".")[0]}.isdisjoint(attention)}
    fitted = dict(plan)
    for parent in attention:
        for name, module in matching(model, parent):
            others = next(iter(by_layer.values()))  # attention outside of the layers, in a plan of the user's
            heads = next((own for layer, own in by_layer.items() if name.startswith(f"{layer}.")), others)
            if heads.layout == AttentionLayout.replicated:
                leaves = [path.rpartition(".")[2] for path in plan if path.rpartition(".")[0] == parent]
                fitted |= {f"{name}.{leaf}": ReplicatedParameters() for leaf in leaves}
                continue
            for norm in ("q_norm", "k_norm"):
                if module._modules.get(norm) is not None and not _planned(plan, f"{name}.{norm}"):
                    fitted[f"{name}.{norm}"] = ReplicatedParameters(partial_grad=True)
            if heads.layout == AttentionLayout.kv_replicated:
                module.num_key_value_groups = heads.heads // tp  # type: ignore[assignment]
                fitted |= {f"{name}.{kv}_proj": KVHeadSlice(heads.kv_heads) for kv in ("k", "v")}
    return fitted


def fit_activations(model: nn.Module, plan: TpPlan) -> TpPlan:
    """Return the plan with the activation functions that have parameters (xIELU), which published plans omit.

    Such a scalar is shared by all features. Next to a row-wise layer each rank computes its gradient from a shard of
    the features, so gradients are summed over ranks.
    """
    fitted = dict(plan)
    for parent in {path.rpartition(".")[0] for path, style in plan.items() if _takes_sharded_input(style)}:
        for name, module in matching(model, parent):
            for leaf, child in module.named_children():
                scalars = list(child.parameters())
                if scalars and all(scalar.numel() == 1 for scalar in scalars) and not _planned(plan, f"{name}.{leaf}"):
                    fitted[f"{parent}.{leaf}"] = ReplicatedParameters(partial_grad=True)
    return fitted


def check_divisible(model: nn.Module, plan: TpPlan, tp: int) -> None:
    """Raise ConfigError listing every linear layer whose sharded size tp does not divide."""
    problems: dict[str, str] = {}
    for path, style in plan.items():
        for name, module in matching(model, path):
            inputs, outputs = ("nx", "nf") if is_transposed(module) else ("in_features", "out_features")
            is_colwise = isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),)
            sharded = outputs if is_colwise else inputs if _takes_sharded_input(style) else None
            if sharded and (size := getattr(module, sharded, 0)) % tp:
                problems.setdefault(path, f"parallelism.tp={tp}: does not divide the {size} features of {name}")
    if problems:
        raise ConfigError([f"{problem}; change parallelism.tp" for problem in problems.values()])


def check_covered(model: nn.Module, plan: TpPlan, tp: int, mixers: Container[str] = ()) -> None:
    """Raise ConfigError for modules that a model's plan omits but that cannot be replicated.

    Args:
        mixers: Names of layers that are divided by heads, with their convolutions.
    """
    problems: dict[str, str] = {}
    for path, style in plan.items():
        parent = path.rpartition(".")[0] if _shards_heads(path, style) else None
        for name, module in matching(model, parent) if parent else []:
            for norm in ("q_norm", "k_norm"):
                if isinstance(plan.get(f"{parent}.{norm}"), PerHead):
                    continue
                if any(parameter.dim() > 1 for parameter in (module._modules.get(norm) or nn.Identity()).parameters()):
                    problems.setdefault(
                        f"{parent}.{norm}", f"{name}.{norm} has a weight for each head, and tp divides heads"
                    )
    for name, module in model.named_modules():
        # Token mixers read the weight of their convolution directly, so a style on the module would have no effect.
        if isinstance(module, nn.Conv1d) and not _planned(plan, name) and name.rpartition(".")[0] not in mixers:
            problems.setdefault("", f"{name} is a convolution, which the plan of {type(model).__name__} leaves out")
    if problems:
        raise ConfigError([f"parallelism.tp={tp}: {text}; set parallelism.tp=1" for text in problems.values()])


def matching(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every module that matches a plan's path; `*` matches one path component."""
    pattern = re.compile("[^.]+".join(re.escape(part) for part in path.split("*")))
    return [(name, module) for name, module in model.named_modules() if pattern.fullmatch(name)]


def _shards_heads(path: str, style: ParallelStyle) -> bool:
    leaf = path.rpartition(".")[2]
    sharded = isinstance(style, ColwiseParallel | RowwiseParallel) and style.output_layouts == (Shard(-1),)
    return leaf in ("q_proj", "k_proj", "v_proj") and sharded


def _takes_sharded_input(style: ParallelStyle) -> bool:
    return isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),)


def _planned(plan: Iterable[str], name: str) -> bool:
    return any(re.fullmatch("[^.]+".join(re.escape(part) for part in path.split("*")), name) for path in plan)
