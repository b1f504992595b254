"""Who shares a turn: by measured cost, oldest first, and nobody is passed over longer than the bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.engine.batcher import Batcher
from bottega.fair_order import Share
from bottega.model.rows import GroupKey
from bottega.planning import PackedTimes, StepTimes
from bottega.planning.cost import OUTDATED_TURNS

SHAPES = ((4, 16, 16), (4, 16, 24), (4, 32, 32))


def key(shape: int = 0) -> GroupKey:
    return GroupKey(shape=SHAPES[shape], tokens=77, dtype=torch.float32)


@dataclass(eq=False)
class Asked:
    """A request of so many steps."""

    steps: int
    row_count: int = 2
    key: GroupKey = key()  # noqa: RUF009 - frozen
    done: int = 0
    waited: int = 0
    turns: int = 0
    computed_share: float = 1.0
    packs: bool = True
    tenant: str = ""

    @property
    def evaluations(self) -> int:
        return self.steps

    @property
    def evaluations_left(self) -> int:
        return self.steps - self.done


def times(seconds: Callable[[int], float]) -> StepTimes:
    """Measured for the first shape; the others borrow in proportion to their area."""
    return StepTimes.from_entries(((16, 16), rows, seconds(rows)) for rows in (1, 2, 4, 8, 16, 32))


def proportional(rows: int) -> float:
    """A large model: doubling the group doubles its turn."""
    return 0.1 * rows


def shared(rows: int) -> float:
    """A small model: most of a turn is there anyway."""
    return 0.1 + 0.005 * rows


def outdated(seconds: Callable[[int], float]) -> StepTimes:
    """As `times`, all of it long ago: wider turns are tried."""
    here = times(seconds)
    return StepTimes.from_entries(here.entries(), outdated={(shape, rows) for shape, rows, _ in here.entries()})


def batcher(seconds: Callable[[int], float] = shared, *, max_rows: int = 16, max_wait_turns: int = 8) -> Batcher[Asked]:
    return Batcher(times(seconds), max_rows=max_rows, max_wait_turns=max_wait_turns)


class Unsteady(PackedTimes):
    """Times of turns of several sizes that are short at one time and long at another."""

    asked = 0

    @property
    def ratio(self) -> float:
        self.asked += 1
        return 0.5 if self.asked % 60 < 30 else 3.0


def step(chosen: Batcher[Asked], here: list[Asked]) -> list[Asked]:
    """One turn; those that are done leave."""
    group = chosen.next_turn().requests
    for asked in here:
        asked.turns += 1
        if asked in group:
            asked.waited = 0
        elif group and asked.tenant == group[0].tenant:
            asked.waited += 1
    for asked in group:
        asked.done += 1
        if not asked.evaluations_left:
            chosen.remove(asked)
            here.remove(asked)
    return group


def test_one_that_was_passed_over_for_the_bound_has_its_turn() -> None:
    chosen = batcher(proportional, max_wait_turns=3)
    first, second = Asked(30), Asked(30)
    chosen.add(first)
    chosen.add(second)
    assert [chosen.next_turn().requests for _ in range(8)] == [[first]] * 3 + [[second]] + [[first]] * 3 + [[second]]


def test_a_request_joins_a_group_that_runs_and_leaves_it_alone() -> None:
    chosen = batcher(shared)
    here = [Asked(9)]
    chosen.add(here[0])
    first = here[0]
    step(chosen, here)
    second = Asked(3)
    here.append(second)
    chosen.add(second)
    groups = [step(chosen, here) for _ in range(8)]
    assert groups == [[first, second]] * 3 + [[first]] * 5
    assert chosen.next_turn().requests == []


def test_a_group_has_one_key_and_no_more_rows_than_allowed() -> None:
    chosen = batcher(shared, max_rows=6)
    for number in range(12):
        chosen.add(Asked(30, row_count=1 + number % 2, key=key(number % 3)))
    for _ in range(50):
        group = chosen.next_turn().requests
        assert len({asked.key for asked in group}) == 1
        assert sum(asked.row_count for asked in group) <= 6


def test_an_exclusive_request_shares_no_group() -> None:
    chosen = batcher(shared)
    requests = [Asked(30) for _ in range(3)]
    for asked in requests:
        chosen.add(asked)
    chosen.next_turn()
    chosen.make_exclusive(requests[1])
    groups = [chosen.next_turn().requests for _ in range(20)]
    assert [requests[1]] in groups
    assert all(len(group) == 1 for group in groups if requests[1] in group)


def test_a_queue_elsewhere_widens_the_group() -> None:
    """Two rows a request; alone it would rather run narrow, but every turn that is shared helps those behind."""

    def mild(rows: int) -> float:
        return 0.1 * float(rows**0.9)

    alone, crowded = batcher(mild), batcher(mild)
    crowded.set_backlog(12)
    for chosen in (alone, crowded):
        for steps in (4, 60, 60):
            chosen.add(Asked(steps))
    assert (len(alone.next_turn().requests), len(crowded.next_turn().requests)) == (1, 3)


def turns_of(chosen: Batcher[Asked], requests: Sequence[Asked], turns: int) -> Counter[int]:
    """How often each request, by its place, was in a turn."""
    had = Counter[int]()
    for _ in range(turns):
        had.update(requests.index(asked) for asked in chosen.next_turn().requests)
    return had


def test_tenants_have_turns_by_weight_however_many_requests_each_has() -> None:
    """Of equal shapes, in groups of at most two."""
    chosen = batcher(proportional, max_rows=4, max_wait_turns=40)
    requests = [Asked(4000) for _ in range(6)]
    for place, asked in enumerate(requests):
        chosen.add(asked, Share(tenant="few", weight=3.0) if place == 4 else Share(tenant="many"))
    had = turns_of(chosen, requests, 4000)
    few, many = had[4], had.total() - had[4]
    assert few / many == pytest.approx(3.0, rel=0.05)


def test_a_tenant_that_asked_for_little_is_ahead_of_one_that_floods_for_as_long_as_its_credit_lasts() -> None:
    chosen = batcher(proportional)
    flood, one = [Asked(4000) for _ in range(2)], Asked(4000)
    for asked in flood:
        chosen.add(asked, Share(tenant="flood"))
    turns_of(chosen, flood, 300)
    chosen.add(one, Share(tenant="one"))
    had = turns_of(chosen, [one, *flood], 45)
    assert had[0] == 45
    turns_of(chosen, [one, *flood], 600)
    had = turns_of(chosen, [one, *flood], 200)
    assert had[0] == pytest.approx(100, rel=0.05), "then each has its share"


def seconds_of(
    chosen: Batcher[Asked], tenants: Mapping[Asked, str], took_s: Callable[[Asked], float], turns: int
) -> Counter[str]:
    """Milliseconds of the device by tenant; each request adds so many seconds to its turn, and they are told."""
    used: Counter[str] = Counter()
    for _ in range(turns):
        turn = chosen.next_turn()
        chosen.settle(turn, [took_s(asked) for asked in turn.requests])
        for asked in turn.requests:
            used[tenants[asked]] += round(1000 * took_s(asked))
    return used


@pytest.mark.parametrize("seconds", [proportional, shared])
@pytest.mark.parametrize("of_heavy", [1, 6])
def test_tenants_share_seconds_and_not_turns(seconds: Callable[[int], float], of_heavy: int) -> None:
    """A turn of the heavy tenant takes four times as long by its pixels, and twice that by ControlNets."""
    chosen = batcher(seconds)
    heavy, light = [Asked(9999, key=key(2)) for _ in range(of_heavy)], [Asked(9999) for _ in range(3)]
    tenants = dict.fromkeys(heavy, "heavy") | dict.fromkeys(light, "light")
    for asked, tenant in tenants.items():
        chosen.add(asked, Share(tenant=tenant))

    def took_s(asked: Asked) -> float:
        return 0.8 if asked in heavy else 0.1

    used = seconds_of(chosen, tenants, took_s, 3000)
    assert used["heavy"] / used.total() == pytest.approx(0.5, abs=0.025)


def test_turns_that_would_hold_up_a_tenant_that_was_here_lately_have_one_request_and_are_split() -> None:
    chosen = batcher(shared)
    heavy = [Asked(9999, key=key(2)) for _ in range(4)]
    for asked in heavy:
        chosen.add(asked, Share(tenant="heavy"))
    turn = chosen.next_turn()
    assert (len(turn.requests), turn.splits) == (4, False)
    chosen.add(one := Asked(1, row_count=1), Share(tenant="light"))
    assert chosen.next_turn().requests == [one]
    chosen.remove(one)
    turn = chosen.next_turn()
    assert (len(turn.requests), turn.splits) == (1, True)


def test_a_tenant_that_comes_back_is_expected_for_twice_as_long_as_it_stayed_away() -> None:
    chosen = batcher(shared)
    for _ in range(4):
        chosen.add(Asked(9999, key=key(2)), Share(tenant="heavy"))
    chosen.next_turn()
    visit(chosen, "light")
    assert last_short_turn_s(chosen, 60.0) == pytest.approx(10.0, abs=2.0), "it comes for the first time"
    visit(chosen, "light")
    assert last_short_turn_s(chosen, 60.0) == pytest.approx(60.0, abs=2.0), "to the end"
    visit(chosen, "light")
    visit(chosen, "light")  # at once: it is still expected for a while
    assert last_short_turn_s(chosen, 200.0) == pytest.approx(60.0, abs=2.0)
    last_short_turn_s(chosen, 1000.0)
    visit(chosen, "light")
    assert last_short_turn_s(chosen, 60.0) == pytest.approx(10.0, abs=2.0), "as if it came for the first time"


def test_work_is_long_where_a_tenant_with_shorter_turns_is_here_or_was_lately() -> None:
    chosen = batcher(proportional)
    chosen.add(Asked(9999, key=key(2)), Share(tenant="heavy"))
    chosen.next_turn()
    assert not chosen.is_long(1e9), "nobody else is here"
    visit(chosen, "light")
    assert not chosen.is_long(0.09)
    assert chosen.is_long(0.11)
    last_short_turn_s(chosen, 1000.0)
    assert not chosen.is_long(1e9), "it was here long ago"


def visit(chosen: Batcher[Asked], tenant: str) -> None:
    """Let a tenant draw one small picture."""
    chosen.add(one := Asked(1, row_count=1), Share(tenant=tenant))
    assert chosen.next_turn().requests == [one]
    chosen.remove(one)


def last_short_turn_s(chosen: Batcher[Asked], seconds: float) -> float:
    """Run turns for so long, and return when the last turn with a single request ended."""
    now_s = last_s = 0.0
    while now_s < seconds:
        turn = chosen.next_turn()
        now_s += sum(turn.charged_s)
        last_s = now_s if len(turn.requests) == 1 else last_s
    return last_s


def test_work_beside_turns_counts_and_waits_for_tenants_that_used_less() -> None:
    chosen = batcher(proportional)
    heavy, light = Asked(9999), Asked(9999)
    assert chosen.may_go_first("heavy"), "nobody else is here"
    chosen.add(heavy, Share(tenant="heavy"))
    turns_of(chosen, [heavy], 10)
    chosen.add(light, Share(tenant="light"))
    assert not chosen.may_go_first("heavy")
    assert chosen.may_go_first("light")
    chosen.charge(Share(tenant="light"), 1000.0)
    assert [chosen.next_turn().requests for _ in range(20)] == [[heavy]] * 20


Plan = list[tuple[int, int, int, int, int]]
"""Arrivals: turns after the one before, steps, rows, shape, tenant."""

arrivals = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 30), st.integers(1, 2), st.integers(0, 2), st.integers(0, 2)),
    min_size=1,
    max_size=30,
)
costs = st.sampled_from([proportional, shared, lambda rows: 0.1 * rows**0.8])


def _of_one_tenant(plan: Plan) -> Plan:
    return [(after, steps, rows, shape, 0) for after, steps, rows, shape, _ in plan]


def longest_wait(chosen: Batcher[Asked], plan: Plan, at_once: int) -> int:
    """Runs the arrivals, at most so many at once; the most turns of its own tenant that anybody was passed over."""
    here: list[Asked] = []
    longest, turn, due = 0, 0, 0
    waiting = list(plan)
    while here or waiting:
        while waiting and len(here) < at_once and (turn >= due or not here):
            _, steps, rows, shape, tenant = waiting.pop(0)
            asked = Asked(steps, row_count=rows, key=key(shape), tenant=str(tenant))
            chosen.add(asked, Share(tenant=str(tenant), weight=1.0 + 9.0 * tenant))
            here.append(asked)
            due = turn + (waiting[0][0] if waiting else 0)
        step(chosen, here)
        longest = max([longest, *(asked.waited for asked in here)])
        turn += 1
        assert turn < 10_000
    return longest


@settings(max_examples=150, deadline=None)
@given(
    measured=st.sampled_from([times, outdated]),
    plan=arrivals,
    cost=costs,
    max_wait_turns=st.integers(1, 8),
    one_tenant=st.booleans(),
)
def test_nobody_is_passed_over_longer_than_the_bound(
    measured: Callable[..., StepTimes],
    plan: Plan,
    cost: Callable[[int], float],
    max_wait_turns: int,
    *,
    one_tenant: bool,
) -> None:
    """Even if each of them needed a group of its own, where wider turns are tried, and where sizes share turns."""
    here = measured(cost)
    plan = _of_one_tenant(plan) if one_tenant else plan
    for packed in (None, Unsteady(here)):
        chosen: Batcher[Asked] = Batcher(here, packed=packed, max_rows=16, max_wait_turns=max_wait_turns)
        assert longest_wait(chosen, plan, at_once=max_wait_turns + 1) <= max_wait_turns


def packing(measured: StepTimes, packed: PackedTimes, *, max_wait_turns: int = 8) -> Batcher[Asked]:
    """A batcher of a network that can compute several sizes at once."""
    return Batcher(measured, packed=packed, max_rows=16, max_wait_turns=max_wait_turns)


def of_each_size(chosen: Batcher[Asked], *, packs: bool = True) -> list[Asked]:
    requests = [Asked(900, key=key(shape), packs=packs) for shape in range(3)]
    for asked in requests:
        chosen.add(asked)
    return requests


def measure_slow(packed: PackedTimes) -> None:
    """Let turns of all sizes take three times as long as those of one size."""
    rows = {(height, width): 2 for _, height, width in SHAPES}
    expected_s = packed.seconds(rows)
    assert expected_s is not None
    for _ in range(20):
        packed.observe(rows, 3 * expected_s)


def sizes_in_turns(chosen: Batcher[Asked], turns: int = 9) -> set[int]:
    """Return how many sizes the next turns have."""
    return {len({asked.key for asked in chosen.next_turn().requests}) for _ in range(turns)}


def test_requests_of_several_sizes_share_turns_where_that_is_faster() -> None:
    measured = times(shared)
    packed = PackedTimes(measured)
    chosen = packing(measured, packed)
    requests = of_each_size(chosen)
    turn = chosen.next_turn()
    assert turn.requests == requests
    assert turn.charged_s == pytest.approx([sum(turn.charged_s) * share for share in (2 / 13, 3 / 13, 8 / 13)])
    measure_slow(packed)
    chosen.regroup()
    assert sizes_in_turns(chosen) == {1}
    for _ in range(OUTDATED_TURNS):
        measured.observe((16, 16), 2, shared(2))
    chosen.regroup()
    assert sizes_in_turns(chosen) == {3}, "what was measured long ago is tried again"


def test_sizes_do_not_share_turns_where_that_gains_nothing() -> None:
    measured = times(proportional)
    chosen = packing(measured, PackedTimes(measured))
    of_each_size(chosen)
    assert sizes_in_turns(chosen) == {1}


def test_requests_that_cannot_run_with_other_sizes_do_not() -> None:
    measured = times(shared)
    chosen = packing(measured, PackedTimes(measured))
    alone = of_each_size(chosen, packs=False)
    of_each_size(chosen)
    groups = [chosen.next_turn().requests for _ in range(12)]
    assert all(len({asked.key for asked in group}) == 1 for group in groups if set(alone) & set(group))
    assert any(len({asked.key for asked in group}) == 3 for group in groups)


def test_sizes_go_on_sharing_turns_where_the_bound_on_waiting_needs_it() -> None:
    measured = times(shared)
    packed = PackedTimes(measured)
    chosen = packing(measured, packed, max_wait_turns=1)
    requests = of_each_size(chosen)
    assert chosen.next_turn().requests == requests
    measure_slow(packed)
    chosen.regroup()
    assert sizes_in_turns(chosen) == {3}


def test_a_turn_on_trial_is_twice_as_wide_as_pays_off_and_the_next_one_is_not() -> None:
    chosen: Batcher[Asked] = Batcher(outdated(proportional), max_rows=16, max_wait_turns=8)
    for _ in range(5):
        chosen.add(Asked(30))
    assert [len(chosen.next_turn().requests) for _ in range(4)] == [2, 1, 1, 1]


@settings(max_examples=75, deadline=None)
@given(plan=arrivals, cost=costs, max_wait_turns=st.integers(1, 4), one_tenant=st.booleans())
def test_wider_groups_keep_the_bound_for_as_many_as_fit(
    plan: Plan, cost: Callable[[int], float], max_wait_turns: int, *, one_tenant: bool
) -> None:
    """Of one key, so many as fill one group more than the bound; more than would each have a turn alone."""
    plan = [(after, steps, 2, 0, tenant) for after, steps, _, _, tenant in plan]
    plan = _of_one_tenant(plan) if one_tenant else plan
    chosen = batcher(cost, max_rows=8, max_wait_turns=max_wait_turns)
    assert longest_wait(chosen, plan, at_once=4 * (max_wait_turns + 1)) <= max_wait_turns
