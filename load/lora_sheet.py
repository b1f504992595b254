"""Draws the same scenes plain, with each LoRA and with two at once, through a running suite that has them.

`python -m load.lora_sheet FILE`, beside `bottega up`. The README shows the sheet.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from bottega.client import AsyncClient, Picture
from load.contact_sheet import GAP, SIDE, Subject

# What each row uses, by LoRA.
ROWS: dict[str, Mapping[str, float]] = {
    "no LoRA": {},
    "striped": {"striped": 1.0},
    "checked": {"checked": 1.0},
    "dusk": {"dusk": 1.0},
    "striped:0.8\ndusk": {"striped": 0.8, "dusk": 1.0},
}
# Seeds with which the pictures without a LoRA are right.
SUBJECTS = (
    Subject(prompt="a big white triangle on the left on a blue background", seed=1),
    Subject(prompt="a white heart left of a yellow circle on a purple background", seed=5),
    Subject(prompt="a black diamond above a red square on a yellow background", seed=3),
    Subject(prompt="a red cross left of a white ring on a black background", seed=96),
    Subject(prompt="a blue star left of a pink triangle on a red background", seed=98),
)
_NAME_WIDTH = 84


async def draw(scales: Mapping[str, float]) -> list[PIL.Image.Image]:
    """A picture of each subject with these LoRAs, all at once."""
    async with AsyncClient() as client:
        pictures: list[Picture] = await asyncio.gather(
            *(client.generate(subject.prompt, seed=subject.seed, lora=list(scales.items())) for subject in SUBJECTS)
        )
    return [picture.pil().convert("RGB") for picture in pictures]


def compose(names: list[str], pictures: list[list[PIL.Image.Image]]) -> PIL.Image.Image:
    """Rows of pictures, each with its name before it."""
    step = SIDE + GAP
    size = (_NAME_WIDTH + GAP + len(pictures[0]) * step, GAP + len(pictures) * step)
    sheet = PIL.Image.new("RGB", size, "white")
    pen, font = PIL.ImageDraw.Draw(sheet), PIL.ImageFont.load_default(14)
    for row, (name, drawn) in enumerate(zip(names, pictures, strict=True)):
        pen.multiline_text((GAP, GAP + row * step + SIDE // 2 - 10), name, fill="black", font=font)
        for column, picture in enumerate(drawn):
            sized = picture.resize((SIDE, SIDE), PIL.Image.Resampling.BICUBIC)
            sheet.paste(sized, (_NAME_WIDTH + GAP + column * step, GAP + row * step))
    return sheet


def main() -> None:
    """Draws the sheet and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="PNG to write")
    options = parser.parse_args()
    pictures = [asyncio.run(draw(scales)) for scales in ROWS.values()]
    compose(list(ROWS), pictures).save(options.file, optimize=True)
    print(options.file)


if __name__ == "__main__":
    main()
