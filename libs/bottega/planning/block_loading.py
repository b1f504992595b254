"""Which blocks of an edit take what was recorded of them, and which are computed in full, while both streams run.

A network's blocks are computed one after the other. Of a block that takes what was recorded, only masked tokens are
computed, as soon as the rest is loaded; the load stream is serial, too, goes in the order of use, and may run ahead of
computing. Loads of all blocks would leave gaps where loading is the slower one, so some are better computed in full.
Source: InstGenIE (2025), section 4.2, whose Algorithm 1 decides block by block; here it is decided for all at once.
It knows no tensors and no links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from bottega.planning.loading_bound import Costs, LoadingBound

MOST_STATES = 6
"""States that `plan_steps` keeps after each block; see there."""

# A bounded plan this near to the bound is not improved any more: costs are not known any better.
_NEAR = 5e-3
# What a second of a lead that is missing counts, in seconds of loading or computing: it has to be made up for by
# waiting, or by taking less. Which of them is best depends on the network, and deciding by each costs little.
_MISSING_LEAD = (0.1, 1.0)
# Of states that are equal but for rounding, that which has loaded more: a lead that is left over was worth nothing.
_TIE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """What a block of the batch in hand takes, in seconds; none is negative.

    full_s: computed in full. masked_s: of masked tokens alone. load_s: to load what was recorded; 0 where that is here,
    or on its way. ready_s: where load_s is 0, when it will be here, from now.
    """

    name: str
    full_s: float
    masked_s: float
    load_s: float = 0.0
    ready_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A step's plan. Times count from now, which is the beginning of the first step that was planned.

    takes: by block, whether it takes what was recorded. compute_s: when its last block ends. load_s: when the load
    stream has loaded for it and all before it. waits_s: by block, how long computing waits for its load.
    """

    takes: tuple[bool, ...]
    compute_s: float
    load_s: float
    waits_s: tuple[float, ...]


def plan_step(blocks: Sequence[BlockCost], *, load_busy_s: float = 0.0) -> StepPlan:
    """The plan of one step that ends first; exact. See `plan_steps`."""
    return plan_steps([blocks], load_busy_s=load_busy_s, most_states=None)[0]


def plan_steps(
    steps: Sequence[Sequence[BlockCost]], *, load_busy_s: float = 0.0, most_states: int | None = MOST_STATES
) -> list[StepPlan]:
    """The plans with which the last of these steps ends first: the load stream runs on from step to step.

    load_busy_s: when the load stream is free, from now. Below 0 it is ahead of computing by as much: what of these
    blocks it has loaded already then still counts in their load_s.
    most_states: None plans exactly, however long that takes: a step of 140 blocks takes up to .1 s. Else as many states
    are kept after each block, and the plan may end a little later than the best, though never later than if each block
    decides for itself, as in the paper. Ten steps of 140 blocks take some milliseconds, and end within 1 % of
    `least_end_s`, or where they really cannot end earlier.

    A dynamic program over the blocks in their order. A state is (L, C): when the load stream and when computing ends,
    after the blocks so far. A block leads from it to (L, C + full_s), or to
    (L + load_s, max(C, L + load_s) + masked_s); neither falls as L or C rises. So of two states after the same block of
    which one is later in neither, the other one can be dropped: whatever is chosen behind it, chosen behind the first
    it ends no later. What remains is a Pareto front, in which C falls as L rises. A state whose lower bound
    (`LoadingBound`) is no earlier than the end of a plan that is known is dropped, too. Hence nothing that could end
    earlier is ever dropped, but by most_states.
    """
    costs = [(block.full_s, block.masked_s, block.load_s, block.ready_s) for blocks in steps for block in blocks]
    return follow(steps, _chosen(costs, load_busy_s, most_states), load_busy_s=load_busy_s)


def least_end_s(steps: Sequence[Sequence[BlockCost]], *, load_busy_s: float = 0.0) -> float:
    """No plan of these steps ends before."""
    costs = [(block.full_s, block.masked_s, block.load_s, block.ready_s) for blocks in steps for block in blocks]
    return LoadingBound(costs, load_busy_s).least_s


def follow(steps: Sequence[Sequence[BlockCost]], takes: Sequence[bool], *, load_busy_s: float = 0.0) -> list[StepPlan]:
    """What a choice comes to. takes: by block, of all steps; as many as there are."""
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


_State = tuple[float, float, int]
"""When the load stream ends, when computing ends, and which blocks were taken: bit i of block i."""


def _chosen(blocks: Sequence[Costs], load_busy_s: float, most_states: int | None) -> list[bool]:
    bound = LoadingBound(blocks, load_busy_s)
    known = min(_one_by_one(blocks, bound, load_busy_s), key=itemgetter(1))
    near = most_states is not None and known[1] <= bound.least_s * (1.0 + _NEAR)
    best = known if near else _best(blocks, bound, (load_busy_s, 0.0, 0), known, most_states)
    # Known plans load where that gains nothing, too: without it nobody waits for longer.
    return [
        bool(best[2] >> place & 1) and (masked_s < full_s or load_s <= 0.0)
        for place, (full_s, masked_s, load_s, _) in enumerate(blocks)
    ]


def _best(
    blocks: Sequence[Costs], bound: LoadingBound, start: _State, known: _State, most_states: int | None
) -> _State:
    """The dynamic program. known: of a plan that is known; it is the answer if none is found that ends before."""
    front = [start]
    for place, block in enumerate(blocks):
        front = list(_better(_after(front, block, 1 << place), bound, place + 1, known[1]))
        if most_states is not None and len(front) > most_states:
            front = _nearest(front, bound, place + 1, most_states)
    return min([*front, known], key=itemgetter(1))


def _one_by_one(blocks: Sequence[Costs], bound: LoadingBound, load_busy_s: float) -> Iterator[_State]:
    """What comes of each block deciding for itself: as in the paper, and by what it leaves for those behind it."""
    nothing = [0.0] * (len(blocks) + 1)
    yield _decided(blocks, load_busy_s, price=0.0, leads=nothing, missing=0.0)
    for missing in _MISSING_LEAD:
        yield _decided(blocks, load_busy_s, price=bound.price, leads=bound.leads, missing=missing * (1 + bound.price))


def _decided(
    blocks: Sequence[Costs], load_busy_s: float, *, price: float, leads: Sequence[float], missing: float
) -> _State:
    """Each block takes the way with the lesser C + price L, a lead that is then missing counted by `missing`."""
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
    """The states after one more block, by when the load stream ends."""
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
            break  # it waits, and those behind it, which load for longer, wait until later
        states.append((here_s, computed_s + masked_s, bits | bit))
    states.sort()
    return states


def _here(state: _State, block: Costs, bit: int) -> _State:
    """After a block that needs no loading: the earlier one of both ends is never worse."""
    loaded_s, computed_s, bits = state
    full_s, masked_s, _, ready_s = block
    full_end_s, end_s = computed_s + full_s, max(computed_s, ready_s) + masked_s
    return (loaded_s, end_s, bits | bit) if end_s <= full_end_s else (loaded_s, full_end_s, bits)


def _better(states: Sequence[_State], bound: LoadingBound, place: int, known_s: float) -> Iterator[_State]:
    """The Pareto front of states, sorted as they come, of which something may come that ends before known_s.

    known_s: no later than if nothing were loaded, so that it does not matter that the bound does not count for that.
    """
    price = bound.price
    most, most_s = (1.0 + price) * known_s - bound.rests[place], known_s - bound.frees[place]
    for state in states:
        loaded_s, computed_s, _ = state
        if computed_s >= most_s:
            continue
        most_s = computed_s  # what comes later, and loads for no less, has to end earlier
        if computed_s + price * loaded_s < most:
            yield state


def _nearest(front: Sequence[_State], bound: LoadingBound, place: int, most_states: int) -> list[_State]:
    """Those with the least C + p L, what is missing of the lead counted, in the order that they had."""
    price, lead_s, missing = bound.price, bound.leads[place], _MISSING_LEAD[0] * (1.0 + bound.price)

    def value(state: _State) -> float:
        loaded_s, computed_s, _ = state
        missing_s = lead_s - computed_s + loaded_s
        return computed_s + (price - _TIE) * loaded_s + (missing * missing_s if missing_s > 0.0 else 0.0)

    return sorted(sorted(front, key=value)[:most_states])
