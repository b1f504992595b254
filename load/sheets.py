"""Sheets of pictures that the READMEs show, drawn through a running suite (`bottega up`).

    python -m load.sheets contact load/contact_sheet.png

`contact` draws prompts; `control`, into a folder, the control images, and prompts with them; `lora` the same scenes
plain, with each LoRA and with two at once. `cache` draws prompts from latents of similar ones: the picture whose latent
is used, the picture from noise, and that from the latent. `edit` draws pictures, their masks, the edit computed in full
and for its mask alone, and how these two differ, with seconds of denoising. All seeds were picked by eye among some.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import PIL.Image
import PIL.ImageChops
import PIL.ImageDraw
import PIL.ImageFont

from bottega.client import AsyncClient, Box, Client, ControlNet, Ellipse, Picture
from bottega.miniature.scenes import DRAWN, Placed, SceneLayout, Thing

SIDE = 160
GAP = 12
CAPTION_HEIGHT = 52
CAPTION_LETTERS = 26


class Subject(NamedTuple):
    """A picture of a sheet."""

    prompt: str
    seed: int


# One thing with its place and size, two with their relation.
SUBJECTS = (
    Subject("a big red star on the left on a blue background", 2),
    Subject("a white heart left of a yellow circle on a purple background", 5),
    Subject("a big pink ring on a green background", 4),
    Subject("a black diamond above a red square on a yellow background", 3),
    Subject("a small blue heart on the right on a red background", 6),
)
LORA_SUBJECTS = (
    Subject("a big white triangle on the left on a blue background", 1),
    Subject("a white heart left of a yellow circle on a purple background", 5),
    Subject("a black diamond above a red square on a yellow background", 3),
    Subject("a red cross left of a white ring on a black background", 96),
    Subject("a blue star left of a pink triangle on a red background", 98),
)
# LoRAs of each row, with their scales.
LORA_ROWS: dict[str, Mapping[str, float]] = {
    "no LoRA": {},
    "striped": {"striped": 1.0},
    "checked": {"checked": 1.0},
    "dusk": {"dusk": 1.0},
    "striped:0.8\ndusk": {"striped": 0.8, "dusk": 1.0},
}
# A prompt whose latent is recorded, and one that starts from it.
CACHE_PAIRS = (
    (
        Subject("a big red star on the left on a blue background", 2),
        Subject("a big yellow star on the left on a blue background", 7),
    ),
    (
        Subject("a big pink ring in the center on a green background", 4),
        Subject("a big pink circle in the center on a green background", 1),
    ),
    (
        Subject("a white heart left of a yellow circle on a purple background", 5),
        Subject("a white heart left of a yellow circle on a black background", 3),
    ),
    (
        Subject("a black diamond above a red square on a yellow background", 3),
        Subject("a black diamond above a red ring on a yellow background", 8),
    ),
)
# A picture, its mask, and the edit.
EDITS: tuple[tuple[Subject, Box | Ellipse, Subject], ...] = (
    (
        Subject("a big red star on the left on a blue background", 2),
        Box(1, 15, 34, 34),
        Subject("a big green star on the left on a blue background", 1),
    ),
    (
        Subject("a white heart left of a yellow circle on a purple background", 5),
        Ellipse(31, 15, 32, 34),
        Subject("a white heart left of a green square on a purple background", 1),
    ),
    (
        Subject("a black diamond above a red square on a yellow background", 3),
        Box(14, 32, 36, 31),
        Subject("a black diamond above a blue circle on a yellow background", 2),
    ),
)
CONTROL_SCALE = 0.8
# Where the control images have the star, by ControlNet: centre and radius, in sides of the picture.
STARS = {"edges": (0.71, 0.5, 0.24), "layout": (0.5, 0.72, 0.24)}
_NAME_WIDTH = 84
_RECORDED_S, _POLL_S = 15.0, 0.1
# One hit in twenty is drawn from noise all the same.
_TRIES = 4
_EDIT_STEPS = 30
# Edits of each kind, by turns: what else the machine does counts for both.
_EDIT_ROUNDS = 5
# Differences are too small to be seen as they are.
_GAIN = 4


def compose(
    captions: Sequence[str],
    pictures: Sequence[PIL.Image.Image],
    *,
    columns: int = 0,
    colours: Sequence[str] = (),
) -> PIL.Image.Image:
    """Compose rows of pictures, each with its caption below.

    Args:
        captions: Of the pictures.
        pictures: Row by row.
        columns: Of each row; 0 for all.
        colours: Of the captions, by the names of CSS; black by default.
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


def contact(file: Path) -> None:
    """Draw prompts."""
    _save(compose([subject.prompt for subject in SUBJECTS], _drawn(SUBJECTS, [{}] * len(SUBJECTS))), file)


def control(folder: Path) -> None:
    """Draw a prompt alone, then each control image beside the picture of the same prompt and seed with it."""
    images = {}
    for name, (x, y, radius) in STARS.items():  # a star elsewhere than the prompt has it
        star = Placed(thing=Thing(shape="star", colour="red"), x=x, y=y, radius=radius)
        images[name] = DRAWN[name](SceneLayout(placed=(star,), ground="blue"))
        images[name].save(folder / f"{name}.png", optimize=True)
    nets = [
        [],
        *([ControlNet(name, image, controlnet_conditioning_scale=CONTROL_SCALE)] for name, image in images.items()),
    ]
    alone, *controlled = _drawn([SUBJECTS[0]] * len(nets), [{"controlnets": each} for each in nets])
    captions, tiles = [SUBJECTS[0].prompt], [alone]
    for (name, image), picture in zip(images.items(), controlled, strict=True):
        captions += [f"--control {name}= {name}.png:{CONTROL_SCALE:g}", "the same prompt and seed, with it"]
        tiles += [image, picture]
    _save(compose(captions, tiles), folder / "control_sheet.png", colours=128)


def lora(file: Path) -> None:
    """Draw scenes in rows, each with the names of its LoRAs before it."""
    step = SIDE + GAP
    size = (_NAME_WIDTH + GAP + len(LORA_SUBJECTS) * step, GAP + len(LORA_ROWS) * step)
    sheet = PIL.Image.new("RGB", size, "white")
    pen, font = PIL.ImageDraw.Draw(sheet), PIL.ImageFont.load_default(14)
    for row, (name, scales) in enumerate(LORA_ROWS.items()):
        pen.multiline_text((GAP, GAP + row * step + SIDE // 2 - 10), name, fill="black", font=font)
        options = {"lora": list(scales.items())}
        for column, picture in enumerate(_drawn(LORA_SUBJECTS, [options] * len(LORA_SUBJECTS))):
            sized = picture.resize((SIDE, SIDE), PIL.Image.Resampling.BICUBIC)
            sheet.paste(sized, (_NAME_WIDTH + GAP + column * step, GAP + row * step))
    _save(sheet, file)


def cache(file: Path) -> None:
    """Draw the picture of a first prompt, that of a second one from noise, and that from a latent of the first."""
    captions: list[str] = []
    tiles: list[PIL.Image.Image] = []
    with Client() as client:
        for first, second in CACHE_PAIRS:
            for _ in range(2):  # a kind of request is recorded when it is seen again
                client.generate(first.prompt, seed=first.seed, fidelity="exact", identical_results=False)
            _wait_until_recorded(client, first.prompt)
            noise = client.generate(second.prompt, seed=second.seed, approximate_cache=False, fidelity="exact")
            started = _start(client, second)
            (use,) = started.provenance.cached_starts
            entry = client.cache_entry(use.entry)
            step, steps = use.entry.partition("@")[2], started.provenance.parameters.num_inference_steps
            captions += [entry.parameters.prompt, f"from noise: {second.prompt}"]
            captions.append(f"from its latent after {step} of {steps} steps, similarity {use.similarity:.3f}")
            files = (entry.picture, noise.data, started.data)
            tiles += [PIL.Image.open(io.BytesIO(data)).convert("RGB") for data in files]
    _save(compose(captions, tiles, columns=6), file, colours=128)


def edit(file: Path) -> None:
    """Draw a picture, its mask, both edits and their difference; raise SystemExit where nothing was reused."""
    captions: list[str] = []
    tiles: list[PIL.Image.Image] = []
    options: dict[str, Any] = {"num_inference_steps": _EDIT_STEPS, "identical_results": False}
    with Client() as client:
        for subject, shape, edited in EDITS:
            template = client.generate(subject.prompt, seed=subject.seed, num_inference_steps=_EDIT_STEPS)
            # Another edit of the picture, with another seed, is what is recorded.
            client.edit(template, shape, subject.prompt, seed=edited.seed + 100, masked_blocks=True, **options)
            exact, masked = [], []
            for _ in range(_EDIT_ROUNDS):
                asked = {**options, "seed": edited.seed}
                exact.append(client.edit(template, shape, edited.prompt, fidelity="exact", **asked))
                masked.append(client.edit(template, shape, edited.prompt, masked_blocks=True, **asked))
            provenance = masked[0].provenance
            if not provenance.blocks_reused:
                raise SystemExit(f"{edited.prompt!r} reused nothing: {provenance.mask.computed_all_because}")
            pictures = [each.pil().convert("RGB") for each in (template, exact[0], masked[0])]
            difference = PIL.ImageChops.difference(pictures[1], pictures[2])
            captions += [
                subject.prompt,
                # As the command has it, but for the dashes, which the sheet's font makes one.
                f"mask: {type(shape).__name__.lower()} {shape.x},{shape.y},{shape.width},{shape.height}",
                f"{edited.prompt}: exact, {_denoise_s(exact):.2f} s",
                f"masked blocks, {provenance.mask.computed_share:.0%} of the tokens: {_denoise_s(masked):.2f} s",
                f"their difference, {_GAIN} times as strong",
            ]
            strong = difference.point(lambda value: min(255, value * _GAIN))
            tiles += [pictures[0], _mask(shape, pictures[0].size), pictures[1], pictures[2], strong]
    _save(compose(captions, tiles, columns=5), file)


SHEETS: Mapping[str, Callable[[Path], None]] = {
    "contact": contact,
    "control": control,
    "lora": lora,
    "cache": cache,
    "edit": edit,
}


def main() -> None:
    """Draw a sheet and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sheet", choices=list(SHEETS))
    parser.add_argument("target", type=Path, help="PNG to write, or the folder of control images")
    options = parser.parse_args()
    SHEETS[options.sheet](options.target)


def _drawn(subjects: Sequence[Subject], options: Sequence[Mapping[str, Any]]) -> list[PIL.Image.Image]:
    """Draw all at once, each with its options: they share the worker's turns."""

    async def draw() -> list[Picture]:
        async with AsyncClient() as client:
            pairs = zip(subjects, options, strict=True)
            requests = [client.generate(each.prompt, seed=each.seed, **more) for each, more in pairs]
            return await asyncio.gather(*requests)

    return [picture.pil().convert("RGB") for picture in asyncio.run(draw())]


def _save(sheet: PIL.Image.Image, file: Path, *, colours: int = 0) -> None:
    if colours:
        sheet = sheet.quantize(colours, dither=PIL.Image.Dither.NONE)
    sheet.save(file, optimize=True)
    print(file)


def _start(client: Client, subject: Subject) -> Picture:
    for _ in range(_TRIES):
        picture = client.generate(
            subject.prompt, seed=subject.seed, fidelity="balanced", approximate_cache=True, identical_results=False
        )
        if picture.provenance.cached_starts:
            return picture
    raise SystemExit(f"{subject.prompt!r} starts from no latent: see bottega cache profiles for what is similar enough")


def _wait_until_recorded(client: Client, prompt: str) -> None:
    deadline = time.monotonic() + _RECORDED_S
    while time.monotonic() < deadline:
        if any(each.parameters.prompt == prompt for each in client.cache_entries()):
            return
        time.sleep(_POLL_S)
    raise SystemExit(f"{prompt!r} was not recorded: see bottega cache")


def _denoise_s(pictures: Sequence[Picture]) -> float:
    return median({time.stage: time.seconds for time in each.provenance.times}["denoise"] for each in pictures)


def _mask(shape: Box | Ellipse, size: tuple[int, int]) -> PIL.Image.Image:
    mask = PIL.Image.new("RGB", size)
    pen = PIL.ImageDraw.Draw(mask)
    corners = (shape.x, shape.y, shape.x + shape.width - 1, shape.y + shape.height - 1)
    draw_shape = pen.rectangle if isinstance(shape, Box) else pen.ellipse
    draw_shape(corners, fill="white")
    return mask


if __name__ == "__main__":
    main()
