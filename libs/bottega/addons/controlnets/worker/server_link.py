"""The connection of a worker's engine to one ControlNet server: requests leases and steps, and receives responses.

A lease is the sessions that one request has at the server. A server that makes no progress for `stall_s` counts as
lost, even if it answers pings. Results of steps arrive point by point: the connection's thread fills them, and the
engine's thread reads them.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bottega import kinds
from bottega.addons.controlnets.engine.messages import (
    ControlMessageKind,
    ControlStep,
    OpenedSession,
    point_of,
    read_opened,
    read_refusal,
    read_residuals_head,
    step_message,
)
from bottega.addons.controlnets.engine.provider import ControlServer
from bottega.addons.controlnets.worker.step_result import StepResult
from bottega.addons.interface.store_link import StoreLink
from bottega.device_links.tensor_messages import TensorMessage, tensor_of
from bottega.errors import BottegaError, DeadlineExceeded, LayoutMismatch, LeaseExpired, LinkClosed, MessageAborted
from bottega.rpc.status import from_job_error, job_error_from_json
from bottega.transport import (
    Connection,
    Incoming,
    Limits,
    LinkClientSettings,
    LinkCounters,
    OfferSource,
    Part,
    WholeMessage,
    kind_of,
    number_message,
)

_log = logging.getLogger(__name__)


# A quiet link is checked several times a second. A check that is later than this shows that this process itself was
# stopped, and that messages of the server are still to be read.
_LATE_S = 1.0
# Weight of the newest measurement in a running average.
_WEIGHT = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLinkSettings(LinkClientSettings):
    """The settings of a connection to a ControlNet server."""

    limits: Limits = field(default_factory=lambda: Limits(slots=8, slot_bytes=1 << 30))
    stall_s: float = 20.0
    """Seconds without progress after which a server with pending requests counts as lost.

    It must be longer than the slowest block of a network, or the embedding of a control image, takes."""


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseStatus:
    """The server's response to a request for a lease: opened, refused, or still pending."""

    opened: bool = False
    sessions: tuple[OpenedSession, ...] = ()
    """Facts about each session once it is opened, in the order of the request."""
    refusal: BottegaError | None = None


class ChangeCondition:
    """A counter of events with which the threads of connections wake the engine's thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """Number of events so far."""
        return self._count

    def notify(self) -> None:
        """Count an event, and wake the engine's thread."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> None:
        """Return when the count is above `seen`, or after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > seen, timeout_s)


class ServerLink(StoreLink):
    """A connection to one server, used by one thread.

    Messages may be sent right after `start`. Once `lost` is set, the connection is not used again.

    Args:
        link_id: ID of the connection that this one replaces.
    """

    def __init__(
        self,
        server: ControlServer,
        *,
        offers: OfferSource,
        changes: ChangeCondition,
        settings: ControlLinkSettings,
        counters: LinkCounters,
        link_id: str = "",
    ) -> None:
        self.answer_s = 0.0
        """Recent seconds from a request to its complete response; 0 if unknown."""
        self.transfer_s = 0.0
        """Recent seconds from the beginning of a response to its end; 0 on the same host, where memory is shared."""
        self._changes = changes
        self._settings = settings
        self._numbers = itertools.count(1)
        self._leases: dict[int, LeaseStatus] = {}  # those without an answer
        self._results: dict[int, StepResult] = {}
        self._outstanding: list[StepResult] = []
        self._progress = 0
        self._progress_s = self._checked_s = 0.0
        self._lost: BottegaError | None = None
        super().__init__(
            server,
            kind=kinds.CONTROLNET,
            title="a ControlNet server",
            offers=offers,
            settings=settings,
            counters=counters,
            link_id=link_id,
        )

    @property
    def lost(self) -> BottegaError | None:
        """Why the connection ended; None while it has not."""
        return self._lost or self._client.connection.cause

    @property
    def link_id(self) -> str:
        """ID of the newest connection."""
        return self._client.link_id

    @property
    def wants_link(self) -> bool:
        """Whether the connection should be open. A lost one stays closed: its sessions move to another server."""
        return self._lost is None

    @property
    def slot_bytes(self) -> int:
        """Maximum bytes of one response."""
        return self._settings.limits.slot_bytes

    def open_lease(self, lease: int, message: TensorMessage) -> LeaseStatus:
        """Request a lease in the background. The returned status has the outcome, unless the connection is lost."""
        answer = self._leases[lease] = LeaseStatus()
        self._send(message, lease=lease)
        return answer

    def close_lease(self, lease: int) -> None:
        """End a lease in the background."""
        self._leases.pop(lease, None)
        self._send(number_message(ControlMessageKind.CLOSE, lease))

    def ask(self, step: ControlStep, result: StepResult) -> None:
        """Request a step, under a new number, in the background. The response goes into `result`."""
        if not self._results:
            self._progress_s = time.monotonic()
        self._results[step.number] = result
        self._outstanding.append(result)
        self._send(step_message(step), step=step.number)

    def number(self) -> int:
        """Return a number that no other step of this connection has."""
        return next(self._numbers)

    @property
    def has_slots_to_spare(self) -> bool:
        """Whether responses occupy, or will occupy, less than half of the slots."""
        return len(self._outstanding) < self._settings.limits.slots // 2

    def spare_slots(self) -> None:
        """Copy responses to free their slots if they occupy half of them, because the server always needs free ones.

        Call it only while nothing reads the responses.
        """
        self._outstanding = [result for result in self._outstanding if result.holds_memory]
        if not self.has_slots_to_spare:
            for result in self._outstanding:
                if result.whole:
                    result.keep_copy()
            self._outstanding = [result for result in self._outstanding if result.holds_memory]

    def end(self) -> None:
        self._client.close()
        self._client.join()

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Handle a message. Residuals are passed on one by one as they arrive."""
        if kind_of(incoming.layout) == ControlMessageKind.RESIDUALS:
            self._take_residuals(connection, incoming)
            return
        with incoming:
            self._take(incoming, connection.wait_all_parts(incoming))
        self._changes.notify()

    @property
    def awaits_answer(self) -> bool:
        """Whether a step is being computed: whether the server makes progress is then checked all the time."""
        return bool(self._results)

    def on_pong(self, progress: int) -> None:
        """Record the server's progress counter, which pongs contain."""
        if progress != self._progress:
            self._progress, self._progress_s = progress, time.monotonic()

    def on_disconnect(self) -> None:
        """Wake the engine, which moves the sessions to another server at once."""
        self._changes.notify()

    def on_end(self, cause: BottegaError) -> None:
        if not isinstance(cause, LinkClosed):
            super().on_end(cause)
        self._lost = cause
        self._client.close()
        self._changes.notify()

    def _send(self, message: WholeMessage, *, lease: int | None = None, step: int | None = None) -> None:
        def refuse(error: BottegaError) -> None:
            self._refuse(error, lease=lease, step=step)

        if not self._client.connection.send(message, on_failure=refuse):
            self._changes.notify()  # the link is lost

    def _take(self, incoming: Incoming, parts: Sequence[Part]) -> None:
        layout = incoming.layout
        match ControlMessageKind(kind_of(layout)):
            case ControlMessageKind.OPENED:
                lease, sessions = read_opened(layout, parts)
                if (answer := self._leases.pop(lease, None)) is not None:
                    answer.sessions = sessions
                    answer.opened = True  # last, because the engine's thread reads it
            case ControlMessageKind.REFUSED:
                refusal = read_refusal(layout, parts)
                error = from_job_error(job_error_from_json(refusal.error))
                self._refuse(error, lease=refusal.lease, step=refusal.step)
            case kind:
                raise ValueError(f"a ControlNet server must not send a {kind} message")

    def _refuse(self, error: BottegaError, *, lease: int | None, step: int | None) -> None:
        """Record that the server refused a lease or a step. The other one is None."""
        if lease is not None and (answer := self._leases.pop(lease, None)) is not None:
            answer.refusal = error
        if step is not None and (result := self._results.pop(step, None)) is not None:
            _log.warning("a server refused a step", extra={"service": self.store.name, "text": error.message})
            result.refused = True
            self._progress_s = time.monotonic()
        self._changes.notify()

    def _take_residuals(self, connection: Connection, incoming: Incoming) -> None:
        connection.wait(incoming, 1)
        number, shared = read_residuals_head(incoming.layout, incoming.part(0))
        result = self._results.get(number)
        if result is None:
            raise ValueError(f"an answer to step {number} arrived, which was not requested")
        if result.layout.digest != incoming.layout.digest:
            raise LayoutMismatch(f"the answer to step {number} has residuals whose shapes do not fit the model")
        result.shared = shared
        result.begin(incoming.release)
        computed_s = 0.0
        try:
            for index, spec in enumerate(incoming.layout.specs[1:], start=1):
                connection.wait(incoming, index + 1, silence_s=self._settings.stall_s)
                self._progress_s = time.monotonic()
                try:
                    part = incoming.part(index)
                except LeaseExpired:
                    continue  # its slot was given back, because no row needs it any more
                if (point := point_of(spec)) is None:
                    computed_s = float(tensor_of(spec, part)) / 1e6
                    continue
                result.put(point, tensor_of(spec, part))
                self._changes.notify()
        except MessageAborted:
            return  # the server refuses the step in its next message
        self._results.pop(number, None)
        self.answer_s = smoothed(self.answer_s, self._progress_s - result.times.asked_s)
        if connection.link is not None and not connection.link.backend_choice.backend.within_host:
            self.transfer_s = smoothed(self.transfer_s, max(0.0, self._progress_s - incoming.began - computed_s))

    def check(self) -> None:
        """Raise DeadlineExceeded if the server answers pings but makes no progress on the requested steps."""
        now_s = time.monotonic()
        late, self._checked_s = now_s - self._checked_s > _LATE_S, now_s
        if late:
            self._progress_s = now_s  # this process was stopped itself, and has received nothing meanwhile
        still_s = now_s - self._progress_s
        if self._results and still_s > self._settings.stall_s:
            raise DeadlineExceeded(
                f"ControlNet server {self.store.name} has made no progress on a pending answer for {still_s:.1f} s"
            )


def smoothed(before: float, now: float) -> float:
    """Return the running average after a new measurement; `before` is 0 for the first one."""
    return now if before == 0.0 else before + _WEIGHT * (now - before)
