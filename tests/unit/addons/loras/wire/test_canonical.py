"""The canonical form of LoRAs: what is written is read again, in one order only, and nothing else is taken."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from typing import cast

import pytest

from bottega.addons.loras.wire import canonical
from bottega.addons.loras.wire.canonical import ModuleWeights, TensorData
from bottega.errors import BadLora

_TEXT = "encoder.layers.0.self_attn.q_proj"
_LINEAR = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
_CONV = "down_blocks.0.resnets.0.conv1"


def _weights(dtype: str, *shape: int, fill: int = 1) -> TensorData:
    count = 1
    for extent in shape:
        count *= extent
    return TensorData(dtype=dtype, shape=shape, data=bytes([fill]) * (count * (4 if dtype == "F32" else 2)))


def _module(component: str, path: str, scale: float, down: TensorData, up: TensorData) -> ModuleWeights:
    return ModuleWeights(component=component, path=path, scale=scale, parts={"down": down, "up": up})


def _modules() -> list[ModuleWeights]:
    linear = _weights("F16", 4, 8, fill=2), _weights("F16", 6, 4, fill=3)
    convolution = _weights("F32", 2, 3, 3, 3, fill=4), _weights("F32", 5, 2, 1, 1, fill=5)
    text = _weights("BF16", 3, 7, fill=6), _weights("BF16", 7, 3, fill=7)
    return [
        _module("unet", _LINEAR, 0.5, *linear),
        _module("unet", _CONV, 2.0, *convolution),
        _module("text_encoder", _TEXT, 1.0, *text),
    ]


def _written(modules: list[ModuleWeights]) -> bytes:
    file = io.BytesIO()
    canonical.write(file, modules)
    return file.getvalue()


def _parsed(data: bytes) -> canonical.CanonicalLora:
    size = 8 + int.from_bytes(data[:8], "little")
    return canonical.parse(data[:size], file_bytes=len(data))


def _with_fields(data: bytes, change: dict[str, object | None]) -> bytes:
    """The file with another header: None leaves a field out, a dict changes it."""
    size = 8 + int.from_bytes(data[:8], "little")
    fields = json.loads(data[8:size])
    for name, value in change.items():
        if value is None:
            del fields[name]
        else:
            fields[name] = {**fields.get(name, {}), **cast(dict[str, object], value)}
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + data[size:]


def test_what_was_written_is_read_again() -> None:
    data = _written(_modules())
    lora = _parsed(data)
    assert lora.file_bytes == len(data)
    assert lora.rank == 4
    text, unet = data[lora.header_bytes :][: lora.text_bytes], data[lora.header_bytes + lora.text_bytes :]
    assert len(unet) == lora.denoiser_bytes
    given = {(module.component, module.path): module for module in _modules()}
    for module in lora.modules:
        section = unet if module.component == "unet" else text
        was = given.pop((module.component, module.path))
        assert struct.unpack("<f", section[module.scale.begin : module.scale.end]) == (was.scale,)
        for entry, weights in ((module.down, was.parts["down"]), (module.up, was.parts["up"])):
            assert (entry.dtype, entry.shape) == (weights.dtype, weights.shape)
            assert section[entry.begin : entry.end] == weights.data
    assert not given


def test_the_same_modules_give_the_same_bytes_in_whatever_order_they_come() -> None:
    assert _written(_modules()) == _written(_modules()[::-1])


def test_the_bytes_of_a_lora_stay_the_same_between_versions() -> None:
    """Provenances, stored LoRAs and saved pictures name a LoRA by their digest."""
    digest = "1d75fe5e7afefc0f71806c4ea68c403e5d94462d9fa6ac59aba8c8b0b711d148"
    assert hashlib.sha256(_written(_modules())).hexdigest() == digest


_NO_FORMAT = (
    "its metadata is not {'format': 'bottega.lora/1'}, the same with bottega.lora/2, or that of an embedding with "
    "its token"
)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"__metadata__": {"format": "pt"}}, _NO_FORMAT),
        ({"__metadata__": None}, _NO_FORMAT),
        ({"__metadata__": {"ignored": "\n" * 300}}, "ignored is not a list of at most 256 layers"),
        (
            {f"unet.{_LINEAR}.down": {"shape": [8, 4]}},
            f"up of unet.{_LINEAR} has the shape [6, 4], which does not follow down's, [8, 4]",
        ),
        (
            {f"unet.{_LINEAR}.down": {"dtype": "I16"}},
            f"unet.{_LINEAR} has elements that are none of BF16, F16, F32",
        ),
        ({f"unet.{_LINEAR}.scale": {"shape": [1]}}, f"the scale of unet.{_LINEAR} is not a single F32"),
        (
            {f"unet.{_LINEAR}.down": {"shape": [2, 2, 8]}},
            f"down of unet.{_LINEAR} has the shape [2, 2, 8]; [rank, in] or a convolution's is accepted",
        ),
    ],
)
def test_a_header_that_breaks_a_rule_is_refused_with_the_rule(change: dict[str, object | None], says: str) -> None:
    with pytest.raises(BadLora) as refused:
        _parsed(_with_fields(_written(_modules()), change))
    assert refused.value.message == f"the file is no LoRA in canonical form: {says}"


@pytest.mark.parametrize("name", ["vae.conv.down", "unet.conv.weight", "unet..down", "unet.a/b.down", "unet.down"])
def test_a_tensor_that_is_no_part_of_a_module_is_refused(name: str) -> None:
    module = _modules()[0]
    data = _written([module])
    renamed = data.replace(f'"unet.{_LINEAR}.down"'.encode(), f'"{name}"'.encode())
    size = 8 + int.from_bytes(data[:8], "little") + len(renamed) - len(data)
    with pytest.raises(BadLora, match=r"no part of a module|order"):
        _parsed((size - 8).to_bytes(8, "little") + renamed[8:])


def test_a_module_that_lacks_a_part_is_refused() -> None:
    piece = _written(_modules()[:1])
    lora = _parsed(piece)
    cut = piece[: len(piece) - (lora.modules[0].up.end - lora.modules[0].up.begin)]
    with pytest.raises(BadLora, match="lacks up"):
        _parsed(_with_fields(cut, {f"unet.{_LINEAR}.up": None}))


def test_tensors_out_of_their_order_are_refused() -> None:
    first, second = _modules()[0], _modules()[2]
    data = _written([first, second])
    size = 8 + int.from_bytes(data[:8], "little")
    swapped = data[8:size].replace(b"text_encoder.", b"unet.").replace(_TEXT.encode(), b"a")
    swapped = swapped.replace(f"unet.{_LINEAR}".encode(), b"text_encoder.b")
    with pytest.raises(BadLora, match="its tensors are not in their order"):
        _parsed(len(swapped).to_bytes(8, "little") + swapped + data[size:])


def test_what_would_not_be_read_is_not_written() -> None:
    high_rank = _module("unet", _LINEAR, 1.0, _weights("F16", 600, 8), _weights("F16", 6, 600))
    for modules, says in (([high_rank], "rank 600"), ([_modules()[0], _modules()[0]], "gap")):
        with pytest.raises(BadLora, match=says):
            _written(modules)


_DOWN, _UP = _weights("F32", 2, 8), _weights("F32", 6, 2)
_KINDS = {
    "LoHa": {"down": _DOWN, "up": _UP, "down2": _weights("F16", 3, 8), "up2": _weights("F16", 6, 3)},
    "LoKr": {"kron": _weights("F32", 2, 4), "full": _weights("BF16", 3, 2)},
    "LoKr with factors": {"kron": _weights("F32", 2, 2), "down": _weights("F16", 1, 4), "up": _weights("F16", 3, 1)},
    "difference": {"full": _weights("F16", 6, 8), "bias": _weights("F32", 6)},
    "DoRA": {"down": _DOWN, "up": _UP, "magnitude": _weights("F32", 6, 1)},
    "DoRA of LyCORIS": {"down": _DOWN, "up": _UP, "dora_scale": _weights("F32", 1, 8)},
}


@pytest.mark.parametrize("kind", _KINDS)
def test_what_has_no_low_rank_form_is_read_again(kind: str) -> None:
    parts = _KINDS[kind]
    data = _written([ModuleWeights(component="unet", path=_LINEAR, scale=0.5, parts=parts), _modules()[-1]])
    assert b'"bottega.lora/2"' in data
    lora = _parsed(data)
    (module,) = [module for module in lora.modules if module.component == "unet"]
    assert module.parts.keys() == {"scale", *parts}
    assert module.shape == (6, 8)
    assert module.expanded_bytes == 6 * 8 * 4
    section = data[lora.header_bytes + lora.text_bytes :]
    assert all(section[module.parts[part].begin : module.parts[part].end] == parts[part].data for part in parts)


_BIG = 70_000


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (
            {"down": _weights("F16", 1, _BIG), "up": _weights("F16", _BIG, 1)}
            | {"down2": _weights("F16", 1, _BIG), "up2": _weights("F16", _BIG, 1)},
            f"it would expand to {4 * _BIG**2} bytes; at most {16 << 30} are accepted",
        ),
        ({"down": _DOWN, "up": _UP, "down2": _DOWN}, f"unet.{_LINEAR} lacks up2"),
        ({"full": _DOWN, "down": _DOWN, "up": _UP}, f"unet.{_LINEAR} has parts that do not go together"),
        ({"magnitude": _weights("F32", 6, 1)}, f"unet.{_LINEAR} lacks down, up"),
        (
            _KINDS["DoRA"] | {"dora_scale": _weights("F32", 6, 1)},
            f"unet.{_LINEAR} has both magnitude and dora_scale",
        ),
        (
            _KINDS["LoHa"] | {"up2": _weights("F16", 7, 3)},
            f"unet.{_LINEAR} has two products of different shapes",
        ),
        (
            {"down": _DOWN, "up": _UP, "magnitude": _weights("F32", 1, 8)},
            f"magnitude of unet.{_LINEAR} has the shape [1, 8], which does not fit [6, 8]",
        ),
        (
            {"full": _weights("F16", 6, 8), "bias": _weights("F32", 5)},
            f"bias of unet.{_LINEAR} has the shape [5], not [6]",
        ),
        (
            {"full": _weights("F16", 6)},
            f"full of unet.{_LINEAR} has the shape [6]; [out, in] or a convolution's is accepted",
        ),
        ({"full": _weights("F16", 6, 0)}, f"full of unet.{_LINEAR} has the shape [6, 0], which has no elements"),
        ({"norm": _weights("F16", 6, 2)}, f"norm of unet.{_LINEAR} has the shape [6, 2]; [channels] is accepted"),
        (
            {"norm": _weights("F16", 6), "magnitude": _weights("F32", 6, 1)},
            f"unet.{_LINEAR} is a normalisation layer with norms of its weight",
        ),
        (
            {"vectors": _weights("F16", 6, 2)},
            f"unet.{_LINEAR} has vectors, which only token_embedding of a text encoder may have",
        ),
        (
            {"kron": _weights("F16", 2, 2, 2), "full": _DOWN},
            f"kron of unet.{_LINEAR} has the shape [2, 2, 2]; [rows, columns] is accepted",
        ),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(parts: dict[str, TensorData], says: str) -> None:
    with pytest.raises(BadLora) as refused:
        _written([ModuleWeights(component="unet", path=_LINEAR, scale=1.0, parts=parts)])
    assert refused.value.message == f"the file is no LoRA in canonical form: {says}"


def test_a_format_that_does_not_go_with_the_tensors_is_refused() -> None:
    plain = _written(_modules())
    with pytest.raises(BadLora, match="its format does not go with its tensors"):
        _parsed(plain.replace(b"bottega.lora/1", b"bottega.lora/2"))
