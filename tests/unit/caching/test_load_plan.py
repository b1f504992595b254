"""What is loaded within a budget: by random operations against the promises, and by the claims made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from bottega.caching.load_plan import CacheItem, EvictionOrder, LoadClaim, LoadPlan, Popularity
from bottega.errors import TooLarge
from bottega.planning import control_steps
from load.bench.controlnet_cache import LeastFrequentlyUsed, LeastRecentlyUsed

BUDGET = 10
SIZES = {"a": 1, "b": 2, "c": 3, "d": 3, "e": 4, "f": 6, "g": 11}
ORDERS: list[Callable[[], EvictionOrder]] = [lambda: Popularity(5), LeastRecentlyUsed, LeastFrequentlyUsed]

_names = st.sampled_from(sorted(SIZES))


def items(*names: str) -> list[CacheItem]:
    return [CacheItem(name=name, size_bytes=SIZES.get(name, 1)) for name in names]


class Operations(RuleBasedStateMachine):
    """Random claims, loads and releases. memory: what an owner that obeys has, loading what is being loaded."""

    def __init__(self, order: EvictionOrder) -> None:
        super().__init__()
        self.plan = LoadPlan(BUDGET, order)
        self.claims: list[LoadClaim] = []
        self.memory: set[str] = set()
        self.loading: str | None = None
        self.granted_uses = 0

    @rule(names=st.lists(_names, min_size=1, max_size=3))
    def claim(self, names: list[str]) -> None:
        if sum(SIZES[name] for name in set(names)) > BUDGET:
            with pytest.raises(TooLarge, match="the budget allows 10"):
                self.plan.claim(items(*names))
        else:
            self.claims.append(self.plan.claim(items(*names)))

    @precondition(lambda self: self.claims)
    @rule(place=st.integers(0, 99))
    def release(self, place: int) -> None:
        self.plan.release(self.claims.pop(place % len(self.claims)))

    @rule(names=st.lists(_names, max_size=3))
    def expect(self, names: list[str]) -> None:
        self.plan.expect(items(*names))

    @rule()
    def begin(self) -> None:
        load = self.plan.next_load()
        if self.loading is not None:
            assert load is None
        elif load is not None:
            assert load.name not in self.memory
            assert set(load.evicted) <= self.memory - self.lent()
            self.memory -= set(load.evicted)
            self.loading = load.name

    @precondition(lambda self: self.loading)
    @rule(succeeds=st.booleans())
    def end(self, succeeds: bool) -> None:
        assert self.loading is not None
        name, self.loading = self.loading, None
        if succeeds:
            self.plan.finished(name)
            self.memory.add(name)
        else:
            self.plan.failed(name)
            for claim in [claim for claim in self.claims if claim.granted and name in names_of(claim)]:
                self.claims.remove(claim)
                self.plan.release(claim)

    def lent(self) -> set[str]:
        return {name for claim in self.claims if claim.granted for name in names_of(claim)}

    @invariant()
    def nothing_is_over_budget(self) -> None:
        here = self.memory | ({self.loading} if self.loading else set())
        assert self.plan.used_bytes == sum(SIZES[name] for name in here) <= BUDGET
        assert set(self.plan.loaded) == self.memory

    @invariant()
    def what_is_asked_for_is_there_or_comes(self) -> None:
        asked_for = {name for claim in self.claims for name in names_of(claim)}
        assert set(self.plan.coming) == (asked_for | ({self.loading} if self.loading else set())) - self.memory

    @invariant()
    def claims_are_granted_in_their_order(self) -> None:
        granted = [claim.granted for claim in self.claims]
        assert granted == sorted(granted, reverse=True)
        assert not self.claims or self.claims[0].granted

    def teardown(self) -> None:
        """Whoever waits is served, once those before it are done."""
        while self.claims:
            for _ in range(2 * len(SIZES)):
                self.begin()
                if self.loading:
                    self.end(True)
            assert set(names_of(self.claims[0])) <= self.memory
            self.release(0)


def names_of(claim: LoadClaim) -> Sequence[str]:
    return [item.name for item in claim.items]


@pytest.mark.parametrize("order", ORDERS, ids=["popularity", "lru", "lfu"])
def test_whatever_happens_the_promises_hold(order: Callable[[], EvictionOrder]) -> None:
    quick = settings(max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None)
    run_state_machine_as_test(lambda: Operations(order()), settings=quick)  # type: ignore[arg-type]  # any factory


def plan_after(budget: int, *uses: str, order: EvictionOrder | None = None) -> LoadPlan:
    """A plan after these uses, one after the other, each over before the next, nothing loaded unasked."""
    plan = LoadPlan(budget, order or Popularity())
    for name in uses:
        use(plan, name)
    return plan


def use(plan: LoadPlan, *names: str) -> None:
    claim = plan.claim(items(*names))
    while not set(names) <= set(plan.loaded):
        serve(plan)
    plan.release(claim)


def serve(plan: LoadPlan) -> str | None:
    """One load, if one is due."""
    load = plan.next_load()
    if load is None:
        return None
    plan.finished(load.name)
    return load.name


def settle(plan: LoadPlan) -> list[str]:
    """All loads that are due; what is loaded then."""
    while serve(plan):
        pass
    return sorted(plan.loaded)


@pytest.mark.parametrize(
    ("uses", "left"),
    [
        ("xyxxyz", "xz"),  # x was used longest ago but one, and y less often
        ("xyyxz", "xz"),  # they are equally popular
        ("xyxyz", "yz"),
    ],
)
def test_the_least_popular_goes_first_and_of_equals_the_least_recently_used(uses: str, left: str) -> None:
    assert sorted(plan_after(2, *uses).loaded) == list(left)


def test_popularity_forgets_names_with_their_last_use() -> None:
    popularity = Popularity(10)
    for number in range(1000):
        popularity.used(str(number))
    assert popularity.counts == {str(number): 1 for number in range(990, 1000)}
    assert popularity.value("5") == (0, 0)


def test_a_popular_one_comes_back_when_the_unpopular_one_is_idle() -> None:
    plan = plan_after(2, *"xxxyyy")
    claim = plan.claim(items("z"))
    assert settle(plan) == ["y", "z"]
    plan.release(claim)
    assert settle(plan) == ["x", "y"]
    assert (plan.counts.hits, plan.counts.misses, plan.counts.loads, plan.counts.evictions) == (4, 3, 4, 2)


def test_two_of_about_the_same_popularity_do_not_take_turns() -> None:
    plan = plan_after(1, *"xxxyyz")
    assert settle(plan) == ["x"]  # three times to one
    use(plan, "y")
    assert settle(plan) == ["y"]  # three times each


def test_what_is_expected_is_loaded_ahead_and_stays_until_it_is_claimed() -> None:
    plan = plan_after(2, *"xxxyyyy")
    plan.expect(items("z"))
    assert settle(plan) == ["y", "z"]
    hits = plan.counts.hits
    use(plan, "z")
    assert plan.counts.hits == hits + 1
    assert settle(plan) == ["x", "y"]


def test_what_is_expected_and_never_comes_does_not_stay_for_ever() -> None:
    plan = plan_after(2, *"xxxyyyy")
    plan.expect(items("z"))
    settle(plan)
    for _ in range(120):
        use(plan, "y")
    assert settle(plan) == ["x", "y"]


def test_those_who_wait_come_before_what_is_expected() -> None:
    plan = LoadPlan(2, Popularity())
    plan.expect(items("x"))
    plan.claim(items("y"))
    assert serve(plan) == "y"
    assert serve(plan) == "x"


def test_a_load_that_failed_is_tried_again_only_for_who_asks_anew() -> None:
    plan = LoadPlan(2, Popularity())
    for _ in range(3):
        claim = plan.claim(items("x"))
        assert plan.next_load() is not None
        plan.failed("x")
        plan.release(claim)
        assert plan.next_load() is None
    assert (plan.counts.failures, plan.counts.misses, plan.counts.hits) == (3, 3, 0)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 200))
def test_a_controlnet_is_active_in_the_steps_that_diffusers_keeps(start: float, end: float, steps: int) -> None:
    keeps = [1.0 - float(i / steps < start or (i + 1) / steps > end) for i in range(steps)]
    first, last = control_steps(start, end, steps)
    assert keeps == [float(first <= i < last) for i in range(steps)]


def _used(plan: LoadPlan, *names: str) -> list[str]:
    """Use items, and return what is in memory meanwhile."""
    claim = plan.claim(items(*names))
    loaded = settle(plan)
    plan.release(claim)
    return loaded


def test_pinned_items_are_loaded_early_evicted_last_and_loaded_again() -> None:
    plan = LoadPlan(BUDGET, Popularity())
    plan.pin(items("f", "g"))
    assert settle(plan) == ["f"], "the other one is larger than the budget"
    for _ in range(3):
        assert _used(plan, "c") == ["c", "f"]
    assert _used(plan, "e") == ["e", "f"], "a popular one makes room, not a pinned one"
    assert _used(plan, "c", "d", "e") == ["c", "d", "e"], "a request goes first"
    assert "f" in settle(plan)
    plan.pin([])
    _used(plan, "c", "d", "e")
    assert "f" not in settle(plan)


def test_dropped_items_leave_and_come_back_only_when_they_are_needed() -> None:
    plan = LoadPlan(BUDGET, Popularity())
    for _ in range(5):
        assert _used(plan, "c") == ["c"]
    plan.claim(items("b"))
    plan.pin(items("a"))
    assert settle(plan) == ["a", "b", "c"]
    assert plan.drop(["a", "b", "c", "nobody"]) == ["c"], "the others are pinned or used"
    assert settle(plan) == ["a", "b"], "popularity alone does not bring it back"
    plan.expect(items("c"))
    assert settle(plan) == ["a", "b", "c"]
