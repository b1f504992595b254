"""Draws captioned pictures through a running suite: `python -m load.contact_sheet FILE`. The README shows them."""

from __future__ import annotations

import argparse
import asyncio
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

from bottega.client import AsyncClient, Picture

SIDE = 160
GAP = 12
CAPTION_HEIGHT = 52
CAPTION_LETTERS = 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What a picture of the sheet shows."""

    prompt: str
    seed: int


# One thing with its place and size, two with their relation; the seeds were picked by eye among six.
SUBJECTS = (
    Subject(prompt="a big red star on the left on a blue background", seed=2),
    Subject(prompt="a white heart left of a yellow circle on a purple background", seed=5),
    Subject(prompt="a big pink ring on a green background", seed=4),
    Subject(prompt="a black diamond above a red square on a yellow background", seed=3),
    Subject(prompt="a small blue heart on the right on a red background", seed=6),
)


def compose(
    captions: Sequence[str],
    pictures: Sequence[PIL.Image.Image],
    *,
    columns: int = 0,
    colours: Sequence[str] = (),
) -> PIL.Image.Image:
    """Rows of pictures, each with its caption below.

    columns: of each row; 0 for all. colours: of each caption, by the names of CSS; black when not given.
    """
    columns = columns or len(pictures)
    across, down = SIDE + GAP, SIDE + CAPTION_HEIGHT + GAP
    rows = -(-len(pictures) // columns)
    sheet = PIL.Image.new("RGB", (GAP + columns * across, GAP + rows * down), "white")
    pen = PIL.ImageDraw.Draw(sheet)
    font = PIL.ImageFont.load_default(12)
    inks = colours or ["black"] * len(captions)
    for place, (caption, picture, ink) in enumerate(zip(captions, pictures, inks, strict=True)):
        left, top = GAP + place % columns * across, GAP + place // columns * down
        sheet.paste(picture.resize((SIDE, SIDE), PIL.Image.Resampling.BICUBIC), (left, top))
        text = "\n".join(textwrap.wrap(caption, CAPTION_LETTERS))
        pen.multiline_text((left, top + SIDE + 4), text, fill=ink, font=font)
    return sheet


async def draw(subjects: Sequence[Subject]) -> list[Picture]:
    """All of them at once: they share the worker's turns."""
    async with AsyncClient() as client:
        return await asyncio.gather(*(client.generate(subject.prompt, seed=subject.seed) for subject in subjects))


def main() -> None:
    """Draws the sheet and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="PNG to write")
    options = parser.parse_args()
    pictures = asyncio.run(draw(SUBJECTS))
    sheet = compose([subject.prompt for subject in SUBJECTS], [picture.pil().convert("RGB") for picture in pictures])
    sheet.save(options.file)
    print(options.file)


if __name__ == "__main__":
    main()
