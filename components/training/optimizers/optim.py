"""Optimizers of a config with their parameter groups, Lion, and AdamW with moments in 8 bits.

The 8-bit AdamW works on any mesh, with the arithmetic and the quantization of torchao (Dettmers et al. 2022,
https://arxiv.org/abs/2110.02861): each block of consecutive values is divided by its largest magnitude and rounded to
the nearest of 256 numbers. torchao.optim.AdamW8bit quantizes blocks of 256 values of a rank's flattened shard, which
depend on the mesh. Here a block lies within a row and within a shard, so that codes and scales are sharded like the
parameter: a checkpoint stores them as they are, and another mesh continues from the same bits. torchao's functions are
used instead of its optimizer for this reason, because a skipped step must change nothing, and because its updates are
not bounded: a second moment that is small beside the largest of its block is stored as 0, and if the first is not, the
next gradient of 0 moves the weight by hundreds of learning rates.
"""

from __future__ import annotations

import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from components.checkpoint.tensors import Optimizers
from components.config.compute_rules import torchao_problems
from components.config.schema.optimizer import (
    AdamW8bitConfig,
    AdamWConfig,
    CustomOptimizerConfig,
    LionConfig,
    MuonConfig,
    NorMuonConfig,
    OptimizerConfig,
    SGDConfig,
    learning_rate,
)
from components.config.schema.training import StageConfig
from components.models.anatomy import Anatomy
from components.models.layers import remove_truncated_libraries, vector_parameters
from components.models.weights.shards import local_blocks, shards_of_dim, zeros_sharded_like
from components.protocol.errors import ConfigError, raise_all
from components.training.optimizers.gradients import local_tensor
from components.training.optimizers.muon import Muon, NorMuon, divide_parameters
from components.training.prepared import Prepared

_LR_SCALE = "lr_scale"
"""Key of a parameter group: factor of the schedule's learning rate; 1 if it is missing."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_CODES, _SCALE = "_codes", "_scale"
"""Suffixes of a moment's 8-bit codes (as many as the parameter has values) and of its scales (one per block)."""
BLOCK = 256
"""Largest number of values in a block, torchao's default."""
_MIN_VALUES = 4096
"""Smaller parameters are not quantized, as in torchao."""
_MIN_BLOCK = 16
"""Parameters whose rows allow only smaller blocks are not quantized."""
_LION_MOMENT = "first_moment"
"""Name of Lion's moment: not exp_avg, since AdamW's second moment begins so, which Lion cannot use."""
_LION_CHUNK = 2**22
"""Number of values that Lion updates at a time, approximately: an update needs temporary memory for three of them."""
_GRAPHS = 64
"""Limit of compiled updates: one for each size of blocks and dtype of the weights."""


def build_optimizer(model: Prepared | nn.Module, config: OptimizerConfig) -> Optimizers:
    """Return the optimizer of the trainable parameters, or two by name for Muon and 8-bit moments.

    Call it after sharding and loading.

    A collective for Muon. Weight decay applies to matrices, not to norms, biases and other vectors.

    Raises:
        ConfigError: An optimizer.factory that cannot be imported, or that does not return an optimizer; torchao is not
            installed for 8-bit moments.
        TypeError: Muon for a model without its anatomy: pass the result of `prepare`.
    """
    module = model.module if isinstance(model, Prepared) else model
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = partial(_groups, module, config)
    match config:
        case AdamWConfig():
            return _adamw(groups(trained), config)
        case AdamW8bitConfig():
            return _adamw8bit(trained, groups, config)
        case LionConfig():
            return Lion(groups(trained), config)
        case SGDConfig():
            return torch.optim.SGD(groups(trained), lr=config.lr, momentum=config.momentum, nesterov=config.nesterov)
        case MuonConfig():
            if not isinstance(model, Prepared) or model.anatomy is None:
                raise TypeError("build_optimizer needs the model from training.prepare for optimizer=muon")
            return _muon(module, model.anatomy, groups, config)
        case CustomOptimizerConfig():
            return _custom(groups(trained), config)
    raise TypeError(f"build_optimizer: there is no optimizer for {type(config).__name__}")


def _groups(
    module: nn.Module, config: OptimizerConfig, parameters: Iterable[nn.Parameter], lr: float | None = None
) -> list[dict[str, Any]]:
    """Return parameter groups by learning rate and weight decay, of the first of config.groups that matches a name.

    Args:
        parameters: Some parameters of the module.
        lr: Peak learning rate of parameters in no group; None: config.lr.
    """
    vectors, names = vector_parameters(module), {parameter: name for name, parameter in module.named_parameters()}
    members: dict[tuple[float | None, float], list[nn.Parameter]] = {}
    # Matrices come first, so that sums over all parameters have one order whatever the groups.
    for parameter in sorted(parameters, key=vectors.__contains__):
        rule = next((each for each in config.groups if re.search(each["match"], names[parameter])), {})
        decay = 0.0 if parameter in vectors else config.weight_decay
        members.setdefault((rule.get("lr", lr), rule.get("weight_decay", decay)), []).append(parameter)
    return [
        {"params": each, "weight_decay": decay} | ({} if rate is None else {"lr": rate, _LR_SCALE: rate / config.lr})
        for (rate, decay), each in members.items()
    ]


def _adamw(groups: list[dict[str, Any]], config: AdamWConfig | AdamW8bitConfig | MuonConfig) -> AdamW:
    """Return AdamW with fused kernels, except on the meta device, which has none."""
    fused = groups[0]["params"][0].device.type != "meta"
    return AdamW(
        groups,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=fused,
        foreach=None if fused else True,
    )


def _adamw8bit(parameters: list[nn.Parameter], groups: Callable[..., Any], config: AdamW8bitConfig) -> Optimizers:
    quantized = [parameter for parameter in parameters if _is_quantized(parameter)]
    others = [parameter for parameter in parameters if not _is_quantized(parameter)]
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if quantized:
        optimizers["adamw8bit"] = AdamW8bit(groups(quantized), config)
    if others:
        optimizers["adamw"] = _adamw(groups(others), config)
    return optimizers


def _muon(module: nn.Module, anatomy: Anatomy, groups: Callable[..., Any], config: MuonConfig) -> Optimizers:
    divided = divide_parameters(module, anatomy, vector_parameters(module))
    optimizers: dict[str, torch.optim.Optimizer] = {}
    if divided.matrices:  # some pipeline stage may hold none
        parameters = list({id(matrix.parameter): matrix.parameter for matrix in divided.matrices}.values())
        if isinstance(config, NorMuonConfig):
            optimizers["muon"] = NorMuon(divided.matrices, config, groups(parameters))
        else:
            optimizers["muon"] = Muon(divided.matrices, config, groups(parameters))
    if divided.others:
        optimizers["adamw"] = _adamw(groups(divided.others, config.adamw_lr), config)
    return optimizers


def _custom(groups: list[dict[str, Any]], config: CustomOptimizerConfig) -> torch.optim.Optimizer:
    key = f"optimizer.factory={config.factory}"
    try:
        factory = pkgutil.resolve_name(config.factory)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key}: cannot be imported: {error}") from error
    if not callable(factory):
        raise ConfigError(f"{key}: is a {type(factory).__name__}, not a function")
    optimizer = factory(groups, lr=config.lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"{key}: returned a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    return optimizer


def set_learning_rate(
    optimizer: torch.optim.Optimizer,
    config: OptimizerConfig,
    step: int,
    max_steps: int,
    stages: Sequence[StageConfig] = (),
) -> None:
    """Set the learning rate of every parameter group to that of optimizer step `step` (the first is 0)."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step, max_steps, stages) * group.get(_LR_SCALE, 1.0)


def keep_group_rates(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Let the schedule scale each parameter group's own learning rate, which relates to optimizer.lr.

    Call it before the first `set_learning_rate`, which overwrites the groups' rates.
    """
    for group in optimizer.param_groups:
        group.setdefault(_LR_SCALE, float(group["lr"]) / config.lr)


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW; a step passes local shards to the kernel instead of DTensors.

    The update is elementwise, so the bits are the same. For a list of DTensors, torch derives the placements of each
    result at the first step and hashes them at each later one: 1.7 s and 15 ms of processor time for 270 parameters on
    a mesh of two axes, where local shards take 16 ms and 5 ms. State dicts hold DTensors as before.
    """

    found_inf: torch.Tensor | None = None
    """Whether to skip the next step (not 0), a scalar; read by the fused kernel."""

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Fill the lists of parameters, gradients, moments and step counters with local shards.

        Overrides a private method of torch.optim.Adam, whose `step` passes the lists to the kernel.
        """
        is_complex: bool = super()._init_group(group, *lists)
        parameters, gradients, *moments, _steps = lists
        for index, parameter in enumerate(parameters):
            if isinstance(parameter, DTensor):
                for each in (gradients, *filter(None, moments)):
                    each[index] = _shard_like(parameter, each[index])
        parameters[:] = map(local_tensor, parameters)
        return is_complex


def _shard_like(parameter: DTensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a tensor with the placements of its parameter."""
    if not isinstance(tensor, DTensor):
        raise TypeError(f"a gradient or moment of a DTensor is a {type(tensor).__name__}")
    if tensor.placements != parameter.placements:
        tensor = tensor.redistribute(parameter.device_mesh, parameter.placements)
    return tensor.to_local()


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675) on local shards, with a moment in float32 or wider.

    The update is elementwise, so it has the same bits on every mesh. A step changes nothing if `found_inf` is not 0, as
    in torch's fused optimizers: the decision stays on the device, so the host does not wait.
    """

    found_inf: torch.Tensor | None = None
    """Set before a step: not 0 if the gradients are not finite, a scalar on the device."""

    def __init__(self, groups: Iterable[dict[str, Any]], cfg: LionConfig) -> None:
        super().__init__(groups, {"lr": cfg.lr, "betas": tuple(cfg.betas)})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        if closure is not None:
            raise ValueError("Lion.step takes no closure")
        for group in self.param_groups:
            chunk: list[nn.Parameter] = []
            size = 0
            for parameter in (each for each in group["params"] if each.grad is not None):
                if chunk and (size > _LION_CHUNK or parameter.dtype != chunk[0].dtype):
                    self._update(chunk, group)
                    chunk, size = [], 0
                chunk.append(parameter)
                size += local_tensor(parameter).numel()
            if chunk:
                self._update(chunk, group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update parameters of one dtype and their moments.

        A skipped step multiplies all changes by 0, with gradients of 0 instead of infinite ones.
        """
        dtype = torch.promote_types(parameters[0].dtype, torch.float32)
        for parameter in parameters:
            if _LION_MOMENT not in self.state[parameter]:
                self.state[parameter][_LION_MOMENT] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        weights = [local_tensor(each.detach()) for each in parameters]
        moments = [local_tensor(self.state[each][_LION_MOMENT]) for each in parameters]
        gradients = [
            (_shard_like(each, each.grad) if isinstance(each, DTensor) else each.grad).to(dtype)  # type: ignore[arg-type,union-attr]
            for each in parameters
        ]
        applied: torch.Tensor | float = 1.0
        if self.found_inf is not None:
            skipped = self.found_inf.to(weights[0].device).bool()
            gradients = [torch.where(skipped, 0.0, each) for each in gradients]
            applied = 1 - skipped.to(dtype)
        beta1, beta2 = group["betas"]
        changes = torch._foreach_lerp(moments, gradients, 1 - beta1)
        torch._foreach_sign_(changes)
        if group["weight_decay"]:
            torch._foreach_add_(changes, [each.to(dtype) for each in weights], alpha=group["weight_decay"])
        torch._foreach_mul_(changes, -group["lr"] * applied)
        torch._foreach_add_(weights, changes)
        changes = torch._foreach_sub(gradients, moments)
        torch._foreach_mul_(changes, (1 - beta2) * applied)
        torch._foreach_add_(moments, changes)


def _is_quantized(parameter: nn.Parameter) -> bool:
    """Return whether `AdamW8bit` trains a parameter; this does not depend on the mesh."""
    if parameter.dim() < 2 or parameter.numel() < _MIN_VALUES:
        return False
    return math.gcd(BLOCK, parameter.shape[-1]) >= _MIN_BLOCK


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with 8-bit moments for parameters that satisfy `_is_quantized`; updates are computed in float32.

    A step changes nothing if `found_inf` is not 0, as in torch's fused optimizers: the decision stays on the device, so
    the host does not wait.
    """

    found_inf: torch.Tensor | None = None
    """Set before a step: not 0 if the gradients are not finite, a scalar on the device."""

    def __init__(self, groups: Iterable[dict[str, Any]], cfg: AdamW8bitConfig) -> None:
        # capturable: step counters are on the device, which decides whether a step counts.
        super().__init__(groups, {"lr": cfg.lr, "betas": tuple(cfg.betas), "eps": cfg.eps, "capturable": True})
        raise_all(torchao_problems(f"optimizer.kind={cfg.kind}"))
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
        remove_truncated_libraries()
        self._update, self._numbers = _compiled_update()
        self._on_device: dict[torch.device, list[torch.Tensor]] = {}

    @property
    def note(self) -> str:
        """Number of this rank's values with 8-bit moments and the bytes of their moments, for the banner."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        values = sum(local_tensor(each).numel() for each in parameters)
        size = sum(local_tensor(each).numel() * _moment_bytes(each) for each in parameters)
        return (
            f"adamw8bit: {size / 2**20:,.1f} MiB for the moments of {values:,} values per rank, "
            f"{size / max(1, values):.2f} bytes each"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. The first step compiles the update."""
        if closure is not None:
            raise ValueError("AdamW8bit.step takes no closure")
        for group in self.param_groups:
            lr = torch.tensor(group["lr"], dtype=torch.float32)  # a number would be compiled into the update
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, lr, group)

    def _step(self, parameter: nn.Parameter, grad: torch.Tensor, lr: torch.Tensor, group: dict[str, Any]) -> None:
        """Update this rank's shard of a parameter and of its state."""
        local, gradient = local_tensor(parameter.detach()), local_tensor(grad)
        state = self._state_of(parameter)
        skipped = torch.zeros((), device=local.device) if self.found_inf is None else self.found_inf
        skipped = skipped.to(local.device).bool()
        state["step"] += ~skipped
        if not local.numel():
            return
        block = _block_of(state[_MOMENTS[0] + _SCALE], parameter)
        weights = local.contiguous()
        tensors = [weights.view(-1, block), gradient.contiguous().view(-1, block)]
        codes = [local_tensor(state[moment + _CODES]).view(-1, block) for moment in _MOMENTS]
        scales = [local_tensor(state[moment + _SCALE]).view(-1) for moment in _MOMENTS]
        for tensor in (*tensors, *codes, *scales):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # one graph for matrices of all sizes
        moments = list(zip(codes, scales, self._numbers_on(local.device), strict=True))
        constants = (*group["betas"], group["weight_decay"], group["eps"])
        self._update(*tensors, state["step"], lr, skipped, moments, constants)
        if weights is not local:
            local.copy_(weights)

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the state of a parameter, which is allocated at the first step, with blocks that fit its shards.

        Moments of float32 or bfloat16, from a checkpoint of another kind of AdamW, are quantized.
        """
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.zeros((), device=parameter.device)
        for moment in _MOMENTS:
            if moment + _CODES not in state:
                state[moment + _CODES] = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
                blocks = (*parameter.shape[:-1], parameter.shape[-1] // _largest_block(parameter))
                state[moment + _SCALE] = zeros_sharded_like(parameter, blocks, torch.float32)
                if moment in state:
                    self._quantize(state, moment, parameter)
            scale = state[moment + _SCALE]
            if local_tensor(scale).shape[-1] * _block_of(scale, parameter) != local_tensor(parameter).shape[-1]:
                state[moment + _SCALE] = _split_blocks(scale, parameter)
        return state

    def _quantize(self, state: dict[str, Any], moment: str, parameter: nn.Parameter) -> None:
        """Replace an unquantized moment by its codes and scales."""
        from torchao.optim.quant_utils import quantize_8bit_with_qmap, scale_tensor

        values = local_tensor(state.pop(moment)).float().contiguous()
        codes, scale = local_tensor(state[moment + _CODES]), local_tensor(state[moment + _SCALE])
        if values.numel():
            scaled, new_scale = scale_tensor(values, _largest_block(parameter))
            numbers = self._numbers_on(values.device)[_MOMENTS.index(moment)]
            codes.copy_(quantize_8bit_with_qmap(scaled, numbers))
            scale.copy_(new_scale.view(scale.shape))

    def _numbers_on(self, device: torch.device) -> list[torch.Tensor]:
        """Return the 256 numbers that the codes of each moment stand for; those of the second are not negative."""
        if device not in self._on_device:
            self._on_device[device] = [torch.tensor(numbers, device=device) for numbers in self._numbers]
        return self._on_device[device]


def _largest_block(parameter: nn.Parameter) -> int:
    """Return the largest divisor of BLOCK into which the part of a row on any rank can be divided."""
    columns, parts = parameter.shape[-1], shards_of_dim(parameter, parameter.dim() - 1)
    return math.gcd(BLOCK, columns // parts) if columns % parts == 0 else 1


def _moment_bytes(parameter: nn.Parameter) -> float:
    """Return the bytes of both moments per value: codes, and a float32 scale per block."""
    return len(_MOMENTS) * (1 + 4 / _largest_block(parameter))


def _block_of(scale: torch.Tensor, parameter: nn.Parameter) -> int:
    return parameter.shape[-1] // scale.shape[-1]


def _split_blocks(scale: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return the scales of smaller blocks, which lie within the parameter's shards.

    The parts of a block have its scale, so all moments remain the same bits.

    Args:
        scale: The scales of whole rows, (..., blocks of a row), loaded from a checkpoint of another mesh.
    """
    before = _block_of(scale, parameter)
    block = math.gcd(before, _largest_block(parameter))
    columns = torch.empty(local_tensor(parameter).shape[-1], dtype=torch.long)
    for each in local_blocks(parameter, "scale"):
        local, full = each.local[-1], each.full[-1]
        columns[local] = torch.arange(full.start, full.stop)
    split = zeros_sharded_like(parameter, (*parameter.shape[:-1], parameter.shape[-1] // block), scale.dtype)
    rows = local_tensor(scale)
    local_tensor(split).copy_(rows[..., (columns[::block] // before).to(rows.device)])
    return split


def _largest_ratio(beta1: float, beta2: float, steps: torch.Tensor) -> torch.Tensor:
    """Return the largest possible ratio of the squared first moment to the second after some steps of AdamW.

    By the Cauchy-Schwarz inequality: (1 - beta1)^2 / (1 - beta2) times the sum of (beta1^2 / beta2)^k for k < steps. If
    rounding never exceeds it, no update exceeds AdamW's own bound: 1.17 learning rates for betas of 0.9 and 0.95.
    """
    factor = beta1**2 / max(beta2, 1e-9)
    factor += 1e-6 * (factor == 1)
    ratio: torch.Tensor = (1 - beta1) ** 2 / (1 - beta2) * (factor**steps - 1) / (factor - 1)
    return ratio.clamp(min=1e-12)  # 0 before the first step


def _compiled_update() -> tuple[Callable[..., None], list[tuple[float, ...]]]:
    """Return the compiled update of a shard, and the numbers that the codes of each moment stand for."""
    from torchao.optim.adam import single_param_adam
    from torchao.optim.quant_utils import dequant_with_qmap, quantize_8bit_with_qmap, scale_tensor
    from torchao.optim.subclass_8bit import get_qmap_signed, get_qmap_unsigned

    def update(
        weights: torch.Tensor,
        gradient: torch.Tensor,
        step: torch.Tensor,
        lr: torch.Tensor,
        skipped: torch.Tensor,
        moments: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        constants: tuple[float, ...],
    ) -> None:
        """Update weights (blocks, block) and moments in place, unless `skipped`.

        Args:
            moments: Codes (blocks, block), scales (blocks,) and the numbers (256,) that the codes stand for.
            constants: The betas, the weight decay and eps.
        """
        updated = weights.clone()
        first, second = (dequant_with_qmap(codes, numbers, scale) for codes, scale, numbers in moments)
        second = torch.maximum(second, first.square() / _largest_ratio(constants[0], constants[1], step - 1))
        is_adamw, rounds_stochastically = True, False
        single_param_adam(updated, gradient, step, first, second, None, lr, *constants, is_adamw, rounds_stochastically)
        weights.copy_(torch.where(skipped, weights, updated))
        for moment, (codes, scale, numbers) in zip((first, second), moments, strict=True):
            scaled, new_scale = scale_tensor(moment, codes.shape[-1])
            codes.copy_(torch.where(skipped, codes, quantize_8bit_with_qmap(scaled, numbers)))
            scale.copy_(torch.where(skipped, scale, new_scale))

    return torch.compile(update, fullgraph=True, dynamic=False), [get_qmap_signed(), get_qmap_unsigned()]
