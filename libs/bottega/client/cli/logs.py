"""`bottega logs` and `bottega stop`, for the suite that runs on this machine, and the log of the suite itself.

Logs are formatted for people.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime

import click

from bottega.client.addons.addon import LeftOutThing
from bottega.client.cli.options import state_option
from bottega.client.cli.terminal import Line, Styled, fail, note, say
from bottega.client.instance import StateFolder
from bottega.client.suite.service_log import ServiceLog, fields_of

_COLOURS = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
_USUAL = ("time", "level", "service", "event", "logger", "exc_info")
# Other values are quoted, so that untrusted text cannot look like several facts.
_ONE_WORD = re.compile(r"[^\s\"'=]+")


@click.command("logs")
@click.argument("service", required=False)
@click.option("-f", "--follow", "following", is_flag=True, help="Also show new lines; Ctrl-C ends it.")
@click.option("-n", "--lines", "count", type=click.IntRange(0), default=20, show_default=True, help="Number of lines.")
@click.option("--raw", is_flag=True, help="Show the JSON lines unchanged.")
@state_option
def command(*, service: str | None, following: bool, count: int, raw: bool, state: StateFolder) -> None:
    """Show the last log lines of SERVICE, or of all services."""
    from bottega.client.suite.service_log import follow, last_lines, services_with_logs

    known = services_with_logs(state.logs)
    if not known:
        fail(
            f"there are no logs in {state.logs}",
            f"For services of systemd: journalctl -u 'bottega{_unit_of(service)}*' -n {count} -o cat\n"
            "Start a suite with: bottega up",
        )
    if service and service not in known:
        fail(f"there is no log of {service}", f"Services with logs: {', '.join(known)}", status=2)
    services = [service] if service else known
    for name, line in last_lines(state.logs, services, count):
        _show(name, line, raw=raw)
    try:
        for name, line in follow(state.logs, services) if following else ():
            _show(name, line, raw=raw)
    except KeyboardInterrupt:
        return


def _unit_of(service: str | None) -> str:
    """Return the suffix of the service's systemd unit: worker-0 of a suite is an instance of bottega-worker there."""
    return f"-{service.partition('-')[0]}" if service else ""


def _show(service: str, line: str, *, raw: bool) -> None:
    for row in [(line,)] if raw else pretty(service, line):
        say(*row)


def pretty(service: str, line: str) -> Iterator[Line]:
    """Yield one line of time, level, service, event and facts as name=value, then the lines of a traceback, marked.

    Args:
        service: The service that wrote the log.
        line: The line as it was written. A line that is not JSON, such as the output of a crash, is shown as an event.
    """
    fields = fields_of(line)
    level = str(fields.get("level", ""))
    head: list[str | Styled] = [
        Styled(text=f"{str(fields.get('time', ''))[11:]:<12}", dim=True),
        " ",
        Styled(text=f"{level:<7}", colour=_COLOURS.get(level)),
        f" {service:<12}",
    ]
    if event := str(fields.get("event", "")):
        head.append(f" {event}")
    if facts := _facts(fields):
        head += [" ", Styled(text=facts, dim=True)]
    yield head
    for row in str(fields.get("exc_info") or "").split("\n"):
        if row:
            yield (f"    | {row}",)


def _facts(fields: Mapping[str, object]) -> str:
    return " ".join(
        f"{name}={_value(value)}" for name, value in fields.items() if name not in _USUAL and value is not None
    )


def _value(value: object) -> str:
    text = str(value)
    return text if _ONE_WORD.fullmatch(text) else json.dumps(text, ensure_ascii=False)


@click.command("stop")
@state_option
def stop(*, state: StateFolder) -> None:
    """Stop the suite that runs here."""
    from bottega.client.suite.background import end_orphans, stop_instance

    if stop_instance(state):
        say("Stopped; nothing is left running.")
        return
    for name in end_orphans(state.read()):
        note(f"Ended {name}, which a killed suite had left running.")
    say(f"No suite runs from {state.root}. For services of systemd: systemctl stop bottega.target")


class TerminalListener:
    """A ServiceListener that prints each event, and appends it to suite.log.

    Args:
        quiet: Only append to suite.log. Its size is limited, while the output file of a background suite has no limit.
    """

    def __init__(self, log: ServiceLog, *, quiet: bool) -> None:
        self._log = log
        self._quiet = quiet

    def starting(self, name: str, progress: str) -> None:
        self._write("INFO", f"{name} starts", progress=progress)
        if not self._quiet:
            say(f"  {name:<12} {progress}")

    def serving(self, name: str, address: str) -> None:
        self._write("INFO", f"{name} serves", address=address)
        if not self._quiet:
            say(f"  {name:<12} serves at {address}")

    def died(self, name: str, how: str, wait_s: float) -> None:
        self._write("WARNING", f"{name} {how}", wait_s=wait_s)
        if not self._quiet:
            note(f"  {name:<12} {how}; starting it again in {wait_s:g} s (bottega logs {name} says why)")

    def not_forked(self, reason: str) -> None:
        event = f"the fork server failed: {reason}; new interpreters are started"
        self._write("WARNING", event)
        if not self._quiet:
            note(f"  {event}")

    def left_out(self, thing: LeftOutThing) -> None:
        """Warn of a file or folder that a service does not host."""
        self._write("WARNING", thing.sentence)
        if not self._quiet:
            note_left_out(thing)

    def _write(self, level: str, event: str, **facts: object) -> None:
        # In the services' own format, so that bottega logs can merge the lines.
        moment = f"{datetime.now():%Y-%m-%d %H:%M:%S,%f}"[:-3]  # noqa: DTZ005 - services write local time, too
        self._log.write(json.dumps({"time": moment, "level": level, "service": "suite", "event": event, **facts}))


def note_left_out(thing: LeftOutThing) -> None:
    """Print a warning about a file or folder that a service does not host."""
    note(Styled(text="warning:", colour="yellow", bold=True), f" {thing.sentence}")
