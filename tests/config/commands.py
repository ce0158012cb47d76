"""A server that runs command lines of recipes, each in its own process, without the start-up time of an interpreter.

The server imports the launcher and Hydra once, but never torch. For each command it forks a child that runs the recipe
like `python recipe.py ARGUMENTS`, and returns its exit status, its output and whether it imported torch.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PLACEHOLDER = """
from components.config.schema import {schema}
from components.launch import recipe

@recipe("{name}")
def main(cfg: {schema}) -> None:
    {body}

main()
"""


def placeholder_recipe(folder: Path, name: str, schema: str, body: str = 'print("started")') -> Path:
    """Write a recipe with the config of a real one, which only runs `body`."""
    file = folder / f"{name}.py"
    file.write_text(PLACEHOLDER.format(name=name, schema=schema, body=body))
    return file


@dataclass(frozen=True)
class Ended:
    """Exit status and output of a command."""

    status: int
    output: str
    errors: str
    imported_torch: bool
    cpu_seconds: float
    """CPU time, without the start of the interpreter and the imports that all commands share."""


class Commands:
    """Client of the server; see `served`."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server = server
        self._folder = folder

    def run(self, recipe: Path | str, arguments: Sequence[str], cwd: Path, **environment: str) -> Ended:
        """Run `python RECIPE ARGUMENTS` in `cwd` with additional environment variables."""
        request = {"argv": [str(recipe), *arguments], "cwd": str(cwd), "environment": environment}
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        output, errors = ((self._folder / name).read_text() for name in ("out", "err"))
        return Ended(answer["status"], output, errors, answer["torch"], answer["cpu"])


@contextmanager
def served() -> Iterator[Commands]:
    """Run the server within the `with` block."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MESHBOOK_")}
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as hub:
        reachable = f"http://127.0.0.1:{hub.getsockname()[1]}"
        server = subprocess.Popen(
            [sys.executable, __file__, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"CUDA_VISIBLE_DEVICES": "", "HF_ENDPOINT": reachable},
        )
        try:
            yield Commands(server, Path(folder))
        finally:
            server.communicate()


def _serve(folder: Path) -> None:
    from components.config.compose import command_line
    from components.config.schema import FinetuneConfig
    from components.launch import local, open_run  # noqa: F401  (needed by every command; imported once)

    # Fills the caches of Hydra and omegaconf, which the children inherit.
    command_line.compose_from_command_line("finetune", FinetuneConfig, folder, arguments=[])
    gc.disable()  # children are short-lived

    for line in sys.stdin:
        request = json.loads(line)
        with (folder / "out").open("w") as output, (folder / "err").open("w") as errors:
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reader)
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                _run(request, writer)
            os.close(writer)
            with os.fdopen(reader) as pipe:
                imported = pipe.read()
            _, status, used = os.wait4(child, 0)
        cpu = used.ru_utime + used.ru_stime
        answer = {"status": os.waitstatus_to_exitcode(status), "torch": imported == "torch", "cpu": cpu}
        print(json.dumps(answer), flush=True)


def _run(request: dict, writer: int) -> None:
    os.chdir(request["cwd"])
    os.environ |= request["environment"]
    sys.argv = request["argv"]
    sys.path.insert(0, str(Path(request["argv"][0]).parent))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status: object = 1
    atexit._clear()
    try:
        runpy.run_path(request["argv"][0], run_name="__main__")
        status = 0
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writer, b"torch" if "torch" in sys.modules else b"")
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)


if __name__ == "__main__":
    sys.path = sys.path[1:]  # without this folder, which is not on the path of a recipe
    _serve(Path(sys.argv[1]))
