"""Tenants in PostgreSQL: all gateways with the database know them, follow their changes, and outlive its outages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest

from bottega.errors import ConfigError, QuotaExceeded, Unavailable
from bottega.gateway.jobs.store.postgresql_schema import COMPONENT, MIGRATIONS
from bottega.gateway.tenants import database
from bottega.rpc.security.tenant_file import Quotas, Tenant, read_tenants
from bottega.rpc.security.tenant_table import change_table, read_table
from bottega.storage.postgresql import PostgresDatabase
from bottega.v1 import image_pb2
from tests.support.postgresql import PASSWORD, execute, new_database, running_server, shared_server
from tests.support.running_gateway import Running, refusal, running_gateway
from tests.support.tenants import calling
from tests.support.terminal import run
from tests.support.waiting import eventually


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A database whose password commands get as operators give it."""
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    with new_database() as url:
        yield url.replace(f":{PASSWORD}@", "@")


async def _command(*words: object) -> str:
    """Run `bottega tenants` and return what it prints on stdout."""
    done = await asyncio.to_thread(run, "tenants", *words)
    assert done.exit_code == 0, done.output
    return done.stdout.strip()


async def _is_known(house: Running, key: str) -> bool:
    try:
        async with calling(house, key) as caller:
            await caller.images.ListJobs(image_pb2.ListJobsRequest(), timeout=20)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            raise
        return False
    return True


@contextlib.asynccontextmanager
async def _two_gateways(url: str, pictures: str) -> AsyncIterator[tuple[Running, Running]]:
    both: dict[str, Any] = {"jobs": url, "tenants": url, "objects": pictures}
    async with running_gateway(name="a", **both) as first, running_gateway(name="b", **both) as second:
        yield first, second


async def test_every_gateway_follows_a_change_of_the_tenants(
    url: str, pictures: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(database, "_LOOK_S", 600.0)  # by notifications alone
    caplog.set_level(logging.DEBUG, logger="bottega")
    old = await _command("add", "shop", "--file", url)
    async with _two_gateways(url, pictures) as gateways:
        for house in gateways:
            assert await _is_known(house, old)
        new = await _command("rotate", "shop", "--file", url)
        for house in gateways:
            await eventually(lambda house=house: _is_known(house, new))  # type: ignore[misc]
            assert not await _is_known(house, old)
        await _command("quota", "shop", "--per-minute", 1, "--file", url)
        await eventually(lambda: all(house.gateway._terms.quotas("shop").per_minute for house in gateways))
        await gateways[0].worker()
        async with calling(gateways[0], new) as shop:
            await shop.submit(prompt="a star")
            assert (await refusal(lambda: shop.submit(prompt="a star"), QuotaExceeded)).metadata["most"] == "1"
        await _command("disable", "shop", "--file", url)
        for house in gateways:
            await eventually(lambda house=house: _is_not_known(house, new))  # type: ignore[misc]
    rows = str(execute(url, "SELECT document FROM tenants"))
    for key in (old, new):
        assert key.rpartition("_")[2][16:] not in rows + caplog.text, "its secret part"
        assert key not in rows + caplog.text


async def _is_not_known(house: Running, key: str) -> bool:
    return not await _is_known(house, key)


async def test_a_change_without_a_notification_is_found(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "_LOOK_S", 0.05)
    key = await _command("add", "shop", "--file", url)
    async with running_gateway(tenants=url) as house:
        execute(url, "UPDATE tenants SET document = jsonb_set(document, '{disabled}', 'true'), revision = DEFAULT")
        await eventually(lambda: _is_not_known(house, key))


async def test_tenants_stay_valid_while_the_database_is_away_but_not_for_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    monkeypatch.setattr(database, "_LOOK_S", 0.05)
    with running_server() as server:
        url = server.url(server.new_database()).replace(f":{PASSWORD}@", "@")
        key = await _command("add", "shop", "--file", url)
        async with running_gateway(tenants=url) as house:
            await asyncio.to_thread(server.stop)
            await eventually(lambda: not house.gateway._terms._readable)  # type: ignore[attr-defined]
            assert await _is_known(house, key)
            monkeypatch.setattr(database, "_VALID_S", 0.0)
            async with calling(house, key) as shop:
                listing = image_pb2.ListJobsRequest()
                refused = await refusal(lambda: shop.images.ListJobs(listing, timeout=20), Unavailable)
                assert "still valid" in refused.message
            await eventually(lambda: "calls of tenants are refused" in caplog.text)
            await eventually(lambda: house.gateway.server._serving is False)
            monkeypatch.setattr(database, "_VALID_S", 60.0)
            await asyncio.to_thread(server.start)
            new = await _command("rotate", "shop", "--file", url)
            await eventually(lambda: _is_known(house, new))
            await eventually(lambda: house.gateway.server._serving is True)


async def test_each_user_of_a_database_is_told_what_to_grant(url: str) -> None:
    server, name = shared_server(), urlsplit(url).path[1:]
    for user in ("keeper", "jobs", "gateway"):
        server.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{PASSWORD}'")
    urls = {user: server.url(name, user=user, port=server.port) for user in ("keeper", "jobs", "gateway")}

    async def granted(text: str) -> None:
        await asyncio.to_thread(server.execute, text, name)

    async def add() -> str:
        return await _command("add", "shop", "--file", urls["keeper"])

    async def make_tables() -> None:
        jobs = PostgresDatabase(urls["jobs"], application="bottega test")
        try:
            await jobs.open()
            await jobs.migrate(COMPONENT, MIGRATIONS)
        finally:
            await jobs.close()

    with pytest.raises(AssertionError, match=r'GRANT CREATE ON SCHEMA public TO "keeper"'):
        await add()
    await granted("GRANT CREATE ON SCHEMA public TO keeper, jobs")
    key = await add()
    with pytest.raises(ConfigError, match=r'GRANT SELECT, INSERT ON bottega_migrations TO "jobs"'):
        await make_tables()
    await granted("GRANT SELECT, INSERT ON bottega_migrations TO jobs")
    await make_tables()
    for table in ("bottega_migrations", "tenants"):
        with pytest.raises(ConfigError, match=f'GRANT SELECT ON {table} TO "gateway"'):
            async with running_gateway(tenants=urls["gateway"]):
                pass
        await granted(f"GRANT SELECT ON {table} TO gateway")
    async with running_gateway(tenants=urls["gateway"]) as house:
        assert await _is_known(house, key)


async def test_a_gateway_that_would_not_know_the_tenants_of_its_jobs_does_not_start(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tenants.json"
    with pytest.raises(ConfigError, match="bottega tenants add NAME"):
        async with running_gateway(tenants=url):
            pass
    key = await _command("add", "shop", "--file", file)
    async with running_gateway(jobs=url, tenants=str(file)) as house:
        assert await _is_known(house, key)
    assert "bottega tenants import FILE" in caplog.text
    await _command("add", "shop", "--file", url)
    for own in ("", str(file)):
        with pytest.raises(ConfigError, match="has tenants, which this gateway would not know"):
            async with running_gateway(jobs=url, tenants=own):
                pass


def test_tenants_move_from_a_file_to_a_database_and_back(url: str, tmp_path: Path) -> None:
    file, other = tmp_path / "tenants.json", tmp_path / "other.json"
    for name in ("shop", "press"):
        assert run("tenants", "add", name, "--file", file).exit_code == 0
    run("tenants", "quota", "shop", "--per-day", "5", "--file", file)
    run("tenants", "webhook", "shop", "--url", "https://shop.example/hooks", "--file", file)
    first = run("tenants", "import", file, "--file", url)
    assert "2 of 2 tenants were copied" in first.stdout
    run("tenants", "weight", "press", "3", "--file", url)
    again = run("tenants", "import", file, "--file", url)
    assert "0 of 2 tenants were copied" in again.stdout
    assert "press, shop" in again.output
    press, shop = read_table(url)
    assert (press.weight, shop.quotas) == (3.0, Quotas(per_day=5))
    assert {replace(press, weight=1.0), shop} == set(read_tenants(file))
    assert run("tenants", "import", url, "--file", other).exit_code == 0
    assert read_tenants(other) == (press, shop)
    assert "shop" in run("tenants", "--file", url).output


def test_a_wrong_change_of_the_tenants_in_a_database_changes_nothing(url: str) -> None:
    change_table(url, lambda _: (Tenant(name="shop"),))
    with pytest.raises(ConfigError):
        change_table(url, lambda tenants: (*tenants, Tenant(name="bank"), replace(tenants[0], weight=0.0)))
    assert read_table(url) == (Tenant(name="shop"),)
    change_table(url, lambda _: ())
    assert read_table(url) == ()
    assert run("tenants", "rotate", "shop", "--file", url).exit_code == 2
    shown = run("tenants", "list", "--file", url.replace("postgres@", "postgres:secret@"))
    assert isinstance(shown.exception, ConfigError) or shown.exit_code
    assert "secret" not in shown.output
    assert "PGPASSWORD" in shown.output + str(shown.exception)
