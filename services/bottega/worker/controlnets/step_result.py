"""A server's answer to one step, as it arrives: residuals by point, deepest first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bottega.transport import Layout


@dataclass(slots=True, kw_only=True, eq=False)
class CallTimes:
    """asked_s: when a step was asked for, on CLOCK_MONOTONIC. seconds: until all of it was here; 0 before."""

    asked_s: float
    seconds: float = 0.0


class StepResult:
    """Filled by a link's thread, read by the engine's.

    layout: what it will have. points: how many. refused: whether the server has said that it will not come. void:
    whether it will never be whole, and what was taken of it has to be thrown away.
    times: of it; they do not hold its memory.
    """

    def __init__(self, layout: Layout, points: int) -> None:
        self.layout = layout
        self.points = points
        self.refused = False
        self.void = False
        self.times = CallTimes(asked_s=time.monotonic())
        self._tensors: dict[int, Tensor] = {}
        self._users = 0
        self._given_back = False
        self._give_back: Callable[[], None] | None = None

    @property
    def whole(self) -> bool:
        """Whether all of it is here."""
        return len(self._tensors) == self.points

    def has(self, points: tuple[int, ...]) -> bool:
        """Whether these are here."""
        return all(point in self._tensors for point in points)

    def at(self, point: int, place: int) -> Tensor:
        """One row's residuals at a point that is here: [channels, height, width], not to be written to."""
        return self._tensors[point][place]

    def begin(self, give_back: Callable[[], None]) -> None:
        """It has begun to arrive. give_back: what gives its memory back to the server."""
        self._give_back = give_back
        if self._users == 0:
            self._return()

    def put(self, point: int, tensor: Tensor) -> None:
        """One point is here: [rows, channels, height, width]."""
        self._tensors[point] = tensor
        if self.whole:
            self.times.seconds = time.monotonic() - self.times.asked_s

    @property
    def holds_memory(self) -> bool:
        """Whether it lies, or will lie, in memory that is the server's."""
        return not (self._given_back or self.refused)

    def keep_copy(self) -> None:
        """Copies all of it, so that the server has its memory back. Only when nobody looks at what is there."""
        self._tensors = {point: tensor.clone() for point, tensor in self._tensors.items()}
        self._return()

    def use(self) -> None:
        """One more row is read from it."""
        self._users += 1

    def drop(self) -> None:
        """One row less is; without any it is given back."""
        self._users -= 1
        if self._users == 0:
            self._return()

    def _return(self) -> None:
        """Gives the memory back, now or when it begins to arrive."""
        if self._give_back is not None:
            self._given_back = True
            self._give_back()
