"""What the two ends of a process group tell each other while it is set up: each has a store for each direction of a
link, and the connection of that direction carries what is set to the other end's.

The connection is proven; so no stranger can take part, as with stores that listen on a port of their own.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from bottega.errors import BadFrame, DeadlineExceeded, PeerDead
from bottega.transport import Deadline

# Bytes of a key, and of what it is set to.
_LENGTHS = struct.Struct("<HI")
# Addresses and identities of groups have some hundred bytes.
_MAX_KEY_BYTES, _MAX_VALUE_BYTES = 512, 1 << 20


class LinkStore(Store):
    """A torch.distributed store for two. Calls end by the deadline; `close` ends the use of the connection."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        super().__init__()
        self._connection: socket.socket | None = connection
        self._deadline = deadline
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Sets it at both ends. Raises OSError, DeadlineExceeded."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        if self._connection is not None:
            self._limit(self._connection)
            name = key.encode()
            self._connection.sendall(_LENGTHS.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """What it was set to; waits for the other end to set it. Raises PeerDead, DeadlineExceeded, BadFrame."""
        while key not in self._values:
            self._receive()
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all of them are set. Raises as `get` does."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are set."""
        return all(key in self._values for key in keys)

    def close(self) -> None:
        """The group is set up: the connection is for frames from now on, and what is not set never will be."""
        self._connection = None

    def _receive(self) -> None:
        connection = self._connection
        if connection is None:
            raise PeerDead("a process group asks for what was not set while it was set up")
        key_bytes, value_bytes = _LENGTHS.unpack(self._read(connection, _LENGTHS.size))
        if key_bytes > _MAX_KEY_BYTES or value_bytes > _MAX_VALUE_BYTES:
            raise BadFrame("the peer sent what no process group sets")
        key = self._read(connection, key_bytes)
        self._values[key.decode(errors="replace")] = self._read(connection, value_bytes)

    def _read(self, connection: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._limit(connection)
            got = connection.recv(count - len(data))
            if not got:
                raise PeerDead("the process at the other end left while the devices were linked")
            data += got
        return data

    def _limit(self, connection: socket.socket) -> None:
        left_s = self._deadline.left_s()
        if left_s == 0:
            raise DeadlineExceeded("the other end did not link its device in time")
        connection.settimeout(left_s)
