"""The canonical form of a LoRA: one safetensors file, whose SHA-256 is the LoRA's digest.

    __metadata__  {"format": "bottega.lora/1"}, and nothing else
    tensors       three for each module: <component>.<module path>.scale (F32, [], alpha / rank),
                  .down ([rank, in] or [rank, in, height, width]), .up ([out, rank] or [out, rank, 1, 1])
    data          two sections without gaps: the text encoders' tensors, then the UNet's. A prompt is encoded once
                  the first has arrived. Within a section: scales, then larger items first, then by name

Within a host, the file is passed as it lies in memory. Over a network, the header and the text encoders' section (one
zero byte if it is empty) come first, then the UNet's section in pieces: see messages.py.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import BinaryIO, NoReturn

from bottega.errors import BadLora
from bottega.safetensors_header import (
    ITEM_BYTES,
    LENGTH_BYTES,
    MAX_NAME_BYTES,
    Header,
    HeaderError,
    TensorEntry,
    parse_header,
    read_header,
)

FORMAT = "bottega.lora/1"
COMPONENTS = ("text_encoder", "text_encoder_2", "unet")
BACKBONE = "unet"
DTYPES = frozenset({"F32", "F16", "BF16"})
# LoRAs that were extracted from fine-tuned models have ranks of some hundreds. Higher ranks save hardly anything.
MAX_RANK = 512
# SDXL's UNet has about 800 modules with weights, its text encoders 264.
MAX_MODULES = 4096
# A LoRA of rank 512 on all of SDXL would take some GiB.
MAX_FILE_BYTES = 8 << 30
_METADATA = MappingProxyType({"format": FORMAT})
_PARTS = ("scale", "down", "up")
_PATH = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
# Sections begin at whole cache lines.
_HEADER_ALIGNMENT = 64
# CLIP's text towers have their encoder in this module or at their root, depending on class and transformers version.
_TEXT_MODEL = "text_model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module that a LoRA changes: scale * up(down(x)) is added to its output.

    The entries' `begin` and `end` are byte offsets in the component's section.
    """

    component: str
    """Component of the model: one of COMPONENTS."""
    path: str
    """Path of the module in the component."""
    scale: TensorEntry
    down: TensorEntry
    up: TensorEntry

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalLora:
    """The parsed header of a canonical file."""

    header_bytes: int
    text_bytes: int
    """Bytes of the text encoders' section."""
    unet_bytes: int
    """Bytes of the UNet's section."""
    modules: tuple[Module, ...]
    """The modules, in the order of their scales in the file."""

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.header_bytes + self.text_bytes + self.unet_bytes

    @property
    def rank(self) -> int:
        """The highest rank among the modules."""
        return max(module.rank for module in self.modules)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleWeights:
    """The weights of one module, for writing a canonical file."""

    component: str
    path: str
    scale: float
    down: TensorData
    up: TensorData


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorData:
    """A tensor's row-major, little-endian elements."""

    dtype: str
    """Element type: one of DTYPES."""
    shape: tuple[int, ...]
    data: bytes | memoryview


def spellings(component: str, path: str) -> tuple[str, ...]:
    """Return the paths that may mean the same module of a component, the given path first.

    Transformers 5 dropped `text_model.` from CLIPTextModel's modules but kept it in CLIPTextModelWithProjection, so
    model folders, LoRA files and loaded networks each may or may not have it.
    """
    if component == BACKBONE:
        return (path,)
    if path.startswith(_TEXT_MODEL):
        return (path, path.removeprefix(_TEXT_MODEL))
    return (path, _TEXT_MODEL + path)


@contextmanager
def headers_of_loras() -> Iterator[None]:
    """Convert errors about safetensors headers in the `with` block to BadLora."""
    try:
        yield
    except HeaderError as error:
        raise BadLora(f"the file is not an acceptable safetensors file: {error}") from None


def read(file: BinaryIO) -> CanonicalLora:
    """Parse the header of an open file. Raise BadLora that names the broken rule, or OSError."""
    with headers_of_loras():
        return _checked(read_header(file))


def parse(head: bytes, *, file_bytes: int) -> CanonicalLora:
    """Parse a header that arrived over a connection. Raise BadLora that names the broken rule.

    Args:
        head: A copy, not memory that the sender may still change.
        file_bytes: Bytes of header and sections together.
    """
    with headers_of_loras():
        return _checked(parse_header(head, file_bytes=file_bytes))


def write(file: BinaryIO, modules: Iterable[ModuleWeights]) -> None:
    """Write a LoRA from the beginning of the file. The same modules give the same bytes, whatever their order.

    Raises BadLora for content that `read` would refuse, or OSError.
    """
    pieces = sorted(_pieces(modules), key=lambda piece: _order(piece.name, piece.weights.dtype))
    head = _head(pieces)
    with headers_of_loras():
        _checked(parse_header(head, file_bytes=len(head) + sum(len(piece.weights.data) for piece in pieces)))
    file.write(head)
    file.writelines(piece.weights.data for piece in pieces)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Piece:
    name: str
    weights: TensorData


def _pieces(modules: Iterable[ModuleWeights]) -> Iterator[_Piece]:
    for module in modules:
        prefix = f"{module.component}.{module.path}"
        scale = TensorData(dtype="F32", shape=(), data=struct.pack("<f", module.scale))
        for part, weights in zip(_PARTS, (scale, module.down, module.up), strict=True):
            yield _Piece(name=f"{prefix}.{part}", weights=weights)


def _head(pieces: Sequence[_Piece]) -> bytes:
    fields: dict[str, object] = {"__metadata__": dict(_METADATA)}
    end = 0
    for piece in pieces:
        begin, end = end, end + len(piece.weights.data)
        shape = list(piece.weights.shape)
        fields[piece.name] = {"dtype": piece.weights.dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(fields, separators=(",", ":")).encode()
    padding = -(LENGTH_BYTES + len(text)) % _HEADER_ALIGNMENT
    return (len(text) + padding).to_bytes(LENGTH_BYTES, "little") + text + b" " * padding


def _checked(header: Header) -> CanonicalLora:
    if header.metadata != _METADATA:
        _refuse(f"its metadata is not {dict(_METADATA)}")
    if not 0 < len(header.tensors) <= len(_PARTS) * MAX_MODULES:
        _refuse(f"it has {len(header.tensors)} tensors, not three for each of 1 to {MAX_MODULES} modules")
    if header.size_bytes + header.data_bytes > MAX_FILE_BYTES:
        _refuse(f"it has {header.data_bytes} bytes; at most {MAX_FILE_BYTES} are accepted")
    names = [_order(entry.name, entry.dtype) for entry in header.tensors]
    if names != sorted(names):
        _refuse("its tensors are not in their order")
    text = [entry for entry in header.tensors if not entry.name.startswith(f"{BACKBONE}.")]
    text_bytes = text[-1].end if text else 0
    return CanonicalLora(
        header_bytes=header.size_bytes,
        text_bytes=text_bytes,
        unet_bytes=header.data_bytes - text_bytes,
        modules=tuple(_modules(header.tensors, text_bytes)),
    )


def _modules(tensors: Sequence[TensorEntry], text_bytes: int) -> Iterator[Module]:
    parts: dict[tuple[str, str], dict[str, TensorEntry]] = {}
    for entry in tensors:
        component, path, part = _name(entry.name)
        offset = text_bytes if component == BACKBONE else 0
        parts.setdefault((component, path), {})[part] = TensorEntry(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            begin=entry.begin - offset,
            end=entry.end - offset,
        )
    for (component, path), found in parts.items():
        if len(found) < len(_PARTS):
            _refuse(f"{component}.{path} lacks {', '.join(part for part in _PARTS if part not in found)}")
        _check_shapes(f"{component}.{path}", found)
        yield Module(component=component, path=path, **found)


def _check_shapes(name: str, parts: Mapping[str, TensorEntry]) -> None:
    scale, down, up = (parts[part] for part in _PARTS)
    if (scale.dtype, scale.shape) != ("F32", ()):
        _refuse(f"the scale of {name[:80]} is not a single F32")
    if down.dtype not in DTYPES or up.dtype not in DTYPES:
        _refuse(f"{name[:80]} has elements that are none of {', '.join(sorted(DTYPES))}")
    if len(down.shape) not in {2, 4} or 0 in down.shape or 0 in up.shape:
        _refuse(f"down of {name[:80]} has the shape {list(down.shape)}; [rank, in] or a convolution's is accepted")
    rank = down.shape[0]
    if rank > MAX_RANK:
        _refuse(f"{name[:80]} has rank {rank}; at most {MAX_RANK} is accepted")
    if up.shape[1:] != (rank, *(1 for _ in down.shape[2:])):
        _refuse(f"up of {name[:80]} has the shape {list(up.shape)}, which does not follow down's, {list(down.shape)}")


def _name(name: str) -> tuple[str, str, str]:
    """Split a tensor's name into component, module path and the last word: scale, down or up."""
    component, _, rest = name.partition(".")
    path, _, part = rest.rpartition(".")
    if component not in COMPONENTS or part not in _PARTS or not _PATH.fullmatch(path) or len(name) > MAX_NAME_BYTES:
        _refuse(f"it has a tensor {name[:80]!r}, which is no part of a module")
    return component, path, part


def _order(name: str, dtype: str) -> tuple[bool, bool, int, str]:
    """Return the sort key: text encoders before the UNet, scales before weights, larger items first, then by name."""
    return name.startswith(f"{BACKBONE}."), not name.endswith(".scale"), -ITEM_BYTES.get(dtype, 0), name


def _refuse(what: str) -> NoReturn:
    raise BadLora(f"the file is no LoRA in canonical form: {what}")
