"""HTTP server on this machine that answers an upload to the Hugging Face hub."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN, USER = "hf_test", "me"


@dataclass
class Repository:
    """A model repository: its visibility, and its files by path."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    """Messages of the commits."""


@dataclass
class LocalHub:
    """State of the hub, and what it received."""

    address: str = ""
    may_write: bool = True
    """Whether the token may write to the namespace `me`; it may never write to others."""
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files by SHA-256."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""

    @property
    def writes(self) -> list[str]:
        """The requests that change something."""
        return [each for each in self.requests if not each.startswith("GET") and "validate-yaml" not in each]


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """Serve a hub on a free port within the block."""
    hub = LocalHub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.state.requests.append(f"{self.command} {path}")
        if path.startswith("/lfs/"):  # a signed address, without a token
            self.state.stored[path.removeprefix("/lfs/")] = body
            self._answer(200, {})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid credentials"})
        elif path == "/api/whoami-v2":
            self._answer(200, {"type": "user", "name": USER})
        elif path == "/api/validate-yaml":
            self._answer(200, {"warnings": [], "errors": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [self._upload_action(each) for each in json.loads(body)["objects"]]
            self._answer(200, {"transfer": "basic", "objects": objects})
        else:
            self._on_repository("/".join(path.split("/")[3:5]), "/".join(path.split("/")[5:]), body)

    def _may_write(self, owner: str) -> bool:
        return self.state.may_write and owner == USER

    def _create(self, request: dict[str, str]) -> None:
        owner = request.get("organization") or USER
        name = f"{owner}/{request['name']}"
        if not self._may_write(owner):
            self._answer(403, {"error": f"You don't have the rights to create a model under the namespace {owner}"})
            return
        self.state.repositories[name] = Repository(private=request.get("visibility") == "private")
        self._answer(200, {"url": f"{self.state.address}/{name}", "name": name, "id": name})

    def _upload_action(self, requested: dict[str, object]) -> dict[str, object]:
        return {**requested, "actions": {"upload": {"href": f"{self.state.address}/lfs/{requested['oid']}"}}}

    def _on_repository(self, name: str, action: str, body: bytes) -> None:
        repository = self.state.repositories.get(name)
        if repository is None:
            self._answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif action == "":
            files = [{"rfilename": file} for file in repository.files]
            self._answer(200, {"id": name, "private": repository.private, "siblings": files})
        elif action == "commits/main":
            commit = {"id": "0" * 40, "authors": [], "date": "2026-01-01T00:00:00.000Z", "message": ""}
            self._answer(200, [{**commit, "title": title} for title in repository.commits])
        elif not self._may_write(name.partition("/")[0]):
            self._answer(403, {"error": "Forbidden: the token has no write access"})
        elif action == "preupload/main":
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif action == "commit/main":
            for line in body.decode().splitlines():
                change = json.loads(line)
                value = change["value"]
                if change["key"] == "header":
                    repository.commits.append(value["summary"])
                if change["key"] == "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                elif change["key"] == "lfsFile":
                    repository.files[value["path"]] = self.state.stored[value["oid"]]
            self._answer(200, {"commitUrl": f"{self.state.address}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40})
        else:
            self._answer(404, {"error": f"no endpoint {self.command} {self.path}"})

    def _answer(self, status: int, content: object, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
