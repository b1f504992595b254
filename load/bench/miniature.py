"""How well the embedded model draws what it is told: held-out prompts through the suite, read back by the oracle.

Half of the prompts name one thing, half two with a relation. A picture counts when everything in it is read right.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import PIL.Image
import transformers

from bottega.client import AsyncClient
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import Scene, caption, held_out_scenes
from bottega.quality import oracle
from load.bench.report import report
from load.bench.scratch import scratch
from load.bench.suite import running
from load.contact_sheet import compose
from load.miniature.quality import load_miniature, measure

PROMPTS = 200
STEPS = 30
GUIDANCE_SCALE = 4.0
AT_ONCE = 16
WANTED = {"one_object": 0.90, "two_objects": 0.75}
# Of each kind, so many are shown on the sheet.
SHOWN = 20
COLUMNS = 8
_GOOD, _BAD = "forestgreen", "crimson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A picture and the scene that it should show."""

    scene: Scene
    picture: PIL.Image.Image

    @property
    def marks(self) -> dict[str, bool]:
        """For each part of the scene whether the oracle read it right."""
        return oracle.marks(oracle.read(self.picture), self.scene)

    @property
    def right(self) -> bool:
        """Whether all of it was."""
        return all(self.marks.values())


async def draw(address: str, scenes: Sequence[Scene]) -> list[Drawn]:
    """Draws scene i with seed i."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(client: AsyncClient, seed: int, scene: Scene) -> Drawn:
        async with gate:
            picture = await client.generate(
                caption(scene), seed=seed, num_inference_steps=STEPS, guidance_scale=GUIDANCE_SCALE
            )
        return Drawn(scene=scene, picture=picture.pil().convert("RGB"))

    async with AsyncClient(address) as client:
        return await asyncio.gather(*(one(client, seed, scene) for seed, scene in enumerate(scenes)))


def shares(drawn: Sequence[Drawn]) -> dict[str, float]:
    """The share of pictures in which each part was read right."""
    marks = [picture.marks for picture in drawn]
    return {part: mean(picture[part] for picture in marks) for part in marks[0]}


def show(groups: Iterable[Sequence[Drawn]], file: Path) -> None:
    """Writes the contact sheet; the prompts of wrong pictures are red."""
    shown = [picture for group in groups for picture in group[:SHOWN]]
    captions = [caption(drawn.scene) for drawn in shown]
    colours = [_GOOD if drawn.right else _BAD for drawn in shown]
    file.parent.mkdir(parents=True, exist_ok=True)
    compose(captions, [drawn.picture for drawn in shown], columns=COLUMNS, colours=colours).save(file)


def main() -> None:
    """Draws, measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="half of them with one thing")
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="a trained folder")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the engine")
    parser.add_argument("--sheet", type=Path, default=Path("out/miniature.png"), help="contact sheet to write")
    options = parser.parse_args()

    each = max(options.prompts // 2, 1)
    scenes = held_out_scenes(each, things=1) + held_out_scenes(each, things=2)
    model = "miniature" if options.model == WEIGHTS else str(options.model)
    with (
        scratch() as folder,
        running(model, options.threads, folder / "suite") as address,
    ):
        drawn = asyncio.run(draw(address, scenes))
    groups = {"one_object": drawn[:each], "two_objects": drawn[each:]}
    show(groups.values(), options.sheet)

    transformers.logging.disable_progress_bar()
    clip = load_miniature(options.model)
    score = measure(clip, [one.picture for one in drawn], [caption(one.scene) for one in drawn]).clip_score
    values = {name: mean(one.right for one in group) for name, group in groups.items()} | {"clip_score": score}
    rows = []
    for name, group in groups.items():
        rows.append((f"{name}: read right, all of it", f"{values[name]:.2f}", f">= {WANTED[name]:.2f}"))
        rows.extend((f"    {part}", f"{share:.2f}", "") for part, share in shares(group).items())
    print(f"contact sheet: {options.sheet}")
    report("miniature", [*rows, ("clip_score (the miniature's own towers)", f"{score:.1f}", "")], values)


if __name__ == "__main__":
    main()
