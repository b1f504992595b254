"""What a cache of loaded values remembers of loads."""

from __future__ import annotations

import time

import pytest

from bottega.caching import load_cache
from bottega.caching.load_cache import LoadCache
from tests.support.waiting import EVENTUALLY_S


class _Names:
    """Loads names as values."""

    what = "name"

    def size_bytes(self, name: str) -> int:
        return len(name)

    def load(self, name: str) -> str:
        time.sleep(0.001)
        return name


def test_the_times_of_the_last_loads_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_cache, "_MAX_TIMES", 2)
    cache = LoadCache(_Names(), budget_bytes=1)
    try:
        for name in "abac":
            lease = cache.borrow([name])
            assert lease.values.result(EVENTUALLY_S) == (name,)
            cache.give_back(lease)
        assert [cache.load_s(name) > 0.0 for name in "abc"] == [True, False, True]
    finally:
        cache.close()
