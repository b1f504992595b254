"""`bottega top`: shows for every service its running and waiting work, rates, batch sizes and hit rates, live."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import astuple, dataclass

import click

from bottega import kinds
from bottega.client.cli.fleet import running_text
from bottega.client.cli.options import address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, new_console, print_table, share_text, size_text
from bottega.client.sdk.clients import Client
from bottega.client.types.fleet import FleetMember, FleetStatus, ServiceActivity, ServiceLoad

# Services report twice a second.
_LOOK_S = 1.0
_UNKNOWN = "-"


@click.command("top")
@address_option
@fleet_option
@click.option("--once", is_flag=True, help="Watch for a second, print the table once and end.")
def command(address: str, once: bool) -> None:
    """Show what the services do now, live.

    Rates and means cover the last ten seconds. "batch" is the mean number of requests in a worker's forward pass, or of
    rows in that of a ControlNet server. "hits" is the share of lookups that found their item; a value in parentheses
    covers the whole time since the service started, because there was no lookup lately.
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


def top_table(fleet: FleetStatus, rates: FleetRates) -> PlainTable:
    """Return a table with a row for each service, and below it the size of the gateway's queue."""
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


def _row(member: FleetMember, rates: Rates | None) -> tuple[str, ...]:
    load = member.load
    return (
        member.name,
        member.kind,
        running_text(member) if member.kind != kinds.GATEWAY else "",
        *_done(load, rates),
        *_steps(load, rates),
        *_lookups(load, rates),
        size_text(load.memory_bytes) if load.memory_bytes else "",
    )


def _done(load: ServiceLoad, rates: Rates | None) -> tuple[str, str]:
    """Return the rates of ended jobs or attempts as text; empty for services that have ended none."""
    if not load.activity.completed and not load.activity.failed:
        return "", ""
    return (f"{60 * rates.completed:.1f}", f"{60 * rates.failed:.1f}") if rates is not None else (_UNKNOWN, _UNKNOWN)


def _steps(load: ServiceLoad, rates: Rates | None) -> tuple[str, str]:
    if not load.activity.turns:
        return "", ""
    if rates is None or rates.batch is None:
        return _UNKNOWN, _UNKNOWN
    return f"{rates.steps:.1f}", f"{rates.batch:.1f}"


def _lookups(load: ServiceLoad, rates: Rates | None) -> tuple[str, str]:
    """Return the rate of lookups and the hit rate as text; without recent lookups the hit rate since the start."""
    ever = hit_share(load.activity)
    if ever is None:
        return "", ""
    if rates is None or rates.hit_share is None:
        return _UNKNOWN, f"({share_text(ever)})"
    return f"{rates.lookups:.1f}", share_text(rates.hit_share)


def _waiting(fleet: FleetStatus, rates: FleetRates) -> str:
    parts = [f"{fleet.queued} waiting in the queue"]
    if fleet.queued:
        parts.append(f"the longest for {fleet.longest_wait_s:.1f} s")
    gateways = (rates.of(member) for member in fleet.members if member.kind == kinds.GATEWAY)
    waits = [each.wait_s for each in gateways if each is not None and each.wait_s is not None]
    if waits:
        parts.append(f"those that began had waited {max(waits):.2f} s")
    return ", ".join(parts)


def _look(client: Client, rates: FleetRates) -> FleetStatus:
    fleet = client.fleet()
    rates.add(fleet, now=time.monotonic())
    return fleet


WINDOW_S = 10.0
"""Length of the time window that the rates cover, in seconds."""

# Samples of one service: one a second needs a dozen.
_MOST_SAMPLES = 64

_Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The rates of a service, per second, over the last WINDOW_S seconds."""

    completed: float
    failed: float
    steps: float
    lookups: float
    batch: float | None
    """Mean number of requests or rows in a forward pass; None if there was none."""
    wait_s: float | None
    """Mean seconds that jobs waited until a worker got them; None if no worker got one."""
    hit_share: float | None
    """Share of lookups that were hits, 0 to 1; None if there was no lookup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """The counters of a service at one time on the monotonic clock."""

    at: float
    activity: ServiceActivity


class FleetRates:
    """The rates of all services of a fleet, computed from repeated reports."""

    def __init__(self) -> None:
        self._samples: dict[_Key, deque[_Sample]] = {}

    def add(self, fleet: FleetStatus, *, now: float) -> None:
        """Record the counters of a fleet at the time `now` of a monotonic clock. Drop services that have left."""
        before = self._samples
        self._samples = {_key(member): before.get(_key(member), _no_samples()) for member in fleet.members}
        for member in fleet.members:
            # A report is as old as the time since its service was last heard.
            sample = _Sample(at=now - member.heard_s, activity=member.load.activity)
            _append(self._samples[_key(member)], sample)

    def of(self, member: FleetMember) -> Rates | None:
        """Return the rates of a service; None until two reports have been recorded."""
        samples = self._samples.get(_key(member))
        if not samples or samples[-1].at <= samples[0].at:
            return None
        first, last = samples[0], samples[-1]
        return _rates(first.activity, last.activity, seconds=last.at - first.at)


def hit_share(activity: ServiceActivity) -> float | None:
    """Return the share of hits among all lookups since the service started; None without lookups."""
    return _share_of(activity.hits, activity.lookups)


def _append(samples: deque[_Sample], sample: _Sample) -> None:
    if samples and _began_anew(samples[-1].activity, sample.activity):
        samples.clear()
    samples.append(sample)
    # One older sample stays, so that the whole window is covered.
    while len(samples) > 2 and samples[1].at <= sample.at - WINDOW_S:
        samples.popleft()


def _began_anew(before: ServiceActivity, after: ServiceActivity) -> bool:
    """Return whether a counter has decreased, because the service or its engine process was restarted."""
    return any(now < then for now, then in zip(astuple(after), astuple(before), strict=True))


def _rates(before: ServiceActivity, after: ServiceActivity, *, seconds: float) -> Rates:
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


def _key(member: FleetMember) -> _Key:
    return member.kind, member.name


def _no_samples() -> deque[_Sample]:
    return deque(maxlen=_MOST_SAMPLES)
