"""Sections on a link to another host: in the order of their use, edits in turn, no further than a worker wants them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bottega.addons.edits.wire import messages
from bottega.errors import LinkError
from bottega.rpc.server_config import LimitedLinksConfig
from bottega.transport import Deadline, Link, kind_of
from tests.support.running_activations import (
    LARGE,
    PATIENCE_S,
    Recorded,
    Running,
    ask,
    config,
    fetch,
    receive_sections,
    request_section,
    running,
    send,
)
from tests.support.waiting import eventually

# Sections of nearly 400 KiB: each takes .4 s, and so there is time to ask for others meanwhile on a busy machine, too.
_BYTES_PER_S = 1 << 20
_STEPS = 3
_MANY = 2 * _STEPS


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path) as made:
        yield made


@pytest.fixture
async def slow(tmp_path: Path) -> AsyncIterator[Running]:
    """A store whose links carry little."""
    async with running(tmp_path, config(links=LimitedLinksConfig(socket=None, bytes_per_s=_BYTES_PER_S))) as made:
        yield made


async def _digests(store: Running, link: Link, made: Recorded) -> list[str]:
    await store.fill(made)
    answer = (await asyncio.to_thread(ask, link, made.question())).header
    return [section.digest for section in answer.sections]


async def test_what_is_needed_of_a_section_comes_in_the_order_of_its_use(store: Running) -> None:
    made = Recorded(layout=LARGE)
    with await store.link() as link:
        (digest, *_) = await _digests(store, link, made)
        some = await asyncio.to_thread(fetch, link, digest, LARGE, tensors=(2, 0))
        whole = await asyncio.to_thread(fetch, link, digest, LARGE, number=2)
    tensors = made.tensors(0)
    assert (some.order, some.tensors) == ((2, 0), {2: tensors[2], 0: tensors[0]})
    assert (whole.order, list(whole.tensors.values())) == ((0, 1, 2), tensors)


async def test_the_sections_of_one_edit_come_one_after_the_other(slow: Running) -> None:
    made = Recorded(layout=LARGE, steps=_STEPS)
    with await slow.link() as link:
        digests = await _digests(slow, link, made)
        for number, digest in enumerate(digests):
            request_section(link, digest, number, edit=1)
        chunks: list[int] = []
        layouts = dict.fromkeys(range(_MANY), LARGE)
        await asyncio.to_thread(receive_sections, link, layouts, on_chunk=chunks.append)
    assert chunks == sorted(chunks)


async def test_an_edit_waits_for_no_other_ones_sections(slow: Running) -> None:
    first, second = Recorded(seed=1, layout=LARGE, steps=_STEPS), Recorded(seed=2, layout=LARGE, steps=1)
    with await slow.link() as link:
        digests = await _digests(slow, link, first)
        other, *_ = await _digests(slow, link, second)
        for number, digest in enumerate(digests):
            request_section(link, digest, number, edit=1)
        request_section(link, other, 99, edit=2)
        chunks: list[int] = []
        found = await asyncio.to_thread(receive_sections, link, {99: LARGE}, on_chunk=chunks.append)
    assert list(found[99].tensors.values()) == second.tensors(0)
    assert len(chunks) < 4 * chunks.count(99), "it had every other turn, and not the last of seven"
    assert len(chunks) > 1.5 * chunks.count(99), "and the other one was not held up by it"


async def test_what_is_said_meanwhile_waits_for_no_section(tmp_path: Path) -> None:
    links = LimitedLinksConfig(socket=None, bytes_per_s=_BYTES_PER_S // 4)  # all of it would take 9 s
    made = Recorded(layout=LARGE, steps=_STEPS)
    async with running(tmp_path, config(links=links)) as store:
        with await store.link() as link:
            digests = await _digests(store, link, made)
            for number, digest in enumerate(digests):
                request_section(link, digest, number)
            send(link, messages.question_message(1000, made.question()))
            sent_bytes = await asyncio.to_thread(_bytes_before_the_answer, link)
    assert sent_bytes < LARGE.size_bytes * len(digests) / 2


def _bytes_before_the_answer(link: Link) -> int:
    """How many bytes of sections come until the answer does."""
    count = 0
    while True:
        with link.recv(Deadline.after(PATIENCE_S)) as incoming:
            incoming.wait_all(Deadline.after(PATIENCE_S))
            if kind_of(incoming.layout) == messages.ActivationMessageKind.ANSWER:
                return count
            count += len(incoming.view(2))


async def test_what_was_cancelled_is_not_sent_any_further(slow: Running) -> None:
    made = Recorded(layout=LARGE, steps=_STEPS)
    with await slow.link() as link:
        digests = await _digests(slow, link, made)
        for number, digest in enumerate(digests):
            request_section(link, digest, number)
        for number in range(_MANY - 1):
            send(link, messages.cancel_message(number))
        send(link, messages.cancel_message(12345))  # of nothing: harmless
        chunks: list[int] = []
        last = _MANY - 1
        found = await asyncio.to_thread(receive_sections, link, {last: LARGE}, on_chunk=chunks.append)
        assert list(found[last].tensors.values()) == made.tensors(last)
        assert len(set(chunks)) <= 3, "at most what was under way, and the last"
    await eventually(lambda: slow.activations.store.wait_idle(0.0), "all of it to be given back")


async def test_a_link_that_ends_gives_back_all_that_was_on_its_way(slow: Running) -> None:
    made = Recorded(layout=LARGE, steps=_STEPS)
    with await slow.link() as link:
        digests = await _digests(slow, link, made)
        for number, digest in enumerate(digests):
            request_section(link, digest, number)
        await eventually(lambda: not slow.activations.store.wait_idle(0.0), "something to be on its way")
    await eventually(lambda: slow.activations.store.wait_idle(0.0), "all of it to be given back")


async def test_more_sections_than_are_loaded_at_once_all_come(store: Running) -> None:
    made = Recorded(steps=30)
    with await store.link() as link:
        digests = await _digests(store, link, made)
        assert len(digests) == 60
        for number, digest in enumerate(digests):
            request_section(link, digest, number, edit=number % 3)
        found = await asyncio.to_thread(receive_sections, link, dict.fromkeys(range(60), made.layout))
    assert all(list(found[place].tensors.values()) == made.tensors(place) for place in range(60))


async def test_a_number_that_is_asked_for_twice_ends_the_link(slow: Running) -> None:
    made = Recorded(layout=LARGE)
    with await slow.link() as link:
        digest, *_ = await _digests(slow, link, made)
        for _ in range(2):
            request_section(link, digest, 1)
        with pytest.raises(LinkError):
            await asyncio.to_thread(receive_sections, link, {1: LARGE, 2: LARGE})


async def test_a_store_that_drains_sends_what_is_under_way_to_its_end(slow: Running) -> None:
    made = Recorded(layout=LARGE)
    with await slow.link() as link:
        digest, *_ = await _digests(slow, link, made)
        request_section(link, digest, 1)
        await eventually(lambda: not slow.activations.store.wait_idle(0.0), "it to be on its way")
        receiving = asyncio.create_task(asyncio.to_thread(receive_sections, link, {1: LARGE}))
        await slow.activations.drain()
        assert slow.activations.store.wait_idle(0.0)
        found = await receiving
    assert list(found[1].tensors.values()) == made.tensors(0)
