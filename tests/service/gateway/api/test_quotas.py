"""Quotas of a tenant at a real gateway: each refuses by its name, bothers nobody else, and days outlive the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import grpc

from bottega.errors import QuotaExceeded
from bottega.rpc.security.tenant_file import Quotas
from bottega.rpc.status import from_rpc_error
from bottega.v1 import image_pb2
from tests.support.flooders import cancel_at_once
from tests.support.running_gateway import Running, running_gateway
from tests.support.tenants import add_tenant, calling
from tests.support.waiting import eventually


class Shops:
    """A gateway, and calls to it of the tenants shop, whose quotas these are, and other, who has none."""

    def __init__(self, house: Running, shop: Running, other: Running) -> None:
        self.house, self.shop, self.other = house, shop, other


@contextlib.asynccontextmanager
async def shops(folder: Path, quotas: Quotas) -> AsyncIterator[Shops]:
    file = folder / "tenants.json"
    file.unlink(missing_ok=True)
    keys = [add_tenant(file, "shop", quotas=quotas), add_tenant(file, "other")]
    async with (
        running_gateway(tenants=str(file), state=str(folder), hold_s=0.1) as house,
        calling(house, keys[0]) as shop,
        calling(house, keys[1]) as other,
    ):
        yield Shops(house, shop, other)


async def _refused(shop: Running) -> QuotaExceeded:
    try:
        await shop.submit(prompt="one too many")
    except grpc.aio.AioRpcError as error:
        refused = from_rpc_error(error)
        assert isinstance(refused, QuotaExceeded)
        return refused
    raise AssertionError("it was taken")


async def test_each_quota_refuses_by_its_name_and_says_when_to_ask_again(tmp_path: Path) -> None:
    for quota in ("queued", "per_minute", "per_day"):
        folder = tmp_path / quota
        folder.mkdir()
        async with shops(folder, Quotas(**{quota: 2})) as both:
            await both.house.worker(hold_at=5)
            await both.other.submit(prompt="a star")  # it holds the worker
            # The first of them begins beside the other's: the worker's turns are shared.
            for number in range(3 if quota == "queued" else 2):
                await both.shop.submit(f"known-{number}", prompt=f"{number} squares")
            refused = await _refused(both.shop)
            assert refused.metadata["quota"] == quota
            assert refused.metadata["most"] == "2"
            assert refused.retry_after_s is not None
            assert refused.retry_after_s > 0
            await both.shop.submit("known-0", prompt="0 squares")  # which is there already
            for _ in range(4):
                await both.other.submit(prompt="a circle")


async def test_days_are_counted_over_restarts_and_pictures_by_their_bytes(tmp_path: Path) -> None:
    async with shops(tmp_path, Quotas(per_day=3)) as both:
        await both.house.worker()
        for number in range(3):
            await both.shop.draw(prompt=f"{number} stars")
        assert (await _refused(both.shop)).metadata["quota"] == "per_day"
    async with shops(tmp_path, Quotas(per_day=3)) as both:
        await both.house.worker()
        assert (await _refused(both.shop)).metadata["quota"] == "per_day"
        await both.other.draw(prompt="a star")
    async with shops(tmp_path, Quotas(per_day=4, stored_bytes=4 * len(b"picture 0"))) as both:
        await both.house.worker()
        await both.shop.draw(prompt="a circle")
        assert (await _refused(both.shop)).metadata["quota"] == "per_day"
    async with shops(tmp_path, Quotas(stored_bytes=4 * len(b"picture 0"))) as both:
        await both.house.worker()
        assert (await _refused(both.shop)).metadata["quota"] == "stored_bytes"
        await both.other.draw(prompt="another star")


async def test_calls_and_streams_of_a_tenant_are_bounded_while_they_are_served(tmp_path: Path) -> None:
    async with shops(tmp_path, Quotas(streams=2, calls=1)) as both:
        await both.house.worker(hold_at=5)
        job_id = (await both.shop.submit(prompt="a star")).job_id
        watching = [both.shop.images.WatchJob(image_pb2.WatchJobRequest(job_id=job_id)) for _ in range(3)]
        ends = [asyncio.create_task(watch.code()) for watch in watching]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        refused = [await end for end in ends if end.done()]
        assert refused == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        for watch in watching:
            watch.cancel()
        await asyncio.gather(*ends)
        assert (await both.shop.job(job_id)).job_id == job_id
        watch = both.shop.images.WatchJob(image_pb2.WatchJobRequest(job_id=job_id))
        assert await watch.read() is not grpc.aio.EOF
        watch.cancel()


async def test_jobs_whose_callers_leave_at_once_count(tmp_path: Path) -> None:
    async with shops(tmp_path, Quotas(per_minute=5)) as at:
        await at.house.worker()
        acknowledged = functools.partial(
            at.house.gateway.server.registry.get_sample_value, "bottega_jobs_acknowledged_total"
        )
        await cancel_at_once(lambda prompt: at.shop.generate(prompt=prompt), 60)
        await eventually(lambda: (acknowledged() or 0) >= 5)
        await asyncio.sleep(0.5)  # whatever is still on its way
        assert acknowledged() == 5
        assert (await _refused(at.shop)).metadata["quota"] == "per_minute"
