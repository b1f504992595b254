"""Gateways of one event loop that share their jobs in a real PostgreSQL: the scheduler and a follower."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.postgresql import new_database
from tests.support.running_gateway import Running, running_gateway
from tests.support.waiting import eventually


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Two gateways of a database, and a worker that both know."""

    scheduler: Running
    follower: Running
    worker: ScriptedWorker
    url: str
    """Of the database."""


@contextlib.asynccontextmanager
async def sharing_gateways(
    *,
    worker: Mapping[str, Any] | None = None,
    hold_at: int | None = None,
    follower_url: str = "{}",
    scheduler: Mapping[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[Sharing]:
    """Serve until the block ends.

    Args:
        worker: Arguments of the worker.
        hold_at: Step at which the worker waits.
        follower_url: Of the database for the follower, with {} for the scheduler's.
        scheduler: Configuration of the scheduler alone, which makes it one that the follower cannot reach.
        config: Configuration of both gateways.
    """
    with new_database() as url:
        async with (
            running_gateway(jobs=url, name="first", **config, **(scheduler or {})) as first,
            running_gateway(jobs=follower_url.format(url), name="second", **config) as second,
        ):
            joined = ScriptedWorker("w1", f"{first.fleet_address},{second.fleet_address}", **(worker or {}))
            joined.script.hold_at = hold_at
            second.workers.append(await joined.start())
            await eventually(lambda: second.gateway._jobs.readable)
            for house in (first,) if scheduler else (first, second):  # a follower asks the scheduler
                await eventually(house.knows_a_worker)
            yield Sharing(scheduler=first, follower=second, worker=joined, url=url)
