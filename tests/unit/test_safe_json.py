"""JSON that others can change: refused with a sentence, never with another exception than ValueError or OSError."""

import json
import os
from pathlib import Path

import pytest

from components.protocol.safe_parsing import DEEPEST, load_json, parse_json


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 200_000, "nests more than"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nests more than"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "nests more than"),
        (b'{"path": "\\ud800"}', "UTF-8"),
        (b'{"\\uDFFF": 1}', "UTF-8"),
        ('{"path": "\ud800"}', "UTF-8"),
        (b"\xff\xfe[\x001\x00]\x00", "UTF-8"),
        (b"9" * 5000, "5000 digits"),
        (b"", "Expecting value"),
    ],
)
def test_texts_that_the_json_module_accepts_or_fails_on_are_refused(text: str | bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_other_texts_give_the_values_of_the_json_module() -> None:
    deepest: list[object] = []
    for _ in range(DEEPEST - 1):
        deepest = [deepest]
    wide = [{"name": f"größe {index} 😀 {{[", "values": [1, None, 0.5]} for index in range(1000)]
    for value in (deepest, wide):
        for ascii_only in (True, False):
            text = json.dumps(value, ensure_ascii=ascii_only)
            assert parse_json(text) == parse_json(text.encode()) == parse_json(b"\xef\xbb\xbf" + text.encode()) == value


def test_pipes_devices_and_files_without_an_end_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as large:
        large.truncate(1 << 40)  # sparse
    for path in (tmp_path / "pipe", tmp_path / "large", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="regular file|Larger than|directory"):
            load_json(path)
