"""Frames of running Python code; no other module inspects frames.

The report of a hung rank contains the location of its main thread, and a thread that is inside a collective must be
found before exit. Python has no public interface for either: `sys._getframe` and `sys._current_frames` are CPython's.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType


def caller_code(levels: int) -> CodeType:
    """Return the code of the function `levels` above the one that calls this; 1 is its direct caller."""
    return sys._getframe(1 + levels).f_code


def thread_frames(thread: int | None) -> list[FrameType]:
    """Return the frames of a thread, the innermost first; empty once it has ended.

    Args:
        thread: `threading.Thread.ident`; None, as of a thread that was not started, gives no frames.
    """
    frame, frames = sys._current_frames().get(thread or 0), []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def package_of(frame: FrameType) -> str:
    """Return the top-level package whose code a frame runs, empty for code without a module."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
