"""Headers of safetensors: what the format forbids is refused, mutations of headers crash nothing."""

from __future__ import annotations

import io
import json
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bottega.addons.loras.wire import canonical, module_parts
from bottega.addons.loras.wire.canonical import ModuleWeights, TensorData
from bottega.errors import BadLora
from bottega.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS, HeaderError, parse_header, read_header

_MUTATIONS = 1_000
# Of one header: it is parsed to Python's objects, some of which are larger than their text.
_MOST_BYTES = 4 << 20


def _file(fields: object, data: bytes = b"") -> bytes:
    text = json.dumps(fields).encode() if not isinstance(fields, bytes) else fields
    return len(text).to_bytes(8, "little") + text + data


def _parse(data: bytes) -> None:
    size = 8 + int.from_bytes(data[:8], "little")
    parse_header(data[:size], file_bytes=len(data))


def _tensor(begin: int, end: int, *shape: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def test_a_file_of_the_library_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.zeros(3, 4), "b.c": torch.zeros(5, dtype=torch.bfloat16), "s": torch.tensor(1.0)}
    save_file(tensors, path, metadata={"who": "me"})
    with path.open("rb") as file:
        header = read_header(file)
    assert dict(header.metadata) == {"who": "me"}
    assert {entry.name: (entry.dtype, entry.shape) for entry in header.tensors} == {
        "a": ("F32", (3, 4)),
        "b.c": ("BF16", (5,)),
        "s": ("F32", ()),
    }
    assert header.size_bytes + header.data_bytes == path.stat().st_size


_ACCEPTED = f"2 to {MAX_HEADER_BYTES} are accepted"
_NO_SPAN = "tensor a does not have the bytes that its shape needs"
_NO_SHAPE = "tensor a has a shape that is no list of at most 8 extents"
_NO_NAMES = "its header is no JSON object with unique names"
_NO_TEXTS = "its __metadata__ is no object of texts"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "it is shorter than the length of a header"),
        (b"\0" * 8, f"it says that its header has 0 bytes; {_ACCEPTED}"),
        ((2**63).to_bytes(8, "little"), f"it says that its header has {2**63} bytes; {_ACCEPTED}"),
        (
            (MAX_HEADER_BYTES + 1).to_bytes(8, "little"),
            f"it says that its header has {MAX_HEADER_BYTES + 1} bytes; {_ACCEPTED}",
        ),
        ((1000).to_bytes(8, "little") + b"{}", "its header should have 1008 bytes, and 10 of 10 are there"),
        (_file(b"[]"), "its header does not begin with {"),
        (_file(b'{"a":1'), _NO_NAMES),
        (_file(b"{" + b'"a":[' * 100_000), _NO_NAMES),
        (_file(b'{"a":' + b"9" * 5000 + b"}"), _NO_NAMES),
        (_file(b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"a":{}}'), _NO_NAMES),
        (
            _file({str(number): 0 for number in range(MAX_TENSORS + 1)}),
            "it has 16385 tensors; at most 16384 are accepted",
        ),
        (_file({"__metadata__": {"a": 1}}), _NO_TEXTS),
        (_file({"": _tensor(0, 4)}, b"1234"), "a tensor has the name ''; 1 to 512 printable bytes are accepted"),
        (_file({"a\n": _tensor(0, 4)}, b"1234"), "a tensor has the name 'a\\n'; 1 to 512 printable bytes are accepted"),
        (
            _file({"a": {**_tensor(0, 4), "more": 1}}, b"1234"),
            "tensor a is not described by dtype, shape and data_offsets",
        ),
        (_file({"a": 7}, b"1234"), "tensor a is not described by dtype, shape and data_offsets"),
        (_file({"a": _tensor(0, 4, dtype="F99")}, b"1234"), "tensor a has an element type that is not known"),
        (_file({"a": _tensor(0, 4, -1)}, b"1234"), _NO_SHAPE),
        (_file({"a": {**_tensor(0, 4), "shape": [1.0]}}, b"1234"), _NO_SHAPE),
        (_file({"a": _tensor(0, 4, *[1] * 9)}, b"1234"), _NO_SHAPE),
        (_file({"a": {**_tensor(0, 4), "data_offsets": [4]}}), "tensor a has data_offsets that are no begin and end"),
        (_file({"a": _tensor(0, 8)}, b"12345678"), _NO_SPAN),
        (_file({"a": _tensor(8, 4)}, b"12345678"), _NO_SPAN),
        (_file({"a": _tensor(0, 4, 2**40, 2**40)}, b"1234"), _NO_SPAN),
        (_file({"a": _tensor(0, 4), "b": _tensor(2, 6)}, b"123456"), "tensor b overlaps a"),
        (_file({"a": _tensor(0, 4), "b": _tensor(8, 12)}, b"123456789012"), "tensor b leaves a gap behind a"),
        (_file({"a": _tensor(4, 8)}, b"12345678"), "tensor a leaves a gap behind the header"),
        (_file({"a": _tensor(0, 4)}, b"12345"), "its tensors take 4 bytes, and 5 are behind its header"),
        (_file({"a": _tensor(0, 4)}, b"123"), "its tensors take 4 bytes, and 3 are behind its header"),
    ],
)
def test_what_the_format_forbids_is_refused(data: bytes, sentence: str) -> None:
    with pytest.raises(HeaderError) as refused:
        _parse(data)
    assert str(refused.value) == sentence


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(HeaderError, match="name"):
        _parse(_file(b'{"\\ud800":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}', b"1234"))


def test_a_file_that_is_shorter_than_its_header_is_refused_before_the_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes((1 << 20).to_bytes(8, "little") + b"{}")
    with path.open("rb") as file, pytest.raises(HeaderError, match="longer than the file"):
        read_header(file)


def test_thousands_of_mutated_headers_are_read_or_refused_within_a_bound_of_memory() -> None:
    seeds = [_canonical(), _file({"__metadata__": {"k": "v"}, "a": _tensor(0, 8, 2), "b": _tensor(8, 12)}, b"x" * 12)]
    chance = random.Random(6)
    refused = 0
    tracemalloc.start()
    try:
        for turn in range(_MUTATIONS):
            data = _mutated(chance, seeds[turn % len(seeds)])
            size = min(len(data), 8 + int.from_bytes(data[:8], "little"))
            try:
                canonical.parse(data[:size], file_bytes=len(data))
            except BadLora:
                refused += 1
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused > _MUTATIONS // 2
    assert peak < _MOST_BYTES
    assert kept < _MOST_BYTES // 4


def _canonical() -> bytes:
    file = io.BytesIO()
    down = TensorData(dtype="F16", shape=(2, 3), data=b"1" * 12)
    up = TensorData(dtype="F16", shape=(4, 2), data=b"2" * 16)
    modules = [
        ModuleWeights(component=component, path=f"a.{index}", scale=1.0, parts={"down": down, "up": up})
        for component in module_parts.COMPONENTS
        for index in range(2)
    ]
    canonical.write(file, modules)
    return file.getvalue()


def _mutated(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    size = 8 + int.from_bytes(data[:8], "little")
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(min(size, len(changed)) or 1)
        match chance.randrange(7):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at : at + 1] = chance.choice((b"9", b"-", b"[", b"}", b'"', b"\0", b"\xff", b"1e9", b"null"))
            case 2:
                del changed[at : at + chance.randint(1, 40)]
            case 3:
                changed[at:at] = changed[at : at + chance.randint(1, 40)]
            case 4:
                changed[:8] = struct.pack("<Q", chance.choice((0, 1, 2**63, chance.randrange(2 * len(data)))))
            case 5:
                del changed[-chance.randint(1, 60) :]
            case _:
                digits = [place for place in range(8, min(size, len(changed))) if chr(changed[place]).isdigit()]
                if digits:
                    changed[chance.choice(digits)] = ord(chance.choice("0123456789"))
    return bytes(changed)
