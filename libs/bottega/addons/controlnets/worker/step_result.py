"""The result of one step at a ControlNet server, as it arrives: residuals by point, deepest first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bottega.transport import Layout


@dataclass(slots=True, kw_only=True, eq=False)
class CallTimes:
    """The times of one request for a step."""

    asked_s: float
    """When the step was requested, on CLOCK_MONOTONIC."""
    seconds: float = 0.0
    """Seconds until the complete response had arrived; 0 before that."""


class StepResult:
    """A server's answer to one step. A link's thread fills it, the engine's thread reads it.

    Args:
        layout: Layout that the answer must have.
        points: Number of points at which the network takes residuals.
    """

    def __init__(self, layout: Layout, points: int) -> None:
        self.layout = layout
        self.points = points
        self.shared = False
        """Whether the server has not computed each of its rows alone (`computes_one_session`)."""
        self.refused = False
        """Whether the server has refused the step."""
        self.void = False
        """Whether it can never become complete. Steps that used a part of it have to be repeated."""
        self.times = CallTimes(asked_s=time.monotonic())
        """Kept by others, too, which then do not hold the result's memory."""
        self._tensors: dict[int, Tensor] = {}
        self._users = 0
        self._given_back = False
        self._give_back: Callable[[], None] | None = None

    @property
    def whole(self) -> bool:
        """Whether all residuals have arrived."""
        return len(self._tensors) == self.points

    def has(self, points: tuple[int, ...]) -> bool:
        """Return whether the residuals of these points have arrived."""
        return all(point in self._tensors for point in points)

    def at(self, point: int, place: int) -> Tensor:
        """Return one row's residuals at a point that is here: [channels, height, width], read-only."""
        return self._tensors[point][place]

    def begin(self, give_back: Callable[[], None]) -> None:
        """Note that the result begins to arrive.

        Args:
            give_back: Gives the result's memory back to the server.
        """
        self._give_back = give_back
        if self._users == 0:
            self._return()

    def put(self, point: int, tensor: Tensor) -> None:
        """Add the residuals of one point: [rows, channels, height, width]."""
        self._tensors[point] = tensor
        if self.whole:
            self.times.seconds = time.monotonic() - self.times.asked_s

    @property
    def holds_memory(self) -> bool:
        """Whether the result lies, or will lie, in memory of the server."""
        return not (self._given_back or self.refused)

    def keep_copy(self) -> None:
        """Copy the result, and give its memory back to the server. Call this only while nobody reads the result."""
        self._tensors = {point: tensor.clone() for point, tensor in self._tensors.items()}
        self._return()

    def use(self) -> None:
        """Count one more row that reads the result."""
        self._users += 1

    def drop(self) -> None:
        """Count one row less. When no row is left, give the memory back to the server."""
        self._users -= 1
        if self._users == 0:
            self._return()

    def _return(self) -> None:
        """Give the memory back, now or when it begins to arrive."""
        if self._give_back is not None:
            self._given_back = True
            self._give_back()
