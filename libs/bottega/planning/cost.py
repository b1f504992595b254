"""Measured seconds of forward passes by latent shape and batch rows, and the cost of rows that compute few tokens.

Forward passes with rows of several shapes have a factor of their own.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Shape = tuple[int, int]
"""Latent height and width."""

MAX_SHAPES = 32
"""Maximum number of shapes with measurements. Callers choose shapes, and every report to the gateway contains all of
them."""

# Turns after which a new measurement weighs a tenth. It is large enough to absorb a busy neighbour, and small enough to
# follow a change of clock speed within about twenty turns.
_SETTLED = 10
# After this many turns of any shape, a row count that did not run is outdated: a few seconds of a small model, a few
# minutes of a large one. By then a download at the start or a busy neighbour may be gone.
OUTDATED_TURNS = 200
# At most one turn in this many is a trial, which may turn out to be too wide.
TRIAL_PAUSE_TURNS = 100
# The part of a row's cost that does not shrink with its tokens, until it is measured: convolutions in full, keys and
# values of all tokens. It is about this with SDXL's share of transformers, .8.
_FIRST_FIXED = 0.35
# Weight of a new measurement.
_WEIGHT = 0.2
# Token shares are rounded to this many values, so that there are few kinds of edits.
_SHARES = 32
# Least cost of any row. A lower result means that the plain turns were measured on a delayed machine.
_LEAST = 0.02


class StepTimes:
    """Estimates the seconds of one forward pass ("turn") from shape and number of batch rows, from passes that ran.

    It interpolates between measured row counts and extends the last slope beyond them. The estimate never falls as rows
    grow: a turn that took longer than one of more rows was delayed. A shape that never ran uses the times of the
    nearest shape in proportion to the area; once it has run with one row count, it only uses that shape's growth with
    rows. A shape without area is unknown and uses the times unchanged. Of more than MAX_SHAPES shapes, the one that ran
    longest ago is dropped.

    A row count that seems too slow is not chosen, so its time would never be corrected. `outdated` tells which row
    count to try again. It changes nothing else: seconds are always measured.
    """

    def __init__(self) -> None:
        self._means: dict[Shape, dict[int, _Mean]] = {}
        self._curves: dict[Shape, _Curve] = {}
        self._turns = 0
        self._tried_at = -TRIAL_PAUSE_TURNS

    def observe(self, shape: Shape, rows: int, seconds: float, *, fewest_rows: int | None = None) -> None:
        """Record the duration of one forward pass ("turn").

        An outlier, for example of a paused machine, counts as at most twice the expected time. The first turns of a row
        count are averaged; later, the weight of old ones decays. An outdated row count that was faster than before is
        measured anew. One that was slower is averaged, because the first turn after a long time is often slow. If fewer
        rows now take longer than an outdated row count, that count is raised to their time.

        Args:
            fewest_rows: The smallest row count that takes as long as `rows`, because it is padded to `rows`.
        """
        self._turns += 1
        known = self._means[shape] = self._means.pop(shape, {})  # dictionary order: the newest is last
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
        """Return the expected seconds of a forward pass with `rows` rows, which may be a fraction; None if unknown."""
        if rows <= 0:
            return 0.0
        curve = self._curves.get(shape)
        if curve is not None and len(curve) > 1:  # the usual case: the scheduler asks a hundred times per decision
            return _along(curve, rows)
        if shape in self._means:
            return self._measured(shape, rows)
        lender = self._nearest(shape, row_counts=1)
        return None if lender is None else self._measured(lender, rows) * relative_area(shape, lender)

    def outdated(self, shape: Shape, rows: int) -> bool:
        """Return whether a forward pass ("turn") with `rows` rows should be tried although it seems too slow.

        That is so if its time was measured at least OUTDATED_TURNS ago and the last trial was at least
        TRIAL_PAUSE_TURNS ago. Row counts are never tried that are higher than all with which the shape, or the shape
        whose times it uses, ever ran.
        """
        if self._turns - self._tried_at < TRIAL_PAUSE_TURNS:
            return False
        source = shape if len(self._means.get(shape, ())) > 1 else self._nearest(shape, row_counts=2)
        known = self._means[source] if source is not None else {}
        measured = min((count for count in known if count >= rows), default=None)
        return measured is not None and self._age(known[measured]) >= OUTDATED_TURNS

    def tried(self) -> None:
        """Record that an outdated row count was tried. None is tried for the next TRIAL_PAUSE_TURNS forward passes."""
        self._tried_at = self._turns

    @property
    def turns(self) -> int:
        """Number of forward passes that have been recorded."""
        return self._turns

    def entries(self) -> Iterator[tuple[Shape, int, float]]:
        """Yield all measurements: shape, rows, seconds."""
        for shape, known in self._means.items():
            for rows, mean in known.items():
                yield shape, rows, mean.seconds

    @classmethod
    def from_entries(
        cls, entries: Iterable[tuple[Shape, int, float]], outdated: Collection[tuple[Shape, int]] = ()
    ) -> StepTimes:
        """Rebuild a table from the entries that another process sent.

        It ignores entries without rows, time or area, and shapes beyond MAX_SHAPES.

        Args:
            outdated: Shapes and rows of the entries that are outdated.
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
        """Return the shape of the nearest area that ran with at least `row_counts` different row counts, or None."""
        able = (other for other, known in self._means.items() if len(known) >= row_counts)
        return min(able, key=lambda other: abs(_area(other) - _area(shape)), default=None)

    def _curve(self, shape: Shape) -> _Curve:
        if shape not in self._curves:
            self._curves[shape] = _rising(self._means[shape])
        return self._curves[shape]


@dataclass(slots=True, kw_only=True)
class _Mean:
    """Mean seconds of forward passes. Once there are enough, the weight of old ones decays."""

    seconds: float
    turns: int = 1
    measured_at: int = 0
    """Number of the forward pass, among those that the table has seen, in which the mean was last updated."""

    def add(self, seconds: float) -> None:
        self.turns = min(self.turns + 1, _SETTLED)
        self.seconds += (min(seconds, 2 * self.seconds) - self.seconds) / self.turns


_Curve = list[tuple[float, float]]


def _rising(known: dict[int, _Mean]) -> _Curve:
    """Return row counts and seconds in order, where each time is lowered to the later ones if it is longer."""
    curve: _Curve = []
    least = math.inf
    for rows in sorted(known, reverse=True):
        least = min(least, known[rows].seconds)
        curve.append((rows, least))
    return curve[::-1]


def _along(curve: _Curve, rows: float) -> float:
    """Return the value of the piecewise linear `curve` at `rows`."""
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
    """Return the seconds of fewer rows than ever ran: on the first slope, but at least in proportion to rows.

    Masked rows count as fractions of rows, and the gain of running them together determines how many do.
    """
    count, seconds = curve[0]
    if len(curve) == 1:
        return seconds * (1 + rows / count) / 2  # between proportional and constant
    after, high = curve[1]
    slope = (high - seconds) / (after - count)
    return max(seconds - slope * (count - rows), seconds * rows / count)


class PackedTimes:
    """The seconds of forward passes whose rows have several shapes, relative to those of one shape.

    Such a pass is compared with one of as many latent elements in rows of its largest shape.

    Args:
        times: Times of forward passes of one shape.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._mean = _Mean(seconds=1.0)

    @property
    def ratio(self) -> float:
        """Mean measured ratio. It is 1 before the first measurement, and again OUTDATED_TURNS after the last one."""
        return 1.0 if self._is_outdated else self._mean.seconds

    def seconds(self, rows: Mapping[Shape, float]) -> float | None:
        """Return the expected seconds of a forward pass with so many rows of each shape; None if unknown."""
        expected_s = self._of_one_shape(rows)
        return None if expected_s is None else self.ratio * expected_s

    def observe(self, rows: Mapping[Shape, float], seconds: float) -> None:
        """Record a forward pass with so many rows of each shape. Ignored while no shape has a measured time."""
        expected_s = self._of_one_shape(rows)
        if not expected_s:
            return
        if self._is_outdated:
            self._mean = _Mean(seconds=1.0)
        self._mean.add(seconds / expected_s)
        self._mean.measured_at = self._times.turns

    def _of_one_shape(self, rows: Mapping[Shape, float]) -> float | None:
        """Return the expected seconds of as many latent elements in rows of the largest shape."""
        largest = max(rows, key=_area)
        return self._times.seconds(largest, sum(relative_area(shape, largest) * rows[shape] for shape in rows))

    @property
    def _is_outdated(self) -> bool:
        return self._times.turns - self._mean.measured_at >= OUTDATED_TURNS


def _area(shape: Shape) -> int:
    return shape[0] * shape[1]


def relative_area(shape: Shape, other: Shape) -> float:
    """Return the area of a shape as a multiple of another one's; 1 if either has none."""
    return _area(shape) / _area(other) if _area(shape) and _area(other) else 1.0


class RowFractions:
    """The fixed part of a row's cost, as a fraction, by latent shape.

    The rest is proportional to the share of tokens that is computed.

    A shape that never ran is assumed to be like the one that ran last. Of more than MAX_SHAPES, the one that ran
    longest ago is dropped.
    """

    def __init__(self) -> None:
        self._fixed: dict[Shape, float] = {}

    def fraction(self, shape: Shape, share: float) -> float:
        """Return the cost of a row that computes this share of its tokens, relative to all of them; in (0, 1]."""
        fixed = self._known(shape)
        return min(1.0, max(_LEAST, fixed + (1.0 - fixed) * share))

    def observe(self, times: StepTimes, shape: Shape, *, rows: int, shares: Sequence[float], seconds: float) -> None:
        """Record a forward pass with `rows` rows, some of which computed only these shares of their tokens.

        A forward pass that says nothing about the fixed part changes nothing.

        Args:
            times: Times of rows that compute all tokens, to estimate the time of the same pass without masks.
        """
        saved = sum(1.0 - share for share in shares)
        measured = rows_in(times, shape, seconds, most=rows)
        if measured is None or saved <= 0.0:
            return
        # rows - measured rows were saved. Without a fixed part it would have been `saved`.
        fixed = min(1.0, max(0.0, 1.0 - (rows - measured) / saved))
        before = self._fixed.pop(shape, None)
        self._fixed[shape] = fixed if before is None else before + _WEIGHT * (fixed - before)
        if len(self._fixed) > MAX_SHAPES:
            del self._fixed[next(iter(self._fixed))]

    def entries(self) -> Iterator[tuple[Shape, float]]:
        """Yield all measurements: shape and fixed part. The shape that ran last comes last."""
        yield from self._fixed.items()

    @classmethod
    def from_entries(cls, entries: Iterable[tuple[Shape, float]]) -> RowFractions:
        """Rebuild the object from another process's entries, ignoring invalid ones and those beyond MAX_SHAPES."""
        fractions = cls()
        for shape, fixed in entries:
            if math.isfinite(fixed) and 0.0 <= fixed <= 1.0 and len(fractions._fixed) < MAX_SHAPES:
                fractions._fixed[shape] = fixed
        return fractions

    def _known(self, shape: Shape) -> float:
        if shape in self._fixed:
            return self._fixed[shape]
        return next(reversed(self._fixed.values()), _FIRST_FIXED)


def rounded_share(share: float) -> float:
    """Return the share rounded up to one of a few values, so that similar edits are planned alike."""
    return math.ceil(share * _SHARES) / _SHARES


def rows_in(times: StepTimes, shape: Shape, seconds: float, *, most: int) -> float | None:
    """Return how many rows that compute all tokens, up to `most`, take `seconds`; None without measurements."""
    if times.seconds(shape, most) is None:
        return None
    low, high = 0.0, float(most)
    for _ in range(30):
        middle = (low + high) / 2
        taken = times.seconds(shape, middle)
        low, high = (middle, high) if taken is not None and taken < seconds else (low, middle)
    return high
