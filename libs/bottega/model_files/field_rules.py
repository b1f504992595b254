"""Rules for single fields of a configuration: which values are served, and why the others are refused.

A part has a table of rules with one row for each field that its class in Diffusers or transformers knows. Fields
without a row are accepted: those libraries pass over what they do not know. The same tables are the pages' tables.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.plain_text import excerpt

_SHOWN_CHARACTERS = 60
# Of a list for levels or layers: published models have at most 4 levels.
_MAX_ENTRIES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """A set of values that a field may have."""

    text: str
    """What the values are, as it stands behind "must be"."""
    accepts: Callable[[object], bool]
    """Whether a value is one of them."""

    def __or__(self, other: Values) -> Values:
        """The values of both."""
        text = f"{self.text.replace(' or ', ', ')} or {other.text}"
        return Values(text=text, accepts=lambda value: self.accepts(value) or other.accepts(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """Which values of one field are served."""

    name: str
    default: object
    """What Diffusers or transformers takes where the field is absent, as JSON writes it."""
    values: Values
    """The values with which pictures are equal to those of stock Diffusers."""
    why: str = ""
    """Why other values are refused, or why any is accepted; empty where stock Diffusers fails with others, too."""


def broken_fields(rules: Sequence[FieldRule], config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field whose value is not served."""
    for rule in rules:
        value = config.get(rule.name, rule.default)
        if not rule.values.accepts(value):
            why = f": {rule.why}" if rule.why else ""
            yield f"{rule.name} must be {rule.values.text}, not {shown(value)}{why}"


def with_defaults(rules: Sequence[FieldRule], config: Mapping[str, object]) -> dict[str, Any]:
    """Return a configuration with what Diffusers or transformers takes for fields that are absent."""
    return {rule.name: rule.default for rule in rules} | dict(config)


def shown(value: object) -> str:
    """Return a value as JSON writes it, cut to a length that a sentence has room for."""
    return excerpt(json.dumps(value), _SHOWN_CHARACTERS)


def whole(least: int, most: int | None = None) -> Values:
    """Return the whole numbers from `least` on, or up to `most`.

    What the checker counts, such as layers, needs `most`: a stranger's configuration may state any number.
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
    """Return these values alone."""
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
