"""How large the messages of each method may be, and how many fields they may have: checked before they are parsed.

A parser makes objects of what it reads: two bytes of an empty message in a message become some eighty. So the bytes of
a message are walked through first, without making anything of them, and the walk stops at the bound.

Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from bottega.errors import TooLarge

# Messages in messages. The deepest of ours are some six deep, and none of ours contains itself.
MAX_DEPTH = 16

# Wire types.
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
# A varint of 64 bits; a longer one is none.
_MAX_VARINT_BYTES = 10
_WIRE_TYPES: Mapping[int, int] = {
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FIXED64: _FIXED64,
    FieldDescriptor.TYPE_SFIXED64: _FIXED64,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_FIXED32: _FIXED32,
    FieldDescriptor.TYPE_SFIXED32: _FIXED32,
    FieldDescriptor.TYPE_STRING: _LENGTH,
    FieldDescriptor.TYPE_BYTES: _LENGTH,
    FieldDescriptor.TYPE_MESSAGE: _LENGTH,
}
_FIXED_BYTES: Mapping[int, int] = {_FIXED64: 8, _FIXED32: 4}
# Bytes after which a varint of a packed field goes on.
_CONTINUED = bytes(range(0x80, 0x100))


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLimits:
    """Limits of one message of a method."""

    max_bytes: int
    max_fields: int
    """Fields on the wire, those of messages in it included, and each element of a packed field."""
    plain: bool = True
    """Whether it carries no image: then it has at most PLAIN_BYTES."""


PLAIN_BYTES = 2 << 20
"""Of a request without images; where it has less, a rule of its fields refuses it, and names the field."""
# An id, a few numbers.
_SMALL = MessageLimits(max_bytes=PLAIN_BYTES, max_fields=2048)
# A request with 8 LoRAs and 8 ControlNets, each field of which is set, has some 200.
_SPEC_FIELDS = 1024
# A report names what is hosted, thousands of names with a dozen fields each; a block profile has 4,096 blocks; and an
# upload with thousands of parts is refused by a rule that names them.
_LIST_FIELDS = 1 << 17

_LIMITS: Mapping[str, MessageLimits] = {
    f"/bottega.v1.{method}": limits
    for method, limits in {
        "ImageService/GetImage": _SMALL,
        "ImageService/GetJob": _SMALL,
        "ImageService/ListJobs": _SMALL,
        "ImageService/WatchJob": _SMALL,
        "ImageService/CancelJob": _SMALL,
        "ImageService/DeleteJob": _SMALL,
        "ImageService/ListModels": _SMALL,
        "ImageService/ListAdapters": _SMALL,
        "ImageService/GetJobTrace": _SMALL,
        # The longest registration, and the longest load, are well below a MiB.
        "FleetService/Join": MessageLimits(max_bytes=PLAIN_BYTES, max_fields=_LIST_FIELDS),
        "FleetService/ListMembers": _SMALL,
        # Chunks have at most 4 MiB, and a head, with a PEFT configuration, little over 3 MiB.
        "LoraService/UploadLora": MessageLimits(max_bytes=5 << 20, max_fields=_LIST_FIELDS),
        "LoraService/RegisterLora": MessageLimits(max_bytes=PLAIN_BYTES, max_fields=_SPEC_FIELDS),
        "ActivationService/SetBlockProfile": MessageLimits(max_bytes=PLAIN_BYTES, max_fields=_LIST_FIELDS),
    }.items()
}
# Of methods that carry input images; their bytes are bounded by the listener's max_message_mib.
_WITH_IMAGES: Mapping[str, int] = {
    "/bottega.v1.ImageService/Generate": _SPEC_FIELDS,
    "/bottega.v1.ImageService/SubmitJob": _SPEC_FIELDS,
    "/bottega.v1.WorkerService/RunAttempt": 4 * _SPEC_FIELDS,
}
# Of the suite's other methods: names and digests, at most some hundred.
_BETWEEN_SERVICES = MessageLimits(max_bytes=PLAIN_BYTES, max_fields=4096)
OF_GRPC = MessageLimits(max_bytes=64 << 10, max_fields=256)
"""Of health and reflection."""
_OTHERS_FIELDS = 1 << 14


def limits_of(method: str, *, max_message_bytes: int) -> MessageLimits:
    """Return the limits of a method's messages.

    Args:
        method: As gRPC names it. Methods of services that were added may use the whole of `max_message_bytes`.
        max_message_bytes: Of the listener.
    """
    ours = method.startswith("/bottega.v1.")
    if method in _WITH_IMAGES or not ours:
        fields = _WITH_IMAGES.get(method, _OTHERS_FIELDS)
        return MessageLimits(max_bytes=max_message_bytes, max_fields=fields, plain=False)
    limits = _LIMITS.get(method, _BETWEEN_SERVICES)
    return replace(limits, max_bytes=min(limits.max_bytes, max_message_bytes))


def check_size(size_bytes: int, limits: MessageLimits) -> None:
    """Raise TooLarge for a message of more bytes than its method needs."""
    if size_bytes > limits.max_bytes:
        metadata = {"limit": "message", "bytes": str(limits.max_bytes)}
        raise TooLarge(f"a message of this method has at most {limits.max_bytes} bytes", metadata=metadata)


def has_unknown_fields(raw: bytes, descriptor: Descriptor, *, max_fields: int) -> bool:
    """Return whether a message has fields that its type does not know, in messages in it too.

    Args:
        raw: The message as it came.
        descriptor: Its type.
        max_fields: The walk stops at so many.

    Raises:
        TooLarge: It has more fields, or deeper messages, than a method needs.
        DecodeError: These bytes are no message.
    """
    walk = _FieldWalk(raw, max_fields)
    try:
        walk.go_through(_fields_of(descriptor), 0, len(raw))
    except IndexError:
        raise DecodeError("a field goes on beyond its message") from None
    return walk.unknown


_UNKNOWN = object()


class _FieldKinds:
    """What a walk knows of a type of messages. Types may contain themselves, so each is looked at when it is met."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor

    @functools.cached_property
    def known(self) -> dict[int, _FieldKinds | int | None]:
        """By tag, a field's number with its wire type: the type of a message in it, the wire type of the elements of a
        packed field, or None.
        """
        known: dict[int, _FieldKinds | int | None] = {}
        for field in self._descriptor.fields:
            wire_type = _WIRE_TYPES.get(field.type, _VARINT)
            known[field.number << 3 | wire_type] = _fields_of(field.message_type) if field.message_type else None
            if field.is_repeated and wire_type != _LENGTH:
                known[field.number << 3 | _LENGTH] = wire_type
        return known


@functools.cache
def _fields_of(descriptor: Descriptor) -> _FieldKinds:
    return _FieldKinds(descriptor)


class _FieldWalk:
    """A walk through the fields of a message, from the first to the last."""

    def __init__(self, raw: bytes, max_fields: int) -> None:
        self._raw = raw
        self._max_fields = max_fields
        self._count = 0
        self.unknown = False

    def go_through(self, fields: _FieldKinds, begin: int, end: int, depth: int = 0) -> None:
        """Walk through a message that lies there."""
        if depth > MAX_DEPTH:
            raise TooLarge(f"messages are at most {MAX_DEPTH} deep", metadata={"limit": "depth"})
        known = fields.known
        while begin < end:
            self._add(1)
            tag, begin = self._number(begin)
            kind = known.get(tag, _UNKNOWN)
            content, begin = self._value(tag & 7, begin)
            if begin > end:
                raise DecodeError("a field goes on beyond its message")
            if isinstance(kind, _FieldKinds):
                self.go_through(kind, content, begin, depth + 1)
            elif isinstance(kind, int):
                self._add(self._elements(content, begin, kind))
            elif kind is _UNKNOWN:
                self.unknown = True

    def _add(self, count: int) -> None:
        self._count += count
        if self._count > self._max_fields:
            metadata = {"limit": "fields", "fields": str(self._max_fields)}
            raise TooLarge(f"a message of this method has at most {self._max_fields} fields", metadata=metadata)

    def _value(self, wire_type: int, begin: int) -> tuple[int, int]:
        """Return where the content of a field begins and ends."""
        if wire_type == _LENGTH:
            length, begin = self._number(begin)
            return begin, begin + length
        if wire_type == _VARINT:
            return begin, self._number(begin)[1]
        if wire_type in _FIXED_BYTES:
            return begin, begin + _FIXED_BYTES[wire_type]
        raise DecodeError("groups are not served")

    def _elements(self, begin: int, end: int, wire_type: int) -> int:
        """Return how many elements a packed field has, or more than may be."""
        if wire_type != _VARINT:
            return (end - begin) // _FIXED_BYTES[wire_type]
        if end - begin > _MAX_VARINT_BYTES * self._max_fields:
            return self._max_fields + 1
        return len(self._raw[begin:end].translate(None, _CONTINUED))

    def _number(self, begin: int) -> tuple[int, int]:
        """Return a number, and where it ends."""
        number = self._raw[begin]
        if number < 0x80:
            return number, begin + 1
        number &= 0x7F
        for place in range(1, _MAX_VARINT_BYTES):
            byte = self._raw[begin + place]
            number |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                return number, begin + place + 1
        raise DecodeError("a number is too long")
