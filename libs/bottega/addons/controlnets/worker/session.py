"""The sessions of requests with ControlNets, local or on servers: which servers were tried, and what they answered.

Only the engine's thread uses them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from bottega.addons.controlnets.engine.provider import ControlCall, ControlInput, ControlRecord, ControlServer
from bottega.addons.controlnets.worker.server_link import LeaseStatus, ServerLink
from bottega.addons.controlnets.worker.step_result import CallTimes, StepResult
from bottega.engine.spans import MAX_SPANS
from bottega.errors import BottegaError
from bottega.model.rows import Half, Row


@dataclass(slots=True, kw_only=True, eq=False)
class SessionLease:
    """The sessions that one request has, or opens, at one server."""

    number: int
    link: ServerLink
    sessions: Sequence[PlacedSession]
    answer: LeaseStatus = field(default_factory=LeaseStatus)
    opened: bool = False
    """Whether the sessions were told that the server has opened them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Answer:
    """A reference to the residuals of one row and step in a result, which may still be arriving."""

    step: int
    result: StepResult
    place: int
    """Index among the rows of the result."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Answers:
    """The residuals that a server sent, or will send, for one row: for the newest step and for the step before.

    A row is one half, conditional or unconditional, of one image.
    """

    newest: _Answer | None = None
    before: _Answer | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class PlacedSession:
    """The use of one ControlNet by one request, in this process or on a server. The engine holds it as a handle."""

    control: ControlInput
    number: int = 0
    """Number of the session at the lease's server."""
    tried: list[str] = field(default_factory=list)
    """Names of the servers that were asked to run it, lost ones included."""
    lease: SessionLease | None = None
    local: Hashable | None = None
    """Handle where the ControlNet runs in this process."""
    error: BottegaError | None = None
    """Why no server can run it any more; None while one can."""
    pipelined: bool = False
    """Whether a step may use the residuals of the previous step instead of waiting for its own."""
    waited_s: float = 0.0
    """Seconds that forward passes waited for it."""
    ran: list[str] = field(default_factory=list)
    """Names of the servers that have run it; an empty name stands for this process."""
    _calls: dict[tuple[int, CallTimes], str] = field(default_factory=dict)
    _answers: dict[tuple[Hashable, Half], _Answers] = field(default_factory=dict)
    _stale: set[tuple[Hashable, int]] = field(default_factory=set)

    @property
    def next_server(self) -> ControlServer | None:
        """The best server that was not tried."""
        return next((server for server in self.control.hosts.servers if server.name not in self.tried), None)

    @property
    def record(self) -> ControlRecord:
        """The facts for the provenance."""
        return ControlRecord(
            waited_s=self.waited_s,
            stale_steps=len(self._stale),
            pipelined=self.pipelined,
            servers=tuple(self.ran),
            calls=tuple(
                ControlCall(server=server, step=step, began_s=times.asked_s, seconds=times.seconds)
                for (step, times), server in self._calls.items()
                if times.seconds
            ),
        )

    @property
    def refused(self) -> bool:
        """Whether the server has refused a step that was requested."""
        return any(answers.newest is not None and answers.newest.result.refused for answers in self._answers.values())

    def asked(self, row: Row) -> bool:
        """Return whether the row's step was requested, and its residuals have arrived or are pending."""
        newest = self._of(row).newest
        return newest is not None and newest.step == row.step

    def expect(self, row: Row, result: StepResult, place: int) -> None:
        """Note which result will have the row's residuals."""
        result.use()
        if self.lease is not None and len(self._calls) < MAX_SPANS:
            self._calls[row.step, result.times] = self.lease.link.server.name
        answers = self._of(row)
        _drop(answers.before)
        answers.before = None
        if self.pipelined and answers.newest is not None and answers.newest.step == row.step - 1:
            answers.before = answers.newest
        else:
            _drop(answers.newest)
            self._stale.discard((row.owner, row.step))  # the step is computed anew after the loss of its server
        answers.newest = _Answer(step=row.step, result=result, place=place)

    def answer(self, row: Row) -> tuple[StepResult, int] | None:
        """Return the result with the row's residuals and the row's place in it.

        In pipelined mode that is the result of the step before, if it was requested.
        """
        answers = self._of(row)
        if answers.before is not None:
            self._stale.add((row.owner, row.step))
            return answers.before.result, answers.before.place
        if answers.newest is not None and answers.newest.step == row.step:
            return answers.newest.result, answers.newest.place
        return None

    def forget_answers(self) -> None:
        """Drop received and pending residuals. Other sessions may still use the same results."""
        for answers in self._answers.values():
            _drop(answers.newest)
            _drop(answers.before)
        self._answers.clear()

    def give_up_answers(self) -> None:
        """Drop the residuals of a lost server.

        Incomplete results are marked as void for rows that have read their first points.
        """
        for answers in self._answers.values():
            for answer in (answers.newest, answers.before):
                if answer is not None and not answer.result.whole:
                    answer.result.void = True
        self.forget_answers()

    def _of(self, row: Row) -> _Answers:
        return self._answers.setdefault((row.owner, row.half), _Answers())


def _drop(answer: _Answer | None) -> None:
    if answer is not None:
        answer.result.drop()
