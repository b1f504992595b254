"""A relay for TCP connections that lets only so many bytes a second through, each way: a slow network on a machine."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType

# Small enough that a message of a millisecond is not held up by one piece.
_PIECE_BYTES = 16 << 10


class Throttle:
    """Listens on `port` of loopback, any free one where it is 0, and passes on to `target` on loopback.

    bytes_per_s: each way, of all connections together; may be changed at any time. piece_bytes: passed on at once; the
    larger, the less the relay takes of the processors.
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
        """Where it listens."""
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
        with contextlib.suppress(OSError):
            while piece := source.recv(self._piece_bytes):
                self._wait(len(piece), way)
                sink.sendall(piece)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _wait(self, size_bytes: int, way: int) -> None:
        """Until the wire has carried these bytes."""
        with self._lock:
            begin = max(self._free_at[way], time.monotonic())
            self._free_at[way] = begin + size_bytes / self.bytes_per_s
            until = self._free_at[way]
        time.sleep(max(0.0, until - time.monotonic()))


def free_port() -> int:
    """A port of loopback on which nobody listens now, for a target that is started after its relay."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
