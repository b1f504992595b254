"""The sessions of requests with ControlNets: where they run, which servers were tried, and the received residuals.

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
    """The sessions that one request has, or is opening, at one server."""

    number: int
    link: ServerLink
    sessions: Sequence[PlacedSession]
    answer: LeaseStatus = field(default_factory=LeaseStatus)
    opened: bool = False
    """Whether the sessions know that the server has opened them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Answer:
    """A reference to the residuals of one batch row at one step, which may still be arriving."""

    step: int
    result: StepResult
    place: int
    """Index of the row in the result."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Answers:
    """The residuals for one row that a server sent or will send: of the newest step and of the step before.

    A row is the conditional or the unconditional half of guidance, of one image.
    """

    newest: _Answer | None = None
    before: _Answer | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class PlacedSession:
    """The use of one ControlNet by one request, in this process or on a server. The engine gets it as a handle."""

    control: ControlInput
    number: int = 0
    """Number of the session within its lease."""
    tried: list[str] = field(default_factory=list)
    """Names of the servers that were asked to run the session, including lost ones."""
    lease: SessionLease | None = None
    local: Hashable | None = None
    """Handle of the session if it runs in this process; None otherwise."""
    error: BottegaError | None = None
    """Why nothing can run the session any more; None while something can."""
    pipelined: bool = False
    """Whether a step may use the residuals of the previous step instead of waiting for its own."""
    waited_s: float = 0.0
    """Seconds that forward passes waited for the session's residuals."""
    ran: list[str] = field(default_factory=list)
    """Names of the servers that have run the session; an empty name stands for this process."""
    _calls: dict[tuple[int, CallTimes], str] = field(default_factory=dict)
    _answers: dict[tuple[Hashable, Half], _Answers] = field(default_factory=dict)
    _stale: set[tuple[Hashable, int]] = field(default_factory=set)

    @property
    def next_server(self) -> ControlServer | None:
        """The best server that was not tried; None if all were."""
        return next((server for server in self.control.hosts.servers if server.name not in self.tried), None)

    @property
    def record(self) -> ControlRecord:
        """Waits, steps and servers of the session, for the provenance."""
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
        """Whether the server has refused a requested step."""
        return any(answers.newest is not None and answers.newest.result.refused for answers in self._answers.values())

    def asked(self, row: Row) -> bool:
        """Return whether the residuals for the row's step have arrived or are pending."""
        newest = self._of(row).newest
        return newest is not None and newest.step == row.step

    def expect(self, row: Row, result: StepResult, place: int) -> None:
        """Record that `result` will have the row's residuals, at index `place`."""
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
        """Return the result with the row's residuals, and the row's index in it; None if there is none.

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

        An incomplete result becomes void, because rows may have read some of its residuals.
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
