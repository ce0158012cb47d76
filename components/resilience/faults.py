"""Faults that a test arms: a kill or an error of the disk at a named point of a save or a load. Imports no torch.

MESHBOOK_FAULT=kill:after_manifest:rank0:2      # rank 0 dies the second time that it gets there
MESHBOOK_FAULT=enospc:after_shards              # every rank, the first time
MESHBOOK_FAULT=slow=5:after_random:rank1:*      # rank 1 sleeps 5 s there each time
MESHBOOK_FAULT=eio:before_manifest,kill:at_load # several

A fault is KIND:POINT, then optionally the rank (rankN, or all), then which time (a number, or * for each). Points are
those of POINTS; only rank 0 comes to those from before_manifest to while_pruning. Kinds: kill (SIGKILL), stop (SIGSTOP,
for a test that then does what it wants), enospc, eio, erofs (what the system raises for a full, a failing and a
read-only disk) and slow=SECONDS. Without the variable nothing happens.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass, replace

from components.config.errors import ConfigError
from components.protocol.role import own_rank

VARIABLE = "MESHBOOK_FAULT"

POINTS = (
    "after_folder",
    "after_shards",
    "after_random",
    "before_manifest",
    "after_manifest",
    "before_rename",
    "after_rename",
    "while_pruning",
    "at_load",
)
"""In the order in which a save comes to them; at_load: before the first file of a checkpoint is read."""

_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO, "erofs": errno.EROFS}
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_ALL, _EACH = "all", "*"


@dataclass(frozen=True, slots=True)
class _Fault:
    kind: str
    seconds: float
    point: str
    who: str
    time: str
    """Which of the times to come, counted from 1, or `*`."""

    def __str__(self) -> str:
        kind = f"{self.kind}={self.seconds:g}" if self.kind == "slow" else self.kind
        return f"{kind}:{self.point}:{self.who}:{self.time}"


def fault_point(name: str) -> None:
    """Do what is armed for this point and this rank; usually nothing.

    The variable counts down in this process's own environment: there is no other state.

    Raises:
        OSError: An error of the disk is armed here.
        ConfigError: The variable cannot be read.
    """
    armed = os.environ.get(VARIABLE)
    if not armed:
        return
    due = []
    left = []
    for fault in map(_parse, armed.split(",")):
        here = fault.point == name and fault.who in (_ALL, f"rank{own_rank(os.environ)}")
        if here and fault.time in ("1", _EACH):
            due.append(fault)
        if here and fault.time != _EACH:
            fault = replace(fault, time=str(int(fault.time) - 1))
        if fault.time != "0":
            left.append(fault)
    os.environ[VARIABLE] = ",".join(map(str, left))
    for fault in due:
        _strike(fault)


def _strike(fault: _Fault) -> None:
    if fault.kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault.kind])
    elif fault.kind == "slow":
        time.sleep(fault.seconds)
    else:
        number = _ERRORS[fault.kind]
        raise OSError(number, f"{os.strerror(number)} ({VARIABLE}={fault})")


def _parse(text: str) -> _Fault:
    kind, point, who, which = [*text.strip().split(":"), "", "", ""][:4]
    kind, _, seconds = kind.partition("=")
    fault = _Fault(kind, float(seconds) if _is_number(seconds) else 0.0, point, who or _ALL, which or "1")
    is_who = fault.who == _ALL or (fault.who.startswith("rank") and fault.who.removeprefix("rank").isdigit())
    is_time = fault.time == _EACH or (fault.time.isdigit() and int(fault.time) > 0)
    is_kind = _is_number(seconds) if kind == "slow" else not seconds and (kind in _SIGNALS or kind in _ERRORS)
    if text.count(":") > 3 or not (is_kind and point in POINTS and is_who and is_time):
        raise ConfigError(
            f"{VARIABLE}={text}: must be KIND:POINT[:rankN or all[:number or *]], KIND one of "
            f"{', '.join([*_SIGNALS, *_ERRORS])} or slow=SECONDS, POINT one of {', '.join(POINTS)}; unset it"
        )
    return fault


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
