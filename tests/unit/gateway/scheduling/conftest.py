"""A job controller without a wire, for the tests of one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes.gateway_rules import Shop


@pytest.fixture
async def shop() -> AsyncIterator[Shop]:
    shop = Shop()
    yield shop
    await shop.stop()
