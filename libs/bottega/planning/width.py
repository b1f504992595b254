"""How many requests should run together, from what a turn costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from heapq import heapify, heappop, heapreplace

from bottega.planning.work import RemainingWork

# Requests looked at: more than this many waiting changes nothing in the choice, only in its cost.
_HORIZON = 32

MAX_BACKLOG = 16
"""Requests in a queue that are imagined beside those of a worker; of more it need not be told."""

# How much worse the mean may get for a wider group. The wider group is fairer (its last member ends
# earlier) and can still admit the next arrival, which the closed sum does not count.
_TOLERANCE = 0.05
# And by how much at most, in shares of what the works take alone. Sharing a turn without gain costs each of
# them half of that, which vanishes in the mean of a long line.
_MOST_TOLERANCE = 0.15


def completion_times(works: Sequence[RemainingWork], seconds: Callable[[float], float], width: int) -> list[float]:
    """Seconds until each of `works` ends, first come first served, at most `width` (1 or more) of them at once.

    seconds: cost of one turn by the number of its rows.
    """
    ends = [0.0] * len(works)
    # The turn after which each ends, and its place in `works`.
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
    """The sum of what `completion_times` says: a width is chosen by it alone."""
    # The turn after which each ends, and its rows.
    running: list[tuple[int, float]] = list(works[:width])
    heapify(running)
    rows = sum(each[1] for each in running)
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
    """How many may run together in a turn that is made to measure again what it takes, where `width` pay off.

    Twice as many: where that still does not pay, the first of them is held up by little more than one turn.
    """
    return 2 * width


def best_width(works: Sequence[RemainingWork], seconds: Callable[[float], float], *, max_rows: int) -> int:
    """How many of `works`, first come first served, should run together: 1 to 32, 0 when there are none.

    The widest of those whose mean completion time is within 5 % of the best, and within 15 % of a work's own
    time. Where doubling a group doubles its turn, as with a large model, that is 1 for works of equal length;
    where a turn has a fixed cost to share, more, and also where a short work would wait for a long one.
    max_rows: bound on the rows of one turn; a first work beyond it still runs, alone.
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
    # Also where turns take no time that there is, such as NaN: then nothing is within any bound.
    return min(1, len(sums))
