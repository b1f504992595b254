"""How `bottega top` looks, and the rates that it shows."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from bottega import kinds
from bottega.client.cli.top import FleetRates, Rates, hit_share, top_table
from bottega.client.types.fleet import FleetStatus, ServiceActivity, fleet_from, member_from
from bottega.v1.fleet_pb2 import Activity, ListMembersResponse, Load, Member, Registration, RunningAttempt
from bottega.v1.hosted_pb2 import Hosted


def member(kind: str, name: str, activity: Activity, **load: object) -> Member:
    return Member(
        registration=Registration(kind=kind, name=name),
        load=Load(activity=activity, **load),  # type: ignore[arg-type]  # its fields
    )


def fleet(second: int, **facts: float) -> FleetStatus:
    """At that second of a fleet in which something happens in each."""
    gateway = Activity(completed=second, failed=0, routed=2 * second, waited_s=3.0 * second)
    worker = Activity(completed=second, failed=3, steps=40 * second, turns=16 * second)
    control = Activity(steps=10 * second, turns=5 * second, lookups=second, hits=second)
    listed = ListMembersResponse(
        members=[
            member(kinds.GATEWAY, "gateway", gateway),
            member(kinds.CACHE, "cache", Activity(lookups=8, hits=6), memory_bytes=3 << 20),
            member(kinds.CONTROLNET, "nets", control, hosted=[Hosted(kind=kinds.CONTROLNET, name="edges", sessions=2)]),
            member(kinds.LORAS, "loras", Activity()),
            member(kinds.WORKER, "w0", worker, running=[RunningAttempt()] * 3, draining=True),
        ],
        **facts,  # type: ignore[arg-type]  # its fields
    )
    return fleet_from(listed)


def shown(*looks: FleetStatus) -> list[str]:
    rates = FleetRates()
    for second, look in enumerate(looks):
        rates.add(look, now=float(second))
    with StringIO() as file:
        Console(file=file, width=200).print(top_table(looks[-1], rates).table)
        return file.getvalue().splitlines()


def row(lines: list[str], name: str) -> list[str]:
    (found,) = [line.split() for line in lines if line.split()[:1] == [name]]
    return found


def test_each_service_has_its_rates_its_batch_and_its_hits() -> None:
    lines = shown(*(fleet(second) for second in range(1, 4)))
    assert row(lines, "gateway") == ["gateway", "gateway", "60.0", "0.0"]
    assert row(lines, "w0") == ["w0", "worker", "3", "(draining)", "60.0", "0.0", "40.0", "2.5"]
    assert row(lines, "nets") == ["nets", "controlnet", "2", "10.0", "2.0", "1.0", "100", "%"]
    assert row(lines, "loras") == ["loras", "loras", "0"]


def test_where_nobody_asked_of_late_the_hits_are_those_since_the_start() -> None:
    assert row(shown(fleet(1), fleet(2)), "cache") == ["cache", "cache", "0", "-", "(75", "%)", "3.00", "MiB"]


def test_what_was_seen_once_has_no_rate_yet() -> None:
    lines = shown(fleet(1))
    assert row(lines, "gateway") == ["gateway", "gateway", "-", "-"]
    assert row(lines, "w0") == ["w0", "worker", "3", "(draining)", "-", "-", "-", "-"]


def test_how_many_wait_and_how_long_stands_below() -> None:
    last = shown(fleet(1), fleet(2, queued=4, longest_wait_s=12.34))[-1]
    assert last.strip() == "4 waiting in the queue, the longest for 12.3 s, those that began had waited 1.50 s"
    assert shown(fleet(1))[-1].strip() == "0 waiting in the queue"


def counted(name: str, *, heard_s: float = 0.0, **counted: float) -> Member:
    activity = Activity(**counted)  # type: ignore[arg-type]  # whole numbers, but for waited_s
    return Member(registration=Registration(kind="worker", name=name), load=Load(activity=activity), heard_s=heard_s)


def rates_of(*reports: tuple[float, Member]) -> Rates | None:
    """Of the last of these reports, each seen at its time."""
    rates = FleetRates()
    for now, report in reports:
        rates.add(fleet_from(ListMembersResponse(members=[report])), now=now)
    return rates.of(member_from(reports[-1][1]))


def test_rates_are_what_was_counted_between_two_reports_over_their_time() -> None:
    found = rates_of(
        (
            100.0,
            counted("w0", completed=7, failed=1, steps=300, turns=100, lookups=10, hits=9, routed=4, waited_s=1.0),
        ),
        (
            104.0,
            counted("w0", completed=9, failed=2, steps=360, turns=120, lookups=14, hits=10, routed=8, waited_s=7.0),
        ),
    )
    assert found == Rates(completed=0.5, failed=0.25, steps=15, lookups=1, batch=3, wait_s=1.5, hit_share=0.25)


def test_the_age_of_a_report_counts() -> None:
    found = rates_of((10.0, counted("w0", heard_s=0.5, steps=0)), (11.0, counted("w0", heard_s=0.25, steps=5)))
    assert found is not None
    assert found.steps == pytest.approx(4.0)


def test_one_report_says_no_rate_and_neither_does_the_same_one_again() -> None:
    assert rates_of((10.0, counted("w0", steps=50))) is None
    assert rates_of((10.0, counted("w0", heard_s=0.5, steps=50)), (11.0, counted("w0", heard_s=1.5, steps=50))) is None


def test_nothing_asked_no_turn_and_no_job_leave_no_mean() -> None:
    found = rates_of(
        (0.0, counted("w0", lookups=3, hits=3, turns=2, steps=2)),
        (1.0, counted("w0", lookups=3, hits=3, turns=2, steps=2)),
    )
    assert found == Rates(completed=0, failed=0, steps=0, lookups=0, batch=None, wait_s=None, hit_share=None)


def test_what_happened_before_the_window_is_not_in_it() -> None:
    burst = [(float(second), counted("w0", steps=1000 if second else 0, turns=1)) for second in range(12)]
    found = rates_of(*burst)
    assert found is not None
    assert found.steps == 0


def test_a_window_that_nobody_looked_in_is_covered_by_an_older_report() -> None:
    found = rates_of((0.0, counted("w0", steps=0)), (60.0, counted("w0", steps=120)))
    assert found is not None
    assert found.steps == 2


def test_a_service_that_counts_anew_is_measured_anew() -> None:
    before = [(0.0, counted("w0", steps=900, completed=4)), (1.0, counted("w0", steps=910, completed=5))]
    assert rates_of(*before, (2.0, counted("w0", steps=20, completed=5))) is None
    found = rates_of(*before, (2.0, counted("w0", steps=20, completed=5)), (3.0, counted("w0", steps=30, completed=5)))
    assert found is not None
    assert found.steps == 10


def test_services_of_one_fleet_are_told_apart_and_those_that_left_are_forgotten() -> None:
    rates = FleetRates()
    rates.add(fleet_from(ListMembersResponse(members=[counted("w0", steps=1), counted("w1", steps=1)])), now=0.0)
    rates.add(fleet_from(ListMembersResponse(members=[counted("w0", steps=5)])), now=1.0)
    rates.add(fleet_from(ListMembersResponse(members=[counted("w0", steps=5), counted("w1", steps=8)])), now=2.0)
    first, second = (rates.of(member_from(counted(name))) for name in ("w0", "w1"))
    assert first is not None
    assert first.steps == 2
    assert second is None


def test_the_share_of_hits_since_the_start() -> None:
    assert hit_share(ServiceActivity(lookups=8, hits=6)) == 0.75
    assert hit_share(ServiceActivity()) is None
