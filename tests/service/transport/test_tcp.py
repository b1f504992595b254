"""What only TCP can do to a message: cut it into pieces, and stop it half-way."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from bottega.errors import DeadlineExceeded, LinkClosed, LinkError, StaleEpoch
from bottega.transport import Backend, Deadline, DType, Layout, TensorSpec
from bottega.transport.backends.frame_stream import TcpReceiver, tune
from tests.support.transport_backends import linked, patience, soon

SIZE = 300_000
LAYOUT = Layout.of(TensorSpec(name="only", dtype=DType.UINT8, shape=(SIZE,)))
# More than the system's buffers hold.
HUGE = Layout.of(TensorSpec(name="huge", dtype=DType.UINT8, shape=(64 << 20,)))


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sending = socket.create_connection(listening.getsockname(), timeout=5)
        receiving, _ = listening.accept()
    tune(receiving)
    return sending, receiving


@pytest.mark.parametrize("late_s", [0.0, 0.045])
@pytest.mark.parametrize("pieces", [(1,), (100_000, 100_000), (SIZE - 1,), (262_145, 2)])
def test_the_last_byte_wakes_the_receiver(pieces: tuple[int, ...], late_s: float) -> None:
    sending, receiving = _pair()
    receiver = TcpReceiver(receiving)
    views = receiver.open_slot(0, LAYOUT)
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
        filled += receiver.receive_data(0, filled, SIZE, patience())
        assert time.monotonic() - began < 2, f"it slept through the last of {filled} bytes"
    assert bytes(views[0]) == data
    thread.join(5)
    sending.close()
    receiver.close()


def test_bytes_that_come_slowly_cost_the_deadline_and_are_kept() -> None:
    sending, receiving = _pair()
    receiver = TcpReceiver(receiving)
    views = receiver.open_slot(0, LAYOUT)
    sending.sendall(b"x" * 1000)
    filled = receiver.receive_data(0, 0, SIZE, soon())
    sending.sendall(b"x" * (SIZE - 1000))
    while filled < SIZE:
        filled += receiver.receive_data(0, filled, SIZE, patience())
    assert bytes(views[0]) == b"x" * SIZE
    sending.close()
    receiver.close()


def test_a_message_that_nobody_takes_costs_its_deadline_and_the_link(tmp_path: Path) -> None:
    with linked(Backend.TCP, tmp_path) as (near, far):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            near.send(HUGE, [bytes(HUGE.size_bytes)], Deadline.after(0.1))
        assert time.monotonic() - began < 2
        with pytest.raises(DeadlineExceeded):
            near.start_message(LAYOUT, patience())
        with pytest.raises(LinkError), far.recv(patience()) as incoming:
            incoming.wait_all(patience())
        assert far.counters.snapshot().received.messages == 0


@pytest.mark.parametrize("end", ["end", "close"])
def test_a_sender_that_is_stuck_in_the_system_can_be_freed(tmp_path: Path, end: str) -> None:
    with linked(Backend.TCP, tmp_path) as (near, _):
        errors: list[LinkError] = []

        def send() -> None:
            try:
                near.send(HUGE, [bytes(HUGE.size_bytes)], patience())
            except LinkError as error:
                errors.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        time.sleep(0.1)
        if end == "end":
            near.end(StaleEpoch("given up by a monitor"))
        else:
            near.close()
        thread.join(20)
        assert not thread.is_alive()
        assert [type(error) for error in errors] == [StaleEpoch if end == "end" else LinkClosed]
