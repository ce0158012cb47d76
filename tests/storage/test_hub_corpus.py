"""scripts/tokenize_corpus.py with hf://: huggingface_hub against a small server with the hub's routes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
ROWS = {f"data/train-{file}.jsonl": [f"row {file} {row} ü" for row in range(20)] for file in range(2)}
FILES = {name: "".join(json.dumps({"text": text}) + "\n" for text in texts).encode() for name, texts in ROWS.items()}
DOWNLOADS: Counter[str] = Counter()
COMMIT = "0" * 40
REPO = "/api/datasets/owner/name"


class Hub(BaseHTTPRequestHandler):
    """Routes of a data set with two files."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        name = path.partition("/datasets/owner/name/resolve/")[2].partition("/")[2]
        if name in FILES:
            self._send(FILES[name], name)
        elif path.startswith(f"{REPO}/tree/"):
            self._json([self._entry(name) for name in FILES])
        elif path == REPO or path.startswith(f"{REPO}/revision/"):
            self._json({"id": "owner/name", "sha": COMMIT, "siblings": [], "tags": [], "private": False})
        else:
            self._json({"error": path}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._json([self._entry(name) for name in FILES if name in body or name.replace("/", "%2F") in body])

    def _entry(self, name: str) -> dict[str, object]:
        digest = hashlib.sha1(FILES[name]).hexdigest()
        return {"type": "file", "path": name, "size": len(FILES[name]), "oid": digest}

    def _json(self, value: object, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response_only(status)
        self._end(content, {"Content-Type": "application/json"})

    def _send(self, content: bytes, name: str) -> None:
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if (given := self.headers.get("Range")) is not None:
            first, last = given.removeprefix("bytes=").split("-")
            part = content[int(first) : int(last) + 1]
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
            content = part
        if self.command == "GET":
            DOWNLOADS[name] += 1
        self.send_response_only(200 if given is None else 206)
        self._end(content, headers)

    def _end(self, content: bytes, headers: dict[str, str]) -> None:
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def test_files_of_the_hub_become_shards_and_are_downloaded_once(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
    }
    command = [sys.executable, "-m", "scripts.tokenize_corpus", "hf://datasets/owner/name", "--tokenizer", "bytes"]
    try:
        for _ in range(2):
            ended = subprocess.run(
                [*command, "--out", str(tmp_path / "out")],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == 0, ended.stderr
            assert dict.fromkeys(FILES, 1) == DOWNLOADS
        assert ended.stdout.count("20 documents, kept") == 2
    finally:
        server.shutdown()
        server.server_close()
    for name, texts in ROWS.items():
        ids = load_file(tmp_path / "out" / f"{name.replace('/', '__')}.safetensors")["ids"].tolist()
        expected = [id for text in texts for id in (*text.encode(), 257)]
        assert ids == expected
    assert not list((tmp_path / "out").glob(".*"))
