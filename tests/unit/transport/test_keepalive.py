"""Who receives from a peer that falls silent, sends slowly, or answers and does nothing else. The test turns the clock.

No link is opened: what the keepalive does follows from when messages come.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from bottega.clocks import AwakeClock
from bottega.errors import BottegaError, DeadlineExceeded, LinkError, PeerDead
from bottega.transport import Deadline, Incoming, connection
from bottega.transport.connection import Connection, ConnectionSettings, Keepalive, LinkHandler
from tests.fakes.fake_time import FakeTime

SILENCE_S = 5.0


class QuietLink:
    """A link on which messages come when the test says so. Who waits lets the clock go on.

    comes_at: when the next message comes. ends_after: waits after which the peer dies. waits_s: what waits may take.
    """

    def __init__(self, clock: FakeTime) -> None:
        self.comes_at: float | None = None
        self.ends_after = 1000
        self.waits_s: list[float] = []
        self.cause: LinkError | None = None
        self._clock = clock

    def __enter__(self) -> QuietLink:
        return self

    def __exit__(self, *_: object) -> None: ...

    def end(self, cause: LinkError) -> None:
        self.cause = self.cause or cause

    def send(self, *_: object, **__: object) -> None: ...

    def recv(self, deadline: Deadline) -> Any:
        self.waits_s.append(deadline.left_s())
        if len(self.waits_s) > self.ends_after:
            raise PeerDead("the end")
        if self.comes_at is not None and self.comes_at <= deadline.at:
            self._clock.now, self.comes_at = max(self._clock.now, self.comes_at), None
            return "a message"
        self._clock.now = max(self._clock.now, deadline.at)
        raise DeadlineExceeded("nothing has come")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    clock = FakeTime(now=100.0)
    monotonic = clock.clock().monotonic
    monkeypatch.setattr(connection, "AwakeClock", partial(AwakeClock, monotonic=monotonic))
    for module in ("connection", "channel.backend"):
        monkeypatch.setattr(f"bottega.transport.{module}.time", SimpleNamespace(monotonic=monotonic))
    return clock


@pytest.fixture
def link(clock: FakeTime) -> QuietLink:
    return QuietLink(clock)


def keepalive_of(link: QuietLink, **settings: Any) -> Keepalive:
    return Keepalive(link, peer="the sender", **{"silence_s": SILENCE_S, "ping": lambda: None, **settings})  # type: ignore[arg-type]


def test_a_silent_peer_is_asked_and_then_given_up(link: QuietLink, clock: FakeTime) -> None:
    asked_at: list[float] = []
    with pytest.raises(DeadlineExceeded, match="the sender was silent"):
        keepalive_of(link, ping=lambda: asked_at.append(clock.now)).next()
    assert SILENCE_S <= clock.now - 100 < 1.2 * SILENCE_S
    assert asked_at[0] - 100 < SILENCE_S / 2
    assert link.cause is None, "its user ends it"


def test_a_peer_that_answers_is_never_given_up(link: QuietLink, clock: FakeTime) -> None:
    def ping() -> None:
        link.comes_at = clock.now + 0.5

    keepalive = keepalive_of(link, ping=ping)
    while clock.now < 100 + 10 * SILENCE_S:
        keepalive.next()


def test_a_peer_is_not_given_up_for_the_time_in_which_this_process_was_stopped(
    link: QuietLink, clock: FakeTime
) -> None:
    asked = 0

    def ping() -> None:
        nonlocal asked
        asked += 1
        link.comes_at = clock.now

    keepalive = keepalive_of(link, ping=ping)
    clock.now += 3600
    keepalive.next()
    assert asked == 1, "it was asked before it was given up"


def test_a_message_may_take_as_long_as_bytes_come(link: QuietLink, clock: FakeTime) -> None:
    class Slow:
        """A message of which some bytes come in each of 100 waits, and then nothing more."""

        filled = 0

        def wait(self, count: int, deadline: Deadline) -> None:
            clock.now = deadline.at
            if self.filled < 100:
                self.filled += 1
                raise DeadlineExceeded("half of it has come")
            if count == 1:
                raise DeadlineExceeded("nothing has come")

    keepalive_of(link).wait(Slow(), 0)  # type: ignore[arg-type]
    assert clock.now > 100 + 4 * SILENCE_S
    with pytest.raises(DeadlineExceeded, match="the sender was silent"):
        keepalive_of(link).wait(Slow(), 1)  # type: ignore[arg-type]


def test_who_answers_and_does_nothing_else_is_given_up_for_the_reason_of_the_user(link: QuietLink) -> None:
    def check() -> None:
        raise PeerDead("it computes nothing")

    with pytest.raises(PeerDead, match="computes nothing"):
        keepalive_of(link, check=check).next()


@pytest.mark.parametrize("awaits", [False, True])
def test_a_link_at_rest_is_checked_less_often_unless_its_peer_owes_an_answer(link: QuietLink, awaits: bool) -> None:
    class Asking(LinkHandler):
        awaits_answer = awaits
        checks = 0

        def on_message(self, connection: Connection, incoming: Incoming) -> None: ...

        def on_end(self, cause: BottegaError) -> None: ...

        def check(self) -> None:
            self.checks += 1

    settings = ConnectionSettings(
        here="the worker", peer="the server", silence_s=600.0, send_s=5.0, receive_s=None, pings=True
    )
    link.ends_after = 60
    assert isinstance(Connection(settings).serve(link, asking := Asking()), PeerDead)  # type: ignore[arg-type]
    assert link.waits_s[0] == pytest.approx(0.25)
    assert link.waits_s[-1] == pytest.approx(0.25 if awaits else 6.0)
    assert asking.checks == 60
