"""Which blocks of an edit take what was recorded of them, and which are computed in full, while both streams run.

A network's blocks are computed one after the other. Of a block that takes what was recorded, only masked tokens are
computed, as soon as the rest is loaded; the load stream is serial, too, goes in the order of use, and may run ahead of
computing. Loads of all blocks would leave gaps where loading is the slower one, so some are better computed in full.
Source: InstGenIE (2025), section 4.2, whose Algorithm 1 decides block by block; here it is decided for all at once.
Plain Python; it knows no tensors and no links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from bottega.planning.loading_bound import LoadingBound

MOST_STATES = 12
"""States that `plan_steps` keeps after each block; see there."""


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
class LoadPlan:
    """A step's plan. Times count from now, which is the beginning of the first step that was planned.

    takes: by block, whether it takes what was recorded. compute_s: when its last block ends. load_s: when the load
    stream has loaded for it and all before it. waits_s: by block, how long computing waits for its load.
    """

    takes: tuple[bool, ...]
    compute_s: float
    load_s: float
    waits_s: tuple[float, ...]


def plan_step(blocks: Sequence[BlockCost], *, load_busy_s: float = 0.0) -> LoadPlan:
    """The plan of one step that ends first; exact. See `plan_steps`."""
    return plan_steps([blocks], load_busy_s=load_busy_s, most_states=None)[0]


def plan_steps(
    steps: Sequence[Sequence[BlockCost]], *, load_busy_s: float = 0.0, most_states: int | None = MOST_STATES
) -> list[LoadPlan]:
    """The plans with which the last of these steps ends first: the load stream runs on from step to step.

    load_busy_s: when the load stream is free, from now. Below 0 it is ahead of computing by as much: what of these
    blocks it has loaded already then still counts in their load_s.
    most_states: None plans exactly, however long that takes: a step of 140 blocks takes up to .1 s. Else so many states
    are kept after each block, and the plan may end a little later than the best, never later than `least_end_s` by more
    than it says itself, nor than what deciding block by block comes to. Ten steps of 140 blocks take some milliseconds.

    A dynamic program over the blocks in their order. A state is (L, C): when the load stream and when computing ends,
    after the blocks so far. A block leads from it to (L, C + full_s), or to
    (L + load_s, max(C, L + load_s) + masked_s); neither falls as L or C rises. So of two states after the same block of
    which one is later in neither, the other one can be dropped: whatever is chosen behind it, chosen behind the first
    it ends no later. What remains is a Pareto front, in which C falls as L rises. A state whose lower bound
    (`LoadingBound`) is no earlier than the end of a plan that is known is dropped, too. Hence nothing that could end
    earlier is ever dropped, but by most_states, which keeps those of the least bound.
    """
    blocks = [block for step in steps for block in step]
    return follow(steps, _chosen(blocks, load_busy_s, most_states), load_busy_s=load_busy_s)


def least_end_s(steps: Sequence[Sequence[BlockCost]], *, load_busy_s: float = 0.0) -> float:
    """No plan of these steps ends before."""
    return LoadingBound([block for step in steps for block in step], load_busy_s).least_s


def follow(steps: Sequence[Sequence[BlockCost]], takes: Sequence[bool], *, load_busy_s: float = 0.0) -> list[LoadPlan]:
    """What a choice comes to. takes: by block, of all steps; as many as there are."""
    choice = iter(takes)
    compute_s, load_s = 0.0, load_busy_s
    plans = []
    for blocks in steps:
        taken, waits_s = [], []
        for block in blocks:
            begin_s = compute_s
            taken.append(next(choice))
            if taken[-1]:
                load_s, compute_s = load_s + block.load_s, _taken(block, load_s + block.load_s, compute_s)
                waits_s.append(compute_s - begin_s - block.masked_s)
            else:
                compute_s += block.full_s
                waits_s.append(0.0)
        plans.append(LoadPlan(takes=tuple(taken), compute_s=compute_s, load_s=load_s, waits_s=tuple(waits_s)))
    return plans


def _taken(block: BlockCost, load_s: float, compute_s: float) -> float:
    """When a block ends that takes what was recorded. load_s: the end of its load; compute_s: of the block before."""
    here_s = load_s if block.load_s > 0.0 else block.ready_s
    return max(compute_s, here_s) + block.masked_s


_State = tuple[float, float, int]
"""When the load stream ends, when computing ends, and which blocks were taken: bit i of block i."""


def _chosen(blocks: Sequence[BlockCost], load_busy_s: float, most_states: int | None) -> list[bool]:
    bound = LoadingBound(blocks, load_busy_s)
    # At no price it is the paper's algorithm; at the bound's, what is worth less than another load is left out.
    known = min((_one_by_one(blocks, load_busy_s, price) for price in (0.0, bound.price * 1.0001)), key=itemgetter(1))
    front: list[_State] = [(load_busy_s, 0.0, 0)]
    for place, block in enumerate(blocks):
        front = list(_better(_after(front, block, 1 << place), bound, place + 1, known[1]))
        if most_states is not None and len(front) > most_states:
            front = _nearest(front, bound.price, most_states)
    bits = min([*front, known], key=itemgetter(1))[2]
    return [bool(bits >> place & 1) for place in range(len(blocks))]


def _one_by_one(blocks: Sequence[BlockCost], load_busy_s: float, price: float) -> _State:
    """What each block for itself decides, if a second of loading has to save more than `price` seconds of computing."""
    load_s, compute_s, bits = load_busy_s, 0.0, 0
    for place, block in enumerate(blocks):
        end_s = _taken(block, load_s + block.load_s, compute_s)
        if end_s + price * block.load_s <= compute_s + block.full_s:
            load_s, compute_s, bits = load_s + block.load_s, end_s, bits | 1 << place
        else:
            compute_s += block.full_s
    return load_s, compute_s, bits


def _after(front: Sequence[_State], block: BlockCost, bit: int) -> list[_State]:
    """The states after one more block, by when the load stream ends."""
    if block.load_s <= 0.0:
        return [_here(state, block, bit) for state in front]
    full_s, masked_s, load_s = block.full_s, block.masked_s, block.load_s
    states = [(loaded_s, computed_s + full_s, bits) for loaded_s, computed_s, bits in front]
    if masked_s >= full_s:
        return states
    for loaded_s, computed_s, bits in front:
        here_s = loaded_s + load_s
        states.append((here_s, (max(here_s, computed_s)) + masked_s, bits | bit))
        if computed_s <= here_s:
            break  # it waits, and those behind it, which load for longer, wait until later
    states.sort()
    return states


def _here(state: _State, block: BlockCost, bit: int) -> _State:
    """After a block that needs no loading: the earlier one of both ends is never worse."""
    loaded_s, computed_s, bits = state
    full_end_s, end_s = computed_s + block.full_s, _taken(block, loaded_s, computed_s)
    return (loaded_s, end_s, bits | bit) if end_s <= full_end_s else (loaded_s, full_end_s, bits)


def _better(states: Sequence[_State], bound: LoadingBound, place: int, known_s: float) -> Iterator[_State]:
    """The Pareto front of states, sorted as they come, of which something may come that ends before known_s."""
    price = bound.price
    most, most_free_s = (1.0 + price) * known_s - bound.rests[place], known_s - bound.frees[place]
    for state in states:
        loaded_s, computed_s, _ = state
        if computed_s >= most_free_s:
            continue
        most_free_s = computed_s  # what comes later, and loads for no less, has to end earlier
        # Where nothing was taken yet, the load stream may be busy for longer than all that is computed takes.
        if computed_s + price * loaded_s < most or loaded_s > computed_s:
            yield state


def _nearest(front: Sequence[_State], price: float, most_states: int) -> list[_State]:
    """Those of the least bound, in the order that they had."""
    return sorted(sorted(front, key=lambda state: state[1] + price * state[0])[:most_states])
