"""Dump of torch's flight recorder: the last collectives of this rank, started and completed."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
"""torch's environment variable with the path prefix of dumps, which the rank follows."""


def write_collectives(timeout: float) -> Path | None:
    """Write the recorded collectives of this rank as JSON next to NCCL's own dumps, and return the file.

    Return None without a path prefix or a process group, or if it takes more than `timeout` seconds: the recorder
    queries the device for completed collectives, which blocks on a hung device. NCCL writes its own dump, for
    `torchfrtrace`, only when a collective times out, possibly long after the hang was detected.
    """
    prefix = os.environ.get(PREFIX)
    if not prefix or not dist.is_initialized():
        return None
    path = Path(f"{prefix}{dist.get_rank()}.json")
    written: list[Path] = []

    def write() -> None:
        records = {name: _dump(function) for name, function in _RECORDERS.items()}
        path.write_text(json.dumps({name: record for name, record in records.items() if record.get("entries")}))
        written.append(path)

    writer = threading.Thread(target=write, name="flight_recorder", daemon=True)
    writer.start()
    writer.join(timeout)
    return path if written else None


_RECORDERS = {"nccl": "_dump_nccl_trace_json", "gloo": "_dump_fr_trace_json"}
"""Backend -> torch's private function that dumps its records; builds without NCCL lack the first."""


def _dump(function: str) -> dict[str, Any]:
    # torch has no public function for this.
    dump = getattr(torch._C._distributed_c10d, function, None)
    return json.loads(dump(includeCollectives=True, onlyActive=False)) if dump else {}
