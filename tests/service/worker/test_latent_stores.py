"""A worker's links to approximate caches: who is asked, what comes back, and that nothing ever waits."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from bottega.addons.cache import wire
from bottega.addons.cache.engine import JobRecording, LatentQuestion, LatentReply
from bottega.addons.cache.placement import placement_key
from bottega.addons.cache.wire import CacheMessage
from bottega.addons.cache.worker import CacheLinkSettings, LatentStores
from bottega.addons.cache.worker import addon as latent_stores
from bottega.addons.interface.store_link import rank_stores
from bottega.device_links.tensor_messages import DTYPES
from bottega.engine.spec import LoraSpec, ResolvedSpec
from bottega.transport import LinkCounters
from bottega.v1.cache_pb2 import CACHE_OUTCOME_UNAVAILABLE, CacheAnswer, CacheQuestion, CacheStart, CacheStarts
from bottega.v1.generation_pb2 import SAMPLER_EULER
from bottega.v1.trace_pb2 import StoreTimes
from tests.fakes.scripted_cache import ScriptedCache
from tests.support.offers import LocalOffers
from tests.support.waiting import EVENTUALLY_S, wait_until

ENTRY = "0" * 31 + "1"
KEY = "a" * 64
SPEC = ResolvedSpec(
    prompt="a star", negative_prompt="", seed=7, width=512, height=256, loras=(LoraSpec(name="ink", digest="b" * 64),)
)
SETTINGS = CacheLinkSettings(retry_s=0.05)
# A question is put into a queue; the thread that asks may have to wait for the processor.
AT_ONCE_S = 5.0
_FAILED = CacheAnswer(outcome=CACHE_OUTCOME_UNAVAILABLE)


def latent(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def answer_with(*latents: Tensor, record: bool = False, number: int | None = None) -> CacheMessage:
    header = CacheAnswer(hits=[CacheStart(entry=ENTRY, step=place + 1) for place in range(len(latents))], record=record)
    said = [
        (wire.latent_spec(place, DTYPES[each.dtype], tuple(each.shape)), each.flatten().view(torch.uint8).numpy())
        for place, each in enumerate(latents)
    ]
    return wire.answer_message(number or 1, header, [(spec, data.data) for spec, data in said])


def replying(*latents: Tensor, name: str = "one") -> ScriptedCache:
    return ScriptedCache(name, lambda number, _: answer_with(*latents, number=number))


def silent(name: str = "one") -> ScriptedCache:
    return ScriptedCache(name, lambda _number, _question: None)


@contextmanager
def linked(*caches: ScriptedCache, budget_bytes: int = 1 << 20) -> Iterator[tuple[LatentStores, LocalOffers]]:
    """A worker's links to these, all open."""
    offers = LocalOffers(*caches)
    stores = LatentStores(
        model_name="m", offers=offers, budget_bytes=budget_bytes, settings=SETTINGS, counters=LinkCounters()
    )
    try:
        stores.set_stores(offers.addresses())
        wait_until(lambda: stores.linked == len(caches), "the links")
        yield stores, offers
    finally:
        stores.stop()
        for cache in caches:
            cache.close()


def question(embedding: Tensor | None = None, **said: object) -> LatentQuestion:
    header = CacheQuestion(**{"key": KEY, "steps": 10, "images": 2, **said})  # type: ignore[arg-type]  # a test's own
    return LatentQuestion(header=header, embedding=torch.arange(6.0) if embedding is None else embedding)


def ask(stores: LatentStores) -> Future[LatentReply]:
    began_s = time.monotonic()
    asked = stores.ask(question())
    assert time.monotonic() - began_s < AT_ONCE_S
    return asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_answer_comes_as_it_was_sent(dtype: torch.dtype) -> None:
    sent = latent(1, dtype), latent(2, dtype)
    cache = replying(*sent)
    with linked(cache) as (stores, _):
        said = ask(stores).result(EVENTUALLY_S)
        assert cache.questions.get(timeout=EVENTUALLY_S) == question().header
        assert all(map(torch.equal, said.latents, sent))
        assert [start.entry for start in said.header.hits] == [ENTRY, ENTRY]


def embedding_of(owner: str, *names: str) -> Tensor:
    """An embedding whose entries this cache has, of the caches of these names."""
    return next(each for each in _embeddings() if rank_stores(names, placement_key(KEY, each.numpy()))[0] == owner)


def _embeddings() -> Iterator[Tensor]:
    chance = torch.Generator().manual_seed(0)
    while True:
        yield torch.randn(32, generator=chance)


def test_the_cache_of_the_prompt_is_asked_and_when_it_is_lost_the_next() -> None:
    first, second = silent("one"), replying(latent(), name="two")
    embedding = embedding_of("one", "one", "two")
    with linked(second, first) as (stores, offers):
        asked = stores.ask(question(embedding))
        first.questions.get(timeout=EVENTUALLY_S)
        assert second.questions.empty()
        del offers.there["one"]
        first.close()
        assert len(asked.result(EVENTUALLY_S).latents) == 1
        assert len(stores.ask(question(embedding)).result(EVENTUALLY_S).latents) == 1


def test_a_job_with_loras_asks_where_pictures_without_them_are_recorded() -> None:
    caches = [silent(name) for name in ("one", "two", "three")]
    with linked(*caches) as (stores, _):
        for embedding in itertools.islice(_embeddings(), 9):
            assert stores.record(recording(embedding=embedding))
            assert stores.record(recording(embedding=embedding, key="b" * 64, plain_key=KEY))
            stores.ask(question(embedding, key="b" * 64, plain_key=KEY))
        wait_until(lambda: sum(cache.recordings.qsize() for cache in caches) == 18, "the recordings")
        wait_until(lambda: sum(cache.questions.qsize() for cache in caches) == 9, "the questions")
        assert all(cache.recordings.qsize() == 2 * cache.questions.qsize() for cache in caches)


def test_a_named_entry_is_found_in_whichever_cache_has_it() -> None:
    caches = [ScriptedCache(name, lambda number, _: answer_with(number=number)) for name in ("one", "two")]
    third = replying(latent(), name="three")
    with linked(*caches, third) as (stores, _):
        pinned = [CacheStart(entry=ENTRY, step=1)]
        for owner in ("one", "two", "three"):
            embedding = embedding_of(owner, "one", "two", "three")
            reply = stores.ask(question(embedding, pinned=pinned)).result(EVENTUALLY_S)
            assert [hit.entry for hit in reply.header.hits] == [ENTRY]
            assert reply.work is not None
            assert reply.work.store == "three"
        third.reply = lambda number, _: answer_with(number=number)
        assert not stores.ask(question(pinned=pinned)).result(EVENTUALLY_S).latents, "every cache was asked"
        asked = [cache.questions.qsize() for cache in (*caches, third)]
        assert min(asked) >= 2
        assert not stores.ask(question()).result(EVENTUALLY_S).latents
        assert sum(cache.questions.qsize() for cache in (*caches, third)) == sum(asked) + 1


def test_a_named_entry_may_be_in_a_cache_that_is_away_or_fails() -> None:
    one = ScriptedCache("one", lambda number, _: answer_with(number=number))
    two = ScriptedCache("two", lambda number, _: wire.answer_message(number, _FAILED, ()))
    with linked(one, two) as (stores, offers):
        pinned = question(pinned=[CacheStart(entry=ENTRY, step=1)])
        assert stores.ask(pinned).result(EVENTUALLY_S).header.outcome == CACHE_OUTCOME_UNAVAILABLE
        away = offers.there.pop("two")
        away.close()
        wait_until(lambda: stores.linked == 1, "the loss")
        asked = stores.ask(pinned)
        one.questions.get(timeout=EVENTUALLY_S)
        with pytest.raises(TimeoutError):
            asked.result(0.2)
        stores.set_stores(offers.addresses())  # it has left the fleet
        assert asked.result(EVENTUALLY_S).header.outcome != CACHE_OUTCOME_UNAVAILABLE


def test_a_question_waits_for_a_cache_that_is_away_and_a_cancelled_one_is_not_asked_again() -> None:
    with linked() as (stores, offers):
        waiting, cancelled = ask(stores), ask(stores)
        assert cancelled.cancel()
        cache = offers.there["late"] = replying(latent(), name="late")
        stores.set_stores(offers.addresses())
        assert len(waiting.result(EVENTUALLY_S).latents) == 1
        ask(stores).result(EVENTUALLY_S)
        asked = [cache.questions.get(timeout=EVENTUALLY_S) for _ in range(2)]
        assert len(asked) == 2
        assert cache.questions.empty()
        cache.close()


# A hit without its latent, and what is no duration, break rules, which ends the link.
LIES = [CacheAnswer(hits=[CacheStart(entry=ENTRY, step=1)]), CacheAnswer(times=StoreTimes(search_s=float("nan")))]


@pytest.mark.parametrize("lie", LIES, ids=["no latent", "no duration"])
def test_a_cache_that_is_lost_is_linked_again_and_asked_again(lie: CacheAnswer) -> None:
    cache = silent()
    with linked(cache) as (stores, _):
        asked = ask(stores)
        cache.questions.get(timeout=EVENTUALLY_S)
        cache.reply = lambda number, _: answer_with(latent(), number=number)
        cache.say(wire.answer_message(1, lie, []))
        assert len(asked.result(EVENTUALLY_S).latents) == 1
        assert stores.linked == 1


def test_a_question_that_ends_every_link_is_given_up_and_others_are_answered() -> None:
    def reply(number: int, asked: CacheQuestion) -> CacheMessage:
        if asked.words == 99:
            raise ValueError("a question that breaks a rule")
        return answer_with(latent(), number=number)

    with linked(ScriptedCache("one", reply)) as (stores, _):
        poison = stores.ask(question(words=99))
        assert poison.result(EVENTUALLY_S).header.outcome == CACHE_OUTCOME_UNAVAILABLE
        assert len(ask(stores).result(EVENTUALLY_S).latents) == 1


def _hit(number: int, *, counts_starts: bool = False) -> CacheMessage:
    header = CacheAnswer(hits=[CacheStart(entry=ENTRY, step=1)], counts_starts=counts_starts)
    one = latent()
    spec = wire.latent_spec(0, DTYPES[one.dtype], tuple(one.shape))
    return wire.answer_message(number, header, [(spec, one.flatten().view(torch.uint8).numpy().data)])


def test_a_cache_that_counts_is_told_what_its_latents_saved() -> None:
    cache = ScriptedCache("one", lambda number, _: _hit(number, counts_starts=True))
    with linked(cache) as (stores, _):
        stores.report(ask(stores).result(EVENTUALLY_S), CacheStarts(pictures=1, skipped_steps=3))
        assert cache.starts.get(timeout=EVENTUALLY_S) == CacheStarts(pictures=1, skipped_steps=3)
        cache.reply = lambda number, _: _hit(number)  # as one of an earlier version does
        stores.report(ask(stores).result(EVENTUALLY_S), CacheStarts(pictures=1))
        ask(stores).result(EVENTUALLY_S)
        assert cache.starts.empty()


def test_a_cache_is_told_of_hits_that_nobody_waits_for_any_more() -> None:
    cache = silent()
    with linked(cache) as (stores, _):
        asked = ask(stores)
        cache.questions.get(timeout=EVENTUALLY_S)
        assert asked.cancel()
        cache.say(_hit(1, counts_starts=True))
        assert cache.starts.get(timeout=EVENTUALLY_S) == CacheStarts(key=KEY, unused=[ENTRY])


def test_questions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_stores, "_MAX_QUESTIONS", 2)
    with linked() as (stores, _):
        first, second, third = (ask(stores) for _ in range(3))
        assert third.result(0).header.outcome == CACHE_OUTCOME_UNAVAILABLE
        assert not first.done()
        second.cancel()
        assert not ask(stores).done()


def test_a_cache_that_has_left_the_fleet_has_no_link_any_more() -> None:
    cache = replying()
    with linked(cache) as (stores, _):
        stores.set_stores([])
        wait_until(lambda: not cache.handlers, "the link to end")
        assert stores.linked == 0


def recording(side: int = 32, **said: object) -> JobRecording:
    pixels = torch.arange(side * side // 2 * 3, dtype=torch.int64).remainder(255).to(torch.uint8)
    made = {
        "key": KEY,
        "model_hash": "h",
        "spec": SPEC,
        "embedding": torch.arange(6, dtype=torch.float32),
        "pixels": pixels.reshape(side // 2, side, 3),
        "latents": {3: latent(3), 1: latent(1)},
    }
    return JobRecording(**{**made, **said})  # type: ignore[arg-type]  # a test's own


def test_a_recording_comes_whole_with_what_was_drawn() -> None:
    cache = silent()
    with linked(cache) as (stores, _):
        assert stores.record(recording())
        got = cache.recordings.get(timeout=EVENTUALLY_S)
        said = got.header
        assert (said.key, said.model_hash, list(said.steps)) == (KEY, "h", [1, 3])
        drawn = said.parameters
        assert (drawn.model, drawn.prompt, drawn.negative_prompt, drawn.seed) == ("m", "a star", "", 7)
        assert (drawn.HasField("negative_prompt"), drawn.HasField("negative_prompt_2")) == (True, False)
        assert (drawn.sampler, drawn.loras[0].digest) == (SAMPLER_EULER, "b" * 64)
        embedding, picture, *latents = got.tensors
        assert np.array_equal(np.frombuffer(embedding, np.float32), np.arange(6))
        assert picture == recording().pixels.numpy().tobytes()
        assert [np.frombuffer(each, np.float32).tolist() for each in latents] == [
            latent(seed).flatten().tolist() for seed in (1, 3)
        ]


def test_recordings_are_bounded_in_bytes_and_lost_without_a_link() -> None:
    with linked() as (stores, _):
        assert not stores.record(recording())
    cache = silent()
    with linked(cache, budget_bytes=recording().size_bytes) as (stores, _):
        assert not stores.record(recording(side=64))
        assert stores.record(recording())
        cache.recordings.get(timeout=EVENTUALLY_S)
        assert stores.record(recording())  # there is room again
        cache.recordings.get(timeout=EVENTUALLY_S)


def test_a_recording_that_cannot_be_made_is_left_out() -> None:
    cache = silent()
    with linked(cache) as (stores, _):
        assert stores.record(recording(pixels=torch.zeros(2, dtype=torch.uint8)))
        assert stores.record(recording())
        assert list(cache.recordings.get(timeout=EVENTUALLY_S).header.steps) == [1, 3]
        assert stores.linked == 1
