"""What this engine does for its peer: takes its link, and computes what it lends between turns of its own.

A thread of the link receives; what has to be computed goes to the engine's thread. While the engine has something of
its own to do the link's thread declines at once, so that two engines that lend to each other never wait for each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from bottega.diffusion.parallel.messages import (
    PairMessageKind,
    RemoteNoise,
    RemoteStep,
    kind_of,
    noise_message,
    number_message,
    read_guest,
    read_number,
    read_step,
)
from bottega.diffusion.parallel.remote_rows import RemoteJobs
from bottega.errors import BottegaError, LinkError, PeerDead, Unavailable
from bottega.sampled_log import SampledLog
from bottega.transport import (
    TOKEN_S,
    Deadline,
    Endpoints,
    Incoming,
    Limits,
    LinkCounters,
    LinkListener,
    LinkLog,
    Offer,
    link_boundary,
)
from bottega.worker.peer.connection import PeerConnection

_log = logging.getLogger(__name__)

# A leader says something every second.
_SILENCE_S = 30.0
# A message whose beginning is here must come to its end.
_MESSAGE_S = 5.0
# Jobs of the leader that are kept; it runs some tens.
_MOST_GUESTS = 256
# Taken only as messages need it: eight control images of four megapixels are 96 MiB.
_LIMITS = Limits(slots=4, slot_bytes=128 << 20)
_LINES = LinkLog(_log, linked="the peer leads", ended="the peer leads no more")
_REFUSED = SampledLog(
    _log,
    "rows of a job of the peer cannot be computed here",
    more="rows of more jobs of the peer cannot be computed here",
    counted="jobs",
    level=logging.WARNING,
)


class Follower:
    """post: has the engine's thread do something soon.

    Raises ConfigError when an address cannot be bound.
    """

    def __init__(
        self,
        doors: Endpoints,
        *,
        guests: RemoteJobs,
        counters: LinkCounters,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._guests = guests
        self._post = post
        self._listener = LinkListener(doors, limits=_LIMITS, counters=counters, token_s=TOKEN_S)
        self._lock = threading.Lock()
        self._leader = ""  # name of the worker that is linked, or about to be
        self._talk: PeerConnection | None = None
        self._busy = False

    @property
    def linked(self) -> bool:
        """Whether somebody leads."""
        return self._talk is not None

    def offer(self, worker: str, link_id: str, *, caller: str) -> Offer:
        """An offer for the worker that leads. caller: host of whoever asks.

        Raises Unavailable where another one does, LinksFull, InvalidRequest.
        """
        with self._lock:
            if self._leader not in ("", worker) and self._talk is not None:
                raise Unavailable(f"this worker follows {self._leader} already, and {worker} asked to lead it, too")
            self._leader = worker
        offer = self._listener.offer(link_id or None, caller=caller)
        threading.Thread(target=self._live, args=(offer, worker), name="leader", daemon=True).start()
        return offer

    def report(self, *, busy: bool) -> None:
        """Whether the engine has something of its own to do. From the engine's thread."""
        with self._lock:
            changed, self._busy, talk = busy != self._busy, busy, self._talk
        if changed and talk is not None:
            talk.send(number_message(PairMessageKind.STATE, int(busy)))

    def attend(self) -> None:
        """Tells the leader of jobs whose rows can be computed now, or cannot any more. From the engine's thread."""
        for standing in self._guests.settled():
            if standing.error is not None:
                _REFUSED.tell(details={"text": standing.error.message})
            talk = self._talk
            if talk is not None:
                talk.send(
                    number_message(PairMessageKind.READY if standing.ready else PairMessageKind.REFUSED, standing.guest)
                )

    def close(self) -> None:
        """Ends its link, and takes no other one."""
        self._listener.close()
        talk = self._talk
        if talk is not None:
            talk.link.end(PeerDead("the worker is stopping"))
        _LINES.sum_up()

    def _live(self, offer: Offer, worker: str) -> None:
        try:
            link = self._listener.accept(offer, Deadline.after(2 * TOKEN_S))
        except LinkError as error:
            _LINES.not_taken_up.tell(details={"peer": worker, "text": error.message})
            return
        _LINES.linked.tell({"backend": link.answer.backend}, {"peer": worker})
        with link:
            talk = PeerConnection(link)
            self._begin(talk)
            with link_boundary(link, here="the worker", peer="its peer"):
                self._receive(talk)
            self._end(talk)
            cause = link.cause
            facts = {"peer": worker, "text": cause.message if cause else ""}
            _LINES.ended.tell({"cause": type(cause).__name__}, facts)

    def _begin(self, talk: PeerConnection) -> None:
        with self._lock:
            before, self._talk = self._talk, talk
            talk.send(number_message(PairMessageKind.STATE, int(self._busy)))
        if before is not None:
            before.link.end(PeerDead("the peer has linked anew"))
        self._post(self._guests.clear)

    def _end(self, talk: PeerConnection) -> None:
        with self._lock:
            if self._talk is not talk:
                return
            self._talk = None
        self._post(self._guests.clear)

    def _receive(self, talk: PeerConnection) -> None:
        while True:
            incoming = talk.link.recv(Deadline.after(_SILENCE_S))
            with incoming:
                incoming.wait_all(Deadline.after(_MESSAGE_S))
                self._take_in(talk, incoming)

    def _take_in(self, talk: PeerConnection, incoming: Incoming) -> None:
        layout = incoming.layout
        views = [incoming.view(index) for index in range(len(layout.specs))]
        match kind_of(layout):
            case PairMessageKind.STEP:
                self._step(talk, read_step(layout, views))
            case PairMessageKind.GUEST:
                number, guest = read_guest(layout, views)
                if number in talk.guests or len(talk.guests) >= _MOST_GUESTS:
                    raise ValueError(f"job {number} is here already, or is one of more than {_MOST_GUESTS}")
                talk.guests.add(number)
                self._post(lambda: self._admit(talk, number, lambda: self._guests.admit(number, guest)))
            case PairMessageKind.LEAVE:
                left = read_number(layout, views)
                if left not in talk.guests:
                    raise ValueError(f"job {left} leaves, which is not here")
                talk.guests.remove(left)
                self._post(lambda: self._guests.dismiss(left))
            case PairMessageKind.PING:
                talk.send(number_message(PairMessageKind.PONG))
            case kind:
                raise ValueError(f"a leader says no {kind}")

    def _step(self, talk: PeerConnection, step: RemoteStep) -> None:
        if talk.stepping:
            raise ValueError("a step comes before the last one is answered")
        if self._busy:
            talk.send(number_message(PairMessageKind.DECLINED, step.number))
        else:
            talk.stepping = True
            self._post(lambda: self._compute(talk, step))

    def _admit(self, talk: PeerConnection, number: int, admit: Callable[[], None]) -> None:
        try:
            if talk is self._talk:
                admit()
        except BottegaError as error:
            _REFUSED.tell(details={"text": error.message})
            talk.send(number_message(PairMessageKind.REFUSED, number))

    def _compute(self, talk: PeerConnection, step: RemoteStep) -> None:
        """In the engine's thread."""
        if talk is not self._talk:
            return  # nobody waits for it
        computed = None
        try:
            computed = self._guests.compute(step.rows, step.samples, step.timesteps)
        except Exception as error:  # noqa: BLE001 - the boundary of a step: the leader computes it itself
            _log.warning("rows of the peer could not be computed", extra={"why": f"{type(error).__name__}: {error}"})
        self.attend()  # before the answer: rows that were late for good are not lent again
        talk.stepping = False
        if computed is None:
            talk.send(number_message(PairMessageKind.DECLINED, step.number))
            return
        answer = RemoteNoise(
            number=step.number, places=computed.places, noise=computed.noise, waited_s=computed.waited_s
        )
        talk.send(noise_message(answer))
