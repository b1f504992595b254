"""Conversion of a caller's arguments to protobuf messages, and of messages to values of the SDK.

Arguments that no field can hold are refused by name, and messages that are too large with the sizes of their images.
Only types are checked here; the services check values. A value's fields have the same names as the message's fields.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from bottega import rules
from bottega.errors import InvalidRequest, TooLarge, Violation
from bottega.rpc.channel import MAX_MESSAGE_MIB
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import GenerateRequest, SubmitJobRequest

MessageT = TypeVar("MessageT", bound=Message)
ValueT = TypeVar("ValueT")

# protobuf's errors for a value that a field cannot hold; for text that is no Unicode it is a ValueError.
UNSENDABLE = (TypeError, ValueError, OverflowError)

# Ranges by the names of arguments, which mean the same in every message; from the contract's comments.
_RANGES: Mapping[str, tuple[int, int]] = {
    **rules.RANGES,
    "index": (0, rules.MAX_IMAGES - 1),
    "page_size": (1, rules.MAX_PAGE),
    "from_step": (0, rules.MAX_STEPS),
    "max_step": (0, rules.MAX_STEPS),
    "similarity": (-1, 1),
}
_KINDS = {
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_STRING: "text",
}
# Items of a list, in the plural.
_ITEMS = {
    FieldDescriptor.CPPTYPE_DOUBLE: "numbers",
    FieldDescriptor.CPPTYPE_STRING: "texts, each of them Unicode",
}
# Characters of a value that an error repeats.
_MOST_LETTERS = 60

SIZE_LIMIT = "max_message_mib"
"""Value of `metadata["limit"]` in errors about messages that are too large."""

# Characters of a name in a message; valid names are shorter.
_MOST_NAME_LETTERS = 200

_EARLIEST, _LATEST = datetime(2, 1, 1, tzinfo=UTC), datetime(9998, 12, 31, tzinfo=UTC)


def build_message(message: MessageT, /, **arguments: object) -> MessageT:
    """Set the field of every argument, and return the message.

    Raises:
        InvalidRequest: Arguments cannot be sent; the error names all of them.
        TooLarge: The message is too large.
    """
    rules.refuse([broken for name, value in arguments.items() for broken in set_field(message, name, value)])
    check_size(message)
    return message


def check_size(message: Message) -> None:
    """Raise TooLarge, with the sizes of the images, if a message is too large to be sent.

    This takes as long as sending the message, so messages with images must not be checked on the event loop.
    """
    images = list(_images(message.spec)) if isinstance(message, GenerateRequest | SubmitJobRequest) else []
    limit_bytes = MAX_MESSAGE_MIB << 20
    size_bytes = sum(size for _, size in images)
    if size_bytes <= limit_bytes:  # beyond 2 GiB, protobuf returns no size
        size_bytes = message.ByteSize()
    if size_bytes > limit_bytes:
        large = ", ".join(f"{name} {_mib(size)}" for name, size in images)
        raise TooLarge(
            f"the request is {_mib(size_bytes)}, and at most {MAX_MESSAGE_MIB} MiB can be sent"
            f"{f'; its input images: {large}' if large else ''}",
            metadata={"limit": SIZE_LIMIT, SIZE_LIMIT: str(MAX_MESSAGE_MIB), "images": str(len(images))},
        )


def set_field(message: Message, name: str, value: object, *, path: str | None = None) -> Iterator[Violation]:
    """Set a field, or yield why that is impossible. `path` is the caller's name of the field; None for `name`."""
    field = cast("FieldDescriptor", message.DESCRIPTOR.fields_by_name[name])
    if field.is_repeated:
        yield from _put_all(getattr(message, name), value, path or name, _ITEMS.get(field.cpp_type, "whole numbers"))
        return
    try:
        setattr(message, name, value)
    except UNSENDABLE:
        yield Violation(field=path or name, description=_rule(field, value))


def set_timestamp(stamp: Timestamp, moment: object, *, path: str) -> Iterator[Violation]:
    """Set a time, or yield why that is impossible. A datetime needs a time zone."""
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        yield Violation(field=path, description=f"must be a datetime with a time zone; got {describe(moment)}")
        return
    try:
        stamp.FromDatetime(moment)
    except UNSENDABLE:
        yield Violation(
            field=path, description=f"must be a time in the years 1 to 9999, in UTC; got {describe(moment)}"
        )


def as_list(values: object, *, name: str, what: str) -> list[Any]:
    """Return a caller's argument as a list. Raise InvalidRequest if it is none; a str is not a list of characters.

    Args:
        name: Name of the argument.
        what: What the items are called in the error, in the plural.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        rules.refuse([Violation(field=name, description=f"must be a list of {what}; got {describe(values)}")])
    return list(cast("Iterable[Any]", values))


def describe(value: object) -> str:
    """Return a value as text for an error message, cut to a bounded length."""
    if isinstance(value, datetime):
        return value.isoformat()
    try:
        text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    except ValueError:  # Python does not convert numbers of some thousand digits
        return "a number with thousands of digits"
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def _put_all(field: Any, values: object, path: str, what: str) -> Iterator[Violation]:
    try:
        field.extend(as_list(values, name=path, what=what.partition(",")[0]))
    except InvalidRequest as error:
        yield from error.violations
    except UNSENDABLE:
        yield Violation(field=path, description=f"must be a list of {what}")


def _rule(field: FieldDescriptor, value: object) -> str:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return f"must be bytes; got {describe(value)}"
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and isinstance(value, str):
        return f"must be Unicode text, which UTF-8 can carry; got {describe(value)}"
    kind = _KINDS.get(field.cpp_type, "a whole number")
    bounds = _RANGES.get(field.name)
    return f"must be {kind}{f', {bounds[0]} to {bounds[1]}' if bounds else ''}; got {describe(value)}"


def _images(spec: GenerationSpec) -> Iterator[tuple[str, int]]:
    """Yield the name and the size in bytes of each image."""
    for name in ("image", "mask_image"):
        if spec.HasField(name):
            yield name, len(getattr(spec, name))
    for net in spec.controlnets:
        yield f"control image of {net.name[:_MOST_NAME_LETTERS]}", len(net.image)


def _mib(size_bytes: int) -> str:
    # Rounded up, so that a message that is one byte too large does not seem to fit.
    return f"{math.ceil(size_bytes * 10 / 2**20) / 10:g} MiB"


def value_from(message: Message, kind: type[ValueT]) -> ValueT:
    """Convert a message to a value of the dataclass `kind`.

    Args:
        message: Has a field for each field of `kind`.
        kind: A dataclass. The metadata of a field may define its conversion: "kind" is the dataclass for a message or
            for each message of a list, "convert" a function of the message's value.
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
    """Return a field of a message: a list as a tuple, a map as a mapping, an absent optional field as None."""
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
    """Convert seconds since 1970 to a datetime, clamped to the years that every time zone can show."""
    try:
        return min(max(datetime.fromtimestamp(unix_s, UTC), _EARLIEST), _LATEST)
    except (OverflowError, OSError, ValueError):
        return _LATEST if unix_s > 0 else _EARLIEST
