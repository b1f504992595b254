"""Caches that share their entries in PostgreSQL and S3: who answers for which, and what a lost cache or store costs."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.addons.cache.placement import placement_key
from bottega.addons.interface.store_link import rank_stores
from bottega.blobstore.records import RecordChanges
from bottega.cache import shared_entries, shared_records
from bottega.cache.__main__ import build
from bottega.cache.profiles import check_configured
from bottega.cache.records import FILE_NAMES
from bottega.cache.store import writer
from bottega.cache.store.store import LatentStore
from bottega.errors import ConfigError, StorageUnavailable
from bottega.storage import BlobFiles
from bottega.storage.objects import s3_location
from bottega.storage.s3 import S3Objects
from bottega.v1 import cache_pb2 as pb
from tests.support import s3
from tests.support.cached_latents import (
    KEY,
    PICTURE_BYTES,
    RECORDED,
    WAIT_S,
    latent,
    profile,
    question,
    record,
    room,
    vector,
    written,
)
from tests.support.postgresql import PASSWORD, new_database, running_server, shared_server
from tests.support.running_cache import config
from tests.support.shared_caches import Group
from tests.support.waiting import wait_until

SEEDS = range(12)


@pytest.fixture
def server(s3_servers: s3.S3Servers, monkeypatch: pytest.MonkeyPatch) -> s3.S3Server:
    server = s3_servers.get("nanio")
    s3.set_environment(monkeypatch, server.url)
    return server


@pytest.fixture
def group(tmp_path: Path, server: s3.S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    monkeypatch.setattr(shared_entries, "_SIGN_S", 0.1)
    with new_database(vector=True) as url:
        yield Group(url=url, objects=f"s3://{server.bucket()}/cache", folder=tmp_path)


def _prompts(store: LatentStore) -> set[str]:
    return {entry.parameters.prompt for entry in store.entries("", 500)}


def _share(name: str, *names: str) -> set[str]:
    """Prompts for which a cache answers, if these are the living ones."""
    first = {seed: rank_stores(names, placement_key(KEY, vector(seed)))[0] for seed in SEEDS}
    return {f"prompt {seed}" for seed, cache in first.items() if cache == name}


def _fill(store: LatentStore) -> None:
    for seed in SEEDS:
        record(store, vector(seed), seed=seed)
    written(store)


def _serves(store: LatentStore, seed: int) -> bool:
    answer = store.ask(question(), vector(seed))
    for start, found in zip(answer.header.hits, answer.latents, strict=True):
        assert found.data == latent(seed, start.step).data, "a latent is another"
    return bool(answer.latents)


def _lose(group: Group, name: str) -> None:
    """Let a cache's registration be so old that the cache counts as gone."""
    seen = f"UPDATE bottega_caches SET seen = now() - interval '1 hour' WHERE name = '{name}'"
    shared_server(vector=True).execute(seen, group.url_name)


def test_a_cache_that_joins_takes_its_share_and_one_that_is_gone_leaves_it(group: Group) -> None:
    with group.running("one") as one:
        _fill(one)
        with group.running("two") as two:
            assert _prompts(two) == _share("two", "one", "two"), "at once"
            wait_until(lambda: _prompts(one) == _share("one", "one", "two"), "its share to leave the other one")
            assert all(_serves(two, int(prompt.split()[1])) for prompt in _prompts(two))
            assert one.statistics().evictions == 0
            assert (one.statistics().sharing, two.statistics().sharing) == (2, 2)
            for name, store in (("one", one), ("two", two)):
                store.set_caches(name, frozenset({"one", "two"}))
                assert store.statistics().elsewhere == 0
        _lose(group, "two")
        wait_until(lambda: _prompts(one) == {f"prompt {seed}" for seed in SEEDS}, "the share of the lost cache")
        assert all(_serves(one, seed) for seed in SEEDS)
        assert one.statistics().damaged == 0


def test_a_cache_on_another_host_finds_its_entries_at_once(group: Group, server: s3.S3Server) -> None:
    with group.running("one", "first host") as one:
        _fill(one)
        before = server.keys(group.objects.split("/")[2])
    with group.running("one", "second host", measured=False) as one:
        assert one.profiles() == [profile()]
        assert len(_prompts(one)) == len(SEEDS)
        assert all(_serves(one, seed) for seed in SEEDS)
    assert server.keys(group.objects.split("/")[2]) == before


def test_a_profile_is_that_of_all_caches(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_TICKS_BETWEEN_PROFILES", 1)
    with group.running("one") as one, group.running("two") as two:
        first, second = profile(), profile(words=9)
        assert two.profiles() == [first], "of the first one"
        two.set_profile(second)
        wait_until(lambda: one.profiles() == [second], "the new one")
        one.set_profile(pb.CacheProfile(model_hash=first.model_hash))
        wait_until(lambda: not two.profiles(), "its deletion")


def test_a_name_belongs_to_one_living_cache(group: Group, caplog: pytest.LogCaptureFixture) -> None:
    with group.running("one", "first") as first:
        _fill(first)
        with group.running("one", "second") as second:
            assert "another cache with these objects is named one" in second.statistics().trouble
            assert not second.statistics().models
            assert not first.statistics().trouble
    assert [line for line in caplog.records if "records nothing" in line.message]


def test_what_a_cache_writes_after_it_lost_its_name_or_entries_has_no_effect(group: Group, server: s3.S3Server) -> None:
    with group.running("one", "first") as first:
        _fill(first)
    stale, index = group.entries("one", "first")
    try:
        stale.lock()
        stale.open()
        numbers = set(_numbers(group))
        shared_server(vector=True).execute("UPDATE bottega_caches SET id = 'another'", group.url_name)
        with pytest.raises(StorageUnavailable, match="another cache has taken this one's name"):
            stale.tidy(RecordChanges(gone=set(numbers)))
        shared_server(vector=True).execute(
            "UPDATE bottega_caches SET id = 'first'; UPDATE bottega_cache_entries SET owner = 'two'", group.url_name
        )
        keys = server.keys(group.objects.split("/")[2])
        stale.discard(key.rpartition("/")[2] for key in keys if "/owner/" not in key)
        stale.tidy(RecordChanges(gone=set(numbers), gone_parts={(number, 5) for number in numbers}))
        assert set(_numbers(group)) == numbers
        assert server.keys(group.objects.split("/")[2]) == keys
    finally:
        stale.close()
        stale.unlock()
        index.close()
    with group.running("two", "another") as two:
        assert all(_serves(two, seed) for seed in SEEDS)


def _numbers(group: Group) -> list[int]:
    return [
        number
        for (number,) in shared_server(vector=True).execute("SELECT number FROM bottega_cache_entries", group.url_name)
    ]


def test_a_cache_that_was_thought_to_be_gone_reads_its_entries_again(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with group.running("one") as one:
        _fill(one)
        deleted = f"DELETE FROM bottega_cache_entries WHERE number = {min(_numbers(group))}"
        shared_server(vector=True).execute(deleted, group.url_name)
        _lose(group, "one")
        wait_until(
            lambda: any("did not renew its registration" in getattr(line, "text", "") for line in caplog.records),
            "a word",
        )
        wait_until(lambda: not one.statistics().trouble, "the end of it")
        assert len(_prompts(one)) == len(SEEDS) - 1, "one was deleted meanwhile"
        assert sum(_serves(one, seed) for seed in SEEDS) == len(SEEDS) - 1


def test_evicted_latents_are_deleted_and_the_budget_is_one_for_all_caches(group: Group, server: s3.S3Server) -> None:
    budget = room(40, 40)

    def keys() -> list[str]:
        return server.keys(group.objects.split("/")[2])

    with (
        group.running("one", budget_bytes=budget, batch_share=0.0) as one,
        group.running("two", budget_bytes=budget, batch_share=0.0) as two,
    ):
        stores = {"one": one, "two": two}
        for seed in SEEDS:
            name = rank_stores(stores, placement_key(KEY, vector(seed)))[0]
            record(stores[name], vector(seed), seed=seed)
            written(stores[name])
        wait_until(lambda: sum(store.statistics().bytes for store in stores.values()) <= budget, "the budget")
        for store in stores.values():
            written(store)
        figures = [store.statistics() for store in stores.values()]
        latents = sum(model.latents for figure in figures for model in figure.models)
        assert sum(figure.evictions for figure in figures) == len(SEEDS) * len(RECORDED) - latents > 0
        wait_until(lambda: sum("@" in key for key in keys()) == latents, "the objects to go")
        assert sum(figure.bytes for figure in figures) > budget - room(1, 1) * 6 - PICTURE_BYTES


def test_objects_without_a_record_are_deleted_when_they_are_old(
    group: Group, server: s3.S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_entries, "_SEARCH_S", 0.0)
    monkeypatch.setattr(shared_entries, "_SHARDS", ["ab", "cd"])
    bucket = group.objects.split("/")[2]
    orphan, foreign = f"cache/ab/{'ab' * 16}@5", "cache/ab/abcd.json"
    for key in (orphan, foreign):
        server.put(bucket, key, b"left")
    with group.running("one") as one:
        _fill(one)
        before = set(server.keys(bucket))
        monkeypatch.setattr(shared_entries, "_ORPHAN_S", -1.0)
        wait_until(lambda: orphan not in server.keys(bucket), "its deletion")
        assert before - set(server.keys(bucket)) == {orphan}
        assert all(_serves(one, seed) for seed in SEEDS)


def _files(
    folder: Path, kind: type[BlobFiles] = BlobFiles, local_bytes: int = 1 << 20
) -> shared_entries.FilesInObjects:
    """Objects of this kind in a folder, and copies of them in another one."""
    objects, tier = kind(folder / "objects", names=FILE_NAMES), BlobFiles(folder / "tier", names=FILE_NAMES)
    objects.clear()
    return shared_entries.FilesInObjects(objects, tier, reading=objects, local_bytes=local_bytes)


def test_writes_that_hang_do_not_delay_reads(tmp_path: Path) -> None:
    begun, released = threading.Semaphore(0), threading.Event()

    class Hanging(BlobFiles):
        def write(self, name: str, data: bytes, *, time: float | None = None) -> None:
            begun.release()
            assert released.wait(WAIT_S)

    files = _files(tmp_path, Hanging)
    name, data = f"{0:032x}@5", b"data"
    BlobFiles(tmp_path / "objects", names=FILE_NAMES).write(name, data)
    files.open()
    writing = threading.Thread(target=files.write, args=({f"{number:032x}@5": data for number in range(1, 17)},))
    writing.start()
    for _ in range(shared_entries._WRITES):
        assert begun.acquire(timeout=WAIT_S)
    try:
        assert files.read(name, digest=hashlib.sha256(data).digest(), size_bytes=len(data)) == data
        assert writing.is_alive()
    finally:
        released.set()
        writing.join()
        files.close()


def test_a_removal_that_hangs_ends_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_entries, "_REMOVE_S", 0.0)
    released = threading.Event()

    class Hanging(BlobFiles):
        def remove(self, names: Iterable[str], *, synced: bool = False) -> None:
            assert released.wait(WAIT_S)

    files = _files(tmp_path, Hanging)
    files.open()
    try:
        with pytest.raises(StorageUnavailable, match="does not answer within 0 s"):
            files.remove([f"{0:032x}@5"])
    finally:
        released.set()
        files.close()


def test_copies_on_disk_have_a_budget_and_the_last_used_ones_stay(tmp_path: Path) -> None:
    files = _files(tmp_path, local_bytes=1000)
    files.open()
    names, data = [f"{number:032x}@5" for number in range(7)], bytes(200)
    for name in names[:5]:
        files.write({name: data})
    assert files.read(names[0], digest=hashlib.sha256(data).digest(), size_bytes=len(data)) == data
    for name in names[5:]:
        files.write({name: data})
    assert sorted(copy.name for copy in (tmp_path / "tier").glob("??/*")) == [names[0], *names[3:]]
    files.close()


def test_latents_are_read_from_s3_when_the_copies_are_gone_or_damaged(group: Group) -> None:
    with group.running("one") as one:
        _fill(one)
        copies = sorted((group.folder / "folder-of-one" / "tier").glob("??/*@*"))
        assert copies
        for place, copy in enumerate(copies):
            if place % 2:
                copy.unlink()
            else:
                copy.write_bytes(b"damaged")
        assert all(_serves(one, seed) for seed in SEEDS)
        assert one.statistics().damaged == 0


def test_an_object_that_is_gone_is_a_miss(group: Group) -> None:
    with group.running("one") as one:
        record(one, vector(0), seed=0)
        written(one)
        store = S3Objects(s3_location(group.objects), names=FILE_NAMES)
        store.remove([found.name for found in store.objects()])
        for copy in (group.folder / "folder-of-one" / "tier").glob("??/*"):
            copy.unlink()
        assert not _serves(one, 0)
        assert one.statistics().damaged == len(RECORDED)


def test_s3_that_fails_a_tenth_of_all_calls_costs_little(
    group: Group, server: s3.S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3.failing_proxy(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with group.running("one") as one:
            proxy.failing = 0.1
            _fill(one)
            assert len(_prompts(one)) == len(SEEDS)
            assert all(_serves(one, seed) for seed in SEEDS)
            assert one.statistics().trouble == ""
            assert proxy.failed > 5


def test_while_s3_is_away_pictures_begin_from_noise_and_nothing_is_recorded(
    group: Group, server: s3.S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with s3.failing_proxy(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with group.running("one") as one:
            record(one, vector(0), seed=0)
            written(one)
            for copy in (group.folder / "folder-of-one" / "tier").glob("??/*"):
                copy.unlink()
            proxy.refusal = "AccessDenied"
            with monkeypatch.context() as patched:
                patched.setattr(shared_entries, "_AWAY_S", 1000.0)
                requests = []
                for _ in range(3):
                    answer = one.ask(question(), vector(0))
                    assert (answer.header.outcome, answer.latents) == (pb.CACHE_OUTCOME_UNAVAILABLE, ())
                    requests.append(proxy.requests)
            assert requests[0] == requests[2], "further questions do not wait for S3"
            proxy.refusal = ""
        with group.running("one") as one:
            proxy.refusal = "AccessDenied"
            answer = one.ask(question(), vector(0))
            assert answer.header.outcome == pb.CACHE_OUTCOME_UNAVAILABLE
            record(one, vector(1), seed=1)
            wait_until(lambda: "may not use the bucket" in one.statistics().trouble, "the trouble")
            proxy.refusal = ""
            wait_until(lambda: not one.statistics().trouble and _serves(one, 0), "the end of it")
    lines = [line.message for line in caplog.records]
    assert lines.count("cached latents cannot be read from the object store") == 2, "once for each start"
    assert s3.SECRET not in caplog.text


def test_a_cache_begins_while_the_database_is_away_and_a_read_only_one_is_trouble(
    tmp_path: Path, server: s3.S3Server
) -> None:
    with running_server(vector=True) as database:
        name = database.new_database()
        group = Group(url=database.url(name), objects=f"s3://{server.bucket()}/cache", folder=tmp_path)
        database.stop()
        with group.running("one", measured=False) as one:
            assert "cannot be used" in one.statistics().trouble
            database.start()
            wait_until(lambda: not one.statistics().trouble, "the end of the outage")
            one.set_profile(profile())
            record(one, vector(0), seed=0)
            written(one)
            database.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
            database.restart()
            record(one, vector(1), seed=1)
            wait_until(lambda: "read-only" in one.statistics().trouble, "the trouble")
            assert one.statistics().dropped["trouble"] >= 1
            database.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = off")
            database.restart()
            wait_until(lambda: not one.statistics().trouble, "the end of it")
            wait_until(lambda: _serves(one, 0), "an answer")


async def test_objects_of_the_caches_of_another_database_are_left_alone(
    group: Group, tmp_path: Path, server: s3.S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_entries, "_SEARCH_S", 0.0)
    monkeypatch.setattr(shared_entries, "_ORPHAN_S", -1.0)
    with group.running("one") as one:
        _fill(one)
    keys = server.keys(group.objects.split("/")[2])
    with new_database(vector=True) as url:
        with Group(url=url, objects=group.objects, folder=tmp_path / "other").running("two", measured=False) as two:
            assert "belongs to caches of another database" in two.statistics().trouble
            two.flush(WAIT_S)
        with pytest.raises(ConfigError, match="belongs to caches of another database"):
            build(config(objects=group.objects, database=url, name="two"), tmp_path / "third")
    assert server.keys(group.objects.split("/")[2]) == keys
    with group.running("one") as one:
        assert not one.statistics().trouble


async def test_a_configuration_that_cannot_work_is_a_clear_error(
    tmp_path: Path, server: s3.S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = config(objects="s3://bucket/cache", database="postgresql://somewhere/cache", name="one")
    with pytest.raises(ConfigError, match="set database: postgresql://"):
        check_configured(replace(shared, database=""))
    with pytest.raises(ConfigError, match="set name"):
        check_configured(replace(shared, name=""))
    with new_database(vector=True) as url:
        known = shared_records._MIGRATIONS
        later = [*known, replace(known[0], statements="SELECT 1", oldest=len(known) + 1)]
        with monkeypatch.context() as patched:
            patched.setattr(shared_records, "_MIGRATIONS", tuple(later))
            with Group(url=url, objects=f"s3://{server.bucket()}/cache", folder=tmp_path).running("one"):
                pass
        with pytest.raises(ConfigError, match="from a newer version of Bottega"):
            build(replace(shared, database=url), tmp_path)
        wrong = url.replace("postgres@", f"postgres:{PASSWORD}x@").replace(url.split("?")[0].rsplit("/", 1)[1], "none")
        with pytest.raises(ConfigError, match='database "none" does not exist') as raised:
            build(replace(shared, database=wrong), tmp_path)
        assert PASSWORD not in str(raised.value)
