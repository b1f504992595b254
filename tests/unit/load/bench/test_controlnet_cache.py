"""The replay of the trace's ControlNets tells good orders from bad ones."""

from __future__ import annotations

import pytest

from bottega.caching import Popularity
from load.bench.controlnet_cache import BOUND, JUDGED, ONE_BY_ONE_PER_S, LeastRecentlyUsed, replay
from load.replay.trace_shape import CONTROLNETS, CONTROLNETS_A, AdapterCalls

REQUESTS = 1500


@pytest.mark.parametrize("service", [*CONTROLNETS.values()], ids=[*CONTROLNETS])
def test_room_for_the_popular_ones_loses_little_and_less_than_lru(service: AdapterCalls) -> None:
    places, share = JUDGED[service.name], service.top_share(JUDGED[service.name])
    ours = replay(service, Popularity(), places=places, requests=REQUESTS, rate_per_s=ONE_BY_ONE_PER_S)
    lru = replay(service, LeastRecentlyUsed(), places=places, requests=REQUESTS, rate_per_s=ONE_BY_ONE_PER_S)
    assert ours.misses <= 1 - share + BOUND + 0.005  # .005: that a short replay may be off
    assert lru.misses > 1.5 * ours.misses


def test_where_all_have_room_each_is_loaded_once() -> None:
    seen = replay(
        CONTROLNETS_A, Popularity(), places=CONTROLNETS_A.unique, requests=REQUESTS, rate_per_s=ONE_BY_ONE_PER_S
    )
    assert seen.misses < 0.01
    assert seen.loads == seen.misses
