"""The result of a check, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the checkup. todo: what helps; empty when nothing has to be done."""

    level: Level
    what: str
    todo: str = ""


def ok(what: str) -> CheckResult:
    """As it should be."""
    return CheckResult(Level.OK, what)


def warn(what: str, todo: str) -> CheckResult:
    """Works, but not for everything."""
    return CheckResult(Level.WARN, what, todo)


def fail(what: str, todo: str) -> CheckResult:
    """Nothing works until it is put right."""
    return CheckResult(Level.FAIL, what, todo)
