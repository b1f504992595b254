"""How the rate of requests changes over a run: a curve as a day has one, and bursts on top of it."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from bottega.errors import ConfigError
from bottega.strict import STRICT

Seconds = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstShape:
    """One burst in each part of the run of every_s, somewhere in it, of length_s. times: as many requests as between
    bursts. The run's own rate is that of all of it, bursts included.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    times: Annotated[float, Field(ge=1)] = 10.0
    length_s: Seconds = 5.0
    every_s: Seconds = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Intensity:
    """Pieces of a run, each with a constant rate. edges: seconds, one more than weights. weights: relative rates."""

    edges: tuple[float, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(
        cls, curve: Sequence[float], bursts: BurstShape | None, *, length_s: float, chance: random.Random
    ) -> Intensity:
        """curve: weights of equally long parts; none is one part. Raises ConfigError for shapes that make no rate."""
        parts = [*curve] or [1.0]
        if not any(parts):
            raise ConfigError("arrivals.curve: all parts are 0, so that no request could come")
        burst_at = _bursts(bursts, length_s, chance) if bursts else []
        edges = {0.0, length_s, *(length_s * number / len(parts) for number in range(1, len(parts)))}
        edges |= {min(edge, length_s) for burst in burst_at for edge in burst}
        ordered = sorted(edges)
        weights = []
        for first, last in itertools.pairwise(ordered):
            middle = (first + last) / 2
            weight = parts[min(int(middle / length_s * len(parts)), len(parts) - 1)]
            in_burst = any(begin <= middle < end for begin, end in burst_at)
            weights.append(weight * bursts.times if bursts and in_burst else weight)
        return cls(edges=tuple(ordered), weights=tuple(weights))

    def times(self, places: Sequence[float]) -> list[float]:
        """Seconds at which those shares of all requests have come. places: 0 to below 1."""
        masses = [
            (last - first) * weight
            for (first, last), weight in zip(itertools.pairwise(self.edges), self.weights, strict=True)
        ]
        reached = [0.0, *itertools.accumulate(masses)]
        times = []
        for place in places:
            mass = place * reached[-1]
            piece = bisect_right(reached, mass) - 1  # one with a weight, as less than all of the mass is wanted
            times.append(self.edges[piece] + (mass - reached[piece]) / self.weights[piece])
        return times


def _bursts(shape: BurstShape, length_s: float, chance: random.Random) -> list[tuple[float, float]]:
    """Where each begins and ends."""
    if shape.length_s >= shape.every_s:
        raise ConfigError(
            f"arrivals.bursts: one of {shape.length_s:g} s every {shape.every_s:g} s is no burst: length_s must be less"
        )
    if length_s < shape.length_s:
        raise ConfigError(
            f"arrivals.bursts: a run of {length_s:g} s is shorter than one burst of {shape.length_s:g} s: "
            "make it longer, or say --no-bursts"
        )
    found = []
    begin_s = 0.0
    while begin_s < length_s:
        room_s = min(shape.every_s, length_s - begin_s) - shape.length_s
        if room_s >= 0:
            at_s = begin_s + chance.uniform(0.0, room_s)
            found.append((at_s, at_s + shape.length_s))
        begin_s += shape.every_s
    return found
