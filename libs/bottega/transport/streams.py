"""Notices over a connected stream socket, with deadlines: what the memfd and TCP backends share. It knows no slots.

The socket stays in blocking mode. Notices are read and written without waiting, with poll before where there is
something to wait for; bulk bytes are left to the system in one call, which ends by the socket's own time limits.
"""

from __future__ import annotations

import array
import select
import socket
import struct
import threading
from collections.abc import Sequence

from bottega.errors import BadFrame, DeadlineExceeded, LinkError, PeerDead
from bottega.transport.deadline import Deadline
from bottega.transport.frames import HEADER_BYTES, Frame, Kind, bye, unpack

# The system takes 1024 pieces a call (IOV_MAX).
_PIECES = 512
_TIMEVAL = struct.Struct("@ll")
_SHORTEST_S = 1e-4

_Rights = tuple[int, int, "array.array[int]"]


class FrameStream:
    """One end of one direction's connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self.socket = connection
        self._header = bytearray(HEADER_BYTES)
        self._payload = bytearray()
        self._frame: Frame | None = None
        self._have = 0
        self._readable = _poll(connection, select.POLLIN)
        self._writable = _poll(connection, select.POLLOUT)
        self._writing = threading.Lock()
        self._torn = False

    def hear(self, deadline: Deadline) -> Frame | None:
        """The next notice, or None by the deadline. Raises PeerDead, BadFrame."""
        if self._frame is None:
            if not self._gather(self._header, deadline):
                return None
            frame = unpack(self._header)
            if frame.kind != Kind.LAYOUT:
                return frame
            self._frame, self._payload = frame, bytearray(frame.size)
        if not self._gather(self._payload, deadline):
            return None
        frame, self._frame = self._frame._replace(payload=bytes(self._payload)), None
        return frame

    def tell(self, frame: Frame, deadline: Deadline) -> None:
        """Sends a notice with its payload. Raises DeadlineExceeded, PeerDead."""
        self.write([memoryview(frame.pack() + frame.payload)], deadline)

    def write(self, pieces: Sequence[memoryview], deadline: Deadline) -> None:
        """Sends bytes, gathered from the pieces. Raises DeadlineExceeded (the stream is then torn), PeerDead."""
        with self._writing:
            self._torn = True  # until all is out
            for first in range(0, len(pieces), _PIECES):
                self._write(list(pieces[first : first + _PIECES]), deadline)
            self._torn = False

    def tell_with_descriptor(self, frame: Frame, descriptor: int, deadline: Deadline) -> None:
        """Sends a notice, and behind it one byte that carries a file descriptor. Raises as `write` does."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        with self._writing:
            self._torn = True
            # Two calls: what is read together with a descriptor by one who does not ask for it is lost.
            self._write([memoryview(frame.pack())], deadline)
            self._write([memoryview(b"\0")], deadline, rights)
            self._torn = False

    def tell_at_once(self, frame: Frame) -> None:
        """Sends a notice without waiting. Raises PeerDead, BadFrame when the peer reads nothing.

        What a peer may have unread here is bounded by its credit; only one that breaks the rules fills the pipe.
        """
        with self._writing:
            try:
                sent = self.socket.send(frame.pack(), socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise gone(error) from error
            if sent < HEADER_BYTES:
                self._torn = True
                raise BadFrame("the peer takes messages and never reads its credit")

    def read_bulk(self, target: memoryview, deadline: Deadline) -> int:
        """Reads into `target` as far as bytes come before the deadline; returns how many. Raises PeerDead."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(deadline))
        try:
            got = self.socket.recv_into(target, len(target), socket.MSG_WAITALL)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise gone(error) from error
        if got == 0:
            raise gone()
        return got

    def shut(self, cause: LinkError) -> None:
        """Says BYE if nothing is in the way, and ends the connection both ways; waiting threads wake up."""
        if self._writing.acquire(blocking=False):
            try:
                if not self._torn:
                    self.socket.send(bye(cause).pack(), socket.MSG_DONTWAIT)
            except OSError:
                pass  # the peer is gone or hears nothing: then it needs no BYE
            finally:
                self._writing.release()
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # ended already

    def close(self) -> None:
        """Gives the descriptor back."""
        self.socket.close()

    def wait_readable(self, deadline: Deadline) -> bool:
        """Whether there is something to read before the deadline, the connection's end included."""
        return bool(self._readable.poll(deadline.left_s() * 1e3))

    def _gather(self, target: bytearray, deadline: Deadline) -> bool:
        """Fills `target`, going on where it stopped; False by the deadline."""
        while self._have < len(target):
            if not self.wait_readable(deadline):
                return False
            try:
                got = self.socket.recv_into(memoryview(target)[self._have :], 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except OSError as error:
                raise gone(error) from error
            if got == 0:
                raise gone()
            self._have += got
        self._have = 0
        return True

    def _write(self, pieces: list[memoryview], deadline: Deadline, *rights: _Rights) -> None:
        flags: int = socket.MSG_DONTWAIT  # the first time, so that what has room needs no limits set
        while pieces:
            try:
                sent = self.socket.sendmsg(pieces, rights, flags)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise gone(error) from error
            _drop(pieces, sent)
            if not pieces:
                return
            if not self._writable.poll(deadline.left_s() * 1e3):
                raise DeadlineExceeded("the peer did not take a message in time; it may be stopped or overloaded")
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(deadline))
            flags = 0


def gone(error: OSError | None = None) -> PeerDead:
    """The peer is dead, as far as a connection can tell."""
    why = f" ({error.strerror})" if error and error.strerror else ""
    return PeerDead(f"the process at the other end of the link is gone{why}")


def _poll(connection: socket.socket, events: int) -> select.poll:
    poll = select.poll()
    poll.register(connection, events)
    return poll


def _timeval(deadline: Deadline) -> bytes:
    # 0 would mean no limit at all.
    left_s = max(deadline.left_s(), _SHORTEST_S)
    return _TIMEVAL.pack(int(left_s), int(left_s % 1 * 1e6))


def _drop(pieces: list[memoryview], sent: int) -> None:
    """Takes `sent` bytes from the front of the pieces."""
    done = 0
    while done < len(pieces) and sent >= len(pieces[done]):
        sent -= len(pieces[done])
        done += 1
    del pieces[:done]
    if sent:
        pieces[0] = pieces[0][sent:]
