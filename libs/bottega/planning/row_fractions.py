"""What rows cost of which a part of the tokens is computed, as fractions of plain rows: learnt from turns that ran."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from bottega.planning.cost import MAX_SHAPES, Shape, StepTimes

# What of a row's cost does not shrink with its tokens, until it is measured: convolutions in full, keys and values of
# all tokens. With SDXL's share of transformers, .8, it is about this.
_FIRST_FIXED = 0.35
# Weight of a new measurement.
_WEIGHT = 0.2
# Of tokens, so that few kinds of edits are told apart.
_SHARES = 32
# Least cost of any row: beyond it a turn was measured on a machine that had just been held up.
_LEAST = 0.02


class RowFractions:
    """By latent shape, which part of a row's cost is fixed; the rest is in proportion to the computed share of tokens.

    A shape that never ran costs as the one that ran last. Of more than MAX_SHAPES, the one that ran longest ago is
    forgotten.
    """

    def __init__(self) -> None:
        self._fixed: dict[Shape, float] = {}

    def fraction(self, shape: Shape, share: float) -> float:
        """Of a plain row's cost, what a row costs of which such a share of the tokens is computed; above 0 to 1."""
        fixed = self._known(shape)
        return min(1.0, max(_LEAST, fixed + (1.0 - fixed) * share))

    def observe(self, times: StepTimes, shape: Shape, *, rows: int, shares: Sequence[float], seconds: float) -> None:
        """Takes in a turn of so many rows, of which some computed these shares, and the others all.

        times: of plain rows, which say what the turn would have taken. A turn that says nothing changes nothing.
        """
        saved = sum(1.0 - share for share in shares)
        measured = rows_in(times, shape, seconds, most=rows)
        if measured is None or saved <= 0.0:
            return
        # rows - measured rows were saved; without a fixed part it would have been `saved`.
        fixed = min(1.0, max(0.0, 1.0 - (rows - measured) / saved))
        before = self._fixed.pop(shape, None)
        self._fixed[shape] = fixed if before is None else before + _WEIGHT * (fixed - before)
        if len(self._fixed) > MAX_SHAPES:
            del self._fixed[next(iter(self._fixed))]

    def entries(self) -> Iterator[tuple[Shape, float]]:
        """Everything measured: shape and fixed part, the shape that ran last at the end."""
        yield from self._fixed.items()

    @classmethod
    def from_entries(cls, entries: Iterable[tuple[Shape, float]]) -> RowFractions:
        """The same on the other side of a wire. Left out are parts that are none, and shapes beyond MAX_SHAPES."""
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
    """Up to the next of few shares of tokens: edits that compute about as much are alike to whoever plans for them."""
    return math.ceil(share * _SHARES) / _SHARES


def rows_in(times: StepTimes, shape: Shape, seconds: float, *, most: int) -> float | None:
    """How many plain rows, at most `most`, a turn of so many seconds has; None where nothing was measured."""
    if times.seconds(shape, most) is None:
        return None
    low, high = 0.0, float(most)
    for _ in range(30):
        middle = (low + high) / 2
        taken = times.seconds(shape, middle)
        low, high = (middle, high) if taken is not None and taken < seconds else (low, middle)
    return high
