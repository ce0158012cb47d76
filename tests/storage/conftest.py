"""A real S3 server (moto) as a process, optionally behind a proxy that spoils requests."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pytest

from components.storage import run_claim
from tests.storage.faulty_proxy import CONTROL

BUCKET = "bucket"
SECRET = "not-a-real-secret-0123456789"
START_SECONDS = 120.0


@dataclass
class S3:
    """A running server, and how its clients reach it."""

    port: int
    """Port that clients connect to: the proxy's or the server's."""
    server_port: int
    proxied: bool = False
    address: str = "127.0.0.1"
    """Address of this machine for clients."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a client."""
        short = {"connect_timeout": 5, "read_timeout": 2}  # of a silent server
        return {
            "AWS_ACCESS_KEY_ID": "test-access-key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{self.address}:{self.port}",
            "AWS_EC2_METADATA_DISABLED": "true",
            **({"FSSPEC_S3_CONFIG_KWARGS": json.dumps(short)} if self.proxied else {}),
        }

    def faults(self, share: float | None = None) -> dict[str, int]:
        """Return the number of faults that the proxy has injected; set the share of spoiled requests if it is given."""
        query = "" if share is None else f"?share={share}"
        with urllib.request.urlopen(f"http://{self.address}:{self.port}{CONTROL}{query}", timeout=30) as answer:
            return json.load(answer)

    def requests(self) -> dict[str, int]:
        """Return the number of requests that the proxy has received, by method and path."""
        with urllib.request.urlopen(f"http://{self.address}:{self.port}{CONTROL}?requests=1", timeout=30) as answer:
            return json.load(answer)

    def names(self, prefix: str = "") -> list[str]:
        """Return the names of the objects of the bucket, read without the proxy."""
        found = self._client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return [each["Key"] for each in found.get("Contents", [])]

    def times(self, prefix: str) -> dict[str, datetime]:
        """Return when each object below `prefix` was written."""
        found = self._client().list_objects_v2(Bucket=BUCKET, Prefix=prefix)
        return {each["Key"]: each["LastModified"] for each in found["Contents"]}

    def get(self, key: str) -> bytes:
        """Return an object, read without the proxy."""
        return self._client().get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key: str, content: bytes) -> None:
        """Write an object, without the proxy."""
        self._client().put_object(Bucket=BUCKET, Key=key, Body=content)

    def delete(self, key: str) -> None:
        """Remove an object, without the proxy."""
        self._client().delete_object(Bucket=BUCKET, Key=key)

    def create_bucket(self) -> None:
        """Create the bucket."""
        self._client().create_bucket(Bucket=BUCKET)

    def _client(self):
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.server_port}",
            aws_access_key_id="test-access-key",
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )


def needs_s3() -> None:
    """Skip a test if the client or the server is not installed."""
    pytest.importorskip("s3fs", reason="needs the extra `s3`")
    pytest.importorskip("moto", reason="needs moto[s3], flask and flask-cors (the extra `dev`)")
    pytest.importorskip("flask_cors", reason="needs moto[s3], flask and flask-cors (the extra `dev`)")


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    """Start a server for all tests of this process."""
    needs_s3()
    port = free_port()
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    with process_on_port([sys.executable, "-c", code], port):
        server = S3(port, port)
        server.create_bucket()
        yield server


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """Return an empty bucket; this process and its children are clients of it."""
    for key in s3_server.names():
        s3_server.delete(key)
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run_claim, "_SETTLE_SECONDS", 0.02)
    return s3_server


@pytest.fixture
def faulty_s3(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Return an empty bucket behind a proxy that spoils one request in a hundred."""
    from fsspec import config

    port = free_port()
    command = [sys.executable, "-m", "tests.storage.faulty_proxy", str(port), str(s3.server_port), "0.01", "7"]
    with process_on_port(command, port):
        faulty = S3(port, s3.server_port, proxied=True)
        for name, value in faulty.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setitem(config.conf, "s3", {"config_kwargs": json.loads(os.environ["FSSPEC_S3_CONFIG_KWARGS"])})
        yield faulty


class process_on_port:
    """A process that listens on a port, in a `with` statement."""

    def __init__(self, command: list[str], port: int, address: str = "127.0.0.1") -> None:
        self._command, self._address = command, (address, port)

    def __enter__(self) -> None:
        root = Path(__file__).parents[2]
        self._child = subprocess.Popen(
            self._command, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(self._address, timeout=5).close()
                return
            except OSError:
                if time.monotonic() > deadline or self._child.poll() is not None:
                    self._child.kill()
                    raise
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
