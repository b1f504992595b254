"""The slow network of a bench lets through what it says, both ways, and changes nothing."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest

from load.bench.throttle import Throttle

SIZE_BYTES = 256 << 10
LONG_BYTES = 12 << 20
LONG_BYTES_PER_S = 40e6
BURST_BYTES = 12 << 10
SLOW_BYTES_PER_S = 2e6


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


@pytest.mark.alone
@pytest.mark.parametrize("piece_bytes", [16 << 10, 256 << 10])
def test_many_pieces_go_through_as_fast_as_said_however_late_each_wakes_the_relay(piece_bytes: int) -> None:
    with Throttle(bytes_per_s=LONG_BYTES_PER_S, piece_bytes=piece_bytes) as throttle:
        # The quickest of some: a machine that is busy for longer than the relay may catch up on makes it slower.
        taken_s = min(_download_s(throttle) for _ in range(5))
    assert LONG_BYTES / LONG_BYTES_PER_S * 0.9 < taken_s < LONG_BYTES / LONG_BYTES_PER_S * 1.1


@pytest.mark.alone
def test_after_a_pause_nothing_goes_faster() -> None:
    with socket.create_server(("127.0.0.1", 0)) as echo, Throttle(bytes_per_s=SLOW_BYTES_PER_S) as throttle:
        throttle.target = echo.getsockname()[1]
        threading.Thread(target=_echo, args=(echo,), daemon=True).start()
        took_s = []
        with socket.create_connection(("127.0.0.1", throttle.port), timeout=20) as caller:
            for _ in range(10):
                time.sleep(0.05)
                began = time.monotonic()
                caller.sendall(bytes(BURST_BYTES))
                _read(caller, BURST_BYTES)
                took_s.append(time.monotonic() - began)
    # There and back: the one after the other, as it is a single piece.
    assert min(took_s) > 2 * BURST_BYTES / SLOW_BYTES_PER_S * 0.95


def _download_s(throttle: Throttle) -> float:
    """What so many bytes take from a server behind the relay."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        throttle.target = server.getsockname()[1]
        threading.Thread(target=_serve, args=(server, random.Random(0).randbytes(LONG_BYTES)), daemon=True).start()
        with socket.create_connection(("127.0.0.1", throttle.port), timeout=20) as caller:
            began = time.monotonic()
            got = _read(caller, LONG_BYTES)
            taken_s = time.monotonic() - began
    assert got == random.Random(0).randbytes(LONG_BYTES)
    return taken_s


def _serve(listener: socket.socket, data: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        connection.sendall(data)


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
