"""A fake CUDA device, and a record of its operators. CUDA tensors have shapes but no values; CPU tensors are real."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from components.planning.fake_rank import _PROPAGATION

MEMORY = 85_000_000_000
"""Bytes of the device's memory, those of an H100."""
HOST_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal"}
"""Operators whose result the host must read from the device."""


class FakeCuda(FakeTensorMode):
    """Makes every CUDA tensor fake; operators on CPU tensors run normally."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if func is torch.ops.aten.addmm.dtype_out:  # torch 2.11 decomposes it without its `out_dtype`
            return kwargs["out"]
        if any(isinstance(leaf, FakeTensor) or _is_cuda(leaf) for leaf in leaves):
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@dataclass
class Record(TorchDispatchMode):
    """Operators that one rank runs on its device, and the host syncs among them."""

    seq_len: int
    """Tokens of a row."""
    operators: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    """Operators and project lines at which the host waits for the device."""
    masks: Counter[str] = field(default_factory=Counter)
    """Shapes of the attention masks."""
    square: Counter[str] = field(default_factory=Counter)
    """Operators whose result has a value for every pair of tokens of a row, and its shape."""
    longest: list[Any] = field(default_factory=list)
    """(max_q, max_k) of each call of the varlen kernel."""
    key_heads: set[int] = field(default_factory=set)
    """Numbers of key heads in calls of the varlen kernel."""
    launches: Counter[str] = field(default_factory=Counter)
    """Operators that launch a kernel: all on CUDA tensors but those that only allocate or describe a tensor anew."""
    moved: Counter[str] = field(default_factory=Counter)
    """Bytes that these operators read and write, if each reads and writes every tensor once."""
    to_host: int = 0
    """Tensors that are copied from the device to the host without waiting."""

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        self.operators[name] += 1
        if name in HOST_WAITS and any(map(_is_cuda, tree_leaves((args, kwargs)))):
            self.waits[f"{name} at {_line()}"] += 1
        if name == "copy_" and not _is_cuda(args[0]) and _is_cuda(args[1]):
            self.to_host += 1
        if _is_blocking_copy(name, args, kwargs):
            self.waits[f"blocking copy at {_line()}"] += 1
        if "scaled_dot_product" in name and "backward" not in name:
            mask = args[3] if len(args) > 3 and isinstance(args[3], torch.Tensor) else None
            if mask is not None:
                self.masks[str(tuple(mask.shape))] += 1
        if name == "_varlen_attn":
            self.longest.append((args[5], args[6]))
            self.key_heads.add(args[1].shape[1])
        result = func(*args, **kwargs)
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and _is_square(each, self.seq_len):
                self.square[f"{name} {tuple(each.shape)} at {_line()}"] += 1
        tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
        if not _only_describes(func) and any(map(_is_cuda, tensors)):
            self.launches[name] += 1
            self.moved[name] += sum(each.numel() * each.element_size() for each in tensors if _is_cuda(each))
        return result


def _only_describes(func: Any) -> bool:
    """Return whether an operator launches no kernel: a view, an allocation, or bookkeeping of streams."""
    name, schema = func.overloadpacket.__name__, func._schema
    if func.namespace == "prim":
        return True
    views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return views or name.startswith(("empty", "new_empty", "detach", "_unsafe_view", "record_stream", "wait_tensor",
                                     "lift_fresh", "set_", "resize_", "_has_compatible"))  # fmt: skip


def _is_square(tensor: torch.Tensor, seq_len: int) -> bool:
    """Return whether the last two dims are a whole row and a whole row or a cp shard of one."""
    rows, columns = tensor.shape[-2:] if tensor.dim() > 1 else (0, 0)
    return columns == seq_len and rows in (seq_len, seq_len // 2, seq_len // 4)


@torch.library.custom_op("meshbook_tests::silu_backward", mutates_args=())
def _silu_backward(grad: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.silu_backward(grad, values)


@_silu_backward.register_fake
def _(grad: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(values)


class _Silu(torch.autograd.Function):
    """SiLU whose backward is one kernel, as on a real device; torch decomposes aten's for fake tensors."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values)
        return torch.ops.aten.silu(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _silu_backward(grad, ctx.saved_tensors[0])


def _silu(values: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return _Silu.apply(values)


def install() -> None:
    """Patch torch's Python code to accept the device. Call once, after all imports and before the first fake tensor."""
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(total_memory=MEMORY)
    torch.cuda.get_rng_state = lambda device=0: torch.zeros(16, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda state, device=0: None
    torch.nn.functional.silu = _silu
    dist.all_gather_object = _gather_copies
    cpu = torch.cpu
    cpu.Stream.record_event = lambda self, event=None: event or cpu.Event()  # type: ignore[method-assign]
    handle = SimpleNamespace(
        Stream=cpu.Stream, stream=cpu.stream, current_stream=cpu.current_stream, Event=cpu.Event,
        current_device=lambda: 0, device_count=lambda: 1, is_initialized=lambda: True, set_device=lambda _: None,
    )  # fmt: skip
    torch.accelerator.current_stream = cpu.current_stream
    torch.cuda.Stream = lambda device=None: cpu.Stream()
    torch.cuda.stream, torch.cuda.current_stream = cpu.stream, lambda device=None: cpu.current_stream()
    propagate = getattr(ShardingPropagator, _PROPAGATION)

    def propagate_on_device(*args: Any) -> Any:
        with torch.device("cuda"):  # in torch 2.11 the tensors that DTensor makes for this are on the default device
            return propagate(*args)

    setattr(ShardingPropagator, _PROPAGATION, propagate_on_device)
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed") and hasattr(module, "_get_device_handle"):
            module._get_device_handle = lambda device_type="cuda": handle  # type: ignore[attr-defined]


def _gather_copies(outputs: list[Any], value: Any, group: Any = None) -> None:
    outputs[:] = [value] * len(outputs)


def _is_cuda(leaf: Any) -> bool:
    device = leaf if isinstance(leaf, torch.device) else getattr(leaf, "device", None)
    return isinstance(device, torch.device) and device.type == "cuda"


def _is_blocking_copy(name: str, args: Any, kwargs: Any) -> bool:
    if name == "_to_copy":
        target, source = kwargs.get("device"), args[0].device
        non_blocking = kwargs.get("non_blocking", False)
    elif name in ("copy_", "_foreach_copy_"):
        pair = (args[0], args[1]) if name == "copy_" else (args[0][0], args[1][0])
        target, source = (each.device for each in pair)
        non_blocking = (args[2] if len(args) > 2 else None) or kwargs.get("non_blocking", False)
    else:
        return False
    return target is not None and {target.type, source.type} == {"cpu", "cuda"} and not non_blocking


def _line() -> str:
    frame = sys._getframe(2)
    while frame is not None and "/components/" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return "torch"
    return f"components/{frame.f_code.co_filename.partition('/components/')[2]}:{frame.f_lineno}"
