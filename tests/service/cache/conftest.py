"""Time for a busy machine: a cache gives up searches and reads that take longer than a job would wait."""

from __future__ import annotations

import pytest

from bottega.cache import shared_entries
from bottega.cache.index import postgresql
from tests.support.cached_latents import WAIT_S

SEARCH_S = 5.0


@pytest.fixture(autouse=True)
def patient_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "_SEARCH_S", SEARCH_S)
    monkeypatch.setattr(shared_entries, "_READ_S", WAIT_S)
