"""Decides how many requests run together in a batch and on which worker, from the cost of forward passes.

This module alone computes the work of a request: its rows and steps with guidance, image-to-image and ControlNets. A
turn is one forward pass of a batch; each request in it makes one step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

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


def steps_to_run(num_inference_steps: int, strength: float | None) -> int:
    """Return the number of denoising steps of one image. A strength means image-to-image, which skips the first steps.

    Source: get_timesteps of Diffusers' StableDiffusionXLImg2ImgPipeline.
    """
    if strength is None:
        return num_inference_steps
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
