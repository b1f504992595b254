"""How early blocks can end at best whose recorded activations are loaded while they are computed: a lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol


class Costs(Protocol):
    """What the bound has to know of a block; see `bottega.planning.block_loading.BlockCost`."""

    @property
    def full_s(self) -> float: ...
    @property
    def masked_s(self) -> float: ...
    @property
    def load_s(self) -> float: ...


class LoadingBound:
    """The relaxation in which a load may be used before it has ended, if all loads have ended when all is computed.

    Whoever has computed until C and loaded until L cannot end before (C + p L + rests[i]) / (1 + p), for any price
    p >= 0 of a second of loading: the end T is at least C plus what the rest computes, and, where anything that was
    loaded is used, at least L plus what the rest loads; p weighs the two, and each block's part of their sum is the
    lesser of computing it in full and of taking it. Nor before C + frees[i], what the rest takes if all of it is here.

    price: the p with which the bound of the beginning is largest: seconds of computing that a second of loading saves
    in the block that is just worth it. rests, frees: by block, of it and of all behind it; one more at the end.
    """

    def __init__(self, blocks: Sequence[Costs], load_busy_s: float) -> None:
        self._full_s = sum(map(_alone_s, blocks))
        self._relaxed_s, self.price = _relaxed(blocks, load_busy_s, self._full_s)
        self.rests = _suffix_sums([_priced(block, self.price) for block in blocks])
        self.frees = _suffix_sums([min(block.full_s, block.masked_s) for block in blocks])

    @property
    def least_s(self) -> float:
        """No plan ends before."""
        return min(self._full_s, max(self._relaxed_s, self.frees[0]))


def _relaxed(blocks: Sequence[Costs], load_busy_s: float, full_s: float) -> tuple[float, float]:
    """The earliest end if parts of blocks could be taken, those that save most per second of loading; its price."""
    compute_s, load_s = full_s, load_busy_s
    for block in sorted(filter(_pays, blocks), key=_worth, reverse=True):
        saved_s = block.full_s - block.masked_s
        part = max(0.0, (compute_s - load_s) / (saved_s + block.load_s))
        if part < 1.0:
            return compute_s - part * saved_s, _worth(block)
        compute_s -= saved_s
        load_s += block.load_s
    return compute_s, 0.0


def _alone_s(block: Costs) -> float:
    """Without loading anything."""
    return block.full_s if block.load_s > 0.0 else min(block.full_s, block.masked_s)


def _pays(block: Costs) -> bool:
    return block.load_s > 0.0 and block.masked_s < block.full_s


def _worth(block: Costs) -> float:
    return (block.full_s - block.masked_s) / block.load_s


def _priced(block: Costs, price: float) -> float:
    return min(block.full_s, block.masked_s + price * block.load_s)


def _suffix_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values), initial=0.0))[::-1]
