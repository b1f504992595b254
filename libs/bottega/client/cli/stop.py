"""`bottega stop`: stops the suite that runs from the state folder."""

from __future__ import annotations

import click

from bottega.client.cli.options import state_option
from bottega.client.cli.terminal import note, say
from bottega.client.instance import StateFolder


@click.command("stop")
@state_option
def command(*, state: StateFolder) -> None:
    """Stop the suite that runs here."""
    from bottega.client.suite.background import end_orphans, stop_instance

    if stop_instance(state):
        say("Stopped; nothing is left running.")
        return
    for name in end_orphans(state.read()):
        note(f"Ended {name}, which a killed suite had left running.")
    say(f"No suite runs from {state.root}. For services of systemd: systemctl stop bottega.target")
