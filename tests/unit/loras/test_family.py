"""A LoRA of another family is refused with both names, and files of every naming fit each family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bottega.addons.loras.wire.lora_files import card_base_model
from bottega.errors import BadLora
from bottega.loras.importing.base import read_base
from bottega.loras.importing.converting import ConvertedLora, convert, sources
from bottega.loras.importing.naming import base_family, family_by_metadata
from bottega.loras.importing.process import _answer
from bottega.miniature import WEIGHTS
from bottega.v1.lora_import_pb2 import LoraImportCall, LoraImportSource
from tests.samples.lora_files import Part, kohya, save

_Q = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"


def _convert(tensors: Mapping[str, Tensor], folder: Path, model: Path, metadata: Mapping[str, str]) -> ConvertedLora:
    path = save(tensors, folder / "a.safetensors", metadata)
    return convert(sources(path), base=read_base(model), family=base_family(model))


def _lora(module: str, inputs: int, outputs: int = 96) -> dict[str, Tensor]:
    return {f"{module}.lora_down.weight": torch.ones(2, inputs), f"{module}.lora_up.weight": torch.ones(outputs, 2)}


_K = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k"
_ELSEWHERE = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k"
_UNMATCHED = "nothing in the file matches the base model; it has"


def test_a_model_card_names_the_family_where_the_file_does_not(tmp_path: Path) -> None:
    """The process of an import reads the card beside a file of the store's machine; uploads bring what theirs names."""
    path = save(_lora("lora_unet_somewhere", 7), tmp_path / "a.safetensors")
    (tmp_path / "README.md").write_text(
        "---\ntags:\n- lora\nbase_model:\n- runwayml/stable-diffusion-v1-5\n---\n# Ink\n"
    )
    folder = LoraImportCall(
        base=str(WEIGHTS), output=str(tmp_path / "out"), sources=[LoraImportSource(path=str(tmp_path))]
    )
    says = "the LoRA is for Stable Diffusion 1, and the base model is SDXL: nothing in the file matches"
    assert _answer(folder).refusal.startswith(says)
    call = LoraImportCall(base=str(WEIGHTS), output=str(tmp_path / "out"), sources=[LoraImportSource(path=str(path))])
    assert _answer(call).refusal.startswith("nothing in the file matches"), "the card may be of something else"
    with (tmp_path / "README.md").open("a") as card:
        card.write("Download `a.safetensors`.\n")
    assert _answer(call).refusal.startswith(says)
    call.base_model = "stabilityai/stable-diffusion-2-1"
    assert _answer(call).refusal.startswith("the LoRA is for Stable Diffusion 2, ")
    # The file's own word counts for more.
    save(_lora("lora_unet_somewhere", 7), path, {"ss_base_model_version": "sdxl_base_v1-0"})
    assert _answer(call).refusal.startswith("nothing in the file matches")


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (b"---\nbase_model: a/b\n---\n", "a/b"),
        (b"---\r\nbase_model:\r\n  - 'a/b'\r\n---\r\n", "a/b"),
        (b'---\nlicense: mit\nbase_model: ["a/b"]\n---\nbase_model: c/d', "a/b"),
        (b"\xef\xbb\xbf---\nbase_model: a/b\n---\n", "a/b"),
        (b"---\nbase_model: # note\n  - a/b # another\n---\n", "a/b"),
        (b"# Ink\nbase_model: a/b\n", ""),
        (b"---\nbase_model:\n---\n", ""),
        (b"\xff\x00" * 100_000, ""),
    ],
)
def test_the_front_matter_of_a_card_names_the_base_model(card: bytes, expected: str) -> None:
    assert card_base_model(card) == expected


def test_a_card_counts_for_a_single_file_only_if_it_names_it() -> None:
    card = b"---\nbase_model: a/b\n---\nLoad ink.safetensors."
    files = ("ink.safetensors", "k.safetensors", "ink", "ink.safe")
    assert [card_base_model(card, file=file) for file in files] == ["a/b", "", "", ""]


@pytest.mark.parametrize(
    ("tensors", "metadata", "says"),
    [
        (
            _lora(_K, 768),
            {},
            (
                "the LoRA is for Stable Diffusion 1, and the base model is SDXL: "
                "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k "
                "has the shape [96, 128] in the base model; down, [2, 768], and up, [96, 2], do not fit it"
            ),
        ),
        (
            _lora(_ELSEWHERE, 1024),
            # Shapes count for more than metadata.
            {"ss_base_model_version": "sd_v1"},
            (
                "the LoRA is for Stable Diffusion 2, and the base model is SDXL: "
                f"{_UNMATCHED} {_ELSEWHERE}.lora_down.weight, {_ELSEWHERE}.lora_up.weight; "
                "its metadata says that it was made for sd_v1"
            ),
        ),
        (
            _lora("lora_unet_somewhere", 7),
            {"base_model": "runwayml/stable-diffusion-v1-5"},
            (
                "the LoRA is for Stable Diffusion 1, and the base model is SDXL: "
                f"{_UNMATCHED} lora_unet_somewhere.lora_down.weight, lora_unet_somewhere.lora_up.weight"
            ),
        ),
        (
            _lora("lora_unet_double_blocks_0_img_attn_qkv", 3072),
            {},
            (
                f"the LoRA is for Flux.1, and the base model is SDXL: {_UNMATCHED} "
                "lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight, "
                "lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"
            ),
        ),
        (
            _lora("diffusion_model.layers.0.attention.qkv", 3840),
            {},
            (
                f"the LoRA is for Z-Image, and the base model is SDXL: {_UNMATCHED} "
                "diffusion_model.layers.0.attention.qkv.lora_down.weight, "
                "diffusion_model.layers.0.attention.qkv.lora_up.weight"
            ),
        ),
        (
            _lora("lora_unet_somewhere", 7),
            {"base_model": "Tongyi-MAI/Z-Image-Turbo"},
            (
                "the LoRA is for Z-Image, and the base model is SDXL: "
                f"{_UNMATCHED} lora_unet_somewhere.lora_down.weight, lora_unet_somewhere.lora_up.weight"
            ),
        ),
    ],
    ids=["shapes", "shapes over metadata", "model card", "names", "other names", "model card of a transformer"],
)
def test_a_lora_of_another_family_is_refused_with_both_names(
    tmp_path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], says: str
) -> None:
    with pytest.raises(BadLora) as refused:
        _convert(tensors, tmp_path, WEIGHTS, metadata)
    assert refused.value.message == says


def test_where_metadata_contradict_the_layers_the_layers_count_and_the_store_says_so(tmp_path: Path) -> None:
    tensors, _ = kohya({("unet", _Q): Part(rank=2)})
    converted = _convert(tensors, tmp_path, WEIGHTS, {"modelspec.architecture": "stable-diffusion-v1/lora"})
    assert converted.note == (
        "its metadata says that it was made for Stable Diffusion 1 (stable-diffusion-v1/lora), but its layers fit "
        "SDXL: the layers count"
    )
    assert not _convert(tensors, tmp_path, WEIGHTS, {"ss_base_model_version": "sdxl_base_v1-0"}).note


@pytest.mark.parametrize(
    ("metadata", "family"),
    [
        ({"ss_base_model_version": "sd_v2_v"}, "Stable Diffusion 2"),
        ({"ss_base_model_version": "sdxl_base_v1-0"}, "SDXL"),
        ({"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"}, "SDXL"),
        ({"modelspec.architecture": "flux-1-dev/lora"}, "Flux.1"),
        ({"base_model": "stabilityai/stable-diffusion-3-medium"}, "Stable Diffusion 3"),
        ({"base_model": "SD 1.5"}, "Stable Diffusion 1"),
        ({"base_model": "someone/something"}, ""),
    ],
)
def test_metadata_name_a_family(metadata: dict[str, str], family: str) -> None:
    assert family_by_metadata(metadata)[0] == family
