"""A gateway, a LoRA store, a cache and a ControlNet server that answer every call with hostile words in every field.

Answers are made from the contract's descriptors, so that a new field or method is hostile by itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from bottega import kinds
from bottega.errors import BottegaError
from bottega.rpc.channel import channel_options
from bottega.rpc.status import to_grpc_status
from bottega.v1 import cache_pb2, controlnet_pb2, fleet_pb2, image_pb2, lora_pb2
from bottega.v1.generation_pb2 import IMAGE_FORMAT_PNG

FORGED = "error: everything is lost"
HOSTILE = (
    "a [/b] star [bold red]:smile:[/] [link=http://evil.invalid]here[/link] {task} %s"
    "\x1b]0;owned\x07\x1b[2J\x1b[31m\x9b31m\x00\x08\x7f"
    "\u202eevil\u202c \u2066x\u2069 zero\u200bwidth\ufeff \u2028\u2029\x85\x0b\x0c"
    f"\r\n{FORGED}\n\r{FORGED}"
)
"""Markup, escape sequences, bidirectional overrides, zero width, and ends of lines with something to forge behind."""

HIDDEN = frozenset("\x00\x07\x08\x0b\x0c\r\x1b\x7f\x85\x9b\u200b\u2028\u2029\u202c\u202e\u2066\u2069\ufeff\t")

_SERVICES: tuple[ServiceDescriptor, ...] = tuple(
    file.DESCRIPTOR.services_by_name[name]
    for file, name in (
        (image_pb2, "ImageService"),
        (fleet_pb2, "FleetService"),
        (lora_pb2, "LoraService"),
        (cache_pb2, "CacheService"),
        (controlnet_pb2, "ControlNetService"),
    )
)
_DEEPEST = 6
_STREAMS = 3  # answers of a stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How the services lie. known: enumerations have values that exist. number: of every numeric field.

    error: what every call fails by, made anew; None: it is answered.
    """

    text: str = HOSTILE
    known: bool = True
    number: float = 3
    error: Callable[[], BottegaError] | None = None


@contextmanager
def serving(manner: Manner) -> Iterator[str]:
    """Serves them on one free port, and says where."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=channel_options())
    port = server.add_insecure_port("127.0.0.1:0")
    address = f"127.0.0.1:{port}"
    for service in _SERVICES:
        handlers = {method.name: _handler(method, manner, address) for method in service.methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
    server.start()
    yield address
    server.stop(0).wait()


def _handler(method: Any, manner: Manner, address: str) -> grpc.RpcMethodHandler[Any, Any]:
    asked, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)

    def answers(_: object, context: grpc.ServicerContext) -> Iterator[Message]:
        if manner.error is not None:
            context.abort_with_status(to_grpc_status(manner.error()))
        for number in range(_STREAMS if method.server_streaming else 1):
            message = answer()
            _fill(message, manner, number)
            _make_usable(message, address, last=number == _STREAMS - 1)
            yield message

    def answer_once(request: object, context: grpc.ServicerContext) -> Message:
        return next(answers(request, context))

    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    made: grpc.RpcMethodHandler[Any, Any] = getattr(grpc, f"{kind}_rpc_method_handler")(
        answers if method.server_streaming else answer_once, asked.FromString, answer.SerializeToString
    )
    return made


def _fill(message: Message, manner: Manner, turn: int, depth: int = 0) -> None:
    """Every field; of those that exclude each other, another one at every turn."""
    for field in message.DESCRIPTOR.fields:
        group = field.containing_oneof
        if group is not None and len(group.fields) > 1 and group.fields[turn % len(group.fields)] is not field:
            continue
        for _ in range(2 if field.is_repeated else 1):
            _put(message, field, manner, turn, depth)


def _put(message: Message, field: Any, manner: Manner, turn: int, depth: int) -> None:
    here = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        here[_value(key, manner)] = _value(value, manner)
    elif field.message_type is not None:
        if depth < _DEEPEST:
            _fill(here.add() if field.is_repeated else here, manner, turn, depth + 1)
            if not field.is_repeated:
                here.SetInParent()
    elif field.is_repeated:
        here.append(_value(field, manner))
    else:
        setattr(message, field.name, _value(field, manner))


def _value(field: Any, manner: Manner) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return manner.text.encode() if field.type == FieldDescriptor.TYPE_BYTES else manner.text
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_ENUM:
            return max(field.enum_type.values_by_number) if manner.known else 99
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return manner.number
        case FieldDescriptor.CPPTYPE_INT32:
            return _whole(manner.number, -(2**31), 2**31 - 1)
        case FieldDescriptor.CPPTYPE_UINT64:
            return _whole(manner.number, 0, 2**64 - 1)
        case _:
            return _whole(manner.number, -(2**63), 2**63 - 1)


def _whole(number: float, low: int, high: int) -> int:
    if math.isnan(number):
        return 0
    return min(max(int(number), low), high)


def _make_usable(message: Message, address: str, *, last: bool) -> None:
    """What the client must be able to follow, so that it comes to show the rest."""
    match message:
        case fleet_pb2.ListMembersResponse():
            (example, *_) = message.members
            for kind in (kinds.WORKER, kinds.CONTROLNET, kinds.LORAS, kinds.CACHE):
                message.members.add().CopyFrom(example)
                message.members[-1].registration.kind = kind
            for member in message.members:
                member.registration.address = address
                for hosted in member.load.hosted:
                    hosted.kind = kinds.CONTROLNET
        case lora_pb2.ListLorasResponse():
            message.next_page_token = ""
        case image_pb2.GetImageResponse():
            message.image.digest = hashlib.sha256(message.chunk * _STREAMS).hexdigest()
            message.image.format = IMAGE_FORMAT_PNG
            message.image.size_bytes = len(message.chunk) * _STREAMS
        case image_pb2.GenerateResponse() | image_pb2.WatchJobResponse():
            _make_event_usable(message.event, last=last)
        case image_pb2.GetJobResponse() | image_pb2.SubmitJobResponse() | image_pb2.CancelJobResponse():
            message.job.spec.format = IMAGE_FORMAT_PNG


def _make_event_usable(event: image_pb2.JobEvent, *, last: bool) -> None:
    if not last:
        return
    for image in event.completed.images:
        image.format = IMAGE_FORMAT_PNG
        image.digest = hashlib.sha256(image.data).hexdigest()
        image.size_bytes = len(image.data)
