"""The real gateway and the approximate cache: what its workers are told, and what callers get of their reports."""

from __future__ import annotations

from bottega import kinds
from bottega.v1.cache_pb2 import CacheDecision, CacheOrder, CacheStart
from bottega.v1.generation_pb2 import CacheUse, Techniques
from tests.support.running_gateway import Running, running_gateway

_ENTRY = "0123456789abcdef" * 2
_PIN = f"{_ENTRY}@6"


async def test_a_picture_says_how_it_is_drawn_again(house: Running) -> None:
    worker = await house.worker()
    drawn = await house.draw(prompt="a red star")
    assert drawn.provenance.parameters.techniques == Techniques(approximate_cache=False)
    worker.script.cached_starts = [CacheUse(entry=_PIN, similarity=0.9, from_step=5)]
    drawn = await house.draw(prompt="a red star")
    assert drawn.provenance.parameters.techniques == Techniques(cache_entry=_PIN)
    assert drawn.provenance.cached_starts == worker.script.cached_starts


async def test_what_is_drawn_again_for_a_request_id_starts_from_what_it_started_from() -> None:
    async with running_gateway(results_bytes=100, max_result_bytes=100) as house:
        worker = await house.worker()
        worker.script.picture = lambda index: b"x" * 60
        worker.script.cached_starts = [CacheUse(entry=_PIN, similarity=0.9, from_step=5)]
        await house.draw("order-1", prompt="a red star")
        worker.script.picture = lambda index: b"y" * 60
        await house.draw(prompt="another that needs the room")
        again = await house.draw("order-1", prompt="a red star")
        assert again.images[0].data
        first, _, repeated = worker.requests
        assert kinds.CACHE not in first.decisions.by_kind
        decision = CacheDecision.FromString(repeated.decisions.by_kind[kinds.CACHE])
        assert decision == CacheDecision(starts=[CacheStart(entry=_ENTRY, step=6, similarity=0.9)])
        order = CacheOrder.FromString(repeated.addons[kinds.CACHE])
        assert (order.read, order.record) == (True, True)
        assert repeated.spec == first.spec
