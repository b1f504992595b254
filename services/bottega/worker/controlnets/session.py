"""One request's use of one ControlNet, wherever it runs: which servers were tried, and what they have answered.

Belongs to the engine's thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from bottega.diffusion.controlnets.provider import ControlCall, ControlInput, ControlRecord, ControlServer
from bottega.diffusion.engine.spans import MAX_SPANS
from bottega.diffusion.rows import Half, Row
from bottega.errors import BottegaError
from bottega.worker.controlnets.server_link import LeaseStatus, ServerLink
from bottega.worker.controlnets.step_result import CallTimes, StepResult


@dataclass(slots=True, kw_only=True, eq=False)
class SessionLease:
    """What one request has open, or is opening, with one server. opened: whether that was taken in."""

    number: int
    link: ServerLink
    sessions: Sequence[PlacedSession]
    answer: LeaseStatus = field(default_factory=LeaseStatus)
    opened: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Answer:
    """Where one row's residuals of one step are, or will be. place: among the rows of the result."""

    step: int
    result: StepResult
    place: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Answers:
    """Of one half of one image: of the newest step that was asked for, and of the one before it."""

    newest: _Answer | None = None
    before: _Answer | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class PlacedSession:
    """A handle of the engine. number: of its session with the lease's server.

    tried: names of the servers that were asked to run it, those that were lost included. local: the handle where it
    runs in this process. error: why nobody runs it any more. pipelined: whether steps go on with the residuals of the
    step before. waited_s: that forwards waited for it. ran: who has run it.
    """

    control: ControlInput
    number: int = 0
    tried: list[str] = field(default_factory=list)
    lease: SessionLease | None = None
    local: Hashable | None = None
    error: BottegaError | None = None
    pipelined: bool = False
    waited_s: float = 0.0
    ran: list[str] = field(default_factory=list)
    _calls: dict[tuple[int, CallTimes], str] = field(default_factory=dict)
    _answers: dict[tuple[Hashable, Half], _Answers] = field(default_factory=dict)
    _stale: set[tuple[Hashable, int]] = field(default_factory=set)

    @property
    def next_server(self) -> ControlServer | None:
        """The best server that was not tried."""
        return next((server for server in self.control.hosts.servers if server.name not in self.tried), None)

    @property
    def record(self) -> ControlRecord:
        """What it has come to."""
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
        """Whether the server has said that it cannot compute a step that was asked for."""
        return any(answers.newest is not None and answers.newest.result.refused for answers in self._answers.values())

    def asked(self, row: Row) -> bool:
        """Whether the row's step was asked for, and its answer came, or may."""
        newest = self._of(row).newest
        return newest is not None and newest.step == row.step

    def expect(self, row: Row, result: StepResult, place: int) -> None:
        """The row's residuals will be in this result."""
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
            self._stale.discard((row.owner, row.step))  # it was to be, before its server was lost
        answers.newest = _Answer(step=row.step, result=result, place=place)

    def answer(self, row: Row) -> tuple[StepResult, int] | None:
        """Where the row's residuals are taken from: the step before in pipelined mode, where that was asked for."""
        answers = self._of(row)
        if answers.before is not None:
            self._stale.add((row.owner, row.step))
            return answers.before.result, answers.before.place
        if answers.newest is not None and answers.newest.step == row.step:
            return answers.newest.result, answers.newest.place
        return None

    def forget_answers(self) -> None:
        """Those that are there, and those that may come, are not wanted any more, here: others may be in them, too."""
        for answers in self._answers.values():
            _drop(answers.newest)
            _drop(answers.before)
        self._answers.clear()

    def give_up_answers(self) -> None:
        """Answers that are not whole will not come, because their server is lost; `void` tells those that have read
        their first points.
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
