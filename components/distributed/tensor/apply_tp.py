"""Applying a tensor-parallel plan: every module gets its style, every other parameter becomes replicated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from components.config.errors import ConfigError
from components.config.layouts import stage_layers
from components.distributed.expert import holds_dtensors
from components.distributed.tensor.adapters import adapted_style, is_adapted
from components.distributed.tensor.tensor_parallel import (
    BlockInput,
    GatherSequence,
    KVHeadSlice,
    ReplicatedParameters,
    ShardedDropout,
    ShardSequence,
    TransformersStyle,
    as_writable,
    convert_output,
    sharded_fraction,
)
from components.distributed.tensor.tp_plan import (
    AttentionLayout,
    Heads,
    Plan,
    check_covered,
    check_divisible,
    fit_activations,
    fit_attention,
    matching,
    names_experts_parameter,
    read_heads,
)
from components.models.anatomy import Anatomy, config_of, drops_hidden_states

KNOWN_STYLES = (ColwiseParallel, RowwiseParallel, KVHeadSlice, ReplicatedParameters)
"""Styles whose borders we know: inside a block made of these, gradients of the input are partial sums."""


@dataclass(frozen=True, slots=True)
class Applied:
    """Which part of the parameters is sharded over tp, in [0, 1], and what a person should know."""

    fraction: float
    notes: tuple[str, ...]


def apply_tensor_parallel(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    plan: Plan,
    anatomy: Anatomy,
    *,
    sequence_parallel: bool,
    strict: bool,
    stages: int = 1,
) -> Applied:
    """Lay a model over the tp axis in place; afterwards every parameter is a DTensor on it, tied ones stay tied.

    Args:
        plan: Module path, `*` for one part of it -> style.
        sequence_parallel: Shard activations between the blocks of decoder layers along the sequence.
        strict: A path that matches nothing is an error (a user's plan); else it is told (a model's own plan).
        stages: Pipeline stages that the model is cut into afterwards; whole sequences travel between them.
    """
    given, plan = plan, fit_activations(model, fit_attention(model, plan, tp_mesh.size(), anatomy))
    heads = read_heads(anatomy, tp_mesh.size())
    notes = _notes(model, plan, heads, tp_mesh.size(), strict, [path for path in given if path not in plan])
    check_divisible(model, plan, tp_mesh.size())
    if not strict:
        check_covered(model, plan, tp_mesh.size())
    ties = _tied_names(model)
    styles = {name: style for path, style in plan.items() for name, _ in matching(model, path)}
    layers = anatomy.decoder_layers(model)
    config = config_of(model)
    if sequence_parallel and not layers:
        raise ConfigError(
            f"parallelism.sequence_parallel=true: {type(model).__name__} has no stack of decoder layers to shard "
            "along the sequence; set parallelism.sequence_parallel=false"
        )
    partial_norms: set[str] = set()
    for name, layer in layers.items():
        partial_norms |= _prepare_layer(name, layer, styles, tp_mesh, sequence_parallel)
    for name, module in list(model.named_modules()):
        style = styles.get(name) or ReplicatedParameters(partial_grad=name in partial_norms)
        if holds_dtensors(module):
            continue  # experts, over ep and tp
        if isinstance(style, TransformersStyle):
            style.config = config and config.get_text_config()
        if name in styles or any(True for _ in module.parameters(recurse=False)):
            _apply_style(name, module, tp_mesh, style)
    if anatomy.embedding is not None:
        # The embedding's all-reduce is still on its way when it leaves, and a compiled layer that takes such a tensor
        # fails in its backward; any operation on it waits (and, unlike .wait(), keeps the gradient).
        convert_output(model.get_submodule(anatomy.embedding), lambda hidden: hidden * 1)
    if sequence_parallel:
        _shard_between_blocks(list(layers.values()), tp_mesh, stages)
    _retie(model, ties)
    return Applied(sharded_fraction(list(model.parameters())), notes)


def _shard_between_blocks(layers: list[nn.Module], tp_mesh: DeviceMesh, stages: int) -> None:
    """Shard hidden states along the sequence from the first to the last layer of each stage, and dropout with them."""
    for layer in filter(drops_hidden_states, layers):
        parallelize_module(layer, tp_mesh, ShardedDropout(), src_data_rank=None)
    for stage in stage_layers(len(layers), stages):
        parallelize_module(layers[stage[0]], tp_mesh, ShardSequence("input"), src_data_rank=None)
        parallelize_module(layers[stage[-1]], tp_mesh, GatherSequence(), src_data_rank=None)


def _prepare_layer(
    layer_name: str,
    layer: nn.Module,
    styles: dict[str, ParallelStyle],
    tp_mesh: DeviceMesh,
    sequence_parallel: bool,
) -> set[str]:
    """Set the borders of a layer's blocks; return the names of modules whose gradients are partial sums.

    A block is a child that holds matrices (attention, MLP). What else a layer holds works token by token (norms), so
    under sequence parallelism it sees a part of the sequence.
    """
    tokenwise = {layer_name}
    for child_name, child in layer.named_children():
        name = f"{layer_name}.{child_name}"
        if all(parameter.dim() < 2 for parameter in child.parameters()):
            tokenwise |= {f"{name}.{inner}".rstrip(".") for inner, _ in child.named_modules()}
            continue
        inside = {path: style for path, style in styles.items() if path == name or path.startswith(f"{name}.")}
        shared = _is_fully_known(name, child, inside)
        if shared or sequence_parallel:
            border = BlockInput(sequence_parallel=sequence_parallel, shared=shared)
            parallelize_module(child, tp_mesh, border, src_data_rank=None)
        if sequence_parallel and shared:
            for path, style in inside.items():
                if isinstance(style, RowwiseParallel):
                    styles[path] = RowwiseParallel(input_layouts=style.input_layouts[0], output_layouts=Shard(1))
        elif sequence_parallel:
            parallelize_module(child, tp_mesh, ShardSequence("output"), src_data_rank=None)
    return tokenwise if sequence_parallel else set()


def _apply_style(name: str, module: nn.Module, tp_mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Lay a module out by its style, or by the style that fits its adapter."""
    fitted = adapted_style(name, style) if is_adapted(module) else style
    parallelize_module(module, tp_mesh, fitted, src_data_rank=None)
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        convert_output(module, as_writable)


def _is_fully_known(name: str, block: nn.Module, inside: dict[str, ParallelStyle]) -> bool:
    """Whether every parameter of a block is under a style that we know, and a row-wise layer closes it."""
    holders = {
        f"{name}.{inner}".rstrip(".")
        for inner, module in block.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    return (
        holders == set(inside)
        and all(isinstance(style, KNOWN_STYLES) for style in inside.values())
        and any(isinstance(style, RowwiseParallel) for style in inside.values())
    )


def _notes(
    model: nn.Module, plan: Plan, heads: Heads | None, tp: int, strict: bool, dropped: list[str]
) -> tuple[str, ...]:
    unmatched = [path for path in plan if not matching(model, path) and not names_experts_parameter(model, path)]
    if unmatched and strict:
        raise ConfigError(
            [f"parallelism.tp_plan: {path!r} matches no module of {type(model).__name__}" for path in unmatched]
        )
    notes = [f"tp plan: no module is named {path}" for path in unmatched]
    if heads is not None and heads.layout == AttentionLayout.replicated and (dropped or not strict):
        left_out = f"; left out of the plan: {', '.join(dropped)}" if strict else ""
        notes.append(
            f"attention is computed by each of the {tp} tp ranks: {heads.heads} heads and {heads.kv_heads} kv heads "
            f"cannot be shared evenly (parallelism.uneven_heads=refuse makes this an error){left_out}"
        )
    return tuple(notes)


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that stand for one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _retie(model: nn.Module, ties: list[list[str]]) -> None:
    """Make tied names one parameter again: styles give each module a parameter of its own."""
    for first, *others in ties:
        kept = model.get_parameter(first)
        for other in others:
            lost = model.get_parameter(other)
            if isinstance(kept, DTensor) and isinstance(lost, DTensor) and kept.placements != lost.placements:
                raise ConfigError(
                    f"parallelism.tp_plan: {first} and {other} are one tied parameter, but the plan lays them out as "
                    f"{kept.placements} and {lost.placements}; give both the same"
                )
            module_name, _, leaf = other.rpartition(".")
            model.get_submodule(module_name).register_parameter(leaf, kept)
