"""From a model to its tensor-parallel plan: module path -> style."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)

from components.config.errors import ConfigError
from components.config.layouts import AttentionLayout, attention_layout
from components.distributed.expert import ExpertParallel
from components.distributed.tensor.tensor_parallel import KVHeadSlice, ReplicatedParameters, TransformersStyle
from components.models.anatomy import Anatomy, is_experts, read_anatomy

Plan = dict[str, ParallelStyle]

TRANSFORMERS_STYLES = (
    "packed_colwise",
    "packed_rowwise",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "local_params",
    "all_reduce",
)
"""Styles that transformers implements well and torch does not have."""
_MISSING = object()


class MissingPlanError(ConfigError, AssertionError):
    """The model brings no tensor-parallel plan (the seed page promises an AssertionError)."""


def translate_to_torch_parallel_style(style: str) -> ParallelStyle:
    """Return a fresh torch style for a name of transformers 4 or 5 (seed page 004, NeMo AutoModel).

    Names that torch has no style for are handed to transformers' own implementation. Raises ValueError for an
    unknown name, and TypeError (an AssertionError too, as the page promises) for what is not a string.
    """
    if not isinstance(style, str):
        raise _NotAStyleNameError(f"a parallel style is named by a string, not by {style!r}")
    match style:
        case "colwise":
            return ColwiseParallel()
        case "rowwise":
            return RowwiseParallel()
        case "colwise_rep" | "colwise_gather_output" | "embedding_colwise":
            return ColwiseParallel(output_layouts=Replicate())
        case "rowwise_rep" | "rowwise_split_input" | "embedding_rowwise":
            return RowwiseParallel(input_layouts=Replicate())
        case "sequence_parallel":
            return SequenceParallel()
        case "replicate":
            return ReplicatedParameters()
        case "replicated_with_grad_allreduce":
            return ReplicatedParameters(partial_grad=True)
        case "moe_tp_experts":
            return ExpertParallel()
        case _ if style in TRANSFORMERS_STYLES:
            return TransformersStyle(style)
    raise ValueError(f"Unknown parallel style: {style!r}; give a plan of your own by parallelism.tp_plan=module:name")


class _NotAStyleNameError(TypeError, AssertionError):
    """What should name a style is not a string."""


def get_hf_tp_shard_plan(model: nn.Module) -> Plan:
    """Return the plan that a Hugging Face model brings: module path (with `*` for layers) -> style.

    The class's, the instance's and the inner model's `_tp_plan` are merged in this order, later ones win; the inner
    model's name is put in front of an inner plan's paths. Paths may name single layers. Raises MissingPlanError where
    nothing of the model would be sharded (seed page 004, NeMo AutoModel).
    """
    return shard_plan(model, read_anatomy(model))


def shard_plan(model: nn.Module, anatomy: Anatomy) -> Plan:
    """Return the plan of a model's anatomy in torch's styles, the input embedding included.

    Raises MissingPlanError where nothing of the model would be sharded.
    """
    styles = dict(anatomy.tp_plan)
    if not shards_any(model, _translated(model, styles)):
        raise MissingPlanError(missing_plan(model))
    if anatomy.embedding is not None:
        styles.setdefault(anatomy.embedding, "embedding_rowwise")
    return _translated(model, styles)


def _translated(model: nn.Module, styles: dict[str, str]) -> Plan:
    plan: Plan = {}
    for path, style in styles.items():
        try:
            plan[path] = translate_to_torch_parallel_style(style)
        except ValueError as error:
            raise ConfigError(f"parallelism.tp: {type(model).__name__} plans {path} as {style!r}: {error}") from error
    return plan


def missing_plan(model: nn.Module) -> str:
    """Return the message for a model that has no plan of its own."""
    return (
        f"parallelism.tp: {type(model).__name__} brings no tensor-parallel plan for its decoder layers; set "
        "parallelism.tp=1, or give a plan by parallelism.tp_plan=module.path:name"
    )


def shards_any(model: nn.Module, plan: Plan, within: Iterable[str] = ("",)) -> bool:
    """Whether a plan shards some module of the model, one whose name begins with one of `within`."""
    starts = tuple(within)
    for path in (path for path, style in plan.items() if _shards(style)):
        names = [name for name, _ in matching(model, path)] or ([path] if names_experts_parameter(model, path) else [])
        if any(name.startswith(starts) for name in names):
            return True
    return False


def _shards(style: ParallelStyle) -> bool:
    packed = isinstance(style, TransformersStyle) and style.name.startswith("packed_")
    return packed or isinstance(style, ColwiseParallel | RowwiseParallel | ExpertParallel)


def names_experts_parameter(model: nn.Module, path: str) -> bool:
    """Whether a path names a parameter of fused experts, whose layout follows from their module."""
    module_path, _, leaf = path.rpartition(".")
    return any(is_experts(module) and leaf in module._parameters for _, module in matching(model, module_path))


def load_plan(path: str, model: nn.Module) -> Plan:
    """Return a user's plan by import path, `package.module:name`: a dict, or a function that returns one.

    The function takes the model or no argument. Values are torch styles, or names of transformers' styles. Raises
    ConfigError for anything else.
    """
    found = import_class_from_path(path)
    plan = _call_with(found, model, path) if callable(found) else found
    if not isinstance(plan, dict):
        raise ConfigError(f"parallelism.tp_plan={path}: must be a dict or return one, not {type(plan).__name__}")
    return {
        name: translate_to_torch_parallel_style(style) if isinstance(style, str) else style
        for name, style in plan.items()
    }


def _call_with(function: Callable[..., Any], model: nn.Module, path: str) -> Any:
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # some builtins
        raise ConfigError(f"parallelism.tp_plan={path}: {error}; give a dict or a function of the model") from error
    for arguments in ((model,), ()):
        try:
            signature.bind(*arguments)
        except TypeError:
            continue
        return function(*arguments)
    raise ConfigError(f"parallelism.tp_plan={path}: {path}{signature} must take the model, or no argument")


def import_class_from_path(name: str) -> Any:
    """Import `package.module.Name`, nested names included, or `package.module:name` (seed page 004, NeMo AutoModel).

    Raises ConfigError (an ImportError too) naming what of the path was found and what was not.
    """
    module_path, _, attributes = name.partition(":")
    parts = module_path.split(".")
    if not all(part.isidentifier() for part in parts) or (not attributes and len(parts) < 2):
        raise ImportPathError(f"{name!r} is not an import path; write package.module:name or package.module.Name")
    for length in range(len(parts), 0, -1):
        candidate = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name and (candidate == error.name or candidate.startswith(f"{error.name}.")):
                continue
            raise
        for attribute in parts[length:] + (attributes.split(".") if attributes else []):
            found = getattr(found, attribute, _MISSING)
            if found is _MISSING:
                raise ImportPathError(f"{name!r}: {candidate} has no {attribute!r}")
        return found
    raise ImportPathError(f"{name!r}: there is no module {parts[0]!r}; is its folder installed or on PYTHONPATH?")


class ImportPathError(ConfigError, ImportError):
    """An import path given by the user leads nowhere."""


def import_classes_from_paths(class_paths: list[str]) -> list[Any]:
    """Import every path of a list (seed page 004, NeMo AutoModel). Raises ImportPathError naming all that fail."""
    found, problems = [], []
    for path in class_paths or []:
        try:
            found.append(import_class_from_path(path))
        except ImportPathError as error:
            problems += error.problems
    if problems:
        raise ImportPathError(problems)
    return found


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention heads of a model and how they lie over the tp axis."""

    heads: int
    kv_heads: int
    layout: AttentionLayout


def read_heads(anatomy: Anatomy, tp: int) -> Heads | None:
    """Return the head counts of a model and their layout over tp, or None where its config states none.

    Raises ConfigError for a model whose layers have different numbers of heads.
    """
    if anatomy.heads_differ:
        raise ConfigError(
            f"parallelism.tp={tp}: the layers of this model have different numbers of heads, which tp cannot share "
            "yet; set parallelism.tp=1"
        )
    if anatomy.heads is None or anatomy.kv_heads is None:
        return None
    return Heads(anatomy.heads, anatomy.kv_heads, attention_layout(anatomy.heads, anatomy.kv_heads, tp))


def fit_attention(model: nn.Module, plan: Plan, tp: int, anatomy: Anatomy) -> Plan:
    """Return the plan with attention as the heads allow, and with the norms that published plans forget.

    Where tp does not divide the heads, attention leaves the plan and is computed by every rank; where there are
    fewer kv heads than ranks, ranks share them. q_norm and k_norm of sharded heads get their gradients summed.
    """
    heads = read_heads(anatomy, tp)
    attention = {path.rpartition(".")[0] for path, style in plan.items() if _cuts_heads(path, style)}
    if heads is None or not attention:
        return plan
    if heads.layout == AttentionLayout.replicated:
        return {path: style for path, style in plan.items() if path.rpartition(".")[0] not in attention}
    fitted = dict(plan)
    for parent in attention:
        for name, module in matching(model, parent):
            for norm in ("q_norm", "k_norm"):
                if module._modules.get(norm) is not None and not _planned(plan, f"{name}.{norm}"):
                    fitted[f"{parent}.{norm}"] = ReplicatedParameters(partial_grad=True)
            if heads.layout == AttentionLayout.kv_replicated:
                module.num_key_value_groups = heads.heads // tp  # type: ignore[assignment]
        if heads.layout == AttentionLayout.kv_replicated:
            fitted |= {f"{parent}.{kv}_proj": KVHeadSlice(heads.kv_heads) for kv in ("k", "v")}
    return fitted


def fit_activations(model: nn.Module, plan: Plan) -> Plan:
    """Return the plan with the activations that published plans forget: those with parameters of their own.

    A number that all features share, beside a layer that takes each rank's part of them (xIELU), has on each rank the
    gradient of that part.
    """
    fitted = dict(plan)
    for parent in {path.rpartition(".")[0] for path, style in plan.items() if _takes_a_part(style)}:
        for name, module in matching(model, parent):
            for leaf, child in module.named_children():
                own = list(child.parameters())
                if own and all(each.numel() == 1 for each in own) and not _planned(plan, f"{name}.{leaf}"):
                    fitted[f"{parent}.{leaf}"] = ReplicatedParameters(partial_grad=True)
    return fitted


def check_divisible(model: nn.Module, plan: Plan, tp: int) -> None:
    """Raise ConfigError naming every linear layer whose sharded size tp does not divide."""
    problems: dict[str, str] = {}
    for path, style in plan.items():
        for name, module in matching(model, path):
            if not isinstance(module, nn.Linear):
                continue
            if isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),):
                size = module.out_features
            elif isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),):
                size = module.in_features
            else:
                continue
            if size % tp:
                problems.setdefault(path, f"parallelism.tp={tp}: does not divide the {size} features of {name}")
    if problems:
        raise ConfigError([f"{problem}; change parallelism.tp" for problem in problems.values()])


def check_covered(model: nn.Module, plan: Plan, tp: int) -> None:
    """Raise ConfigError for a module that a model's own plan leaves out and that cannot be computed by every rank."""
    problems: dict[str, str] = {}
    for path, style in plan.items():
        parent = path.rpartition(".")[0] if _cuts_heads(path, style) else None
        for name, module in matching(model, parent) if parent else []:
            for norm in ("q_norm", "k_norm"):
                if any(each.dim() > 1 for each in (module._modules.get(norm) or nn.Identity()).parameters()):
                    problems.setdefault(
                        f"{parent}.{norm}", f"{name}.{norm} has a weight for each head, and tp divides heads"
                    )
    for name, module in model.named_modules():
        # Mixers of tokens read the weight of their convolution themselves.
        if isinstance(module, nn.Conv1d) and not _planned(plan, name):
            problems.setdefault("", f"{name} is a convolution, which the plan of {type(model).__name__} leaves out")
    if problems:
        raise ConfigError([f"parallelism.tp={tp}: {text}; set parallelism.tp=1" for text in problems.values()])


def matching(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every module that a plan's path names; `*` stands for one part of the name."""
    pattern = re.compile("[^.]+".join(re.escape(part) for part in path.split("*")))
    return [(name, module) for name, module in model.named_modules() if pattern.fullmatch(name)]


def _cuts_heads(path: str, style: ParallelStyle) -> bool:
    leaf = path.rpartition(".")[2]
    sharded = isinstance(style, ColwiseParallel | RowwiseParallel) and style.output_layouts == (Shard(-1),)
    return leaf in ("q_proj", "k_proj", "v_proj") and sharded


def _takes_a_part(style: ParallelStyle) -> bool:
    return isinstance(style, RowwiseParallel) and style.input_layouts == (Shard(-1),)


def _planned(plan: Plan, name: str) -> bool:
    return any(re.fullmatch("[^.]+".join(re.escape(part) for part in path.split("*")), name) for path in plan)
