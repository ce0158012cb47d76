"""Model and optimizer state as named tensors.

A tensor is identified by its name and global shape: `model/<parameter>`, `optimizer/<quantity>/<parameter>` for state
of the parameter's shape or with one value per block of one of its dims, `counter/<quantity>/<parameter>` for scalars
such as AdamW's step, `number/<quantity>/<parameter>` for those that are Python numbers, `average/<parameter>` for the
moving average of the weights. The mesh is not part of the format, so a checkpoint can be loaded on any mesh. Ranks of
different pipeline stages hold different names: where all names are needed, the ranks exchange them, and each rank reads
only its own tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from components.json_collectives import all_gather_json, this_rank
from components.models.anatomy import has_adapters
from components.models.weights.shards import zeros_sharded_like
from components.protocol.errors import ConfigError
from components.storage.object_store import shown_names

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
MODEL = "model/"
OPTIMIZER = "optimizer/"
_COUNTER = "counter/"
_NUMBER = "number/"
AVERAGE = "average/"
AVERAGE_UPDATES = "average_updates"
"""Name of the number of updates in the moving average, a scalar."""
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Python type of a number -> dtype that stores it."""
_OURS = "components.training.optimizers"
_ADAM, _MOMENTUM = ("step", "exp_avg", "max_exp_avg"), ("momentum_buffer",)
_USED_STATE = {
    **dict.fromkeys(("torch.optim.adam.Adam", "torch.optim.adamw.AdamW"), _ADAM),
    **dict.fromkeys((f"{_OURS}.optim.AdamW", f"{_OURS}.optim.AdamW8bit"), _ADAM),
    **dict.fromkeys(("torch.optim.sgd.SGD", f"{_OURS}.muon.Muon"), _MOMENTUM),
    f"{_OURS}.muon.NorMuon": (*_MOMENTUM, "row_mean_square"),
    f"{_OURS}.optim.Lion": ("first_moment",),
}
"""Optimizer, with its module since a user's own may have the same name -> first characters of the names of its state,
with that which it converts or `_check_moments` rejects."""
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]
"""One optimizer, or several by name with disjoint parameters."""
Tensors = dict[str, torch.Tensor]


def merge_over_ranks(entries: dict[str, _T], group: dist.ProcessGroup | None = None) -> dict[str, _T]:
    """Return the union of all ranks' entries, as JSON values; the lowest rank wins for equal names. A collective."""
    union: dict[str, _T] = {}
    for by_name in all_gather_json(entries, group):
        for name, entry in by_name.items():
            union.setdefault(name, entry)
    return union


def model_tensors(model: nn.Module) -> Tensors:
    """Return parameters and persistent buffers as `model/<name>`, tied ones once; with adapters, only the adapters."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    adapted = has_adapters(model)
    seen: set[int] = set()
    tensors: Tensors = {}
    # state_dict() makes FSDP2 reshard: the parameters are then the DTensors that the optimizer holds.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen and (tensor.requires_grad or not adapted):
            seen.add(id(tensor))
            tensors[MODEL + name] = tensor
    return tensors


def list_optimizers(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a run as a list."""
    return list(optimizers.values()) if isinstance(optimizers, Mapping) else [optimizers]


def optimizer_tensors(optimizers: Optimizers, parameters: Tensors) -> Tensors:
    """Return the optimizer state of `parameters` as `optimizer/...`, `counter/...` and `number/...`.

    Raises:
        NotImplementedError: State that is neither a scalar, nor of the parameter's shape, nor one value per block of
            one of its dims.
    """
    tensors: Tensors = {}
    for optimizer in list_optimizers(optimizers):
        tensors |= _tensors_of(optimizer, parameters)
    return tensors


def _tensors_of(optimizer: torch.optim.Optimizer, parameters: Tensors) -> Tensors:
    tensors: Tensors = {}
    optimizer.state_dict()  # for its hooks: after a skipped step they restore the rest of the state
    for full_name, parameter in parameters.items():
        name = full_name.removeprefix(MODEL)
        for quantity, value in optimizer.state.get(parameter, {}).items():
            if value is None:
                continue
            if type(value) in _NUMBERS:
                tensors[f"{_NUMBER}{quantity}/{name}"] = torch.tensor(value, dtype=_NUMBERS[type(value)])
                continue
            if not isinstance(value, torch.Tensor):
                raise NotImplementedError(
                    f"{type(optimizer).__name__}: its state {quantity} of {name} is a {type(value).__name__}; only "
                    "numbers and tensors can be saved, choose another optimizer"
                )
            if value.ndim == 0:
                tensors[f"{_COUNTER}{quantity}/{name}"] = value
            elif value.shape == parameter.shape or _is_sharded_like(value, parameter):
                tensors[f"{OPTIMIZER}{quantity}/{name}"] = value
            else:
                raise NotImplementedError(
                    f"{type(optimizer).__name__}: its state {quantity} of {name} has shape {tuple(value.shape)}, the "
                    f"parameter has {tuple(parameter.shape)}; only scalars and state of the parameter's shape can be "
                    "saved, choose another optimizer"
                )
    return tensors


def make_optimizer_state(
    optimizers: Optimizers, parameters: Tensors, stored: Mapping[str, tuple[Sequence[int], torch.dtype]]
) -> Tensors:
    """Allocate the stored optimizer state of this rank's parameters and return it by stored name; a collective.

    Stepping the optimizers would allocate it too, but also change the parameters. State that an optimizer does not use,
    as after a change from adamw to muon, and state of parameters that are frozen now, is dropped and named in the log:
    it would be saved again, and be stale after a change back.

    Args:
        stored: Global shape and dtype of each stored tensor.

    Raises:
        ConfigError: On every rank, if there is stored state of a parameter that no rank has, or state of another
            optimizer than AdamW for AdamW.
    """
    owners = {
        id(parameter): (optimizer, group)
        for optimizer in list_optimizers(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    # Under pp a rank has only its own parameters: whether a run trains one at all is known by all ranks together.
    is_trained = merge_over_ranks(dict.fromkeys(parameters, False))
    is_trained |= merge_over_ranks({name: True for name, each in parameters.items() if id(each) in owners})
    dropped, frozen = dict[str, str](), dict[str, None]()
    for optimizer in list_optimizers(optimizers):
        optimizer.state.clear()
    for key, (shape, dtype) in stored.items():
        kind, _, rest = key.partition("/")
        quantity, _, name = rest.partition("/")
        if f"{kind}/" not in (OPTIMIZER, _COUNTER, _NUMBER):
            continue
        if MODEL + name not in is_trained:
            raise ConfigError(
                f"the checkpoint holds optimizer state of {name}, which this model does not have; train the same "
                "model as the run that saved it, or choose another run.dir to start over"
            )
        if not is_trained[MODEL + name]:
            frozen[name] = None
            continue
        parameter = parameters.get(MODEL + name)
        if parameter is None or id(parameter) not in owners:
            continue
        optimizer, group = owners[id(parameter)]
        if not _uses(optimizer, quantity):
            dropped[quantity] = type(optimizer).__name__
            continue
        value: torch.Tensor | bool | int | float
        if f"{kind}/" == _NUMBER:
            value = next(each(0) for each, stored_as in _NUMBERS.items() if stored_as == dtype)
        elif f"{kind}/" == OPTIMIZER:
            value = zeros_sharded_like(parameter, torch.Size(shape), dtype)
        else:
            # As in torch.optim: step counters are on the device only for fused and capturable kernels.
            on_device = group.get("fused") or group.get("capturable")
            value = torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
        optimizer.state[parameter][quantity] = value
    if (dropped := merge_over_ranks(dropped)) and this_rank() == 0:
        names = ", ".join(f"{quantity} ({optimizer})" for quantity, optimizer in sorted(dropped.items()))
        logger.warning("state of the checkpoint that the optimizer of this run does not use is dropped: %s", names)
    if frozen and this_rank() == 0:
        logger.warning("optimizer state of parameters that are frozen now is dropped: %s", shown_names(frozen))
    _check_moments(optimizers, parameters)
    return optimizer_tensors(optimizers, parameters)


def _uses(optimizer: torch.optim.Optimizer, quantity: str) -> bool:
    """Return whether an optimizer uses state of this name; True for those of unknown state."""
    kind = type(optimizer)
    return quantity.startswith(_USED_STATE.get(f"{kind.__module__}.{kind.__name__}", ""))


def restore_numbers(optimizers: Optimizers, parameters: Tensors, tensors: Tensors) -> None:
    """Set the optimizer state that consists of Python numbers to the values that were read into `tensors`."""
    states = {id(each): optimizer.state[each] for optimizer in list_optimizers(optimizers) for each in optimizer.state}
    for key, value in tensors.items():
        if key.startswith(_NUMBER):
            quantity, _, name = key.removeprefix(_NUMBER).partition("/")
            states[id(parameters[MODEL + name])][quantity] = value.item()


def _check_moments(optimizers: Optimizers, parameters: Tensors) -> None:
    """Require loaded state of Adam, AdamW and their subclasses to have moments, or a step would fail; a collective.

    Raises ConfigError on every rank.
    """
    adams = [each for each in list_optimizers(optimizers) if isinstance(each, torch.optim.Adam)]
    lacking = {
        name.removeprefix(MODEL): sorted(optimizer.state[parameter])
        for name, parameter in parameters.items()
        for optimizer in adams
        if parameter in optimizer.state and "exp_avg" not in optimizer.state[parameter]
    }
    if lacking := merge_over_ranks(lacking):
        name, quantities = next(iter(lacking.items()))
        raise ConfigError(
            f"the checkpoint holds {', '.join(quantities)} of {name}, but AdamW needs exp_avg and exp_avg_sq; set "
            "optimizer as in the run that saved it, or choose another run.dir to start over"
        )


def _is_sharded_like(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether state has one value per block of consecutive values along one dim of a parameter."""
    if value.dim() != parameter.dim() or isinstance(value, DTensor) != isinstance(parameter, DTensor):
        return False
    pairs = [pair for pair in zip(value.shape, parameter.shape, strict=True) if pair[0] != pair[1]]
    return len(pairs) <= 1 and all(blocks > 0 and size % blocks == 0 for blocks, size in pairs)
