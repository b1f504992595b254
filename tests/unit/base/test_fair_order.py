"""Shares by weight, whoever asks for how much; and with one tenant the order of asking."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from bottega.fair_order import FairOrder, TurnLengths


class Line:
    """Serves the tenant with the least tag; of equal ones the one that asked first. Work is charged when it begins."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._order = FairOrder()
        self._weights = weights
        self._waiting: dict[str, deque[tuple[int, float]]] = {}
        self._asked = 0

    def ask(self, tenant: str, cost: float = 1.0) -> None:
        self._asked += 1
        self._waiting.setdefault(tenant, deque()).append((self._asked, cost))

    def serve(self) -> tuple[str, float]:
        tenant = min(self._waiting, key=lambda tenant: (self._order.next_tag(tenant), self._waiting[tenant][0]))
        _, cost = self._waiting[tenant].popleft()
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self._order.served(self._order.next_tag(tenant))
        self._order.charge(tenant, cost=cost, weight=self._weights.get(tenant, 1.0))
        if not self._waiting:
            self._order.idle()
        return tenant, cost

    def settle(self, tenant: str, more: float) -> None:
        """Work has taken so much more than it was charged."""
        self._order.charge(tenant, cost=more, weight=self._weights.get(tenant, 1.0))

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 10.0)), max_size=60))
def test_one_tenant_is_served_in_the_order_of_asking(moves: list[tuple[bool, float]]) -> None:
    line, asked, served = Line({}), [], []
    for asks, cost in moves:
        if asks:
            line.ask("", cost)
            asked.append(cost)
        elif len(line):
            served.append(line.serve()[1])
    served += [line.serve()[1] for _ in range(len(line))]
    assert served == asked


def test_who_floods_has_its_share_and_no_more() -> None:
    line, served = Line({"one": 3.0, "other": 1.0}), Counter[str]()
    for _ in range(4000):
        line.ask("one")
        line.ask("other")
    for _ in range(2000):
        served[line.serve()[0]] += 1
    assert abs(served["one"] / 2000 - 0.75) < 0.01


def test_costs_count_and_not_how_many_pieces_they_come_in() -> None:
    chance, line = random.Random(0), Line({})
    work = {"large": 0.0, "small": 0.0}
    for _ in range(500):
        line.ask("large", chance.uniform(5.0, 15.0))
    for _ in range(5000):
        line.ask("small", chance.uniform(0.5, 1.5))
    for _ in range(2000):
        tenant, cost = line.serve()
        work[tenant] += cost
    assert abs(work["large"] / sum(work.values()) - 0.5) < 0.02


def test_who_asks_now_and_then_waits_for_one_of_each_of_the_others() -> None:
    line = Line({})
    for _ in range(1000):
        line.ask("flood")
    for _ in range(100):
        for _ in range(7):
            line.serve()
        line.ask("victim")
        assert "victim" in {line.serve()[0], line.serve()[0]}


def test_who_was_idle_gets_no_credit_for_it() -> None:
    line, served = Line({}), Counter[str]()
    for _ in range(1000):
        line.ask("busy")
    for _ in range(500):
        line.serve()
    for _ in range(500):
        line.ask("late")
    for _ in range(200):
        served[line.serve()[0]] += 1
    assert abs(served["late"] - 100) <= 1


def test_nothing_is_kept_of_those_whose_work_is_done() -> None:
    line = Line({})
    for number in range(1000):
        line.ask(f"tenant {number}")
        line.serve()
    line.ask("last")
    assert len(line._order._done_at) <= 2


def test_a_tenant_that_is_here_counts_however_long_ago_its_last_turn_was() -> None:
    here = {"small", "large"}
    lengths = TurnLengths(here)
    lengths.note_turn("small", 1.0)
    for _ in range(5):
        lengths.note_turn("large", 8.0)
    dear_s = 16.0  # of short turns in its place, so that tenants that were here lately do not count for it
    assert lengths.delays_another("large", 8.0, dear_s)
    here.remove("small")
    assert not lengths.delays_another("large", 8.0, dear_s), "it is not expected back any more"
    assert lengths.delays_another("large", 8.0, 8.0)
