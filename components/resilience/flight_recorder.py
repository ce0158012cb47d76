"""The last collectives of this rank, as torch's flight recorder keeps them: which began, and which were completed."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable of torch: what the name of a dump begins with; a rank's number follows."""


def write_collectives(timeout: float) -> Path | None:
    """Write the recorded collectives of this rank as JSON beside NCCL's own dumps, and return the file.

    Returns None where there is nowhere to write, nothing was recorded, or it takes more than `timeout` seconds: the
    recorder asks the device whether collectives are completed, and a device that hangs does not answer. NCCL writes its
    own dump, for `torchfrtrace`, only when a collective times out, which may be long after a run was found to hang.
    """
    prefix = os.environ.get(PREFIX)
    if not prefix or not dist.is_initialized():
        return None
    path = Path(f"{prefix}{dist.get_rank()}.json")
    written: list[Path] = []

    def write() -> None:
        records = {name: _read(function) for name, function in _RECORDERS.items()}
        path.write_text(json.dumps({name: record for name, record in records.items() if record.get("entries")}))
        written.append(path)

    writer = threading.Thread(target=write, name="flight_recorder", daemon=True)
    writer.start()
    writer.join(timeout)
    return path if written else None


_RECORDERS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
"""Backend -> the function of torch that dumps its record; builds without NCCL lack its own."""


def _read(function: str) -> dict[str, Any]:
    # torch offers no public function for this.
    dump = getattr(torch._C._distributed_c10d, function, None)
    return json.loads(dump(includeCollectives=True, onlyActive=False)) if dump else {}
