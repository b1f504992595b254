"""Which variant of a model's weights is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.model_files.folder_check import check_model_folder
from bottega.model_files.weights import choose_variant
from tests.samples.wrong_folders import UNET, VAE, link_model

PLAIN, FP16, BOTH = frozenset({""}), frozenset({"fp16"}), frozenset({"", "fp16"})
HALVES = frozenset({"fp16", "bf16"})


@pytest.mark.parametrize(
    ("unet", "vae", "wanted", "chosen"),
    [
        (PLAIN, PLAIN, "", ""),
        (BOTH, BOTH, "", ""),
        (FP16, PLAIN, "", "fp16"),
        (FP16, BOTH, "", "fp16"),
        (HALVES, HALVES, "", "fp16"),
        (HALVES, PLAIN, "bf16", "bf16"),
        (BOTH, BOTH, "fp16", "fp16"),
        (frozenset({"ema"}), PLAIN, "", "ema"),
    ],
)
def test_a_variant_is_chosen(unet: frozenset[str], vae: frozenset[str], wanted: str, chosen: str) -> None:
    assert choose_variant({"unet": unet, "vae": vae}, wanted) == chosen


@pytest.mark.parametrize(
    ("unet", "vae", "wanted", "sentence"),
    [
        (
            FP16,
            frozenset({"bf16"}),
            "bf16",
            (
                "some parts have neither weights of the variant bf16 nor plain ones (unet of fp16; vae of bf16); "
                "download them, too"
            ),
        ),
        (PLAIN, PLAIN, "fp16", "no part has weights of the variant fp16; correct engine.model_variant"),
    ],
)
def test_a_variant_that_is_not_there_is_refused(
    unet: frozenset[str], vae: frozenset[str], wanted: str, sentence: str
) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole text is compared
        choose_variant({"unet": unet, "vae": vae}, wanted)
    assert str(refused.value) == sentence


def test_a_folder_with_a_unet_in_fp16_alone_can_be_served(tmp_path: Path) -> None:
    link_model(tmp_path)
    (tmp_path / UNET).rename(tmp_path / UNET.replace(".safetensors", ".fp16.safetensors"))
    report = check_model_folder(tmp_path)
    assert (report.problems, report.variant) == ((), "fp16")
    assert (report.parts["unet"].variant, report.parts["vae"].variant) == ("fp16", "")


def test_the_operator_chooses_among_complete_variants(tmp_path: Path) -> None:
    link_model(tmp_path)
    for file in (UNET, VAE):
        (tmp_path / file.replace(".safetensors", ".bf16.safetensors")).symlink_to((tmp_path / file).readlink())
    assert check_model_folder(tmp_path).variant == ""
    report = check_model_folder(tmp_path, "bf16")
    assert (report.problems, report.variant) == ((), "bf16")
    assert check_model_folder(tmp_path, "fp8").problems == (
        "no part has weights of the variant fp8, but of bf16; correct engine.model_variant",
    )
