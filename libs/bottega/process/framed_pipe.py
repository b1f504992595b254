"""Frames over a socket pair between a parent process and its child.

A frame is its length (4 bytes, little-endian) and that many bytes. Both ends have the same limit. A longer frame is
refused before it is sent, and before more is received than what came with its length. A channel closes after an error,
because the bytes after half a frame are meaningless. This module does not know what frames carry.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

from bottega.errors import InternalError, Unavailable
from bottega.process.copying import copied

# A decoded image of 16 megapixels is 48 MiB; no other frame comes near.
MAX_FRAME_BYTES = 64 * 2**20

_LENGTH = struct.Struct("<I")
# Maximum size of one send or receive on the event loop. If the other end is busy at the same time, one call would
# handle a whole frame (12 MiB: 15 ms).
_PIECE_BYTES = 256 * 2**10
# How much the parent reads at once. An engine sends a dozen small messages after every turn; with a system call for
# each, a message costs 38 us at both ends, and 28 us without (measured).
_READ_AHEAD_BYTES = 64 * 2**10


class FramedPipe:
    """The blocking end, for a child. Any thread may call `send`, one at a time `recv`."""

    def __init__(self, end: socket.socket, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._socket = end
        self._max_frame_bytes = max_frame_bytes
        self._sending = threading.Lock()

    @classmethod
    def from_fd(cls, fd: int, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> FramedPipe:
        """Take over the descriptor that the parent passed."""
        end = socket.socket(fileno=fd)
        end.setblocking(True)
        return cls(end, max_frame_bytes=max_frame_bytes)

    def send(self, payload: bytes) -> None:
        """Send one frame; block while the pipe is full.

        Raises InternalError for a frame beyond the limit, and Unavailable if the other end is gone.
        """
        _check_length(len(payload), self._max_frame_bytes)
        length = _LENGTH.pack(len(payload))
        with self._sending:
            try:
                # One call, so that the other end wakes once for a frame.
                sent = self._socket.sendmsg([length, payload])
                if sent < len(length) + len(payload):
                    self._socket.sendall(memoryview(length + payload)[sent:])
            except OSError as error:
                self.close()
                raise _gone() from error

    def recv(self) -> bytes | None:
        """Return the next frame, or None if the other end is gone. It blocks until the frame is complete.

        Raises InternalError for a frame beyond the limit.
        """
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        _check_length(length, self._max_frame_bytes)
        return self._read(length)

    def close(self) -> None:
        """Close this end. A `recv` that waits in another thread returns None."""
        _shut(self._socket)
        self._socket.close()

    def _read(self, length: int) -> bytes | None:
        try:
            data = self._socket.recv(length, socket.MSG_WAITALL) if length else b""
        except OSError:
            return None
        return data if len(data) == length else None


class AsyncFramedPipe:
    """The asyncio end, for a parent. One task sends at a time and one receives.

    No turn of the event loop copies more than a piece of a frame.
    """

    def __init__(self, end: socket.socket, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        end.setblocking(False)
        self._socket = end
        self._max_frame_bytes = max_frame_bytes
        self._ahead = memoryview(b"")

    async def send(self, payload: bytes) -> None:
        """Send one frame. If it is cancelled or fails half-way, it closes the channel.

        Raises InternalError for a frame beyond the limit, and Unavailable if the other end is gone.
        """
        _check_length(len(payload), self._max_frame_bytes)
        loop = asyncio.get_running_loop()
        try:
            view = memoryview(payload)
            await loop.sock_sendall(self._socket, _LENGTH.pack(len(payload)) + view[:_PIECE_BYTES])
            for start in range(_PIECE_BYTES, len(payload), _PIECE_BYTES):
                await asyncio.sleep(0)  # a ready socket does not suspend: give other tasks a turn
                await loop.sock_sendall(self._socket, view[start : start + _PIECE_BYTES])
        except OSError as error:
            self.close()
            raise _gone() from error
        except asyncio.CancelledError:
            self.close()
            raise

    async def recv(self) -> bytes | None:
        """Return the next frame, or None if the other end is gone. If it is cancelled, it closes the channel.

        Raises InternalError for a frame beyond the limit.
        """
        await asyncio.sleep(0)  # frames that are here already do not suspend: give other tasks a turn between them
        header = await self._read(_LENGTH.size)
        if header is None:
            return None
        (length,) = _LENGTH.unpack(header)
        try:
            _check_length(length, self._max_frame_bytes)
        except InternalError:
            self.close()
            raise
        return await self._read(length)

    def close(self) -> None:
        """Close this end. The child sees the end of the pipe."""
        _shut(self._socket)
        self._socket.close()

    async def _read(self, length: int) -> bytes | None:
        """Return `length` bytes, beginning with those read ahead, or None if the other end is gone before."""
        if length <= len(self._ahead):
            return self._taken(length)
        pieces: list[memoryview | bytes] = [self._taken(len(self._ahead))]
        missing = length - len(pieces[0])
        try:
            while missing > 0:
                if len(pieces) > 1:
                    await asyncio.sleep(0)  # as in `send`
                piece = await self._piece(missing)
                if not piece:
                    return None
                pieces.append(piece[:missing])
                self._ahead = piece[missing:]
                missing -= len(pieces[-1])
        except OSError:
            return None
        except asyncio.CancelledError:
            self.close()
            raise
        return await copied(length, lambda: b"".join(pieces))

    async def _piece(self, missing: int) -> memoryview:
        """Return the next bytes of a frame that lacks `missing`, at least one; empty at the end. Raises OSError."""
        most_bytes = max(_READ_AHEAD_BYTES, min(missing, _PIECE_BYTES))
        return memoryview(await asyncio.get_running_loop().sock_recv(self._socket, most_bytes))

    def _taken(self, length: int) -> bytes:
        data, self._ahead = bytes(self._ahead[:length]), self._ahead[length:]
        return data


def _check_length(length: int, limit: int) -> None:
    if length > limit:
        raise InternalError(f"a frame of {length} bytes is beyond the limit of {limit} bytes")


def _gone() -> Unavailable:
    return Unavailable("the process at the other end of the pipe is gone")


def _shut(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # already closed, or the other end is gone
