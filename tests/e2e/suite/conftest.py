"""The HTTP API in front of the suite, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import Suite
from tests.support.services import FREE_PORTS, Service


@pytest.fixture(scope="session")
def http(suite: Suite) -> Iterator[Service]:
    addresses = {"gateway": suite.gateway.address, "fleet": suite.gateway.fleet}
    service = suite.services.start("http", {**addresses, "name": "http", "server": FREE_PORTS})
    yield service
    service.stop()
