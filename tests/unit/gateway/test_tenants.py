"""Quotas are checked before a job is accepted, and callers are known by the keys in the file of tenants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import ConfigError, InvalidRequest, QuotaExceeded, Unauthenticated
from bottega.gateway.jobs.store import TenantUsage
from bottega.gateway.tenants import QuotaLedger, TenantAuthenticator, TenantTerms
from bottega.rpc.security.api_keys import bearer, new_key
from bottega.rpc.security.caller import Caller, Role
from bottega.rpc.security.tenant_file import UNBOUNDED, Quotas, Tenant, change_tenants
from tests.fakes.fake_time import FakeTime

SHOP = Caller(role=Role.TENANT, name="shop", tenant="shop")


class Terms(TenantTerms):
    """Terms of a file with one tenant."""

    def __init__(self, quotas: Quotas) -> None:
        self._shop = quotas

    def quotas(self, tenant: str) -> Quotas:
        return self._shop if tenant == "shop" else UNBOUNDED


class Shop:
    """A ledger, what it is told waits and is stored, and how often the store was asked."""

    def __init__(self, quotas: Quotas) -> None:
        self.time = FakeTime()
        self.waiting, self.usage, self.asked = 0, TenantUsage(), 0
        self.ledger = QuotaLedger(
            terms=Terms(quotas),
            waiting=lambda tenant: self.waiting if tenant == "shop" else 0,
            usage=self._usage,
            retry_s=lambda: 7.0,
            clock=self.time.clock(),
        )

    async def _usage(self, tenant: str) -> TenantUsage:
        self.asked += 1
        return self.usage if tenant == "shop" else TenantUsage()

    async def begin(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        async with self.ledger.admitting("shop") as place:
            meanwhile()
            place.count()

    async def refused(self) -> QuotaExceeded:
        with pytest.raises(QuotaExceeded) as refused:
            await self.begin()
        return refused.value


async def test_without_quotas_nothing_is_asked_nor_kept() -> None:
    shop = Shop(UNBOUNDED)
    shop.waiting = 10**6
    for _ in range(100):
        await shop.begin()
    assert shop.asked == 0
    assert not shop.ledger._begun


async def test_jobs_that_wait_are_bounded_and_the_refusal_says_by_what_and_until_when() -> None:
    shop = Shop(Quotas(queued=3))
    shop.waiting = 2
    await shop.begin()
    shop.waiting = 3
    error = await shop.refused()
    assert error.metadata == {"quota": "queued", "most": "3"}
    assert error.retry_after_s == 7.0
    assert "quota queued is used up: at most 3 jobs may wait" in error.message


async def test_a_minute_counts_from_the_first_of_its_jobs() -> None:
    shop = Shop(Quotas(per_minute=2))
    await shop.begin()
    shop.time.now += 50
    await shop.begin()
    error = await shop.refused()
    assert error.metadata["quota"] == "per_minute"
    assert error.retry_after_s == pytest.approx(10.0)
    shop.time.now += 10.5
    await shop.begin()
    assert (await shop.refused()).retry_after_s == pytest.approx(49.5)
    shop.time.now += 1000
    await shop.begin()
    assert len(shop.ledger._begun["shop"]) == 1, "what is over is not kept"


async def test_what_fails_does_not_count() -> None:
    shop = Shop(Quotas(per_minute=1))

    def fail() -> None:
        raise InvalidRequest("no")

    for _ in range(3):
        with pytest.raises(InvalidRequest):
            await shop.begin(fail)
    await shop.begin()
    await shop.refused()


async def test_days_and_stored_bytes_are_what_the_store_says() -> None:
    shop = Shop(Quotas(per_day=5, stored_bytes=1000))
    shop.usage = TenantUsage(jobs_today=4, stored_bytes=999)
    await shop.begin()
    shop.usage = TenantUsage(jobs_today=5, stored_bytes=999)
    error = await shop.refused()
    assert error.metadata == {"quota": "per_day", "most": "5"}
    assert error.retry_after_s == pytest.approx(86_400 - shop.time.clock().wall() % 86_400)
    shop.usage = TenantUsage(jobs_today=4, stored_bytes=1000)
    assert (await shop.refused()).metadata["quota"] == "stored_bytes"


@pytest.mark.parametrize("quotas", [Quotas(queued=1), Quotas(per_minute=1), Quotas(per_day=1)])
async def test_of_those_that_come_at_once_no_more_get_in(quotas: Quotas) -> None:
    shop = Shop(quotas)

    async def begin() -> bool:
        try:
            async with shop.ledger.admitting("shop"):
                await asyncio.sleep(0.01)
        except QuotaExceeded:
            return False
        return True

    assert sum(await asyncio.gather(*(begin() for _ in range(20)))) <= 1
    assert not shop.ledger._admitting


async def test_a_job_that_is_stored_after_its_caller_has_left_has_its_place_until_then() -> None:
    shop = Shop(Quotas(per_minute=1))
    storing = contextlib.ExitStack()

    async def leave() -> None:
        async with shop.ledger.admitting("shop") as place:
            storing.callback(place.count)
            storing.enter_context(place.held())
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await leave()
    assert (await shop.refused()).metadata["quota"] == "per_minute"
    storing.close()
    assert (await shop.refused()).metadata["quota"] == "per_minute"
    assert not shop.ledger._admitting


def _write(file: Path, *, disabled: bool = False) -> str:
    key, parts = new_key()
    change_tenants(file, lambda _: (Tenant(name="shop", disabled=disabled).rotated(parts, keep_old=False),))
    return key


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tenants.json"


async def test_whatever_is_wrong_with_a_key_is_said_in_the_same_words(file: Path) -> None:
    key = _write(file)
    known = TenantAuthenticator(file, FakeTime().clock())
    said = set()
    for wrong in (new_key()[0], key[:-1] + ("1" if key[-1] == "0" else "0"), "nonsense", key + "0"):
        with pytest.raises(Unauthenticated) as refused:
            await known.authenticate((), [bearer(wrong)])
        said.add(refused.value.message)
        assert wrong not in refused.value.message
    assert len(said) == 1
    with pytest.raises(Unauthenticated, match="BOTTEGA_API_KEY"):
        await known.authenticate((), [])


async def test_it_knows_the_weights_of_tenants_as_they_are_now(file: Path) -> None:
    key, time = _write(file), FakeTime()
    known = TenantAuthenticator(file, time.clock())
    assert (known.weight("shop"), known.weight("nobody")) == (1.0, 1.0)
    change_tenants(file, lambda tenants: tuple(replace(tenant, weight=3.0) for tenant in tenants))
    time.now += 2.0
    await known.authenticate((), [bearer(key)])
    assert known.weight("shop") == 3.0


async def test_a_disabled_tenant_is_refused(file: Path) -> None:
    key = _write(file, disabled=True)
    with pytest.raises(Unauthenticated):
        await TenantAuthenticator(file, FakeTime().clock()).authenticate((), [bearer(key)])


async def test_a_rotated_key_ends_within_a_second(file: Path) -> None:
    time = FakeTime()
    old = _write(file)
    known = TenantAuthenticator(file, time.clock())
    new = _write(file)
    time.now += 1.0
    with pytest.raises(Unauthenticated):
        await known.authenticate((), [bearer(old)])
    assert await known.authenticate((), [bearer(new)]) == SHOP


async def test_a_file_that_breaks_later_changes_nothing(file: Path) -> None:
    time = FakeTime()
    key = _write(file)
    known = TenantAuthenticator(file, time.clock())
    for spoil in (lambda: file.write_text("{"), lambda: file.chmod(0o644), file.unlink):
        spoil()
        time.now += 1.0
        assert await known.authenticate((), [bearer(key)]) == SHOP
        with pytest.raises(Unauthenticated):
            await known.authenticate((), [bearer(new_key()[0])])


def test_a_gateway_does_not_start_without_its_file(file: Path) -> None:
    with pytest.raises(ConfigError, match="bottega tenants add"):
        TenantAuthenticator(file, FakeTime().clock())
