"""The frames of a link: 28 bytes each, little-endian, some followed by bytes.

Each direction has its own stream. The sender sends LAYOUT (a description follows), SEGMENT (the memory of a slot comes
with it), FILE (a file of the slot's next message comes with it) and DATA (tensors are ready; TCP sends their bytes
next). The receiver answers with CREDIT. Both may send BYE.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from bottega.errors import BadFrame, DeadlineExceeded, LayoutMismatch, LinkClosed, LinkError, StaleEpoch
from bottega.transport.layout import MAX_ENCODED_BYTES

_MAGIC = 0xB077
_HEADER = struct.Struct("<HBBHHIQQ")
HEADER_BYTES = _HEADER.size


class FrameKind(IntEnum):
    """The kind of a frame."""

    LAYOUT = 1
    SEGMENT = 2
    DATA = 3
    CREDIT = 4
    BYE = 5
    FILE = 6


class Frame(NamedTuple):
    """A frame. It is a plain tuple because every message needs one and frozen dataclasses take four times as long."""

    kind: int
    flag: int = 0
    """In DATA: 1 if the sender aborts the message. In BYE: the reason."""
    slot: int = 0
    """Index of the slot, from 0."""
    ready: int = 0
    """In DATA: number of tensors that are ready, counted from the first."""
    layout: int = 0
    """Number of the layout on this link."""
    sequence: int = 0
    """In DATA and CREDIT: number of the message, counted from 1."""
    size: int = 0
    """Number of bytes that follow the frame."""
    payload: bytes = b""
    """The serialized layout that follows the header of a LAYOUT frame; empty in other frames."""

    def pack(self) -> bytes:
        """Serialize the header."""
        return _HEADER.pack(_MAGIC, *self[:-1])


def unpack(header: bytes | bytearray) -> Frame:
    """Parse a copy of 28 received bytes as a frame. Raises BadFrame if they are not a frame.

    Sender and receiver check the numbers of slots, layouts and messages, because they know the valid ones.
    """
    fields = _HEADER.unpack(header)
    frame = Frame(*fields[1:])
    if fields[0] != _MAGIC or frame.kind not in _KINDS:
        raise BadFrame("the peer sent bytes that are not a frame of a link")
    if frame.kind == FrameKind.LAYOUT and frame.size > MAX_ENCODED_BYTES:
        raise BadFrame(f"the peer announces a layout's description of {frame.size} bytes; {MAX_ENCODED_BYTES} are read")
    return frame


_KINDS = frozenset(int(kind) for kind in FrameKind)

# The reasons for a BYE, and the message at the peer. Any other reason is a plain close to the peer.
_BYE_MESSAGES: dict[type[LinkError], str] = {
    LinkClosed: "the peer closed the link",
    LayoutMismatch: "the peer expects messages of a layout other than ours, and closed the link",
    BadFrame: "the peer found a fault in what we sent, and closed the link",
    StaleEpoch: "the peer has opened this link again; this connection is of an older epoch",
    DeadlineExceeded: "the peer could not send a message in time, and closed the link",
}
_REASONS = tuple(_BYE_MESSAGES)


def bye(cause: LinkError) -> Frame:
    """Return the frame that tells the peer why the link ends."""
    kind = type(cause)
    return Frame(FrameKind.BYE, flag=_REASONS.index(kind) if kind in _REASONS else 0)


def cause_of_bye(frame: Frame) -> LinkError:
    """Return why the peer ended the link, as it says in its BYE frame."""
    kind = _REASONS[frame.flag] if frame.flag < len(_REASONS) else LinkClosed
    return kind(_BYE_MESSAGES[kind])
