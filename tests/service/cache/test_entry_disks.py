"""What holds wherever a cache's entries are stored: in a folder with SQLite, or in PostgreSQL and S3."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psycopg
import pytest

from bottega.addons.cache.placement import placement_key
from bottega.blobstore.records import RecordChanges
from bottega.cache import records as cache_records
from bottega.cache import shared_entries
from bottega.cache.eviction import Usage
from bottega.cache.latent import Entry, EntryPicture, EntryRecord, KeptLatent
from bottega.cache.records import EntryDisk, LocalEntries, latent_name, picture_name
from bottega.transport import DType
from tests.support import s3
from tests.support.postgresql import new_database
from tests.support.shared_caches import Group

LATENT, PICTURE, EMBEDDING = b"latent" * 4, b"rgb" * 4, np.ones(4, np.float32).tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A place of entries."""

    opened: Callable[[], contextlib.AbstractContextManager[EntryDisk]]
    execute: Callable[[str], object]
    """Executes a statement, in which entries and latents are the names of the tables."""
    files: Callable[[], set[str]]


@contextlib.contextmanager
def _local(folder: Path) -> Iterator[Storage]:
    @contextlib.contextmanager
    def opened() -> Iterator[EntryDisk]:
        disk = LocalEntries(folder, min_free_bytes=0)
        disk.lock()
        disk.open()
        try:
            yield disk
        finally:
            disk.close()
            disk.unlock()

    def execute(statement: str) -> None:
        with contextlib.closing(sqlite3.connect(folder / "records.db")) as connection, connection:
            connection.execute(statement)

    yield Storage(
        opened=opened,
        execute=execute,
        files=lambda: {path.name for path in (folder / "latents").glob("??/*")},
    )


@contextlib.contextmanager
def _shared(folder: Path, servers: s3.S3Servers) -> Iterator[Storage]:
    server = servers.get("nanio")
    bucket = server.bucket()
    with new_database(vector=True) as url:
        group = Group(url=url, objects=f"s3://{bucket}/cache", folder=folder)

        @contextlib.contextmanager
        def opened() -> Iterator[EntryDisk]:
            disk, index = group.entries("one")
            disk.lock()
            disk.open()
            try:
                yield disk
            finally:
                disk.close()
                disk.unlock()
                index.close()

        def execute(statement: str) -> None:
            for name in ("entries", "latents"):
                statement = statement.replace(f" {name} ", f" bottega_cache_{name} ")
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(statement.encode())

        yield Storage(
            opened=opened,
            execute=execute,
            files=lambda: {key.rpartition("/")[2] for key in server.keys(bucket)},
        )


@pytest.fixture(params=["folder", "shared"])
def storage(
    request: pytest.FixtureRequest, tmp_path: Path, s3_servers: s3.S3Servers, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Storage]:
    if request.param == "folder":
        with _local(tmp_path) as local:
            yield local
    else:
        s3.set_environment(monkeypatch, s3_servers.get("nanio").url)
        with _shared(tmp_path, s3_servers) as shared:
            yield shared


def _record(number: int, steps: tuple[int, ...] = (5, 10), key: str = "ab" * 32) -> EntryRecord:
    picture = EntryPicture(height=2, width=2, digest=hashlib.sha256(PICTURE).digest())
    entry = Entry(
        number=number,
        name=f"{number:032x}",
        noise=-1 - number,
        key=key,
        model_hash="cd" * 32,
        dtype=DType.FLOAT16,
        shape=(1, 3, 4),
        picture=picture,
        recorded_s=1.5,
        place=placement_key(key, np.frombuffer(EMBEDDING, np.float32)),
    )
    digest = hashlib.sha256(LATENT).digest()
    latents = {step: KeptLatent(digest=digest, usage=Usage(step=step, used_at=3.0, created_at=2.0)) for step in steps}
    return EntryRecord(entry=entry, embedding=EMBEDDING, parameters=b"", hits=0, latents=latents)


def _add(disk: EntryDisk, *records: EntryRecord) -> None:
    for record in records:
        disk.write_files(_files(record))
    disk.write_entries(RecordChanges(), records)


def _files(record: EntryRecord) -> dict[str, bytes]:
    name = record.entry.name
    return {picture_name(name): PICTURE} | {latent_name(name, step): LATENT for step in record.latents}


def _load(disk: EntryDisk) -> dict[int, EntryRecord]:
    found: dict[int, EntryRecord] = {}
    disk.load_entries((), lambda _, records: found.update({record.entry.number: record for record in records}))
    disk.tidy(RecordChanges())
    return found


def _facts(record: EntryRecord) -> tuple[object, ...]:
    return record.entry, record.embedding, record.parameters, record.hits, record.latents


def test_entries_are_loaded_as_they_were_written_by_key(storage: Storage) -> None:
    records = [_record(1), _record(2, key="0a" * 32), _record(1 << 60, steps=(1, 2, 999))]
    batches: list[tuple[str, list[int]]] = []
    with storage.opened() as disk:
        assert _load(disk) == {}
        _add(disk, *records)
    with storage.opened() as disk:
        disk.load_entries((), lambda key, found: batches.append((key, [record.entry.number for record in found])))
        found = _load(disk)
        assert disk.parameters([1, 2, 77]) == {1: b"", 2: b""}
        name = latent_name(records[0].entry.name, 5)
        assert disk.read(name, digest=hashlib.sha256(LATENT).digest(), size_bytes=len(LATENT)) == LATENT
        assert disk.read(name, digest=bytes(32), size_bytes=len(LATENT)) is None, "it would be another"
    assert {number: _facts(record) for number, record in found.items()} == {
        record.entry.number: _facts(record) for record in records
    }
    assert batches == [("0a" * 32, [2]), ("ab" * 32, [1, 1 << 60])]


def test_uses_and_deletions_are_stored_and_files_go_with_their_records(storage: Storage) -> None:
    with storage.opened() as disk:
        _load(disk)
        _add(disk, _record(1), _record(2), _record(3, steps=(1, 2, 3)))
        changes = RecordChanges(
            gone={2}, gone_parts={(1, 10), (3, 1)}, uses={1: (7,)}, part_uses={(1, 5): (2.0, 9.0, 2.0)}
        )
        two = _record(2).entry.name
        gone = {picture_name(two), latent_name(two, 5), latent_name(two, 10), latent_name(_record(1).entry.name, 10)}
        disk.discard(gone)
        disk.tidy(changes)
        found = _load(disk)
        assert found.keys() == {1, 3}
        assert (found[1].hits, set(found[1].latents), set(found[3].latents)) == (7, {5}, {2, 3})
        assert found[1].latents[5].usage == Usage(step=5, frequency=2.0, used_at=9.0, created_at=2.0)
        assert not gone & storage.files()
        assert picture_name(_record(1).entry.name) in storage.files()


def test_a_new_entry_and_changes_are_written_together(storage: Storage) -> None:
    with storage.opened() as disk:
        _load(disk)
        _add(disk, _record(1))
        disk.write_files(_files(_record(2)))
        disk.write_entries(RecordChanges(gone={1}), [_record(2)])
        assert _load(disk).keys() == {2}


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE entries SET key = replace(key, 'a', '1') WHERE number = 1",
        "UPDATE entries SET shape = '[4, 4, 16]' WHERE number = 1",
        "UPDATE entries SET recorded_s = 2 WHERE number = 1",
        "UPDATE latents SET checksum = 5 WHERE number = 1",
        "UPDATE latents SET step = step + 1 WHERE number = 1 AND step = 10",
    ],
)
def test_damaged_rows_are_dropped_alone(storage: Storage, damage: str) -> None:
    with storage.opened() as disk:
        _load(disk)
        _add(disk, _record(1), _record(2))
    storage.execute(damage)
    with storage.opened() as disk:
        found = _load(disk)
        assert _facts(found.pop(2)) == _facts(_record(2))
        assert {number: record.latents.keys() for number, record in found.items()} in ({}, {1: {5}})


def test_entries_are_loaded_in_parts(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_records, "_MOST_AT_ONCE", 2)
    monkeypatch.setattr(shared_entries, "_PAGE", 2)
    batches: list[list[int]] = []
    with storage.opened() as disk:
        _load(disk)
        _add(disk, *(_record(number, steps=(5,)) for number in range(1, 8)))
        disk.load_entries((), lambda _, found: batches.append([record.entry.number for record in found]))
    assert max(map(len, batches)) == 2
    assert sorted(number for batch in batches for number in batch) == list(range(1, 8))
