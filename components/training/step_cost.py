"""What an optimizer step costs: its FLOPs, its collectives, and a profile.

The FLOPs are model FLOPs for the MFU, not hardware FLOPs: the matmuls and the attention of the forward and backward,
without recomputation, padding, attention across documents and embedding lookups. A matrix parameter costs 6 FLOPs per
token (2 in the forward, 4 in the backward), a frozen one 4; of a mixture of experts, those of the experts a token is
routed to. Attention costs 6 x heads x (key head_dim + value head_dim) per pair of a query token and a token it attends
to.

Of each collective the process group, the number of calls and the bytes are recorded. torch's CommDebugMode counts
operators, but records neither groups nor bytes, misses sends and receives, and fails around compiled layers. Its
handling of DTensors is adopted here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from components.batch import Batch
from components.config.schema.data import IGNORED
from components.config.schema.run import LoggingConfig, ProfileConfig
from components.distributed.mesh import Mesh, Ranks, groups_of_mesh
from components.models.anatomy import (
    FULL,
    SLIDING,
    WITHOUT_MASK,
    Anatomy,
    config_of,
    encoder_parameters,
    read_anatomy,
)
from components.protocol.run_files import atomic_path, atomic_write, own_folder

_PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.5,
    "NVIDIA H200": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA B200": 2250.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
}
"""torch.cuda.get_device_name -> dense bfloat16 peak in TFLOP/s, from the vendor's data sheet."""
_OPERATIONS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "recv",
    "send",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
"""Operation names in the table: an operator is listed under the first of these that its name contains."""
_STATE_SIZES = {
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"): 6,
    ("linear_num_heads", "linear_head_dim", "linear_head_dim"): 6,
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"): 4,
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"): 4,
}
"""Keys of config.json whose product is the size of a layer's recurrent state -> FLOPs of a forward per token and
element: 2 for each product of the state with a vector and for each outer product that is added to it."""
_RECORDED_STEP = 2
"""Step of a run that is recorded, from 1; the first step also runs one-time initialization."""


@dataclass(frozen=True, slots=True)
class _ModelFlops:
    """FLOPs of a forward and backward of the whole model, independent of the mesh."""

    per_token: float
    """Matmuls with parameters, and recurrences."""
    per_pair: tuple[tuple[int | None, int], ...] = ()
    """Attention, per kind of layer: (sliding window or None, FLOPs per pair of tokens summed over these layers)."""

    def of(self, lengths: Iterable[int]) -> float:
        """Return the FLOPs for documents of the given lengths in tokens."""
        lengths = list(lengths)
        attention = sum(flops * sum(pairs(length, window) for length in lengths) for window, flops in self.per_pair)
        return self.per_token * sum(lengths) + attention


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Model FLOPs and peak of a run, from which each step's time at peak is computed."""

    flops: _ModelFlops | None
    peak: float | None
    """FLOP/s of all devices together; None if unknown."""
    why: str
    """Source of the peak, or why the MFU is left out; empty on CPUs, where it is never reported."""
    counts: bool = True
    """Whether this rank's rows count in sums over all ranks; False if another rank reads the same rows."""

    def __str__(self) -> str:
        return f"MFU: {self.why}" if self.why else ""

    def seconds_at_peak(self, batches: Iterable[Batch]) -> float:
        """Return the seconds that all devices would need at peak for this rank's micro-batches; 0 if unknown.

        Args:
            batches: On the host: the lengths of documents are read without waiting for the device.
        """
        if self.flops is None or self.peak is None or not self.counts:
            return 0.0
        return sum(self.flops.of(_document_lengths(batch)) for batch in batches) / self.peak


def step_flops(
    model: nn.Module,
    cfg: LoggingConfig,
    mesh: Mesh,
    device: torch.device,
    compute_dtype: torch.dtype,
    anatomy: Anatomy | None = None,
) -> StepFlops:
    """Return the model FLOPs and the peak of a run. Call it on the whole model, before it is parallelized."""
    tflops, why = peak_tflops(cfg, device, compute_dtype)
    if tflops is None:
        return StepFlops(None, None, why)
    try:
        flops = model_flops(model, anatomy)
    except NotImplementedError as reason:
        return StepFlops(None, None, f"left out: {reason}")
    counts = mesh.counts_tokens and mesh.rank("cp") == 0
    return StepFlops(flops, tflops * 1e12 * mesh.shape.world, why, counts)


def peak_tflops(cfg: LoggingConfig, device: torch.device, dtype: torch.dtype) -> tuple[float | None, str]:
    """Return the peak of one device in TFLOP/s, or None if unknown, and the explanation for the banner."""
    if cfg.peak_tflops is not None:
        return cfg.peak_tflops, f"relative to {cfg.peak_tflops:g} TFLOP/s per device (logging.peak_tflops)"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type}"
    kind = str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        return None, ""
    if name not in _PEAK_TFLOPS or dtype not in (torch.bfloat16, torch.float16):
        return None, f"left out: the peak of {name} in {kind} is unknown; set logging.peak_tflops"
    return _PEAK_TFLOPS[name], f"relative to {_PEAK_TFLOPS[name]:g} TFLOP/s per device, the peak of {name} in {kind}"


def model_flops(model: nn.Module, anatomy: Anatomy | None = None) -> _ModelFlops:
    """Count the FLOPs of a transformers model from its modules and its anatomy (None: read it).

    A recurrence counts token by token: reading a state of heads x keys x values by the key, adding to it, and reading
    it by the query (delta rule), or the last two (Mamba-2); kernels that work on chunks of tokens compute more.

    Raises NotImplementedError for layers of other types.
    """
    anatomy = anatomy or read_anatomy(model)
    per_token, unused = 0.0, encoder_parameters(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        is_expert = name in anatomy.experts
        for leaf, parameter in module.named_parameters(recurse=False):
            if (3 if is_expert else 2) <= parameter.dim() <= 3 and f"{name}.{leaf}" not in unused:
                share = _experts_per_token(anatomy) / parameter.shape[0] if is_expert else 1.0
                values = parameter.numel() if parameter.is_floating_point() else _packed_values(module)
                per_token += (6 if parameter.requires_grad else 4) * values * share
    return _ModelFlops(per_token + _of_states(model, anatomy), _per_pair(anatomy))


def pairs(length: int, window: int | None = None) -> int:
    """Return the number of (query, key) pairs of causal attention in a document, each token attending to itself too."""
    near = length if window is None else min(length, window)
    return near * (near + 1) // 2 + (length - near) * near


def _document_lengths(batch: Batch) -> list[int]:
    """Return the lengths in tokens of a micro-batch's documents without padding; [] for a batch on a GPU.

    Reading a GPU tensor would make the host wait. Every sample ends with a target token, so whatever follows the last
    target of a row is padding.
    """
    targets, bounds = batch.targets, batch.document_bounds  # (micro_batch, seq)
    if targets.device.type != "cpu":
        return []
    target_ends = torch.arange(2, targets.shape[1] + 2)  # a target is the token after its position
    ends = torch.where(targets != IGNORED, target_ends, 0).amax(1)  # (micro_batch,)
    if bounds is None:
        return ends.tolist()
    bounds = torch.minimum(bounds, ends[:, None].to(bounds.dtype))
    return [length for length in bounds.diff(dim=1).flatten().tolist() if length > 0]


def _packed_values(module: Any) -> int:
    """Return the number of weights of a quantized linear layer, whose packed tensor has fewer elements."""
    return module.in_features * module.out_features


def _experts_per_token(anatomy: Anatomy) -> int:
    if anatomy.experts_per_token is None:
        raise NotImplementedError("the config does not set num_experts_per_tok, the number of experts per token")
    return anatomy.experts_per_token


def _of_states(model: nn.Module, anatomy: Anatomy) -> float:
    """Return the FLOPs per token of the recurrences of all layers, forward and backward."""
    layers = sum(kind in ("linear_attention", "hybrid") for kind in anatomy.kinds)
    config = config_of(model)
    if not anatomy.mixers or not layers or config is None:
        return 0.0
    values = config.get_text_config().to_dict()
    for keys, flops in _STATE_SIZES.items():
        sizes = [size for key in keys if isinstance(size := values.get(key), int)]
        if len(sizes) == len(keys):
            return 3.0 * flops * layers * math.prod(sizes)
    raise NotImplementedError(f"the config of {config.model_type} does not give the size of the recurrent state")


def _per_pair(anatomy: Anatomy) -> tuple[tuple[int | None, int], ...]:
    if unknown := set(anatomy.kinds) - {FULL, SLIDING, *(WITHOUT_MASK if anatomy.mixers else ())}:
        raise NotImplementedError(f"the FLOPs of layers of {', '.join(sorted(unknown))} are unknown")
    if len(anatomy.layer_heads) != len(anatomy.kinds):
        raise NotImplementedError("the config does not give the number and size of the heads of each layer")
    flops: Counter[int | None] = Counter()
    for kind, own in zip(anatomy.kinds, anatomy.layer_heads, strict=True):
        if kind in (FULL, SLIDING, "hybrid"):
            flops[anatomy.window if kind == SLIDING else None] += 6 * own.heads * (own.keys + own.values)
    return tuple(flops.items())


@dataclass(slots=True)
class _Volume:
    """Calls and bytes of one operation over one group."""

    calls: int = 0
    bytes: int = 0
    """Input bytes of this rank, see `record_traffic`."""


@dataclass(slots=True)
class Traffic:
    """Recorded operations."""

    volumes: dict[tuple[Ranks, str], _Volume] = field(default_factory=dict)
    """(global ranks of the group, operation) -> volume, in the order of the first call."""

    @property
    def groups(self) -> set[Ranks]:
        """Groups with at least one recorded operation."""
        return {group for group, _ in self.volumes}


@contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Record every collective and point-to-point operation of this rank within the context, forward and backward.

    Covers the operators of torch.distributed (FSDP2, DDP, direct calls) and the functional ones (DTensor), on any
    backend, inside compiled layers too. Groups of one rank move no data and are left out.

    Bytes are those of this rank's input tensors: its shard for an all-gather, the full input for a reduce-scatter,
    all-reduce or all-to-all, the sent or received tensor for a send or receive. (nccl-tests counts the larger of input
    and output, which for an all-gather is ranks x this number.) The hops of a ring or tree algorithm are not counted.
    """
    recorder = _Recorder()
    with recorder:
        yield recorder.traffic


@dataclass(frozen=True, slots=True)
class TrafficRow:
    """Row of the traffic table: one operation over one group."""

    group: str
    """Axes or views of the mesh with this group, or its ranks."""
    purpose: str
    operation: str
    calls: int
    bytes: int
    """Input bytes of this rank, see `record_traffic`."""


class StepTraffic:
    """Recorder of a run's second optimizer step; passes the table to `show`, or does nothing if not enabled."""

    def __init__(self, mesh: Mesh, show: Callable[[list[TrafficRow]], None], *, enabled: bool) -> None:
        self._mesh, self._show, self._enabled = mesh, show, enabled
        self._steps = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one optimizer step within this context."""
        self._steps += 1
        if not self._enabled or self._steps != _RECORDED_STEP:
            yield
            return
        with record_traffic() as traffic:
            yield
        self._show(traffic_table(traffic, self._mesh))


def traffic_table(traffic: Traffic, mesh: Mesh) -> list[TrafficRow]:
    """Return the rows of a recording in the order of `groups_of_mesh`; groups outside the mesh come last."""
    mesh_groups = {each.ranks: each for each in groups_of_mesh(mesh)}
    order = [*mesh_groups, *(ranks for ranks in traffic.groups if ranks not in mesh_groups)]
    rows = []
    for (ranks, operation), volume in sorted(traffic.volumes.items(), key=lambda item: order.index(item[0][0])):
        axes = mesh_groups[ranks].axes if ranks in mesh_groups else f"ranks {', '.join(map(str, ranks))}"
        purpose = mesh_groups[ranks].purpose if ranks in mesh_groups else "not a group of the mesh"
        rows.append(TrafficRow(axes, purpose, operation, volume.calls, volume.bytes))
    return rows


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()
        self._arguments: dict[Any, tuple[int, list[int]] | None] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Disable the mode during compilation only; torch.compile otherwise fails under a dispatch mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor runs first; its collectives on local tensors are dispatched here again
        kwargs = kwargs or {}
        if func not in self._arguments:
            self._arguments[func] = _find_arguments(func)
        positions = self._arguments[func]
        if positions is not None:
            group, inputs = positions
            values = dict(enumerate(args)) | {
                index: kwargs[argument.name]
                for index, argument in enumerate(func._schema.arguments)
                if argument.name in kwargs
            }
            self._count(_operation(func), values[group], [values.get(index) for index in inputs])
        return func(*args, **kwargs)

    def _count(self, operation: str, handle: Any, inputs: list[Any]) -> None:
        ranks = _ranks(handle)
        if len(ranks) == 1:
            return
        volume = self.traffic.volumes.setdefault((ranks, operation), _Volume())
        volume.calls += 1
        if operation != "barrier":
            tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
            volume.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _find_arguments(func: Any) -> tuple[int, list[int]] | None:
    """Return the positions of the group and the input tensors among an operator's arguments; None without a group.

    Arguments are found by name, so that no list of operators has to be maintained.
    """
    # Higher-order operators have no schema.
    names = [argument.name for argument in func._schema.arguments] if isinstance(func, OpOverload) else []
    groups = [index for index, name in enumerate(names) if name in ("process_group", "group_name")]
    if not groups:
        return None
    return groups[0], [index for index, name in enumerate(names) if name.startswith(("input", "tensor"))]


def _operation(func: Any) -> str:
    name = func._schema.name.partition("::")[2].replace("_", "")
    return next((operation for operation in _OPERATIONS if operation.replace("_", "") in name), name)


def _ranks(handle: Any) -> Ranks:
    """Return the global ranks of an operator's group argument: a name, a ProcessGroup, or a boxed ProcessGroup."""
    if isinstance(handle, str):
        handle = _resolve_process_group(handle)  # type: ignore[arg-type]
    elif not isinstance(handle, dist.ProcessGroup):
        handle = dist.ProcessGroup.unbox(handle)
    return tuple(dist.get_process_group_ranks(handle))


class StepProfile:
    """Profiler of the steps in logging.profile, counted from the start of this attempt; no overhead in other steps.

    It writes RUN_DIR/profile/rank_N.json, a Chrome trace (chrome://tracing, perfetto.dev), and rank_N.txt, a table of
    operators.
    """

    def __init__(self, cfg: ProfileConfig, run_dir: str, report: Callable[[str], None]) -> None:
        """Set up the profiler of this rank; `report` prints the line about the written files."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._cfg, self._report = cfg, report
        self._files = Path(run_dir) / "profile" / f"rank_{rank}"
        self._enabled = cfg.enabled and rank in cfg.ranks
        self._steps = 0
        self._profiler: torch.profiler.profile | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose one optimizer step; start and stop the profiler at the configured steps."""
        self._steps += 1
        if self._enabled and self._steps == self._cfg.start:
            self._profiler = torch.profiler.profile(profile_memory=self._cfg.memory, with_stack=self._cfg.stacks)
            self._profiler.start()
        yield
        if self._profiler is not None and self._steps == self._cfg.start + self._cfg.steps - 1:
            self._finish(self._profiler)
            self._profiler = None

    def finish(self) -> None:
        """Report that an attempt, which may have resumed, ended before the configured steps."""
        first, last = self._cfg.start, self._cfg.start + self._cfg.steps - 1
        if self._cfg.enabled and self._steps < last:
            self._report(
                f"no profile of steps {first} to {last} of this attempt, which had {self._steps}: logging.profile "
                "counts from the start of an attempt; set logging.profile.start and logging.profile.steps lower"
            )

    def _finish(self, profiler: torch.profiler.profile) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the kernels that these steps have launched belong to the trace
        profiler.stop()
        own_folder(self._files.parent)
        trace, table = self._files.with_suffix(".json"), self._files.with_suffix(".txt")
        with atomic_path(trace) as unpublished:
            profiler.export_chrome_trace(str(unpublished))
        by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        atomic_write(table, profiler.key_averages().table(sort_by=by, row_limit=60) + "\n")
        last = self._cfg.start + self._cfg.steps - 1
        self._report(f"profile of steps {self._cfg.start} to {last} of this attempt: {trace}, {table}")
