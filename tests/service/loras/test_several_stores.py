"""LoRA stores that share a catalogue in PostgreSQL and files in S3: each serves what another one has imported."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bottega.addons.loras.wire.canonical import CanonicalLora
from bottega.errors import BottegaError, ConfigError, LoraInUse, LoraNotFound, StorageUnavailable
from bottega.loras import store as store_module
from bottega.loras.__main__ import build
from bottega.loras.config import LoraConfig
from bottega.v1 import lora_pb2 as pb
from tests.support.postgresql import PASSWORD, new_database, shared_server
from tests.support.running_loras import (
    PATIENCE_S,
    Running,
    config,
    lora_file,
    refused,
    running,
    served,
    upload_requests,
)
from tests.support.waiting import eventually


@pytest.fixture
def settings(bucket: str) -> Iterator[LoraConfig]:
    with new_database() as url:
        yield config(objects=f"s3://{bucket}/loras", database=url)


@contextlib.asynccontextmanager
async def _two(folder: Path, settings: LoraConfig) -> AsyncIterator[tuple[Running, Running]]:
    async with running(folder / "one", settings) as one, running(folder / "two", settings) as two:
        yield one, two


async def _names(store: Running) -> list[str]:
    return [lora.name for lora in (await store.call("ListLoras")).loras]


async def test_all_stores_serve_what_one_has_imported_and_its_loss_loses_nothing(
    tmp_path: Path, settings: LoraConfig
) -> None:
    async with _two(tmp_path, settings) as (one, two):
        lora = await one.upload("ink@shop", lora_file(tmp_path), trigger_words=["in ink"])
        found = (await two.call("GetLora", name="ink@shop")).lora
        assert (found.digest, list(found.trigger_words)) == (lora.digest, ["in ink"])
        assert await served(two, lora.digest)
        assert (await two.call("PrefetchLoras", digests=[lora.digest])).accepted == [lora.digest]
    shutil.rmtree(tmp_path / "one")
    shutil.rmtree(tmp_path / "two")
    async with running(tmp_path / "three", settings) as three:
        assert (await three.call("GetLora", name="ink@shop")).lora == found
        assert (await three.call("PrefetchLoras", digests=[lora.digest])).accepted == [lora.digest]
        assert await served(three, lora.digest)
        assert not (await three.call("ListQuarantine")).loras


async def test_a_lora_that_a_job_needs_is_deleted_at_no_store(tmp_path: Path, settings: LoraConfig) -> None:
    async with _two(tmp_path, settings) as (one, two):
        lora = await one.upload("a", lora_file(tmp_path))
        for store in (one, two):  # gateways tell all stores which LoRAs jobs need
            await store.call("PrefetchLoras", digests=[lora.digest], only_keep=True)
        for store in (one, two):
            assert isinstance(await refused(store.call("DeleteLora", name="a")), LoraInUse)
        two.store._needed_until.clear()
        await two.call("DeleteLora", name="a")
        assert await _names(one) == []
        assert isinstance(await refused(one.call("GetLora", name="a")), LoraNotFound)


async def test_a_deletion_waits_for_the_import_of_the_same_weights_at_another_store(
    tmp_path: Path, settings: LoraConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _two(tmp_path, settings) as (one, two):
        await one.upload("a", lora_file(tmp_path))
        adopt, adopted, go = two.store._files.adopt, threading.Event(), threading.Event()

        def adopt_slowly(spool: Path) -> tuple[str, CanonicalLora]:
            made = adopt(spool)
            adopted.set()
            assert go.wait(PATIENCE_S)
            return made

        monkeypatch.setattr(two.store._files, "adopt", adopt_slowly)
        importing = asyncio.create_task(two.upload("b", lora_file(tmp_path)))
        assert await asyncio.to_thread(adopted.wait, PATIENCE_S)
        deleting = asyncio.create_task(one.call("DeleteLora", name="a"))
        await asyncio.wait([deleting], timeout=0.5)  # it would be done by now
        go.set()
        digest = (await importing).digest
        await deleting
        assert await _names(one) == ["b"]
    async with running(tmp_path / "three", settings) as three:
        assert await served(three, digest)
        assert not (await three.call("ListQuarantine")).loras


async def test_what_one_store_has_restored_is_not_discarded_at_another(tmp_path: Path, settings: LoraConfig) -> None:
    async with _two(tmp_path, settings) as (one, two):
        lora = await one.upload("a", lora_file(tmp_path))
        await one.store.catalogue.remove("a")
        await two.store.recovery.reconcile()
        (found,) = (await two.call("ListQuarantine")).loras
        await one.store.recovery.reconcile()
        await one.call("RestoreLora", id=found.id)
        assert isinstance(await refused(two.call("DiscardLora", id=found.id)), LoraNotFound)
        assert await served(two, lora.digest)


async def test_a_pin_at_one_store_loads_the_lora_at_the_others(
    tmp_path: Path, settings: LoraConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_FOLLOW_S", 0.05)
    async with _two(tmp_path, settings) as (one, two):
        await one.upload("a", lora_file(tmp_path))
        await one.call("PinLora", name="a", pinned=True)

        async def is_loaded() -> bool:
            lora: pb.StoredLora = (await two.call("GetLora", name="a")).lora
            return lora.state == pb.LORA_STATE_IN_MEMORY

        await eventually(is_loaded)


async def test_while_the_database_is_away_loras_are_served_and_none_is_changed(
    tmp_path: Path, settings: LoraConfig
) -> None:
    server, database = shared_server(), settings.database.partition("@/")[2].partition("?")[0]
    async with running(tmp_path / "store", settings) as store:
        lora = await store.upload("a", lora_file(tmp_path))
        server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
        server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")
        other = lora_file(tmp_path, seed=1).read_bytes()
        calls = (
            store.stub.UploadLora(upload_requests("b", other), timeout=PATIENCE_S),
            store.call("DeleteLora", name="a"),
            store.call("ListLoras"),
        )
        for error in await asyncio.gather(*map(refused, calls)):
            assert isinstance(error, StorageUnavailable)
        assert await served(store, lora.digest)
        server.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")

        async def is_back() -> bool:
            with contextlib.suppress(BottegaError):
                await store.store.catalogue.all()
                return True
            return False

        await eventually(is_back)
        await store.stub.UploadLora(upload_requests("b", other), timeout=PATIENCE_S)
        assert await _names(store) == ["a", "b"]


async def test_a_catalogue_that_cannot_be_used_is_a_clear_error_without_the_password(
    tmp_path: Path, bucket: str
) -> None:
    server = shared_server()
    wrong = {
        "mysql://somewhere/loras": "postgresql://",
        server.url("no_such_database", password=PASSWORD): 'database "no_such_database" does not exist',
        server.url("postgres", password="falsch-geraten"): "password authentication failed",
    }
    for url, text in wrong.items():
        with pytest.raises(ConfigError, match=text) as raised:
            async with running(tmp_path / "store", config(objects=f"s3://{bucket}/loras", database=url)):
                pass
        assert PASSWORD not in str(raised.value)
        assert "falsch" not in str(raised.value)
    with pytest.raises(ConfigError, match="set objects"):
        build(config(database="postgresql://x/y"), tmp_path)
