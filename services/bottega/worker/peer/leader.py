"""The leader's side of a pair: offloads batch rows to the other worker over a connection that reopens when it is lost.

If the connection is lost, the leader's engine computes the offloaded rows itself.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bottega import kinds
from bottega.engine.parallel.messages import PairMessageKind, job_message, read_noise, step_message
from bottega.engine.parallel.remote_rows import OffloadedRow, OffloadResult, RemoteJob
from bottega.errors import BottegaError
from bottega.model.rows import Row
from bottega.transport import (
    Connection,
    Incoming,
    Limits,
    LinkClient,
    LinkClientHandler,
    LinkClientSettings,
    LinkCounters,
    OfferSource,
    kind_of,
    number_message,
    read_number,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLinkSettings(LinkClientSettings):
    """The settings of the connection to the other worker of a pair.

    Sending fails after `send_s`, because a running follower receives messages at once. Reconnecting is tried every
    `retry_s`, because a stopped follower may stay away for long.
    """

    limits: Limits = field(default_factory=lambda: Limits(slots=4, slot_bytes=1 << 30))
    send_s: float | None = 1.0
    retry_s: float = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class _FollowerState:
    """The state of a follower, as its leader knows it over one connection: the jobs sent to it, and its current step.

    A reopened connection starts with a new state.
    """

    connection: Connection
    remote_jobs: dict[RemoteJob, int] = field(default_factory=dict)
    """Number of each job that was sent over the connection."""
    ready: set[int] = field(default_factory=set)
    """Numbers of the jobs whose rows can be offloaded."""
    busy: bool = True
    """Whether the follower has work of its own."""
    step: int = 0
    """Number of the step whose answer is pending; 0 for none."""
    rows: Sequence[Row] = ()
    sent_s: float = 0.0
    outcome: OffloadResult | None = None
    """Answer to the last step; None until it arrives."""


class Leader(LinkClientHandler):
    """An OffloadTarget: offloads batch rows to the follower.

    Args:
        address: host:port of the follower.
        terms: Properties that both workers must have in common.
    """

    def __init__(
        self,
        address: str,
        *,
        terms: Mapping[str, str],
        offers: OfferSource,
        counters: LinkCounters,
        settings: PeerLinkSettings | None = None,
    ) -> None:
        self._address = address
        self._state: _FollowerState | None = None
        self._changed = threading.Condition()  # guards the state, which two threads change
        self._numbers = itertools.count(1)
        self._complaint = ""
        self._client = LinkClient(
            self,
            peer="its peer",
            request=lambda link_id: offers.request(kinds.WORKER, address, link_id, terms),
            settings=settings or PeerLinkSettings(),
            counters=counters,
        )

    def start(self) -> None:
        """Open the connection in the background, and again whenever it is lost."""
        self._client.start()

    def stop(self) -> None:
        """Close the link."""
        self._client.close()

    @property
    def wants_link(self) -> bool:
        """Always True."""
        return True

    @property
    def linked(self) -> bool:
        """Whether the connection is open."""
        return self._state is not None

    @property
    def name(self) -> str:
        return self._client.service or self._address

    @property
    def free(self) -> bool:
        state = self._state
        return state is not None and not state.busy and not state.step

    @property
    def awaits_result(self) -> bool:
        state = self._state
        return state is not None and state.step != 0

    def accepts(self, remote_job: RemoteJob) -> bool:
        state = self._state
        if state is None:
            return False
        if remote_job not in state.remote_jobs:
            number = state.remote_jobs[remote_job] = next(self._numbers)
            if not remote_job.parts:
                state.ready.add(number)  # the link keeps the order, so rows arrive after the job
            state.connection.send(job_message(number, remote_job))
        return state.remote_jobs[remote_job] in state.ready

    def forget(self, remote_job: RemoteJob) -> None:
        state = self._state
        number = state.remote_jobs.pop(remote_job, None) if state is not None else None
        if state is not None and number is not None:
            state.ready.discard(number)
            state.connection.send(number_message(PairMessageKind.LEAVE, number))

    def offload(self, rows: Sequence[OffloadedRow]) -> bool:
        state = self._state
        if state is None or any(offloaded.remote_job not in state.remote_jobs for offloaded in rows):
            return False  # the link was lost meanwhile
        with self._changed:
            state.step, state.outcome = next(self._numbers), None
            state.rows, state.sent_s = [offloaded.row for offloaded in rows], time.monotonic()
        return state.connection.send(step_message(state.step, rows, state.remote_jobs))

    def result(self, timeout_s: float) -> OffloadResult | None:
        with self._changed:
            self._changed.wait_for(lambda: not self.awaits_result, timeout_s)
            state = self._state
            return state.outcome if state is not None else None

    def on_open(self, connection: Connection) -> None:
        """Start with an empty state, because the follower knows none of the jobs over a new connection."""
        assert connection.link is not None
        choice = connection.link.backend_choice
        _log.info("linked to the peer", extra={"peer": self.name, "backend": choice.backend, "why": choice.reason})
        self._complaint = ""
        self._state = _FollowerState(connection=connection)

    def on_end(self, cause: BottegaError) -> None:
        """Log why the connection is lost. An absent follower is tried every second, but logged once."""
        with self._changed:
            before, self._state = self._state, None
            self._changed.notify_all()
        facts = {"peer": self.name, "cause": type(cause).__name__, "text": cause.message}
        if before is not None:
            _log.warning("the other worker of the pair is lost; this worker goes on alone", extra=facts)
        elif cause.message != self._complaint:
            self._complaint = cause.message
            _log.warning("the other worker of the pair cannot be reached; this worker goes on alone", extra=facts)

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Handle a message of the newest connection."""
        state = self._state
        assert state is not None, "messages come after on_open"
        layout = incoming.layout
        with incoming:
            parts = connection.wait_all_parts(incoming)
            kind = PairMessageKind(kind_of(layout))
            if kind is PairMessageKind.NOISE:
                answer = read_noise(layout, parts)
                noise = dict(zip(answer.places, answer.noise, strict=True))
                self._settle(state, answer.number, noise, waited_s=answer.waited_s)
                return
            number = read_number(layout, parts)
        match kind:
            case PairMessageKind.DECLINED:
                self._settle(state, number, None)
            case PairMessageKind.STATE:
                state.busy = number != 0
            case PairMessageKind.READY:
                state.ready.add(number)
            case PairMessageKind.REFUSED:
                state.ready.discard(number)
            case _:
                raise ValueError(f"a follower must not send a {kind} message")

    def _settle(
        self, state: _FollowerState, number: int, noise: dict[int, Tensor] | None, *, waited_s: float = 0.0
    ) -> None:
        """Store the answer to a step."""
        with self._changed:
            if number != state.step:
                raise ValueError(f"the follower answered step {number}, which was not requested")
            if noise is not None:
                if any(place >= len(state.rows) for place in noise):
                    raise ValueError(f"the follower's answer to step {number} has a row that was not requested")
                rows = {state.rows[place]: tensor.to(state.rows[place].sample) for place, tensor in noise.items()}
                if any(tensor.shape != row.sample.shape for row, tensor in rows.items()):
                    raise ValueError(f"the follower's answer to step {number} has a row of another shape")
                state.outcome = OffloadResult(noise=rows, seconds=max(0.0, time.monotonic() - state.sent_s - waited_s))
            state.step, state.rows = 0, ()
            self._changed.notify_all()
