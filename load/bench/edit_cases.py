"""Templates of embedded models, edits of them by which one thing becomes another, and how stock Diffusers draws these.

A template is a rendered scene and the box of the thing that is edited. What an edit wants is held out from training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageDraw
import torch
from diffusers import StableDiffusion3InpaintPipeline, StableDiffusionXLInpaintPipeline

from bottega.miniature.scenes import (
    COLOURS,
    SHAPES,
    SIDE,
    Placed,
    Scene,
    Thing,
    caption,
    random_layout,
    random_scene,
    render,
)
from bottega.model_files.family_names import TRANSFORMER
from load.bench.miniature import guidance_of
from load.bench.stock import STRENGTH, stock_pipeline
from tests.support.composed_noise import Draws, composed_noise, draws_of

# A thing is drawn as it is told where the mask leaves it room: of single things the oracle read .78 right with half of
# this margin, .88 with this one, .90 with half as much again (40, 60 and 60 held-out scenes; .91 without a mask).
MARGIN = 0.08
"""Margin around a thing, in sides of the picture."""

# Of the transformers that Diffusers edits with.
_SD3_CHANNELS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Template:
    """A picture to be edited."""

    picture: PIL.Image.Image
    mask: PIL.Image.Image
    """White where the picture is redrawn."""
    wanted: tuple[Scene, ...]
    """Scenes that edits of it may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EditCase:
    """An edit of a template."""

    template: Template
    wanted: Scene
    seed: int
    again: bool = False
    """Whether the edit before it had the same prompt."""

    @property
    def prompt(self) -> str:
        """The prompt, of all of the picture, not of the masked part alone."""
        return caption(self.wanted)


class StockEdits:
    """Stock Diffusers in this process.

    Args:
        model: Folder of the model.
    """

    def __init__(self, model: Path) -> None:
        self._guidance = guidance_of(model)
        if not (model / TRANSFORMER).is_dir():
            self._pipeline = stock_pipeline(model, StableDiffusionXLInpaintPipeline)
            return
        self._pipeline = stock_pipeline(model, StableDiffusion3InpaintPipeline)
        # It refuses transformers with other numbers of channels, which it reads here alone.
        self._pipeline.transformer.register_to_config(in_channels=_SD3_CHANNELS)

    def draws(self, case: EditCase) -> Draws:
        """Return what an edit draws from its generator."""
        width, height = case.template.picture.size
        return draws_of(self._pipeline, case.template.picture, seed=case.seed, width=width, height=height)

    def draw(self, cases: Sequence[EditCase], steps: int, recorded: Draws | None = None) -> list[PIL.Image.Image]:
        """Draw edits of one template together, with the recorded noise outside their masks, or with their own."""
        masks = [case.template.mask for case in cases]
        composed: Any = nullcontext()
        if recorded is not None:
            composed = composed_noise(self._pipeline, Draws.stack([recorded] * len(cases)), masks)
        width, height = cases[0].template.picture.size
        with composed:
            latents = self._pipeline(
                [case.prompt for case in cases],
                image=[case.template.picture for case in cases],
                mask_image=masks,
                num_inference_steps=steps,
                guidance_scale=self._guidance,
                strength=STRENGTH,
                width=width,
                height=height,
                generator=[torch.Generator().manual_seed(case.seed) for case in cases],
                output_type="latent",
            ).images
        return self._decoded(latents)

    @torch.no_grad()
    def _decoded(self, latents: torch.Tensor) -> list[PIL.Image.Image]:
        """Return pictures. Diffusers' inpainting with Stable Diffusion 3 forgets the shift of its latents."""
        vae = self._pipeline.vae
        pixels = vae.decode(latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)).sample
        pictures: list[PIL.Image.Image] = self._pipeline.image_processor.postprocess(pixels)
        return pictures


def templates(count: int, prompts: int, *, seed: int = 0) -> list[Template]:
    """Return templates for edits with so many prompts, every second one with two things; the same ones every time."""
    rng = random.Random(seed)
    return [_template(rng, prompts, things=1 + number % 2) for number in range(count)]


def edits_of(template: Template, seed: int) -> Iterator[EditCase]:
    """Yield edits with seeds from `seed` on, as of people who try each prompt twice."""
    for number in range(2 * len(template.wanted)):
        wanted = template.wanted[number // 2]
        yield EditCase(template=template, wanted=wanted, seed=seed + number, again=bool(number % 2))


def box(placed: Placed, margin: float = MARGIN, side: int = SIDE) -> PIL.Image.Image:
    """Return a mask of the square around a thing, white on black, with a margin in sides of the picture."""
    mask = PIL.Image.new("L", (side, side), 0)
    reach = placed.radius + margin
    corners = (placed.x - reach, placed.y - reach, placed.x + reach, placed.y + reach)
    PIL.ImageDraw.Draw(mask).rectangle([round(corner * side) for corner in corners], fill=255)
    return mask


def _template(rng: random.Random, prompts: int, *, things: int) -> Template:
    while True:
        scene = random_scene(rng, things=things)
        at = rng.randrange(things)
        wanted = [other for other in _others(scene, at) if other.held_out]
        if len(wanted) >= prompts:
            layout = random_layout(scene, rng)
            chosen = tuple(rng.sample(wanted, prompts))
            return Template(picture=render(layout), mask=box(layout.placed[at]), wanted=chosen)


def _others(scene: Scene, at: int) -> Iterator[Scene]:
    """Yield the scenes that differ in the thing at place `at` alone."""
    for thing in (Thing(shape=shape, colour=colour) for shape in SHAPES for colour in COLOURS):
        if thing.colour != scene.ground and thing not in scene.things:
            yield replace(scene, things=(*scene.things[:at], thing, *scene.things[at + 1 :]))
