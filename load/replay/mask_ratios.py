"""How large masks are in production: what of a picture's tokens edits redraw, by where they come from.

InstGenIE gives the averages of three data sets, .11, .19 and .35, and no more. The shapes here are Beta distributions,
the usual ones of shares, with these averages: masks of the two traces are of any size and mostly small (the density
falls, or rises and falls early), those of try-on all cover an upper body and are much alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRatios:
    """Of one data set. mean: of the shares, 0 to 1. concentration: sum of both of the Beta distribution's parameters.

    The standard deviation is sqrt(mean * (1 - mean) / (concentration + 1)).
    """

    name: str
    mean: float
    concentration: float

    def draw(self, chance: random.Random) -> Iterator[float]:
        """Shares for ever, each by itself."""
        first = self.mean * self.concentration
        while True:
            yield chance.betavariate(first, self.concentration - first)


# Beta(1, 8.1): standard deviation .10, median .08, one in ten above .25.
PRODUCTION = MaskRatios(name="production", mean=0.11, concentration=9.1)
# Beta(1.4, 6): standard deviation .13, median .16, one in ten above .38.
PUBLIC = MaskRatios(name="public", mean=0.19, concentration=7.4)
# Beta(9, 16.7): standard deviation .09, nine in ten between .21 and .51.
TRY_ON = MaskRatios(name="try-on", mean=0.35, concentration=25.7)
TRACES = (PRODUCTION, PUBLIC, TRY_ON)
