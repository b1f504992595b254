"""A store whose disk is full or fails is read-only: it says so, serves what it has, and heals by itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bottega.cache.index import KeyedIndex
from bottega.cache.store.store import LatentStore
from bottega.errors import StorageUnavailable
from bottega.v1 import cache_pb2
from tests.support.cached_latents import MODEL, profile, question, record, running, settings, vector, written
from tests.support.full_disk import fill, read_only, small_disk
from tests.support.waiting import wait_until

_DISK_BYTES = 4 << 20


def _in_trouble(store: LatentStore, says: str) -> None:
    """It says so, records nothing, and serves vector(0)."""
    wait_until(lambda: store.statistics().trouble != "", "the store to notice")
    assert says in store.statistics().trouble
    record(store, vector(9), seed=9)
    assert store.statistics().dropped["trouble"] >= 1
    answer = store.ask(question(images=2), vector(0))
    assert (len(answer.latents), answer.header.record) == (1, False)
    assert not store.ask(question(), vector(5)).header.record


def _healed(store: LatentStore) -> None:
    wait_until(lambda: store.statistics().trouble == "", "the store to heal")
    assert store.ask(question(), vector(5)).header.record
    record(store, vector(7), seed=7)
    written(store)
    assert store.ask(question(), vector(7)).header.hits


def test_a_full_disk_is_said_and_heals_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=_DISK_BYTES) as disk, running(disk / "cache") as store:
        record(store, vector(0))
        written(store)
        ballast = fill(disk)
        record(store, vector(1), seed=1)
        _in_trouble(store, "the disk is full")
        incoming = (disk / "cache" / "latents" / "incoming").iterdir()
        assert not [path.name for path in incoming if path.name != "probe"]  # which comes and goes
        with pytest.raises(StorageUnavailable, match="the disk is full"):
            store.set_profile(profile("ff"))
        assert store.entries(MODEL, 10)[0].parameters.prompt == "prompt 0"
        ballast.unlink()
        _healed(store)


def test_what_did_not_fit_leaves_nothing_behind(tmp_path: Path) -> None:
    index = KeyedIndex()
    with small_disk(tmp_path / "disk", size_bytes=_DISK_BYTES) as disk, running(disk / "cache", index=index) as store:
        record(store, vector(0))
        written(store)
        ballast = fill(disk)
        for seed in range(1, 20):
            record(store, vector(seed), seed=seed)
        wait_until(lambda: store.statistics().trouble != "" and not store.statistics().waiting, "it to be dropped")
        ballast.unlink()
        _healed(store)
        kept = {entry.entry for entry in store.entries(MODEL, 100)}
        files = {path.name.partition("@")[0].partition(".")[0] for path in (disk / "cache/latents").glob("??/*")}
        assert files == kept
        assert len(index) == len(kept)


def test_evicting_makes_room_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=_DISK_BYTES) as disk, running(disk / "cache") as store:
        for seed in range(20):
            record(store, vector(seed), seed=seed)
        written(store)
        fill(disk)
        record(store, vector(30), seed=30)
        wait_until(lambda: store.statistics().trouble != "", "the store to notice")
        assert store.clear() == 20
        wait_until(lambda: store.statistics().trouble == "", "the store to heal: clearing has made room")
        record(store, vector(31), seed=31)
        written(store)


def test_a_disk_that_cannot_be_written_is_served_from(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=_DISK_BYTES) as disk:
        with running(disk / "cache") as store:
            record(store, vector(0))
            written(store)
        store = LatentStore(settings(disk / "cache"))
        with read_only(disk):
            store.start()
            wait_until(lambda: len(store.entries(MODEL, 10)) == 1, "what is there to be read")
            _in_trouble(store, "cannot be written")
        _healed(store)
        store.close()


def test_a_store_starts_on_a_full_disk_and_heals(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_bytes=_DISK_BYTES) as disk:
        (disk / "cache").mkdir()
        ballast = fill(disk)
        with running(disk / "cache", measured=False) as store:
            assert store.statistics().trouble
            assert store.ask(question(), vector(0)).header.outcome == cache_pb2.CACHE_OUTCOME_NO_PROFILE
            ballast.unlink()
            wait_until(lambda: store.statistics().trouble == "", "the store to heal")
            store.set_profile(profile())
            _healed(store)


def test_some_of_the_disk_stays_free_for_others(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    ballast = disk / "ballast"
    with small_disk(disk, size_bytes=_DISK_BYTES), running(disk / "cache", min_free_bytes=1 << 30) as store:
        record(store, vector(0))
        written(store)
        ballast.write_bytes(bytes(_DISK_BYTES * 94 // 100))
        record(store, vector(1), seed=1)
        _in_trouble(store, "stay free (min_free_bytes)")
        ballast.unlink()
        _healed(store)


@pytest.mark.parametrize("gone", ["cache", "cache/records.db", "cache/latents"])
def test_what_somebody_has_deleted_is_made_again(tmp_path: Path, gone: str) -> None:
    with running(tmp_path / "cache") as store:
        record(store, vector(0))
        written(store)
        place = tmp_path / gone
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        record(store, vector(1), seed=1)
        wait_until(lambda: store.statistics().dropped["trouble"] == 1, "the store to notice")
        _healed(store)
        assert not store.ask(question(), vector(0)).header.hits
    with running(tmp_path / "cache") as store:
        assert store.ask(question(), vector(7)).latents, "what was recorded since is there"


def test_records_that_are_damaged_while_it_runs_are_made_again(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        for seed in range(50):
            record(store, vector(seed), seed=seed)
        written(store)
        file = tmp_path / "records.db"
        with file.open("r+b") as records:
            records.write(b"\xff" * file.stat().st_size)
        record(store, vector(60), seed=60)
        wait_until(lambda: store.statistics().dropped["trouble"] == 1, "the store to notice")
        _healed(store)
        assert list(tmp_path.glob("records.damaged-*.db"))
