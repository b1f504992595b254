"""The slow network of a bench lets through what it says, both ways, and changes nothing."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from load.bench.throttle import Throttle

SIZE_BYTES = 256 << 10


@pytest.mark.alone
def test_what_goes_through_is_whole_and_as_slow_as_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as echo, Throttle(bytes_per_s=1e6) as throttle:
        throttle.target = echo.getsockname()[1]
        threading.Thread(target=_echo, args=(echo,), daemon=True).start()
        sent = bytes(range(256)) * (SIZE_BYTES // 256)
        with socket.create_connection(("127.0.0.1", throttle.port), timeout=20) as caller:
            began = time.monotonic()
            threading.Thread(target=caller.sendall, args=(sent,), daemon=True).start()
            got = _read(caller, len(sent))
            taken_s = time.monotonic() - began
    assert got == sent
    # Both ways at once, so the time of one and of the last piece.
    assert SIZE_BYTES / 1e6 * 0.9 < taken_s < SIZE_BYTES / 1e6 * 3


def _read(caller: socket.socket, size_bytes: int) -> bytes:
    got = bytearray()
    while len(got) < size_bytes:
        got += caller.recv(1 << 16)
    return bytes(got)


def _echo(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    with connection:
        while piece := connection.recv(1 << 16):
            connection.sendall(piece)
