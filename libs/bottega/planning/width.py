"""Decides how many requests run together in a batch and on which worker, from the cost of forward passes.

This module alone computes the work of a request: its rows and steps with guidance, image-to-image and ControlNets. A
turn is one forward pass of a batch; each request in it makes one step. Workers report the seconds of a step by its
number of rows as a small table.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from bottega.planning.cost import MAX_SHAPES, Shape

# Number of requests that are considered. More of them would raise only the cost of the choice.
_HORIZON = 32

MAX_BACKLOG = 16
"""Maximum number of queued requests that decisions consider. Callers need not report a longer queue."""

# How much worse the mean may get for a wider group. A wider group is fairer, because its last member ends earlier, and
# it can admit the next arrival, which the sum does not count.
_TOLERANCE = 0.05
# Upper bound of that, as a share of the works' own times. Sharing a turn without gain costs each work half of it, which
# disappears in the mean of a long queue.
_MOST_TOLERANCE = 0.15
# Sharing a turn must save at least this share; less is within the noise of the measured times.
_LEAST_GAIN = 0.05

Seconds = Callable[[float], float | None]
"""Returns the seconds of a forward pass from its number of rows; None without measurements."""


class RemainingWork(NamedTuple):
    """The work that a request still needs. It is a tuple because the scheduler makes hundreds per decision."""

    steps: int
    """Number of remaining steps."""
    rows: float
    """Batch rows of the request (two per image if guided), in multiples of a row that computes all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often a sampler evaluates the network."""

    per_step: int = 1
    """Evaluations in each step."""
    extra: int = 0
    """Evaluations of a picture beside those; negative if the last step makes fewer."""

    def evaluations(self, steps: int) -> int:
        """Return the number of evaluations in the last `steps` steps of a picture."""
        return max(steps, self.per_step * steps + self.extra)


def rows_per_image(guidance_scale: float) -> int:
    """Return the batch rows of an image: 2 with classifier-free guidance, else 1."""
    return 2 if guidance_scale > 1.0 else 1


def steps_to_run(num_inference_steps: int, strength: float | None, *, flows: bool = False) -> int:
    """Return the number of denoising steps of one image. A strength means image-to-image, which skips the first steps.

    Args:
        num_inference_steps: Number of steps of the whole schedule.
        strength: Strength of image-to-image; None if no step is skipped.
        flows: Whether the model was trained with flow matching. A part of a step is then a whole one.

    Source: get_timesteps of Diffusers' StableDiffusionXLImg2ImgPipeline and StableDiffusion3Img2ImgPipeline.
    """
    if strength is None:
        return num_inference_steps
    if flows:
        return num_inference_steps - int(max(num_inference_steps - num_inference_steps * strength, 0))
    return min(int(num_inference_steps * strength), num_inference_steps)


def control_steps(start: float, end: float, steps: int) -> tuple[int, int]:
    """Return the steps [first, last) of `steps` in which a ControlNet is active; (0, 0) if there are none.

    Source: controlnet_keep of Diffusers' StableDiffusionXLControlNetPipeline, with the same divisions.

    Args:
        start: control_guidance_start, a fraction of the steps that run.
        end: control_guidance_end, a fraction of the steps that run.
    """
    active = [step for step in range(steps) if step / steps >= start and (step + 1) / steps <= end]
    return (active[0], active[-1] + 1) if active else (0, 0)


def completion_times(works: Sequence[RemainingWork], seconds: Callable[[float], float], width: int) -> list[float]:
    """Return the seconds until each of `works` ends, first come first served, with at most `width` in a batch.

    Args:
        seconds: Returns the seconds of a forward pass from its number of rows.
    """
    ends = [0.0] * len(works)
    # The turn after which each work ends, and its place in `works`.
    running = [(work.steps, place) for place, work in enumerate(works[:width])]
    heapify(running)
    rows = sum((work.rows for work in works[:width]), 0.0)
    clock, turn, arrived = 0.0, 0, len(running)
    while running:
        end, ended = running[0]
        if end > turn:
            clock += (end - turn) * seconds(rows)
            turn = end
        ends[ended] = clock
        rows -= works[ended].rows
        if arrived < len(works):
            work = works[arrived]
            heapreplace(running, (turn + work.steps, arrived))
            rows += work.rows
            arrived += 1
        else:
            heappop(running)
    return ends


def _sum_of_completions(works: Sequence[RemainingWork], seconds: Callable[[float], float], width: int) -> float:
    """Return the sum of `completion_times`, which is all that the choice of a width needs."""
    # The turn after which each work ends, and its rows.
    running: list[tuple[int, float]] = list(works[:width])
    heapify(running)
    rows = sum(work_rows for _, work_rows in running)
    clock = total = 0.0
    turn = 0
    for steps, more_rows in works[width:]:
        end, ended_rows = running[0]
        if end > turn:
            clock += (end - turn) * seconds(rows)
            turn = end
        total += clock
        rows += more_rows - ended_rows
        heapreplace(running, (turn + steps, more_rows))
    running.sort()
    for end, ended_rows in running:
        if end > turn:
            clock += (end - turn) * seconds(rows)
            turn = end
        total += clock
        rows -= ended_rows
    return total


def most_on_trial(width: int) -> int:
    """Return how many requests may run together in a trial batch, if `width` of them are known to pay off.

    It is twice as many: if that still does not pay, the first request is delayed by little more than one forward pass.
    """
    return 2 * width


def best_width(works: Sequence[RemainingWork], seconds: Callable[[float], float], *, max_rows: int) -> int:
    """Return how many of `works`, first come first served, should run together: 1 to 32, or 0 if there are none.

    It is the largest width whose mean completion time is within 5 % of the best, and within 15 % of a work's own time.
    If doubling a batch doubles its time, as with a large model, that is 1 for works of equal length. It is more if a
    forward pass has a fixed cost to share, or if a short work would wait for a long one.

    Args:
        max_rows: Maximum rows of a batch. A first work beyond it still runs, alone.
    """
    seen = works[:_HORIZON]
    cost = cache(seconds)
    sums: list[float] = []
    rows = 0.0
    for width, work in enumerate(seen, start=1):
        rows += work.rows
        if width > 1 and rows > max_rows:
            break
        sums.append(_sum_of_completions(seen, cost, width))
    best, alone = min(sums, default=0.0), sum(work.steps * cost(work.rows) for work in seen)
    bound = best + min(_TOLERANCE * best, _MOST_TOLERANCE * alone)
    for width in range(len(sums), 1, -1):
        if sums[width - 1] <= bound:
            return width
    # Also for invalid turn times such as NaN, for which nothing is within the bound.
    return min(1, len(sums))


def rows_to_offload(
    rows: int, offloadable: int, *, own: Seconds, theirs: Seconds, backlog: int, saved: float = 0.0
) -> int:
    """Return how many of `rows` rows a second worker should compute, so that the forward pass ends earliest.

    It returns 0 if sharing saves less than 5 % of the time.

    Args:
        offloadable: Maximum number of rows that may be offloaded.
        own: Seconds of a forward pass on this worker.
        theirs: Seconds of a forward pass on the other worker, with transfer.
        backlog: Requests that wait for a worker. If there are any, nothing is offloaded: two workers that share a
            request achieve less than two that have one each, because half the rows take more than half the time.
        saved: Time that rows on this worker save by computing only part of their tokens, in plain rows.
    """
    if backlog > 0 or offloadable < 1 or rows < 2:
        return 0
    alone_s = own(rows - saved)
    if alone_s is None:
        return min(offloadable, rows // 2)  # nothing is known: split equally
    best, best_s = 0, alone_s * (1 - _LEAST_GAIN)
    for offloaded in range(1, min(offloadable, rows - 1) + 1):
        here_s, there_s = own(rows - offloaded - saved), theirs(offloaded)
        shared_s = max(here_s or 0.0, there_s if there_s is not None else own(offloaded) or 0.0)
        if shared_s < best_s:
            best, best_s = offloaded, shared_s
    return best


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
