"""Computations in pieces: generators that yield between two pieces, so that other work can run there."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from bottega.device.device import Device
from bottega.device.span import Span

Result = TypeVar("Result")


def run_pieces(pieces: Generator[None, None, Result]) -> Result:
    """Run all pieces of a computation, and return its result."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: Result = end.value
            return result


class PausableWork(Generic[Result]):
    """A computation in pieces that may pause where the device has done all pieces so far.

    A GPU is mostly behind the thread that enqueues the pieces, so there it seldom pauses.
    """

    def __init__(self, device: Device, pieces: Generator[None, None, Result]) -> None:
        self.spans: list[Span] = []
        """The time that the device spent in each call of `run`."""
        self.result: Result | None = None
        """The result; None before all pieces have been enqueued."""
        self._device = device
        self._pieces = pieces

    def run(self, pause_due: Callable[[], bool] = lambda: False) -> None:
        """Enqueue the pieces that are left.

        Args:
            pause_due: Returns whether to pause after a piece that the device has done.
        """
        began = self._device.record()
        try:
            while self.result is None:
                try:
                    next(self._pieces)
                except StopIteration as end:
                    self.result = end.value
                if self._device.record().ready and pause_due():
                    break
        finally:
            self.spans.append(Span(begin=began, end=self._device.record()))
