"""`bottega jobs migrate` between a SQLite file and a PostgreSQL database, with images in S3."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.clocks import SharedClock
from bottega.errors import ConfigError
from bottega.gateway.jobs.migration import migrate
from bottega.gateway.jobs.store import SqliteJobStore
from bottega.gateway.jobs.store.postgresql import PostgresJobStore
from bottega.gateway.jobs.values import StoredImage
from bottega.storage import ContentStore
from bottega.storage.folders import ProcessLock
from bottega.storage.postgresql import PostgresDatabase
from tests.support.job_store_backends import completed, failed, record, running, sample_event
from tests.support.terminal import run

IMAGE, LATENTS = b"a picture", b"some latents"
# More than the test opens the target.
STARTS = 5
EVICTED = StoredImage(digest="e" * 64, size_bytes=3)


@pytest.fixture
async def state(tmp_path: Path) -> Path:
    """The folder of a gateway that has stopped: ended, replaced and live jobs, an event and an image."""
    folder = tmp_path / "state"
    for _ in range(STARTS):
        store = SqliteJobStore(folder / "jobs.sqlite")
        await store.open()
        await store.close()
    store = SqliteJobStore(folder / "jobs.sqlite")
    await store.open()
    stored = StoredImage(
        digest=_digest(IMAGE), size_bytes=len(IMAGE), latents=_digest(LATENTS), latents_bytes=len(LATENTS)
    )
    await store.add(record("j1", request_id="r"))
    await store.update("j1", failed(ended_wall=2.0))
    await store.add(replace(record("j2", request_id="r"), deadline_steady=None), replaces="j1")
    await store.update("j2", running(1))
    await store.update(
        "j2", completed(1, ended_wall=3.0, images=(stored, EVICTED), result_key="k"), event_of=sample_event
    )
    await store.add(replace(record("j3", request_id="r"), tenant="b"), inputs=b"an image")
    await store.update("j3", running(7))
    await store.add(record("j4"))
    await store.close()
    images = ContentStore(folder / "images", budget_bytes=1000, ttl_s=1000.0)
    await images.open()
    await images.put(_digest(IMAGE), IMAGE)
    await images.put(_digest(LATENTS), LATENTS)
    await images.close()
    return folder


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _files(state: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in state.rglob("*") if path.is_file()}


def _from(state: Path) -> str:
    return f"sqlite:{state / 'jobs.sqlite'}"


async def test_jobs_are_copied_again_and_back_and_the_source_stays_as_it_was(
    state: Path, url: str, tmp_path: Path
) -> None:
    before = _files(state)
    for _ in range(2):
        counts = await migrate(_from(state), url)
        assert counts.equal
        assert (counts.jobs, counts.events, counts.images, counts.different) == (4, 1, 0, [])
    assert _files(state) == before
    store = PostgresJobStore(PostgresDatabase(url, application="bottega test"), clock=SharedClock())
    await store.open()
    assert store.generation > STARTS + 1, "attempts of the gateway have larger numbers than before"
    assert [job.job_id for job in await store.live()] == ["j3", "j4"]
    assert await store.inputs("j3") == b"an image"
    newest = await store.of_request("r")
    assert newest is not None
    assert (newest.job_id, newest.images[1]) == ("j2", EVICTED)
    await store.close()
    back = tmp_path / "back"
    assert (await migrate(url, _from(back))).equal
    old, new = SqliteJobStore(state / "jobs.sqlite"), SqliteJobStore(back / "jobs.sqlite")
    await old.open_to_read()
    await new.open_to_read()
    assert await new.every(after=0, limit=9) == await old.every(after=0, limit=9)
    assert await new.outbox.get("evt_j2") == await old.outbox.get("evt_j2")
    await old.close()
    await new.close()


async def test_images_are_copied_to_a_bucket_and_back(state: Path, url: str, tmp_path: Path, pictures: str) -> None:
    for _ in range(2):
        counts = await migrate(_from(state), url, objects=pictures)
        assert counts.equal
        assert (counts.images, counts.evicted_images) == (2, 1)
    back = tmp_path / "back"
    counts = await migrate(url, _from(back), objects=pictures)
    assert (counts.equal, counts.images, counts.evicted_images) == (True, 2, 1)
    images = ContentStore(back / "images", budget_bytes=1000, ttl_s=1000.0)
    await images.open()
    assert [await images.get(_digest(data)) for data in (IMAGE, LATENTS)] == [IMAGE, LATENTS]
    await images.close()


async def test_jobs_that_went_on_in_the_target_are_named_and_kept(state: Path, url: str) -> None:
    await migrate(_from(state), url)
    store = PostgresJobStore(PostgresDatabase(url, application="bottega test"), clock=SharedClock())
    await store.open()
    await store.update("j4", failed(ended_wall=9.0))
    await store.update("j3", running(8))
    await store.close()
    counts = await migrate(_from(state), url)
    assert not counts.equal
    assert counts.different == ["j4"], "j3 has not ended, and is as in the source again"


async def test_deletions_and_the_counts_of_days_are_copied_there_and_back(
    state: Path, url: str, tmp_path: Path
) -> None:
    await migrate(_from(state), url)
    old = SqliteJobStore(state / "jobs.sqlite")
    await old.open()
    await old.add(record("j5"))
    for job_id in ("j2", "j4", "j5"):
        await old.update(job_id, failed(ended_wall=9.0))
        await old.delete(job_id, steady=9.0)
    await old.close()
    for _ in range(2):
        counts = await migrate(_from(state), url)
        assert (counts.equal, counts.deletions, counts.jobs) == (True, 3, 2)
    back = tmp_path / "back"
    for _ in range(2):
        assert (await migrate(url, _from(back))).equal
    new = PostgresJobStore(PostgresDatabase(url, application="bottega test"), clock=SharedClock())
    for store in (new, SqliteJobStore(back / "jobs.sqlite")):
        await store.open_to_read()
        assert [job.job_id for job in await store.every(after=0, limit=9)] == ["j1", "j3"]
        assert [await store.was_deleted(job_id) for job_id in ("j1", "j2", "j5")] == [False, True, True]
        assert not await store.was_deleted("j2", tenant="b")
        assert [(await store.usage(tenant, now_wall=9.0)).jobs_today for tenant in ("", "b")] == [4, 1]
        await store.close()


async def test_running_gateways_are_refused(state: Path, url: str) -> None:
    lock = ProcessLock(state / "images")
    lock.acquire()
    with pytest.raises(ConfigError, match="stop the gateway first"):
        await migrate(_from(state), url)
    lock.release()
    store = PostgresJobStore(PostgresDatabase(url, application="bottega gateway gateway-2"), clock=SharedClock())
    await store.open()
    with pytest.raises(ConfigError, match="stop the gateways first: gateway-2"):
        await migrate(_from(state), url)
    await store.close()
    cache = PostgresDatabase(url, application="bottega cache")
    await cache.open()
    assert (await migrate(_from(state), url)).equal, "only gateways use the tables of jobs"
    await cache.close()


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ("sqlite:nowhere/jobs.sqlite", "postgresql://h/x", "no file"),
        ("sqlite:a", "sqlite:b", "one of --from and --to"),
        ("mysql://h/x", "postgresql://h/x", "not a job store"),
        ("postgresql://u:hush@h/x", "sqlite:a", "PGPASSFILE"),
        ("postgresql://u@h/x?password=hush", "sqlite:a", "PGPASSFILE"),
    ],
)
async def test_wrong_addresses_are_refused(source: str, target: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        await migrate(source, target)
    assert "hush" not in raised.value.message


async def test_the_command_says_which_server_cannot_be_reached_and_why(state: Path) -> None:
    arguments = ("jobs", "migrate", "--from", _from(state), "--to", "postgresql://b@127.0.0.1:1/b")
    said = (await asyncio.to_thread(run, *arguments)).output
    assert "PostgreSQL cannot be reached: 127.0.0.1:1/b: connection failed" in said
    assert "repeat the command" in said
