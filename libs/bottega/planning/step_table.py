"""The planned seconds of a step by its number of rows, in a table that is small enough for a worker's reports."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from bottega.planning.cost import MAX_SHAPES, Shape

MAX_POINTS = 12
"""Maximum number of points in the table of one shape."""

# Row counts within this ratio are about the same. It is small, because a turn's time grows with its rows.
_NEAR = 1.1
# Plans after which a point is old. Most turns add one, and some tens of turns cover all usual row counts.
_OLD_NOTES = 100

# Seconds, and the number of the note.
_Planned = tuple[float, int]


class StepTable:
    """Seconds of one step as the worker plans it, as a function of latent shape and row-equivalents.

    A row-equivalent is the cost of a row that computes all tokens; fractions are usual. The table interpolates between
    two points, extends the last slope, and below the first point goes half-way between proportional and constant, as
    StepTimes does. A plan replaces those of about as many rows, because the speed of loads may have changed. Of more
    than MAX_POINTS points of a shape, one is dropped: the oldest if it is old, else the one that its neighbours predict
    best. Of more than MAX_SHAPES shapes, the one planned longest ago is dropped.
    """

    def __init__(self) -> None:
        self._points: dict[Shape, dict[float, _Planned]] = {}
        self._curves: dict[Shape, list[tuple[float, float]]] = {}
        self._notes = 0

    def note(self, shape: Shape, row_equivalents: float, seconds: float) -> None:
        """Record a planned step. A step without rows, time or area is ignored."""
        if not (0.0 < row_equivalents < math.inf and 0.0 < seconds < math.inf and min(shape) > 0):
            return
        self._notes += 1
        points = self._points.pop(shape, {})
        self._curves.pop(shape, None)
        for near in [rows for rows in points if row_equivalents / _NEAR <= rows <= row_equivalents * _NEAR]:
            del points[near]
        # Dictionary order: the newest are last.
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
        """Return the seconds of one step; None if no step of this shape was planned."""
        points = self._points.get(shape)
        if not points:
            return None
        curve = self._curves.get(shape)
        if curve is None:
            curve = self._curves[shape] = _curve(points)
        return _along(curve, row_equivalents) if row_equivalents > 0.0 else 0.0

    def entries(self) -> Iterator[tuple[Shape, float, float]]:
        """Yield all planned steps: shape, row-equivalents, seconds."""
        for shape, points in self._points.items():
            for row_equivalents, seconds in _curve(points):
                yield shape, row_equivalents, seconds

    @classmethod
    def from_entries(cls, entries: Iterable[tuple[Shape, float, float]]) -> StepTable:
        """Rebuild a table from the entries that another process sent, within the same limits."""
        table = cls()
        for shape, row_equivalents, seconds in entries:
            table.note(shape, row_equivalents, seconds)
        return table


def _curve(points: dict[float, _Planned]) -> list[tuple[float, float]]:
    return sorted((row_equivalents, seconds) for row_equivalents, (seconds, _) in points.items())


def _least_missed(curve: list[tuple[float, float]], *, but: float) -> float:
    """Return the inner point that a line between its neighbours predicts with the least relative error."""
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
