"""`bottega fleet` and `bottega top`: the services that have joined, how busy they are, and what they do now."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass

import click

from bottega import kinds
from bottega.client.addons.addon import add_ons_by_kind, left_out_of, refusals_of
from bottega.client.cli.options import address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, duration_text, new_console, print_table, share_text, size_text
from bottega.client.sdk.clients import Client
from bottega.client.types.fleet import FleetMember, FleetStatus, Readiness, ServiceActivity, ServiceLoad
from bottega.plain_text import progress_text

_LOOK_S = 0.5
# Names of hosted items of one kind that fit into a row.
_MOST_NAMES = 6

# Services report twice a second.
_RATE_S = 1.0
_UNKNOWN = "-"


@click.command("fleet")
@address_option
@fleet_option
@click.option("--once", is_flag=True, help="Print the table once instead of keeping it up to date.")
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print once, also with the start-up times and the results of the workers' self-checks.",
)
def command(address: str, once: bool, verbose: bool) -> None:
    """Show the services and their load, live."""
    from rich.live import Live

    console = new_console(stderr=True)
    with connect(address) as client:
        if verbose:
            fleet = client.fleet()
            print_table(fleet_table(fleet, starts=True))
            if any(member.load.accelerations for member in fleet.members):
                print_table(accelerations_table(fleet))
            return
        if once or not console.is_terminal:
            print_table(fleet_table(client.fleet()))
            return
        with Live(fleet_table(client.fleet()), console=console, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(_LOOK_S)
                    live.update(fleet_table(client.fleet()), refresh=True)
            except KeyboardInterrupt:
                return


def fleet_table(fleet: FleetStatus, *, starts: bool = False) -> PlainTable:
    """Return a table with a row for each service, and the gateway's queue below it.

    Args:
        starts: Whether to show how long the newest start of each service took.
    """
    columns = ["service", "kind", "address", "serves", "device", ">running", ">steps", ">memory", ">since"]
    table = PlainTable(
        *columns,
        *([">start"] if starts else []),
        wraps=("serves", "device"),
        optional=("since", "steps", "device", "memory", "kind", "running"),
    )
    for member in fleet.members:
        start_s = member.load.start_s
        table.add_row(*_row(member), *([f"{start_s:.1f} s" if start_s else ""] if starts else []))
    table.add_caption(
        f"{fleet.queued} waiting in the queue",
        *([f"{fleet.scheduler} schedules"] if fleet.scheduler else []),
        *(f"no gateway answers at {address}" for address in fleet.silent),
        *(thing.sentence for thing in left_out_of(fleet)),
        *(f"{member.name} has ended: {reason}" for member, reason in refusals_of(fleet)),
    )
    return table


def accelerations_table(fleet: FleetStatus) -> PlainTable:
    """Return a table with a row for each acceleration that a worker tried at its start, with the result."""
    table = PlainTable(
        "worker", "acceleration", "used", ">times as fast", ">differs by", "why not", optional=("differs by",)
    )
    for member in fleet.members:
        for each in member.load.accelerations:
            timed = f"{each.speedup:.2f}" if each.speedup else ""
            differs = f"{each.difference:.1e}" if each.speedup else ""
            used = "yes" if each.kept else "no"
            table.add_row(member.name, each.name, used, timed, differs, each.reason)
    table.add_caption("Each worker tests the accelerations that engine.accelerations allows when it starts.")
    return table


def _row(member: FleetMember) -> tuple[str, ...]:
    load = member.load
    return (
        member.name,
        member.kind,
        member.address,
        ", ".join([*(model.name for model in member.models), *_hosted(load), *start_text(member)]),
        member.device,
        running_text(member),
        str(sum(attempt.steps_left for attempt in load.running)) if load.running else "",
        f"{load.memory_bytes / 2**20:.0f} MiB" if load.memory_bytes else "",
        duration_text(member.joined_s),
    )


def start_text(member: FleetMember) -> Iterator[str]:
    """Yield the progress of a service that is still starting."""
    if start := member.starting:
        yield f"starting: {progress_text(start.stage, start.done_bytes, start.total_bytes)}"


def _hosted(load: ServiceLoad) -> Iterator[str]:
    """Yield the items that a service hosts: names, or a count for each kind with many. Items on disk are marked."""
    add_ons = add_ons_by_kind()
    listed = [item for item in load.hosted if item.readiness is not Readiness.APPLIED]
    for kind, count in Counter(item.kind for item in listed).items():
        items = [item for item in listed if item.kind == kind]
        loaded = sum(item.readiness is Readiness.LOADED for item in items)
        if count > _MOST_NAMES or not all(item.name for item in items):
            title = add_ons[kind].hosted_title if kind in add_ons else kind
            yield f"{count} {title}, {loaded} loaded"
        else:
            for item in items:
                yield item.name if item.readiness is Readiness.LOADED else f"{item.name} (not loaded)"


def running_text(member: FleetMember) -> str:
    """Return how many attempts a worker runs, or how many sessions another service has."""
    load = member.load
    sessions = sum(item.sessions for item in load.hosted)
    count = len(load.running) if member.kind == kinds.WORKER else sessions
    return f"{count} (draining)" if load.draining else str(count)


@click.command("top")
@address_option
@fleet_option
@click.option("--once", is_flag=True, help="Watch for a second, print the table once and end.")
def top(address: str, once: bool) -> None:
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
        time.sleep(_RATE_S)
        if once or not console.is_terminal:
            print_table(top_table(_look(client, rates), rates))
            return
        with Live(top_table(_look(client, rates), rates), console=console, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(_RATE_S)
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
        table.add_row(*_activity_row(member, rates.of(member)))
    table.add_caption(_waiting(fleet, rates))
    return table


def _activity_row(member: FleetMember, rates: Rates | None) -> tuple[str, ...]:
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
