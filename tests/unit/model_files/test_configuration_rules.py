"""Published configurations are served; what the engine does not implement is refused by name, in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from bottega.model_files.configuration_rules import check_configurations
from bottega.model_files.family_names import SD15, SD21
from tests.samples import published_configs as published
from tests.samples.stable_diffusion_configs import sd15, sd21

Configs = dict[str, dict[str, Any]]

# What other repositories than SDXL's have in their UNets: models of fewer blocks, distilled from SDXL.
SSD_1B = {
    "reverse_transformer_layers_per_block": [[4, 4, 10], [2, 1, 1], 1],
    "transformer_layers_per_block": [0, [2, 2], [4, 4]],
}
VEGA = {
    "mid_block_type": None,
    "reverse_transformer_layers_per_block": [[2, 2, 2], [1, 1, 1], 1],
    "transformer_layers_per_block": [1, [1, 1], [2, 2]],
}


def sdxl() -> Configs:
    """Return every configuration of SDXL's published folder, by part."""
    configs = {name: getattr(published, name)() for name in ("unet", "vae", "text_encoder", "text_encoder_2")}
    for name, pad_token in (("tokenizer", published.END), ("tokenizer_2", "!")):
        configs[name] = published.tokenizer(pad_token)["tokenizer_config.json"]
    return configs | {"scheduler": published.scheduler()}


def problems(part: str = "", changes: Mapping[str, Any] | None = None) -> list[str]:
    """Return what is refused of SDXL's folder with changes in one part's configuration."""
    index, configs = published.model_index(), sdxl()
    {**configs, "index": index}.get(part, {}).update(changes or {})
    return check_configurations(index, configs)


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("", {}),
        ("unet", SSD_1B),
        ("unet", VEGA),
        ("vae", {"force_upcast": False, "latents_mean": None, "latents_std": None, "shift_factor": None}),
        ("text_encoder", {"eos_token_id": 49407, "bos_token_id": 49406, "dtype": "float16"}),
        ("index", {"image_encoder": [None, None], "feature_extractor": [None, None], "safety_checker": None}),
        ("index", {"tokenizer": ["transformers", "CLIPTokenizerFast"], "force_zeros_for_empty_prompt": False}),
    ],
    ids=["SDXL", "SSD-1B", "Segmind Vega", "VAE without upcast", "new token ids", "null parts", "fast tokenizer"],
)
def test_what_is_published_for_sdxl_is_served(part: str, changes: dict[str, Any]) -> None:
    assert problems(part, changes) == []


@pytest.mark.parametrize(
    ("part", "changes", "sentence"),
    [
        (
            "unet",
            {"transformer_layers_per_block": [1, [2, 2], 10]},
            (
                "unet/config.json: reverse_transformer_layers_per_block must be there with "
                "transformer_layers_per_block [1, [2, 2], 10]"
            ),
        ),
        (
            "text_encoder_2",
            {"projection_dim": 768},
            (
                "unet/config.json: projection_class_embeddings_input_dim must be 2304, projection_dim of "
                "text_encoder_2 and 6 times addition_time_embed_dim, not 2816"
            ),
        ),
        (
            "text_encoder_2",
            {"max_position_embeddings": 64},
            (
                "tokenizer_2/tokenizer_config.json: model_max_length must be at most 64, max_position_embeddings of "
                "text_encoder_2, not 77"
            ),
        ),
        (
            "index",
            {"vae": ["diffusers", "AutoencoderTiny"]},
            (
                'model_index.json: vae must be ["diffusers", "AutoencoderKL"], not ["diffusers", "AutoencoderTiny"]: '
                "no other class is served"
            ),
        ),
    ],
)
def test_what_is_not_served_is_refused_in_one_sentence(part: str, changes: dict[str, Any], sentence: str) -> None:
    assert problems(part, changes)[0] == sentence


@pytest.mark.parametrize(
    ("family", "published_as", "changes"),
    [
        (SD15, sd15, {}),
        (SD15, sd15, {"in_channels": 9}),
        (SD15, sd15, {"time_cond_proj_dim": 256}),
        (SD21, sd21, {}),
        (SD21, sd21, {"in_channels": 9}),
    ],
    ids=["1.5", "1.5 for inpainting", "1.5 of LCM", "2.1", "2 for inpainting"],
)
def test_what_is_published_for_stable_diffusion_is_served(
    family: str, published_as: Callable[[], Mapping[str, dict[str, Any]]], changes: Mapping[str, Any]
) -> None:
    configs = dict(published_as())
    index = configs.pop("index")
    configs["unet"] |= changes
    assert check_configurations(index, configs, family=family) == []
