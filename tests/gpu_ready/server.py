"""`python -m tests.gpu_ready.server STUB`: load the stub, import torch, and fork for each case read from stdin.

A line of stdin is {"case": name, "arguments": {...}}; a line of stdout is {"result": ...} or {"error": traceback}.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback


def main(stub: str) -> None:
    library = ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)  # CUDA hooks are created when torch is imported
    import torch

    library.replace_cuda()

    from tests.gpu_ready import cases, device

    torch.set_num_threads(1)
    cases.import_all()
    device.install()
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # redirect output of cases to stderr
    for line in sys.stdin:
        results.write(_fork(cases, json.loads(line)) + "\n")
        results.flush()


def _fork(cases: object, request: dict) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            result = {"result": getattr(cases, request["case"])(**request["arguments"])}
        except BaseException:
            result = {"error": traceback.format_exc()}
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(result))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        result = pipe.read()
    _, status = os.waitpid(child, 0)
    return result or json.dumps({"error": f"the case exited with status {status} without a result"})


if __name__ == "__main__":
    main(sys.argv[1])
