"""Reads and checks headers of untrusted safetensors files, before anything is mapped.

It knows the format (https://huggingface.co/docs/safetensors, "Format"), but not what the tensors are for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import BinaryIO, NoReturn

LENGTH_BYTES = 8
"""Size of the length field with which a file begins."""
# Trainers write their whole configuration, with word counts, into the metadata: some MiB at most.
MAX_HEADER_BYTES = 8 << 20
# A LoRA of SDXL with convolutions and both text encoders has about 3,300 tensors; the largest base models some 2,000.
MAX_TENSORS = 16_384
MAX_RANK = 8
MAX_NAME_BYTES = 512
# Far above the size of any file, and far below the size where products of extents become slow.
_MAX_FILE_BYTES = 1 << 44

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E5M2": 1,
        "F8_E4M3": 1,
        "I16": 2,
        "U16": 2,
        "F16": 2,
        "BF16": 2,
        "I32": 4,
        "U32": 4,
        "F32": 4,
        "F64": 8,
        "I64": 8,
        "U64": 8,
    }
)
"""Bytes of one element, by the format's names of element types."""


class HeaderError(ValueError):
    """The error that a file is not an acceptable safetensors file. Its text names the broken rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """The description of a tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of the tensor's first byte, counted from the end of the header."""
    end: int
    """Offset of the byte after the tensor's last, counted from the end of the header."""

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a file."""

    size_bytes: int
    """Bytes of the header, including its length field."""
    metadata: Mapping[str, str]
    tensors: tuple[TensorEntry, ...]
    """Tensors in the order of their bytes."""

    @property
    def data_bytes(self) -> int:
        """Number of bytes after the header."""
        return self.tensors[-1].end if self.tensors else 0


def read_header(file: BinaryIO) -> Header:
    """Return the header of an open file. Raise HeaderError or OSError."""
    file_bytes = os.fstat(file.fileno()).st_size
    file.seek(0)
    length = header_bytes(file.read(LENGTH_BYTES))
    if length > file_bytes:
        _refuse(f"its header of {length} bytes is longer than the file, which has {file_bytes}")
    file.seek(0)
    return parse_header(file.read(length), file_bytes=file_bytes)


def header_bytes(beginning: bytes) -> int:
    """Return the bytes of the header, including its length field, from a file's first 8 bytes. Raise HeaderError."""
    if len(beginning) < LENGTH_BYTES:
        _refuse("it is shorter than the length of a header")
    length = int.from_bytes(beginning[:LENGTH_BYTES], "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        _refuse(f"it says that its header has {length} bytes; 2 to {MAX_HEADER_BYTES} are accepted")
    return LENGTH_BYTES + length


def parse_header(head: bytes, *, file_bytes: int) -> Header:
    """Parse the header in the first bytes of a file. Raise HeaderError if it breaks a rule.

    Args:
        head: The header with its length field.
        file_bytes: Bytes of the whole file, which the tensors must fill completely.
    """
    size_bytes = header_bytes(head)
    if len(head) != size_bytes or file_bytes < size_bytes or file_bytes > _MAX_FILE_BYTES:
        _refuse(f"its header should have {size_bytes} bytes, and {len(head)} of {file_bytes} are there")
    fields = _decoded(head[LENGTH_BYTES:])
    metadata = _metadata(fields.pop("__metadata__", {}))
    if len(fields) > MAX_TENSORS:
        _refuse(f"it has {len(fields)} tensors; at most {MAX_TENSORS} are accepted")
    entries = [_entry(name, value) for name, value in fields.items()]
    tensors = tuple(sorted(entries, key=lambda entry: (entry.begin, entry.end)))
    _check_spans(tensors, file_bytes - size_bytes)
    return Header(size_bytes=size_bytes, metadata=MappingProxyType(metadata), tensors=tensors)


def _decoded(text: bytes) -> dict[str, object]:
    if not text.startswith(b"{"):
        _refuse("its header does not begin with {")
    try:
        fields = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError):  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        _refuse("its header is no JSON object with unique names")
    if not isinstance(fields, dict):
        _refuse("its header is no JSON object")
    return fields


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        _refuse("its __metadata__ is no object of texts")
    return value


def _entry(name: str, value: object) -> TensorEntry:
    if not (name.isprintable() and 0 < len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES):
        _refuse(f"a tensor has the name {name[:80]!r}; 1 to {MAX_NAME_BYTES} printable bytes are accepted")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(f"tensor {name[:80]} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _refuse(f"tensor {name[:80]} has an element type that is not known")
    if not _counts(shape) or len(shape) > MAX_RANK:
        _refuse(f"tensor {name[:80]} has a shape that is no list of at most {MAX_RANK} extents")
    if not _counts(offsets) or len(offsets) != 2:
        _refuse(f"tensor {name[:80]} has data_offsets that are no begin and end")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        _refuse(f"tensor {name[:80]} does not have the bytes that its shape needs")
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _counts(value: object) -> bool:
    """Return whether a value is a list of integers that are possible sizes or offsets in a file."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_FILE_BYTES for item in value)


def _check_spans(tensors: tuple[TensorEntry, ...], data_bytes: int) -> None:
    """Check that the tensors do not overlap, leave no gap, and end with the file."""
    if tensors and tensors[0].begin != 0:
        _refuse(f"tensor {tensors[0].name[:80]} leaves a gap behind the header")
    for before, after in pairwise(tensors):
        if after.begin != before.end:
            what = "overlaps" if after.begin < before.end else "leaves a gap behind"
            _refuse(f"tensor {after.name[:80]} {what} {before.name[:80]}")
    needed = tensors[-1].end if tensors else 0
    if needed != data_bytes:
        _refuse(f"its tensors take {needed} bytes, and {data_bytes} are behind its header")


def _refuse(what: str) -> NoReturn:
    raise HeaderError(what)
