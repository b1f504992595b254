"""Draws with ControlNets through a running suite: `python -m load.control_sheet FOLDER`. The README shows the sheet.

Writes FOLDER/edges.png and FOLDER/layout.png, the control images, and FOLDER/control_sheet.png: the picture of a prompt
alone, then each control image beside the picture of the same prompt and seed with it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path

import PIL.Image

from bottega.client import AsyncClient, ControlNet
from bottega.miniature.scenes import DRAWN, Placed, SceneLayout, Thing
from load.contact_sheet import compose

PROMPT = "a big red star on the left on a blue background"
# Picked by eye among six.
SEED = 2
SCALE = 0.8
# Where the control images have the star, by ControlNet: centre and radius, in sides of the picture.
STARS = {"edges": (0.71, 0.5, 0.24), "layout": (0.5, 0.72, 0.24)}


def control_images() -> dict[str, PIL.Image.Image]:
    """By ControlNet: a star where the prompt does not say that it is."""
    star = Thing(shape="star", colour="red")
    images = {}
    for name, (x, y, radius) in STARS.items():
        layout = SceneLayout(placed=(Placed(thing=star, x=x, y=y, radius=radius),), ground="blue")
        images[name] = DRAWN[name](layout)
    return images


async def draw(images: Mapping[str, PIL.Image.Image]) -> list[PIL.Image.Image]:
    """The prompt alone, then with each of the images, all with one seed."""
    nets = [[], *([ControlNet(name, image, controlnet_conditioning_scale=SCALE)] for name, image in images.items())]
    async with AsyncClient() as client:
        pictures = await asyncio.gather(
            *(client.generate(PROMPT, seed=SEED, controlnets=controlled) for controlled in nets)
        )
    return [picture.pil().convert("RGB") for picture in pictures]


def main() -> None:
    """Draws, and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write to")
    options = parser.parse_args()
    images = control_images()
    alone, *controlled = asyncio.run(draw(images))
    captions, tiles = [PROMPT], [alone]
    for (name, image), picture in zip(images.items(), controlled, strict=True):
        image.save(options.folder / f"{name}.png", optimize=True)
        captions += [f"--control {name}= {name}.png:{SCALE:g}", "the same prompt and seed, with it"]
        tiles += [image, picture]
    sheet = compose(captions, tiles).quantize(128, dither=PIL.Image.Dither.NONE)
    sheet.save(options.folder / "control_sheet.png", optimize=True)
    print(options.folder / "control_sheet.png")


if __name__ == "__main__":
    main()
