"""Measured seconds of one turn by latent shape and rows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

Shape = tuple[int, int]
"""Latent height and width."""

MAX_SHAPES = 32
"""Shapes that are remembered: callers choose them, and every report to the gateway carries all of them."""

# Turns after which a new measurement weighs a tenth. Large enough to ride out a busy neighbour's hiccup,
# small enough to follow a change of clock speed within about twenty turns.
_SETTLED = 10
# Turns of whatever shape after which a row count that did not run is outdated: a few seconds of a small model, a few
# minutes of a large one. What made it slow, a download at the start or a neighbour, may be over by then.
OUTDATED_TURNS = 200
# Trials are so many turns apart: at most one turn in so many may turn out to be too wide.
TRIAL_PAUSE_TURNS = 100


class StepTimes:
    """Seconds of one turn as a function of shape and rows, learnt from turns that ran.

    Between two measured row counts it interpolates, beyond the last it extends the last slope, and it never
    falls with rows: a turn that took longer than one of more rows was held up. A shape that never ran borrows
    the nearest one's times in proportion to the area; once it has run with one number of rows, it borrows only
    how times grow with rows. A shape without area is an unknown one and borrows the times as they are.
    Of more than MAX_SHAPES shapes, the one that ran longest ago is forgotten.

    A row count that seems too dear is not chosen, so that nobody learns when it no longer is. `outdated` says which
    should be tried again; nothing else changes by it: seconds are what was measured last, never what is hoped for.
    """

    def __init__(self) -> None:
        self._means: dict[Shape, dict[int, _Mean]] = {}
        self._curves: dict[Shape, _Curve] = {}
        self._turns = 0
        self._tried_at = -TRIAL_PAUSE_TURNS

    def observe(self, shape: Shape, rows: int, seconds: float, *, fewest_rows: int | None = None) -> None:
        """Takes in one turn. fewest_rows: so few take what `rows` take, as where they are padded to those.

        Outliers (a paused machine) count as at most twice what that shape was expected to take.

        The first turns of a row count are averaged; then old ones fade. An outdated row count that took less than it
        used to is learnt anew. One that took more is averaged as always: its first turn for long is often a slow one.
        One that fewer rows take longer than by now takes as long as those, at least.
        """
        self._turns += 1
        known = self._means[shape] = self._means.pop(shape, {})  # the last one is the newest
        if len(self._means) > MAX_SHAPES:
            forgotten = next(iter(self._means))
            del self._means[forgotten]
            self._curves.pop(forgotten, None)
        if rows not in known:
            expected = self.seconds(shape, rows) if known else None
            known[rows] = _Mean(seconds=seconds if expected is None else min(seconds, 2 * expected))
        elif seconds < known[rows].seconds and self._age(known[rows]) >= OUTDATED_TURNS:
            known[rows] = _Mean(seconds=seconds)
        else:
            known[rows].add(seconds)
        known[rows].measured_at = self._turns
        if fewest_rows is not None:
            known[fewest_rows] = known[rows]
        for count, mean in known.items():
            if count > rows and self._age(mean) >= OUTDATED_TURNS:
                mean.seconds = max(mean.seconds, known[rows].seconds)
        self._curves.pop(shape, None)

    def seconds(self, shape: Shape, rows: float) -> float | None:
        """Expected seconds of one turn of `rows` rows, fractions included; None while nothing at all was measured."""
        if rows <= 0:
            return 0.0
        curve = self._curves.get(shape)
        if curve is not None and len(curve) > 1:  # nearly always: the scheduler asks a hundred times in a look
            return _along(curve, rows)
        if shape in self._means:
            return self._measured(shape, rows)
        lender = self._nearest(shape, row_counts=1)
        return None if lender is None else self._measured(lender, rows) * _ratio(shape, lender)

    def outdated(self, shape: Shape, rows: int) -> bool:
        """Whether a turn of so many rows should be tried though it seems too dear.

        What is expected of it was measured OUTDATED_TURNS ago or before, and the last trial was TRIAL_PAUSE_TURNS ago.
        Never of more rows than ever ran, of that shape or of the one that it borrows from.
        """
        if self._turns - self._tried_at < TRIAL_PAUSE_TURNS:
            return False
        source = shape if len(self._means.get(shape, ())) > 1 else self._nearest(shape, row_counts=2)
        known = self._means[source] if source is not None else {}
        measured = min((count for count in known if count >= rows), default=None)
        return measured is not None and self._age(known[measured]) >= OUTDATED_TURNS

    def tried(self) -> None:
        """A turn is made only because it was outdated: nothing is for the next TRIAL_PAUSE_TURNS."""
        self._tried_at = self._turns

    def entries(self) -> Iterator[tuple[Shape, int, float]]:
        """Everything measured: shape, rows, seconds."""
        for shape, known in self._means.items():
            for rows, mean in known.items():
                yield shape, rows, mean.seconds

    @classmethod
    def from_entries(
        cls, entries: Iterable[tuple[Shape, int, float]], outdated: Collection[tuple[Shape, int]] = ()
    ) -> StepTimes:
        """The same table on the other side of a wire. outdated: shapes and rows of those entries that are.

        Left out are entries without rows, time or an area, which say nothing, and shapes beyond MAX_SHAPES.
        """
        times = cls()
        for shape, rows, seconds in entries:
            says_something = rows > 0 and seconds > 0 and min(shape) > 0
            if says_something and (shape in times._means or len(times._means) < MAX_SHAPES):
                measured_at = -OUTDATED_TURNS if (shape, rows) in outdated else 0
                mean = _Mean(seconds=seconds, turns=_SETTLED, measured_at=measured_at)
                times._means.setdefault(shape, {})[rows] = mean
        return times

    def _age(self, mean: _Mean) -> int:
        return self._turns - mean.measured_at

    def _measured(self, shape: Shape, rows: float) -> float:
        curve = self._curve(shape)
        lender = self._nearest(shape, row_counts=2) if len(curve) == 1 else None
        if lender is None:
            return _along(curve, rows)
        count, seconds = curve[0]
        growth = self._curve(lender)
        return seconds * _along(growth, rows) / _along(growth, count)

    def _nearest(self, shape: Shape, *, row_counts: int) -> Shape | None:
        """The shape of the nearest area that ran with at least so many numbers of rows."""
        able = (other for other, known in self._means.items() if len(known) >= row_counts)
        return min(able, key=lambda other: abs(_area(other) - _area(shape)), default=None)

    def _curve(self, shape: Shape) -> _Curve:
        if shape not in self._curves:
            self._curves[shape] = _rising(self._means[shape])
        return self._curves[shape]


@dataclass(slots=True, kw_only=True)
class _Mean:
    """Seconds over the turns so far: of all, until there are enough to let the old ones fade.

    measured_at: the table's turn of the last one.
    """

    seconds: float
    turns: int = 1
    measured_at: int = 0

    def add(self, seconds: float) -> None:
        self.turns = min(self.turns + 1, _SETTLED)
        self.seconds += (min(seconds, 2 * self.seconds) - self.seconds) / self.turns


_Curve = list[tuple[float, float]]


def _rising(known: dict[int, _Mean]) -> _Curve:
    """Row counts with their seconds, in order, each at most as long as those after it."""
    curve: _Curve = []
    least = math.inf
    for rows in sorted(known, reverse=True):
        least = min(least, known[rows].seconds)
        curve.append((rows, least))
    return curve[::-1]


def _along(curve: _Curve, rows: float) -> float:
    """Reads the piecewise linear `curve` at `rows`."""
    place = bisect_left(curve, (rows, 0.0))
    if place == 0:
        return _below(curve, rows)
    before, low = curve[place - 1]
    if place == len(curve):
        slope = low / before if place == 1 else (low - curve[-2][1]) / (before - curve[-2][0])
        return low + slope * (rows - before)
    after, high = curve[place]
    return high - (high - low) * (after - rows) / (after - before)


def _below(curve: _Curve, rows: float) -> float:
    """Fewer rows than were ever run, or a part of one: on the first slope, where there is one, at least in proportion.

    Masked rows are parts of rows: what seems to be saved by running them together decides how many do.
    """
    count, seconds = curve[0]
    if len(curve) == 1:
        return seconds * (1 + rows / count) / 2  # between proportional and constant
    after, high = curve[1]
    slope = (high - seconds) / (after - count)
    return max(seconds - slope * (count - rows), seconds * rows / count)


def _area(shape: Shape) -> int:
    return shape[0] * shape[1]


def _ratio(shape: Shape, lender: Shape) -> float:
    return _area(shape) / _area(lender) if _area(shape) and _area(lender) else 1.0
