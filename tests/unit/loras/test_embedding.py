"""Files of textual inversion in every layout become canonical files, and hostile ones are refused by name."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bottega.addons.loras.wire import canonical
from bottega.addons.loras.wire.canonical import CanonicalLora
from bottega.addons.loras.wire.module_parts import TOKEN_EMBEDDING, VECTORS
from bottega.errors import BadLora
from bottega.loras.importing.base import read_base
from bottega.loras.importing.converting import ConvertedLora, sources
from bottega.loras.importing.embedding import convert_embedding
from bottega.loras.importing.naming import base_family
from bottega.safetensors_header import LENGTH_BYTES, header_bytes
from tests.samples.family_models import family_model
from tests.samples.lora_files import canonical_layers, save

_THREE = torch.arange(96.0).view(3, 32)
_TWO = {"clip_l": _THREE, "clip_g": _THREE[:2] + 1}


def _convert(
    tensors: Mapping[str, Tensor], folder: Path, family: str = "SD 1", *, token: str = "", name: str = "Cat@shop"
) -> ConvertedLora:
    path, model = save(tensors, folder / "a.safetensors"), family_model(family)
    converted = convert_embedding(
        sources(path), base=read_base(model), folder=model, family=base_family(model), token=token, name=name
    )
    assert converted is not None
    return converted


def _written(converted: ConvertedLora) -> bytes:
    file = io.BytesIO()
    canonical.write(file, converted.modules, token=converted.token)
    return file.getvalue()


def _read(data: bytes) -> CanonicalLora:
    return canonical.parse(data[: header_bytes(data[:LENGTH_BYTES])], file_bytes=len(data))


@pytest.mark.parametrize(
    ("tensors", "family", "token", "expected"),
    [
        ({"<Toy>": _THREE}, "SD 1", "", "<toy>"),
        ({"<toy>": _THREE[0]}, "SD 2", "", "<toy>"),
        ({"<toy>": _THREE.half()}, "SD 1", "<My-Cat>", "<my-cat>"),
        ({"emb_params": _THREE}, "SD 1", "", "cat"),
        ({"string_to_param.*": _THREE}, "SD 2", "", "cat"),
        (_TWO, "SDXL", "", "cat"),
        ({"text_encoders_0": _THREE, "text_encoders_1": _THREE[:2] + 1}, "SDXL", "<s0>", "<s0>"),
    ],
)
def test_each_layout_keeps_its_vectors_and_gets_a_token(
    tmp_path: Path, tensors: dict[str, Tensor], family: str, token: str, expected: str
) -> None:
    data = _written(_convert(tensors, tmp_path, family, token=token))
    lora = _read(data)
    assert (lora.token, lora.size, lora.rank) == (expected, max(len(rows.view(-1, 32)) for rows in tensors.values()), 0)
    layers = canonical_layers(data)
    for component, rows in zip(("text_encoder", "text_encoder_2"), tensors.values(), strict=False):
        kept = layers[component][TOKEN_EMBEDDING].parts[VECTORS]  # type: ignore[union-attr]
        assert torch.equal(kept, rows.view(-1, 32))
    assert _written(_convert(tensors, tmp_path, family, token="<other>")) != data, "the token is part of the digest"


_RULE = (
    "must have 1 to 200 printable characters, without spaces, capitals and any of ( ) , : [ \\ ]: give another one as "
    "its trigger word"
)
_KNOWN = "is in the vocabulary of the base model: give another one as its trigger word"
_COUNT = "an embedding has 1 to 75 vectors"


@pytest.mark.parametrize(
    ("tensors", "token", "says"),
    [
        (
            {"emb_params": torch.zeros(2, 1024)},
            "",
            (
                "the embedding is for Stable Diffusion 2, and the base model is Stable Diffusion 1: it has vectors of "
                "1024 values for text_encoder, and the model reads 32"
            ),
        ),
        (
            _TWO,
            "",
            (
                "the embedding is for SDXL, and the base model is Stable Diffusion 1: it has vectors for text_encoder, "
                "text_encoder_2, and the model reads text_encoder"
            ),
        ),
        ({"<toy>": torch.full((1, 32), torch.nan)}, "", "<toy> has elements that are not finite (NaN or infinity)"),
        (
            {"<toy>": torch.full((32,), -7e4, dtype=torch.bfloat16)},
            "",
            "<toy> has elements up to 7.01e+04; float16 holds at most 65504",
        ),
        (
            {"<toy>": torch.zeros(1, 32, dtype=torch.int64)},
            "",
            "<toy> has elements of I64; BF16, F16, F32 are supported",
        ),
        *(
            ({"<toy>": torch.zeros(shape)}, "", f"<toy> has the shape {list(shape)}; {_COUNT}")
            for shape in ((76, 32), (0, 32), (1, 1, 32))
        ),
        ({"my toy": _THREE}, "", f"the token 'my toy' {_RULE}"),
        ({"emb_params": _THREE}, "a(b", f"the token 'a(b' {_RULE}"),
        ({"emb_params": _THREE}, "t" * 201, f"the token '{'t' * 80}...' {_RULE}"),
        ({"emb_params": _THREE}, "star</w>", f"the token star</w> {_KNOWN}"),
        ({"emb_params": _THREE}, "<|EndOfText|>", f"the token <|endoftext|> {_KNOWN}"),
    ],
)
def test_what_cannot_be_an_embedding_of_the_model_is_refused(
    tmp_path: Path, tensors: dict[str, Tensor], token: str, says: str
) -> None:
    with pytest.raises(BadLora) as refused:
        _convert(tensors, tmp_path, "SD 1", token=token)
    assert refused.value.message == says


def test_a_canonical_file_that_lies_about_its_token_or_vectors_is_refused(tmp_path: Path) -> None:
    data = _written(_convert({"<toy>": _THREE}, tmp_path))
    for old, new in (
        (b'"<toy>"', b'"<tOy>"'),
        (b'"token"', b'"taken"'),
        (b"bottega.lora/3", b"bottega.lora/2"),
        (b"token_embedding.vectors", b"token_embeddinG.vectors"),
        (b"text_encoder.token_embedding", b"unet.token_embedding12345678"),
        (b"[3,32]", b"[96]  "),
    ):
        assert old in data
        with pytest.raises(BadLora):
            _read(data.replace(old, new))
