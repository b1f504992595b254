"""Formats a service's JSON log lines for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from bottega.client.cli.terminal import Line, Styled
from bottega.client.suite.service_log import fields_of

_COLOURS = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}
_USUAL = ("time", "level", "service", "event", "logger", "exc_info")
# Other values are quoted, so that untrusted text cannot look like several facts.
_ONE_WORD = re.compile(r"[^\s\"'=]+")


def pretty(service: str, line: str) -> Iterator[Line]:
    """Yield time, level, service and event, then the facts as name=value; below them the marked lines of a traceback.

    Args:
        service: Owner of the log. Lines that are no JSON, such as the output of a crash, are shown as its events.
        line: The line as it was written.
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
