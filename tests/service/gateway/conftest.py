"""The gateway that most tests here talk to."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.running_gateway import Running, running_gateway


@pytest.fixture
async def house() -> AsyncIterator[Running]:
    """One of its own for each test, as it is without a configuration."""
    async with running_gateway() as running:
        yield running
