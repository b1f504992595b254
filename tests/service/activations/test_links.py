"""Links of an activation store over real gRPC: what one worker records, others are told of and given; and workers that
break the rules, or end in the middle.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bottega.addons.edits.wire import messages
from bottega.addons.edits.wire.pieces import SectionChunks
from bottega.errors import BottegaError, LinkError
from bottega.rpc.server_config import LimitedLinksConfig
from bottega.transport import DType, Layout, Limits, TensorSpec, WholeMessage, number_message, number_spec, pack_number
from bottega.transport.messages import BytesMessage
from bottega.v1 import activations_pb2 as pb
from bottega.v1.trace_pb2 import StoreTimes
from tests.fakes.scripted_activation_store import chunk_message
from tests.support.running_activations import (
    LARGE,
    SMALL,
    Recorded,
    Running,
    ask,
    config,
    fetch,
    receive_abandon,
    receive_answer,
    record_template,
    running,
    send,
    send_section,
)
from tests.support.stored_templates_writer import look_through, store_of, work
from tests.support.waiting import eventually


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Running]:
    async with running(tmp_path / "activations") as made:
        yield made


@pytest.fixture
async def shared(tmp_path: Path) -> AsyncIterator[Running]:
    """A store that shares its memory with workers of its host."""
    links = LimitedLinksConfig(socket=str(tmp_path / "links.sock"))
    async with running(tmp_path / "activations", config(links=links)) as made:
        yield made


async def test_a_worker_of_the_same_host_is_given_the_memory_itself(shared: Running) -> None:
    made = Recorded(layout=LARGE)
    await shared.fill(made)
    with await shared.link() as link:
        answer = (await asyncio.to_thread(ask, link, made.question())).header
        # What is needed of it is no matter: all of it costs nothing.
        section = await asyncio.to_thread(fetch, link, answer.sections[1].digest, LARGE, tensors=(1,))
    assert section.shared
    assert list(section.tensors.values()) == made.tensors(1)


async def test_a_template_that_is_recorded_by_nobody_is_recorded_by_one_worker_alone(store: Running) -> None:
    made = Recorded()
    with await store.link("one") as one, await store.link("two") as two:
        assert not (await asyncio.to_thread(ask, one, made.question())).header.record, "it would not"
        asked = made.question(would_record=True)
        granted = [(await asyncio.to_thread(ask, link, asked)).header.record for link in (one, two, one)]
        assert granted == [True, False, True]
        send_section(two, made, 0)  # nobody has asked it to
        assert await asyncio.to_thread(receive_abandon, two) == (made.id, made.key)
        await asyncio.to_thread(record_template, one, made)
        await eventually(lambda: _is_told(store, two, made))
        assert not (await asyncio.to_thread(ask, two, asked)).header.record, "it is there"
    assert store.activations.store.statistics().dropped["not_granted"] == 1


async def _is_told(store: Running, link: object, made: Recorded) -> bool:
    answer = await asyncio.to_thread(ask, link, made.question())  # type: ignore[arg-type]
    return answer.header.recording == made.id


async def test_a_worker_is_told_that_a_template_was_dropped_of_which_it_sends_a_section(store: Running) -> None:
    made = Recorded()
    await store.fill(made)
    with await store.link("one") as one, await store.link("two") as two:
        await eventually(lambda: _is_told(store, one, made))
        await store.call("DropStoredTemplate", id=made.id)
        send_section(one, made, 0)
        assert await asyncio.to_thread(receive_abandon, one) == (made.id, made.key)
        assert (await asyncio.to_thread(ask, two, made.question(would_record=True))).header.record
        await asyncio.to_thread(record_template, two, made)


async def test_what_a_worker_had_begun_is_nothing_when_its_link_ends_or_it_gives_up(store: Running) -> None:
    made = Recorded()
    asked = made.question(would_record=True)
    with await store.link("one") as one:
        assert (await asyncio.to_thread(ask, one, asked)).header.record
        send_section(one, made, 0)
    with await store.link("two") as two:

        async def may_record() -> bool:
            return (await asyncio.to_thread(ask, two, asked)).header.record

        await eventually(may_record)
        send_section(two, made, 0)
        send(two, messages.abandon_message(made.id, made.key))
        await asyncio.to_thread(ask, two, made.question())  # its answer comes after all before it was heard
        with await store.link("three") as three:
            await asyncio.to_thread(record_template, three, made)
            await eventually(lambda: _is_told(store, two, made))
        answer = (await asyncio.to_thread(ask, two, made.question())).header
        assert len(answer.sections) == len(made.keys)


async def test_a_section_that_nobody_has_and_a_tensor_that_it_has_not_are_refused(store: Running) -> None:
    made = Recorded()
    await store.fill(made)
    with await store.link() as link:
        with pytest.raises(BottegaError):
            await asyncio.to_thread(fetch, link, "0" * 64, SMALL)
        digest = (await asyncio.to_thread(ask, link, made.question())).header.sections[0].digest
        with pytest.raises(BottegaError, match="numbered 0 to 2"):
            await asyncio.to_thread(fetch, link, digest, SMALL, tensors=(0, 3), number=2)
        section = await asyncio.to_thread(fetch, link, digest, SMALL, number=3)
    assert list(section.tensors.values()) == made.tensors(0)


async def test_a_worker_that_has_no_room_for_the_answer_is_told_of_nothing(store: Running) -> None:
    made = Recorded()
    await store.fill(made)
    with await store.link(limits=Limits(slots=1, slot_bytes=512)) as link:
        answer = await asyncio.to_thread(ask, link, made.question())
    assert (answer.header.recording, answer.drawn) == ("", None)


async def test_a_worker_that_reads_nothing_gets_no_more_answers_that_are_worth_something(store: Running) -> None:
    made = Recorded()
    await store.fill(made)
    asked = 100
    with await store.link(limits=Limits(slots=1, slot_bytes=1 << 20)) as link:
        for number in range(asked):
            send(link, messages.question_message(number, made.question()))
        last = Recorded(seed=1)
        send(link, messages.question_message(asked, last.question(would_record=True)))
        await eventually(lambda: store.activations.store.statistics().misses == 1, "all of it to be heard")
        answers = [await asyncio.to_thread(receive_answer, link, number) for number in range(asked + 1)]
    told = [bool(answer.header.recording) for answer in answers]
    assert told.count(True) in (64, 65), "one may be on its way"


def _header(size: int) -> TensorSpec:
    return TensorSpec(name="header", dtype=DType.UINT8, shape=(size,))


def _message(kind: str, *specs: TensorSpec, header: bytes = b"") -> WholeMessage:
    """Whose tensors behind its number are these; the first one is the header."""
    layout = Layout.of(number_spec(kind), *specs)
    sizes = [spec.size_bytes for spec in specs[1:]]
    return BytesMessage(layout=layout, buffers=(pack_number(1), header, *(bytes(size) for size in sizes)))


def _section(**fields: object) -> WholeMessage:
    made = Recorded()
    return messages.section_message(1, made.section(0, **fields), made.layout)


def _recording(**fields: object) -> WholeMessage:
    made = Recorded()
    return messages.recording_message(made.header(**fields), made.drawn_tensors())


_BROKEN: dict[str, Callable[[], WholeMessage]] = {
    "of no kind": lambda: number_message("colour"),
    "an answer": lambda: messages.answer_message(1, pb.TemplateAnswer(), None),
    "a whole section": lambda: messages.whole_message(1, StoreTimes()),
    "a chunk of nothing": lambda: chunk_message(1, tensor=0, start=0, data=b"x"),
    "a question without a header": lambda: number_message("question"),
    "a question with a header that is none": lambda: _message("question", _header(7), header=b"\3\0\0\0\xff\xff\xff"),
    "a question with a header that is too long": lambda: _message("question", _header(1 << 20), header=bytes(1 << 20)),
    "a question of no key": lambda: messages.question_message(1, pb.TemplateQuestion(key="x")),
    "a fetch of no digest": lambda: messages.fetch_message(1, pb.SectionRequest(digest="../x")),
    "a section of no key": lambda: _section(key="x"),
    "a section of no recording": lambda: _section(recording="../x"),
    "a section of a third half": lambda: _section(section=pb.SectionKey(timestep=1.0, noise_level=1.0, half=2)),
    "a section with a map of another size": lambda: _section(map=b"\xff"),
    "a section of no tensors": lambda: _message("section", _header(256), header=bytes(256)),
    "a recording of no key": lambda: _recording(key="x"),
    "a recording without what it says was drawn": lambda: messages.recording_message(Recorded().header(), None),
    "an abandoned recording that is none": lambda: messages.abandon_message("../x", "ab" * 32),
}


async def test_a_message_that_breaks_a_rule_ends_its_link_and_no_other(store: Running) -> None:
    made = Recorded(seed=3)
    await store.fill(made)
    async with contextlib.AsyncExitStack() as links:
        good = links.enter_context(await store.link("good"))
        for name, broken in _BROKEN.items():
            with await store.link("bad") as bad:
                send(bad, broken())
                with pytest.raises(LinkError):
                    pytest.fail(f"{name} was answered: {await asyncio.to_thread(receive_answer, bad)}")
            assert (await asyncio.to_thread(ask, good, made.question())).header.recording == made.id, name


async def test_a_section_that_another_one_cuts_off_is_nothing(store: Running) -> None:
    made = Recorded(layout=LARGE, steps=1)
    with await store.link() as link:
        assert (await asyncio.to_thread(ask, link, made.question(would_record=True))).header.record
        send(link, messages.section_message(7, made.section(0), made.layout))
        SectionChunks(7, made.layout, made.tensors(0)).send(link, 1000)
        await asyncio.to_thread(send_section, link, made, 1)
        send(link, messages.recording_message(made.header(), made.drawn_tensors()))

        async def is_there() -> bool:
            return bool(await store.templates())

        await eventually(is_there)
        answer = await asyncio.to_thread(ask, link, made.question())
    assert [section.key for section in answer.header.sections] == made.keys[1:]
    figures = store.activations.store.statistics()
    assert (figures.dropped["abandoned"], figures.waiting, figures.waiting_bytes) == (1, 0, 0)


async def test_a_link_that_ends_in_the_middle_of_a_section_leaves_nothing(store: Running) -> None:
    made = Recorded(layout=LARGE)
    with await store.link() as link:
        assert (await asyncio.to_thread(ask, link, made.question(would_record=True))).header.record
        send(link, messages.section_message(7, made.section(0), made.layout))
        SectionChunks(7, made.layout, made.tensors(0)).send(link, 1000)
        await eventually(lambda: store.activations.store.statistics().waiting == 1)
    await eventually(lambda: store.activations.store.statistics().waiting == 0)


def test_what_many_workers_do_at_once_is_not_mixed_up(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone
    store = store_of(tmp_path)
    store.start()
    failures: list[BaseException] = []

    def worker(number: int) -> None:
        chance = random.Random(number)
        try:
            for turn in range(60):
                work(store, chance, number * 1000 + turn)
                if chance.random() < 0.03:
                    store.drop("")
        except BaseException as error:  # noqa: BLE001 - the test fails with it
            failures.append(error)

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(80.0)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert store.flush(20.0)
    figures = store.statistics()
    assert (figures.waiting, figures.waiting_bytes, figures.trouble) == (0, 0, "")
    assert figures.recorded > 20
    assert figures.recording == 0, "every link has ended"
    store.close()
    store = store_of(tmp_path)
    store.start()
    look_through(store, tmp_path)
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # noqa: PTH208 - names alone
