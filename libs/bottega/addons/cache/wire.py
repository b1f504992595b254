"""Cached latents: their names, which requests may start from them, and the messages between workers and caches.

A message is a list of tensors. The first is named after the message's kind and holds a number. The second is a header,
a message of cache.proto. The receiver checks both in a copy before it uses them, and raises ValueError for a message
that breaks a rule.

worker -> cache    question: the prompt's embedding     answer: the latents that its header lists
                   recording: embedding, picture, and   no answer
                   the latents that its header lists
                   starts: no further tensor            no answer

An answer has the number of its question. Latents are [channels, height, width] in the model's element type. Recordings
and starts have the number 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from bottega.transport import DType, Layout, TensorSpec, kind_of, number_spec, pack_number, read_number

MAX_HEADER_BYTES = 256 << 10
"""Maximum size of a header. The prompts of a recording have at most 16 KiB each."""

MAX_EMBEDDING = 4096
"""Maximum number of elements of an embedding; SDXL's has 1,280."""

MAX_LATENTS = 8
"""Maximum number of latents in a message: a job has at most eight pictures, a picture five recorded steps."""

MAX_PICTURE_SIDE = 256
"""Maximum width and height in pixels of the picture in a recording."""

_LATENT_DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)

MessageT = TypeVar("MessageT", bound=Message)


class CacheMessageKind(StrEnum):
    """The kind of a message."""

    QUESTION = "question"
    ANSWER = "answer"
    RECORDING = "recording"
    STARTS = "starts"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheMessage:
    """A message to send: its layout, and a buffer for each tensor."""

    layout: Layout
    buffers: Sequence[bytes | memoryview]


def question_message(number: int, header: Message, embedding: memoryview) -> CacheMessage:
    """Return a question message. `embedding` holds the bytes of float32 values."""
    rest = [(_embedding_spec(embedding.nbytes), embedding)]
    return _message(CacheMessageKind.QUESTION, number, header, rest)


def answer_message(number: int, header: Message, latents: Sequence[tuple[TensorSpec, memoryview]]) -> CacheMessage:
    """Return an answer message with the latents that its header lists, in their order."""
    return _message(CacheMessageKind.ANSWER, number, header, latents)


def recording_message(
    header: Message,
    *,
    embedding: memoryview,
    picture: tuple[TensorSpec, memoryview],
    latents: Sequence[tuple[TensorSpec, memoryview]],
) -> CacheMessage:
    """Return a recording message.

    Args:
        picture: uint8, [height, width, 3].
        latents: The latents in the order of their steps.
    """
    rest = [(_embedding_spec(embedding.nbytes), embedding), picture, *latents]
    return _message(CacheMessageKind.RECORDING, 0, header, rest)


def starts_message(header: Message) -> CacheMessage:
    """Return a message that reports how many steps a cache's latents have saved."""
    return _message(CacheMessageKind.STARTS, 0, header, ())


def latent_spec(index: int, dtype: DType, shape: tuple[int, ...]) -> TensorSpec:
    """Return the tensor spec of the latent at index `index` of an answer or a recording."""
    return TensorSpec(name=f"latent{index}", dtype=dtype, shape=shape)


def picture_spec(height: int, width: int) -> TensorSpec:
    """Return the tensor spec of the picture in a recording."""
    return TensorSpec(name="picture", dtype=DType.UINT8, shape=(height, width, 3))


def read_header(layout: Layout, views: Sequence[memoryview], kind: type[MessageT]) -> tuple[int, MessageT]:
    """Return number and header of a message. Raise ValueError if it has none."""
    number = read_number(layout, views)
    spec = layout.specs[1] if len(layout.specs) > 1 else None
    if spec is None or spec.name != "header" or spec.dtype != DType.UINT8 or len(spec.shape) != 1:
        raise ValueError(f"a {kind_of(layout)} message has no header")
    if spec.shape[0] > MAX_HEADER_BYTES:
        raise ValueError(f"the header of a {kind_of(layout)} message is not at most {MAX_HEADER_BYTES} bytes")
    try:
        # A blank follows the header, because a tensor is never empty and a header may be.
        return number, kind.FromString(bytes(views[1])[:-1])
    except DecodeError:
        raise ValueError(f"the header of a {kind_of(layout)} message cannot be decoded") from None


def check_embedding(layout: Layout) -> None:
    """Raise ValueError if the third tensor of a message is not an embedding."""
    spec = layout.specs[2] if len(layout.specs) > 2 else None
    if spec is None or spec.name != "embedding" or spec.dtype != DType.FLOAT32 or len(spec.shape) != 1:
        raise ValueError(f"a {kind_of(layout)} message has no embedding")
    if spec.shape[0] > MAX_EMBEDDING:
        raise ValueError(f"an embedding has at most {MAX_EMBEDDING} numbers")


def check_picture(layout: Layout) -> None:
    """Raise ValueError if the fourth tensor of a recording is not a picture."""
    spec = layout.specs[3] if len(layout.specs) > 3 else None
    if spec is None or spec.name != "picture" or spec.dtype != DType.UINT8 or len(spec.shape) != 3:
        raise ValueError("a recording has no picture")
    if spec.shape[2] != 3 or max(spec.shape) > MAX_PICTURE_SIDE:
        raise ValueError(f"the picture of a recording is not RGB of at most {MAX_PICTURE_SIDE} pixels a side")


def check_latents(layout: Layout, first: int, number: int) -> None:
    """Raise ValueError unless the tensors from index `first` on are `number` latents of one shape and element type."""
    specs = layout.specs[first:]
    if len(specs) != number or number > MAX_LATENTS:
        raise ValueError(f"a {kind_of(layout)} message has latents that differ from its header")
    for index, spec in enumerate(specs):
        if spec.name != f"latent{index}" or spec.dtype not in _LATENT_DTYPES or len(spec.shape) != 3:
            raise ValueError(f"a tensor of a {kind_of(layout)} message is not a latent")
        if (spec.dtype, spec.shape) != (specs[0].dtype, specs[0].shape):
            raise ValueError(f"the latents of a {kind_of(layout)} message differ in shape")


def _message(
    kind: CacheMessageKind, number: int, header: Message, rest: Sequence[tuple[TensorSpec, memoryview]]
) -> CacheMessage:
    packed = header.SerializeToString() + b" "
    specs = [number_spec(kind), TensorSpec(name="header", dtype=DType.UINT8, shape=(len(packed),))]
    return CacheMessage(
        layout=Layout.of(*specs, *(spec for spec, _ in rest), headers=len(specs)),
        buffers=(pack_number(number), packed, *(buffer for _, buffer in rest)),
    )


def _embedding_spec(size_bytes: int) -> TensorSpec:
    return TensorSpec(name="embedding", dtype=DType.FLOAT32, shape=(size_bytes // 4,))
