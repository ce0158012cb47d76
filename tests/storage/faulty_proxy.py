"""HTTP proxy between a client and an S3 server that spoils a share of the requests; a process of its own.

python -m tests.storage.faulty_proxy PORT SERVER_PORT SHARE SEED [ADDRESS]

Each request is spoiled with the probability SHARE, in one of FAULTS at random. `GET /__faults__` returns the number of
each so far as JSON, and with ?share=X sets the share; with ?requests=1 it returns the number of requests by method and
path.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

FAULTS = ("500", "503", "silence", "truncated", "lost answer")
SILENT_SECONDS = 4.0  # longer than the timeout of the tests' clients
CONTROL = "/__faults__"
_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}


class Proxy(ThreadingHTTPServer):
    """State that the threads of the requests share."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, server_port: int, share: float, seed: int, address: str = "127.0.0.1") -> None:
        self.server_port_behind, self.share = server_port, share
        self._random, self._lock = random.Random(seed), threading.Lock()
        self.injected: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        super().__init__((address, port), Handler)

    def draw(self, method: str) -> str | None:
        """Return the fault of the next request, or None. Only answers to GET have a body to cut."""
        with self._lock:
            if self._random.random() >= self.share:
                return None
            fault = self._random.choice([each for each in FAULTS if method == "GET" or each != "truncated"])
            self.injected[fault] += 1
            return fault


class Handler(BaseHTTPRequestHandler):
    """Forwards a request, or spoils it."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def _handle(self) -> None:
        body = self._body()
        if self.path.startswith(CONTROL):
            self._control()
            return
        self.server.requests[f"{self.command} {urlsplit(self.path).path}"] += 1
        fault = self.server.draw(self.command)
        if fault in ("500", "503"):
            code = "InternalError" if fault == "500" else "SlowDown"
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
            self._answer(int(fault), [("Content-Type", "application/xml")], b"" if self.command == "HEAD" else text)
            return
        if fault == "silence":
            time.sleep(SILENT_SECONDS)
            self.close_connection = True
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port_behind, timeout=120)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP | {"expect"}}
        connection.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if fault == "lost answer":  # the server has carried it out
            self.close_connection = True
            return
        kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP]
        length = int(answer.headers.get("Content-Length") or len(content))
        self._answer(answer.status, kept, content, length, cut=fault == "truncated")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle

    def _control(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "share" in query:
            self.server.share = float(query["share"][0])
        counts = self.server.requests if "requests" in query else self.server.injected
        self._answer(200, [("Content-Type", "application/json")], json.dumps(counts).encode())

    def _answer(
        self,
        status: int,
        headers: list[tuple[str, str]],
        content: bytes,
        length: int | None = None,
        cut: bool = False,
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.wfile.flush()
            self.close_connection = True

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return body

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    Proxy(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:]).serve_forever()
