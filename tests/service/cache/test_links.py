"""Links of an approximate cache over real gRPC: questions, recordings, and workers that break the rules."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from bottega.addons.cache import wire
from bottega.addons.cache.wire import CacheMessage
from bottega.errors import Draining, LinkError
from bottega.transport import BytesMessage, DType, Layout, Limits, TensorSpec, number_message, number_spec, pack_number
from bottega.v1 import cache_pb2 as pb
from tests.support.running_cache import (
    KEY,
    MODEL_HASH,
    PATIENCE_S,
    Running,
    ask,
    embedding,
    latents,
    picture,
    profile,
    question,
    receive,
    record,
    recording_message,
    running,
    send,
)
from tests.support.running_loras import refused
from tests.support.waiting import eventually


@pytest.fixture
async def cache(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "cache") as made:
        await made.call("SetCacheProfile", profile=profile())
        yield made


async def test_what_one_worker_records_another_one_starts_from(cache: Running) -> None:
    with await cache.link("one") as one, await cache.link("two") as two:
        asked = [await asyncio.to_thread(ask, one, embedding(0), number=number) for number in (1, 2)]
        assert [answer.header.record for answer in asked] == [False, True], "of a kind there must be two"
        assert {answer.header.outcome for answer in asked} == {pb.CACHE_OUTCOME_MISS}
        await asyncio.to_thread(record, one, embedding(0), seed=7)

        async def found() -> bool:
            answer = await asyncio.to_thread(ask, two, embedding(0))
            return bool(answer.latents)

        await eventually(found)
        answer = await asyncio.to_thread(ask, two, embedding(0), number=2**40)
    (hit,) = answer.header.hits
    assert (answer.header.outcome, hit.step, answer.header.record) == (pb.CACHE_OUTCOME_HIT, 10, False)
    assert hit.similarity == pytest.approx(1.0)
    assert np.array_equal(answer.latents[0], latents(7)[4])


async def test_what_was_recorded_before_a_stop_is_there_after_it(tmp_path: Path) -> None:
    async with running(tmp_path) as cache:
        await cache.call("SetCacheProfile", profile=profile())
        with await cache.link() as link:
            await asyncio.to_thread(record, link, embedding(3), seed=3)
            await eventually(lambda: _is_heard(cache))
    async with running(tmp_path) as cache, asyncio.timeout(PATIENCE_S):
        assert await asyncio.to_thread(cache.cache.store.flush, PATIENCE_S)
        with await cache.link() as link:
            answer = await asyncio.to_thread(ask, link, embedding(3))
    assert np.array_equal(answer.latents[0], latents(3)[4])


def _is_heard(cache: Running) -> bool:
    figures = cache.cache.store.statistics()
    return bool(figures.waiting or figures.models)


def _question_with(*specs: TensorSpec, header: bytes = b" ") -> CacheMessage:
    """A question whose tensors behind its number are these; the first one is the header."""
    layout = Layout.of(number_spec("question"), *specs)
    sizes = [spec.size_bytes for spec in specs[1:]]
    return CacheMessage(layout=layout, buffers=(pack_number(1), header, *(bytes(size) for size in sizes)))


def _header(size: int) -> TensorSpec:
    return TensorSpec(name="header", dtype=DType.UINT8, shape=(size,))


def _recording(**facts: object) -> CacheMessage:
    header = pb.CacheRecording(**{"key": KEY, "model_hash": MODEL_HASH, "steps": [2, 4], **facts})  # type: ignore[arg-type]
    return recording_message(header, embedding(0), picture(), latents(0, 2))


_VECTOR = TensorSpec(name="embedding", dtype=DType.FLOAT32, shape=(4,))
_BROKEN: dict[str, Callable[[], CacheMessage | BytesMessage]] = {
    "of no kind": lambda: number_message("colour"),
    "an answer": lambda: wire.answer_message(1, pb.CacheAnswer(), ()),
    "a question without anything": lambda: number_message("question"),
    "a question without an embedding": lambda: _question_with(_header(1)),
    "a question with numbers of another kind": lambda: _question_with(
        _header(1), TensorSpec(name="embedding", dtype=DType.FLOAT16, shape=(4,))
    ),
    "a question with too many numbers": lambda: _question_with(
        _header(1), TensorSpec(name="embedding", dtype=DType.FLOAT32, shape=(4097,))
    ),
    "a question with a header that is none": lambda: _question_with(_header(3), _VECTOR, header=b"\xff\xff "),
    "a question of no key": lambda: wire.question_message(1, pb.CacheQuestion(), memoryview(bytes(64))),
    "a question of nine pictures": lambda: wire.question_message(1, question(images=9), _nonzero()),
    "a question without a direction": lambda: wire.question_message(1, question(), memoryview(bytes(64))),
    "a recording of other steps": lambda: _recording(steps=[2, 4, 6]),
    "a recording of one step twice": lambda: _recording(steps=[2, 2]),
    "a recording of no key": lambda: _recording(key="x"),
    "a recording of no model": lambda: _recording(model_hash="../x"),
    "a recording with a large picture": lambda: recording_message(
        pb.CacheRecording(key=KEY, model_hash=MODEL_HASH, steps=[2]),
        embedding(0),
        np.zeros((257, 1, 3), np.uint8),
        latents(0, 1),
    ),
}


def _nonzero() -> memoryview:
    return embedding(0).data.cast("B")


async def test_a_message_that_breaks_a_rule_ends_its_link_and_no_other(cache: Running) -> None:
    with await cache.link("good") as good:
        for broken in _BROKEN.values():
            with await cache.link("bad") as bad:
                send(bad, broken())
                with pytest.raises(LinkError):
                    await asyncio.to_thread(receive, bad)
        assert (await asyncio.to_thread(ask, good, embedding(0))).header.outcome == pb.CACHE_OUTCOME_MISS


async def test_a_worker_that_has_no_room_for_the_latents_is_told_so(cache: Running) -> None:
    await cache.fill("a")
    with await cache.link(limits=Limits(slots=1, slot_bytes=512)) as link:
        answer = await asyncio.to_thread(ask, link, embedding(0))
    assert (answer.header.outcome, answer.latents) == (pb.CACHE_OUTCOME_UNAVAILABLE, ())


async def test_a_worker_that_reads_nothing_gets_no_more_latents(cache: Running) -> None:
    await cache.fill("a")
    asked = 100
    with await cache.link(limits=Limits(slots=1, slot_bytes=1 << 20)) as link:
        for number in range(asked):
            send(link, wire.question_message(number, question(), _nonzero()))
        await asyncio.to_thread(record, link, embedding(1), prompt="last")
        await eventually(lambda: len(cache.cache.store.entries(MODEL_HASH, 9)) == 2, "all of it to be heard")
        answers = [await asyncio.to_thread(receive, link, number) for number in range(asked)]
    outcomes = [answer.header.outcome for answer in answers]
    assert outcomes.count(pb.CACHE_OUTCOME_HIT) in (64, 65), "one may be on its way"
    assert {*outcomes} == {pb.CACHE_OUTCOME_HIT, pb.CACHE_OUTCOME_UNAVAILABLE}


async def test_a_cache_that_stops_offers_no_link(cache: Running) -> None:
    await cache.cache.drain()
    error = await refused(cache.open_link())
    assert isinstance(error, Draining)
    assert cache.cache.load().draining
