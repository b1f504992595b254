"""Who receives from a peer that falls silent, sends slowly, or answers and does nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from bottega.errors import BottegaError, DeadlineExceeded, PeerDead
from bottega.transport import Backend, Deadline, DType, Incoming, Layout, Link, TensorSpec, connection
from bottega.transport.connection import Connection, ConnectionSettings, Keepalive, LinkHandler
from tests.support.transport_backends import LAYOUT, content, linked, patience

SILENCE_S = 1.0
WORD = Layout.of(TensorSpec(name="word", dtype=DType.UINT8, shape=(1,)))


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Link, Link]]:
    with linked(Backend.TCP, tmp_path) as both:
        yield both


def test_a_silent_peer_is_asked_and_then_given_up(ends: tuple[Link, Link]) -> None:
    _, far = ends
    asked_s: list[float] = []
    began_s = time.monotonic()
    keepalive = Keepalive(
        far, peer="the sender", silence_s=SILENCE_S, ping=lambda: asked_s.append(time.monotonic() - began_s)
    )
    with pytest.raises(DeadlineExceeded, match="the sender was silent"):
        keepalive.next()
    assert SILENCE_S <= time.monotonic() - began_s < 2 * SILENCE_S
    assert asked_s[0] < SILENCE_S / 2
    assert far.cause is None, "its user ends it"


def test_a_peer_that_answers_is_never_given_up(ends: tuple[Link, Link]) -> None:
    near, far = ends
    keepalive = Keepalive(
        far, peer="the sender", silence_s=SILENCE_S, ping=lambda: near.send(WORD, [bytearray(1)], patience())
    )
    until_s = time.monotonic() + 2 * SILENCE_S
    while time.monotonic() < until_s:
        keepalive.next().release()


class StoppedOnce:
    """A link whose process is stopped in its first wait, for so long that a silent peer would have been given up."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stopped = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)

    def recv(self, deadline: Deadline) -> Incoming:
        if not self._stopped:
            self._stopped = True
            time.sleep(2 * SILENCE_S)
        return self._link.recv(deadline)


def test_a_peer_is_not_given_up_for_the_time_in_which_this_process_was_stopped(ends: tuple[Link, Link]) -> None:
    near, far = ends
    asked = 0

    def ping() -> None:
        nonlocal asked
        asked += 1
        near.send(WORD, [bytearray(1)], patience())

    keepalive = Keepalive(cast("Link", StoppedOnce(far)), peer="the sender", silence_s=SILENCE_S, ping=ping)
    keepalive.next().release()
    assert asked == 1, "it was asked before it was given up"


def test_a_message_may_take_as_long_as_bytes_come(ends: tuple[Link, Link]) -> None:
    near, far = ends
    parts = content(LAYOUT, 1)

    def send_slowly() -> None:
        with near.start_message(LAYOUT, patience()) as outgoing:
            for count, (view, part) in enumerate(zip(outgoing.views, parts, strict=True), start=1):
                time.sleep(0.7 * SILENCE_S)
                view[:] = part
                outgoing.ready(count)

    sending = threading.Thread(target=send_slowly)
    sending.start()
    keepalive = Keepalive(far, peer="the sender", silence_s=SILENCE_S, ping=lambda: None)
    with keepalive.next() as incoming:
        keepalive.wait(incoming, len(parts))
        assert [bytes(incoming.view(index)) for index in range(len(parts))] == parts
    sending.join(10)


def test_who_answers_and_does_nothing_else_is_given_up_for_the_reason_of_the_user(ends: tuple[Link, Link]) -> None:
    _, far = ends

    def check() -> None:
        raise PeerDead("it computes nothing")

    with pytest.raises(PeerDead, match="computes nothing"):
        Keepalive(far, peer="the sender", silence_s=60.0, ping=lambda: None, check=check).next()


class SilentLink:
    """A link on which nothing comes. It notes how long each wait may take, and ends after the third."""

    cause = None

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def recv(self, deadline: Deadline) -> Incoming:
        self.waits_s.append(deadline.left_s())
        if len(self.waits_s) == 3:
            raise PeerDead("the end")
        raise DeadlineExceeded("nothing has come")


@pytest.mark.parametrize(("is_at_rest", "wait_s"), [(False, 0.25), (True, 3.0)])
def test_a_link_that_is_only_kept_open_is_checked_less_often(is_at_rest: bool, wait_s: float) -> None:
    link = SilentLink()
    keepalive = Keepalive(
        cast("Link", link), peer="the sender", silence_s=5.0, ping=lambda: None, is_at_rest=lambda: is_at_rest
    )
    with pytest.raises(PeerDead):
        keepalive.next()
    assert link.waits_s == pytest.approx([wait_s] * 3, abs=0.05)


@pytest.mark.parametrize("awaits", [False, True])
def test_a_quiet_peer_that_owes_an_answer_is_checked_all_the_time(
    ends: tuple[Link, Link], awaits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_REST_AFTER_S", -1.0)
    checked = threading.Semaphore(0)

    class Asking(LinkHandler):
        awaits_answer = awaits

        def on_message(self, connection: Connection, incoming: Incoming) -> None:
            incoming.release()

        def on_end(self, cause: BottegaError) -> None:
            pass

        def check(self) -> None:
            checked.release()

    settings = ConnectionSettings(
        here="the worker", peer="the server", silence_s=600.0, send_s=5.0, receive_s=None, pings=True
    )
    asking = Connection(settings)
    serving = threading.Thread(target=asking.serve, args=(ends[1], Asking()))
    serving.start()
    try:
        seen = all(checked.acquire(timeout=20.0 if awaits else 2.0) for _ in range(4))
        assert seen is awaits
    finally:
        asking.close(PeerDead("the end of the test"))
        serving.join(10)
