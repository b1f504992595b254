"""A peer that knows the token and lies all the same ends its own link, with BadFrame, and nothing else.

The other end is a bare socket that says what no link of ours would.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import random
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bottega.errors import BadFrame, DeadlineExceeded, LinkError, NoSharedMemory, PeerDead
from bottega.transport import Backend, BackendChoice, Deadline, DType, Layout, Limits, Link, LinkCounters, TensorSpec
from bottega.transport.backends import Proven, backend_ends
from bottega.transport.channel.frames import HEADER_BYTES, Frame, FrameKind
from bottega.transport.layout import MAX_ENCODED_BYTES
from bottega.transport.link import LinkTerms
from bottega.transport.memory import shared_slot
from tests.support.transport_backends import (
    FILE_NAME,
    LAYOUT,
    content,
    mapped_files,
    open_descriptors,
    patience,
    sealed_file,
)

LIMITS = Limits(slots=2, slot_bytes=1 << 20, layouts=4)
SPAN = LAYOUT.span(0, len(LAYOUT.specs))[1]
COUNT = len(LAYOUT.specs)
HUGE = Layout.of(TensorSpec(name="huge", dtype=DType.UINT8, shape=(1 << 40,)))
_SEALS = (fcntl.F_SEAL_SEAL, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE)
_ALL_SEALS = sum(_SEALS)
# <linux/falloc.h>: blocks behind a file's end.
_KEEP_SIZE = 1
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Liar:
    """The other end of a link, as two bare sockets."""

    link: Link
    sends: socket.socket
    receives: socket.socket

    @property
    def shares_memory(self) -> bool:
        """Whether tensors come by shared memory, and not behind their frames."""
        return self.link.backend_choice.backend == Backend.MEMFD

    def bulk(self, size_bytes: int) -> bytes:
        """What comes behind the frame of so many bytes of tensors."""
        return b"" if self.shares_memory else bytes(size_bytes)

    def prepare(self) -> None:
        """Registers LAYOUT and shares slots, as an honest peer does."""
        self.register(LAYOUT)
        self.share_slots()

    def share_slots(self) -> None:
        """As an honest peer does, where it has to."""
        for slot in range(LIMITS.slots if self.shares_memory else 0):
            descriptor, mapping = shared_slot(1 << 20)
            self.share(descriptor, slot=slot, size=len(mapping))
            os.close(descriptor)

    def say(self, frame: Frame) -> None:
        """Sends a frame to the link's receiver, with what belongs to it."""
        self.sends.sendall(frame.pack() + frame.payload)

    def register(self, layout: Layout, number: int = 0) -> None:
        """Registers a layout as an honest peer does."""
        encoded = layout.encode()
        self.say(Frame(FrameKind.LAYOUT, layout=number, size=len(encoded), payload=encoded))

    def share(self, descriptor: int, *, slot: int = 0, size: int, kind: FrameKind = FrameKind.SEGMENT) -> None:
        """Shares memory as a slot's, or passes a file with the slot's next message."""
        self.say(Frame(kind, slot=slot, size=size))
        self.sends.sendmsg([b"\0"], [_rights(descriptor)])


def _rights(*descriptors: int) -> tuple[int, int, array.array[int]]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors)


@pytest.fixture
def liar(request: pytest.FixtureRequest) -> Iterator[Liar]:
    ours_out, receives = socket.socketpair()
    ours_in, sends = socket.socketpair()
    terms = LinkTerms(
        link_id="0" * 32,
        epoch=1,
        backend_choice=BackendChoice(backend=request.param, reason="a test"),
        ours=LIMITS,
        theirs=LIMITS,
        counters=LinkCounters(),
    )
    with (
        Link(
            terms, *backend_ends(request.param, Proven(connection=ours_out), Proven(connection=ours_in), LIMITS)
        ) as link,
        sends,
        receives,
    ):
        yield Liar(link=link, sends=sends, receives=receives)


_both = pytest.mark.parametrize("liar", list(Backend), ids=str, indirect=True)
_memfd = pytest.mark.parametrize("liar", [Backend.MEMFD], ids=str, indirect=True)
_tcp = pytest.mark.parametrize("liar", [Backend.TCP], ids=str, indirect=True)


def _whole(**changes: Any) -> Frame:
    return Frame(FrameKind.DATA, ready=COUNT, sequence=1, size=SPAN)._replace(**changes)


def _take(link: Link) -> None:
    with link.recv(patience()) as incoming:
        incoming.wait_all(patience())


@pytest.mark.parametrize(
    "frame",
    [
        _whole(ready=0),
        _whole(ready=COUNT + 1),
        _whole(size=0),
        _whole(size=SPAN - 1),
        _whole(size=SPAN + 1),
        _whole(slot=2),
        _whole(layout=1),
        _whole(sequence=2),
        Frame(FrameKind.CREDIT, sequence=1),
        Frame(9),
        Frame(FrameKind.LAYOUT, layout=4, size=len(LAYOUT.encode()), payload=LAYOUT.encode()),
        Frame(FrameKind.LAYOUT, layout=1, size=MAX_ENCODED_BYTES + 1),
        Frame(FrameKind.LAYOUT, layout=1, size=0),
        Frame(FrameKind.LAYOUT, layout=1, size=4, payload=b"\xff\xff\xff\xff"),
        Frame(FrameKind.LAYOUT, layout=1, size=len(HUGE.encode()), payload=HUGE.encode()),
    ],
    ids=str,
)
@_both
def test_a_frame_that_lies_ends_the_link(liar: Liar, frame: Frame) -> None:
    liar.prepare()
    liar.say(frame)
    began = time.monotonic()
    with pytest.raises(BadFrame):
        _take(liar.link)
    assert time.monotonic() - began < 2, "it waited for bytes that nobody had sent"
    assert liar.link.counters.snapshot().deaths == {"BadFrame": 1}
    assert liar.link.counters.snapshot().received.messages == 0


@_both
def test_bytes_that_are_no_frame_end_the_link(liar: Liar) -> None:
    liar.sends.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with pytest.raises(BadFrame):
        liar.link.recv(patience())


@_both
def test_a_message_without_credit_ends_the_link(liar: Liar) -> None:
    liar.prepare()
    liar.say(_whole(payload=liar.bulk(SPAN)))
    held = liar.link.recv(patience())
    held.wait_all(patience())
    liar.say(_whole(sequence=2))
    with pytest.raises(BadFrame, match="without a credit"):
        liar.link.recv(patience())


@_both
def test_a_message_in_the_middle_of_another_ends_the_link(liar: Liar) -> None:
    liar.prepare()
    first = LAYOUT.span(0, 1)[1]
    liar.say(_whole(ready=1, size=first, payload=liar.bulk(first)))
    incoming = liar.link.recv(patience())
    incoming.wait(1, patience())
    liar.say(_whole(slot=1, sequence=2))
    with pytest.raises(BadFrame, match="in the middle"):
        incoming.wait_all(patience())


@pytest.mark.parametrize(
    "frame", [Frame(FrameKind.CREDIT, sequence=1), Frame(FrameKind.CREDIT, slot=7), Frame(FrameKind.LAYOUT)]
)
@_both
def test_credit_for_nothing_ends_the_link(liar: Liar, frame: Frame) -> None:
    liar.receives.sendall(frame.pack())
    with pytest.raises(BadFrame):
        liar.link.start_message(LAYOUT, patience())


@_both
def test_credit_for_another_message_than_the_one_in_the_slot_ends_the_link(liar: Liar) -> None:
    with liar.link.start_message(LAYOUT, patience()) as outgoing:
        liar.receives.sendall(Frame(FrameKind.CREDIT, slot=outgoing.index, sequence=7).pack())
        outgoing.finish()
    with pytest.raises(BadFrame, match="not under way"):
        liar.link.start_message(LAYOUT, patience())


@_both
def test_a_sender_that_never_reads_its_credit_cannot_hold_up_a_release(liar: Liar) -> None:
    liar.prepare()
    bulk = liar.bulk(SPAN)
    for number in range(1, 100_000):
        liar.say(_whole(sequence=number, payload=bulk))
        began = time.monotonic()
        _take(liar.link)
        assert time.monotonic() - began < 2
        if liar.link.cause is not None:
            break
    assert type(liar.link.cause) is BadFrame


@_both
def test_half_a_header_is_waited_for_until_the_deadline_and_completed_later(liar: Liar) -> None:
    encoded = LAYOUT.encode()
    whole = Frame(FrameKind.LAYOUT, size=len(encoded)).pack() + encoded + Frame(FrameKind.BYE).pack()
    for at in range(0, len(whole) - HEADER_BYTES, 17):
        liar.sends.sendall(whole[at : at + 17])
        with pytest.raises(DeadlineExceeded):
            liar.link.recv(Deadline.after(0.0))
    assert liar.link.cause is None


@_both
def test_an_end_in_the_middle_of_a_header_is_a_death(liar: Liar) -> None:
    liar.sends.sendall(Frame(FrameKind.BYE).pack()[:10])
    liar.sends.close()
    with pytest.raises(PeerDead):
        liar.link.recv(patience())


@_tcp
def test_an_end_in_the_middle_of_a_tensor_is_a_death(liar: Liar) -> None:
    liar.register(LAYOUT)
    liar.say(_whole())
    liar.sends.sendall(bytes(SPAN - 1))
    incoming = liar.link.recv(patience())
    with pytest.raises(DeadlineExceeded):
        incoming.wait(1, Deadline.after(0.05))
    liar.sends.close()
    with pytest.raises(PeerDead):
        incoming.wait_all(patience())
    with pytest.raises(IndexError):
        incoming.view(0)


@pytest.mark.parametrize("seed", range(8))
@_both
def test_mutated_frames_end_in_a_link_error_and_never_in_a_wrong_message(liar: Liar, seed: int) -> None:
    draw = random.Random(seed)
    encoded = LAYOUT.encode()
    honest = [Frame(FrameKind.LAYOUT, size=len(encoded)).pack() + encoded]
    bulk = b"" if liar.shares_memory else b"".join(_padded())
    liar.share_slots()
    honest.append(_whole().pack() + bulk)
    said = bytearray(b"".join(honest))
    for _ in range(draw.randint(1, 3)):
        said[draw.randrange(len(honest[0]) + HEADER_BYTES)] ^= 1 << draw.randrange(8)
    liar.sends.sendall(said)
    liar.sends.shutdown(socket.SHUT_WR)
    whole = []

    def receive() -> None:
        with liar.link.recv(patience(), LAYOUT) as incoming:
            incoming.wait_all(patience())
            whole.append([bytes(incoming.view(index)) for index in range(COUNT)])
        liar.link.recv(patience())

    with pytest.raises(LinkError) as raised:
        receive()
    assert not isinstance(raised.value, DeadlineExceeded)
    assert not whole or bulk == b"" or whole == [content(LAYOUT, 1)]


def _memory(size: int, *, seals: int = _ALL_SEALS, holes: bool = False, blocks_behind: bool = False) -> int:
    """Memory of that size, all of it there unless it has holes. blocks_behind: as many as those, behind its end."""
    descriptor = os.memfd_create(FILE_NAME, os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, size)
    if holes:
        os.pwrite(descriptor, b"x", 0)
    else:
        os.posix_fallocate(descriptor, 0, size)
    if blocks_behind:
        fallocate = ctypes.CDLL(None).fallocate
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        assert fallocate(descriptor, _KEEP_SIZE, size, size) == 0
    assert (os.fstat(descriptor).st_blocks * 512 >= size) == (not holes or blocks_behind)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _disk_file(size: int) -> int:
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        file.truncate(size)
        return os.dup(file.fileno())


_SLOT, _FILE = FrameKind.SEGMENT, FrameKind.FILE


@pytest.mark.parametrize(
    ("kind", "make", "slot", "size", "match"),
    [
        (_SLOT, lambda: _memory(_MIB, seals=0), 0, _MIB, "not sealed"),
        (_SLOT, lambda: _disk_file(_MIB), 0, _MIB, "not shared memory"),
        *((_SLOT, lambda: shared_slot(_MIB)[0], 0, size, ".+") for size in (_MIB // 2, _MIB + 4096, 0, 2**63)),
        (_SLOT, lambda: shared_slot(_MIB)[0], 2, _MIB, "beyond the limits"),
        *((_FILE, lambda seal=seal: _memory(5000, seals=_ALL_SEALS & ~seal), 0, 5000, "not sealed") for seal in _SEALS),
        (_FILE, lambda: _memory(5000, seals=0), 0, 5000, "not sealed"),
        (_FILE, lambda: _disk_file(5000), 0, 5000, "shorten it"),
        (_FILE, lambda: _memory(_MIB, holes=True), 0, _MIB, "holes"),
        (_FILE, lambda: _memory(_MIB, holes=True, blocks_behind=True), 0, _MIB, "holes"),
        *((_FILE, lambda: _memory(5000), 0, size, ".+") for size in (4999, 5001, 0, _MIB + 1, 2**63)),
        (_FILE, lambda: _memory(5000), 2, 5000, "beyond the limits"),
    ],
)
@_memfd
def test_memory_that_is_not_as_it_must_be_is_refused_and_not_kept(
    liar: Liar, kind: FrameKind, make: Callable[[], int], slot: int, size: int, match: str
) -> None:
    before = open_descriptors(), mapped_files()
    descriptor = make()
    liar.share(descriptor, slot=slot, size=size, kind=kind)
    os.close(descriptor)
    with pytest.raises(BadFrame, match=match):
        liar.link.recv(patience())
    assert (open_descriptors(), mapped_files()) == before


@pytest.mark.parametrize("kind", [_SLOT, _FILE])
@_memfd
def test_memory_that_is_only_announced_is_refused(liar: Liar, kind: FrameKind) -> None:
    liar.say(Frame(kind, size=5000))
    with pytest.raises(DeadlineExceeded):
        liar.link.recv(Deadline.after(0.02))
    liar.sends.sendall(b"\0")
    with pytest.raises(BadFrame, match="sent none"):
        liar.link.recv(patience())


@_memfd
def test_a_message_in_memory_that_was_never_shared_is_refused(liar: Liar) -> None:
    liar.register(LAYOUT)
    liar.say(_whole())
    with pytest.raises(BadFrame, match="larger than the memory"):
        liar.link.recv(patience())


@_memfd
def test_descriptors_that_nobody_asked_for_are_not_kept(liar: Liar) -> None:
    before = open_descriptors()
    descriptor, ours = shared_slot(1 << 16)
    rights = _rights(*[descriptor] * 20)
    liar.sends.sendmsg([Frame(FrameKind.SEGMENT, size=1 << 16).pack()], [rights])
    liar.sends.sendmsg([b"\0"], [rights])
    os.close(descriptor)
    with pytest.raises(DeadlineExceeded):
        liar.link.recv(Deadline.after(0.02))
    assert open_descriptors() == before + 1  # the sender's mapping
    assert len(ours) == 1 << 16


@_memfd
def test_files_that_no_message_follows_are_no_more_than_slots(liar: Liar) -> None:
    before = open_descriptors(), mapped_files()
    with sealed_file(bytes(5000)) as file:
        for slot in [*range(LIMITS.slots)] * 20:
            liar.share(file.descriptor, slot=slot, size=5000, kind=_FILE)
        with pytest.raises(DeadlineExceeded):
            liar.link.recv(Deadline.after(0.1))
    assert (open_descriptors(), mapped_files()) == (before[0], before[1] + LIMITS.slots)
    liar.link.close()
    assert mapped_files() == before[1]


@_memfd
def test_a_process_without_a_descriptor_left_says_so_and_ends_that_link(liar: Liar) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_descriptors()
    with sealed_file(bytes(5000)) as file:
        liar.share(file.descriptor, size=5000, kind=_FILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(NoSharedMemory, match="no free file descriptor"):
                liar.link.recv(patience())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_descriptors() <= before
    assert mapped_files() == 0


@_tcp
def test_a_file_over_a_network_ends_the_link(liar: Liar) -> None:
    liar.say(Frame(FrameKind.FILE, size=5000))
    with pytest.raises(BadFrame):
        liar.link.recv(patience())


def _padded() -> Iterator[bytes]:
    end = 0
    for offset, part in zip(LAYOUT.offsets, content(LAYOUT, 1), strict=True):
        yield bytes(offset - end) + part
        end = offset + len(part)
