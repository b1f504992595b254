"""From accepted to ended by the gateway's rules, without a wire and on a clock that the test turns."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from bottega.v1 import image_pb2
from tests.unit.sample_shop import Shop


@pytest.fixture
async def shop() -> AsyncIterator[Shop]:
    shop = Shop()
    yield shop
    await shop.foreman.stop()


def _calling_takes(shop: Shop, seconds: float) -> None:
    def pass_time() -> None:
        shop.time.now += seconds

    for client in shop.clients.values():
        client.on_call = pass_time


async def test_routing_is_timed_from_accepted_to_the_call_of_a_worker_that_is_free(shop: Shop) -> None:
    shop.worker()
    _calling_takes(shop, 0.25)
    job = shop.submit()
    assert (job.queue_s, job.route_s) == (0, 0.25)
    assert shop.registry.get_sample_value("bottega_route_seconds_sum") == 0.25


async def test_routing_of_a_job_that_waited_is_timed_from_the_worker_being_free(shop: Shop) -> None:
    shop.worker()
    first = shop.submit()
    waits = shop.submit()
    assert waits.state == image_pb2.JOB_STATE_QUEUED
    _calling_takes(shop, 0.25)
    shop.time.now += 10
    await shop.complete(first)
    assert waits.state == image_pb2.JOB_STATE_RUNNING
    assert (waits.queue_s, waits.route_s) == (10, 0.25)
    assert shop.registry.get_sample_value("bottega_queue_seconds_sum") == 10
