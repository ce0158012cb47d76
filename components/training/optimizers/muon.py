"""Muon and NorMuon on any mesh: momentum whose matrices are orthogonalized by Newton-Schulz iterations on owner ranks.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/); the arithmetic is that of torch.optim.Muon. Momentum,
weight decay and the update stay on the shards. Orthogonalization needs whole matrices: see matrix_exchange.py. A
matrix has the same shape on its owner as in one process, so the result does not depend on the mesh.

NorMuon (Li et al. 2025, https://arxiv.org/abs/2510.05491) then divides each row of the result by the root mean square
of that row over recent steps. These mean squares are sharded like the rows, and travel with them to the owner and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from components.config.schema.optimizer import MatrixScale, MuonConfig, NorMuonConfig
from components.models.anatomy import Anatomy, config_of
from components.models.weights.shards import zeros_sharded_like
from components.torch_kernels import torch_dtype
from components.training.optimizers.gradients import local_tensor
from components.training.optimizers.matrix_exchange import Matrix, MatrixExchange, Piece, Runs, Transfer, fused_matrices

_MOMENTUM = "momentum_buffer"
"""Name of the momentum in the optimizer's state, as in torch.optim.Muon."""
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7
_MEAN_SQUARE = "row_mean_square"
"""Name of the mean square of each row in NorMuon's state."""
_ROW_EPS = 1e-10


def orthogonalize(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Return a matrix with the singular vectors of `matrix` (rows, columns) and singular values between 0.5 and 1.5.

    A quintic Newton-Schulz iteration in the dtype of `matrix`.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _newton_schulz_flops(shape: Sequence[int], steps: int) -> float:
    """Return the FLOPs of `orthogonalize` for a matrix (..., rows, columns)."""
    small, large = sorted(shape[-2:])
    return steps * (4 * small**2 * large + 2 * small**3)


def _learning_rate_scale(shape: Sequence[int], scale: MatrixScale) -> float:
    """Return the factor of the learning rate for a matrix (..., out, in).

    rms: the update has the root mean square of a typical AdamW update, so that AdamW's learning rate and weight decay
    can be reused (Liu et al. 2025). shape: sqrt(max(1, out / in)), as in the original.
    """
    outputs, inputs = shape[-2:]
    if scale is MatrixScale.rms:
        return 0.2 * math.sqrt(max(outputs, inputs))
    return math.sqrt(max(1, outputs / inputs))


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum over matrices that may be sharded in any way.

    Each matrix of a fused projection is orthogonalized by itself. A step changes nothing if `found_inf` is not 0, as in
    torch's fused optimizers: the decision stays on the device, so the host does not wait.
    """

    found_inf: torch.Tensor | None = None
    """Set before a step: not 0 if the gradients are not finite, a scalar on the device."""

    def __init__(self, matrices: Sequence[Matrix], cfg: MuonConfig, groups: list[dict[str, Any]]) -> None:
        """Plan the exchanges. A collective if a parameter is sharded.

        Args:
            groups: Parameter groups of the matrices' parameters; lr and weight_decay default to those of `cfg`.
        """
        super().__init__(groups, {"lr": cfg.lr, "weight_decay": cfg.weight_decay, "momentum": cfg.momentum})
        self._steps, self._scale = cfg.ns_steps, cfg.scale
        self._dtype = torch_dtype(cfg.ns_dtype)
        self._exchange = MatrixExchange(matrices, lambda matrix: _newton_schulz_flops(matrix.shape, cfg.ns_steps))
        self._matrices = len(matrices)
        self._group_numbers = {
            parameter: number for number, group in enumerate(self.param_groups) for parameter in group["params"]
        }

    @property
    def note(self) -> str:
        """Number of matrices and bytes that this rank sends in a step, for the banner."""
        sent = self._exchange.sent_elements * self._dtype.itemsize
        return f"muon: {self._matrices:,} matrices, {sent / 2**20:,.1f} MiB sent to and from their owners per step"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all matrices. A collective of the ranks that shard them."""
        if closure is not None:
            raise ValueError("Muon.step takes no closure")
        skipped = None if self.found_inf is None else self.found_inf.bool()
        earlier: Transfer | None = None
        for bucket in self._exchange.buckets:  # the exchange of a bucket overlaps the arithmetic of the one before
            transfer = Transfer(
                bucket, {parameter: self._direction(parameter, skipped) for parameter in bucket.parameters}
            )
            if earlier is not None:
                self._finish(earlier, skipped)
            earlier = transfer
        if earlier is not None:
            self._finish(earlier, skipped)

    def _direction(self, parameter: nn.Parameter, skipped: torch.Tensor | None) -> torch.Tensor:
        """Update the momentum of this rank's shard; return its Nesterov direction in the dtype of Newton-Schulz."""
        momentum = self._group_of(parameter)["momentum"]
        if parameter.grad is None:
            raise ValueError("a parameter of Muon has no gradient in this step; freeze it, or use another optimizer")
        state = self.state[parameter]
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(parameter, requires_grad=False)
        gradient, buffer = local_tensor(parameter.grad), local_tensor(state[_MOMENTUM])
        updated = buffer.lerp(gradient, 1 - momentum)
        buffer.copy_(updated if skipped is None else torch.where(skipped, buffer, updated))
        return gradient.lerp(updated, momentum).to(self._dtype)

    def _group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        return self.param_groups[self._group_numbers[parameter]]

    def _finish(self, transfer: Transfer, skipped: torch.Tensor | None) -> None:
        """Decay the weights of a bucket and add the orthogonalized directions."""
        for parameter in transfer.bucket.parameters:
            group = self._group_of(parameter)
            decay = 1 - group["lr"] * group["weight_decay"]
            local = local_tensor(parameter.detach())
            decayed = local * decay  # by a Python number: a bfloat16 tensor would round a decay near 1
            local.copy_(decayed if skipped is None else torch.where(skipped, local, decayed))
        for matrix, piece, result in transfer.apply(self._orthogonalized):
            self._add(matrix, piece, result, skipped)

    def _orthogonalized(self, matrix: Matrix, direction: torch.Tensor) -> torch.Tensor:
        """Return the update of a whole matrix on its owner."""
        return orthogonalize(direction, self._steps)

    def _add(self, matrix: Matrix, piece: Piece, result: torch.Tensor, skipped: torch.Tensor | None) -> None:
        shape = matrix.shape[:-3:-1] if matrix.is_transposed else matrix.shape
        rate = self._group_of(matrix.parameter)["lr"] * _learning_rate_scale(shape, self._scale)
        if skipped is not None:
            result = torch.where(skipped, 0.0, result)
        local_tensor(matrix.parameter.detach())[piece.local].add_(result, alpha=-rate)


class NorMuon(Muon):
    """Muon whose orthogonalized update is divided by the root mean square of each of its rows over recent steps.

    The result is rescaled: with scale=rms such that its root mean square is 0.2 learning rates, as in the paper; with
    scale=shape to its norm before the division, as in the authors' code.
    """

    found_inf: torch.Tensor | None = None
    """Set before a step: not 0 if the gradients are not finite, a scalar on the device."""

    def __init__(self, matrices: Sequence[Matrix], cfg: NorMuonConfig, groups: list[dict[str, Any]]) -> None:
        """Plan the exchanges, as `Muon` does. A collective if a parameter is sharded."""
        dtype = torch_dtype(cfg.ns_dtype)
        self._row_dtype = torch.promote_types(dtype, torch.float32)
        # The exchange has one dtype: a float32 number travels as the bits of two of bfloat16.
        attached = self._row_dtype.itemsize // dtype.itemsize
        super().__init__([replace(each, attached=attached) for each in matrices], cfg, groups)
        self._beta2 = cfg.beta2
        self._input_dims = {matrix.parameter: matrix.input_dim for matrix in matrices}

    def _direction(self, parameter: nn.Parameter, skipped: torch.Tensor | None) -> torch.Tensor:
        """Update the momentum of this rank's shard; return its direction, and the bits of the rows' mean squares."""
        direction = super()._direction(parameter, skipped)
        dim, state = self._input_dims[parameter], self.state[parameter]
        if _MEAN_SQUARE not in state:
            shape = [1 if each == dim else size for each, size in enumerate(parameter.shape)]
            state[_MEAN_SQUARE] = zeros_sharded_like(parameter, shape, self._row_dtype)
        rows = local_tensor(state[_MEAN_SQUARE]).to(self._row_dtype).movedim(dim, -1)  # (..., 1)
        bits = rows.reshape(-1).view(self._dtype).view(*rows.shape[:-1], -1)
        return torch.cat([direction, bits.movedim(-1, dim)], dim)

    def _orthogonalized(self, matrix: Matrix, direction: torch.Tensor) -> torch.Tensor:
        """Return the update of a whole matrix on its owner, and the bits of the new mean squares of its rows."""
        rows = direction.T if matrix.is_transposed else direction  # (out, in + attached)
        inputs = rows.shape[1] - matrix.attached
        mean_square = rows[:, inputs:].contiguous().view(self._row_dtype)  # (out, 1)
        update = orthogonalize(rows[:, :inputs], self._steps).to(self._row_dtype)
        mean_square = mean_square.lerp(update.square().mean(1, keepdim=True), 1 - self._beta2)
        divided = update / (mean_square.sqrt() + _ROW_EPS)
        # sqrt(min(out, in)) is the norm of a matrix whose singular values are 1.
        norm = update.norm() if self._scale is MatrixScale.shape else math.sqrt(min(update.shape))
        divided *= norm / divided.norm().clamp(min=_ROW_EPS)
        result = torch.cat([divided.to(self._dtype), mean_square.view(self._dtype)], 1)
        return result.T if matrix.is_transposed else result

    def _add(self, matrix: Matrix, piece: Piece, result: torch.Tensor, skipped: torch.Tensor | None) -> None:
        if not piece.is_attached:
            super()._add(matrix, piece, result, skipped)
            return
        dim = matrix.input_dim
        rows = result.movedim(dim, -1).contiguous().view(self._row_dtype).movedim(-1, dim)
        local = local_tensor(self.state[matrix.parameter][_MEAN_SQUARE])
        old = local[(*piece.local[:dim], slice(None), *piece.local[dim + 1 :])]
        old.copy_(rows if skipped is None else torch.where(skipped, old, rows.to(old.dtype)))


@dataclass(frozen=True, slots=True)
class _MuonParameters:
    """Trainable parameters of a model, divided between Muon and another optimizer."""

    matrices: list[Matrix]
    others: list[nn.Parameter]


def divide_parameters(model: nn.Module, anatomy: Anatomy, vectors: Container[nn.Parameter]) -> _MuonParameters:
    """Divide the trainable parameters: matrices within decoder layers, and the rest.

    The rest are embeddings, the head, norms, biases, routers, and anything outside the decoder layers.

    Args:
        vectors: Parameters that are vectors or stacks of vectors.
    """
    model_type = str(getattr(config_of(model), "model_type", ""))
    layers = tuple(f"{name}." for name in anatomy.layers)
    excluded = tuple(f"{name}." for name in (*anatomy.routers, anatomy.embedding, anatomy.head) if name)
    matrices: list[Matrix] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_matrix = parameter.dim() in (2, 3) and parameter not in vectors
        if not is_matrix or not name.startswith(layers) or name.startswith(excluded):
            others.append(parameter)
            continue
        if parameter.dim() == 3 and name.rpartition(".")[0] not in anatomy.experts:
            others.append(parameter)  # a convolution, or a stack of unknown meaning
            continue
        matrices += _matrices_of(name, parameter, anatomy, model_type)
    return _MuonParameters(matrices, others)


def _matrices_of(name: str, parameter: nn.Parameter, anatomy: Anatomy, model_type: str) -> list[Matrix]:
    """Return the matrices of a parameter: each expert, and each matrix of a fused projection."""
    shape, transposed = tuple(parameter.shape), name in anatomy.transposed
    full: list[Runs] = [(range(size),) for size in shape]
    fused = fused_matrices(name, shape, anatomy, model_type)
    variants: list[list[Runs]] = []
    if fused is None:
        variants.append(full)
    else:
        dim, runs_of_each = fused
        for runs in runs_of_each:
            variants.append([*full[:dim], runs, *full[dim + 1 :]])
    if len(shape) == 2:
        return [Matrix(parameter, tuple(runs), transposed) for runs in variants]
    experts: list[Any] = [(range(index, index + 1),) for index in range(shape[0])]
    return [Matrix(parameter, (expert, *runs[1:]), transposed) for expert in experts for runs in variants]
