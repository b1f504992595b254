"""The replay of the trace's ControlNets: what it draws, and that it tells good orders from bad ones."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from itertools import pairwise

import pytest

from bottega.caching import Popularity
from load.bench.controlnet_cache import BOUND, JUDGED, ONE_BY_ONE_PER_S, LeastRecentlyUsed, replay
from load.bench.trace_shape import A, B, Service

REQUESTS = 1500


@pytest.mark.parametrize("service", [A, B], ids=["A", "B"])
def test_calls_have_the_shares_of_the_trace(service: Service) -> None:
    assert sum(service.shares()) == pytest.approx(1)
    assert all(more > less - 1e-5 for more, less in pairwise(service.shares()))
    drawn = list(itertools.islice(service.draw(random.Random(0)), 20_000))
    calls = Counter(name for names in drawn for name in names)
    top = sum(calls[f"{service.name}{rank}"] for rank in range(1, 6)) / calls.total()
    assert top == pytest.approx(service.top_share(5), abs=0.01)
    assert min(map(len, drawn)) == 1


def test_the_trace_says_what_it_is_quoted_for() -> None:
    assert round(100 * A.top_share(5), 1) == 97.6
    assert round(100 * B.top_share(8), 1) == 94.5


@pytest.mark.parametrize("service", [A, B], ids=["A", "B"])
def test_room_for_the_popular_ones_loses_little_and_less_than_lru(service: Service) -> None:
    places, share = JUDGED[service.name], service.top_share(JUDGED[service.name])
    ours = replay(service, Popularity(), places=places, requests=REQUESTS, rate_per_s=ONE_BY_ONE_PER_S)
    lru = replay(service, LeastRecentlyUsed(), places=places, requests=REQUESTS, rate_per_s=ONE_BY_ONE_PER_S)
    assert ours.misses <= 1 - share + BOUND + 0.005  # .005: that a short replay may be off
    assert lru.misses > 1.5 * ours.misses


def test_where_all_have_room_each_is_loaded_once() -> None:
    seen = replay(A, Popularity(), places=A.unique, requests=REQUESTS, rate_per_s=ONE_BY_ONE_PER_S)
    assert seen.misses < 0.01
    assert seen.loads == seen.misses
