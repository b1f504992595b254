"""Where the system has no memory for a slot, the message fails with its own error and the link goes on."""

from __future__ import annotations

import errno
import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bottega.errors import NoSharedMemory
from bottega.transport import Backend, DType, Layout, Limits, TensorSpec
from bottega.transport.memory import GrowingSlots, address, copy
from tests.support.full_disk import files_at_most
from tests.support.transport_backends import (
    LAYOUT,
    check_message,
    content,
    linked,
    listening,
    opened,
    patience,
    read,
    write,
)

LARGE = Layout.of(TensorSpec(name="large", dtype=DType.UINT8, shape=(4 << 20,)))
LIMITS = Limits(slots=2, slot_bytes=8 << 20)


def test_a_full_tmpfs_is_an_error_of_the_message_and_the_link_lives(tmp_path: Path) -> None:
    with (
        listening(tmp_path, limits=LIMITS) as listener,
        opened(listener, Backend.MEMFD, limits=LIMITS) as (near, far),
        opened(listener, Backend.MEMFD, limits=LIMITS) as (other_near, other_far),
    ):
        write(near, LAYOUT, content(LAYOUT, 1))
        with files_at_most(1 << 20):
            for call in (
                lambda: near.start_message(LARGE, patience()),
                lambda: near.send(LARGE, [bytes(4 << 20)], patience()),
                lambda: near.prepare(LARGE, patience()),
            ):
                with pytest.raises(NoSharedMemory) as raised:
                    call()
                assert raised.value.metadata == {"cause": "EFBIG"}
            near.send(LAYOUT, content(LAYOUT, 2), patience())
            write(other_near, LAYOUT, content(LAYOUT, 3))
        assert read(far, LAYOUT) == content(LAYOUT, 1)
        assert read(far, LAYOUT) == content(LAYOUT, 2)
        assert read(other_far, LAYOUT) == content(LAYOUT, 3)
        check_message(near, far, 4, LARGE)


def test_every_page_is_reserved_before_one_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with linked(Backend.MEMFD, tmp_path, limits=LIMITS) as (near, far):
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", no_room)
            with pytest.raises(NoSharedMemory) as raised:
                near.start_message(LAYOUT, patience())
            assert raised.value.metadata == {"cause": "ENOSPC"}
        check_message(near, far)


def test_a_slot_for_which_there_was_no_memory_is_made_for_the_next_message() -> None:
    def no_memory(size_bytes: int) -> mmap.mmap:
        raise NoSharedMemory("no memory")

    slots = GrowingSlots()
    with pytest.raises(NoSharedMemory):
        slots.get(0, 8 << 20, no_memory)
    assert len(slots.get(0, 5)) == mmap.PAGESIZE, "no larger than was needed"


def test_slots_begin_at_pages(tmp_path: Path) -> None:
    for backend in (Backend.MEMFD, Backend.TCP):
        with linked(backend, tmp_path) as (near, far):
            with near.start_message(LAYOUT, patience()) as outgoing:
                assert address(outgoing.views[0]) % mmap.PAGESIZE == 0
                outgoing.finish()
            with far.recv(patience()) as incoming:
                incoming.wait_all(patience())
                for index, offset in enumerate(LAYOUT.offsets):
                    assert (address(incoming.view(index)) - offset) % mmap.PAGESIZE == 0


@pytest.mark.parametrize(
    "size_bytes", [0, 1, 1000, 64 << 10, (64 << 10) + 1, 1 << 20, 4 << 20, (4 << 20) + 1, 9_999_999]
)
def test_copies_are_exact_and_stay_in_their_bounds(size_bytes: int) -> None:
    source = random.Random(size_bytes).randbytes(size_bytes)
    target = bytearray(size_bytes + 8)
    copy(memoryview(target), memoryview(source))
    assert target == source + bytes(8)
    if size_bytes:
        with pytest.raises(ValueError, match=r".+"):
            copy(memoryview(bytearray(size_bytes - 1)), memoryview(source))


def test_large_copies_of_many_threads_do_not_mix() -> None:
    sources = [random.Random(seed).randbytes(5 << 20) for seed in range(4)]
    targets = [bytearray(len(source)) for source in sources]
    for _ in range(10):
        with ThreadPoolExecutor(len(sources)) as threads:
            list(threads.map(copy, map(memoryview, targets), map(memoryview, sources)))
        assert targets == sources
        for target in targets:
            target[:] = bytes(len(target))
