"""kohya's names of SDXL's modules: every module has one, and Diffusers' own converter means the same by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.lora_conversion_utils import (
    _convert_non_diffusers_lora_to_diffusers,
    _maybe_map_sgm_blocks_to_diffusers,
)

from bottega.loras.importing.original_names import sgm_names
from bottega.miniature import WEIGHTS

# https://huggingface.co/stabilityai/stable-diffusion-xl-base-1.0/blob/main/unet/config.json
_SDXL = {
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "attention_head_dim": [5, 10, 20],
    "layers_per_block": 2,
    "cross_attention_dim": 2048,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "use_linear_projection": True,
}


def _miniature() -> dict[str, object]:
    config: dict[str, object] = json.loads((Path(WEIGHTS) / "unet" / "config.json").read_text())
    return config


# As SSD-1B: layers of one level differ.
_PRUNED = _SDXL | {
    "transformer_layers_per_block": [1, [2, 2], [4, 4]],
    "reverse_transformer_layers_per_block": [[4, 4, 10], [2, 1, 1], 1],
}
# The first version's file says nothing of depths.
_SD1 = {
    "block_out_channels": [320, 640, 1280, 1280],
    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
    "attention_head_dim": 8,
    "layers_per_block": 2,
    "cross_attention_dim": 768,
}


@pytest.mark.parametrize(
    "config", [_SDXL, _miniature(), _PRUNED, _SD1], ids=["SDXL", "miniature", "pruned", "Stable Diffusion 1"]
)
def test_every_module_with_weights_has_a_name(config: dict[str, object]) -> None:
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
    paths = {path for path, module in unet.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)}
    named = sgm_names(config)
    assert paths <= set(named.values())
    assert len(set(named.values())) == len(named)


def test_the_names_mean_what_diffusers_converter_takes_them_for() -> None:
    class Config:
        layers_per_block = 2

    names = {name: path for name, path in sgm_names(_SDXL).items() if "norm" not in path}
    # The converter leaves these where they are, or makes names of them that no module has.
    unknown = ("time_embed", "label_emb")
    asked = {name: path for name, path in names.items() if not name.startswith(unknown)}
    file = {}
    for name in asked:
        file[f"lora_unet_{name}.lora_down.weight"] = torch.zeros(1, 1)
        file[f"lora_unet_{name}.lora_up.weight"] = torch.zeros(1, 1)
    with torch.no_grad():
        mapped = _maybe_map_sgm_blocks_to_diffusers(dict(file), Config)
        converted, _ = _convert_non_diffusers_lora_to_diffusers(mapped)
    theirs = {_path(key) for key in converted if ".down." in key or "lora_A" in key}
    assert theirs == set(asked.values())


def _path(key: str) -> str:
    path = key.removeprefix("unet.").replace(".processor.", ".")
    for end in ("_lora.down.weight", ".lora.down.weight", ".down.weight"):
        path = path.removesuffix(end)
    return f"{path}.0" if path.endswith("to_out") else path
