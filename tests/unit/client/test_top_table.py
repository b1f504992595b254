"""What `bottega top` shows of a fleet."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from bottega import kinds
from bottega.client.cli.fleet_rates import FleetRates
from bottega.client.cli.top import top_table
from bottega.v1.fleet_pb2 import Activity, ListMembersResponse, Load, Member, Registration, RunningAttempt
from bottega.v1.hosted_pb2 import Hosted


def member(kind: str, name: str, activity: Activity, **load: object) -> Member:
    return Member(
        registration=Registration(kind=kind, name=name),
        load=Load(activity=activity, **load),  # type: ignore[arg-type]  # its fields
    )


def fleet(second: int, **facts: float) -> ListMembersResponse:
    """At that second of a fleet in which something happens in each."""
    gateway = Activity(completed=second, failed=0, routed=2 * second, waited_s=3.0 * second)
    worker = Activity(completed=second, failed=3, steps=40 * second, turns=16 * second)
    control = Activity(steps=10 * second, turns=5 * second, lookups=second, hits=second)
    return ListMembersResponse(
        members=[
            member(kinds.GATEWAY, "gateway", gateway),
            member(kinds.CACHE, "cache", Activity(lookups=8, hits=6), memory_bytes=3 << 20),
            member(kinds.CONTROLNET, "nets", control, hosted=[Hosted(kind=kinds.CONTROLNET, name="edges", sessions=2)]),
            member(kinds.LORAS, "loras", Activity()),
            member(kinds.WORKER, "w0", worker, running=[RunningAttempt()] * 3, draining=True),
        ],
        **facts,  # type: ignore[arg-type]  # its fields
    )


def shown(*looks: ListMembersResponse) -> list[str]:
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
