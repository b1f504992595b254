"""`bottega fleet`: which services have joined, and how busy they are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from bottega.client.cli.gateway_options import address_option, connect, fleet_option
from bottega.client.cli.terminal import PlainTable, new_table, print_table, stderr_console

if TYPE_CHECKING:
    from bottega.v1.fleet_pb2 import ListMembersResponse, Load, Member

_LOOK_S = 0.5
# ControlNets of one service that a row has room for.
_MOST_NAMES = 6


@click.command("fleet")
@address_option
@fleet_option
@click.option("--once", is_flag=True, help="Print the table once instead of keeping it up to date.")
def command(address: str, once: bool) -> None:
    """Show the services and their load, live."""
    from rich.live import Live

    console = stderr_console()
    with connect(address) as client:
        if once or not console.is_terminal:
            print_table(fleet_table(client.fleet()))
            return
        with Live(fleet_table(client.fleet()).table, console=console, auto_refresh=False) as live:
            try:
                while True:
                    time.sleep(_LOOK_S)
                    live.update(fleet_table(client.fleet()).table, refresh=True)
            except KeyboardInterrupt:
                return


def fleet_table(fleet: ListMembersResponse) -> PlainTable:
    """One row a service; the gateway's queue stands below."""
    table = new_table("service", "kind", "address", "serves", "device", ">running", ">steps", ">memory", ">since")
    for member in fleet.members:
        table.add_row(*_row(member))
    table.add_caption(f"{fleet.queued} waiting in the queue")
    return table


def _row(member: Member) -> tuple[str, ...]:
    who, load = member.registration, member.load
    return (
        who.name,
        who.kind,
        who.address,
        ", ".join([*(model.name for model in who.models), *_controlnets(load)]),
        who.device,
        _running(member),
        str(sum(attempt.steps_left for attempt in load.running)) if load.running else "",
        f"{load.memory_bytes / 2**20:.0f} MiB" if load.memory_bytes else "",
        _duration(member.joined_s),
    )


def _controlnets(load: Load) -> list[str]:
    """By name while they are few; those that are not in memory say so."""
    from bottega.v1.controlnet_pb2 import HOSTED_STATE_LOADED

    loaded = [net.name for net in load.controlnets if net.state == HOSTED_STATE_LOADED]
    if len(load.controlnets) > _MOST_NAMES:
        return [f"{len(load.controlnets)} ControlNets, {len(loaded)} loaded"]
    return [net.name if net.name in loaded else f"{net.name} (not loaded)" for net in load.controlnets]


def _running(member: Member) -> str:
    """Attempts of a worker, sessions of a ControlNet server."""
    from bottega import kinds

    load = member.load
    serves = member.registration.kind == kinds.CONTROLNET
    count = sum(net.sessions for net in load.controlnets) if serves else len(load.running)
    return f"{count} (draining)" if load.draining else str(count)


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{minutes:.0f} min" if minutes >= 1 else f"{seconds:.0f} s"
