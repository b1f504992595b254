"""The messages between a worker's engine and an activation store over a tensor connection.

A message is a list of tensors. The first is named after the message's kind and holds a number. In most messages the
next one is a header, a message of activations.proto. The receiver checks copies of both before it uses them, and raises
ValueError for a message that breaks a rule. A section is the recorded outputs of one forward pass.

worker -> store    question: a template's recording   answer: its sections, image latent and noise
                   fetch: request a section           whole, or its chunks in the requested order, or refused
                   cancel: ends a fetch               no answer; chunks already sent may still arrive
                   section: begin a recorded one      no answer, or abandon: the store rejects the recording
                   chunk: bytes of that section       no answer
                   recording: all sections were sent  no answer
                   abandon: discard the recording     no answer

An answer, a whole message and the first chunk also report the time that the store has spent on the request.

A whole message carries the section's sealed file, so no byte is copied within a host. Chunks of different sections may
alternate. If a section is refused after some of its chunks, those chunks are discarded.

A recorded section follows its section message in chunks with the same number: all tensors, in order. If another section
message comes before the last chunk, the rest will not come. Recording and abandon messages have the number 0.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from bottega.addons.edits.wire.section import MAX_DRAWN_BYTES, MAX_SECTION_BYTES, DrawnTensors, SectionLayout
from bottega.store_times import check_times
from bottega.transport import (
    BytesMessage,
    DType,
    Layout,
    Limits,
    TensorSpec,
    kind_of,
    number_message,
    number_spec,
    pack_number,
    read_number,
)
from bottega.v1.activations_pb2 import (
    AbandonHeader,
    ChunkHeader,
    EditDecision,
    RecordingHeader,
    SectionHeader,
    SectionRequest,
    TemplateAnswer,
    TemplateQuestion,
)
from bottega.v1.trace_pb2 import StoreTimes

MAX_HEADER_BYTES = 2 << 20
"""Maximum size of an answer's header: 400 sections, layouts of thousands of tensors, and a profile of as many blocks.
"""

MAX_REQUEST_BYTES = 256 << 10
"""Maximum size of other headers, except for that of a section, which has a layout and a map."""

MAX_MAP_BYTES = 128 << 10
"""Maximum size of a map of valid elements: for a latent of 1024x1024 elements."""

CHUNK_BYTES = 4 << 20
"""Maximum size of a chunk.

Other messages may be sent between two chunks. The worker's slots for chunks limit how far loading runs ahead."""

WORKER_LIMITS = Limits(slots=8, slot_bytes=MAX_SECTION_BYTES + MAX_HEADER_BYTES)
"""Limits of what a worker receives, which bound how far loading runs ahead.

Slots grow to the largest message, an answer with image latent and noise. slot_bytes also limits the file of a whole
section, which is not in a slot."""

STORE_LIMITS = Limits(slots=2, slot_bytes=2 * MAX_DRAWN_BYTES + MAX_HEADER_BYTES)
"""Limits of what a store receives from a worker. Slots grow to its largest message: a chunk, or image latent and noise.
"""

_MAX_ERROR_BYTES = 64 << 10
# Headers differ by a few bytes. Padding gives most messages of a kind the same layout, which is registered once.
_HEADER_PADDING = 256
_HEADER_LENGTH = struct.Struct("<I")
_HEADER = "header"
_DRAWN = ("image_latent", "noise")
_DIGEST = re.compile("[0-9a-f]{64}")
_FIRST = 2  # the first tensor after number and header

HeaderT = TypeVar("HeaderT", bound=Message)


class ActivationMessageKind(StrEnum):
    """The kind of a message."""

    QUESTION = "question"
    ANSWER = "answer"
    FETCH = "fetch"
    WHOLE = "whole"
    CHUNK = "chunk"
    REFUSED = "refused"
    CANCEL = "cancel"
    SECTION = "section"
    RECORDING = "recording"
    ABANDON = "abandon"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActivationMessage:
    """A message to send: its layout, and a buffer for each tensor."""

    layout: Layout
    buffers: Sequence[bytes | memoryview]


def question_message(number: int, question: TemplateQuestion) -> ActivationMessage:
    """Return a question message, which asks a store for a template's sections."""
    return _message(ActivationMessageKind.QUESTION, number, question)


def answer_message(number: int, answer: TemplateAnswer, drawn: DrawnTensors | None) -> ActivationMessage:
    """Return an answer message. `drawn` is set if the answer's `has_drawn` is."""
    return _message(ActivationMessageKind.ANSWER, number, answer, _drawn_tensors(drawn))


def fetch_message(number: int, request: SectionRequest) -> ActivationMessage:
    """Return a fetch message, which requests a section."""
    return _message(ActivationMessageKind.FETCH, number, request)


def cancel_message(number: int) -> BytesMessage:
    """Return a cancel message, for a fetch whose result is no longer needed."""
    return number_message(ActivationMessageKind.CANCEL, number)


def whole_message(number: int, times: StoreTimes) -> ActivationMessage:
    """Return a whole message. The section's file is sent beside it. `times` is the time that the store spent on it."""
    return _message(ActivationMessageKind.WHOLE, number, times)


def chunk_layout(size_bytes: int) -> Layout:
    """Return the layout of a chunk that is written in place: `chunk_header` goes into all views but the last."""
    specs = (number_spec(ActivationMessageKind.CHUNK), _bytes_spec(_HEADER, _HEADER_PADDING))
    return Layout.of(*specs, _bytes_spec("bytes", size_bytes), headers=len(specs))


def chunk_header(number: int, *, tensor: int, start: int, times: StoreTimes | None = None) -> tuple[bytes, bytes]:
    """Return the bytes of the first two tensors of a chunk.

    Args:
        tensor: Index, in the section, of the first tensor in the chunk.
        start: Offset in that tensor of the first byte in the chunk.
        times: Time that the store spent; only in the first chunk of a section.
    """
    return pack_number(number), _packed(ChunkHeader(tensor=tensor, start=start, times=times))


def refused_message(number: int, error: bytes) -> BytesMessage:
    """Return a refused message. `error` is a JobError as JSON."""
    layout = Layout.of(number_spec(ActivationMessageKind.REFUSED), _bytes_spec("error", len(error)), headers=2)
    return BytesMessage(layout=layout, buffers=(pack_number(number), error))


def section_message(number: int, header: SectionHeader, layout: SectionLayout) -> ActivationMessage:
    """Return a section message. The section's tensors follow in chunks with the same number."""
    whole_header = SectionHeader(layout=layout.to_wire())
    whole_header.MergeFrom(header)
    return _message(ActivationMessageKind.SECTION, number, whole_header)


def recording_message(header: RecordingHeader, drawn: DrawnTensors | None) -> ActivationMessage:
    """Return a recording message. `drawn` is set if the header's `has_drawn` is."""
    return _message(ActivationMessageKind.RECORDING, 0, header, _drawn_tensors(drawn))


def abandon_message(recording: str, key: str) -> ActivationMessage:
    """Return an abandon message.

    Args:
        recording: ID of the recording, 32 hex digits.
        key: Key of its template, 64 hex digits.
    """
    return _message(ActivationMessageKind.ABANDON, 0, AbandonHeader(recording=recording, key=key))


def read_question(layout: Layout, views: Sequence[memoryview]) -> tuple[int, TemplateQuestion]:
    """Return number and header of a question."""
    _check_end(layout, _FIRST)
    return _read(layout, views, TemplateQuestion, MAX_REQUEST_BYTES)


def read_answer(layout: Layout, views: Sequence[memoryview]) -> tuple[int, TemplateAnswer]:
    """Return number and header of an answer; `read_drawn` reads the rest."""
    number, answer = _read(layout, views, TemplateAnswer, MAX_HEADER_BYTES)
    check_times(answer.times)
    return number, answer


def read_drawn(layout: Layout, views: Sequence[memoryview], *, has_drawn: bool) -> DrawnTensors | None:
    """Return a copy of image latent and noise in an answer or recording message; None if it has none."""
    if not has_drawn:
        _check_end(layout, _FIRST)
        return None
    specs = layout.specs[_FIRST:]
    if [spec.name for spec in specs] != list(_DRAWN) or specs[0].shape != specs[1].shape:
        raise ValueError(f"a {kind_of(layout)} message needs image latent and noise of one shape")
    if any(spec.dtype != DType.FLOAT32 for spec in specs):
        raise ValueError(f"image latent and noise of a {kind_of(layout)} message are not float32")
    return DrawnTensors(shape=specs[0].shape, image_latent=bytes(views[_FIRST]), noise=bytes(views[_FIRST + 1]))


def read_fetch(layout: Layout, views: Sequence[memoryview]) -> tuple[int, SectionRequest]:
    """Return number and header of a fetch. Raise ValueError if the digest in it is malformed."""
    _check_end(layout, _FIRST)
    number, request = _read(layout, views, SectionRequest, MAX_REQUEST_BYTES)
    if not _DIGEST.fullmatch(request.digest):
        raise ValueError("the digest of a fetch is not 64 hex digits")
    return number, request


def read_chunk(layout: Layout, views: Sequence[memoryview]) -> tuple[int, ChunkHeader]:
    """Return number and header of a chunk, whose bytes are its third tensor."""
    _check_bytes(layout, _FIRST, "bytes", CHUNK_BYTES)
    number, chunk = _read(layout, views, ChunkHeader, MAX_REQUEST_BYTES)
    check_times(chunk.times)
    return number, chunk


def read_whole(layout: Layout, views: Sequence[memoryview]) -> tuple[int, StoreTimes]:
    """Return number and store times of a whole message."""
    _check_end(layout, _FIRST)
    number, times = _read(layout, views, StoreTimes, MAX_REQUEST_BYTES)
    return number, check_times(times)


def read_refused(layout: Layout, views: Sequence[memoryview]) -> tuple[int, bytes]:
    """Return number and reason of a refusal."""
    _check_bytes(layout, 1, "error", _MAX_ERROR_BYTES)
    return read_number(layout, views), bytes(views[1])


def read_section(layout: Layout, views: Sequence[memoryview]) -> tuple[int, SectionHeader, SectionLayout]:
    """Return number, header and layout of a section message."""
    _check_end(layout, _FIRST)
    number, header = _read(layout, views, SectionHeader, MAX_HEADER_BYTES)
    return number, header, SectionLayout.from_wire(header.layout)


def read_recording(layout: Layout, views: Sequence[memoryview]) -> RecordingHeader:
    """Return the header of a recording message; `read_drawn` reads the rest."""
    return _read(layout, views, RecordingHeader, MAX_REQUEST_BYTES)[1]


def read_abandon(layout: Layout, views: Sequence[memoryview]) -> AbandonHeader:
    """Return the header of an abandon message."""
    _check_end(layout, _FIRST)
    return _read(layout, views, AbandonHeader, MAX_REQUEST_BYTES)[1]


def _message(
    kind: ActivationMessageKind,
    number: int,
    header: Message,
    rest: Sequence[tuple[TensorSpec, bytes | memoryview]] = (),
) -> ActivationMessage:
    packed = _packed(header)
    specs = (number_spec(kind), _bytes_spec(_HEADER, len(packed)), *(spec for spec, _ in rest))
    buffers = (pack_number(number), packed, *(buffer for _, buffer in rest))
    return ActivationMessage(layout=Layout.of(*specs, headers=_FIRST), buffers=buffers)


def _packed(header: Message) -> bytes:
    encoded = header.SerializeToString()
    padded = -(-(_HEADER_LENGTH.size + len(encoded)) // _HEADER_PADDING) * _HEADER_PADDING
    return (_HEADER_LENGTH.pack(len(encoded)) + encoded).ljust(padded, b"\0")


def _read(layout: Layout, views: Sequence[memoryview], kind: type[HeaderT], max_bytes: int) -> tuple[int, HeaderT]:
    number = read_number(layout, views)
    _check_bytes(layout, 1, _HEADER, max_bytes + _HEADER_PADDING, is_last=False)
    packed = bytes(views[1])
    if len(packed) < _HEADER_LENGTH.size:
        raise ValueError(f"the header of a {kind_of(layout)} message is too short")
    (length,) = _HEADER_LENGTH.unpack_from(packed)
    encoded = packed[_HEADER_LENGTH.size : _HEADER_LENGTH.size + length]
    if len(encoded) != length:
        raise ValueError(f"the header of a {kind_of(layout)} message ends too early")
    try:
        return number, kind.FromString(encoded)
    except DecodeError:
        raise ValueError(f"the header of a {kind_of(layout)} message cannot be decoded") from None


def _drawn_tensors(drawn: DrawnTensors | None) -> Sequence[tuple[TensorSpec, bytes | memoryview]]:
    if drawn is None:
        return ()
    specs = (TensorSpec(name=name, dtype=DType.FLOAT32, shape=drawn.shape) for name in _DRAWN)
    return tuple(zip(specs, (drawn.image_latent, drawn.noise), strict=True))


def _check_end(layout: Layout, count: int) -> None:
    if len(layout.specs) != count:
        raise ValueError(f"a {kind_of(layout)} message has {count} tensors, not {len(layout.specs)}")


def _check_bytes(layout: Layout, place: int, name: str, max_bytes: int, *, is_last: bool = True) -> None:
    spec = layout.specs[place] if len(layout.specs) > place else None
    if spec is None or (spec.name, spec.dtype, len(spec.shape)) != (name, DType.UINT8, 1):
        raise ValueError(f"a {kind_of(layout)} message has no {name}")
    if spec.shape[0] > max_bytes:
        raise ValueError(f"{name} of a {kind_of(layout)} message is not at most {max_bytes} bytes")
    if is_last:
        _check_end(layout, place + 1)


def _bytes_spec(name: str, size_bytes: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=DType.UINT8, shape=(size_bytes,))


def taken_from(decision: EditDecision) -> str:
    """Return the recording or the kept latents that an edit used, as in MaskUse.recording; empty if it used none."""
    return decision.recording or decision.kept_latents
