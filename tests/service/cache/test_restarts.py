"""Of a restart: no pin is gone while entries are still read, and uses count on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from bottega.cache.index.key_index import KeyedIndex
from bottega.cache.store.store import LatentStore
from bottega.v1.cache_pb2 import CACHE_OUTCOME_HIT, CACHE_OUTCOME_MISS, CACHE_OUTCOME_UNAVAILABLE
from tests.support.cached_latents import (
    MODEL,
    WAIT_S,
    pins,
    record,
    room,
    running,
    settings,
    vector,
    written,
)

KEYS = tuple(f"{number:064x}" for number in range(5))


def _fill(folder: Path) -> None:
    with running(folder) as store:
        for seed in range(20):
            record(store, vector(seed), key=KEYS[seed % 5], seed=seed, steps=(5, 10 + seed % 3))
        written(store)


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
