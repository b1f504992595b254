"""What of a tenant every job store shows to it alone. Run against each of BACKENDS."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace

import pytest

from bottega.errors import QuotaExceeded
from bottega.gateway.jobs.store import JobFilter, JobRecord, JobStore
from bottega.gateway.jobs.store.quotas import DAY_S
from bottega.gateway.jobs.values import StoredImage
from bottega.rpc.security.tenant_file import Quotas
from tests.support.job_store_backends import answered, failed, record

PICTURE = StoredImage(digest="a" * 64, size_bytes=10, latents="c" * 64, latents_bytes=500)


def _of(tenant: str, job_id: str, *, request_id: str = "") -> JobRecord:
    return replace(record(job_id, request_id=request_id), tenant=tenant)


def _at(created_wall: float, tenant: str, job_id: str, *, request_id: str = "") -> JobRecord:
    return replace(_of(tenant, job_id, request_id=request_id), created_wall=created_wall)


async def test_two_tenants_may_use_one_request_id(store: JobStore) -> None:
    ones = await store.add(_of("one", "j1", request_id="order-1"))
    others = await store.add(_of("other", "j2", request_id="order-1"))
    assert (ones.job_id, others.job_id) == ("j1", "j2")
    assert (await store.add(_of("one", "j3", request_id="order-1"))).job_id == "j1"
    assert await store.of_request("order-1", tenant="one") == ones
    assert await store.of_request("order-1", tenant="other") == others
    assert await store.of_request("order-1") is None, "nobody's"
    await store.update("j1", failed(ended_wall=1.0))
    assert await store.forget(ended_before=5.0, max_jobs=9, max_bytes=1 << 30, limit=9) == 1
    assert await store.of_request("order-1", tenant="one") is None
    assert await store.of_request("order-1", tenant="other") == others


async def test_a_job_is_found_by_its_tenant_alone(store: JobStore) -> None:
    added = await store.add(_of("one", "j1"))
    assert await store.get("j1", tenant="one") == await store.get("j1") == added
    assert await store.get("j1", tenant="other") is None
    assert await store.get("j1", tenant="") is None


async def test_a_page_has_jobs_of_one_tenant(store: JobStore) -> None:
    for number in range(6):
        await store.add(_of("one" if number % 3 else "other", f"j{number}"))
    ones = await store.page(JobFilter(tenant="one"), size=9)
    assert [job.job_id for job in ones] == ["j5", "j4", "j2", "j1"]
    older = await store.page(JobFilter(tenant="one"), size=9, before_sequence=ones[1].sequence)
    assert [job.job_id for job in older] == ["j2", "j1"]
    assert [job.job_id for job in await store.page(JobFilter(tenant="other"), size=9)] == ["j3", "j0"]
    assert await store.page(size=9) == []


async def test_what_is_kept_of_a_picture_counts_as_stored(store: JobStore) -> None:
    await store.add(answered(_of("one", "j1"), ended_wall=5.0, images=(PICTURE, replace(PICTURE, digest="b" * 64))))
    assert (await store.usage("one", now_wall=5.0)).stored_bytes == 1020
    assert await store.forget(ended_before=6.0, max_jobs=9, max_bytes=1 << 30, limit=9) == 1
    assert (await store.usage("one", now_wall=5.0)).stored_bytes == 0


@pytest.mark.parametrize("quotas", [Quotas(queued=2), Quotas(per_minute=2), Quotas(per_day=2), Quotas(stored_bytes=99)])
async def test_a_job_that_would_exceed_a_quota_is_not_added(store: JobStore, quotas: Quotas) -> None:
    at = float(2 * DAY_S + 30)
    first = answered(_at(at, "one", "j1"), ended_wall=at, images=(replace(PICTURE, latents_bytes=90),))
    await store.add(first if quotas.stored_bytes else _at(at - 5, "one", "j1", request_id="r"), quotas=quotas)
    if not quotas.stored_bytes:
        await store.add(_at(at, "one", "j2"), quotas=quotas)
        assert (await store.add(_at(at, "one", "j4", request_id="r"), quotas=quotas)).job_id == "j1", "it is there"
    with pytest.raises(QuotaExceeded) as refused:
        await store.add(_at(at + 1, "one", "j3", request_id="s"), quotas=quotas)
    quota, most = next((name, most) for name, most in asdict(quotas).items() if most)
    assert refused.value.metadata == {"quota": quota, "most": str(most)}
    if quota == "per_minute":
        assert refused.value.retry_after_s == pytest.approx(54.0)
    assert await store.get("j3") is None
    assert await store.of_request("s", tenant="one") is None
    await store.add(_at(at + 1, "other", "j5"), quotas=quotas)
    await store.add(_at(at + 1, "one", "j6"))
    if quotas.per_minute or quotas.per_day:
        later = at + 62 if quotas.per_minute else at + DAY_S
        await store.add(_at(later, "one", "j7"), quotas=quotas)


async def test_no_two_jobs_get_the_last_place_of_a_quota(store: JobStore) -> None:
    adding = [store.add(_at(100.0, "one", f"j{number}"), quotas=Quotas(per_minute=3)) for number in range(12)]
    ends = await asyncio.gather(*adding, return_exceptions=True)
    assert (
        sum(isinstance(end, JobRecord) for end in ends) == len(await store.page(JobFilter(tenant="one"), size=99)) == 3
    )
    assert sum(isinstance(end, QuotaExceeded) for end in ends) == 9


async def test_each_picture_is_known_with_all_its_tenants_and_found_for_each(store: JobStore) -> None:
    for tenant, job_id in (("one", "j1"), ("other", "j2")):
        await store.add(answered(_of(tenant, job_id), ended_wall=5.0, images=(PICTURE,)))
    found = await store.with_kept_picture(PICTURE.digest, tenant="one", limit=9)
    assert [job.job_id for job in found] == ["j1"]
    assert await store.with_kept_picture(PICTURE.digest, limit=9) == []
    await store.add(answered(_of("one", "j3"), ended_wall=5.0, images=(StoredImage(digest="b" * 64, size_bytes=1),)))
    both = {"one", "other"}
    assert await store.contents() == {PICTURE.digest: both, PICTURE.latents: both, "b" * 64: {"one"}}
