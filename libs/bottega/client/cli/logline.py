"""A service's JSON log line as a person reads it. Knows the fields that every line has, not what logs them."""

from __future__ import annotations

from collections.abc import Mapping

import click

from bottega.client.suite.output import fields_of

_COLOURS = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
_USUAL = ("time", "level", "service", "event", "logger", "exc_info")


def pretty(service: str, line: str) -> str:
    """Time, level, service and event, then the facts as name=value; a traceback below, indented.

    service: whose log it is; lines that are no JSON, such as a crash's last words, have only that.
    """
    fields = fields_of(line)
    level = str(fields.get("level", ""))
    moment = click.style(f"{str(fields.get('time', ''))[11:]:<12}", dim=True)
    head = f"{moment} {click.style(f'{level:<7}', fg=_COLOURS.get(level))} {service:<9}"
    parts = [head, str(fields.get("event", "")), click.style(_facts(fields), dim=True)]
    trace = str(fields.get("exc_info") or "")
    below = "".join(f"\n    {row}" for row in trace.splitlines())
    return " ".join(part for part in parts if click.unstyle(part)) + below


def _facts(fields: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items() if name not in _USUAL and value is not None)
