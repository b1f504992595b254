"""How fast a store's disk is, from what its loads took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bottega.activations.store.answers import DiskPace
from bottega.caching.tiered_cache import TieredCache
from bottega.caching.tiers import FilesByPath
from bottega.errors import Unavailable


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[TieredCache]:
    made = TieredCache(
        FilesByPath(lambda digest: tmp_path / digest),
        what="section",
        missing=Unavailable,
        budget_bytes=1,
        max_entries=1,
        max_loads=1,
    )
    yield made
    made.close()


def _loaded(memory: TieredCache, size_bytes: int, seconds: float) -> None:
    memory.counts.loaded_bytes += size_bytes
    memory.counts.load_s += seconds


def test_the_latest_loads_count_for_half_and_short_ones_together(memory: TieredCache) -> None:
    pace = DiskPace(memory)
    assert pace() == 0.0
    _loaded(memory, 1000, 0.001)
    assert pace() == pytest.approx(1e6), "the first one counts however short"
    _loaded(memory, 300_000, 0.1)
    assert pace() == pytest.approx(2e6)
    _loaded(memory, 30_000, 0.006)
    assert pace() == pytest.approx(2e6), "too short to tell"
    _loaded(memory, 0, 0.004)
    assert pace() == pytest.approx((2e6 + 3e6) / 2)
    assert pace() == pytest.approx((2e6 + 3e6) / 2), "nothing was loaded since"
