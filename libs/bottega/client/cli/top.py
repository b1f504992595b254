"""`bottega top`: what every service does now: what runs and waits, rates, batches, hit rates."""

from __future__ import annotations

import time

import click

from bottega import kinds
from bottega.client.cli.fleet import running_text
from bottega.client.cli.fleet_rates import FleetRates, Rates, hit_share
from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, new_console, print_table, share_text, size_text
from bottega.client.sdk.clients import Client
from bottega.v1.fleet_pb2 import ListMembersResponse, Load, Member

# Services report twice a second.
_LOOK_S = 1.0
_NOTHING = "-"


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
    return (f"{60 * rates.completed:.1f}", f"{60 * rates.failed:.1f}") if rates is not None else (_NOTHING, _NOTHING)


def _steps(load: Load, rates: Rates | None) -> tuple[str, str]:
    if not load.activity.turns:
        return "", ""
    if rates is None or rates.batch is None:
        return _NOTHING, _NOTHING
    return f"{rates.steps:.1f}", f"{rates.batch:.1f}"


def _lookups(load: Load, rates: Rates | None) -> tuple[str, str]:
    """The share of all questions, in parentheses, where nobody asked of late."""
    ever = hit_share(load.activity)
    if ever is None:
        return "", ""
    if rates is None or rates.hit_share is None:
        return _NOTHING, f"({share_text(ever)})"
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
