"""The stages of the training by name: their order and steps, the networks that they change, how each is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bottega.miniature.scenes import DRAWN
from load.miniature.training import text, unet
from load.miniature.training.controlnet import ControlNetRecipe, ControlNetStage, controlnet_folder
from load.miniature.training.corpus import Corpus, draw_style, encode, with_styles
from load.miniature.training.descent import DescentStage
from load.miniature.training.dit import DitControlNetStage, DitRecipe, DitStage
from load.miniature.training.lora import LORAS, LoraStage, lora_folder
from load.miniature.training.parts import Parts
from load.miniature.training.text import TextRecipe, TextStage
from load.miniature.training.unet import UnetRecipe, UnetStage
from load.miniature.training.vae import VaeRecipe, VaeStage

# The stages of a whole training in their order, with their steps: as many in all as the embedded weights had. The VAE
# is first, because the UNet learns its latents; vision follows the text encoders, which the UNet's stage trains on, and
# the ControlNets and the LoRAs follow the UNet.
RECIPE = {"vae": 4500, "text": 500, "unet": 3800, "vision": 600, "edges": 700, "layout": 700}
RECIPE |= dict.fromkeys(("striped", "checked", "dusk"), 400)
# Those of the transformer, which is of another model with a folder of its own.
DIT_RECIPE = {"dit": 12_000, "dit-layout": 1000, "dit-striped": 500}
# A decoder alone is for later: it sharpens, and all that was trained on the latents stays as it is.
STEPS = {**RECIPE, "decoder": 1500, **DIT_RECIPE}
_CONTROLNETS = {
    recipe.name: recipe
    for recipe in (
        *(ControlNetRecipe(name=kind, kind=kind) for kind in DRAWN),
        ControlNetRecipe(name="dit-layout", kind="layout"),
    )
}
# The networks that each stage changes.
CHANGED = {
    "vae": ("vae",),
    "text": text.TRAINED,
    "unet": unet.TRAINED,
    "vision": ("clip_vision",),
    "decoder": ("vae",),
    "dit": ("transformer",),
    **{name: (controlnet_folder(name),) for name in _CONTROLNETS},
    **{name: (lora_folder(name),) for name in LORAS},
}
# Those that it may begin with random weights; a decoder alone would learn the latents of an encoder without meaning,
# and a ControlNet begins as the UNet's encoder, a LoRA as nothing.
FRESH = {"vae": ("vae",), "text": text.TRAINED, "unet": ("unet",), "vision": ("clip_vision",)}
# A style takes few pictures to learn.
_STYLE_PICTURES = 2048


def build_stage(
    name: str, parts: Parts, corpus: Corpus, latents_folder: Path, *, rows: int = 0, compiled: bool = False
) -> DescentStage:
    """Build a stage.

    Args:
        name: The stage's.
        parts: The networks.
        corpus: The pictures.
        latents_folder: For the corpus's latents.
        rows: Rows of a batch; 0 is the stage's own choice.
        compiled: Whether the UNet or the transformer is compiled.
    """
    if name in {"text", "vision"}:
        words = TextRecipe(vision_only=name == "vision")
        return TextStage(parts, corpus, replace(words, rows=rows or words.rows))
    if name == "vae":
        return VaeStage(parts, with_styles(corpus), None, VaeRecipe(rows=rows or VaeRecipe().rows))
    if name in LORAS:
        styled = draw_style(corpus, LORAS[name].style, _STYLE_PICTURES)
        encoded = encode(styled, parts, latents_folder / name)
        return LoraStage(parts, styled, encoded, replace(LORAS[name], rows=rows or LORAS[name].rows))
    if name == "decoder":
        mixed = with_styles(corpus)
        return VaeStage(parts, mixed, encode(mixed, parts, latents_folder), VaeRecipe(rows=rows or VaeRecipe().rows))
    latents = encode(corpus, parts, latents_folder)
    if name == "dit":
        return DitStage(parts, corpus, latents, DitRecipe(rows=rows or DitRecipe().rows, compiled=compiled))
    if name in _CONTROLNETS:
        control, made = _CONTROLNETS[name], DitControlNetStage if name in DIT_RECIPE else ControlNetStage
        return made(parts, corpus, latents, replace(control, rows=rows or control.rows))
    return UnetStage(parts, corpus, latents, UnetRecipe(rows=rows or UnetRecipe().rows, compiled=compiled))
