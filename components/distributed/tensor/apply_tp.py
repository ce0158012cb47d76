"""Applying a tensor-parallel plan: modules get their styles, and all other parameters are replicated."""

from __future__ import annotations

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
from components.distributed.tensor.adapters import check_adapters, style_for
from components.distributed.tensor.per_head import PerHead, PerHeadNorms
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
)
from components.distributed.tensor.tp_plan import (
    AttentionLayout,
    Heads,
    TpPlan,
    check_covered,
    check_divisible,
    fit_activations,
    fit_attention,
    matching,
    names_experts_parameter,
    read_heads,
)
from components.models.anatomy import Anatomy, config_of, drops_hidden_states

KNOWN_STYLES = (ColwiseParallel, RowwiseParallel, KVHeadSlice, ReplicatedParameters, PerHead, PerHeadNorms)
"""Styles that take a DTensor input: in a block made of these, the gradient of the input is a partial sum over tp."""


def apply_tensor_parallel(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    plan: TpPlan,
    anatomy: Anatomy,
    *,
    sequence_parallel: bool,
    strict: bool,
    stages: int = 1,
) -> tuple[str, ...]:
    """Apply tensor parallelism to a model in place. Every parameter becomes a DTensor on the tp mesh; ties are kept.

    Args:
        plan: Module path -> style; `*` matches one path component.
        sequence_parallel: Shard activations between the blocks of decoder layers along the sequence.
        strict: Raise ConfigError for a path that matches no module (a user's plan), instead of adding a note (the
            model's own plan).
        stages: Number of pipeline stages that the model is split into afterwards; stages exchange full sequences.
    """
    requested, plan = plan, fit_activations(model, fit_attention(model, plan, tp_mesh.size(), anatomy))
    heads = read_heads(anatomy, tp_mesh.size())
    notes = _notes(model, plan, heads, tp_mesh.size(), strict, [path for path in requested if path not in plan])
    check_divisible(model, plan, tp_mesh.size())
    if not strict:
        check_covered(model, plan, tp_mesh.size())
    ties = _tied_names(model)
    styles = {name: style for path, style in plan.items() for name, _ in matching(model, path)}
    check_adapters(model, styles, tp_mesh.size())
    layers = anatomy.decoder_layers(model)
    config = config_of(model)
    if sequence_parallel and not layers:
        raise ConfigError(
            f"parallelism.sequence_parallel=true: {type(model).__name__} has no list of decoder layers whose "
            "activations could be sharded; set parallelism.sequence_parallel=false"
        )
    partial_norms: set[str] = set()
    for name, layer in layers.items():
        partial_norms |= _prepare_layer(name, layer, styles, tp_mesh, sequence_parallel)
    for name, module in list(model.named_modules()):
        style = styles.get(name) or ReplicatedParameters(partial_grad=name in partial_norms)
        if holds_dtensors(module):
            continue  # sharded already: experts, over ep and tp, and the norms of single heads, by their list
        if isinstance(style, TransformersStyle):
            style.config = config and config.get_text_config()
        if name in styles or any(True for _ in module.parameters(recurse=False)):
            _apply_style(module, tp_mesh, style)
    if anatomy.embedding is not None:
        # The embedding returns the pending result of an asynchronous all-reduce, and a compiled layer that receives it
        # fails in the backward. Any operation waits for the result, and unlike .wait() is differentiable.
        convert_output(model.get_submodule(anatomy.embedding), lambda hidden: hidden * 1)
    if sequence_parallel:
        _shard_between_blocks(list(layers.values()), tp_mesh, stages)
    _retie(model, ties)
    return notes


def _shard_between_blocks(layers: list[nn.Module], tp_mesh: DeviceMesh, stages: int) -> None:
    """Shard hidden states along the sequence between the first and last layer of each stage, and dropout masks too."""
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
    """Convert the inputs and outputs of a layer's blocks; return the names of modules with partial-sum gradients.

    A block is a child with matrices (attention, MLP). Other children are tokenwise (norms) and process a shard of the
    sequence under sequence parallelism. May replace row-wise styles in `styles`, to reduce-scatter their output.
    """
    tokenwise = {layer_name}
    for child_name, child in layer.named_children():
        name = f"{layer_name}.{child_name}"
        if all(parameter.dim() < 2 for parameter in child.parameters()):
            tokenwise |= {f"{name}.{inner}".rstrip(".") for inner, _ in child.named_modules()}
            continue
        inside = {path: style for path, style in styles.items() if path == name or path.startswith(f"{name}.")}
        shared = _takes_dtensor(name, child, inside)
        if shared or sequence_parallel:
            block_input = BlockInput(sequence_parallel=sequence_parallel, shared=shared)
            parallelize_module(child, tp_mesh, block_input, src_data_rank=None)
        if sequence_parallel and shared:
            for path, style in inside.items():
                if isinstance(style, RowwiseParallel):
                    styles[path] = RowwiseParallel(input_layouts=style.input_layouts[0], output_layouts=Shard(1))
        elif sequence_parallel:
            parallelize_module(child, tp_mesh, ShardSequence("output"), src_data_rank=None)
    return tokenwise if sequence_parallel else set()


def _apply_style(module: nn.Module, tp_mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Apply a style to a module, or its counterpart to a layer with a LoRA adapter and to a Conv1D."""
    parallelize_module(module, tp_mesh, style_for(module, style), src_data_rank=None)
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        convert_output(module, as_writable)


def _takes_dtensor(name: str, block: nn.Module, inside: dict[str, ParallelStyle]) -> bool:
    """Return whether a block's input may be a DTensor: KNOWN_STYLES cover all parameters, and one is row-wise."""
    with_parameters = {
        f"{name}.{inner}".rstrip(".")
        for inner, module in block.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    lists = tuple(f"{path}." for path, style in inside.items() if isinstance(style, PerHeadNorms))
    return (
        all(each in inside or each.startswith(lists) for each in with_parameters)
        and all(isinstance(style, KNOWN_STYLES) for style in inside.values())
        and any(isinstance(style, RowwiseParallel) for style in inside.values())
    )


def _notes(
    model: nn.Module, plan: TpPlan, heads: Heads | None, tp: int, strict: bool, dropped: list[str]
) -> tuple[str, ...]:
    unmatched = [path for path in plan if not matching(model, path) and not names_experts_parameter(model, path)]
    if unmatched and strict:
        raise ConfigError(
            [f"parallelism.tp_plan: {path!r} matches no module of {type(model).__name__}" for path in unmatched]
        )
    notes = [f"tp plan: {path} matches no module" for path in unmatched]
    if heads is not None and heads.layout == AttentionLayout.replicated and (dropped or not strict):
        removed = f"; removed from the plan: {', '.join(dropped)}" if strict else ""
        notes.append(
            f"attention is replicated over the {tp} tp ranks: {heads.heads} heads and {heads.kv_heads} kv heads "
            f"cannot be divided evenly (parallelism.uneven_heads=refuse makes this an error){removed}"
        )
    return tuple(notes)


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that share one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _retie(model: nn.Module, ties: list[list[str]]) -> None:
    """Tie parameters again, because applying styles gives each module a separate parameter."""
    for first, *others in ties:
        shared = model.get_parameter(first)
        for other in others:
            duplicate = model.get_parameter(other)
            if (
                isinstance(shared, DTensor)
                and isinstance(duplicate, DTensor)
                and shared.placements != duplicate.placements
            ):
                raise ConfigError(
                    f"parallelism.tp_plan: {first} and {other} are tied, but the plan shards them differently "
                    f"({shared.placements} and {duplicate.placements}); give both the same style"
                )
            module_name, _, leaf = other.rpartition(".")
            model.get_submodule(module_name).register_parameter(leaf, shared)
