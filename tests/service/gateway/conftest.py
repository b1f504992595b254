"""What most tests here talk to: a gateway, or a database for several."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.postgresql import new_database
from tests.support.running_gateway import Running, running_gateway


@pytest.fixture
async def house() -> AsyncIterator[Running]:
    """One of its own for each test, as it is without a configuration."""
    async with running_gateway() as running:
        yield running


@pytest.fixture
def url() -> Iterator[str]:
    """An empty database."""
    with new_database() as made:
        yield made
