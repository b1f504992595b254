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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from bottega.errors import BadFrame, DeadlineExceeded, LinkError, NoSharedMemory, PeerDead
from bottega.transport import Backend, BackendChoice, Deadline, Layout, Limits, Link, LinkCounters
from bottega.transport.backends.memfd import MemfdReceiver, MemfdSender
from bottega.transport.backends.tcp import TcpReceiver, TcpSender
from bottega.transport.channel.frames import HEADER_BYTES, Frame, FrameKind
from bottega.transport.layout import MAX_ENCODED_BYTES
from bottega.transport.link import LinkTerms
from bottega.transport.memory.mappings import shared_slot
from tests.support.transport_backends import LAYOUT, content, mapped_files, open_descriptors, patience, sealed_file

LIMITS = Limits(slots=2, slot_bytes=1 << 20, layouts=4)
SPAN = LAYOUT.span(0, len(LAYOUT.specs))[1]
COUNT = len(LAYOUT.specs)
WAYS = (Backend.MEMFD, Backend.TCP)
_SEALS = (fcntl.F_SEAL_SEAL, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE)
_ALL_SEALS = sum(_SEALS)
# <linux/falloc.h>: blocks behind a file's end.
_KEEP_SIZE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Liar:
    """The other end of a link, as two bare sockets."""

    link: Link
    sends: socket.socket
    receives: socket.socket

    @property
    def shares_memory(self) -> bool:
        """Whether tensors come by shared memory, and not behind their notices."""
        return self.link.backend_choice.backend == Backend.MEMFD

    def bulk(self, size_bytes: int) -> bytes:
        """What comes behind the notice of so many bytes of tensors."""
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
        """Sends a notice to the link's receiver, with what belongs to it."""
        self.sends.sendall(frame.pack() + frame.payload)

    def register(self, layout: Layout, number: int = 0) -> None:
        """Registers a layout as an honest peer does."""
        encoded = layout.encode()
        self.say(Frame(FrameKind.LAYOUT, layout=number, size=len(encoded), payload=encoded))

    def share(self, descriptor: int, *, slot: int = 0, size: int) -> None:
        """Shares a file as a slot's memory."""
        self._pass(Frame(FrameKind.SEGMENT, slot=slot, size=size), descriptor)

    def attach(self, descriptor: int, *, slot: int = 0, size: int) -> None:
        """Passes a file with the slot's next message."""
        self._pass(Frame(FrameKind.FILE, slot=slot, size=size), descriptor)

    def _pass(self, notice: Frame, descriptor: int) -> None:
        self.say(notice)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        self.sends.sendmsg([b"\0"], [rights])


@pytest.fixture
def liar(request: pytest.FixtureRequest) -> Iterator[Liar]:
    ours_out, receives = socket.socketpair()
    ours_in, sends = socket.socketpair()
    memfd = request.param == Backend.MEMFD
    outlet = MemfdSender(ours_out) if memfd else TcpSender(ours_out)
    inlet = MemfdReceiver(ours_in, LIMITS) if memfd else TcpReceiver(ours_in)
    answer = BackendChoice(backend=request.param, reason="a test")
    terms = LinkTerms(
        link_id="0" * 32,
        epoch=1,
        backend_choice=answer,
        ours=LIMITS,
        theirs=LIMITS,
        counters=LinkCounters(),
        lease_s=30.0,
    )
    with Link(terms, outlet, inlet) as link, sends, receives:
        yield Liar(link=link, sends=sends, receives=receives)


_both = pytest.mark.parametrize("liar", WAYS, ids=str, indirect=True)
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
        _whole(ready=65535),
        _whole(size=0),
        _whole(size=SPAN - 1),
        _whole(size=SPAN + 1),
        _whole(size=2**64 - 1),
        _whole(slot=2),
        _whole(slot=65535),
        _whole(layout=1),
        _whole(layout=2**32 - 1),
        _whole(sequence=0),
        _whole(sequence=2),
        _whole(sequence=2**64 - 1),
        Frame(FrameKind.CREDIT, sequence=1),
        Frame(9),
        Frame(FrameKind.LAYOUT, layout=4, size=len(LAYOUT.encode()), payload=LAYOUT.encode()),
        Frame(FrameKind.LAYOUT, layout=1, size=MAX_ENCODED_BYTES + 1),
        Frame(FrameKind.LAYOUT, layout=1, size=2**64 - 1),
        Frame(FrameKind.LAYOUT, layout=1, size=0),
        Frame(FrameKind.LAYOUT, layout=1, size=4, payload=b"\xff\xff\xff\xff"),
    ],
    ids=str,
)
@_both
def test_a_header_that_lies_ends_the_link(liar: Liar, frame: Frame) -> None:
    liar.prepare()
    liar.say(frame)
    began = time.monotonic()
    with pytest.raises(BadFrame):
        _take(liar.link)
    assert time.monotonic() - began < 2, "it waited for bytes that nobody had sent"
    assert liar.link.counters.snapshot().deaths == {"BadFrame": 1}
    assert liar.link.counters.snapshot().received.messages == 0


@_both
def test_bytes_that_are_no_notice_end_the_link(liar: Liar) -> None:
    liar.sends.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with pytest.raises(BadFrame):
        liar.link.recv(patience())


@_both
def test_a_layout_beyond_the_slots_ends_the_link(liar: Liar) -> None:
    from bottega.transport import DType, TensorSpec

    liar.register(Layout.of(TensorSpec(name="huge", dtype=DType.UINT8, shape=(1 << 40,))))
    with pytest.raises(BadFrame, match="more than a slot has"):
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
def test_mutated_notices_end_in_a_link_error_and_never_in_a_wrong_message(liar: Liar, seed: int) -> None:
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


@_memfd
def test_memory_that_could_be_taken_away_is_refused(liar: Liar) -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, 1 << 20)
    liar.share(descriptor, size=1 << 20)
    os.close(descriptor)
    with pytest.raises(BadFrame, match="not sealed"):
        liar.link.recv(patience())


@_memfd
def test_a_file_is_no_shared_memory(liar: Liar) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 20)
        liar.share(file.fileno(), size=1 << 20)
        with pytest.raises(BadFrame, match="no shared memory"):
            liar.link.recv(patience())


@pytest.mark.parametrize(("slot", "size"), [(0, 1 << 19), (0, (1 << 20) + 4096), (0, 0), (0, 2**63), (2, 1 << 20)])
@_memfd
def test_a_slot_of_another_size_or_place_is_refused(liar: Liar, slot: int, size: int) -> None:
    descriptor, _ = shared_slot(1 << 20)
    liar.share(descriptor, slot=slot, size=size)
    os.close(descriptor)
    with pytest.raises(BadFrame):
        liar.link.recv(patience())


@_memfd
def test_a_slot_that_does_not_come_is_refused(liar: Liar) -> None:
    liar.say(Frame(FrameKind.SEGMENT, size=1 << 20))
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
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor] * 20))
    liar.sends.sendmsg([Frame(FrameKind.SEGMENT, size=1 << 16).pack()], [rights])
    liar.sends.sendmsg([b"\0"], [rights])
    os.close(descriptor)
    with pytest.raises(DeadlineExceeded):
        liar.link.recv(Deadline.after(0.02))
    assert open_descriptors() == before + 1  # the sender's mapping
    assert len(ours) == 1 << 16


@pytest.mark.parametrize("missing", [_ALL_SEALS, *_SEALS], ids=str)
@_memfd
def test_a_file_that_could_be_changed_is_refused(liar: Liar, missing: int) -> None:
    descriptor = os.memfd_create("half sealed", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, 5000)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _ALL_SEALS & ~missing)
    liar.attach(descriptor, size=5000)
    os.close(descriptor)
    with pytest.raises(BadFrame, match="not sealed"):
        liar.link.recv(patience())


@_memfd
def test_a_file_of_a_disk_is_refused(liar: Liar) -> None:
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        file.truncate(5000)
        liar.attach(file.fileno(), size=5000)
        with pytest.raises(BadFrame, match="shorten it"):
            liar.link.recv(patience())


@pytest.mark.parametrize("behind", [False, True], ids=["fewer blocks", "as many blocks, behind its end"])
@_memfd
def test_a_file_with_holes_is_refused(liar: Liar, behind: bool) -> None:
    size = 1 << 20
    descriptor = os.memfd_create("holes", os.MFD_ALLOW_SEALING)
    os.pwrite(descriptor, b"x", 0)
    os.truncate(descriptor, size)
    if behind:
        fallocate = ctypes.CDLL(None).fallocate
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        assert fallocate(descriptor, _KEEP_SIZE, size, size) == 0
    assert (os.fstat(descriptor).st_blocks * 512 > size) == behind
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _ALL_SEALS)
    liar.attach(descriptor, size=size)
    os.close(descriptor)
    with pytest.raises(BadFrame, match="holes"):
        liar.link.recv(patience())


@pytest.mark.parametrize(("slot", "size"), [(0, 4999), (0, 5001), (0, 0), (0, (1 << 20) + 1), (0, 2**63), (2, 5000)])
@_memfd
def test_a_file_of_another_size_or_place_is_refused_and_not_kept(liar: Liar, slot: int, size: int) -> None:
    before = mapped_files()
    with sealed_file(bytes(5000)) as file:
        liar.attach(file.descriptor, slot=slot, size=size)
        with pytest.raises(BadFrame):
            liar.link.recv(patience())
    assert mapped_files() == before


@_memfd
def test_files_that_no_message_follows_are_no_more_than_slots(liar: Liar) -> None:
    before = open_descriptors(), mapped_files()
    with sealed_file(bytes(5000)) as file:
        for _ in range(20):
            for slot in range(LIMITS.slots):
                liar.attach(file.descriptor, slot=slot, size=5000)
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
        liar.attach(file.descriptor, size=5000)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(NoSharedMemory, match="descriptor left"):
                liar.link.recv(patience())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert open_descriptors() <= before
    assert mapped_files() == 0


@_memfd
def test_a_file_that_is_only_announced_is_refused(liar: Liar) -> None:
    liar.say(Frame(FrameKind.FILE, size=5000))
    liar.sends.sendall(b"\0")
    with pytest.raises(BadFrame, match="sent none"):
        liar.link.recv(patience())


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
