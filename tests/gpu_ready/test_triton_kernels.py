"""The GPU kernels that unpack NF4 and compute SwiGLU, interpreted on the CPU by Triton, and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.optional import need_triton

NF4 = """
import torch
from components.models.quantization import BLOCK, BLOCK_BYTES, level_pairs, pack, unpack
from components.models.triton_kernels import launch_unpack

torch.manual_seed(0)
for rows, columns in ((5, 64), (3, 200), (2, 1100)):
    packed, pairs = pack(torch.randn(rows, columns)), level_pairs()
    for dtype in (torch.float32, torch.float16):
        expected = unpack(packed, columns, pairs, dtype)
        values = launch_unpack(packed, columns, pairs, dtype, BLOCK, BLOCK_BYTES)
        assert torch.equal(values, expected), (rows, columns, dtype)
    # The interpreter truncates to bfloat16, where a GPU rounds: up to one unit in the last of 8 bits.
    exact = unpack(packed, columns, pairs, torch.float32)
    rounded = launch_unpack(packed, columns, pairs, torch.bfloat16, BLOCK, BLOCK_BYTES)
    assert torch.allclose(rounded.float(), exact, rtol=2**-7, atol=0)
"""

SWIGLU = """
import torch
import torch.nn.functional as F
from components.models.triton_kernels import launch_swiglu, launch_swiglu_backward

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
COMPILES = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from components.models.quantization import BLOCK, BLOCK_BYTES
from components.models.triton_kernels import _swiglu, _swiglu_backward, _unpack_blocks

CONSTANTS = {"SIZE": BLOCK, "SIZE_BYTES": BLOCK_BYTES}
INPUTS = {"packed": "*u8", "pairs": "*fp32"}
SIZES = {"blocks", "columns", "width", "stride"}
ROUNDS = {"bf16": "cvt.rn.bf16", "fp16": "cvt.rn.f16"}  # to nearest
for kernel, dtypes in (
    (_unpack_blocks, ("bf16", "fp16", "fp32")),
    (_swiglu, ("bf16", "fp32", "fp64")),
    (_swiglu_backward, ("bf16", "fp32", "fp64")),
):
    for dtype in dtypes:
        names = {name: "i32" if name in SIZES else INPUTS.get(name, f"*{dtype}") for name in kernel.arg_names}
        constants = {name: value for name, value in CONSTANTS.items() if name in names}
        source = ASTSource(fn=kernel, signature=names | dict.fromkeys(constants, "constexpr"), constexprs=constants)
        compiled = compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
        assert compiled.asm["cubin"], (kernel, dtype)
        assert ROUNDS.get(dtype, "") in compiled.asm["ptx"], (kernel, dtype)
        print(kernel.fn.__name__, dtype)
"""


def run_without_gpu(code: str, *arguments: str, interprets: bool, folder: Path) -> str:
    """Run Python code in a new process, with Triton's interpreter or its compiler, and return what it prints."""
    need_triton()
    variables = {"TRITON_INTERPRET": str(int(interprets)), "TRITON_CACHE_DIR": str(folder)}
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("code", [pytest.param(NF4, id="NF4"), pytest.param(SWIGLU, id="SwiGLU")])
def test_a_kernel_equals_plain_pytorch(code: str, tmp_path: Path) -> None:
    run_without_gpu(code, interprets=True, folder=tmp_path)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernels_compile_in_every_dtype(capability: int, tmp_path: Path) -> None:
    """A100, H100 and B200: three kernels in three dtypes each."""
    printed = run_without_gpu(COMPILES, str(capability), interprets=False, folder=tmp_path)
    assert len(printed.splitlines()) == 9
