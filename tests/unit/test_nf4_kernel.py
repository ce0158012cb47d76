"""The GPU kernel that unpacks NF4, interpreted on the CPU by Triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.optional import need_triton

COMPARE = """
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


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from components.models.quantization.nf4_kernel import _unpack_blocks

kinds = {"packed": "*u8", "pairs": "*fp32", "values": "*bf16", "row_bytes": "i32", "blocks": "i32", "columns": "i32"}
compiled = compile(ASTSource(fn=_unpack_blocks, signature=kinds, constexprs={}), target=GPUTarget("cuda", 90, 32))
assert compiled.asm["cubin"]
assert "cvt.rn.bf16" in compiled.asm["ptx"]  # rounds to nearest
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "interprets"), [(COMPARE, "1"), (COMPILE, "0")], ids=["values", "compiles for an H100"]
)
def test_the_kernel_equals_unpacking_in_plain_pytorch(
    code: str, interprets: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need_triton()
    monkeypatch.setenv("TRITON_INTERPRET", interprets)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
