"""The requests of an engine to the workers that compute one stage for it, over connections that reopen when lost.

Each request goes to the connected stage worker with the fewest of them. If the connection is lost, the request goes to
another one, or to the same one again. Only the request that was being computed may be the reason of the loss.

The engine's thread makes requests, and the connections' threads answer them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bottega.addons.interface.store_link import StoreLink, renew_links
from bottega.device_links.tensor_messages import TensorMessage
from bottega.errors import (
    BottegaError,
    DeadlineExceeded,
    InternalError,
    LinkClosed,
    LinkError,
    PeerDead,
    Poisoned,
    QueueFull,
    Unavailable,
)
from bottega.transport import Connection, Incoming, Limits, LinkClientSettings, LinkCounters, OfferSource, kind_of
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.worker.stages.messages import (
    DecodedPixels,
    EncodedPrompts,
    StageMessageKind,
    cancel_message,
    read_begun,
    read_conditions_answer,
    read_pixels,
    read_refused,
)

# Seconds for which a request waits for a stage worker to be connected. The gateway gives no job to a worker while no
# stage worker is in the fleet, so one has left just now.
_PROVIDER_S = 10.0
# Stage workers that may be lost while they compute a request, or refuse it, so that it cannot break all of them. The
# gateway gives up a job after as many deaths of workers that ran it alone.
_MAX_LOSSES = 2
# Stage workers that may be lost before they report that they compute a request. Most likely another one was the reason.
_MAX_MOVES = 16
# Seconds without progress after which a stage worker with requests counts as lost, even if it answers pings. It beats
# between two layers of a network, and its own front replaces an engine that hangs after `hang_s` of 30 s.
_STALL_S = 60.0

Answer = EncodedPrompts | DecodedPixels


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLinkSettings(LinkClientSettings):
    """The settings of a connection to a stage worker. Slots grow as messages need it."""

    limits: Limits = field(default_factory=lambda: Limits(slots=4, slot_bytes=1 << 30))


@dataclass(slots=True, kw_only=True, eq=False)
class StageCall:
    """A request, and what became of it."""

    number: int
    message: TensorMessage
    link: StageLink | None = None
    """The connection over which it was sent; None while it waits for one."""
    refused_by: StageLink | None = None
    """The connection that lost or refused it last."""
    waits_since_s: float = 0.0
    """Time on a monotonic clock since which it waits for a connection."""
    begun: bool = False
    """Whether the stage worker has begun to compute it."""
    deaths: int = 0
    """Number of stage workers that died while they computed it."""
    losses: int = 0
    """Number of stage workers that were lost while they computed it, or refused it."""
    moves: int = 0
    """Number of stage workers that were lost before they computed it."""
    answer: Answer | None = None
    error: BottegaError | None = None
    worker: str = ""
    """Name of the stage worker that answered."""

    @property
    def done(self) -> bool:
        """Whether it was answered, or has failed."""
        return self.answer is not None or self.error is not None


class StageLink(StoreLink):
    """A connection to one stage worker. Any thread may call it."""

    def __init__(
        self,
        store: ServiceAddress,
        *,
        owner: StageClient,
        offers: OfferSource,
        counters: LinkCounters,
        terms: Mapping[str, str],
    ) -> None:
        self._owner = owner
        self._progress, self._progress_s = 0, time.monotonic()
        super().__init__(
            store,
            kind=owner.kind,
            title=f"a worker with the role {owner.kind}",
            offers=offers,
            settings=StageLinkSettings(),
            counters=counters,
            terms=terms,
        )
        self.start()

    def ask(self, call: StageCall) -> bool:
        """Send a request. Return False if the connection is not open."""
        connection = self._connection
        if not self.awaits_answer:
            self._progress_s = time.monotonic()

        def refuse(error: BottegaError) -> None:
            self._owner.on_failure(self, call.number, error)

        return connection is not None and connection.send(call.message, on_failure=refuse)

    def cancel(self, number: int) -> None:
        """Tell the stage worker that a request needs no answer."""
        connection = self._connection
        if connection is not None:
            connection.send(cancel_message(number))

    def on_open(self, connection: Connection) -> None:
        super().on_open(connection)
        self._owner.on_link()

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Handle an answer."""
        layout = incoming.layout
        with incoming:
            parts = connection.wait_all_parts(incoming)
            self._progress_s = time.monotonic()
            match StageMessageKind(kind_of(layout)):
                case StageMessageKind.CONDITIONS:
                    encoded = read_conditions_answer(layout, parts)
                    self._owner.on_answer(self, encoded.number, encoded)
                case StageMessageKind.PIXELS:
                    decoded = read_pixels(layout, parts)
                    self._owner.on_answer(self, decoded.number, decoded)
                case StageMessageKind.BEGUN:
                    self._owner.on_begun(self, read_begun(layout, parts))
                case StageMessageKind.REFUSED:
                    self._owner.on_failure(self, *read_refused(layout, parts))
                case kind:
                    raise ValueError(f"a stage worker must not send a {kind} message")

    @property
    def awaits_answer(self) -> bool:
        """Whether requests are pending: whether the stage worker makes progress is then checked all the time."""
        return self._owner.pending(self) > 0

    def on_pong(self, progress: int) -> None:
        """Record the stage worker's progress counter."""
        if progress != self._progress:
            self._progress, self._progress_s = progress, time.monotonic()

    def check(self) -> None:
        """Raise DeadlineExceeded if the stage worker answers pings but makes no progress."""
        if self.awaits_answer and time.monotonic() - self._progress_s > _STALL_S:
            raise DeadlineExceeded(f"{self.store.name} made no progress for {_STALL_S:g} s")

    def on_end(self, cause: BottegaError) -> None:
        super().on_end(cause)
        self._owner.on_lost(self, cause)


class StageClient:
    """The connections to all workers that compute one stage of a model.

    Args:
        kind: The stage, which is their kind in the fleet.
        terms: Properties that they must share with this worker.
    """

    def __init__(self, kind: str, *, offers: OfferSource, counters: LinkCounters, terms: Mapping[str, str]) -> None:
        self.kind = kind
        self._offers = offers
        self._counters = counters
        self._terms = terms
        self._changed = threading.Condition()
        self._links: dict[str, StageLink] = {}  # by name
        self._calls: dict[int, StageCall] = {}  # those that are not done
        self._numbers = itertools.count(1)
        self.answered = 0
        """Number of requests that were answered with a result."""
        self.lost = 0
        """Number of times that a stage worker was lost while it computed a request, or refused one."""

    @property
    def linked(self) -> int:
        """Number of connected stage workers."""
        return sum(link.open for link in list(self._links.values()))

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        """Connect to these stage workers, and to no others. Any thread may call it."""
        with self._changed:
            self._links, gone = renew_links(self._links, services, self._open)
        for link in gone:
            link.close()

    def call(self, message_of: Callable[[int], TensorMessage]) -> StageCall:
        """Make a request.

        Args:
            message_of: Returns the message with this number.
        """
        number = next(self._numbers)
        call = StageCall(number=number, message=message_of(number), waits_since_s=time.monotonic())
        with self._changed:
            self._calls[number] = call
            self._send_waiting()
        return call

    def check(self, call: StageCall) -> bool:
        """Return whether a request was answered.

        Raises:
            BottegaError: It never will be.
        """
        if call.error is None and call.answer is None and call.link is None:
            waited_s = time.monotonic() - call.waits_since_s
            if waited_s > _PROVIDER_S:
                self.drop(call)
                raise Unavailable(f"no worker with the role {self.kind} was connected for {_PROVIDER_S:g} s")
        if call.error is not None:
            raise call.error
        return call.answer is not None

    def drop(self, call: StageCall) -> None:
        """Forget a request, whose answer is not needed any more. May be called again."""
        with self._changed:
            is_pending = self._calls.pop(call.number, None) is not None
        if is_pending and call.link is not None:
            call.link.cancel(call.number)

    def wait(self, calls: Sequence[StageCall], timeout_s: float) -> None:
        """Wait until one of these requests is done, at most for this time."""
        with self._changed:
            self._changed.wait_for(lambda: any(call.done for call in calls), timeout_s)

    def pending(self, link: StageLink) -> int:
        """Return how many requests a stage worker has not answered."""
        return sum(call.link is link for call in list(self._calls.values()))

    # Called by the connections' threads.

    def on_link(self) -> None:
        """Send the requests that wait for a connection."""
        with self._changed:
            self._send_waiting()

    def on_answer(self, link: StageLink, number: int, answer: Answer) -> None:
        """Record an answer. One that came too late is ignored."""
        with self._changed:
            call = self._calls.get(number)
            if call is not None and call.link is link:
                del self._calls[number]
                call.answer, call.worker = answer, link.store.name
                self.answered += 1
                self._changed.notify_all()

    def on_begun(self, link: StageLink, number: int) -> None:
        """Record that a stage worker computes a request now."""
        with self._changed:
            call = self._calls.get(number)
            if call is not None and call.link is link:
                call.begun = True

    def on_failure(self, link: StageLink, number: int, error: BottegaError) -> None:
        """Record that a stage worker refused a request. Another one may serve it, unless its inputs are the reason."""
        with self._changed:
            call = self._calls.get(number)
            if call is None or call.link is not link:
                return
            if isinstance(error, (Unavailable, LinkError, QueueFull, InternalError)):
                self._lose(call, error)
                self._send_waiting()
            else:
                self._fail(call, error)

    def on_lost(self, link: StageLink, cause: BottegaError) -> None:
        """Send the requests of a lost connection to another stage worker, or to the same one again.

        A stage worker that was stopped did not die with the requests.
        """
        with self._changed:
            for call in [call for call in self._calls.values() if call.link is link]:
                if isinstance(cause, LinkClosed):
                    self._release(call)
                elif call.begun:
                    self._lose(call, cause)
                else:
                    self._move(call, cause)
            self._send_waiting()

    # Called under the lock.

    def _open(self, store: ServiceAddress) -> StageLink:
        return StageLink(store, owner=self, offers=self._offers, counters=self._counters, terms=self._terms)

    def _send_waiting(self) -> None:
        for call in list(self._calls.values()):
            if call.link is None:
                self._send(call)

    def _send(self, call: StageCall) -> None:
        links = [link for link in self._links.values() if link.open]
        for link in sorted(links, key=lambda link: (link is call.refused_by, self.pending(link))):
            call.link = link
            if link.ask(call):
                return
            call.link = None

    def _release(self, call: StageCall) -> None:
        call.refused_by, call.link, call.waits_since_s, call.begun = call.link, None, time.monotonic(), False

    def _lose(self, call: StageCall, error: BottegaError) -> None:
        self._release(call)
        call.losses += 1
        call.deaths += isinstance(error, PeerDead)
        self.lost += 1
        if call.deaths >= _MAX_LOSSES:
            self._fail(
                call, Poisoned(f"{call.deaths} workers with the role {self.kind} died while they computed this job")
            )
        elif call.losses >= _MAX_LOSSES:
            lost = f"{call.losses} workers with the role {self.kind} were lost with the job, or refused it"
            is_internal = isinstance(error, InternalError)
            self._fail(call, error if is_internal else Unavailable(f"{lost}: {error.message}"))
        self._changed.notify_all()

    def _move(self, call: StageCall, error: BottegaError) -> None:
        self._release(call)
        call.moves += 1
        if call.moves >= _MAX_MOVES:
            lost = f"{call.moves} workers with the role {self.kind} were lost before they computed the job"
            self._fail(call, Unavailable(f"{lost}: {error.message}"))
        self._changed.notify_all()

    def _fail(self, call: StageCall, error: BottegaError) -> None:
        self._calls.pop(call.number, None)
        call.error = error
        self._changed.notify_all()
