"""However a message is cut into pieces on its way, a TCP link's receiver wakes up for its last byte."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from bottega.transport import DType, Layout, TensorSpec
from bottega.transport.tcp import TcpInlet, tune
from tests.service.transport_backends import patience, soon

SIZE = 300_000
LAYOUT = Layout.of(TensorSpec(name="only", dtype=DType.UINT8, shape=(SIZE,)))


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sending = socket.create_connection(listening.getsockname(), timeout=5)
        receiving, _ = listening.accept()
    tune(receiving)
    return sending, receiving


@pytest.mark.parametrize("late_s", [0.0, 0.045])
@pytest.mark.parametrize("pieces", [(200_000,), (1,), (100_000, 100_000), (SIZE - 1,), (262_144,), (262_145, 2)])
def test_the_last_byte_wakes_the_receiver(pieces: tuple[int, ...], late_s: float) -> None:
    sending, receiving = _pair()
    inlet = TcpInlet(receiving)
    views = inlet.open(0, LAYOUT)
    data = bytes(range(250)) * (SIZE // 250)

    def send() -> None:
        start = 0
        for piece in (*pieces, SIZE - sum(pieces)):
            time.sleep(0.03)
            sending.sendall(data[start : start + piece])
            start += piece

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(late_s)  # with the first piece there already, or none
    began, filled = time.monotonic(), 0
    while filled < SIZE:
        filled += inlet.fill(0, filled, SIZE, patience())
        assert time.monotonic() - began < 2, f"it slept through the last of {filled} bytes"
    assert bytes(views[0]) == data
    thread.join(5)
    sending.close()
    inlet.close()


def test_bytes_that_come_slowly_cost_the_deadline_and_are_kept() -> None:
    sending, receiving = _pair()
    inlet = TcpInlet(receiving)
    views = inlet.open(0, LAYOUT)
    sending.sendall(b"x" * 1000)
    filled = inlet.fill(0, 0, SIZE, soon())
    sending.sendall(b"x" * (SIZE - 1000))
    while filled < SIZE:
        filled += inlet.fill(0, filled, SIZE, patience())
    assert bytes(views[0]) == b"x" * SIZE
    sending.close()
    inlet.close()
