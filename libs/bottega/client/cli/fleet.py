"""`bottega fleet`: the services that have joined, and how busy they are."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import click

from bottega import kinds
from bottega.client.addons.addon import add_ons_by_kind, left_out_of, refusals_of
from bottega.client.cli.options import address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, new_console, print_table
from bottega.client.types.fleet import FleetMember, FleetStatus, Readiness, ServiceLoad
from bottega.plain_text import progress_text

_LOOK_S = 0.5
# Names of hosted items of one kind that fit into a row.
_MOST_NAMES = 6


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
        _duration(member.joined_s),
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


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{minutes:.0f} min" if minutes >= 1 else f"{seconds:.0f} s"
