"""`python -m tests.gpu_ready.server STUB`: load the stub, import torch, and fork for each case that stdin names.

A line of stdin is {"case": name, "arguments": {...}}; a line of stdout is {"result": ...} or {"error": traceback}.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback


def main(stub: str) -> None:
    ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)  # before torch, whose CPU build has no hooks of its own
    import torch

    from tests.gpu_ready import cases, device

    torch.set_num_threads(1)
    cases.import_all()
    device.install()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a case prints is no answer
    for line in sys.stdin:
        answers.write(_fork(cases, json.loads(line)) + "\n")
        answers.flush()


def _fork(cases: object, asked: dict) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = {"result": getattr(cases, asked["case"])(**asked["arguments"])}
        except BaseException:
            answer = {"error": traceback.format_exc()}
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return answer or json.dumps({"error": f"the case ended with status {status} and no answer"})


if __name__ == "__main__":
    main(sys.argv[1])
