"""The GPU kernels that unpack NF4 and compute SwiGLU, interpreted on the CPU by Triton, and compiled for an H100."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.optional import need_triton

NF4 = """
import torch
from components.models.quantization.nf4 import level_pairs, pack, unpack
from components.models.quantization.nf4_kernel import launch_unpack

torch.manual_seed(0)
for rows, columns in ((5, 64), (3, 200), (2, 1100)):
    packed, pairs = pack(torch.randn(rows, columns)), level_pairs()
    for dtype in (torch.float32, torch.float16):
        expected = unpack(packed, columns, pairs, dtype)
        assert torch.equal(launch_unpack(packed, columns, pairs, dtype), expected), (rows, columns, dtype)
    # The interpreter truncates to bfloat16, where a GPU rounds: up to one unit in the last of 8 bits.
    exact = unpack(packed, columns, pairs, torch.float32)
    assert torch.allclose(launch_unpack(packed, columns, pairs, torch.bfloat16).float(), exact, rtol=2**-7, atol=0)
"""

NF4_COMPILES = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from components.models.quantization.nf4_kernel import _unpack_blocks

kinds = {"packed": "*u8", "pairs": "*fp32", "values": "*bf16", "row_bytes": "i32", "blocks": "i32", "columns": "i32"}
compiled = compile(ASTSource(fn=_unpack_blocks, signature=kinds, constexprs={}), target=GPUTarget("cuda", 90, 32))
assert compiled.asm["cubin"]
assert "cvt.rn.bf16" in compiled.asm["ptx"]  # rounds to nearest
"""
SWIGLU = """
import torch
import torch.nn.functional as F
from components.models.swiglu_kernel import launch_swiglu, launch_swiglu_backward

torch.manual_seed(0)
for shape, dtype in (((2, 3, 1100), torch.float64), ((5, 64), torch.float32), ((0, 8), torch.float32)):
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    joint = torch.randn(*shape[:-1], 2 * shape[-1], dtype=dtype)
    gate, up = joint.chunk(2, -1)  # rows are not next to each other
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    grad = torch.randn(*shape, dtype=dtype)
    expected = F.silu(gate) * up
    expected.backward(grad)
    results = (launch_swiglu(gate.detach(), up.detach()), *launch_swiglu_backward(grad, gate.detach(), up.detach()))
    for result, reference in zip(results, (expected, gate.grad, up.grad), strict=True):
        assert torch.allclose(result, reference, rtol=tolerance, atol=tolerance), (shape, dtype)
"""
SWIGLU_COMPILES = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from components.models.swiglu_kernel import _swiglu, _swiglu_backward

TENSORS = {"grad", "gate", "up", "grad_gate", "grad_up", "product"}
for kernel in (_swiglu, _swiglu_backward):
    kinds = {name: "*bf16" if name in TENSORS else "i32" for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=kinds, constexprs={})
    compiled = compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.asm["cubin"]
    assert "cvt.rn.bf16" in compiled.asm["ptx"]  # rounds to nearest
"""
KERNELS = {"NF4": (NF4, NF4_COMPILES), "SwiGLU": (SWIGLU, SWIGLU_COMPILES)}


@pytest.mark.slow
@pytest.mark.parametrize("interprets", [True, False], ids=["values", "compiles for an H100"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_equals_plain_pytorch(
    kernel: str, interprets: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need_triton()
    code = KERNELS[kernel][0 if interprets else 1]
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interprets)))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
