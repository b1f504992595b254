"""Sealed (encrypted) records, in which bytes cross a network between hosts. This module does not use sockets.

A record is its length (4 bytes), followed by up to 256 KiB encrypted with AES-256-GCM. Each direction of a connection
has its own key, derived from the offer's token and both ends' nonces, and counts its records. A record that was
changed, omitted, repeated or moved cannot be decrypted. A truncated connection is detected by its frames: without a BYE
the peer counts as lost.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bottega.errors import BadFrame

# Larger records leave the processor's cache before they are sent; smaller ones cost more calls.
RECORD_BYTES = 256 << 10
_HEADER_BYTES = 4
_TAG_BYTES = 16
_NONCE_BYTES = 12
_WHOLE_BYTES = _HEADER_BYTES + RECORD_BYTES + _TAG_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class SealKeys:
    """The keys of one connection, 32 bytes each."""

    ours: bytes
    """Key for the bytes that this end sends."""
    theirs: bytes
    """Key for the bytes that this end receives."""


class Records:
    """The encryption of a link. One thread at a time may seal outgoing bytes, and another may open incoming records."""

    def __init__(self, keys: SealKeys) -> None:
        self._sealing, self._opening = AESGCM(keys.ours), AESGCM(keys.theirs)
        self._sealed = self._opened = 0
        # Incoming bytes that have arrived, and the size of their whole record, which is 0 until its header has arrived.
        self._have = self._due = 0
        self._plain = memoryview(b"")
        # A mapping goes back to the system when nothing refers to it; C library memory of this size sometimes does not.
        room_bytes = _WHOLE_BYTES + _HEADER_BYTES
        memory = memoryview(mmap.mmap(-1, 3 * room_bytes))
        self._outgoing, self._incoming, self._room = (
            memory[begin : begin + room_bytes] for begin in range(0, len(memory), room_bytes)
        )

    def seal(self, data: bytes | memoryview) -> memoryview:
        """Return the data as a record of at most RECORD_BYTES. It is valid until the next one is sealed."""
        size = len(data) + _TAG_BYTES
        record = self._outgoing[: _HEADER_BYTES + size]
        record[:_HEADER_BYTES] = size.to_bytes(_HEADER_BYTES, "little")
        nonce = self._sealed.to_bytes(_NONCE_BYTES, "little")
        self._sealed += 1
        self._sealing.encrypt_into(nonce, data, record[:_HEADER_BYTES], record[_HEADER_BYTES:])
        return record

    def seal_all(self, pieces: Sequence[memoryview]) -> Iterator[memoryview]:
        """Yield the records of the pieces in order. Each is valid until the next one is requested."""
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
        """Number of decrypted bytes that `take` has not returned yet."""
        return len(self._plain)

    def take(self, target: memoryview) -> int:
        """Move waiting bytes into `target`; return how many were moved."""
        count = min(len(target), len(self._plain))
        target[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    @property
    def wanted(self) -> memoryview:
        """Buffer for the next received bytes: the rest of a record, and the next header.

        Raises BadFrame if the received bytes are not a record.
        """
        self.read_header()
        return self._incoming[self._have : self._due + _HEADER_BYTES]

    @property
    def missing(self) -> int:
        """Number of bytes that are missing from the current record. Raises the errors of `wanted`."""
        self.read_header()
        return (self._due or _HEADER_BYTES) - self._have

    def received(self, count: int, target: memoryview) -> int:
        """Account for bytes received into `wanted`.

        Return how many bytes of a complete record were written to `target`.

        A record that does not fit into `target` waits. Raises BadFrame for bytes that are not a record, or not the next
        one.
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
        """Read the header of the next record once it has arrived. Raises BadFrame if it is not a record's."""
        if self._due or self._have < _HEADER_BYTES:
            return
        size = int.from_bytes(self._incoming[:_HEADER_BYTES], "little")
        if not _TAG_BYTES < size <= RECORD_BYTES + _TAG_BYTES:
            raise BadFrame(
                "the peer sent bytes that are not a sealed record: the network changed them, or it does not encrypt"
            )
        self._due = _HEADER_BYTES + size

    def _open(self, target: memoryview) -> None:
        incoming = self._incoming
        nonce = self._opened.to_bytes(_NONCE_BYTES, "little")
        try:
            self._opening.decrypt_into(nonce, incoming[_HEADER_BYTES : self._due], incoming[:_HEADER_BYTES], target)
        except InvalidTag:
            raise BadFrame("a sealed record was changed, dropped, repeated or reordered on the network") from None
        self._opened += 1
        ahead = self._have - self._due  # bytes of the next record's header
        incoming[:ahead] = incoming[self._due : self._have]
        self._have, self._due = ahead, 0
