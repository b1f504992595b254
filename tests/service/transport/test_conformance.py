"""What every backend of bottega.transport promises: order, credit, prefixes, checks, deadlines, deaths."""

from __future__ import annotations

import functools
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bottega.errors import (
    AuthFailed,
    BottegaError,
    DeadlineExceeded,
    LayoutMismatch,
    LeaseExpired,
    LinkClosed,
    MessageAborted,
    NoCredit,
    StaleEpoch,
    TooLarge,
)
from bottega.transport import Backend, DType, Layout, Limits, Link, TensorSpec, connect
from tests.fakes.fake_time import FakeTime
from tests.support.transport_backends import (
    BACKENDS,
    LAYOUT,
    OTHER_LAYOUT,
    SOON_S,
    check_message,
    content,
    devices_for,
    linked,
    listening,
    mapped_files,
    open_descriptors,
    open_link,
    opened,
    patience,
    read,
    received,
    sealed_file,
    soon,
    write,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.parametrize("backend", BACKENDS, ids=str)

LIMITS = Limits(slots=2, slot_bytes=1 << 20, layouts=3)
LAST = len(LAYOUT.specs) - 1


@pytest.fixture
def ends(backend: Backend, tmp_path: Path) -> Iterator[tuple[Link, Link]]:
    with linked(backend, tmp_path, limits=LIMITS) as both:
        yield both


def _sized(size_bytes: int) -> Layout:
    return Layout.of(TensorSpec(name="only", dtype=DType.UINT8, shape=(size_bytes,)))


def _in_thread(work: Callable[[], object]) -> Callable[[], BottegaError | None]:
    """Starts work that waits; the answer waits for its end and gives the error that it ended with."""
    errors: list[BottegaError] = []

    def run() -> None:
        try:
            work()
        except BottegaError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> BottegaError | None:
        thread.join(10)
        assert not thread.is_alive(), "it still waits"
        return errors[0] if errors else None

    return end


def test_what_is_sent_from_the_senders_own_buffers_arrives(ends: tuple[Link, Link]) -> None:
    near, far = ends
    for seed in range(4):
        near.send(LAYOUT, content(LAYOUT, seed), patience())
        write(near, LAYOUT, content(LAYOUT, seed + 100))
        assert read(far, LAYOUT) == content(LAYOUT, seed)
        assert read(far, LAYOUT) == content(LAYOUT, seed + 100)


def test_messages_of_both_directions_keep_their_order(ends: tuple[Link, Link]) -> None:
    near, far = ends
    layouts = [_sized(1), _sized(70_000), _sized(200), _sized(65)]

    def send(link: Link, seed: int) -> None:
        for number in range(100):
            layout = layouts[number % len(layouts)]
            link.send(layout, content(layout, seed + number), patience())

    sending = [_in_thread(lambda: send(near, 0)), _in_thread(lambda: send(far, 1000))]
    for number in range(100):
        layout = layouts[number % len(layouts)]
        assert read(far, layout) == content(layout, number)
        assert read(near, layout) == content(layout, 1000 + number)
    assert [end() for end in sending] == [None, None]


def test_the_first_tensors_can_be_used_before_the_last_are_written(ends: tuple[Link, Link]) -> None:
    near, far = ends
    parts = content(LAYOUT, 5)
    with near.start_message(LAYOUT, patience()) as outgoing:
        outgoing.views[0][:] = parts[0]
        outgoing.ready(1)
        incoming = far.recv(patience(), LAYOUT)
        incoming.wait(1, patience())
        assert bytes(incoming.view(0)) == parts[0]
        with pytest.raises(DeadlineExceeded):
            incoming.wait(2, soon())
        with pytest.raises(IndexError):
            incoming.view(1)
        for view, part in zip(outgoing.views[1:], parts[1:], strict=True):
            view[:] = part
        outgoing.ready(3)
        incoming.wait(3, patience())
        with pytest.raises(IndexError):
            incoming.view(3)
        outgoing.finish()
    incoming.wait_all(patience())
    assert [bytes(incoming.view(index)) for index in range(LAST + 1)] == parts
    incoming.release()


def test_a_message_that_is_taken_back_is_never_whole_and_the_link_lives(ends: tuple[Link, Link]) -> None:
    near, far = ends
    for seed in range(5):  # more than there are slots
        with near.start_message(LAYOUT, patience()) as outgoing:
            outgoing.ready(2)
        with far.recv(patience(), LAYOUT) as incoming:
            incoming.wait(2, patience())
            with pytest.raises(MessageAborted):
                incoming.wait_all(patience())
        check_message(near, far, seed)
    assert near.counters.snapshot().aborted == far.counters.snapshot().aborted == 5
    for _ in range(5):
        near.start_message(LAYOUT, patience()).abort()
    with pytest.raises(DeadlineExceeded):
        far.recv(soon())  # nothing was said of those
    check_message(near, far)


def test_without_credit_nothing_moves_and_the_link_lives(ends: tuple[Link, Link]) -> None:
    near, far = ends
    write(near, LAYOUT, content(LAYOUT, 1))
    write(near, LAYOUT, content(LAYOUT, 2))
    began = time.monotonic()
    with pytest.raises(NoCredit):
        near.start_message(LAYOUT, soon())
    assert time.monotonic() - began < 2
    held = [far.recv(patience()), far.recv(patience())]
    for incoming in held:
        incoming.wait_all(patience())
    with pytest.raises(NoCredit):
        near.send(LAYOUT, content(LAYOUT, 3), soon())
    held[1].release()
    write(near, LAYOUT, content(LAYOUT, 3))
    assert bytes(held[0].view(LAST)) == content(LAYOUT, 1)[LAST], "what is held was written over"
    assert read(far, LAYOUT) == content(LAYOUT, 3)
    held[0].release()
    assert near.counters.snapshot().no_credit == 2
    assert near.counters.snapshot().credit_wait_s >= 2 * SOON_S


def test_credit_that_any_thread_gives_back_wakes_the_sender(ends: tuple[Link, Link]) -> None:
    near, far = ends
    for seed in range(2):
        write(near, LAYOUT, content(LAYOUT, seed))
    incoming = received(far)
    end = _in_thread(lambda: write(near, LAYOUT, content(LAYOUT, 9)))
    time.sleep(0.02)
    threading.Thread(target=incoming.release).start()
    assert end() is None


def test_a_sender_can_wait_until_all_is_given_back(ends: tuple[Link, Link]) -> None:
    near, far = ends
    near.drain(soon())
    for seed in range(2):
        write(near, LAYOUT, content(LAYOUT, seed))
    read(far, LAYOUT)

    def held() -> str:
        with pytest.raises(DeadlineExceeded) as late:
            near.drain(soon())
        return late.value.message

    wait_until(lambda: "still holds 1" in held(), "the credit of one message to come back")
    end = _in_thread(lambda: near.drain(patience()))
    read(far, LAYOUT)
    assert end() is None


def test_a_full_direction_does_not_hold_up_the_other(ends: tuple[Link, Link]) -> None:
    near, far = ends
    for seed in range(2):
        write(near, LAYOUT, content(LAYOUT, seed))
    end = _in_thread(lambda: write(near, LAYOUT, content(LAYOUT, 2)))
    check_message(far, near, 7)
    read(far, LAYOUT)
    assert end() is None


def test_a_message_may_be_given_back_before_it_is_there(ends: tuple[Link, Link]) -> None:
    near, far = ends
    for seed in range(4):
        with near.start_message(LAYOUT, patience()) as outgoing:
            outgoing.ready(1)
            far.recv(patience(), LAYOUT).release()
            outgoing.finish()
        check_message(near, far, seed)


def test_a_message_given_back_while_it_is_looked_at_has_expired(
    ends: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ends
    write(near, LAYOUT, content(LAYOUT, 1))
    incoming = received(far)
    far.end(LinkClosed("its memory is still valid"))

    def meanwhile() -> float:
        """The clock that `view` asks: another thread gives the message back between two of its lines."""
        incoming.release()
        return 0.0

    monkeypatch.setattr("bottega.transport.channel.counters.time", SimpleNamespace(monotonic=meanwhile))
    with pytest.raises(LeaseExpired):
        incoming.view(0)


def test_a_wrong_layout_ends_the_link_at_both_ends_before_a_byte_is_taken(ends: tuple[Link, Link]) -> None:
    near, far = ends
    near.send(LAYOUT, content(LAYOUT, 1), patience())
    with pytest.raises(LayoutMismatch, match=r"float16\[2, 5, 7\] where deepest float16\[2, 5, 8\]"):
        far.recv(patience(), OTHER_LAYOUT)
    with pytest.raises(LayoutMismatch):
        near.recv(patience())
    with pytest.raises(LayoutMismatch):
        near.start_message(LAYOUT, patience())
    assert far.counters.snapshot().received.messages == 0
    assert near.counters.snapshot().deaths == far.counters.snapshot().deaths == {"LayoutMismatch": 1}


def test_more_layouts_than_are_remembered_can_be_used(ends: tuple[Link, Link]) -> None:
    near, far = ends
    for size_bytes in [*range(1, 12), 1, 5, 11]:
        layout = _sized(size_bytes)
        check_message(near, far, size_bytes, layout)


def test_large_messages_arrive_whole(backend: Backend, tmp_path: Path) -> None:
    with linked(backend, tmp_path, limits=Limits(slots=2, slot_bytes=8 << 20)) as (near, far):
        for size_bytes in ((1 << 18) - 1, (1 << 18) + 1, (1 << 19) + 5, (5 << 20) + 17, 8 << 20):
            layout = Layout.of(
                TensorSpec(name="large", dtype=DType.UINT8, shape=(size_bytes - 64,)),
                TensorSpec(name="small", dtype=DType.UINT8, shape=(3,)),
            )
            end = _in_thread(functools.partial(near.send, layout, content(layout, 1), patience()))
            assert read(far, layout) == content(layout, 1)
            assert end() is None


def test_what_cannot_be_sent_is_refused_before_anything_moves_and_the_link_lives(ends: tuple[Link, Link]) -> None:
    near, far = ends
    with pytest.raises(TooLarge) as raised:
        near.start_message(_sized((1 << 20) + 1), patience())
    assert raised.value.metadata == {"limit": "slot_bytes"}
    parts = content(LAYOUT, 1)
    for wrong in (parts[:-1], [*parts[:-1], parts[-1][1:]]):
        with pytest.raises(ValueError, match="buffer"):
            near.send(LAYOUT, wrong, patience())
    with near.start_message(LAYOUT, patience()), pytest.raises(RuntimeError, match="one message at a time"):
        near.start_message(LAYOUT, patience())
    check_message(near, far)


def test_a_close_is_told_to_the_peer(ends: tuple[Link, Link]) -> None:
    near, far = ends
    near.close()
    for call in (
        lambda: far.recv(patience()),
        lambda: far.start_message(LAYOUT, patience()),
        lambda: near.recv(patience()),
    ):
        with pytest.raises(LinkClosed):
            call()
    near.close()
    assert far.counters.snapshot().deaths == {"LinkClosed": 1}


def test_a_close_in_mid_message_leaves_it_unfinished(ends: tuple[Link, Link]) -> None:
    near, far = ends
    outgoing = near.start_message(LAYOUT, patience())
    outgoing.views[0][:] = content(LAYOUT, 3)[0]
    outgoing.ready(1)
    incoming = far.recv(patience())
    incoming.wait(1, patience())
    near.close()
    with pytest.raises(LinkClosed):
        incoming.wait_all(patience())
    with pytest.raises(LinkClosed):
        outgoing.finish()
    assert bytes(incoming.view(0)) == content(LAYOUT, 3)[0], "what had arrived stays readable"
    with pytest.raises(IndexError):
        incoming.view(1)
    assert far.counters.snapshot().received.messages == 0


@pytest.mark.parametrize("end", [0, 1])
def test_a_monitor_can_end_a_link_whose_threads_wait(ends: tuple[Link, Link], end: int) -> None:
    near, far = ends
    for seed in range(2):
        write(near, LAYOUT, content(LAYOUT, seed))
    waiting = [
        _in_thread(lambda: near.start_message(LAYOUT, patience())),
        _in_thread(lambda: near.recv(patience())),
        _in_thread(lambda: far.start_message(LAYOUT, patience()).abort()),
    ]
    time.sleep(0.02)
    began = time.monotonic()
    ends[end].end(StaleEpoch("given up by a monitor"))
    ends[end].end(LinkClosed("too late: the first cause counts"))
    errors = [done() for done in waiting]
    assert [type(error) for error in errors[:2]] == [StaleEpoch, StaleEpoch]
    assert type(ends[end].cause) is StaleEpoch
    assert time.monotonic() - began < 2


def test_within_a_host_a_message_carries_a_file_and_elsewhere_it_is_said_that_none_can(
    ends: tuple[Link, Link], backend: Backend
) -> None:
    near, far = ends
    assert near.passes_files == far.passes_files == (backend is Backend.MEMFD)
    data = bytes(range(251)) * 1000
    with sealed_file(data) as file:
        if not near.passes_files:
            with pytest.raises(ValueError, match="cannot pass files"):
                near.send(LAYOUT, content(LAYOUT, 1), patience(), file=file)
        for seed in range(4 * near.passes_files):  # more than there are slots
            near.send(LAYOUT, content(LAYOUT, seed), patience(), file=file)
            with far.recv(patience(), LAYOUT) as incoming:
                incoming.wait_all(patience())
                assert incoming.file is not None
                assert bytes(incoming.file) == data
                assert bytes(incoming.view(LAST)) == content(LAYOUT, seed)[LAST]
    for seed in range(3):
        near.send(LAYOUT, content(LAYOUT, seed), patience())
        with far.recv(patience(), LAYOUT) as incoming:
            assert incoming.file is None, "a file is of one message alone"
            incoming.wait_all(patience())
    carried = 4 * len(data) * near.passes_files
    assert near.counters.snapshot().sent.file_bytes == far.counters.snapshot().received.file_bytes == carried
    assert near.counters.snapshot().sent.size_bytes == (3 + 4 * near.passes_files) * LAYOUT.size_bytes


def test_a_file_outlives_its_message_its_link_and_its_sender_and_keeps_no_descriptor(
    backend: Backend, tmp_path: Path
) -> None:
    if backend is not Backend.MEMFD:
        return
    before = open_descriptors(), mapped_files()
    files = []
    with linked(backend, tmp_path, limits=LIMITS) as (near, far):
        for seed in range(20):
            with sealed_file(bytes([seed]) * 5000) as file:
                near.send(LAYOUT, content(LAYOUT, seed), patience(), file=file)
            with far.recv(patience()) as incoming:
                files.append(incoming.file)
                incoming.wait_all(patience())
    del incoming, near, far
    assert [bytes(file) for file in files if file is not None] == [bytes([seed]) * 5000 for seed in range(20)]
    assert (open_descriptors(), mapped_files()) == (before[0], before[1] + 20)
    del files
    assert mapped_files() == before[1]


def test_files_that_nobody_takes_are_let_go(backend: Backend, tmp_path: Path) -> None:
    if backend is not Backend.MEMFD:
        return
    before = open_descriptors(), mapped_files()
    with linked(backend, tmp_path, limits=LIMITS) as (near, far), sealed_file(b"x" * 5000) as file:
        for seed in range(5):
            near.send(LAYOUT, content(LAYOUT, seed), patience(), file=file)
            incoming = received(far)
            incoming.release()
            assert incoming.file is None
        assert mapped_files() == before[1]
        near.send(LAYOUT, content(LAYOUT, 1), patience(), file=file)  # nobody receives this one
    del near, far, incoming
    assert (open_descriptors(), mapped_files()) == before


def test_a_file_counts_as_its_message_and_is_bounded_as_it_is(ends: tuple[Link, Link]) -> None:
    near, far = ends
    if not near.passes_files:
        return
    with sealed_file(bytes((1 << 20) + 1)) as large, sealed_file(b"x") as file:
        with pytest.raises(TooLarge) as raised:
            near.send(LAYOUT, content(LAYOUT, 1), patience(), file=large)
        assert raised.value.metadata == {"limit": "slot_bytes"}
        with pytest.raises(ValueError, match="empty"):
            near.send(LAYOUT, content(LAYOUT, 1), patience(), file=replace(file, size_bytes=0))
        for seed in range(2):
            near.send(LAYOUT, content(LAYOUT, seed), patience(), file=file)
        with pytest.raises(NoCredit):
            near.send(LAYOUT, content(LAYOUT, 2), soon(), file=file)
        read(far, LAYOUT)
        near.send(LAYOUT, content(LAYOUT, 2), patience(), file=file)


def test_memory_stays_valid_for_as_long_as_somebody_looks_at_it(backend: Backend, tmp_path: Path) -> None:
    import torch

    parts = content(LAYOUT, 8)
    with linked(backend, tmp_path, limits=LIMITS) as (near, far):
        near.send(LAYOUT, parts, patience())
        incoming = received(far)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tensor = torch.frombuffer(incoming.view(LAST), dtype=torch.uint8)
        view = incoming.view(1)
    del incoming, near, far
    gc.collect()
    assert bytes(view) == parts[1]
    assert tensor.numpy().tobytes() == parts[LAST]


def test_what_a_dead_link_brought_expires(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeTime()
    monkeypatch.setattr("bottega.transport.channel.counters.time", clock)
    with linked(backend, tmp_path, limits=LIMITS, lease_s=5.0) as (near, far):
        far.send(LAYOUT, content(LAYOUT, 1), patience())
        incoming = received(near)
        clock.now += 60
        assert bytes(incoming.view(0)) == content(LAYOUT, 1)[0], "a living link's messages never expire"
        far.close()
        with pytest.raises(LinkClosed):
            near.recv(patience())
        clock.now += 4
        incoming.view(0)
        clock.now += 2
        with pytest.raises(LeaseExpired):
            incoming.view(0)


def test_links_outlive_their_listener(backend: Backend, tmp_path: Path) -> None:
    with listening(tmp_path, devices=devices_for(backend)) as listener, opened(listener, backend) as (near, far):
        listener.close()
        check_message(near, far, 2)


def test_relinking_raises_the_epoch_and_ends_the_older_link(backend: Backend, tmp_path: Path) -> None:
    with listening(tmp_path, devices=devices_for(backend)) as listener, opened(listener, backend) as (near, far):
        newer = listener.offer(near.link_id)
        assert newer.epoch == near.epoch + 1
        for old in (near, far):
            with pytest.raises(StaleEpoch):
                old.recv(patience())
        again, other = open_link(listener, newer, backend)
        with again, other:
            check_message(again, other, 2)


def test_an_old_epoch_is_stale(backend: Backend, tmp_path: Path) -> None:
    devices = devices_for(backend)
    with listening(tmp_path, devices=devices) as listener:
        old = listener.offer()
        listener.offer(old.link_id)
        with pytest.raises(StaleEpoch):
            connect(old, patience(), backends=(backend,), devices=devices)
        with pytest.raises(StaleEpoch):
            listener.accept(old, patience())


def test_a_token_opens_one_link_once(backend: Backend, tmp_path: Path) -> None:
    devices = devices_for(backend)
    with listening(tmp_path, devices=devices) as listener, ThreadPoolExecutor(1) as pool:
        offer = listener.offer()
        connecting = pool.submit(connect, offer, patience(), backends=(backend,), devices=devices)
        pending = listener._pending.get(offer.link_id)
        assert pending is not None
        wait_until(lambda: len(pending.connections) == 2, "both connections of the link")
        with pytest.raises(AuthFailed):  # before it was accepted
            connect(offer, patience(), backends=(backend,), devices=devices)
        with listener.accept(offer, patience()) as far, connecting.result() as near:
            with pytest.raises(AuthFailed):
                connect(offer, patience(), backends=(backend,), devices=devices)
            check_message(near, far)


def test_an_offer_expires(backend: Backend, tmp_path: Path) -> None:
    devices = devices_for(backend)
    with listening(tmp_path, token_s=0.05, devices=devices) as listener:
        offer = listener.offer()
        with pytest.raises(AuthFailed):
            listener.accept(offer, patience())
        with pytest.raises(AuthFailed):
            connect(offer, patience(), backends=(backend,), devices=devices)


def test_counters_tell_what_moved(ends: tuple[Link, Link]) -> None:
    near, far = ends
    write(near, LAYOUT, content(LAYOUT, 1))
    near.send(OTHER_LAYOUT, content(OTHER_LAYOUT, 1), patience())
    read(far, LAYOUT)
    read(far, OTHER_LAYOUT)
    sent, received = near.counters.snapshot().sent, far.counters.snapshot().received
    assert sent.messages == received.messages == 2
    assert sent.size_bytes == received.size_bytes == LAYOUT.size_bytes + OTHER_LAYOUT.size_bytes
    assert 0 < sent.longest_s <= sent.seconds < 5
    assert near.counters.snapshot().deaths == {}
