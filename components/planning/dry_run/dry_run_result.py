"""Result of a dry run; imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PlayedGroup:
    """A process group of the mesh with more than one rank."""

    axes: str
    """Axes or views of the mesh with these ranks, such as `fsdp = dp`."""
    size: int
    """Number of ranks."""


@dataclass(frozen=True, slots=True)
class PlayedTraffic:
    """Calls of one collective over one group in a step."""

    group: str
    """Axes or views of the mesh with this group."""
    operation: str
    calls: int
    bytes: int
    """Bytes of this rank's input tensors, see components.distributed.traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Memory and traffic of one rank in the second step of a run, when the optimizer has its state."""

    rank: int
    world: int
    """Number of ranks."""
    mesh: str
    """Degrees of the axes."""
    coordinates: str
    """This rank's coordinate on every axis larger than 1."""
    parameters: int
    """Bytes of this rank's parameters, with the copy of a tied head on the last pipeline stage."""
    gradients: int
    """Bytes of the gradients at the optimizer step."""
    optimizer: int
    """Bytes of the optimizer state."""
    average: int
    """Bytes of the moving average of the weights (training.ema_decay)."""
    frozen: int
    """Bytes of a second model, which is not trained: a teacher or a reference."""
    buffers: int
    """Bytes of the trained model's buffers."""
    saved: int
    """Highest sum of the bytes that autograd saves for the backward, without parameters. Outputs that selective
    recomputation keeps are not among them; they are in `peak`."""
    peak: int
    """Highest sum of all bytes during the step, with all of the above."""
    peak_operator: str
    """Operator that allocated the last bytes of the peak."""
    peak_phase: str
    """forward, backward or update."""
    groups: tuple[PlayedGroup, ...]
    """Process groups of this rank."""
    traffic: tuple[PlayedTraffic, ...]
    """Collectives of the step."""
    micro_batches: int
    """Micro-batches of the step."""
    micro_batch_rows: int
    """Rows of a micro-batch."""
    cpu_seconds: float
    """CPU time of the process until the result."""
    resident_bytes: int
    """Highest resident memory of the process."""
    notes: tuple[str, ...] = ()
    """Assumptions, and differences from a run."""

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> DryRun:
        """Return the result that `as_json` returned in another process."""
        groups = tuple(PlayedGroup(**each) for each in values["groups"])
        traffic = tuple(PlayedTraffic(**each) for each in values["traffic"])
        return cls(**{**values, "groups": groups, "traffic": traffic, "notes": tuple(values["notes"])})
