"""Bytes in sealed records: what crosses a network between hosts. Knows no sockets.

A record is its length (4 bytes), and then what AES-256-GCM makes of up to 256 KiB. Each direction of a connection has a
key of its own, made of the offer's token and both ends' nonces, and counts its records: one that was changed, left out,
repeated or moved does not open. Where a connection just ends, its frames say so: without BYE the peer is lost.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bottega.errors import BadFrame

# In a record. Larger ones leave the processor's cache before they are sent; smaller ones cost more calls.
RECORD_BYTES = 256 << 10
_HEADER_BYTES = 4
_TAG_BYTES = 16
_NONCE_BYTES = 12
_WHOLE_BYTES = _HEADER_BYTES + RECORD_BYTES + _TAG_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SealKeys:
    """Of one connection, 32 bytes each. ours: of what this end sends. theirs: of what it receives."""

    ours: bytes
    theirs: bytes


class Records:
    """Seals what this end sends, and opens what it receives. One thread at a time for each of both."""

    def __init__(self, keys: SealKeys) -> None:
        self._sealing, self._opening = AESGCM(keys.ours), AESGCM(keys.theirs)
        self._sealed = self._opened = 0
        # Of what comes in: bytes that are here, and of the whole record, 0 until its header is here.
        self._have = self._due = 0
        self._plain = memoryview(b"")
        # Given back to the system as soon as nobody has it, which memory of this size from the C library is not always.
        room_bytes = _WHOLE_BYTES + _HEADER_BYTES
        memory = memoryview(mmap.mmap(-1, 3 * room_bytes))
        self._outgoing, self._incoming, self._room = (
            memory[begin : begin + room_bytes] for begin in range(0, len(memory), room_bytes)
        )

    def seal(self, data: bytes | memoryview) -> memoryview:
        """The record of at most RECORD_BYTES. It is good until the next one is sealed."""
        size = len(data) + _TAG_BYTES
        record = self._outgoing[: _HEADER_BYTES + size]
        record[:_HEADER_BYTES] = size.to_bytes(_HEADER_BYTES, "little")
        nonce = self._sealed.to_bytes(_NONCE_BYTES, "little")
        self._sealed += 1
        self._sealing.encrypt_into(nonce, data, record[:_HEADER_BYTES], record[_HEADER_BYTES:])
        return record

    def seal_all(self, pieces: Sequence[memoryview]) -> Iterator[memoryview]:
        """The records of the pieces, one after the other, each good until the next is asked for."""
        small: list[memoryview] = []
        size = 0
        for piece in pieces:
            if size and size + len(piece) > RECORD_BYTES:
                yield self.seal(b"".join(small))
                small, size = [], 0
            if len(piece) > RECORD_BYTES:
                for begin in range(0, len(piece), RECORD_BYTES):
                    yield self.seal(piece[begin : begin + RECORD_BYTES])
            elif len(piece):
                small.append(piece)
                size += len(piece)
        if size:
            yield self.seal(b"".join(small))

    @property
    def waiting(self) -> int:
        """Bytes that were opened, and not taken yet."""
        return len(self._plain)

    def take(self, target: memoryview) -> int:
        """Moves what waits into `target`; returns how many bytes that was."""
        count = min(len(target), len(self._plain))
        target[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    @property
    def wanted(self) -> memoryview:
        """Where what comes over the connection goes next: what is missing of a record, and the next one's header, so
        that it need not be read alone. Raises BadFrame where what is here is no record."""
        self.read_header()
        return self._incoming[self._have : self._due + _HEADER_BYTES]

    @property
    def missing(self) -> int:
        """How many bytes of the record are. Raises as `wanted` does."""
        self.read_header()
        return (self._due or _HEADER_BYTES) - self._have

    def received(self, count: int, target: memoryview) -> int:
        """So many bytes were put where they were wanted. Returns how many of a whole record went into `target`; where
        that has no room for it, it waits. Raises BadFrame for one that is none, or not the next.
        """
        self._have += count
        if not self._due or self._have < self._due:
            return 0
        size = self._due - _HEADER_BYTES - _TAG_BYTES
        direct = len(target) >= size
        self._open(target[:size] if direct else self._room[:size])
        if direct:
            return size
        self._plain = self._room[:size]
        return self.take(target)

    def read_header(self) -> None:
        """Of the record that comes next, once it is here. Raises BadFrame where it is none's."""
        if self._due or self._have < _HEADER_BYTES:
            return
        size = int.from_bytes(self._incoming[:_HEADER_BYTES], "little")
        if not _TAG_BYTES < size <= RECORD_BYTES + _TAG_BYTES:
            raise BadFrame("the peer sent no sealed record: the way between changes bytes, or it does not seal")
        self._due = _HEADER_BYTES + size

    def _open(self, target: memoryview) -> None:
        incoming = self._incoming
        nonce = self._opened.to_bytes(_NONCE_BYTES, "little")
        try:
            self._opening.decrypt_into(nonce, incoming[_HEADER_BYTES : self._due], incoming[:_HEADER_BYTES], target)
        except InvalidTag:
            raise BadFrame("a sealed record was changed, left out, repeated or moved on its way") from None
        self._opened += 1
        ahead = self._have - self._due  # of the next record's header
        incoming[:ahead] = incoming[self._due : self._have]
        self._have, self._due = ahead, 0
