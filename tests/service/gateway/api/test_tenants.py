"""Two tenants at one real gateway: neither sees, ends, counts or gets answers from what is the other's."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from bottega import errors, kinds
from bottega.rpc.security.api_keys import new_key
from bottega.rpc.security.tenant_file import change_tenants
from bottega.v1 import image_pb2
from bottega.v1.cache_pb2 import CacheOrder
from bottega.v1.image_pb2 import (
    CancelJobRequest,
    DeleteJobRequest,
    GetImageRequest,
    GetJobRequest,
    GetJobTraceRequest,
    ListAdaptersRequest,
    ListJobsRequest,
    ListModelsRequest,
    WatchJobRequest,
)
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.running_gateway import Running, refusal, running_gateway
from tests.support.tenants import add_tenant, calling
from tests.support.waiting import eventually

STAR: dict[str, Any] = {"prompt": "a star", "seed": 7}


class Shops:
    """A gateway with the tenants one and other. house: without a key."""

    def __init__(self, house: Running, one: Running, other: Running, file: Path) -> None:
        self.house, self.one, self.other, self.file = house, one, other, file


@pytest.fixture
async def shops(tmp_path: Path) -> AsyncIterator[Shops]:
    file = tmp_path / "tenants.json"
    keys = [add_tenant(file, name) for name in ("one", "other")]
    async with running_gateway(tenants=str(file)) as house, contextlib.AsyncExitStack() as stack:
        one, other = [await stack.enter_async_context(calling(house, key)) for key in keys]
        yield Shops(house, one, other, file)


@pytest.fixture
async def worker(shops: Shops) -> ScriptedWorker:
    """Its pictures differ from one request to the next."""
    worker = await shops.house.worker()
    worker.script.picture = lambda index: b"picture %d of request %d" % (index, len(worker.requests))
    return worker


@pytest.fixture
def reads(shops: Shops, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the gateway has read of jobs in its store."""
    found: list[Any] = []
    store = shops.house.gateway._storage.jobs

    def watched(read: Any) -> Any:
        async def watch(*args: Any, **kwargs: Any) -> Any:
            found.append(await read(*args, **kwargs))
            return found[-1]

        return watch

    for name in ("get", "with_result", "of_request"):
        monkeypatch.setattr(store, name, watched(getattr(store, name)))
    return found


async def test_every_call_without_a_good_key_is_refused(shops: Shops) -> None:
    async with calling(shops.house, new_key()[0]) as stranger:
        for caller in (shops.house, stranger):
            for call in _every_call(caller):
                await refusal(call, errors.Unauthenticated)
    assert await shops.house.is_serving(), "whoever asks for health shows no key"


def _every_call(shop: Running) -> list[Callable[[], Any]]:
    of_jobs = [functools.partial(call, "j") for call in _calls(shop)]
    listing = [lambda: shop.listed(), lambda: shop.images.ListModels(ListModelsRequest(), timeout=60)]
    listing.append(lambda: shop.images.ListAdapters(ListAdaptersRequest(), timeout=60))
    return [*of_jobs, *listing, lambda: shop.generate(**STAR), lambda: shop.submit(**STAR)]


async def test_a_job_of_another_is_as_none_in_every_call(
    shops: Shops, worker: ScriptedWorker, reads: list[Any]
) -> None:
    ended = (await shops.one.ended((await shops.one.submit(**STAR)).job_id)).job_id
    worker.script.hold_at = 1
    running = (await shops.one.submit(prompt="a square")).job_id
    reads.clear()
    for call in _calls(shops.other):
        said = set()
        for job_id in (ended, running, "nobody-has-it"):
            refused = await refusal(functools.partial(call, job_id), errors.JobNotFound)
            said.add((type(refused), refused.message, tuple(refused.metadata.items()), refused.retry_after_s))
        assert len(said) == 1, "the same to the last word"
    assert not any(reads), "a record that is read and thrown away takes longer"
    assert (await shops.one.job(running)).state == image_pb2.JOB_STATE_RUNNING
    assert await shops.one.image(ended)
    assert await shops.other.listed() == []
    assert await shops.one.listed() == [running, ended]
    worker.script.hold_at = None


def _calls(shop: Running) -> list[Callable[[str], Any]]:
    return [
        lambda job_id: shop.images.GetJob(GetJobRequest(job_id=job_id), timeout=60),
        lambda job_id: shop.images.WatchJob(WatchJobRequest(job_id=job_id), timeout=60),
        lambda job_id: shop.images.GetImage(GetImageRequest(job_id=job_id), timeout=60),
        lambda job_id: shop.images.GetJobTrace(GetJobTraceRequest(job_id=job_id), timeout=60),
        lambda job_id: shop.images.CancelJob(CancelJobRequest(job_id=job_id), timeout=60),
        lambda job_id: shop.images.DeleteJob(DeleteJobRequest(job_id=job_id), timeout=60),
    ]


async def test_a_request_id_of_another_is_free(shops: Shops, worker: ScriptedWorker) -> None:
    ones = await shops.one.submit("order-1", prompt="a star")
    others = await shops.other.submit("order-1", prompt="a square")
    assert ones.job_id != others.job_id
    assert (await shops.one.submit("order-1", prompt="a star")).job_id == ones.job_id
    await refusal(lambda: shops.one.generate("order-1", prompt="a square"), errors.RequestIdReused)
    assert {(await shops.other.ended(others.job_id)).spec.prompt} == {"a square"}


async def test_identical_requests_are_answered_to_their_tenant_alone(
    shops: Shops, worker: ScriptedWorker, reads: list[Any]
) -> None:
    first = await shops.one.draw(**STAR)
    again = await shops.one.draw(**STAR)
    assert (len(worker.requests), again.images[0].digest) == (1, first.images[0].digest)
    reads.clear()
    others = await shops.other.draw(**STAR)
    assert not any(reads), "which would take longer"
    assert len(worker.requests) == 2, "it is drawn, as if nobody had asked before"
    assert others.provenance.identical_job == ""
    assert others.images[0].digest != first.images[0].digest


async def test_an_attempt_says_whose_it_is_to_caches_and_templates(shops: Shops, worker: ScriptedWorker) -> None:
    await shops.one.draw(prompt="a big red star")
    await shops.other.draw(prompt="a big red star")
    orders = [CacheOrder.FromString(request.addons[kinds.CACHE]) for request in worker.requests]
    assert [order.tenant for order in orders] == ["one", "other"]


async def test_a_page_token_is_its_tenants_alone(shops: Shops, worker: ScriptedWorker) -> None:
    for shop in (shops.one, shops.other):
        for number in range(3):
            await shop.submit(prompt=f"star {number}")
    first = ListJobsRequest(page_size=1)
    tokens = [(await shops.one.images.ListJobs(first, timeout=60)).next_page_token for _ in range(2)]
    assert tokens[0] != tokens[1], "a token tells of nothing, not even that it is the same page"
    for token in tokens:
        stolen = ListJobsRequest(page_token=token)
        await refusal(functools.partial(shops.other.images.ListJobs, stolen, timeout=60), errors.InvalidRequest)
        assert len((await shops.one.images.ListJobs(stolen, timeout=60)).jobs) == 2


async def test_a_rotated_key_ends_while_its_tenants_jobs_stay(shops: Shops, worker: ScriptedWorker) -> None:
    kept = (await shops.one.submit("order-1", prompt="a star")).job_id
    key, parts = new_key()
    change_tenants(
        shops.file,
        lambda tenants: tuple(each.rotated(parts, keep_old=False) if each.name == "one" else each for each in tenants),
    )
    await eventually(lambda: _is_refused(shops.one))
    await refusal(lambda: shops.one.job(kept), errors.Unauthenticated)
    async with calling(shops.house, key) as renewed:
        assert (await renewed.job(kept)).job_id == kept
    assert await shops.other.listed() == []


async def _is_refused(shop: Running) -> bool:
    try:
        await shop.listed()
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNAUTHENTICATED
    return False


async def test_jobs_stay_their_tenants_over_a_restart(tmp_path: Path) -> None:
    file, state = tmp_path / "tenants.json", str(tmp_path / "state")
    keys = [add_tenant(file, name) for name in ("one", "other")]
    async with running_gateway(tenants=str(file), state=state) as house, calling(house, keys[0]) as one:
        await house.worker()
        drawn = (await one.ended((await one.submit("order-1", prompt="a star")).job_id)).job_id
    async with (
        running_gateway(tenants=str(file), state=state) as house,
        calling(house, keys[0]) as one,
        calling(house, keys[1]) as other,
    ):
        assert (await one.submit("order-1", prompt="a star")).job_id == drawn
        await refusal(lambda: other.job(drawn), errors.JobNotFound)
        assert await other.listed() == []
    async with running_gateway(state=state) as open_to_all:
        assert await open_to_all.listed() == [], "without keys it is nobody's"
        await refusal(lambda: open_to_all.job(drawn), errors.JobNotFound)
