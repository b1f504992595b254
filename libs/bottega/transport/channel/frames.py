"""The frames of a link: 28 bytes each, little-endian, some followed by bytes.

Each direction has a stream of its own. The sender sends LAYOUT (a description follows), SEGMENT (a slot's memory comes
with it), FILE (a file comes with it, and is part of the slot's next message) and DATA (tensors are there; TCP sends
them right behind); the receiver answers CREDIT. Both may send BYE.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from bottega.errors import (
    BadFrame,
    DeadlineExceeded,
    LayoutMismatch,
    LinkClosed,
    LinkError,
    StaleEpoch,
)
from bottega.transport.layout import MAX_ENCODED_BYTES

_MAGIC = 0xB077
_HEADER = struct.Struct("<HBBHHIQQ")
HEADER_BYTES = _HEADER.size


class FrameKind(IntEnum):
    """What a frame is."""

    LAYOUT = 1
    SEGMENT = 2
    DATA = 3
    CREDIT = 4
    BYE = 5
    FILE = 6


class Frame(NamedTuple):
    """One frame. A plain tuple, because one is made for every message and frozen dataclasses take four times as long.

    flag: of DATA 1 where the sender aborts the message; of BYE the reason.
    slot: which one, counted from 0. ready: of DATA how many tensors are there now, counted from the first.
    layout: its number on this link. sequence: of DATA and CREDIT the message's number, counted from 1.
    size: bytes that belong to the frame.
    payload: of LAYOUT the description; never part of the header.
    """

    kind: int
    flag: int = 0
    slot: int = 0
    ready: int = 0
    layout: int = 0
    sequence: int = 0
    size: int = 0
    payload: bytes = b""

    def pack(self) -> bytes:
        """The header."""
        return _HEADER.pack(_MAGIC, *self[:-1])


def unpack(header: bytes | bytearray) -> Frame:
    """The frame in a copy of 28 received bytes. Raises BadFrame when it is none.

    Numbers of slots, layouts and messages are checked by sender and receiver, which know what there is.
    """
    fields = _HEADER.unpack(header)
    frame = Frame(*fields[1:])
    if fields[0] != _MAGIC or frame.kind not in _KINDS:
        raise BadFrame("the peer sent bytes that are no frame of a link")
    if frame.kind == FrameKind.LAYOUT and frame.size > MAX_ENCODED_BYTES:
        raise BadFrame(f"the peer announces a layout's description of {frame.size} bytes; {MAX_ENCODED_BYTES} are read")
    return frame


_KINDS = frozenset(int(kind) for kind in FrameKind)

# Why an end sends BYE, and what the peer says then. To the peer a reason that is not here is a plain close.
_BYE_MESSAGES: dict[type[LinkError], str] = {
    LinkClosed: "the peer closed the link",
    LayoutMismatch: "the peer expects messages of another layout than ours, and closed the link",
    BadFrame: "the peer found a fault in what we sent, and closed the link",
    StaleEpoch: "the peer has opened this link anew; this one is of an older epoch",
    DeadlineExceeded: "the peer could not send a message in time, and closed the link",
}
_REASONS = tuple(_BYE_MESSAGES)


def bye(cause: LinkError) -> Frame:
    """The frame that tells the peer why the link ends."""
    kind = type(cause)
    return Frame(FrameKind.BYE, flag=_REASONS.index(kind) if kind in _REASONS else 0)


def cause_of_bye(frame: Frame) -> LinkError:
    """Why the peer ended the link, by its BYE."""
    kind = _REASONS[frame.flag] if frame.flag < len(_REASONS) else LinkClosed
    return kind(_BYE_MESSAGES[kind])
