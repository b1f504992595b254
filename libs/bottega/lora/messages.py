"""What a worker's engine and a LoRA store say to each other over a link: each message as tensors.

The first tensor of a message has the name of its kind, and is a number. The receiver checks it here, from a copy,
before anything is done with it; what breaks a rule raises ValueError.

    worker -> store    fetch: the LoRA of a digest          whole, or lora and its pieces in order, or refused
                       cancel: of a fetch's number          nothing; what is on its way already may still come

A whole or lora message also says what the store has spent on the fetch until then.

A whole message carries the canonical file as the store has it in memory, sealed: within a host no
byte of it is copied. Between the pieces of one LoRA may be any other messages: what a prompt waits for waits for no
other LoRA. A LoRA that is refused after its head, or some of its pieces, comes to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from google.protobuf.message import DecodeError

from bottega.lora.canonical import CanonicalLora
from bottega.store_times import check_times
from bottega.transport import BytesMessage, DType, Layout, TensorSpec, number_spec, pack_number, read_number
from bottega.v1.trace_pb2 import StoreTimes

DIGEST_BYTES = 32
# That a worker takes in at once: so many pieces keep a link busy while others are acknowledged.
SLOTS = 4
# A status of ours, as JSON.
_MAX_ERROR_BYTES = 64 << 10
_UNET_BYTES = "unet_bytes"
# Tensors of a lora message: how many bytes its pieces will have, what was spent, and what a prompt waits for.
UNET_BYTES, TIMES, HEADER, TEXT = 1, 2, 3, 4
# A length, a StoreTimes and what fills up: all messages of a kind have the same layout.
_TIMES_BYTES = 64
# The tensor of a piece message.
PIECE = 1


class LoraMessageKind(StrEnum):
    """What a message is."""

    FETCH = "fetch"
    CANCEL = "cancel"
    WHOLE = "whole"
    LORA = "lora"
    PIECE = "piece"
    REFUSED = "refused"


def fetch_message(number: int, digest: str) -> BytesMessage:
    """A fetch message. digest: SHA-256, hex."""
    layout = Layout.of(number_spec(LoraMessageKind.FETCH), _bytes("digest", DIGEST_BYTES), headers=2)
    return BytesMessage(layout=layout, buffers=(pack_number(number), bytes.fromhex(digest)))


def whole_message(number: int, times: StoreTimes) -> BytesMessage:
    """A whole message, which goes beside the file."""
    layout = Layout.of(number_spec(LoraMessageKind.WHOLE), _bytes("times", _TIMES_BYTES), headers=2)
    return BytesMessage(layout=layout, buffers=(pack_number(number), pack_times(times)))


def refused_message(number: int, error: bytes) -> BytesMessage:
    """A refused message. error: a JobError as JSON."""
    return BytesMessage(
        layout=Layout.of(number_spec(LoraMessageKind.REFUSED), _bytes("error", len(error)), headers=2),
        buffers=(pack_number(number), error),
    )


def lora_layout(lora: CanonicalLora) -> Layout:
    """Of the head of an answer to a fetch: its number, the bytes of the UNet's section, what was spent, the file's
    header and the text encoders' section; a zero byte is an empty one."""
    return Layout.of(
        number_spec(LoraMessageKind.LORA),
        number_spec(_UNET_BYTES),
        _bytes("times", _TIMES_BYTES),
        _bytes("header", lora.header_bytes),
        _bytes("text", max(1, lora.text_bytes)),
        headers=5,
    )


def piece_layout(size_bytes: int) -> Layout:
    """Of the next bytes of the UNet's section: its LoRA's number, and they."""
    return Layout.of(number_spec(LoraMessageKind.PIECE), _bytes("bytes", size_bytes), headers=1)


def pack_times(times: StoreTimes) -> bytes:
    """What the times of a message hold."""
    said = times.SerializeToString()
    return (bytes([len(said)]) + said).ljust(_TIMES_BYTES, b"\0")


def read_times(view: memoryview) -> StoreTimes:
    """What they say. Raises ValueError."""
    packed = bytes(view)
    try:
        return check_times(StoreTimes.FromString(packed[1 : 1 + packed[0]]))
    except DecodeError:
        raise ValueError("a LoRA store's times are none") from None


def read_whole(layout: Layout, views: Sequence[memoryview]) -> tuple[int, StoreTimes]:
    """Number of a whole message, and what was spent."""
    _check(layout, {"times": _TIMES_BYTES})
    return read_number(layout, views), read_times(views[1])


def read_fetch(layout: Layout, views: Sequence[memoryview]) -> tuple[int, str]:
    """Number and digest of a fetch message."""
    _check(layout, {"digest": DIGEST_BYTES})
    return read_number(layout, views), bytes(views[1]).hex()


def read_refusal(layout: Layout, views: Sequence[memoryview]) -> tuple[int, bytes]:
    """Number and reason of a refused message."""
    _check(layout, {"error": _MAX_ERROR_BYTES})
    return read_number(layout, views), bytes(views[1])


def check_lora(layout: Layout, *, max_bytes: int) -> None:
    """Raises ValueError where a message of this layout can be no head of a LoRA of at most so many bytes."""
    size = layout.specs[UNET_BYTES] if len(layout.specs) > UNET_BYTES else None
    if size is None or (size.name, size.dtype, size.shape) != (_UNET_BYTES, DType.INT64, (1,)):
        raise ValueError("a lora message does not say how long its pieces will be")
    _check(layout, {"times": _TIMES_BYTES, "header": max_bytes, "text": max_bytes}, behind=UNET_BYTES)


def read_unet_bytes(view: memoryview, *, max_bytes: int) -> int:
    """What a lora message says of its pieces. view: of its tensor UNET_BYTES. Raises ValueError."""
    size_bytes = int.from_bytes(bytes(view), "little", signed=True)
    if not 0 <= size_bytes <= max_bytes:
        raise ValueError(f"a LoRA's pieces cannot have {size_bytes} bytes")
    return size_bytes


def check_piece(layout: Layout, *, max_bytes: int) -> None:
    """Raises ValueError where a message of this layout can be no piece of a LoRA of at most so many bytes."""
    _check(layout, {"bytes": max_bytes})


def _check(layout: Layout, rest: dict[str, int], behind: int = 0) -> None:
    """rest: most bytes of each tensor behind the numbers, the last of which is at `behind`."""
    specs = layout.specs[behind + 1 :]
    if [spec.name for spec in specs] != list(rest):
        raise ValueError(f"a {layout.specs[0].name} message has other tensors than {', '.join(rest)}")
    for spec in specs:
        if spec.dtype != DType.UINT8 or len(spec.shape) != 1 or spec.shape[0] > rest[spec.name]:
            raise ValueError(f"{spec.name} of a {layout.specs[0].name} message is not at most {rest[spec.name]} bytes")


def _bytes(name: str, size_bytes: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=DType.UINT8, shape=(size_bytes,))
