"""Calls to an engine process that wait for their answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from bottega.errors import BottegaError, Unavailable

AnswerT = TypeVar("AnswerT")


class PendingCalls(Generic[AnswerT]):
    """Pending calls by number, in one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[AnswerT]] = {}

    async def call(self, send: Callable[[int], None], timeout_s: float) -> AnswerT:
        """Call `send` with a new number, and return the answer with that number.

        Raises the errors of `send`, an error that answers the call, and Unavailable if no answer comes in time.
        """
        number = next(self._numbers)
        send(number)
        answer: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the engine did not answer within {timeout_s:g} s") from None
        finally:
            self._pending.pop(number, None)

    def answer(self, number: int, answer: AnswerT | BottegaError) -> None:
        """Complete a call. It does nothing if the caller no longer waits."""
        call = self._pending.pop(number, None)
        if call is None or call.done():
            return
        if isinstance(answer, BottegaError):
            call.set_exception(answer)
        else:
            call.set_result(answer)

    def fail_all(self, error: BottegaError) -> None:
        """Fail all calls, because the engine is gone."""
        for number in list(self._pending):
            self.answer(number, error)
