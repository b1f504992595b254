"""Receives from a peer that must not fall silent: it is pinged when nothing comes, and given up in the end."""

from __future__ import annotations

from collections.abc import Callable

from bottega.clocks import AwakeClock
from bottega.errors import DeadlineExceeded
from bottega.transport.channel.deadline import Deadline
from bottega.transport.channel.receiver import Incoming
from bottega.transport.link import Link

# How often a quiet link is checked, by the end that pings and by one that only listens.
_CHECK_S = 0.25
_LISTENING_CHECK_S = 2.0
# A peer is pinged after this share of silence_s without a message.
_PING_SHARE = 0.2
# A peer is pinged after this time in any case: the other end gives up a peer that is silent for half a minute.
_PING_S = 5.0


class Keepalive:
    """A receiver that pings a silent peer. One thread uses it.

    Time during which this process itself was stopped does not count as silence of the peer.

    Args:
        peer: Its name in errors.
        silence_s: A peer that is silent this long is given up.
        ping: Sends a ping; None if the peer sends something every few seconds anyway.
        check: Called while nothing comes; raises if a peer that answers pings must be given up all the same.
    """

    def __init__(
        self,
        link: Link,
        *,
        peer: str,
        silence_s: float,
        ping: Callable[[], object] | None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._link = link
        self._peer = peer
        self._silence_s = silence_s
        self._ping = ping
        self._check = check
        self._check_s = _LISTENING_CHECK_S if ping is None else _CHECK_S
        self._awake = AwakeClock(self._check_s)
        self._last_s = self._pinged_s = self._awake()

    def next(self) -> Incoming:
        """Return the next message.

        Raises DeadlineExceeded if the peer has been silent for too long, and like `check` and Link.recv.
        """
        while True:
            try:
                incoming = self._link.recv(Deadline.after(self._check_s))
            except DeadlineExceeded as error:
                self._check_silence(error)
            else:
                self._last_s = self._awake()
                return incoming

    def wait(self, incoming: Incoming, count: int) -> None:
        """Wait for the first `count` tensors of a message, as long as bytes keep coming. Raises like `next`."""
        while True:
            filled = incoming.filled
            try:
                incoming.wait(count, Deadline.after(self._check_s))
                break
            except DeadlineExceeded as error:
                if incoming.filled == filled:
                    self._check_silence(error)
                else:
                    self._last_s = self._awake()
        self._last_s = self._awake()

    def _check_silence(self, error: DeadlineExceeded) -> None:
        """Ping a quiet peer, or raise if it has been silent for too long."""
        if self._link.cause is not None:
            raise self._link.cause
        now_s = self._awake()
        quiet_s = now_s - self._last_s
        if quiet_s > self._silence_s:
            raise DeadlineExceeded(f"{self._peer} was silent for {quiet_s:.1f} s; it is stopped, or cut off") from error
        self._check()
        quiet_since_s = max(self._last_s, self._pinged_s)
        if self._ping is not None and now_s - quiet_since_s > min(_PING_SHARE * self._silence_s, _PING_S):
            self._pinged_s = now_s
            self._ping()
