"""A gateway with a scripted worker, and an HTTP API in front of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.running_gateway import Running, running_gateway
from tests.support.running_http import Door, running_http


@pytest.fixture
async def house() -> AsyncIterator[Running]:
    async with running_gateway() as running:
        yield running


@pytest.fixture
async def worker(house: Running) -> ScriptedWorker:
    return await house.worker()


@pytest.fixture
async def door(house: Running) -> AsyncIterator[Door]:
    async with running_http(house.address) as running:
        yield running
