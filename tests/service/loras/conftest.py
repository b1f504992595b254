"""A server with S3's interface, and a bucket of each test's own."""

from __future__ import annotations

import pytest

from tests.support import s3


@pytest.fixture
def server(s3_servers: s3.S3Servers, monkeypatch: pytest.MonkeyPatch) -> s3.S3Server:
    server = s3_servers.get("nanio")
    s3.set_environment(monkeypatch, server.url)
    return server


@pytest.fixture
def bucket(server: s3.S3Server) -> str:
    return server.bucket()
