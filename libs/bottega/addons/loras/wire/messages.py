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

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from google.protobuf.message import DecodeError

from bottega.addons.loras.wire.canonical import COMPONENTS, CanonicalLora
from bottega.errors import BadLora
from bottega.store_times import check_times
from bottega.transport import BytesMessage, DType, Layout, TensorSpec, number_spec, pack_number, read_number
from bottega.v1.trace_pb2 import StoreTimes

DIGEST_BYTES = 32
# Messages that a worker receives at once: enough pieces to keep a link busy while others are acknowledged.
SLOTS = 4
# Maximum size of a JobError as JSON.
_MAX_ERROR_BYTES = 64 << 10
_UNET_BYTES = "unet_bytes"
# Indexes of a lora message's tensors: size of the pieces, store times, file header, and text encoders' section.
UNET_BYTES, TIMES, HEADER, TEXT = 1, 2, 3, 4
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

    It has the number, the size of the UNet's section, the store times, the file's header and the text encoders'
    section, which is one zero byte if it is empty.
    """
    return Layout.of(
        number_spec(LoraMessageKind.LORA),
        number_spec(_UNET_BYTES),
        _bytes("times", _TIMES_BYTES),
        _bytes("header", lora.header_bytes),
        _bytes("text", max(1, lora.text_bytes)),
        headers=5,
    )


def piece_layout(size_bytes: int) -> Layout:
    """Return the layout of a message: the number of its fetch, and the next bytes of a LoRA's layers for the UNet."""
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
    size = layout.specs[UNET_BYTES] if len(layout.specs) > UNET_BYTES else None
    if size is None or (size.name, size.dtype, size.shape) != (_UNET_BYTES, DType.INT64, (1,)):
        raise ValueError("a lora message does not give the size of its pieces")
    _check(layout, {"times": _TIMES_BYTES, "header": max_bytes, "text": max_bytes}, behind=UNET_BYTES)


def read_unet_bytes(view: memoryview, *, max_bytes: int) -> int:
    """Return the total bytes of the pieces, from the tensor UNET_BYTES of a lora message. Raise ValueError."""
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


PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"


MODEL_CARD = "README.md"
MAX_CARD_BYTES = 64 << 10
_BASE_MODEL = re.compile(r"^base_model:[ \t]*(?:#.*)?(?:\n[ \t]*-[ \t]*)?([^\s#].*)$", re.MULTILINE)
_COMMENT = re.compile(r"\s#.*")
_MAX_BASE_MODEL_CHARACTERS = 200


def card_base_model(card: bytes, *, file: str = "") -> str:
    """Return the base model that a model card's front matter names; "" if it names none.

    Args:
        card: The content of the card, or its first MAX_CARD_BYTES.
        file: Name of a LoRA's file in a folder that may be of other things, so that a card counts only if it has the
            name; "" for a LoRA's own folder.
    """
    text = card[:MAX_CARD_BYTES].decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    if file and not re.search(rf"(?<![\w.-]){re.escape(file)}(?![\w.-]*\w)", text):
        return ""
    front = text.partition("\n---")[0] if text.startswith("---\n") else ""
    found = _BASE_MODEL.search(front)
    return _COMMENT.sub("", found[1]).strip().strip("'\"[]")[:_MAX_BASE_MODEL_CHARACTERS] if found else ""


def model_card(path: Path) -> Path:
    """Return where the model card of the LoRA at a path would be: in its folder."""
    return (path if path.is_dir() else path.parent) / MODEL_CARD


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFile:
    """A safetensors file of a LoRA."""

    path: Path
    component: str | None = None
    """The only component that the file is for, if its folder is named after one; else None."""
    config: Path | None = None
    """PEFT's configuration in the same folder; None without one."""


def find_weights(path: Path) -> list[LoraFile]:
    """Return the files of the LoRA at a path, which is a safetensors file or a folder. Files are not opened.

    Raises BadLora for a folder that has no LoRA, or more than one.
    """
    if not path.is_dir():
        config = path.with_name(PEFT_CONFIG)
        return [LoraFile(path=path, config=config if path.name == PEFT_WEIGHTS and config.is_file() else None)]
    files, parts = sorted(path.glob("*.safetensors")), list(_parts(path))
    if files and parts:
        folders = ", ".join(f"{part.component}/" for part in parts)
        raise BadLora(f"{path.name} holds {files[0].name} beside {folders}: add the two separately")
    return parts or [_whole(path, files)]


def _whole(folder: Path, files: Sequence[Path]) -> LoraFile:
    """Return the single file of the LoRA in a folder."""
    named = [file for file in files if file.name in {PEFT_WEIGHTS, DIFFUSERS_WEIGHTS}]
    if not files:
        raise BadLora(
            f"{folder.name} holds none of {PEFT_WEIGHTS}, {DIFFUSERS_WEIGHTS}, nor one .safetensors file alone, nor a "
            f"folder of PEFT's for a component ({', '.join(COMPONENTS)}); pickled weights are never opened"
        )
    if len(named or files) > 1:
        listed = ", ".join(file.name for file in (named or files)[:4])
        raise BadLora(f"{folder.name} holds several LoRAs ({listed}): name the file that you mean")
    file, config = (named or files)[0], folder / PEFT_CONFIG
    if file.name == PEFT_WEIGHTS and not config.is_file():
        raise BadLora(f"{PEFT_WEIGHTS} has no {PEFT_CONFIG} beside it, which says its alpha")
    return LoraFile(path=file, config=config if config.is_file() else None)


def _parts(folder: Path) -> Iterator[LoraFile]:
    """Yield PEFT's files of single components, if there are any."""
    named = [component for component in COMPONENTS if (folder / component).is_dir()]
    if not any((folder / component / name).exists() for component in named for name in (PEFT_WEIGHTS, PEFT_CONFIG)):
        return
    for component in named:
        weights, config = folder / component / PEFT_WEIGHTS, folder / component / PEFT_CONFIG
        if not weights.is_file():
            raise BadLora(f"{component} holds no {PEFT_WEIGHTS}; pickled weights are never opened")
        if not config.is_file():
            raise BadLora(f"{component}/{PEFT_WEIGHTS} has no {PEFT_CONFIG} beside it, which says its alpha")
        yield LoraFile(path=weights, component=component, config=config)
