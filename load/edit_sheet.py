"""Edits pictures through a running suite, exactly and for their masks alone: `python -m load.edit_sheet FILE`.

A row for each picture: the picture, the mask, the edit computed in full, the edit of which only the masked tokens are
computed, and how these two differ; seconds of denoising beside each. Beside `bottega up`; README.md shows the sheet.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageChops
import PIL.ImageDraw

from bottega.client import Box, Client, Ellipse, Picture
from load.contact_sheet import compose

COLUMNS = 5
_STEPS = 30
# Of each kind, by turns: what else the machine does counts for both.
_ROUNDS = 5
# Differences are too small to be seen as they are.
_GAIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A picture and what is made of it. seed, edit_seed: with which both are right, picked by eye among some."""

    prompt: str
    seed: int
    shape: Box | Ellipse
    edited: str
    edit_seed: int


EDITS = (
    Edit(
        prompt="a big red star on the left on a blue background",
        seed=2,
        shape=Box(1, 15, 34, 34),
        edited="a big green star on the left on a blue background",
        edit_seed=1,
    ),
    Edit(
        prompt="a white heart left of a yellow circle on a purple background",
        seed=5,
        shape=Ellipse(31, 15, 32, 34),
        edited="a white heart left of a green square on a purple background",
        edit_seed=1,
    ),
    Edit(
        prompt="a black diamond above a red square on a yellow background",
        seed=3,
        shape=Box(14, 32, 36, 31),
        edited="a black diamond above a blue circle on a yellow background",
        edit_seed=2,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """An edit, and the median of the seconds of denoising that it took."""

    picture: Picture
    seconds: float


def draw(client: Client, edit: Edit) -> tuple[list[str], list[PIL.Image.Image]]:
    """Captions and pictures of a row. Raises SystemExit where nothing was reused."""
    template = client.generate(edit.prompt, seed=edit.seed, num_inference_steps=_STEPS)
    options: dict[str, Any] = {"num_inference_steps": _STEPS, "identical_results": False}
    # Another edit of the picture, with another seed, is what is recorded.
    client.edit(template, edit.shape, edit.prompt, seed=edit.edit_seed + 100, masked_blocks=True, **options)
    exact, masked = [], []
    for _ in range(_ROUNDS):
        options["seed"] = edit.edit_seed
        exact.append(client.edit(template, edit.shape, edit.edited, fidelity="exact", **options))
        masked.append(client.edit(template, edit.shape, edit.edited, masked_blocks=True, **options))
    return _row(edit, template, _timed(exact), _timed(masked))


def _row(edit: Edit, template: Picture, exact: Timed, masked: Timed) -> tuple[list[str], list[PIL.Image.Image]]:
    provenance = masked.picture.provenance
    if not provenance.blocks_reused:
        raise SystemExit(f"{edit.edited!r} reused nothing: {provenance.mask.computed_all_because}")
    pictures = [each.pil().convert("RGB") for each in (template, exact.picture, masked.picture)]
    difference = PIL.ImageChops.difference(pictures[1], pictures[2])
    tokens = provenance.mask.computed_share
    captions = [
        edit.prompt,
        f"mask: {_named(edit.shape)}",
        f"{edit.edited}: exact, {exact.seconds:.2f} s",
        f"masked blocks, {tokens:.0%} of the tokens: {masked.seconds:.2f} s",
        f"their difference, {_GAIN} times as strong",
    ]
    strong = difference.point(lambda value: min(255, value * _GAIN))
    return captions, [pictures[0], _mask(edit.shape, pictures[0].size), pictures[1], pictures[2], strong]


def _timed(pictures: Sequence[Picture]) -> Timed:
    seconds = [{time.stage: time.seconds for time in each.provenance.times}["denoise"] for each in pictures]
    return Timed(picture=pictures[0], seconds=statistics.median(seconds))


def _mask(shape: Box | Ellipse, size: tuple[int, int]) -> PIL.Image.Image:
    mask = PIL.Image.new("RGB", size)
    pen = PIL.ImageDraw.Draw(mask)
    corners = (shape.x, shape.y, shape.x + shape.width - 1, shape.y + shape.height - 1)
    draw_shape = pen.rectangle if isinstance(shape, Box) else pen.ellipse
    draw_shape(corners, fill="white")
    return mask


def _named(shape: Box | Ellipse) -> str:
    """As the command has it, but for the dashes, which the sheet's font makes one."""
    kind = type(shape).__name__.lower()
    return f"{kind} {shape.x},{shape.y},{shape.width},{shape.height}"


def main() -> None:
    """Draws the sheet and writes it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="PNG to write")
    options = parser.parse_args()
    with Client() as client:
        rows = [draw(client, edit) for edit in EDITS]
    captions = [caption for row, _ in rows for caption in row]
    sheet = compose(captions, [picture for _, row in rows for picture in row], columns=COLUMNS)
    sheet.save(options.file, optimize=True)
    print(options.file)


if __name__ == "__main__":
    main()
