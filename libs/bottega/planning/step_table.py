"""Planned seconds of a step by how much is in it, short enough to be sent with every report of a worker."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from bottega.planning.cost import MAX_SHAPES, Shape

MAX_POINTS = 12
"""Of one shape."""

# The ratio of numbers of rows that are about the same. Small: turns of a batch grow with its rows.
_NEAR = 1.1
# Plans after which one is old. There is one in most turns, and in some tens of them all usual numbers of rows come by.
_OLD_NOTES = 100

# Seconds, and the number of the note.
_Planned = tuple[float, int]


class StepTable:
    """Seconds of one step as a function of latent shape and row-equivalents, as the worker plans it.

    Row-equivalents: rows, each as what it costs of a plain one; fractions are usual. Between two points it
    interpolates, beyond the last it extends the last slope, before the first it goes half-way between proportional and
    constant, as StepTimes does. A plan takes the place of those of about as many rows: loads may be faster or slower
    than they were. Of more than MAX_POINTS of a shape, one is left out: the oldest, where it was planned long ago, and
    else the one that its neighbours say best. Of more than MAX_SHAPES shapes, it is the one that was planned longest
    ago.
    """

    def __init__(self) -> None:
        self._points: dict[Shape, dict[float, _Planned]] = {}
        self._curves: dict[Shape, list[tuple[float, float]]] = {}
        self._notes = 0

    def note(self, shape: Shape, row_equivalents: float, seconds: float) -> None:
        """Takes in a planned step. What says nothing (no rows, no time) is left out."""
        if not (0.0 < row_equivalents < math.inf and 0.0 < seconds < math.inf and min(shape) > 0):
            return
        self._notes += 1
        points = self._points.pop(shape, {})
        self._curves.pop(shape, None)
        for near in [rows for rows in points if row_equivalents / _NEAR <= rows <= row_equivalents * _NEAR]:
            del points[near]
        # The last ones are the newest.
        self._points[shape], points[row_equivalents] = points, (seconds, self._notes)
        if len(points) > MAX_POINTS:
            oldest, (_, noted) = next(iter(points.items()))
            old = noted <= self._notes - _OLD_NOTES
            del points[oldest if old else _least_missed(_curve(points), but=row_equivalents)]
        if len(self._points) > MAX_SHAPES:
            forgotten = next(iter(self._points))
            del self._points[forgotten]
            self._curves.pop(forgotten, None)

    def seconds(self, shape: Shape, row_equivalents: float) -> float | None:
        """Of one step; None where no step of this shape was planned."""
        points = self._points.get(shape)
        if not points:
            return None
        curve = self._curves.get(shape)
        if curve is None:
            curve = self._curves[shape] = _curve(points)
        return _along(curve, row_equivalents) if row_equivalents > 0.0 else 0.0

    def entries(self) -> Iterator[tuple[Shape, float, float]]:
        """Everything planned: shape, row-equivalents, seconds."""
        for shape, points in self._points.items():
            for row_equivalents, seconds in _curve(points):
                yield shape, row_equivalents, seconds

    @classmethod
    def from_entries(cls, entries: Iterable[tuple[Shape, float, float]]) -> StepTable:
        """The same table on the other side of a wire, within the same bounds."""
        table = cls()
        for shape, row_equivalents, seconds in entries:
            table.note(shape, row_equivalents, seconds)
        return table


def _curve(points: dict[float, _Planned]) -> list[tuple[float, float]]:
    """Row-equivalents with their seconds, in order."""
    return sorted((row_equivalents, seconds) for row_equivalents, (seconds, _) in points.items())


def _least_missed(curve: list[tuple[float, float]], *, but: float) -> float:
    """The point between two others that a line between them comes nearest to, in shares of what it says."""
    missed = {}
    for (before, after), (row_equivalents, seconds) in zip(
        zip(curve, curve[2:], strict=False), curve[1:-1], strict=True
    ):
        missed[row_equivalents] = abs(_between(before, after, row_equivalents) - seconds) / seconds
    missed.pop(but, None)
    return min(missed, key=missed.__getitem__)


def _along(curve: list[tuple[float, float]], row_equivalents: float) -> float:
    place = bisect_left(curve, (row_equivalents, 0.0))
    if place == 0:
        first, seconds = curve[0]
        return seconds * (1.0 + row_equivalents / first) / 2.0
    if place < len(curve):
        return _between(curve[place - 1], curve[place], row_equivalents)
    last, seconds = curve[-1]
    slope = seconds / last if len(curve) == 1 else _slope(curve[-2], curve[-1])
    return seconds + max(0.0, slope) * (row_equivalents - last)


def _between(before: tuple[float, float], after: tuple[float, float], row_equivalents: float) -> float:
    return before[1] + _slope(before, after) * (row_equivalents - before[0])


def _slope(before: tuple[float, float], after: tuple[float, float]) -> float:
    return (after[1] - before[1]) / (after[0] - before[0])
