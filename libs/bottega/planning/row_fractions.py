"""The cost of rows that compute only part of their tokens, as fractions of plain rows, learnt from turns that ran."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from bottega.planning.cost import MAX_SHAPES, Shape, StepTimes

# The part of a row's cost that does not shrink with its tokens, until it is measured: convolutions in full, keys and
# values of all tokens. It is about this with SDXL's share of transformers, .8.
_FIRST_FIXED = 0.35
# Weight of a new measurement.
_WEIGHT = 0.2
# Token shares are rounded to this many values, so that there are few kinds of edits.
_SHARES = 32
# Least cost of any row. A lower result means that the plain turns were measured on a delayed machine.
_LEAST = 0.02


class RowFractions:
    """The fixed part of a row's cost, by latent shape.

    The rest is proportional to the share of tokens that is computed.

    A shape that never ran costs as much as the one that ran last. Of more than MAX_SHAPES, the one that ran longest ago
    is forgotten.
    """

    def __init__(self) -> None:
        self._fixed: dict[Shape, float] = {}

    def fraction(self, shape: Shape, share: float) -> float:
        """Return the cost of a row that computes this share of its tokens, in plain rows; in (0, 1]."""
        fixed = self._known(shape)
        return min(1.0, max(_LEAST, fixed + (1.0 - fixed) * share))

    def observe(self, times: StepTimes, shape: Shape, *, rows: int, shares: Sequence[float], seconds: float) -> None:
        """Record a turn of `rows` rows, some of which computed only these shares of their tokens.

        A turn without information changes nothing.

        Args:
            times: Times of plain rows, which tell what the whole turn would have taken.
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
        """Yield everything measured: shape and fixed part. The shape that ran last comes last."""
        yield from self._fixed.items()

    @classmethod
    def from_entries(cls, entries: Iterable[tuple[Shape, float]]) -> RowFractions:
        """Return the same object at the other end of a wire, without invalid parts and shapes beyond MAX_SHAPES."""
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
    """Return how many plain rows, up to `most`, take `seconds`; None if nothing was measured."""
    if times.seconds(shape, most) is None:
        return None
    low, high = 0.0, float(most)
    for _ in range(30):
        middle = (low + high) / 2
        taken = times.seconds(shape, middle)
        low, high = (middle, high) if taken is not None and taken < seconds else (low, middle)
    return high
