"""The code before it was prepared for GPUs, commit 0a6a30f, on the same fake CUDA device and counted by the same code.

    python -m tests.gpu_ready.before      # counts of every lever that it had on every layout: before.json (10 minutes)

Needs the repository's history.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.gpu_ready.conftest import Run, build_stub, started_server
from tests.gpu_ready.matrix import EXPERT_LAYOUTS, LEVERS, PAIRS, arguments, difference
from tests.gpu_ready.table import BEFORE, recorded, write_rows

COMMIT = "0a6a30f"
HERE = Path(__file__).parent
SHARED = ("__init__.py", "device.py", "roofline.py", "server.py")
"""Files of this folder that do not depend on the commit."""


@contextmanager
def server_before(stub: Path, folder: Path) -> Iterator[Run]:
    """Check the commit out into a folder, and yield a function that runs a case of cases_before.py there."""
    archive = subprocess.run(["git", "archive", COMMIT], cwd=HERE.parents[1], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    tests = folder / "tests" / "gpu_ready"
    tests.mkdir()
    for name in SHARED:
        shutil.copy(HERE / name, tests / name)
    shutil.copy(HERE / "cases_before.py", tests / "cases.py")
    with started_server(stub, folder) as run:
        yield run


def main() -> None:
    """Count the pairs of levers and layouts that are not recorded, and record them."""
    rows = recorded(BEFORE)
    # The commit has one objective and one optimizer. By layout, so that a stopped run has all levers on some layouts.
    pairs = [pair for pair in PAIRS if not {"objective", "optimizer"} & LEVERS[pair[0]].keys()]
    pairs.sort(key=lambda pair: list(EXPERT_LAYOUTS).index(pair[1]))
    with (
        tempfile.TemporaryDirectory() as stub,
        tempfile.TemporaryDirectory() as folder,
        server_before(build_stub(Path(stub)), Path(folder)) as run,
    ):
        for lever, layout in pairs:
            if (lever, layout) not in rows:
                rows[lever, layout] = {"lever": lever, "layout": layout, **_count(run, lever, layout)}
                print(rows[lever, layout], flush=True)
                write_rows(BEFORE, rows)


def _count(run: Run, lever: str, layout: str) -> dict[str, Any]:
    """Return the counts of a pair, or the last line of the error that its step ends with."""
    try:
        shorter, longer = (run("step", **arguments(lever, layout, layers)) for layers in (1, 2))
    except AssertionError as error:
        return {"error": str(error).strip().splitlines()[-1][:200]}
    return {**difference(shorter, longer), "waits": longer["waits"], "masks": longer["masks"]}


if __name__ == "__main__":
    main()
