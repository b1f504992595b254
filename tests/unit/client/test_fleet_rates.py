"""What services do a second, from what they say that they have counted."""

from __future__ import annotations

import pytest

from bottega.client.cli.fleet_rates import FleetRates, Rates, hit_share
from bottega.v1.fleet_pb2 import Activity, ListMembersResponse, Load, Member, Registration


def member(name: str, *, heard_s: float = 0.0, **counted: float) -> Member:
    activity = Activity(**counted)  # type: ignore[arg-type]  # whole numbers, but for waited_s
    return Member(registration=Registration(kind="worker", name=name), load=Load(activity=activity), heard_s=heard_s)


def rates_of(*reports: tuple[float, Member]) -> Rates | None:
    """Of the last of these reports, each seen at its time."""
    rates = FleetRates()
    for now, report in reports:
        rates.add(ListMembersResponse(members=[report]), now=now)
    return rates.of(reports[-1][1])


def test_rates_are_what_was_counted_between_two_reports_over_their_time() -> None:
    found = rates_of(
        (100.0, member("w0", completed=7, failed=1, steps=300, turns=100, lookups=10, hits=9, routed=4, waited_s=1.0)),
        (104.0, member("w0", completed=9, failed=2, steps=360, turns=120, lookups=14, hits=10, routed=8, waited_s=7.0)),
    )
    assert found == Rates(completed=0.5, failed=0.25, steps=15, lookups=1, batch=3, wait_s=1.5, hit_share=0.25)


def test_the_age_of_a_report_counts() -> None:
    found = rates_of((10.0, member("w0", heard_s=0.5, steps=0)), (11.0, member("w0", heard_s=0.25, steps=5)))
    assert found is not None
    assert found.steps == pytest.approx(4.0)


def test_one_report_says_no_rate_and_neither_does_the_same_one_again() -> None:
    assert rates_of((10.0, member("w0", steps=50))) is None
    assert rates_of((10.0, member("w0", heard_s=0.5, steps=50)), (11.0, member("w0", heard_s=1.5, steps=50))) is None


def test_nothing_asked_no_turn_and_no_job_leave_no_mean() -> None:
    found = rates_of(
        (0.0, member("w0", lookups=3, hits=3, turns=2, steps=2)),
        (1.0, member("w0", lookups=3, hits=3, turns=2, steps=2)),
    )
    assert found == Rates(completed=0, failed=0, steps=0, lookups=0, batch=None, wait_s=None, hit_share=None)


def test_what_happened_before_the_window_is_not_in_it() -> None:
    burst = [(float(second), member("w0", steps=1000 if second else 0, turns=1)) for second in range(12)]
    found = rates_of(*burst)
    assert found is not None
    assert found.steps == 0


def test_a_window_that_nobody_looked_in_is_covered_by_an_older_report() -> None:
    found = rates_of((0.0, member("w0", steps=0)), (60.0, member("w0", steps=120)))
    assert found is not None
    assert found.steps == 2


def test_a_service_that_counts_anew_is_measured_anew() -> None:
    before = [(0.0, member("w0", steps=900, completed=4)), (1.0, member("w0", steps=910, completed=5))]
    assert rates_of(*before, (2.0, member("w0", steps=20, completed=5))) is None
    found = rates_of(*before, (2.0, member("w0", steps=20, completed=5)), (3.0, member("w0", steps=30, completed=5)))
    assert found is not None
    assert found.steps == 10


def test_services_of_one_fleet_are_told_apart_and_those_that_left_are_forgotten() -> None:
    rates = FleetRates()
    rates.add(ListMembersResponse(members=[member("w0", steps=1), member("w1", steps=1)]), now=0.0)
    rates.add(ListMembersResponse(members=[member("w0", steps=5)]), now=1.0)
    rates.add(ListMembersResponse(members=[member("w0", steps=5), member("w1", steps=8)]), now=2.0)
    first, second = (rates.of(member(name)) for name in ("w0", "w1"))
    assert first is not None
    assert first.steps == 2
    assert second is None


def test_the_share_of_hits_since_the_start() -> None:
    assert hit_share(Activity(lookups=8, hits=6)) == 0.75
    assert hit_share(Activity()) is None
