"""What is loaded within a budget: by random operations against the promises, and by the claims made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from bottega.caching import CacheItem, EvictionOrder, LoadClaim, LoadPlan, Popularity
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
    """Random borrowing, loading and giving back. memory: what an owner that obeys has, loading what is being loaded."""

    def __init__(self, order: EvictionOrder) -> None:
        super().__init__()
        self.shelf = LoadPlan(BUDGET, order)
        self.loans: list[LoadClaim] = []
        self.memory: set[str] = set()
        self.loading: str | None = None
        self.granted_uses = 0

    @rule(names=st.lists(_names, min_size=1, max_size=3))
    def borrow(self, names: list[str]) -> None:
        if sum(SIZES[name] for name in set(names)) > BUDGET:
            with pytest.raises(TooLarge, match="room for 10"):
                self.shelf.borrow(items(*names))
        else:
            self.loans.append(self.shelf.borrow(items(*names)))

    @precondition(lambda self: self.loans)
    @rule(place=st.integers(0, 99))
    def give_back(self, place: int) -> None:
        self.shelf.give_back(self.loans.pop(place % len(self.loans)))

    @rule(names=st.lists(_names, max_size=3))
    def expect(self, names: list[str]) -> None:
        self.shelf.expect(items(*names))

    @rule()
    def begin(self) -> None:
        load = self.shelf.next_load()
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
            self.shelf.finished(name)
            self.memory.add(name)
        else:
            self.shelf.failed(name)
            for loan in [loan for loan in self.loans if loan.granted and name in names_of(loan)]:
                self.loans.remove(loan)
                self.shelf.give_back(loan)

    def lent(self) -> set[str]:
        return {name for loan in self.loans if loan.granted for name in names_of(loan)}

    @invariant()
    def nothing_is_over_budget(self) -> None:
        here = self.memory | ({self.loading} if self.loading else set())
        assert self.shelf.used_bytes == sum(SIZES[name] for name in here) <= BUDGET
        assert set(self.shelf.loaded) == self.memory

    @invariant()
    def what_is_asked_for_is_there_or_comes(self) -> None:
        asked_for = {name for loan in self.loans for name in names_of(loan)}
        assert set(self.shelf.coming) == (asked_for | ({self.loading} if self.loading else set())) - self.memory

    @invariant()
    def loans_are_granted_in_their_order(self) -> None:
        granted = [loan.granted for loan in self.loans]
        assert granted == sorted(granted, reverse=True)
        assert not self.loans or self.loans[0].granted

    def teardown(self) -> None:
        """Whoever waits is served, once those before it are done."""
        while self.loans:
            for _ in range(2 * len(SIZES)):
                self.begin()
                if self.loading:
                    self.end(True)
            assert set(names_of(self.loans[0])) <= self.memory
            self.give_back(0)


def names_of(loan: LoadClaim) -> Sequence[str]:
    return [item.name for item in loan.items]


@pytest.mark.parametrize("order", ORDERS, ids=["popularity", "lru", "lfu"])
def test_whatever_happens_the_promises_hold(order: Callable[[], EvictionOrder]) -> None:
    quick = settings(max_examples=40, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None)
    run_state_machine_as_test(lambda: Operations(order()), settings=quick)  # type: ignore[arg-type]  # any factory


def shelf_with(budget: int, *uses: str, order: EvictionOrder | None = None) -> LoadPlan:
    """A shelf after these uses, one after the other, each over before the next, nothing loaded unasked."""
    shelf = LoadPlan(budget, order or Popularity())
    for name in uses:
        use(shelf, name)
    return shelf


def use(shelf: LoadPlan, *names: str) -> None:
    loan = shelf.borrow(items(*names))
    while not set(names) <= set(shelf.loaded):
        serve(shelf)
    shelf.give_back(loan)


def serve(shelf: LoadPlan) -> str | None:
    """One load, if one is due."""
    load = shelf.next_load()
    if load is None:
        return None
    shelf.finished(load.name)
    return load.name


def settle(shelf: LoadPlan) -> list[str]:
    """All loads that are due; what is loaded then."""
    while serve(shelf):
        pass
    return sorted(shelf.loaded)


@pytest.mark.parametrize(
    ("uses", "left"),
    [
        ("xyxxyz", "xz"),  # x was used longest ago but one, and y less often
        ("xyyxz", "xz"),  # they are equally popular
        ("xyxyz", "yz"),
    ],
)
def test_the_least_popular_goes_first_and_of_equals_the_least_recently_used(uses: str, left: str) -> None:
    assert sorted(shelf_with(2, *uses).loaded) == list(left)


def test_popularity_is_of_the_last_uses_only() -> None:
    shelf = shelf_with(2, *"xxxxxx", *"yy", *"zzz", order=Popularity(5))
    assert sorted(shelf.loaded) == ["y", "z"]


def test_popularity_forgets_names_with_their_last_use() -> None:
    popularity = Popularity(10)
    for number in range(1000):
        popularity.used(str(number))
    assert popularity.counts == {str(number): 1 for number in range(990, 1000)}
    assert popularity.value("5") == (0, 0)


def test_a_popular_one_comes_back_when_the_unpopular_one_is_idle() -> None:
    shelf = shelf_with(2, *"xxxyyy")
    loan = shelf.borrow(items("z"))
    assert settle(shelf) == ["y", "z"]
    shelf.give_back(loan)
    assert settle(shelf) == ["x", "y"]
    assert (shelf.counts.hits, shelf.counts.misses, shelf.counts.loads, shelf.counts.evictions) == (4, 3, 4, 2)


def test_two_of_about_the_same_popularity_do_not_take_turns() -> None:
    shelf = shelf_with(1, *"xxxyyz")
    assert settle(shelf) == ["x"]  # three times to one
    use(shelf, "y")
    assert settle(shelf) == ["y"]  # three times each


def test_what_is_expected_is_loaded_ahead_and_stays_until_it_is_borrowed() -> None:
    shelf = shelf_with(2, *"xxxyyyy")
    shelf.expect(items("z"))
    assert settle(shelf) == ["y", "z"]
    hits = shelf.counts.hits
    use(shelf, "z")
    assert shelf.counts.hits == hits + 1
    assert settle(shelf) == ["x", "y"]


def test_what_is_expected_and_never_comes_does_not_stay_for_ever() -> None:
    shelf = shelf_with(2, *"xxxyyyy")
    shelf.expect(items("z"))
    settle(shelf)
    for _ in range(120):
        use(shelf, "y")
    assert settle(shelf) == ["x", "y"]


def test_those_who_wait_come_before_what_is_expected() -> None:
    shelf = LoadPlan(2, Popularity())
    shelf.expect(items("x"))
    shelf.borrow(items("y"))
    assert serve(shelf) == "y"
    assert serve(shelf) == "x"


def test_a_load_that_failed_is_tried_again_only_for_who_asks_anew() -> None:
    shelf = LoadPlan(2, Popularity())
    for _ in range(3):
        loan = shelf.borrow(items("x"))
        assert shelf.next_load() is not None
        shelf.failed("x")
        shelf.give_back(loan)
        assert shelf.next_load() is None
    assert (shelf.counts.failures, shelf.counts.misses, shelf.counts.hits) == (3, 3, 0)


def test_a_loan_given_back_before_it_was_granted_is_forgotten() -> None:
    shelf = LoadPlan(1, Popularity())
    shelf.borrow(items("x"))
    shelf.give_back(shelf.borrow(items("y")))
    assert settle(shelf) == ["x"]
    assert shelf.counts.misses == 1


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 200))
def test_a_controlnet_is_active_in_the_steps_that_diffusers_keeps(start: float, end: float, steps: int) -> None:
    keeps = [1.0 - float(i / steps < start or (i + 1) / steps > end) for i in range(steps)]
    first, last = control_steps(start, end, steps)
    assert keeps == [float(first <= i < last) for i in range(steps)]
