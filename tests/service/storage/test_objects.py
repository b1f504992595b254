"""Stores of objects: the same promises of a local folder and of S3, with servers of two makers as real processes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from bottega.errors import StorageUnavailable
from bottega.storage import BlobFiles
from bottega.storage.objects import ObjectStore, s3_location
from bottega.storage.s3 import S3Objects
from tests.support import full_disk, s3

NAMES = re.compile(r"[0-9a-f]{4}(-[a-z0-9]+)?")
MIB = 1 << 20


@dataclass(kw_only=True)
class Case:
    """A store, and how a test looks at what it stores."""

    kind: str
    store: ObjectStore
    visible: Callable[[], list[str]]
    """Returns the keys or files that others see."""
    cut: Callable[[int], contextlib.AbstractContextManager[ObjectStore]]
    """Gives a store in the same place whose writes fail after some bytes."""


@pytest.fixture(params=["folder", "moto", "nanio"])
def case(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_servers: s3.S3Servers
) -> Case:
    if request.param == "folder":
        files = BlobFiles(tmp_path, names=NAMES, synced=True)
        files.open()

        @contextlib.contextmanager
        def limited(size_bytes: int) -> Iterator[ObjectStore]:
            with full_disk.files_at_most(size_bytes):
                yield files

        return Case(
            kind="folder",
            store=files,
            visible=lambda: sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()),
            cut=limited,
        )
    server = s3_servers.get(request.param)
    s3.set_environment(monkeypatch, server.url)
    bucket = server.bucket()
    location = s3_location(f"s3://{bucket}/deep/prefix")

    @contextlib.contextmanager
    def cut(size_bytes: int) -> Iterator[ObjectStore]:
        with s3.failing_proxy(server) as proxy:
            proxy.cut_after_bytes = size_bytes
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            yield S3Objects(location, names=NAMES)

    return Case(
        kind=request.param,
        store=S3Objects(location, names=NAMES),
        visible=lambda: [key.removeprefix("deep/prefix/") for key in server.keys(bucket)],
        cut=cut,
    )


def _read(store: ObjectStore, name: str, data: bytes) -> bytes | None:
    return store.read(name, digest=hashlib.sha256(data).digest(), size_bytes=len(data))


def _names(store: ObjectStore, start: str = "") -> list[str]:
    return sorted(found.name for found in store.objects(start))


def test_an_object_is_read_as_it_was_written_replaced_and_removed(case: Case) -> None:
    store = case.store
    store.probe()
    assert case.visible() == []
    store.write("ab01", b"first")
    assert _read(store, "ab01", b"first") == b"first"
    store.write("ab01", b"second")
    assert _read(store, "ab01", b"second") == b"second"
    assert _read(store, "ab02", b"first") is None
    assert case.visible() == ["ab/ab01"]
    store.remove(["ab01", "ab02"])
    assert (_read(store, "ab01", b"second"), case.visible()) == (None, [])


@pytest.mark.parametrize("wrong", ["../secret", "ab01/x", "", "AB01"])
def test_a_name_that_is_none_becomes_no_path_or_key(case: Case, wrong: str) -> None:
    with pytest.raises(ValueError, match="not the name"):
        case.store.write(wrong, b"data")
    assert case.visible() == []


def test_what_is_not_what_was_written_is_not_read(case: Case) -> None:
    case.store.write("ab01", b"damaged")
    assert _read(case.store, "ab01", b"written") is None, "another hash"
    case.store.write("ab01", b"longer than it was")
    assert _read(case.store, "ab01", b"longer") is None, "another size"


def test_the_listing_has_sizes_and_ages_and_may_begin_anywhere(case: Case) -> None:
    for name in ("ab01", "ab02-one", "ab02-two", "ab03", "ac02"):
        case.store.write(name, name.encode())
    assert _names(case.store) == ["ab01", "ab02-one", "ab02-two", "ab03", "ac02"]
    assert _names(case.store, "ab") == ["ab01", "ab02-one", "ab02-two", "ab03"]
    assert _names(case.store, "ab02") == ["ab02-one", "ab02-two"]
    assert _names(case.store, "ab01") == ["ab01"]
    assert _names(case.store, "ad") == []
    found = {item.name: item for item in case.store.objects()}
    assert found["ab02-one"].size_bytes == 8
    assert all(0 <= item.age_s < 60 for item in found.values()), "by the store's own clock"


def test_the_listing_has_more_than_a_page(case: Case) -> None:
    names = {f"ab{number:02x}-{letter:03}" for number in range(4) for letter in range(30)}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: case.store.write(name, b"x"), sorted(names)))
    assert set(_names(case.store)) == names
    assert len(_names(case.store, "ab01")) == 30
    case.store.remove(names)
    assert case.visible() == []


def test_of_many_who_create_an_object_one_is_told_that_it_did(case: Case) -> None:
    if case.kind == "nanio":  # it overwrites, so the store must not say that it keeps what is there
        case.store.write("ab01", b"kept")
        with pytest.raises(StorageUnavailable, match="in spite of If-None-Match"):
            case.store.create("ab01", b"other")
        assert _read(case.store, "ab01", b"kept") == b"kept"
        assert case.visible() == ["ab/ab01"]
        return
    contents = [f"content {number}".encode() for number in range(8)]
    begin = threading.Barrier(8)

    def create(data: bytes) -> bool:
        begin.wait()
        return case.store.create("ab01", data)

    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(create, contents))
    assert told.count(True) == 1
    winner = contents[told.index(True)]
    assert _read(case.store, "ab01", winner) == winner
    assert not case.store.create("ab01", b"later")
    assert case.visible() == ["ab/ab01"]


def test_a_large_object_is_whole(case: Case) -> None:
    data = os.urandom(9 * MIB + 1)
    case.store.write("ab01", data)
    assert _read(case.store, "ab01", data) == data


@pytest.mark.parametrize("size_bytes", [MIB, 9 * MIB], ids=["small", "in parts"])
def test_a_write_that_is_cut_off_leaves_nothing_to_see(case: Case, size_bytes: int) -> None:
    with case.cut(MIB // 2) as store, pytest.raises(StorageUnavailable):
        store.write("ab01", bytes(size_bytes))
    assert case.visible() == []
    assert _names(case.store) == []
    case.store.write("ab01", b"next")
    assert _read(case.store, "ab01", b"next") == b"next"


def test_readers_see_one_whole_content_while_writers_replace_it(case: Case) -> None:
    contents = [bytes([number]) * 200_000 for number in range(4)]
    case.store.write("ab01", contents[0])
    ended = threading.Event()

    def write(data: bytes) -> None:
        for _ in range(10):
            case.store.write("ab01", data)

    def read() -> int:
        seen = 0
        while not ended.is_set():
            if any(_read(case.store, "ab01", data) == data for data in contents):
                seen += 1
            assert _names(case.store, "ab01") == ["ab01"]
        return seen

    with ThreadPoolExecutor(5) as threads:
        reading = threads.submit(read)
        list(threads.map(write, contents))
        ended.set()
        assert reading.result() > 0
    assert any(_read(case.store, "ab01", data) == data for data in contents)
    assert case.visible() == ["ab/ab01"]


def test_what_is_too_old_is_found_by_its_age_and_removed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.store.write("ab01", b"old")
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 100)
    ages = {item.name: item.age_s for item in case.store.objects()}
    if case.kind == "folder":
        assert ages["ab01"] >= 100
        case.store.write("ab02", b"new")
        case.store.remove([item.name for item in case.store.objects() if item.age_s > 60])
        assert _names(case.store) == []  # the file's own time is the machine's
    else:
        assert ages["ab01"] < 60, "the clock of this machine makes nothing older: that of S3 counts"
