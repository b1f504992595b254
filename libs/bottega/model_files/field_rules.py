"""Rules for single fields of a configuration: the values that are served, and the reasons to refuse others.

A part has a table with a rule for each field that its class in Diffusers or transformers knows. Other fields are
accepted, because those libraries ignore them. The documentation's tables are made from the same rules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.plain_text import excerpt

_SHOWN_CHARACTERS = 60
# Entries of a list for levels or layers; published models have at most 4 levels.
_MAX_ENTRIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """A set of values that a field may have."""

    text: str
    """Description of the values, to follow "must be"."""
    accepts: Callable[[object], bool]
    """Returns whether a value is in the set."""

    def __or__(self, other: Values) -> Values:
        """Return the union of both sets."""
        text = f"{self.text.replace(' or ', ', ')} or {other.text}"
        return Values(text=text, accepts=lambda value: self.accepts(value) or other.accepts(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """A rule for the values of one field."""

    name: str
    default: object
    """Default of Diffusers or transformers, as in JSON."""
    values: Values
    """Values with which pictures are equal to those of stock Diffusers."""
    why: str = ""
    """Why other values are refused, or why any is accepted; empty if stock Diffusers fails with others too."""


def broken_fields(rules: Sequence[FieldRule], config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field whose value is not served."""
    for rule in rules:
        value = config.get(rule.name, rule.default)
        if not rule.values.accepts(value):
            why = f": {rule.why}" if rule.why else ""
            yield f"{rule.name} must be {rule.values.text}, not {shown(value)}{why}"


def with_defaults(rules: Sequence[FieldRule], config: Mapping[str, object]) -> dict[str, Any]:
    """Return a configuration with the defaults of Diffusers or transformers for missing fields."""
    return {rule.name: rule.default for rule in rules} | dict(config)


def shown(value: object) -> str:
    """Return a value as JSON, cut to a length that fits into a sentence."""
    return excerpt(json.dumps(value), _SHOWN_CHARACTERS)


def whole(least: int, most: int | None = None) -> Values:
    """Return the whole numbers from `least`, or from `least` to `most`.

    Numbers over which the checker loops, such as layers, need `most`: an untrusted configuration may have any number.
    """
    return Values(
        text=f"a whole number from {least}" if most is None else f"a whole number from {least} to {most}",
        accepts=lambda value: (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value >= least
            and (most is None or value <= most)
        ),
    )


def number(text: str, accepts: Callable[[float], bool] = math.isfinite) -> Values:
    """Return the finite numbers for which `accepts` is true."""
    return Values(
        text=text,
        accepts=lambda value: (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and accepts(float(value))
        ),
    )


def only(*values: object) -> Values:
    """Return the set of these values."""
    *others, last = (shown(value) for value in values)
    text = f"{', '.join(others)} or {last}" if others else last
    return Values(text=text, accepts=lambda value: any(_same(value, each) for each in values))


def list_of(values: Values, text: str) -> Values:
    """Return the lists of 1 to 64 entries of which each is one of `values`."""
    return Values(
        text=text,
        accepts=lambda value: (
            isinstance(value, list) and 0 < len(value) <= _MAX_ENTRIES and all(values.accepts(each) for each in value)
        ),
    )


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


ANY = Values(text="anything", accepts=lambda value: True)
BOOLEAN = only(True, False)
# Diffusers takes null for false wherever it only asks whether a value is true.
FLAG = only(True, False, None)
OFF = only(False, None)
NULL = only(None)
TEXT = Values(text="a text", accepts=lambda value: isinstance(value, str))
FRACTION = number("a number from 0 to 1", lambda value: 0 <= value <= 1)
POSITIVE = number("a number above 0", lambda value: value > 0)
