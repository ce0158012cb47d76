"""Applying a tensor-parallel plan: modules get their styles, and all other parameters are replicated.

torch's styles cannot shard a linear layer with a LoRA adapter, or Conv1D (GPT-2); styles for these are here. The
adapter is sharded like its layer and adds no collective to the forward. Column-wise, W and B are sharded by output
features and A is replicated; row-wise, W and A are sharded by input features, B is replicated, and one reduction sums
the outputs of layer and adapter. The gradient of the replicated matrix is a partial sum on each rank, which is summed
over tp once, when FSDP reduces gradients.

An adapted layer is a module with the parameters `lora_A`, `lora_B` and optionally `lora_magnitude_vector` besides
`weight` and `bias`, and a method `compute` that takes the input and these parameters as plain tensors. A packed
(quantized) weight has one row of bytes per output feature, and its input features are packed in groups of
`columns_together`. Other weights are (out, in), or (in, out) in a Conv1D.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from components.config.mesh_rules import quantized_inputs_problem
from components.config.shape import stage_layers
from components.distributed.expert import holds_dtensors
from components.distributed.mixer_parallel import RowsOfHeads, mixer_plan, mixers_of
from components.distributed.tensor_parallel import (
    BlockInput,
    GatherSequence,
    KVHeadSlice,
    PerHead,
    PerHeadNorms,
    ReplicatedParameters,
    RowwiseSequence,
    ShardedDropout,
    ShardSequence,
    TransformersStyle,
    as_replicated,
    as_writable,
    convert_output,
    distribute_parameters,
    redistribute,
)
from components.distributed.tp_plan import (
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
from components.models.anatomy import Anatomy, config_of, drops_hidden_states, is_transposed
from components.protocol.errors import ConfigError

_KNOWN_STYLES = (ColwiseParallel, RowwiseParallel, KVHeadSlice, ReplicatedParameters, PerHead, PerHeadNorms)
"""Styles that take a DTensor input: in a block made of these, the gradient of the input is a partial sum over tp."""
_NAMES = ("weight", "bias", "lora_A", "lora_B", "lora_magnitude_vector")
"""Parameters of an adapted layer, in the argument order of `compute`."""
_MLA = "mla_kv_a_proj"
"""transformers' style of a replicated projection, which changes the gradient of its output only."""


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
    mixers = mixers_of(model)
    check_divisible(model, plan, tp_mesh.size())
    if not strict:
        check_covered(model, plan, tp_mesh.size(), mixers)
    ties = _tied_names(model)
    styles = {name: style for path, style in plan.items() for name, _ in matching(model, path)}
    if not strict:
        notes += _plan_mixers(model, mixers, styles, tp_mesh)
    _check_adapters(model, styles, tp_mesh.size())
    layers = anatomy.decoder_layers(model)
    config = config_of(model)
    if sequence_parallel and not layers:
        raise ConfigError(
            f"parallelism.sequence_parallel=true: {type(model).__name__} has no list of decoder layers whose "
            "activations could be sharded; set parallelism.sequence_parallel=false"
        )
    partial_norms: set[str] = set()
    if sequence_parallel and any(path.rpartition(".")[0] in layers for path in anatomy.experts):
        raise ConfigError(
            f"parallelism.sequence_parallel=true: the experts of {type(model).__name__} take the tokens of all rows "
            "together, which tp does not shard with the hidden states; set parallelism.sequence_parallel=false"
        )
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


def _plan_mixers(
    model: nn.Module, mixers: Mapping[str, nn.Module], styles: dict[str, ParallelStyle], tp_mesh: DeviceMesh
) -> tuple[str, ...]:
    """Replace the styles within layers of linear attention and Mamba-2 by those of their heads; return notes."""
    whole = 0
    for name, mixer in mixers.items():
        for inner in [path for path in styles if path == name or path.startswith(f"{name}.")]:
            del styles[inner]
        plan = mixer_plan(mixer, config_of(model).get_text_config().model_type, tp_mesh)  # type: ignore[union-attr]
        styles |= {f"{name}.{path}".rstrip("."): style for path, style in plan.items()}
        whole += len(plan) == 1
    if not whole:
        return ()
    return (f"tp={tp_mesh.size()} does not divide the heads of {whole} linear layers, which each tp rank computes",)


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
                    styles[path] = RowwiseSequence(style.input_layouts[0])
        elif sequence_parallel:
            parallelize_module(child, tp_mesh, ShardSequence("output"), src_data_rank=None)
    return tokenwise if sequence_parallel else set()


def _apply_style(module: nn.Module, tp_mesh: DeviceMesh, style: ParallelStyle) -> None:
    """Apply a style to a module, or its counterpart to a layer with a LoRA adapter and to a Conv1D."""
    parallelize_module(module, tp_mesh, _style_for(module, style), src_data_rank=None)
    if isinstance(style, ColwiseParallel | RowwiseParallel):
        convert_output(module, as_writable)


def _takes_dtensor(name: str, block: nn.Module, inside: dict[str, ParallelStyle]) -> bool:
    """Return whether a block's input may be a DTensor: _KNOWN_STYLES cover all parameters, and one is row-wise."""
    with_parameters = {
        f"{name}.{inner}".rstrip(".")
        for inner, module in block.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    lists = tuple(f"{path}." for path, style in inside.items() if isinstance(style, PerHeadNorms))
    return (
        all(parameter in inside or parameter.startswith(lists) for parameter in with_parameters)
        and all(isinstance(style, _KNOWN_STYLES) for style in inside.values())
        and any(isinstance(style, RowwiseParallel) for style in inside.values())
    )


def _notes(
    model: nn.Module, plan: TpPlan, heads: Mapping[str, Heads], tp: int, strict: bool, dropped: list[str]
) -> tuple[str, ...]:
    unmatched = [path for path in plan if not matching(model, path) and not names_experts_parameter(model, path)]
    if unmatched and strict:
        raise ConfigError(
            [f"parallelism.tp_plan: {path!r} matches no module of {type(model).__name__}" for path in unmatched]
        )
    notes = [f"tp plan: {path} matches no module" for path in unmatched]
    replicated = dict.fromkeys(each for each in heads.values() if each.layout == AttentionLayout.replicated)
    if replicated and (dropped or not strict):
        removed = f"; removed from the plan: {', '.join(dropped)}" if strict else ""
        counts = " or ".join(f"{each.heads} heads and {each.kv_heads} kv heads" for each in replicated)
        notes.append(
            f"attention is replicated over the {tp} tp ranks: {counts} cannot be divided evenly "
            f"(parallelism.uneven_heads=refuse makes this an error){removed}"
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


def _is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a linear layer with a LoRA adapter."""
    return module._parameters.get("lora_A") is not None


def _style_for(module: nn.Module, style: ParallelStyle) -> ParallelStyle | None:
    """Return the style that shards a module like `style` shards a linear layer; None if it cannot be sharded so."""
    adapted = _is_adapted(module)
    if not (adapted or is_transposed(module)):
        return style
    if type(style) is ColwiseParallel:
        return _AdaptedColwise(style)
    if (
        isinstance(style, RowwiseParallel)
        and type(style) in (RowwiseParallel, RowwiseSequence)
        and style.output_layouts[0] in (Replicate(), Shard(0), Shard(1))
    ):
        return _AdaptedRowwise(style) if style.use_local_output else None
    if adapted and isinstance(style, RowsOfHeads):
        return style
    if adapted and isinstance(style, KVHeadSlice):
        return _AdaptedKVHeadSlice(style.kv_heads)
    is_known = isinstance(style, ReplicatedParameters) or _name(style) == _MLA
    return style if is_known or not adapted else None


def _name(style: ParallelStyle) -> str:
    return getattr(style, "name", type(style).__name__)


def _check_adapters(model: nn.Module, styles: Mapping[str, ParallelStyle], tp: int) -> None:
    """Raise ConfigError listing all layers that their styles, by module name, cannot shard because of their adapters.

    Layers that differ in their number only are listed once.
    """
    unknown: dict[str, str] = {}
    uneven: dict[str, str] = {}
    for name, style in styles.items():
        module: Any = model.get_submodule(name)
        listed = re.sub(r"\.\d+(?=\.)", ".*", name)
        if _style_for(module, style) is None:
            unknown[listed] = f"{listed} ({_name(style)})"
        elif _is_adapted(module) and isinstance(style, RowwiseParallel):
            inputs, together = module.lora_A.shape[1], module.columns_together
            if together > 1 and inputs % (together * tp):
                uneven[listed] = f"{listed} ({inputs})"
    problems = [quantized_inputs_problem(tp, uneven.values())] if uneven else []
    if unknown:
        problems.append(
            f"parallelism.tp={tp}: layers with adapters cannot have the style of {', '.join(unknown.values())}; use "
            "colwise, rowwise, colwise_gather_output, rowwise_split_input or replicate in parallelism.tp_plan, or name "
            "other layers in peft.targets"
        )
    if problems:
        raise ConfigError(problems)


class _AdaptedColwise(ParallelStyle):
    """Column-wise: each rank takes all input features and computes its shard of the output features.

    Args:
        style: Layouts of the input and of the output, which may be all-gathered (`colwise_gather_output`).
    """

    def __init__(self, style: ColwiseParallel) -> None:
        super().__init__()
        self.style = style

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        dim = 1 if is_transposed(module) else 0
        features = module.weight.shape[dim]
        by_name: dict[str, list[Placement]] = {"weight": [Shard(dim)], "lora_A": [Replicate()]}
        distribute_parameters(module, device_mesh, [Shard(0)], by_name)

        def forward(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, in) -> (batch, seq, out / tp), or gathered
            entered = _entered(hidden, device_mesh, self.style.input_layouts, Replicate())
            output = _compute(module, entered.to_local(grad_placements=[Partial()]), _local(module, ("lora_A",)))
            if self.style.use_local_output and self.style.output_layouts == (Shard(-1),):
                return output
            shape = torch.Size((*output.shape[:-1], features))  # tp need not divide the features
            stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            sharded = DTensor.from_local(output, device_mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)
            leaving = sharded.redistribute(placements=self.style.output_layouts)
            return leaving.to_local() if self.style.use_local_output else leaving

        module.forward = forward
        return module


class _AdaptedRowwise(ParallelStyle):
    """Row-wise: each rank takes its shard of the input features; outputs are all-reduced or reduce-scattered.

    Args:
        style: Layouts of the output and of the input, which may be replicated (`rowwise_split_input`).
    """

    def __init__(self, style: RowwiseParallel) -> None:
        super().__init__()
        self.style = style

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        inputs = _InputShard(device_mesh, _input_features(module))
        by_name = {"weight": [Shard(0 if is_transposed(module) else 1)], "lora_A": [Shard(1)]}
        if isinstance(self.style, RowwiseSequence):
            module.shards_sequence = True
        distribute_parameters(module, device_mesh, by_name=by_name)
        # With a sharded sequence each rank adds the bias to its own tokens.
        of_tokens = () if self.style.output_layouts[0] == Replicate() else ("bias",)
        partial = ("lora_B", "lora_magnitude_vector", *of_tokens)

        def forward(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, in / tp or in) -> (batch, seq, out)
            entered = _entered(hidden, device_mesh, self.style.input_layouts, Shard(-1))
            weight, bias, *adapter = _local(module, partial)
            output = _compute(module, entered.to_local(), [weight, None, *adapter], inputs)
            summed = DTensor.from_local(output, device_mesh, [Partial()], run_check=False)
            is_whole = isinstance(self.style, RowwiseSequence) and not module.shards_sequence
            layouts = [Replicate()] if is_whole else self.style.output_layouts
            output = summed.redistribute(placements=layouts).to_local()
            return output if bias is None else output + bias

        module.forward = forward
        return module


class _AdaptedKVHeadSlice(KVHeadSlice):
    """Key or value projection with fewer heads than tp ranks; each rank computes the one head it needs."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh)
        head = device_mesh.get_local_rank() // (device_mesh.size() // self.kv_heads)

        def forward(hidden: torch.Tensor) -> torch.Tensor:  # (batch, seq, hidden) -> (batch, seq, head_dim)
            hidden = as_replicated(hidden, device_mesh).to_local(grad_placements=[Partial()])
            parameters = zip(_NAMES, _local(module, partial=_NAMES), strict=True)
            of_head = [
                each if each is None or name == "lora_A" else each.chunk(self.kv_heads)[head]
                for name, each in parameters
            ]
            return module.compute(hidden, *of_head)  # type: ignore[operator]

        module.forward = forward
        return module


@dataclass(frozen=True, slots=True)
class _InputShard:
    """Operations of `compute` that depend on all input features, for a layer with sharded ones."""

    mesh: DeviceMesh
    features: int
    """Global number of input features."""

    def dropout(self, hidden: torch.Tensor, probability: float) -> torch.Tensor:
        """Apply dropout to (..., features / tp) with the mask of an unsharded layer.

        tp ranks have equal random streams: each draws the mask for all features and takes its shard.
        """
        mask = F.dropout(hidden.new_ones(*hidden.shape[:-1], self.features), probability)
        return hidden * redistribute(mask, self.mesh, Replicate(), Shard(-1))

    def norms(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the norms of full weight rows, given those of this rank's column shard, (out,)."""
        return redistribute(norms.square(), self.mesh, Partial(), Replicate()).sqrt()


def _input_features(module: Any) -> int:
    """Return the global number of input features of a linear layer or a Conv1D."""
    return module.nx if is_transposed(module) else module.in_features


def _entered(hidden: torch.Tensor, mesh: DeviceMesh, layouts: Sequence[Placement], wanted: Placement) -> DTensor:
    """Return a layer's input, a DTensor or a local tensor in `layouts`, in the layout that the layer computes with."""
    if not isinstance(hidden, DTensor):
        hidden = DTensor.from_local(hidden, mesh, layouts, run_check=False)
    # Layers with the same input add up their partial gradients, which a redistribution would sum for each layer.
    return hidden if hidden.placements == (wanted,) else hidden.redistribute(placements=[wanted])


def _compute(
    module: Any, hidden: torch.Tensor, parameters: list[torch.Tensor | None], inputs: _InputShard | None = None
) -> torch.Tensor:
    """Apply a layer to this rank's shards of its input and of its parameters, in the order of _NAMES."""
    weight, bias, *adapter = parameters
    if is_transposed(module):
        weight = weight.T  # type: ignore[union-attr]
    if _is_adapted(module):
        return module.compute(hidden, weight, bias, *adapter, inputs)
    return F.linear(hidden, weight, bias)  # type: ignore[arg-type]


def _local(module: Any, partial: tuple[str, ...]) -> list[torch.Tensor | None]:
    """Return the local tensors of _NAMES; gradients of those in `partial` are partial sums over the ranks."""
    local: list[torch.Tensor | None] = []
    for name in _NAMES:
        parameter = module._parameters.get(name)
        if isinstance(parameter, DTensor):
            parameter = parameter.to_local(grad_placements=[Partial()] if name in partial else None)
        local.append(parameter)
    return local
