"""How many requests should run together, from what a turn costs. Knows no shapes and no clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bottega.planning.cost import Work

# Requests looked at: more than this many waiting changes nothing in the choice, only in its cost.
_HORIZON = 32

# How much worse the mean may get for a wider group. The wider group is fairer (its last member ends
# earlier) and keeps the door open for the next arrival, which the closed sum cannot see.
_TOLERANCE = 0.05


def completion_times(works: Sequence[Work], seconds: Callable[[int], float], width: int) -> list[float]:
    """Seconds until each of `works` ends, first come first served, at most `width` of them at once.

    seconds: cost of one turn by the number of its rows.
    """
    ends = [0.0] * len(works)
    left: dict[int, int] = {}
    clock, arrived = 0.0, 0
    while arrived < len(works) or left:
        while arrived < len(works) and len(left) < width:
            left[arrived] = works[arrived].steps
            arrived += 1
        turns = min(left.values())
        clock += turns * seconds(sum(works[index].rows for index in left))
        for index in list(left):
            left[index] -= turns
            if left[index] <= 0:
                ends[index] = clock
                del left[index]
    return ends


def best_width(works: Sequence[Work], seconds: Callable[[int], float], *, max_rows: int) -> int:
    """How many of `works`, first come first served, should run together: 1 to len(works).

    The widest of those whose mean completion time is within 5 % of the best. Where doubling a group
    doubles its turn, as with a large model, that is 1; where a turn has a fixed cost to share, more.
    max_rows: bound on the rows of one turn; a first work beyond it still runs, alone.
    """
    seen = works[:_HORIZON]
    means: list[float] = []
    for width in range(1, len(seen) + 1):
        if width > 1 and sum(work.rows for work in seen[:width]) > max_rows:
            break
        ends = completion_times(seen, seconds, width)
        means.append(sum(ends))
    if not means:
        return 0
    bound = min(means) * (1 + _TOLERANCE)
    return max(index for index, mean in enumerate(means) if mean <= bound) + 1
