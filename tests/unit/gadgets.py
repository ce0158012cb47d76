"""Malicious pickles for tests: each creates a canary file if it is unpickled."""

from __future__ import annotations

import bz2
import gzip
import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch


class _Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


class _CallsLater(_Calls):
    """The same call, nested in a dict item."""

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter([("weights", _Calls(self.function, *self.arguments))])


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _zipped(payload: bytes, name: str = "archive/data.pkl") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, payload)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def _saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def _numpy(value: Any, *, many: bool) -> bytes:
    buffer, array = io.BytesIO(), np.array([value], dtype=object)
    np.savez(buffer, weights=array) if many else np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def gadgets(canary: Path) -> dict[str, tuple[bytes, Callable[[bytes], Any]]]:
    """Return thirty malicious pickles by name: (file content, function that would execute it)."""
    import os
    import runpy
    import subprocess
    import time
    import timeit

    script = canary.with_suffix(".py")
    script.write_text(f"open({str(canary)!r}, 'w').close()\n")
    code, shell = script.read_text(), f"touch {canary}"
    made = _Calls(exec, code)
    loads: Callable[[bytes], Any] = pickle.loads
    raw = {
        **{f"exec, protocol {number}": pickle.dumps(made, number) for number in range(6)},
        "eval": pickle.dumps(_Calls(eval, f"open({str(canary)!r}, 'w')")),
        "os.system": pickle.dumps(_Calls(os.system, shell)),
        "subprocess": pickle.dumps(_Calls(subprocess.check_call, ["touch", str(canary)])),
        "runpy": pickle.dumps(_Calls(runpy.run_path, str(script))),
        "timeit": pickle.dumps(_Calls(timeit.timeit, code, "pass", time.perf_counter, 1)),
        "open": pickle.dumps(_Calls(open, str(canary), "w")),
        "in a dict": pickle.dumps(_CallsLater(exec, code)),
        "deep in a state": pickle.dumps({"state": [{"step": 1, "extra": (made,)}]}),
        "in an OrderedDict of tensors": pickle.dumps({"weight": torch.zeros(2), "bias": made}),
        "INST": b"(" + _text(shell) + b"ios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + _text(shell) + b"o.",
        "GLOBAL, REDUCE": b"cbuiltins\nexec\n" + _text(code).join((b"(", b"tR.")),
        "STACK_GLOBAL": b"\x80\x04" + _text("os") + _text("system") + b"\x93" + _text(shell) + b"\x85R.",
        "NEWOBJ, BUILD": b"\x80\x02}" + _text("x") + b"cos\nsystem\n" + _text(shell) + b"\x85Rs.",
        "memo, late": b"\x80\x02cos\nsystem\nq\x00h\x00" + _text(shell) + b"\x85q\x01R0N.",
        "before a JSON object": pickle.dumps(made) + b'{"step": 1}',
    }
    found: dict[str, tuple[bytes, Callable[[bytes], Any]]] = {name: (payload, loads) for name, payload in raw.items()}
    plain = pickle.dumps(made)
    unsafe: Callable[[bytes], Any] = lambda data: torch.load(io.BytesIO(data), weights_only=False)  # noqa: E731
    array: Callable[[bytes], Any] = lambda data: np.load(io.BytesIO(data), allow_pickle=True)  # noqa: E731
    found |= {
        "torch.save": (_saved({"model": made}), unsafe),
        "torch.save, old": (_saved({"model": made}, _use_new_zipfile_serialization=False), unsafe),
        "zip": (_zipped(plain), lambda data: loads(zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl"))),
        "gzip": (gzip.compress(plain), lambda data: loads(gzip.decompress(data))),
        "bz2": (bz2.compress(plain), lambda data: loads(bz2.decompress(data))),
        "zlib": (zlib.compress(plain), lambda data: loads(zlib.decompress(data))),
        "npy": (_numpy(made, many=False), array),
        "npz": (_numpy(made, many=True), lambda data: array(data)["weights"]),
    }
    return found
