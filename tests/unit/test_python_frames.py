"""Frames as the installed Python gives them."""

from __future__ import annotations

import json
import threading

from components.resilience.frames import caller_code, package_of, thread_frames


def test_the_caller_is_the_function_above() -> None:
    def inner(levels: int) -> object:
        return caller_code(levels)

    def outer(levels: int) -> object:
        return inner(levels)

    test = test_the_caller_is_the_function_above.__code__
    assert inner(1) is test
    assert (outer(1), outer(2)) == (outer.__code__, test)


def test_a_thread_s_frames_begin_with_the_innermost() -> None:
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


def test_a_frame_s_package_is_that_of_its_code() -> None:
    packages: list[list[str]] = []

    def hook(pairs: list[tuple[str, object]]) -> None:
        packages.append([package_of(frame) for frame in thread_frames(threading.get_ident())])

    json.loads("{}", object_pairs_hook=hook)
    assert packages[0][0] == "components"
    assert set(packages[0]) >= {"components", "tests", "json"}
