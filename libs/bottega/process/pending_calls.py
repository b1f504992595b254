"""Calls of an engine process that wait for their answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from bottega.errors import BottegaError, Unavailable

AnswerT = TypeVar("AnswerT")


class PendingCalls(Generic[AnswerT]):
    """By number. In one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[AnswerT]] = {}

    async def call(self, send: Callable[[int], None], timeout_s: float) -> AnswerT:
        """The answer to what `send` sends under the number that it is given.

        Raises what `send` raises, what the call is answered with, and Unavailable where no answer comes in time.
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
        """The answer has come. Harmless when nobody waits for it any more."""
        call = self._pending.pop(number, None)
        if call is None or call.done():
            return
        if isinstance(answer, BottegaError):
            call.set_exception(answer)
        else:
            call.set_result(answer)

    def fail_all(self, error: BottegaError) -> None:
        """The engine is gone, and answers nothing any more."""
        for number in list(self._pending):
            self.answer(number, error)
