"""Servers of S3 as real processes: moto, and nanio of another maker; and a proxy in front that fails, delays or cuts.

A process of pytest starts each once. They listen on ports that the system assigns to nobody.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from bottega.client.suite.plan import free_ports
from tests.support.waiting import wait_until

KEY, SECRET = "AKIAIOSFODNN7TESTING", "the-secret-of-the-tests"
_BIN = Path(sys.executable).parent


@dataclass(kw_only=True)
class S3Server:
    """A server that runs. Its data is lost when it ends, unless it is nanio."""

    kind: str
    port: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = {
            "moto": [str(_BIN / "moto_server"), "-H", "127.0.0.1", "-p", str(self.port)],
            "nanio": [str(_BIN / "nanio"), "serve", "--host", "127.0.0.1", "--port", str(self.port), "--no-access-log"],
        }[self.kind]
        # Short pages, so that few objects need several.
        variables = {
            "MOTO_S3_DEFAULT_MAX_KEYS": "50",
            "NANIO_ACCESS_KEY": KEY,
            "NANIO_SECRET_KEY": SECRET,
            "NANIO_DATA_DIR": str(self.folder),
        }
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=log)
        wait_until(self._answers, f"{self.kind} on port {self.port}")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Kill it for good."""
        self.kill()
        shutil.rmtree(self.folder)

    def bucket(self) -> str:
        """Create a bucket of its own for a test."""
        name = f"test-{uuid.uuid4().hex}"
        self.create_bucket(name)
        return name

    def create_bucket(self, name: str) -> None:
        url = obstore.sign(self._at(name), "PUT", "", dt.timedelta(seconds=60))
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("PUT", url.removeprefix(self.url))
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
        connection.close()

    def keys(self, bucket: str) -> list[str]:
        return sorted(meta["path"] for meta in obstore.list(self._at(bucket)).collect())

    def put(self, bucket: str, key: str, data: bytes) -> None:
        obstore.put(self._at(bucket), key, data)

    def _at(self, bucket: str) -> S3Store:
        return S3Store(
            bucket,
            endpoint=self.url,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
            return True
        return False


def started(kind: str) -> S3Server:
    """Return a new server. The caller ends it."""
    server = S3Server(kind=kind, port=free_ports(1)[0], folder=Path(tempfile.mkdtemp(prefix=f"bottega-{kind}-")))
    server.start()
    return server


class S3Servers:
    """The servers of a process of pytest, one of each kind, which start when they are first asked for."""

    def __init__(self) -> None:
        self._servers: dict[str, S3Server] = {}

    def get(self, kind: str) -> S3Server:
        if kind not in self._servers:
            self._servers[kind] = started(kind)
        return self._servers[kind]

    def end(self) -> None:
        for server in self._servers.values():
            server.end()


def set_environment(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Set the variables with which a client finds a server."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    values = {"ENDPOINT_URL": url, "REGION": "us-east-1", "ACCESS_KEY_ID": KEY, "SECRET_ACCESS_KEY": SECRET}
    for name, value in values.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@dataclass(kw_only=True)
class FailingProxy:
    """A proxy in front of a server, which fails as it is told to."""

    server: S3Server
    failing: float = 0.0
    """Share of the requests that it fails: by 503, or without an answer, whether the server has done it or not."""
    refusal: str = ""
    """Code of S3 with which it refuses every request."""
    delay_s: float = 0.0
    cut_after_bytes: int | None = None
    """Bytes of the body of a PUT after which it closes the connection."""
    requests: int = 0
    failed: int = 0
    seen: list[dict[str, str]] = field(default_factory=list)
    """Headers of each PUT and POST."""
    random: random.Random = field(default_factory=lambda: random.Random(5))

    host: str = "127.0.0.1"
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


class _Handler(BaseHTTPRequestHandler):
    """Passes a request on, or fails it."""

    protocol_version = "HTTP/1.1"
    proxy: FailingProxy

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # its client has died
            super().handle()

    def handle_any(self) -> None:
        proxy = self.proxy
        proxy.requests += 1
        time.sleep(proxy.delay_s)
        size = int(self.headers.get("content-length", 0))
        if self.command == "PUT" and proxy.cut_after_bytes is not None and size > proxy.cut_after_bytes:
            self.rfile.read(proxy.cut_after_bytes)
            self._cut()
            return
        body = self.rfile.read(size)
        if self.command in ("PUT", "POST"):
            proxy.seen.append({name.lower(): value for name, value in self.headers.items()})
        if proxy.refusal:
            self._answer(403, f"<Error><Code>{proxy.refusal}</Code><Message>{SECRET}</Message></Error>".encode())
        elif proxy.random.random() >= proxy.failing:
            self._answer(*self._passed_on(body))
        else:
            self._fail(body)

    def _fail(self, body: bytes) -> None:
        proxy = self.proxy
        proxy.failed += 1
        way = proxy.failed % 3
        if way == 0:
            self._answer(503, b"<Error><Code>SlowDown</Code></Error>")
            return
        if way == 1:  # the server does it, but its client does not get to know
            self._passed_on(body)
        self._cut()

    def _passed_on(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.proxy.server.port, timeout=60)
        try:
            connection.request(self.command, self.path, body=body, headers=dict(self.headers.items()))
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())
        except OSError:
            return 502, b"", {}
        finally:
            connection.close()

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        sent = {name.lower(): value for name, value in (headers or {}).items()}
        for name, value in ({"content-length": str(len(body))} | sent).items():
            if name not in _HOP_BY_HOP:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing to log."""


@contextlib.contextmanager
def failing_proxy(server: S3Server, *, host: str = "127.0.0.1") -> Iterator[FailingProxy]:
    """Serve a proxy in the block. host: its address."""
    proxy = FailingProxy(server=server, host=host)
    methods = {f"do_{method}": _Handler.handle_any for method in ("GET", "HEAD", "PUT", "POST", "DELETE")}
    listener = ThreadingHTTPServer((host, 0), type("Handler", (_Handler,), {"proxy": proxy, **methods}))
    listener.daemon_threads = True
    proxy.port = listener.server_address[1]
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        listener.shutdown()
        listener.server_close()
        thread.join()


_HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "keep-alive"})
