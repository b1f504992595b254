"""`bottega top`: what every service does now: running and waiting work, rates, batches, hit rates."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import click

from bottega import kinds
from bottega.client.cli.fleet import running_text
from bottega.client.cli.options import address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, new_console, print_table, share_text, size_text
from bottega.client.sdk.clients import Client
from bottega.v1.fleet_pb2 import Activity, ListMembersResponse, Load, Member

# Services report twice a second.
_LOOK_S = 1.0
_UNKNOWN = "-"


@click.command("top")
@address_option
@fleet_option
@click.option("--once", is_flag=True, help="Watch for a second, print the table once, and end.")
def command(address: str, once: bool) -> None:
    """Show what the services do now, live.

    Rates and means are of the last ten seconds at most: "batch" is how many requests share a turn of a worker, or how
    many rows a forward of a ControlNet server. "hits" are of the questions asked meanwhile, or in parentheses of those
    since the service's start.
    """
    from rich.live import Live

    console = new_console(stderr=True)
    rates = FleetRates()
    with connect(address) as client:
        _look(client, rates)
        time.sleep(_LOOK_S)
        if once or not console.is_terminal:
            print_table(top_table(_look(client, rates), rates))
            return
        with Live(top_table(_look(client, rates), rates), console=console, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(_LOOK_S)
                    live.update(top_table(_look(client, rates), rates), refresh=True)
            except KeyboardInterrupt:
                return


def top_table(fleet: ListMembersResponse, rates: FleetRates) -> PlainTable:
    """One row a service; what waits stands below."""
    table = PlainTable(
        "service",
        "kind",
        ">running",
        ">done/min",
        ">failed/min",
        ">steps/s",
        ">batch",
        ">asked/s",
        ">hits",
        ">memory",
        optional=("kind", "memory", "asked/s", "batch", "hits"),
    )
    for member in fleet.members:
        table.add_row(*_row(member, rates.of(member)))
    table.add_caption(_waiting(fleet, rates))
    return table


def _row(member: Member, rates: Rates | None) -> tuple[str, ...]:
    who, load = member.registration, member.load
    return (
        who.name,
        who.kind,
        running_text(member) if who.kind != kinds.GATEWAY else "",
        *_done(load, rates),
        *_steps(load, rates),
        *_lookups(load, rates),
        size_text(load.memory_bytes) if load.memory_bytes else "",
    )


def _done(load: Load, rates: Rates | None) -> tuple[str, str]:
    """Of services that end jobs, or attempts at them; empty for others, and for those that have ended none."""
    if not load.activity.completed and not load.activity.failed:
        return "", ""
    return (f"{60 * rates.completed:.1f}", f"{60 * rates.failed:.1f}") if rates is not None else (_UNKNOWN, _UNKNOWN)


def _steps(load: Load, rates: Rates | None) -> tuple[str, str]:
    if not load.activity.turns:
        return "", ""
    if rates is None or rates.batch is None:
        return _UNKNOWN, _UNKNOWN
    return f"{rates.steps:.1f}", f"{rates.batch:.1f}"


def _lookups(load: Load, rates: Rates | None) -> tuple[str, str]:
    """The share of all questions, in parentheses, where nobody asked of late."""
    ever = hit_share(load.activity)
    if ever is None:
        return "", ""
    if rates is None or rates.hit_share is None:
        return _UNKNOWN, f"({share_text(ever)})"
    return f"{rates.lookups:.1f}", share_text(rates.hit_share)


def _waiting(fleet: ListMembersResponse, rates: FleetRates) -> str:
    parts = [f"{fleet.queued} waiting in the queue"]
    if fleet.queued:
        parts.append(f"the longest for {fleet.longest_wait_s:.1f} s")
    gateways = (rates.of(member) for member in fleet.members if member.registration.kind == kinds.GATEWAY)
    waits = [each.wait_s for each in gateways if each is not None and each.wait_s is not None]
    if waits:
        parts.append(f"those that began had waited {max(waits):.2f} s")
    return ", ".join(parts)


def _look(client: Client, rates: FleetRates) -> ListMembersResponse:
    fleet = client.fleet()
    rates.add(fleet, now=time.monotonic())
    return fleet


WINDOW_S = 10.0
"""Rates are of the last so many seconds."""

# Of one service: a look every second needs a dozen.
_MOST_SAMPLES = 64

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a service has done of late.

    completed, failed, steps, lookups: a second. batch: steps of one turn; None where there was no turn. wait_s: that
    jobs waited for the worker that they got, on average; None where none got one. hit_share: of the questions for what
    it keeps, 0 to 1; None where nobody asked.
    """

    completed: float
    failed: float
    steps: float
    lookups: float
    batch: float | None
    wait_s: float | None
    hit_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """What a service had counted at a moment of our clock."""

    at: float
    activity: Activity


class FleetRates:
    """Follows the services of a fleet; those that have left are forgotten."""

    def __init__(self) -> None:
        self._samples: dict[_Key, deque[_Sample]] = {}

    def add(self, fleet: ListMembersResponse, *, now: float) -> None:
        """Takes in the fleet as it was at `now`, of a clock that never goes back."""
        before = self._samples
        self._samples = {_key(member): before.get(_key(member), _no_samples()) for member in fleet.members}
        for member in fleet.members:
            # A report is as old as the time since its service was heard.
            sample = _Sample(at=now - member.heard_s, activity=member.load.activity)
            _append(self._samples[_key(member)], sample)

    def of(self, member: Member) -> Rates | None:
        """None until it has reported twice."""
        samples = self._samples.get(_key(member))
        if not samples or samples[-1].at <= samples[0].at:
            return None
        first, last = samples[0], samples[-1]
        return _rates(first.activity, last.activity, seconds=last.at - first.at)


def hit_share(activity: Activity) -> float | None:
    """Of all questions since the start; None where there was none."""
    return _share_of(activity.hits, activity.lookups)


def _append(samples: deque[_Sample], sample: _Sample) -> None:
    if samples and _began_anew(samples[-1].activity, sample.activity):
        samples.clear()
    samples.append(sample)
    # One that is older stays, so that the window is covered.
    while len(samples) > 2 and samples[1].at <= sample.at - WINDOW_S:
        samples.popleft()


def _began_anew(before: Activity, after: Activity) -> bool:
    """Whether another process or engine counts now."""
    return any(getattr(after, field.name) < value for field, value in before.ListFields())


def _rates(before: Activity, after: Activity, *, seconds: float) -> Rates:
    steps, lookups = after.steps - before.steps, after.lookups - before.lookups
    turns, routed = after.turns - before.turns, after.routed - before.routed
    return Rates(
        completed=(after.completed - before.completed) / seconds,
        failed=(after.failed - before.failed) / seconds,
        steps=steps / seconds,
        lookups=lookups / seconds,
        batch=steps / turns if turns else None,
        wait_s=(after.waited_s - before.waited_s) / routed if routed else None,
        hit_share=_share_of(after.hits - before.hits, lookups),
    )


def _share_of(hits: int, lookups: int) -> float | None:
    return hits / lookups if lookups > 0 else None


def _key(member: Member) -> _Key:
    return member.registration.kind, member.registration.name


def _no_samples() -> deque[_Sample]:
    return deque(maxlen=_MOST_SAMPLES)
