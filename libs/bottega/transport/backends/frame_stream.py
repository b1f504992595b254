"""Frames over a connected stream socket, with deadlines, which the memfd backend uses, too, and the TCP backend.

The socket stays in blocking mode. Frames are read and written without waiting, after a poll if there may be a wait.
Bulk bytes are left to the system in one call, which ends by the socket's own timeouts.

Between hosts, each direction of a link has a TCP connection for frames and messages, sealed in records. The sender
gathers from the caller's buffers or from its own slots. The receiver reads straight into its slots, so only the system
copies the bytes.
"""

from __future__ import annotations

import array
import select
import socket
import struct
import threading
from collections.abc import Sequence

from bottega.errors import BadFrame, DeadlineExceeded, LinkError, NoSharedMemory, PeerDead
from bottega.transport.backends.records import Records
from bottega.transport.channel.backend import Deadline, Part, on_host
from bottega.transport.channel.frames import HEADER_BYTES, Frame, FrameKind, bye, unpack
from bottega.transport.layout import Layout
from bottega.transport.memory import GrowingSlots, SealedFile, Slot

# IOV_MAX allows 1024 pieces in a call.
_PIECES = 512
_TIMEVAL = struct.Struct("@ll")
_SHORTEST_S = 1e-4
# The longest timeout that poll accepts: 24 days.
_LONGEST_MS = 2**31 - 1
# A reader of bulk bytes sleeps until this many have arrived. Waking for each segment takes a third longer.
_COARSE_BYTES = 256 << 10

# How long `shut_down` lets a thread finish writing a frame, which never waits.
_NOTICE_S = 0.1

_DESCRIPTOR_BYTES = array.array("i").itemsize
_Rights = tuple[int, int, "array.array[int]"]

# A host that vanished silently is noticed after about 10 + 3 x 3 seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3))


class FrameStream:
    """An end of the connection that carries one direction. All backends share this part of a BackendEnd.

    Args:
        records: Encrypts outgoing and decrypts incoming bytes; None for plain bytes.
    """

    def __init__(self, connection: socket.socket, records: Records | None = None) -> None:
        self._records = records
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

    def receive_frame(self, deadline: Deadline) -> Frame | None:
        """Return the next frame, or None at the deadline. Raises PeerDead, BadFrame."""
        if self._frame is None:
            header = self._read_header(deadline)
            if header is None:
                return None
            frame = unpack(header)
            if frame.kind != FrameKind.LAYOUT:
                return frame
            self._frame, self._payload = frame, bytearray(frame.size)
        if not self._gather(self._payload, deadline):
            return None
        frame, self._frame = self._frame._replace(payload=bytes(self._payload)), None
        return frame

    def send_frame(self, frame: Frame, deadline: Deadline) -> None:
        """Send a frame with its payload. Raises DeadlineExceeded, PeerDead."""
        with self._writing:
            encoded = self._sealed(frame.pack() + frame.payload)
            sent = self._send_at_once(encoded)
            if sent < len(encoded):
                self._torn = True
                self._write([memoryview(encoded)[sent:]], deadline)
                self._torn = False

    def write(self, pieces: Sequence[memoryview], deadline: Deadline) -> None:
        """Send the pieces. Raises PeerDead, or DeadlineExceeded, after which the stream cannot be used further."""
        with self._writing:
            self._torn = True  # until everything is sent
            if self._records is not None:
                for record in self._records.seal_all(pieces):
                    self._write([record], deadline)
            else:
                for first in range(0, len(pieces), _PIECES):
                    self._write(list(pieces[first : first + _PIECES]), deadline)
            self._torn = False

    def send_frame_with_descriptor(self, frame: Frame, descriptor: int, deadline: Deadline) -> None:
        """Send a frame, followed by one byte that carries a file descriptor. Raises the errors of `write`."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        with self._writing:
            self._torn = True
            # Two calls: a plain read that also covers the descriptor's byte would lose the descriptor.
            self._write([memoryview(frame.pack())], deadline)
            self._write([memoryview(b"\0")], deadline, rights)
            self._torn = False

    def receive_descriptor(self) -> int:
        """Return the file descriptor that comes with the next byte, which has already arrived.

        Raises PeerDead, BadFrame, NoSharedMemory.
        """
        room = socket.CMSG_LEN(_DESCRIPTOR_BYTES)  # for one descriptor; the system drops any more
        try:
            data, extra, flags, _ = self.socket.recvmsg(1, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            data, extra, flags = b"\0", [], 0
        except OSError as error:
            raise gone(error) from error
        if not data:
            raise gone()
        for level, kind, value in extra:
            if (level, kind, len(value)) == (socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR_BYTES):
                return array.array("i", value)[0]
        if flags & socket.MSG_CTRUNC:
            raise NoSharedMemory(
                "this process has no free file descriptor for the peer's shared memory: raise its limit"
            )
        raise BadFrame("the peer announced shared memory and sent none")

    def send_credit(self, frame: Frame) -> None:
        """Send a CREDIT frame without waiting. Raises PeerDead, or BadFrame if the peer reads nothing.

        Credit bounds what a peer may leave unread here, so only a peer that breaks the rules fills the pipe.
        """
        with self._writing:
            encoded = self._sealed(frame.pack())
            if self._send_at_once(encoded) < len(encoded):
                self._torn = True
                raise BadFrame("the peer sends messages but does not read the credit for them")

    def read_bulk(self, target: memoryview, deadline: Deadline) -> int:
        """Read into `target` until it is full or the deadline passes; return how many bytes were read. Raises PeerDead.

        Poll wakes this thread for large pieces only. A recv that sleeps for more bytes than there are left would miss
        the end.
        """
        done, asked = 0, 1
        try:
            while done < len(target):
                if asked != (wanted := self._wanted_bytes(len(target) - done)):
                    self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
                    asked = wanted
                if not self.wait_readable(deadline):
                    break
                done += self._receive(target[done:])
        finally:
            if asked != 1:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return done

    def shut_down(self, cause: LinkError) -> None:
        """Send BYE (unless half a message is in the way), shut the connection down, and wake the waiting threads."""
        # A thread that is writing a frame finishes soon. After half a message, the peer would read a BYE as part of it.
        if self._writing.acquire(timeout=0.0 if self._torn else _NOTICE_S):
            try:
                if not self._torn:
                    self.socket.send(self._sealed(bye(cause).pack()), socket.MSG_DONTWAIT)
            except OSError:
                pass  # the peer is gone or reads nothing, so it needs no BYE
            finally:
                self._writing.release()
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # already ended

    def close(self) -> None:
        """Close the descriptor."""
        self.socket.close()

    def wait_readable(self, deadline: Deadline) -> bool:
        """Wait until something can be read, or the connection ends. Return False at the deadline.

        Raises BadFrame at once if the received bytes are not a record.
        """
        if self._records is not None:
            if self._records.waiting:
                return True
            self._records.read_header()
        return bool(self._readable.poll(_milliseconds(deadline)))

    def _read_header(self, deadline: Deadline) -> bytes | bytearray | None:
        """Return a whole header, or None at the deadline. The next call continues with a partly read header."""
        if self._have == 0 and self._records is None:
            if not self._readable.poll(_milliseconds(deadline)):
                return None
            try:
                header = self.socket.recv(HEADER_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return self._header if self._gather(self._header, deadline) else None
            except OSError as error:
                raise gone(error) from error
            if len(header) == HEADER_BYTES:
                return header
            if not header:
                raise gone()
            self._header[: len(header)] = header
            self._have = len(header)
        return self._header if self._gather(self._header, deadline) else None

    def _gather(self, target: bytearray, deadline: Deadline) -> bool:
        """Fill `target`, continuing where the last call stopped. Return False at the deadline."""
        while self._have < len(target):
            if not self.wait_readable(deadline):
                return False
            self._have += self._receive(memoryview(target)[self._have :])
        self._have = 0
        return True

    def _receive(self, target: memoryview) -> int:
        """Read what has arrived; return how many bytes that was."""
        if self._records is None:
            return self._receive_raw(target)
        if self._records.waiting:
            return self._records.take(target)
        return self._records.received(self._receive_raw(self._records.wanted), target)

    def _receive_raw(self, target: memoryview) -> int:
        try:
            got = self.socket.recv_into(target, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise gone(error) from error
        if got == 0:
            raise gone()
        return got

    def _wanted_bytes(self, missing: int) -> int:
        """Return how many of the missing bytes must arrive before this thread is woken."""
        if self._records is not None:  # bytes wait here only as whole records
            return 1 if self._records.waiting else self._records.missing
        return min(missing, _COARSE_BYTES)

    def _sealed(self, data: bytes) -> bytes | memoryview:
        """Return the data in the form in which it is sent. Hold `_writing`, because records are ordered."""
        return data if self._records is None else self._records.seal(data)

    def _send_at_once(self, encoded: bytes | memoryview) -> int:
        """Send what the system accepts without waiting; return how many bytes that was."""
        try:
            return self.socket.send(encoded, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise gone(error) from error

    def _write(self, pieces: list[memoryview], deadline: Deadline, *rights: _Rights) -> None:
        flags: int = socket.MSG_DONTWAIT  # at first; if everything fits, no timeout needs to be set
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
            if not self._writable.poll(_milliseconds(deadline)):
                raise DeadlineExceeded("the peer did not receive a message in time; it may be stopped or overloaded")
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(deadline))
            flags = 0


def gone(error: OSError | None = None) -> PeerDead:
    """Return the error for a lost connection. Its peer has probably ended."""
    why = f" ({error.strerror})" if error and error.strerror else ""
    return PeerDead(f"the process at the other end of the link has ended{why}")


def _poll(connection: socket.socket, events: int) -> select.poll:
    poll = select.poll()
    poll.register(connection, events)
    return poll


def _milliseconds(deadline: Deadline) -> float:
    return min(deadline.left_s() * 1e3, _LONGEST_MS)


def _timeval(deadline: Deadline) -> bytes:
    # 0 would mean no limit.
    left_s = max(deadline.left_s(), _SHORTEST_S)
    return _TIMEVAL.pack(int(left_s), int(left_s % 1 * 1e6))


def _drop(pieces: list[memoryview], sent: int) -> None:
    done = 0
    while done < len(pieces) and sent >= len(pieces[done]):
        sent -= len(pieces[done])
        done += 1
    del pieces[:done]
    if sent:
        pieces[0] = pieces[0][sent:]


def tune(connection: socket.socket) -> None:
    """Set TCP_NODELAY and keepalive on a link's connection.

    The system sizes the buffers by the path's delay. With fixed buffers of 4 MiB, transfers within a host took half as
    long again, because the bytes leave the processor's cache meanwhile.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class TcpSender(FrameStream):
    """The sender of one direction over TCP."""

    passes_files = False

    def __init__(self, connection: socket.socket, records: Records | None = None) -> None:
        super().__init__(connection, records)
        self._slots = GrowingSlots()

    def slot(self, index: int, size_bytes: int, deadline: Deadline) -> Slot:
        return self._slots.get(index, size_bytes)

    def stage(self, index: int, layout: Layout, parts: Sequence[Part], deadline: Deadline) -> list[Part]:
        pieces: list[Part] = []
        end = 0
        for offset, buffer in zip(layout.offsets, on_host(parts), strict=True):
            if offset > end:
                pieces.append(memoryview(bytes(offset - end)))
            pieces.append(buffer)
            end = offset + len(buffer)
        return pieces

    def attach_file(self, index: int, file: SealedFile, deadline: Deadline) -> None:
        raise ValueError("links over TCP cannot pass files")

    def send_data(self, frame: Frame, pieces: Sequence[Part], deadline: Deadline) -> None:
        self.write([memoryview(frame.pack()), *on_host(pieces)], deadline)

    def close(self) -> None:
        super().close()
        self._slots.clear()


class TcpReceiver(FrameStream):
    """The receiver of one direction over TCP."""

    def __init__(self, connection: socket.socket, records: Records | None = None) -> None:
        super().__init__(connection, records)
        self._slots = GrowingSlots()
        self._open: dict[int, Slot] = {}

    def open_slot(self, index: int, layout: Layout) -> tuple[memoryview, ...]:
        slot = self._open[index] = self._slots.get(index, layout.size_bytes)
        return slot.views(layout)

    def pop_file(self, index: int) -> memoryview | None:
        return None

    def receive_data(self, index: int, start: int, stop: int, deadline: Deadline) -> int:
        return self.read_bulk(self._open[index].memory[start:stop], deadline)

    def close(self) -> None:
        super().close()
        self._slots.clear()
        self._open.clear()
