"""Decides which blocks of an edit load their recorded output, and which compute all tokens, to finish earliest.

A network's blocks are computed one after another. A block that loads its recorded output only computes masked tokens,
but cannot start before the output is loaded. Loads run one after another, too, in the order of use, and may run ahead
of computing. If loading is slower than computing, loading every block would leave gaps, so some blocks should rather be
computed in full.
Source: InstGenIE (2025), section 4.2, whose Algorithm 1 decides block by block; here all blocks are decided together.
This module knows neither tensors nor connections.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockValue:
    """The time that recording a block saves, and the bytes that it takes."""

    name: str
    saved_s: float
    """Seconds that an edit saves by using the block's recorded output."""
    size_bytes: int
    """Bytes of the recorded output."""


def choose(blocks: Iterable[BlockValue], budget_bytes: int | None) -> frozenset[str]:
    """Return the names of the blocks to record: those that save the most seconds per byte, as far as they fit.

    A block that saves nothing is never recorded. A block that does not fit is skipped, and later ones may fit. For
    blocks of one size, or small ones, this is the optimum. In general it saves at least half of the optimum, because
    the most valuable block is recorded alone if that is better.

    Args:
        budget_bytes: Maximum bytes of all blocks together; None for no limit.
    """
    useful = sorted((block for block in blocks if block.saved_s > 0.0), key=_density, reverse=True)
    room = math.inf if budget_bytes is None else budget_bytes
    fitting = [block for block in useful if block.size_bytes <= room]
    chosen = []
    for block in fitting:
        if block.size_bytes <= room:
            chosen.append(block)
            room -= block.size_bytes
    best = max(fitting, key=lambda block: block.saved_s, default=None)
    if best is not None and best.saved_s > sum(block.saved_s for block in chosen):
        chosen = [best]
    return frozenset(block.name for block in chosen)


def _density(block: BlockValue) -> float:
    return block.saved_s / block.size_bytes if block.size_bytes else math.inf


MOST_STATES = 6
"""Maximum number of states that `plan_steps` keeps after each block."""

# A bounded plan this near to the bound is not improved further, because costs are not known more exactly.
_NEAR = 5e-3
# What a missing second of lead counts, in seconds of loading or computing: it must be made up by waiting, or by loading
# less. Which value is best depends on the network, and trying both costs little.
_MISSING_LEAD = (0.1, 1.0)
# Of states that are equal except for rounding, prefer the one that has loaded more: a lead that is left over is worth
# nothing.
_TIE = 1e-9
_State = tuple[float, float, int]
"""The time when loads end, the time when computing ends, and a bit mask: bit i is set if block i uses its recording."""
Costs = tuple[float, float, float, float]
"""Seconds of a block: full_s, masked_s, load_s, ready_s; see `BlockCost`."""
# Ratios that differ by less belong to one kind of blocks.
_ALIKE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """The costs of one block for the current batch, in seconds; none is negative."""

    name: str
    full_s: float
    """Time to compute all tokens."""
    masked_s: float
    """Time to compute only masked tokens."""
    load_s: float = 0.0
    """Time to load the recorded output; 0 if it is loaded or being loaded."""
    ready_s: float = 0.0
    """If load_s is 0, time from now until the recorded output is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The plan of one step. Times count from now, the beginning of the first planned step."""

    takes: tuple[bool, ...]
    """For each block, whether it uses its recorded output."""
    compute_s: float
    """Time when the last block of the step ends."""
    load_s: float
    """Time when all loads of this step and of earlier steps have ended."""
    waits_s: tuple[float, ...]
    """For each block, how long computing waits for its load."""


def plan_steps(
    steps: Sequence[Sequence[BlockCost]], *, load_busy_s: float = 0.0, most_states: int | None = MOST_STATES
) -> list[StepPlan]:
    """Return the plans with which the last of these steps ends earliest. The load stream runs on from step to step.

    Args:
        load_busy_s: When the load stream is free, from now. A negative value means that it is ahead of computing;
            load_s must still include what it has loaded ahead.
        most_states: None plans exactly, which takes up to .1 s for a step of 140 blocks. Otherwise this many states are
            kept after each block, and the plan may end a little later than the best, but never later than if each block
            decides for itself, as in the paper. Ten steps of 140 blocks then take some milliseconds, and end within 1 %
            of `least_end_s` or of the exact plan.

    This is a dynamic program over the blocks in order. A state is (L, C): when the load stream and when computing ends,
    after the blocks so far. A block leads from it to (L, C + full_s), or to (L + load_s, max(C, L + load_s) +
    masked_s). Neither falls as L or C rises. So if one of two states after the same block is later in neither value,
    the other state can be dropped: the same choices for later blocks end no later from the first. The rest is a Pareto
    front in which C falls as L rises. A state whose lower bound (`LoadingBound`) is no earlier than the end of a known
    plan is dropped, too. Thus only most_states can drop a state that could end earlier.
    """
    costs = [(block.full_s, block.masked_s, block.load_s, block.ready_s) for blocks in steps for block in blocks]
    return follow(steps, _chosen(costs, load_busy_s, most_states), load_busy_s=load_busy_s)


def least_end_s(steps: Sequence[Sequence[BlockCost]], *, load_busy_s: float = 0.0) -> float:
    """Return a lower bound on the end time of any plan of these steps."""
    costs = [(block.full_s, block.masked_s, block.load_s, block.ready_s) for blocks in steps for block in blocks]
    return LoadingBound(costs, load_busy_s).least_s


def follow(steps: Sequence[Sequence[BlockCost]], takes: Sequence[bool], *, load_busy_s: float = 0.0) -> list[StepPlan]:
    """Return the plans that result from given choices.

    Args:
        takes: Whether each block uses its recorded output, for all blocks of all steps in order.
    """
    choice = iter(takes)
    compute_s, load_s = 0.0, load_busy_s
    plans = []
    for blocks in steps:
        taken, waits_s = [], []
        for block in blocks:
            take, wait_s = next(choice), 0.0
            if take:
                load_s += block.load_s
                wait_s = max(0.0, (load_s if block.load_s > 0.0 else block.ready_s) - compute_s)
            compute_s += wait_s + block.masked_s if take else block.full_s
            taken.append(take)
            waits_s.append(wait_s)
        plans.append(StepPlan(takes=tuple(taken), compute_s=compute_s, load_s=load_s, waits_s=tuple(waits_s)))
    return plans


def _chosen(blocks: Sequence[Costs], load_busy_s: float, most_states: int | None) -> list[bool]:
    bound = LoadingBound(blocks, load_busy_s)
    known = min(_one_by_one(blocks, bound, load_busy_s), key=itemgetter(1))
    near = most_states is not None and known[1] <= bound.least_s * (1.0 + _NEAR)
    best = known if near else _best(blocks, bound, (load_busy_s, 0.0, 0), known, most_states)
    # Known plans also load where that gains nothing. Without those loads, no block waits longer.
    return [
        bool(best[2] >> place & 1) and (masked_s < full_s or load_s <= 0.0)
        for place, (full_s, masked_s, load_s, _) in enumerate(blocks)
    ]


def _best(
    blocks: Sequence[Costs], bound: LoadingBound, start: _State, known: _State, most_states: int | None
) -> _State:
    """Return the state with the earliest end (dynamic program), or `known` if none ends earlier."""
    front = [start]
    for place, block in enumerate(blocks):
        front = list(_better(_after(front, block, 1 << place), bound, place + 1, known[1]))
        if most_states is not None and len(front) > most_states:
            front = _nearest(front, bound, place + 1, most_states)
    return min([*front, known], key=itemgetter(1))


def _one_by_one(blocks: Sequence[Costs], bound: LoadingBound, load_busy_s: float) -> Iterator[_State]:
    """Yield end states of block-by-block decisions: as in the paper, and with the cost for later blocks considered."""
    nothing = [0.0] * (len(blocks) + 1)
    yield _decided(blocks, load_busy_s, price=0.0, leads=nothing, missing=0.0)
    for missing in _MISSING_LEAD:
        yield _decided(blocks, load_busy_s, price=bound.price, leads=bound.leads, missing=missing * (1 + bound.price))


def _decided(
    blocks: Sequence[Costs], load_busy_s: float, *, price: float, leads: Sequence[float], missing: float
) -> _State:
    """Return the end state if each block picks the option with the lower C + price L + `missing` x the missing lead."""
    load_s, compute_s, bits, bit = load_busy_s, 0.0, 0, 1
    for (full_s, masked_s, own_load_s, ready_s), lead_s in zip(blocks, leads[1:], strict=True):
        busy_s, full_end_s = load_s + own_load_s, compute_s + full_s
        here_s = busy_s if own_load_s > 0.0 else ready_s
        end_s = max(compute_s, here_s) + masked_s
        gain = full_end_s - end_s - price * (1.0 - _TIE) * own_load_s
        if missing:
            gain += missing * (max(0.0, lead_s - full_end_s + load_s) - max(0.0, lead_s - end_s + busy_s))
        if gain >= 0.0:
            load_s, compute_s, bits = busy_s, end_s, bits | bit
        else:
            compute_s = full_end_s
        bit += bit
    return load_s, compute_s, bits


def _after(front: Sequence[_State], block: Costs, bit: int) -> list[_State]:
    """Return the states after one more block, sorted by the end of the load stream."""
    full_s, masked_s, load_s, _ = block
    if load_s <= 0.0:
        return [_here(state, block, bit) for state in front]
    states = [(loaded_s, computed_s + full_s, bits) for loaded_s, computed_s, bits in front]
    if masked_s >= full_s:
        return states
    for loaded_s, computed_s, bits in front:
        here_s = loaded_s + load_s
        if computed_s <= here_s:
            states.append((here_s, here_s + masked_s, bits | bit))
            break  # it waits; later states load longer and would wait longer
        states.append((here_s, computed_s + masked_s, bits | bit))
    states.sort()
    return states


def _here(state: _State, block: Costs, bit: int) -> _State:
    """Return the state after a block that needs no loading, where the choice that ends earlier is always best."""
    loaded_s, computed_s, bits = state
    full_s, masked_s, _, ready_s = block
    full_end_s, end_s = computed_s + full_s, max(computed_s, ready_s) + masked_s
    return (loaded_s, end_s, bits | bit) if end_s <= full_end_s else (loaded_s, full_end_s, bits)


def _better(states: Sequence[_State], bound: LoadingBound, place: int, known_s: float) -> Iterator[_State]:
    """Yield the Pareto front of the sorted states, without those that cannot lead to an end before `known_s`.

    Args:
        known_s: The end of a known plan, at the latest that of computing everything, which need not be considered.
    """
    price = bound.price
    most, most_s = (1.0 + price) * known_s - bound.rests[place], known_s - bound.frees[place]
    for state in states:
        loaded_s, computed_s, _ = state
        if computed_s >= most_s:
            continue
        most_s = computed_s  # later states load no less, so they have to end earlier
        if computed_s + price * loaded_s < most:
            yield state


def _nearest(front: Sequence[_State], bound: LoadingBound, place: int, most_states: int) -> list[_State]:
    """Return the `most_states` states with the least C + p L plus the cost of the missing lead, in their old order."""
    price, lead_s, missing = bound.price, bound.leads[place], _MISSING_LEAD[0] * (1.0 + bound.price)

    def value(state: _State) -> float:
        loaded_s, computed_s, _ = state
        missing_s = lead_s - computed_s + loaded_s
        return computed_s + (price - _TIE) * loaded_s + (missing * missing_s if missing_s > 0.0 else 0.0)

    return sorted(sorted(front, key=value)[:most_states])


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
        """Lower bound on the end time of any plan."""
        return min(self._full_s, max(self._relaxed_s, self.frees[0]))


def _relaxed(blocks: Sequence[Costs], load_busy_s: float, full_s: float) -> tuple[float, float]:
    """Return the earliest end if parts of blocks could be loaded, and the price (see `LoadingBound`)."""
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
    """Return the seconds of a block if it does not need to load anything."""
    full_s, masked_s, load_s, _ = block
    return full_s if load_s > 0.0 else min(full_s, masked_s)


def _suffix_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values), initial=0.0))[::-1]
