"""Results of the checks of `bottega doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """The severity of a result."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    level: Level
    what: str
    """The finding, in words."""
    todo: str = ""
    """Advice for the user; empty if nothing has to be done."""


def ok(what: str) -> CheckResult:
    """Return a result without a problem."""
    return CheckResult(Level.OK, what)


def warn(what: str, todo: str) -> CheckResult:
    """Return a result about a problem that affects only some uses."""
    return CheckResult(Level.WARN, what, todo)


def fail(what: str, todo: str) -> CheckResult:
    """Return a result about a problem that must be solved first."""
    return CheckResult(Level.FAIL, what, todo)
