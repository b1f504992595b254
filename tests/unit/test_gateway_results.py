"""Finished images are kept within bounds."""

from __future__ import annotations

import pytest

from bottega.errors import TooLarge
from bottega.gateway.results import ResultStore
from tests.unit.sample_jobs import FakeTime


def test_results_are_bounded_in_bytes_and_time() -> None:
    time = FakeTime()
    store = ResultStore(budget_bytes=10, ttl_s=60, clock=time.clock())
    store.put("a", b"12345")
    time.now += 30
    store.put("b", b"12345")
    store.put("c", b"1")
    assert (store.get("a"), store.get("b"), store.get("c")) == (None, b"12345", b"1")
    with pytest.raises(TooLarge):
        store.put("d", b"x" * 11)
    assert store.get("b") == b"12345"
    time.now += 61
    assert store.get("b") is None
    store.sweep()
    assert store.size_bytes == 0
