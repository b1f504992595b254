"""The index in memory: that keys never see each other's entries, and that neither entries nor keys stay behind."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from bottega.cache.index.key_index import KeyedIndex
from bottega.cache.index.vector_index import IndexSettings
from tests.support.waiting import EVENTUALLY_S

WIDTH = 8
SETTINGS = IndexSettings(flat_entries=100)


@pytest.fixture
def index() -> Iterator[KeyedIndex]:
    made = KeyedIndex(max_entries=1000, settings=SETTINGS)
    yield made
    made.close()


def _random(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, WIDTH), dtype=np.float32)


def test_a_key_with_many_entries_gets_sketches(index: KeyedIndex) -> None:
    vectors = _random(700)
    for first in (0, 300, 600):
        index.load("key", np.arange(first, min(first + 300, 700)), vectors[first : first + 300])
        assert index.statistics().sketched_entries == index.entries("key") == min(first + 300, 700)
    index.load("small", np.arange(5), vectors[:5])
    index.load("none", np.arange(0), vectors[:0])
    assert index.statistics().keys == 2
    assert index.statistics().sketched_entries == 700
    assert [index.search("key", vector, 1)[0].number for vector in vectors] == list(range(700))
    for number in range(99):
        index.add("small", 5 + number, vectors[number])
        assert index.statistics().sketched_entries == (700 if number < 94 else 700 + 6 + number)
    assert index.statistics().size_bytes > 0


def _run_together(work: Callable[[int], None], threads: int) -> None:
    """Do work in threads, each with its own number. Raises the first error of one."""
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, thread) for thread in range(threads)]:
            done.result(EVENTUALLY_S)


def test_threads_may_change_and_search_the_same_keys(index: KeyedIndex) -> None:
    """Each thread has numbers of its own, so that it knows what has to be there, whatever the others do."""
    vectors = _random(1000)
    kept: list[set[tuple[str, int]]] = [set() for _ in range(4)]

    def change(thread: int) -> None:
        rng = random.Random(thread)
        for _ in range(500):
            number = 4 * rng.randrange(200) + thread
            key = f"key{number % 3}"
            if rng.random() < 0.6:
                index.add(key, number, vectors[number])
                kept[thread].add((key, number))
                assert index.search(key, vectors[number], 1)[0].number == number
            else:
                assert index.remove(key, number) is ((key, number) in kept[thread])
                kept[thread].discard((key, number))
                assert all(match.number != number for match in index.search(key, vectors[number], 3))

    _run_together(change, 4)
    there = set().union(*kept)
    assert len(index) == len(there) == index.statistics().entries
    for key, number in there:
        assert index.search(key, vectors[number], 1)[0].number == number
    for key, number in there:
        assert index.remove(key, number)
    assert index.statistics().keys == 0


def test_threads_may_add_to_a_key_while_it_vanishes(index: KeyedIndex) -> None:
    vectors = _random(2)

    def come_and_go(number: int) -> None:
        for _ in range(1500):
            index.add("key", number, vectors[number])
            assert index.similarity("key", number, vectors[number]) == pytest.approx(1.0)
            assert index.remove("key", number)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        _run_together(come_and_go, 2)
    finally:
        sys.setswitchinterval(before)
    assert index.statistics().keys == len(index) == 0
