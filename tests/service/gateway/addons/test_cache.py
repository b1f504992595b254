"""The real gateway and the approximate cache: what its workers are told, and what callers get of their reports."""

from __future__ import annotations

import pytest

from bottega import kinds
from bottega.v1.cache_pb2 import CacheDecision, CacheOrder, CacheStart
from bottega.v1.generation_pb2 import FIDELITY_BALANCED, FIDELITY_EXACT, CacheUse, Techniques
from bottega.v1.worker_pb2 import RunAttemptRequest
from tests.support.running_gateway import Running, running_gateway

_ENTRY = "0123456789abcdef" * 2
_PIN = f"{_ENTRY}@6"


def _order(request: RunAttemptRequest) -> CacheOrder:
    return CacheOrder.FromString(request.addons[kinds.CACHE])


async def test_workers_are_told_whether_pictures_may_start_from_latents(house: Running) -> None:
    worker = await house.worker()
    for spec in ({}, {"seed": 1}, {"seed": 1, "techniques": Techniques(approximate_cache=True)}):
        await house.draw(prompt="a red star", **spec)
    jobs = [_order(request).job for request in worker.requests]
    assert len(set(jobs)) == 3
    assert [_order(request) for request in worker.requests] == [
        CacheOrder(read=True, record=True, fidelity=FIDELITY_BALANCED, job=jobs[0]),
        CacheOrder(record=True, fidelity=FIDELITY_EXACT, job=jobs[1]),
        CacheOrder(read=True, record=True, fidelity=FIDELITY_BALANCED, job=jobs[2]),
    ]


async def test_a_picture_says_how_it_is_drawn_again(house: Running) -> None:
    worker = await house.worker()
    drawn = await house.draw(prompt="a red star")
    assert drawn.provenance.parameters.techniques == Techniques(approximate_cache=False)
    worker.script.cached_starts = [CacheUse(entry=_PIN, similarity=0.9, from_step=5)]
    drawn = await house.draw(prompt="a red star")
    assert drawn.provenance.parameters.techniques == Techniques(cache_entry=_PIN)
    assert drawn.provenance.cached_starts == worker.script.cached_starts


@pytest.mark.parametrize("started", [True, False], ids=["from a latent", "from noise"])
async def test_what_is_drawn_again_for_a_request_id_starts_from_what_it_started_from(started: bool) -> None:
    async with running_gateway(results_bytes=100, max_result_bytes=100) as house:
        worker = await house.worker()
        worker.script.picture = lambda index: b"x" * 60
        if started:
            worker.script.cached_starts = [CacheUse(entry=_PIN, similarity=0.9, from_step=5)]
        await house.draw("order-1", prompt="a red star")
        worker.script.picture = lambda index: b"y" * 60
        await house.draw(prompt="another that needs the room")
        again = await house.draw("order-1", prompt="a red star")
        assert again.images[0].data
        first, _, repeated = worker.requests
        assert kinds.CACHE not in first.decisions.by_kind
        decision = CacheDecision.FromString(repeated.decisions.by_kind[kinds.CACHE])
        start = CacheStart(entry=_ENTRY, step=6, similarity=0.9) if started else CacheStart()
        assert decision == CacheDecision(starts=[start])
        assert (_order(repeated).read, _order(repeated).record) == (started, True)
        assert repeated.spec == first.spec
