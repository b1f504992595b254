"""`bottega logs`: what the services on this machine said."""

from __future__ import annotations

import click

from bottega.client.cli.log_format import pretty
from bottega.client.cli.options import state_option
from bottega.client.cli.terminal import fail, say
from bottega.client.instance import StateFolder


@click.command("logs")
@click.argument("service", required=False)
@click.option("-f", "--follow", "following", is_flag=True, help="Go on with what comes; Ctrl-C ends it.")
@click.option("-n", "--lines", "count", type=click.IntRange(0), default=20, show_default=True, help="Last lines.")
@click.option("--raw", is_flag=True, help="The JSON lines as they are.")
@state_option
def command(*, service: str | None, following: bool, count: int, raw: bool, state: StateFolder) -> None:
    """Show what SERVICE, or all of them, said last."""
    from bottega.client.suite.service_log import follow, last_lines, services_with_logs

    known = services_with_logs(state.logs)
    if not known:
        fail(
            f"there are no logs in {state.logs}",
            f"Services that systemd runs: journalctl -u 'bottega{_unit_of(service)}*' -n {count} -o cat\n"
            "Start a suite with: bottega up",
        )
    if service and service not in known:
        fail(f"there is no log of {service}", f"There are: {', '.join(known)}", status=2)
    services = [service] if service else known
    for name, line in last_lines(state.logs, services, count):
        _show(name, line, raw=raw)
    try:
        for name, line in follow(state.logs, services) if following else ():
            _show(name, line, raw=raw)
    except KeyboardInterrupt:
        return


def _unit_of(service: str | None) -> str:
    """What its unit's name goes on with: a suite's worker-0 is an instance of bottega-worker there."""
    return f"-{service.partition('-')[0]}" if service else ""


def _show(service: str, line: str, *, raw: bool) -> None:
    """raw: JSON is plain text as it is, and lines that are none are made so."""
    for row in [(line,)] if raw else pretty(service, line):
        say(*row)
