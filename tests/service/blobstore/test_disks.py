"""A store whose disk is full or fails is read-only: it says so, serves what it has, and heals by itself.

Both stores that use blobstore keep these promises.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import ConfigError, StorageUnavailable, Unavailable
from tests.support.blob_stores import CASES, StoreCase
from tests.support.full_disk import fill, read_only, small_disk
from tests.support.waiting import wait_until

_DISK_BYTES = 4 << 20

Case = StoreCase[Any]
pytestmark = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def _in_trouble(case: Case, store: Any, says: str) -> None:
    """It says so, records nothing, and serves record 0."""
    wait_until(lambda: store.statistics().trouble != "", "the store to notice")
    assert says in store.statistics().trouble
    assert not case.may_record(store)
    before = store.statistics().dropped["trouble"]
    case.record(store, 90)
    assert store.statistics().dropped["trouble"] > before
    assert case.serves(store, 0)


def _healed(case: Case, store: Any) -> None:
    wait_until(lambda: store.statistics().trouble == "", "the store to heal")
    assert case.may_record(store)
    case.record(store, 70)
    assert case.serves(store, 70)


def test_a_full_disk_is_said_and_heals_when_there_is_room(case: Case, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=_DISK_BYTES) as disk, case.running(disk / "store") as store:
        case.keep(store, 0)
        ballast = fill(disk)
        for name in range(1, 20):
            case.record(store, name)
        _in_trouble(case, store, "the disk is full")
        incoming = (disk / "store" / case.files / "incoming").iterdir()
        assert not [path.name for path in incoming if path.name != "probe"]  # which comes and goes
        with pytest.raises(StorageUnavailable, match="the disk is full"):
            case.set_profile(store)
        ballast.unlink()
        _healed(case, store)
        assert case.serves(store, 0)
        files = len(case.paths(disk / "store"))
        assert files == case.count(store) * case.files_per_record, "what did not fit leaves nothing behind"


def test_deleting_makes_room_on_a_full_disk(case: Case, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=_DISK_BYTES) as disk, case.running(disk / "store") as store:
        for name in range(20):
            case.keep(store, name)
        fill(disk)
        case.record(store, 30)
        wait_until(lambda: store.statistics().trouble != "", "the store to notice")
        assert case.clear(store) == 20
        _healed(case, store)


def test_a_disk_that_cannot_be_written_is_served_from(case: Case, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=_DISK_BYTES) as disk:
        with case.running(disk / "store") as store:
            case.record(store, 0)
        store = case.new(disk / "store")
        with read_only(disk):
            store.start()
            wait_until(lambda: case.count(store) == 1, "what is there to be read")
            _in_trouble(case, store, "cannot be written")
        _healed(case, store)
        store.close()
        with case.running(disk / "store") as store:
            assert case.serves(store, 0)
            assert case.serves(store, 70)


def test_a_store_starts_on_a_full_disk_and_heals(case: Case, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=_DISK_BYTES) as disk:
        (disk / "store").mkdir()
        ballast = fill(disk)
        with case.running(disk / "store") as store:
            assert store.statistics().trouble
            assert not case.may_record(store)
            ballast.unlink()
            wait_until(lambda: store.statistics().trouble == "", "the store to heal")
            case.set_profile(store)
            _healed(case, store)


def test_some_of_the_disk_stays_free_for_others(case: Case, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, size_bytes=_DISK_BYTES), case.running(disk / "store", min_free_bytes=1 << 30) as store:
        case.keep(store, 0)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(_DISK_BYTES * 94 // 100))
        case.record(store, 1)
        _in_trouble(case, store, "stay free (min_free_bytes)")
        ballast.unlink()
        _healed(case, store)


@pytest.mark.parametrize("gone", ["", "records.db", "files"])
def test_what_somebody_has_deleted_is_made_again(case: Case, tmp_path: Path, gone: str) -> None:
    folder = tmp_path / "store"
    with case.running(folder) as store:
        case.record(store, 0)
        place = folder / (case.files if gone == "files" else gone)
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        case.record(store, 1)
        wait_until(lambda: store.statistics().dropped["trouble"] >= 1, "the store to notice")
        _healed(case, store)
        assert not case.serves(store, 0)
    with case.running(folder) as store:
        assert case.serves(store, 70), "what was recorded since is there"


def test_records_that_are_damaged_while_it_runs_are_made_again(case: Case, tmp_path: Path) -> None:
    with case.running(tmp_path) as store:
        for name in range(50):
            case.record(store, name)
        file = tmp_path / "records.db"
        with file.open("r+b") as records:
            records.write(b"\xff" * file.stat().st_size)
        case.record(store, 60)
        wait_until(lambda: store.statistics().dropped["trouble"] >= 1, "the store to notice")
        _healed(case, store)
        assert list(tmp_path.glob("records.damaged-*.db"))
        assert case.count(store) == 1
        assert len(case.paths(tmp_path)) == case.files_per_record, "nobody knows the others any more"


def test_one_process_at_a_time_has_a_folder(case: Case, tmp_path: Path) -> None:
    with case.running(tmp_path), pytest.raises(Unavailable, match="in use by process"):
        case.new(tmp_path).start()
    with case.running(tmp_path) as store:
        case.record(store, 0)


def test_another_programs_records_are_left_alone(case: Case, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "records.db")) as records, records:
        records.execute("CREATE TABLE things (name TEXT)")
    store = case.new(tmp_path)
    with pytest.raises(ConfigError, match=case.is_somebody_elses):
        store.start()
    store.close()


def test_records_of_an_earlier_version_are_left_alone(case: Case, tmp_path: Path) -> None:
    with case.running(tmp_path) as store:
        case.record(store, 0)
    with contextlib.closing(sqlite3.connect(tmp_path / "records.db")) as records, records:
        records.execute("PRAGMA user_version = 1")
    store = case.new(tmp_path)
    with pytest.raises(ConfigError, match=r"earlier version .*schema 1"):
        store.start()
    store.close()
    assert case.paths(tmp_path)
