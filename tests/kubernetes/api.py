"""A test API server of Kubernetes: what kubectl needs, with objects checked against the official schemas.

    with ApiServer(tmp_path) as api:
        subprocess.run(["kubectl", "get", "jobs"], env=api.environment)

It serves discovery, creation (with server-side dry runs and strict field validation, by `kubernetes-validate`),
reading, deletion and reviews of access. Nothing runs: a test sets the status of an object. What a real cluster does
besides, such as admission, defaults, quota enforcement and scheduling, is absent.
"""

from __future__ import annotations

import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

VERSION = "1.31"
"""Kubernetes version of the schemas."""
KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: here, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: me, user: {{}}}}]
contexts: [{{name: here, context: {{cluster: here, user: me}}}}]
current-context: here
"""
GROUPS = {
    "v1": {
        "services": "Service",
        "pods": "Pod",
        "configmaps": "ConfigMap",
        "secrets": "Secret",
        "persistentvolumeclaims": "PersistentVolumeClaim",
        "resourcequotas": "ResourceQuota",
        "serviceaccounts": "ServiceAccount",
    },
    "batch/v1": {"jobs": "Job"},
    "authorization.k8s.io/v1": {"selfsubjectaccessreviews": "SelfSubjectAccessReview"},
    "kueue.x-k8s.io/v1beta1": {"localqueues": "LocalQueue"},
    "jobset.x-k8s.io/v1alpha2": {"jobsets": "JobSet"},
}
"""API version -> resource -> kind; the last two exist where their controllers are installed."""
WITHOUT_SCHEMA = {"JobSet", "LocalQueue"}


class ApiServer:
    """The server, its objects by path, and what its user may do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[str, dict[str, Any]] = {}
        self.forbidden: set[tuple[str, str]] = set()
        """Verbs and resources that access reviews deny."""
        self.groups = {name: dict(resources) for name, resources in GROUPS.items()}
        self.requests: list[str] = []
        """Methods and paths of all requests."""
        self.lose_answers = 0
        """Number of the next creations after whose completion the connection is closed without an answer."""
        self.refuse_after: int | None = None
        """Number of creations after which every connection is closed without an answer."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": self}))

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        (self.folder / "kubeconfig").write_text(KUBECONFIG.format(port=self._server.server_port))
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop answering: connections are refused."""
        self._server.shutdown()
        self._server.server_close()

    @property
    def variables(self) -> dict[str, str]:
        """Variables with which kubectl uses this server."""
        return {"KUBECONFIG": str(self.folder / "kubeconfig"), "HOME": str(self.folder)}

    def add(self, path: str, **fields: Any) -> dict[str, Any]:
        """Store an object at /api(s)/... without checks, and return it."""
        self.objects[path] = {"metadata": {"name": path.rpartition("/")[2]}, **fields}
        return self.objects[path]

    def create(self, path: str, body: dict[str, Any], *, dry_run: bool) -> tuple[int, dict[str, Any]]:
        """Check and store an object, and return the status and body of the answer."""
        import kubernetes_validate

        if path.removeprefix("/apis/").removeprefix("/api/").partition("/namespaces/")[0] not in self.groups:
            return _status(404, "NotFound", "the server could not find the requested resource")
        if "/namespaces/" in path and not self._has_namespace(path):
            return _status(404, "NotFound", f'namespaces "{path.split("/namespaces/")[1].split("/")[0]}" not found')
        name = f"{path}/{body['metadata']['name']}"
        if name in self.objects:
            return _status(409, "AlreadyExists", f"{path.rpartition('/')[2]} {body['metadata']['name']} already exists")
        if body["kind"] not in WITHOUT_SCHEMA:
            try:
                kubernetes_validate.validate(body, VERSION, strict=True)
            except kubernetes_validate.ValidationError as error:
                return _rejected(body, error)
        made = {**body, "metadata": {**body["metadata"], "uid": str(uuid.uuid4())}}
        if not dry_run:
            self.objects[name] = made
        return 201, made

    def _has_namespace(self, path: str) -> bool:
        return f"/api/v1/namespaces/{path.split('/namespaces/')[1].split('/')[0]}" in self.objects

    def read(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return the status and body of the answer to GET."""
        version, _, rest = path.removeprefix("/apis/").removeprefix("/api/").partition("/namespaces/")
        if path in self.objects:
            return 200, self.objects[path]
        if (found := self._discovery(path)) is not None:
            return found
        resource = rest.split("/")[1] if rest.count("/") else ""
        if resource and resource not in self.groups.get(version, {}):
            return _status(404, "NotFound", "the server could not find the requested resource")
        if rest.count("/") == 1:
            items = [each for name, each in self.objects.items() if name.rpartition("/")[0] == path]
            return 200, {"kind": "List", "apiVersion": version, "items": items}
        kind, name = path.split("/")[-2:]
        return _status(404, "NotFound", f'{kind} "{name}" not found')

    def _discovery(self, path: str) -> tuple[int, dict[str, Any]] | None:
        if path == "/api":
            return 200, {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            groups = []
            for version in self.groups:
                group, _, number = version.rpartition("/")
                if group:
                    entry = {"groupVersion": version, "version": number}
                    groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
            return 200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version in self.groups:
            resources = [
                {
                    "name": name,
                    "singularName": "",
                    "namespaced": True,
                    "kind": kind,
                    "verbs": ["create", "get", "delete"],
                }
                for name, kind in self.groups[version].items()
            ]
            return 200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}
        return None


class _Handler(BaseHTTPRequestHandler):
    api: ApiServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._reply(*self.api.read(self._path()))

    def do_DELETE(self) -> None:
        path = self._path()
        self._body()
        if self.api.objects.pop(path, None) is None:
            self._reply(*_status(404, "NotFound", f"{path} not found"))
            return
        owned = [
            name
            for name, each in self.api.objects.items()
            if path.rpartition("/")[2] in [owner["name"] for owner in each["metadata"].get("ownerReferences", ())]
        ]
        for name in owned:
            del self.api.objects[name]
        self._reply(200, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})

    def do_POST(self) -> None:
        path, body, query = self._path(), self._body(), parse_qs(urlsplit(self.path).query)
        if path.endswith("/selfsubjectaccessreviews"):
            wanted = body["spec"]["resourceAttributes"]
            allowed = (wanted["verb"], wanted["resource"]) not in self.api.forbidden
            self._reply(201, {**body, "status": {"allowed": allowed}})
            return
        stored = "dryRun" not in query
        if stored and self.api.refuse_after is not None:
            if self.api.refuse_after == 0:
                self.close_connection = True
                return
            self.api.refuse_after -= 1
        answer = self.api.create(path, body, dry_run="All" in query.get("dryRun", ()))
        if answer[0] == 201 and self.api.lose_answers and "dryRun" not in query:
            self.api.lose_answers -= 1
            self.close_connection = True
            return
        self._reply(*answer)

    def _path(self) -> str:
        path = urlsplit(self.path).path
        self.api.requests.append(f"{self.command} {self.path}")
        return path

    def _body(self) -> dict[str, Any]:
        """Return the object in the request, which kubectl sends in chunks with --raw."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return json.loads(data)

    def _reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _status(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    """Return a failure as the API server reports it."""
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return code, {**body, "reason": reason, "code": code, "message": message}


def _rejected(body: dict[str, Any], error: Any) -> tuple[int, dict[str, Any]]:
    """Return the failure of an object with an unknown field (BadRequest) or a wrong value (Invalid)."""
    if error.validator == "additionalProperties":
        return _status(400, "BadRequest", f"strict decoding error: {error.message}")
    field = ".".join(map(str, error.path))
    code, status = _status(422, "Invalid", f"{body['kind']} is invalid: {field}: {error.message}")
    cause = {"reason": "FieldValueInvalid", "message": error.message, "field": field}
    details = {"name": body["metadata"]["name"], "kind": body["kind"], "causes": [cause]}
    return code, {**status, "details": details}
