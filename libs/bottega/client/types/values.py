"""Conversion of the contract's messages into the SDK's values, whose fields have the names of the messages' fields."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

ValueT = TypeVar("ValueT")

_EARLIEST, _LATEST = datetime(2, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, tzinfo=UTC)


def value_from(message: Message, kind: type[ValueT]) -> ValueT:
    """Return the value that a message describes.

    Args:
        message: Has a field for each field of `kind`.
        kind: A dataclass. The metadata of a field may say how its value is made: "kind" is the dataclass of a message
            or of each message of a list, "convert" a function of the message's value.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cast("Any", kind)):
        value = field_of(message, field.name)
        if (convert := field.metadata.get("convert")) is not None:
            value = convert(value)
        elif (inner := field.metadata.get("kind")) is not None:
            several = isinstance(value, tuple)
            value = tuple(value_from(each, inner) for each in value) if several else value_from(value, inner)
        values[field.name] = value
    return kind(**values)


def field_of(message: Message, name: str) -> Any:
    """Return the value of a message's field: a list as a tuple, a map as a mapping, None for an absent plain value."""
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return MappingProxyType(dict(value))
    if field.is_repeated:
        return tuple(value)
    if field.message_type is None and field.has_presence and not message.HasField(name):
        return None
    return value


def moment_from(unix_s: float) -> datetime:
    """Return a moment given in seconds since 1970, within the years that every time zone can show."""
    try:
        return min(max(datetime.fromtimestamp(unix_s, UTC), _EARLIEST), _LATEST)
    except (OverflowError, OSError, ValueError):
        return _LATEST if unix_s > 0 else _EARLIEST
