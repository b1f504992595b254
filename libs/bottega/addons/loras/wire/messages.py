"""The messages between a worker's engine and a LoRA store over a tensor connection.

A message is a list of tensors. The first is named after the message's kind and holds a number, which identifies the
fetch. The receiver checks a copy of the message here before it uses it. A message that breaks a rule raises ValueError.

worker -> store    fetch: the LoRA of a digest          whole; or lora and its pieces in order; or refused
                   cancel: ends a fetch                 no answer; messages already sent may still arrive

A whole or lora message also reports the time that the store has spent on the fetch.

A whole message carries the sealed canonical file as the store has it in memory, so no byte is copied within a host.
Messages about other LoRAs may come between the pieces of a LoRA, so that a prompt never waits for a LoRA that it does
not need. If a LoRA is refused after its first messages, those are discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from google.protobuf.message import DecodeError

from bottega.addons.loras.wire.canonical import CanonicalLora
from bottega.store_times import check_times
from bottega.transport import BytesMessage, DType, Layout, TensorSpec, number_spec, pack_number, read_number
from bottega.v1.trace_pb2 import StoreTimes

DIGEST_BYTES = 32
# Messages that a worker receives at once: enough pieces to keep a link busy while others are acknowledged.
SLOTS = 4
# Maximum size of a JobError as JSON.
_MAX_ERROR_BYTES = 64 << 10
# The name by which workers and stores of other versions know it.
_DENOISER_BYTES = "unet_bytes"
# Indexes of a lora message's tensors: size of the pieces, store times, file header, and text encoders' section.
DENOISER_BYTES, TIMES, HEADER, TEXT = 1, 2, 3, 4
# A length, a StoreTimes and padding, so that all messages of a kind have the same layout.
_TIMES_BYTES = 64
# Index of the data tensor of a piece message.
PIECE = 1


class LoraMessageKind(StrEnum):
    """The kind of a message."""

    FETCH = "fetch"
    CANCEL = "cancel"
    WHOLE = "whole"
    LORA = "lora"
    PIECE = "piece"
    REFUSED = "refused"


def fetch_message(number: int, digest: str) -> BytesMessage:
    """Return a fetch message. `digest` is a SHA-256 in hex."""
    layout = Layout.of(number_spec(LoraMessageKind.FETCH), _bytes("digest", DIGEST_BYTES), headers=2)
    return BytesMessage(layout=layout, buffers=(pack_number(number), bytes.fromhex(digest)))


def whole_message(number: int, times: StoreTimes) -> BytesMessage:
    """Return a whole message. The file is sent beside it."""
    layout = Layout.of(number_spec(LoraMessageKind.WHOLE), _bytes("times", _TIMES_BYTES), headers=2)
    return BytesMessage(layout=layout, buffers=(pack_number(number), pack_times(times)))


def refused_message(number: int, error: bytes) -> BytesMessage:
    """Return a refused message. `error` is a JobError as JSON."""
    return BytesMessage(
        layout=Layout.of(number_spec(LoraMessageKind.REFUSED), _bytes("error", len(error)), headers=2),
        buffers=(pack_number(number), error),
    )


def lora_layout(lora: CanonicalLora) -> Layout:
    """Return the layout of a lora message, which begins the response to a fetch.

    It has the number, the size of the denoising network's section, the store times, the file's header and the text
    encoders' section, which is one zero byte if it is empty.
    """
    return Layout.of(
        number_spec(LoraMessageKind.LORA),
        number_spec(_DENOISER_BYTES),
        _bytes("times", _TIMES_BYTES),
        _bytes("header", lora.header_bytes),
        _bytes("text", max(1, lora.text_bytes)),
        headers=5,
    )


def piece_layout(size_bytes: int) -> Layout:
    """Return the layout of a message: the number of its fetch, and the next bytes of the denoising network's layers."""
    return Layout.of(number_spec(LoraMessageKind.PIECE), _bytes("bytes", size_bytes), headers=1)


def pack_times(times: StoreTimes) -> bytes:
    """Return store times as bytes for a message."""
    encoded = times.SerializeToString()
    return (bytes([len(encoded)]) + encoded).ljust(_TIMES_BYTES, b"\0")


def read_times(view: memoryview) -> StoreTimes:
    """Return the store times in a message. Raise ValueError if they cannot be decoded."""
    packed = bytes(view)
    try:
        return check_times(StoreTimes.FromString(packed[1 : 1 + packed[0]]))
    except DecodeError:
        raise ValueError("a LoRA store's times cannot be decoded") from None


def read_whole(layout: Layout, views: Sequence[memoryview]) -> tuple[int, StoreTimes]:
    """Return number and store times of a whole message."""
    _check(layout, {"times": _TIMES_BYTES})
    return read_number(layout, views), read_times(views[1])


def read_fetch(layout: Layout, views: Sequence[memoryview]) -> tuple[int, str]:
    """Return number and digest of a fetch."""
    _check(layout, {"digest": DIGEST_BYTES})
    return read_number(layout, views), bytes(views[1]).hex()


def read_refusal(layout: Layout, views: Sequence[memoryview]) -> tuple[int, bytes]:
    """Return number and reason of a refusal."""
    _check(layout, {"error": _MAX_ERROR_BYTES})
    return read_number(layout, views), bytes(views[1])


def check_lora(layout: Layout, *, max_bytes: int) -> None:
    """Raise ValueError unless the layout can begin a LoRA of at most `max_bytes`."""
    size = layout.specs[DENOISER_BYTES] if len(layout.specs) > DENOISER_BYTES else None
    if size is None or (size.name, size.dtype, size.shape) != (_DENOISER_BYTES, DType.INT64, (1,)):
        raise ValueError("a lora message does not give the size of its pieces")
    _check(layout, {"times": _TIMES_BYTES, "header": max_bytes, "text": max_bytes}, behind=DENOISER_BYTES)


def read_denoiser_bytes(view: memoryview, *, max_bytes: int) -> int:
    """Return the total bytes of the pieces, from the tensor DENOISER_BYTES of a lora message. Raise ValueError."""
    size_bytes = int.from_bytes(bytes(view), "little", signed=True)
    if not 0 <= size_bytes <= max_bytes:
        raise ValueError(f"a LoRA's pieces cannot have {size_bytes} bytes")
    return size_bytes


def check_piece(layout: Layout, *, max_bytes: int) -> None:
    """Raise ValueError unless the layout can be a piece of a LoRA of at most `max_bytes`."""
    _check(layout, {"bytes": max_bytes})


def _check(layout: Layout, rest: dict[str, int], behind: int = 0) -> None:
    """Raise ValueError unless the tensors after index `behind` have the names in `rest`, and at most those sizes."""
    specs = layout.specs[behind + 1 :]
    if [spec.name for spec in specs] != list(rest):
        raise ValueError(f"a {layout.specs[0].name} message has other tensors than {', '.join(rest)}")
    for spec in specs:
        if spec.dtype != DType.UINT8 or len(spec.shape) != 1 or spec.shape[0] > rest[spec.name]:
            raise ValueError(f"{spec.name} of a {layout.specs[0].name} message is not at most {rest[spec.name]} bytes")


def _bytes(name: str, size_bytes: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=DType.UINT8, shape=(size_bytes,))
