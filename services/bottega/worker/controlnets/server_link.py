"""One ControlNet server as a worker's engine sees it: leases and steps asked for by number, and their answers.

A server that computes nothing within `stall_s` is given up, though it answers pings.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bottega import kinds
from bottega.diffusion.controlnets.messages import ControlMessageKind, ControlStep, read_refusal, step_message
from bottega.diffusion.controlnets.provider import ControlServer
from bottega.diffusion.tensor_messages import TensorMessage, tensor_of
from bottega.errors import BottegaError, DeadlineExceeded, LayoutMismatch, LeaseExpired, LinkClosed
from bottega.rpc.status import from_job_error, job_error_from_json
from bottega.transport import (
    Connection,
    Incoming,
    Limits,
    LinkClient,
    LinkClientHandler,
    LinkClientSettings,
    LinkCounters,
    OfferSource,
    Part,
    WholeMessage,
    kind_of,
    number_message,
    read_number,
)
from bottega.worker.controlnets.step_result import StepResult

_log = logging.getLogger(__name__)

# A quiet link is looked at several times a second. One look that is later than this says that this process itself was
# stopped: what the server has said meanwhile is read now.
_LATE_S = 1.0
# Weight of the newest measurement in a running average.
_WEIGHT = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLinkSettings(LinkClientSettings):
    """stall_s: after which a server is given up whose forwards show no sign of life though it owes an answer: longer
    than the longest block of a network takes, or the embedding of a control image.
    """

    limits: Limits = field(default_factory=lambda: Limits(slots=8, slot_bytes=1 << 30))
    stall_s: float = 20.0


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseStatus:
    """What the server has said of a lease that it was asked for: that it is open, or why it will not be."""

    opened: bool = False
    refusal: BottegaError | None = None


class ChangeCondition:
    """A counter of events; a thread that has seen a count may wait for a higher one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0

    @property
    def count(self) -> int:
        """How much has happened."""
        return self._count

    def notify(self) -> None:
        """Something has happened."""
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, seen: int, timeout_s: float) -> None:
        """Returns when more than `seen` has happened, or after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._count > seen, timeout_s)


class ServerLink(LinkClientHandler):
    """`start` it, use it at once: what is sent waits for the link. One thread uses it; when `lost`, it is over.

    link_id: of the link that it replaces. answer_s: seconds from a step to its whole answer, of late; 0 is not known.
    transfer_s: from the answer's beginning on; 0 within this host, where the wait is for a processor.
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
        self.server = server
        self.answer_s = self.transfer_s = 0.0
        self._changes = changes
        self._settings = settings
        self._numbers = itertools.count(1)
        self._leases: dict[int, LeaseStatus] = {}  # that were not answered yet
        self._results: dict[int, StepResult] = {}
        self._outstanding: list[StepResult] = []
        self._progress = 0
        self._progress_s = self._checked_s = 0.0
        self._lost: BottegaError | None = None
        self._client = LinkClient(
            self,
            peer=f"ControlNet server {server.name}",
            request=lambda link_id: offers.request(kinds.CONTROLNET, server.address, link_id),
            settings=settings,
            counters=counters,
            link_id=link_id,
        )

    @property
    def lost(self) -> BottegaError | None:
        """Why the link has ended, once it has."""
        return self._lost or self._client.connection.cause

    @property
    def link_id(self) -> str:
        """Of the newest link."""
        return self._client.link_id

    @property
    def wants_link(self) -> bool:
        """Only one: what was begun on it moves to another server when it is lost."""
        return self._lost is None

    @property
    def slot_bytes(self) -> int:
        """Most bytes of one answer."""
        return self._settings.limits.slot_bytes

    def start(self) -> None:
        """Opens the link in the background."""
        self._client.start()

    def open(self, lease: int, message: TensorMessage) -> LeaseStatus:
        """Asks for a lease, in the background; what it returns will say what came of it, unless the link is lost."""
        answer = self._leases[lease] = LeaseStatus()
        self._send(message, lease=lease)
        return answer

    def close(self, lease: int) -> None:
        """Ends a lease, in the background."""
        self._leases.pop(lease, None)
        self._send(number_message(ControlMessageKind.CLOSE, lease))

    def ask(self, step: ControlStep, result: StepResult) -> None:
        """Asks for a step, whose number is new, in the background; the answer goes there."""
        if not self._results:
            self._progress_s = time.monotonic()
        self._results[step.number] = result
        self._outstanding.append(result)
        self._send(step_message(step), step=step.number)

    def number(self) -> int:
        """A number that no other step of the link has."""
        return next(self._numbers)

    @property
    def has_slots_to_spare(self) -> bool:
        """Whether answers hold, or will hold, less than half of the slots."""
        return len(self._outstanding) < self._settings.limits.slots // 2

    def spare_slots(self) -> None:
        """Copies answers where they hold half of the slots: the server must always have some to answer into.

        To be called when nobody looks at what is in them.
        """
        self._outstanding = [result for result in self._outstanding if result.holds_memory]
        if not self.has_slots_to_spare:
            for result in self._outstanding:
                if result.whole:
                    result.keep_copy()
            self._outstanding = [result for result in self._outstanding if result.holds_memory]

    def end(self) -> None:
        """Closes the link, and tells the server."""
        self._client.close()
        self._client.join()

    def on_open(self, connection: Connection) -> None:
        """The server can be asked."""
        assert connection.link is not None
        choice = connection.link.backend_choice
        facts = {"server": self.server.name, "backend": choice.backend, "why": choice.reason}
        _log.info("linked to a ControlNet server", extra=facts)

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Residuals are handed on point by point."""
        if kind_of(incoming.layout) == ControlMessageKind.RESIDUALS:
            self._take_residuals(connection, incoming)
            return
        with incoming:
            self._take(incoming, connection.wait_all_parts(incoming))
        self._changes.notify()

    def on_pong(self, progress: int) -> None:
        """The server has counted so many signs of life of its forwards."""
        if progress != self._progress:
            self._progress, self._progress_s = progress, time.monotonic()

    def on_disconnect(self) -> None:
        """Sessions that wait for an answer move to another server at once."""
        self._changes.notify()

    def on_end(self, cause: BottegaError) -> None:
        """Nobody uses it any more."""
        if not isinstance(cause, LinkClosed):
            _log.warning("a ControlNet server is lost", extra={"server": self.server.name, "text": cause.message})
        self._lost = cause
        self._client.close()
        self._changes.notify()

    def _send(self, message: WholeMessage, *, lease: int | None = None, step: int | None = None) -> None:
        def refuse(error: BottegaError) -> None:
            self._refuse(error, lease=lease, step=step)

        if not self._client.connection.send(message, on_failure=refuse):
            self._changes.notify()  # it is lost

    def _take(self, incoming: Incoming, parts: Sequence[Part]) -> None:
        layout = incoming.layout
        match ControlMessageKind(kind_of(layout)):
            case ControlMessageKind.OPENED:
                if (answer := self._leases.pop(read_number(layout, parts), None)) is not None:
                    answer.opened = True
            case ControlMessageKind.REFUSED:
                refusal = read_refusal(layout, parts)
                error = from_job_error(job_error_from_json(refusal.error))
                self._refuse(error, lease=refusal.lease, step=refusal.step)
            case kind:
                raise ValueError(f"a server sends no {kind} message")

    def _refuse(self, error: BottegaError, *, lease: int | None, step: int | None) -> None:
        """A lease will not be opened, or a step not be computed."""
        if lease is not None and (answer := self._leases.pop(lease, None)) is not None:
            answer.refusal = error
        if step is not None and (result := self._results.pop(step, None)) is not None:
            _log.warning("a step was refused", extra={"server": self.server.name, "text": error.message})
            result.refused = True
            self._progress_s = time.monotonic()
        self._changes.notify()

    def _take_residuals(self, connection: Connection, incoming: Incoming) -> None:
        connection.wait(incoming, 1)
        number = read_number(incoming.layout, [incoming.part(0)])
        result = self._results.pop(number, None)
        if result is None:
            raise ValueError(f"the answer to step {number}, which was not asked for")
        if result.layout.digest != incoming.layout.digest:
            raise LayoutMismatch(f"the answer to step {number} has other residuals than the model takes")
        result.begin(incoming.release)
        for index in range(1, len(incoming.layout.specs)):
            connection.wait(incoming, index + 1)
            try:
                part = incoming.part(index)
            except LeaseExpired:
                continue  # nobody reads it any more
            result.put(result.points - index, tensor_of(incoming.layout.specs[index], part))
            self._changes.notify()
        self._progress_s = time.monotonic()
        self.answer_s = smoothed(self.answer_s, self._progress_s - result.times.asked_s)
        if connection.link is not None and not connection.link.backend_choice.backend.within_host:
            self.transfer_s = smoothed(self.transfer_s, self._progress_s - incoming.began)

    def check(self) -> None:
        """Raises DeadlineExceeded when the server answers pings, and computes nothing of what it was asked for."""
        now_s = time.monotonic()
        late, self._checked_s = now_s - self._checked_s > _LATE_S, now_s
        if late:
            self._progress_s = now_s  # this process was stopped itself, and received nothing that the server sent
        still_s = now_s - self._progress_s
        if self._results and still_s > self._settings.stall_s:
            raise DeadlineExceeded(
                f"ControlNet server {self.server.name} owes an answer and has computed nothing for {still_s:.1f} s"
            )


def smoothed(before: float, now: float) -> float:
    """Return a running average of a measurement; `before` is 0 for the first one."""
    return now if before == 0.0 else before + _WEIGHT * (now - before)
