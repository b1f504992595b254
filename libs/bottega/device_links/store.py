"""The store through which the two ends of a process group exchange values while it is set up.

Each direction of a link has one, and the connection of that direction carries the values. The connection is proven, so
no stranger can take part, unlike with stores that listen on their own port.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from bottega.errors import BadFrame, DeadlineExceeded, PeerDead
from bottega.transport import Deadline

# Lengths of a key and of its value.
_LENGTHS = struct.Struct("<HI")
# Addresses and identities of groups have some hundred bytes.
_MAX_KEY_BYTES, _MAX_VALUE_BYTES = 512, 1 << 20


class LinkStore(Store):
    """A torch.distributed store for two processes. Calls end by the deadline."""

    def __init__(self, connection: socket.socket, deadline: Deadline) -> None:
        super().__init__()
        self._connection: socket.socket | None = connection
        self._deadline = deadline
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value at both ends. Raises OSError, DeadlineExceeded."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        if self._connection is not None:
            self._limit(self._connection)
            name = key.encode()
            self._connection.sendall(_LENGTHS.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """Return a value, after waiting for the other end to set it. Raises PeerDead, DeadlineExceeded, BadFrame."""
        while key not in self._values:
            self._receive()
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set. Raises like `get`."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return all(key in self._values for key in keys)

    def close(self) -> None:
        """End the set-up: from now on the connection carries frames, and keys that are not set never will be."""
        self._connection = None

    def _receive(self) -> None:
        connection = self._connection
        if connection is None:
            raise PeerDead("a process group reads a key that was not set during its set-up")
        key_bytes, value_bytes = _LENGTHS.unpack(self._read(connection, _LENGTHS.size))
        if key_bytes > _MAX_KEY_BYTES or value_bytes > _MAX_VALUE_BYTES:
            raise BadFrame("the peer sent a longer key or value than any process group sets")
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
