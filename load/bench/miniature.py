"""How well does an embedded model draw what it is told?

Held-out prompts through the suite, read back by the oracle. Half of the prompts name one thing, half two with a
relation. A picture counts when everything in it is read right.

A run takes 3 minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import PIL.Image

from bottega.client import AsyncClient
from bottega.client.types.models import EMBEDDED_MODEL
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import Scene, caption, held_out_scenes
from bottega.model_files.folder_check import folder_of
from bottega.model_files.presets import read_preset
from bottega.quality import oracle
from load.bench.framework import CORES, Bench, Option, Sheet
from load.bench.suites import plain_suite
from load.miniature.quality import Clip, load_miniature
from load.miniature.quality import measure as measure_quality
from load.sheets import compose

STEPS = 30
GUIDANCE = 4.0
AT_ONCE = 16
WANTED = {"one_object": 0.90, "two_objects": 0.75}
# Pictures of each kind on the contact sheet, and of a row.
SHOWN, COLUMNS = 20, 8
BENCH = Bench(
    __file__,
    __doc__,
    Option("--prompts", 200, "half of them with one thing", smallest=2),
    Option("--model", EMBEDDED_MODEL, "an embedded model, or a trained folder"),
    Option("--threads", CORES, "of the engine"),
    Option("--sheet", Path("out/miniature.png"), "contact sheet to write", kind=Path),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A picture and the scene that it should show."""

    scene: Scene
    picture: PIL.Image.Image

    @property
    def marks(self) -> dict[str, bool]:
        """Whether the oracle read each part of the scene right."""
        return oracle.marks(oracle.read(self.picture), self.scene)

    @property
    def right(self) -> bool:
        """Whether all of it was read right."""
        return all(self.marks.values())

    @property
    def colour(self) -> str:
        """The colour of its caption on a contact sheet."""
        return "forestgreen" if self.right else "crimson"


def guidance_of(folder: Path) -> float:
    """Return the guidance with which an embedded model draws by default."""
    preset = read_preset(folder)
    return GUIDANCE if preset is None or preset.guidance_scale is None else preset.guidance_scale


def draw_stock(
    pipeline: Any, prompts: Sequence[str], rows: int = 20, /, *, guidance_scale: float = GUIDANCE, **options: Any
) -> list[PIL.Image.Image]:
    """Draw prompt i with seed i by a stock pipeline.

    Args:
        rows: Pictures of one call.
        guidance_scale: See `guidance_of`.
        options: Of each call; a list has an entry for each prompt.
    """
    import torch

    pictures: list[PIL.Image.Image] = []
    for first in range(0, len(prompts), rows):
        some = slice(first, first + rows)
        count = len(prompts[some])
        pictures += pipeline(
            list(prompts[some]),
            num_inference_steps=STEPS,
            guidance_scale=guidance_scale,
            generator=[torch.Generator().manual_seed(first + row) for row in range(count)],
            **{name: value[some] if isinstance(value, list) else value for name, value in options.items()},
        ).images
    return pictures


def shares(drawn: Sequence[Drawn]) -> dict[str, float]:
    """Return the share of pictures in which each part was read right."""
    marks = [picture.marks for picture in drawn]
    return {part: mean(picture[part] for picture in marks) for part in marks[0]}


def load_towers(model: str) -> Clip:
    """Return the towers of an embedded model: the first one's if it has a transformer, and so none of its own."""
    own = folder_of(model)
    return load_miniature(own if (own / "clip_vision").is_dir() else WEIGHTS)


def write_sheet(drawn: Sequence[Drawn], columns: int, file: Path) -> None:
    """Write a contact sheet; the prompts of wrong pictures are red."""
    file.parent.mkdir(parents=True, exist_ok=True)
    captions, colours = [caption(one.scene) for one in drawn], [one.colour for one in drawn]
    compose(captions, [one.picture for one in drawn], columns=columns, colours=colours).save(file)
    print(f"contact sheet: {file}")


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Draw, read and report."""
    each = max(options.prompts // 2, 1)
    scenes = held_out_scenes(each, things=1) + held_out_scenes(each, things=2)
    with plain_suite(options.model, options.threads, folder / "suite") as gateway:
        drawn = asyncio.run(_draw(gateway.address, scenes))
    sheet.name_model(options.model)
    groups: Mapping[str, Sequence[Drawn]] = {"one_object": drawn[:each], "two_objects": drawn[each:]}
    write_sheet([one for group in groups.values() for one in group[:SHOWN]], COLUMNS, options.sheet)
    for name, group in groups.items():
        right = sheet.values[name] = mean(one.right for one in group)
        sheet.row(f"{name}: read right, all of it", f"{right:.2f}", f">= {WANTED[name]:.2f}")
        for part, share in shares(group).items():
            sheet.row(f"    {part}", f"{share:.2f}")
    texts = [caption(one.scene) for one in drawn]
    quality = measure_quality(load_towers(options.model), [one.picture for one in drawn], texts)
    sheet.row("clip_score (the miniature's own towers)", f"{quality.clip_score:.1f}")
    sheet.values["clip_score"] = quality.clip_score


async def _draw(address: str, scenes: Sequence[Scene]) -> list[Drawn]:
    """Draw scene i with seed i."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(client: AsyncClient, seed: int, scene: Scene) -> Drawn:
        async with gate:
            picture = await client.generate(caption(scene), seed=seed, num_inference_steps=STEPS)
        return Drawn(scene=scene, picture=picture.pil().convert("RGB"))

    async with AsyncClient(address) as client:
        return await asyncio.gather(*(one(client, seed, scene) for seed, scene in enumerate(scenes)))


if __name__ == "__main__":
    sys.exit(BENCH.command())
