"""How many rows of a turn the other worker of a pair should compute."""

from __future__ import annotations

from collections.abc import Callable

# What sharing a turn must save to be worth it: below that it is within the noise of the measured times.
_LEAST_GAIN = 0.05

Seconds = Callable[[float], float | None]
"""Seconds of a forward by the number of its rows; None while nothing was measured."""


def rows_to_offload(
    rows: int, offloadable: int, *, own: Seconds, theirs: Seconds, backlog: int, saved: float = 0.0
) -> int:
    """Of `rows` rows, those to be computed by the other worker meanwhile: those with which the turn ends first.

    offloadable: how many may be. own: seconds of a local forward; theirs: of one at the peer, with transfer.
    saved: what the rows that stay cost less than so many plain ones, in rows, where a part of their tokens is computed.
    backlog: requests that wait for a worker. Two workers that halve one request between them do less in all than two
    that have one each, because a forward of half the rows takes more than half the time; so nothing is offloaded while
    somebody waits.
    Returns 0 where sharing saves less than 5 % of the turn.
    """
    if backlog > 0 or offloadable < 1 or rows < 2:
        return 0
    alone_s = own(rows - saved)
    if alone_s is None:
        return min(offloadable, rows // 2)  # nothing is known: in equal parts
    best, best_s = 0, alone_s * (1 - _LEAST_GAIN)
    for offloaded in range(1, min(offloadable, rows - 1) + 1):
        here_s, there_s = own(rows - offloaded - saved), theirs(offloaded)
        shared_s = max(here_s or 0.0, there_s if there_s is not None else own(offloaded) or 0.0)
        if shared_s < best_s:
            best, best_s = offloaded, shared_s
    return best
