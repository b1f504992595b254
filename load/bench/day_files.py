"""Makes what both sides of a day draw with: the same every time, random but for the text towers."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from diffusers import ControlNetModel, UNet2DConditionModel

from bottega.miniature import WEIGHTS
from load.bench.bench_model import BenchShape, write_bench_model
from load.bench.day_world import World
from load.bench.lora_files import random_lora
from load.replay.pictures import Pictures

# SDXL's topology, and about its share of transformers in a step (.79, measured), as small as edits allow that shall
# gain by their masks as SDXL's do: with fewer channels, layers or tokens a masked block takes as long as a whole one. A
# guided step takes .5 to .7 s on two cores. With the embedded model's text towers, so that prompts can be alike.
SHAPE = BenchShape(
    block_out_channels=(64, 128, 256),
    transformer_layers=(2, 10),
    head_channels=32,
    norm_groups=16,
    sample_size=48,
    latent_scale=4,
    text_width=64,
)
RANK = 8
# Of a ControlNet's small network that brings an image down to the size of latents, by how many pixels these have.
_EMBEDDING_CHANNELS = {4: (16, 32, 64), 8: (16, 32, 64, 128)}
_TEXT_TOWERS = ("text_encoder", "text_encoder_2")


def build_world(folder: Path, *, controlnets: int, loras: int) -> World:
    """Writes all of it, the same every time. controlnets, loras: how many."""
    model = folder / "model"
    write_bench_model(model, SHAPE)
    # Prompts that say the same are near each other for towers that were trained, which a random model's are not.
    for tower in _TEXT_TOWERS:
        shutil.rmtree(model / tower)
        shutil.copytree(WEIGHTS / tower, model / tower)
    images, lora_files = folder / "images", folder / "loras"
    images.mkdir()
    lora_files.mkdir()
    side = SHAPE.sample_size * SHAPE.latent_scale
    return World(
        model=model,
        controlnets=_write_controlnets(model, folder / "controlnets", controlnets),
        loras={
            f"lora{number}": random_lora(model, lora_files, seed=number, rank=RANK).theirs for number in range(loras)
        },
        pictures=Pictures(width=side, height=side),
        images=images,
    )


def _write_controlnets(model: Path, folder: Path, count: int) -> dict[str, Path]:
    unet = UNet2DConditionModel.from_pretrained(model / "unet", use_safetensors=True)
    found = {}
    for number in range(count):
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(number)
            net = ControlNetModel.from_unet(
                unet, conditioning_embedding_out_channels=_EMBEDDING_CHANNELS[SHAPE.latent_scale]
            )
            for convolution in (*net.controlnet_down_blocks, net.controlnet_mid_block):
                torch.nn.init.normal_(convolution.weight, std=0.01)
        found[f"net{number}"] = folder / f"net{number}"
        net.half().save_pretrained(found[f"net{number}"], safe_serialization=True)
    return found
