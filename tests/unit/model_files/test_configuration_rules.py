"""Published configurations are served; what the engine does not implement is refused by name, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bottega.model_files.configuration_rules import check_configurations
from tests.samples import published_configs as published

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
            {"time_cond_proj_dim": 2},
            "unet/config.json: time_cond_proj_dim must be null or a whole number from 4 to 8192, not 2",
        ),
        (
            "unet",
            {"in_channels": 8},
            (
                "unet/config.json: in_channels must be 4, as out_channels is, or 9 for inpainting, with a mask and a "
                "masked image beside the latent, not 8"
            ),
        ),
        (
            "unet",
            {"sample_size": [128, 96]},
            (
                "unet/config.json: sample_size must be a whole number from 1 to 16384, not [128, 96]: it gives "
                "the default size of pictures"
            ),
        ),
        (
            "unet",
            {"num_attention_heads": [5, 10]},
            "unet/config.json: num_attention_heads must be null, not [5, 10]",
        ),
        (
            "unet",
            {"layers_per_block": [2, 2]},
            "unet/config.json: layers_per_block must have 3 entries, as block_out_channels has, not 2",
        ),
        (
            "unet",
            {"transformer_layers_per_block": [1, [2, 2], 10]},
            (
                "unet/config.json: reverse_transformer_layers_per_block must be there with "
                "transformer_layers_per_block [1, [2, 2], 10]"
            ),
        ),
        (
            "unet",
            SSD_1B | {"reverse_transformer_layers_per_block": [[4, 4], 1, 1]},
            "unet/config.json: reverse_transformer_layers_per_block[0] must have 3 entries, one for each layer, not 2",
        ),
        (
            "unet",
            {"cross_attention_dim": 768},
            (
                "unet/config.json: cross_attention_dim must be 2048, hidden_size of text_encoder and of text_encoder_2 "
                "together, not 768"
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
            "vae",
            {"latent_channels": 16},
            "unet/config.json: in_channels must be 16, as latent_channels of the VAE is, not 4",
        ),
        (
            "vae",
            {"latents_mean": [0.0] * 16},
            "vae/config.json: latents_mean must be null or have 4 entries, one for each of as many latent channels",
        ),
        (
            "tokenizer_2",
            {"model_max_length": 512},
            "tokenizer_2/tokenizer_config.json: model_max_length must be 77, as the first tokenizer's is, not 512",
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
        (
            "index",
            {"requires_aesthetics_score": True},
            (
                "model_index.json: requires_aesthetics_score must be false or null, not true: models that take an "
                "aesthetic score, as SDXL's refiner does, are not served"
            ),
        ),
    ],
)
def test_what_is_not_served_is_refused_in_one_sentence(part: str, changes: dict[str, Any], sentence: str) -> None:
    assert problems(part, changes)[0] == sentence
