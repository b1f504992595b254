"""What a worker's engine and an activation store say to each other over a link: each message as tensors.

The first tensor of a message has the name of its kind, and is a number; most have a header behind it, a message of
activations.proto. The receiver reads both from a copy, before anything is done with them; what breaks a rule raises
ValueError.

    worker -> store    question: is this recorded?        answer: which sections, and image latent and noise
                       fetch: of a section                whole, or its chunks in the order asked for, or refused
                       cancel: of a fetch's number        nothing; what is on its way may still come
                       section: one that was recorded     nothing, or abandon: the store takes none of its recording
                       chunk: of that section             nothing
                       recording: its sections were all   nothing
                       abandon: it is worth nothing       nothing

An answer, a whole message and the first chunk also say what the store has spent on the request until then.

A whole message carries the section's file, sealed: within a host no byte of it is copied. Chunks of different sections
may come in turn. A section that is refused after some of its chunks comes to nothing.

What is recorded comes in the chunks that follow its section message, under its number: all tensors, in their order.
Another section message before the last of them says that the rest will not come. Numbers of recording and abandon
messages are 0.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from bottega.sections.section import MAX_DRAWN_BYTES, MAX_SECTION_BYTES, DrawnTensors, SectionLayout
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
    RecordingHeader,
    SectionHeader,
    SectionRequest,
    TemplateAnswer,
    TemplateQuestion,
)
from bottega.v1.trace_pb2 import StoreTimes

MAX_HEADER_BYTES = 2 << 20
"""Of an answer: 400 sections, some hundred bytes each, layouts of thousands of tensors, a profile of as many blocks."""

MAX_REQUEST_BYTES = 256 << 10
"""Of every other header, but that of a section, which has its layout and a map of at most 128 KiB."""

MAX_MAP_BYTES = 128 << 10
"""Of a map: a latent of 1024x1024 elements."""

CHUNK_BYTES = 4 << 20
"""Of a chunk at most: between two chunks others may speak. A worker's slots of them are its prefetch window."""

WORKER_LIMITS = Limits(slots=8, slot_bytes=MAX_SECTION_BYTES + MAX_HEADER_BYTES)
"""What a worker takes in at once: its prefetch window. Slots grow to the largest message that came, which is an answer,
with image latent and noise; a whole section is a file beside its message, which slot_bytes bounds, too."""

STORE_LIMITS = Limits(slots=2, slot_bytes=2 * MAX_DRAWN_BYTES + MAX_HEADER_BYTES)
"""What a store takes in of a worker: slots grow to its largest message, a chunk, or image latent and noise."""

_MAX_ERROR_BYTES = 64 << 10
# Headers differ by a few bytes: padded, most messages of a kind have the same layout, which a link registers once.
_HEADER_PADDING = 256
_HEADER_LENGTH = struct.Struct("<I")
_HEADER = "header"
_DRAWN = ("image_latent", "noise")
_DIGEST = re.compile("[0-9a-f]{64}")
_FIRST = 2  # tensor of a message behind number and header

HeaderT = TypeVar("HeaderT", bound=Message)


class ActivationMessageKind(StrEnum):
    """What a message is."""

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
    """A message to send: its layout, and a buffer for each of its tensors."""

    layout: Layout
    buffers: Sequence[bytes | memoryview]


def question_message(number: int, question: TemplateQuestion) -> ActivationMessage:
    """A question message."""
    return _message(ActivationMessageKind.QUESTION, number, question)


def answer_message(number: int, answer: TemplateAnswer, drawn: DrawnTensors | None) -> ActivationMessage:
    """An answer message. drawn: where the answer has_drawn."""
    return _message(ActivationMessageKind.ANSWER, number, answer, _drawn_tensors(drawn))


def fetch_message(number: int, request: SectionRequest) -> ActivationMessage:
    """A fetch message."""
    return _message(ActivationMessageKind.FETCH, number, request)


def cancel_message(number: int) -> BytesMessage:
    """Of a fetch that nobody waits for any more."""
    return number_message(ActivationMessageKind.CANCEL, number)


def whole_message(number: int, times: StoreTimes) -> ActivationMessage:
    """Beside the file of a section, all of it. times: that the store has spent on it."""
    return _message(ActivationMessageKind.WHOLE, number, times)


def chunk_layout(size_bytes: int) -> Layout:
    """Of so many bytes of a section, to be written in place: `chunk_header` into the views before the last."""
    specs = (number_spec(ActivationMessageKind.CHUNK), _bytes_spec(_HEADER, _HEADER_PADDING))
    return Layout.of(*specs, _bytes_spec("bytes", size_bytes), headers=len(specs))


def chunk_header(number: int, *, tensor: int, start: int, times: StoreTimes | None = None) -> tuple[bytes, bytes]:
    """What the first two tensors of a chunk hold. tensor: its place in the section. start: first byte in the tensor.

    times: of the first chunk of an answer.
    """
    return pack_number(number), _packed(ChunkHeader(tensor=tensor, start=start, times=times))


def chunk_message(
    number: int, *, tensor: int, start: int, data: bytes | memoryview, times: StoreTimes | None = None
) -> ActivationMessage:
    """A chunk message: bytes of one tensor, at most CHUNK_BYTES."""
    layout = chunk_layout(memoryview(data).nbytes)
    header = chunk_header(number, tensor=tensor, start=start, times=times)
    return ActivationMessage(layout=layout, buffers=(*header, data))


def refused_message(number: int, error: bytes) -> BytesMessage:
    """A refused message. error: a JobError as JSON."""
    layout = Layout.of(number_spec(ActivationMessageKind.REFUSED), _bytes_spec("error", len(error)), headers=2)
    return BytesMessage(layout=layout, buffers=(pack_number(number), error))


def section_message(number: int, header: SectionHeader, layout: SectionLayout) -> ActivationMessage:
    """A section message: its tensors follow in chunks of this number."""
    said = SectionHeader(layout=layout.to_wire())
    said.MergeFrom(header)
    return _message(ActivationMessageKind.SECTION, number, said)


def recording_message(header: RecordingHeader, drawn: DrawnTensors | None) -> ActivationMessage:
    """A recording message. drawn: where the header has_drawn."""
    return _message(ActivationMessageKind.RECORDING, 0, header, _drawn_tensors(drawn))


def abandon_message(recording: str, key: str) -> ActivationMessage:
    """An abandon message. recording: 32 hex digits. key: of its template, 64."""
    return _message(ActivationMessageKind.ABANDON, 0, AbandonHeader(recording=recording, key=key))


def read_question(layout: Layout, views: Sequence[memoryview]) -> tuple[int, TemplateQuestion]:
    """Number and header of a question message."""
    _check_end(layout, _FIRST)
    return _read(layout, views, TemplateQuestion, MAX_REQUEST_BYTES)


def read_answer(layout: Layout, views: Sequence[memoryview]) -> tuple[int, TemplateAnswer]:
    """Number and header of an answer message; `read_drawn` has the rest."""
    number, answer = _read(layout, views, TemplateAnswer, MAX_HEADER_BYTES)
    check_times(answer.times)
    return number, answer


def read_drawn(layout: Layout, views: Sequence[memoryview], *, has_drawn: bool) -> DrawnTensors | None:
    """Copies of image latent and noise of an answer or recording message whose header says whether it has them."""
    if not has_drawn:
        _check_end(layout, _FIRST)
        return None
    specs = layout.specs[_FIRST:]
    if [spec.name for spec in specs] != list(_DRAWN) or specs[0].shape != specs[1].shape:
        raise ValueError(f"a {kind_of(layout)} message has other tensors than image latent and noise of one shape")
    if any(spec.dtype != DType.FLOAT32 for spec in specs):
        raise ValueError(f"image latent and noise of a {kind_of(layout)} message are not float32")
    return DrawnTensors(shape=specs[0].shape, image_latent=bytes(views[_FIRST]), noise=bytes(views[_FIRST + 1]))


def read_fetch(layout: Layout, views: Sequence[memoryview]) -> tuple[int, SectionRequest]:
    """Number and header of a fetch message; its digest is one."""
    _check_end(layout, _FIRST)
    number, request = _read(layout, views, SectionRequest, MAX_REQUEST_BYTES)
    if not _DIGEST.fullmatch(request.digest):
        raise ValueError("a section is fetched by 64 hex digits")
    return number, request


def read_chunk(layout: Layout, views: Sequence[memoryview]) -> tuple[int, ChunkHeader]:
    """Number and header of a chunk message, whose bytes are its third tensor."""
    _check_bytes(layout, _FIRST, "bytes", CHUNK_BYTES)
    number, chunk = _read(layout, views, ChunkHeader, MAX_REQUEST_BYTES)
    check_times(chunk.times)
    return number, chunk


def read_whole(layout: Layout, views: Sequence[memoryview]) -> tuple[int, StoreTimes]:
    """Number of a whole message, and what the store has spent."""
    _check_end(layout, _FIRST)
    number, times = _read(layout, views, StoreTimes, MAX_REQUEST_BYTES)
    return number, check_times(times)


def read_refused(layout: Layout, views: Sequence[memoryview]) -> tuple[int, bytes]:
    """Number and reason of a refused message."""
    _check_bytes(layout, 1, "error", _MAX_ERROR_BYTES)
    return read_number(layout, views), bytes(views[1])


def read_section(layout: Layout, views: Sequence[memoryview]) -> tuple[int, SectionHeader, SectionLayout]:
    """Number and header of a section message, and what its chunks bring."""
    _check_end(layout, _FIRST)
    number, header = _read(layout, views, SectionHeader, MAX_HEADER_BYTES)
    return number, header, SectionLayout.from_wire(header.layout)


def read_recording(layout: Layout, views: Sequence[memoryview]) -> RecordingHeader:
    """Header of a recording message; `read_drawn` has the rest."""
    return _read(layout, views, RecordingHeader, MAX_REQUEST_BYTES)[1]


def read_abandon(layout: Layout, views: Sequence[memoryview]) -> AbandonHeader:
    """Header of an abandon message."""
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
    said = header.SerializeToString()
    padded = -(-(_HEADER_LENGTH.size + len(said)) // _HEADER_PADDING) * _HEADER_PADDING
    return (_HEADER_LENGTH.pack(len(said)) + said).ljust(padded, b"\0")


def _read(layout: Layout, views: Sequence[memoryview], kind: type[HeaderT], most_bytes: int) -> tuple[int, HeaderT]:
    number = read_number(layout, views)
    _check_bytes(layout, 1, _HEADER, most_bytes + _HEADER_PADDING, is_last=False)
    packed = bytes(views[1])
    if len(packed) < _HEADER_LENGTH.size:
        raise ValueError(f"the header of a {kind_of(layout)} message is none")
    (length,) = _HEADER_LENGTH.unpack_from(packed)
    said = packed[_HEADER_LENGTH.size : _HEADER_LENGTH.size + length]
    if len(said) != length:
        raise ValueError(f"the header of a {kind_of(layout)} message ends too early")
    try:
        return number, kind.FromString(said)
    except DecodeError:
        raise ValueError(f"the header of a {kind_of(layout)} message is none") from None


def _drawn_tensors(drawn: DrawnTensors | None) -> Sequence[tuple[TensorSpec, bytes | memoryview]]:
    if drawn is None:
        return ()
    specs = (TensorSpec(name=name, dtype=DType.FLOAT32, shape=drawn.shape) for name in _DRAWN)
    return tuple(zip(specs, (drawn.image_latent, drawn.noise), strict=True))


def _check_end(layout: Layout, count: int) -> None:
    if len(layout.specs) != count:
        raise ValueError(f"a {kind_of(layout)} message has {count} tensors, not {len(layout.specs)}")


def _check_bytes(layout: Layout, place: int, name: str, most_bytes: int, *, is_last: bool = True) -> None:
    spec = layout.specs[place] if len(layout.specs) > place else None
    if spec is None or (spec.name, spec.dtype, len(spec.shape)) != (name, DType.UINT8, 1):
        raise ValueError(f"a {kind_of(layout)} message has no {name}")
    if spec.shape[0] > most_bytes:
        raise ValueError(f"{name} of a {kind_of(layout)} message is not at most {most_bytes} bytes")
    if is_last:
        _check_end(layout, place + 1)


def _bytes_spec(name: str, size_bytes: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=DType.UINT8, shape=(size_bytes,))
