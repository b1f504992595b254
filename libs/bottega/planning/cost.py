"""Measured seconds of one turn by latent shape and rows. Knows no model and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Shape = tuple[int, int]
"""Latent height and width."""

# Weight of a new measurement. Small enough to ride out a busy neighbour's hiccup, large enough to
# follow a change of clock speed within about twenty turns.
_NEW = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a request asks of the turns to come.

    rows: rows that it puts into each turn (two when guided, times its images).
    steps: turns to go.
    """

    rows: int
    steps: int


class StepTimes:
    """Seconds of one turn as a function of shape and rows, learnt from turns that ran.

    Between two measured row counts it interpolates, beyond the last it extends the last slope, and a
    shape that never ran borrows the nearest one's times in proportion to the area: a guess that the
    first turn of that shape replaces.
    """

    def __init__(self) -> None:
        self._seconds: dict[Shape, dict[int, float]] = {}

    def observe(self, shape: Shape, rows: int, seconds: float) -> None:
        """Takes in one turn. Outliers (a paused machine) count as at most twice what was expected."""
        known = self._seconds.setdefault(shape, {})
        before = known.get(rows)
        if before is None:
            known[rows] = seconds
        else:
            known[rows] = before + _NEW * (min(seconds, 2 * before) - before)

    def seconds(self, shape: Shape, rows: int) -> float | None:
        """Expected seconds of one turn of `rows` rows; None while nothing at all was measured."""
        if rows <= 0:
            return 0.0
        known = self._seconds.get(shape)
        if known:
            return _along(known, rows)
        if not self._seconds:
            return None
        area = shape[0] * shape[1]
        nearest = min(self._seconds, key=lambda other: abs(other[0] * other[1] - area))
        return _along(self._seconds[nearest], rows) * area / (nearest[0] * nearest[1])

    def entries(self) -> Iterator[tuple[Shape, int, float]]:
        """Everything measured: shape, rows, seconds."""
        for shape, known in self._seconds.items():
            for rows, seconds in known.items():
                yield shape, rows, seconds

    @classmethod
    def from_entries(cls, entries: Iterable[tuple[Shape, int, float]]) -> StepTimes:
        """The same table on the other side of a wire."""
        times = cls()
        for shape, rows, seconds in entries:
            times._seconds.setdefault(shape, {})[rows] = seconds
        return times


def _along(known: dict[int, float], rows: int) -> float:
    """Reads the piecewise linear curve through `known` at `rows`; never falling with more rows."""
    below = max((count for count in known if count <= rows), default=None)
    above = min((count for count in known if count >= rows), default=None)
    if below is not None and above is not None:
        if below == above:
            return known[below]
        share = (rows - below) / (above - below)
        return known[below] + share * max(0.0, known[above] - known[below])
    if above is not None:
        # Fewer rows than were ever run: between proportional and constant.
        return known[above] * (1 + rows / above) / 2
    assert below is not None
    before = max((count for count in known if count < below), default=None)
    slope = known[below] / below if before is None else (known[below] - known[before]) / (below - before)
    return known[below] + max(0.0, slope) * (rows - below)
