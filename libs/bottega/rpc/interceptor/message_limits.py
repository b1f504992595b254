"""Limits on the bytes and fields of each method's messages, checked before parsing.

A parser creates objects: an empty nested message of two bytes becomes about eighty. So the fields of a message are
first counted without creating objects, and counting stops at the limit.

Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError

from bottega.errors import TooLarge

# Depth of nested messages. Ours are at most about six deep, and none contains itself.
MAX_DEPTH = 16

# Wire types.
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
# Bytes of a varint of 64 bits.
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
# Bytes of a varint that are not its last one.
_CONTINUED = bytes(range(0x80, 0x100))


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLimits:
    """Limits on one message of a method."""

    max_bytes: int
    max_fields: int
    """Upper bound on the fields on the wire, including those of nested messages and each element of packed fields."""
    plain: bool = True
    """Whether it has no image, and so at most PLAIN_BYTES."""


PLAIN_BYTES = 2 << 20
"""Upper bound on the bytes of a request without images. Up to it, a field that is too long is named in the error."""
# An id, a few numbers.
_SMALL = MessageLimits(max_bytes=PLAIN_BYTES, max_fields=2048)
# A request with 8 LoRAs and 8 ControlNets and all fields set has about 200.
_SPEC_FIELDS = 1024
# A report may name thousands of hosted things with a dozen fields each; a block profile has 4,096 blocks; an upload
# with thousands of parts is refused by a rule that names them.
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
        # The longest registration and the longest load report are well below a MiB.
        "FleetService/Join": MessageLimits(max_bytes=PLAIN_BYTES, max_fields=_LIST_FIELDS),
        "FleetService/ListMembers": _SMALL,
        # A chunk has at most 4 MiB; a head with a PEFT configuration a little over 3 MiB.
        "LoraService/UploadLora": MessageLimits(max_bytes=5 << 20, max_fields=_LIST_FIELDS),
        "LoraService/RegisterLora": MessageLimits(max_bytes=PLAIN_BYTES, max_fields=_SPEC_FIELDS),
        "ActivationService/SetBlockProfile": MessageLimits(max_bytes=PLAIN_BYTES, max_fields=_LIST_FIELDS),
    }.items()
}
# Fields of methods whose requests carry images. The listener's max_message_mib limits their bytes.
_WITH_IMAGES: Mapping[str, int] = {
    "/bottega.v1.ImageService/Generate": _SPEC_FIELDS,
    "/bottega.v1.ImageService/SubmitJob": _SPEC_FIELDS,
    "/bottega.v1.WorkerService/RunAttempt": 4 * _SPEC_FIELDS,
}
# The suite's other methods: at most some hundred names and digests.
_BETWEEN_SERVICES = MessageLimits(max_bytes=PLAIN_BYTES, max_fields=4096)
OF_GRPC = MessageLimits(max_bytes=64 << 10, max_fields=256)
"""Limits for health and reflection."""
_OTHERS_FIELDS = 1 << 14


def limits_of(method: str, *, max_message_bytes: int) -> MessageLimits:
    """Return the limits of a method's messages.

    Args:
        method: Name as in gRPC. Methods of services that are not part of the suite may use all of `max_message_bytes`.
        max_message_bytes: The listener's limit.
    """
    ours = method.startswith("/bottega.v1.")
    if method in _WITH_IMAGES or not ours:
        fields = _WITH_IMAGES.get(method, _OTHERS_FIELDS)
        return MessageLimits(max_bytes=max_message_bytes, max_fields=fields, plain=False)
    limits = _LIMITS.get(method, _BETWEEN_SERVICES)
    return replace(limits, max_bytes=min(limits.max_bytes, max_message_bytes))


def check_size(size_bytes: int, limits: MessageLimits) -> None:
    """Raise TooLarge if a message has more bytes than its method needs."""
    if size_bytes > limits.max_bytes:
        metadata = {"limit": "message", "bytes": str(limits.max_bytes)}
        raise TooLarge(f"a message of this method may have at most {limits.max_bytes} bytes", metadata=metadata)


def has_unknown_fields(raw: bytes, descriptor: Descriptor, *, max_fields: int) -> bool:
    """Return whether a message, or one nested in it, has fields that its type does not know.

    Args:
        raw: The serialized message.
        descriptor: The message's type.
        max_fields: Number of fields at which counting stops.

    Raises:
        TooLarge: The message has too many fields or is nested too deeply.
        DecodeError: The bytes are not a message.
    """
    walk = _FieldWalk(raw, max_fields)
    try:
        walk.go_through(_fields_of(descriptor), 0, len(raw))
    except IndexError:
        raise DecodeError("a field goes on beyond its message") from None
    return walk.unknown


_UNKNOWN = object()


class _FieldKinds:
    """The fields of a message type. They are read on first use, because a type may contain itself."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor

    @functools.cached_property
    def known(self) -> dict[int, _FieldKinds | int | None]:
        """The kinds of the fields, by tag (field number and wire type).

        A kind is the type of a nested message, the wire type of a packed field's elements, or None for other fields.
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
    """Counts the fields of a serialized message."""

    def __init__(self, raw: bytes, max_fields: int) -> None:
        self._raw = raw
        self._max_fields = max_fields
        self._count = 0
        self.unknown = False

    def go_through(self, fields: _FieldKinds, begin: int, end: int, depth: int = 0) -> None:
        """Count the fields of the message between two offsets."""
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
            raise TooLarge(f"a message of this method may have at most {self._max_fields} fields", metadata=metadata)

    def _value(self, wire_type: int, begin: int) -> tuple[int, int]:
        """Return the offsets of the start and end of a field's content."""
        if wire_type == _LENGTH:
            length, begin = self._number(begin)
            return begin, begin + length
        if wire_type == _VARINT:
            return begin, self._number(begin)[1]
        if wire_type in _FIXED_BYTES:
            return begin, begin + _FIXED_BYTES[wire_type]
        raise DecodeError("groups are not served")

    def _elements(self, begin: int, end: int, wire_type: int) -> int:
        """Return the number of elements of a packed field, or a number above the limit."""
        if wire_type != _VARINT:
            return (end - begin) // _FIXED_BYTES[wire_type]
        if end - begin > _MAX_VARINT_BYTES * self._max_fields:
            return self._max_fields + 1
        return len(self._raw[begin:end].translate(None, _CONTINUED))

    def _number(self, begin: int) -> tuple[int, int]:
        """Decode a varint. Return its value and the offset of its end."""
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
