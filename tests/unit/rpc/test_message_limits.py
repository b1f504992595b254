"""What a message may expand to is known from its bytes: how many fields they have, how deep, and which are unknown."""

from __future__ import annotations

import time
from typing import Any

import pytest
from google.protobuf import struct_pb2
from google.protobuf.message import DecodeError, Message

from bottega.errors import TooLarge
from bottega.rpc.interceptor.message_limits import MAX_DEPTH, has_unknown_fields, limits_of
from bottega.v1 import activations_pb2, cache_pb2, image_pb2, worker_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from tests.support.processor_speed import on_this_machine

FIELDS = 1024


def look(message: Message | bytes, kind: type[Message] | None = None, max_fields: int = FIELDS) -> bool:
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    found: Any = kind or type(message)
    return has_unknown_fields(raw, found.DESCRIPTOR, max_fields=max_fields)


def spec_of(*, loras: int) -> image_pb2.SubmitJobRequest:
    request = image_pb2.SubmitJobRequest(request_id="x" * 300, spec=GenerationSpec(prompt="a star", seed=1 << 52))
    for _ in range(loras):
        request.spec.loras.add(name="ink", scale=0.5, from_step=-1)
    return request


def test_fields_count_in_messages_of_messages_and_the_bound_is_exact() -> None:
    fields = 1 + 1 + 2 + 8 * 4  # request_id, spec, its prompt and seed, 8 LoRAs with three fields each
    assert not look(spec_of(loras=8), max_fields=fields)
    with pytest.raises(TooLarge) as refused:
        look(spec_of(loras=8), max_fields=fields - 1)
    assert refused.value.metadata == {"limit": "fields", "fields": str(fields - 1)}


def test_eight_million_empty_messages_are_refused_within_a_moment() -> None:
    spec = b"\x8a\x01\x00" * 8_039_082  # loras, empty
    length = len(spec)
    raw = b"\x12" + bytes([length & 0x7F | 0x80, length >> 7 & 0x7F | 0x80, length >> 14 & 0x7F | 0x80, length >> 21])
    message = raw + spec
    began_s = time.thread_time()
    with pytest.raises(TooLarge):
        look(message, image_pb2.SubmitJobRequest)
    spent_s = time.thread_time() - began_s
    assert spent_s < on_this_machine(0.25)


@pytest.mark.parametrize("values", [[1], [300], [-1]], ids=["one byte", "two bytes", "ten bytes"])
def test_elements_of_packed_fields_count(values: list[int]) -> None:
    message = activations_pb2.SectionTensor(shape=values * 1000)
    assert not look(message, max_fields=1001)
    with pytest.raises(TooLarge):
        look(message, max_fields=1000)


def test_doubles_and_entries_of_maps_count() -> None:
    with pytest.raises(TooLarge):
        look(activations_pb2.BlockCost(masked_s=[0.5] * 100), max_fields=100)
    stats = cache_pb2.GetCacheStatsResponse(lookups={str(number): number + 1 for number in range(100)})
    assert not look(stats, max_fields=300)
    with pytest.raises(TooLarge):
        look(stats, max_fields=299)


@pytest.mark.parametrize(
    "unknown",
    [
        pytest.param(b"\xfa\x3e\x03abc", id="another number"),
        pytest.param(b"\x08\x05", id="another wire type"),
        pytest.param(b"\xf9\x3e" + bytes(8), id="64 bits"),
        pytest.param(b"\xfd\x3e" + bytes(4), id="32 bits"),
    ],
)
def test_unknown_fields_are_seen_in_messages_of_messages_too(unknown: bytes) -> None:
    assert look(unknown, image_pb2.SubmitJobRequest)
    assert look(
        spec_of(loras=1).SerializeToString() + bytes([0x12, len(unknown)]) + unknown, image_pb2.SubmitJobRequest
    )
    assert not look(spec_of(loras=1))


def test_known_bytes_are_not_walked_into() -> None:
    attempt = worker_pb2.RunAttemptRequest(
        addons={"loras": b"\x8a\x01\x00" * 5000}, spec=GenerationSpec(image=b"\xff" * 9999)
    )
    assert not look(attempt, max_fields=8)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\x0a", id="without a length"),
        pytest.param(b"\x0a\x05abc", id="cut"),
        pytest.param(b"\x12\x02\x12\x05abcde", id="beyond the message that it is in"),
        pytest.param(b"\xff" * 11, id="a tag without an end"),
        pytest.param(b"\x20" + b"\xff" * 5000, id="a number without an end"),
        pytest.param(b"\x0b\x0c", id="a group"),
        pytest.param(b"\x19\x00", id="a double that is cut"),
    ],
)
def test_bytes_that_are_no_message_are_refused(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        look(raw, image_pb2.SubmitJobRequest)


def test_messages_that_contain_themselves_are_followed_to_a_bound() -> None:
    value = struct_pb2.Value(number_value=1.0)
    for _ in range(MAX_DEPTH // 2 - 1):
        value = struct_pb2.Value(list_value=struct_pb2.ListValue(values=[value]))
    assert not look(value)
    with pytest.raises(TooLarge):
        look(
            struct_pb2.Value(
                list_value=struct_pb2.ListValue(
                    values=[struct_pb2.Value(list_value=struct_pb2.ListValue(values=[value]))]
                )
            )
        )


def test_a_method_that_carries_no_image_has_small_messages() -> None:
    most = 24 << 20
    assert limits_of("/bottega.v1.ImageService/SubmitJob", max_message_bytes=most).max_bytes == most
    assert limits_of("/bottega.v1.ImageService/GetJob", max_message_bytes=most).max_bytes < 4 << 20
    assert limits_of("/bottega.v1.NewService/New", max_message_bytes=most).max_bytes < 4 << 20
    assert limits_of("/somebody.Else/Draw", max_message_bytes=most).max_bytes == most
