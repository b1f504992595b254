"""Decides how many requests should run together, from the cost of a turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from heapq import heapify, heappop, heapreplace

from bottega.planning.work import RemainingWork

# Number of requests that are considered. More of them would raise only the cost of the choice.
_HORIZON = 32

MAX_BACKLOG = 16
"""Number of queued requests that are considered beside those of a worker. It need not be told of more."""

# How much worse the mean may get for a wider group. A wider group is fairer, because its last member ends earlier, and
# it can admit the next arrival, which the sum does not count.
_TOLERANCE = 0.05
# Upper bound of that, as a share of the works' own times. Sharing a turn without gain costs each work half of it, which
# disappears in the mean of a long queue.
_MOST_TOLERANCE = 0.15


def completion_times(works: Sequence[RemainingWork], seconds: Callable[[float], float], width: int) -> list[float]:
    """Return the seconds until each of `works` ends, first come first served, with at most `width` at once.

    Args:
        seconds: Cost of one turn by its number of rows.
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
    """Return the sum of `completion_times`, which alone decides the width."""
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
    """Return how many may run together in a trial turn, if `width` pay off.

    It is twice as many: if that still does not pay, the first request is delayed by little more than one turn.
    """
    return 2 * width


def best_width(works: Sequence[RemainingWork], seconds: Callable[[float], float], *, max_rows: int) -> int:
    """Return how many of `works`, first come first served, should run together: 1 to 32, or 0 if there are none.

    It is the largest width whose mean completion time is within 5 % of the best, and within 15 % of a work's own time.
    If doubling a group doubles its turn, as with a large model, that is 1 for works of equal length. It is more if a
    turn has a fixed cost to share, or if a short work would wait for a long one.

    Args:
        max_rows: Bound on the rows of one turn. A first work beyond it still runs, alone.
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
