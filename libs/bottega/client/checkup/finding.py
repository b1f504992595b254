"""What a check found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the checkup. todo: what helps; empty when nothing has to be done."""

    level: Level
    what: str
    todo: str = ""


def ok(what: str) -> Finding:
    """As it should be."""
    return Finding(Level.OK, what)


def warn(what: str, todo: str) -> Finding:
    """Works, but not for everything."""
    return Finding(Level.WARN, what, todo)


def fail(what: str, todo: str) -> Finding:
    """Nothing works until it is put right."""
    return Finding(Level.FAIL, what, todo)
