"""The calls that a server has in its hands: how many there are, and what turns the errors of each into a status.

Knows no methods, nor what is asked or answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from bottega.errors import BottegaError, Code, InternalError
from bottega.rpc import logs
from bottega.rpc.answers import AnswerBudget, Answers
from bottega.rpc.metrics import CallMetrics
from bottega.rpc.refusals import RefusalLog
from bottega.rpc.status import to_grpc_status

REQUEST_ID_KEY = "x-request-id"

_log = logging.getLogger(__name__)

# How a write fails when the caller has gone, and how a method of gRPC's own ends itself.
_OF_GRPC = (grpc.aio.InternalError, grpc.aio.AbortError)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class Tally:
    """Calls of one kind. active: being served. opened: those, and those whose answers were not read out."""

    active: int = 0
    opened: int = 0

    @property
    def count(self) -> int:
        """How many it may be said to be: of one that has ended gRPC has only some memory left, so it counts half."""
        return max(self.active, self.opened // 2)


class Calls:
    """All calls. `asked_once` and `streamed`: by how they are asked; `of_grpc`: gRPC's own, which nobody waits for."""

    def __init__(self, metrics: CallMetrics, answers: AnswerBudget) -> None:
        self.asked_once, self.streamed, self.of_grpc = Tally(), Tally(), Tally()
        self.refusals = RefusalLog()
        self._metrics = metrics
        self._answers = answers
        self._idle = asyncio.Event()
        self._idle.set()
        metrics.watch_in_flight(lambda: self._active)

    async def wait_idle(self) -> None:
        """Returns when no call is being served, gRPC's own aside."""
        await self._idle.wait()

    def guard(self, tally: Tally, method: str, context: Context) -> Guard:
        """Around the serving of one call."""
        return Guard(self, tally, method, context)

    def enter(self, tally: Tally, context: Context) -> Answers:
        """A call begins."""
        # Every call runs in a task of its own, so what is bound here is bound for this call only. It ends when gRPC has
        # sent all that was answered, or the caller has gone.
        answers, task = Answers(self._answers), asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._close(tally, answers))
        answers.bind()
        logs.bind(**_request_id(context))
        tally.opened += 1
        tally.active += 1
        if self._active:
            self._idle.clear()
        return answers

    def leave(self, tally: Tally, method: str, code: Code | None, seconds: float) -> None:
        """It has ended, but for what its caller has not read. code: None is OK."""
        tally.active -= 1
        if not self._active:
            self._idle.set()
        if tally is not self.of_grpc:
            self._metrics.observe(method, code.name if code else "OK", seconds)

    @property
    def _active(self) -> int:
        return self.asked_once.active + self.streamed.active

    def _close(self, tally: Tally, answers: Answers) -> None:
        tally.opened -= 1
        answers.release()


class Guard:
    """Around one call: whatever it raises ends it with a status.

    gRPC keeps the exception of an abort with the call's context, and raises it again when the method has returned. One
    that led to the frames of the call, which hold context and request, would be a cycle of some MiB perhaps, until the
    collector comes by: so it ends here, without a traceback.
    """

    def __init__(self, calls: Calls, tally: Tally, method: str, context: Context) -> None:
        self._calls = calls
        self._tally = tally
        self._method = method
        self._context = context
        self._began = time.perf_counter()

    async def __aenter__(self) -> Answers:
        return self._calls.enter(self._tally, self._context)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        del kind, trace
        refused = error if isinstance(error, Exception) and not isinstance(error, _OF_GRPC) else None
        ours = _told(self._method, refused, self._calls.refusals) if refused else None
        code = Code.CANCELLED if error is not None else None
        # Before the caller hears: one that does not read, does not hear either.
        seconds = time.perf_counter() - self._began
        self._calls.leave(self._tally, self._method, ours.code if ours else code, seconds)
        if ours is None:
            return False
        try:
            await self._context.abort_with_status(to_grpc_status(ours))
        except grpc.aio.AbortError as aborted:
            aborted.__traceback__ = aborted.__context__ = None
        return True


def _request_id(context: Context) -> dict[str, str]:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY:
            found = logs.request_id_from(str(value))
            return {"request_id": found} if found else {}
    return {}


def _told(method: str, error: Exception, refusals: RefusalLog) -> BottegaError:
    """What the caller is told. It is logged here, once, and forgets where it was raised."""
    told = error if isinstance(error, BottegaError) else _plain_internal()
    if told is not error:
        _log.error("call failed unexpectedly", exc_info=error, extra={"method": method})
    elif isinstance(error, InternalError):
        _log.error("call failed", exc_info=error, extra={"method": method})
    else:
        refusals.tell(method, told.reason_name, told.message)
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return told


def _plain_internal() -> InternalError:
    return InternalError("an internal fault; the service's log says more under the same request_id")
