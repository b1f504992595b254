"""What tests of several services use: a folder that every user of the machine may look into, and servers of S3."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.s3 import FailingProxy, S3Server, S3Servers, failing_proxy, set_environment


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """One that every user may look into: those that pytest makes are one user's alone."""
    made = Path(tempfile.mkdtemp(prefix="links-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="session")
def s3_servers() -> Iterator[S3Servers]:
    """Servers of S3, which all tests of a process share. A test has a bucket of its own."""
    servers = S3Servers()
    yield servers
    servers.end()


@pytest.fixture
def s3_server(s3_servers: S3Servers, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A server that the environment leads to."""
    server = s3_servers.get("nanio")
    set_environment(monkeypatch, server.url)
    return server


@pytest.fixture
def s3_proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingProxy]:
    """What the environment leads to instead: a proxy in front of that server, which fails as it is told to."""
    with failing_proxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def pictures(s3_server: S3Server) -> str:
    """`objects` of gateways that share a database: a bucket of its own for each test."""
    return f"s3://{s3_server.bucket()}/pictures"
