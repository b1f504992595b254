"""One gateway with a scripted worker for the tests of a module, and an HTTP API in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from tests.fakes.scripted_worker import Script, ScriptedWorker
from tests.support.running_gateway import Running, running_gateway
from tests.support.running_http import Door, running_http
from tests.support.waiting import eventually


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[Running]:
    async with running_gateway() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def worker(house: Running) -> ScriptedWorker:
    """The only one; what tests before this one told it is forgotten, and their jobs have ended."""
    worker = house.workers[0] if house.workers else await house.worker()
    worker.script.release.set()
    worker.script = Script()
    await eventually(lambda: not house.gateway._controller.has_jobs)
    worker.requests.clear()
    worker.arrived.clear()
    worker.cancelled = asyncio.Queue()
    return worker


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(house: Running) -> AsyncIterator[Door]:
    async with running_http(house.address) as running:
        yield running
