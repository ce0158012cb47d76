"""The CUDA stub library, built once per test session, and the server process that loads it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = Path(__file__).parent / "cuda_stub.cpp"

Run = Callable[..., Any]
"""(name of a function of cases.py, **its arguments) -> what it returned; AssertionError with its traceback."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest test first: one worker runs it, the other the rest meanwhile."""
    items.sort(key=lambda item: not item.name.startswith("test_checks_run_on_a_cpu"))


def build_stub(folder: Path) -> Path:
    """Compile the stub against torch's headers into a folder, unless it is there; return the library."""
    library, root = folder / "libcuda_stub.so", Path(torch.__path__[0])
    with (folder / "cuda_stub.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            command = [
                "g++", "-std=c++20", "-O0", "-shared", "-fPIC", str(SOURCE), f"-I{root}/include",
                f"-I{root}/include/torch/csrc/api/include", f"-L{root}/lib", "-lc10", "-ltorch_cpu",
                f"-Wl,-rpath,{root}/lib", "-o", f"{library}.part",
            ]  # fmt: skip
            subprocess.run(command, check=True)
            os.replace(f"{library}.part", library)
    return library


@contextmanager
def started_server(stub: Path, root: Path = SOURCE.parents[2]) -> Iterator[Run]:
    """Yield a function that runs a case on fake CUDA tensors in a separate process, with the code in `root`."""
    command = [sys.executable, "-m", "tests.gpu_ready.server", str(stub)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root
    ) as server:

        def run(case: str, **arguments: Any) -> Any:
            server.stdin.write(json.dumps({"case": case, "arguments": arguments}) + "\n")
            server.stdin.flush()
            line = server.stdout.readline()
            answer = json.loads(line) if line else {"error": "the fake CUDA server exited"}
            assert "error" not in answer, answer["error"]
            return answer["result"]

        yield run
        server.stdin.close()
        server.wait(30)


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub library; one pytest worker compiles it for all workers."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA stub with; install g++")
    shared = tmp_path_factory.getbasetemp()
    return build_stub(shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared)


@pytest.fixture(scope="session")
def fake_cuda(stub: Path) -> Iterator[Run]:
    """Return a function that runs a case on fake CUDA tensors in a separate process."""
    with started_server(stub) as run:
        yield run
