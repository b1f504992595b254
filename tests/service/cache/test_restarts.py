"""What a store had it has again after a restart, without what was interrupted, damaged or put there by others."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from bottega.cache.index.key_index import KeyedIndex
from bottega.cache.store.store import LatentStore
from bottega.v1.cache_pb2 import CACHE_OUTCOME_HIT, CACHE_OUTCOME_MISS, CACHE_OUTCOME_UNAVAILABLE, CacheAnswer
from tests.support.cached_latents import (
    MODEL,
    WAIT_S,
    digest,
    pins,
    profile,
    question,
    record,
    room,
    running,
    settings,
    similar,
    vector,
    written,
)

KEYS = tuple(f"{number:064x}" for number in range(5))


def _fill(folder: Path) -> None:
    with running(folder) as store:
        for seed in range(20):
            record(store, vector(seed), key=KEYS[seed % 5], seed=seed, steps=(5, 10 + seed % 3))
        written(store)


def _answers(store: LatentStore) -> list[tuple[CacheAnswer, list[str]]]:
    asked = [store.ask(question(key, images=2), similar(vector(seed), 0.9)) for seed in range(20) for key in KEYS[:2]]
    for answer in asked:
        answer.header.ClearField("times")  # which are other ones each time
    return [(answer.header, digest(answer)) for answer in asked]


def test_a_restart_serves_the_same(tmp_path: Path) -> None:
    _fill(tmp_path)
    with running(tmp_path) as store:
        answers, entries = _answers(store), store.entries("", 100)
        assert sum(len(found) for _, found in answers) == 8
    with running(tmp_path) as store:
        assert _answers(store) == answers
        again = store.entries("", 100)
        assert [entry.entry for entry in again] == [entry.entry for entry in entries]
        assert store.profiles() == [profile()]


class _GatedIndex(KeyedIndex):
    """Takes entries of earlier times in when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def load(self, *args: Any) -> None:
        assert self.gate.wait(WAIT_S)
        super().load(*args)


def test_no_pin_is_said_to_be_gone_while_entries_are_still_read(tmp_path: Path) -> None:
    _fill(tmp_path)
    with running(tmp_path) as store:
        pin = pins((store.entries("", 1)[0].entry, 5), key=KEYS[4])
        assert store.ask(pin, vector(0)).header.outcome == CACHE_OUTCOME_HIT
    index = _GatedIndex()
    store = LatentStore(settings(tmp_path), index=index)
    store.start()
    try:
        assert store.ask(pin, vector(0)).header.outcome == CACHE_OUTCOME_UNAVAILABLE
        index.gate.set()
        written(store)
        assert store.ask(pin, vector(0)).header.outcome == CACHE_OUTCOME_HIT
        assert store.ask(pins(("f" * 32, 5)), vector(0)).header.outcome == CACHE_OUTCOME_MISS
    finally:
        index.gate.set()
        store.close()


def test_how_often_something_was_used_outlives_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        record(store, vector(0), steps=(5, 10))
        written(store)
        (entry,) = store.entries(MODEL, 1)
        for _ in range(3):
            store.ask(pins((entry.entry, 5)), vector(0))
    with running(tmp_path, budget_bytes=room(2, 2)) as store:
        assert store.entries(MODEL, 1)[0].hits == 3
        record(store, vector(1), seed=1, steps=(10,))
        written(store)
        assert list(store.entries(MODEL, 2)[1].steps) == [5]
