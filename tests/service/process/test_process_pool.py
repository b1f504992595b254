"""A pool that stops while a call begins: the call is refused, and no process is left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil
import pytest

from bottega.errors import Unavailable
from bottega.process import PoolLimits, PreparedCall, ProcessPool, ProcessSpec

SPEC = ProcessSpec(name="test process", module="bottega.codec.process", deadline_s=20)


def pool(*, new_process: bool) -> ProcessPool:
    limits = PoolLimits(processes=1, max_waiting=4, limit="calls", waiting="calls wait", new_process=new_process)
    return ProcessPool(SPEC, limits)


@pytest.fixture
def no_new_child() -> Callable[[], None]:
    """Says that no process was begun since the test did; shared suites of other tests may have some that stay."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def check() -> None:
        assert [child for child in psutil.Process().children(recursive=True) if child.pid not in before] == []

    return check


async def _turns(number: int) -> None:
    """The event loop runs whatever is due so many times."""
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("new_process", [False, True])
@pytest.mark.parametrize(
    "until_stop",
    [lambda: _turns(1), lambda: _turns(2), lambda: asyncio.sleep(0.02)],
    ids=["before it runs", "while it is prepared", "while its process starts"],
)
async def test_a_call_that_begins_while_the_pool_stops_is_refused_and_leaves_no_process(
    until_stop: Callable[[], asyncio.Future[None]], new_process: bool, no_new_child: Callable[[], None]
) -> None:
    async def prepare() -> PreparedCall:
        await asyncio.sleep(0.01)
        return PreparedCall(frame=b"")

    stopping = pool(new_process=new_process)
    call = asyncio.create_task(stopping.call(prepare))
    await until_stop()
    await stopping.stop()
    await asyncio.sleep(0.05)  # in which one that was not ended would start its process
    no_new_child()
    with pytest.raises(Unavailable, match="stopping"):
        await asyncio.wait_for(call, 30)


async def test_a_pool_that_stops_while_it_starts_leaves_no_process(no_new_child: Callable[[], None]) -> None:
    stopping = pool(new_process=False)
    starting = asyncio.create_task(stopping.start())
    await asyncio.sleep(0.01)
    await stopping.stop()
    with pytest.raises(Unavailable, match="stopping"):
        await asyncio.wait_for(starting, 30)
    no_new_child()
