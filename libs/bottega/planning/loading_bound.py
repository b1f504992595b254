"""A lower bound of when blocks can end while their recorded output is loaded, and the worth of a second of loading."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter

Costs = tuple[float, float, float, float]
"""Seconds of a block: full_s, masked_s, load_s, ready_s; see `bottega.planning.block_loading.BlockCost`."""

# Ratios that differ by less belong to one kind of blocks.
_ALIKE = 1e-9


class LoadingBound:
    """A relaxation in which a load may be used before it has ended, if all loads have ended when all is computed.

    If computing has reached C and loading L, and everything loaded was used, the end T cannot be before (C + p L +
    rests[i]) / (1 + p), for any price p >= 0 of a second of loading. T is at least C plus the rest's computing, and at
    least L plus the rest's loading. p weighs the two, and each block's part of their sum is at least the lesser of
    computing it in full and of loading it. T is also not before C + frees[i], the rest's time if all of it is loaded.

    `price` is the p with the largest bound at the beginning: the seconds that a second of loading saves in the block
    that is just worth it. `rests`, `frees` and `leads` have a value for each block and all blocks after it, and one
    more at the end. `leads` is how far loading must be ahead of computing, so that no block that saves more than
    `price` waits.
    """

    def __init__(self, blocks: Sequence[Costs], load_busy_s: float) -> None:
        self._full_s = sum(map(_alone_s, blocks))
        self._relaxed_s, self.price = _relaxed(blocks, load_busy_s, self._full_s)
        self.rests = _suffix_sums([min(full, masked + self.price * load) for full, masked, load, _ in blocks])
        self.frees = _suffix_sums([min(full, masked) for full, masked, _, _ in blocks])
        self.leads = _leads(blocks, self.price)

    @property
    def least_s(self) -> float:
        """Lower bound of the end of any plan."""
        return min(self._full_s, max(self._relaxed_s, self.frees[0]))


def _relaxed(blocks: Sequence[Costs], load_busy_s: float, full_s: float) -> tuple[float, float]:
    """Return the earliest end if parts of blocks could be loaded, best savings first, and the price."""
    compute_s, busy_s = full_s, load_busy_s
    offers = [((full - masked) / load, full - masked, load) for full, masked, load, _ in blocks if load > 0.0]
    for worth, saved_s, load_s in sorted(offers, key=itemgetter(0), reverse=True):
        if saved_s <= 0.0:
            break
        part = max(0.0, (compute_s - busy_s) / (saved_s + load_s))
        if part < 1.0:
            return compute_s - part * saved_s, worth
        compute_s, busy_s = compute_s - saved_s, busy_s + load_s
    return compute_s, 0.0


def _leads(blocks: Sequence[Costs], price: float) -> list[float]:
    lead_s, leads = 0.0, [0.0]
    for full_s, masked_s, load_s, _ in reversed(blocks):
        if load_s > 0.0 and full_s - masked_s > (1.0 + _ALIKE) * price * load_s:
            lead_s = max(load_s, lead_s + load_s - masked_s)
        else:
            lead_s = max(0.0, lead_s - _alone_s((full_s, masked_s, load_s, 0.0)))
        leads.append(lead_s)
    return leads[::-1]


def _alone_s(block: Costs) -> float:
    """Return the seconds of a block without loading anything."""
    full_s, masked_s, load_s, _ = block
    return full_s if load_s > 0.0 else min(full_s, masked_s)


def _suffix_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values), initial=0.0))[::-1]
