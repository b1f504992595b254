"""Decides how many rows of a turn the other worker of a pair should compute."""

from __future__ import annotations

from collections.abc import Callable

# Sharing a turn must save at least this share; less is within the noise of the measured times.
_LEAST_GAIN = 0.05

Seconds = Callable[[float], float | None]
"""Seconds of a forward by its number of rows; None if nothing was measured."""


def rows_to_offload(
    rows: int, offloadable: int, *, own: Seconds, theirs: Seconds, backlog: int, saved: float = 0.0
) -> int:
    """Return how many of `rows` rows the other worker should compute, so that the turn ends earliest.

    It returns 0 if sharing saves less than 5 % of the turn.

    Args:
        offloadable: How many rows may be offloaded.
        own: Seconds of a local forward.
        theirs: Seconds of a forward at the peer, with transfer.
        backlog: Requests that wait for a worker. Nothing is offloaded then: two workers that share a request achieve
            less than two that have one each, because half the rows take more than half the time.
        saved: How many rows' worth of time the rows that stay save by computing only part of their tokens.
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
