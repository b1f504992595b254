"""Job stores of each of BACKENDS."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import pytest

from bottega.gateway.jobs.store import JobStore
from tests.support.job_store_backends import BACKENDS


class Opener(Protocol):
    """Opens one more store of the same jobs."""

    async def __call__(self, *, to_read: bool = False) -> JobStore: ...


@pytest.fixture(params=BACKENDS)
async def another(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opener]:
    """Opens stores of the same jobs, as several gateways or lives of one would; closes them at the end."""
    make: Callable[[Path], JobStore] = BACKENDS[request.param]
    async with contextlib.AsyncExitStack() as stack:

        async def opened(*, to_read: bool = False) -> JobStore:
            store = make(tmp_path)
            stack.push_async_callback(store.close)
            await (store.open_to_read() if to_read else store.open())
            return store

        yield opened


@pytest.fixture
async def store(another: Opener) -> JobStore:
    return await another()
