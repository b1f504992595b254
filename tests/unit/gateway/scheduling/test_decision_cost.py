"""What a decision costs with many workers, over what it costs with few of them."""

from __future__ import annotations

import time

from tests.fakes.gateway_rules import Shop
from tests.samples.jobs import sample_job

# Workers that change between two decisions, as many in both fleets.
_CHANGED = 10
_ROUNDS = 12


async def test_a_decision_among_500_workers_costs_at_most_5_of_those_of_50() -> None:
    few, many = await _decision_s(50), await _decision_s(500)
    assert many < 5.0 * few, "only changed workers have their states computed, and only a few get a plan"


async def _decision_s(workers: int) -> float:
    """Return the least processor seconds of a decision in a fleet of busy workers, most of which have not changed."""
    shop = Shop(max_members=workers)
    try:
        members = [shop.worker(f"w{number}") for number in range(workers)]
        for member in members:
            shop.dispatcher.start_attempt(sample_job(shop.time, controlnets=()), member, free_at=0.0)
        waiting = shop.submit()
        took_s = []
        for number in range(_ROUNDS):
            for place in range(_CHANGED):
                members[(number * _CHANGED + place) % workers].revision += 1
            began_s = time.thread_time()
            shop.controller.scheduler.schedule("m")
            took_s.append(time.thread_time() - began_s)
        assert not waiting.worker
        return min(took_s)
    finally:
        await shop.stop()
