"""Frame inspection on the installed Python version."""

from __future__ import annotations

import json
import threading

from components.protocol.failures import caller_code, package_of, thread_frames


def test_caller_code_returns_the_calling_function() -> None:
    def inner(levels: int) -> object:
        return caller_code(levels)

    def outer(levels: int) -> object:
        return inner(levels)

    test = test_caller_code_returns_the_calling_function.__code__
    assert inner(1) is test
    assert (outer(1), outer(2)) == (outer.__code__, test)


def test_thread_frames_start_with_the_innermost() -> None:
    started, end = threading.Event(), threading.Event()

    def wait_inside() -> None:
        started.set()
        end.wait()

    def run() -> None:
        wait_inside()

    thread = threading.Thread(target=run)
    assert thread_frames(thread.ident) == []
    thread.start()
    started.wait()
    try:
        codes = [frame.f_code for frame in thread_frames(thread.ident)]
        assert codes.index(wait_inside.__code__) + 1 == codes.index(run.__code__)
        assert {package_of(frame) for frame in thread_frames(thread.ident)} == {"threading", "tests"}
    finally:
        end.set()
        thread.join()
    assert thread_frames(thread.ident) == []


def test_package_of_frame_follows_its_code() -> None:
    packages: list[list[str]] = []

    def hook(pairs: list[tuple[str, object]]) -> None:
        packages.append([package_of(frame) for frame in thread_frames(threading.get_ident())])

    json.loads("{}", object_pairs_hook=hook)
    assert packages[0][0] == "components"
    assert set(packages[0]) >= {"components", "tests", "json"}
