"""Requests that somebody got wrong: valid messages with some fields at other values, or with damaged bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from tests.fuzz.images import bad_images, good_images, largest_image, too_large_image

# Fields at once: one that is nasty among many that are fine is looked at the longest.
_CHANGES = (0, 1, 1, 1, 2, 2, 4)
# Messages in messages.
_MOST_DEEP = 5
# One request of so many has damaged bytes.
_DAMAGED = 8

TEXTS: tuple[str, ...] = (
    *("", " ", "a", "\0", "a\0b", "\n", "\r\nx-request-id: 1", "\t", "a b", "ü", "\ufeff", "\U0010ffff", "\ud7ff"),
    "\u202eright to left\u202c \u05d0\u05d1\u05d2 \u0627\u0644",
    "e\u0301" * 60,
    "Z" + "\u0334\u0321\u035d" * 200,
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466" * 30,
    *(
        "../../etc/passwd",
        "/proc/self/environ",
        "unix:/run/x",
        "127.0.0.1:1",
        "file:///",
        "dns:///x:1",
        "[::1]:1",
        ":1",
    ),
    *("'; DROP TABLE jobs; --", "%s%n{0}{1.__class__}", "$(id)", "<script>", '{"a": 1}', "\\x00", "None", "nan"),
    *("x@shop", "x" * 128, "x" * 129, "x" * 200, "x" * 201, "x" * 16_384, "x" * 16_385, "é" * 8192, "é" * 8193),
    "x" * (1 << 20),
)
_INT32 = (0, 1, -1, 2, 4, 7, 8, 9, 63, 64, 65, 100, 101, 128, 199, 200, 201, 16_384, 16_392, 2**31 - 1, -(2**31))
_INT64 = (0, 1, -1, 2**31, 2**53 - 8, 2**53 - 7, 2**63 - 1, -(2**63), 253_402_300_800)
_UINT64 = (0, 1, 2**53 - 8, 2**53 - 7, 2**63, 2**64 - 1)
_DOUBLES = (
    0.0,
    -0.0,
    0.01,
    0.3,
    0.5,
    1.0,
    1.0001,
    50.0,
    50.0001,
    -1.0,
    1e308,
    5e-324,
    *map(float, ("nan", "inf", "-inf")),
)
_NUMBERS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from(_INT32) | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from(_INT64) | st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.sampled_from(_UINT64) | st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.sampled_from(_DOUBLES) | st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}
_UNKNOWN_ENUMS = (99, -1, 2**31 - 1)
# Numbers of fields that no message of ours has.
_FIRST_UNKNOWN, _LAST_UNKNOWN = 100, 15_000
_COPIES = (1, 8, 9, 1000)
_ENTRIES = (1, 16, 17)
# Of what is copied, all together: a thousand long texts in each of a thousand messages are no request.
_MOST_COPIED_BYTES = 32 << 20


@st.composite
def mutated(draw: st.DrawFn, valid: Sequence[Message], words: Sequence[str]) -> bytes:
    """One of the valid messages, or what became of it, as bytes. words: texts that mean something to the service."""
    message = type(valid[0])()
    message.CopyFrom(draw(st.sampled_from(valid)))
    texts = st.sampled_from((*words, *TEXTS)) | st.text(max_size=40)
    for _ in range(draw(st.sampled_from(_CHANGES))):
        _change(draw, message, texts)
    raw = message.SerializeToString()
    return draw(_damaged(raw)) if draw(st.integers(1, _DAMAGED)) == _DAMAGED else raw


def _change(draw: st.DrawFn, message: Message, texts: st.SearchStrategy[str], depth: int = 0) -> None:
    if not message.DESCRIPTOR.fields:
        return
    field: Any = draw(st.sampled_from([*message.DESCRIPTOR.fields]))  # its types are those of two implementations
    if draw(st.integers(0, 5)) == 0:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        _put(draw, message, field, texts)
    elif field.is_repeated:
        _grow(draw, message, field, texts)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        inner = getattr(message, field.name)
        inner.SetInParent()
        if depth < _MOST_DEEP:
            _change(draw, inner, texts, depth + 1)
    else:
        setattr(message, field.name, draw(_value(field, texts)))


def _grow(draw: st.DrawFn, message: Message, field: FieldDescriptor, texts: st.SearchStrategy[str]) -> None:
    items = getattr(message, field.name)
    copies = draw(st.sampled_from(_COPIES))
    if field.cpp_type != FieldDescriptor.CPPTYPE_MESSAGE:
        value = draw(_value(field, texts))
        size_bytes = len(value) if isinstance(value, (str, bytes)) else 1
        items.extend([value] * _at_most(copies, size_bytes))
        return
    item = items.add()
    for _ in range(draw(st.integers(0, 3))):
        _change(draw, item, texts, _MOST_DEEP)
    items.extend([item] * (_at_most(copies, item.ByteSize()) - 1))


def _put(draw: st.DrawFn, message: Message, field: Any, texts: st.SearchStrategy[str]) -> None:
    entry, items = field.message_type.fields_by_name, getattr(message, field.name)
    for _ in range(draw(st.sampled_from(_ENTRIES))):
        items[draw(_value(entry["key"], texts))] = draw(_value(entry["value"], texts))


def _at_most(copies: int, size_bytes: int) -> int:
    return min(copies, max(1, _MOST_COPIED_BYTES // max(1, size_bytes)))


def _value(field: FieldDescriptor, texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        assert field.enum_type is not None
        known = [value.number for value in field.enum_type.values]
        return st.sampled_from([*known, *_UNKNOWN_ENUMS])
    if field.cpp_type != FieldDescriptor.CPPTYPE_STRING:
        return _NUMBERS[field.cpp_type]
    if field.type != FieldDescriptor.TYPE_BYTES:
        return texts
    files = [*good_images().values(), *bad_images().values()]
    # The large ones are two of many: they take a thousand times as long as the others.
    return st.sampled_from([*files, *files, largest_image(), too_large_image()]) | st.binary(max_size=200)


def _damaged(raw: bytes) -> st.SearchStrategy[bytes]:
    """Cut, with something put in, with a byte changed, or with fields behind that nobody knows."""
    place = st.integers(0, len(raw))
    number = st.integers(_FIRST_UNKNOWN, _LAST_UNKNOWN)
    return (
        place.map(lambda at: raw[:at])
        | st.tuples(place, st.binary(min_size=1, max_size=12)).map(lambda put: raw[: put[0]] + put[1] + raw[put[0] :])
        | st.tuples(place, st.integers(0, 255)).map(lambda put: raw[: put[0]] + bytes([put[1]]) + raw[put[0] + 1 :])
        | st.binary(min_size=1, max_size=60).map(lambda more: raw + more)
        | st.tuples(number, st.binary(max_size=60)).map(lambda more: raw + _unknown(*more))
    )


def _unknown(number: int, data: bytes) -> bytes:
    """A field of bytes, as a newer client may send it."""
    return b"".join(_varint(part) for part in (number << 3 | 2, len(data))) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
