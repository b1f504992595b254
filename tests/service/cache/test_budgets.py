"""A store keeps to its budgets: what saves least goes first, with its files and records, and what waits is bounded."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bottega.cache.eviction import FIFO
from bottega.cache.index.key_index import KeyedIndex
from bottega.v1 import cache_pb2
from tests.support.cached_latents import (
    LATENT_BYTES,
    MODEL,
    pins,
    question,
    record,
    room,
    running,
    similar,
    vector,
    written,
)
from tests.support.waiting import wait_until


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """In the block another process, as it were, uses the records: nothing can be written."""
    with contextlib.closing(sqlite3.connect(folder / "records.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def _files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "latents").glob("??/*")}


def test_what_was_used_least_for_its_steps_goes_first_and_leaves_holes(tmp_path: Path) -> None:
    with running(tmp_path, budget_bytes=room(5, 2)) as store:
        record(store, vector(0), steps=(5, 10, 25))
        written(store)
        (entry,) = store.entries(MODEL, 1)
        for _ in range(2):  # 5 is worth 15 then, more than 10
            assert store.ask(pins((entry.entry, 5)), vector(0)).latents
        record(store, vector(1), seed=1, steps=(20, 25, 30))
        written(store)
        old, new = reversed(store.entries(MODEL, 2))
        assert (list(old.steps), list(new.steps)) == ([5, 25], [20, 25, 30])
        found = store.statistics()
        assert (found.evictions, found.bytes, found.holes) == (1, room(5, 2), 0)
        answer = store.ask(question(), similar(vector(0), 0.8))  # enough for 10, which is gone
        assert [hit.step for hit in answer.header.hits] == [5]
        assert store.statistics().holes == 1
        rows = {f"{entry.entry}@{step}" for entry in (old, new) for step in entry.steps}
        assert _files(tmp_path) == rows | {f"{old.entry}.rgb", f"{new.entry}.rgb"}


def test_an_entry_without_latents_leaves_index_and_records(tmp_path: Path) -> None:
    index = KeyedIndex()
    with running(tmp_path, index=index, budget_bytes=room(2, 1), policy=FIFO) as store:
        record(store, vector(0), steps=(5, 10))
        record(store, vector(1), steps=(5, 10), seed=1)
        written(store)
        assert [entry.parameters.prompt for entry in store.entries(MODEL, 10)] == ["prompt 1"]
        assert not store.ask(question(), vector(0)).header.hits
        assert len(index) == 1
        assert len(_files(tmp_path)) == 3
    with contextlib.closing(sqlite3.connect(tmp_path / "records.db")) as records:
        assert records.execute("SELECT count(*) FROM entries").fetchone() == (1,)
        assert records.execute("SELECT count(*) FROM latents").fetchone() == (2,)


def test_evictions_come_in_batches(tmp_path: Path) -> None:
    with running(tmp_path, budget_bytes=room(100, 20), batch_share=0.2) as store:
        for seed in range(21):
            record(store, vector(seed), seed=seed)
            written(store)
        assert store.statistics().evictions == 25
        for seed in range(21, 25):
            record(store, vector(seed), seed=seed)
            written(store)
        assert store.statistics().evictions == 25


def test_there_are_at_most_so_many_entries(tmp_path: Path) -> None:
    with running(tmp_path, max_entries=3) as store:
        for seed in range(10):
            record(store, vector(seed), seed=seed)
        written(store)
        assert len(store.entries(MODEL, 10)) == 3


def test_a_smaller_budget_holds_from_the_start(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        for seed in range(10):
            record(store, vector(seed), seed=seed)
        written(store)
    with running(tmp_path, budget_bytes=room(7, 2)) as store:
        assert store.statistics().bytes <= room(7, 2)
        assert len([name for name in _files(tmp_path) if "@" in name]) <= 7


def test_pictures_are_in_the_budget_too(tmp_path: Path) -> None:
    with running(tmp_path, budget_bytes=room(4, 2)) as store:
        for seed in range(8):
            record(store, vector(seed), seed=seed, steps=(5,))
            written(store)
        found = store.statistics()
        assert found.bytes == room(found.models[0].latents, found.models[0].entries) <= room(4, 2)
        assert found.models[0].entries == 3
        on_disk = sum(path.stat().st_size for path in (tmp_path / "latents").glob("??/*"))
        assert on_disk == found.bytes == sum(entry.bytes for entry in store.entries(MODEL, 9))


def test_what_is_larger_than_the_budget_is_dropped(tmp_path: Path) -> None:
    with running(tmp_path, budget_bytes=room(4, 1)) as store:
        record(store, vector(0))
        written(store)
        found = store.statistics()
        assert (found.dropped["too_large"], found.bytes, found.trouble) == (1, 0, "")


def test_an_embedding_of_another_width_is_dropped_alone(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        record(store, vector(0))
        record(store, vector(0)[:32], seed=1)
        record(store, vector(2), seed=2)
        written(store)
        assert [entry.parameters.prompt for entry in store.entries(MODEL, 10)] == ["prompt 2", "prompt 0"]
        assert store.statistics().dropped["unfit"] == 1


@pytest.mark.parametrize("bound", [{"max_waiting": 3}, {"max_waiting_bytes": 3 * 6 * LATENT_BYTES}], ids=str)
def test_recordings_wait_in_bounds_and_nobody_waits_for_them(tmp_path: Path, bound: dict[str, Any]) -> None:
    with running(tmp_path, **bound) as store:
        record(store, vector(0))
        written(store)
        with _locked(tmp_path):
            record(store, vector(1), seed=1)
            wait_until(lambda: not store.statistics().waiting, "the first one to be written")
            for seed in range(2, 7):
                record(store, vector(seed), seed=seed)
            found = store.statistics()
            assert (found.waiting, found.dropped["busy"]) == (3, 2)
            assert 0 < found.waiting_bytes <= 3 * 6 * LATENT_BYTES
            assert store.ask(question(), vector(0)).header.outcome == cache_pb2.CACHE_OUTCOME_HIT
        written(store)
        assert store.statistics().waiting_bytes == 0
        assert len(store.entries(MODEL, 10)) == 5
