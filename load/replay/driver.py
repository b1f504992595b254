"""The open loop: requests go out when they were planned to, whatever becomes of those before them.

Latencies count from the time at which a request was meant to go out. A service that holds its callers up is therefore
not spared the requests that come meanwhile (coordinated omission).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic

from load.replay.results import LONGEST_S, Answer, Outcome, Replay, RequestT, Result, Timed, concluded

MAX_IN_FLIGHT = 1000


async def replay(
    plan: Sequence[RequestT],
    send: Callable[[RequestT], Awaitable[Result]],
    *,
    deadline_s: float,
    max_in_flight: int = MAX_IN_FLIGHT,
    length_s: float | None = None,
    stop: asyncio.Event | None = None,
) -> Replay[RequestT]:
    """Send all of a plan at its times, and wait for what becomes of each.

    Args:
        plan: Requests, in order of at_s.
        send: Returns errors that it expects as a Result. What it raises ends the run.
        deadline_s: Seconds of a request from when it was meant to go out; then it is cancelled, and late.
        max_in_flight: What would be one more is not sent.
        length_s: Seconds of the run, for its rates; by default up to the last request.
        stop: Once it is set, no more are sent.

    Raises ValueError for a plan that cannot be sent, and what `send` raises, in an ExceptionGroup.
    """
    _check(plan, deadline_s, max_in_flight)
    answers = await _Run(plan, send, deadline_s, max_in_flight).run(stop or asyncio.Event())
    return concluded(answers, deadline_s=deadline_s, length_s=length_s or plan[-1].at_s)


def _check(plan: Sequence[Timed], deadline_s: float, max_in_flight: int) -> None:
    if not plan:
        raise ValueError("the plan is empty: nothing would be sent")
    if not 0 < deadline_s <= LONGEST_S:
        raise ValueError(f"deadline_s must be above 0, at most {LONGEST_S:g}; got {deadline_s:g}")
    if max_in_flight < 1:
        raise ValueError(f"max_in_flight must be at least 1; got {max_in_flight}")
    times = [request.at_s for request in plan]
    if not all(map(math.isfinite, times)) or times[0] < 0:
        raise ValueError("at_s of every request must be a finite number of seconds, 0 or more")
    for number, (before, after) in enumerate(itertools.pairwise(times), start=1):
        if after < before:
            raise ValueError(f"request {number} is at {after:g} s, before request {number - 1} at {before:g} s")


class _Run(Generic[RequestT]):
    """A run, on the clock of the event loop."""

    def __init__(
        self,
        plan: Sequence[RequestT],
        send: Callable[[RequestT], Awaitable[Result]],
        deadline_s: float,
        max_in_flight: int,
    ) -> None:
        self._plan = plan
        self._send = send
        self._deadline_s = deadline_s
        self._max_in_flight = max_in_flight
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._answers: list[Answer[RequestT] | None] = [None] * len(plan)
        self._in_flight = 0

    async def run(self, stop: asyncio.Event) -> list[Answer[RequestT]]:
        """Return an answer for each request of the plan."""
        async with asyncio.TaskGroup() as group:
            for number, request in enumerate(self._plan):
                if await _is_set_by(stop, self._began_s + request.at_s):
                    break
                if self._in_flight < self._max_in_flight:
                    self._in_flight += 1
                    group.create_task(self._request(number))
                else:
                    self._answers[number] = _unsent(request, f"{self._in_flight} in flight")
        return [
            answer or _unsent(request, "the run was stopped")
            for answer, request in zip(self._answers, self._plan, strict=True)
        ]

    async def _request(self, number: int) -> None:
        """Send a request, and wait for it until its deadline."""
        request = self._plan[number]
        due_s = self._began_s + request.at_s
        delay_s = self._loop.time() - due_s
        try:
            async with asyncio.timeout_at(due_s + self._deadline_s) as deadline:
                result = await self._send(request)
        except TimeoutError:
            if not deadline.expired():
                raise  # the sender's own
            result = Result(outcome=Outcome.LATE, reason="deadline")
        finally:
            self._in_flight -= 1
        self._answers[number] = Answer(
            request=request,
            outcome=result.outcome,
            reason=result.reason,
            latency_s=self._loop.time() - due_s,
            delay_s=delay_s,
        )


def _unsent(request: RequestT, reason: str) -> Answer[RequestT]:
    return Answer(request=request, outcome=Outcome.UNSENT, reason=reason, latency_s=math.nan, delay_s=math.nan)


async def _is_set_by(stop: asyncio.Event, when_s: float) -> bool:
    """Wait until that time, or until the event is set; let other tasks run even where that is now."""
    try:
        async with asyncio.timeout_at(when_s):
            await stop.wait()
    except TimeoutError:
        return False
    return True
