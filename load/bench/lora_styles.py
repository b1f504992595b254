"""Whether the miniature's LoRAs draw their styles and keep the scenes: stock Diffusers with PEFT, held-out scenes.

Half of the prompts name one thing, half two. A picture counts when the oracle reads all of its scene.

A style is seen where, in the features of the vision tower's layers, a picture is nearer to its own scene rendered in
that style than to it plain or in another one.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import PIL.Image
import torch

from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import STYLES, Placed, Scene, SceneLayout, Thing, caption, held_out_scenes, render
from bottega.quality import oracle
from load import stock_loras
from load.bench.miniature import GUIDANCE_SCALE, STEPS, Drawn, shares
from load.bench.report import report
from load.bench.side_process import stock_pipeline
from load.contact_sheet import compose
from load.miniature.quality import Clip, load_miniature, perceptual_distances

PROMPTS = 100
WANTED = 0.85
PLAIN = "plain"
# Pictures of one call of the pipeline.
_ROWS = 20
# Of one thing, and of two, so many are shown on the sheet of each style.
_SHOWN = 4
_GOOD, _BAD = "forestgreen", "crimson"


def load(model: Path, loras: Path) -> Any:
    """The stock pipeline with all LoRAs, in float32."""
    pipeline = stock_pipeline(model)
    for style in STYLES:
        if (loras / style).is_dir():
            stock_loras.load(pipeline, loras / style, style)
    return pipeline


def use(pipeline: Any, scales: Mapping[str, float]) -> None:
    """Switches to these LoRAs; none is the base alone."""
    if not scales:
        pipeline.disable_lora()
        return
    pipeline.enable_lora()
    pipeline.set_adapters(list(scales), list(scales.values()))


def draw(pipeline: Any, scenes: Sequence[Scene]) -> list[Drawn]:
    """Scene i with seed i."""
    drawn = []
    for first in range(0, len(scenes), _ROWS):
        rows = scenes[first : first + _ROWS]
        pictures = pipeline(
            [caption(scene) for scene in rows],
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE_SCALE,
            generator=[torch.Generator().manual_seed(first + row) for row in range(len(rows))],
        ).images
        drawn += [Drawn(scene=scene, picture=picture) for scene, picture in zip(rows, pictures, strict=True)]
    return drawn


def seen(clip: Clip, pipeline: Any, drawn: Sequence[Drawn], plain: Sequence[Drawn]) -> dict[str, float]:
    """The share of pictures that are nearest to each style's rendering; of those that are read right, also plain.

    A thing is rendered where it stands in the picture, and as large as without the LoRA: a style may change sizes.
    """
    pairs = [(one, without) for one, without in zip(drawn, plain, strict=True) if one.right and without.right]
    layouts = [layout_of(one.picture, without.picture, one.scene.ground) for one, without in pairs]
    nearest = look(clip, pipeline, [one.picture for one, _ in pairs], layouts)
    return {way: nearest.count(way) / len(nearest) for way in (PLAIN, *STYLES)}


def look(clip: Clip, pipeline: Any, pictures: Sequence[PIL.Image.Image], layouts: Sequence[SceneLayout]) -> list[str]:
    """Of each picture what its layout's rendering that is nearest to it is in: one of STYLES, or plain."""
    ways = {PLAIN: render, **STYLES}
    distances = [
        perceptual_distances(clip, pictures, _drawable(pipeline, [way(layout) for layout in layouts]))
        for way in ways.values()
    ]
    return [list(ways)[number] for number in torch.stack(distances).argmin(dim=0).tolist()]


def layout_of(picture: PIL.Image.Image, plain: PIL.Image.Image, ground: str) -> SceneLayout:
    """Places of a picture, radii of the same scene without a LoRA.

    Both are read right, and so show the same things in one order.
    """
    both = zip(oracle.read(picture).things, oracle.read(plain).things, strict=True)
    placed = tuple(
        Placed(thing=Thing(shape=seen.shape, colour=seen.colour), x=seen.x, y=seen.y, radius=other.radius)
        for seen, other in both
    )
    return SceneLayout(placed=placed, ground=ground)


def keeps(drawn: Sequence[Drawn], plain: Sequence[Drawn]) -> float:
    """Of the scenes that are read right without the LoRA, the share that is with it."""
    return mean(one.right for one, without in zip(drawn, plain, strict=True) if without.right)


def show(groups: Mapping[str, Sequence[Drawn]], file: Path) -> None:
    """Writes the contact sheet, a row for each style; the prompts of wrong pictures are red."""
    shown = [one for drawn in groups.values() for one in (*drawn[:_SHOWN], *drawn[-_SHOWN:])]
    colours = [_GOOD if one.right else _BAD for one in shown]
    file.parent.mkdir(parents=True, exist_ok=True)
    captions = [caption(one.scene) for one in shown]
    compose(captions, [one.picture for one in shown], columns=2 * _SHOWN, colours=colours).save(file)


def main() -> None:
    """Draws, reads and reports."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is stopped
    torch.set_num_threads(options.threads)
    each = max(options.prompts // 2, 1)
    scenes = held_out_scenes(each, things=1) + held_out_scenes(each, things=2)
    pipeline = load(options.model, options.loras or options.model / "loras")
    found = {}
    for name in (PLAIN, *options.styles):
        use(pipeline, {} if name == PLAIN else {name: 1.0})
        found[name] = draw(pipeline, scenes)
    show(found, options.sheet)
    print(f"contact sheet: {options.sheet}")
    clip = load_miniature(options.model)
    use(pipeline, {})
    values: dict[str, float] = {}
    rows = []
    for name, drawn in found.items():
        shares_seen = seen(clip, pipeline, drawn, found[PLAIN])
        values |= {
            name: mean(one.right for one in drawn),
            f"{name}_kept": keeps(drawn, found[PLAIN]),
            f"{name}_seen": shares_seen[name],
        }
        wanted = "" if name == PLAIN else f">= {WANTED:.2f}"
        rows.append((f"{name}: read right", f"{values[name]:.2f}", wanted))
        rows.extend((f"    {part}", f"{share:.2f}", "") for part, share in _shares(drawn, each).items())
        rows.append(("    of those that plain has right", f"{values[f'{name}_kept']:.2f}", wanted))
        rows.extend((f"    looks {way}", f"{share:.2f}", "") for way, share in shares_seen.items())
    report("lora_styles", rows, values)


@torch.no_grad()
def _drawable(pipeline: Any, pictures: Sequence[PIL.Image.Image]) -> list[PIL.Image.Image]:
    """The pictures as the VAE gives them back."""
    pixels = pipeline.image_processor.preprocess(list(pictures))
    back = [pipeline.vae.decode(pipeline.vae.encode(rows).latent_dist.mode()).sample for rows in pixels.split(_ROWS)]
    found: list[PIL.Image.Image] = pipeline.image_processor.postprocess(torch.cat(back), output_type="pil")
    return found


def _shares(drawn: Sequence[Drawn], each: int) -> dict[str, float]:
    """Of one thing and of two what is wrong most often; parts that are always right are left out."""
    groups = {"one thing": drawn[:each], "two things": drawn[each:]}
    return {
        f"{name}, {part}": share
        for name, group in groups.items()
        for part, share in {"all": mean(one.right for one in group), **shares(group)}.items()
        if share < 1.0
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="of each style, half of them with one thing")
    parser.add_argument("--styles", nargs="*", choices=tuple(STYLES), default=list(STYLES))
    parser.add_argument("--model", type=Path, default=WEIGHTS, help="folder of the base model")
    parser.add_argument("--loras", type=Path, help="folder of the LoRAs, by style; the model's own when not given")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--sheet", type=Path, default=Path("out/lora_styles.png"), help="contact sheet to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
