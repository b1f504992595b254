"""`bottega scale`: the services that each model needs, and the scaler that starts and stops them on this host."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from bottega import kinds
from bottega.client.cli.options import address_option, connect, fleet_option, with_examples
from bottega.client.cli.terminal import PlainTable, print_table
from bottega.client.types.fleet import FleetStatus


@click.command("scale")
@address_option
@fleet_option
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Run this host's scaler in the foreground, with this configuration.",
)
@with_examples("""
    bottega scale
    bottega scale --config scale.yaml
""")
def command(address: str, config: Path | None) -> None:
    """Show how many workers and ControlNet servers each model needs.

    With --config, keep as many running on this host: as units of systemd, or as child processes with
    `manager: processes`. The unit bottega-scale does the same.
    """
    if config is not None:
        os.execv(sys.executable, [sys.executable, "-m", "bottega.scale", "--config", str(config)])
    with connect(address) as client:
        print_table(demand_table(client.fleet()))


def demand_table(fleet: FleetStatus) -> PlainTable:
    """Return a table with a row for each kind and model, and the scalers below it."""
    table = PlainTable("model", "kind", ">ready", ">starting", ">needed", ">waiting", ">work", ">start")
    for each in fleet.demand:
        work = f"{each.waiting_s:.1f} s" if each.waiting else ""
        counts = (each.ready, each.starting, each.desired, each.waiting)
        table.add_row(each.model, each.kind, *map(str, counts), work, f"{each.start_s:.0f} s")
    scalers = ", ".join(member.name for member in fleet.of_kind(kinds.SCALE))
    table.add_caption(
        f"scaled by {scalers}" if scalers else "no scaler has joined: nothing starts or stops by these numbers"
    )
    return table
