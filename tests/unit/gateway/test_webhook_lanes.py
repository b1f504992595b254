"""Which webhook is delivered next: limits by tenant and host, fair turns, and receivers that fail."""

from __future__ import annotations

import sys
import tracemalloc

from bottega.gateway.jobs.store import OutboxPlace
from bottega.gateway.webhooks.lanes import DeliveryLanes, DeliveryLimits


def _place(event_id: str, tenant: str = "a", host: str = "h", *, due: float = 0.0, created: float = 0.0) -> OutboxPlace:
    return OutboxPlace(
        number=1, event_id=event_id, tenant=tenant, host=host, due_steady=due, created_wall=created, dead=False
    )


def _lanes(*places: OutboxPlace, total: int = 99, per_tenant: int = 99, per_host: int = 99) -> DeliveryLanes:
    lanes = DeliveryLanes(DeliveryLimits(total=total, per_tenant=per_tenant, per_host=per_host))
    for place in places:
        lanes.add(place)
    return lanes


def _begun(lanes: DeliveryLanes, now: float = 0.0) -> list[OutboxPlace]:
    begun = []
    while (place := lanes.begin(now)) is not None:
        begun.append(place)
    return begun


def _ids(places: list[OutboxPlace]) -> list[str]:
    return [place.event_id for place in places]


def test_events_come_when_they_are_due_the_earliest_first() -> None:
    lanes = _lanes(_place("late", due=9.0), _place("second", due=2.0), _place("first", due=1.0))
    assert (_ids(_begun(lanes, 0.5)), lanes.next_due()) == ([], 1.0)
    assert _ids(_begun(lanes, 2.0)) == ["first", "second"]
    assert lanes.next_due() == 9.0


def test_tenants_take_turns_however_many_events_each_has() -> None:
    lanes = _lanes(*(_place(f"a{n}") for n in range(4)), _place("b0", "b", "g"), _place("b1", "b", "g"), total=1)
    order = []
    while (place := lanes.begin(0.0)) is not None:
        order.append(place.tenant)
        lanes.end(place, failed=False)
    assert order[:4] in (["a", "b", "a", "b"], ["b", "a", "b", "a"])
    assert len(lanes) == 0


def test_deliveries_at_once_are_limited_in_all_by_tenant_and_by_host() -> None:
    events = [_place(f"{tenant}{host}{n}", tenant, host) for tenant in "ab" for host in "gh" for n in range(4)]
    assert len(_begun(_lanes(*events, total=5))) == 5
    by_tenant = _begun(_lanes(*events, per_tenant=3))
    assert [sum(place.tenant == tenant for place in by_tenant) for tenant in "ab"] == [3, 3]
    by_host = _begun(_lanes(*events, per_host=2))
    assert [sum(place.host == host for place in by_host) for host in "gh"] == [2, 2]
    full = _lanes(*events, total=1)
    _begun(full)
    assert full.next_due() is None, "the end of a delivery is waited for, and no time"


def test_a_receiver_that_fails_gets_one_delivery_at_a_time_until_it_accepts() -> None:
    lanes = _lanes(*(_place(f"e{n}", due=n) for n in range(6)), per_tenant=3)
    first, second, third = _begun(lanes, 9.0)
    for place in (first, second, third):
        lanes.end(place, failed=True)
    (probe,) = _begun(lanes, 9.0)
    lanes.end(probe, failed=False)
    assert len(_begun(lanes, 9.0)) == 2


def test_an_event_that_is_added_again_gets_the_new_time_and_is_delivered_once() -> None:
    lanes = _lanes(_place("e", due=50.0))
    lanes.add(_place("e", due=1.0))
    (place,) = _begun(lanes, 60.0)
    lanes.add(_place("e", due=0.0))
    assert (len(lanes), _begun(lanes, 60.0)) == (1, []), "it is in flight"
    lanes.end(place, failed=False)
    assert (len(lanes), lanes.waiting_of("a"), lanes.next_due()) == (0, 0, None)


def test_the_oldest_undelivered_event_is_known() -> None:
    lanes = _lanes(_place("new", created=20.0), _place("old", created=10.0, due=5.0))
    assert lanes.oldest_wall() == 10.0
    old = _begun(lanes, 5.0)[-1]
    assert (old.event_id, lanes.oldest_wall()) == ("old", 10.0)
    lanes.end(old, failed=False)
    assert lanes.oldest_wall() == 20.0


def test_lanes_that_wait_for_a_host_come_before_tenants_that_were_served_since() -> None:
    events = [_place(f"{tenant}{n}", tenant, "shared") for tenant in "ab" for n in range(3)]
    lanes = _lanes(*events, _place("c0", "c", "own"), per_host=1)
    first, own = _begun(lanes)
    assert (first.host, own.host) == ("shared", "own")
    lanes.end(first, failed=False)
    (second,) = _begun(lanes)
    assert {first.tenant, second.tenant} == {"a", "b"}


def test_a_tenant_with_no_delivery_left_does_not_keep_a_host_from_others() -> None:
    lanes = _lanes(_place("a0", "a", "shared"), _place("b0", "b", "shared"), per_host=1, per_tenant=1)
    lanes.add(_place("a1", "a", "slow", due=1.0))
    (running,) = _begun(lanes)
    assert running.event_id == "a0"
    lanes.add(_place("a2", "a", "shared"))
    assert _begun(lanes, 1.0) == []
    lanes.end(running, failed=False)
    assert _ids(_begun(lanes, 1.0)) == ["b0", "a1"]
    assert _begun(lanes, 1.0) == []


def _calls_of_100_deliveries(lanes: DeliveryLanes) -> int:
    """Return how many functions, also built-in ones, are called."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(100):
            place = lanes.begin(1.0)
            lanes.next_due()
            assert place is not None
            lanes.end(place, failed=True)
            lanes.add(_place(place.event_id, place.tenant, place.host, due=1.0))
    finally:
        sys.setprofile(before)
    return calls


def test_the_cost_of_a_delivery_does_not_grow_with_the_number_of_lanes() -> None:
    def cost(tenants: int, host: str) -> int:
        events = [_place(f"e{n}", f"t{n}", host.format(n), due=float(n % 2 * 9)) for n in range(tenants)]
        lanes = _lanes(*events, per_host=2)
        running = [lanes.begin(1.0), lanes.begin(1.0)]  # the shared host has no room
        for place in running[:1]:
            assert place is not None
            lanes.end(place, failed=False)
        return _calls_of_100_deliveries(lanes)

    for host in ("host-{}", "shared"):
        assert cost(5000, host) < 2 * cost(10, host)


def test_memory_is_not_kept_for_events_that_were_delivered() -> None:
    lanes = _lanes(_place("stuck", due=99.0))

    def deliver(numbers: range) -> None:
        for number in numbers:
            lanes.add(_place(f"e{number}", created=float(number)))
            (place,) = _begun(lanes, 1.0)
            lanes.end(place, failed=False)

    deliver(range(100))
    tracemalloc.start()
    try:
        deliver(range(100, 2000))
        assert tracemalloc.get_traced_memory()[0] < 50_000
    finally:
        tracemalloc.stop()
