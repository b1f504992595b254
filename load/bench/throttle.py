"""A relay for TCP connections that passes a bounded number of bytes a second, each way: a slow network on one machine.

A network takes nothing of the processors of those that it links, so the relay takes as little as it can: bytes go from
socket to socket through a pipe, as the system's own pages, and are never copied here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import threading
import time
from types import TracebackType

# Small enough that a message of a millisecond is not held up by one piece.
_PIECE_BYTES = 16 << 10
# Seconds of the wire that a larger piece may take: a reader of its last byte waits for so long.
_PIECE_S = 0.005
# Seconds that a relay which woke too late may catch up on: without it every late wake-up, of a tenth of a millisecond
# on an idle machine and of many on a busy one, made the network slower than it should be.
_BEHIND_S = 0.01


class Throttle:
    """A relay that listens on a free port of loopback, and passes on to the port `target` of loopback.

    Args:
        bytes_per_s: Each way, of all connections together; may be changed at any time.
        piece_bytes: Bytes that are passed on at once where the wire carries them in a moment; the larger, the less the
            relay takes of the processors.
    """

    def __init__(self, *, bytes_per_s: float = 1e9, piece_bytes: int = _PIECE_BYTES) -> None:
        self.bytes_per_s = bytes_per_s
        self._piece_bytes = piece_bytes
        self.target = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self._free_at = [0.0, 0.0]
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        """Return the port on which it listens."""
        return int(self._listener.getsockname()[1])

    def __enter__(self) -> Throttle:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for connection in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                caller, _ = self._listener.accept()
                callee = socket.create_connection(("127.0.0.1", self.target))
                self._connections += [caller, callee]
                for source, sink, way in ((caller, callee, 0), (callee, caller, 1)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pass_on, args=(source, sink, way), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, way: int) -> None:
        pipe = os.pipe()
        with contextlib.suppress(OSError):  # of a user that has many pipes already: pieces are smaller then
            fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, self._piece_bytes)
        with contextlib.suppress(OSError, ValueError):  # ValueError: of a closed socket
            while True:
                here, _, _ = select.select([source], [], [], 0.0)
                came = os.splice(source.fileno(), pipe[1], self._max_bytes)
                if not came:
                    break
                self._wait(came, way, waited_here=bool(here))
                while came:
                    came -= os.splice(pipe[0], sink.fileno(), came)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for descriptor in pipe:
            os.close(descriptor)

    @property
    def _max_bytes(self) -> int:
        """The bound of the next piece."""
        return min(self._piece_bytes, max(_PIECE_BYTES, int(self.bytes_per_s * _PIECE_S)))

    def _wait(self, size_bytes: int, way: int, *, waited_here: bool) -> None:
        """Wait until the wire has carried these bytes.

        Args:
            waited_here: Whether they had come when those before were through. Otherwise the wire has had a pause,
                which is nothing to catch up on.
        """
        with self._lock:
            begin = max(self._free_at[way], time.monotonic() - (_BEHIND_S if waited_here else 0.0))
            self._free_at[way] = begin + size_bytes / self.bytes_per_s
            until = self._free_at[way]
        time.sleep(max(0.0, until - time.monotonic()))
