"""The response of a ControlNet server to one step, which arrives residual by residual."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from bottega.transport import Layout


@dataclass(slots=True, kw_only=True, eq=False)
class CallTimes:
    """When a step was requested, and how long the response took."""

    asked_s: float
    """Time of the request, on CLOCK_MONOTONIC."""
    seconds: float = 0.0
    """Seconds from the request to the complete response; 0 until then."""


class StepResult:
    """A server's response to one step. The connection's thread fills it, the engine's thread reads it.

    Args:
        layout: Layout that the response must have.
        points: Number of residuals of the network.
    """

    def __init__(self, layout: Layout, points: int) -> None:
        self.layout = layout
        self.points = points
        self.shared = False
        """Whether the server computed rows of other sessions or steps in the same batch (`computes_one_session`)."""
        self.refused = False
        """Whether the server has refused the step."""
        self.void = False
        """Whether the result can never become complete. Steps that used a part of it have to be repeated."""
        self.times = CallTimes(asked_s=time.monotonic())
        """Times of the request. They may outlive the result, whose memory they do not hold."""
        self._tensors: dict[int, Tensor] = {}
        self._users = 0
        self._given_back = False
        self._give_back: Callable[[], None] | None = None

    @property
    def whole(self) -> bool:
        """Whether all residuals have arrived."""
        return len(self._tensors) == self.points

    def has(self, points: Sequence[int]) -> bool:
        """Return whether the residuals with these indices have arrived."""
        return all(point in self._tensors for point in points)

    def at(self, point: int, place: int) -> Tensor:
        """Return one row's residual with an index that is here, read-only."""
        return self._tensors[point][place]

    def begin(self, give_back: Callable[[], None]) -> None:
        """Record that the result begins to arrive.

        Args:
            give_back: Returns the result's memory to the server.
        """
        self._give_back = give_back
        if self._users == 0:
            self._return()

    def put(self, point: int, tensor: Tensor) -> None:
        """Add the residual with index `point`, whose first dimension is the row."""
        self._tensors[point] = tensor
        if self.whole:
            self.times.seconds = time.monotonic() - self.times.asked_s

    @property
    def holds_memory(self) -> bool:
        """Whether the result occupies, or will occupy, memory of the server."""
        return not (self._given_back or self.refused)

    def keep_copy(self) -> None:
        """Copy the result, and return its memory to the server. Call this only while nothing reads the result."""
        self._tensors = {point: tensor.clone() for point, tensor in self._tensors.items()}
        self._return()

    def use(self) -> None:
        """Count one more row that reads the result."""
        self._users += 1

    def drop(self) -> None:
        """Count one row less. When no row is left, return the memory to the server."""
        self._users -= 1
        if self._users == 0:
            self._return()

    def _return(self) -> None:
        """Let the server reuse the result's memory, as soon as the result has begun to arrive."""
        if self._give_back is not None:
            self._given_back = True
            self._give_back()
