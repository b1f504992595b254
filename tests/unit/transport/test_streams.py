"""Ends of a connection while another thread writes to it: what the peer is told, and how long that takes."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from bottega.errors import BadFrame, LinkClosed
from bottega.transport import Deadline
from bottega.transport.backends.frame_stream import FrameStream
from bottega.transport.backends.records import Records, SealKeys
from bottega.transport.channel.frames import Frame, FrameKind, cause_of_bye

SOON = 10.0


def test_a_peer_is_told_why_although_a_notice_was_being_written() -> None:
    here, there = socket.socketpair()
    stream, peer = FrameStream(here), FrameStream(there)
    try:
        with stream._writing:  # as by a thread that has not run on since it wrote
            ending = threading.Thread(target=stream.shut_down, args=(BadFrame("a lie"),))
            ending.start()
            assert peer.receive_frame(Deadline.after(0.02)) is None
        ending.join()
        frame = peer.receive_frame(Deadline.after(SOON))
        assert frame is not None
        assert frame.kind == FrameKind.BYE
        assert isinstance(cause_of_bye(frame), BadFrame)
    finally:
        stream.close()
        peer.close()


def test_behind_half_a_message_nobody_waits_to_say_bye() -> None:
    here, there = socket.socketpair()
    stream, peer = FrameStream(here), FrameStream(there)
    try:
        writer = threading.Thread(target=_write_until_it_ends, args=(stream,))
        writer.start()
        while not stream._torn:
            pass
        stream.shut_down(LinkClosed("closed"))
        writer.join(SOON)
        assert not writer.is_alive()
    finally:
        stream.close()
        peer.close()


def test_what_came_before_a_record_that_is_none_can_be_read() -> None:
    """Though the next record's header came together with it."""
    here, there = socket.socketpair()
    keys = SealKeys(ours=os.urandom(32), theirs=os.urandom(32))
    sender = Records(keys)
    peer = FrameStream(there, Records(SealKeys(ours=keys.theirs, theirs=keys.ours)))
    payload = memoryview(os.urandom(10_000))
    try:
        for record in sender.seal_all([memoryview(Frame(FrameKind.DATA).pack()), payload]):
            here.sendall(record)
        here.sendall(bytes(4))  # a header, for whose record nobody has to wait
        frame = peer.receive_frame(Deadline.after(SOON))
        assert frame is not None
        assert frame.kind == FrameKind.DATA
        target = bytearray(len(payload))
        assert peer.read_bulk(memoryview(target), Deadline.after(SOON)) == len(payload)
        assert target == payload
        with pytest.raises(BadFrame, match="not a sealed record"):
            peer.receive_frame(Deadline.after(SOON))
    finally:
        here.close()
        peer.close()


def _write_until_it_ends(stream: FrameStream) -> None:
    large = memoryview(bytes(64 << 20))
    with pytest.raises(Exception, match="has ended"):
        stream.write([memoryview(Frame(FrameKind.DATA).pack()), large], Deadline.after(SOON))
